# ruff: noqa: E501  (a row is a line)
"""Signals, closed streams, and what surrounds a process: environment, limits and terminals."""

import signal
from typing import Any

from hostile_cases.case import Case

SLOW = (
  "import time\ndef f(completions, **columns):\n"
  "  time.sleep(0.3)\n  return [float(len(c)) for c in completions]\n"
)
STUCK = "import time\ndef f(completions, **columns):\n  print('waiting', flush=True); time.sleep(8)\n  return [0.0] * 8\n"
TERM, INT, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
LONG = "train $REWARD --config.steps=30"
SEEN = "completions of step 3"


def _signal(
  name: str,
  signals: tuple[tuple[str, int], ...],
  code: int | tuple[int, ...],
  *words: str,
  **more: Any,
) -> Case:
  """A run of 30 slow steps gets signals."""
  files = {"reward.py": more.pop("source", SLOW)}
  command = more.pop("command", LONG)
  return Case(f"signal/{name}", command, code, words, files=files, signals=signals, **more)


GO_ON = "train $REWARD --config.steps=8"
SIGNALS = [
  _signal("term", ((SEEN, TERM),), 75, "resume", saved=3, then=GO_ON),
  _signal("int", ((SEEN, INT),), 75, "resume", saved=3),
  _signal("hup", ((SEEN, HUP),), 75, "resume", saved=3),
  _signal("term at once", (("", TERM),), (75, 143)),
  _signal("int at once", (("", INT),), (75, 130)),
  _signal("hup at once", (("", HUP),), (75, 129)),
  _signal("term when it begins", (("1 x cpu", TERM),), (75, 143)),
  _signal("int when it begins", (("1 x cpu", INT),), (75, 130)),
  _signal("term in a reward", (("waiting", TERM),), 75, source=STUCK, limit=60),
  # Slurm sends SIGTERM twice, so both count as one for three seconds.
  _signal("term twice in a reward", (("waiting", TERM), ("stopping", TERM)), 75, "resume", source=STUCK, limit=60),
  _signal("term twice, seconds apart", (("waiting", TERM), ("after 8 seconds", TERM)), 143, source=STUCK.replace("(8)", "(20)"), limit=60),
  _signal("int twice in a reward", (("waiting", INT), ("stopping", INT)), 130, source=STUCK, limit=60),
  _signal("hup twice in a reward", (("waiting", HUP), ("stopping", HUP)), 129, source=STUCK, limit=60),
  _signal("term and int", (("waiting", TERM), ("stopping", INT)), 130, source=STUCK, limit=60),
  _signal("kill", ((SEEN, signal.SIGKILL),), 137, then=GO_ON),
  _signal("kill in the first step", (("waiting", signal.SIGKILL),), 137, source=STUCK),
  _signal("stopped and continued", ((SEEN, signal.SIGSTOP), (SEEN, signal.SIGCONT)), 0, "finished", command="train $REWARD --config.steps=6"),
  _signal("window changes", ((SEEN, signal.SIGWINCH), (SEEN, TERM)), 75),
  _signal("quit", ((SEEN, signal.SIGQUIT),), 131, then=GO_ON),
  _signal("user signal", ((SEEN, signal.SIGUSR1),), (75, 138), then=GO_ON),
  _signal("pipe", ((SEEN, signal.SIGPIPE), ("completions of step 6", TERM)), 75),
  _signal("term at the end", (("completions of step 3", TERM),), (0, 75), command="train $REWARD --config.steps=3"),
  _signal("term in the warm start", (("warm start", TERM),), (0, 75), command="train $RUN --config.warm_start.steps=30 --config.warm_start.batch=4 --config.sampling.max_tokens=12"),
  Case("signal/int while evaluating", "evaluate --workdir=run --samples=300", (0, 130), needs="run", signals=(("step 3", INT),)),
  Case("signal/term while evaluating", "evaluate --workdir=run --samples=300", (0, 143), needs="run", signals=(("step 3", TERM),)),
  Case("signal/int while sampling", "sample --workdir=run --prompt=1", (0, 130), needs="run", signals=(("step 3", INT),)),
  Case("signal/int at once while sampling", "sample --workdir=run --prompt=1", 130, needs="run", signals=(("", INT),)),
  Case("signal/int at once while exporting", "export --workdir=run --out=x", 130, needs="run", signals=(("", INT),)),
]  # fmt: skip

PIPE = "; exit ${PIPESTATUS[0]}"
STREAMS = [
  Case("stream/reader leaves", LONG + " | head -2" + PIPE, 75, files={"reward.py": SLOW}, then=GO_ON),
  Case("stream/reader never reads", "train $RUN | true" + PIPE, (0, 75)),
  Case("stream/both streams to a reader that leaves", LONG + " 2>&1 | head -1" + PIPE, 75, files={"reward.py": SLOW}),
  Case("stream/no stdout", "train $RUN >&-", (0, 75)),
  Case("stream/no stderr", "train $RUN 2>&-", 0, ("finished",)),
  Case("stream/no stdin", "train $RUN <&-", 0, ("finished",)),
  Case("stream/no streams", "train $RUN <&- >&- 2>&-", (0, 75)),
  Case("stream/no stderr and a bad flag", "train $RUN --config.seed=x 2>&-", 2),
  Case("stream/stdout is full", "train $RUN > /dev/full", (0, 1, 75)),
  Case("stream/stderr is full", "train $RUN 2> /dev/full", 0, ("finished",)),
  Case("stream/stderr is full and a bad flag", "train $RUN --config.seed=x 2> /dev/full; exit", 2),
  Case("stream/evaluate to nobody", "evaluate --workdir=run | true" + PIPE, (0, 1, 75, 141), needs="run"),
  Case("stream/sample to nobody", "sample --workdir=run --prompt=1 | true" + PIPE, (0, 1, 75, 141), needs="run"),
  Case("stream/export to nobody", "export --workdir=run --out=x | true" + PIPE, (0, 1, 75, 141), needs="run"),
  Case("stream/evaluate without stdout", "evaluate --workdir=run >&-", (0, 1), needs="run"),
  Case("stream/evaluate to a full disk", "evaluate --workdir=run > /dev/full", 1, needs="run"),
  Case("stream/sample to a full disk", "sample --workdir=run --prompt=1 > /dev/full", 1, needs="run"),
  Case("stream/export without stdout", "export --workdir=run --out=x >&-", 0, needs="run"),
  Case("stream/a warm start in a pipe", "train $RUN --config.warm_start.steps=30 --config.warm_start.batch=4 --config.sampling.max_tokens=12 --config.log.every=1 | cat" + PIPE, 0, ("warm start 1/30", " tok/s", "step 33/33", "finished"), absent=("/33 warm start",)),
  Case("stream/help to nobody", "train --help | true" + PIPE, (0, 1, 141), lines=50),
]  # fmt: skip


def _env(
  name: str,
  code: int | tuple[int, ...],
  *words: str,
  command: str = "train $RUN",
  lines: int = 5,
  tty: bool = False,
  limit: int = 120,
  **env: str | None,
) -> Case:
  return Case(f"env/{name}", command, code, words, env=env, tty=tty, lines=lines, limit=limit)


PLACES = [
  _env("folder is gone and full paths", (0, 1, 2), command="D=$PWD; mkdir d; cd d; rmdir ../d; train --config=$D/tiny.py --workdir=$D/run"),
]  # fmt: skip


SERVED = [
  Case("serve/key that is no text", "serve --workdir=run", 2, ("GRPO_JAX_API_KEY: the key is not UTF-8",), needs="run", env={"GRPO_JAX_API_KEY": "\udcff"}),
]  # fmt: skip

CASES = [*SIGNALS, *STREAMS, *PLACES, *SERVED]
