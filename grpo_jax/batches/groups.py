"""Groups of completions with their rewards, on the host."""

from collections.abc import Mapping
import dataclasses
from typing import Any

from flax import struct
import numpy as np

from grpo_jax.rollouts.rollout import Rollouts, take
from grpo_jax.scoring.scores import groups_that_differ
from grpo_jax.types import Completions, Rewards


class ScoredGroups(struct.PyTreeNode):
  """Completions of P prompts and their rewards.

  Attributes:
    indices_P: int64, which training prompts they are.
    temperature_P: float32, what they were sampled at.
    version_P: int64, how many GRPO steps had changed the policy that sampled them. -1 if a
      checkpoint of an earlier version of this program does not say.
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


def choose(groups: ScoredGroups, count: int) -> tuple[ScoredGroups, np.ndarray, ScoredGroups]:
  """The first `count` groups whose rewards differ.

  Where there are fewer, other groups fill their places.

  Returns:
    The groups; float32 [count], 1 for those whose rewards differ and 0 for the others; and the
    surplus, which are the other groups whose rewards differ.
  """
  differ = groups_that_differ(groups.rewards)
  live, surplus = np.split(np.flatnonzero(differ), [count])
  others = np.flatnonzero(~differ)[: count - len(live)]
  chosen = take(groups, np.concatenate([live, others]))
  return chosen, (np.arange(count) < len(live)).astype(np.float32), take(groups, surplus)


def to_arrays(groups: ScoredGroups) -> dict[str, Any]:
  """What a checkpoint keeps of groups: nested dicts of arrays. Texts and extras are left out."""
  rewards = fields_of(groups.rewards)
  del rewards["weights"]  # those of the config
  return {
    "indices_P": groups.indices_P,
    "temperature_P": groups.temperature_P,
    "version_P": groups.version_P,
    "checks_PG": groups.checks_PG,
    "completions": fields_of(groups.rollouts.completions),
    "rewards": rewards,
  }


def from_arrays(
  arrays: Mapping[str, Any], weights: tuple[float, ...], has_turns: bool = False
) -> ScoredGroups:
  """The inverse of `to_arrays`. There are no texts, no turns and no extras.

  Args:
    arrays: What `to_arrays` returned.
    weights: Of the reward functions.
    has_turns: Whether other groups have turns.
  """
  completions = Completions(**arrays["completions"])
  shape = completions.lengths_PG.shape
  extras_PG = np.empty(shape, object)
  for index in np.ndindex(shape):
    extras_PG[index] = {}
  return ScoredGroups(
    indices_P=arrays["indices_P"],
    temperature_P=arrays["temperature_P"],
    version_P=arrays.get("version_P", np.full(shape[0], -1)),
    rollouts=Rollouts(
      completions,
      np.full(shape, None, object),
      np.full(shape, None, object) if has_turns else None,
    ),
    rewards=Rewards(weights=weights, **arrays["rewards"]),
    extras_PG=extras_PG,
    checks_PG=arrays["checks_PG"],
  )


def fields_of(tree: Any) -> dict[str, Any]:
  """The fields of a struct that are not None."""
  fields = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
  return {name: value for name, value in fields.items() if value is not None}
