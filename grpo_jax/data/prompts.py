"""The prompts of a split: which examples fit, and their texts and tokens when batches need them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from grpo_jax.data import chat
from grpo_jax.data.prompt_template import fill
from grpo_jax.data.tokenizer import Tokenizer
from grpo_jax.settings import ConfigError

if TYPE_CHECKING:
  from grpo_jax.config import Data

T = TypeVar("T")
_AT_ONCE = 4096  # prompts whose token ids are in memory while they are counted


class Processes(Protocol):
  """How the processes of a run share work on the host. `parallel.hosts.Hosts` is one."""

  def own_rows(self, count: int) -> slice:
    """Which of `count` rows this process works on."""

  def join_rows(self, tree: Any) -> Any:
    """The rows of all processes, one after the other, as numpy arrays on every process."""

  def on_each(self, act: Callable[[], T]) -> T:
    """act() of this process. If it fails on one process, all of them raise."""


class OneProcess:
  """`Processes` of a run that has one."""

  def own_rows(self, count: int) -> slice:
    """All of them."""
    return slice(0, count)

  def join_rows(self, tree: Any) -> Any:
    """The tree as it is."""
    return tree

  def on_each(self, act: Callable[[], T]) -> T:
    """act()."""
    return act()


ONE_PROCESS = OneProcess()


@dataclasses.dataclass(frozen=True)
class Prompt:
  """A prompt.

  Attributes:
    example: What it was made from.
    text: Its text. With data.chat: as the chat template rendered it.
    ids: Its token ids.
    messages: With data.chat: the conversation. Else None.
  """

  example: Mapping[str, Any]
  text: str
  ids: list[int]
  messages: chat.Messages | None


class Prompts:
  """The prompts of a split. They are formatted and tokenized each time that a batch needs them.

  Examples whose prompt has more than data.max_prompt_tokens tokens are left out.

  Without data.chat, a prompt is the text of data.prompt with its fields filled in, after the
  tokenizer's prefix. With data.chat, it is a conversation, rendered up to where the assistant's
  answer begins. data.prompt then gives the user's message, or names the one field that holds the
  messages.

  Attributes:
    dropped: How many examples are left out.
    max_tokens: The longest prompt that is kept (S).
    pad_id: The id of the padding token.
  """

  def __init__(
    self,
    split: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    data: "Data",
    processes: Processes = ONE_PROCESS,
  ) -> None:
    """Counts the tokens of every prompt. Each process tokenizes its part of them.

    Raises:
      ConfigError: data.prompt does not fit the examples, or no prompt is short enough.
    """
    self._split, self._tokenizer, self._data = split, tokenizer, data
    own = range(len(split))[processes.own_rows(len(split))]
    lengths = processes.join_rows(processes.on_each(lambda: self._count(own)))
    self._kept = np.flatnonzero(lengths <= data.max_prompt_tokens)
    if not len(self._kept):
      raise ConfigError(
        f"data.max_prompt_tokens={data.max_prompt_tokens} drops all {len(split)} prompts;"
        f" the shortest one has {min(lengths, default=0)} tokens"
      )
    self.dropped = len(split) - len(self._kept)
    self.max_tokens = data.max_prompt_tokens
    self.pad_id = tokenizer.pad_id

  def __len__(self) -> int:
    return len(self._kept)

  def example(self, index: int) -> Mapping[str, Any]:
    """The example that prompt `index` is made from."""
    return self._split[int(self._kept[index])]

  def make(self, indices: Iterable[int]) -> list[Prompt]:
    """The prompts at `indices`, of those that are kept."""
    return self._make([self.example(i) for i in indices])

  def _count(self, own: range) -> np.ndarray:
    """The number of tokens of each prompt, int32."""
    lengths = [
      len(prompt.ids)
      for start in range(0, len(own), _AT_ONCE)
      for prompt in self._make([self._split[i] for i in own[start : start + _AT_ONCE]])
    ]
    return np.array(lengths, np.int32)

  def _make(self, examples: list[Mapping[str, Any]]) -> list[Prompt]:
    data, tokenizer = self._data, self._tokenizer
    messages: list[chat.Messages] | list[None] = [None] * len(examples)
    if data.chat:
      messages = [_conversation(data, example) for example in examples]
      texts = tokenizer.render_batch(messages)
      prefix_ids: tuple[int, ...] = ()  # a chat template writes <s> or the like itself
    else:
      texts = [fill(data.prompt, example) for example in examples]
      prefix_ids = tokenizer.prefix_ids
    text_ids = tokenizer.encode_batch(texts)
    if not all(text_ids):
      raise ConfigError(
        f"data.prompt={data.prompt!r} makes a prompt without tokens; it must hold some text"
      )
    return [
      Prompt(example, text, [*prefix_ids, *ids], conversation)
      for example, text, ids, conversation in zip(examples, texts, text_ids, messages)
    ]


def _conversation(data: "Data", example: Mapping[str, Any]) -> chat.Messages:
  """The conversation that the model is to continue.

  It begins with a system message of data.system, unless it has a system message of its own.
  """
  field = data.prompt[1:-1]
  prompt_is_one_field = data.prompt == f"{{{field}}}"
  if prompt_is_one_field and isinstance(example.get(field), list):
    messages = example[field]
  else:
    messages = [{"role": "user", "content": fill(data.prompt, example)}]
  chat.check(messages, f"data.prompt={data.prompt!r}")
  if data.system and messages[0]["role"] != "system":
    return [{"role": "system", "content": data.system}, *messages]
  return messages
