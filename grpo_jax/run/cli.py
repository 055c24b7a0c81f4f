"""What the entry points share: flags, and errors of the user as one line and exit code 2."""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import logging
import math
import os
from pathlib import Path
import re
import sys
from typing import Any

from absl import app, flags
import jax
from ml_collections import ConfigDict, config_flags

from grpo_jax.config import Config, Mesh, check_key, from_dict
from grpo_jax.parallel import processes
from grpo_jax.patience import told_if_slow
from grpo_jax.run import ends
from grpo_jax.run.build import Run
from grpo_jax.run.checkpoint import Checkpoints
from grpo_jax.run.flag_errors import flag_error
from grpo_jax.run.saved_config import load_config
from grpo_jax.run.terminal import Loading
from grpo_jax.settings import ConfigError, is_text, shown

flags.disclaim_key_flags()  # so that --help shows the flags that a program defines here

Change = Callable[[Config], Config]


def run(main: Callable[[list[str]], None], argv: Sequence[str] | None = None) -> None:
  """Runs `main` with the flags of the command line, or with those of `argv`, and exits.

  The exit code is 0 if it did all of its work, 2 for bad input, 75 for a run that was asked to stop
  and goes on with the same command, and 1 for other failures. What went wrong is one line of
  stderr. Only a defect of the program prints a traceback.
  """
  ends.interruptible()
  ends.open_standard_streams()
  app.define_help_flags()
  logging.getLogger("absl").setLevel(logging.WARNING)
  try:
    main(_parse(list(argv or sys.argv), flags.FLAGS))
    sys.stdout.flush()
    processes.ended()
  except BaseException as error:
    together = processes.failed_together()
    workdir = flags.FLAGS["workdir"].value if "workdir" in flags.FLAGS else None
    ended = ends.exit_of(error, workdir)
    if not together:  # the others wait for this process, and leaving in peace would wait for them
      ends.leave_at_once(error, ended)
    if ended is None:
      raise
    ends.leave(*ended)
  finally:
    ends.flush_standard_streams()


def config_of(train_flags: Sequence[str]) -> Config:
  """The config that these flags of grpo_jax.train give. Leaves the flags of this program alone."""
  values, argv = flags.FlagValues(), [sys.argv[0], *train_flags]
  config_flags.DEFINE_config_file("config", None, "", flag_values=values, sys_argv=argv)
  return read_config(_parse(argv, values), values)


def read_config(argv: Sequence[str] = (), values: flags.FlagValues = flags.FLAGS) -> Config:
  """The --config flag with its overrides applied."""
  value = values.config
  file = next((given for key, given in _config_flags(argv or sys.argv) if not key), "")
  if not values["config"].present:
    raise ConfigError("flag --config is missing: for example --config=configs/arithmetic.py")
  failure = vars(value).get("_error") if hasattr(value, "__dict__") else None
  if isinstance(failure, OSError):  # what ml_collections makes of one in the config file
    raise flag_error(failure, [("", file)])
  if not isinstance(value, ConfigDict):
    raise ConfigError(
      f"flag --config={file}: get_config() of that file must return a ConfigDict, as in"
      " configs/default.py"
    )
  try:
    values = value.to_dict()
  except Exception as error:  # a section inside itself, or a value that cannot be copied
    raise ConfigError(
      f"flag --config={file}: its ConfigDict cannot be read ({type(error).__name__}:"
      f" {' '.join(str(error).split()):.200})"
    ) from None
  return _with_absolute_paths(from_dict(values))


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


def folder_of_flag(name: str, value: str) -> Path:
  """The folder that the flag `name` has as its value.

  Raises:
    ConfigError: It is not a folder of a file system.
  """
  if "://" in value:
    raise ConfigError(f"flag --{name}={value}: object storage is not supported; name a folder")
  if not is_text(value):
    raise ConfigError(f"flag --{name}={value!r}: the name is not UTF-8; choose another one")
  try:
    folder = Path(value).expanduser()
    folder.exists()
  except RuntimeError as error:  # ~NAME of nobody
    raise ConfigError(f"flag --{name}={value}: {error}") from None
  except OSError as error:  # a name that is too long
    raise ConfigError(f"flag --{name}={value}: {error.strerror}") from None
  return folder


def join_processes() -> None:
  """Joins the processes of a command on several hosts, of which the first one prints."""
  processes.initialize_distributed()
  if jax.distributed.is_initialized() and jax.process_index():
    sys.stdout = open(os.devnull, "w")


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
  workdir = folder_of_flag("workdir", values.workdir)
  built = Run(change(_on_this_machine(saved_config(workdir))), Loading())
  checkpoints = Checkpoints(workdir / "checkpoints", keep=1, layers_of=built.parameters.layers_of)
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


def _with_absolute_paths(config: Config) -> Config:
  """The config with absolute paths, so that its run can be used from another folder."""

  def absolute(key: str, path: str) -> str:
    try:
      expanded = Path(path).expanduser()
      return str(expanded.absolute()) if path and expanded.exists() else path
    except (OSError, RuntimeError, ValueError) as error:  # too long, no such user, NUL in it
      raise ConfigError(f"config key {key} is {shown(path)}: {error}") from None

  def absolute_reward(key: str, name: str) -> str:
    file, colon, function = name.rpartition(":")
    return f"{absolute(key, file)}:{function}" if colon else absolute(key, name)

  replace = dataclasses.replace
  functions = tuple(absolute_reward("reward.functions", x) for x in config.reward.functions)
  return replace(
    config,
    model=replace(config.model, path=absolute("model.path", config.model.path)),
    lora=replace(config.lora, path=absolute("lora.path", config.lora.path)),
    data=replace(
      config.data,
      path=absolute("data.path", config.data.path),
      tokenizer=absolute("data.tokenizer", config.data.tokenizer),
    ),
    reward=replace(config.reward, functions=functions),
    eval=replace(config.eval, function=absolute_reward("eval.function", config.eval.function)),
  )


def _on_this_machine(config: Config) -> Config:
  """The config with a mesh that fits this machine's devices, if its own does not."""
  sizes = dataclasses.astuple(config.mesh)
  product = math.prod(size for size in sizes if size != -1)
  devices = jax.device_count()
  fits = devices % product == 0 if -1 in sizes else devices == product
  return config if fits else dataclasses.replace(config, mesh=Mesh(data=-1))


def _parse(argv: list[str], values: flags.FlagValues) -> list[str]:
  """Parses flags into `values`.

  absl, ml_collections and the config file each raise errors of their own. They become ConfigErrors.
  """
  overrides = list(_config_flags(argv))
  for key, value in overrides:
    file = value.split(":")[0]
    if key:
      check_key(key)
    elif not os.path.isfile(file):
      if os.path.exists(file):
        raise ConfigError(f"flag --config={value}: {shown(file)} is not a regular file")
      raise ConfigError(f"flag --config={value}: there is no file {shown(file)}")
  try:
    logging.disable(logging.WARNING)  # ml_collections warns of what becomes an error here
    with told_if_slow("reading --config"):
      rest = values(argv)[1:]
  except KeyboardInterrupt:
    raise
  except BaseException as error:  # a config file is a program, so it can raise any exception
    if isinstance(error, SystemExit) and _asks_for_help(argv):
      sys.exit(0)  # the help is printed
    raise flag_error(error, overrides) from None
  finally:
    logging.disable(logging.NOTSET)
  if rest:
    raise ConfigError(f"argument {rest[0]!r} is not a flag: write --name=value")
  return argv


def _config_flags(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
  """(key, value) of each --config.KEY=VALUE, and ("", FILE) of --config=FILE."""
  for flag, following in zip(argv[1:], [*argv[2:], ""]):
    name, equals, value = flag.partition("=")
    if re.match(r"--?config(\.|$)", name):
      yield name.partition("config")[2][1:], value if equals else following


def _asks_for_help(argv: list[str]) -> bool:
  return any(re.fullmatch(r"--?(help(short|full|xml)?|\?)", flag) for flag in argv[1:])
