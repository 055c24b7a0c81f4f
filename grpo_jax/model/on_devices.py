"""Which device has what: functions of each device's part of arrays, activations and weights."""

from collections.abc import Callable
import functools
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def split_already() -> frozenset[str]:
  """The axes of the mesh over which the surrounding `shard_map`s, if any, have split arrays."""
  return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def on_devices(
  function: Callable[..., Any],
  mesh: Mesh,
  in_specs: Any,
  out_specs: Any,
  axes: frozenset[str] | None = None,
  check_vma: bool = False,
) -> Callable[..., Any]:
  """`jax.shard_map` over the axes that surrounding ones leave.

  Args:
    function: The function of a device's parts of the arguments.
    mesh: The whole mesh.
    in_specs: As in `jax.shard_map`. They name no axis that is split already.
    out_specs: As in `jax.shard_map`.
    axes: The axes to split over. None means all. XLA splits what is left.
    check_vma: As in `jax.shard_map`. Outputs of kernels do not say over which axes they vary.
  """
  split = split_already()
  left = (frozenset(mesh.axis_names) if axes is None else axes) - split
  if not left:  # `jax.shard_map` would take no axis for all of them
    return function
  return jax.shard_map(
    function,
    mesh=None if split else mesh,  # JAX wants the mesh of the surrounding `shard_map`
    in_specs=in_specs,
    out_specs=out_specs,
    axis_names=left,
    check_vma=check_vma,
  )


def constrain(x: jax.Array, sharding: NamedSharding | None) -> jax.Array:
  """Constrains an activation to a sharding. With None, XLA chooses.

  Left to choose on a mesh, XLA splits activations along D, as fsdp splits the weights, and gathers
  all rows on every device. The sharding names no axis that a surrounding `shard_map` splits.
  """
  if sharding is None:
    return x
  # JAX wants the mesh of the surrounding `shard_map`, which a bare spec stands for.
  return jax.lax.with_sharding_constraint(x, sharding.spec if split_already() else sharding)


def gathered(rows: NamedSharding | None, dimension: int, kernel_IO: jax.Array) -> jax.Array:
  """Gathers a weight that fsdp and context split: over the devices of one axis, then of the other.

  In one step, a device of a TPU v5p:4x4x4 has parts of 56 rows, which do not fill tiles of its
  memory. There XLA gathers by an all-reduce, which sends twice as much (experiments/LOG.md,
  2026-11-29). On other meshes, and where the axes do not divide the dimension, nothing changes.

  Args:
    rows: The sharding of activations, or None.
    dimension: The dimension of the weight that both axes split.
    kernel_IO: The weight.
  """
  sizes = {} if rows is None else rows.mesh.shape
  fsdp, context = sizes.get("fsdp", 1), sizes.get("context", 1)
  if fsdp == 1 or context == 1 or kernel_IO.shape[dimension] % (fsdp * context):
    return kernel_IO
  return _gathered(rows.mesh, dimension, kernel_IO)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gathered(mesh: Mesh, dimension: int, kernel_IO: jax.Array) -> jax.Array:
  for axis in ("fsdp", None):
    spec: list[Any] = [PartitionSpec.UNCONSTRAINED] * 2
    spec[dimension] = axis
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    kernel_IO = jax.lax.with_sharding_constraint(kernel_IO, sharding)
  return kernel_IO


def _gathered_forward(mesh: Mesh, dimension: int, kernel_IO: jax.Array) -> tuple[jax.Array, None]:
  return _gathered(mesh, dimension, kernel_IO), None


def _gathered_backward(
  mesh: Mesh, dimension: int, saved: None, dkernel_IO: jax.Array
) -> tuple[jax.Array]:
  """Leaves the gradient as it is: XLA adds it up, and splits it as it likes."""
  return (dkernel_IO,)


_gathered.defvjp(_gathered_forward, _gathered_backward)
