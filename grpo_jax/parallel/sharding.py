"""The sharding of every array on the mesh: a strict table of parameter paths."""

import re
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from grpo_jax.model import is_stacked, layer_embeddings, mixers, mlps, towers
from grpo_jax.parallel.mesh import CONTEXT
from grpo_jax.settings import ConfigError

# The mesh axes that split the first axis of a batch.
ROW_AXES = ("data", "fsdp", "expert")

# A stack has its layers on a first axis, which is never sharded. RULES leave out this axis.
LAYER = r"layers_\d+/"
# A quantised kernel has two leaves. Its scales have fewer elements than its values.
QUANTISED = r"(/qvalue|/scale)?"
# Path of a parameter -> the mesh axis that splits each dimension. "fsdp" always splits D. "tensor"
# splits the other large dimension, so that a layer needs one all-reduce over "tensor" after o and
# one after down. "expert" splits the experts of a sparse layer. The rank of an adapter is too small
# to split.
RULES = (
  (r"embed/embedding", ("tensor", "fsdp")),
  (LAYER + r"(attention|mlp)(_post)?_norm/scale", (None,)),
  *(
    (LAYER + path + (QUANTISED if path.endswith("kernel") else ""), axes)
    for path, axes in mixers.RULES + mlps.RULES + layer_embeddings.LAYER_RULES
  ),
  (LAYER + r"layer_scale", ()),
  *layer_embeddings.RULES,
  *((r"vision/" + path, axes) for path, axes in towers.RULES),
  (r"final_norm/scale", (None,)),
  (r"head/kernel", ("fsdp", "tensor")),
  (r"score/kernel", ("fsdp", None)),
  (r"score/bias", (None,)),
)
SPLIT_AXES = ("fsdp", "expert", "tensor")  # the mesh axes in RULES


def leaf_path(path: tuple[Any, ...]) -> str:
  """Joins the keys of a key path of jax.tree_util by "/"."""
  return jax.tree_util.keystr(path, simple=True, separator="/")


def param_specs(params: Any, mesh: Mesh) -> Any:
  """The NamedSharding of every parameter, by RULES.

  A dimension is not split if the size of its mesh axis does not divide it.

  Args:
    params: A tree of parameters, or of other leaves with a shape.
    mesh: The mesh.

  Raises:
    ConfigError: RULES has no rule for a path.
  """

  def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
    axes = _axes(leaf_path(path), leaf)
    split = [_weight_axes(mesh, axis, size) for axis, size in zip(axes, leaf.shape)]
    return NamedSharding(mesh, PartitionSpec(*split))

  return jax.tree_util.tree_map_with_path(sharding, params)


def undivided(params: Any, mesh: Mesh) -> list[str]:
  """One line for each dimension of a parameter that is not split as RULES say.

  Its mesh axes do not divide it, so it is whole, or split over fewer of them. A run prints how many
  there are when it starts, and the first line.
  """
  lines = []
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    name = leaf_path(path)
    for dimension, (axis, size) in enumerate(zip(_axes(name, leaf), leaf.shape)):
      if axis is None:
        continue
      split_by, text = _weight_axes(mesh, axis, size), f"{name}: dimension {dimension} of {size}"
      # Where RULES say fsdp, context splits, too. Perhaps only one of them divides it, or none.
      if axis == "fsdp" and mesh.shape.get(CONTEXT, 1) > 1:
        both = mesh.shape[axis] * mesh.shape[CONTEXT]
        alone = f"it is split over {split_by} alone" if split_by else "it is whole on each device"
        if size % both:
          lines.append(f"{text} is not divisible by fsdp x context = {both}: {alone}")
      elif split_by is None:
        lines.append(f"{text} is not divisible by {axis}={mesh.shape[axis]}")
  return lines


def state_shardings(state: Any, mesh: Mesh) -> Any:
  """The NamedSharding of every leaf of a TrainState.

  An optimizer array with the path and shape of a parameter, such as a moment, is sharded like the
  parameter. An array with the path of a parameter and all its dimensions but one, such as
  Adafactor's mean over rows (Shazeer & Stern 1804.04235), is sharded like these dimensions.
  Everything else is replicated on every device: `replicated` lists it.
  """
  placement = _Placement(state.params, mesh)

  def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
    return placement.find(leaf_path(path), leaf.shape) or NamedSharding(mesh, PartitionSpec())

  return jax.tree_util.tree_map_with_path(sharding, state)


def replicated(state: Any, mesh: Mesh) -> list[str]:
  """One line of text for each optimizer array of a TrainState that is replicated.

  Lists the arrays that `state_shardings` cannot match to a parameter, except those of one element.
  The list is empty if the mesh does not split parameters.
  """
  # No rule names CONTEXT, but it also splits what a rule splits over fsdp (see `_weight_axes`).
  if all(mesh.shape.get(axis, 1) == 1 for axis in (*SPLIT_AXES, CONTEXT)):
    return []
  placement = _Placement(state.params, mesh)
  # The key makes the paths in the lines begin with opt_state.
  arrays = jax.tree_util.tree_leaves_with_path({"opt_state": state.opt_state})
  return [
    f"{leaf_path(path)} {leaf.shape} of the optimizer lies whole on every device"
    for path, leaf in arrays
    if leaf.size > 1 and placement.find(leaf_path(path), leaf.shape) is None
  ]


class _Placement:
  """Finds the sharding of an array by the parameter whose path is a suffix of the array's path."""

  def __init__(self, params: Any, mesh: Mesh) -> None:
    self._mesh = mesh
    shardings = jax.tree.leaves(param_specs(params, mesh))
    self._params = {
      leaf_path(path): (leaf.shape, sharding)
      for (path, leaf), sharding in zip(jax.tree_util.tree_leaves_with_path(params), shardings)
    }

  def find(self, path: str, shape: tuple[int, ...]) -> NamedSharding | None:
    """The sharding of the array at `path`, or None if it matches no parameter."""
    keys = path.split("/")
    suffixes = ("/".join(keys[start:]) for start in range(len(keys)))
    matches = [self._params[suffix] for suffix in suffixes if suffix in self._params]
    for param_shape, sharding in matches:
      if shape == param_shape:
        return sharding
    for param_shape, sharding in matches:
      reduced = _without_one_dimension(param_shape, sharding.spec, shape)
      if reduced is not None:
        return NamedSharding(self._mesh, reduced)
    return None


def _without_one_dimension(
  param_shape: tuple[int, ...], spec: PartitionSpec, shape: tuple[int, ...]
) -> PartitionSpec | None:
  """The spec for an array of `shape`, which lacks one dimension of a parameter.

  Returns None if `shape` does not, or if it is ambiguous which dimension it lacks, because several
  have the same size.
  """
  specs = {
    PartitionSpec(*spec[:dimension], *spec[dimension + 1 :])
    for dimension in range(len(param_shape))
    if shape == param_shape[:dimension] + param_shape[dimension + 1 :]
  }
  return specs.pop() if len(specs) == 1 else None


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Shards the first axis of a batch, the prompts, over data, fsdp and expert."""
  return NamedSharding(mesh, PartitionSpec(ROW_AXES))


def tokens_sharding(mesh: Mesh) -> NamedSharding:
  """Shards activations [P, N, ...]: prompts P as in a batch, and tokens N over context."""
  return NamedSharding(mesh, PartitionSpec(ROW_AXES, CONTEXT))


def parts_sharding(mesh: Mesh) -> NamedSharding:
  """Shards the second axis, the prompts, of micro-batches [M, m, ...], as `batch_sharding` does."""
  return NamedSharding(mesh, PartitionSpec(None, ROW_AXES))


def table_sharding(mesh: Mesh, vocabulary: int) -> NamedSharding:
  """Shards the embedding [V, D] while tokens are looked up.

  D is not split, so that the embeddings that are looked up have the sharding of the batch.
  """
  return NamedSharding(mesh, PartitionSpec(_axis_if_divides(mesh, "tensor", vocabulary)))


def experts_sharding(mesh: Mesh, experts: int, width: int) -> NamedSharding:
  """Shards the experts' matrices [X, D, M] while tokens pass through them: D is not split."""
  expert_axis = _axis_if_divides(mesh, "expert", experts)
  width_axis = _axis_if_divides(mesh, "tensor", width)
  return NamedSharding(mesh, PartitionSpec(expert_axis, None, width_axis))


def model_shardings(
  shape: Any, mesh: Mesh, splits_tokens: bool = False
) -> dict[str, NamedSharding]:
  """The shardings in a ModelConfig, by field: `rows`, `table` and `experts`.

  Args:
    shape: The ModelConfig.
    mesh: The mesh.
    splits_tokens: Whether the axis `context`, if the mesh has it, splits the tokens of a text.
  """
  is_split = splits_tokens and CONTEXT in mesh.shape
  return {
    "rows": tokens_sharding(mesh) if is_split else batch_sharding(mesh),
    "table": table_sharding(mesh, shape.vocab_size),
    "experts": experts_sharding(mesh, shape.num_experts, shape.expert_dim),
  }


def _axes(name: str, leaf: Any) -> tuple[str | None, ...]:
  """The mesh axis of each dimension of a parameter, by RULES. None: the dimension is not split."""
  stack_axis = (None,) if is_stacked(name) else ()
  for pattern, axes in RULES:
    if re.fullmatch(pattern, name) and len(stack_axis + axes) == len(leaf.shape):
      return *stack_axis, *axes
  raise ConfigError(
    f"parameter {name} {leaf.shape} has no rule: add one to RULES in grpo_jax/parallel/sharding.py"
  )


def _weight_axes(mesh: Mesh, axis: str | None, size: int) -> str | tuple[str, ...] | None:
  """The mesh axes that split a dimension of `size`, for its axis in RULES, or None if none does.

  Where RULES say `fsdp`, `context` splits, too, because devices along both use the same parameters.
  """
  if axis == "fsdp" and CONTEXT in mesh.shape:
    if size % (mesh.shape[axis] * mesh.shape[CONTEXT]) == 0:
      return axis, CONTEXT
    if mesh.shape[axis] == 1 or not _divides(mesh, axis, size):
      return CONTEXT if size % mesh.shape[CONTEXT] == 0 else None
  return axis if _divides(mesh, axis, size) else None


def _axis_if_divides(mesh: Mesh, axis: str, size: int) -> str | None:
  return axis if _divides(mesh, axis, size) else None


def _divides(mesh: Mesh, axis: str | None, size: int) -> bool:
  return axis is None or size % mesh.shape[axis] == 0
