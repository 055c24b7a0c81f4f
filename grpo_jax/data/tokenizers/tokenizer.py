"""Texts to token ids and back.

There are four kinds of tokenizers: one id per character (`characters`), Hugging Face's
tokenizer.json, sentencepiece's tokenizer.model, and those in GGUF files (`load`).
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
  """The methods of a tokenizer.json or a tokenizer.model that `Tokenizer` needs.

  Attributes:
    vocab_size: The highest id + 1.
    special_tokens: The special tokens that the file itself names, by their roles, such as
      "eos_token".
    prefix_ids: The ids that the file itself puts before a text.
    longest_token: How many characters the longest token has.
    special_texts: The texts of the tokens that `decode` skips, by their ids.
  """

  vocab_size: int
  longest_token: int
  special_texts: Mapping[int, str]
  special_tokens: Mapping[str, SpecialToken]
  prefix_ids: tuple[int, ...]

  def token_to_id(self, token: str) -> int | None:
    """The id of a token, or None if it is not in the vocabulary."""

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of texts."""

  def encode_batch_after(self, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of texts that follow other texts."""

  def decode(self, ids: Sequence[int]) -> str:
    """The text that the tokens add to the text before them."""


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """A tokenizer with its special tokens and its chat template.

  Encoding turns special tokens in a text into their ids and adds no others.

  Attributes:
    vocab_size: The highest id that a text may have + 1.
    stop_ids: The ids of the tokens that end a text, possibly none. The warm start writes the first
      one after a solution.
    pad_id: The id of the padding token.
    prefix_ids: The ids that belong before a plain prompt, such as that of <s>. Empty if the
      tokenizer's files do not want any.
    special: The texts of the special tokens by the names that chat templates use, such as
      {"eos_token": "</s>"}.
    files: Names and contents of the files that `save` writes.
    codec: Encodes and decodes.
    chat_options: Further variables of the chat template, beside the conversation.
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
    """Token ids of `text`.

    Raises:
      ConfigError: The vocabulary cannot express a character of `text`.
    """
    return self.encode_batch([text])[0]

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text.

    Raises:
      ConfigError: The vocabulary cannot express a character.
    """
    return self._checked(texts, self.codec.encode_batch(texts))

  def encode_batch_after(self, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text, for texts that follow another text, as a completion does.

    Some tokenizers, sentencepiece's among them, put a space before a text. This method leaves it
    out.

    Raises:
      ConfigError: The vocabulary cannot express a character.
    """
    return self._checked(texts, self.codec.encode_batch_after(texts))

  def decode(self, ids: Sequence[int], shown: Mapping[int, str] | None = None) -> str:
    """The text of a completion, which follows another text.

    All spaces at its start are kept, so that a prompt followed by the decoded completion is the
    text of both. Special tokens and ids outside the vocabulary are skipped.

    Args:
      ids: The tokens.
      shown: The texts of special tokens that are not skipped, by their ids.
    """
    if not shown:
      return self.codec.decode(ids)
    parts, start = list[str](), 0
    for place in [*(i for i, token in enumerate(ids) if token in shown), len(ids)]:
      parts.append(self.codec.decode(ids[start:place]) if place > start else "")
      parts.append(shown[ids[place]] if place < len(ids) else "")
      start = place + 1
    return "".join(parts)

  def skipped(self, texts: Sequence[str]) -> dict[int, str]:
    """The texts that are special tokens, which `decode` skips, by their ids."""
    ids = {text: self.codec.token_to_id(text) for text in texts}
    return {i: text for text, i in ids.items() if i is not None and not self.codec.decode([i])}

  def render(
    self,
    messages: chat.Messages,
    generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
  ) -> str:
    """A conversation as text for `encode`, by the chat template.

    Args:
      messages: A list of {"role": ..., "content": ...}.
      generation_prompt: Whether the text ends with the marks that open the assistant's answer.
      tools: The functions that the assistant may call, as JSON schemas, or None.
      options: Variables of the template beside `chat_options`, or in their place.

    Raises:
      ConfigError: There is no chat template, it fails, or it tries something that the sandbox
        forbids; or `messages` is not a conversation.
    """
    return self.render_batch([messages], generation_prompt, tools, options)[0]

  def render_batch(
    self,
    conversations: Sequence[chat.Messages],
    generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
  ) -> list[str]:
    """Each conversation as text: see `render`."""
    given = {**self.special, **self.chat_options, **(options or {})}
    return self._template.render(conversations, generation_prompt, given, tools)

  @property
  def special_texts(self) -> Mapping[int, str]:
    """The texts of the special tokens, which `decode` skips, by their ids."""
    return self.codec.special_texts

  @property
  def longest_token(self) -> int:
    """How many characters the longest token has."""
    return self.codec.longest_token

  @property
  def template(self) -> str:
    """The source of the chat template. Raises ConfigError if there is none."""
    return chat.find_template(self.files)[0]

  def for_model(self, vocab_size: int, model: str, key: str = "data.tokenizer") -> "Tokenizer":
    """The same tokenizer for a model that may have fewer ids.

    Ids beyond those of the model are allowed for special tokens and for parts of characters, such
    as a <|endoftext|> that another program added. A text that has such a token is refused.

    Args:
      vocab_size: How many ids the model has.
      model: The name of the model in errors.
      key: The config key that chose the tokenizer, for errors.

    Raises:
      ConfigError: The model lacks the id of a token that ends or begins a text, or of an ordinary
        token.
    """
    beyond = range(vocab_size, self.codec.vocab_size)
    needed = any(i in beyond for i in (*self.stop_ids, *self.prefix_ids))
    # The decoder leaves special tokens out and makes U+FFFD of a part of a character.
    if needed or any(self.codec.decode([i]).strip("\ufffd") for i in beyond):
      raise ConfigError(
        f"{key}: a tokenizer of {self.codec.vocab_size} ids does not fit {model}, which has"
        f" {vocab_size}"
      )
    pad_id = self.pad_id
    if pad_id in beyond:
      pad_id = self.stop_ids[0] if self.stop_ids else 0
    size = min(vocab_size, self.codec.vocab_size)
    return dataclasses.replace(self, vocab_size=size, pad_id=pad_id)

  def _checked(self, texts: Sequence[str], rows: list[list[int]]) -> list[list[int]]:
    """The rows of ids, all below `vocab_size`."""
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
    """Writes the files that `load` and `transformers.AutoTokenizer` need.

    Files that were loaded are written unchanged.
    """
    for name, content in self.files.items():
      file = pathlib.Path(folder) / name
      file.parent.mkdir(parents=True, exist_ok=True)
      file.write_bytes(content)


def characters(alphabet: str) -> Tokenizer:
  """A tokenizer with one id per character.

  Id 0 is `<pad>`, id 1 is `<eos>`. The characters of the alphabet follow in their order, a repeated
  character once.
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
    key: The config key that holds `path`, for error messages.

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
  """A tokenizer whose special tokens are those of the JSON files, or else those of the codec."""
  own_tokens = codec.special_tokens
  special = {role: token.text for role, token in own_tokens.items()} | special_tokens.texts(files)
  stop_ids, pad_id = special_tokens.stop_and_pad_ids(files, codec.token_to_id)
  if not stop_ids and "eos_token" in own_tokens:
    stop_ids = (own_tokens["eos_token"].id,)
  if pad_id is None and "pad_token" in own_tokens:
    pad_id = own_tokens["pad_token"].id
  if pad_id is None:
    pad_id = stop_ids[0] if stop_ids else 0
  prefix_ids = special_tokens.prefix_ids(
    files, codec.token_to_id, special.get("bos_token", ""), codec.prefix_ids
  )
  return Tokenizer(codec.vocab_size, stop_ids, pad_id, prefix_ids, special, files, codec)
