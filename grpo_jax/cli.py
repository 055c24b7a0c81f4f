"""Flags and error handling of all entry points. A user's error is one line and exit code 2."""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import logging
import os
from pathlib import Path
import re
import sys
import traceback
from typing import TYPE_CHECKING, Any

from absl import app, flags
from ml_collections import ConfigDict, config_flags

from grpo_jax.algo.presets import CHOICES
from grpo_jax.config import Config, check_key, from_dict, wrong_type
from grpo_jax.console import exit_codes, line
from grpo_jax.foreign import printing_to_stderr
from grpo_jax.lazy import jax
from grpo_jax.parallel import processes
from grpo_jax.progress import doing
from grpo_jax.recipes import (
  Change,
  file_of,
  import_hint,
  recipe_files,
  unchanged,
  with_absolute_paths,
)
from grpo_jax.settings import ConfigError, path_of, shown
from grpo_jax.storage import bucket

if TYPE_CHECKING:
  from grpo_jax.evaluation.policy import Policy

flags.disclaim_key_flags()  # so that --help shows the flags that a program defines here


def run(main: Callable[[list[str]], None], argv: Sequence[str] | None = None) -> None:
  """Parses the flags of a command line and runs `main`. On an error, exits the process.

  The exit code is 2 for bad input, 3 for a run that does not fit its devices, 75 for a run that was
  asked to stop and that the same command resumes, 130 for Ctrl-C, and 1 for other failures. An
  error is one line on stderr. Only a bug of this package prints a traceback.

  Args:
    main: The program. It is called with the whole command line, flags included.
    argv: The command line. None means `sys.argv`.
  """
  line.started()  # the imports, which the status line calls "starting", are over
  exit_codes.interruptible()
  exit_codes.open_standard_streams()
  app.define_help_flags()
  logging.getLogger("absl").setLevel(logging.WARNING)
  try:
    main(_parse(list(argv or sys.argv), flags.FLAGS))
    sys.stdout.flush()  # here, so that an error of writing is handled below
    processes.ended()
  except BaseException as error:
    all_failed = processes.failed_together()
    workdir = flags.FLAGS["workdir"].value if "workdir" in flags.FLAGS else None
    code_and_line = exit_codes.exit_of(error, workdir)
    if not all_failed:  # a regular exit would wait for the other processes, which wait for this one
      exit_codes.leave_at_once(error, code_and_line)
    if code_and_line is None:  # a bug, whose traceback helps
      raise
    exit_codes.leave(*code_and_line)
  finally:
    exit_codes.flush_standard_streams()


class _ConfigParser(flags.ArgumentParser):
  """Parses --config, the name of a recipe or the path of a config file, into a ConfigDict.

  The output of a config file goes to stderr, because another program may read stdout.
  """

  def __init__(self, of_files: flags.ArgumentParser) -> None:
    """Wraps `of_files`, the parser of ml_collections, which executes a config file."""
    self._of_files = of_files

  def parse(self, argument: str) -> Any:
    """Returns what get_config() of the file returns. A `Config` becomes a ConfigDict."""
    with printing_to_stderr():
      config = self._of_files.parse(file_of(argument))
    if isinstance(config, Config):
      config = ConfigDict(dataclasses.asdict(config)).lock()
    return config


def define_config_flag(
  meaning: str = "a config, such as configs/arithmetic.py, or a recipe, such as arithmetic",
  values: flags.FlagValues = flags.FLAGS,
  argv: list[str] | None = None,
) -> None:
  """Defines --config, which `config_from_flags` reads.

  Args:
    meaning: The text that --help shows.
    values: The FlagValues in which to define it.
    argv: The command line, with its overrides --config.KEY=VALUE. None means `sys.argv`.
  """
  config_flags.DEFINE_config_file("config", None, meaning, flag_values=values, sys_argv=argv)
  flag = values["config"]
  flag.parser = _ConfigParser(flag.parser)  # accepts the name of a recipe, too


def config_of(train_flags: Sequence[str]) -> Config:
  """The config that flags of grpo_jax.train, such as --config=FILE, name. Raises ConfigError."""
  values, argv = flags.FlagValues(), [sys.argv[0], *train_flags]
  define_config_flag(values=values, argv=argv)
  return config_from_flags(_parse(argv, values), values)


def config_from_flags(argv: Sequence[str] = (), values: flags.FlagValues = flags.FLAGS) -> Config:
  """The config that --config names, with the overrides --config.KEY=VALUE applied.

  Args:
    argv: The command line, for error messages. Empty means `sys.argv`.
    values: The parsed flags.

  Raises:
    ConfigError: --config is missing, or its file returns no valid config.
  """
  if not values["config"].present:
    raise ConfigError("flag --config is missing: for example --config=configs/arithmetic.py")
  value = values.config
  # The key of --config itself is empty.
  file = next((argument for key, argument in _config_flags(argv or sys.argv) if not key), "")
  # ml_collections keeps an OSError of the config file until a field is read.
  failure = vars(value).get("_error") if hasattr(value, "__dict__") else None
  if isinstance(failure, OSError):
    raise flag_error(failure, [("", file)])
  if not isinstance(value, ConfigDict):
    raise ConfigError(
      f"flag --config={file}: get_config() of that file must return a ConfigDict, as in"
      " configs/default.py"
    )
  try:
    fields = value.to_dict()
  except Exception as error:  # a section inside itself, or a value that cannot be copied
    raise ConfigError(
      f"flag --config={file}: its ConfigDict cannot be read ({type(error).__name__}:"
      f" {' '.join(str(error).split()):.200})"
    ) from None
  return with_absolute_paths(from_dict(fields))


def folder_of_flag(name: str, value: str) -> Path:
  """The path in `value`, the value of the flag `name`. It need not exist.

  Raises:
    ConfigError: It is in object storage, or no valid path.
  """
  if "://" in value:
    raise ConfigError(f"flag --{name}={value}: object storage is not supported here; name a folder")
  return path_of(value, f"flag --{name}")


def folder_of_run(name: str) -> Path:
  """The folder that `name`, the value of --workdir, names: a path, or a path in a bucket."""
  return bucket.folder(name) if "://" in name else folder_of_flag("workdir", name)


def join_processes() -> None:
  """Joins the processes of a command on several hosts. Only the first one prints to stdout."""
  processes.initialize_distributed()
  if jax.distributed.is_initialized() and jax.process_index():
    sys.stdout = open(os.devnull, "w")


def define_policy_flags() -> None:
  """Defines the flags that `open_policy` reads: --workdir and --step, or --config."""
  flags.DEFINE_string(
    "workdir", None, "a run's folder: its newest whole checkpoint, or that of --step"
  )
  flags.DEFINE_integer("step", None, "the checkpoint's step")
  define_config_flag("instead of --workdir: a config, with --config.model.path=FOLDER")


def open_policy(change: Change = unchanged) -> "Policy":
  """Loads the policy that either --workdir or --config names. Raises ConfigError if it cannot.

  `change` is applied to the policy's config before the policy is built.
  """
  values = flags.FLAGS
  if (values.workdir is None) == (values.config is None):
    raise ConfigError(
      "give either --workdir=DIR or --config=configs/X.py --config.model.path=FOLDER"
    )
  if values.workdir is None and values.step is not None:
    raise ConfigError(
      f"flag --step={values.step} is for the checkpoints of --workdir: leave it out"
    )
  # Imported here, so that commands without a policy and mistakes in the flags need no jax.
  from grpo_jax.evaluation.policy import policy_of_config, policy_of_run

  if values.workdir is None:
    return policy_of_config(change(config_from_flags()))
  return policy_of_run(folder_of_run(values.workdir), values.step, change)


def _parse(argv: list[str], values: flags.FlagValues) -> list[str]:
  """Parses a command line into `values`, and returns it.

  Errors of absl, of ml_collections and of the config file become ConfigErrors.
  """
  # The value of --config itself, whose key is empty, may name a recipe instead of a file.
  overrides = [(key, value if key else file_of(value)) for key, value in _config_flags(argv)]
  for key, value in overrides:
    if key:
      check_key(key)
    else:
      _check_file(value)
  try:
    logging.disable(logging.WARNING)  # hides warnings about errors that are raised below
    with doing("reading --config"):
      rest = values(argv)[1:]
  except KeyboardInterrupt:
    raise  # Ctrl-C is no error of the file
  except BaseException as error:  # a config file is a program, so it can raise any exception
    if isinstance(error, SystemExit) and _asks_for_help(argv):
      sys.exit(0)  # absl has printed the help, and would exit with 1
    raise flag_error(error, overrides) from None
  finally:
    logging.disable(logging.NOTSET)
  if rest:
    raise ConfigError(f"argument {rest[0]!r} is not a flag: write --name=value")
  return argv


def _check_file(config: str) -> None:
  """Raises ConfigError unless FILE of --config=FILE[:PRESET] is a file."""
  file = config.split(":")[0]
  if os.path.isfile(file):
    return
  if os.path.exists(file):
    raise ConfigError(f"flag --config={config}: {shown(file)} is not a regular file")
  names = ", ".join(recipe_files())
  raise ConfigError(
    f"flag --config={config}: there is no file {shown(file)}, and no recipe of this name: they are"
    f" {names}"
  )


def _config_flags(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
  """(key, value) of each --config.KEY=VALUE, and ("", FILE) of --config=FILE."""
  for flag, following in zip(argv[1:], [*argv[2:], ""]):
    name, equals, value = flag.partition("=")
    if re.match(r"--?config(\.|$)", name):
      yield name.partition("config")[2][1:], value if equals else following


def _asks_for_help(argv: list[str]) -> bool:
  return any(re.fullmatch(r"--?(help(short|full|xml)?|\?)", flag) for flag in argv[1:])


def flag_error(error: BaseException, overrides: list[tuple[str, str]]) -> ConfigError:
  """Turns an error of parsing flags into a ConfigError with one line.

  Args:
    error: The error that was raised.
    overrides: (key, value) of each --config.KEY=VALUE, and ("", FILE) of --config=FILE.
  """
  # The message of absl begins like this if a value has the wrong type. Unknown keys were refused
  # before.
  for key, value in overrides:
    if key and str(error).startswith(f"flag --config.{key}={value}: "):
      return wrong_type(key, value)
  for key, value in overrides:
    in_file = None if key else _error_in_config(value, error)
    if in_file:
      return ConfigError(in_file)
  return ConfigError(str(error).strip().split("\n")[0] or type(error).__name__)


def _error_in_config(config: str, error: BaseException | None) -> str | None:
  """Describes an error of the config file in `config`, FILE[:PRESET], with its line in the file.

  It also searches the __context__ of the error, because absl wraps errors. Returns None for an
  error of absl about another flag.
  """
  file, _, preset = config.partition(":")
  message = str(error)
  if isinstance(error, AttributeError) and "has no attribute 'get_config'" in message:
    return f"flag --config={config}: {file} defines no get_config(), as configs/default.py does"
  while error:
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == Path(file)]
    if lines and isinstance(error, KeyError) and error.args == (preset,):
      return f"flag --config={config}: {file} has no preset {preset!r}: {CHOICES}"
    text = " ".join(str(error).split())
    # The file of a SyntaxError was not executed, so no frame is in it.
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename) == Path(file):
      lines, text = [error.lineno], error.msg
    if isinstance(error, SystemExit):
      reason = f": {text}" if isinstance(error.code, str) else ""
      text = f"a config file must not end the program{reason}"
    if lines:
      return f"{file} line {lines[-1]}: {type(error).__name__}: {text:.300}{import_hint(error)}"
    # No line of the file was reached: the file cannot be opened, for example.
    if error.__context__ is None and not isinstance(error, flags.Error):
      return f"{file} cannot be read as a config: {type(error).__name__}: {text:.300}"
    error = error.__context__
  return None
