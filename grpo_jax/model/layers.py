"""The layers of the decoder as Flax Linen modules. grpo_jax/types.py explains the shape letters."""

from collections.abc import Callable
import functools
import math

from flax import linen as nn
import jax
import jax.numpy as jnp

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.kernels import factors
from grpo_jax.model.on_devices import gathered

_LIMIT, _SLOPE = 7.0, 1.702  # the constants of clamped_silu in gpt-oss


def clamped_silu(gate: jax.Array, up: jax.Array) -> jax.Array:
  """gate sigmoid(1.702 gate) (up + 1), gate <= 7, |up| <= 7: the SwiGLU of gpt-oss (2508.10925)."""
  gate, up = jnp.minimum(gate, _LIMIT), jnp.clip(up, -_LIMIT, _LIMIT)
  return gate * nn.sigmoid(_SLOPE * gate) * (up + 1)


# (gate, up) -> the hidden units of a gated MLP.
ACTIVATIONS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
  "silu": lambda gate, up: nn.silu(gate) * up,
  "gelu_tanh": lambda gate, up: nn.gelu(gate, approximate=True) * up,
  "clamped_silu": clamped_silu,
}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def einsum(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
  """jnp.einsum of two operands of one dtype with a float32 result.

  The gradient is computed in the dtype of the operands. By default, JAX would compute the gradient
  of a bfloat16 product with a float32 result as two float32 products.
  """
  return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)


def _einsum_forward(
  equation: str, x: jax.Array, y: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  # Not `einsum`: a policy of learner.remat_policy cannot see the product inside a custom_vjp.
  return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32), (x, y)


def _einsum_backward(
  equation: str, operands: tuple[jax.Array, jax.Array], dz: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """The gradient of each operand: the product of dz with the other operand."""
  x, y = operands
  inputs, of_z = equation.split("->")
  of_x, of_y = inputs.split(",")
  dz = dz.astype(x.dtype)
  dx = jnp.einsum(f"{of_z},{of_y}->{of_x}", dz, y, preferred_element_type=jnp.float32)
  dy = jnp.einsum(f"{of_x},{of_z}->{of_y}", x, dz, preferred_element_type=jnp.float32)
  return dx.astype(x.dtype), dy.astype(y.dtype)


einsum.defvjp(_einsum_forward, _einsum_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def matmul(on_cpu: bool, x: jax.Array, kernel_IO: jax.Array) -> jax.Array:
  """x [..., I] @ kernel. The gradient of the kernel transposes the smaller of its two operands.

  By default, XLA's CPU compiler fuses the transposition of the larger operand with the elementwise
  code that computes it, and reads that with a stride (experiments/LOG.md, 2026-11-21). `on_cpu`
  says whether the program is compiled for a CPU (see `_product`).
  """
  return _product(on_cpu, x, kernel_IO)


def _product(on_cpu: bool, x: jax.Array, y: jax.Array) -> jax.Array:
  """x @ y in the operands' dtype, from sums in float32.

  XLA's CPU compiler uses the processor's instructions for bfloat16, which are several times as
  fast, only for a float32 result (experiments/LOG.md, 2026-11-24). Accelerators sum in float32 and
  round when they write.
  """
  return jnp.matmul(x, y, preferred_element_type=jnp.float32 if on_cpu else None).astype(x.dtype)


def _matmul_forward(
  on_cpu: bool, x: jax.Array, kernel_IO: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  return _product(on_cpu, x, kernel_IO), (x, kernel_IO)


def _matmul_backward(
  on_cpu: bool, saved: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """The gradients of x and of the kernel."""
  x, kernel_IO = saved
  dy = jax.lax.optimization_barrier(dy)  # or XLA would fuse transpositions with the code of dy
  if x.ndim > 2:  # tokens are split over devices (see `merged`)
    dkernel_IO = jnp.einsum("...i,...o->io", x, dy, preferred_element_type=jnp.float32)
    return _product(on_cpu, dy, kernel_IO.T), dkernel_IO.astype(x.dtype)
  x_is_smaller = x.shape[1] <= dy.shape[1]
  if x_is_smaller:
    dkernel_IO = _product(on_cpu, x.T, dy)
  else:
    dkernel_IO = _product(on_cpu, dy.T, x).T
  return _product(on_cpu, dy, kernel_IO.T), dkernel_IO


matmul.defvjp(_matmul_forward, _matmul_backward)


def merged(config: ModelConfig, x: jax.Array, axes: int = 1) -> jax.Array:
  """Reshapes x to rows [N, I], where I is the product of the last `axes` axes.

  Where tokens are split over devices, the result is [B, T, I] instead: one axis B * T could not
  stay split over both mesh axes.
  """
  I = math.prod(x.shape[-axes:])
  return x.reshape(*x.shape[:-axes], I) if config.context > 1 else x.reshape(-1, I)


class Dense(nn.Module):
  """Multiplies the last `axes` axes of x with a kernel, in config.dtype.

  `features` are the sizes of the output axes. Adds the product of the LoRA adapter if the
  parameters hold one, and a bias if `use_bias` is set.
  """

  config: ModelConfig
  features: tuple[int, ...]
  axes: int = 1
  use_bias: bool = False

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns x W, plus the adapter's product and the bias if there are any."""
    c = self.config
    batch_shape = x.shape[: x.ndim - self.axes]
    inputs = x.shape[x.ndim - self.axes :]
    I, O = math.prod(inputs), math.prod(self.features)

    def initial_kernel(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
      # The initial scale depends on the product of all input axes, hence the matrix.
      return nn.initializers.lecun_normal()(key, (I, O)).reshape(shape)

    kernel = self.param("kernel", initial_kernel, (*inputs, *self.features))
    kernel_IO, scale_O = factors(kernel, c.dtype, O)
    if I != O and c.embed_dim in (I, O):  # fsdp and context split the dimension of size D
      kernel_IO = gathered(c.rows, (I, O).index(c.embed_dim), kernel_IO)
    rows = merged(c, x, self.axes).astype(c.dtype)
    on_cpu = (c.platform or jax.default_backend()) == "cpu"
    out = matmul(on_cpu, rows, kernel_IO)
    if scale_O is not None:
      out = out * scale_O
    if self.has_variable("params", "lora_a"):
      a: jax.Array = self.get_variable("params", "lora_a").astype(c.dtype)
      b: jax.Array = self.get_variable("params", "lora_b").astype(c.dtype)
      down = matmul(on_cpu, rows, a.reshape(I, -1))
      out = out + c.lora.scale * matmul(on_cpu, down, b.reshape(-1, O))
    out = out.reshape(*batch_shape, *self.features)
    if not self.use_bias:
      return out
    bias = self.param("bias", nn.initializers.zeros_init(), self.features)
    return out + bias.astype(c.dtype)


# The backward pass recomputes the norm from its inputs. Otherwise Flax would keep three float32
# arrays of the inputs' shape, each of which takes twice the bytes of bfloat16 inputs.
RMSNorm = nn.remat(nn.RMSNorm)


def head_product(
  config: ModelConfig, equation: str, hidden: jax.Array, weights: jax.Array
) -> jax.Array:
  """`einsum` of hidden states [..., D] with weights: float32 [..., outputs].

  In the equation, n is the axis of rows. Where tokens are split over devices, n becomes b and t.
  """
  if config.context > 1:
    return einsum(equation.replace("n", "bt"), hidden, weights)
  out_NV = einsum(equation, hidden.reshape(-1, hidden.shape[-1]), weights)
  return out_NV.reshape(*hidden.shape[:-1], -1)


class Head(nn.Module):
  """A linear map of hidden states [..., D] to float32 [..., outputs], with a bias if `use_bias`."""

  config: ModelConfig
  outputs: int
  use_bias: bool = False

  @nn.compact
  def __call__(self, hidden_BTD: jax.Array) -> jax.Array:
    shape = self.config.embed_dim, self.outputs
    kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
    out = head_product(self.config, "nd,dv->nv", hidden_BTD, kernel.astype(self.config.dtype))
    return out + self.param("bias", nn.initializers.zeros, shape[1:]) if self.use_bias else out
