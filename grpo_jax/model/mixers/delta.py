"""The gated delta rule (Yang et al. 2412.06464): linear attention with a memory of fixed size.

Each head has a matrix S that maps keys to values. A token with query q, key k, value v, decay a and
strength b changes it to S <- a S + b k (v - k^T a S)^T, and reads q^T S from it. Queries and keys
are normalised. As Qwen3.5 has it in transformers, with a short convolution before.
"""

from typing import Any

from flax import linen as nn
from flax import struct
import jax
import jax.numpy as jnp

from grpo_jax.model.config import DeltaShape, ModelConfig
from grpo_jax.model.layers import Dense
from grpo_jax.model.mixers.seen import Seen

CHUNK = 64  # tokens that are computed together
_EPSILON = 1e-6  # of the norm of queries and keys
# The memory adds up what all earlier tokens wrote, so that a TPU's short products are not enough.
_EXACT = jax.lax.Precision.HIGHEST

# Path in a layer -> the axis of the mesh that splits each dimension (see parallel/sharding.py).
RULES = (
  (r"delta/in_proj_(qkv|[ab])/kernel", ("fsdp", "tensor")),
  (r"delta/in_proj_z/kernel", ("fsdp", "tensor", None)),
  (r"delta/out_proj/kernel", ("tensor", None, "fsdp")),
  (r"delta/conv", (None, "tensor")),
  (r"delta/(decay|decay_bias)", ("tensor",)),
  (r"delta/norm_scale", (None,)),
)


class Memory(struct.PyTreeNode):
  """What a row keeps of its earlier tokens.

  Attributes:
    state: float32 [B, J, R, A, N], the matrices of the heads, R of them for each of J key heads.
    tail: [B, 1, W - 1, C], the last tokens before the convolution of width W over C channels.
  """

  state: jax.Array
  tail: jax.Array


class Tokens(struct.PyTreeNode):
  """What the tokens of a row bring along. The keys have J heads, and each has R values.

  Attributes:
    channels_BTC: Queries, keys and values of a token, before the convolution.
    log_decay: float32 [B, T, J, R], log a.
    strength: float32 [B, T, J, R], b.
  """

  channels_BTC: jax.Array
  log_decay: jax.Array
  strength: jax.Array


class GatedDelta(nn.Module):
  """The gated delta rule with its projections. `Seen.recur` says where rows begin."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x_BTD: jax.Array, seen: Seen) -> tuple[jax.Array, Any]:
    """Returns the output [B, T, D], and what `recur` returns beside its output."""
    c = self.config
    shape = c.delta
    heads, R = shape.key_heads, shape.value_heads // shape.key_heads
    tokens, z = self._projected(x_BTD)
    conv_WC = self.param(
      "conv", nn.initializers.lecun_normal(), (shape.width, shape.channels)
    ).astype(jnp.float32)

    def scan(
      tokens: Tokens, memory: Memory, is_token_BT: jax.Array | None
    ) -> tuple[jax.Array, Memory]:
      return scan_tokens(shape, conv_WC, tokens, memory, is_token_BT)

    empty = Memory(
      jnp.zeros((heads, R, shape.key_dim, shape.value_dim), jnp.float32),
      jnp.zeros((1, shape.width - 1, shape.channels), c.dtype),
    )
    out, kept = seen.recur(scan, tokens, empty)
    scale = self.param("norm_scale", nn.initializers.ones, (shape.value_dim,))
    out = out * jax.lax.rsqrt(jnp.square(out).mean(-1, keepdims=True) + c.norm_eps)
    out = (out * scale).astype(c.dtype) * nn.silu(z.astype(jnp.float32))
    out = out.astype(c.dtype).reshape(*x_BTD.shape[:2], shape.value_heads, shape.value_dim)
    return Dense(c, (c.embed_dim,), axes=2, name="out_proj")(out), kept

  def _projected(self, x_BTD: jax.Array) -> tuple[Tokens, jax.Array]:
    """The tokens, and the gate z [B, T, J, R, N] of the output."""
    c = self.config
    shape, batch = c.delta, x_BTD.shape[:2]
    J, R, N = shape.key_heads, shape.value_heads // shape.key_heads, shape.value_dim
    channels_BTC = Dense(c, (shape.channels,), name="in_proj_qkv")(x_BTD)
    z = Dense(c, (shape.value_heads, N), name="in_proj_z")(x_BTD)
    b, a = (Dense(c, (J * R,), name=f"in_proj_{name}")(x_BTD) for name in "ba")
    decay = self.param("decay", nn.initializers.zeros, (J * R,))
    bias = self.param("decay_bias", nn.initializers.ones, (J * R,))
    a = a.reshape(*batch, J, R).astype(jnp.float32)
    log_decay = -jnp.exp(decay.reshape(J, R)) * nn.softplus(a + bias.reshape(J, R))
    strength = nn.sigmoid(b.reshape(*batch, J, R)).astype(jnp.float32)
    return Tokens(channels_BTC, log_decay, strength), z.reshape(*batch, J, R, N)


def scan_tokens(
  shape: DeltaShape,
  conv_WC: jax.Array,
  tokens: Tokens,
  memory: Memory,
  is_token_BT: jax.Array | None,
) -> tuple[jax.Array, Memory]:
  """The convolution and the delta rule over the tokens of rows.

  Args:
    shape: The shape of the layer.
    conv_WC: float32, the weights of the convolution, the newest token last.
    tokens: The tokens.
    memory: Of the rows' earlier tokens.
    is_token_BT: As in `seen.Scan`.

  Returns:
    What the queries read, float32 [B, T, J, R, N], and the memory after the tokens.
  """
  (B, T, _), J, A = tokens.channels_BTC.shape, shape.key_heads, shape.key_dim
  R, W, N = shape.value_heads // J, shape.width, shape.value_dim
  with_tail = jnp.concatenate([memory.tail[:, 0], tokens.channels_BTC], axis=1)
  mixed_BTC = nn.silu(sum(with_tail[:, w : w + T] * conv_WC[w] for w in range(W)))
  q, k, v = jnp.split(mixed_BTC, (J * A, 2 * J * A), axis=-1)
  log_decay, strength = tokens.log_decay, tokens.strength
  if is_token_BT is None:
    tail = with_tail[:, T:]
  else:
    is_token = is_token_BT[..., None, None]
    log_decay, strength = jnp.where(is_token, log_decay, 0), jnp.where(is_token, strength, 0)
    from_BW = is_token_BT.sum(1)[:, None] + jnp.arange(W - 1)
    tail = jnp.take_along_axis(with_tail, from_BW[..., None], axis=1)
  q, k = _normalised(q.reshape(B, T, J, A)) / A**0.5, _normalised(k.reshape(B, T, J, A))
  v = v.reshape(B, T, J, R, N)
  rule = one_token if T == 1 else in_chunks
  out, state = rule(q, k, v, log_decay, strength, memory.state)
  return out, Memory(state, tail[:, None])


def _normalised(x: jax.Array) -> jax.Array:
  return x * jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + _EPSILON)


def one_token(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  log_decay: jax.Array,
  strength: jax.Array,
  state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """The rule as its definition has it, for T = 1. See `in_chunks`."""
  q, k, v, b = q[:, 0, :, None, :, None], k[:, 0, :, None, :, None], v[:, 0], strength[:, 0]
  state = state * jnp.exp(log_decay[:, 0])[..., None, None]
  new = (v - (state * k).sum(-2)) * b[..., None]
  state = state + k * new[..., None, :]
  return (state * q).sum(-2)[:, None], state


def in_chunks(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  log_decay: jax.Array,
  strength: jax.Array,
  state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """The rule for many tokens, whose chunks are products of matrices (section 3.3 of the paper).

  Args:
    q: float32 [B, T, J, A], normalised and divided by sqrt(A).
    k: float32 [B, T, J, A], normalised.
    v: float32 [B, T, J, R, N].
    log_decay: float32 [B, T, J, R], at most 0.
    strength: float32 [B, T, J, R].
    state: float32 [B, J, R, A, N], before the tokens.

  Returns:
    [B, T, J, R, N], and the state after the tokens.
  """
  T = q.shape[1]
  C = min(CHUNK, 1 << (T - 1).bit_length())
  chunks = -(-T // C)

  def split(x: jax.Array) -> jax.Array:
    """[B, T, J, ...] -> [chunks, B, J, ..., C, last]"""
    x = jnp.pad(x, [(0, 0), (0, chunks * C - T)] + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(x.shape[0], chunks, C, *x.shape[2:])
    return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 2, -2)

  q, k, v = split(q), split(k), split(v)
  decay, b = split(log_decay[..., None])[..., 0], split(strength[..., None])[..., 0]
  decay = jnp.cumsum(decay, -1)  # log of the product of all decays in the chunk so far
  back = jnp.arange(C)[:, None] - jnp.arange(C)
  between = decay[..., :, None] - decay[..., None, :]
  between = jnp.exp(jnp.where(back >= 0, between, -jnp.inf))
  products = jnp.einsum("sbjca,sbjda->sbjcd", k, k, precision=_EXACT)[:, :, :, None]
  system = jnp.where(back > 0, b[..., None] * products * between, 0)
  solved = inverse(system)
  values = jnp.einsum("sbjrcd,sbjrdn->sbjrcn", solved, v * b[..., None], precision=_EXACT)
  scaled = solved * (b * jnp.exp(decay))[..., None, :]
  keys = jnp.einsum("sbjrcd,sbjda->sbjrca", scaled, k, precision=_EXACT)
  reads = jnp.einsum("sbjca,sbjda->sbjcd", q, k, precision=_EXACT)[:, :, :, None] * between

  def chunk(state: jax.Array, x: Any) -> tuple[jax.Array, jax.Array]:
    q, k, values, keys, reads, decay = x
    new = values - jnp.einsum("bjrca,bjran->bjrcn", keys, state, precision=_EXACT)
    out = jnp.einsum("bjca,bjran->bjrcn", q, state, precision=_EXACT)
    out = out * jnp.exp(decay)[..., None]
    out = out + jnp.einsum("bjrcd,bjrdn->bjrcn", reads, new, precision=_EXACT)
    last = decay[..., -1:]
    added = new * jnp.exp(last - decay)[..., None]
    state = state * jnp.exp(last)[..., None]
    return state + jnp.einsum("bjca,bjrcn->bjran", k, added, precision=_EXACT), out

  state, out = jax.lax.scan(chunk, state, (q, k, values, keys, reads, decay))
  out = jnp.moveaxis(jnp.moveaxis(out, -2, 2), 0, 1)  # [B, chunks, C, J, R, N]
  return out.reshape(out.shape[0], chunks * C, *out.shape[3:])[:, :T], state


@jax.custom_vjp
def inverse(lower: jax.Array) -> jax.Array:
  """(1 + L)^-1 of strictly lower triangular matrices L [..., C, C], C a power of two.

  Two neighbouring blocks of the diagonal that are inverted make one of twice the size. A series of
  powers of L would be shorter, and lose all digits where keys are alike. The products are of whole
  matrices, because compilers handle blocks of a few numbers badly.
  """
  C = lower.shape[-1]
  number = jnp.arange(C)
  inverted = jnp.broadcast_to(jnp.eye(C, dtype=lower.dtype), lower.shape)
  size = 1
  while size < C:
    block = number // size
    # The block below the diagonal, between the two.
    joins = (block[:, None] == block + 1) & (block[:, None] % 2 == 1)
    between = jnp.where(joins, lower, 0)
    if size > 1:
      between = jnp.matmul(inverted, between, precision=_EXACT)
      between = jnp.matmul(between, inverted, precision=_EXACT)
    inverted = inverted - between
    size *= 2
  return inverted


def _inverse_forward(lower: jax.Array) -> tuple[jax.Array, jax.Array]:
  inverted = inverse(lower)
  return inverted, inverted


def _inverse_backward(inverted: jax.Array, dy: jax.Array) -> tuple[jax.Array]:
  across = jnp.swapaxes(inverted, -1, -2)
  return (-jnp.matmul(jnp.matmul(across, dy, precision=_EXACT), across, precision=_EXACT),)


inverse.defvjp(_inverse_forward, _inverse_backward)
