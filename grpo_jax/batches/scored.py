"""A batch on the host that is drawn and scored, and how a checkpoint keeps it."""

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
  """A batch on the host, with its rewards. It knows nothing of the step that will learn from it.

  Attributes:
    indices_P: int64, the number of each group's training prompt.
    temperature_P: float32, the temperatures that they were sampled at.
    version_P: int64, how many GRPO steps had changed the policy that sampled them.
    live_P: float32, 0 for groups that only fill up the batch.
    completions: The rows that are learned, as numpy arrays. Those of the rollouts come first.
    rewards: The rollouts' rewards, with the penalty for length where that is on, as numpy arrays.
    rollout_PB: int32, the number of the rollout that each row belongs to, where rows are branches.
    rows: One object per completion of the batch, for completions/ and for the terminal. None where
      log.completions_every leaves the step out. Empty on the processes that write nothing.
    metrics: The metrics of everything that was sampled, including groups that are not in the batch.
    host: The host state after the step.
    why_unscored: Why no completion has a reward and a token in the loss. "" if one has.
    prompts: The prompts of the batch. None means that they are made again.
    asked: The tokens of the prompts, where a harness chose them. Otherwise None.
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


_PLAIN = ("rows", "metrics", "why_unscored")  # kept as JSON


def to_arrays(scored: Scored) -> dict[str, Any]:
  """The parts of a batch that a checkpoint keeps: nested dicts of numpy arrays."""
  rewards = fields_of(scored.rewards)
  del rewards["weights"]  # those of the config
  arrays = fields_of(scored) | {
    "completions": fields_of(scored.completions),
    "rewards": rewards,
  }
  arrays.pop("prompts", None)
  if scored.asked is not None:
    arrays["asked"] = fields_of(scored.asked)
  for name in _PLAIN:
    text = json.dumps(getattr(scored, name), default=lambda x: x.item())
    arrays[name] = np.frombuffer(text.encode(), np.uint8)
  return arrays


def from_arrays(arrays: Mapping[str, Any], weights: tuple[float, ...]) -> Scored:
  """The inverse of `to_arrays`. `weights` are those of the reward functions."""
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
