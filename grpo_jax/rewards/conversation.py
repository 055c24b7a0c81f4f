"""Completions as messages, for reward functions that read them as in TRL.

With data.chat, TRL passes `prompts` and `completions` as messages: its functions read a text as
`completion[0]["content"]`. Functions of grpo_jax read texts. Which of the two a user's function
reads is seen at the start: it is called with messages that notice whether they are read.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
import contextlib
import functools
import inspect
from typing import Any

MADE_UP = "I think that the answer is 1."  # a completion that no policy wrote

Columns = Mapping[str, Sequence[Any]]


class _Noticing(dict[str, Any]):
  """A message that notices when one of its fields is read.

  What only hands a message on reads none: copy.deepcopy and json.dumps call items().
  """

  def __init__(self, message: Mapping[str, Any], notice: Callable[[], None]) -> None:
    super().__init__(message)
    self._notice = notice

  def __getitem__(self, key: str) -> Any:
    self._notice()
    return super().__getitem__(key)

  def __iter__(self) -> Iterator[str]:
    return super().__iter__()  # a dict with an __iter__ of its own is copied by its __getitem__

  def get(self, key: str, default: Any = None) -> Any:
    self._notice()
    return super().get(key, default)

  def pop(self, *key_and_default: Any) -> Any:
    self._notice()
    return super().pop(*key_and_default)

  def values(self) -> Any:
    self._notice()
    return super().values()


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
  """Whether it has to be seen what a function reads: its mark `conversational` does not say it."""
  return is_of_user(function) and getattr(function, "conversational", None) is None


def asking(function: Callable[..., Any]) -> Callable[..., Any]:
  """A reward function that gives 1 to each completion if `function` reads messages, else 0.

  It calls the function with messages, whose texts are made up. What that returns, or raises because
  of such a text, says nothing.

  Args:
    function: A reward function of the user, which may be async.
  """

  def ask(**columns: Any) -> Any:
    read = list[bool]()
    given = as_messages(columns)
    for name in ("prompts", "completions"):
      given[name] = [
        [_Noticing(message, lambda: read.append(True)) for message in messages]
        for messages in given[name]
      ]

    def answer() -> list[float]:
      return [float(any(read))] * len(columns["completions"])

    async def answer_after(values: Awaitable[Any]) -> list[float]:
      with contextlib.suppress(Exception):
        await values
      return answer()

    with contextlib.suppress(Exception):
      values = function(**given)
      if inspect.isawaitable(values):
        return answer_after(values)
      if isinstance(values, Iterator):
        list(values)
    return answer()

  return ask
