"""Makes parameters on the devices from the tensors of a checkpoint."""

from collections.abc import Callable, Mapping
import functools
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.model import families
from grpo_jax.model.config import ModelConfig
from grpo_jax.model.stacks import Places
from grpo_jax.model.tensor_spec import TensorSpec

Shardings = Mapping[str, Any]  # the sharding of each parameter, by its path
Convert = Callable[[str, jax.Array], Any]


class Put:
  """Makes parameters from the tensors of a checkpoint, one layer after another."""

  def __init__(self, config: ModelConfig, convert: Convert, shardings: Shardings | None):
    """`shardings` are those of what `convert` returns, or None."""
    self._sizes, self._places = families.sizes(config), Places(config)
    self._convert, self._shardings = convert, shardings
    self._whole = jax.jit(self._place_whole, static_argnums=0)
    self._empty = jax.jit(self._make_empty, static_argnums=0)
    self._into_stack = jax.jit(self._place_into_stack, static_argnums=0, donate_argnums=1)

  def __call__(
    self, spec: TensorSpec, stack: Any, place: int | None, tensor: Any
  ) -> tuple[Any, jax.Array]:
    """The parameter with this tensor in it, and whether the tensor is finite.

    Args:
      spec: The tensor's spec, with the parameter's name.
      stack: The parameter so far, or None. It is donated.
      place: The number of the layer in the stack, or None for a parameter without layers.
      tensor: In the dtype of the file.
    """
    if place is None:
      return self._whole(spec, tensor)
    if stack is None:
      stack = self._empty(spec, tensor)
    return self._into_stack(spec, stack, place, tensor)

  def _leaf(self, spec: TensorSpec, tensor: jax.Array) -> Any:
    return self._convert(spec.leaf_name, spec.from_hf(tensor, self._sizes))

  def _placed(self, name: str, leaf: Any) -> Any:
    if self._shardings is None:
      return leaf
    return jax.lax.with_sharding_constraint(leaf, self._shardings[name])

  def _place_whole(self, spec: TensorSpec, tensor: jax.Array) -> tuple[Any, jax.Array]:
    return self._placed(spec.leaf_name, self._leaf(spec, tensor)), jnp.isfinite(tensor).all()

  def _make_empty(self, spec: TensorSpec, tensor: jax.Array) -> Any:
    def zeros(x: jax.ShapeDtypeStruct) -> jax.Array:
      return jnp.zeros(self._places.shape(spec.leaf_name, x.shape), x.dtype)

    leaf = jax.eval_shape(functools.partial(self._leaf, spec), tensor)
    return self._placed(spec.leaf_name, jax.tree.map(zeros, leaf))

  def _place_into_stack(
    self, spec: TensorSpec, stack: Any, place: jax.Array, tensor: jax.Array
  ) -> tuple[Any, jax.Array]:
    def write(whole: jax.Array, layer: jax.Array) -> jax.Array:
      return jax.lax.dynamic_update_index_in_dim(whole, layer, place, 0)

    stack = jax.tree.map(write, stack, self._leaf(spec, tensor))
    return self._placed(spec.leaf_name, stack), jnp.isfinite(tensor).all()
