"""Encodes and decodes texts with a Hugging Face tokenizer (tokenizer.json)."""

from collections.abc import Iterator, Mapping, Sequence
import itertools
import json
import re
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers

from grpo_jax.data.tokenizers.special_tokens import SpecialToken
from grpo_jax.data.tokenizers.tokenizer_files import read_json
from grpo_jax.settings import ConfigError

_AT_ONCE = 1_000_000  # the most characters that are encoded together, except for one longer text


def from_files(files: Mapping[str, bytes], model_type: str | None) -> "HuggingFaceCodec":
  """Makes the codec of tokenizer.json.

  Args:
    files: The contents of tokenizer.json and tokenizer_config.json, keyed by file name.
    model_type: The `model_type` in the config.json of the model, None without a config.json.
  """
  parts = json.loads(files["tokenizer.json"])
  config = read_json(files, "tokenizer_config.json")
  if _is_llama_tokenizer(parts, config, model_type):
    parts |= _llama_parts(config)
  return HuggingFaceCodec(parts)


class HuggingFaceCodec:
  """Encodes and decodes with the `tokenizers` library.

  Attributes:
    vocab_size: The highest id + 1.
    special_tokens: Empty, because tokenizer.json does not say which token ends a text.
    prefix_ids: The ids that the tokenizer's post-processor puts before a text.
    longest_token: The number of characters in the longest token.
    special_texts: The texts of the tokens that `decode` skips, keyed by id.
  """

  def __init__(self, parts: Mapping[str, Any]) -> None:
    """Creates a codec from the JSON value of tokenizer.json."""
    self._engine = _make_engine(parts)
    # A second engine is for texts that continue other texts. Some tokenizers add a space before
    # each text or remove one, which would change a continuation.
    parts_of_continuations = dict(parts)
    for name in ("normalizer", "pre_tokenizer", "decoder"):
      parts_of_continuations[name] = _without_space(parts.get(name))
    self._engine_of_continuations = self._engine
    if parts_of_continuations != parts:
      self._engine_of_continuations = _make_engine(parts_of_continuations)
    vocabulary = self._engine.get_vocab(with_added_tokens=True)
    self.vocab_size = max(vocabulary.values()) + 1
    self.longest_token = max(map(len, vocabulary))  # in a byte-level BPE, in bytes: an upper bound
    self.special_tokens: Mapping[str, SpecialToken] = {}
    self.prefix_ids = _post_processor_prefix(self._engine)
    # The symbols that texts are limited to. None if the model can express every text.
    self._symbols = _needed_symbols(parts["model"])
    self._expressible: set[str] = set()  # characters that passed _check_characters
    added_tokens = self._engine.get_added_tokens_decoder()
    texts = [token.content for token in added_tokens.values()]
    self._added_token = re.compile("|".join(map(re.escape, texts)))
    special = {i: token.content for i, token in added_tokens.items() if token.special}
    self.special_texts: Mapping[int, str] = special

  def token_to_id(self, token: str) -> int | None:
    """The id of a token, or None if it is not in the vocabulary."""
    return self._engine.token_to_id(token)

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Encodes texts that stand alone. Some tokenizers put a space before each text."""
    return self._encode_batch(self._engine, texts)

  def encode_batch_after(self, texts: Sequence[str]) -> list[list[int]]:
    """Encodes texts that follow other texts, without adding a space before them."""
    return self._encode_batch(self._engine_of_continuations, texts)

  def decode(self, ids: Sequence[int]) -> str:
    """The text that these tokens append to a text, without special tokens."""
    ids = [int(i) for i in ids]
    return self._engine_of_continuations.decode(ids, skip_special_tokens=True)

  def _encode_batch(self, engine: tokenizers.Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Encodes texts. Raises ConfigError for a character that the vocabulary lacks."""
    if self._symbols is not None:
      self._check_characters(texts)
    try:
      return [
        encoding.ids
        for batch in _in_batches(texts)
        for encoding in engine.encode_batch(batch, add_special_tokens=False)
      ]
    except Exception:  # for an unknown character, the library raises Exception itself
      characters = sorted(set("".join(texts)))
      unknown = next((c for c in characters if not _can_encode(engine, c)), None)
      if unknown is None:
        raise
      raise _unknown(unknown) from None

  def _check_characters(self, texts: Sequence[str]) -> None:
    """Raises ConfigError for a character that the model would silently drop.

    Only for models with `_symbols`. A character that has passed is not checked again. Added tokens
    are exempt, because they are found before the model splits the rest of a text.
    """
    if self._expressible.issuperset("".join(texts)):
      return
    other_texts = "".join(self._added_token.sub("", text) for text in texts)
    for character in sorted(set(other_texts) - self._expressible):
      engine = self._engine_of_continuations  # it neither adds nor removes a space
      normalizer, pre_tokenizer = engine.normalizer, engine.pre_tokenizer
      text = normalizer.normalize_str(character) if normalizer else character
      # A pre-tokenizer may write each byte of a character as a symbol of its own.
      symbols = (
        [part for part, _ in pre_tokenizer.pre_tokenize_str(text)] if pre_tokenizer else [text]
      )
      if not self._symbols.issuperset("".join(symbols)):
        raise _unknown(character)
      self._expressible.add(character)


def _in_batches(texts: Sequence[str]) -> Iterator[list[str]]:
  """Yields the texts in batches of at most `_AT_ONCE` characters, in order.

  The batches limit memory, because the library needs about 100 bytes for each token of a batch.
  """
  batch, characters = list[str](), 0
  for text in texts:
    if batch and characters + len(text) > _AT_ONCE:
      yield batch
      batch, characters = [], 0
    batch.append(text)
    characters += len(text)
  if batch:
    yield batch


def _make_engine(parts: Mapping[str, Any]) -> tokenizers.Tokenizer:
  engine = tokenizers.Tokenizer.from_str(json.dumps(parts))
  # A file may switch these on. In this package, the loader truncates and pads.
  engine.no_truncation()
  engine.no_padding()
  return engine


def _is_llama_tokenizer(
  parts: Mapping[str, Any], config: Mapping[str, Any], model_type: str | None
) -> bool:
  """Whether `transformers` 5 loads the files as its LlamaTokenizer.

  It does so only for tokenizers made by sentencepiece, not for the byte-level tokenizer of Llama 3.
  """
  class_name = str(config.get("tokenizer_class")).removesuffix("Fast")
  if class_name != "LlamaTokenizer" or model_type not in (None, "llama"):
    return False
  works_on_bytes = any(
    '"ByteLevel"' in json.dumps(parts.get(name)) for name in ("pre_tokenizer", "decoder")
  )
  return not works_on_bytes


def _llama_parts(config: Mapping[str, Any]) -> dict[str, Any]:
  """The normalizer and the pre-tokenizer that LlamaTokenizer uses instead of tokenizer.json's.

  "first" puts a space before a text, and "always" also before the text after a special token.
  """
  if config.get("add_prefix_space") is False:
    prepend_scheme = "never"
  elif config.get("legacy"):
    prepend_scheme = "always"
  else:
    prepend_scheme = "first"
  pre_tokenizer = {
    "type": "Metaspace",
    "replacement": "▁",
    "prepend_scheme": prepend_scheme,
    "split": False,
  }
  return {"normalizer": None, "pre_tokenizer": pre_tokenizer}


def _without_space(part: Any) -> Any:
  """Changes a part of tokenizer.json so that it neither adds nor removes a space before a text.

  Args:
    part: A normalizer, a pre-tokenizer or a decoder, or None.

  Returns:
    The changed part. None if its only purpose is that space. A sequence remains, perhaps empty.
  """
  if not part:
    return part
  kind = part["type"]
  if kind == "Sequence":
    changed = {
      name: [member for member in map(_without_space, members) if member]
      for name, members in part.items()
      if name != "type"
    }
    return part | changed
  if kind == "Prepend" or (kind == "Strip" and part.get("content") == " "):
    return None
  if kind in ("Metaspace", "ByteLevel"):
    no_space = {"prepend_scheme": "never", "add_prefix_space": False}
    return part | {name: value for name, value in no_space.items() if name in part}
  return part


def _post_processor_prefix(engine: tokenizers.Tokenizer) -> tuple[int, ...]:
  """The ids that the post-processor puts before a text. They are found by encoding "0"."""
  if engine.post_processor is None:
    return ()
  encoding = engine.encode("0")
  ids_and_masks = zip(encoding.ids, encoding.special_tokens_mask)
  return tuple(i for i, _ in itertools.takewhile(_is_special, ids_and_masks))


def _is_special(id_and_mask: tuple[int, int]) -> bool:
  return bool(id_and_mask[1])


def _needed_symbols(model: Mapping[str, Any]) -> frozenset[str] | None:
  """The symbols that the model can express, or None if it can express every text.

  A BPE drops unknown symbols, unless it has an unknown token, falls back to bytes, or has a symbol
  for every byte.
  """
  says_unknown = model.get("unk_token") is not None or model.get("byte_fallback")
  has_affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
  if model.get("type") != "BPE" or says_unknown or has_affixes:
    return None
  symbols = frozenset(token for token in model["vocab"] if len(token) == 1)
  return None if symbols.issuperset(pre_tokenizers.ByteLevel.alphabet()) else symbols


def _unknown(character: str) -> ConfigError:
  return ConfigError(f"data.tokenizer: the character {character!r} is not in the vocabulary")


def _can_encode(engine: tokenizers.Tokenizer, character: str) -> bool:
  try:
    engine.encode(character, add_special_tokens=False)
  except Exception:
    return False
  return True
