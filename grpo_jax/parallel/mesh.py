"""The mesh of devices: its axes, and the start of several processes."""

from collections.abc import Mapping, Sequence
import math
import os

import jax
from jax.sharding import AxisType

from grpo_jax.config import Mesh
from grpo_jax.settings import ConfigError

AXES = ("data", "fsdp", "expert", "tensor")


def make_mesh(config: Mesh, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
  """All devices as a [data, fsdp, expert, tensor] mesh.

  Args:
    config: The size of each axis. One of them may be -1: it takes the devices that the others
      leave.
    devices: The devices of the mesh. None means all of them.

  Raises:
    ConfigError: The sizes do not multiply to the number of devices.
  """
  devices = jax.devices() if devices is None else devices
  count = len(devices)
  sizes = [getattr(config, axis) for axis in AXES]
  settings = ", ".join(f"mesh.{axis}={size}" for axis, size in zip(AXES, sizes))
  if any(size < 1 and size != -1 for size in sizes) or sizes.count(-1) > 1:
    raise ConfigError(
      f"{settings}: each must be at least 1, and one of them may be -1 for what is left"
    )
  fixed = math.prod(size for size in sizes if size != -1)
  sizes = [count // fixed if size == -1 else size for size in sizes]
  if math.prod(sizes) != count:
    raise ConfigError(
      f"{settings} does not fit {count} devices: choose axes whose product is {count}"
    )
  return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def initialize_distributed() -> None:
  """Joins the processes of a Slurm step, of a TPU pod or of JAX_COORDINATOR_ADDRESS.

  Does nothing elsewhere, or if the processes have joined already. Call it before any other use of
  JAX.

  Under Slurm, JAX gives each task one GPU: start as many tasks per node as the node has GPUs.
  Without Slurm or a TPU pod, set three environment variables for each process:
  JAX_COORDINATOR_ADDRESS (host:port of the first process), JAX_NUM_PROCESSES and JAX_PROCESS_ID.

  Raises:
    ConfigError: JAX_COORDINATOR_ADDRESS is set, and one of the other two is not a number; or the
      processes do not find each other.
  """
  if jax.distributed.is_initialized():
    return
  if "JAX_COORDINATOR_ADDRESS" in os.environ:
    _join(
      num_processes=_number_from_environment("JAX_NUM_PROCESSES"),
      process_id=_number_from_environment("JAX_PROCESS_ID"),
    )
  elif _has_several_processes(os.environ):
    _join()


def _join(**places: int) -> None:
  """jax.distributed.initialize, whose errors become ConfigErrors."""
  try:
    jax.distributed.initialize(**places)
  except Exception as error:  # each way to start has errors of its own
    reason = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
    raise ConfigError(
      f"the environment describes several processes, which JAX cannot join ({reason}): set"
      " JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or unset the variables of"
      " Slurm or of the TPU pod"
    ) from error


def _number_from_environment(variable: str) -> int:
  value = os.environ.get(variable, "")
  if not value.isdecimal():
    raise ConfigError(
      f"environment variable {variable} is {value!r}: beside JAX_COORDINATOR_ADDRESS it must be a "
      "number"
    )
  return int(value)


def _has_several_processes(environ: Mapping[str, str]) -> bool:
  """True inside a Slurm step of several tasks, or on a TPU of several hosts."""
  # The tasks of this srun: an allocation alone starts none.
  tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
  if not tasks.isdecimal():
    raise ConfigError(f"environment variable SLURM_STEP_NUM_TASKS is {tasks!r}: not a number")
  hosts = environ.get("TPU_PROCESS_ADDRESSES", environ.get("TPU_WORKER_HOSTNAMES", "")).split(",")
  # On a Cloud TPU VM, importing jax sets TPU_ML_PLATFORM. A notebook's TPU without a metadata
  # server sets TPU_SKIP_MDS_QUERY.
  cloud_tpu = environ.get("TPU_ML_PLATFORM") == "JAX" and "TPU_SKIP_MDS_QUERY" not in environ
  return int(tasks) > 1 or len(hosts) > 1 or cloud_tpu
