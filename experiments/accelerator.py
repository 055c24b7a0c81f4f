"""Measures on an accelerator what is worth most, in at most eight minutes and without a network.

  python experiments/accelerator.py --out=FILE.json [--seconds=480] [--only=PART,PART]
      [--rows=N,N] [--beside] [--tiny]

It runs these parts, in this order:

  device     what the device is, and which matrix products and copies it really reaches
  quick_start  the README's quick start in full: seconds to its first row, accuracy, log-probs
  resume     a short quick start that is killed half way and resumed, against one that never was:
             equal bit for bit, or by how much not
  golden     the golden numbers of the objectives, in float32 and from inputs in bfloat16
  gap        log-probs of the sampler against those of the learner, in float32 and bfloat16
  decode     a model in the shape of Qwen2.5-0.5B: tokens a second and share of memory bandwidth
  update     the same model: share of peak, and peak memory against the estimate of micro_batch=0
  attention  dense, chunked and cudnn against each other: seconds and errors
  trl        the same step by transformers, and by TRL where it is installed

The parts that measure a program say how long it took to trace and compile, in `compile_s`.

FILE.json is one JSON object. It is written whole whenever there is something new, so a run that is
cut off leaves what it measured. Each part is a process of its own with a limit of time, so one part
that fails or hangs costs the others no more than that. `parts` has an object for each part: its
results, `start` (how long the process took to import JAX and to find the device), `seconds`, and
`error` or `skipped` with the reason where there is one.

With --beside, the parts run beside each other, up to the limit of all. It is for those that ask
whether something is right, because most of their time is compilation, which a host does in
parallel: --beside --only=quick_start,resume,golden,gap.

This process never imports JAX, because the device belongs to one process at a time. --tiny takes
sizes that a CPU computes in two minutes.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
import concurrent.futures
import contextlib
import dataclasses
import json
import os
from pathlib import Path
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

ROOT = Path(__file__).parents[1]
RESERVE = 3.0  # seconds that are kept to stop a part and to write the file
POLL = 0.25  # seconds between two looks at what a part has written
LAST_LINES = 20  # of what a part printed, kept where it failed
# Variables of parts that take turns: a folder, how many there are, the name and place of this one.
TURNS, PARTIES = "ACCELERATOR_TURNS", "ACCELERATOR_PARTIES"
NAME, PLACE = "ACCELERATOR_NAME", "ACCELERATOR_PLACE"
READY = "ready"  # in that folder, a file for each part that has compiled or ended

Report = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Part:
  """One thing to measure.

  Attributes:
    name: Its name, in the file and in accelerator_part.py.
    seconds: How long it may take at most.
    least: It is skipped if less time than this is left, because it would measure nothing.
    command: What is run. Empty means accelerator_part.py.
  """

  name: str
  seconds: float
  least: float
  command: tuple[str, ...] = ()


# The limits add up to more than eight minutes, because not all parts will need theirs. For an H100,
# LOG.md estimates 25, 80, 35, 45, 85, 60, 35 and 100 s. It does not know `quick_start`.
PARTS = (
  Part("device", 60, 20),
  Part("quick_start", 240, 60),
  Part("resume", 130, 30),
  Part("golden", 60, 15),
  Part("gap", 70, 20),
  Part("decode", 130, 35),
  Part("update", 100, 35),
  Part("attention", 60, 20),
  Part("trl", 250, 40),
)


def write(path: Path, report: Report) -> None:
  """Replaces the file by one with this report, all at once."""
  new = path.with_name(path.name + ".new")
  new.write_text(json.dumps(report, indent=1) + "\n")
  os.replace(new, path)


def read(path: Path) -> Report:
  """The report in a file, or an empty one if there is none yet."""
  return json.loads(path.read_text()) if path.exists() else {}


def environment(tiny: bool) -> dict[str, str]:
  """The variables of each part's process."""
  given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
  # Absolute, because parts start processes in other folders.
  paths = [str(ROOT), *(os.path.abspath(path) for path in given if path)]
  variables = {
    # Parts follow each other, and memory of one that was killed may not be free at once.
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "HF_HUB_OFFLINE": "1",
    **os.environ,
    "PYTHONPATH": os.pathsep.join(paths),
    "JAX_NUM_CPU_DEVICES": "1",
  }
  if not tiny:
    variables.pop("JAX_COMPILATION_CACHE_DIR", None)  # or compile times would be those of reading
  return variables


def run_part(
  part: Part,
  seconds: float,
  options: Sequence[str],
  show: Callable[..., None],
  turns: Mapping[str, str] | None = None,
) -> None:
  """Runs one part in a process of its own.

  Args:
    part: The part.
    seconds: It is killed after this time.
    options: Of accelerator_part.py.
    show: Called with the part's results whenever there are new ones.
    turns: The variables by which parts that run beside each other take turns.
  """
  with tempfile.TemporaryDirectory(prefix="grpo_jax_part_") as name:
    results, log = Path(name, "results.json"), Path(name, "log")
    script = (sys.executable, str(ROOT / "experiments/accelerator_part.py"), part.name)
    command = [*(part.command or script), f"--results={results}", *options]
    start, failure = time.monotonic(), ""
    with open(log, "w") as file:
      process = subprocess.Popen(
        command,
        stdout=file,
        stderr=file,
        env=environment("--tiny" in options) | dict(turns or {}) | {"TMPDIR": name},
        start_new_session=True,
      )
      try:
        code = wait(process, start + seconds, lambda: show(read(results)))
      finally:
        end(process)
    if code is None:
      failure = f"it was stopped after {seconds:.0f} s"
    elif code:
      failure = f"the process ended with code {code}"
    found = read(results)
    if failure:
      lines = log.read_text(errors="replace").splitlines()
      found = {"error": failure, **found, "log": lines[-LAST_LINES:]}
    show(found | {"seconds": round(time.monotonic() - start, 1)})


def wait(process: subprocess.Popen, deadline: float, look: Callable[[], None]) -> int | None:
  """The exit code of a process, or None if it still runs at the deadline. Looks now and then."""
  while time.monotonic() < deadline:
    try:
      return process.wait(min(POLL, max(0.0, deadline - time.monotonic())))
    except subprocess.TimeoutExpired:
      look()
  return process.poll()


def end(process: subprocess.Popen) -> None:
  """Kills a process and all that it has started, and waits for it."""
  with contextlib.suppress(ProcessLookupError):
    os.killpg(process.pid, signal.SIGKILL)
  process.wait()


def facts(arguments: Mapping[str, Any]) -> Report:
  """What is known before the first part runs."""
  git = ("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12")
  try:
    commit = subprocess.run(git, capture_output=True, text=True, timeout=10).stdout.strip()
  except (OSError, subprocess.TimeoutExpired):
    commit = ""
  names = ("XLA_FLAGS", "JAX_PLATFORMS", "XLA_PYTHON_CLIENT_MEM_FRACTION", "CUDA_VISIBLE_DEVICES")
  return {
    "arguments": {key: str(value) for key, value in arguments.items()},
    "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    "commit": commit or None,
    "python": platform.python_version(),
    "host": {"machine": platform.platform(), "cores": os.cpu_count()},
    "environment": {name: os.environ[name] for name in names if name in os.environ},
    "parts": {},
  }


def keeper(out: Path, report: Report, began: float) -> Callable[[str, Report], None]:
  """keep(name of a part, its results) puts them into the report, and writes it if they are new."""
  lock = threading.Lock()

  def keep(name: str, found: Report) -> None:
    with lock:
      if report["parts"].get(name) != found:
        report["parts"][name] = found
        report["seconds"] = round(time.monotonic() - began, 1)
        write(out, report)

  return keep


def measure(
  parts: Sequence[Part], out: Path, seconds: float, report: Report, options: Sequence[str]
) -> Report:
  """Runs the parts one after the other, and keeps the file up to date. Returns the whole report.

  Args:
    parts: What to run.
    out: The file.
    seconds: How long all may take together.
    report: What `facts` returned.
    options: Of accelerator_part.py.
  """
  began = time.monotonic()
  deadline = began + seconds - RESERVE
  results = report["parts"]

  keep = keeper(out, report, began)

  for part in parts:
    left = deadline - time.monotonic()
    if left < part.least:
      reason = f"{max(0, left):.0f} s are left, and it needs {part.least:.0f} s"
      keep(part.name, {"skipped": reason})
      continue
    print(f"{time.monotonic() - began:5.0f} s  {part.name}", flush=True)
    name, device = part.name, f"--device={json.dumps(results.get('device', {}))}"
    run_part(
      part, min(part.seconds, left), [device, *options], lambda found, name=name: keep(name, found)
    )
    for key in ("error", "skipped"):
      if key in results[name]:
        print(f"         {key}: {results[name][key]}", flush=True)
  report["seconds"] = round(time.monotonic() - began, 1)
  write(out, report)
  return report


def measure_together(
  parts: Sequence[Part], out: Path, seconds: float, report: Report, options: Sequence[str]
) -> Report:
  """`measure`, where the parts compile beside each other and then measure one after the other."""
  began = time.monotonic()
  keep, results = keeper(out, report, began), report["parts"]
  device = f"--device={json.dumps(results.get('device', {}))}"

  def run(part: Part, folder: str) -> None:
    turns = {TURNS: folder, PARTIES: str(len(parts)), NAME: part.name}
    turns[PLACE] = str(parts.index(part))
    limit = seconds - RESERVE - (time.monotonic() - began)
    run_part(part, limit, [device, *options], lambda found: keep(part.name, found), turns)
    Path(folder, READY, part.name).touch()  # nobody waits for it any more
    end = results[part.name].get("error", "done")
    print(f"{time.monotonic() - began:5.0f} s  {part.name}: {end}", flush=True)

  with tempfile.TemporaryDirectory() as folder:
    Path(folder, READY).mkdir()
    with concurrent.futures.ThreadPoolExecutor(len(parts)) as pool:
      list(pool.map(run, parts, [folder] * len(parts)))
  write(out, report)
  return report


def chosen(names: str) -> list[Part]:
  """The parts of these names, separated by commas, in their own order. All of them for ""."""
  wanted = set(filter(None, names.split(",")))
  unknown = wanted - {part.name for part in PARTS}
  if unknown:
    sys.exit(f"--only={names}: there is no part {', '.join(sorted(unknown))}")
  return [part for part in PARTS if not wanted or part.name in wanted]


def stop(number: int, frame: Any) -> None:
  """What a signal does: it ends this process in order, so that the running part ends, too."""
  del frame
  sys.exit(128 + number)


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--out", type=Path, required=True, help="the file to write")
  parser.add_argument("--seconds", type=float, default=480.0, help="of all parts together")
  parser.add_argument("--only", default="", help="names of parts, separated by commas")
  parser.add_argument("--rows", default="64,256,1024", help="how many rows `decode` decodes")
  parser.add_argument("--beside", action="store_true", help="all parts beside each other")
  parser.add_argument("--tiny", action="store_true", help="the sizes of a test on a CPU")
  args = parser.parse_args()
  parts = chosen(args.only)
  args.out.parent.mkdir(parents=True, exist_ok=True)
  signal.signal(signal.SIGTERM, stop)
  report = facts(vars(args))
  write(args.out, report)
  options = [f"--rows=[{args.rows}]", *["--tiny"] * args.tiny]
  run = measure_together if args.beside else measure
  report = run(parts, args.out, args.seconds, report, options)
  sys.exit(any("error" in found for found in report["parts"].values()))


if __name__ == "__main__":
  main()
