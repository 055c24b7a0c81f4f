"""What the user sees: on a terminal, in a pipe, and of texts that could steer a terminal."""

import fcntl
import io
import json
import os
from pathlib import Path
import pty
import re
import struct
import subprocess
import sys
import termios

from hypothesis import given
from hypothesis import strategies as st
import pytest
from rich.cells import cell_len
from rich.console import Console

from grpo_jax import sample
from grpo_jax.console import terminal
from grpo_jax.console.json_console import JsonConsole
from grpo_jax.console.terminal import Terminal
from grpo_jax.console.text import shorten, visible
from grpo_jax.timing import duration

METRICS = {
  "reward": 0.7123,
  "kl": 0.00301,
  "completions/mean_length": 21.37,
  "perf/tokens_per_second": 5321.2,
  "loss": 0.1,
}


@pytest.fixture
def clock(monkeypatch):
  """A list of one number, the time in seconds. The test sets it."""
  now = [0.0]
  monkeypatch.setattr(terminal, "monotonic", lambda: now[0])
  return now


def plain(width=80, total=400, warm=0, encoding="utf-8", **options):
  """A Terminal that writes to a file, and a function that returns what it wrote so far."""
  raw = io.BytesIO()
  stream = io.TextIOWrapper(raw, encoding=encoding)

  def written():
    return raw.getvalue().decode(encoding)

  return Terminal(total, warm, Console(file=stream, width=width), **options), written


def screen(text):
  """The lines that stay on the screen. The text may only go to the start of a line and clear it."""
  lines = []
  for line in text.split("\n"):
    line = line.rstrip("\r").split("\r")[-1]
    lines.append(re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line).rstrip())
  return lines


def test_a_row_reads_as_documented(clock):
  out, text = plain()
  clock[0] = 100.0
  out.update(117, METRICS)
  for step in (118, 119, 120):
    clock[0] += 13.0 / 28
    out.update(step, {**METRICS, "eval/accuracy": 0.8123} if step == 120 else METRICS)
  # 3 steps took 39/28 s, so 280 more take 130 s
  assert text().splitlines()[-1] == (
    "step 120/400  reward 0.71  accuracy 81.2%  kl 0.003  len 21.4  5321 tok/s  left 2m10s"
  )


def test_a_pipe_gets_a_line_every_few_seconds_and_at_each_eval_and_the_last_step(clock):
  out, text = plain(total=100)
  for step in range(1, 101):
    clock[0] = step / 8
    out.update(step, {**METRICS, "eval/accuracy": 0.5} if step == 7 else METRICS)
  out.close()
  assert [int(n) for n in re.findall(r"step (\d+)/100", text())] == [1, 7, 31, 55, 79, 100]
  assert "\x1b" not in text() and "\r" not in text()


def test_each_phase_counts_to_its_own_end_with_its_speed_and_time_left(clock):
  out, text = plain(total=10, warm=5, warm_steps_of_a_step=4)
  for step in range(1, 9):
    clock[0] += 100.0 if step > 5 else 5.0
    warm = {"warm_start/loss": 2.5, "warm_start/tokens": 600.0, "time/step": 4.0}
    out.update(step, METRICS if step > 5 else warm)
  lines = text().splitlines()
  assert lines[0] == "warm start 1/5  loss 2.500  150 tok/s"  # it compiled: no time left yet
  # 3 more of 5 s, and 5 of GRPO, each of which is thought to take as long as 4
  assert lines[1] == "warm start 2/5  loss 2.500  150 tok/s  left ~1m55s"
  assert lines[4] == "warm start 5/5  loss 2.500  150 tok/s  left ~1m40s"
  # The sixth step is the first of GRPO, which compiles, and the warm start's pace is not GRPO's.
  assert lines[5].startswith("step 6/10  reward 0.71") and "left" not in lines[5]
  assert lines[6].endswith("left 5m00s") and lines[7].endswith("left 3m20s")


def test_no_estimate_holds_a_compilation_and_each_holds_the_evaluations(clock):
  out, text = plain(total=101)
  out.update(0, {"eval/accuracy": 0.1, "time/evaluate": 9.0})
  for step in range(1, 26):
    # Step 1 compiles, and step 3 does again. Every fifth step is evaluated.
    clock[0] += {1: 300.0, 3: 300.0}.get(step, 3.0) + 10.0 * (step % 5 == 0)
    evaluated = {"eval/accuracy": 0.5, "time/evaluate": 10.0} if step % 5 == 0 else {}
    out.update(step, METRICS | evaluated)
  lines = {line.split("/")[0]: line for line in text().splitlines()}
  assert "left" not in lines["step 0"] and "left" not in lines["step 1"]
  assert lines["step 2"].endswith("left 4m57s")  # 99 steps of 3 s
  # 76 steps of 3 s, and the 10 s of an evaluation 5 times in the 24 steps since the first one
  assert lines["step 25"].endswith("left 6m26s")


@pytest.mark.parametrize(
  "seconds, text",
  [
    (0.4, "0s"),
    (59.4, "59s"),
    (59.6, "1m00s"),
    (130, "2m10s"),
    (3600, "1h00m"),
    (11100, "3h05m"),
    (187200, "2d04h"),
  ],
)
def test_durations(seconds, text):
  assert duration(seconds) == text


def test_metrics_that_are_absent_or_not_numbers_do_no_harm(clock):
  out, text = plain()
  out.update(1, {"reward": float("nan"), "kl": None})
  assert text() == "step 1/400  reward nan\n"


@pytest.mark.parametrize("width", [50, 80, 120])
def test_the_bar_stays_on_one_line_and_shows_the_last_accuracy(clock, width):
  stream = io.StringIO()
  out = Terminal(
    400, 100, Console(file=stream, width=width, force_terminal=True, legacy_windows=False)
  )
  out.header(["arithmetic, 1.06M parameters"])
  for step in range(1, 251):
    clock[0] += 1.0
    values = {"warm_start/loss": 1.234} if step <= 100 else METRICS
    out.update(step, {**values, "eval/accuracy": 0.8123} if step == 200 else values)
    if step == 50:
      bar = screen(stream.getvalue())[-1]
      assert "warm start 50/100" in bar and "loss 1.234" in bar
  out.say("saving [bold]now[/bold]")
  out.close()
  lines = [line for line in screen(stream.getvalue()) if line]
  assert lines[:2] == ["arithmetic, 1.06M parameters", "saving [bold]now[/bold]"]
  assert len(lines) == 3
  assert lines[2].startswith("grpo 250/400") and "reward 0.71  accuracy 81.2%" in lines[2]
  assert width < 80 or lines[2].endswith("5321 tok/s  left 2m30s")
  assert width < 80 or "━━━━" in lines[2]
  frames = re.split(r"[\r\n]", stream.getvalue())
  without_escapes = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", frame) for frame in frames]
  assert max(map(cell_len, without_escapes)) <= width


ROWS = [
  {"prompt": "What is 3 + 4?", "completion": "3 + 4 = 7\n#### 7", "reward": 1.0, "length": 12},
  {
    "prompt": "[/bold] [red]",
    "completion": "\x1b[2J\x07\r\u202e\ud83d[/] \\",
    "reward": None,
    "length": 64,
  },
  {
    "prompt": "p " * 500,
    "completion": "start " + "x" * 5000 + " the end",
    "reward": 0,
    "length": 5000,
  },
] + 9 * [{"prompt": "", "completion": "日本語" * 90, "reward": -12.345, "length": 7}]


@pytest.mark.parametrize("width", [80, 120])
def test_completions_are_a_small_table_of_harmless_text(width):
  out, text = plain(width)
  out.completions(20, ROWS)
  lines = [line.rstrip() for line in text().splitlines()]
  assert max(map(cell_len, lines)) <= width and len(lines) < 25
  table = "\n".join(lines)
  assert "completions of step 20" in table
  assert re.search(r"What is 3 \+ 4\? +3 \+ 4 = 7↵#### 7 +1\.00 +12\n", table)
  assert r"[/bold] [red]" in table and r"\x1b[2J\x07\r\u202e\ud83d[/] \ "[:-1] in table
  assert "start" in table and "…" in table and "the end" in table
  assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", table)


def test_a_table_of_completions_shows_where_chat_prompts_differ():
  out, text = plain(80)
  opening, closing = "<|im_start|>system You are a helpful assistant.<|im_end|> ", "<|im_end|>" * 9
  row = {"completion": "7", "reward": 1, "length": 2}
  out.completions(
    1, [row | {"prompt": f"{opening}{question}{closing}"} for question in ("3 + 4", "2 + 2")]
  )
  assert "… 3 + 4 …" in text() and "… 2 + 2 …" in text() and "helpful" not in text()


def test_a_stream_that_cannot_encode_the_text_gets_question_marks():
  out, text = plain(encoding="ascii")
  out.completions(1, ROWS)
  out.say("ü [x]")
  assert text().splitlines()[-1] == "? [x]"


@given(st.text())
def test_visible_text_is_printable(text):
  shown = visible(text)
  assert shown.isprintable() and "\n" not in shown
  if text.isprintable():
    assert shown == text


@given(st.text(), st.integers(-5, 60))
def test_shortened_text_keeps_its_ends(text, length):
  short = shorten(text, length)
  assert len(short) <= max(0, length)
  if len(text) <= length:
    assert short == text
  elif length >= 5:
    head, tail = short.split(" … ", 1) if text.count(" … ") == 0 else (short[:1], short[-1:])
    assert text.startswith(head) and text.endswith(tail)


def test_a_sampled_text_cannot_steer_a_terminal_and_is_whole_in_a_file():
  text = "one\n\x1b[2Jtwo\x07\r\nthree"
  assert sample.printable(text, on_terminal=True) == "one\n\\x1b[2Jtwo\\x07\\r\nthree"
  assert sample.printable(text, on_terminal=False) == text


LOOP = """
from grpo_jax.console.terminal import Terminal
out = Terminal(20, 0)
for step in range(1, 21):
  out.update(step, {"reward": step / 20, "perf/tokens_per_second": 99})
  if step == 10:
    out.completions(step, [{"prompt": "a", "completion": "b\\x1b[2J", "reward": 1.0, "length": 2}])
    print("a reward function prints")
out.close()
"""


def test_on_a_real_terminal():
  master, slave = pty.openpty()
  fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
  env = {
    k: v
    for k, v in os.environ.items()
    if k not in ("COLUMNS", "LINES", "NO_COLOR", "TTY_COMPATIBLE", "CI")
  }
  child = subprocess.Popen(
    [sys.executable, "-c", LOOP],
    stdin=slave,
    stdout=slave,
    stderr=slave,
    cwd=Path(__file__).parents[1],
    env={**env, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"},
  )
  os.close(slave)
  output = b""
  try:
    while chunk := os.read(master, 4096):
      output += chunk
  except OSError:  # Linux reports the end of a pseudo-terminal like this.
    pass
  assert child.wait(timeout=30) == 0
  text = output.decode()
  lines = [line for line in screen(text) if line]
  assert lines[0] == "completions of step 10" and lines[-2] == "a reward function prints"
  assert re.fullmatch(r"grpo 20/20 ━+ reward 1.00  99 tok/s", lines[-1]) and len(lines[-1]) == 80
  assert "\x1b[2J" not in text
  assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is shown again


def test_a_cluster_gets_one_json_object_a_line():
  stream = io.StringIO()
  terminal = JsonConsole(Console(file=stream, width=20))
  terminal.header(["8 x cpu [bold]mesh", "warning: a remark"])
  terminal.update(3, {"reward": 0.5, "kl": float("nan"), "self": 1.0})
  terminal.say("finished: everything is in a folder with a long name")
  terminal.say("warning: disk")
  terminal.close()
  lines = [json.loads(line) for line in stream.getvalue().splitlines()]
  assert all(line.pop("time").endswith("+00:00") for line in lines)
  assert lines == [
    {"event": "header", "text": "8 x cpu [bold]mesh"},
    {"event": "warning", "text": "a remark"},
    {"event": "step", "step": 3, "reward": 0.5, "kl": None, "self": 1.0},
    {"event": "message", "text": "finished: everything is in a folder with a long name"},
    {"event": "warning", "text": "disk"},
  ]
