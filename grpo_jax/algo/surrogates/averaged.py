"""Surrogates with one weight for all tokens of a row, from the row's ratios: gmpo and vespo."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from grpo_jax import masked
from grpo_jax.algo.surrogates.surrogate import ClipSettings, Surrogate
from grpo_jax.algo.variant import Example, Records
from grpo_jax.lazy import jax, jnp
from grpo_jax.settings import Settings, above, names_of, setting

if TYPE_CHECKING:
  from grpo_jax.algo.surrogates.terms import Terms

SURROGATES = Records[Surrogate]()


def gmpo(terms: Terms, algo: ClipSettings) -> jax.Array:
  """-A exp(mean over the row of c), a geometric mean of clipped ratios (GMPO 2507.20673, eq. 5).

  c = min(d, k) where A > 0, else max(d, k), with k = clip(d, -clip_low, clip_high). The mean is
  weighted by the weights of the tokens, and every token carries the row's value.

  Args:
    terms: Arrays [P, G, T].
    algo: Reads `clip_low` and `clip_high`, which are bounds of the logarithm.

  Returns:
    The loss of each token, [P, G, T].
  """
  d_PGT, A_PGT = terms.d_PGT, terms.advantages_PGT
  # As in PPO, the clip limits what a token can gain, and not what it can lose.
  clipped_PGT = jnp.clip(d_PGT, -algo.clip_low, algo.clip_high)
  lower_PGT, higher_PGT = jnp.minimum(d_PGT, clipped_PGT), jnp.maximum(d_PGT, clipped_PGT)
  pessimistic_PGT = jnp.where(A_PGT > 0, lower_PGT, higher_PGT)
  weighted_PGT = terms.weights_PGT * masked.masked(pessimistic_PGT, terms.weights_PGT)
  log_mean_PG1 = masked.divide(
    weighted_PGT.sum(-1, keepdims=True), terms.weights_PGT.sum(-1, keepdims=True)
  )
  return -A_PGT * jnp.exp(log_mean_PG1)


def gmpo_bounds(terms: Terms, algo: ClipSettings) -> tuple[jax.Array, jax.Array]:
  """Tokens whose log-ratio the lower or the upper bound replaces in the row's mean."""
  d_PGT, positive_PGT = terms.d_PGT, terms.advantages_PGT > 0
  return (d_PGT < -algo.clip_low) & ~positive_PGT, (d_PGT > algo.clip_high) & positive_PGT


_GMPO_CLIP = {"clip_low": 0.1, "clip_high": 0.4}

SURROGATES["gmpo"] = Surrogate(
  loss=gmpo,
  bounds=gmpo_bounds,
  settings=ClipSettings,
  ratios=("token",),
  weighs_tokens_itself=True,
  idle_at_ratio_one=names_of(ClipSettings),
  idle_without_advantage=True,
  examples=(
    # e^(.4 / 4) = 1.105171
    Example(
      {"w": [1, 1, 1, 5], "A": [1] * 4},
      {
        "loss": [-1.1051709] * 4,
        "gradient": [-1.1051709] * 3 + [0],
        "low": [0] * 4,
        "high": [0, 0, 0, 1],
      },
      _GMPO_CLIP,
    ),
    # (1/5)^(1/4)
    Example(
      {"w": [1, 1, 1, 0.2], "A": [1] * 4},
      {"loss": [-0.6687403] * 4, "gradient": [-0.6687403] * 4, "low": [0] * 4, "high": [0] * 4},
      _GMPO_CLIP,
    ),
    # 5^(1/4)
    Example(
      {"w": [1, 1, 1, 5], "A": [-1] * 4},
      {"loss": [1.4953488] * 4, "gradient": [1.4953488] * 4, "low": [0] * 4, "high": [0] * 4},
      _GMPO_CLIP,
    ),
    # e^(-.1 / 4)
    Example(
      {"w": [1, 1, 1, 0.2], "A": [-1] * 4},
      {
        "loss": [0.9753099] * 4,
        "gradient": [0.9753099] * 3 + [0],
        "low": [0, 0, 0, 1],
        "high": [0] * 4,
      },
      _GMPO_CLIP,
    ),
    # Without the second token the row's mean is 1.1^(3/3). Four tokens carry it, three share it.
    Example(
      {"w": [1, 9, 1, 1.331], "A": [2] * 4, "weights": [1, 0, 1, 1]},
      {"loss": [-2.2] * 4, "gradient": [-8.8 / 3, 0, -8.8 / 3, -8.8 / 3]},
      _GMPO_CLIP,
    ),
    # 1.4641^(.5 / 2) = 1.1
    Example(
      {"w": [1, 9, 1, 1.4641], "A": [2] * 4, "weights": [1, 0, 0.5, 0.5]},
      {"loss": [-2.2] * 4, "gradient": [-4.4, 0, -2.2, -2.2]},
      _GMPO_CLIP,
    ),
  ),
)

_SMALLEST_WEIGHT, _LARGEST_LOG_WEIGHT = 1e-8, 20.0


@dataclasses.dataclass(frozen=True)
class VespoSettings(Settings):
  """Settings of vespo."""

  k_pos: float = setting(2.0, "vespo: power of the weight at advantages from 0 on", above(0))
  lambda_pos: float = setting(3.0, "vespo: decay of the weight at advantages from 0 on", above(0))
  k_neg: float = setting(3.0, "vespo: power of the weight at negative advantages", above(0))
  lambda_neg: float = setting(2.0, "vespo: decay of the weight at negative advantages", above(0))


def vespo(terms: Terms, algo: VespoSettings) -> jax.Array:
  """-sg[phi] A lp, phi = W^k e^(lambda (1 - W)) (VESPO 2602.10693, eq. 12).

  W is the product of the row's ratios, limited to [1e-8, e^20] as in TRL. (k, lambda) is
  (k_pos, lambda_pos) where A >= 0, else (k_neg, lambda_neg). The weights of a correction multiply
  the limited W.

  Args:
    terms: Arrays [P, G, T].

  Returns:
    The loss of each token, [P, G, T].
  """
  log_w_PG1 = masked.total(terms.d_PGT, terms.mask_PGT, -1, keepdims=True)
  log_w_PG1 = jnp.clip(log_w_PG1, jnp.log(_SMALLEST_WEIGHT), _LARGEST_LOG_WEIGHT)
  # A correction may be 0, which has no logarithm.
  log_corrections_PGT = jnp.log(jnp.maximum(terms.corrections_PGT, _SMALLEST_WEIGHT))
  # A correction of the row is the same at all tokens, so their mean is taken and not their product.
  reduce = masked.mean if terms.corrections_of_row else masked.total
  log_w_PG1 = log_w_PG1 + reduce(log_corrections_PGT, terms.mask_PGT, -1, keepdims=True)
  positive_PGT = terms.advantages_PGT >= 0
  k_PGT = jnp.where(positive_PGT, algo.k_pos, algo.k_neg)
  lambda_PGT = jnp.where(positive_PGT, algo.lambda_pos, algo.lambda_neg)
  phi_PGT = jnp.exp(k_PGT * log_w_PG1 + lambda_PGT * (1 - jnp.exp(log_w_PG1)))
  return -jax.lax.stop_gradient(phi_PGT) * terms.advantages_PGT * terms.logprobs_PGT


SURROGATES["vespo"] = Surrogate(
  loss=vespo,
  settings=VespoSettings,
  ratios=("token",),
  applies_correction_itself=True,
  idle_at_ratio_one=names_of(VespoSettings),
  idle_without_advantage=True,
  examples=(
    # W 1/2 and 2; lp = ln .25 and ln .5
    Example({"w": [0.5], "A": [1]}, {"loss": [1.5532351], "gradient": [-1.1204223]}),
    Example({"w": [2], "A": [1], "old": [0.25]}, {"loss": [0.1380391], "gradient": [-0.1991483]}),
    Example({"w": [0.5], "A": [-1]}, {"loss": [-0.4710423], "gradient": [0.3397852]}),
    Example({"w": [2], "A": [-1], "old": [0.25]}, {"loss": [-0.7504581], "gradient": [1.0826823]}),
    # W = 1/2 * 4; the last token is padding.
    Example(
      {"w": [0.5, 4, 9], "A": [1, -1, 0], "old": [0.5, 0.2, 0.1], "mask": [1, 1, 0]},
      {"gradient": [-0.2706706, 1.7155278, 0]},
      {"k_pos": 1.0, "lambda_pos": 2.0, "k_neg": 1.5, "lambda_neg": 0.5},
    ),
    # Corrections per token: W = 1/2 * (4 * 1/4). Per row: W = 1/2 * 4, which both tokens carry.
    Example(
      {"w": [0.5, 1], "A": [1, -1], "corrections": [4, 0.25]},
      {"gradient": [-1.1204223, 0.3397852]},
    ),
    Example(
      {"w": [0.5, 1], "A": [1, -1], "corrections": [4, 4], "corrections_of_row": True},
      {"gradient": [-0.1991483, 1.0826823]},
    ),
    # W is limited: (1e-8)^.05 e^3 for too small a product, or a correction of 0.
    Example({"w": [1e-9, 1e-4], "A": [1, 1]}, {"gradient": [-7.9961960] * 2}, {"k_pos": 0.05}),
    Example({"w": [1], "A": [1], "corrections": [0]}, {"gradient": [-7.9961960]}, {"k_pos": 0.05}),
    # And to e^20, for a product of e^25: e^2 e^(1e-9 (1 - e^20))
    Example(
      {"w": [7.2004899e10], "A": [-1], "old": [1e-11]},
      {"gradient": [4.5486696]},
      {"k_neg": 0.1, "lambda_neg": 1e-9},
    ),
  ),
)
