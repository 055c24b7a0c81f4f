"""Advantages: how much better a completion is than the others.

To add one, write its function and its record into one of the files of this folder. A user's program
calls `register_advantage`.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses

from grpo_jax.algo.advantages import answers, batch, group, steps
from grpo_jax.algo.advantages.advantage import Advantage
from grpo_jax.lazy import jax
from grpo_jax.registry import register
from grpo_jax.settings import Settings, one_of, setting

__all__ = ["ADVANTAGES", "Advantage", "AdvantageSettings", "register_advantage"]

ADVANTAGES: dict[str, Advantage] = (
  group.ADVANTAGES | batch.ADVANTAGES | answers.ADVANTAGES | steps.ADVANTAGES
)


@dataclasses.dataclass(frozen=True)
class _Choice(Settings):
  advantage: str = setting(
    "group_normalized",
    "how rewards become advantages",
    one_of(ADVANTAGES, "or call grpo_jax.register_advantage first"),
  )


@dataclasses.dataclass(frozen=True)
class AdvantageSettings(answers.PassAtKSettings, batch.GdpoSettings, _Choice):
  """The choice of an advantage, and the settings of all advantages. New bases go in front."""


def register_advantage(compute: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
  """Registers an advantage of the user under its function's name, for `algo.advantage`.

  Returns the function, so that it can be used as a decorator. A program that resumes a run
  registers the function first, because the run saves only the name.

  Args:
    compute: (rewards, mask_PGT, algo) -> advantages [P, G], in JAX. `rewards.total_PG` has the
      weighted scores minus a KL penalty, and `rewards.scored_PG` says which completions were
      scored. The function must return 0 for all others, and for groups of equal rewards. For an
      advantage that does not, or that differs within a completion, write a record into a file of
      `grpo_jax/algo/advantages/`.

  Raises:
    ConfigError: grpo_jax has an advantage of this name, or the function has no name.
  """
  record = Advantage(compute=compute, settings=Settings, examples=())
  register("advantage", ADVANTAGES, compute, record)
  return compute
