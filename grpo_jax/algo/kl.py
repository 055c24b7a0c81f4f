"""KL(pi || ref) per token: estimates from the token that was sampled, (logprobs, ref_logprobs) -> [P, G, T], with
d = lp - ref; and the whole of it, `full`, from both distributions."""

import jax
import jax.numpy as jnp


def k1(logprobs_PGT: jax.Array, ref_logprobs_PGT: jax.Array) -> jax.Array:
  """d: unbiased, of either sign."""
  return logprobs_PGT - ref_logprobs_PGT


def absolute(logprobs_PGT: jax.Array, ref_logprobs_PGT: jax.Array) -> jax.Array:
  """|d|."""
  return jnp.abs(logprobs_PGT - ref_logprobs_PGT)


def k2(logprobs_PGT: jax.Array, ref_logprobs_PGT: jax.Array) -> jax.Array:
  """d^2 / 2: its gradient, d, is on average that of the KL (Schulman 2020; 2506.09477)."""
  return 0.5 * (logprobs_PGT - ref_logprobs_PGT) ** 2


def k3(logprobs_PGT: jax.Array, ref_logprobs_PGT: jax.Array) -> jax.Array:
  """e^-d + d - 1: unbiased, never negative (Schulman 2020; GRPO 2402.03300, eq. 4)."""
  d_PGT = logprobs_PGT - ref_logprobs_PGT
  # expm1 keeps the value exact for small d. From d = -20 on, e^-d goes on along its tangent: a gradient of 5e8 points
  # the right way, and its square is still finite where the gradient's norm is taken.
  bounded_PGT = jnp.minimum(-d_PGT, 20.0)
  return jnp.expm1(bounded_PGT) + jnp.exp(bounded_PGT) * (-d_PGT - bounded_PGT) + d_PGT


def straight_through(estimate):
  """The value of `estimate`, the gradient of k2."""

  def value(logprobs_PGT: jax.Array, ref_logprobs_PGT: jax.Array) -> jax.Array:
    gradient = k2(logprobs_PGT, ref_logprobs_PGT)
    return gradient + jax.lax.stop_gradient(estimate(logprobs_PGT, ref_logprobs_PGT) - gradient)

  return value


def full(logits_V: jax.Array, ref_logits_V: jax.Array) -> jax.Array:
  """sum over the last axis, the vocabulary, of pi (log pi - log ref): [..., V] twice -> [...], with its own gradient.

  It is exact for the token's distribution, so it needs no estimate of a gradient, and has no + form.
  """
  logprobs_V, ref_logprobs_V = jax.nn.log_softmax(logits_V), jax.nn.log_softmax(ref_logits_V)
  return (jnp.exp(logprobs_V) * (logprobs_V - ref_logprobs_V)).sum(-1)


KL = {"k1": k1, "abs": absolute, "k2": k2, "k3": k3}
KL |= {f"{name}+": straight_through(estimate) for name, estimate in KL.items()}
