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
    indices_P: int64, which training prompts they are.
    temperature_P: float32, what they were sampled at.
    version_P: int64, how many GRPO steps had changed the policy that sampled them.
    rollouts: The completions.
    rewards: From the reward functions, without the penalty for length.
    extras_PG: object array of dicts: what the functions gave to log_extra.
    checks_PG: float32, 1 where eval.function says that the completion is right, else 0. NaN without
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
  """The first `count` groups whose rewards differ.

  Where there are fewer, other groups fill their places.

  Returns:
    The groups, and float32 [count], 1 for those whose rewards differ and 0 for the others.
  """
  differ = groups_that_differ(groups.rewards)
  live = np.flatnonzero(differ)[:count]
  others = np.flatnonzero(~differ)[: count - len(live)]
  chosen = take(groups, np.concatenate([live, others]))
  return chosen, (np.arange(count) < len(live)).astype(np.float32)


def fields_of(tree: Any) -> dict[str, Any]:
  """The fields of a struct that are not None."""
  fields = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
  return {name: value for name, value in fields.items() if value is not None}
