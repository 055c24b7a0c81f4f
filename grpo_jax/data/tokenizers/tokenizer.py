"""Tokenizers encode texts to token ids and decode token ids to texts.

`characters` makes a tokenizer with one id per character. `load` reads Hugging Face's
tokenizer.json, sentencepiece's tokenizer.model, or the tokenizer in a GGUF file.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import pathlib
from typing import Any, Protocol

from grpo_jax.data.tokenizers import (
  character_files,
  chat,
  gguf_tokenizer,
  huggingface_codec,
  sentencepiece_codec,
  special_tokens,
  tokenizer_files,
)
from grpo_jax.data.tokenizers.special_tokens import SpecialToken
from grpo_jax.gguf_file import is_gguf
from grpo_jax.settings import ConfigError


class Codec(Protocol):
  """The interface of a tokenizer.json or a tokenizer.model that `Tokenizer` uses.

  Attributes:
    vocab_size: The highest id + 1.
    special_tokens: The special tokens that the file itself names, keyed by role, such as
      "eos_token".
    prefix_ids: The ids that the file itself puts before a text.
    longest_token: The number of characters in the longest token.
    special_texts: The texts of the tokens that `decode` skips, keyed by id.
  """

  vocab_size: int
  longest_token: int
  special_texts: Mapping[int, str]
  special_tokens: Mapping[str, SpecialToken]
  prefix_ids: tuple[int, ...]

  def token_to_id(self, token: str) -> int | None:
    """The id of a token, or None if it is not in the vocabulary."""

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Encodes texts that stand alone."""

  def encode_batch_after(self, texts: Sequence[str]) -> list[list[int]]:
    """Encodes texts that follow other texts."""

  def decode(self, ids: Sequence[int]) -> str:
    """The text that these tokens append to a text, without special tokens."""


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """A tokenizer with its special tokens and its chat template.

  Encoding turns special tokens in a text into their ids and adds no other special tokens.

  Attributes:
    vocab_size: The highest id that a text may have + 1.
    stop_ids: The ids of the tokens that end a text, possibly none. The warm start writes the first
      one after a solution.
    pad_id: The id of the padding token.
    prefix_ids: The ids to put before a prompt without a chat template, such as the id of <s>. Empty
      if the tokenizer's files name none.
    special: The texts of the special tokens, keyed by their names in chat templates, such as
      {"eos_token": "</s>"}.
    files: Names and contents of the files that `save` writes.
    codec: Encodes and decodes.
    chat_options: Variables of the chat template in addition to the conversation.
  """

  vocab_size: int
  stop_ids: tuple[int, ...]
  pad_id: int
  prefix_ids: tuple[int, ...]
  special: Mapping[str, str]
  files: Mapping[str, bytes] = dataclasses.field(repr=False)
  codec: Codec = dataclasses.field(repr=False)
  chat_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def encode(self, text: str) -> list[int]:
    """Token ids of `text`. Raises ConfigError if the vocabulary lacks a character."""
    return self.encode_batch([text])[0]

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text. Raises ConfigError if the vocabulary lacks a character."""
    return self._checked(texts, self.codec.encode_batch(texts))

  def encode_batch_after(self, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of texts that follow another text, as a completion follows a prompt.

    Some tokenizers, such as sentencepiece's, put a space before a text. This method does not.
    Raises ConfigError if the vocabulary lacks a character.
    """
    return self._checked(texts, self.codec.encode_batch_after(texts))

  def decode(self, ids: Sequence[int], shown: Mapping[int, str] | None = None) -> str:
    """Decodes a completion, which follows another text.

    Leading spaces are kept, so that the prompt plus the decoded completion is the whole text.
    Special tokens and ids outside the vocabulary are skipped.

    Args:
      ids: The token ids.
      shown: The texts of special tokens that are not skipped, keyed by id.
    """
    if not shown:
      return self.codec.decode(ids)
    parts, start = list[str](), 0  # `start` is the place after the last token in `shown`
    for place in [*(i for i, token in enumerate(ids) if token in shown), len(ids)]:
      parts.append(self.codec.decode(ids[start:place]) if place > start else "")
      parts.append(shown[ids[place]] if place < len(ids) else "")
      start = place + 1
    return "".join(parts)

  def skipped(self, texts: Sequence[str]) -> dict[int, str]:
    """The special tokens among `texts`, which `decode` skips, keyed by id."""
    ids = {text: self.codec.token_to_id(text) for text in texts}
    return {i: text for text, i in ids.items() if i is not None and not self.codec.decode([i])}

  def render(
    self,
    messages: chat.Messages,
    generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
  ) -> str:
    """Renders a conversation with the chat template as text for `encode`.

    Args:
      messages: A list of {"role": ..., "content": ...}.
      generation_prompt: Whether the text ends with the header of the assistant's next message.
      tools: The functions that the assistant may call, as JSON schemas, or None.
      options: Variables of the template that extend or override `chat_options`.

    Raises:
      ConfigError: There is no chat template, it fails or violates the sandbox, or `messages` is not
        a conversation.
    """
    return self.render_batch([messages], generation_prompt, tools, options)[0]

  def render_batch(
    self,
    conversations: Sequence[chat.Messages],
    generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
  ) -> list[str]:
    """Renders each conversation as text: see `render`."""
    variables = {**self.special, **self.chat_options, **(options or {})}
    return self._template.render(conversations, generation_prompt, variables, tools)

  @property
  def special_texts(self) -> Mapping[int, str]:
    """The texts of the special tokens, which `decode` skips, keyed by id."""
    return self.codec.special_texts

  @property
  def longest_token(self) -> int:
    """The number of characters in the longest token."""
    return self.codec.longest_token

  @property
  def template(self) -> str:
    """The source of the chat template. Raises ConfigError if there is none."""
    return chat.find_template(self.files)[0]

  def for_model(self, vocab_size: int, model: str, key: str = "data.tokenizer") -> "Tokenizer":
    """A copy of the tokenizer for a model whose vocabulary may be smaller.

    The model may lack the ids of special tokens, such as a <|endoftext|> that another program
    added, and of parts of characters. Encoding then refuses a text with such a token.

    Args:
      vocab_size: The number of ids of the model.
      model: The name of the model in error messages.
      key: The config key of the tokenizer in error messages.

    Raises:
      ConfigError: The model lacks the id of a token that ends or begins a text, or of an ordinary
        token.
    """
    beyond = range(vocab_size, self.codec.vocab_size)
    needed = any(i in beyond for i in (*self.stop_ids, *self.prefix_ids))
    # The decoder skips special tokens, and turns a part of a character into U+FFFD.
    if needed or any(self.codec.decode([i]).strip("\ufffd") for i in beyond):
      raise ConfigError(
        f"{key}: a tokenizer of {self.codec.vocab_size} ids does not fit {model}, which has"
        f" {vocab_size}"
      )
    pad_id = self.pad_id
    if pad_id in beyond:  # any id can pad, because padding is masked
      pad_id = self.stop_ids[0] if self.stop_ids else 0
    size = min(vocab_size, self.codec.vocab_size)
    return dataclasses.replace(self, vocab_size=size, pad_id=pad_id)

  def _checked(self, texts: Sequence[str], rows: list[list[int]]) -> list[list[int]]:
    """Returns `rows`, the ids of `texts`. Raises ConfigError if an id is not below `vocab_size`."""
    for text, ids in zip(texts, rows, strict=True):
      if max(ids, default=0) < self.vocab_size:
        continue
      for character in sorted(set(text)):
        if max(self.codec.encode_batch([character])[0], default=0) >= self.vocab_size:
          raise ConfigError(
            f"data.tokenizer: the character {character!r} is not in the vocabulary of the model"
          )
      raise ConfigError(
        f"data.tokenizer: a token of {text[:80]!r} is not in the vocabulary of the model"
      )
    return rows

  @functools.cached_property
  def _template(self) -> chat.Template:
    source, file = chat.find_template(self.files)
    return chat.Template(source, file)

  def save(self, folder: str | pathlib.Path) -> None:
    """Writes the files that `load` and `transformers.AutoTokenizer` need into a folder.

    The files that `load` read are written unchanged.
    """
    for name, content in self.files.items():
      file = pathlib.Path(folder) / name
      file.parent.mkdir(parents=True, exist_ok=True)
      file.write_bytes(content)


def characters(alphabet: str) -> Tokenizer:
  """Makes a tokenizer with one id per character.

  Id 0 is `<pad>`, and id 1 is `<eos>`. The distinct characters of the alphabet follow in order.
  """
  alphabet = "".join(dict.fromkeys(alphabet))
  files = character_files.make(alphabet)
  codec = huggingface_codec.from_files(files, model_type=None)
  return _tokenizer(codec, files).for_model(2 + len(alphabet), "the alphabet")


def load(path: str | pathlib.Path, key: str = "data.tokenizer") -> Tokenizer:
  """Loads a tokenizer.

  Args:
    path: A .json file, a .model file, a .gguf file, or a folder with tokenizer.json or
      tokenizer.model. If the folder has both, tokenizer.json is used.
    key: The config key of `path`, for error messages.

  Raises:
    ConfigError: There is no such file, or it cannot be read.
  """
  main_file = tokenizer_files.find(path, key)
  codec: Codec
  try:
    if is_gguf(main_file):
      files = gguf_tokenizer.make_files(main_file)
      return _tokenizer(huggingface_codec.from_files(files, model_type=None), files)
    files = tokenizer_files.read(main_file)
    if main_file.suffix == ".model":
      codec = sentencepiece_codec.from_files(files)
    else:
      codec = huggingface_codec.from_files(
        files, tokenizer_files.model_type(main_file.with_name("config.json"))
      )
    return _tokenizer(codec, files)
  except ConfigError:
    raise
  except Exception as error:  # both libraries raise Exception or RuntimeError for a damaged file
    raise ConfigError(
      f"{key}: {main_file} cannot be read as a tokenizer{main_file.suffix}: {error}"
    ) from error


def _tokenizer(codec: Codec, files: Mapping[str, bytes]) -> Tokenizer:
  """Makes a tokenizer. The JSON files in `files` take precedence over the codec's special tokens.

  If no file names a padding token, padding uses the first stop id, or id 0 if there is none.
  """
  of_codec = codec.special_tokens
  special = {role: token.text for role, token in of_codec.items()} | special_tokens.texts(files)
  stop_ids, pad_id = special_tokens.stop_and_pad_ids(files, codec.token_to_id)
  if not stop_ids and "eos_token" in of_codec:
    stop_ids = (of_codec["eos_token"].id,)
  if pad_id is None and "pad_token" in of_codec:
    pad_id = of_codec["pad_token"].id
  if pad_id is None:
    pad_id = stop_ids[0] if stop_ids else 0
  prefix_ids = special_tokens.prefix_ids(
    files, codec.token_to_id, special.get("bos_token", ""), codec.prefix_ids
  )
  return Tokenizer(codec.vocab_size, stop_ids, pad_id, prefix_ids, special, files, codec)
