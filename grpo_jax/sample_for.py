"""Samples for a run that learns in another process, on this machine or on another one.

python -m grpo_jax.sample_for --learner=HOST:PORT --config=configs/arithmetic.py

HOST:PORT is rollout.listen of the run. The config and its overrides must be those of the run,
except for mesh.*, rollout.secret_file and rollout.certificate_file, which describe the devices and
files of this process. docs/sampler_processes.md has more.
"""

from absl import flags

from grpo_jax import cli
from grpo_jax.settings import ConfigError, address_of


def main(argv: list[str]) -> None:
  """Joins the learner of the flags, and samples for it."""
  del argv
  values = flags.FLAGS
  if not values.learner:
    raise ConfigError("flag --learner is missing: HOST:PORT, the run's rollout.listen")
  address = address_of(values.learner, "flag --learner")
  if values.give_up_after < 0:
    raise ConfigError(f"flag --give_up_after={values.give_up_after:g}: it must be at least 0")
  config = cli.config_from_flags()
  from grpo_jax.asynchronous import access  # here: --help and mistakes in flags need no jax
  from grpo_jax.asynchronous.sampler import sample_for
  from grpo_jax.run.run import Run

  credentials = access.sampler_access(config.rollout, address[0])
  sample_for(Run(config), address, values.give_up_after, credentials)


if __name__ == "__main__":
  cli.define_config_flag()
  flags.DEFINE_string("learner", None, "where the run listens, as HOST:PORT")
  flags.DEFINE_float(
    "give_up_after", 600.0, "seconds for which it tries to find a learner that is not there"
  )
  cli.run(main)
