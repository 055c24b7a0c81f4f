"""Prints the progress of a run as JSON, one object a line, for clusters that collect output."""

from collections.abc import Mapping, Sequence
import contextlib
import datetime
import json
from typing import Any

from rich.console import Console

from grpo_jax.progress import PROGRESS, Lines, Work
from grpo_jax.storage.json_files import plain

_WARNING = "warning: "


class JsonConsole:
  """Prints the same messages as `Terminal`, and every row of metrics.jsonl.

  Each object has `time` in UTC and `event`: "header", "step", "progress", "warning" or "message". A
  step has the numbers of its row. The others have a `text`. A "progress" event names work that
  takes long, and its counts `done` and `total`, which are 0 if the work is not counted. Completions
  are not printed, because completions/ has them.
  """

  def __init__(self, console: Console) -> None:
    """`console` prints the lines."""
    self._console, self._shown = console, contextlib.ExitStack()

  def start(self) -> None:
    """Starts to print "progress" events, until `close`."""
    self._shown.enter_context(PROGRESS.shown_by(Lines(self._progress)))

  def header(self, lines: Sequence[str]) -> None:
    """Prints the description of the run. A line that begins with "warning: " is a warning."""
    for line in lines:
      is_warning = line.startswith(_WARNING)
      self._print("warning" if is_warning else "header", {"text": line.removeprefix(_WARNING)})

  def update(self, step: int, metrics: Mapping[str, Any]) -> None:
    """Prints the row of a step. NaN and infinity become null."""
    self._print("step", {"step": step, **plain(metrics)})

  def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints nothing."""

  def say(self, text: str) -> None:
    """Prints a line of text, as a message or a warning."""
    is_warning = text.startswith(_WARNING)
    self._print("warning" if is_warning else "message", {"text": text.removeprefix(_WARNING)})

  def close(self) -> None:
    """Ends the "progress" events."""
    self._shown.close()

  def _progress(self, text: str, works: Sequence[Work]) -> None:
    counted = [work for work in works if work.total > 1]
    done, total = (counted[-1].done, counted[-1].total) if counted else (0, 0)
    self._print("progress", {"text": text, "done": done, "total": total})

  def _print(self, event: str, values: Mapping[str, Any]) -> None:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    line = json.dumps({"time": now, "event": event, **values})
    self._console.out(line, highlight=False)  # neither wrapped nor read as markup
    self._console.file.flush()
