"""Surrogates without a bound on the ratio: reinforce, unclipped and dro."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from grpo_jax.algo.surrogates.surrogate import Surrogate
from grpo_jax.algo.variant import Example, Records
from grpo_jax.lazy import jax
from grpo_jax.settings import Settings, at_least, names_of, setting

if TYPE_CHECKING:
  from grpo_jax.algo.surrogates.terms import Terms

SURROGATES = Records[Surrogate]()


def reinforce(terms: Terms, algo: Settings) -> jax.Array:
  """-A lp (Williams 1992; RLOO 2402.14740; GPG 2504.02546).

  Args:
    terms: Arrays [P, G, T].

  Returns:
    The loss of each token, [P, G, T].
  """
  return -terms.advantages_PGT * terms.logprobs_PGT


SURROGATES["reinforce"] = Surrogate(
  loss=reinforce,
  settings=Settings,
  ratios=("token",),
  reads_ratio=False,
  idle_without_advantage=True,
  examples=(
    # lp = ln .75 and ln .25
    Example(
      {"w": [1.5, 0.5, 1.5, 0.5], "A": [2, 2, -2, -2]},
      {"loss": [0.5753641, 2.7725887, -0.5753641, -2.7725887], "gradient": [-2, -2, 2, 2]},
    ),
  ),
)


def unclipped(terms: Terms, algo: Settings) -> jax.Array:
  """-w A, PPO's surrogate without its clip (TRPO 1502.05477, eq. 14; M2PO 2510.01161).

  Another setting has to keep the ratio near 1, such as `algo.m2_bound`.

  Args:
    terms: Arrays [P, G, T].

  Returns:
    The loss of each token, [P, G, T].
  """
  return -terms.ratio_PGT * terms.advantages_PGT


SURROGATES["unclipped"] = Surrogate(
  loss=unclipped,
  settings=Settings,
  idle_without_advantage=True,
  examples=(
    # The gradient of w by lp is w.
    Example(
      {"w": [1.5, 0.5, 1.5, 0.5, 9], "A": [2, 2, -2, -2, 1]},
      {"loss": [-3, -1, 3, 1, -9], "gradient": [-3, -1, 3, 1, -9]},
    ),
  ),
)


@dataclasses.dataclass(frozen=True)
class DroSettings(Settings):
  """Settings of dro."""

  dro_beta: float = setting(0.05, "dro: weight of the squared log-ratio", at_least(0))


def dro(terms: Terms, algo: DroSettings) -> jax.Array:
  """-(lp A - dro_beta / 2 d^2) (DRO 2405.19107, eq. 4).

  Args:
    terms: Arrays [P, G, T].

  Returns:
    The loss of each token, [P, G, T].
  """
  penalty_PGT = 0.5 * algo.dro_beta * terms.d_PGT**2
  return penalty_PGT - terms.logprobs_PGT * terms.advantages_PGT


SURROGATES["dro"] = Surrogate(
  loss=dro,
  ratios=("token",),
  settings=DroSettings,
  idle_at_ratio_one=names_of(DroSettings),
  examples=(
    # d = ln 1.5 = .4054651 and -ln 2; the loss is d^2 - A lp, its gradient 2 d - A.
    Example(
      {"w": [1.5, 0.5, 1.5, 0.5], "A": [1, 1, -1, -1]},
      {
        "loss": [0.4520840, 1.8667474, -0.1232801, -0.9058413],
        "gradient": [-0.1890698, -2.3862944, 1.8109302, -0.3862944],
      },
      {"dro_beta": 2.0},
    ),
  ),
)
