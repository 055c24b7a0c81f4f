"""What the entry points share: flags, and errors of the user as one line and exit code 2."""

from collections.abc import Callable, Iterator
import dataclasses
import io
import logging
import math
import os
from pathlib import Path
import re
import sys
import traceback
from typing import Any

from absl import app, flags
import jax
from ml_collections import ConfigDict, config_flags

from grpo_jax.algo.presets import PRESETS
from grpo_jax.config import Config, Mesh, check_key, from_dict, wrong_type
from grpo_jax.run import disk, ends
from grpo_jax.run.build import Run
from grpo_jax.run.checkpoint import Checkpoints
from grpo_jax.run.saved_config import load_config
from grpo_jax.run.stdout import discard_stdout
from grpo_jax.run.terminal import Loading
from grpo_jax.settings import ConfigError

flags.disclaim_key_flags()  # so that --help shows the flags that a program defines here

Change = Callable[[Config], Config]


def run(main: Callable[[list[str]], None]) -> None:
  """Runs `main` with the flags of the command line, and exits.

  The exit code is 0 if it did all of its work, 2 for bad input, 75 for a run that was asked to stop
  and goes on with the same command, and 1 for other failures. What went wrong is one line of
  stderr. Only a defect of the program prints a traceback.
  """
  _open_standard_streams()
  app.define_help_flags()
  logging.getLogger("absl").setLevel(logging.WARNING)
  try:
    main(_parse(sys.argv))
    sys.stdout.flush()
  except BaseException as error:
    ended = ends.exit_of(error) or _failed_write(error)
    if ended is None:
      raise
    code, line = ended
    if line:
      print(line, file=sys.stderr)
    if isinstance(error, BrokenPipeError):
      discard_stdout()
    sys.exit(code)


def read_config() -> Config:
  """The --config flag with its overrides applied."""
  value = flags.FLAGS.config
  if not flags.FLAGS["config"].present:
    raise ConfigError("flag --config is missing: for example --config=configs/arithmetic.py")
  if not isinstance(value, ConfigDict):
    raise ConfigError(
      "flag --config: get_config() of that file must return a ConfigDict, as in configs/default.py"
    )
  return _with_absolute_paths(from_dict(value.to_dict()))


@dataclasses.dataclass(frozen=True)
class Policy:
  """A policy to sample from.

  Attributes:
    name: How to call it in messages.
    run: The parts that its config describes.
    params: Its trained parameters.
    step: The step of its checkpoint, 0 for a Hugging Face folder.
  """

  name: str
  run: Run
  params: Any
  step: int


def define_policy_flags() -> None:
  """Defines what `open_policy` reads: --workdir and --step, or --config."""
  flags.DEFINE_string(
    "workdir", None, "a run's folder: its newest whole checkpoint, or that of --step"
  )
  flags.DEFINE_integer("step", None, "the checkpoint's step")
  config_flags.DEFINE_config_file(
    "config", None, "instead of --workdir: a config, with --config.model.path=FOLDER"
  )


def unchanged(config: Config) -> Config:
  """A `Change` that changes nothing."""
  return config


def open_policy(change: Change = unchanged) -> Policy:
  """The policy that the flags name. `change` is applied to its config before it is built."""
  values = flags.FLAGS
  if (values.workdir is None) == (values.config is None):
    raise ConfigError(
      "give either --workdir=DIR or --config=configs/X.py --config.model.path=FOLDER"
    )
  if values.workdir is None:
    config = change(read_config())
    built = Run(config, Loading())
    return Policy(config.model.path or "random weights", built, built.initial_params(), 0)
  workdir = Path(values.workdir).expanduser()
  built = Run(change(_on_this_machine(saved_config(workdir))), Loading())
  checkpoints = Checkpoints(workdir / "checkpoints", keep=1)
  step, params = checkpoints.restore_params(built.parameters.abstract, values.step)
  return Policy(f"{workdir}, step {step}", built, params, step)


def saved_config(workdir: str | Path) -> Config:
  """The config that a run's folder was made with."""
  file = Path(workdir) / "config.json"
  if not file.is_file():
    raise ConfigError(f"workdir {workdir} has no config.json: it is not the folder of a run")
  values = load_config(file)
  try:
    return from_dict(values, saved=True)
  except ConfigError as error:
    raise ConfigError(f"{file} cannot be read: {error}") from None


def _failed_write(error: BaseException) -> tuple[int, str] | None:
  """The exit code and the line for a disk that cannot be written, or None for another error."""
  workdir = flags.FLAGS["workdir"].value if "workdir" in flags.FLAGS else None
  line = disk.explain(error, workdir) if isinstance(error, Exception) else None
  return (ends.FAILED, f"error: {line}") if line else None


def _open_standard_streams() -> None:
  """Makes printing safe: no stream is missing, and no character that it cannot encode is an error.

  A closed stream would otherwise give its number to the next file that is opened, and what is
  printed would land in that file.
  """
  for number in range(3):
    try:
      os.fstat(number)
    except OSError:
      os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
  sys.stdout = sys.stdout or open(os.devnull, "w")
  sys.stderr = sys.stderr or open(os.devnull, "w")
  for stream in (sys.stdout, sys.stderr):
    if isinstance(stream, io.TextIOWrapper):
      stream.reconfigure(errors="backslashreplace")


def _with_absolute_paths(config: Config) -> Config:
  """The config with absolute paths, so that its run can be used from another folder."""

  def absolute(path: str) -> str:
    expanded = Path(path).expanduser()
    return str(expanded.absolute()) if path and expanded.exists() else path

  def absolute_reward(name: str) -> str:
    file, colon, function = name.rpartition(":")
    return f"{absolute(file)}:{function}" if colon else absolute(name)

  replace = dataclasses.replace
  functions = tuple(absolute_reward(name) for name in config.reward.functions)
  return replace(
    config,
    model=replace(config.model, path=absolute(config.model.path)),
    lora=replace(config.lora, path=absolute(config.lora.path)),
    data=replace(
      config.data,
      path=absolute(config.data.path),
      tokenizer=absolute(config.data.tokenizer),
    ),
    reward=replace(config.reward, functions=functions),
    eval=replace(config.eval, function=absolute_reward(config.eval.function)),
  )


def _on_this_machine(config: Config) -> Config:
  """The config with a mesh that fits this machine's devices, if its own does not."""
  sizes = dataclasses.astuple(config.mesh)
  product = math.prod(size for size in sizes if size != -1)
  devices = jax.device_count()
  fits = devices % product == 0 if -1 in sizes else devices == product
  return config if fits else dataclasses.replace(config, mesh=Mesh(data=-1))


def _parse(argv: list[str]) -> list[str]:
  """Parses flags into flags.FLAGS.

  absl, ml_collections and the config file each raise errors of their own. They become ConfigErrors.
  """
  overrides = list(_config_flags(argv))
  for key, value in overrides:
    file = value.split(":")[0]
    if key:
      check_key(key)
    elif not Path(file).is_file():
      raise ConfigError(f"flag --config={value}: there is no file {file!r}")
  try:
    rest = flags.FLAGS(argv)[1:]
  except Exception as error:
    raise _flag_error(error, overrides) from None
  if rest:
    raise ConfigError(f"argument {rest[0]!r} is not a flag: write --name=value")
  return argv


def _config_flags(argv: list[str]) -> Iterator[tuple[str, str]]:
  """(key, value) of each --config.KEY=VALUE, and ("", FILE) of --config=FILE."""
  for flag, following in zip(argv[1:], [*argv[2:], ""]):
    name, equals, value = flag.partition("=")
    if re.match(r"--?config(\.|$)", name):
      yield name.partition("config")[2][1:], value if equals else following


def _flag_error(error: Exception, overrides: list[tuple[str, str]]) -> ConfigError:
  for key, value in overrides:
    if key and str(error).startswith(f"flag --config.{key}={value}: "):
      return wrong_type(key, value)
  for key, value in overrides:
    in_file = None if key else _error_in_config(value, error)
    if in_file:
      return ConfigError(in_file)
  return ConfigError(str(error).strip().split("\n")[0] or type(error).__name__)


def _error_in_config(config: str, error: BaseException | None) -> str | None:
  """Where in the config file an error was raised, and what it is. None if it was elsewhere."""
  file, _, preset = config.partition(":")
  while error:
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == Path(file)]
    if lines and isinstance(error, KeyError) and error.args == (preset,):
      names = ", ".join(PRESETS)
      return (
        f"flag --config={config}: {file} has no preset {preset!r}; grpo_jax/algo/presets.py has"
        f" {names}"
      )
    if lines:
      return f"{file} line {lines[-1]}: {type(error).__name__}: {' '.join(str(error).split())}"
    error = error.__context__
  return None
