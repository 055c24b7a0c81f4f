"""Held-out accuracy of a policy: greedy, mean@k, unbiased pass@k and maj@k, with 95% intervals.

python -m grpo_jax.evaluate --workdir=DIR [--step=N] [--samples=16] [--examples=1319]
python -m grpo_jax.evaluate --config=configs/gsm8k.py --config.model.path=FOLDER
"""

import dataclasses
import sys
from typing import Any, Callable

import jax
import numpy as np
from absl import flags

from grpo_jax import rewards as rewards_lib
from grpo_jax.config import Config
from grpo_jax.data.loader import Prompts, prompt_batch
from grpo_jax.rewards.answers import final_answer
from grpo_jax.run import cli, estimators, rollout
from grpo_jax.run.build import Run

Progress = Callable[[str, int, int], None]  # (what, problems done, of how many)


class Evaluator:
  """Compiled once, called at any step: `evaluator(params, step) -> metrics`."""

  def __init__(self, run: Run, progress: Progress = lambda *_: None):
    self._run, self._config, self._progress = run, run.config.eval, progress
    run.check_rows(eval__batch=self._config.batch)
    self._prompts = run.prompts("test")
    self._function = rewards_lib.resolve(self._config.function, "eval.function")
    sampling, samples = run.config.sampling, self._config.samples
    self._greedy = run.sampler(dataclasses.replace(sampling, temperature=0.0), 1)
    self._drawn = samples and run.sampler(
      dataclasses.replace(sampling, temperature=self._config.temperature), samples
    )

  @property
  def prompts(self) -> Prompts:
    """The problems, those too long left out."""
    return self._prompts

  def __call__(self, params: Any, step: int) -> dict[str, float]:
    """Metrics under eval/. `params` as `Parameters.for_sampling` gives them."""
    key = jax.random.fold_in(self._run.key("evaluate"), step)
    greedy = self._draws("greedy", self._greedy, params, key)
    right_N1 = greedy.right_NG
    metrics = named("accuracy", estimators.proportion(int(right_N1.sum()), len(right_N1)))
    metrics["eval/mean_length"] = float(greedy.lengths_NG.mean())
    metrics["eval/clipped_ratio"] = float(greedy.cut_off_NG.mean())
    n = self._config.samples
    if n:
      drawn = self._draws("draws", self._drawn, params, key)
      metrics |= named(f"mean@{n}", estimators.mean(drawn.right_NG.mean(1)))
      for k in [2**i for i in range(1, n.bit_length()) if 2**i < n] + [n] * (n > 1):
        metrics |= named(
          f"pass@{k}", estimators.mean(estimators.pass_at_k(drawn.right_NG.sum(1), n, k))
        )
      majorities = [estimators.majority(a, r) for a, r in zip(drawn.answers, drawn.right_NG)]
      metrics |= named(f"maj@{n}", estimators.mean(np.array(majorities)))
    return metrics

  def _draws(self, what, sampler, params, key):
    """G draws of every problem. The last batch is filled up with problems seen before, which do not count."""
    run, size, count = self._run, self._config.batch, len(self._prompts)
    parts, answers = [], []
    for start in range(0, count, size):
      kept = min(size, count - start)
      batch = prompt_batch(self._prompts, (start + np.arange(size)) % count)
      arrays = run.put((batch.prompts_PS, batch.prompt_lengths_P))
      out = run.fetch(sampler(params, *arrays, key, start))
      scored = rollout.score(out, batch, run.tokenizer.decode, [self._function], (1.0,))
      parts.append(
        [x[:kept] for x in (scored.rewards_PG == 1, out.lengths_PG, out.stopped_by_PG < 0)]
      )
      answers += [[final_answer(text) for text in group] for group in scored.texts[:kept]]
      self._progress(what, start + kept, count)
    return Draws(*map(np.concatenate, zip(*parts)), answers)


@dataclasses.dataclass(frozen=True)
class Draws:
  """G completions of each of N problems."""

  right_NG: np.ndarray  # bool
  lengths_NG: np.ndarray  # int32, tokens
  cut_off_NG: np.ndarray  # bool, not stopped after sampling.max_tokens
  answers: list[list[Any]]  # [N][G], what each one votes for; None = nothing


def named(name: str, estimate: estimators.Estimate) -> dict[str, float]:
  """An estimate as three metrics: eval/NAME, eval/NAME_low and eval/NAME_high, the ends of the 95% interval."""
  return dict(zip((f"eval/{name}", f"eval/{name}_low", f"eval/{name}_high"), estimate))


def table(metrics: dict[str, float], config: Config) -> list[str]:
  """Lines for a reader."""
  lines, c = [], config
  for name, value in metrics.items():
    if name + "_low" in metrics:
      low, high = metrics[name + "_low"], metrics[name + "_high"]
      lines.append(f"  {name:14}{value:7.1%}   95% interval {low:6.1%} to {high:6.1%}")
  length, cut_off = metrics["eval/mean_length"], metrics["eval/clipped_ratio"]
  greedy = (
    f"greedy: {length:.1f} tokens on average, {cut_off:.1%} cut off at {c.sampling.max_tokens}"
  )
  drawn = (
    [f"{c.eval.samples} draws of each at temperature {c.eval.temperature:g}:"]
    if c.eval.samples
    else []
  )
  return [greedy, lines[0], *drawn, *lines[1:]]


def show_progress(what: str, done: int, count: int) -> None:
  """On one line of a terminal's stderr, wiped at the end."""
  if sys.stderr.isatty():
    print(
      f"\r{what}: {done}/{count} problems" if done < count else "\r\033[K",
      end="",
      file=sys.stderr,
      flush=True,
    )


def main(argv):
  del argv
  samples, examples = flags.FLAGS.samples, flags.FLAGS.examples
  change = {k: v for k, v in (("samples", samples), ("examples", examples)) if v is not None}
  policy = cli.open_policy(
    lambda c: dataclasses.replace(c, eval=dataclasses.replace(c.eval, **change))
  )
  evaluator, config = Evaluator(policy.run, show_progress), policy.run.config
  dropped = evaluator.prompts.dropped
  print(
    f"{policy.name}: {len(evaluator.prompts)} test problems of {config.data.task}"
    + (f" ({dropped} longer than data.max_prompt_tokens left out)" if dropped else ""),
    flush=True,
  )
  metrics = evaluator(policy.run.parameters.for_sampling(policy.params), policy.step)
  print("\n".join(table(metrics, config)))


if __name__ == "__main__":
  flags.DEFINE_integer(
    "samples", None, "draws per problem for mean@k, pass@k and maj@k (default: eval.samples)"
  )
  flags.DEFINE_integer("examples", None, "test problems (default: eval.examples)")
  cli.define_policy_flags()
  cli.run(main)
