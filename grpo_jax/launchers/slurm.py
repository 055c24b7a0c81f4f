"""Runs as jobs of Slurm: a sweep is an array, several hosts of a run are tasks of one srun."""

from collections.abc import Sequence
from pathlib import Path
import shutil
import subprocess

from grpo_jax.launchers.launcher import DONE, launch_folder, say
from grpo_jax.launchers.options import Options
from grpo_jax.launchers.slurm_script import job_name, names_in, script
from grpo_jax.launchers.units import Unit
from grpo_jax.patience import told_if_slow
from grpo_jax.run.json_files import replace_file
from grpo_jax.run.workdir import make_folder
from grpo_jax.settings import ConfigError, RunFailed

# Jobs that Slurm still lists and that have ended for good.
_ENDED = {
  "BOOT_FAIL",
  "CANCELLED",
  "COMPLETED",
  "DEADLINE",
  "FAILED",
  "NODE_FAIL",
  "OUT_OF_MEMORY",
  "PREEMPTED",
  "REVOKED",
  "TIMEOUT",
}
_HERE = "run this on a machine of the cluster, where sbatch and squeue are"


def launch(units: Sequence[Unit], options: Options) -> int:
  """Submits the units as one job, or as one array, and does not wait for its end.

  Args:
    units: The only run, or runs of a sweep.
    options: What the script needs, and dry_run.

  Returns:
    0 if the job is submitted.

  Raises:
    ConfigError: Slurm is absent, or an option cannot be used.
    RunFailed: sbatch refuses the job.
  """
  folder = launch_folder(units[0])
  numbers = (path.stem.rpartition("-")[2] for path in folder.glob("slurm-*.sh"))
  number = 1 + max((int(text) for text in numbers if text.isdecimal()), default=0)
  path = folder / f"slurm-{number}.sh"
  text = script(units, options, path)
  if options.dry_run:
    print(text, end="")
    return DONE
  if not shutil.which("sbatch"):
    raise ConfigError(f"flag --on=slurm: there is no sbatch: {_HERE}")
  make_folder(folder)
  replace_file(path, text)
  try:
    job = _output(["sbatch", "--parsable", str(path)]).split(";")[0].strip()
  except RunFailed:
    path.unlink()  # nothing refers to it
    raise
  say(f"submitted job {job}: {path}; its logs will be beside it")
  return DONE


def queued(units: Sequence[Unit]) -> dict[str, str]:
  """The units that are in Slurm's queue: their titles, with the job and its state.

  A job is found by its comment, which is the path of its script in the launch folder. The script
  says which run each task of an array trains.

  Raises:
    RunFailed: squeue fails, or the script of a job is gone.
  """
  if not shutil.which("squeue"):
    say(f"warning: there is no squeue, so nothing is known of jobs: {_HERE}")
    return {}
  command = ["squeue", "--noheader", "--array", "--states=all", f"--name={job_name(units)}"]
  folder = launch_folder(units[0])
  found: dict[str, str] = {}
  scripts: dict[str, dict[str, str]] = {}
  for line in _output([*command, "--format=%i|%T|%r|%k"]).splitlines():
    job, state, reason, comment = line.split("|", 3)
    if state in _ENDED or Path(comment).parent != folder:
      continue
    if comment not in scripts:
      scripts[comment] = names_in(_read(Path(comment), job))
    task = job.partition("_")[2]
    title = scripts[comment][task] if task else units[0].title
    why = f": {reason}" if state == "PENDING" and reason != "None" else ""
    found[title] = f"job {job} {state.lower()}{why}"
  return found


def _read(path: Path, job: str) -> str:
  try:
    return path.read_text()
  except OSError as error:
    raise RunFailed(
      f"job {job} is of this folder, and its script {path} cannot be read ({error.strerror}), so"
      f" its runs are not known: wait for its end, or scancel {job}"
    ) from None


def _output(command: Sequence[str]) -> str:
  """What a command of Slurm prints.

  Raises:
    RunFailed: It fails.
  """
  with told_if_slow(f"waiting for {command[0]}"):
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
  if done.returncode:
    reason = " ".join(done.stderr.split()).removeprefix(f"{command[0]}: ")
    raise RunFailed(f"{command[0]}: {reason or f'exit code {done.returncode}'}")
  return done.stdout
