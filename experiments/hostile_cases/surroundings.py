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
  _signal("term twice in a reward", (("waiting", TERM), ("stopping", TERM)), 143, source=STUCK, limit=60),
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
  _signal("term in the warm start", (("warm start", TERM),), (0, 75), command="train $RUN --config.warm_start.steps=30 --config.warm_start.batch=4"),
  _signal("term in an evaluation", (("waiting", TERM),), 75, source=STUCK, command="train $RUN --config.eval.every=1 --config.eval.function=reward.py:f", limit=60),
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


TERMINALS = [
  _env("terminal", 0, "finished", tty=True, TERM="xterm"),
  _env("terminal of one column", 0, "finished", tty=True, TERM="xterm", COLUMNS="1"),
  _env("terminal without a name", 0, "finished", tty=True, TERM=None),
  _env("terminal that is dumb", 0, "finished", tty=True, TERM="dumb"),
  _env("terminal unknown", 0, "finished", tty=True, TERM="nosuch"),
  _env("terminal in ascii", 0, "finished", tty=True, TERM="xterm", PYTHONIOENCODING="ascii"),
  _env("no colours", 0, "finished", tty=True, TERM="xterm", NO_COLOR="1"),
  _env("columns zero", 0, "finished", COLUMNS="0"),
  _env("columns one", 0, "finished", COLUMNS="1"),
  _env("columns negative", 0, "finished", COLUMNS="-5"),
  _env("columns a word", 0, "finished", COLUMNS="wide"),
  _env("columns many", 0, "finished", COLUMNS="1000000"),
  _env("ascii output", 0, "finished", PYTHONIOENCODING="ascii"),
  _env("utf-16 output", (0, 1, 2), PYTHONIOENCODING="utf-16"),
  _env("unknown output encoding", (0, 1, 2), PYTHONIOENCODING="klingon"),
  _env("strict ascii and a bad value", 2, "data.task", command="train $RUN --config.data.task=ü", PYTHONIOENCODING="ascii:strict"),
  _env("locale of bytes", 0, "finished", LC_ALL="C", LANG="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0"),
  _env("locale of bytes and a prompt", 0, "finished", command="train $RUN --config.data.prompt='→{question}'", LC_ALL="C", LANG="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0"),
  _env("locale unknown", 0, "finished", LC_ALL="xx_YY.UTF-8"),
  _env("sample in ascii", 0, "--- 4:", command="sample --config=tiny.py --config.data.prompt='→{question}' --prompt=1→", PYTHONIOENCODING="ascii"),
]  # fmt: skip

PLACES = [
  _env("no home", 0, "finished", HOME=None),
  _env("home is missing", 0, "finished", HOME="/nonexistent"),
  _env("home is a file", 0, "finished", HOME="/dev/null"),
  _env("no home and a tilde", (0, 2), command="train --config=tiny.py --workdir=~nobodyatall/run", HOME=None),
  _env("temporary folder is missing", 0, "finished", TMPDIR="/nonexistent"),
  _env("cache folder cannot be made", 0, "finished", lines=30, JAX_COMPILATION_CACHE_DIR="/proc/x"),
  _env("cache folder is a file", 0, "finished", lines=30, JAX_COMPILATION_CACHE_DIR="tiny.py"),
  _env("time zone unknown", 0, "finished", TZ="Mars/Olympus"),
  _env("time before 1970", 0, "finished", SOURCE_DATE_EPOCH="-1"),
  _env("folder is gone", (0, 1, 2), command="mkdir d; cd d; rmdir ../d; train --config=../tiny.py --workdir=../run"),
  _env("folder is gone and full paths", (0, 1, 2), command="D=$PWD; mkdir d; cd d; rmdir ../d; train --config=$D/tiny.py --workdir=$D/run"),
  _env("other module named like ours", 0, "finished", command="mkdir grpo_jax; train $RUN"),
  _env("file named like a library", (0, 1), command="echo 'x = 1' > sympy.py; train $RUN"),
]  # fmt: skip

LIBRARIES = [
  _env("platform unknown", (1, 2), "JAX_PLATFORMS", JAX_PLATFORMS="unknown"),
  _env("platform without hardware", (1, 2), "JAX_PLATFORMS", JAX_PLATFORMS="tpu"),
  _env("platform cuda", (1, 2), "JAX_PLATFORMS", JAX_PLATFORMS="cuda"),
  _env("no platform", 0, "finished", JAX_PLATFORMS=""),
  _env("xla flags of rubbish", (1, 2), "XLA_FLAGS", XLA_FLAGS="--rubbish"),
  _env("xla flags of words", (0, 1, 2), XLA_FLAGS="rubbish"),
  _env("xla dump to nowhere", 0, "finished", lines=50, XLA_FLAGS="--xla_dump_to=/proc/x"),
  _env("64 bits", 0, "finished", JAX_ENABLE_X64="1"),
  _env("64 bits a word", (1, 2), "JAX_ENABLE_X64", JAX_ENABLE_X64="maybe"),
  _env("debug nans", 0, "finished", JAX_DEBUG_NANS="1"),
  _env("without jit", (0, 1), JAX_DISABLE_JIT="1", limit=240),
  _env("precision unknown", (0, 1, 2), JAX_DEFAULT_MATMUL_PRECISION="rubbish"),
  _env("log level unknown", (0, 1, 2), JAX_LOGGING_LEVEL="rubbish"),
  _env("random numbers of another kind", 0, "finished", JAX_DEFAULT_PRNG_IMPL="rbg"),
  _env("random numbers unknown", (1, 2), "JAX_DEFAULT_PRNG_IMPL", JAX_DEFAULT_PRNG_IMPL="rubbish"),
  _env("transfers forbidden", (0, 1), JAX_TRANSFER_GUARD="disallow"),
  _env("coordinator alone", 2, "JAX_NUM_PROCESSES", JAX_COORDINATOR_ADDRESS="localhost:1"),
  _env("processes a word", 2, "JAX_NUM_PROCESSES", JAX_COORDINATOR_ADDRESS="localhost:1", JAX_NUM_PROCESSES="two", JAX_PROCESS_ID="0"),
  _env("no processes", (1, 2), "JAX_NUM_PROCESSES", JAX_COORDINATOR_ADDRESS="localhost:12987", JAX_NUM_PROCESSES="0", JAX_PROCESS_ID="0"),
  _env("process beyond the number", (1, 2), "JAX_PROCESS_ID", JAX_COORDINATOR_ADDRESS="localhost:12989", JAX_NUM_PROCESSES="1", JAX_PROCESS_ID="5"),
  _env("coordinator without a port", (1, 2), "JAX_COORDINATOR_ADDRESS", JAX_COORDINATOR_ADDRESS="localhost", JAX_NUM_PROCESSES="1", JAX_PROCESS_ID="0"),
  _env("one process alone", 0, "finished", lines=20, JAX_COORDINATOR_ADDRESS="localhost:12991", JAX_NUM_PROCESSES="1", JAX_PROCESS_ID="0"),
  _env("slurm tasks a word", (0, 1, 2), SLURM_STEP_NUM_TASKS="two"),
  _env("slurm without the rest", (1, 2), "SLURM", SLURM_STEP_NUM_TASKS="2"),
  _env("slurm of one task", 0, "finished", SLURM_STEP_NUM_TASKS="1", SLURM_JOB_ID="1"),
  _env("tpu hosts", (1, 2), TPU_WORKER_HOSTNAMES="a,b"),
  _env("hash seed", 0, "finished", PYTHONHASHSEED="7"),
  _env("hash seed a word", 1, PYTHONHASHSEED="x"),
  _env("python optimised", 0, "finished", PYTHONOPTIMIZE="2"),
  _env("python in development mode", 0, "finished", PYTHONDEVMODE="1", lines=500),
  _env("warnings are errors", (0, 1), PYTHONWARNINGS="error"),
  _env("threads zero", (0, 1), OMP_NUM_THREADS="0", OPENBLAS_NUM_THREADS="0"),
  _env("hub address", 2, "model.path", command="train $RUN --config.model.path=a/b", HF_ENDPOINT="http://localhost:1", HF_HUB_OFFLINE="0"),
]  # fmt: skip

LIMITS = [
  _env("limit of memory 1 GB", (1, 2), command="ulimit -v 1000000; train $RUN", lines=5),
  _env("limit of memory 3 GB", (0, 1), command="ulimit -v 3000000; train $RUN"),
  _env("limit of files 20", (0, 1, 2), command="ulimit -n 20; train $RUN"),
  _env("limit of files 40", (0, 1), command="ulimit -n 40; train $RUN"),
  _env("limit of file size 0", (1, 2), command="ulimit -f 0; train $RUN"),
  _env("limit of file size 1 kB", (1, 2), "run", command="ulimit -f 1; train $RUN"),
  _env("limit of file size 2 kB", 1, "run", command="ulimit -f 2; train $RUN"),
  _env("limit of time 2 s", (137, 152), command="ulimit -t 2; train $RUN"),
  _env("limit of the stack", (0, 139), command="ulimit -s 256; train $RUN"),
  _env("limit of threads", (0, 1), command="ulimit -u 30; train $RUN"),
  _env("mask of all rights", (0, 1, 2), command="umask 777; train $RUN"),
]  # fmt: skip

CASES = [*SIGNALS, *STREAMS, *TERMINALS, *PLACES, *LIBRARIES, *LIMITS]
