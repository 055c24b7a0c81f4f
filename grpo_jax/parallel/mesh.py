"""The mesh of devices."""

from collections.abc import Sequence
import math

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType
import numpy as np

from grpo_jax.config import Mesh
from grpo_jax.model.config import SLOTS_AXIS
from grpo_jax.settings import ConfigError

DATA = "data"  # the axis along which devices have the same parameters
AXES = (DATA, "fsdp", "expert", "tensor")
CONTEXT = "context"  # the axis that splits the tokens of a text. Only meshes that use it have it.


def sizes_of(mesh: jax.sharding.Mesh) -> str:
  """The axes of a mesh and their sizes as a text, such as "data 1 x fsdp 4"."""
  return " x ".join(f"{name} {size}" for name, size in mesh.shape.items())


def split(config: Mesh, devices: Sequence[jax.Device]) -> tuple[list[jax.Device], list[jax.Device]]:
  """Splits the devices of a run into those that learn and those that only sample.

  Returns:
    The devices that learn, in all processes, and those of this process that only sample: its last
    mesh.sampler devices.

  Raises:
    ConfigError: A process would have no device left to learn.
  """
  if not config.sampler:
    return list(devices), []
  by_process: dict[int, list[jax.Device]] = {}
  for device in devices:
    by_process.setdefault(device.process_index, []).append(device)
  least = min(map(len, by_process.values()))
  if config.sampler >= least:
    where = "" if len(by_process) == 1 else " in a process"
    raise ConfigError(
      f"config key mesh.sampler is {config.sampler}: there are {least} devices{where}, and at least"
      " one must learn"
    )
  learn = [device for in_process in by_process.values() for device in in_process[: -config.sampler]]
  # If programs are only compiled for `devices`, this process may have none of them.
  local = by_process.get(jax.process_index(), next(iter(by_process.values())))
  return learn, local[-config.sampler :]


def mesh_apart(mesh: jax.sharding.Mesh, devices: Sequence[jax.Device]) -> jax.sharding.Mesh:
  """The mesh of the devices that only sample. `sampling_mesh` then widens its axis `tensor`.

  Args:
    mesh: The mesh of the devices that learn, with the sizes of the axes `expert` and `tensor`.
    devices: The devices that only sample.

  Raises:
    ConfigError: The number of devices is not a multiple of expert x tensor.
  """
  expert, tensor = mesh.shape["expert"], mesh.shape["tensor"]
  if len(devices) % (expert * tensor):
    raise ConfigError(
      f"config key mesh.sampler is {len(devices)}: it must be a multiple of mesh.expert x"
      f" mesh.tensor = {expert * tensor}"
    )
  # The other devices are along `fsdp`, because `fitting.sampling_tensor` chooses a wider `tensor`
  # only where `fsdp` or `context` is above 1.
  sizes = (1, len(devices) // (expert * tensor), expert, tensor)
  return _mesh_of(sizes, AXES, devices)


def sampling_mesh(mesh: jax.sharding.Mesh, tensor: int, context: int = 1) -> jax.sharding.Mesh:
  """The mesh of the sampler. Its `fsdp` is 1, so that decoding need not gather weights.

  It has no axis `context`. If the argument exceeds 1, it has an axis `slots` of this size instead,
  along which weights are whole. It splits the cache, and prompts while they are computed.

  Args:
    mesh: The mesh of the run, or of the devices that only sample.
    tensor: The size of the axis `tensor`, a multiple of its size in `mesh`.
    context: sampling.context, the size of the axis `slots`.

  Raises:
    ConfigError: `tensor` is not such a multiple, or the two do not divide the devices.
  """
  old, experts = mesh.shape["tensor"], mesh.shape["expert"]
  if tensor % old or mesh.size % (experts * tensor):
    raise ConfigError(
      f"config key sampling.tensor is {tensor}: it must be a multiple of mesh.tensor = {old}, and"
      f" divide the {mesh.size // experts} devices that mesh.expert leaves"
    )
  left = mesh.size // (experts * tensor)
  if left % context:
    raise ConfigError(
      f"config key sampling.context is {context}: it must divide the {left} devices that"
      " mesh.expert and sampling.tensor leave"
    )
  if context > 1:
    devices = mesh.devices.reshape(-1, 1, context, experts, tensor)
    axes = (*AXES[:2], SLOTS_AXIS, *AXES[2:])
    return jax.sharding.Mesh(devices, axes, axis_types=_auto(axes))
  if mesh.shape["fsdp"] == 1 and tensor == old and CONTEXT not in mesh.shape:
    return mesh
  devices = mesh.devices.reshape(-1, 1, experts, tensor)
  return jax.sharding.Mesh(devices, AXES, axis_types=_auto(AXES))


def make_mesh(config: Mesh, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
  """Makes the [data, fsdp, expert, tensor] mesh of a run.

  If mesh.context exceeds 1, it is a [data, fsdp, context, expert, tensor] mesh.

  Args:
    config: The size of each axis. One size may be -1: the number of devices divided by the others.
    devices: The devices of the mesh. None means all devices.

  Raises:
    ConfigError: A size is invalid, several are -1, or they do not multiply to the number of
      devices.
  """
  devices = jax.devices() if devices is None else devices
  count = len(devices)
  axes = (*AXES, CONTEXT)
  sizes = [getattr(config, axis) for axis in axes]
  settings = ", ".join(f"mesh.{axis}={size}" for axis, size in zip(axes, sizes))
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
  *others, context = sizes
  if context == 1:
    return _mesh_of(others, AXES, devices)
  # `context` precedes `expert`, so that the sampler's mesh has the devices in the same order.
  axes, sizes = (*AXES[:2], CONTEXT, *AXES[2:]), [*others[:2], context, *others[2:]]
  return _mesh_of(sizes, axes, devices)


def _mesh_of(
  sizes: Sequence[int], axes: Sequence[str], devices: Sequence[jax.Device]
) -> jax.sharding.Mesh:
  return jax.sharding.Mesh(arranged(sizes, devices), axes, axis_types=_auto(axes))


def arranged(sizes: Sequence[int], devices: Sequence[jax.Device]) -> np.ndarray:
  """Arranges devices on axes of these sizes. Devices along the last axes are the best connected.

  `jax.make_mesh` refuses several slices of TPUs, several machines with GPUs and, on most TPUs, axes
  that would share an axis of the chips' torus. Here, slices are along the first axes, because the
  network between slices is the slowest.

  Args:
    sizes: The sizes of the axes. Their product is the number of devices.
    devices: The devices. TPUs of slices that are no boxes, or differ in size, stay in this order,
      slice after slice.
  """
  if devices[0].platform != "tpu":
    return mesh_utils.create_device_mesh(sizes, devices)
  slices: dict[int, list[jax.Device]] = {}
  for device in devices:
    slices.setdefault(getattr(device, "slice_index", 0), []).append(device)
  if len({*map(len, slices.values())}) > 1 or not all(map(_fill_a_box, slices.values())):
    in_slices = [device for number in sorted(slices) for device in slices[number]]
    return np.asarray(in_slices).reshape(sizes)
  if len(slices) == 1:
    return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
  between, left = [], len(slices)  # how many slices lie along each axis
  for size in sizes:
    between.append(math.gcd(size, left))
    left //= between[-1]
  inside = [size // number for size, number in zip(sizes, between)]
  return mesh_utils.create_hybrid_device_mesh(
    inside, between, devices, allow_split_physical_axes=True
  )


def _fill_a_box(devices: Sequence[jax.Device]) -> bool:
  """Whether the chips of TPU devices of a slice form a box without holes, which JAX can arrange."""
  coords = np.array([device.coords for device in devices])
  cores = len({device.core_on_chip for device in devices})
  return len(devices) == cores * math.prod(np.ptp(coords, axis=0) + 1)


def _auto(axes: Sequence[str]) -> tuple[AxisType, ...]:
  return (AxisType.Auto,) * len(axes)
