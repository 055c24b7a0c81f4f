"""Launches runs as Slurm jobs: a sweep as an array, several hosts of a run as tasks of one srun."""

from collections.abc import Sequence
import math
import os
from pathlib import Path
import re
import shlex
import shutil
import subprocess
import sys
import time

from grpo_jax.around.launchers.launcher import launch_folder, say
from grpo_jax.around.launchers.options import Options
from grpo_jax.around.launchers.units import TRAIN, Unit
from grpo_jax.console.exit_codes import DONE, STOPPED
from grpo_jax.progress import doing
from grpo_jax.settings import ConfigError, RunFailed
from grpo_jax.storage.json_files import replace_file
from grpo_jax.storage.workdir import make_folder

# States of jobs that Slurm still lists although they have ended for good.
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
# How long `settle` waits. Slurm kills the processes of ending jobs after KillWait, 30 s by default.
_SECONDS_TO_COMPLETE = 180.0
_SECONDS_BETWEEN_LOOKS = 2.0
_SECONDS_BETWEEN_LINES = 10.0
_COMPLETING = " completing"  # ends the description by `queued` of a job that Slurm is ending
_HERE = "run this on a machine of the cluster, where sbatch and squeue are"


def launch(units: Sequence[Unit], options: Options) -> int:
  """Submits the units as one job or as one array of jobs. Returns 0 without waiting for their end.

  Args:
    units: The single run, or runs of a sweep.
    options: The options of the script, and dry_run, which prints the script instead.

  Raises:
    ConfigError: There is no sbatch, or an option is invalid.
    RunFailed: sbatch refuses the job.
  """
  folder = launch_folder(units[0])
  earlier_numbers = (path.stem.rpartition("-")[2] for path in folder.glob("slurm-*.sh"))
  number = 1 + max((int(text) for text in earlier_numbers if text.isdecimal()), default=0)
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
    printed = _output(["sbatch", "--parsable", str(path)])  # "JOB" or "JOB;CLUSTER"
    job = printed.split(";")[0].strip()
  except RunFailed:
    path.unlink()  # no job uses the script
    raise
  say(f"submitted job {job}: {path}; its logs will be beside it")
  return DONE


def queued(units: Sequence[Unit]) -> dict[str, str]:
  """Finds units in Slurm's queue: a text such as "job 12_3 pending: Priority" by unit title.

  The comment of a job is the path of its script in the launch folder. The script says which run
  each task of an array trains.

  Raises:
    RunFailed: squeue fails, or the script of a job cannot be read.
  """
  if not shutil.which("squeue"):
    say(f"warning: there is no squeue, so nothing is known of jobs: {_HERE}")
    return {}
  # By default, squeue lists only pending, running and completing jobs, and no suspended ones.
  command = ["squeue", "--noheader", "--array", "--states=all", f"--name={job_name(units)}"]
  folder = launch_folder(units[0])
  found: dict[str, str] = {}
  scripts: dict[str, dict[str, str]] = {}
  for line in _output([*command, "--format=%i|%T|%r|%k"]).splitlines():
    job, state, reason, comment = line.split("|", 3)
    # Jobs of other folders may have the same name.
    if state in _ENDED or Path(comment).parent != folder:
      continue
    if comment not in scripts:
      scripts[comment] = names_in(_read(Path(comment), job))
    task = job.partition("_")[2]
    title = scripts[comment][task] if task else units[0].title
    why = f": {reason}" if state == "PENDING" and reason != "None" else ""
    found[title] = f"job {job} {state.lower()}{why}"
  return found


def settle(units: Sequence[Unit]) -> bool:
  """Waits until no job of the units is in the state COMPLETING, in which processes may still save.

  Slurm then either removes the job, so that its run must be submitted again, or queues the job
  again, so that its run must not.

  Returns:
    Whether no such job is left. False after a timeout.

  Raises:
    RunFailed: squeue fails, or the script of a job cannot be read.
  """
  if not shutil.which("squeue"):
    return True  # nothing is known of jobs, as `queued` says
  began, last_line_at = time.monotonic(), -math.inf
  while ending := [words for words in queued(units).values() if words.endswith(_COMPLETING)]:
    jobs = ending[0].removesuffix(_COMPLETING)
    jobs += f" and {len(ending) - 1} more" if len(ending) > 1 else ""
    now = time.monotonic()
    if now - began > _SECONDS_TO_COMPLETE:
      say(
        f"Slurm has not ended {jobs} in {_SECONDS_TO_COMPLETE:g} seconds: see squeue, and run the"
        " same command again when it has"
      )
      return False
    if now - last_line_at > _SECONDS_BETWEEN_LINES:
      last_line_at = now
      say(f"waiting until Slurm has ended {jobs}")
    time.sleep(_SECONDS_BETWEEN_LOOKS)
  return True


def _read(path: Path, job: str) -> str:
  """Reads the script of a job. Raises RunFailed if it cannot be read."""
  try:
    return path.read_text()
  except OSError as error:
    raise RunFailed(
      f"job {job} is of this folder, and its script {path} cannot be read ({error.strerror}), so"
      f" its runs are not known: wait for its end, or scancel {job}"
    ) from None


def _output(command: Sequence[str]) -> str:
  """Runs a command of Slurm and returns its standard output. Raises RunFailed if it fails."""
  with doing(f"waiting for {command[0]}"):
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
  if done.returncode:
    reason = " ".join(done.stderr.split()).removeprefix(f"{command[0]}: ")
    raise RunFailed(f"{command[0]}: {reason or f'exit code {done.returncode}'}")
  return done.stdout


# How long the other processes of a run, which may wait for it, still run after one has ended.
_GRACE_SECONDS = 30
_EARLIEST_SECONDS = 60  # Slurm may send the signal up to this much earlier than requested

_HEADER = """\
#!/bin/bash
# Written by grpo_jax.launch.{contents}
{options}
# Slurm queues the job again when it preempts it and when its node fails.
#SBATCH --requeue
# So many seconds before the time limit, each process of the run gets SIGTERM. The run then saves
# its state and exits with {stopped}.
#SBATCH --signal=TERM@{stop_ahead}
"""

_BODY = """
flags=(
{flags}
)
{choice}
# Since version 22.05, srun does not read this option of sbatch.
[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
trap : TERM  # scancel sends it to this shell too, which then waits until the run has saved
{serves}srun --wait={grace} --kill-on-bad-exit=0{label}{place} \\
  {python} -m {train} "${{flags[@]}}"
code=$?

# A job that Slurm is ending is not RUNNING any more. Slurm itself queues it again after a
# preemption, and leaves it ended after scancel.
state=$(squeue --noheader --jobs="$job" --format=%T)
if [ "$code" = {stopped} ] && [ "$state" = RUNNING ]; then
  echo "job $job: stopped and saved, queued again"
  scontrol requeue "$job"
fi
exit "$code"
"""

# The slice of `flags` is all but the last one, --workdir, which grpo_jax.engine does not have.
_SERVES = """\
# All nodes but the first serve rollout.engine. They end with this script.
nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
port=$((20000 + SLURM_JOB_ID % 10000))  # of this job, which may share a node
printf -v urls "'http://%s:$port'," "${{nodes[@]:1}}"
for node in "${{!nodes[@]}}"; do
  [ "$node" = 0 ] || srun --nodes=1 --ntasks=1 --relative="$node" \\
    {python} -m grpo_jax.engine "${{flags[@]::${{#flags[@]}}-1}}" \\
    --config.rollout.engine_urls="($urls)" --url="http://${{nodes[node]}}:$port"{more} &
done
flags+=("--config.rollout.engine_urls=($urls)")
"""


def script(units: Sequence[Unit], options: Options, path: Path) -> str:
  """Writes the text of the script that sbatch runs for these units.

  Args:
    units: The single run, or runs of a sweep.
    options: The options of the launcher.
    path: The file that the script will be written to. The comment of the job is this path, so that
      `queued` can find the job.

  Raises:
    ConfigError: The time limit is malformed or too short for stop_ahead, the options of the engine
      are invalid, or an option of sbatch contains a newline.
  """
  _check_time_limit(options)
  is_sweep = bool(units[0].name)
  contents = ""
  if is_sweep:
    # `queued` reads these lines with `names_in`.
    names = (f"#   {index}: {unit.name}" for index, unit in enumerate(units))
    contents = "\n".join([" Each task of the array trains one run of the sweep:", *names])
  # The flags with which all lists begin, which the script has once. `commonprefix` compares any
  # sequences.
  common_flags = os.path.commonprefix([unit.flags for unit in units])
  has_several_processes = options.hosts * options.tasks_per_host > 1
  # A run of several processes does its own sampling, so it cannot use engine hosts.
  if options.engine_hosts and has_several_processes:
    raise ConfigError(
      "flag --engine_hosts: a run of several processes samples itself; leave out --hosts and"
      " --tasks_per_host"
    )
  if options.engine and not options.engine_hosts:
    raise ConfigError("flag --engine: it needs --engine_hosts above 0")
  python = shlex.quote(sys.executable)
  engine_flags = "".join(f" {shlex.quote(flag)}" for flag in options.engine)
  serve_engine = _SERVES.format(python=python, more=engine_flags)
  header = _HEADER.format(
    contents=contents,
    options="\n".join(f"#SBATCH {option}" for option in _options(units, options, path)),
    stop_ahead=options.stop_ahead,
    stopped=STOPPED,
  )
  return header + _BODY.format(
    flags="\n".join(f"  {shlex.quote(flag)}" for flag in common_flags),
    choice=_choice(units, len(common_flags)),
    grace=_GRACE_SECONDS,
    label=" --label" if has_several_processes else "",
    serves=serve_engine if options.engine_hosts else "",
    # The run trains on the first node. The other nodes serve the engine.
    place=" --nodes=1 --ntasks=1 --relative=0" if options.engine_hosts else "",
    python=python,
    train=TRAIN,
    stopped=STOPPED,
  )


def names_in(text: str) -> dict[str, str]:
  """Reads the names of a sweep's runs from its script, by the array task that trains each."""
  return dict(re.findall(r"^#   (\d+): (.*)$", text, flags=re.MULTILINE))


def job_name(units: Sequence[Unit]) -> str:
  """The name of the job: the name of the run's or sweep's folder, without unusual characters."""
  folder = Path(units[0].workdir)
  name = (folder.parent if units[0].name else folder).name
  return re.sub(r"[^\w.=+-]", "_", name, flags=re.ASCII)[:100] or "grpo_jax"


def seconds(time_limit: str) -> int | None:
  """Parses a time limit of Slurm: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S. None if it is malformed."""
  match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time_limit)
  if not match:
    return None
  days, *parts = match.groups()
  numbers = [int(part) for part in parts if part is not None]
  # The first number is hours after days or if there are three numbers, else minutes.
  first = 0 if days is not None or len(numbers) == 3 else 1
  units = (3600, 60, 1)[first : first + len(numbers)]
  if len(units) < len(numbers):
    return None
  return int(days or 0) * 86400 + sum(n * unit for n, unit in zip(numbers, units))


def _check_time_limit(options: Options) -> None:
  """Raises ConfigError for a time limit that is malformed or leaves no time to train."""
  limit = options.time_limit
  if not limit:
    return
  total = seconds(limit)
  if total is None:
    raise ConfigError(
      f"flag --time_limit={limit}: write minutes, hours:minutes:seconds or"
      " days-hours:minutes:seconds"
    )
  if total < options.stop_ahead + _EARLIEST_SECONDS:
    raise ConfigError(
      f"flag --time_limit={limit} is {total} seconds: it must be"
      f" {_EARLIEST_SECONDS} seconds longer than --stop_ahead={options.stop_ahead}, or the run"
      " would stop as soon as it starts"
    )


def _options(units: Sequence[Unit], options: Options, path: Path) -> list[str]:
  """The options of sbatch for these units, quoted for a shell.

  Raises ConfigError for newlines, and for a name or a comment of the user.
  """
  is_sweep = bool(units[0].name)
  # sbatch replaces %A, %a and %j by numbers, and %% by %.
  log = f"{path.parent}/slurm-".replace("%", "%%") + ("%A_%a.log" if is_sweep else "%j.log")
  lines = [f"--job-name={job_name(units)}", f"--comment={path}"]  # by which `queued` finds the job
  for given in options.sbatch:
    if given.startswith(("--job-name", "--comment", "-J")):
      raise ConfigError(
        f"flag --sbatch={given}: leave it out, because the launcher finds its jobs by their"
        " --job-name and --comment"
      )
  if is_sweep:
    limit = f"%{options.at_once}" if options.at_once else ""
    lines.append(f"--array=0-{len(units) - 1}{limit}")
  nodes = options.hosts + options.engine_hosts
  lines += [f"--nodes={nodes}", f"--ntasks-per-node={options.tasks_per_host}"]
  if options.time_limit:
    lines.append(f"--time={options.time_limit}")
  if options.partition:
    lines.append(f"--partition={options.partition}")
  # A job that is queued again continues its log. The user's options are last, so that they win.
  lines += [f"--chdir={Path.cwd()}", f"--output={log}", "--open-mode=append", *options.sbatch]
  for line in lines:
    if "\n" in line:
      raise ConfigError(f"sbatch takes no option with a newline: {line!r}")
  return [shlex.quote(line) for line in lines]


def _choice(units: Sequence[Unit], common: int) -> str:
  """The lines of the script that add a run's flags after the first `common` ones, and set $job."""
  if not units[0].name:
    return f"flags+=({shlex.quote(f'--workdir={units[0].workdir}')})\njob=$SLURM_JOB_ID\n"
  lines = ["case $SLURM_ARRAY_TASK_ID in"]
  for index, unit in enumerate(units):
    own = (*unit.flags[common:], f"--workdir={unit.workdir}")
    lines.append(f"  {index}) flags+=({shlex.join(own)}) ;;")
  # SLURM_JOB_ID is ambiguous: for one of the tasks, it is the number of the whole array.
  return "\n".join([*lines, "esac", "job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID", ""])
