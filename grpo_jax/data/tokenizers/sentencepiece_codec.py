"""Encodes and decodes texts with a sentencepiece model (tokenizer.model).

The model file contains only some special tokens. The JSON files in its folder contain the others.
"""

from collections.abc import Iterable, Mapping, Sequence
import itertools
import re
from typing import Any

import sentencepiece

from grpo_jax.data.tokenizers import special_tokens
from grpo_jax.data.tokenizers.special_tokens import SpecialToken
from grpo_jax.data.tokenizers.tokenizer_files import read_json

# The protobuf message normalizer_spec { add_dummy_prefix: false, remove_extra_whitespaces: false }.
# Appended to a model file, these bytes override its two values: protobuf merges a message that
# occurs twice, and the last value of a field wins.
_KEEP_SPACES = b"\x1a\x04\x18\x00\x20\x00"


def from_files(files: Mapping[str, bytes]) -> "SentencePieceCodec":
  """Makes the codec of tokenizer.model and of the JSON files in its folder."""
  config = read_json(files, "tokenizer_config.json")
  added_ids = read_json(files, "added_tokens.json")
  special_texts = special_tokens.all_texts(files)
  added_tokens: dict[int, Mapping[str, Any]] = {
    i: {"content": text, "special": text in special_texts} for text, i in added_ids.items()
  }
  for i, token in config.get("added_tokens_decoder", {}).items():
    added_tokens[int(i)] = token
  return SentencePieceCodec(
    files["tokenizer.model"],
    added_tokens,
    special_texts,
    legacy=bool(config.get("legacy")),
  )


class SentencePieceCodec:
  """Encodes and decodes with sentencepiece, and handles special tokens like `transformers`.

  A special token in a text becomes its id. sentencepiece alone would split it into pieces.

  Attributes:
    vocab_size: The highest id + 1.
    special_tokens: The special tokens of the model file, keyed by role, such as "eos_token".
    prefix_ids: Empty, because a model file does not say what a text begins with.
    longest_token: The number of characters in the longest token.
    special_texts: The texts of the tokens that `decode` skips, keyed by id.
  """

  def __init__(
    self,
    model: bytes,
    added_tokens: Mapping[int, Mapping[str, Any]],
    special_texts: Iterable[str],
    legacy: bool,
  ) -> None:
    """Creates a codec.

    Args:
      model: The contents of tokenizer.model.
      added_tokens: Tokens keyed by id, in the form of added_tokens_decoder in
        tokenizer_config.json. They extend the vocabulary of the model, or describe tokens in it.
      special_texts: The texts of special tokens, which join those that `model` and `added_tokens`
        mark as special. Texts outside the model's vocabulary are ignored.
      legacy: Whether a space is put before the text after each special token. If false, a space is
        put only before the beginning of a text.
    """
    # The first processor puts a space before a text, if the model file says so. The second adds
    # none. The third name is the one of them that encodes the text after a special token.
    self._model = sentencepiece.SentencePieceProcessor(model_proto=model)
    self._spaceless_model = sentencepiece.SentencePieceProcessor(model_proto=model + _KEEP_SPACES)
    self._model_after_special = self._model if legacy else self._spaceless_model
    self._num_pieces = self._model.get_piece_size()

    special_ids = self._control_ids()  # text -> id, of the tokens that `decode` skips
    for text in special_texts:
      piece_id = self._piece_id(text)
      if piece_id is not None:
        special_ids[text] = piece_id
    added_ids = {token["content"]: i for i, token in added_tokens.items()}  # special or not
    special_ids |= {
      token["content"]: i for i, token in added_tokens.items() if token.get("special", True)
    }
    self._ids = special_ids | added_ids  # text -> id, of the tokens at which a text is split
    # id -> what `decode` writes for such a token: nothing for a special one.
    self._decoded = {i: "" if text in special_ids else text for text, i in self._ids.items()}
    self.special_texts: Mapping[int, str] = {i: text for text, i in special_ids.items()}

    # Longer tokens come first, so that a shorter token that is their prefix does not match instead.
    tokens = {token["content"]: token for token in added_tokens.values()}
    longest_first = sorted(self._ids, key=len, reverse=True)
    self._split = re.compile(
      "|".join(_pattern(text, tokens.get(text, {})) for text in longest_first)
    )

    self.vocab_size = max([self._num_pieces - 1, *self._ids.values()]) + 1
    self.special_tokens: Mapping[str, SpecialToken] = self._own_special_tokens()
    self.prefix_ids: tuple[int, ...] = ()
    pieces = map(self._model.id_to_piece, range(self._num_pieces))
    self.longest_token = max(map(len, [*pieces, *self._ids]))

  def token_to_id(self, token: str) -> int | None:
    """The id of a token, or None if it is not in the vocabulary."""
    return self._ids.get(token, self._piece_id(token))

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Encodes texts that stand alone. The model may put a space before each text."""
    return [self._encode(text, self._model) for text in texts]

  def encode_batch_after(self, texts: Sequence[str]) -> list[list[int]]:
    """Encodes texts that follow other texts, without adding a space before them."""
    return [self._encode(text, self._spaceless_model) for text in texts]

  def decode(self, ids: Sequence[int]) -> str:
    """The text that these tokens append to a text. Skips special tokens and unknown ids."""
    known_ids = [int(i) for i in ids if 0 <= i < self._num_pieces or i in self._decoded]
    parts = []
    # Adjacent pieces are decoded together, because a character can consist of several pieces.
    for decoded, run in itertools.groupby(known_ids, key=self._decoded.get):
      run_ids = list(run)
      if decoded is None:
        parts.append(self._spaceless_model.decode(run_ids))
      else:
        parts.append(decoded * len(run_ids))
    return "".join(parts)

  def _control_ids(self) -> dict[str, int]:
    """The ids of the tokens that the model file marks as control or unknown, keyed by text."""
    model = self._model
    return {
      model.id_to_piece(i): i
      for i in range(self._num_pieces)
      if model.is_control(i) or model.is_unknown(i)
    }

  def _own_special_tokens(self) -> dict[str, SpecialToken]:
    ids = {
      "bos_token": self._model.bos_id(),
      "eos_token": self._model.eos_id(),
      "unk_token": self._model.unk_id(),
      "pad_token": self._model.pad_id(),
    }
    # The id is -1 for a role without a token.
    return {role: SpecialToken(self._model.id_to_piece(i), i) for role, i in ids.items() if i >= 0}

  def _piece_id(self, text: str) -> int | None:
    # sentencepiece returns the id of <unk> for a text that is not a piece.
    piece_id = self._model.piece_to_id(text)
    return piece_id if self._model.id_to_piece(piece_id) == text else None

  def _encode(self, text: str, model: sentencepiece.SentencePieceProcessor) -> list[int]:
    """Encodes `text`. `model` encodes the part before the first special token."""
    ids: list[int] = []
    start = 0
    for match in self._split.finditer(text):
      ids += self._encode_part(text[start : match.start()], model)
      ids.append(self._ids[match[match.lastindex]])
      start = match.end()
      model = self._model_after_special
    return ids + self._encode_part(text[start:], model)

  def _encode_part(self, text: str, model: sentencepiece.SentencePieceProcessor) -> list[int]:
    if not text:
      return []
    if text.startswith((" ", "▁")):
      # Like `transformers`, this adds no second space before a space. sentencepiece would.
      model = self._spaceless_model
    return model.encode(text)


def _pattern(text: str, token: Mapping[str, Any]) -> str:
  """A regular expression for a token and the adjacent whitespace that it absorbs."""
  left = r"\s*" if token.get("lstrip") else ""
  right = r"\s*" if token.get("rstrip") else ""
  return f"{left}({re.escape(text)}){right}"
