"""Makes the files of a Hugging Face tokenizer from the metadata of a GGUF file.

A GGUF file contains a vocabulary, its merges or scores, and the name of the rule that splits texts.
The type of tokenizer determines the rest, as in llama.cpp. The token ids equal those of
transformers, which also reads GGUF files, except where transformers differs from llama.cpp: it does
not know which tokenizers make every word of the vocabulary one token.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
import os
from typing import Any, TypeVar

import numpy as np
from tokenizers import pre_tokenizers

from grpo_jax.gguf_file import GGUFFile, open_file
from grpo_jax.settings import shown

T = TypeVar("T")
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # values of tokenizer.ggml.token_type
_ALPHABET = frozenset(pre_tokenizers.ByteLevel.alphabet())
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_GEMMA = ("gemma", "gemma2", "gemma3")  # values of general.architecture
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}

# Regular expressions that split a text for a byte-level BPE, keyed by tokenizer.ggml.pre.
_GPT2 = ""  # the built-in rule of the ByteLevel pre-tokenizer
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"


def _words(contractions: str) -> str:
  """A pattern of words in lower case, in capitals or capitalized, perhaps with `contractions`."""
  first = rf"{_BEFORE_WORD}{_UPPER}*{_LOWER}+{contractions}"
  return rf"{first}|{_BEFORE_WORD}{_UPPER}+{_LOWER}*{contractions}"


def _llama3(digits: str) -> str:
  """The rule of Llama 3. The quantifier `digits`, such as {1,3}, limits a group of digits."""
  words = rf"{_CONTRACTIONS}|{_BEFORE_WORD}\p{{L}}+"
  return rf"{words}|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


_TEKKEN = rf"{_words('')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_GPT4O = rf"{_words(_CONTRACTIONS + '?')}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_LLAMA3 = ("llama3", "llama-v3", "llama-bpe", "falcon3")
_SPLITS = {
  **dict.fromkeys(("", "default", "gpt-2", "smollm"), _GPT2),
  **dict.fromkeys((*_LLAMA3, "smaug-bpe"), _llama3("{1,3}")),
  **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _llama3("")),
  "tekken": _TEKKEN,
  **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
}
# With these values of tokenizer.ggml.pre, llama.cpp makes a word of the vocabulary one token, even
# if no merges lead to it, and puts the bos_token before texts. The files state neither.
_WHOLE_WORDS = frozenset((*_LLAMA3, "tekken"))


def make_files(path: str | os.PathLike) -> dict[str, bytes]:
  """Makes tokenizer.json and tokenizer_config.json. Returns their contents, keyed by file name.

  Raises:
    ConfigError: The file is damaged, or its type of tokenizer is not supported.
  """
  file = open_file(path)
  vocabulary = _Vocabulary.of(file)
  kind = file.metadata.get("tokenizer.ggml.model")
  if type(kind) is not str or kind not in _KINDS:  # a list, for example, could not be looked up
    file.refuse(f"tokenizer.ggml.model is {shown(kind)}: choose a file of {', '.join(_KINDS)}")
  parts = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": vocabulary.added_tokens(),
    **_KINDS[kind](file, vocabulary),  # normalizer, pre_tokenizer, decoder and model
  }
  config = _config(file, vocabulary, kind)
  parts["post_processor"] = _post_processor(config, vocabulary)
  return {
    "tokenizer.json": json.dumps(parts, ensure_ascii=False).encode(),
    "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False).encode(),
  }


@dataclasses.dataclass(frozen=True)
class _Vocabulary:
  """The tokens of a GGUF file.

  Attributes:
    tokens: The text of each token. The index is the id.
    types: The type of each token, a value of tokenizer.ggml.token_type.
    special: The texts of special tokens, keyed by role, such as {"eos_token": "</s>"}.
  """

  tokens: Sequence[str]
  types: Sequence[int]
  special: Mapping[str, str]

  @classmethod
  def of(cls, file: GGUFFile) -> "_Vocabulary":
    """Reads the vocabulary of a file. Raises ConfigError if it is missing or malformed."""
    tokens = _get(file, "tokenizer.ggml.tokens", list, [])
    if not tokens or type(tokens[0]) is not str:
      file.refuse("it has no tokenizer (tokenizer.ggml.tokens): set data.tokenizer")
    if file.metadata.get("general.architecture") in _GEMMA:
      # A Gemma file stores a token of spaces alone as spaces, but the tokenizer needs ▁ for each.
      tokens = ["▁" * len(token) if token and not token.strip(" ") else token for token in tokens]
    types = _numbers(file, "tokenizer.ggml.token_type", len(tokens))
    special = {}
    for role, name in _ROLES.items():
      key = f"tokenizer.ggml.{name}_token_id"
      number = _get(file, key, int, None)
      if number is None or number == 2**32 - 1:  # -1 as uint32, which means no token
        continue
      if not 0 <= number < len(tokens):
        file.refuse(f"{key} is {number}, of {len(tokens)} tokens")
      special[f"{role}_token"] = tokens[number]
    return cls(tokens, [_NORMAL] * len(tokens) if types is None else types.tolist(), special)

  def added_tokens(self) -> list[dict[str, Any]]:
    """`added_tokens` of tokenizer.json: tokens that are found in a text before it is split."""
    roles = {*self.special.values()}
    return [
      {
        "id": number,
        "content": token,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": kind == _CONTROL or token in roles,
      }
      for number, (token, kind) in enumerate(zip(self.tokens, self.types))
      if kind in (_CONTROL, _USER_DEFINED) or token in roles
    ]


def _get(file: GGUFFile, key: str, kind: type[T], default: T | None) -> T:
  """A field of the metadata, or `default`. Raises ConfigError if its type is not `kind`."""
  value = file.metadata.get(key, default)
  if value is not default and type(value) is not kind:
    file.refuse(f"{key} must be of type {kind.__name__}, got {shown(value)}")
  return value


def _numbers(file: GGUFFile, key: str, count: int) -> np.ndarray | None:
  """A field with a number for each of `count` tokens, or None if the file lacks the field."""
  found = _get(file, key, np.ndarray, None)
  if found is not None and len(found) != count:
    file.refuse(f"{key} has {len(found)} entries for {count} tokens")
  return found


def _config(file: GGUFFile, vocabulary: _Vocabulary, kind: str) -> dict[str, Any]:
  """Makes the object of tokenizer_config.json. `kind` is tokenizer.ggml.model."""
  # If the field is missing, llama.cpp puts the bos_token before texts of these tokenizers.
  adds_by_default = kind == "llama" or _get(file, "tokenizer.ggml.pre", str, "") in _WHOLE_WORDS
  add_bos = _get(file, "tokenizer.ggml.add_bos_token", bool, adds_by_default)
  config = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
    "add_bos_token": add_bos and "bos_token" in vocabulary.special,
    "add_eos_token": (
      _get(file, "tokenizer.ggml.add_eos_token", bool, False) and "eos_token" in vocabulary.special
    ),
    "unk_token": None,  # else transformers adds <|endoftext|> to the tokenizer of a Qwen2 model
    **vocabulary.special,
  }
  template = _get(file, "tokenizer.chat_template", str, "")
  return config | ({"chat_template": template} if template else {})


def _post_processor(config: Mapping[str, Any], vocabulary: _Vocabulary) -> dict[str, Any]:
  """The part of tokenizer.json that adds the bos_token and the eos_token to a text or two texts."""
  first = {"Sequence": {"id": "A", "type_id": 0}}
  second = {"Sequence": {"id": "B", "type_id": 1}}
  used = {}
  # For each role: its entry beside text A, and its entry beside text B. Empty if it is not added.
  around: dict[str, list[list[dict[str, Any]]]] = {}
  for role in ("bos_token", "eos_token"):
    around[role] = [[], []]
    if config[f"add_{role}"]:
      token = config[role]
      used[token] = {"id": token, "ids": [vocabulary.tokens.index(token)], "tokens": [token]}
      around[role] = [[{"SpecialToken": {"id": token, "type_id": i}}] for i in (0, 1)]
  bos, eos = around["bos_token"], around["eos_token"]
  single = [*bos[0], first, *eos[0]]
  pair = [*single, *bos[1], second, *eos[1]]
  return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": used}


def _on_bytes(file: GGUFFile, vocabulary: _Vocabulary) -> dict[str, Any]:
  """The parts of tokenizer.json for a byte-level BPE, as in GPT-2, Llama 3 and Qwen."""
  name = _get(file, "tokenizer.ggml.pre", str, "")
  if name not in _SPLITS:
    known = ", ".join(filter(None, _SPLITS))
    file.refuse(f"tokenizer.ggml.pre is {shown(name)}: choose a file of {known}")
  # Added tokens stay texts. All others must be in byte symbols, and a file may have them as texts.
  added = (_CONTROL, _USER_DEFINED)
  ids = {
    token if kind in added or _ALPHABET.issuperset(token) else _in_byte_symbols(token): number
    for number, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types))
  }
  on_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
  pre_tokenizer: dict[str, Any] = {**on_bytes, "use_regex": True}
  if _SPLITS[name]:
    split = {
      "type": "Split",
      "pattern": {"Regex": _SPLITS[name]},
      "behavior": "Isolated",
      "invert": False,
    }
    pre_tokenizer = {
      "type": "Sequence",
      "pretokenizers": [split, {**on_bytes, "use_regex": False}],
    }
  merges = _get(file, "tokenizer.ggml.merges", list, None)
  if merges is None:
    file.refuse("it has no tokenizer.ggml.merges, which a tokenizer of kind gpt2 needs")
  return {
    "normalizer": None,
    "pre_tokenizer": pre_tokenizer,
    "decoder": {**on_bytes, "add_prefix_space": True, "use_regex": True},  # decoding reads neither
    "model": _bpe(
      ids,
      _pairs(file, merges),
      continuing_subword_prefix="",
      end_of_word_suffix="",
      ignore_merges=name in _WHOLE_WORDS,
    ),
  }


def _in_byte_symbols(token: str) -> str:
  """A token in the byte symbols of a byte-level BPE."""
  return "".join(piece for piece, _ in _BYTES.pre_tokenize_str(token))


def _on_characters(file: GGUFFile, vocabulary: _Vocabulary) -> dict[str, Any]:
  """The parts of tokenizer.json for a character-level BPE, as sentencepiece makes it.

  A space is written as ▁. Families other than Gemma may add a space before a text, which decoding
  removes.
  """
  architecture, tokens = file.metadata.get("general.architecture"), vocabulary.tokens
  is_gemma = architecture in _GEMMA
  adds_space = _get(file, "tokenizer.ggml.add_space_prefix", bool, True) and not is_gemma
  if is_gemma:  # merges are in the order of the ids, and the scores in the files are not
    scores = -np.arange(len(tokens), dtype=np.float64)
  else:
    scores = _numbers(file, "tokenizer.ggml.scores", len(tokens))
  merges = _get(file, "tokenizer.ggml.merges", list, None)
  if merges is None and scores is None:
    file.refuse("its tokenizer has neither tokenizer.ggml.merges nor tokenizer.ggml.scores")
  pairs = _merges_of(tokens, scores.tolist()) if merges is None else _pairs(file, merges)
  ids = {token: number for number, token in enumerate(tokens)}
  unknown = "<unk>" if is_gemma else None
  decoders: list[dict[str, Any]] = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
  ]
  if adds_space:
    decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
  return {
    **_spaces_as_marks(architecture, adds_space),
    "model": _bpe(ids, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True),
    "decoder": {"type": "Sequence", "decoders": decoders},
  }


def _spaces_as_marks(architecture: Any, adds_space: bool) -> dict[str, Any]:
  """The normalizer and the pre-tokenizer of tokenizer.json, which write a space as ▁.

  Args:
    architecture: general.architecture of the file.
    adds_space: Whether a space is put before a text.
  """
  marked = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
  normalizer: dict[str, Any] | None = None
  pre_tokenizer: dict[str, Any] | None = None
  if architecture in _GEMMA:  # as in Gemma's tokenizer.json, whose Split finds no space any more
    normalizer = marked
    pre_tokenizer = {
      "type": "Split",
      "pattern": {"String": " "},
      "behavior": "MergedWithPrevious",
      "invert": False,
    }
  elif architecture == "phi3":  # as in the tokenizer.json of Phi-3
    in_front = [{"type": "Prepend", "prepend": "▁"}] if adds_space else []
    normalizer = {"type": "Sequence", "normalizers": [*in_front, marked]}
  else:
    pre_tokenizer = {
      "type": "Metaspace",
      "replacement": "▁",
      "prepend_scheme": "first" if adds_space else "never",
      "split": False,
    }
  return {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer}


def _bpe(ids: Mapping[str, int], merges: Sequence[Sequence[str]], **options: Any) -> dict[str, Any]:
  return {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
    "ignore_merges": False,
    **options,
    "vocab": ids,
    "merges": merges,
  }


def _pairs(file: GGUFFile, merges: Sequence[Any]) -> list[list[str]]:
  """Splits each merge at its space into two tokens. Raises ConfigError if there are not two."""
  pairs = [merge.split(" ") if isinstance(merge, str) else [] for merge in merges]
  for merge, pair in zip(merges, pairs):
    if len(pair) != 2:
      file.refuse(f"tokenizer.ggml.merges has {shown(merge)}, which is not two tokens")
  return pairs


def _merges_of(tokens: Sequence[str], scores: Sequence[float]) -> list[list[str]]:
  """Derives the merges of a sentencepiece BPE, in order of priority, from the scores of its tokens.

  Any two tokens that form a third token are a merge. The merge with the highest score comes first.
  Equal scores are ordered as in transformers, because the order changes how texts are split.
  """
  ids = {token: number for number, token in enumerate(tokens)}
  found = []
  score_of = dict(zip(tokens, scores))
  for token, score in score_of.items():
    ways = [(token[:i], token[i:]) for i in range(1, len(token))]
    ways = [(a, b) for a, b in ways if a in ids and b in ids]
    # This order remains among equal merges, because the final sort is stable.
    ways.sort(key=lambda way: (ids[way[0]], ids[way[1]]))
    found += [(score, a, b) for a, b in ways]
  found.sort(key=lambda merge: (-merge[0], -len(merge[1]), -len(merge[2])))
  return [[a, b] for _, a, b in found]


_KINDS: dict[str, Callable[[GGUFFile, _Vocabulary], dict[str, Any]]] = {
  "gpt2": _on_bytes,
  "llama": _on_characters,
}
