"""How parts of accelerator.py measure and save, and the parts that need no model.

The parts that measure a model in the shape of Qwen2.5-0.5B are in accelerator_model.py, and those
that need PyTorch in accelerator_torch.py.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import fcntl
import importlib.metadata
import json
import os
from pathlib import Path
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import accelerator
import numpy as np

ROOT = Path(__file__).parents[1]
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu", "flax", "numpy")


class Part:
  """What a part gets, and where its results go.

  Attributes:
    tiny: Whether the sizes are those of a test.
    device: The results of the part `device`, empty if it has none.
    rows: The numbers of rows to decode.
    folder: For files that nobody needs later.
    results: All results so far.
  """

  def __init__(
    self, file: Path, tiny: bool, device: Mapping[str, Any], rows: Sequence[int] = (64, 256, 1024)
  ) -> None:
    self._file, self.tiny, self.device, self.rows = file, tiny, device, rows
    self.folder = str(file.parent)
    self._turn: Any = None
    self.results: dict[str, Any] = {}

  def save(self, **results: Any) -> None:
    """Adds results, and writes all of them to the file."""
    self.results |= results
    accelerator.write(self._file, self.results)

  def take_turn(self) -> None:
    """Waits until all parts beside this one have compiled, and no other one measures.

    The turn ends with the process, because its memory is free only then.
    """
    folder = os.environ.get(accelerator.TURNS)
    if not folder or self._turn is not None:
      return
    ready = Path(folder, accelerator.READY)
    (ready / os.environ[accelerator.NAME]).touch()
    time.sleep(0.2 * int(os.environ[accelerator.PLACE]))  # in their order, more or less
    while len(os.listdir(ready)) < int(os.environ[accelerator.PARTIES]):
      time.sleep(0.05)
    self._turn = open(Path(folder, "lock"), "w")
    fcntl.flock(self._turn, fcntl.LOCK_EX)

  def compiled(self, name: str, function: Any, *arguments: Any) -> Any:
    """Traces and compiles a jitted function for these arguments, and says how long it took."""
    start = time.perf_counter()
    program = function.lower(*arguments).compile()
    seconds = {name: round(time.perf_counter() - start, 2)}
    self.save(compile_s=self.results.get("compile_s", {}) | seconds)
    return program

  def reached(self, name: str) -> float | None:
    """What the part `device` reached: "copy" in bytes a second, a dtype in FLOP/s."""
    return self.device.get("reached", {}).get(name)

  def peak(self, name: str) -> float | None:
    """A field of `Chip`, by the data sheet of the device, or None if there is no such chip."""
    return (self.device.get("peak") or {}).get(name)


def share(value: float, of: float | None) -> float | None:
  """A part of a whole, or None if the whole is not known."""
  return value / of if of else None


def median_seconds(run: Callable[[], Any], calls: int) -> float:
  """The median time of a function that returns arrays, after one call that does not count."""
  import jax

  jax.block_until_ready(run())
  times = []
  for _ in range(calls):
    start = time.perf_counter()
    jax.block_until_ready(run())
    times.append(time.perf_counter() - start)
  return statistics.median(times)


def kernels(run: Callable[[], Any], folder: str, most: int = 30) -> dict[str, Any]:
  """What a device does during one call, by JAX's profiler: its kernels, those with most time first.

  While it looks, XLA starts the kernels one by one and not as graphs, so `span_ms` is longer than
  the call. What the kernels take themselves is right. Empty where there is no GPU.

  Args:
    run: Returns arrays.
    folder: The profiler writes there.
    most: How many kernels to name.
  """
  import jax

  jax.block_until_ready(run())
  try:
    with jax.profiler.trace(folder):
      jax.block_until_ready(run())
  except Exception as error:  # not every machine lets a program look at its device
    return {"error": one_line(error)}
  newest = max(Path(folder).rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
  events = [
    event
    for plane in jax.profiler.ProfileData.from_file(str(newest)).planes
    if plane.name.startswith("/device:GPU")
    for line in plane.lines
    if line.name.startswith("Stream")
    for event in line.events
  ]
  if not events:
    return {}
  times: dict[str, list[float]] = {}
  for event in events:
    times.setdefault(event.name, []).append(event.duration_ns / 1e6)
  order = sorted(times, key=lambda name: -sum(times[name]))
  first, last = min(e.start_ns for e in events), max(e.start_ns + e.duration_ns for e in events)
  return {
    "number": len(events),
    "busy_ms": round(sum(map(sum, times.values())), 3),
    "span_ms": round((last - first) / 1e6, 3),
    "kernels": [[name, len(times[name]), round(sum(times[name]), 3)] for name in order[:most]],
  }


def start_device() -> dict[str, float]:
  """Imports JAX and finds the device. Returns how long both took."""
  start = time.perf_counter()
  import jax

  imported = time.perf_counter()
  jax.devices()
  return {
    "import_s": round(imported - start, 2),
    "init_s": round(time.perf_counter() - imported, 2),
  }


def device(part: Part) -> None:
  """What the device is, what it should reach, and what it reaches."""
  import jax

  from grpo_jax.parallel import chips

  first = jax.devices()[0]
  chip = chips.chip_of(first)
  part.save(
    platform=first.platform,
    kind=first.device_kind,
    number=len(jax.devices()),
    memory=chips.memory_of(first),
    memory_stats=first.memory_stats(),
    preallocates=os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE"),
    versions={name: version_of(name) for name in PACKAGES},
    runtime=first.client.platform_version,
    driver=driver(),
    peak=dataclasses.asdict(chip) if chip else None,
  )
  size = 256 if part.tiny else 8192
  found = {}
  for name, dtype, precision in (
    ("bfloat16", "bfloat16", None),
    ("float32", "float32", "float32"),  # as grpo_jax computes float32
    ("float32, JAX's default", "float32", None),
  ):
    found[name] = product_flops(size, dtype, precision)
    part.save(reached=found)
  found["copy"] = copied_bytes(2**22 if part.tiny else 2**31)
  part.save(reached=found)


def version_of(package: str) -> str | None:
  """The version of a package that is installed, else None."""
  with contextlib.suppress(importlib.metadata.PackageNotFoundError):
    return importlib.metadata.version(package)
  return None


def driver() -> str | None:
  """What NVIDIA's tool says of its driver and the memory, or None."""
  command = ("nvidia-smi", "--query-gpu=driver_version,memory.total", "--format=csv,noheader")
  try:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
  except (OSError, subprocess.TimeoutExpired):
    return None
  return done.stdout.strip() if done.returncode == 0 else None


def product_flops(size: int, dtype: str, precision: str | None) -> float:
  """The FLOP/s of a product of two random square matrices. Ones would draw less power."""
  import jax
  import jax.numpy as jnp

  left, right = (jax.random.normal(jax.random.key(i), (size, size), dtype) for i in range(2))
  with jax.default_matmul_precision(precision):
    product = jax.jit(jnp.matmul)
    seconds = median_seconds(lambda: product(left, right), calls=9)
  return 2 * size**3 / seconds


def copied_bytes(size: int) -> float:
  """The bytes a second, read and written, of a pass over an array of so many bytes."""
  import jax
  import jax.numpy as jnp

  array = jnp.ones(size // 4, jnp.float32)
  negative = jax.jit(jnp.negative)
  return 2 * size / median_seconds(lambda: negative(array), calls=9)


def resume(part: Part) -> None:
  """Kills a short quick start half way, resumes it and compares it with one never killed.

  The processes of the runs have the device. This one takes it when they have ended, because arrays
  are read from a checkpoint to where they were.
  """
  import kill

  settings = short_settings(part.tiny)
  on_gpu = part.device.get("platform") == "gpu"
  flags = os.environ.get("XLA_FLAGS", "")
  if on_gpu:
    flags = f"{flags} --xla_gpu_deterministic_ops=true"
  folder = Path(tempfile.mkdtemp())
  job = kill.Job(folder, settings, os.environ | {"XLA_FLAGS": flags})
  part.save(settings=settings, xla_flags=flags, whole_s=round(job.finish(folder / "whole"), 1))
  last = kill.rows(folder / "whole")[-1]["step"]
  killed_at = kill_at(job, folder / "killed", last - GRPO_STEPS // 2)
  part.save(killed_at=killed_at, saved_at=kill.newest_step(folder / "killed"), steps=last)
  part.save(resumed_s=round(job.finish(folder / "killed"), 1))
  killed, whole = folder / "killed", folder / "whole"
  part.save(rows=differences_of_rows(kill.rows(killed), kill.rows(whole)))
  part.save(arrays=differences_of_arrays(kill.arrays(killed), kill.arrays(whole)))
  part.save(equal=part.results["rows"]["equal"] and part.results["arrays"]["equal"])


def quick_start(part: Part) -> None:
  """The README's quick start, as a user starts it: its seconds, its accuracy and its log-probs."""
  folder = Path(tempfile.mkdtemp())
  workdir = folder / "run"
  command = (sys.executable, "-m", "grpo_jax.train", "--config=configs/arithmetic.py")
  settings = [f"--config.{setting}" for setting in short_settings(tiny=True)] if part.tiny else []
  began = time.monotonic()
  file = workdir / "metrics.jsonl"
  with open(folder / "stderr", "w") as errors:
    process = subprocess.Popen(
      [*command, f"--workdir={workdir}", *settings],
      cwd=ROOT,
      stdout=subprocess.DEVNULL,
      stderr=errors,
    )
    while process.poll() is None:
      time.sleep(0.25)
      rows = read_rows(file)
      if rows and "first_row_s" not in part.results:
        part.save(first_row_s=round(time.monotonic() - began, 1))
      part.save(run_s=round(time.monotonic() - began, 1), **summary_of_run(rows))
  part.save(code=process.returncode, errors=(folder / "stderr").read_text()[-500:])


def read_rows(file: Path) -> list[dict[str, Any]]:
  """The whole rows of metrics that a run has written so far."""
  lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
  return [json.loads(line) for line in lines]


def summary_of_run(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """How far a run is, what its steps take, what it reaches and how far its log-probs are apart.

  The times are medians of the later half, which compiles nothing.
  """
  found: dict[str, Any] = {"step": rows[-1]["step"] if rows else 0}
  for name in ("time/step", "time/sample", "time/update"):
    times = [row[name] for row in rows if name in row]
    if times:
      found[name] = statistics.median(times[len(times) // 2 :])
  found["accuracy"] = {row["step"]: row["eval/accuracy"] for row in rows if "eval/accuracy" in row}
  found["logprob_gap_max"] = max((row[GAP] for row in rows if GAP in row), default=None)
  return found


GAP = "sampler/logprob_gap_max"
WARM_STEPS, GRPO_STEPS = 8, 8


def short_settings(tiny: bool) -> list[str]:
  """Settings that make configs/arithmetic.py short. A tiny one has one small layer, too."""
  settings = f"""
    warm_start.steps={WARM_STEPS} steps={GRPO_STEPS} checkpoint.every=2 checkpoint.keep=2
    algo.kl_coef=0.04 eval.every=4 eval.examples=64 eval.batch=64 eval.samples=0
    log.completions_every=0 log.tensorboard=False reward.workers=0
  """.split()
  if tiny:
    settings += """
      model.embed_dim=16 model.num_layers=1 model.num_heads=2 model.num_kv_heads=1 model.head_dim=8
      model.mlp_dim=32 batch.prompts=4 batch.group_size=4 sampling.max_tokens=12 warm_start.batch=8
      eval.examples=8 eval.batch=8
    """.split()
  return settings


def kill_at(job: Any, workdir: Path, step: int) -> int:
  """Starts a run and kills it once it has written this step. Returns the last step it wrote."""
  process = job.start(workdir)
  try:
    while process.poll() is None:
      if last_step(workdir) >= step:
        process.send_signal(signal.SIGKILL)
        process.wait()
        # A line that was cut off is no row.
        return last_step(workdir)
      time.sleep(0.005)
  finally:
    process.kill()
    process.wait()
  raise RuntimeError(f"the run ended with code {process.returncode} before step {step}")


def last_step(workdir: Path) -> int:
  """The step of the last whole row of a run, -1 without one."""
  rows = read_rows(workdir / "metrics.jsonl")
  return rows[-1]["step"] if rows else -1


def differences_of_rows(
  ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
  """How far two lists of metrics are apart. The largest difference is relative to 1 + |theirs|."""
  largest, worst, differ = 0.0, None, 0
  for mine, other in zip(ours, theirs):
    differ += mine != other
    for name in mine.keys() & other.keys():
      gap = abs(mine[name] - other[name]) / (1 + abs(other[name]))
      if gap > largest:
        largest, worst = gap, {"step": mine["step"], "name": name}
  steps_agree = [row["step"] for row in ours] == [row["step"] for row in theirs]
  return {
    "number": len(ours),
    "equal": steps_agree and not differ,
    "that_differ": differ,
    "largest_difference": largest,
    "there": worst,
  }


def differences_of_arrays(
  ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]
) -> dict[str, Any]:
  """How far the parameters, moments and other arrays of two checkpoints are apart."""
  import kill

  bits, largest, worst = 0, 0.0, None
  for name in sorted(ours.keys() | theirs.keys()):
    mine, other = ours.get(name), theirs.get(name)
    bits += (differing := kill.differing_bits(mine, other))
    if differing and mine is not None and other is not None and mine.shape == other.shape:
      gap = float(np.max(np.abs(mine.astype(float) - other.astype(float))))
      if gap > largest:
        largest, worst = gap, name
  return {
    "number": len(theirs),
    "equal": bits == 0,
    "differing_bits": bits,
    "largest_difference": largest,
    "there": worst,
  }


def golden(part: Part) -> None:
  """The golden numbers on this device: the largest differences, relative to 1 + |expected|.

  `float32` has the inputs in float32. `bfloat16` has log-probs, entropies and advantages rounded to
  bfloat16, and computes in float32, because the objective always does. There, rounding can carry an
  input over a bound, so the median of the cases says more than the largest.
  """
  sys.path.append(str(ROOT / "tests"))
  import golden_cases
  import jax

  jax.config.update("jax_default_matmul_precision", "float32")  # as a run in float32 does
  files = golden_cases.load(golden_cases.FOLDER)
  cases = [(f"{name}: {case['name']}", case) for name in files for case in files[name]]
  # Cases of all files from the start, so that a part that is cut off has seen each of them.
  cases = [case for offset in range(16) for case in cases[offset::16]][:: 8 if part.tiny else 1]
  gaps: dict[str, dict[str, float]] = {"float32": {}, "bfloat16": {}}
  for number, (name, case) in enumerate(cases, 1):
    for dtype, found in gaps.items():
      found[name] = max(
        float(np.max(np.abs(ours - expected) / (1 + np.abs(expected))))
        for _, ours, expected in golden_cases.compute(case, "float32", dtype)
      )
    if number % 10 == 0 or number == len(cases):
      part.save(of=len(cases), **{dtype: summary(found) for dtype, found in gaps.items()})


def summary(gaps: Mapping[str, float]) -> dict[str, Any]:
  """The differences of all cases in a few numbers. NaN is the largest of all."""
  worst = max(gaps, key=lambda name: np.nan_to_num(gaps[name], nan=np.inf))
  values = np.array(list(gaps.values()))
  return {
    "cases": len(gaps),
    "largest": float(gaps[worst]),
    "there": worst,
    "median": float(np.median(values)),
    "above_1e-5": int((~(values <= 1e-5)).sum()),
  }


def one_line(error: BaseException) -> str:
  """An exception as one line: the first of its lines and the last, at most 200 characters each."""
  first, *others = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
  ends = [f"{type(error).__name__}: {first}"[:200], *(line[:200] for line in others[-1:])]
  return " ... ".join(ends)
