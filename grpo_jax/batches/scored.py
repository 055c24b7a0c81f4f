"""Defines a drawn and scored batch on the host, and converts it to arrays for a checkpoint."""

from collections.abc import Mapping
import dataclasses
import json
from typing import Any

import numpy as np

from grpo_jax.batches.groups import fields_of
from grpo_jax.data.loader import PromptBatch
from grpo_jax.rollouts.rollout import HarnessPrompts
from grpo_jax.types import Completions, Rewards


@dataclasses.dataclass(frozen=True)
class Scored:
  """A drawn batch on the host, with its rewards.

  Attributes:
    indices_P: int64, the index of each group's training prompt.
    temperature_P: float32, the sampling temperatures.
    version_P: int64, how many GRPO steps had changed the policy when each group was opened.
    live_P: float32, 0 for groups that only fill the batch, else 1.
    completions: The rows to learn from, as numpy arrays. With branches, the rollouts' own rows come
      first.
    rewards: The rewards of rollouts, including the penalty for length if it is on, as numpy arrays.
    rollout_PB: int32, the index of the rollout to which each row belongs. None without branches.
    rows: One dict per completion of the batch, for completions/ and the terminal. None if
      log.completions_every skips the step. Empty on processes that do not write.
    metrics: The metrics of all sampled groups, including those that are not in the batch.
    host: The host state after the step.
    why_unscored: Why the step has nothing to learn from. "" if it has.
    prompts: The prompts of the batch. None means that they must be made again from `indices_P`.
    asked: The tokens of the prompts if a harness chose them, else None.
  """

  indices_P: np.ndarray
  temperature_P: np.ndarray
  version_P: np.ndarray
  live_P: np.ndarray
  completions: Completions
  rewards: Rewards
  rollout_PB: np.ndarray | None
  rows: list[dict[str, Any]] | None
  metrics: dict[str, float]
  host: dict[str, Any]
  why_unscored: str = ""
  prompts: PromptBatch | None = None
  asked: HarnessPrompts | None = None


_PLAIN = ("rows", "metrics", "why_unscored")  # a checkpoint has these fields as JSON


def to_arrays(scored: Scored) -> dict[str, Any]:
  """Converts a batch to nested dicts of numpy arrays for a checkpoint, without `prompts`."""
  rewards = fields_of(scored.rewards)
  del rewards["weights"]  # they are in the config
  arrays = fields_of(scored) | {
    "completions": fields_of(scored.completions),
    "rewards": rewards,
  }
  arrays.pop("prompts", None)
  if scored.asked is not None:
    arrays["asked"] = fields_of(scored.asked)
  for name in _PLAIN:
    text = json.dumps(getattr(scored, name), default=lambda x: x.item())  # NumPy scalars
    arrays[name] = np.frombuffer(text.encode(), np.uint8)
  return arrays


def from_arrays(arrays: Mapping[str, Any], weights: tuple[float, ...]) -> Scored:
  """Makes a batch from the result of `to_arrays` and the weights of the reward functions."""
  plain = {name: json.loads(arrays[name].tobytes()) for name in _PLAIN}
  return Scored(
    **{"rollout_PB": None, **arrays}
    | ({"asked": HarnessPrompts(**arrays["asked"])} if "asked" in arrays else {})
    | plain
    | {
      "completions": Completions(**arrays["completions"]),
      "rewards": Rewards(weights=weights, **arrays["rewards"]),
    }
  )
