"""Shows the progress of a run: a progress bar on a terminal, or occasional lines in a file."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
import contextlib
import re
import statistics
from time import monotonic
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column, Table
from rich.text import Text

from grpo_jax.console import notebook
from grpo_jax.console.text import shorten, visible, without_common_parts
from grpo_jax.progress import PROGRESS, Work, describe
from grpo_jax.timing import duration

_SECONDS_BETWEEN_LINES = 3.0
_SECONDS_BETWEEN_FRAMES = 0.1
_SECONDS_UNTIL_SAID = 2.0  # work that takes longer is named below the bar
_MAX_COMPLETIONS = 4  # the most rows of the table of completions
_STEPS_OF_AN_ESTIMATE = 50  # the number of recent steps that estimate the time of the next steps
_GRPO = "grpo"
_WARM_START = "warm start"
_EXAM = re.compile(r"eval/(\w+)/accuracy")
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

  On a terminal or in a notebook, this is a progress bar, and below it the work of the step that
  takes long. In a file or a pipe, it is a line every few seconds.
  """

  def __init__(
    self,
    total_steps: int,
    warm_start_steps: int = 0,
    console: Console | None = None,
    warm_steps_of_a_step: float = 1.0,
  ) -> None:
    """Prepares the output and prints nothing.

    Args:
      total_steps: The number of the run's last step, as `update` receives it.
      warm_start_steps: The number of the last warm-start step, or 0 without a warm start. It is the
        total of the bar during the warm start.
      console: The console to print to. None means stdout.
      warm_steps_of_a_step: The assumed time of a GRPO step, in warm-start steps. The time estimate
        uses it until the first GRPO step.
    """
    self._console = console or Console(highlight=False)
    self._total = total_steps
    self._ends = {_WARM_START: warm_start_steps, _GRPO: total_steps}
    self._last_accuracy: float | None = None
    self._clock = _Clock((total_steps - warm_start_steps) * warm_steps_of_a_step)
    self._progress = contextlib.ExitStack()  # from `_start` to `close`, PROGRESS calls `show`
    self._printed_at = self._drawn_at = -float("inf")
    self._bar: _Bar | notebook.Bar | None = None
    self._is_started = False
    in_notebook = notebook.is_running()
    if in_notebook or (self._console.is_terminal and not self._console.is_dumb_terminal):
      self._bar = notebook.Bar() if in_notebook else _make_bar(self._console, total_steps)
      self._task = self._bar.add_task("", total=total_steps, completed=0, text="")

  def start(self) -> None:
    """Does nothing, because the first step draws the bar."""

  def header(self, lines: Sequence[str]) -> None:
    """Prints the description of the run before its first step."""
    for line in lines:
      self.say(line)

  def update(self, step: int, metrics: Mapping[str, Any]) -> None:
    """Shows a finished step.

    A terminal shows every step. A file shows the first step, the last step, every step with an
    evaluation, and one of the other steps every few seconds.

    Args:
      step: The number of steps so far.
      metrics: The row of the step in metrics.jsonl.
    """
    now = monotonic()
    phase = _phase(metrics)
    end = self._ends[phase]
    seconds_left = self._clock.seconds_left(now, step, end, metrics)
    self._last_accuracy = metrics.get("eval/accuracy", self._last_accuracy)
    is_last = step >= self._total
    if self._bar is None:
      is_due = now - self._printed_at >= _SECONDS_BETWEEN_LINES
      if is_due or is_last or any(name.startswith("eval/") for name in metrics):
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
        self._start()
        self._bar.refresh()

  def show(self, works: Sequence[Work]) -> None:
    """Shows nested work, the outermost first, below the bar until other work replaces it."""
    assert self._bar is not None
    now = monotonic()
    if works and (self._bar.doing is not None or now - works[0].began > _SECONDS_UNTIL_SAID):
      doing = visible(describe(works, now))
      if doing != self._bar.doing:
        self._bar.doing = doing
        self._bar.refresh()

  def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints a table of the first few completions of a step. In a notebook, it replaces the last.

    The beginning and the end that all prompts share, such as a system message, are left out.

    Args:
      step: The step that sampled the completions.
      rows: Each has `prompt`, `completion`, `reward` (or None) and `length`, and perhaps `turns`.
    """
    # 24 cells are for the other columns and the gaps. A prompt gets a third of what remains.
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
      # About three lines of a cell.
      table.add_row(
        self._text(shorten(visible(prompt), 3 * prompt_width)),
        self._text(shorten(visible(_written(row)), 3 * completion_width)),
        "-" if row["reward"] is None else f"{row['reward']:.2f}",
        str(row["length"]),
      )
    if isinstance(self._bar, notebook.Bar):
      with self._console.capture() as captured:  # the bar shows the table below itself
        self._console.print(table)
      self._bar.update(self._task, below=captured.get())
    else:
      self._console.print(table)

  def say(self, text: str) -> None:
    """Prints one line, above the bar if there is one."""
    self._console.print(self._text(visible(text)), soft_wrap=True)

  def close(self) -> None:
    """Stops the bar. Its last state stays on the screen, and the cursor is shown again."""
    self._progress.close()
    if self._bar is not None:
      self._bar.doing = None
      self._bar.stop()

  def _start(self) -> None:
    """Starts to draw the bar, and to show long work below it."""
    self._bar.start()
    if not self._is_started:
      self._progress.enter_context(PROGRESS.shown_by(self))
    self._is_started = True

  def _fewer(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics for the short line of a bar, with the newest accuracy."""
    left_out = ("kl", "completions/mean_length")
    shown = {name: value for name, value in metrics.items() if name not in left_out}
    return shown if self._last_accuracy is None else shown | {"eval/accuracy": self._last_accuracy}

  def _text(self, text: str) -> Text:
    """A Text that is not parsed as markup, with "?" for characters that cannot be encoded."""
    encoding = self._console.encoding
    return Text(text.encode(encoding, "replace").decode(encoding))


class _Bar(Progress):
  """A progress bar and a line below it.

  Attributes:
    doing: The line, which names the work under way, or None for no line.
  """

  doing: str | None = None

  def get_renderables(self) -> Iterable[RenderableType]:
    """Yields the bar, and the line if there is one."""
    yield from super().get_renderables()
    if self.doing is not None:
      yield Text(self.doing, style="dim", no_wrap=True, overflow="ellipsis")


class _Clock:
  """Estimates the remaining time of the run.

  It multiplies the median time of a step, which steps that compile hardly change, and adds
  evaluations at their frequency so far. During the warm start, the time of GRPO is a guess.
  """

  def __init__(self, warm_steps_of_grpo: float) -> None:
    """`warm_steps_of_grpo` is the assumed time of all GRPO steps, in warm-start steps."""
    self._warm_steps_of_grpo = warm_steps_of_grpo
    self._phase = ""
    self._now, self._first, self._last = 0.0, 0, 0
    self._steps: deque[float] = deque(maxlen=_STEPS_OF_AN_ESTIMATE)
    self._evaluations: list[float] = []

  def seconds_left(
    self, now: float, step: int, end: int, metrics: Mapping[str, Any]
  ) -> float | None:
    """Records a step and estimates the remaining seconds. None if unknown, and at the end.

    The first step of a phase compiles, so its time is ignored. Step 0 is only an evaluation. `now`
    is the end of the step, `end` the last step of the phase, and `metrics` the row of the step.
    """
    phase = _phase(metrics)
    if step == 0:
      return None
    if phase != self._phase:
      self._phase, self._first = phase, step
      self._steps.clear()
      self._evaluations.clear()
    elif step > self._last:
      # Since the last row, log.every steps may have passed, but at most one evaluation.
      evaluation = metrics.get("time/evaluate") or 0.0
      self._steps.append(max(0.0, now - self._now - evaluation) / (step - self._last))
      self._evaluations += [evaluation] if evaluation else []
    self._now, self._last = now, step
    steps_left = end - step + (self._warm_steps_of_grpo if phase == _WARM_START else 0)
    if not self._steps or steps_left <= 0:
      return None
    a_step = statistics.median(self._steps)
    if self._evaluations:
      share = len(self._evaluations) / (step - self._first)  # evaluations for each step
      a_step += share * statistics.median(self._evaluations)
    return a_step * steps_left


def _make_bar(console: Console, total_steps: int) -> _Bar:
  widest_name = f"{_GRPO} {total_steps}/{total_steps}"
  name_column = Column(no_wrap=True, min_width=len(widest_name))
  return _Bar(
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
  """Formats the metrics of a step, such as ["reward 0.71", "left 2m10s"]."""
  # The KL is NaN if no token is in the loss. Only NaN differs from itself.
  found = {name: x for name, x in metrics.items() if x == x or name != "kl"}
  parts = [form.format(found[name]) for name, form in _FORMATS if found.get(name) is not None]
  exams = [_EXAM.fullmatch(name) for name in metrics]
  parts += [f"{exam[1]} {metrics[exam[0]]:.1%}" for exam in exams if exam]
  if metrics.get("warm_start/tokens") and metrics.get("time/step"):
    parts.append(f"{metrics['warm_start/tokens'] / metrics['time/step']:.0f} tok/s")
  if metrics.get("skipped_updates"):
    parts.append("update skipped: gradient not finite")
  if seconds_left is not None:
    about = "~" if _phase(metrics) == _WARM_START else ""  # the time of GRPO is still a guess
    parts.append(f"left {about}{duration(seconds_left)}")
  return parts


def _written(row: Mapping[str, Any]) -> str:
  """The text of a completion, or with an environment the texts of all turns with their roles."""
  turns = row.get("turns")
  if not turns:
    return row["completion"]
  return " ".join(f"[{turn['role']}] {turn['text']}" for turn in turns)
