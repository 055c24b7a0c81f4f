"""Estimates of KL(pi || ref) per token: (logprobs, ref_logprobs) -> [P, G, T]."""
import jax
import jax.numpy as jnp


def k3(logprobs_PGT: jax.Array, ref_logprobs_PGT: jax.Array) -> jax.Array:
  """e^-d + d - 1, d = lp - ref: unbiased, never negative (Schulman 2020; GRPO 2402.03300, eq. 4)."""
  d_PGT = logprobs_PGT - ref_logprobs_PGT
  # expm1 keeps the value exact for small d. From d = -20 on, e^-d goes on along its tangent: a
  # gradient of 5e8 points the right way, and its square is still finite where the gradient's norm is taken.
  bounded_PGT = jnp.minimum(-d_PGT, 20.0)
  return jnp.expm1(bounded_PGT) + jnp.exp(bounded_PGT) * (-d_PGT - bounded_PGT) + d_PGT


KL = {"k3": k3}
