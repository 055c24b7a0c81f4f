"""Advantages: how much better a completion is than the others.

To add one, write its function and its record into one of the files of this folder.
"""

from grpo_jax.algo.advantages import answers, batch, group, steps
from grpo_jax.algo.advantages.record import Advantage

__all__ = ["ADVANTAGES", "Advantage"]

ADVANTAGES: dict[str, Advantage] = (
  group.ADVANTAGES | batch.ADVANTAGES | answers.ADVANTAGES | steps.ADVANTAGES
)
