"""From logits to a token: the filters, the draw, and the log-probs of what was drawn."""

import jax
import jax.numpy as jnp

from grpo_jax.config import Sampling

BRANCH = 16  # of the tree over the vocabulary that a draw goes down


def filtered(logits_BV: jax.Array, sampling: Sampling) -> jax.Array:
  """Tempered logits with -inf outside top-k, then top-p, then min-p (the order of Hugging Face's generate).

  top-p keeps the fewest most likely tokens whose probability reaches p (Holtzman 1904.09751); min-p those of at least
  p times the largest probability (Nguyen 2407.01082). Equal logits at a threshold are kept or dropped together.
  """
  if sampling.top_k:
    kept_BK = jax.lax.top_k(logits_BV, min(sampling.top_k, logits_BV.shape[-1]))[0]
    logits_BV = jnp.where(logits_BV < kept_BK[:, -1:], -jnp.inf, logits_BV)
  if sampling.top_p < 1:
    sorted_BV = -jnp.sort(-logits_BV, axis=-1)
    probs_BV = jax.nn.softmax(sorted_BV, axis=-1)
    before_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV
    least_B1 = jnp.where(before_BV < sampling.top_p, sorted_BV, jnp.inf).min(-1, keepdims=True)
    logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
  if sampling.min_p:
    least_B1 = logits_BV.max(-1, keepdims=True) + jnp.log(sampling.min_p)
    logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
  return logits_BV


def draws_per_token(vocabulary: int) -> int:
  """Uniform numbers that one token takes: the levels of the tree."""
  return 1 + (draws_per_token(-(-vocabulary // BRANCH)) if vocabulary > BRANCH else 0)


def draw(logits_BV: jax.Array, uniforms_BN: jax.Array) -> jax.Array:
  """Tokens [B] ~ softmax(logits), from N = draws_per_token(V) uniforms in [0, 1) each.

  Down a tree whose nodes hold the weight below them, choosing one of at most BRANCH children by inversion at each. That
  is one pass over V, where a noise per token (Gumbel) would cost most of a decode step; and few boundaries for rounding
  to cross, so that the same key gives the same tokens on another mesh.
  """
  levels = [jnp.exp(logits_BV - logits_BV.max(-1, keepdims=True))]
  while levels[-1].shape[1] > BRANCH:
    blocks = jnp.pad(levels[-1], ((0, 0), (0, -levels[-1].shape[1] % BRANCH))).reshape(
      len(logits_BV), -1, BRANCH
    )
    levels[-1] = blocks
    levels.append(blocks.sum(-1))
  token_B = _invert(levels.pop(), uniforms_BN[:, 0])
  for blocks, uniform_B in zip(reversed(levels), uniforms_BN.T[1:]):
    children = jnp.take_along_axis(blocks, token_B[:, None, None], axis=1)[:, 0]
    token_B = token_B * BRANCH + _invert(children, uniform_B)
  return token_B


def _invert(weights_BN, uniform_B):
  """The first entry whose cumulative share exceeds the uniform; never one of weight 0, whatever the rounding."""
  cumulative_BN = jnp.cumsum(weights_BN, axis=-1)
  index_B = (cumulative_BN <= uniform_B[:, None] * cumulative_BN[:, -1:]).sum(-1)
  return jnp.where(index_B < weights_BN.shape[-1], index_B, weights_BN.argmax(-1))


def log_prob(logits_BV: jax.Array, tokens_B: jax.Array) -> jax.Array:
  """log softmax(logits)[token], [B] float32."""
  return jnp.take_along_axis(logits_BV, tokens_B[:, None], axis=-1)[:, 0] - jax.nn.logsumexp(
    logits_BV, axis=-1
  )


def sample_token(
  logits_BV: jax.Array, uniforms_BN: jax.Array, sampling: Sampling
) -> tuple[jax.Array, ...]:
  """(token, logprob, sampling_logprob), each [B]; see `types.Completions` for the two.

  At temperature 0 the likeliest token is taken with sampling_logprob 0, and logprob is that of temperature 1.
  """
  if sampling.temperature == 0:
    tokens_B = logits_BV.argmax(-1)
    return tokens_B, log_prob(logits_BV, tokens_B), jnp.zeros(tokens_B.shape)
  tempered_BV = logits_BV / sampling.temperature
  kept_BV = filtered(tempered_BV, sampling)
  tokens_B = draw(kept_BV, uniforms_BN)
  logprobs_B = log_prob(tempered_BV, tokens_B)
  return tokens_B, logprobs_B, logprobs_B if kept_BV is tempered_BV else log_prob(kept_BV, tokens_B)
