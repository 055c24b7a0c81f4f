"""Low-rank adapters (LoRA, Hu et al. 2106.09685): y = x W + scale (x A) B, where only A and B are trained.

A tree of parameters with adapters is the frozen one with two leaves more beside a kernel: lora_a [in..., r], lora_b
[r, out...]. `join` makes it, without a copy. W may be quantised (QLoRA 2305.14314).
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import qwix
from flax.traverse_util import flatten_dict, unflatten_dict

from grpo_jax.model.config import PROJECTIONS, ModelConfig
from grpo_jax.settings import ConfigError

QUANTISED = ("int8", "int4", "nf4")  # besides float32 and bfloat16, dtypes of a frozen base
TILE = 64  # weights of an input axis that share a scale


def init(key: jax.Array, config: ModelConfig, base: Any) -> Any:
  """Adapters for the projections that config.lora names: A ~ U(-1/sqrt(in), 1/sqrt(in)), B = 0, float32, as PEFT has it.

  `base` is the frozen tree, or its shapes. With B = 0 the policy is the base. Raises ConfigError for a projection that the
  model has not.
  """
  rank, leaves = config.lora.rank, {}
  kernels = {
    name: leaf
    for name, leaf in sorted(flatten_dict(base, sep="/").items())
    if name.endswith("/kernel") and name.split("/")[-2] in config.lora.targets
  }
  for target in set(config.lora.targets) - {name.split("/")[-2] for name in kernels}:
    raise ConfigError(
      f"config key lora.targets: the model has no projection {target}_proj that can have an adapter (experts"
      " cannot): leave it out"
    )
  for name, key in zip(kernels, jax.random.split(key, len(kernels))):
    inputs, outputs = _split(name, kernels[name].shape)
    bound = 1 / math.sqrt(math.prod(inputs))
    parent = name.removesuffix("kernel")
    leaves[parent + "lora_a"] = jax.random.uniform(key, (*inputs, rank), jnp.float32, -bound, bound)
    leaves[parent + "lora_b"] = jnp.zeros((rank, *outputs), jnp.float32)
  return unflatten_dict(leaves, sep="/")


def join(base: Any, adapters: Any) -> Any:
  """The tree with the leaves of both."""
  if not isinstance(adapters, dict):
    return adapters
  return base | {name: join(base.get(name, {}), inner) for name, inner in adapters.items()}


def merged(kernel: Any, a: jax.Array | None, b: jax.Array | None, scale: float) -> jax.Array:
  """W + scale A B, a new array in float32: the weights that compute the same without adapters. `a` None: W."""
  kernel = jnp.array(dequantised(kernel, jnp.float32))
  return kernel if a is None else kernel + scale * jnp.tensordot(a, b, 1)


def quantised(name: str, kernel: jax.Array, dtype: str) -> Any:
  """A frozen leaf in `dtype`; in one of QUANTISED, the projections' kernels alone, and the others in bfloat16. Scales of
  norms stay float32: Gemma's are 1 + w.

  Each TILE weights along an input axis have a scale of their own, as has each output.
  """
  projection = name.endswith("/kernel") and name.split("/")[-2] in PROJECTIONS
  if kernel.ndim == 1:
    return kernel.astype("float32")
  if dtype not in QUANTISED or not projection:
    return kernel.astype("bfloat16" if dtype in QUANTISED else dtype)
  inputs, _ = _split(name, kernel.shape)
  tiled = len(inputs) - 1
  tile = math.gcd(inputs[tiled], TILE)
  others = [axis for axis in range(kernel.ndim) if axis != tiled]
  return qwix.quantize(
    kernel, dtype, channelwise_axes=others, tiled_axes={tiled: tile}, scale_dtype=jnp.bfloat16
  )


def dequantised(kernel: Any, dtype: Any) -> jax.Array:
  """A kernel, quantised or not, in the dtype of the computation."""
  if isinstance(kernel, qwix.QArray):
    kernel = qwix.dequantize(kernel.astype(dtype))
  return kernel.astype(dtype)


def _split(name, shape):
  """A kernel's input and output axes."""
  inputs = 2 if name.split("/")[-2] == "o" else 1
  return shape[:inputs], shape[inputs:]
