"""Completions as messages, for reward functions that read them as in TRL.

With data.chat, TRL passes `prompts` and `completions` as messages: its functions read a text as
`completion[0]["content"]`. Functions of grpo_jax read texts. Which of the two a user's function
reads is seen at the start, where it is called with a made-up completion.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any

from grpo_jax.rewards.answer import Answer

MADE_UP = "I think that the answer is 1."  # a completion that no policy wrote
# What Python raises for a text that is read as messages: t[0]["content"], t[0].get("content").
_WRONG_TYPE = (" raised TypeError", " raised AttributeError")

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


def is_asked(function: Callable[..., Any]) -> bool:
  """Whether it has to be seen what a function reads.

  Those of grpo_jax read texts, and the mark `conversational` says it of others.
  """
  if isinstance(function, functools.partial):
    function = function.func
  module = getattr(function, "__module__", "") or ""
  return not module.startswith("grpo_jax.") and getattr(function, "conversational", None) is None


def reads_messages(call: Callable[[Columns], Answer], columns: Columns) -> bool:
  """Whether a function reads messages: it fails on a text because of its type, and not on messages.

  Args:
    call: Calls the function with columns. What the function raises becomes failures of the answer.
    columns: The columns of one completion, with the column `messages`.
  """
  failures = call(columns).failures
  has_wrong_type = any(kind in one.text for one in failures for kind in _WRONG_TYPE)
  return has_wrong_type and not call(as_messages(columns)).failures
