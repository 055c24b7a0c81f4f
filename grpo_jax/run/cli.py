"""The edge of the entry points: flags, and errors of the user as one line and exit code 2."""

import dataclasses
import json
import logging
import math
import re
import sys
import traceback
from pathlib import Path
from typing import Any, Callable

import jax
from absl import app, flags
from ml_collections import ConfigDict, config_flags

from grpo_jax.algo.presets import PRESETS
from grpo_jax.config import Config, Mesh, check_key, from_dict, wrong_type
from grpo_jax.run.build import Run
from grpo_jax.run.checkpoint import Checkpoints
from grpo_jax.run.terminal import Loading
from grpo_jax.settings import ConfigError

flags.disclaim_key_flags()  # so that --help shows a program's flags that are defined here


def run(main: Callable[[list[str]], None]) -> None:
  """absl's app.run for `main`, with every error of the user's on one line of stderr and exit code 2."""
  app.define_help_flags()
  logging.getLogger("absl").setLevel(logging.WARNING)
  try:
    main(_parse(sys.argv))
  except ConfigError as error:
    print("error:", *str(error).splitlines(), file=sys.stderr)
    sys.exit(2)


def read_config() -> Config:
  """The --config flag, its overrides applied, as frozen dataclasses."""
  value = flags.FLAGS.config
  if not flags.FLAGS["config"].present:
    raise ConfigError("flag --config is missing: for example --config=configs/arithmetic.py")
  if not isinstance(value, ConfigDict):
    raise ConfigError(
      "flag --config: get_config() of that file must return a ConfigDict, as in configs/default.py"
    )
  return _absolute(from_dict(value.to_dict()))


@dataclasses.dataclass(frozen=True)
class Policy:
  """Something to sample from: a run's checkpoint, or a Hugging Face folder."""

  name: str
  run: Run
  params: Any
  step: int


def define_policy_flags() -> None:
  """--workdir and --step, or --config: what `open_policy` reads."""
  flags.DEFINE_string(
    "workdir", None, "a run's folder: its newest whole checkpoint, or the one of --step"
  )
  flags.DEFINE_integer("step", None, "the checkpoint's step")
  config_flags.DEFINE_config_file(
    "config", None, "instead of --workdir: a config, with --config.model.path=FOLDER"
  )


def open_policy(change: Callable[[Config], Config] = lambda config: config) -> Policy:
  """The policy that the flags name; `change` is applied to its config before anything is built."""
  workdir, step = (
    flags.FLAGS.workdir and str(Path(flags.FLAGS.workdir).expanduser()),
    flags.FLAGS.step,
  )
  if (workdir is None) == (flags.FLAGS.config is None):
    raise ConfigError(
      "give either --workdir=DIR or --config=configs/X.py --config.model.path=FOLDER"
    )
  if workdir is None:
    config = change(read_config())
    built = Run(config, Loading())
    return Policy(config.model.path or "random weights", built, built.initial_params(), 0)
  built = Run(change(_fitting(saved_config(workdir))), Loading())
  step, params = Checkpoints(Path(workdir) / "checkpoints", keep=1).restore_params(
    built.parameters.abstract, step
  )
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


def _absolute(config: Config) -> Config:
  """The config with the whole paths of what it names, so that its run can be used from another folder."""
  whole = lambda path: (
    str(Path(path).expanduser().absolute()) if path and Path(path).expanduser().exists() else path
  )
  reward = lambda name: (
    ":".join([whole(name.rpartition(":")[0]), name.rpartition(":")[2]])
    if ":" in name
    else whole(name)
  )
  model, data, rewards = config.model, config.data, config.reward
  return dataclasses.replace(
    config,
    model=dataclasses.replace(model, path=whole(model.path)),
    lora=dataclasses.replace(config.lora, path=whole(config.lora.path)),
    data=dataclasses.replace(data, path=whole(data.path), tokenizer=whole(data.tokenizer)),
    reward=dataclasses.replace(rewards, functions=tuple(map(reward, rewards.functions))),
    eval=dataclasses.replace(config.eval, function=reward(config.eval.function)),
  )


def _fitting(config: Config) -> Config:
  """The config on this machine: a mesh of other devices than it was trained on gives way to this one's."""
  asked = dataclasses.astuple(config.mesh)
  product = math.prod(n for n in asked if n != -1)
  fits = jax.device_count() % product == 0 if -1 in asked else jax.device_count() == product
  return config if fits else dataclasses.replace(config, mesh=Mesh(-1, 1, 1, 1))


def _parse(argv):
  """Flags into flags.FLAGS. absl, ml_collections and the config file each raise their own errors: -> ConfigError."""
  given = list(_config_flags(argv))
  for key, value in given:
    if key:
      check_key(key)
    elif not Path(value.split(":")[0]).is_file():
      raise ConfigError(f"flag --config={value}: there is no file {value.split(':')[0]!r}")
  try:
    rest = flags.FLAGS(argv)[1:]
  except Exception as error:
    for key, value in given:
      if key and str(error).startswith(f"flag --config.{key}={value}: "):
        raise wrong_type(key, value) from None
    where = next((_inside(value, error) for key, value in given if not key), None)
    raise ConfigError(where or str(error).strip().split("\n")[0] or type(error).__name__) from None
  if rest:
    raise ConfigError(f"argument {rest[0]!r} is not a flag: write --name=value")
  return argv


def _config_flags(argv):
  """(key, value) of each --config.KEY=VALUE, and ("", FILE) of --config=FILE."""
  for flag, following in zip(argv[1:], [*argv[2:], ""]):
    name, equals, value = flag.partition("=")
    if re.match(r"--?config(\.|$)", name):
      yield name.partition("config")[2][1:], value if equals else following


def _inside(config, error):
  """Where in the config file an error came from and what it is; None if it came from elsewhere."""
  file, _, preset = config.partition(":")
  while error:
    lines = [
      f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == Path(file)
    ]
    if lines and isinstance(error, KeyError) and error.args == (preset,):
      names = ", ".join(PRESETS)
      return f"flag --config={config}: {file} has no preset {preset!r}; grpo_jax/algo/presets.py has {names}"
    if lines:
      return f"{file} line {lines[-1]}: {type(error).__name__}: {' '.join(str(error).split())}"
    error = error.__context__
