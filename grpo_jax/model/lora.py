"""Low-rank adapters (LoRA, Hu et al. 2106.09685): y = x W + scale (x A) B.

Only A and B are trained, and W is frozen.
A tree of parameters with adapters is the frozen tree with two more leaves beside each adapted
kernel: lora_a [inputs..., r] and lora_b [r, outputs...]. `join` makes such a tree without a copy.
The frozen W may be quantised (QLoRA 2305.14314).
"""

import math
from typing import Any

from flax.traverse_util import flatten_dict, unflatten_dict
import jax
import jax.numpy as jnp
import qwix

from grpo_jax.model.config import ADAPTABLE, ModelConfig
from grpo_jax.model.stacks import TOWER, layer_names, stacked
from grpo_jax.settings import ConfigError

QUANTISED_DTYPES = ("int8", "int4", "nf4")  # dtypes of a frozen base, besides float32 and bfloat16
_INPUT_AXES = {"o": 2, "out": 3}  # of a kernel, where it has several
TILE = 64  # how many weights along an input axis have a scale in common


def init_adapters(key: jax.Array, config: ModelConfig, base: Any) -> Any:
  """New adapters for the projections that `config.lora` names, float32.

  A ~ U(-1/sqrt(inputs), 1/sqrt(inputs)) and B = 0, as in PEFT. With B = 0 the policy computes the
  same as the base.

  Args:
    key: For A.
    config: The model, with `config.lora`.
    base: The frozen tree, or its shapes.

  Raises:
    ConfigError: The model does not have one of the projections.
  """
  shapes = {
    name: leaf.shape[1:]
    for stack, leaf in flatten_dict(base, sep="/").items()
    if is_projection(stack) and _module(stack) in config.lora.targets
    for name in layer_names(stack, config)
  }
  for target in set(config.lora.targets) - {_module(name) for name in shapes}:
    raise ConfigError(
      f"config key lora.targets: the model has no projection {ADAPTABLE[target]} that can have an"
      " adapter (experts cannot): leave it out"
    )
  leaves = {}
  for name, kernel_key in zip(sorted(shapes), jax.random.split(key, len(shapes))):
    inputs, outputs = _split_shape(name, shapes[name])
    shape_a, shape_b = (*inputs, config.lora.rank), (config.lora.rank, *outputs)
    bound = 1 / math.sqrt(math.prod(inputs))
    module = name.removesuffix("kernel")
    leaves[module + "lora_a"] = jax.random.uniform(kernel_key, shape_a, jnp.float32, -bound, bound)
    leaves[module + "lora_b"] = jnp.zeros(shape_b, jnp.float32)
  return stacked(unflatten_dict(leaves, sep="/"), config)


def join(base: Any, trained: Any) -> Any:
  """One tree with the leaves of both trees. The leaves are not copied. `base` may be None."""
  if base is None or not isinstance(trained, dict):
    return trained
  return base | {name: join(base.get(name, {}), inner) for name, inner in trained.items()}


def merged(kernel: Any, a: jax.Array | None, b: jax.Array | None, scale: float) -> jax.Array:
  """W + scale A B for one layer: what W with its adapter computes. W if `a` is None.

  Always returns a new float32 array.
  """
  weights = jnp.array(dequantised(kernel, jnp.float32))
  return weights if a is None else weights + scale * jnp.tensordot(a, b, 1)


def quantised(name: str, leaf: jax.Array, dtype: str) -> Any:
  """A leaf of the frozen tree, for one layer, in the dtype of the frozen base.

  With a dtype in QUANTISED_DTYPES, only the kernels of ADAPTABLE are quantised, and other leaves
  become bfloat16. Every TILE weights along an input axis have their own scale, separately for each
  output. The scales of norms stay float32 in every case, because Gemma's are 1 + w.

  Args:
    name: The path of the leaf, such as "layers_0/attention/q/kernel".
    leaf: float32.
    dtype: float32, bfloat16 or a name in QUANTISED_DTYPES.

  Returns:
    A jax.Array or a qwix.QArray.
  """
  if leaf.ndim <= 1:
    return leaf.astype("float32")
  if dtype not in QUANTISED_DTYPES or not is_projection(name):
    return leaf.astype("bfloat16" if dtype in QUANTISED_DTYPES else dtype)
  inputs, _ = _split_shape(name, leaf.shape)
  tiled = len(inputs) - 1
  tile = math.gcd(inputs[tiled], TILE)
  other_axes = [axis for axis in range(leaf.ndim) if axis != tiled]
  return qwix.quantize(
    leaf, dtype, channelwise_axes=other_axes, tiled_axes={tiled: tile}, scale_dtype=jnp.bfloat16
  )


def rounded(name: str, kernel: jax.Array) -> Any:
  """A kernel of ADAPTABLE, for one layer, in int8 with one scale for each output.

  The product with it needs no other copy of the kernel: see `factors`.
  """
  _, outputs = _split_shape(name, kernel.shape)
  first = kernel.ndim - len(outputs)
  return qwix.quantize(kernel, "int8", channelwise_axes=range(first, kernel.ndim))


def is_projection(name: str) -> bool:
  """Whether this leaf is a kernel of the decoder that can have an adapter and can be quantised."""
  is_kernel = name.endswith("/kernel") and _module(name) in ADAPTABLE
  return is_kernel and not name.startswith(TOWER)


def dequantised(kernel: Any, dtype: Any) -> jax.Array:
  """A kernel, quantised or not, in the dtype of the computation."""
  if isinstance(kernel, qwix.QArray):
    kernel = qwix.dequantize(kernel.astype(dtype))
  return kernel.astype(dtype)


def factors(kernel: Any, dtype: Any, outputs: int) -> tuple[jax.Array, jax.Array | None]:
  """A kernel as a matrix [I, O] in the dtype of the computation, and a scale [O] of the product.

  The scale is None except for int8 with one scale for each output, as of `rounded`.
  """
  is_int8 = isinstance(kernel, qwix.QArray) and kernel.qvalue.dtype == jnp.int8
  if is_int8 and kernel.scale.size == outputs:
    return kernel.qvalue.astype(dtype).reshape(-1, outputs), kernel.scale.reshape(-1).astype(dtype)
  return dequantised(kernel, dtype).reshape(-1, outputs), None


def _module(name: str) -> str:
  """The module that a leaf belongs to, such as "q" for "layers_0/attention/q/kernel"."""
  return name.split("/")[-2]


def _split_shape(name: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """The input axes and the output axes of a kernel."""
  inputs = _INPUT_AXES.get(_module(name), 1)
  return shape[:inputs], shape[inputs:]
