"""The kernels of projections: which can have a LoRA adapter, and how layers read quantised ones."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Target(NamedTuple):
  """A projection that can have a LoRA adapter (see `lora.py`).

  Attributes:
    modules: The Hugging Face modules that hold this kernel, in some family each. The first module
      holds only this kernel, if there is such a module.
    inputs: How many axes of the kernel, the first ones, are inputs. The others are outputs.
  """

  modules: tuple[str, ...]
  inputs: int = 1


def is_quantised(kernel: Any) -> bool:
  """Whether a kernel is a qwix.QArray. The check avoids qwix, which is slow to import."""
  return hasattr(kernel, "qvalue")


def dequantised(kernel: Any, dtype: Any) -> jax.Array:
  """A kernel, quantised or not, in the dtype of the computation."""
  if is_quantised(kernel):
    import qwix  # here, because models that are not quantised do not need it

    kernel = qwix.dequantize(kernel.astype(dtype))
  return kernel.astype(dtype)


def factors(kernel: Any, dtype: Any, outputs: int) -> tuple[jax.Array, jax.Array | None]:
  """A kernel as a matrix [I, O] in the dtype of the computation, and a scale [O] of the product.

  The scale is None except for int8 kernels with one scale for each output (`lora.rounded`).
  """
  is_int8 = is_quantised(kernel) and kernel.qvalue.dtype == jnp.int8
  if is_int8 and kernel.scale.size == outputs:
    return kernel.qvalue.astype(dtype).reshape(-1, outputs), kernel.scale.reshape(-1).astype(dtype)
  return dequantised(kernel, dtype).reshape(-1, outputs), None
