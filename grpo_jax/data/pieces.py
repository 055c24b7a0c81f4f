"""A sentencepiece model with the special tokens that are only named beside it."""

import itertools
import re
from typing import Any, Iterable, Mapping, Sequence

import sentencepiece

# Fields of the protobuf's normalizer_spec: add_dummy_prefix = false, remove_extra_whitespaces = false. Appended to a
# model they take the place of its own: protobuf merges a message that comes twice, the last value counts.
_AS_IT_STANDS = b"\x1a\x04\x18\x00\x20\x00"


class Pieces:
  """Texts to ids and back. Special tokens in a text become their ids, as `transformers` has it: sentencepiece alone
  would take them to pieces.

  Attributes: `ids` (token -> id of those that a text is split at), `size` (the highest id + 1).
  """

  def __init__(
    self, model: bytes, added: Mapping[int, Mapping[str, Any]], named: Iterable[str], legacy: bool
  ):
    """`added`: tokens beyond the model's, or more about those it has, as added_tokens_decoder of tokenizer_config.json
    has them. `named`: special tokens by their texts. `legacy`: a space before each part of a text between two special
    tokens, not only before the first."""
    self.model = sentencepiece.SentencePieceProcessor(model_proto=model)
    self._inside = sentencepiece.SentencePieceProcessor(model_proto=model + _AS_IT_STANDS)
    self._later = self.model if legacy else self._inside
    self._size = self.model.get_piece_size()
    special = {
      self.model.id_to_piece(i): i
      for i in range(self._size)
      if self.model.is_control(i) or self.model.is_unknown(i)
    }
    special |= {token: i for token in named if (i := self._piece_id(token)) is not None}
    special |= {about["content"]: i for i, about in added.items() if about.get("special", True)}
    self.ids = special | {about["content"]: i for i, about in added.items()}
    self.size = max([self._size - 1, *self.ids.values()]) + 1
    self._texts = {i: "" if token in special else token for token, i in self.ids.items()}
    strips = {about["content"]: about for about in added.values()}
    self._split = re.compile(
      "|".join(
        _pattern(token, strips.get(token, {})) for token in sorted(self.ids, key=len, reverse=True)
      )
    )

  def token_to_id(self, token: str) -> int | None:
    return self.ids.get(token, self._piece_id(token))

  def _piece_id(self, token):
    index = self.model.piece_to_id(token)
    return (
      index if self.model.id_to_piece(index) == token else None
    )  # an unknown piece has the id of <unk>

  def encode(self, text: str) -> list[int]:
    """Of a whole text: the first part gets the space that the model puts before a text."""
    return self._encode(text, self.model)

  def encode_after(self, text: str) -> list[int]:
    """Of a text that follows another one."""
    return self._encode(text, self._inside)

  def _encode(self, text, first):
    ids, start = [], 0  # start: of the part after the last special token
    for match in self._split.finditer(text):
      ids += self._part(text[start : match.start()], self._later if start else first)
      ids.append(self.ids[match[match.lastindex]])
      start = match.end()
    return ids + self._part(text[start:], self._later if start else first)

  def _part(self, text, engine):
    if text.startswith(
      (" ", "▁")
    ):  # `transformers` puts no second space there; sentencepiece alone would
      engine = self._inside
    return engine.encode(text) if text else []

  def decode(self, ids: Sequence[int]) -> str:
    """The text that these ids add to one before them."""
    known = (i for i in ids if 0 <= i < self._size or i in self._texts)
    parts = itertools.groupby(known, key=lambda i: self._texts.get(i))
    return "".join(
      self._inside.decode(list(run)) if text is None else text * len(list(run))
      for text, run in parts
    )


def _pattern(token, about):
  """Added tokens may take the whitespace on a side with them."""
  return (
    r"\s*" * bool(about.get("lstrip"))
    + f"({re.escape(token)})"
    + r"\s*" * bool(about.get("rstrip"))
  )
