"""Prints the held-out accuracy of a policy: greedy, mean@k, pass@k and maj@k.

python -m grpo_jax.evaluate --workdir=DIR [--step=N] [--samples=16] [--examples=1319]
python -m grpo_jax.evaluate --config=configs/gsm8k.py --config.model.path=FOLDER
"""

import dataclasses

from absl import flags

from grpo_jax import cli
from grpo_jax.config import Config
from grpo_jax.data.tasks.tasks import name_of


def main(argv: list[str]) -> None:
  del argv
  given = {"samples": flags.FLAGS.samples, "examples": flags.FLAGS.examples}
  changes = {name: value for name, value in given.items() if value is not None}

  def with_flags(config: Config) -> Config:
    return dataclasses.replace(config, eval=dataclasses.replace(config.eval, **changes))

  from grpo_jax.evaluation.evaluator import (  # here: --help and mistakes in flags need no jax
    Evaluator,
    table,
  )

  cli.join_processes()
  policy = cli.open_policy(with_flags)
  config = policy.run.config
  evaluator = Evaluator(policy.run, policy.scorers)
  dropped = evaluator.prompts.dropped
  left_out = f" ({dropped} longer than data.max_prompt_tokens left out)" if dropped else ""
  if unopened := evaluator.prompts.unopened:
    left_out += f" ({unopened} whose environments cannot begin left out)"
  count = len(evaluator.prompts)
  print(f"{policy.name}: {count} test problems of {name_of(config.data)}{left_out}", flush=True)
  metrics = evaluator(policy.run.parameters.for_sampling(policy.params), policy.step)
  print("\n".join(table(metrics, config.eval, config.sampling.max_tokens)))


if __name__ == "__main__":
  flags.DEFINE_integer("samples", None, "draws of each problem for mean@k, pass@k and maj@k")
  flags.DEFINE_integer("examples", None, "how many test problems (default: eval.examples)")
  cli.define_policy_flags()
  cli.run(main)
