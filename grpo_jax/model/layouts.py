"""The layout of an array in the memory of a TPU: the order of its axes."""

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import NamedSharding, PartitionSpec

from grpo_jax.model.on_devices import on_devices


def in_order(
  x: jax.Array, order: tuple[int, ...], rows: NamedSharding | None, spec: PartitionSpec
) -> jax.Array:
  """Constrains the order of an array's axes in memory, for the cache and for logits.

  The compiler cannot partition a layout constraint: on a mesh, each device would first gather the
  whole array. So each device constrains its shard, within a shard_map.

  Args:
    x: The array.
    order: The numbers of the axes. The last axis varies fastest.
    rows: A sharding on the array's mesh. None means one device.
    spec: The sharding of the array on this mesh.
  """

  def here(x: jax.Array) -> jax.Array:
    return with_layout_constraint(x, Layout(major_to_minor=order))

  if rows is None or rows.mesh.size == 1:
    return here(x)
  return on_devices(here, rows.mesh, spec, spec)(x)
