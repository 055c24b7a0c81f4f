"""What the user sees of a run: a progress bar on a terminal, or occasional lines in a file."""

from collections import deque
from collections.abc import Mapping, Sequence
import statistics
import sys
from time import monotonic
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column, Table
from rich.text import Text

from grpo_jax.console import notebook
from grpo_jax.console.text import shorten, visible, without_common_parts

_SECONDS_BETWEEN_LINES = 3.0
_SECONDS_BETWEEN_FRAMES = 0.1
_MAX_COMPLETIONS = 4
_STEPS_OF_AN_ESTIMATE = 50  # the newest steps tell how long the next will take
_GRPO = "grpo"
_WARM_START = "warm start"
_FORMATS = (
  ("warm_start/loss", "loss {:.3f}"),
  ("reward", "reward {:.2f}"),
  ("eval/accuracy", "accuracy {:.1%}"),
  ("kl", "kl {:.2g}"),
  ("completions/mean_length", "len {:.1f}"),
  ("perf/tokens_per_second", "{:.0f} tok/s"),
)


class Terminal:
  """The output of one run.

  On a terminal or in a notebook it is a progress bar. In a file or a pipe it is a line every few
  seconds.
  """

  def __init__(
    self, total_steps: int, warm_start_steps: int = 0, console: Console | None = None
  ) -> None:
    """Prints nothing yet.

    Args:
      total_steps: The last step of the run, in the counting of `update`.
      warm_start_steps: The last step of its warm start, 0 without one. The warm start is counted
        to this step, and GRPO to the last.
      console: Where to print. None means stdout.
    """
    self._console = console or Console(highlight=False)
    self._total = total_steps
    self._ends = {_WARM_START: warm_start_steps, _GRPO: total_steps}
    self._last_accuracy: float | None = None
    self._clock = _Clock()
    self._printed_at = self._drawn_at = -float("inf")
    self._bar: Progress | notebook.Bar | None = None
    in_notebook = notebook.is_running()
    if in_notebook or (self._console.is_terminal and not self._console.is_dumb_terminal):
      self._bar = notebook.Bar() if in_notebook else _make_bar(self._console, total_steps)
      self._task = self._bar.add_task("", total=total_steps, completed=0, text="")

  def header(self, lines: Sequence[str]) -> None:
    """Prints what the run is about to do, before its first step."""
    for line in lines:
      self.say(line)

  def update(self, step: int, metrics: Mapping[str, Any]) -> None:
    """Shows a finished step.

    A terminal shows every step. A file gets the first step, the last one, every step with an
    evaluation, and otherwise one every few seconds.

    Args:
      step: The number of steps so far.
      metrics: The step's row of metrics.jsonl.
    """
    now = monotonic()
    phase = _phase(metrics)
    end = self._ends[phase]
    seconds_left = self._clock.seconds_left(now, step, end, metrics)
    self._last_accuracy = metrics.get("eval/accuracy", self._last_accuracy)
    is_last = step >= self._total
    if self._bar is None:
      is_due = now - self._printed_at >= _SECONDS_BETWEEN_LINES
      if is_due or is_last or "eval/accuracy" in metrics:
        self._printed_at = now
        name = "step" if phase == _GRPO else phase
        self.say("  ".join([f"{name} {step}/{end}", *step_parts(metrics, seconds_left)]))
    else:
      self._bar.update(
        self._task,
        description=f"{phase} {step}/{end}",
        completed=step,
        total=end,
        text="  ".join(step_parts(self._fewer(metrics), seconds_left)),
      )
      if now - self._drawn_at >= _SECONDS_BETWEEN_FRAMES or is_last:
        self._drawn_at = now
        self._bar.start()
        self._bar.refresh()

  def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints a table of the first few completions of a step. A notebook shows the newest table.

    What all prompts of the step share, such as a system message, is left out.

    Args:
      step: The step that sampled them.
      rows: Each has a prompt, a completion, a reward (None if there is none) and a length.
    """
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
    prompts = without_common_parts([row["prompt"] for row in rows])
    for prompt, row in list(zip(prompts, rows))[:_MAX_COMPLETIONS]:
      table.add_row(
        self._text(shorten(visible(prompt), 3 * prompt_width)),
        self._text(shorten(visible(_written(row)), 3 * completion_width)),
        "-" if row["reward"] is None else f"{row['reward']:.2f}",
        str(row["length"]),
      )
    if isinstance(self._bar, notebook.Bar):
      with self._console.capture() as captured:
        self._console.print(table)
      self._bar.update(self._task, below=captured.get())
    else:
      self._console.print(table)

  def say(self, text: str) -> None:
    """Prints one line, above the bar if there is one."""
    self._console.print(self._text(visible(text)), soft_wrap=True)

  def close(self) -> None:
    """Leaves the last state of the bar on the screen, and the cursor as it was."""
    if self._bar is not None:
      self._bar.stop()

  def _fewer(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """What a line with a bar has room for, with the last accuracy."""
    left_out = ("kl", "completions/mean_length")
    shown = {name: value for name, value in metrics.items() if name not in left_out}
    return shown if self._last_accuracy is None else shown | {"eval/accuracy": self._last_accuracy}

  def _text(self, text: str) -> Text:
    """Text that is never read as markup, with "?" for what the stream cannot encode."""
    encoding = self._console.encoding
    return Text(text.encode(encoding, "replace").decode(encoding))


class Loading:
  """Shows on stderr how much of a checkpoint is read.

  On a terminal one line changes. A file gets a line every few seconds.
  """

  def __init__(self) -> None:
    self._shown_at = monotonic()

  def __call__(self, done: int, total: int) -> None:
    """Shows that `done` of `total` bytes are read."""
    now = monotonic()
    is_terminal = sys.stderr.isatty()
    is_finished = done >= total
    interval = _SECONDS_BETWEEN_FRAMES if is_terminal else _SECONDS_BETWEEN_LINES
    if now - self._shown_at < interval and not (is_terminal and is_finished):
      return
    self._shown_at = now
    text = f"loading weights: {done / 1e9:.1f} of {total / 1e9:.1f} GB"
    if not is_terminal:
      output = f"{text}\n"
    elif is_finished:
      output = "\r\033[K"
    else:
      output = f"\r{text}\033[K"
    print(output, end="", file=sys.stderr, flush=True)


class _Clock:
  """Estimates the time that is left of a phase: the warm start, or GRPO.

  It counts the median time of a step, so that steps that compile do not matter, and the
  evaluations as often as they came so far.
  """

  def __init__(self) -> None:
    self._phase = ""
    self._now, self._first, self._last = 0.0, 0, 0
    self._steps: deque[float] = deque(maxlen=_STEPS_OF_AN_ESTIMATE)
    self._evaluations: list[float] = []

  def seconds_left(
    self, now: float, step: int, end: int, metrics: Mapping[str, Any]
  ) -> float | None:
    """None while it is unknown, and at the end.

    The first step of a phase compiles, so it is not counted. Step 0 is an evaluation alone.
    """
    phase = _phase(metrics)
    if step == 0:
      return None
    if phase != self._phase:
      self._phase, self._first = phase, step
      self._steps.clear()
      self._evaluations.clear()
    elif step > self._last:
      evaluation = metrics.get("time/evaluate") or 0.0
      self._steps.append(max(0.0, now - self._now - evaluation) / (step - self._last))
      self._evaluations += [evaluation] if evaluation else []
    self._now, self._last = now, step
    if not self._steps or step >= end:
      return None
    a_step = statistics.median(self._steps)
    if self._evaluations:
      share = len(self._evaluations) / (step - self._first)
      a_step += share * statistics.median(self._evaluations)
    return a_step * (end - step)


def _make_bar(console: Console, total_steps: int) -> Progress:
  widest_name = f"{_GRPO} {total_steps}/{total_steps}"
  name_column = Column(no_wrap=True, min_width=len(widest_name))
  return Progress(
    TextColumn("{task.description}", style="bold", table_column=name_column),
    BarColumn(bar_width=None),
    TextColumn("{task.fields[text]}", markup=False, table_column=Column(no_wrap=True)),
    console=console,
    auto_refresh=False,
    expand=True,
  )


def _phase(metrics: Mapping[str, Any]) -> str:
  return _WARM_START if "warm_start/loss" in metrics else _GRPO


def step_parts(metrics: Mapping[str, Any], seconds_left: float | None) -> list[str]:
  """The parts of a step's line, such as ["reward 0.71", "left 2m10s"]."""
  # Without a token in the loss there is no KL.
  found = {name: x for name, x in metrics.items() if x == x or name != "kl"}
  parts = [form.format(found[name]) for name, form in _FORMATS if found.get(name) is not None]
  if metrics.get("warm_start/tokens") and metrics.get("time/step"):
    parts.append(f"{metrics['warm_start/tokens'] / metrics['time/step']:.0f} tok/s")
  if metrics.get("skipped_updates"):
    parts.append("update skipped: gradient not finite")
  if seconds_left is not None:
    parts.append(f"left {duration(seconds_left)}")
  return parts


def duration(seconds: float) -> str:
  """A duration in two units at most: 45s, 2m10s, 3h05m, 2d04h."""
  s = round(seconds)
  if s < 60:
    return f"{s}s"
  if s < 3600:
    return f"{s // 60}m{s % 60:02d}s"
  if s < 86400:
    return f"{s // 3600}h{s % 3600 // 60:02d}m"
  return f"{s // 86400}d{s % 86400 // 3600:02d}h"


def _written(row: Mapping[str, Any]) -> str:
  """What a completion says: with an environment, all its turns."""
  turns = row.get("turns")
  if not turns:
    return row["completion"]
  return " ".join(f"[{turn['role']}] {turn['text']}" for turn in turns)
