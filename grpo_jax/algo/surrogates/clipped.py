"""Surrogates that limit the ratio of each token: ppo_clip, cispo and sapo."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from grpo_jax.algo.surrogates.surrogate import ClipSettings, RatioMaxSettings, Surrogate
from grpo_jax.algo.variant import Example, Records
from grpo_jax.lazy import jax, jnp
from grpo_jax.settings import Settings, above, names_of, setting, zero_or_above

if TYPE_CHECKING:
  from grpo_jax.algo.surrogates.terms import Terms

SURROGATES = Records[Surrogate]()


@dataclasses.dataclass(frozen=True)
class PpoSettings(RatioMaxSettings):
  """Settings of ppo_clip, and of clip_cov, which is based on it."""

  dual_clip: float = setting(
    0.0,
    "ppo_clip, clip_cov: bound of the loss at negative advantages; 0 = off",
    zero_or_above(1, "a lower bound stops the gradient of tokens that have not moved; 0 is off"),
  )


def ppo_clip(terms: Terms, algo: PpoSettings) -> jax.Array:
  """-min(w A, clip(w, 1 - clip_low, 1 + clip_high) A) (PPO 1707.06347, eq. 7).

  clip_high > clip_low is the clip-higher of DAPO 2503.14476. `ratio_max` limits w in the first,
  unclipped term (INTELLECT-2 2505.07291). With `dual_clip`, the loss is at most -dual_clip A where
  A < 0 (dual-clip PPO 1912.09729). 0 turns `ratio_max` or `dual_clip` off.

  Args:
    terms: Arrays [P, G, T].

  Returns:
    The loss of each token, [P, G, T].
  """
  w_PGT, A_PGT = terms.ratio_PGT, terms.advantages_PGT
  clipped_PGT = jnp.clip(w_PGT, 1 - algo.clip_low, 1 + algo.clip_high)
  if algo.ratio_max:
    w_PGT = jnp.minimum(w_PGT, algo.ratio_max)
  # The minimum lets the clip limit what a token can gain, and not what it can lose.
  loss_PGT = -jnp.minimum(w_PGT * A_PGT, clipped_PGT * A_PGT)
  if algo.dual_clip:  # otherwise the loss of a token with A < 0 grows without limit with w
    loss_PGT = jnp.where(A_PGT < 0, jnp.minimum(loss_PGT, -algo.dual_clip * A_PGT), loss_PGT)
  return loss_PGT


def ppo_bounds(terms: Terms, algo: ClipSettings) -> tuple[jax.Array, jax.Array]:
  """Tokens without a gradient: A pushes their ratio further beyond the lower or upper bound."""
  w_PGT, A_PGT = terms.ratio_PGT, terms.advantages_PGT
  return (w_PGT < 1 - algo.clip_low) & (A_PGT < 0), (w_PGT > 1 + algo.clip_high) & (A_PGT > 0)


SURROGATES["ppo_clip"] = Surrogate(
  loss=ppo_clip,
  bounds=ppo_bounds,
  settings=PpoSettings,
  idle_at_ratio_one=names_of(PpoSettings),
  needs_lower_bound=True,
  idle_without_advantage=True,
  examples=(
    Example(
      {"w": [1.5, 0.5, 1.5, 0.5, 0.9, 1.1, 1.5, 0.5], "A": [1, 1, -1, -1, -1, 1, 0, 0]},
      {
        "loss": [-1.2, -0.5, 1.5, 0.8, 0.9, -1.1, 0, 0],
        "gradient": [0, -0.5, 1.5, 0, 0.9, -1.1, 0, 0],
        "low": [0, 0, 0, 1, 0, 0, 0, 0],
        "high": [1, 0, 0, 0, 0, 0, 0, 0],
      },
    ),
    Example(
      {"w": [1.5, 0.5, 1.25, 0.85], "A": [1, -1, 1, -1]},
      {
        "loss": [-1.28, 0.9, -1.25, 0.9],
        "gradient": [0, 0, -1.25, 0],
        "low": [0, 1, 0, 1],
        "high": [1, 0, 0, 0],
      },
      {"clip_low": 0.1, "clip_high": 0.28},
    ),
    Example(
      {"w": [5, 5, 3], "A": [-2, 2, -2]},
      {"loss": [8, -2.4, 6], "gradient": [0, 0, 6], "low": [0, 0, 0], "high": [0, 1, 0]},
      {"ratio_max": 4.0},
    ),
    Example(
      {"w": [5, 2, 5, 0.9], "A": [-1, -2, 1, -2]},
      {
        "loss": [3, 4, -1.2, 1.8],
        "gradient": [0, 4, 0, 1.8],
        "low": [0, 0, 0, 0],
        "high": [0, 0, 1, 0],
      },
      {"dual_clip": 3.0},
    ),
  ),
)


def cispo(terms: Terms, algo: ClipSettings) -> jax.Array:
  """-sg[clip(w, 1 - clip_low, 1 + clip_high)] A lp (MiniMax-M1 2506.13585, eq. 4-5).

  With a `clip_low` of 1 there is no lower bound.

  Args:
    terms: Arrays [P, G, T].

  Returns:
    The loss of each token, [P, G, T].
  """
  weight_PGT = jnp.clip(terms.ratio_PGT, 1 - algo.clip_low, 1 + algo.clip_high)
  return -jax.lax.stop_gradient(weight_PGT) * terms.advantages_PGT * terms.logprobs_PGT


def cispo_bounds(terms: Terms, algo: ClipSettings) -> tuple[jax.Array, jax.Array]:
  """Tokens whose ratio is below the lower or above the upper bound, which is then their weight."""
  return terms.ratio_PGT < 1 - algo.clip_low, terms.ratio_PGT > 1 + algo.clip_high


SURROGATES["cispo"] = Surrogate(
  loss=cispo,
  bounds=cispo_bounds,
  settings=ClipSettings,
  idle_at_ratio_one=names_of(ClipSettings),
  idle_without_advantage=True,
  examples=(
    # lp = ln .75 = -.2876821, ln .25 = -1.3862944, ln .5 = -.6931472
    Example(
      {"w": [1.5, 0.5, 1.5, 0.5, 1], "A": [1, 1, -1, -1, 1]},
      {
        "loss": [0.3452185, 1.1090355, -0.3452185, -1.1090355, 0.6931472],
        "gradient": [-1.2, -0.8, 1.2, 0.8, -1],
        "low": [0, 1, 0, 1, 0],
        "high": [1, 0, 1, 0, 0],
      },
    ),
    # lp = ln .05 and ln .6
    Example(
      {"w": [0.5, 6], "A": [1, 1], "old": [0.1, 0.1]},
      {"loss": [1.4978661, 2.5541281], "gradient": [-0.5, -5], "low": [0, 0], "high": [0, 1]},
      {"clip_low": 1.0, "clip_high": 4.0},
    ),
  ),
)


@dataclasses.dataclass(frozen=True)
class SapoSettings(Settings):
  """Settings of sapo."""

  tau_pos: float = setting(1.0, "sapo: sharpness of the gate at positive advantages", above(0))
  tau_neg: float = setting(1.05, "sapo: sharpness of the gate at other advantages", above(0))


def sapo(terms: Terms, algo: SapoSettings) -> jax.Array:
  """-(4 / tau) sigmoid(tau (w - 1)) A, tau = tau_pos where A > 0, else tau_neg (2511.20347, eq. 6).

  Args:
    terms: Arrays [P, G, T].

  Returns:
    The loss of each token, [P, G, T].
  """
  tau_PGT = jnp.where(terms.advantages_PGT > 0, algo.tau_pos, algo.tau_neg)
  gate_PGT = jax.nn.sigmoid(tau_PGT * (terms.ratio_PGT - 1))
  return -4 / tau_PGT * gate_PGT * terms.advantages_PGT


SURROGATES["sapo"] = Surrogate(
  loss=sapo,
  settings=SapoSettings,
  idle_at_ratio_one=names_of(SapoSettings),
  idle_without_advantage=True,
  examples=(
    Example(
      {"w": [1, 0.5, 2, 0.5, 2], "A": [1, 1, 1, -1, -1]},
      {
        "loss": [-2, -1.5101627, -2.9242343, 0.5378828, 1.7615942],
        "gradient": [-1, -0.4700074, -1.5728955, 0.3932239, 0.8399487],
      },
      {"tau_neg": 2.0},
    ),
    Example(
      {"w": [2, 0.5], "A": [1, 1]},
      {"loss": [-1.2700988, -0.2432340], "gradient": [-0.3614133, -0.2982929]},
      {"tau_pos": 3.0},
    ),
  ),
)
