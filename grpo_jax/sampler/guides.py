"""Guides restrict which tokens a row may draw next. They need the optional package llguidance."""

from collections.abc import Callable, Sequence
import functools
import re
from typing import Any, Protocol

import numpy as np

from grpo_jax.config import Sampling
from grpo_jax.data.tokenizers.tokenizer import Tokenizer
from grpo_jax.settings import ConfigError, shown


class Guided(Protocol):
  """Restricts the tokens of a single row, such as `Guide` does with a grammar."""

  def fill(self, bits_W: np.ndarray) -> None:
    """Overwrites int32 words with a mask: bit t % 32 of word t // 32 is 1 if token t may follow."""

  def take(self, tokens: Sequence[int]) -> bool:
    """Appends tokens that the row has drawn. Returns False if they are not allowed."""

  @property
  def is_whole(self) -> bool:
    """Whether the answer may end after the tokens that the row has drawn."""


class Guide:
  """A `Guided` that follows a grammar of llguidance."""

  def __init__(self, matcher: Any) -> None:
    """`matcher` is an LLMatcher that has consumed no tokens."""
    self._matcher = matcher

  def fill(self, bits_W: np.ndarray) -> None:
    """Writes the mask of the tokens that may follow. `bits_W` is a contiguous int32 array."""
    self._matcher.unsafe_compute_mask_ptr(bits_W.ctypes.data, bits_W.nbytes)

  def take(self, tokens: Sequence[int]) -> bool:
    """Appends tokens that the row has drawn. Returns False if the grammar forbids them."""
    return bool(self._matcher.consume_tokens(list(tokens)))

  @property
  def is_whole(self) -> bool:
    """Whether the drawn tokens match the whole grammar, rather than only a beginning of it."""
    return not self._matcher.is_error() and self._matcher.is_accepting()


def lexicon(tokenizer: Tokenizer, vocabulary: int) -> Any:
  """Returns llguidance's LLTokenizer of a tokenizer. `vocabulary` is V, the model's token ids.

  Raises:
    ConfigError: llguidance is not installed, or the tokenizer has no tokenizer.json or no stop ids.
  """
  try:
    from llguidance import LLTokenizer
  except ImportError:
    raise ConfigError("it needs the package llguidance: pip install -e '.[guides]'") from None
  text = tokenizer.files.get("tokenizer.json")
  if text is None or not tokenizer.stop_ids:
    raise ConfigError("it needs a model with tokenizer.json and a token that ends an answer")
  return LLTokenizer(text.decode(), n_vocab=vocabulary, eos_token=list(tokenizer.stop_ids))


def guides_of(
  sampling: Sampling, tokenizer: Tokenizer, vocabulary: int
) -> Callable[[], Guide] | None:
  """Compiles sampling.regex and sampling.banned into a grammar for rows.

  Args:
    sampling: The section of the config.
    tokenizer: The tokenizer of the model.
    vocabulary: V, how many token ids the model has.

  Returns:
    A function that makes the guide of a new row. None if both settings are empty.

  Raises:
    ConfigError: llguidance is missing, does not support the tokenizer, or rejects the grammar.
  """
  if not sampling.regex and not sampling.banned:
    return None
  name = "regex" if sampling.regex else "banned"  # the setting that errors name
  where = f"config key sampling.{name} is {shown(getattr(sampling, name)):.100}"
  try:
    llg_tokenizer = lexicon(tokenizer, vocabulary)
  except ConfigError as error:
    raise ConfigError(f"{where}: {error}") from None
  from llguidance import LLMatcher

  # A regular expression must match the whole completion, so no special token may interrupt it. Stop
  # ids end the text instead: llguidance allows them itself (`eos_token` in `lexicon`).
  special = [] if sampling.regex else [*tokenizer.special_texts]
  special = [i for i in special if i not in tokenizer.stop_ids and i < vocabulary]
  grammar = _grammar(sampling.regex, sampling.banned, special)
  matcher = LLMatcher(llg_tokenizer, LLMatcher.grammar_from_lark(grammar))
  if matcher.is_error():
    raise ConfigError(f"{where}: {' '.join(matcher.get_error().split()):.300}")
  return functools.partial(_copy, matcher)


def _copy(matcher: Any) -> Guide:
  return Guide(matcher.deep_copy())


def _grammar(regex: str, banned: Sequence[str], special: Sequence[int]) -> str:
  """Returns a Lark grammar of the texts that match `regex` and contain no text of `banned`.

  For `regex` "[0-9]+" and the banned text "42", it has the line
  TEXT: /[0-9]+/ & ~/(?s:.*)(42)(?s:.*)/

  Args:
    regex: A regular expression for the whole text. "" matches anything.
    banned: The texts that must not occur.
    special: The ids of special tokens that may occur between texts.
  """
  anything = "(?s:.*)"  # (?s) lets the dot match newlines, too
  terms = [f"/{_in_lark(regex) or anything}/"]
  if banned:
    terms.append(f"~/{anything}({'|'.join(map(_literal, banned))}){anything}/")
  # Without this option, llguidance would force one tokenization of text that the grammar dictates.
  text = f'%llguidance {{"no_forcing": true}}\nTEXT: {" & ".join(terms)}'
  if not special:
    return f"{text}\nstart: TEXT"
  # Two adjacent texts could form a banned text together, so a special token must separate them.
  ids = ",".join(map(str, special))
  return f"{text}\nstart: TEXT? (special+ TEXT?)*\nspecial: <[{ids}]>"


def _in_lark(regex: str) -> str:
  """Escapes the slashes and newlines of a regular expression, so that it fits between Lark's //."""
  written = {"/": "\\x2F", "\n": "\\x0A"}
  written |= {f"\\{character}": code for character, code in written.items()}
  return re.sub(r"(?s)\\.|/|\n", lambda found: written.get(found[0], found[0]), regex)


def _literal(text: str) -> str:
  """Returns a regular expression that matches exactly this text."""
  return "".join(c if c.isalnum() and c.isascii() else f"\\x{{{ord(c):X}}}" for c in text)
