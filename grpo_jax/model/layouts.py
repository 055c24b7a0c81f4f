"""The order in which axes of an array lie in the memory of a TPU."""

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import NamedSharding, PartitionSpec


def in_order(
  x: jax.Array, order: tuple[int, ...], rows: NamedSharding | None, spec: PartitionSpec
) -> jax.Array:
  """The array with its axes in this order in memory, the one that varies fastest last.

  The compiler cannot split the operation that fixes an order: on a mesh, each device would get the
  whole array from all others first. So each device fixes the order of its own part.

  Args:
    x: The array.
    order: The numbers of its axes.
    rows: The sharding of rows, whose mesh the array lies on. None means one device.
    spec: How the array lies on the mesh.
  """

  def here(x: jax.Array) -> jax.Array:
    return with_layout_constraint(x, Layout(major_to_minor=order))

  if rows is None or rows.mesh.size == 1:
    return here(x)
  return jax.shard_map(here, mesh=rows.mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)
