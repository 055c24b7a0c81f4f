"""The mesh of devices: its axes, and the start of several processes."""

import math
import os
from typing import Mapping, Sequence

import jax
from jax.sharding import AxisType

from grpo_jax.config import Mesh
from grpo_jax.settings import ConfigError

AXES = ("data", "fsdp", "expert", "tensor")


def make_mesh(config: Mesh, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
  """All devices as a [data, fsdp, expert, tensor] mesh; an axis of -1 takes what the others leave.

  Raises ConfigError where the axes do not multiply to the number of devices.
  """
  devices = jax.devices() if devices is None else devices
  sizes, count = [getattr(config, axis) for axis in AXES], len(devices)
  asked = ", ".join(f"mesh.{axis}={size}" for axis, size in zip(AXES, sizes))
  if any(size < 1 and size != -1 for size in sizes) or sizes.count(-1) > 1:
    raise ConfigError(
      f"{asked}: each must be at least 1, and one of them may be -1 for what is left"
    )
  known = math.prod(size for size in sizes if size != -1)
  sizes = [count // known if size == -1 else size for size in sizes]
  if math.prod(sizes) != count:
    raise ConfigError(f"{asked} does not fit {count} devices: choose axes whose product is {count}")
  return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def initialize_distributed() -> None:
  """Joins the processes of a Slurm step, a TPU pod or JAX_COORDINATOR_ADDRESS; does nothing elsewhere.

  Call it before any other use of JAX. Under Slurm, JAX gives each task one GPU: start as many tasks per node as it has
  GPUs. Elsewhere, JAX_COORDINATOR_ADDRESS (host:port of the first), JAX_NUM_PROCESSES and JAX_PROCESS_ID say who is who.
  """
  if jax.distributed.is_initialized():
    return
  if "JAX_COORDINATOR_ADDRESS" in os.environ:
    jax.distributed.initialize(
      num_processes=_number("JAX_NUM_PROCESSES"), process_id=_number("JAX_PROCESS_ID")
    )
  elif _several_processes(os.environ):
    jax.distributed.initialize()


def _number(variable):
  value = os.environ.get(variable, "")
  if not value.isdecimal():
    raise ConfigError(
      f"environment variable {variable} is {value!r}: beside JAX_COORDINATOR_ADDRESS it must be a number"
    )
  return int(value)


def _several_processes(environ: Mapping[str, str]) -> bool:
  tasks = int(
    environ.get("SLURM_STEP_NUM_TASKS", 1)
  )  # of this srun: an allocation alone starts nothing
  hosts = environ.get("TPU_PROCESS_ADDRESSES", environ.get("TPU_WORKER_HOSTNAMES", "")).split(",")
  # On a Cloud TPU VM importing jax sets the first; a notebook's TPU without a metadata server sets the second.
  cloud_tpu = environ.get("TPU_ML_PLATFORM") == "JAX" and "TPU_SKIP_MDS_QUERY" not in environ
  return tasks > 1 or len(hosts) > 1 or cloud_tpu
