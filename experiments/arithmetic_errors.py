"""Prints which step of a sum a run of the quick start gets wrong, and what it never samples right.

python experiments/arithmetic_errors.py --workdir=/tmp/arithmetic --step=1000

It samples 64 answers to each of 512 held-out sums from the newest checkpoint, or that of --step.
"""

from collections.abc import Sequence
import dataclasses
import re

import numpy as np

from grpo_jax import cli
from grpo_jax.config import Config
from grpo_jax.data.loader import prompt_batch
from grpo_jax.rewards.functions.final_number import strict
from grpo_jax.rollouts.complete import Completer, make_rollout

SUMS, DRAWS, ROWS = 512, 64, 32


def main(argv: list[str]) -> None:
  del argv
  policy = cli.open_policy(_on_sums)
  run = policy.run
  params, prompts = run.parameters.for_sampling(policy.params), run.prompts("test")
  answers = [prompts.example(i)["answer"] for i in range(len(prompts))]

  def draw(rollout: Completer) -> np.ndarray:
    """Texts [N, G]."""
    return rollout(params, prompt_batch(prompts, np.arange(SUMS)), run.key("evaluate")).texts_PG

  def right(texts_NG: np.ndarray) -> np.ndarray:
    columns = [np.array(strict(list(texts), answer=answers)) == 1 for texts in texts_NG.T]
    return np.stack(columns, axis=1)

  greedy_N = right(draw(make_rollout(run, 1, greedy=True, at_once=ROWS)))[:, 0]
  texts_NG = draw(make_rollout(run, DRAWS, at_once=ROWS))
  right_NG = right(texts_NG)
  worked_NG = np.vectorize(lambda text: ";" in text)(texts_NG)
  print(policy.name)
  print(f"greedy answers: {greedy_N.mean():.1%} right")
  print(f"sampled answers: {worked_NG.mean():.1%} work the sum out,")
  print(f"  of these {right_NG[worked_NG].mean():.1%} are right,")
  if not worked_NG.all():
    print(f"  of the direct ones {right_NG[~worked_NG].mean():.1%}")
  rates = step_rates([x.text for x in prompts.make(range(SUMS))], texts_NG, worked_NG)
  print("each step, where the steps before it are right:", *[f"{rate:.1%}" for rate in rates])
  counts = right_NG.sum(1)[~greedy_N]
  print(
    f"sums whose greedy answer is wrong: {len(counts)}; right in 0 of {DRAWS} samples:"
    f" {(counts == 0).sum()}, in 1 to 4: {((counts > 0) & (counts <= 4)).sum()}"
  )


def _on_sums(config: Config) -> Config:
  return dataclasses.replace(config, eval=dataclasses.replace(config.eval, examples=SUMS))


def step_rates(questions: Sequence[str], texts_NG: np.ndarray, worked_NG: np.ndarray) -> np.ndarray:
  """How often each step of a worked answer is right, where all steps before it are."""
  tried, right = np.zeros(3), np.zeros(3)
  for question, texts, worked in zip(questions, texts_NG, worked_NG):
    steps = solution(question)
    for text in texts[worked]:
      for i, (step, found) in enumerate(zip(steps, text.split(";"))):
        tried[i] += 1
        if step != found:
          break
        right[i] += 1
  return right / np.maximum(tried, 1)


def solution(question: str) -> list[str]:
  """The steps of the worked solution: 7+15=22, 22-6=16 and 16+9=25 for 7+15-6+9=."""
  total, *terms = map(int, re.findall(r"[+-]?\d+", question))
  steps = []
  for term in terms:
    steps.append(f"{total}{term:+d}={total + term}")
    total += term
  return steps


if __name__ == "__main__":
  cli.define_policy_flags()
  cli.run(main)
