"""What a user sees of a run: a progress bar on a terminal, a line now and then in a file or a pipe."""

import sys
from time import monotonic
from typing import Any, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column, Table
from rich.text import Text

_SECONDS_BETWEEN_LINES = 3.0
_SECONDS_BETWEEN_FRAMES = 0.1
_SHOWN = 4  # completions
_GRPO = "grpo"


class Terminal:
  """One run's output. `total_steps` and `start_step` count as the steps given to `update` do."""

  def __init__(self, total_steps: int, start_step: int, console: Console | None = None):
    self._console = console or Console(highlight=False)
    self._total = total_steps
    self._accuracy = None
    self._clock = _Clock(total_steps)
    self._printed = self._drawn = -float("inf")
    self._bar = None
    if self._console.is_terminal and not self._console.is_dumb_terminal:
      name = Column(no_wrap=True, min_width=len(f"{_GRPO} {total_steps}/{total_steps}"))
      self._bar = Progress(
        TextColumn("{task.description}", style="bold", table_column=name),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[text]}", markup=False, table_column=Column(no_wrap=True)),
        console=self._console,
        auto_refresh=False,
        expand=True,
      )
      self._task = self._bar.add_task("", total=total_steps, completed=start_step, text="")

  def header(self, lines: Sequence[str]) -> None:
    """What is about to run, before the first step."""
    for line in lines:
      self.say(line)

  def update(self, step: int, metrics: Mapping[str, Any]) -> None:
    """Shows a finished step: each on a terminal; else the first, the last, those with an eval, and one in a while."""
    now = monotonic()
    phase = _phase(metrics)
    left = self._clock.left(now, step, phase)
    self._accuracy = metrics.get("eval/accuracy", self._accuracy)
    if self._bar is None:
      due = now - self._printed >= _SECONDS_BETWEEN_LINES
      if due or step >= self._total or "eval/accuracy" in metrics:
        self._printed = now
        name = [phase] if phase != _GRPO else []
        self.say("  ".join([f"step {step}/{self._total}", *name, *_parts(metrics, left)]))
    elif now - self._drawn >= _SECONDS_BETWEEN_FRAMES or step >= self._total:
      self._drawn = now
      shown = {k: v for k, v in metrics.items() if k not in ("kl", "completions/mean_length")}
      if self._accuracy is not None:
        shown["eval/accuracy"] = self._accuracy
      self._bar.update(
        self._task,
        description=f"{phase} {step}/{self._total}",
        completed=step,
        text="  ".join(_parts(shown, left)),
      )
      self._bar.start()
      self._bar.refresh()

  def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """A table of the first few; `rows` have prompt, completion, reward and length."""
    prompt_width = max(10, (self._console.width - 24) // 3)
    completion_width = max(10, self._console.width - 24 - prompt_width)
    table = Table(
      title=Text(f"completions of step {step}"),
      title_justify="left",
      box=box.SIMPLE_HEAD,
      pad_edge=False,
    )
    table.add_column("prompt", width=prompt_width, overflow="fold")
    table.add_column("completion", width=completion_width, overflow="fold")
    table.add_column("reward", justify="right", width=6)
    table.add_column("length", justify="right", width=6)
    for row in rows[:_SHOWN]:
      table.add_row(
        self._text(shorten(visible(row["prompt"]), 3 * prompt_width)),
        self._text(shorten(visible(row["completion"]), 3 * completion_width)),
        "-" if row["reward"] is None else f"{row['reward']:.2f}",
        str(row["length"]),
      )
    self._console.print(table)

  def say(self, text: str) -> None:
    """One line, above the bar if there is one."""
    self._console.print(self._text(text), soft_wrap=True)

  def close(self) -> None:
    """Leaves the last state of the bar on the screen, and the cursor as it was."""
    if self._bar is not None:
      self._bar.stop()

  def _text(self, text):
    """Never markup; what the stream cannot encode becomes a question mark."""
    encoding = self._console.encoding
    return Text(text.encode(encoding, "replace").decode(encoding))


class Loading:
  """How much of a checkpoint is read, on stderr: one changing line on a terminal, a line now and then in a file."""

  def __init__(self):
    self._shown = monotonic()

  def __call__(self, done: int, total: int) -> None:
    now, terminal = monotonic(), sys.stderr.isatty()
    if now - self._shown >= (_SECONDS_BETWEEN_FRAMES if terminal else _SECONDS_BETWEEN_LINES) or (
      terminal and done == total
    ):
      self._shown = now
      text = f"loading weights: {done / 1e9:.1f} of {total / 1e9:.1f} GB"
      ends = ("\r", "\033[K" if done < total else "\r\033[K") if terminal else ("", "\n")
      print(
        ends[0] + text * (done < total or not terminal), end=ends[1], file=sys.stderr, flush=True
      )


def visible(text: str) -> str:
  """Printable characters only, so that a model's text cannot steer a terminal: newlines ↵, controls escaped."""
  return "".join(
    "↵" if c == "\n" else c if c.isprintable() else c.encode("unicode_escape").decode()
    for c in text
  )


def shorten(text: str, length: int) -> str:
  """At most `length` characters: the middle of a longer text goes, since its end holds the answer."""
  if len(text) <= length:
    return text
  head = (length - 3) // 2
  return f"{text[:head].rstrip()} … {text[len(text) - (length - 3 - head) :].lstrip()}"


class _Clock:
  """The time left, by the mean time of the steps of this phase but the first, which compiles."""

  def __init__(self, total):
    self._total = total
    self._phase = None

  def left(self, now, step, phase):
    """Seconds; None while unknown, at the end, and in the warm start, whose pace is not that of the steps after it."""
    if phase != self._phase:
      self._phase, self._first_time, self._first_step = phase, now, step
    if phase != _GRPO or step <= self._first_step or step >= self._total:
      return None
    return (now - self._first_time) / (step - self._first_step) * (self._total - step)


def _phase(metrics):
  return "warm start" if "warm_start/loss" in metrics else _GRPO


_FORMATS = (
  ("warm_start/loss", "loss {:.3f}"),
  ("reward", "reward {:.2f}"),
  ("eval/accuracy", "accuracy {:.1%}"),
  ("kl", "kl {:.2g}"),
  ("completions/mean_length", "len {:.1f}"),
  ("perf/tokens_per_second", "{:.0f} tok/s"),
)


def _parts(metrics, left):
  parts = [form.format(metrics[name]) for name, form in _FORMATS if metrics.get(name) is not None]
  if metrics.get("skipped_updates"):
    parts.append("update skipped: gradient not finite")
  return parts + ([] if left is None else [f"left {_duration(left)}"])


def _duration(seconds):
  """45s, 2m10s, 3h05m, 2d04h."""
  s = round(seconds)
  if s < 60:
    return f"{s}s"
  if s < 3600:
    return f"{s // 60}m{s % 60:02d}s"
  if s < 86400:
    return f"{s // 3600}h{s % 3600 // 60:02d}m"
  return f"{s // 86400}d{s % 86400 // 3600:02d}h"
