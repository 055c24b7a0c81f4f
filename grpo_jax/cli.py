"""The edge of the entry points: flags, and errors of the user as one line and exit code 2."""
import dataclasses
import json
import logging
import sys
from pathlib import Path
from typing import Any, Callable

import jax
from absl import flags
from ml_collections import ConfigDict, config_flags

from grpo_jax.checkpoint import Checkpoints
from grpo_jax.config import Config, ConfigError, Mesh, from_dict
from grpo_jax.run import Run


def run(main: Callable[[list[str]], None]) -> None:
  """absl's app.run for `main`, with every error of the user's on one line of stderr and exit code 2."""
  try:
    argv = flags.FLAGS(sys.argv)
  except Exception as error:  # absl, ml_collections and the config file each raise their own
    _fail(error)
  if len(argv) > 1:
    _fail(ConfigError(f"argument {argv[1]!r} is not a flag: write --name=value"))
  logging.getLogger("absl").setLevel(logging.WARNING)
  try:
    main(argv)
  except ConfigError as error:
    _fail(error)


def read_config() -> Config:
  """The --config flag, its overrides applied, as frozen dataclasses."""
  value = flags.FLAGS.config
  if value is None:
    raise ConfigError("flag --config is missing: for example --config=configs/arithmetic.py")
  return from_dict(value.to_dict() if isinstance(value, ConfigDict) else value)


@dataclasses.dataclass(frozen=True)
class Policy:
  """Something to sample from: a run's checkpoint, or a Hugging Face folder."""
  name: str
  run: Run
  params: Any
  step: int


def define_policy_flags() -> None:
  """--workdir and --step, or --config: what `open_policy` reads."""
  flags.DEFINE_string("workdir", None, "a run's folder: its newest whole checkpoint, or the one of --step")
  flags.DEFINE_integer("step", None, "the checkpoint's step")
  config_flags.DEFINE_config_file("config", None, "instead of --workdir: a config, with --config.model.path=FOLDER")


def open_policy(change: Callable[[Config], Config] = lambda config: config) -> Policy:
  """The policy that the flags name; `change` is applied to its config before anything is built."""
  workdir, step = flags.FLAGS.workdir, flags.FLAGS.step
  if (workdir is None) == (flags.FLAGS.config is None):
    raise ConfigError("give either --workdir=DIR or --config=configs/X.py --config.model.path=FOLDER")
  if workdir is None:
    config = change(read_config())
    built = Run(config)
    return Policy(config.model.path or "random weights", built, built.initial_params(), 0)
  built = Run(change(_fitting(saved_config(workdir))))
  step, params = Checkpoints(Path(workdir) / "checkpoints", keep=1).restore_params(built.abstract_params, step)
  return Policy(f"{workdir}, step {step}", built, params, step)


def saved_config(workdir: str) -> Config:
  """The config a run's folder was made with."""
  file = Path(workdir) / "config.json"
  if not file.is_file():
    raise ConfigError(f"workdir {workdir} has no config.json: it is not the folder of a run")
  try:
    return from_dict(json.loads(file.read_text()))
  except ValueError as error:
    raise ConfigError(f"{file} cannot be read: {error}") from None


def _fitting(config: Config) -> Config:
  """The config on this machine: a mesh of other devices than it was trained on gives way to this one's."""
  mesh = config.mesh
  sizes = [n for n in (mesh.data, mesh.fsdp, mesh.tensor) if n != -1]
  product = 1
  for size in sizes:
    product *= size
  fits = jax.device_count() % product == 0 if len(sizes) < 3 else jax.device_count() == product
  return config if fits else dataclasses.replace(config, mesh=Mesh(-1, 1, 1))


def _fail(error):
  first = str(error).strip().split("\n")[0] or type(error).__name__
  print(f"error: {first}", file=sys.stderr)
  sys.exit(2)
