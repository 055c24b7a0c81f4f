"""The files of a tokenizer, made from the metadata of a GGUF file.

A GGUF file holds a vocabulary, its merges or scores, and the name of the rule that splits texts.
How the rest of a tokenizer works depends on the kind. Texts get the ids that they get from
transformers, which reads such files too.
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
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # of tokenizer.ggml.token_type
_ALPHABET = frozenset(pre_tokenizers.ByteLevel.alphabet())
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_GEMMA = ("gemma", "gemma2", "gemma3")  # values of general.architecture
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}

# Where a BPE on bytes splits a text, by tokenizer.ggml.pre. The first one is the rule of GPT-2.
_GPT2 = ""
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"


def _words(contractions: str) -> str:
  """Words that begin with capitals or have none, with what may follow a word."""
  first = rf"{_BEFORE_WORD}{_UPPER}*{_LOWER}+{contractions}"
  return rf"{first}|{_BEFORE_WORD}{_UPPER}+{_LOWER}*{contractions}"


def _llama3(digits: str) -> str:
  """The rule of Llama 3, with so many digits together."""
  words = rf"{_CONTRACTIONS}|{_BEFORE_WORD}\p{{L}}+"
  return rf"{words}|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


_TEKKEN = rf"{_words('')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_GPT4O = rf"{_words(_CONTRACTIONS + '?')}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_SPLITS = {
  **dict.fromkeys(("", "default", "gpt-2", "smollm"), _GPT2),
  **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "smaug-bpe"), _llama3("{1,3}")),
  **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _llama3("")),
  "tekken": _TEKKEN,
  **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
}


def make_files(path: str | os.PathLike) -> dict[str, bytes]:
  """tokenizer.json and tokenizer_config.json by their names.

  Raises:
    ConfigError: The file is damaged, or has a tokenizer of another kind than those made here.
  """
  file = open_file(path)
  vocabulary = _Vocabulary.of(file)
  kind = file.metadata.get("tokenizer.ggml.model")
  if type(kind) is not str or kind not in _KINDS:
    file.refuse(f"tokenizer.ggml.model is {shown(kind)}: choose a file of {', '.join(_KINDS)}")
  parts = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": vocabulary.added_tokens(),
    **_KINDS[kind](file, vocabulary),
  }
  config = _config(file, vocabulary, kind)
  parts["post_processor"] = _post_processor(config, vocabulary)
  return {
    "tokenizer.json": json.dumps(parts, ensure_ascii=False).encode(),
    "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False).encode(),
  }


@dataclasses.dataclass(frozen=True)
class _Vocabulary:
  """The tokens of a file.

  Attributes:
    tokens: Their texts, by id.
    types: Their types, as tokenizer.ggml.token_type has them.
    special: Token by role, such as {"eos_token": "</s>"}.
  """

  tokens: Sequence[str]
  types: Sequence[int]
  special: Mapping[str, str]

  @classmethod
  def of(cls, file: GGUFFile) -> "_Vocabulary":
    """Reads the vocabulary of a file. Raises ConfigError if there is none."""
    tokens = _get(file, "tokenizer.ggml.tokens", list, [])
    if not tokens or type(tokens[0]) is not str:
      file.refuse("it has no tokenizer (tokenizer.ggml.tokens): set data.tokenizer")
    if file.metadata.get("general.architecture") in _GEMMA:
      # The file has spaces where the tokenizer has its mark for them, also in added tokens.
      tokens = ["▁" * len(token) if token and not token.strip(" ") else token for token in tokens]
    types = _numbers(file, "tokenizer.ggml.token_type", len(tokens))
    special = {}
    for role, name in _ROLES.items():
      key = f"tokenizer.ggml.{name}_token_id"
      number = _get(file, key, int, None)
      if number is None or number == 2**32 - 1:  # -1, which stands for no token
        continue
      if not 0 <= number < len(tokens):
        file.refuse(f"{key} is {number}, of {len(tokens)} tokens")
      special[f"{role}_token"] = tokens[number]
    return cls(tokens, [_NORMAL] * len(tokens) if types is None else types.tolist(), special)

  def added_tokens(self) -> list[dict[str, Any]]:
    """The tokens that are found in a text before it is split, as tokenizer.json has them."""
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
  """A field of the metadata, which must be of a kind."""
  value = file.metadata.get(key, default)
  if value is not default and type(value) is not kind:
    file.refuse(f"{key} must be of type {kind.__name__}, got {shown(value)}")
  return value


def _numbers(file: GGUFFile, key: str, count: int) -> np.ndarray | None:
  """A number for each token, or None without such a field."""
  found = _get(file, key, np.ndarray, None)
  if found is not None and len(found) != count:
    file.refuse(f"{key} has {len(found)} entries for {count} tokens")
  return found


def _config(file: GGUFFile, vocabulary: _Vocabulary, kind: str) -> dict[str, Any]:
  """tokenizer_config.json."""
  # llama.cpp puts the first token before a text if a file of this kind does not say.
  add_bos = _get(file, "tokenizer.ggml.add_bos_token", bool, kind == "llama")
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
  """The part of tokenizer.json that puts special tokens around a text."""
  text = {"Sequence": {"id": "A", "type_id": 0}}
  second = {"Sequence": {"id": "B", "type_id": 1}}
  single: list[dict[str, Any]] = [text]
  pair: list[dict[str, Any]] = [text, second]
  used = {}
  for role in ("bos_token", "eos_token"):
    if not config[f"add_{role}"]:
      continue
    token = config[role]
    used[token] = {"id": token, "ids": [vocabulary.tokens.index(token)], "tokens": [token]}
    marks = [{"SpecialToken": {"id": token, "type_id": i}} for i in (0, 1)]
    if role == "bos_token":
      single, pair = [marks[0], text], [marks[0], text, marks[1], second]
    else:
      single, pair = [*single, marks[0]], [*pair[:-1], marks[0], second, marks[1]]
      if config["add_bos_token"]:
        first = {"SpecialToken": {"id": config["bos_token"], "type_id": 0}}
        other = {"SpecialToken": {"id": config["bos_token"], "type_id": 1}}
        pair = [first, text, marks[0], other, second, marks[1]]
  return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": used}


def _on_bytes(file: GGUFFile, vocabulary: _Vocabulary) -> dict[str, Any]:
  """A BPE whose symbols stand for bytes, as that of GPT-2, Llama 3 and Qwen."""
  name = _get(file, "tokenizer.ggml.pre", str, "")
  if name not in _SPLITS:
    known = ", ".join(filter(None, _SPLITS))
    file.refuse(f"tokenizer.ggml.pre is {shown(name)}: choose a file of {known}")
  whole = (_CONTROL, _USER_DEFINED)
  ids = {
    token if kind in whole or _ALPHABET.issuperset(token) else _spelled(token): number
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
    "decoder": {**on_bytes, "add_prefix_space": True, "use_regex": True},
    "model": _bpe(ids, _pairs(file, merges), continuing_subword_prefix="", end_of_word_suffix=""),
  }


def _spelled(token: str) -> str:
  """The symbols of the bytes of a token."""
  return "".join(piece for piece, _ in _BYTES.pre_tokenize_str(token))


def _on_characters(file: GGUFFile, vocabulary: _Vocabulary) -> dict[str, Any]:
  """The parts of tokenizer.json for a BPE on characters, as sentencepiece makes it.

  A space is written as ▁. Gemma splits a text at its spaces. The other families may write a space
  in front of a text, which decoding takes away again.
  """
  architecture, tokens = file.metadata.get("general.architecture"), vocabulary.tokens
  is_gemma = architecture in _GEMMA
  adds_space = _get(file, "tokenizer.ggml.add_space_prefix", bool, True) and not is_gemma
  if is_gemma:  # the scores in its files are not the order of merges. That of the tokens is
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
  """The parts of tokenizer.json that write a space as ▁, before the BPE.

  Args:
    architecture: general.architecture of the file.
    adds_space: Whether a text gets a space in front.
  """
  marked = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
  normalizer: dict[str, Any] | None = None
  pre_tokenizer: dict[str, Any] | None = None
  if architecture in _GEMMA:
    normalizer = marked
    pre_tokenizer = {
      "type": "Split",
      "pattern": {"String": " "},
      "behavior": "MergedWithPrevious",
      "invert": False,
    }
  elif architecture == "phi3":
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
  """The two tokens of each merge, which a space separates."""
  pairs = [merge.split(" ") if isinstance(merge, str) else [] for merge in merges]
  for merge, pair in zip(merges, pairs):
    if len(pair) != 2:
      file.refuse(f"tokenizer.ggml.merges has {shown(merge)}, which is not two tokens")
  return pairs


def _merges_of(tokens: Sequence[str], scores: Sequence[float]) -> list[list[str]]:
  """The merges that make the tokens of a BPE of sentencepiece, in their order.

  A token is made of any two others. The token with the highest score is made first.
  """
  ids = {token: number for number, token in enumerate(tokens)}
  found = []
  score_of = dict(zip(tokens, scores))
  for token, score in score_of.items():
    ways = [(token[:i], token[i:]) for i in range(1, len(token))]
    ways = [(a, b) for a, b in ways if a in ids and b in ids]
    # The order of equal ones: sorting is stable.
    ways.sort(key=lambda way: (ids[way[0]], ids[way[1]]))
    found += [(score, a, b) for a, b in ways]
  found.sort(key=lambda merge: (-merge[0], -len(merge[1]), -len(merge[2])))
  return [[a, b] for _, a, b in found]


_KINDS: dict[str, Callable[[GGUFFile, _Vocabulary], dict[str, Any]]] = {
  "gpt2": _on_bytes,
  "llama": _on_characters,
}
