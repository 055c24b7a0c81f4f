"""Reads the files of a run, which may still be running."""

import json
from numbers import Integral
from pathlib import Path
import re
from typing import Any

from grpo_jax import files
from grpo_jax.config import Config, from_dict, to_dict
from grpo_jax.settings import ConfigError, shown
from grpo_jax.storage.bucket import folder, reaching
from grpo_jax.storage.json_files import parse_rows
from grpo_jax.storage.saved_config import flat, read_values

Row = dict[str, Any]
_NEW_DEFAULTS = ("optimizer.b2",)  # keys that earlier versions had with another default


def read_config(workdir: str | Path) -> Config:
  """Reads the config of a run from its folder.

  Raises:
    ConfigError: config.json is missing or damaged.
  """
  file = folder(workdir) / "config.json"
  with reaching(workdir, ConfigError):
    if not file.is_file():
      raise ConfigError(f"workdir {workdir} has no config.json: it is not the folder of a run")
    values = read_values(file)
  try:
    return from_dict(values, saved=True)
  except ConfigError as error:
    raise ConfigError(f"{file} cannot be read: {error}") from None


def as_begun(config: Config, workdir: str | Path) -> Config:
  """Adapts the config of a run to the version of grpo_jax that began the run.

  If a setting did not exist in that version, or had another default, and `config` has the default,
  the setting gets the value that reproduces the old behaviour. So the same command can continue the
  run. If config.json cannot be read, `config` is returned unchanged, because another run may be
  writing it. `open_run` reads it again under the folder's lock, and reports errors.

  Args:
    config: The config with which the run begins or continues.
    workdir: The run's folder, which need not exist.
  """
  file = folder(workdir) / "config.json"
  try:
    with reaching(workdir, ConfigError):
      saved = flat(read_values(file)) if file.is_file() else None
  except ConfigError:
    saved = None
  if saved is None:
    return config
  # The values that reproduce the behaviour of versions without the keys.
  earlier = flat(to_dict(from_dict({}, saved=True)))
  default, current = flat(to_dict(Config())), flat(to_dict(config))
  changes = {}
  for key, value in earlier.items():
    had_old_default = key in _NEW_DEFAULTS and key in saved and saved[key] == value
    if (key not in saved or had_old_default) and value != default[key] == current[key]:
      changes[key] = value
  return config.replace(changes)


def read_metrics(workdir: str | Path) -> list[Row]:
  """Reads the rows of a run's metrics.jsonl, in the order of their steps.

  Returns:
    Dicts from the names of metrics to numbers, with `step` first. A number that is not finite is
    None. Rows differ in their names: only some have metrics of an evaluation, and those of the warm
    start have other metrics.

  Raises:
    ConfigError: The file does not exist or is damaged.
  """
  path = folder(workdir) / "metrics.jsonl"
  with reaching(workdir, ConfigError):
    if not path.is_file():
      raise ConfigError(f"{path} does not exist: is {workdir} a run's folder?")
    return [row for row, _ in parse_rows(path)]


def completion_steps(workdir: str | Path) -> list[int]:
  """The steps whose completions a run saved (see `log.completions_every`), in ascending order."""
  names = (path.name for path in (folder(workdir) / "completions").glob("*.jsonl"))
  return sorted(int(name[:-6]) for name in names if re.fullmatch(r"\d{6,}\.jsonl", name))


def read_completions(workdir: str | Path, step: int | None = None) -> list[Row]:
  """Reads the completions that a run sampled in a step.

  Args:
    workdir: The run's folder.
    step: One of `completion_steps`. None means the newest one.

  Returns:
    One dict for each completion, with `prompt`, `completion`, `reward` (None if no function scored
    it), `rewards/NAME`, `advantage`, `length` in tokens, `stopped_by`, `prompt_ids`,
    `completion_ids` and `logprobs`. The completions of a group are consecutive.

  Raises:
    ConfigError: The step was not saved, or its file is damaged.
  """
  steps = completion_steps(workdir)
  if not steps:
    raise ConfigError(
      f"{workdir} has no completions yet: log.completions_every says after how many steps they are"
      " saved"
    )
  step = steps[-1] if step is None else step
  if not isinstance(step, Integral) or isinstance(step, bool) or step not in steps:
    saved = ", ".join(map(str, steps[-20:]))
    more = "..., " if len(steps) > 20 else ""
    raise ConfigError(f"{workdir} has no completions of step {shown(step)}, but of {more}{saved}")
  path = folder(workdir) / "completions" / f"{step:06d}.jsonl"
  try:
    return [json.loads(line) for line in files.read_bytes(path).splitlines()]
  except (OSError, ValueError) as error:
    raise ConfigError(f"{path} cannot be read ({error}): move it away") from error
