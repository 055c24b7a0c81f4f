"""Kills a short run at random moments, or fills its disk, and compares what it ends with.

  python experiments/kill.py --kills 100        # SIGKILL, then the same command, again and again
  python experiments/kill.py --kills 20 --images --set model.vision=trained
  python experiments/kill.py --full-disk 20     # needs root: it mounts a small tmpfs

The run has a warm start and steps of GRPO, with a checkpoint every second step. First it runs twice
undisturbed. These two must agree, and the second one, whose programs are compiled already, says how
long a process lives. Where a later one lives less long, that time counts. The moment of a kill, or
of the full disk, is uniform over that time, so many fall into the start of the process.

Each disturbed run goes on with the same command until it is finished. Then every row of metrics
(without times), every byte of completions and every bit of the newest checkpoint (parameters,
optimizer, reference, host state) must be those of the undisturbed run. The exit code is 1 if one is
not, or if a full disk ends in anything but exit code 1 and one line.
"""

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
import contextlib
import json
import os
from pathlib import Path
import random
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from grpo_jax.timing import is_of_clock

ROOT = Path(__file__).parents[1]
SETTINGS = """
  model.embed_dim=16 model.num_layers=1 model.num_heads=2 model.num_kv_heads=1 model.head_dim=8
  model.mlp_dim=32 batch.prompts=4 batch.group_size=4 batch.micro_batch=0 sampling.max_tokens=12
  algo.kl_coef=0.5 optimizer.learning_rate=0.01 warm_start.batch=8 warm_start.steps=6 steps=14
  eval.every=4 eval.examples=8 eval.batch=8 eval.samples=2 checkpoint.every=2 checkpoint.keep=2
  log.completions_every=1
""".split()
# Beside them, with images: prompts of a task that draws, and the model of small_vlm.py.
IMAGES = """
  data.task=count_shapes data.path=48 data.max_prompt_tokens=48 data.count_at_start=100
  warm_start.steps=4 steps=8
""".split()
# A tiny model answers no sum, so the reward counts digits. A step takes long enough to be met.
REWARD = """
import time

def digits(completions, **_):
  time.sleep(0.1)
  return [sum(c.isdigit() for c in text) / 12 for text in completions]
"""
PATIENCE = 1800  # seconds, on a machine with other things to do
DISK_BYTES = 6 << 20


class Job:
  """The command, for one folder after the other."""

  def __init__(
    self,
    folder: Path,
    settings: Sequence[str] = SETTINGS,
    variables: Mapping[str, str] = os.environ,
  ) -> None:
    """`settings` are those of the run, and `variables` those of its process."""
    self._folder, self._settings = folder, settings
    (folder / "reward.py").write_text(REWARD)
    self._environment = {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"), **variables}
    self._environment |= {
      "JAX_NUM_CPU_DEVICES": "1",
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
      "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }

  def start(self, workdir: Path) -> subprocess.Popen[str]:
    """Starts a process. Its errors go to a file, because a pipe could fill up."""
    settings = [*self._settings, f"reward.functions=('{self._folder / 'reward.py'}:digits',)"]
    command = [
      *(sys.executable, "-m", "grpo_jax.train", "--config=configs/arithmetic.py"),
      f"--workdir={workdir}",
      *(f"--config.{setting}" for setting in settings),
    ]
    with open(self._folder / "stderr", "w") as errors:
      return subprocess.Popen(
        command,
        cwd=ROOT,
        env=self._environment,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        text=True,
      )

  def errors(self) -> str:
    """What the last process wrote to stderr."""
    return (self._folder / "stderr").read_text()

  def finish(self, workdir: Path) -> float:
    """Runs a process to its end. Returns the seconds that it took."""
    began = time.monotonic()
    code = self.start(workdir).wait(PATIENCE)
    if code:
      raise RuntimeError(f"exit code {code}: {self.errors()}")
    return time.monotonic() - began


def rows(workdir: Path) -> list[dict[str, Any]]:
  """The rows of metrics, without times."""
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  return [
    {key: value for key, value in json.loads(line).items() if not is_of_clock(key)}
    for line in lines
  ]


def completions(workdir: Path) -> dict[str, bytes]:
  return {path.name: path.read_bytes() for path in (workdir / "completions").iterdir()}


def arrays(workdir: Path) -> dict[str, np.ndarray]:
  """Every array of the newest checkpoint and of the reference, by name."""
  found = {}
  for folder in (workdir / "checkpoints", workdir / "reference"):
    newest = max((p for p in folder.iterdir() if p.name.isdecimal()), key=lambda p: int(p.name))
    manifest = json.loads((newest / "manifest/metadata").read_text())["leaves"]
    groups = {name.partition(".")[0] for name in manifest}
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
      args = ocp.args.Composite(**{group: ocp.args.StandardRestore() for group in groups})
      restored = reader.restore(newest, args)
    for group in groups:
      for name, array in restored[group].items():
        found[f"{folder.name} {name}"] = np.asarray(array)
  return found


def differing_bits(ours: np.ndarray | None, theirs: np.ndarray | None) -> int:
  """The number of bits that differ: all of them, if the arrays cannot be compared."""
  if ours is None or theirs is None or (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
    return 8 * max(0 if a is None else a.nbytes for a in (ours, theirs))
  pairs = (np.frombuffer(a.tobytes(), np.uint8) for a in (ours, theirs))
  return int(np.unpackbits(np.bitwise_xor(*pairs)).sum())


class Tally:
  """How far the disturbed runs differ from the undisturbed one."""

  def __init__(self, plain: Path) -> None:
    self._rows, self._completions, self._arrays = rows(plain), completions(plain), arrays(plain)
    self.counts: Counter[str] = Counter()
    self.faults: Counter[str] = Counter(
      {
        "differing bits": 0,
        "rows missing": 0,
        "rows twice": 0,
        "rows that differ": 0,
        "files of completions that differ": 0,
      }
    )

  def add_finished(self, workdir: Path) -> None:
    """Compares a finished run."""
    ours, theirs = arrays(workdir), self._arrays
    for name in ours.keys() | theirs.keys():
      self.faults["differing bits"] += differing_bits(ours.get(name), theirs.get(name))
    found = Counter(row["step"] for row in rows(workdir))
    self.faults["rows missing"] += sum(row["step"] not in found for row in self._rows)
    self.faults["rows twice"] += sum(count - 1 for count in found.values())
    self.faults["rows that differ"] += sum(row not in self._rows for row in rows(workdir))
    files = completions(workdir)
    self.faults["files of completions that differ"] += sum(
      files.get(name) != self._completions.get(name)
      for name in files.keys() | self._completions.keys()
    )
    self.counts["finished runs"] += 1

  def is_beginning(self, workdir: Path) -> bool:
    """Whether the rows of an unfinished run are the first ones of the undisturbed run."""
    path = workdir / "metrics.jsonl"
    found = rows(workdir) if path.exists() else []
    return found == self._rows[: len(found)]

  def print(self) -> None:
    print(", ".join(f"{count} {name}" for name, count in (self.counts + Counter()).items()))
    print("; ".join(f"{count} {name}" for name, count in self.faults.items()), flush=True)


def in_a_save(workdir: Path) -> bool:
  return any(workdir.glob("*/*.orbax-checkpoint-tmp"))


def newest_step(workdir: Path) -> int:
  return max((int(p.name) for p in workdir.glob("checkpoints/*") if p.name.isdecimal()), default=0)


def kill(job: Job, folder: Path, tally: Tally, seconds: float, count: int) -> None:
  """Kills `count` processes, in as many runs as it takes. Each run goes on to its end."""
  kills = 0
  while kills < count:
    workdir = folder / f"run-{tally.counts['finished runs']}"
    is_finished = False
    while not is_finished:
      is_new = not workdir.exists()
      process, start = job.start(workdir), time.monotonic()
      try:
        # After the last kill, the run may finish.
        code = process.wait(random.uniform(0, seconds) if kills < count else PATIENCE)
        if code:
          raise RuntimeError(f"exit code {code}: {job.errors()}")
        is_finished = True
        if is_new:  # the machine has become faster, and a process lives less long
          seconds = min(seconds, time.monotonic() - start)
      except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
        if kills == count:
          raise
        kills += 1
        tally.counts["kills"] += 1
        tally.counts["of them in a save"] += in_a_save(workdir)
        tally.counts["of them before the first checkpoint"] += not newest_step(workdir)
    tally.add_finished(workdir)
    tally.print()


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
  """Mounts a tmpfs on a new folder."""
  mount = folder / "disk"
  mount.mkdir()
  subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", mount], check=True)
  try:
    yield mount
  finally:
    subprocess.run(["umount", mount], check=True)


def fill(disk: Path, process: subprocess.Popen[str]) -> None:
  """Takes every free block of the disk, also those that become free, until the process ends."""
  with open(disk / "ballast", "ab", buffering=0) as ballast:
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None:
      if time.monotonic() > deadline:
        process.kill()
      try:
        ballast.write(bytes(1024))
      except OSError:
        time.sleep(0.002)


def fill_disks(job: Job, folder: Path, tally: Tally, seconds: float, count: int) -> None:
  """Fills the disk under `count` runs. Each goes on when the disk is free again."""
  with small_disk(folder) as disk:
    while tally.counts["full disks"] < count:
      workdir = disk / f"run-{tally.counts['finished runs']}"
      process = job.start(workdir)
      with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(random.uniform(0, seconds))
      before = newest_step(workdir)
      fill(disk, process)
      code = process.wait()
      if code == 0:  # nothing was left to write
        tally.counts["runs that ended before their disk was full"] += 1
      else:
        check_failure(code, job.errors(), workdir, before, tally)
      (disk / "ballast").unlink()
      if code:
        job.finish(workdir)
      tally.add_finished(workdir)
      tally.print()
      subprocess.run(["rm", "-r", workdir], check=True)


def check_failure(code: int, errors: str, workdir: Path, before: int, tally: Tally) -> None:
  """Counts what a run on a full disk should not do."""
  tally.counts["full disks"] += 1
  tally.counts["of them in a save"] += in_a_save(workdir)
  print(errors.strip(), flush=True)
  is_one_line = errors.count("\n") == 1 and errors.startswith("error: ")
  tally.faults["ends other than exit code 1 and one line"] += (code, is_one_line) != (1, True)
  saved = newest_step(workdir)
  tally.faults["lines without the newest checkpoint"] += (
    bool(saved) and f"step {saved};" not in errors
  )
  tally.faults["checkpoints lost"] += saved < before
  tally.faults["damaged metrics.jsonl"] += not tally.is_beginning(workdir)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--kills", type=int, default=0, help="how many processes to kill")
  parser.add_argument("--full-disk", type=int, default=0, help="how many disks to fill")
  parser.add_argument("--images", action="store_true", help="prompts with images")
  parser.add_argument("--set", action="append", default=[], help="a further setting, key=value")
  parser.add_argument("--seed", type=int, default=0, help="another seed draws other moments")
  args = parser.parse_args()
  random.seed(args.seed)
  with tempfile.TemporaryDirectory(prefix="grpo_jax_kill_") as name:
    folder = Path(name)
    settings = [*SETTINGS, *args.set]
    if args.images:
      script = Path(__file__).with_name("small_vlm.py")
      subprocess.run([sys.executable, script, folder / "model"], check=True)
      settings = [*SETTINGS, *IMAGES, f"model.path={folder / 'model'}", *args.set]
    job = Job(folder, settings)
    job.finish(folder / "plain")  # compiles
    seconds = job.finish(folder / "again")
    tally = Tally(folder / "plain")
    tally.add_finished(folder / "again")
    tally.counts.clear()
    print(f"an undisturbed process lives for {seconds:.1f} s", flush=True)
    if args.kills:
      kill(job, folder, tally, seconds, args.kills)
    if args.full_disk:
      fill_disks(job, folder, tally, seconds, args.full_disk)
  sys.exit(any(tally.faults.values()))


if __name__ == "__main__":
  main()
