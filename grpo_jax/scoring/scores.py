"""Rewards of rollouts on the host: sums, the length penalty, and rewards of steps at tokens."""

import bisect
from collections.abc import Callable, Sequence
import os

import numpy as np

from grpo_jax import rewards as rewards_lib
from grpo_jax.rewards.functions.lengths import overlong
from grpo_jax.rollouts.rollout import Rollouts
from grpo_jax.settings import ConfigStopsRun
from grpo_jax.types import Completions, Rewards

OVERLONG = "overlong"  # the name of the length penalty in metrics

DecodeText = Callable[[list[int]], str]


def host_scores(rewards: Rewards) -> np.ndarray:
  """Computes `Rewards.score_PG` with numpy, float32 [P, G], summed in float64. It may be NaN."""
  scores_PGJ = rewards.scores_PGJ.astype(np.float64)
  totals_PG = np.nansum(scores_PGJ * np.array(rewards.weights), -1)
  unscored_PG = np.isnan(scores_PGJ).all(-1)
  return np.where(unscored_PG, np.nan, totals_PG).astype(np.float32)


def groups_that_differ(rewards: Rewards) -> np.ndarray:
  """Returns which groups have two different rewards, bool [P]. Others have no learning signal."""
  totals_PG = host_scores(rewards)
  scored_PG = ~np.isnan(totals_PG)
  largest_P = np.where(scored_PG, totals_PG, -np.inf).max(1)
  smallest_P = np.where(scored_PG, totals_PG, np.inf).min(1)
  return largest_P > smallest_P


def check_not_negative(rewards: Rewards) -> None:
  """Raises ConfigStopsRun if a completion has a reward below 0."""
  smallest = np.nanmin(host_scores(rewards), initial=0)
  if smallest < 0:
    raise ConfigStopsRun(
      f"a completion has the reward {smallest:g}: the advantage of algo.advantage takes none below"
      " 0. Change reward.functions or reward.weights, or choose another advantage, in another"
      " --workdir"
    )


def with_overlong(
  rewards: Rewards, completions: Completions, max_tokens: int, fraction: float
) -> Rewards:
  """Adds DAPO's length penalty to the rewards, as one more function with weight 1.

  A completion has a penalty if its length is in the last `fraction` of max_tokens and a function
  scored it. With rewards of steps, the penalty is also the reward of a step that ends at the last
  token. A penalty of 0 adds no such step, because the step would count in the mean over steps.
  """
  penalty_PG = overlong(completions.lengths_PG, max_tokens, round(fraction * max_tokens))
  scored_PG = ~np.isnan(rewards.scores_PGJ).all(-1)
  # The penalty alone would make a completion count as scored.
  penalty_PG = np.where(scored_PG, penalty_PG, np.float32(np.nan))
  shaped = rewards.replace(
    scores_PGJ=np.concatenate([rewards.scores_PGJ, penalty_PG[..., None]], -1),
    weights=(*rewards.weights, 1.0),
  )
  if rewards.step_rewards_PGT is None:
    return shaped
  T = completions.tokens_PGT.shape[-1]
  at_last_PGT = np.arange(T) == completions.lengths_PG[..., None] - 1
  penalised_PGT = at_last_PGT & (penalty_PG < 0)[..., None]
  penalty_PGT = np.where(penalised_PGT, penalty_PG[..., None], 0)
  return shaped.replace(
    step_rewards_PGT=rewards.step_rewards_PGT + penalty_PGT.astype(np.float32),
    step_ends_PGT=np.maximum(rewards.step_ends_PGT, penalised_PGT.astype(np.float32)),
  )


def no_steps(completions: Completions) -> tuple[np.ndarray, np.ndarray]:
  """Returns zero step rewards and zero step ends, float32 [P, G, T] each."""
  shape = completions.tokens_PGT.shape
  return np.zeros(shape, np.float32), np.zeros(shape, np.float32)


def steps_on_tokens(
  rollouts: Rollouts,
  steps: Sequence[Sequence[rewards_lib.Steps]],
  by_turn: Sequence[bool],
  weights: Sequence[float],
  decode_text: DecodeText,
) -> tuple[np.ndarray, np.ndarray]:
  """Places the reward of each step at the token with the step's last character.

  Args:
    rollouts: P * G completions.
    steps: For each function, the steps (end in characters, reward) of each completion. Empty for a
      completion that the function did not score.
    by_turn: For each function, whether it rewards turns. Then the rewards in the conversations that
      it scored replace its steps.
    weights: The weights of the functions. Steps that end at the same token become one step, whose
      reward is the weighted sum.
    decode_text: Decodes token ids to a text.

  Returns:
    (rewards, ends), float32 [P, G, T]. `ends` is 1 at tokens where a step ends, else 0. A step that
    ends with the text ends at the completion's last sampled token.
  """
  rewards_PGT, ends_PGT = no_steps(rollouts.completions)
  G = rollouts.texts_PG.shape[1]
  for weight, steps_of_rows, rewards_turns in zip(weights, steps, by_turn, strict=True):
    for p, g in np.ndindex(rollouts.texts_PG.shape):
      if not rollouts.completions.sampled_PGT[p, g].any():  # a harness never called the policy
        continue
      if not steps_of_rows[p * G + g]:  # such as a row of a task that the function is not for
        continue
      # Pairs (token, reward). A turn or a step ends at its last token.
      if rewards_turns:
        on_tokens = [
          (turn.end - 1, turn.reward)
          for turn in rollouts.turns_PG[p, g].own
          if turn.reward is not None
        ]
      else:
        on_tokens = [
          (_token_of_character(rollouts, p, g, end, decode_text), reward)
          for end, reward in steps_of_rows[p * G + g]
        ]
      for t, reward in on_tokens:
        rewards_PGT[p, g, t] += weight * reward
        ends_PGT[p, g, t] = 1
  return rewards_PGT, ends_PGT


def _token_of_character(
  rollouts: Rollouts, p: int, g: int, end: int, decode_text: DecodeText
) -> int:
  """Returns the index in row [p, g] of the token that completes the first `end` characters."""
  text, completions = rollouts.texts_PG[p, g], rollouts.completions
  places = np.flatnonzero(completions.sampled_PGT[p, g])
  if rollouts.turns_PG is not None:  # the text is only the policy's last turn
    places = places[places >= rollouts.turns_PG[p, g].own[-1].start]
  ids = completions.tokens_PGT[p, g, places].tolist()
  if end >= len(text):  # the token that ended the completion, which may write no character
    return int(places[-1])

  def characters_written(count: int) -> int:
    # Not the length of the decoded text: if `count` cuts a character between its bytes, the bytes
    # decode to replacement characters.
    return len(os.path.commonprefix([text, decode_text(ids[:count])]))

  # Finds the smallest number of tokens that write `end` characters, minus 1: the token's index.
  return int(places[bisect.bisect_left(range(1, len(ids)), end, key=characters_written)])
