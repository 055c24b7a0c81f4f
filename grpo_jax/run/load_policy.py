"""Loads policies: from the checkpoint of a run, or from before the training."""

from collections.abc import Callable
import dataclasses
import math
from pathlib import Path

import jax

from grpo_jax.config import Config, Mesh
from grpo_jax.run.bucket import folder
from grpo_jax.run.build import Run
from grpo_jax.run.checkpoint import Checkpoints
from grpo_jax.run.library import leaving_nothing_behind
from grpo_jax.run.policy import Policy, check_numbers
from grpo_jax.run.reading import read_config
from grpo_jax.run.recipes import with_absolute_paths
from grpo_jax.run.terminal import Loading

Change = Callable[[Config], Config]


def load_policy(source: Config | str | Path, step: int | None = None) -> Policy:
  """Loads a policy, to sample from it, to evaluate it or to export it.

  It takes memory of the devices until nothing refers to it any more.

  Args:
    source: The folder of a run, or a Config: then it is the model before training.
    step: The step of the checkpoint. None means the newest.

  Raises:
    ConfigError: The folder has no such checkpoint, or the config cannot be used.
  """
  with leaving_nothing_behind():
    if isinstance(source, Config):
      return policy_of_config(with_absolute_paths(source))
    check_numbers({"step": step}, "load_policy(): ")
    return policy_of_run(folder(source), step)


def unchanged(config: Config) -> Config:
  """A `Change` that changes nothing."""
  return config


def policy_of_config(config: Config) -> Policy:
  """The policy before training."""
  run = Run(config, Loading())
  return Policy(config.model.path or "random weights", run, run.initial_params(), 0)


def policy_of_run(workdir: Path, step: int | None, change: Change = unchanged) -> Policy:
  """The policy of a run's checkpoint: the newest, or that of `step`.

  `change` is applied to the run's config before anything is built.
  """
  run = Run(change(_on_this_machine(read_config(workdir))), Loading())
  checkpoints = Checkpoints(workdir / "checkpoints", keep=1, layers_of=run.parameters.layers_of)
  step, params = checkpoints.restore_params(run.parameters.abstract, step)
  return Policy(f"{workdir}, step {step}", run, params, step)


def _on_this_machine(config: Config) -> Config:
  """The config with a mesh that fits this machine's devices, if its own does not."""
  sizes = dataclasses.astuple(config.mesh)
  product = math.prod(size for size in sizes if size != -1)
  devices = jax.device_count()
  fits = devices % product == 0 if -1 in sizes else devices == product
  return config if fits else dataclasses.replace(config, mesh=Mesh(data=-1))
