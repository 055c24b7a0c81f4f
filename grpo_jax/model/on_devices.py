"""Runs a function on each device's part of arrays, also where another `shard_map` does so."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding


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
