"""The record of a surrogate, and the settings that several surrogates share.

In docstrings, w is the ratio, A the advantage, lp the policy's log-prob, old the log-prob before
the update, d = lp - old, and sg a stopped gradient.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
from typing import TYPE_CHECKING, TypeAlias

from grpo_jax.algo.variant import Record, S
from grpo_jax.lazy import jax
from grpo_jax.settings import Settings, above, setting, zero_or_above

if TYPE_CHECKING:
  from grpo_jax.algo.surrogates.terms import BatchTokens, Terms


Loss: TypeAlias = "Callable[[Terms, S], jax.Array]"
Bounds: TypeAlias = "Callable[[Terms, S], tuple[jax.Array, jax.Array]]"
Select: TypeAlias = "Callable[[BatchTokens, S], jax.Array]"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Surrogate(Record[S]):
  """One way to turn ratios and advantages into a loss.

  Attributes:
    loss: (terms, algo) -> the loss of each token, [P, G, T]. It never reduces over tokens.
    examples: Inputs are lists over the tokens of one row: `w`, `A` and, if the loss reads them,
      `old` (probabilities, 1/2 if missing), `mask`, `weights`, `chosen`, `corrections` and
      `corrections_of_row`. Outputs are `loss`, `gradient`, the derivative of the summed loss by
      each lp, and `low` and `high` if there are `bounds`. For `select`, the inputs are `lp`, `w`,
      `A` and `mask`, and the output is `chosen`.
    bounds: (terms, algo) -> (low, high), bool [P, G, T] each: True where the lower or the upper
      bound of the surrogate limits the token. Only metrics use it.
    select: (tokens of the whole batch, algo) -> bool [P, G, T], the tokens that the loss treats
      specially.
    ratios: The names of the ratios that the loss can be combined with. None means all.
    weighs_tokens_itself: True if `loss` applies `Terms.weights_PGT`, so that `objective` does not.
    applies_correction_itself: True if `loss` applies `Terms.corrections_PGT`, so that `objective`
      does not.
    idle_at_ratio_one: Names of settings that do not change the gradient if every ratio is 1.
    reads_ratio: False if the loss does not depend on how far the policy has moved since it sampled.
    idle_without_advantage: True if a group whose advantages are all 0 has no loss and no gradient,
      so that an update may leave it out.
    needs_lower_bound: True if `clip_low` must be below 1, because from 1 on it bounds nothing.
    check: (algo) -> None. Raises ConfigError if the settings do not fit together.
  """

  loss: Loss[S]
  bounds: Bounds[S] | None = None
  select: Select[S] | None = None
  ratios: tuple[str, ...] | None = None
  weighs_tokens_itself: bool = False
  applies_correction_itself: bool = False
  idle_at_ratio_one: tuple[str, ...] = ()
  reads_ratio: bool = True
  idle_without_advantage: bool = False
  needs_lower_bound: bool = False
  check: Callable[[S], None] | None = None


@dataclasses.dataclass(frozen=True)
class ClipSettings(Settings):
  """The bounds of the ratio; in gmpo of its logarithm, in dppo_tv and dppo_kl of a divergence."""

  clip_low: float = setting(
    0.2, "the ratio is limited to [1 - clip_low, 1 + clip_high]; see the surrogate", above(0)
  )
  clip_high: float = setting(
    0.2, "the ratio is limited to [1 - clip_low, 1 + clip_high]; see the surrogate", above(0)
  )


@dataclasses.dataclass(frozen=True)
class RatioMaxSettings(ClipSettings):
  """The bounds, and a limit of the ratio where they do not apply."""

  ratio_max: float = setting(
    0.0,
    "ppo_clip, clip_cov, dppo_tv, dppo_kl: limit of the ratio where it is not clipped; 0 = off",
    zero_or_above(1, "a lower limit stops the gradient of tokens that have not moved; 0 is off"),
  )
