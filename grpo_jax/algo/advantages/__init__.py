"""Advantages: how much better a completion is than the others.

To add one, write its function and its record into one of the files of this folder. A program adds
its own with `register_advantage`.
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
  """The choice of an advantage and the settings of all. New settings go in front."""


def register_advantage(compute: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
  """Gives an advantage of this program a name in configs: that of its function.

  It can be used as a decorator. `algo.advantage` then finds the name. A program that goes on with a
  run registers the function first, because the run saves the name alone.

  Args:
    compute: (rewards, mask_PGT, algo) -> [P, G], in JAX. `rewards.total_PG` has the weighted
      scores less a KL penalty, and `rewards.scored_PG` says which completions were scored. The
      others get 0, and so do groups whose rewards are equal. An advantage for which that is not so,
      or that differs within a completion, is a record in a file of `grpo_jax/algo/advantages/`.

  Returns:
    The function.

  Raises:
    ConfigError: An advantage of grpo_jax has this name, or it has none.
  """
  record = Advantage(compute=compute, settings=Settings, examples=())
  register("advantage", ADVANTAGES, compute, record)
  return compute
