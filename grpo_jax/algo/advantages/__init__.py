"""Advantages: how much better a completion is than the others.

To add one, write its function and its record into one of the files of this folder.
"""

import dataclasses

from grpo_jax.algo.advantages import answers, batch, group, steps
from grpo_jax.algo.advantages.record import Advantage
from grpo_jax.settings import Settings, one_of, setting

__all__ = ["ADVANTAGES", "Advantage", "AdvantageSettings"]

ADVANTAGES: dict[str, Advantage] = (
  group.ADVANTAGES | batch.ADVANTAGES | answers.ADVANTAGES | steps.ADVANTAGES
)


@dataclasses.dataclass(frozen=True)
class _Choice(Settings):
  advantage: str = setting("group_normalized", "a name in algo/advantages", one_of(ADVANTAGES))


@dataclasses.dataclass(frozen=True)
class AdvantageSettings(answers.PassAtKSettings, batch.GdpoSettings, _Choice):
  """The choice of an advantage and the settings of all. New settings go in front."""
