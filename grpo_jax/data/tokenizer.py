"""Text to token ids and back: one id per character, a Hugging Face tokenizer.json, a sentencepiece tokenizer.model."""

import dataclasses
import functools
import itertools
import json
import pathlib
from typing import Any, Callable, Mapping, Sequence

import tokenizers

from grpo_jax.data import chat
from grpo_jax.data.pieces import Pieces
from grpo_jax.settings import ConfigError

_BESIDE = (
  "tokenizer_config.json",
  "special_tokens_map.json",
  "generation_config.json",
  "added_tokens.json",
  "vocab.json",
  "merges.txt",
  "chat_template.jinja",
  "chat_template.json",
  "tokenizer.model",
)
EncodeBatch = Callable[[Sequence[str]], list[list[int]]]


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """Special tokens in a text become their ids, and no others are added. What stands before a plain prompt is `prefix_ids`.

  A text that follows another one is encoded by `encode_batch_after`, without the space that sentencepiece puts before a
  text, and `decode` gives it back with every space it begins with: the text of prompt and completion is the prompt's and
  then decode(completion). `decode` skips special tokens and ids beyond the vocabulary.
  """

  vocab_size: int  # the highest id + 1
  stop_ids: tuple[
    int, ...
  ]  # what ends a text; the first one is written after a solution. May be empty
  pad_id: int
  prefix_ids: tuple[
    int, ...
  ]  # of <s> or the like, where the tokenizer is said to begin a text with it
  special: Mapping[
    str, str
  ]  # the special tokens by the names that chat templates use, such as eos_token
  encode_batch: EncodeBatch = dataclasses.field(repr=False)
  encode_batch_after: EncodeBatch = dataclasses.field(repr=False)
  decode: Callable[[Sequence[int]], str] = dataclasses.field(repr=False)
  files: Mapping[str, bytes] = dataclasses.field(repr=False)  # what `save` writes

  def encode(self, text: str) -> list[int]:
    """Token ids of `text`. Raises ConfigError for a character the vocabulary cannot express."""
    return self.encode_batch([text])[0]

  def render(self, messages: chat.Messages, generation_prompt: bool = True) -> str:
    """A conversation as text for `encode`, by the chat template: list of {"role": ..., "content": ...} -> text.

    `generation_prompt`: ends where the assistant's answer begins. Raises ConfigError without a template, for one that
    fails or reaches out of its sandbox, and for messages that are none.
    """
    return self._template(messages, generation_prompt, self.special)

  @functools.cached_property
  def _template(self):
    return chat.compiled(*_chat_template(self.files))

  def save(self, folder: str | pathlib.Path) -> None:
    """Writes what `load` and `transformers.AutoTokenizer` need; files that were loaded are written as they were."""
    for name, content in self.files.items():
      file = pathlib.Path(folder) / name
      file.parent.mkdir(parents=True, exist_ok=True)
      file.write_bytes(content)


def characters(alphabet: str) -> Tokenizer:
  """One id per character: 0 is `<pad>`, 1 is `<eos>`, then the alphabet in its order, repeated characters once."""
  vocabulary = {token: i for i, token in enumerate(("<pad>", "<eos>", *dict.fromkeys(alphabet)))}
  engine = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary))
  engine.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
  engine.decoder = tokenizers.decoders.Fuse()
  engine.add_special_tokens(["<pad>", "<eos>"])
  special = {"eos_token": "<eos>", "pad_token": "<pad>"}
  about = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
  } | special
  return _hugging_face(
    {
      "tokenizer.json": engine.to_str(pretty=True).encode(),
      "tokenizer_config.json": json.dumps(about, indent=2).encode(),
      "special_tokens_map.json": json.dumps(special, indent=2).encode(),
    }
  )


def load(path: str | pathlib.Path, key: str = "data.tokenizer") -> Tokenizer:
  """The tokenizer in `path`: a .json or .model file, or a folder with tokenizer.json or, failing that, tokenizer.model.
  Errors name the config key `key`.

  The ids that end a text are the eos_token of the files beside it, then the eos_token_id of generation_config.json.
  """
  path = pathlib.Path(path).expanduser()
  if path.is_dir():
    found = [
      path / name for name in ("tokenizer.json", "tokenizer.model") if (path / name).is_file()
    ]
    if not found:
      raise ConfigError(f"{key}: {path} holds neither tokenizer.json nor tokenizer.model")
    path = found[0]
  if not path.is_file() or path.suffix not in (".json", ".model"):
    raise ConfigError(
      f"{key}: {path} must be a tokenizer.json, a tokenizer.model or a folder with one"
    )
  name, config = f"tokenizer{path.suffix}", path.with_name("config.json")
  beside = {other: path.with_name(other) for other in _BESIDE}
  beside |= {
    f"{one.parent.name}/{one.name}": one
    for one in path.parent.glob("additional_chat_templates/*.jinja")
  }
  files = {other: file.read_bytes() for other, file in beside.items() if file.is_file()} | {
    name: path.read_bytes()
  }
  try:
    if path.suffix == ".model":
      return _sentencepiece(files)
    model = _json({"config.json": config.read_bytes()} if config.is_file() else {}, "config.json")
    return _hugging_face(files, model.get("model_type"))
  except ConfigError:
    raise
  except (
    Exception
  ) as error:  # both libraries raise bare Exception or RuntimeError for a damaged file
    raise ConfigError(f"{key}: {path} cannot be read as a {name}: {error}") from error


def _hugging_face(files: Mapping[str, bytes], model_type: str | None = None) -> Tokenizer:
  parts = json.loads(files["tokenizer.json"])
  if _is_llama(parts, _json(files, "tokenizer_config.json"), model_type):
    parts |= _llama_spaces(_json(files, "tokenizer_config.json"))
  engine = _engine(json.dumps(parts))
  inside = parts | {
    key: _without_space(parts.get(key)) for key in ("normalizer", "pre_tokenizer", "decoder")
  }
  after = engine if inside == parts else _engine(json.dumps(inside))
  special = _special_tokens(files)
  stop_ids, pad_id = _special_ids(files, engine.token_to_id)
  return Tokenizer(
    vocab_size=max(engine.get_vocab(with_added_tokens=True).values()) + 1,
    stop_ids=stop_ids,
    pad_id=stop_ids[0] if pad_id is None and stop_ids else pad_id or 0,
    prefix_ids=_prefix_ids(files, engine.token_to_id, special, _added_before(engine)),
    special=special,
    encode_batch=functools.partial(_encode_batch, engine),
    encode_batch_after=functools.partial(_encode_batch, after),
    decode=lambda ids: after.decode([int(i) for i in ids], skip_special_tokens=True),
    files=files,
  )


def _engine(content):
  engine = tokenizers.Tokenizer.from_str(content)
  engine.no_truncation()  # a file may ask for either; lengths are the loader's business
  engine.no_padding()
  return engine


def _is_llama(parts, about, model_type):
  """Whether `transformers` 5 makes a LlamaTokenizer of it: only of sentencepiece's kind, not of Llama 3's bytes."""
  named = str(about.get("tokenizer_class")).removesuffix(
    "Fast"
  ) == "LlamaTokenizer" and model_type in (None, "llama")
  return named and not any(
    '"ByteLevel"' in json.dumps(parts.get(key)) for key in ("pre_tokenizer", "decoder")
  )


def _llama_spaces(about):
  """The normalizer and pre-tokenizer of transformers' LlamaTokenizer, which it has whatever tokenizer.json says."""
  scheme = (
    "never"
    if about.get("add_prefix_space") is False
    else "always"
    if about.get("legacy")
    else "first"
  )
  return {
    "normalizer": None,
    "pre_tokenizer": {
      "type": "Metaspace",
      "replacement": "▁",
      "prepend_scheme": scheme,
      "split": False,
    },
  }


def _without_space(part: Any) -> Any:
  """A normalizer, pre-tokenizer or decoder of tokenizer.json that neither puts a space before a text nor takes one away."""
  kind = part["type"] if part else None
  if kind == "Sequence":
    return part | {
      key: list(filter(None, map(_without_space, members)))
      for key, members in part.items()
      if key != "type"
    }
  if kind == "Prepend" or kind == "Strip" and part.get("content") == " ":
    return None
  off = (
    {"prepend_scheme": "never", "add_prefix_space": False}
    if kind in ("Metaspace", "ByteLevel")
    else {}
  )
  return part and part | {key: value for key, value in off.items() if key in part}


def _added_before(engine):
  """What the post-processor puts before a text."""
  if engine.post_processor is None:
    return ()
  encoding = engine.encode("0")
  return tuple(
    i
    for i, _ in itertools.takewhile(lambda x: x[1], zip(encoding.ids, encoding.special_tokens_mask))
  )


def _encode_batch(engine, texts):
  try:
    return [encoding.ids for encoding in engine.encode_batch(list(texts), add_special_tokens=False)]
  except Exception:
    unknown = next((c for c in sorted(set("".join(texts))) if not _encodes(engine, c)), None)
    if unknown is None:
      raise
    raise ConfigError(
      f"data.tokenizer: the character {unknown!r} is not in the vocabulary"
    ) from None


def _encodes(engine, character):
  try:
    return engine.encode(character, add_special_tokens=False) is not None
  except Exception:
    return False


def _sentencepiece(files: Mapping[str, bytes]) -> Tokenizer:
  about, special = _json(files, "tokenizer_config.json"), _special_tokens(files)
  added = {i: {"content": token} for token, i in _json(files, "added_tokens.json").items()}
  added |= {int(i): token for i, token in about.get("added_tokens_decoder", {}).items()}
  pieces = Pieces(
    files["tokenizer.model"], added, special.values(), legacy=bool(about.get("legacy"))
  )
  model = pieces.model
  own = {
    "bos_token": model.bos_id(),
    "eos_token": model.eos_id(),
    "unk_token": model.unk_id(),
    "pad_token": model.pad_id(),
  }
  special = {key: model.id_to_piece(i) for key, i in own.items() if i >= 0} | special
  stop_ids, pad_id = _special_ids(files, pieces.token_to_id)
  if model.eos_id() >= 0 and not stop_ids:
    stop_ids = (model.eos_id(),)
  if pad_id is None:
    pad_id = model.pad_id() if model.pad_id() >= 0 else (*stop_ids, 0)[0]
  return Tokenizer(
    vocab_size=pieces.size,
    stop_ids=stop_ids,
    pad_id=pad_id,
    prefix_ids=_prefix_ids(files, pieces.token_to_id, special, ()),
    special=special,
    encode_batch=lambda texts: [pieces.encode(text) for text in texts],
    encode_batch_after=lambda texts: [pieces.encode_after(text) for text in texts],
    decode=lambda ids: pieces.decode([int(i) for i in ids]),
    files=files,
  )


def _prefix_ids(files, token_to_id, special, added):
  """`added` by the tokenizer's own post-processor, unless the files beside it say whether a text begins with bos_token."""
  about = _json(files, "tokenizer_config.json")
  if not about.keys() & {"add_bos_token", "add_eos_token"}:
    return added
  bos_id = token_to_id(special.get("bos_token", ""))
  return (bos_id,) if about.get("add_bos_token") and bos_id is not None else ()


def _special_tokens(files: Mapping[str, bytes]) -> dict[str, str]:
  """bos_token, eos_token and so on -> their texts."""
  named = _json(files, "special_tokens_map.json") | _json(files, "tokenizer_config.json")
  return {
    key: text for key, value in named.items() if key.endswith("_token") and (text := _token(value))
  }


def _special_ids(files: Mapping[str, bytes], token_to_id: Callable[[str], int | None]):
  """-> (stop ids, pad id or None), as the configuration files beside a tokenizer name them."""
  stops, pads = [], []
  for name in ("tokenizer_config.json", "special_tokens_map.json"):
    values = _json(files, name)
    stops.append(token_to_id(_token(values.get("eos_token"))))
    pads.append(token_to_id(_token(values.get("pad_token"))))
  generation = _json(files, "generation_config.json").get("eos_token_id")
  stops += generation if isinstance(generation, list) else [generation]
  return (
    tuple(dict.fromkeys(i for i in stops if i is not None)),
    next((i for i in pads if i is not None), None),
  )


def _token(value):
  return value["content"] if isinstance(value, dict) else value if isinstance(value, str) else ""


def _chat_template(files: Mapping[str, bytes]) -> tuple[str, str]:
  """-> (the template, the name of its file). Of several in tokenizer_config.json, the one named default."""
  if "chat_template.jinja" in files:
    return files["chat_template.jinja"].decode("utf-8"), "chat_template.jinja"
  for name in ("tokenizer_config.json", "chat_template.json"):
    template = _json(files, name).get("chat_template")
    if isinstance(template, list):
      template = {one["name"]: one["template"] for one in template}.get("default")
    if template:
      return template, name
  raise ConfigError(
    "data.tokenizer: no chat template (chat_template in tokenizer_config.json, or chat_template.jinja) is"
    " beside the tokenizer, so it knows no conversations; choose a chat model's, or set data.chat=False"
  )


def _json(files, name):
  try:
    return json.loads(files.get(name, b"{}"))
  except ValueError as error:
    raise ConfigError(f"data.tokenizer: {name} beside the tokenizer is not JSON: {error}") from None
