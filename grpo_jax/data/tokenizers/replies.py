"""The tokens that follow a turn of the policy: the messages of others, and where it goes on.

The tokens of the policy are never made again from their text. Another text may have the same
tokens, and a template may write an earlier turn in another way than the policy did (Qwen3's drops
its thinking). So the policy's own tokens stay as they were drawn, thinking included, and only what
follows them is rendered: after a turn of the assistant that stands for the real one.
"""

from collections.abc import Callable, Mapping, Sequence
import json
from typing import Any

from grpo_jax.data.tokenizers.tokenizer import Tokenizer
from grpo_jax.settings import ConfigError

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]  # their schemas

_MARK = "Zq7Turn"  # what the assistant said, in a conversation that stands for the real one
_SAID = "Zq7Said"  # what answers it there
_MOST_KNOWN = 1000  # turns that are kept
_Turn = Callable[[Sequence[Message]], Message]  # makes the turn that stands for the real one


class Replies:
  """Makes the tokens of replies, by a chat template or as plain text."""

  def __init__(self, tokenizer: Tokenizer, chat: bool, tools: Tools = ()) -> None:
    """Takes what renders them.

    Args:
      tokenizer: Has the chat template.
      chat: Whether it is used. Otherwise a reply is the contents of its messages, one after the
        other.
      tools: The schemas of the functions that the assistant may call.
    """
    self._tokenizer, self._chat, self._tools = tokenizer, chat, tools
    self._turns: dict[tuple[str, ...], _Turn] = {}  # by the tools and the roles of what answers

  def check(self, roles: Sequence[str]) -> None:
    """Checks that messages of some roles can answer a turn.

    Raises:
      ConfigError: The chat template cannot render them after a turn of the assistant.
    """
    for role in roles:
      self.ids([{"role": role, "content": "0", "name": "tool"}], -1)

  def hides_tools(self) -> bool:
    """Whether there are tools that the chat template does not show to the model."""
    if not self._chat or not self._tools:
      return False
    asked = [{"role": "user", "content": "?"}]
    shown = self._tokenizer.render(asked, tools=[*self._tools])
    return shown == self._tokenizer.render(asked)

  def ids(self, messages: Sequence[Message], last_id: int, tools: Tools | None = None) -> list[int]:
    """The tokens that follow a turn.

    Args:
      messages: The messages that answer it, at least one.
      last_id: The last token of the turn. The reply ends the turn where this token does not.
      tools: The functions of this conversation. None means those of all.

    Returns:
      The token ids. Characters that the vocabulary lacks are left out.

    Raises:
      ConfigError: The chat template cannot render the messages.
    """
    if not self._chat:
      return self._encoded("".join(message["content"] for message in messages))
    stop_ids = self._tokenizer.stop_ids
    turn, text = self._after_turn(messages, self._tools if tools is None else tools)
    ids = self._encoded(text)
    # A call that stands for the turn has closing brackets before the turn's end.
    end = next((place for place, token in enumerate(ids) if token in stop_ids), None)
    if end is None and turn is not _said:
      raise ConfigError(
        "data.tokenizer: its chat template ends a call of a tool with none of the tokens that end"
        " a turn; add that token to eos_token_id in generation_config.json"
      )
    end = end or 0
    return ids[end + 1 :] if ids[end] == last_id else ids[end:]

  def _encoded(self, text: str) -> list[int]:
    """The tokens of a text, without the characters that the vocabulary lacks.

    What a tool or a game says must not end a run.
    """
    try:
      return self._tokenizer.encode_batch_after([text])[0]
    except ConfigError:
      known = {character for character in set(text) if self._has(character)}
      return self._tokenizer.encode_batch_after(["".join(x for x in text if x in known)])[0]

  def _has(self, character: str) -> bool:
    try:
      self._tokenizer.encode_batch_after([character])
    except ConfigError:
      return False
    return True

  def _after_turn(self, messages: Sequence[Message], tools: Tools) -> tuple[_Turn, str]:
    """The turn that stands for the assistant's, and what the template writes after it."""
    roles = [message["role"] for message in messages]
    key = (json.dumps(tools), *roles)
    if key not in self._turns:
      if len(self._turns) >= _MOST_KNOWN:  # each row may have tools of its own
        self._turns.clear()
      self._turns[key] = self._turn_before(roles, tools)
    turn = self._turns[key]
    return turn, self._rendered(turn, messages, tools)

  def _turn_before(self, roles: Sequence[str], tools: Tools) -> _Turn:
    """The turn that can stand for the real one before messages of some roles."""
    probes = [
      {"role": role, "content": f"{_SAID}{i}", "name": "tool"} for i, role in enumerate(roles)
    ]
    problem: ConfigError | None = None
    for turn in (_said, _calls_each, _calls_once):
      try:
        text = self._rendered(turn, probes, tools)
      except ConfigError as error:
        problem = problem or error
        continue
      # Some templates write a tool's answer only after a call.
      if text and all(probe["content"] in text for probe in probes):
        return turn
    raise problem or ConfigError(
      "data.tokenizer: its chat template leaves out what the assistant said before a message of the"
      f" role {' and '.join(dict.fromkeys(roles))}, or this message, so no environment can answer"
      " with it"
    )

  def _rendered(self, turn: _Turn, messages: Sequence[Message], tools: Tools) -> str:
    """The text that follows a turn that stands for the real one, or ""."""
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


def _said(messages: Sequence[Message]) -> Message:
  """A text, which the templates of most families want."""
  del messages
  return {"role": "assistant", "content": _MARK}


def _calls_each(messages: Sequence[Message]) -> Message:
  """A call of each tool that answers. Templates write the names that the calls have."""
  tools = [one["name"] for one in messages if one["role"] == "tool"]
  return call_turn([(name, {_MARK: 0}) for name in tools])


def _calls_once(messages: Sequence[Message]) -> Message:
  """One call, however many tools answer: Llama's template takes no more."""
  return call_turn([("tool", {_MARK: 0})])


def call_turn(calls: Sequence[tuple[str, Any]]) -> dict[str, Any]:
  """A turn of the assistant that calls functions: their names and arguments."""
  given = [(call_id(number), *call) for number, call in enumerate(calls)]
  return {"role": "assistant", "content": "", "tool_calls": tool_calls(given)}


def tool_calls(calls: Sequence[tuple[str, str, Any]]) -> list[dict[str, Any]]:
  """Calls as a message has them: their ids, the names of functions, and arguments."""
  return [
    {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    for id, name, arguments in calls
  ]


def call_id(number: int) -> str:
  """The id of a call by its number."""
  return f"call{number:05}"  # Mistral's templates want nine letters and digits
