"""Trains with XManager: one run, or the runs of a sweep as the work units of an experiment.

xmanager launch experiments/xm_launch.py -- --config=configs/arithmetic.py --workdir=DIR
  [--config.section.key=value] [--sweep=FILE] [--executor=local|vertex|kubernetes]

A sweep is a file as for `python -m grpo_jax.launch`, which also says which runs are left to start.
Run the same command again to go on with them. With --executor=local the runs train on this machine,
one after another. Ctrl-C makes them save and end. The other executors build an image with Docker,
in which `--workdir` has to be a folder that lasts, such as /gcs/BUCKET/DIR on Vertex AI.

XManager and grpo_jax need not be in the same environment: --python names that of grpo_jax.
"""

import asyncio
from collections.abc import Sequence
import json
from pathlib import Path
import re
import shlex
import shutil
import subprocess
import sys
from typing import Any

from absl import app, flags

try:
  from xmanager import xm, xm_local
except ModuleNotFoundError:
  sys.exit("xm_launch.py needs xmanager: uv tool install xmanager (docs/clusters.md)")

FINISHED, FAILED, BAD_INPUT, STOPPED = 0, 1, 2, 75  # as in the table of docs/runs.md
_TRAIN = "grpo_jax.train"
_CONFIG_FLAG = re.compile(r"--?(config(?:\.[^=]+)?)(?:=|$)")

_WORKDIR = flags.DEFINE_string("workdir", None, "the folder of the run, or of the sweep's runs")
_SWEEP = flags.DEFINE_string("sweep", None, "a Python file whose sweep() yields settings")
_RUNS = flags.DEFINE_string(
  "runs", None, "a file with a command in each line, in the place of --config and --workdir"
)
_PYTHON = flags.DEFINE_string("python", "python", "the Python that can import grpo_jax")
_AT_ONCE = flags.DEFINE_integer(
  "at_once", 1, "how many runs --executor=local trains at once", lower_bound=1
)
_REQUIREMENTS = flags.DEFINE_string(
  "requirements", "{}", 'what xm.JobRequirements takes, as JSON such as {"A100": 8}'
)
_IMAGE = flags.DEFINE_string("image", "python:3.12", "the image that a container is built upon")
_EXTRA = flags.DEFINE_string("extra", "cuda", "the extra of setup.py that a container installs")

_EXECUTORS = {
  "local": xm_local.Local,
  "vertex": xm_local.Vertex,
  "kubernetes": xm_local.Kubernetes,
}
_EXECUTOR = flags.DEFINE_enum("executor", "local", sorted(_EXECUTORS), "where the runs train")


def _define_config_flags(argv: Sequence[str]) -> None:
  """Makes absl accept --config and --config.KEY=VALUE, whose keys only grpo_jax knows."""
  for name in {match[1] for match in map(_CONFIG_FLAG.match, argv) if match}:
    flags.DEFINE_string(name, None, "for grpo_jax.train")


_define_config_flags(sys.argv)


def commands() -> list[list[str]]:
  """The command of each run that is neither finished nor running."""
  if _RUNS.value:
    text = Path(_RUNS.value).read_text()
  else:
    command = [_PYTHON.value, "-m", "grpo_jax.launch", "--on=xmanager", "--dry_run"]
    command += [f"--{flag.name}={flag.value}" for flag in (_WORKDIR, _SWEEP) if flag.value]
    done = subprocess.run(
      [*command, "--", *filter(_CONFIG_FLAG.match, sys.argv)], stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
      if done.returncode != BAD_INPUT:
        print(f"error: flag --python={_PYTHON.value} must be a Python that can import grpo_jax")
      sys.exit(done.returncode)
    text = done.stdout
  return [shlex.split(line) for line in text.splitlines()]


def packageable(command: Sequence[str], executor: str) -> xm.Packageable:
  """The program of the runs: the Python of this machine, or a container with this source tree."""
  spec = _EXECUTORS[executor].Spec()
  if executor == "local":
    return xm.binary(executor_spec=spec, path=shutil.which(command[0]))
  root = Path(__file__).resolve().parents[1]
  instructions = [
    f"COPY {root.name}/ /grpo_jax",
    "WORKDIR /grpo_jax",
    f"RUN pip install -e '.[{_EXTRA.value}]'",
  ]
  return xm.python_container(
    executor_spec=spec,
    path=str(root),
    base_image=_IMAGE.value,
    docker_instructions=instructions,
    entrypoint=xm.ModuleName(_TRAIN),
  )


def job(command: Sequence[str], executable: xm.Executable, executor: str) -> xm.Job:
  """The job of a run. Its settings are the arguments that XManager shows."""
  flags_at = command.index(_TRAIN) + 1
  args: list[Any] = [list(command[1:flags_at])] if executor == "local" else []
  for flag in command[flags_at:]:
    match = re.fullmatch(r"--([^=]+)=(.*)", flag, flags=re.DOTALL)
    args.append({match[1]: match[2]} if match else [flag])
  requirements = xm.JobRequirements(**json.loads(_REQUIREMENTS.value))
  return xm.Job(
    name=_name(command),
    executable=executable,
    executor=_EXECUTORS[executor](requirements=requirements),
    args=xm.merge_args(*args),
  )


def _name(command: Sequence[str]) -> str:
  """The name of a run's folder."""
  return Path(command[-1].partition("=")[2]).name


def launch(runs: Sequence[Sequence[str]], executor: str) -> int:
  """Adds a work unit for each run. With the local executor it waits for their ends.

  Args:
    runs: The commands of the runs.
    executor: Where they train.

  Returns:
    0 if none failed, 75 if some were stopped and none failed, else 1.
  """
  codes: list[int] = []

  async def train(experiment: xm.Experiment, command: Sequence[str], made: xm.Job) -> None:
    async with at_once:
      unit = await experiment.add(made)
      if executor == "local":
        codes.append(await _exit_code(unit))
        print(f"[{_name(command)}] exited with {codes[-1]}")

  at_once = asyncio.Semaphore(_AT_ONCE.value)
  try:
    with xm_local.create_experiment(experiment_title="grpo_jax") as experiment:
      [executable] = experiment.package([packageable(runs[0], executor)])
      jobs = [(command, job(command, executable, executor)) for command in runs]

      async def train_all(unit: xm.ExperimentUnit) -> None:
        del unit
        await asyncio.gather(*(train(experiment, *one) for one in jobs))

      # A generator of jobs, so that Ctrl-C ends the wait for them as XManager means it to.
      experiment.add(train_all, role=xm.AuxiliaryUnitRole(termination_delay_secs=0))
  except KeyboardInterrupt:
    print("asked to stop: what runs saves and ends; the same command goes on")
    return STOPPED
  except RuntimeError:  # XManager raises the failure of a job again
    if not any(codes):
      raise
  failed = set(codes) - {FINISHED}
  return FAILED if failed - {STOPPED} else STOPPED if failed else FINISHED


async def _exit_code(unit: xm.ExperimentUnit) -> int:
  """Waits for the end of a local work unit."""
  try:
    await unit.wait_until_complete()
  except xm.ExperimentUnitFailedError as error:
    return int(re.search(r"code: (-?\d+)", str(error))[1])
  return FINISHED


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"{argv[1]} is no flag")
  runs = commands()
  sys.exit(launch(runs, _EXECUTOR.value) if runs else FINISHED)


if __name__ == "__main__":
  app.run(main)
