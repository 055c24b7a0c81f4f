"""What follows a turn of the policy, as tokens: the messages of others, and where it goes on.

The tokens of the policy are never made again from their text. Another text may have the same
tokens, and a template may write an earlier turn in another way than the policy did (Qwen3's drops
its thinking). So the policy's own tokens stay as they were drawn, thinking included, and only what
follows them is rendered: after a turn of the assistant that stands for the real one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_jax.data.tokenizers.tokenizer import Tokenizer
from grpo_jax.settings import ConfigError

Message = Mapping[str, Any]

_MARK = "Zq7Turn"  # what the assistant said, in a conversation that stands for the real one
_CALL_ID = "call00000"  # Mistral's templates want nine letters and digits
# The assistant's turn: a text, or, for templates that want one before a tool's answer, a call.
_TURNS: tuple[dict[str, Any], ...] = (
  {"role": "assistant", "content": _MARK},
  {
    "role": "assistant",
    "content": "",
    "tool_calls": [
      {"id": _CALL_ID, "type": "function", "function": {"name": _MARK, "arguments": {}}}
    ],
  },
)


class Replies:
  """Makes the tokens of replies, by a chat template or as plain text."""

  def __init__(
    self, tokenizer: Tokenizer, chat: bool, tools: Sequence[Mapping[str, Any]] = ()
  ) -> None:
    """Takes what renders them.

    Args:
      tokenizer: Has the chat template.
      chat: Whether it is used. Otherwise a reply is the contents of its messages, one after the
        other.
      tools: The schemas of the functions that the assistant may call.
    """
    self._tokenizer, self._chat, self._tools = tokenizer, chat, list(tools) or None

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
    return self._tokenizer.render(asked, tools=self._tools) == self._tokenizer.render(asked)

  def ids(self, messages: Sequence[Message], last_id: int) -> list[int]:
    """The tokens that follow a turn.

    Args:
      messages: What answers it, at least one message.
      last_id: The last token of the turn. The reply ends the turn where this token does not.

    Returns:
      The token ids. Characters that the vocabulary lacks are left out.

    Raises:
      ConfigError: The chat template cannot render the messages.
    """
    if not self._chat:
      return self._encoded("".join(message["content"] for message in messages))
    stop_ids = self._tokenizer.stop_ids
    ids = self._encoded(self._text_after_turn(messages))
    # A call that stands for the turn has closing brackets before the turn's end.
    end = next((place for place, token in enumerate(ids) if token in stop_ids), 0)
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

  def _text_after_turn(self, messages: Sequence[Message]) -> str:
    """What the template writes after the assistant's text."""
    given = [
      dict(one) | {"tool_call_id": _CALL_ID} if one["role"] == "tool" else one for one in messages
    ]
    problem: ConfigError | None = None
    for turn in _TURNS:
      try:
        text = self._tokenizer.render(
          [{"role": "user", "content": "?"}, turn, *given], tools=self._tools
        )
      except ConfigError as error:
        problem = problem or error
        continue
      _, found, after = text.partition(_MARK)
      if found and after:
        return after
    roles = " and ".join(dict.fromkeys(message["role"] for message in messages))
    raise problem or ConfigError(
      f"data.tokenizer: its chat template leaves out what the assistant said before a message of"
      f" the role {roles}, so no environment can answer with it"
    )
