"""Finds out from a run's folder how far the run is."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from grpo_jax.storage import lock
from grpo_jax.storage.saved_config import read_values

_ACCURACY = "eval/accuracy"


@dataclasses.dataclass(frozen=True)
class RunProgress:
  """How far a run is.

  Attributes:
    step: The last step in its metrics, 0 without any.
    last_step: The number of steps of the finished run, warm start included. None if the run has no
      config.json yet.
    accuracy: The newest held-out accuracy, in [0, 1]. None before the first evaluation.
    holder: The process that trains the run now, such as "process 7 on HOST since ...", or "".
    is_finished: Whether all work of the run is done and saved.
  """

  step: int
  last_step: int | None
  accuracy: float | None
  holder: str
  is_finished: bool

  def __str__(self) -> str:
    if self.is_finished:
      return "finished"
    at = f"at {self.step} of {self.last_step}"
    if self.holder:
      return f"running, {at}" if self.last_step is not None else "starting"
    return at if self.step else "not started"


def progress(workdir: str | Path, last_step: int | None = None) -> RunProgress:
  """Reads how far a run is. The folder need not exist.

  Args:
    workdir: The folder of a run.
    last_step: The number of steps of the finished run. None means the number in its config.json.

  Raises:
    ConfigError: config.json is damaged.
  """
  folder = Path(workdir)
  holder = lock.holder(folder)
  config = read_values(folder / "config.json") if (folder / "config.json").is_file() else {}
  if last_step is None and config:
    last_step = config.get("steps", 0) + config.get("warm_start", {}).get("steps", 0)
  lines = _rows(folder / "metrics.jsonl")
  newest = _newest(lines, "step")
  step = newest.get("step", 0)
  # With eval.every, the last step is evaluated: on a test split, on exams (eval/EXAM/...) or both.
  has_evaluation = any(name.startswith("eval/") for name in newest)
  is_evaluated = not config.get("eval", {}).get("every") or has_evaluation
  is_finished = (
    not holder
    and last_step is not None
    and step >= last_step
    and is_evaluated  # if the last evaluation failed, the next start repeats it
    and _newest_checkpoint(folder / "checkpoints") >= last_step
  )
  accuracy = _newest(lines, _ACCURACY).get(_ACCURACY)
  return RunProgress(step, last_step, accuracy, holder, is_finished)


def _rows(path: Path) -> list[bytes]:
  """The lines of metrics.jsonl, [] if it cannot be read. The last line may be incomplete."""
  try:
    return path.read_bytes().split(b"\n")
  except OSError:
    return []


def _newest(rows: list[bytes], key: str) -> dict[str, Any]:
  """The last row with a value for `key`, or {}. Parses few rows, because files can be long."""
  for line in reversed(rows):
    if f'"{key}"'.encode() in line:
      try:
        row = json.loads(line)
      except ValueError:  # incomplete or damaged; the run reports damaged lines when it resumes
        continue
      if row.get(key) is not None:
        return row
  return {}


def _newest_checkpoint(folder: Path) -> int:
  """The step of the newest checkpoint, -1 without any."""
  if not folder.is_dir():
    return -1
  return max((int(path.name) for path in folder.iterdir() if path.name.isdecimal()), default=-1)
