"""The record of an advantage, and the settings that several advantages share."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
from typing import TYPE_CHECKING

from grpo_jax.algo.variant import Record, S
from grpo_jax.lazy import jax
from grpo_jax.settings import Settings, at_least, setting

if TYPE_CHECKING:
  from grpo_jax.types import Rewards


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advantage(Record[S]):
  """One way to compute advantages.

  Attributes:
    compute: (rewards, mask_PGT, algo) -> advantages [P, G], or [P, G, T] if the tokens of a
      completion differ. A completion that no function scored gets 0 and changes no statistic.
    examples: Inputs are `scores` (nested [P, G], or [P, G, J] with `weights`) and, if `compute`
      reads them, `lengths` [P, G], `greedy_scores` [P], `step_rewards` [P, G, T] with None where no
      step ends, and `kl_penalty` [P, G, T]. The output is `advantages`.
    equal_rewards_teach: True if a group whose rewards are all equal may get advantages other than
      0. Dynamic sampling, which drops such groups, is then refused.
    takes_kl_penalty: True if `compute` can work with a KL penalty in the reward.
    needs_greedy: True if `compute` reads `Rewards.greedy_scores_PJ`.
    needs_steps: True if `compute` reads `Rewards.step_rewards_PGT`.
    counts_right_answers: True if only the sign of a reward matters. Length penalties, which could
      make a right answer wrong, are then refused.
    refuses_negative: True if `compute` cannot use rewards below 0. A run stops at such a reward,
      and length penalties are refused.
    per_token: True if the tokens of a completion may differ without a KL penalty in the reward.
    check: (algo, group_size) -> None. Raises ConfigError if the settings do not fit together.
  """

  compute: Callable[[Rewards, jax.Array, S], jax.Array]
  equal_rewards_teach: bool = False
  takes_kl_penalty: bool = True
  needs_greedy: bool = False
  needs_steps: bool = False
  counts_right_answers: bool = False
  refuses_negative: bool = False
  per_token: bool = False
  check: Callable[[S, int], None] | None = None


@dataclasses.dataclass(frozen=True)
class EpsSettings(Settings):
  """The number that keeps a division by a standard deviation finite."""

  std_eps: float = setting(
    1e-4, "added to a standard deviation before the division by it", at_least(0)
  )


@dataclasses.dataclass(frozen=True)
class StdSettings(EpsSettings):
  """How a standard deviation is computed and divided by."""

  std_ddof: int = setting(
    1,
    "what is subtracted from the count in a variance: 1 as in TRL and verl, 0 as in the textbook",
    at_least(0),
  )
