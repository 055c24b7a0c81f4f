"""Completions as messages, for reward functions that read them as in TRL.

With data.chat, TRL passes `prompts` and `completions` as messages: its functions read a text as
`completion[0]["content"]`. Functions of grpo_jax read texts. Which of the two a user's function
reads is seen at the start: see `asking.py`.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any

MADE_UP = "I think that the answer is 1."  # a completion that no policy wrote

Columns = Mapping[str, Sequence[Any]]


def as_messages(columns: Columns) -> dict[str, Any]:
  """The columns with `prompts` and `completions` as lists of messages.

  Args:
    columns: The arguments of a reward function, with the column `messages`.
  """
  completions = columns.get("turns")
  if completions is None:
    completions = [[{"role": "assistant", "content": text}] for text in columns["completions"]]
  return {**columns, "prompts": columns["messages"], "completions": completions}


def texts_of(completions: Sequence[Any]) -> list[str]:
  """The texts of completions, which are texts or lists of messages, the last of the assistant."""
  return [one if isinstance(one, str) else _last_of_policy(one) for one in completions]


def _last_of_policy(messages: Sequence[Mapping[str, str]]) -> str:
  own = [message["content"] for message in messages if message["role"] == "assistant"]
  return own[-1] if own else ""  # a harness may never ask the policy


def is_of_user(function: Callable[..., Any]) -> bool:
  """Whether a function is not of grpo_jax, whose functions read texts."""
  if isinstance(function, functools.partial):
    function = function.func
  return not (getattr(function, "__module__", "") or "").startswith("grpo_jax.")


def is_asked(function: Callable[..., Any]) -> bool:
  """Whether the run must find out what a function reads: it has no mark `conversational`."""
  return is_of_user(function) and getattr(function, "conversational", None) is None
