"""Held-out accuracy of a policy: greedy, mean@k, unbiased pass@k and maj@k, with 95% intervals.

  python -m grpo_jax.evaluate --workdir=DIR [--samples=16] [--examples=1319]
  python -m grpo_jax.evaluate --config=configs/gsm8k.py --config.model.path=FOLDER
"""
import dataclasses
from typing import Any

import jax
import numpy as np
from absl import flags

from grpo_jax import cli, estimators, rollout
from grpo_jax import rewards as rewards_lib
from grpo_jax.config import Reward
from grpo_jax.data.loader import Prompts, prompt_batch
from grpo_jax.rewards.answers import final_answer
from grpo_jax.run import Run


class Evaluator:
  """Compiled once, called at any step: `evaluator(params, step) -> metrics`."""

  def __init__(self, run: Run):
    self._run, self._config = run, run.config.eval
    self._prompts = run.prompts("test")
    self._function = rewards_lib.resolve(self._config.function)
    sampling, samples = run.config.sampling, self._config.samples
    self._greedy = run.sampler(dataclasses.replace(sampling, temperature=0.0), 1)
    self._drawn = samples and run.sampler(dataclasses.replace(sampling, temperature=self._config.temperature), samples)

  @property
  def prompts(self) -> Prompts:
    """The problems, those too long left out."""
    return self._prompts

  def __call__(self, params: Any, step: int) -> dict[str, float]:
    """Metrics under eval/. `params` as `Run.sampling_params` gives them."""
    key = jax.random.fold_in(self._run.key("evaluate"), step)
    right_N1, lengths_N1, _ = self._draws(self._greedy, params, key)
    metrics = named("accuracy", estimators.proportion(int(right_N1.sum()), len(right_N1)))
    metrics["eval/mean_length"] = float(lengths_N1.mean())
    n = self._config.samples
    if n:
      right_NG, _, answers = self._draws(self._drawn, params, key)
      metrics |= named(f"mean@{n}", estimators.mean(right_NG.mean(1)))
      for k in [2**i for i in range(1, n.bit_length()) if 2**i < n] + [n] * (n > 1):
        metrics |= named(f"pass@{k}", estimators.mean(estimators.pass_at_k(right_NG.sum(1), n, k)))
      majorities_N = np.array([estimators.majority(a, r) for a, r in zip(answers, right_NG)])
      metrics |= named(f"maj@{n}", estimators.mean(majorities_N))
    return metrics

  def _draws(self, sampler, params, key):
    """-> right [N, G] bool, lengths [N, G], answers [N][G]. The last batch is filled up with problems seen before."""
    run, size, count = self._run, self._config.batch, len(self._prompts)
    right, lengths, answers = [], [], []
    for start in range(0, count, size):
      kept = min(size, count - start)
      batch = prompt_batch(self._prompts, (start + np.arange(size)) % count)
      arrays = run.put((batch.prompts_PS, batch.prompt_lengths_P))
      out = run.fetch(sampler(params, *arrays, jax.random.fold_in(key, start)))
      scored = rollout.score(out, batch, run.tokenizer.decode, [self._function], Reward(("",), (1.0,)))
      right.append(scored.rewards_PG[:kept] == 1)
      lengths.append(out.lengths_PG[:kept])
      answers += [[final_answer(text) for text in group] for group in scored.texts[:kept]]
    return np.concatenate(right), np.concatenate(lengths), answers


def named(name: str, estimate: estimators.Estimate) -> dict[str, float]:
  """An estimate as three metrics: eval/NAME, eval/NAME_low and eval/NAME_high, the ends of the 95% interval."""
  return dict(zip((f"eval/{name}", f"eval/{name}_low", f"eval/{name}_high"), estimate))


def main(argv):
  del argv
  samples, examples = flags.FLAGS.samples, flags.FLAGS.examples
  change = {k: v for k, v in (("samples", samples), ("examples", examples)) if v is not None}
  policy = cli.open_policy(lambda c: dataclasses.replace(c, eval=dataclasses.replace(c.eval, **change)))
  evaluator = Evaluator(policy.run)
  dropped = evaluator.prompts.dropped
  print(f"{policy.name}: {len(evaluator.prompts)} problems" + (f", {dropped} too long left out" if dropped else ""))
  metrics = evaluator(policy.run.sampling_params(policy.params), policy.step)
  for name, value in metrics.items():
    if name + "_low" in metrics:
      print(f"{name:20} {value:7.1%}   95% interval {metrics[name + '_low']:.1%} to {metrics[name + '_high']:.1%}")
  print(f"{'eval/mean_length':20} {metrics['eval/mean_length']:7.1f} tokens")


if __name__ == "__main__":
  flags.DEFINE_integer("samples", None, "draws per problem for mean@k, pass@k and maj@k (default: eval.samples)")
  flags.DEFINE_integer("examples", None, "test problems (default: eval.examples)")
  cli.define_policy_flags()
  cli.run(main)
