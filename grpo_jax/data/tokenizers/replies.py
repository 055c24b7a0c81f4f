"""Makes the tokens that follow a turn of the policy: replies, and the header of the next turn.

The policy's tokens are never encoded again from their text. Encoding might return other tokens, and
a template may render an earlier turn differently (Qwen3's drops the thinking). So the sampled
tokens stay, thinking included. Only the text after them is rendered, in a conversation with a
stand-in for the real turn of the assistant.
"""

from collections.abc import Callable, Mapping, Sequence
import json
from typing import Any

from grpo_jax.data.tokenizers.tokenizer import Tokenizer
from grpo_jax.settings import ConfigError

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]  # JSON schemas of functions

_MARK = "Zq7Turn"  # the text or argument in the stand-in turn. The reply's text follows it
_PROBE = "Zq7Said"  # the start of the messages that probe a template
_MOST_KNOWN = 1000  # the most entries of the cache of stand-ins
_Turn = Callable[[Sequence[Message]], Message]  # maps the reply's messages to the stand-in turn


class Replies:
  """Makes the tokens of replies, by a chat template or as plain text."""

  def __init__(self, tokenizer: Tokenizer, chat: bool, tools: Tools = ()) -> None:
    """Stores the arguments.

    Args:
      tokenizer: Encodes the replies, and renders them if `chat`.
      chat: Whether the chat template is used. If not, a reply is the concatenated contents of its
        messages.
      tools: The schemas of the functions that the assistant may call.
    """
    self._tokenizer, self._chat, self._tools = tokenizer, chat, tools
    self._turns: dict[tuple[str, ...], _Turn] = {}  # keyed by the tools and the reply's roles

  def check(self, roles: Sequence[str]) -> None:
    """Checks that messages of each of these roles can reply to a turn.

    Raises:
      ConfigError: The chat template cannot render such a message after a turn of the assistant.
    """
    for role in roles:
      self.ids([{"role": role, "content": "0", "name": "tool"}], -1)

  def hides_tools(self) -> bool:
    """Whether there are tools and the chat template ignores them."""
    if not self._chat or not self._tools:
      return False
    asked = [{"role": "user", "content": "?"}]
    shown = self._tokenizer.render(asked, tools=[*self._tools])
    return shown == self._tokenizer.render(asked)

  def ids(self, messages: Sequence[Message], last_id: int, tools: Tools | None = None) -> list[int]:
    """The tokens that follow a turn of the policy.

    Args:
      messages: The messages that reply to the turn, at least one.
      last_id: The last token of the turn. If it does not end the turn, the reply's tokens do.
      tools: The functions of this conversation. None means the functions of all conversations.

    Returns:
      The token ids, without characters that the vocabulary lacks.

    Raises:
      ConfigError: The chat template cannot render the messages.
    """
    if not self._chat:
      return self._encoded("".join(message["content"] for message in messages))
    stop_ids = self._tokenizer.stop_ids
    turn, text = self._after_turn(messages, self._tools if tools is None else tools)
    ids = self._encoded(text)
    # If the stand-in is a call, the text starts with its closing brackets, before the turn's end.
    # If it is a text, the text starts with the turn's end, which need not be a stop token.
    end = next((place for place, token in enumerate(ids) if token in stop_ids), None)
    if end is None and turn is not _says_text:
      raise ConfigError(
        "data.tokenizer: its chat template ends a call of a tool with none of the tokens that end"
        " a turn; add that token to eos_token_id in generation_config.json"
      )
    end = end or 0
    # If the policy drew the token that ends its turn, the reply does not repeat it.
    return ids[end + 1 :] if ids[end : end + 1] == [last_id] else ids[end:]

  def _encoded(self, text: str) -> list[int]:
    """Encodes a text without the characters that the vocabulary lacks.

    An error would end the run because of the text of a tool or a game.
    """
    try:
      return self._tokenizer.encode_batch_after([text])[0]
    except ConfigError:
      known = {character for character in set(text) if self._has(character)}
      return self._tokenizer.encode_batch_after(["".join(x for x in text if x in known)])[0]

  def _has(self, character: str) -> bool:
    """Whether the vocabulary can express a character."""
    try:
      self._tokenizer.encode_batch_after([character])
    except ConfigError:
      return False
    return True

  def _after_turn(self, messages: Sequence[Message], tools: Tools) -> tuple[_Turn, str]:
    """(the maker of the stand-in turn, the text that the template writes after this turn)."""
    roles = [message["role"] for message in messages]
    key = (json.dumps(tools), *roles)
    if key not in self._turns:
      if len(self._turns) >= _MOST_KNOWN:  # each row may have different tools
        self._turns.clear()
      self._turns[key] = self._turn_before(roles, tools)
    turn = self._turns[key]
    return turn, self._rendered(turn, messages, tools)

  def _turn_before(self, roles: Sequence[str], tools: Tools) -> _Turn:
    """Finds a stand-in turn after which the template renders all messages of these roles.

    Raises ConfigError if the template fails, or drops the turn or a message, for every stand-in.
    """
    probes = [
      {"role": role, "content": f"{_PROBE}{i}", "name": "tool"} for i, role in enumerate(roles)
    ]
    problem: ConfigError | None = None  # the error of the first stand-in that fails
    for turn in (_says_text, _calls_each, _calls_once):
      try:
        text = self._rendered(turn, probes, tools)
      except ConfigError as error:
        problem = problem or error
        continue
      # Some templates render a tool's reply only after a call.
      if text and all(probe["content"] in text for probe in probes):
        return turn
    raise problem or ConfigError(
      "data.tokenizer: its chat template leaves out what the assistant said before a message of the"
      f" role {' and '.join(dict.fromkeys(roles))}, or this message, so no environment can answer"
      " with it"
    )

  def _rendered(self, turn: _Turn, messages: Sequence[Message], tools: Tools) -> str:
    """The text after the mark in the stand-in turn. "" if the template drops the mark."""
    called = iter(range(len(messages)))
    given = [
      {"name": "tool", **one, "tool_call_id": call_id(0 if turn is _calls_once else next(called))}
      if one["role"] == "tool"
      else one
      for one in messages
    ]
    text = self._tokenizer.render(
      [{"role": "user", "content": "?"}, turn(given), *given], tools=[*tools] or None
    )
    _, found, after = text.rpartition(_MARK)
    return after if found else ""


def _says_text(messages: Sequence[Message]) -> Message:
  """The stand-in turn with a text, which most templates support."""
  del messages
  return {"role": "assistant", "content": _MARK}


def _calls_each(messages: Sequence[Message]) -> Message:
  """The stand-in turn with a call for each message of a tool, under the name of the tool."""
  tools = [one["name"] for one in messages if one["role"] == "tool"]
  return call_turn([(name, {_MARK: 0}) for name in tools])


def _calls_once(messages: Sequence[Message]) -> Message:
  """The stand-in turn with one call for all messages. Llama's template supports only one call."""
  return call_turn([("tool", {_MARK: 0})])


def call_turn(calls: Sequence[tuple[str, Any]]) -> dict[str, Any]:
  """A message of the assistant with calls, each (name of the function, arguments)."""
  given = [(call_id(number), *call) for number, call in enumerate(calls)]
  return {"role": "assistant", "content": "", "tool_calls": tool_calls(given)}


def tool_calls(calls: Sequence[tuple[str, str, Any]]) -> list[dict[str, Any]]:
  """The value of `tool_calls` in a message, for calls (id, name of the function, arguments)."""
  return [
    {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    for id, name, arguments in calls
  ]


def call_id(number: int) -> str:
  """The id of call `number`."""
  return f"call{number:05}"  # Mistral's templates require nine letters and digits
