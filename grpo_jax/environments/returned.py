"""Checks what users' environments and harnesses return, and converts it to plain JSON values."""

from collections.abc import Mapping
import json
import math
from typing import Any

from grpo_jax.rewards.answer import LARGEST
from grpo_jax.settings import shown

LONGEST_MESSAGE = 20_000  # characters of a tool's result; the rest is cut off

Messages = list[dict[str, Any]]


class Mistake(Exception):
  """An environment or a harness returned a wrong value. The message follows the word "returned"."""


class Unreachable(Exception):
  """The server of a tool is gone, so no call can succeed. The message follows the caller's name."""


def step_of(value: Any) -> tuple[Messages, float | None, bool]:
  """Checks the return value of `step`, and returns (messages, reward or None, whether it ended).

  Raises:
    Mistake: The value is not of this form.
  """
  if not isinstance(value, (tuple, list)) or len(value) != 3:
    raise Mistake(f"{shown(value)}: return (messages, reward, done)")
  messages, reward, done = value
  return checked(messages), reward_of(reward), _is_done(done)


def checked(messages: Any) -> Messages:
  """Checks the messages of an environment. A text becomes one user message, and None an empty list.

  An unpaired surrogate, which JSON can write and UTF-8 cannot, becomes a question mark.

  Raises:
    Mistake: The value is not a text, a message or a list of messages.
  """
  if isinstance(messages, str):
    messages = [{"role": "user", "content": messages}]
  if isinstance(messages, Mapping):
    messages = [messages]
  try:
    return [_message(one) for one in ([] if messages is None else messages)]
  except TypeError:  # it cannot be iterated over
    raise Mistake(
      f"the messages {shown(messages)}: give a text, a message or a list of messages"
    ) from None


def reward_of(value: Any) -> float | None:
  """Converts a reward to a float. None stays None.

  Raises:
    Mistake: The value is not a finite number, or its absolute value exceeds `LARGEST`.
  """
  if value is None:
    return None
  try:  # texts are refused, although float("1") would work
    number = math.nan if isinstance(value, (str, bytes)) else float(value)
  except Exception:  # an object of a user or of a package may raise anything
    number = math.nan
  if not abs(number) <= LARGEST:  # also if it is NaN
    raise Mistake(f"the reward {shown(value)}: give a number of at most {LARGEST:g}, or None")
  return number


def played_of(value: Any) -> dict[str, Any]:
  """Checks the return value of a harness.

  It is a reward, or a dict with `reward`, optional `metrics`, and further fields, the columns.

  Returns:
    {"reward": float or None, "columns": by name, "metrics": floats by name, without None}.

  Raises:
    Mistake: The value has another form, or a column or metric uses a reserved name.
  """
  if not isinstance(value, Mapping):
    return {"reward": reward_of(value), "columns": {}, "metrics": {}}
  if "reward" not in value or not all(isinstance(name, str) for name in value):
    raise Mistake(
      f"{shown(dict(value))}: the keys of a dict must be texts, and one of them must be reward"
    )
  columns = {name: column for name, column in value.items() if name not in ("reward", "metrics")}
  taken = sorted(set(columns) & _TAKEN)
  if taken:
    raise Mistake(f"the column {taken[0]}, which reward functions have already: rename it")
  returned = value.get("metrics") or {}
  if not isinstance(returned, Mapping):
    raise Mistake(f"metrics={shown(returned)}: give a dict of numbers by name")
  metrics = {str(name): _metric(name, number) for name, number in returned.items()}
  if taken := sorted({*metrics} & METRICS):
    raise Mistake(f"the metric {taken[0]}, which a run reports itself: rename it")
  return {
    "reward": reward_of(value["reward"]),
    "columns": _plain(columns, "the columns"),
    "metrics": {name: number for name, number in metrics.items() if number is not None},
  }


# Metrics that the run itself reports about harnesses. A harness may not use these names.
METRICS = {"prompt_tokens", "computed_tokens", "lost_tokens"}
# The arguments of reward functions that are no columns of the data. No column may use these names.
_TAKEN = {"completions", "completion_ids", "prompts", "messages", "turns", "turn_rewards"}
_TAKEN |= {"step", "log_metric", "log_extra", "environments"}


def content_of(value: Any) -> str | list[Any]:
  """Returns what a tool returned as the content of its message, as reward functions see it.

  Returns:
    A list as a list of plain JSON values, because TRL gives reward functions the list. Other
    values, and a list whose text is too long, as the text that the model reads.
  """
  text = as_text(value)
  if len(text) > LONGEST_MESSAGE:
    return f"{text[:LONGEST_MESSAGE]}... (cut off)"
  # NaN and infinity become texts, because what a worker answers is strict JSON.
  return json.loads(text, parse_constant=str) if isinstance(value, list) else text


def as_text(content: Any) -> str:
  """Returns the text that the model reads: a text as it is, other values as JSON."""
  text = (
    content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=str)
  )
  return text.encode("utf-8", "replace").decode()  # UTF-8 cannot encode unpaired surrogates


def _metric(name: Any, value: Any) -> float | None:
  """Converts a metric to a float. None stays None. Raises Mistake for other values."""
  try:
    return reward_of(value)
  except Mistake:
    raise Mistake(f"the metric {name}={shown(value)}: give a finite number or None") from None


def _is_done(value: Any) -> bool:
  """Converts `done` to a bool. None is False. Refuses texts: bool("False") would be True."""
  try:
    plain = value.item() if hasattr(value, "item") else value  # a scalar of numpy, JAX or PyTorch
  except Exception:
    plain = value
  if plain is None:
    return False
  if not isinstance(plain, (bool, int, float)) or plain not in (0, 1):
    raise Mistake(f"done={shown(value)}: give True or False")
  return bool(plain)


def _message(value: Any) -> dict[str, Any]:
  """Checks one message of an environment. Raises Mistake."""
  message = dict(value) if isinstance(value, Mapping) else {}
  if not all(isinstance(message.get(field), str) for field in ("role", "content")):
    raise Mistake(
      f"the message {shown(value)}: a message is an object with a text role and a text content"
    )
  if message["role"] == "assistant":
    raise Mistake(
      f"the message {shown(value)}: its role must be user, tool or system; assistant is the policy"
    )
  return _plain(message, "the message")


def _plain(value: dict[str, Any], what: str) -> dict[str, Any]:
  """Converts a dict to plain JSON values. Raises Mistake, whose text begins with `what`."""
  try:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    plain: dict[str, Any] = json.loads(text.encode("utf-8", "replace"))
  except (TypeError, ValueError, RecursionError):
    raise Mistake(f"{what} {shown(value)}: it holds something that JSON cannot represent") from None
  return plain
