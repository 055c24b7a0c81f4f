"""What takes long is said: a terminal has a line that changes, and a file gets one now and then."""

import io
import json
import os
from pathlib import Path
import re
import sys
import threading
import time

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from experiments.silences import record
from grpo_jax import progress
from grpo_jax.console import line as line_lib
from grpo_jax.console import terminal
from grpo_jax.console.json_console import JsonConsole
from grpo_jax.console.line import Above, Line, fitting
from grpo_jax.console.terminal import Terminal
from grpo_jax.progress import PROGRESS, Lines, Progress, Work, describe, doing
from grpo_jax.run import compilations

ROOT = Path(__file__).parents[1]


@pytest.fixture
def clock(monkeypatch):
  """A list of one number, the time in seconds. The test sets it."""
  now = [0.0]
  monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
  monkeypatch.setattr(terminal, "monotonic", lambda: now[0])
  return now


@pytest.fixture
def quick(monkeypatch):
  """Looks are made at once."""
  monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LOOKS", 0.01)
  monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.02)


class Recorder:
  """A `Display` that keeps the texts."""

  def __init__(self):
    self.texts = []

  def show(self, works):
    self.texts.append(": ".join(work.text for work in works))


def work(what, total=0, unit="", is_routine=False):
  return Work(what, total, unit, is_routine=is_routine, is_once=what.startswith("compiling"))


def test_a_line_says_what_is_done_and_how_far_it_is_and_what_is_left(clock):
  step, sampling = work("step 1"), work("sampling", 512, "completions")
  assert describe([step, sampling], 0.9) == "step 1: sampling 0 of 512 completions"
  assert describe([step, sampling], 20) == "step 1: sampling 0 of 512 completions (20s)"
  sampling.advance(128)
  text = "step 1: sampling 128 of 512 completions (20s, about 1m00s left)"
  assert describe([step, sampling], 20.0) == text
  clock[0] = 14.0
  compiling = work("compiling chunk")
  text = "step 1: sampling 128 of 512 completions: compiling chunk (6s, about 42s left)"
  assert describe([step, sampling, compiling], 20.0) == text
  sampling.once = 16.0  # what was compiled does not come again
  assert describe([sampling], 20.0).endswith("(20s, about 12s left)")
  sampling.reach(600)
  assert describe([sampling], 20.0) == "sampling 512 of 512 completions (20s)"
  assert work("updating", 1, "minibatches").text == "updating"


def told(clock, times):
  """When lines are printed, of works that are looked at at these times: (time, works)."""
  found = []
  lines = Lines(lambda text, works: found.append(clock[0]))
  for clock[0], works in times:
    lines.show(works)
  return found


def test_a_log_gets_a_line_every_few_seconds_and_later_every_minute(clock):
  whole = work("compiling")
  found = told(clock, [(t / 5, [whole]) for t in range(5 * 600)])
  assert found[:3] == [8.0, 16.0, 24.0] and 14 <= sum(t <= 120 for t in found) <= 15
  gaps = [b - a for a, b in zip(found, found[1:])]
  assert max(gaps) <= 60.2 and min(gap for gap, t in zip(gaps, found) if t > 120) >= 60


def test_short_works_one_after_the_other_are_not_silent_together(clock):
  times = []
  for number in range(6):
    clock[0] = 5.0 * number
    one = work(f"work {number}")
    times += [(clock[0] + t, [one]) for t in (0.2, 2.5, 4.8)] + [(clock[0] + 4.9, ())]
  assert max(b - a for a, b in zip(told(clock, times), told(clock, times)[1:])) <= 10.5
  assert len(told(clock, times)) == 3


def test_a_log_hears_of_a_step_like_those_before_it_after_a_minute(clock):
  times = []
  for number in range(3):
    clock[0] = 50.0 * number
    step = work(f"step {number}", is_routine=True)
    times += [(clock[0] + t, [step]) for t in range(1, 50)] + [(clock[0] + 50, ())]
  assert not told(clock, times)
  clock[0] = 1000.0
  step = work("step", is_routine=True)
  assert told(clock, [(1000.0 + t, [step]) for t in range(1, 100)]) == [1060.0]


def test_parts_are_shown_with_their_whole_and_what_other_threads_do_is_not(quick):
  all_work, shown = Progress(), Recorder()
  with all_work.shown_by(shown), all_work.doing("whole"):
    with all_work.doing("part", 4, "rows") as part:
      part.advance(3)
      other = list[Work]()
      thread = threading.Thread(target=lambda: other.append(all_work.begin("something else")))
      thread.start()
      thread.join()
      all_work.show_now()
      assert shown.texts[-1] == "whole: part 3 of 4 rows"
      all_work.end(other[0])
    with pytest.raises(KeyError), all_work.doing("fails"):
      raise KeyError
    all_work.show_now()
    assert shown.texts[-1] == "whole"
  assert shown.texts[-1] == ""  # nothing is done any more


def test_nothing_is_left_when_nothing_is_done(quick, capsys):
  before = threading.active_count()
  with doing("waiting for the rain"):
    time.sleep(0.3)
    assert threading.active_count() == before + 1
  assert threading.active_count() == before  # a process that forks has no other threads
  assert capsys.readouterr().err.splitlines()[0] == "waiting for the rain"


def test_a_fork_knows_nothing_of_what_its_process_did(quick):
  with doing("something that the fork does not do"):
    child = os.fork() if hasattr(os, "fork") else 0
    if child == 0:
      is_right = not PROGRESS._works
      with doing("something else"):
        time.sleep(0.05)
      os._exit(0 if is_right else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_what_jax_compiles_is_said(quick):
  compilations.tell()
  compilations.tell()
  shown = Recorder()

  def slow_to_compile(x):
    for _ in range(150):
      x = jnp.sin(x @ x)
    return x

  with PROGRESS.shown_by(shown), doing("step 1") as step:
    jax.jit(slow_to_compile)(jnp.ones((32, 32)))
  assert "step 1: compiling slow_to_compile" in shown.texts
  assert not shown.texts[-1] and 0 < step.once < 60


class Screen(io.StringIO):
  """A terminal that keeps what is written to it."""

  def isatty(self):
    return True

  def lines(self):
    """What is to be read. A line that is drawn again replaces itself."""
    lines = [one.split("\r")[-1] for one in self.getvalue().split("\n")]
    return [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", one) for one in lines]


def test_what_is_printed_goes_above_the_line(clock):
  screen = Screen()
  line = Line(screen)
  out, err = Above(screen, line), Above(screen, line)
  works = [work("evaluating", 192, "problems")]
  line.show(works)
  line.show(works)
  assert screen.getvalue() == "\revaluating 0 of 192 problems\x1b[K"
  print("a warning", file=err)
  assert screen.lines() == ["a warning", ""]
  works[0].advance(64)
  line.show(works)
  assert screen.lines() == ["a warning", "evaluating 64 of 192 problems"]
  print("a question? ", end="", file=out)
  line.show(works)  # there is no room for it
  assert screen.lines() == ["a warning", "a question? "]
  print("yes", file=out)
  print("\x1b[?25h", end="", file=out)  # moves nothing
  line.show(works)
  assert screen.lines()[1:] == ["a question? yes", "evaluating 64 of 192 problems"]
  line.show(())
  assert screen.lines()[-1] == ""
  assert out.isatty() and out.encoding == screen.encoding


def test_a_line_has_room_on_its_line_and_steers_nothing():
  assert fitting("reading \x1b[2J", 80) == "reading \\x1b[2J"
  assert fitting("abc", 2) == "ab" and fitting("日本語", 4) == "日本" == fitting("日本語", 5)


@pytest.mark.parametrize("term, is_line", [("xterm", True), ("dumb", False)])
def test_a_command_begins_with_a_line_on_a_terminal_alone(monkeypatch, term, is_line):
  screen = Screen()
  monkeypatch.setattr(sys, "stderr", screen)
  monkeypatch.setattr(sys, "stdout", io.StringIO())
  monkeypatch.setenv("TERM", term)
  try:
    line_lib.start()
    assert screen.getvalue() == ("\rstarting\x1b[K" if is_line else "")
    assert bool(PROGRESS._works) == is_line  # an error is the only line of a file
    assert not isinstance(sys.stdout, Above) and isinstance(sys.stderr, Above) == is_line
    line_lib.started()
    assert screen.lines() == [""]
  finally:
    line_lib.started()
    line_lib._for_ever.close()


def test_what_a_step_does_is_below_the_bar_and_the_end_has_the_bar_alone(clock):
  stream = io.StringIO()
  console = Console(file=stream, width=80, force_terminal=True, legacy_windows=False)
  out = Terminal(3, 0, console)
  out.update(1, {"reward": 0.5})
  with doing("step 2") as step, doing("sampling", 64, "completions") as part:
    part.advance(16)
    clock[0] = 1.0
    PROGRESS.show_now()
    assert "sampling" not in stream.getvalue()  # a step that is quick needs no line
    clock[0] = 6.0
    PROGRESS.show_now()
    assert "step 2: sampling 16 of 64 completions (6s, about 18s left)" in stream.getvalue()
    assert step.began == 0.0
  written = len(stream.getvalue())
  out.update(3, {"reward": 0.75})
  out.close()
  end = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue()[written:])
  frames = [one.strip() for one in re.split(r"[\r\n]", end) if one.strip()]
  assert frames[-1].startswith("grpo 3/3") and "reward 0.75" in frames[-1]
  with doing("something after the end"):
    PROGRESS.show_now()
  assert "something after" not in stream.getvalue()


def test_json_has_an_event_for_what_takes_long(clock):
  stream = io.StringIO()
  console = JsonConsole(Console(file=stream))
  console.start()
  with doing("step 1"), doing("sampling", 64, "completions") as part, doing("compiling chunk"):
    part.advance(16)
    clock[0] = 9.0
    PROGRESS.show_now()
  console.close()
  (event,) = map(json.loads, stream.getvalue().splitlines())
  text = "step 1: sampling 16 of 64 completions: compiling chunk (9s, about 27s left)"
  del event["time"]
  assert event == {"event": "progress", "text": text, "done": 16, "total": 64}


TINY = """
  warm_start.steps=2 warm_start.batch=8 steps=2 batch.prompts=8 eval.every=1 eval.examples=16
  eval.batch=16 checkpoint.every=1
""".split()


@pytest.mark.slow
def test_a_command_on_a_terminal_is_never_silent(tmp_path, monkeypatch):
  """First output within 2 seconds and something new every 10, with nothing compiled before."""
  monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
  run = f"--workdir={tmp_path / 'run'}"
  settings = [f"--config.{setting}" for setting in TINY]
  train = ["train", "--config=configs/arithmetic.py", *settings, run]
  prompt = ["sample", run, "--prompt=7+15-6+9="]
  export = ["export", run, f"--out={tmp_path / 'exported'}"]
  plan = ["plan", "--config=configs/arithmetic.py", *settings, "--topology=cpu:1"]
  monkeypatch.chdir(ROOT)
  for command in (train, prompt, ["evaluate", run], export, plan):
    found = record([sys.executable, "-m", f"grpo_jax.{command[0]}", *command[1:]])
    text = found.text.decode()
    assert found.code == 0, text
    silence, since = found.longest_silence
    assert found.changes[0] < 2 and silence < 10, (command[0], found.changes[0], silence, since)
    lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", one) for one in text.split("\r\n")]
    left = [one.split("\r")[-1] for one in lines]
    assert not any(re.match("loading|making|step|sampling|evaluating", one) for one in left), left
    if command is train:
      assert "compiling" in text and "tokenising" in text and "left ~" in text
