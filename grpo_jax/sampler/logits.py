"""From logits to a token: filters, the draw, and the log-probs of the drawn token."""

import dataclasses

import jax
import jax.numpy as jnp

BRANCH = 16  # children of a node in the tree over the vocabulary


@dataclasses.dataclass(frozen=True)
class Decoding:
  """How tokens are drawn and when a row ends.

  Attributes:
    max_tokens: T, the longest completion.
    stop_ids: The token ids that end a completion.
    top_k: Draw from the k likeliest tokens. 0 is off.
    top_p: Draw from the fewest likeliest tokens whose probability reaches p. 1 is off.
    min_p: Drop tokens less likely than min_p times the likeliest. 0 is off.
  """

  max_tokens: int
  stop_ids: tuple[int, ...] = ()
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0

  @property
  def filters(self) -> bool:
    """Whether tokens are drawn from another distribution than softmax(logits / temperature)."""
    return bool(self.top_k) or self.top_p < 1 or bool(self.min_p)


def filtered(logits_BV: jax.Array, decoding: Decoding) -> jax.Array:
  """Logits with -inf where a filter drops the token: top-k first, then top-p, then min-p.

  That is the order of Hugging Face's generate. For top-p see Holtzman 1904.09751, for min-p Nguyen
  2407.01082. Equal logits at a threshold are kept or dropped together.

  Args:
    logits_BV: float32, already divided by the temperature.
    decoding: The filters.
  """
  if decoding.top_k:
    count = min(decoding.top_k, logits_BV.shape[-1])
    least_B1 = jax.lax.top_k(logits_BV, count)[0][:, -1:]
    logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
  if decoding.top_p < 1:
    sorted_BV = -jnp.sort(-logits_BV, axis=-1)
    probs_BV = jax.nn.softmax(sorted_BV, axis=-1)
    before_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV
    kept_BV = jnp.where(before_BV < decoding.top_p, sorted_BV, jnp.inf)
    logits_BV = jnp.where(logits_BV < kept_BV.min(-1, keepdims=True), -jnp.inf, logits_BV)
  if decoding.min_p:
    least_B1 = logits_BV.max(-1, keepdims=True) + jnp.log(decoding.min_p)
    logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
  return logits_BV


def draws_per_token(vocabulary: int) -> int:
  """How many uniform numbers one token takes: the levels of the tree that `draw` descends."""
  return 1 + (draws_per_token(-(-vocabulary // BRANCH)) if vocabulary > BRANCH else 0)


def draw(logits_BV: jax.Array, uniforms_BN: jax.Array) -> jax.Array:
  """Draws a token from softmax(logits) for each row.

  It descends a tree whose nodes hold the weight below them, and chooses one of at most BRANCH
  children by inversion at each level. That is one pass over V, where a noise per token (Gumbel)
  would cost most of a decode step. It also leaves few boundaries for rounding to cross, so that the
  same key gives the same tokens on another mesh.

  Args:
    logits_BV: float32, may hold -inf.
    uniforms_BN: Uniform numbers in [0, 1), N = draws_per_token(V).

  Returns:
    Tokens, integers [B].
  """
  levels = [jnp.exp(logits_BV - logits_BV.max(-1, keepdims=True))]
  while levels[-1].shape[1] > BRANCH:
    padding = -levels[-1].shape[1] % BRANCH
    levels[-1] = jnp.pad(levels[-1], ((0, 0), (0, padding)))
    # Not as a sum over [B, N / BRANCH, BRANCH]: a TPU pads the last axis of an array to 128.
    block = (1, BRANCH)
    levels.append(jax.lax.reduce_window(levels[-1], 0.0, jax.lax.add, block, block, "VALID"))
  token_B = _invert(levels.pop(), uniforms_BN[:, 0])
  for weights, uniform_B in zip(reversed(levels), uniforms_BN.T[1:]):
    children = token_B[:, None] * BRANCH + jnp.arange(BRANCH)
    chosen = jnp.take_along_axis(weights, children, axis=1)
    token_B = token_B * BRANCH + _invert(chosen, uniform_B)
  return token_B


def log_prob(logits_BV: jax.Array, tokens_B: jax.Array) -> jax.Array:
  """log softmax(logits)[token], float32 [B]."""
  chosen_B = jnp.take_along_axis(logits_BV, tokens_B[:, None], axis=-1)[:, 0]
  return chosen_B - jax.nn.logsumexp(logits_BV, axis=-1)


def sample_token(
  logits_BV: jax.Array, uniforms_BN: jax.Array, temperature_B: jax.Array, decoding: Decoding
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Draws the next token of each row.

  Args:
    logits_BV: float32.
    uniforms_BN: As in `draw`.
    temperature_B: float32. At 0 the row takes the likeliest token.
    decoding: The filters.

  Returns:
    (token, logprob, behavior_logprob), each [B]. The first log-prob is under softmax(logits /
    temperature), the second under the distribution after the filters. At temperature 0, the first
    is of temperature 1 and the second is 0, because the choice is certain.
  """
  is_greedy_B = temperature_B == 0
  tempered_BV = logits_BV / jnp.where(is_greedy_B, 1, temperature_B)[:, None]
  kept_BV = filtered(tempered_BV, decoding)
  drawn_B = draw(kept_BV, uniforms_BN)

  def with_likeliest() -> jax.Array:  # `filtered` keeps the likeliest token
    return jnp.where(is_greedy_B, kept_BV.argmax(-1), drawn_B)

  tokens_B = jax.lax.cond(is_greedy_B.any(), with_likeliest, lambda: drawn_B)
  logprobs_B = log_prob(tempered_BV, tokens_B)
  behavior_B = log_prob(kept_BV, tokens_B) if decoding.filters else logprobs_B
  return tokens_B, logprobs_B, jnp.where(is_greedy_B, 0, behavior_B)


def _invert(weights_BN: jax.Array, uniform_B: jax.Array) -> jax.Array:
  """The first of N entries whose cumulative weight exceeds the uniform number.

  It is never an entry of weight 0, whatever the rounding.
  """
  cumulative_BN = jnp.cumsum(weights_BN, axis=-1)
  index_B = (cumulative_BN <= uniform_B[:, None] * cumulative_BN[:, -1:]).sum(-1)
  return jnp.where(index_B < weights_BN.shape[-1], index_B, weights_BN.argmax(-1))
