"""The reward that an environment gives."""

from typing import Any

from grpo_jax.rewards.marks import by_turn, in_process


@in_process
@by_turn
def environment(turn_rewards: list[list[float | None]], **columns: Any) -> list[float | None]:
  """The sum of the rewards of a completion's turns. None where the environment gave none.

  With process supervision, each turn with a reward is a step.
  """
  del columns
  known = [[reward for reward in rewards if reward is not None] for rewards in turn_rewards]
  return [sum(rewards) if rewards else None for rewards in known]
