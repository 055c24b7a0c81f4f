"""Text to token ids and back: one id per character, a Hugging Face tokenizer.json, a sentencepiece tokenizer.model."""
import dataclasses
import functools
import json
import pathlib
from typing import Callable, Mapping, Sequence

import sentencepiece
import tokenizers

from grpo_jax.config import ConfigError

_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "added_tokens.json",
           "vocab.json", "merges.txt", "chat_template.jinja", "tokenizer.model")


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """`encode_batch` adds no special tokens; `decode` skips special tokens and ids beyond the vocabulary."""
  vocab_size: int  # the highest id + 1
  stop_ids: tuple[int, ...]  # what ends a text; the first one is written after a solution. May be empty
  pad_id: int
  encode_batch: Callable[[Sequence[str]], list[list[int]]] = dataclasses.field(repr=False)
  decode: Callable[[Sequence[int]], str] = dataclasses.field(repr=False)
  files: Mapping[str, bytes] = dataclasses.field(repr=False)  # what `save` writes

  def encode(self, text: str) -> list[int]:
    """Token ids of `text`. Raises ConfigError for a character the vocabulary cannot express."""
    return self.encode_batch([text])[0]

  def save(self, folder: str | pathlib.Path) -> None:
    """Writes what `load` and `transformers.AutoTokenizer` need; files that were loaded are written as they were."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in self.files.items():
      (folder / name).write_bytes(content)


def characters(alphabet: str) -> Tokenizer:
  """One id per character: 0 is `<pad>`, 1 is `<eos>`, then the alphabet in its order, repeated characters once."""
  vocabulary = {token: i for i, token in enumerate(("<pad>", "<eos>", *dict.fromkeys(alphabet)))}
  engine = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary))
  engine.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
  engine.decoder = tokenizers.decoders.Fuse()
  engine.add_special_tokens(["<pad>", "<eos>"])
  special = {"eos_token": "<eos>", "pad_token": "<pad>"}
  about = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | special
  return _hugging_face({
      "tokenizer.json": engine.to_str(pretty=True).encode(),
      "tokenizer_config.json": json.dumps(about, indent=2).encode(),
      "special_tokens_map.json": json.dumps(special, indent=2).encode(),
  }, "tokenizer.json")


def load(path: str | pathlib.Path, key: str = "data.tokenizer") -> Tokenizer:
  """The tokenizer in `path`: a .json or .model file, or a folder with tokenizer.json or, failing that, tokenizer.model.
  Errors name the config key `key`.

  The ids that end a text are the eos_token of the files beside it, then the eos_token_id of generation_config.json.
  """
  path = pathlib.Path(path).expanduser()
  if path.is_dir():
    found = [path / name for name in ("tokenizer.json", "tokenizer.model") if (path / name).is_file()]
    if not found:
      raise ConfigError(f"{key}: {path} holds neither tokenizer.json nor tokenizer.model")
    path = found[0]
  if not path.is_file() or path.suffix not in (".json", ".model"):
    raise ConfigError(f"{key}: {path} must be a tokenizer.json, a tokenizer.model or a folder with one")
  read, name = (_hugging_face, "tokenizer.json") if path.suffix == ".json" else (_sentencepiece, "tokenizer.model")
  beside = {other: path.with_name(other) for other in _BESIDE}
  files = {other: file.read_bytes() for other, file in beside.items() if file.is_file()} | {name: path.read_bytes()}
  try:
    return read(files, name)
  except ConfigError:
    raise
  except Exception as error:  # both libraries raise bare Exception or RuntimeError for a damaged file
    raise ConfigError(f"{key}: {path} cannot be read as a {name}: {error}") from error


def _hugging_face(files: Mapping[str, bytes], name: str) -> Tokenizer:
  engine = tokenizers.Tokenizer.from_str(files[name].decode("utf-8"))
  engine.no_truncation()  # a file may ask for either; lengths are the loader's business
  engine.no_padding()

  def encode_batch(texts):
    try:
      return [encoding.ids for encoding in engine.encode_batch(list(texts), add_special_tokens=False)]
    except Exception:
      unknown = next((c for c in sorted(set("".join(texts))) if not _encodes(engine, c)), None)
      if unknown is None:
        raise
      raise ConfigError(f"data.tokenizer: the character {unknown!r} is not in the vocabulary") from None

  stop_ids, pad_id = _special_ids(files, engine.token_to_id)
  return Tokenizer(
      vocab_size=max(engine.get_vocab(with_added_tokens=True).values()) + 1, stop_ids=stop_ids,
      pad_id=stop_ids[0] if pad_id is None and stop_ids else pad_id or 0, encode_batch=encode_batch,
      decode=lambda ids: engine.decode([int(i) for i in ids], skip_special_tokens=True), files=files)


def _encodes(engine, character):
  try:
    return engine.encode(character, add_special_tokens=False) is not None
  except Exception:
    return False


def _sentencepiece(files: Mapping[str, bytes], name: str) -> Tokenizer:
  engine = sentencepiece.SentencePieceProcessor(model_proto=files[name])
  size = engine.get_piece_size()
  stop_ids, pad_id = _special_ids(files, functools.partial(_piece_id, engine))
  if engine.eos_id() >= 0 and not stop_ids:
    stop_ids = (engine.eos_id(),)
  if pad_id is None:
    pad_id = engine.pad_id() if engine.pad_id() >= 0 else (*stop_ids, 0)[0]
  silent = {i for i in range(size) if engine.is_control(i)} | set(stop_ids) | {pad_id}
  return Tokenizer(
      vocab_size=size, stop_ids=stop_ids, pad_id=pad_id, encode_batch=lambda texts: engine.encode(list(texts)),
      decode=lambda ids: engine.decode([int(i) for i in ids if 0 <= i < size and i not in silent]), files=files)


def _piece_id(engine, token):
  index = engine.piece_to_id(token)
  return index if engine.id_to_piece(index) == token else None  # an unknown piece has the id of <unk>


def _special_ids(files: Mapping[str, bytes], token_to_id: Callable[[str], int | None]):
  """-> (stop ids, pad id or None), as the configuration files beside a tokenizer name them."""
  stops, pads = [], []
  for name in ("tokenizer_config.json", "special_tokens_map.json"):
    values = _json(files, name)
    stops.append(token_to_id(_token(values.get("eos_token"))))
    pads.append(token_to_id(_token(values.get("pad_token"))))
  generation = _json(files, "generation_config.json").get("eos_token_id")
  stops += generation if isinstance(generation, list) else [generation]
  return (tuple(dict.fromkeys(i for i in stops if i is not None)), next((i for i in pads if i is not None), None))


def _token(value):
  return value["content"] if isinstance(value, dict) else value or ""


def _json(files, name):
  try:
    return json.loads(files.get(name, b"{}"))
  except ValueError as error:
    raise ConfigError(f"data.tokenizer: {name} beside the tokenizer is not JSON: {error}") from None
