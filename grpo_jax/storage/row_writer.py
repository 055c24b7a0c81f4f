"""Writes the rows of a run to metrics.jsonl, completions/, TensorBoard's event files and trackers.

metrics.jsonl is the record of the run. Each line is a strict JSON object with `step` first. When
`RowWriter.write` returns, the row is in metrics.jsonl and in the event files.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import logging
from pathlib import Path
import re
from typing import Any, Protocol

from grpo_jax.storage.json_files import AppendedFile, json_line, parse_rows, plain, replace_file
from grpo_jax.storage.tensorboard import Events, completions_as_markdown


class Receiver(Protocol):
  """An object that receives the rows in addition to the files. Its methods raise nothing."""

  def log(self, step: int, values: Mapping[str, float]) -> None:
    """Receives the finite numbers of a new row, or numbers to add to the last row."""

  def completions(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
    """Receives the completions of a step."""

  def close(self, has_failed: bool = False) -> None:
    """Is called at the end of the run. `has_failed`: the run ends with an error."""


class RowWriter:
  """Appends rows to the files in a run's folder. Only one process may write."""

  def __init__(
    self,
    workdir: str | Path,
    start_step: int,
    tensorboard: bool,
    receivers: Sequence[Receiver] = (),
    warn: Callable[[str], None] = logging.warning,
  ) -> None:
    """Opens the files, and removes the rows of steps after `start_step`, which will run again.

    If no checkpoint was restored, all steps run again. Then the old files are renamed.

    Args:
      workdir: The folder, which must exist.
      start_step: The step of the restored checkpoint, or -1 if none was restored.
      tensorboard: Whether to write event files.
      receivers: They receive the same rows as the event files.
      warn: warn(line) is called if the run starts over or if rows are missing.

    Raises:
      ConfigError: metrics.jsonl is damaged.
      OSError: The folder cannot be written.
    """
    workdir = Path(workdir)
    self._completions = workdir / "completions"
    if start_step < 0:
      _keep_what_was_there(workdir, warn)
    self._path = workdir / "metrics.jsonl"
    self._last_step = _truncate_metrics(self._path, start_step)
    _remove_completions(self._completions, start_step)
    self._file = AppendedFile(self._path)
    self._events = Events(workdir, start_step) if tensorboard else None
    self._receivers = receivers
    self._warn = warn

  def warn_of_missing_rows(self, start_step: int, every: int) -> None:
    """Warns if metrics.jsonl ends too early.

    Args:
      start_step: The step of the restored checkpoint, or -1 if none was restored.
      every: The largest number of steps from one row to the next.
    """
    last_step = self._last_step or 0
    if start_step - last_step >= every:
      self._warn(
        f"metrics.jsonl ends at step {last_step} and the checkpoint is of step {start_step}:"
        " the rows between them are missing"
      )

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Writes one row. Once `write` has returned, metrics.jsonl keeps it even after a kill.

    Raises:
      ValueError: `step` is not later than the last step.
      OSError: The row cannot be written. metrics.jsonl then holds no part of it.
    """
    if self._last_step is not None and step <= self._last_step:
      raise ValueError(
        f"step {step} is not later than step {self._last_step}, which is written already"
      )
    self._file.append(json_line({"step": step, **values}))
    self._last_step = step
    self._show(step, values)

  def lacks_evaluation(self, step: int) -> bool:
    """Whether the last row belongs to `step` and has no metrics of an evaluation."""
    if self._last_step != step:
      return False
    last_row, _ = parse_rows(self._path)[-1]
    return not any(name.startswith("eval/") for name in last_row)

  def add_to_last(self, values: Mapping[str, float]) -> None:
    """Adds values to the last row of metrics.jsonl."""
    rows = parse_rows(self._path)
    last_row, _ = rows.pop()
    self._file.close()
    content = b"".join(line for _, line in rows)
    replace_file(self._path, content + json_line(last_row | dict(values)))
    self._file = AppendedFile(self._path)
    self._show(last_row["step"], values)

  def completions(self, step: int, rows: list[dict[str, Any]]) -> None:
    """Writes completions to completions/STEP.jsonl atomically, and to the other outputs."""
    self._completions.mkdir(exist_ok=True)
    content = b"".join(json_line(row) for row in rows)
    replace_file(self._completions / f"{step:06d}.jsonl", content)
    if self._events is not None:
      self._events.write_text(step, "completions", completions_as_markdown(rows))
    for receiver in self._receivers:
      receiver.completions(step, rows)

  def close(self, has_failed: bool = False) -> None:
    """Closes the files and the receivers, all of them even if one raises an error."""
    with contextlib.ExitStack() as stack:  # it calls in reverse order: the files close first
      for receiver in reversed(self._receivers):
        stack.callback(receiver.close, has_failed)
      if self._events is not None:
        stack.callback(self._events.close)
      stack.callback(self._file.close)

  def _show(self, step: int, values: Mapping[str, float]) -> None:
    """Sends the finite values to TensorBoard and to the receivers."""
    finite = {name: value for name, value in plain(values).items() if value is not None}
    if self._events is not None:
      self._events.write(step, finite)
    for receiver in self._receivers:
      receiver.log(step, finite)


def _keep_what_was_there(workdir: Path, warn: Callable[[str], None]) -> None:
  """Renames the files of a run that starts over: metrics.jsonl to metrics.jsonl.1, and so on."""
  metrics, completions = workdir / "metrics.jsonl", workdir / "completions"
  old = [completions] if any(completions.glob("[0-9]*.jsonl")) else []
  if metrics.exists() and metrics.stat().st_size:
    old.append(metrics)
  number = 1
  while any(path.with_name(f"{path.name}.{number}").exists() for path in (metrics, completions)):
    number += 1
  kept = [path.rename(path.with_name(f"{path.name}.{number}")).name for path in old]
  if kept:
    warn(f"{workdir} has no checkpoint: starting over; what was there is in {' and '.join(kept)}")


def _truncate_metrics(path: Path, start_step: int) -> int | None:
  """Removes rows after `start_step` and a partial row. Returns the last step left, or None."""
  if not path.exists():
    return None
  kept = [(row, line) for row, line in parse_rows(path) if row["step"] <= start_step]
  content = b"".join(line for _, line in kept)
  if content != path.read_bytes():
    replace_file(path, content)
  if not kept:
    return None
  last_row, _ = kept[-1]
  return last_row["step"]


def _remove_completions(folder: Path, start_step: int) -> None:
  """Removes the files of steps after `start_step` and partly written files, but no other files."""
  for path in folder.glob("*"):
    match = re.fullmatch(r"(\d{6,})\.jsonl(\.new)?", path.name)
    if match and (match[2] or int(match[1]) > start_step):
      path.unlink()
