# ruff: noqa: E501  (a row is a line)
"""schedule.jsonl, in the folder of a run and as rollout.replay, of runs that sample beside."""

import os
from pathlib import Path
import signal

from hostile_cases.case import Case, Step

FLAGS = (
  "train $RUN --config.mesh.sampler=1 --config.rollout.max_staleness=1 --config.rollout.weights=newest"
  " --config.algo.old_logprobs=sampler --config.algo.kl_coef=0.0"
)
DEVICES = {"JAX_NUM_CPU_DEVICES": "2"}
FIRST = '{"batch": 0, "weights": [[0, 0]]}\n'
SLOW = "import time\ndef f(completions, **columns):\n  time.sleep(0.5)\n  return [float(len(c)) for c in completions]\n"
REWARD = FLAGS + " --config.reward.functions=\"('reward.py:f',)\" --config.reward.workers=0"


def _own(name: str, line: str, *words: str) -> Case:
  """The second line of the run's own file is wrong."""
  files = {"run/schedule.jsonl": FIRST + line + "\n"}
  words = ("schedule.jsonl line 2 does not say which weights drew a batch", *words)
  return Case(f"schedule/{name}", FLAGS, 2, words, files=files, env=DEVICES)


def _replay(name: str, content: str, *words: str) -> Case:
  """Another run is to be repeated, whose file is wrong."""
  command = FLAGS + " --config.rollout.replay=other.jsonl"
  return Case(
    f"schedule/replay {name}", command, 2, words, files={"other.jsonl": content}, env=DEVICES
  )


def _made(make: Step, *, replay: bool = False) -> Step:
  def step(folder: Path) -> None:
    path = folder / ("other.jsonl" if replay else "run/schedule.jsonl")
    path.parent.mkdir(exist_ok=True)
    make(path)

  return step


CASES = [
  _own(
    "later weights", '{"batch": 1, "weights": [[0, 999]]}', "weights of step 999 come after batch 1"
  ),
  _own(
    "chunks without order",
    '{"batch": 1, "weights": [[0, 0], [3, 1], [2, 1]]}',
    "[2, 1] cannot follow [3, 1]",
  ),
  _own("flight", '{"batch": 1, "weights": [[0, 0], [3, 1]]}', "change in flight"),
  _own("1e400", '{"batch": 1, "weights": [[0, 1e400]]}', "[[0, inf]]"),
  _own("nan", '{"batch": NaN, "weights": [[0, 0]]}', "batch is nan"),
  _own("text", '{"batch": 1, "weights": "all"}', "weights are 'all'"),
  _own("depth", "[" * 100_000, "no JSON"),
  _own("zeros", "\0" * 100, "no JSON"),
  Case(
    "schedule/half a line",
    FLAGS,
    0,
    ("finished",),
    files={"run/schedule.jsonl": FIRST + '{"batch": 1, "wei'},
    env=DEVICES,
    may_change=("run/schedule.jsonl",),
  ),
  Case(
    "schedule/folder",
    FLAGS,
    2,
    ("schedule.jsonl is a folder",),
    setup=(_made(Path.mkdir),),
    env=DEVICES,
  ),
  Case(
    "schedule/pipe",
    FLAGS,
    2,
    ("schedule.jsonl is a pipe or a device",),
    setup=(_made(os.mkfifo),),
    env=DEVICES,
  ),
  _replay(
    "later weights",
    FIRST + '{"batch": 1, "weights": [[0, 2]]}\n',
    "other.jsonl line 2",
    "weights of step 2 come after batch 1",
  ),
  _replay("gap", FIRST + '{"batch": 2, "weights": [[0, 2]]}\n', "which weights drew batch 1"),
  Case(
    "schedule/replay folder",
    FLAGS + " --config.rollout.replay=other.jsonl",
    2,
    ("other.jsonl is a folder",),
    setup=(_made(Path.mkdir, replay=True),),
    env=DEVICES,
  ),
  Case(
    "schedule/term while it waits",
    REWARD + " --config.steps=30",
    75,
    ("resume",),
    files={"reward.py": SLOW},
    signals=(("completions of step 3", signal.SIGTERM),),
    env=DEVICES,
    then=REWARD + " --config.steps=8",
  ),
]
