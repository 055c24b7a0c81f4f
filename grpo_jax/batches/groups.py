"""Groups of completions with their rewards, on the host."""

import dataclasses
from typing import Any

from flax import struct
import numpy as np

from grpo_jax.rollouts.rollout import Rollouts, take
from grpo_jax.scoring.scores import groups_that_differ
from grpo_jax.types import Rewards


class ScoredGroups(struct.PyTreeNode):
  """Completions of P prompts and their rewards.

  Attributes:
    indices_P: int64, the indices of the training prompts.
    temperature_P: float32, the sampling temperatures.
    version_P: int64, how many GRPO steps had changed the policy when each group was opened.
    rollouts: The completions.
    rewards: The scores of the reward functions, without the penalty for length.
    extras_PG: object array of dicts, the values that the functions passed to log_extra.
    checks_PG: float32, 1 for completions that are right by eval.function, else 0. NaN without
      eval.check_training.
  """

  indices_P: np.ndarray
  temperature_P: np.ndarray
  version_P: np.ndarray
  rollouts: Rollouts
  rewards: Rewards
  extras_PG: np.ndarray
  checks_PG: np.ndarray


def choose(groups: ScoredGroups, count: int) -> tuple[ScoredGroups, np.ndarray]:
  """Chooses the first `count` groups whose rewards differ. If there are fewer, adds other groups.

  Returns:
    The groups, and float32 [count], 1 for groups whose rewards differ and 0 for the added ones.
  """
  differ = groups_that_differ(groups.rewards)
  live = np.flatnonzero(differ)[:count]
  others = np.flatnonzero(~differ)[: count - len(live)]
  chosen = take(groups, np.concatenate([live, others]))
  return chosen, (np.arange(count) < len(live)).astype(np.float32)


def fields_of(tree: Any) -> dict[str, Any]:
  """The fields of a dataclass that are not None, by name."""
  fields = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
  return {name: value for name, value in fields.items() if value is not None}
