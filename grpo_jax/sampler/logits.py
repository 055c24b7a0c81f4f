"""From logits to a token: the filters, the draw, and the log-probs of what was drawn."""
import jax
import jax.numpy as jnp

from grpo_jax.config import Sampling

BLOCK = 128  # vocabulary entries per block of the two-level draw


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


def draw(logits_BV: jax.Array, uniform_B: jax.Array) -> jax.Array:
  """Tokens [B] by inversion of the distribution function at one uniform in [0, 1) each.

  Two levels, a block and a token within it: V / BLOCK + BLOCK partial sums per row, where one per token would cost most
  of a decode step.
  """
  B, V = logits_BV.shape
  weights_BV = jnp.exp(logits_BV - logits_BV.max(-1, keepdims=True))
  blocks = jnp.pad(weights_BV, ((0, 0), (0, -V % BLOCK))).reshape(B, -1, BLOCK)
  block_B, rest_B = _invert(blocks.sum(-1), uniform_B * blocks.sum((-1, -2)))
  inside_B, _ = _invert(jnp.take_along_axis(blocks, block_B[:, None, None], axis=1)[:, 0], rest_B)
  return block_B * BLOCK + inside_B


def _invert(weights_BN, target_B):
  """The first entry whose cumulative weight exceeds the target, and what remains of the target inside it.

  Never an entry of weight 0: a target that rounding put past the end falls on the heaviest one.
  """
  cumulative_BN = jnp.cumsum(weights_BN, axis=-1)
  index_B = (cumulative_BN <= target_B[:, None]).sum(-1)
  index_B = jnp.where(index_B < weights_BN.shape[-1], index_B, weights_BN.argmax(-1))
  chosen = lambda x_BN: jnp.take_along_axis(x_BN, index_B[:, None], axis=-1)[:, 0]
  return index_B, target_B - (chosen(cumulative_BN) - chosen(weights_BN))


def log_prob(logits_BV: jax.Array, tokens_B: jax.Array) -> jax.Array:
  """log softmax(logits)[token], [B] float32."""
  return jnp.take_along_axis(logits_BV, tokens_B[:, None], axis=-1)[:, 0] - jax.nn.logsumexp(logits_BV, axis=-1)


def sample_token(logits_BV: jax.Array, uniform_B: jax.Array, sampling: Sampling) -> tuple[jax.Array, ...]:
  """(token, logprob, sampling_logprob), each [B]; see `types.Completions` for the two.

  At temperature 0 the likeliest token is taken with sampling_logprob 0, and logprob is that of temperature 1.
  """
  if sampling.temperature == 0:
    tokens_B = logits_BV.argmax(-1)
    return tokens_B, log_prob(logits_BV, tokens_B), jnp.zeros(tokens_B.shape)
  tempered_BV = logits_BV / sampling.temperature
  kept_BV = filtered(tempered_BV, sampling)
  tokens_B = draw(kept_BV, uniform_B)
  logprobs_B = log_prob(tempered_BV, tokens_B)
  return tokens_B, logprobs_B, logprobs_B if kept_BV is tempered_BV else log_prob(kept_BV, tokens_B)
