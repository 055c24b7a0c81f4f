"""The reward that an environment gives."""

from typing import Any

from grpo_jax.rewards.marks import by_turn, in_process


@in_process
@by_turn
def environment(turn_rewards: list[list[float | None]], **columns: Any) -> list[float | None]:
  """The sum of the rewards of a completion's turns. None if the environment failed.

  If a limit ends a conversation before any reward, the sum is 0. With None instead, the policy
  would learn not to finish conversations that it would lose. With process supervision, each turn
  with a reward is a step.
  """
  del columns
  known = [[reward for reward in rewards if reward is not None] for rewards in turn_rewards]
  return [
    float(sum(some)) if rewards else None for some, rewards in zip(known, turn_rewards, strict=True)
  ]
