"""An endpoint records what other programs asked the policy, so that a run can learn from it.

A client names its conversation in its key: `KEY:NAME`. Whatever it asks under that name, the
endpoint keeps the tokens that it read and wrote.
"""

import collections
from collections.abc import Mapping, Sequence
import hashlib
import threading
from typing import Any, NamedTuple

from grpo_jax.sampler.logits import RowSettings

Messages = Sequence[Mapping[str, Any]]


class Trace(NamedTuple):
  """A completion that the policy wrote for a client.

  Attributes:
    prompt: The token ids that it read.
    tokens: The token ids that it wrote, with the one that ended it.
    logprobs: Their log-probs at the run's temperature.
    version: The version of the weights that wrote the last of them.
    finish: "stop" or "length".
    said: The content of the answer that the client got.
    calls: The calls of tools in it, as messages have them. Their arguments are dicts.
    computed: How many tokens of the prompt were computed.
    number: How many completions the client had asked for before.
    messages: The messages that the client sent, if it was a conversation. Otherwise None.
  """

  prompt: list[int]
  tokens: list[int]
  logprobs: list[float]
  version: int
  finish: str
  said: str = ""
  calls: tuple[dict[str, Any], ...] = ()
  computed: int = 0
  number: int = 0
  messages: Messages | None = None


class Recorder:
  """Keeps the traces of conversations. Every method may be called from any thread.

  While it records, the run decides how tokens are drawn, because it learns from their log-probs:
  temperature, filters and seed of a request are not used.
  """

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._traces: dict[str, list[Trace]] = collections.defaultdict(list)
    # Of prompts: their messages and tools.
    self._asked_with: dict[tuple[str, tuple[int, ...]], tuple[Messages, Any]] = {}
    self._asked: dict[str, int] = collections.defaultdict(int)
    self._settings, self._seed = RowSettings(), ""

  def begin(self, settings: RowSettings, seed: str) -> None:
    """Forgets what it has, and draws with other settings.

    Args:
      settings: How every completion is drawn. A request's own limit of tokens is kept.
      seed: The random numbers depend on it, on the conversation's name and on how many
        completions it asked for before.
    """
    with self._lock:
      self._traces.clear()
      self._asked_with.clear()
      self._asked.clear()
      self._settings, self._seed = settings, seed

  def draws(self, name: str, asked: RowSettings) -> tuple[RowSettings, int, int]:
    """How the next completion of a conversation is drawn.

    Returns:
      Its settings, the int32 that its random numbers depend on, and how many the client had asked
      for before.
    """
    with self._lock:
      count = self._asked[name]
      self._asked[name] += 1
      text = f"{self._seed}/{name}/{count}"
      number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1
      return self._settings.replace(max_tokens=asked.max_tokens), number, count

  def read(self, name: str, messages: Messages, tools: Any, prompt: Sequence[int]) -> None:
    """Remembers which messages and tools a prompt was rendered from."""
    with self._lock:
      self._asked_with[name, tuple(prompt)] = messages, tools

  def earlier(self, name: str, messages: Messages, tools: Any) -> tuple[Trace, Messages] | None:
    """The completion that messages go on from, and those that follow it.

    Returns:
      The latest completion of the conversation whose messages these begin with, followed by the
      answer that the client got, and which had the same tools. None if there is none.
    """
    with self._lock:
      for trace in reversed(self._traces[name]):
        before, shown = self._asked_with.get((name, tuple(trace.prompt)), (None, None))
        if before is None or shown != tools or list(messages[: len(before)]) != list(before):
          continue
        answer, after = messages[len(before) :][:1], messages[len(before) + 1 :]
        if answer and after and _is_answer(answer[0], trace):
          return trace, after
    return None

  def add(self, name: str, trace: Trace) -> None:
    """Keeps a completion of a conversation."""
    with self._lock:
      messages, _ = self._asked_with.get((name, tuple(trace.prompt)), (None, None))
      self._traces[name].append(trace._replace(messages=messages))

  def take(self, name: str) -> list[Trace]:
    """The completions of a conversation in the order in which they were asked for.

    They are then forgotten.
    """
    with self._lock:
      return sorted(self._traces.pop(name, []), key=lambda trace: trace.number)


def _is_answer(message: Mapping[str, Any], trace: Trace) -> bool:
  """Whether a message is what the client was answered."""
  if message.get("role") != "assistant" or (message.get("content") or "") != trace.said:
    return False
  return _what_is_called(message.get("tool_calls") or ()) == _what_is_called(trace.calls)


def _what_is_called(calls: Sequence[Mapping[str, Any]]) -> list[tuple[Any, Any]]:
  return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
