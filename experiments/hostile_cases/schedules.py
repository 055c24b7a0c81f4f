# ruff: noqa: E501  (a row is a line)
"""schedule.jsonl, in the folder of a run and as rollout.replay, of runs that sample beside."""

import os
from pathlib import Path
import signal

from hostile_cases.case import Case, Step

FLAGS = "JAX_NUM_CPU_DEVICES=2 train $BESIDE --workdir=run"
MORE = FLAGS + " --config.steps=5"  # of the fixture, which has 3
AGAIN = ("run/config.json", "run/environment.json")  # which a run writes that goes on
FIRST = '{"batch": 0, "weights": [[0, 0]]}\n'
SLOW = "import time\ndef f(completions, **columns):\n  time.sleep(0.5)\n  return [float(len(c)) for c in completions]\n"
REWARD = FLAGS + " --config.reward.functions=\"('reward.py:f',)\" --config.reward.workers=0"


def _run_with(content: str) -> Step:
  """The fixture becomes the run, whose schedule.jsonl has other content."""

  def step(folder: Path) -> None:
    (folder / "beside").rename(folder / "run")
    (folder / "run/schedule.jsonl").write_text(content)

  return step


def _own(name: str, line: str, *words: str) -> Case:
  """The second line of the run's own file is wrong."""
  words = ("schedule.jsonl line 2 does not say which weights drew a batch", *words)
  setup = (_run_with(FIRST + line + "\n"),)
  return Case(f"schedule/{name}", MORE, 2, words, needs="beside", setup=setup, may_change=AGAIN)


def _replay(name: str, content: str, *words: str) -> Case:
  """Another run is to be repeated, whose file is wrong."""
  command = FLAGS + " --config.rollout.replay=other.jsonl"
  return Case(f"schedule/replay {name}", command, 2, words, files={"other.jsonl": content})


def _made(make: Step, *, replay: bool = False) -> Step:
  def step(folder: Path) -> None:
    path = folder / ("other.jsonl" if replay else "run/schedule.jsonl")
    path.unlink(missing_ok=True)
    make(path)

  return step


CASES = [
  _own("later weights", '{"batch": 4, "weights": [[0, 999]]}', "weights of step 999 come after batch 4"),
  _own("chunks without order", '{"batch": 4, "weights": [[0, 2], [3, 3], [2, 4]]}', "[2, 4] cannot follow [3, 3]"),
  _own("flight", '{"batch": 4, "weights": [[0, 3], [3, 4]]}', "change in flight"),
  _own("1e400", '{"batch": 4, "weights": [[0, 1e400]]}', "[[0, inf]]"),
  _own("nan", '{"batch": NaN, "weights": [[0, 0]]}', "batch is nan"),
  _own("text", '{"batch": 4, "weights": "all"}', "weights are 'all'"),
  _own("depth", "[" * 100_000, "no JSON"),
  _own("zeros", "\0" * 100, "no JSON"),
  Case("schedule/half a line", MORE, 0, ("finished",), needs="beside", setup=(_run_with(FIRST + '{"batch": 1, "wei'),), may_change=(*AGAIN, "run/schedule.jsonl")),
  Case("schedule/folder", MORE, 2, ("schedule.jsonl is a folder",), needs="beside", setup=(_run_with(""), _made(Path.mkdir)), may_change=AGAIN),
  Case("schedule/pipe", MORE, 2, ("schedule.jsonl is a pipe or a device",), needs="beside", setup=(_run_with(""), _made(os.mkfifo)), may_change=AGAIN),
  _replay("later weights", FIRST + '{"batch": 1, "weights": [[0, 2]]}\n', "other.jsonl line 2", "weights of step 2 come after batch 1"),
  _replay("gap", FIRST + '{"batch": 2, "weights": [[0, 2]]}\n', "which weights drew batch 1"),
  Case("schedule/replay folder", FLAGS + " --config.rollout.replay=other.jsonl", 2, ("other.jsonl is a folder",), setup=(_made(Path.mkdir, replay=True),)),
  Case("schedule/term while it waits", REWARD + " --config.steps=30", 75, ("resume",), files={"reward.py": SLOW}, signals=(("completions of step 3", signal.SIGTERM),), then=REWARD + " --config.steps=8"),
]  # fmt: skip
