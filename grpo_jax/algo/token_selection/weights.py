"""Weights of tokens. To add one, write its function and its record."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
from typing import TYPE_CHECKING

from grpo_jax.algo.ratios import RatioSettings
from grpo_jax.algo.surrogates import SURROGATES, SurrogateSettings
from grpo_jax.algo.variant import Example, Record, Records, S
from grpo_jax.lazy import jax, jnp
from grpo_jax.settings import Settings, at_least, fraction, setting

if TYPE_CHECKING:
  from grpo_jax.algo.surrogates.terms import BatchTokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenWeight(Record[S]):
  """One way to weigh tokens. If several are on, their weights are multiplied.

  Attributes:
    compute: (tokens of the whole batch, algo) -> weights [P, G, T], read where the mask is 1.
    is_on: (algo) -> whether the settings turn it on.
    examples: Inputs are lists over the tokens of one row: `mask` and, if `compute` reads them,
      `entropies`, `lp`, `w` and `A`. The output is `weights`. The settings turn the weight on.
  """

  compute: Callable[[BatchTokens, S], jax.Array]
  is_on: Callable[[S], bool]


TOKEN_WEIGHTS = Records[TokenWeight]()


@dataclasses.dataclass(frozen=True)
class TopEntropySettings(Settings):
  """Settings of top_entropy."""

  top_entropy_quantile: float = setting(
    1.0,
    "the fraction of tokens, those of highest entropy, that learn; 1 = off",
    fraction("1 is off"),
  )


def top_entropy(tokens: BatchTokens, algo: TopEntropySettings) -> jax.Array:
  """1 at tokens whose entropy is at least the (1 - q) quantile, else 0 (2506.01939, eq. 5).

  Args:
    tokens: The tokens of the whole batch, [P, G, T].
    algo: Reads q, which is `top_entropy_quantile`.

  Returns:
    [P, G, T], 1 or 0
  """
  entropies = jnp.where(tokens.mask_PGT != 0, tokens.entropies_PGT, jnp.nan)  # no padding
  threshold = jnp.nanquantile(entropies, 1 - algo.top_entropy_quantile)
  return (tokens.entropies_PGT >= threshold).astype(tokens.mask_PGT.dtype)


def _top_entropy_is_on(algo: TopEntropySettings) -> bool:
  return algo.top_entropy_quantile < 1


TOKEN_WEIGHTS["top_entropy"] = TokenWeight(
  compute=top_entropy,
  is_on=_top_entropy_is_on,
  settings=TopEntropySettings,
  examples=(
    # The threshold is the third of the five entropies. The last token is padding.
    Example(
      {"entropies": [0.5, 0.1, 0.4, 0.2, 0.3, 9], "mask": [1, 1, 1, 1, 1, 0]},
      {"weights": [1, 0, 1, 0, 1, 0]},
      {"top_entropy_quantile": 0.5},
    ),
    # The threshold is between .4 and .5; it is .4 + .2 (.5 - .4).
    Example(
      {"entropies": [0.5, 0.1, 0.4, 0.2, 0.3], "mask": [1] * 5},
      {"weights": [1, 0, 0, 0, 0]},
      {"top_entropy_quantile": 0.2},
    ),
  ),
)


@dataclasses.dataclass(frozen=True)
class SecondMomentSettings(Settings):
  """Settings of second_moment."""

  m2_bound: float = setting(
    0.0,
    "leaves out the tokens with the largest squared log-ratio, of those that move away from the old"
    " policy, until the mean of the others is at most this; 0 = off",
    at_least(0),
  )


def second_moment(tokens: BatchTokens, algo: SecondMomentSettings) -> jax.Array:
  """0 at the outliers of (log w)^2, 1 elsewhere (M2PO 2510.01161, algorithm 1).

  Only tokens that PPO might clip can be outliers: those with A > 0 and w > 1, or A < 0 and w < 1.
  Of these, tokens of the largest (log w)^2 are left out until the mean over those that remain is at
  most `m2_bound`. Tokens with equal values stay or go together, so that the order of tokens does
  not matter. If all tokens of a row share a ratio, whole completions stay or go.

  Args:
    tokens: The tokens of the whole batch, [P, G, T].
    algo: Reads `m2_bound`.

  Returns:
    [P, G, T], 1 or 0
  """
  log_w_PGT = jnp.log(tokens.ratio_PGT)
  moves_away_PGT = (tokens.mask_PGT != 0) & (tokens.advantages_PGT * log_w_PGT > 0)
  # All other tokens sort to the end, where an infinite mean keeps none.
  squares_PGT = jnp.where(moves_away_PGT, log_w_PGT**2, jnp.inf)
  squares = jnp.sort(squares_PGT.ravel())
  means = jnp.cumsum(squares) / jnp.arange(1, squares.size + 1)
  is_last_of_equals = jnp.append(squares[1:] > squares[:-1], True)
  may_stay = is_last_of_equals & (means <= algo.m2_bound)
  largest_kept = jnp.where(may_stay, squares, -1).max()  # -1, below all squares, keeps none
  is_outlier_PGT = moves_away_PGT & (squares_PGT > largest_kept)
  return (~is_outlier_PGT).astype(tokens.mask_PGT.dtype)


def _second_moment_is_on(algo: SecondMomentSettings) -> bool:
  return algo.m2_bound > 0


# Log-ratios of .1, .2, .3 and 1 have squares of .01, .04, .09 and 1.
_MOVED = [1.1051709, 1.2214028, 1.3498588, 2.7182818]

TOKEN_WEIGHTS["second_moment"] = TokenWeight(
  compute=second_moment,
  is_on=_second_moment_is_on,
  settings=SecondMomentSettings,
  examples=(
    # The means of the smallest 1, 2, 3 and 4 are .01, .025, .0467 and .285. Padding is not counted.
    Example(
      {"w": [_MOVED[3], *_MOVED[:3], 1.01], "A": [1] * 5, "mask": [1, 1, 1, 1, 0]},
      {"weights": [0, 1, 1, 0, 0]},
      {"m2_bound": 0.04},
    ),
    # A token that comes back to the old policy stays, and is not in the mean.
    Example(
      {"w": [_MOVED[2], _MOVED[3], 0.3678794, _MOVED[0]], "A": [1, -1, 1, 1], "mask": [1] * 4},
      {"weights": [1, 1, 1, 1]},
      {"m2_bound": 0.051},
    ),
    # Of two equal squares both go, because with both the mean is .03.
    Example(
      {"w": [_MOVED[1], _MOVED[1], _MOVED[0]], "A": [1, 1, 2], "mask": [1] * 3},
      {"weights": [0, 0, 1]},
      {"m2_bound": 0.026},
    ),
    # With A < 0 a token moves away downwards: the squares are .04 and .09.
    Example(
      {"w": [0.8187308, 0.7408182, _MOVED[3]], "A": [-1, -1, -1], "mask": [1] * 3},
      {"weights": [1, 0, 1]},
      {"m2_bound": 0.05},
    ),
    # Even the smallest square is above the bound. Tokens that teach nothing cannot move away.
    Example(
      {"w": [_MOVED[1], _MOVED[3], _MOVED[2]], "A": [1, 0, 1], "mask": [1] * 3},
      {"weights": [0, 1, 0]},
      {"m2_bound": 0.02},
    ),
  ),
)


@dataclasses.dataclass(frozen=True)
class SelectionSettings(SecondMomentSettings, TopEntropySettings, SurrogateSettings, RatioSettings):
  """The settings of all token weights, and the choices of other axes that the selection reads."""


def is_needed(algo: SelectionSettings) -> bool:
  """Whether any choice of the config weighs or chooses tokens."""
  return SURROGATES[algo.surrogate].select is not None or has_weights(algo)


def has_weights(algo: SelectionSettings) -> bool:
  """Whether any token weight is on."""
  return any(record.is_on(algo) for record in TOKEN_WEIGHTS.values())
