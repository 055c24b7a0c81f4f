"""Measures how far a run's policy is from the one that it started from, in nats per token.

  python experiments/drift.py DIR_0 DIR_1 ...

It draws a completion of each test problem from the run's newest checkpoint, at the run's
temperature, and computes log-probs of its tokens under this policy and under the one before the
first step. The mean over tokens of their difference is an unbiased estimate of the KL divergence
(k1). `standard_error` is the one of this mean. A run without a KL term has no reference, so its
metrics do not say. Whole batches of batch.prompts problems are drawn, --examples at most.
"""

import argparse
import json
import sys

import jax
import numpy as np

from grpo_jax import load_policy
from grpo_jax.data.loader import prompt_batch
from grpo_jax.rollouts.complete import make_rollout


def drift(workdir: str, examples: int) -> dict[str, float | str]:
  """The KL divergence of a run from its start, and its standard error."""
  policy = load_policy(workdir)
  run, prompts = policy.run, policy.run.prompts("test")
  programs, parameters, config = run.programs, run.parameters, run.config
  rollout = make_rollout(run, 1)
  trained = parameters.policy(policy.params)
  before = parameters.policy(run.initial_params())
  for_sampling = parameters.for_sampling(policy.params)
  gaps, lengths = [], []
  size = config.batch.prompts
  batches = min(examples, len(prompts)) // size
  if not batches:
    sys.exit(f"{workdir}: a batch takes {size} test problems, which is more than there are to draw")
  for start in range(0, batches * size, size):
    batch = prompt_batch(prompts, start + np.arange(size), run.hosts)
    key = jax.random.fold_in(jax.random.key(0), start)
    completions = rollout(for_sampling, batch, key, config.sampling.temperature).completions
    learned = programs.to_batch(
      completions,
      batch.prompts_PS,
      batch.prompt_lengths_P,
      np.full(size, config.sampling.temperature, np.float32),
      np.ones(size, bool),
    )
    here, there = (np.asarray(programs.logprobs(params, learned)) for params in (trained, before))
    mask_PGT = np.asarray(learned.mask_PGT)
    gaps.append(((here - there) * mask_PGT).sum(-1).ravel())
    lengths.append(mask_PGT.sum(-1).ravel())
  gaps_N, lengths_N = np.concatenate(gaps), np.concatenate(lengths)
  kl = gaps_N.sum() / lengths_N.sum()
  # The standard error of a ratio of means, by the delta method.
  rest_N = (gaps_N - kl * lengths_N) / lengths_N.mean()
  return {
    "run": workdir,
    "kl": round(float(kl), 4),
    "standard_error": round(float(rest_N.std() / np.sqrt(len(rest_N))), 4),
    "completions": len(rest_N),
  }


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("workdirs", nargs="+")
  parser.add_argument("--examples", type=int, default=96, help="at most so many test problems")
  args = parser.parse_args()
  for workdir in args.workdirs:
    print(json.dumps(drift(workdir, args.examples)), flush=True)


if __name__ == "__main__":
  main()
