"""Converts completions to messages, for reward functions that were written for TRL.

With data.chat, TRL passes `prompts` and `completions` as messages: a function reads a text as
`completion[0]["content"]`. Functions of grpo_jax read texts. Trial calls at the start find out what
a user's function reads: see `asking.py`.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any

MADE_UP = "I think that the answer is 1."  # the completion in trial calls

Columns = Mapping[str, Sequence[Any]]


def as_messages(columns: Columns) -> dict[str, Any]:
  """Replaces `prompts` and `completions` by lists of messages.

  Args:
    columns: The arguments of a reward function, with the column `messages`.
  """
  completions = columns.get("turns")
  if completions is None:
    completions = [[{"role": "assistant", "content": text}] for text in columns["completions"]]
  return {**columns, "prompts": columns["messages"], "completions": completions}


def texts_of(completions: Sequence[Any]) -> list[str]:
  """Returns a text for each completion: itself, or the last assistant message of its messages."""
  return [one if isinstance(one, str) else _last_of_policy(one) for one in completions]


def _last_of_policy(messages: Sequence[Mapping[str, str]]) -> str:
  texts = [message["content"] for message in messages if message["role"] == "assistant"]
  return texts[-1] if texts else ""  # a harness may never call the policy


def is_of_user(function: Callable[..., Any]) -> bool:
  """Whether a function was written by the user. Functions of grpo_jax always read texts."""
  if isinstance(function, functools.partial):
    function = function.func
  return not (getattr(function, "__module__", "") or "").startswith("grpo_jax.")


def is_asked(function: Callable[..., Any]) -> bool:
  """Whether trial calls must find out what a function reads: it has no mark `conversational`."""
  return is_of_user(function) and getattr(function, "conversational", None) is None
