"""The gated delta rule (Yang et al. 2412.06464): linear attention with a memory of fixed size.

Each head has a matrix S that maps keys to values. A token with query q, key k, value v, decay a and
strength b changes it to S <- a S + b k (v - k^T a S)^T, and reads q^T S from it. Queries and keys
are normalised. The layer follows Qwen3.5 in transformers: a short convolution comes first.
"""

from typing import Any

from flax import linen as nn
from flax import struct
import jax
import jax.numpy as jnp

from grpo_jax.model.config import DeltaShape, LayerKind, ModelConfig
from grpo_jax.model.kernels import Target
from grpo_jax.model.layers import Dense
from grpo_jax.model.mixers.seen import Kept, Seen

CHUNK = 64  # tokens that are computed together
# The backward pass computes each segment of this many tokens again. A multiple of CHUNK.
SEGMENT = 2048
_EPSILON = 1e-6  # of the norm of queries and keys
# The state sums what all earlier tokens wrote, so one bfloat16 product of a TPU is too inexact.
# HIGH splits each number into two bfloat16 parts, which is enough. HIGHEST takes three parts, and
# four times as long to compile.
_EXACT = jax.lax.Precision.HIGH

# Path in a layer -> the axis of the mesh that splits each dimension (see parallel/sharding.py).
RULES = (
  (r"delta/in_proj_[qkab]/kernel", ("fsdp", "tensor", None)),
  (r"delta/in_proj_[vz]/kernel", ("fsdp", "tensor", None, None)),
  (r"delta/out/kernel", ("tensor", None, None, "fsdp")),
  (r"delta/conv_[qk]", (None, "tensor", None)),
  (r"delta/conv_v", (None, "tensor", None, None)),
  (r"delta/(decay|decay_bias)", ("tensor", None)),
  (r"delta/norm_scale", (None,)),
  (r"delta/in_proj_[qkvzab]/lora_a", ("fsdp", None)),
  (r"delta/in_proj_[qkab]/lora_b", (None, "tensor", None)),
  (r"delta/in_proj_[vz]/lora_b", (None, "tensor", None, None)),
  (r"delta/out/lora_a", ("tensor", None, None, None)),
  (r"delta/out/lora_b", (None, "fsdp")),
)
# Path of a kernel in a layer -> the projection, which can have an adapter.
TARGETS = {
  "delta/in_proj_q": Target(("in_proj_qkv", "in_proj_qkvz")),
  "delta/in_proj_k": Target(("in_proj_qkv", "in_proj_qkvz")),
  "delta/in_proj_v": Target(("in_proj_qkv", "in_proj_qkvz")),
  "delta/in_proj_z": Target(("in_proj_z", "in_proj_qkvz")),
  "delta/in_proj_b": Target(("in_proj_b", "in_proj_ba")),
  "delta/in_proj_a": Target(("in_proj_a", "in_proj_ba")),
  "delta/out": Target(("out_proj",), inputs=3),
}


def kept(config: ModelConfig, kind: LayerKind) -> Kept:
  """The layer keeps a `Memory` of each row."""
  del kind
  shape, item = config.delta, jnp.dtype(config.dtype).itemsize
  state = 4.0 * shape.value_heads * shape.key_dim * shape.value_dim
  tails = item * (shape.width - 1) * shape.channels
  return Kept(of_row=((shape.key_heads, state + tails),))


class Tails(struct.PyTreeNode):
  """The last W - 1 tokens of rows before the convolution, or its W weights.

  Attributes:
    q: [B, W - 1, J, A], or [W, J, A].
    k: The shape of q.
    v: [B, W - 1, J, R, N], or [W, J, R, N].
  """

  q: jax.Array
  k: jax.Array
  v: jax.Array


class Memory(struct.PyTreeNode):
  """The recurrent state of a row after earlier tokens. J key heads have R value heads each.

  Attributes:
    state: float32 [B, J, R, A, N], the matrices S of the heads.
    tails: `Tails` with the axis J, which a mesh splits, before that of tokens: [B, J, W - 1, ...].
  """

  state: jax.Array
  tails: Tails


class Tokens(struct.PyTreeNode):
  """The inputs of the delta rule, for the tokens of a row.

  Attributes:
    mixed: `Tails` with T tokens, before the convolution.
    log_decay: float32 [B, T, J, R], log a.
    strength: float32 [B, T, J, R], b.
  """

  mixed: Tails
  log_decay: jax.Array
  strength: jax.Array


class GatedDelta(nn.Module):
  """The gated delta rule with its projections. `Seen.recur` runs `scan_tokens` over the rows."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x_BTD: jax.Array, seen: Seen) -> tuple[jax.Array, Any]:
    """Returns the output [B, T, D], and the memory to keep (see `seen.Recur`), if any."""
    c = self.config
    heads = _heads(c.delta)
    tokens, z = self._projected(x_BTD)
    init, width = nn.initializers.lecun_normal(), c.delta.width
    weights = Tails(
      *(self.param(f"conv_{x}", init, (width, *heads[x])).astype(jnp.float32) for x in "qkv")
    )
    J, R, N = heads["v"]
    tails = (jnp.zeros((J, width - 1, *heads[x][1:]), c.dtype) for x in "qkv")
    empty = Memory(jnp.zeros((J, R, c.delta.key_dim, N), jnp.float32), Tails(*tails))
    out, kept = seen.recur(scan_tokens, weights, tokens, empty)
    # Each head's output gets an RMS norm, and z gates it.
    scale = self.param("norm_scale", nn.initializers.ones, (N,))
    out = out * jax.lax.rsqrt(jnp.square(out).mean(-1, keepdims=True) + c.norm_eps)
    out = ((out * scale).astype(c.dtype) * nn.silu(z.astype(jnp.float32))).astype(c.dtype)
    return Dense(c, (c.embed_dim,), axes=3, name="out")(out), kept

  def _projected(self, x_BTD: jax.Array) -> tuple[Tokens, jax.Array]:
    """The inputs of the delta rule, and the gate z [B, T, J, R, N] of the output."""
    c, heads = self.config, _heads(self.config.delta)
    J, R, _ = heads["v"]

    def project(name: str, features: tuple[int, ...]) -> jax.Array:
      return Dense(c, features, name=f"in_proj_{name}")(x_BTD)

    mixed = Tails(*(project(x, heads[x]) for x in "qkv"))
    decay = self.param("decay", nn.initializers.zeros, (J, R))
    bias = self.param("decay_bias", nn.initializers.ones, (J, R))
    # As in Mamba 2 (2405.21060), a token decays the state by exp(-exp(decay) softplus(x + bias)),
    # where x is its projection "a". This is always between 0 and 1. A sampler may hold both
    # parameters in bfloat16, in which exp would lose further digits.
    decay, bias = decay.astype(jnp.float32), bias.astype(jnp.float32)
    log_decay = -jnp.exp(decay) * nn.softplus(project("a", (J, R)).astype(jnp.float32) + bias)
    strength = nn.sigmoid(project("b", (J, R))).astype(jnp.float32)
    return Tokens(mixed, log_decay, strength), project("z", heads["v"])


def _heads(shape: DeltaShape) -> dict[str, tuple[int, ...]]:
  """The shape of a token's queries and keys [J, A] and values [J, R, N]."""
  keys = shape.key_heads, shape.key_dim
  values = shape.key_heads, shape.value_heads // shape.key_heads, shape.value_dim
  return {"q": keys, "k": keys, "v": values}


def scan_tokens(
  weights: Tails, tokens: Tokens, memory: Memory, is_token_BT: jax.Array | None
) -> tuple[jax.Array, Memory]:
  """Applies the convolution and the delta rule to the tokens of rows (a `seen.Scan`).

  Long rows are computed in segments. The backward pass keeps the inputs and the memory before each
  segment, and not the many float32 arrays of every token.

  Args:
    weights: float32, the weights of the convolution. The newest token's are last.
    tokens: The inputs of the T tokens.
    memory: The memory of the rows' earlier tokens.
    is_token_BT: As in `seen.Scan`.

  Returns:
    The vectors that the queries read, float32 [B, T, J, R, N], and the memory after the tokens.
  """
  B, T = tokens.log_decay.shape[:2]
  if T <= SEGMENT:
    return _scan_segment(weights, tokens, memory, is_token_BT)
  padding = -T % SEGMENT
  if padding and is_token_BT is None:
    is_token_BT = jnp.ones((B, T), bool)

  def in_segments(x: jax.Array) -> jax.Array:
    """[B, T, ...] -> [segments, B, SEGMENT, ...]"""
    x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(B, -1, SEGMENT, *x.shape[2:]), 1, 0)

  @jax.checkpoint
  def segment(memory: Memory, x: tuple[Tokens, jax.Array | None]) -> tuple[Memory, jax.Array]:
    out, memory = _scan_segment(weights, x[0], memory, x[1])
    return memory, out

  memory, out = jax.lax.scan(segment, memory, jax.tree.map(in_segments, (tokens, is_token_BT)))
  out = jnp.moveaxis(out, 0, 1)
  return out.reshape(B, T + padding, *out.shape[3:])[:, :T], memory


def _scan_segment(
  weights: Tails, tokens: Tokens, memory: Memory, is_token_BT: jax.Array | None
) -> tuple[jax.Array, Memory]:
  """`scan_tokens` for at most SEGMENT tokens."""
  T, (W, _, A) = tokens.log_decay.shape[1], weights.q.shape
  with_tails = jax.tree.map(
    lambda tail, x: jnp.concatenate([jnp.moveaxis(tail, 1, 2), x], axis=1),
    memory.tails,
    tokens.mixed,
  )

  def convolved(x: jax.Array, weights: jax.Array) -> jax.Array:
    """SiLU of the convolution of each channel over a token and the W - 1 tokens before it."""
    return nn.silu(sum(x[:, w : w + T] * weights[w] for w in range(W)))

  log_decay, strength = tokens.log_decay, tokens.strength
  if is_token_BT is None:
    tails = jax.tree.map(lambda x: x[:, T:], with_tails)
  else:
    # With a decay of exp(0) and a strength of 0, padding leaves the state as it is.
    is_token = is_token_BT[..., None, None]
    log_decay, strength = jnp.where(is_token, log_decay, 0), jnp.where(is_token, strength, 0)
    # `with_tails` has W - 1 earlier tokens in front, so the last W - 1 of n tokens begin at n.
    from_BW = is_token_BT.sum(1)[:, None] + jnp.arange(W - 1)

    def newest(x: jax.Array) -> jax.Array:
      index = from_BW.reshape(*from_BW.shape, *[1] * (x.ndim - 2))
      return jnp.take_along_axis(x, index, axis=1)

    tails = jax.tree.map(newest, with_tails)
  mixed = jax.tree.map(convolved, with_tails, weights)
  q, k = _normalised(mixed.q) / A**0.5, _normalised(mixed.k)
  rule = one_token if T == 1 else in_chunks
  out, state = rule(q, k, mixed.v, log_decay, strength, memory.state)
  return out, Memory(state, jax.tree.map(lambda x: jnp.moveaxis(x, 2, 1), tails))


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
  """The rule by its definition, for T = 1. Arguments and results are those of `in_chunks`."""
  # q and k become [B, J, 1, A, 1], v [B, J, R, N], and b [B, J, R].
  q, k, v, b = q[:, 0, :, None, :, None], k[:, 0, :, None, :, None], v[:, 0], strength[:, 0]
  # Both sums read the old state, so a TPU reads it once and updates it in place. If q read the new
  # state, XLA would copy all states.
  decay = jnp.exp(log_decay[:, 0])[..., None]
  written = (v - decay * (state * k).sum(-2)) * b[..., None]
  out = decay * (state * q).sum(-2) + (k * q).sum(-2) * written
  return out[:, None], state * decay[..., None] + k * written[..., None, :]


def in_chunks(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  log_decay: jax.Array,
  strength: jax.Array,
  state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """The rule for many tokens, a chunk at a time by matrix products (section 3.3 of the paper).

  Args:
    q: float32 [B, T, J, A], normalised and divided by sqrt(A).
    k: float32 [B, T, J, A], normalised.
    v: float32 [B, T, J, R, N].
    log_decay: float32 [B, T, J, R], at most 0.
    strength: float32 [B, T, J, R].
    state: float32 [B, J, R, A, N], before the tokens.

  Returns:
    The vectors that the queries read, [B, T, J, R, N], and the state after the tokens.
  """
  T = q.shape[1]
  C = min(CHUNK, 1 << (T - 1).bit_length())  # a power of two, as `inverse` needs
  chunks = -(-T // C)
  back = jnp.arange(C)[:, None] - jnp.arange(C)  # how many tokens d comes before c, in [c, d]

  def split(x: jax.Array) -> jax.Array:
    """[B, T, J, ...] -> [chunks, B, J, ..., C, last], padded by zeros, which keep the state."""
    x = jnp.pad(x, [(0, 0), (0, chunks * C - T)] + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(x.shape[0], chunks, C, *x.shape[2:])
    return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 2, -2)

  # Few products, and each of one chunk: a compiler may take seconds for each, and more for many
  # matrices at once. Token c of a chunk writes k_c u_c^T. As it reads the earlier writes, u is the
  # solution of a triangular system: (1 + L) u = b (v - exp(decay) k^T S), with S before the chunk.
  # L is b k_c . k_d times the decay from d to c, for d < c.
  def chunk(state: jax.Array, x: Any) -> tuple[jax.Array, jax.Array]:  # -> state after it, outputs
    k_and_q, v, decay, b = x
    k = k_and_q[..., :C, :]
    decay = jnp.cumsum(decay, -2)  # log of the product of all decays in the chunk so far
    between = decay - jnp.swapaxes(decay, -1, -2)  # log of the decay from token d to token c
    between = jnp.exp(jnp.where(back >= 0, between, -jnp.inf))
    products = jnp.einsum("bjca,bjda->bjcd", k_and_q, k, precision=_EXACT)[:, :, None]
    k_products, q_products = products[..., :C, :] * between, products[..., C:, :] * between
    of_state = jnp.einsum("bjca,bjran->bjrcn", k_and_q, state, precision=_EXACT)
    inverted = inverse(jnp.where(back > 0, b * k_products, 0))
    wanted = b * (v - of_state[..., :C, :] * jnp.exp(decay))
    writes = jnp.matmul(inverted, wanted, precision=_EXACT)  # u of all tokens
    out = of_state[..., C:, :] * jnp.exp(decay) + jnp.matmul(q_products, writes, precision=_EXACT)
    end = decay[..., -1:, :]  # log of the decay over the whole chunk
    added, state = writes * jnp.exp(end - decay), state * jnp.exp(end)
    return state + jnp.einsum("bjca,bjrcn->bjran", k, added, precision=_EXACT), out

  k_and_q = jnp.concatenate([split(k), split(q)], axis=-2)
  of_tokens = (k_and_q, split(v), split(log_decay[..., None]), split(strength[..., None]))
  state, out = jax.lax.scan(chunk, state, of_tokens)
  out = jnp.moveaxis(jnp.moveaxis(out, -2, 2), 0, 1)  # [B, chunks, C, J, R, N]
  return out.reshape(out.shape[0], chunks * C, *out.shape[3:])[:, :T], state


@jax.custom_vjp
def inverse(lower: jax.Array) -> jax.Array:
  """(1 + L)^-1 of strictly lower triangular matrices L [..., C, C], C a power of two.

  Each step joins pairs of neighbouring inverted blocks on the diagonal to blocks of twice the size.
  A series of powers of L would be shorter code, but loses all digits where keys are similar. The
  products are of whole matrices, because compilers handle blocks of a few numbers badly.
  """
  C = lower.shape[-1]
  number = jnp.arange(C)

  def joined(level: int, inverted: jax.Array) -> jax.Array:
    block = number >> level
    # The block below the diagonal that couples the two blocks of a pair.
    joins = (block[:, None] == block + 1) & (block[:, None] % 2 == 1)
    between = jnp.matmul(inverted, jnp.where(joins, lower, 0), precision=_EXACT)
    return inverted - jnp.matmul(between, inverted, precision=_EXACT)

  identity = jnp.broadcast_to(jnp.eye(C, dtype=lower.dtype), lower.shape)
  # A loop, so that only one level is compiled.
  return jax.lax.fori_loop(0, C.bit_length() - 1, joined, identity)


def _inverse_forward(lower: jax.Array) -> tuple[jax.Array, jax.Array]:
  inverted = inverse(lower)
  return inverted, inverted


def _inverse_backward(inverted: jax.Array, dy: jax.Array) -> tuple[jax.Array]:
  transposed = jnp.swapaxes(inverted, -1, -2)
  return (-jnp.matmul(jnp.matmul(transposed, dy, precision=_EXACT), transposed, precision=_EXACT),)


inverse.defvjp(_inverse_forward, _inverse_backward)
