"""Guides say which tokens a row may draw next, by the package llguidance, which is optional."""

from collections.abc import Callable, Sequence
import functools
import re
from typing import Any, Protocol

import numpy as np

from grpo_jax.config import Sampling
from grpo_jax.data.tokenizers.tokenizer import Tokenizer
from grpo_jax.settings import ConfigError, shown


class Guided(Protocol):
  """Says what a row may draw, whatever the others do. `Guide` is one."""

  def fill(self, bits_W: np.ndarray) -> None:
    """Sets the bit of each token that may follow, and of no other."""

  def take(self, tokens: Sequence[int]) -> bool:
    """The row has drawn these. Returns whether that may be."""

  @property
  def is_whole(self) -> bool:
    """Whether an answer may end after what the row has drawn."""


class Guide:
  """A `Guided` of llguidance."""

  def __init__(self, matcher: Any) -> None:
    """`matcher` is a LLMatcher."""
    self._matcher = matcher

  def fill(self, bits_W: np.ndarray) -> None:
    """Sets the bit of each token that may follow, and of no other. int32."""
    self._matcher.unsafe_compute_mask_ptr(bits_W.ctypes.data, bits_W.nbytes)

  def take(self, tokens: Sequence[int]) -> bool:
    """The row has drawn these. Returns whether the form allows them."""
    return bool(self._matcher.consume_tokens(list(tokens)))

  @property
  def is_whole(self) -> bool:
    """Whether what was drawn has the form, and not the beginning of it alone."""
    return not self._matcher.is_error() and self._matcher.is_accepting()


def lexicon(tokenizer: Tokenizer, vocabulary: int) -> Any:
  """The LLTokenizer of a tokenizer. `vocabulary` is how many ids the model has.

  Raises:
    ConfigError: llguidance is not installed, or the tokenizer lacks what it needs.
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
  """Makes the guide of a new row, or None where sampling.regex and sampling.banned are empty.

  Args:
    sampling: The section of the config.
    tokenizer: The tokenizer of the model.
    vocabulary: How many ids the model has.

  Raises:
    ConfigError: llguidance is not installed, or it cannot read the expression.
  """
  if not sampling.regex and not sampling.banned:
    return None
  name = "regex" if sampling.regex else "banned"
  where = f"config key sampling.{name} is {shown(getattr(sampling, name)):.100}"
  try:
    engine = lexicon(tokenizer, vocabulary)
  except ConfigError as error:
    raise ConfigError(f"{where}: {error}") from None
  from llguidance import LLMatcher

  special = [] if sampling.regex else [*tokenizer.special_texts]
  special = [i for i in special if i not in tokenizer.stop_ids and i < vocabulary]
  grammar = _grammar(sampling.regex, sampling.banned, special)
  whole = LLMatcher(engine, LLMatcher.grammar_from_lark(grammar))
  if whole.is_error():
    raise ConfigError(f"{where}: {' '.join(whole.get_error().split()):.300}")
  return functools.partial(_copy, whole)


def _copy(matcher: Any) -> Guide:
  return Guide(matcher.deep_copy())


def _grammar(regex: str, banned: Sequence[str], special: Sequence[int]) -> str:
  """A grammar in Lark: texts that match, without those that are banned.

  Args:
    regex: An expression that the whole text matches. "" is anything.
    banned: Texts that it does not hold.
    special: The ids of special tokens that may come between texts.
  """
  anything = "(?s:.*)"
  terms = [f"/{_in_lark(regex) or anything}/"]
  if banned:
    terms.append(f"~/{anything}({'|'.join(map(_literal, banned))}){anything}/")
  # Without the option, a text without a choice could be drawn in one way of many.
  text = f'%llguidance {{"no_forcing": true}}\nTEXT: {" & ".join(terms)}'
  if not special:
    return f"{text}\nstart: TEXT"
  # Two texts side by side could hold a banned one together, so a special token is between them.
  ids = ",".join(map(str, special))
  return f"{text}\nstart: TEXT? (special+ TEXT?)*\nspecial: <[{ids}]>"


def _in_lark(regex: str) -> str:
  """A regular expression between the slashes of Lark, on one line."""
  written = {"/": "\\x2F", "\n": "\\x0A"}
  written |= {f"\\{character}": code for character, code in written.items()}
  return re.sub(r"(?s)\\.|/|\n", lambda found: written.get(found[0], found[0]), regex)


def _literal(text: str) -> str:
  """An expression that matches a text alone."""
  return "".join(c if c.isalnum() and c.isascii() else f"\\x{{{ord(c):X}}}" for c in text)
