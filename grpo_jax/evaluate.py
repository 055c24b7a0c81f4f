"""Prints the held-out accuracy of a policy: greedy, mean@k, pass@k and maj@k.

python -m grpo_jax.evaluate --workdir=DIR [--step=N] [--samples=16] [--examples=1319]
python -m grpo_jax.evaluate --config=configs/gsm8k.py --config.model.path=FOLDER
python -m grpo_jax.evaluate --workdir=DIR --tasks='math500:test.jsonl' --tasks='aime24(samples=16)'

--tasks evaluates exams in place of the test problems: see eval.tasks.
"""

import dataclasses

from absl import flags

from grpo_jax import cli
from grpo_jax.config import Config
from grpo_jax.data.tasks.tasks import name_of
from grpo_jax.settings import ConfigError


def main(argv: list[str]) -> None:
  """Evaluates the policy of the flags on the test split or on exams, and prints the results."""
  del argv
  values = flags.FLAGS
  tasks = tuple(values.tasks or ())
  eval_flags = {"samples": values.samples, "examples": values.examples, "tasks": tasks or None}
  if tasks and values.examples is not None:
    raise ConfigError(
      f"flag --examples={values.examples} is for the test problems: with --tasks write"
      " EXAM(examples=N):FILE"
    )
  # A flag that is not given leaves the value of the config.
  changes = {name: value for name, value in eval_flags.items() if value is not None}

  def with_flags(config: Config) -> Config:
    return dataclasses.replace(config, eval=dataclasses.replace(config.eval, **changes))

  from grpo_jax.evaluation.evaluator import (  # here: --help and mistakes in flags need no jax
    Evaluators,
    table,
  )

  cli.join_processes()
  policy = cli.open_policy(with_flags)
  data = name_of(policy.run.config.data)
  params = policy.run.parameters.for_sampling(policy.params)
  for evaluator in Evaluators(policy.run, policy.scorers, only_exams=bool(tasks)).parts:
    dropped = evaluator.prompts.dropped
    # Only an exam has a name. Its prompts may be longer than those of training.
    limit = "the model's positions" if evaluator.name else "data.max_prompt_tokens"
    left_out = f" ({dropped} longer than {limit} left out)" if dropped else ""
    if unopened := evaluator.prompts.unopened:
      left_out += f" ({unopened} whose environments cannot begin left out)"
    problems = f"problems of {evaluator.name}" if evaluator.name else f"test problems of {data}"
    print(f"{policy.name}: {len(evaluator.prompts)} {problems}{left_out}", flush=True)
    metrics = evaluator(params, policy.step)
    lines = table(metrics, evaluator.config, evaluator.max_tokens, evaluator.name)
    print("\n".join(lines), flush=True)


if __name__ == "__main__":
  flags.DEFINE_integer("samples", None, "draws of each problem for mean@k, pass@k and maj@k")
  flags.DEFINE_integer("examples", None, "how many test problems (default: eval.examples)")
  flags.DEFINE_multi_string("tasks", None, "an exam in place of the test problems, EXAM:FILE")
  cli.define_policy_flags()
  cli.run(main)
