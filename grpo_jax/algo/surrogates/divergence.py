"""Surrogates that leave out tokens whose distribution has moved too far (DPPO 2602.04879).

A distribution is reduced to two outcomes, the sampled token and all others. The sampled token has
the probability p = e^lp under the policy, and q = e^old before the update.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpo_jax.algo.surrogates.surrogate import ClipSettings, RatioMaxSettings, Surrogate
from grpo_jax.algo.variant import Example, Records
from grpo_jax.lazy import jax, jnp
from grpo_jax.settings import names_of

if TYPE_CHECKING:
  from grpo_jax.algo.surrogates.terms import Terms

SURROGATES = Records[Surrogate]()


def dppo_tv(terms: Terms, algo: RatioMaxSettings) -> jax.Array:
  """-sg[min(w, ratio_max)] A lp, 0 at the tokens of `tv_bounds` (DPPO 2602.04879).

  Args:
    terms: Arrays [P, G, T].

  Returns:
    The loss of each token, [P, G, T].
  """
  low_PGT, high_PGT = tv_bounds(terms, algo)
  return jnp.where(low_PGT | high_PGT, 0, _limited_reinforce(terms, algo))


def tv_bounds(terms: Terms, algo: ClipSettings) -> tuple[jax.Array, jax.Array]:
  """Tokens whose total variation |p - q| exceeds a bound in the direction in which A pushes.

  Returns:
    (A <= 0 and q - p > clip_low, A > 0 and p - q > clip_high), bool [P, G, T] each.
  """
  moved_PGT = jnp.exp(terms.logprobs_PGT) - jnp.exp(terms.old_logprobs_PGT)
  positive_PGT = terms.advantages_PGT > 0
  return ~positive_PGT & (-moved_PGT > algo.clip_low), positive_PGT & (moved_PGT > algo.clip_high)


SURROGATES["dppo_tv"] = Surrogate(
  loss=dppo_tv,
  bounds=tv_bounds,
  settings=RatioMaxSettings,
  ratios=("token",),
  needs_lower_bound=True,
  idle_at_ratio_one=names_of(RatioMaxSettings),
  idle_without_advantage=True,
  examples=(
    # q = .5, so p - q is .25, .15, -.25, -.075, .25, -.25 and -.25.
    Example(
      {"w": [1.5, 1.3, 0.5, 0.85, 1.5, 0.5, 0.5], "A": [1, 1, -1, -1, -1, 1, 0]},
      {
        "loss": [0, 0.5600178, 0, -0.7273162, -0.4315231, 0.6931472, 0],
        "gradient": [0, -1.3, 0, 0.85, 1.5, -0.5, 0],
        "low": [0, 0, 1, 0, 0, 0, 1],
        "high": [1, 0, 0, 0, 0, 0, 0],
      },
      {"clip_low": 0.1, "clip_high": 0.2},
    ),
    Example(
      {"w": [1.3, 1.1], "A": [2, 2]},
      {"gradient": [-2.4, -2.2], "low": [0, 0], "high": [0, 0]},
      {"ratio_max": 1.2},
    ),
  ),
)


def dppo_kl(terms: Terms, algo: RatioMaxSettings) -> jax.Array:
  """-sg[min(w, ratio_max)] A lp, 0 at the tokens of `kl_bounds` (DPPO 2602.04879).

  Args:
    terms: Arrays [P, G, T].

  Returns:
    The loss of each token, [P, G, T].
  """
  low_PGT, high_PGT = kl_bounds(terms, algo)
  return jnp.where(low_PGT | high_PGT, 0, _limited_reinforce(terms, algo))


def kl_bounds(terms: Terms, algo: ClipSettings) -> tuple[jax.Array, jax.Array]:
  """Tokens whose KL divergence exceeds a bound in the direction in which A pushes.

  A = 0 counts as negative: the loss of such a token is 0 in any case.

  The divergence is KL = q log(q / p) + (1 - q) log((1 - q) / (1 - p)), where p is the probability
  of the sampled token under the policy, and q under the policy before the update.

  Returns:
    (A <= 0 and p < q and KL > clip_low, A > 0 and p > q and KL > clip_high), bool [P, G, T] each.
  """
  lp_PGT, old_PGT = terms.logprobs_PGT, terms.old_logprobs_PGT
  q_PGT = jnp.exp(old_PGT)
  of_token_PGT = q_PGT * (old_PGT - lp_PGT)
  of_others_PGT = (1 - q_PGT) * (_log_of_others(old_PGT) - _log_of_others(lp_PGT))
  divergence_PGT = of_token_PGT + of_others_PGT
  positive_PGT = terms.advantages_PGT > 0
  return (
    ~positive_PGT & (lp_PGT < old_PGT) & (divergence_PGT > algo.clip_low),
    positive_PGT & (lp_PGT > old_PGT) & (divergence_PGT > algo.clip_high),
  )


SURROGATES["dppo_kl"] = Surrogate(
  loss=dppo_kl,
  bounds=kl_bounds,
  settings=RatioMaxSettings,
  ratios=("token",),
  idle_at_ratio_one=names_of(RatioMaxSettings),
  idle_without_advantage=True,
  examples=(
    # q = .5: the divergence is .143841 at w 1.5 and .5, and .047155 at w 1.3 and .7.
    Example(
      {"w": [1.5, 1.3, 0.5, 0.5, 1.5, 0.5], "A": [1, 1, -1, 1, -1, 0]},
      {
        "loss": [0.4315231, 0.5600178, 0, 0.6931472, -0.4315231, 0],
        "gradient": [-1.5, -1.3, 0, -0.5, 1.5, 0],
        "low": [0, 0, 1, 0, 0, 1],
        "high": [0, 0, 0, 0, 0, 0],
      },
      {"clip_low": 0.1, "clip_high": 0.2},
    ),
    # q = .2: the divergence is .091516 at w 2 and .044403 at w 1/2.
    Example(
      {"w": [2, 2, 0.5], "A": [1, -1, -1], "old": [0.2, 0.2, 0.2]},
      {"gradient": [0, 2, 0.5], "low": [0, 0, 0], "high": [1, 0, 0]},
      {"clip_low": 0.05, "clip_high": 0.09},
    ),
    Example({"w": [1.3, 1.1], "A": [2, 2]}, {"gradient": [-2.4, -2.2]}, {"ratio_max": 1.2}),
  ),
)


def _limited_reinforce(terms: Terms, algo: RatioMaxSettings) -> jax.Array:
  """-sg[min(w, ratio_max)] A lp."""
  w_PGT = jnp.exp(terms.d_PGT)
  if algo.ratio_max:
    w_PGT = jnp.minimum(w_PGT, algo.ratio_max)
  return -jax.lax.stop_gradient(w_PGT) * terms.advantages_PGT * terms.logprobs_PGT


def _log_of_others(logprobs_PGT: jax.Array) -> jax.Array:
  """log(1 - p), the log-prob of all other tokens. p is kept below 1, so that the log is finite."""
  return jnp.log1p(-jnp.exp(jnp.minimum(logprobs_PGT, -1e-7)))
