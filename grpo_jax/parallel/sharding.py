"""Where every array lies on the mesh: a strict table of parameter paths."""

import re
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from grpo_jax.settings import ConfigError

QUANTISED = r"(/qvalue|/scale)?"  # a kernel that is has two leaves; scales are fewer
# Path of a parameter -> the mesh axis that splits each dimension. "fsdp" splits D everywhere, "tensor" the other large
# axis, so that a layer needs one sum over "tensor" after o and one after down; "expert" splits a mixture's experts.
RULES = (
  (r"embed/embedding", ("tensor", "fsdp")),
  (r"layers_\d+/(attention|mlp)(_post)?_norm/scale", (None,)),
  (r"layers_\d+/attention/[qk]_norm/scale", (None,)),
  (r"layers_\d+/attention/[qkv]/kernel" + QUANTISED, ("fsdp", "tensor", None)),
  (r"layers_\d+/attention/[qkv]/bias", ("tensor", None)),
  (r"layers_\d+/attention/o/kernel" + QUANTISED, ("tensor", None, "fsdp")),
  (r"layers_\d+/mlp/(gate|up)/kernel" + QUANTISED, ("fsdp", "tensor")),
  (r"layers_\d+/mlp/down/kernel" + QUANTISED, ("tensor", "fsdp")),
  (
    r"layers_\d+/(attention/[qkv]|mlp/(gate|up))/lora_a",
    ("fsdp", None),
  ),  # a rank is too short to split
  (r"layers_\d+/attention/[qkv]/lora_b", (None, "tensor", None)),
  (r"layers_\d+/attention/o/lora_a", ("tensor", None, None)),
  (r"layers_\d+/mlp/(gate|up)/lora_b", (None, "tensor")),
  (r"layers_\d+/mlp/down/lora_a", ("tensor", None)),
  (r"layers_\d+/(attention/o|mlp/down)/lora_b", (None, "fsdp")),
  (r"layers_\d+/experts/router", ("fsdp", None)),
  (r"layers_\d+/experts/(gate|up)", ("expert", "fsdp", "tensor")),
  (r"layers_\d+/experts/down", ("expert", "tensor", "fsdp")),
  (r"final_norm/scale", (None,)),
  (r"head/kernel", ("fsdp", "tensor")),
  (r"score/kernel", ("fsdp", None)),
  (r"score/bias", (None,)),
)
LAYOUTS = {
  "train": ("fsdp", "expert", "tensor"),
  "tensor": ("expert", "tensor"),
}  # the axes of RULES that a layout keeps


def leaf_path(path: tuple[Any, ...]) -> str:
  """A key path of jax.tree_util as keys joined by "/"."""
  return jax.tree_util.keystr(path, simple=True, separator="/")


def param_specs(params: Any, mesh: Mesh, layout: str = "train") -> Any:
  """The NamedSharding of every leaf (anything with a shape). layout "tensor" leaves weights whole along fsdp.

  A dimension that its axis does not divide stays whole. Raises ConfigError for a path that RULES does not know.
  """

  def sharding(path, leaf):
    axes = _axes(leaf_path(path), leaf, layout)
    return NamedSharding(
      mesh, PartitionSpec(*(a if _divides(mesh, a, n) else None for a, n in zip(axes, leaf.shape)))
    )

  return jax.tree_util.tree_map_with_path(sharding, params)


def undivided(params: Any, mesh: Mesh, layout: str = "train") -> list[str]:
  """One line for each dimension that stays whole because its axis does not divide it."""
  return [
    f"{leaf_path(path)}: dimension {d} of {n} is not divisible by {axis}={mesh.shape[axis]}"
    for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    for d, (axis, n) in enumerate(zip(_axes(leaf_path(path), leaf, layout), leaf.shape))
    if not _divides(mesh, axis, n)
  ]


def state_shardings(state: Any, mesh: Mesh) -> Any:
  """The NamedSharding of every leaf of a TrainState: moments lie as their parameters do, scalars everywhere.

  Raises ConfigError for an array of the optimizer that has no parameter's path and shape.
  """
  of_params = param_specs(state.params, mesh)
  known = {
    leaf_path(path): (leaf.shape, sharding)
    for (path, leaf), sharding in zip(
      jax.tree_util.tree_leaves_with_path(state.params), jax.tree.leaves(of_params)
    )
  }

  def sharding(path, leaf):
    if not leaf.shape:
      return NamedSharding(mesh, PartitionSpec())
    keys = leaf_path(path).split("/")
    for suffix in ("/".join(keys[i:]) for i in range(len(keys))):
      if suffix in known and known[suffix][0] == leaf.shape:
        return known[suffix][1]
    raise ConfigError(
      f"{leaf_path(path)} {leaf.shape} of the optimizer has no parameter's path and shape: "
      "teach grpo_jax/parallel/sharding.py where it lies"
    )

  return jax.tree_util.tree_map_with_path(sharding, state)


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Prompts, the leading axis of a batch, over data, fsdp and expert."""
  return NamedSharding(mesh, PartitionSpec(("data", "fsdp", "expert")))


def table_sharding(mesh: Mesh, vocabulary: int) -> NamedSharding:
  """The embedding [V, D] while tokens are looked up: whole along D, so that the rows found lie where the batch does."""
  return NamedSharding(
    mesh, PartitionSpec("tensor" if _divides(mesh, "tensor", vocabulary) else None)
  )


def experts_sharding(mesh: Mesh, experts: int, width: int) -> NamedSharding:
  """Experts' matrices [X, D, M] while tokens go through them: each device has all of D of its experts."""
  return NamedSharding(
    mesh,
    PartitionSpec(
      "expert" if _divides(mesh, "expert", experts) else None,
      None,
      "tensor" if _divides(mesh, "tensor", width) else None,
    ),
  )


def model_shardings(shape: Any, mesh: Mesh) -> dict[str, NamedSharding]:
  """The fields of a model's config that say where its activations and what they meet lie."""
  return dict(
    rows=batch_sharding(mesh),
    table=table_sharding(mesh, shape.vocab_size),
    experts=experts_sharding(mesh, shape.num_experts, shape.expert_dim),
  )


def _axes(name: str, leaf: Any, layout: str) -> tuple[str | None, ...]:
  if layout not in LAYOUTS:
    raise ConfigError(f"weights layout {layout!r} is unknown: choose one of {', '.join(LAYOUTS)}")
  for pattern, axes in RULES:
    if re.fullmatch(pattern, name) and len(axes) == len(leaf.shape):
      return tuple(a if a in LAYOUTS[layout] else None for a in axes)
  raise ConfigError(
    f"parameter {name} {leaf.shape} has no rule: add one to RULES in grpo_jax/parallel/sharding.py"
  )


def _divides(mesh: Mesh, axis: str | None, length: int) -> bool:
  return axis is None or length % mesh.shape[axis] == 0
