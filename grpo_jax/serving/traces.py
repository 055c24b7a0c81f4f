"""Records the completions that clients request from an endpoint, so that a run can learn from them.

A client names its conversation in its API key: `KEY:GENERATION:NAME`. The endpoint records the
tokens of all prompts and completions of that name. The generation is the number of the batch that
the conversation belongs to, so that calls of an earlier batch that come late are not recorded.
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
    prompt: The token ids of the prompt.
    tokens: The token ids of the completion, including the one that ended it.
    logprobs: The log-probs of `tokens` at the run's temperature.
    version: The version of the weights that wrote the last token.
    finish: "stop" or "length".
    said: The content of the answer that the client received.
    calls: The tool calls of the answer, in the format of messages. Their arguments are dicts.
    computed: How many tokens of the prompt were computed, rather than taken from the cache.
    number: How many completions of the conversation were requested earlier.
    messages: The messages that the client sent. None if the request was no conversation.
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
  """Stores the traces of conversations. Every method may be called from any thread.

  While the endpoint records, the run's temperature, filters and seed replace those of requests,
  because the run learns from the log-probs.

  The names of conversations that methods take begin with the generation, as `named` writes them.
  """

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._generation = 0  # how often `begin` was called
    self._traces: dict[str, list[Trace]] = collections.defaultdict(list)
    # (conversation, prompt's token ids) -> the messages and tools that it was rendered from
    self._asked_with: dict[tuple[str, tuple[int, ...]], tuple[Messages, Any]] = {}
    self._asked: dict[str, int] = collections.defaultdict(int)  # requested completions by name
    self._settings, self._seed = RowSettings(), ""

  def begin(self, settings: RowSettings, seed: str) -> None:
    """Drops all traces, begins a new generation, and changes how completions are drawn.

    Args:
      settings: How every completion is drawn. Only the token limit comes from the request.
      seed: The seed of the random numbers. They also depend on the conversation's name and on how
        many of its completions were requested earlier.
    """
    with self._lock:
      self._generation += 1
      self._traces.clear()
      self._asked_with.clear()
      self._asked.clear()
      self._settings, self._seed = settings, seed

  def named(self, name: str) -> str:
    """Puts the generation before a name. The result names a conversation until the next `begin`."""
    with self._lock:
      return f"{self._generation}:{name}"

  def is_current(self, name: str) -> bool:
    """Whether a conversation belongs to this generation."""
    with self._lock:
      return self._is_current(name)

  def draws(self, name: str, asked: RowSettings) -> tuple[RowSettings, int, int]:
    """Decides how the next completion of a conversation is drawn.

    Returns:
      The settings, the int32 that determines the random numbers, and how many completions of the
      conversation were requested earlier.
    """
    with self._lock:
      count = self._asked[name]
      self._asked[name] += 1
      _, _, own_name = name.partition(":")  # the numbers of a batch do not depend on those before
      text = f"{self._seed}/{own_name}/{count}"
      number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1
      return self._settings.replace(max_tokens=asked.max_tokens), number, count

  def remember_prompt(
    self, name: str, messages: Messages, tools: Any, prompt: Sequence[int]
  ) -> None:
    """Remembers which messages and tools a prompt was rendered from."""
    with self._lock:
      self._asked_with[name, tuple(prompt)] = messages, tools

  def earlier(self, name: str, messages: Messages, tools: Any) -> tuple[Trace, Messages] | None:
    """Finds the completion that a client's messages continue.

    The next prompt then keeps the tokens that the policy drew for its answer.

    Args:
      name: The conversation.
      messages: The messages of the client's request.
      tools: The tools of the request with the options of the chat template.

    Returns:
      (completion, the messages after its answer). It is the latest completion of the conversation
      for which `messages` begin with its messages and then its answer, and whose `tools` were the
      same. None if there is none, or no message follows the answer.
    """
    with self._lock:
      for trace in reversed(self._traces[name]):
        before, tools_before = self._asked_with.get((name, tuple(trace.prompt)), (None, None))
        if before is None or tools_before != tools or list(messages[: len(before)]) != list(before):
          continue
        answer, after = messages[len(before) :][:1], messages[len(before) + 1 :]
        if answer and after and _is_answer(answer[0], trace):
          return trace, after
    return None

  def add(self, name: str, trace: Trace) -> None:
    """Stores a completion of a conversation, unless it belongs to another generation."""
    with self._lock:
      if not self._is_current(name):
        return
      messages, _ = self._asked_with.get((name, tuple(trace.prompt)), (None, None))
      self._traces[name].append(trace._replace(messages=messages))

  def take(self, name: str) -> list[Trace]:
    """Removes and returns the completions of a conversation, in the order of their requests."""
    with self._lock:
      return sorted(self._traces.pop(name, []), key=lambda trace: trace.number)

  def _is_current(self, name: str) -> bool:
    generation, _, _ = name.partition(":")
    return generation == str(self._generation)


def _is_answer(message: Mapping[str, Any], trace: Trace) -> bool:
  """Whether a message repeats the answer that the client received."""
  if message.get("role") != "assistant" or (message.get("content") or "") != trace.said:
    return False
  return _what_is_called(message.get("tool_calls") or ()) == _what_is_called(trace.calls)


def _what_is_called(calls: Sequence[Mapping[str, Any]]) -> list[tuple[Any, Any]]:
  return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
