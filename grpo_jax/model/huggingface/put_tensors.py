"""Makes parameters on the devices from the tensors of a checkpoint."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.huggingface import families
from grpo_jax.model.huggingface.tensor_spec import TensorSpec
from grpo_jax.model.stacks import Places

Shardings = Mapping[str, Any]  # the sharding of each parameter, by its path
Convert = Callable[[str, jax.Array], Any]


class Put:
  """Makes parameters from the tensors of a checkpoint, one layer after another."""

  def __init__(self, config: ModelConfig, convert: Convert, shardings: Shardings | None):
    """`shardings` are those of what `convert` returns, or None."""
    self._sizes, self._places = tuple(families.sizes(config).items()), Places(config)
    self._convert, self._shardings = convert, shardings

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
    # The layers of a stack get the same spec, so that one compilation serves them all.
    spec = dataclasses.replace(spec, hf_name="")
    where = self._shardings and self._shardings[spec.leaf_name]
    layers = self._places.shape(spec.leaf_name, ())
    how = _Conversion(spec, self._sizes, self._convert, layers, where)
    if place is None:
      return _whole(how, tensor)
    if stack is None:
      stack = _empty_stack(how, tensor)
    return _into_stack(how, stack, place, tensor)


@dataclasses.dataclass(frozen=True)
class _Conversion:
  """How tensors become a parameter. Equal ones share a compilation, from load to load."""

  spec: TensorSpec
  sizes: tuple[tuple[str, int], ...]
  convert: Convert
  layers: tuple[int, ...]  # how many there are, or ()
  sharding: Any

  def layer(self, tensor: jax.Array) -> Any:
    leaf = self.spec.from_hf(tensor, dict(self.sizes))
    return self.convert(self.spec.leaf_name, leaf)

  def placed(self, parameter: Any) -> Any:
    if self.sharding is None:
      return parameter
    return jax.lax.with_sharding_constraint(parameter, self.sharding)


@functools.partial(jax.jit, static_argnums=0)
def _whole(how: _Conversion, tensor: jax.Array) -> tuple[Any, jax.Array]:
  return how.placed(how.layer(tensor)), jnp.isfinite(tensor).all()


@functools.partial(jax.jit, static_argnums=0)
def _empty_stack(how: _Conversion, tensor: jax.Array) -> Any:
  def zeros(x: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros((*how.layers, *x.shape), x.dtype)

  return how.placed(jax.tree.map(zeros, jax.eval_shape(how.layer, tensor)))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _into_stack(
  how: _Conversion, stack: Any, place: jax.Array, tensor: jax.Array
) -> tuple[Any, jax.Array]:
  def write(whole: jax.Array, layer: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(whole, layer, place, 0)

  stack = jax.tree.map(write, stack, how.layer(tensor))
  return how.placed(stack), jnp.isfinite(tensor).all()
