"""A run's folder: creates it, checks whether a run may continue in it, and lists checkpoints."""

from collections.abc import Callable, Mapping
import json
from pathlib import Path
from typing import Any

from grpo_jax import files
from grpo_jax.settings import ConfigError
from grpo_jax.storage.bucket import COMMITTED, folder, is_bucket, reaching
from grpo_jax.storage.json_files import parse_rows, replace_file
from grpo_jax.storage.saved_config import as_json, check_same_run, read_values

LOCK_FILE = "run.lock"  # the file that grpo_jax/storage/lock.py locks
LAUNCH_FOLDER = "launch"  # where grpo_jax/around/launchers/ keep logs and scripts
# Files of a launcher, or of a run that was killed at its start, which a new folder may contain.
_OF_THE_START = {LOCK_FILE, LAUNCH_FOLDER, "config.json.new"}


def make_folder(workdir: Path) -> None:
  """Creates the folder of a run, if it does not exist.

  Raises:
    ConfigError: The path cannot be a folder, for example because it is a file.
    OSError: The disk cannot be written to.
  """
  if is_bucket(workdir):  # a bucket has no folders, only names of objects
    return
  try:
    workdir.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    if error.errno not in files.NO_FOLDER:
      raise
    raise ConfigError(f"--workdir={workdir} cannot be created: {error.strerror}") from error


def open_run(
  workdir: str | Path,
  config: Mapping[str, Any],
  complete: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> None:
  """Creates the folder, or checks that its run can continue with `config`. Stores the config.

  Args:
    workdir: The run's folder.
    config: The nested plain values of the run's config, from config.to_dict.
    complete: complete(values of an older config.json) -> the values with the keys that it lacks,
      set so that they reproduce the old behaviour. It removes no key, so that a file that is not a
      run's config is noticed. None adds no keys.

  Raises:
    ConfigError: The folder cannot be created, holds another run or other files, or is damaged.
  """
  workdir = folder(workdir)
  path = workdir / "config.json"
  config = as_json(config)
  make_folder(workdir)
  if path.exists():
    saved = read_values(path)
    old = as_json(complete(saved)) if complete else saved
    has_begun = any((workdir / name).exists() for name in ("metrics.jsonl", "checkpoints"))
    # A run that failed before it wrote metrics or a checkpoint may get another config. But a file
    # with other sections belongs to another program, and must not be overwritten.
    is_foreign = old.keys() != config.keys()
    if has_begun or is_foreign:
      check_same_run(path, old, config)
  elif any(entry.name not in _OF_THE_START for entry in workdir.iterdir()):
    raise ConfigError(f"--workdir={workdir} is not empty and has no config.json: name a new folder")
  for name in ("checkpoints", "completions"):
    if (workdir / name).exists() and not (workdir / name).is_dir():
      raise ConfigError(f"{workdir / name} is not a folder: move it away")
  if (workdir / "metrics.jsonl").exists():  # raises if it is damaged, before anything is written
    parse_rows(workdir / "metrics.jsonl")
  replace_file(path, json.dumps(config, indent=2) + "\n")


def saved_steps(directory: Path) -> list[int]:
  """The steps with complete checkpoints in this folder (damaged or not), in ascending order."""
  with reaching(directory):
    return sorted(int(path.name) for path in _numbered(directory) if _is_complete(path))


def unfinished(directory: Path) -> list[Path]:
  """The unfinished checkpoints in this folder, from saves that were killed or failed."""
  with reaching(directory):
    if is_bucket(directory):
      return [path for path in _numbered(directory) if not _is_complete(path)]
    return list(directory.glob("*.orbax-checkpoint-tmp*"))


def _numbered(directory: Path) -> list[Path]:
  if not directory.is_dir():
    return []
  return [path for path in directory.iterdir() if path.name.isdecimal()]


def _is_complete(path: Path) -> bool:
  """Whether orbax has finished the checkpoint. On a disk, unfinished ones have another name."""
  return not is_bucket(path) or (path / COMMITTED).exists()
