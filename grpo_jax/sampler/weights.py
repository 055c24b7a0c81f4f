"""Converts parameters for the sampler, which may use another dtype, mesh and layout of layers."""

import dataclasses
import functools
from typing import Any

import jax

from grpo_jax import model
from grpo_jax.config import Sampling
from grpo_jax.parallel import sharding
from grpo_jax.parallel.sharding import leaf_path

_MOST_UNROLLED_LAYERS = {"cpu": 8, "gpu": 48}  # by platform. Other platforms unroll none


class SamplingWeights:
  """Converts parameters for the sampler.

  Attributes:
    model: The model config for sampling.
    mesh: The sampler's mesh.
    is_apart: Whether the sampler's mesh has other devices than the learner's.
  """

  def __init__(self, shape: model.ModelConfig, sampling: Sampling, mesh: jax.sharding.Mesh):
    """Compiles nothing yet. `shape` is the model on the learner's mesh, `mesh` the sampler's."""
    self._trained_model, self._sampling, self.mesh = shape, sampling, mesh
    self.model = sampling_config(shape, sampling, mesh)
    self.is_apart = set(mesh.devices.flat) != set(shape.rows.mesh.devices.flat)
    self._convert = self._moved if self.is_apart else jax.jit(self._converted)
    self._cast = jax.jit(self._in_dtype)
    everywhere = jax.sharding.NamedSharding(shape.rows.mesh, jax.sharding.PartitionSpec())
    self._whole = jax.jit(_itself, out_shardings=everywhere)

  def convert(self, params: Any) -> Any:
    """Returns the parameters for sampling: `params` itself if it suits, otherwise a copy."""
    return params if self.suits(params) else self._convert(params)

  def _moved(self, params: Any) -> Any:
    """Copies the parameters to the sampler's devices. Returns when the copy is complete."""
    cast = self._cast(params)
    places = sharding.param_specs(cast, self.mesh)
    if jax.process_count() > 1:
      return jax.tree.map(self._moved_from_all, cast, places)
    return jax.block_until_ready(jax.device_put(cast, places))

  def _moved_from_all(self, x: jax.Array, where: jax.sharding.Sharding) -> jax.Array:
    """Copies an array that is sharded over all processes to sampling devices of this process.

    JAX cannot move an array from a mesh of several processes to another mesh. So the array is first
    replicated on the learner's devices, and each process moves its replica. Arrays are copied one
    after the other, because a replica needs much memory.
    """
    whole = self._whole(x).addressable_data(0)
    return jax.block_until_ready(jax.device_put(whole, where))

  def abstract(self, params: Any) -> Any:
    """The shapes, dtypes and shardings that `convert` returns for abstract parameters."""
    if self.suits(params):
      return params
    converted = jax.eval_shape(self._in_dtype, params)
    places = sharding.param_specs(converted, self.mesh)

    def place(x: Any, where: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
      return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    return jax.tree.map(place, converted, places)

  def suits(self, params: Any) -> bool:
    """Whether the sampler can use the parameters without a conversion."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    names = [(leaf_path(path), x) for path, x in leaves]
    has_dtype = all(x.dtype == sampling_dtype(name, x, self._sampling.dtype) for name, x in names)
    has_projections = any(model.is_projection(name) for name, _ in names)
    if self._sampling.weights_dtype and has_projections:
      return False
    is_there = self.mesh == self._trained_model.rows.mesh
    return has_dtype and is_there and not self.model.unrolled

  def _in_dtype(self, params: Any) -> Any:
    params = cast_for_sampling(params, self._sampling)
    return model.unrolled(params, self._trained_model) if self.model.unrolled else params

  def _converted(self, params: Any) -> Any:
    params = self._in_dtype(params)
    places = sharding.param_specs(params, self.mesh)
    return jax.lax.with_sharding_constraint(params, places)


def _itself(x: jax.Array) -> jax.Array:
  return x


def sampling_config(
  shape: model.ModelConfig, sampling: Sampling, mesh: jax.sharding.Mesh
) -> model.ModelConfig:
  """The model config for sampling: the sampler's dtypes and mesh, with layers maybe unrolled."""
  # In a loop over stacked layers, CPUs and GPUs copy each layer's weights, keys and values for
  # every token. TPUs read them in place. But unrolled layers take longer to compile. On a CPU, 30
  # layers compile three to five times as long, and sampling takes 4 to 6% less (LOG.md,
  # 2026-11-24). On a GPU, 24 layers compile 1.5 times as long and move 3/5 of the bytes.
  most = _MOST_UNROLLED_LAYERS.get(shape.platform, 0)
  unrolled = shape.num_layers <= most
  dtype, cache_dtype = sampling.dtype or shape.dtype, sampling.cache_dtype
  changes: dict[str, Any] = dict(dtype=dtype, cache_dtype=cache_dtype, unrolled=unrolled)
  return dataclasses.replace(shape, **changes, **sharding.model_shardings(shape, mesh))


def cast_for_sampling(params: Any, sampling: Sampling) -> Any:
  """Casts parameters to sampling.dtype, and projections to sampling.weights_dtype if it is set."""

  def cast(path: tuple[Any, ...], x: jax.Array) -> Any:
    name = leaf_path(path)
    if sampling.weights_dtype and model.is_projection(name):
      return model.per_layer(functools.partial(model.rounded, name), name)(x)
    return x.astype(sampling_dtype(name, x, sampling.dtype))

  return jax.tree_util.tree_map_with_path(cast, params)


def sampling_dtype(name: str, x: Any, dtype: str) -> Any:
  """The sampler's dtype for the parameter with the path `name`. `dtype` is sampling.dtype."""
  return matrix_dtype(x, x.ndim - model.is_stacked(name), dtype)


def matrix_dtype(x: Any, ndim: int, dtype: str) -> Any:
  """The dtype of a parameter when its tree is cast to `dtype`. '' leaves all dtypes unchanged.

  Only floating-point matrices are cast. Norm scales stay float32, because models multiply by them
  in float32. Scales with an axis of heads count as matrices. `ndim` is the number of axes of x,
  without the axis of stacked layers.
  """
  is_converted = dtype and ndim > 1 and x.dtype in ("float32", "bfloat16")
  return dtype if is_converted else x.dtype
