"""Starts and ends the processes of a run together."""

from collections.abc import Mapping
import os
from typing import TYPE_CHECKING

from grpo_jax.lazy import jax
from grpo_jax.settings import ConfigError

if TYPE_CHECKING:
  from grpo_jax.parallel.watch import Watch

# Seconds, for a host that vanishes without closing its connections. JAX's default is 100.
_HEARTBEAT_TIMEOUT = 40
_watches: "list[Watch]" = []  # this process's watch, if the run has several processes


def initialize_distributed() -> None:
  """Joins the processes of a Slurm step, of a TPU pod or of JAX_COORDINATOR_ADDRESS.

  Otherwise, or if the processes have joined already, it does nothing. Call it before any other use
  of JAX.

  Under Slurm, JAX assigns one GPU to each task: start as many tasks per node as the node has GPUs.
  Without Slurm or a TPU pod, set three environment variables for each process:
  JAX_COORDINATOR_ADDRESS (host:port of the first process), JAX_NUM_PROCESSES and JAX_PROCESS_ID.

  Raises:
    ConfigError: JAX_COORDINATOR_ADDRESS is set and one of the other two is not a number, or the
      processes do not find each other.
  """
  if jax.distributed.is_initialized():
    return
  if "JAX_COORDINATOR_ADDRESS" in os.environ:
    _join(
      num_processes=_number_from_environment("JAX_NUM_PROCESSES"),
      process_id=_number_from_environment("JAX_PROCESS_ID"),
    )
  elif _has_several_processes(os.environ):  # JAX finds these processes without arguments
    _join()


def ended() -> None:
  """Records that this process has finished its work. From now on, the other processes may end."""
  if _watches:
    _watches[0].stop()


def failed_together() -> bool:
  """Whether all processes of the run have failed. True for a run of one process.

  If another process has ended before, this does not return, but ends this process, too.
  """
  return not _watches or _watches[0].all_failed()


def _watch_the_others() -> None:
  """Connects this process so that it ends when another process ends. See watch.py."""
  from jax._src import distributed  # nothing public has the coordinator's address
  from jax.experimental import multihost_utils

  from grpo_jax.parallel import watch

  address = distributed.global_state.coordinator_address
  watched = watch.Watch(jax.process_index(), jax.process_count(), watch.leave)
  host = address.rpartition(":")[0].strip("[]") if address else "localhost"
  watched.start(host, multihost_utils.broadcast_one_to_all)
  _watches.append(watched)


def _join(**places: int) -> None:
  """Calls jax.distributed.initialize with `places`, and turns its errors into ConfigErrors."""
  try:
    jax.distributed.initialize(heartbeat_timeout_seconds=_HEARTBEAT_TIMEOUT, **places)
  except Exception as error:  # each way to start raises other exceptions
    reason = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
    raise ConfigError(
      f"the environment describes several processes, which JAX cannot join ({reason}): set"
      " JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or unset the variables of"
      " Slurm or of the TPU pod"
    ) from error
  if jax.process_count() > 1:
    _watch_the_others()


def _number_from_environment(variable: str) -> int:
  value = os.environ.get(variable, "")
  if not value.isdecimal():
    raise ConfigError(
      f"environment variable {variable} is {value!r}: beside JAX_COORDINATOR_ADDRESS it must be a "
      "number"
    )
  return int(value)


def _has_several_processes(environ: Mapping[str, str]) -> bool:
  """Whether the environment is that of a Slurm step with several tasks, or of a TPU pod."""
  # The tasks of this srun. An allocation alone starts none.
  tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
  if not tasks.isdecimal():
    raise ConfigError(f"environment variable SLURM_STEP_NUM_TASKS is {tasks!r}: not a number")
  hosts = environ.get("TPU_PROCESS_ADDRESSES", environ.get("TPU_WORKER_HOSTNAMES", "")).split(",")
  # On a Cloud TPU VM, importing jax sets TPU_ML_PLATFORM. A notebook's TPU without a metadata
  # server sets TPU_SKIP_MDS_QUERY.
  cloud_tpu = environ.get("TPU_ML_PLATFORM") == "JAX" and "TPU_SKIP_MDS_QUERY" not in environ
  return int(tasks) > 1 or len(hosts) > 1 or cloud_tpu
