"""Predicts whether a run fits on devices and what bounds its speed, without such devices.

python -m grpo_jax.plan --config=configs/X.py [--config.section.key=value] --topology=v5e:2x2
python -m grpo_jax.plan --config=configs/X.py --topology=h100:8
python -m grpo_jax.plan --config=configs/X.py --topology=cpu:4
python -m grpo_jax.plan --config=configs/X.py --async --topology=v5e:2x4 [--workdir=RUN]
python -m grpo_jax.plan --config=configs/X.py --async --round_ms=1:9,4:5 --update_s=1:40,4:11

It compiles the programs of the run and counts their memory and operations. For TPUs it needs the
compiler of pip install 'jax[tpu]', for GPUs 'jax[cuda]'. It reads config.json of the model, but
neither weights nor data.
The exit code is 0 if the run fits, and 3 if it does not.

With --async it finds how many devices the sampler and the learner of an asynchronous run should
have. It simulates every split, with lower bounds of the programs' times or with measured times.
"""

from absl import flags

from grpo_jax import cli


def main(argv: list[str]) -> None:
  del argv
  config = cli.config_from_flags()
  # Here, because --help and mistakes in flags need no jax.
  from grpo_jax.around.planning.plan import plan_by_flags

  plan_by_flags(config, flags.FLAGS)


if __name__ == "__main__":
  cli.define_config_flag()
  flags.DEFINE_string("topology", None, "chips, such as v5e:2x2, v5p:2x2x4 or h100:8, or cpu:N")
  flags.DEFINE_integer("chips", None, "how many of its chips to use (default: all)", lower_bound=1)
  flags.DEFINE_bool("async", False, "devices for the sampler and for the learner, by simulation")
  flags.DEFINE_string("workdir", None, "--async: a run whose completions have typical lengths")
  flags.DEFINE_string("round_ms", None, "--async: measured DEVICES:MS of a round of decoding, ...")
  flags.DEFINE_string("update_s", None, "--async: measured DEVICES:S of the learner's step, ...")
  flags.DEFINE_float("reward_s", 0.0, "--async: seconds to score a batch", lower_bound=0.0)
  flags.DEFINE_list("staleness", ["0", "1", "2", "4", "8"], "--async: bounds on staleness to try")
  cli.run(main)
