"""The files of a tokenizer: tokenizer.json or tokenizer.model, and other files in its folder."""

import codecs
from collections.abc import Mapping
import pathlib
from typing import Any

from grpo_jax import gguf_file
from grpo_jax.files import json_object
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


def find(path: str | pathlib.Path, key: str) -> pathlib.Path:
  """Finds the file that defines the tokenizer in `path`.

  Args:
    path: A .json file, a .model file, a .gguf file, or a folder with tokenizer.json or
      tokenizer.model. If the folder has both, tokenizer.json is used.
    key: The config key of `path`, for error messages.

  Raises:
    ConfigError: There is no such file.
  """
  path = pathlib.Path(path).expanduser()
  if path.is_dir():
    candidates = (path / "tokenizer.json", path / "tokenizer.model")
    found = next((file for file in candidates if file.is_file()), None)
    if found is None:
      raise ConfigError(
        f"{key}: {path} holds neither tokenizer.json nor tokenizer.model{gguf_file.names_in(path)}"
      )
    return found
  if gguf_file.is_gguf(path):
    return path
  if not path.is_file() or path.suffix not in (".json", ".model"):
    raise ConfigError(
      f"{key}: {path} must be a tokenizer.json, a tokenizer.model, a GGUF file or a folder with one"
    )
  return path


def read(path: pathlib.Path) -> dict[str, bytes]:
  """Reads a tokenizer's files. Returns their contents, keyed by the name to save them under.

  `path`, whatever its name, is saved as tokenizer.json or tokenizer.model.
  """
  paths = {name: path.with_name(name) for name in _BESIDE}
  for template in path.parent.glob("additional_chat_templates/*.jinja"):
    paths[f"{template.parent.name}/{template.name}"] = template
  paths[f"tokenizer{path.suffix}"] = path
  # Windows programs may start a text with a byte order mark.
  return {
    name: file.read_bytes().removeprefix(codecs.BOM_UTF8)
    for name, file in paths.items()
    if file.is_file()
  }


def read_json(files: Mapping[str, bytes], name: str) -> Any:
  """Parses the JSON file `name` of `files`. Returns {} if there is no such file.

  Raises:
    ConfigError: The file is not a JSON object.
  """
  try:
    return json_object(files.get(name, b"{}"))
  except ValueError as error:
    raise ConfigError(f"data.tokenizer: {name} beside the tokenizer is not JSON: {error}") from None


def model_type(config_file: pathlib.Path) -> str | None:
  """The `model_type` in the config.json of a model, or None without such a file."""
  if not config_file.is_file():
    return None
  config = read_json({"config.json": config_file.read_bytes()}, "config.json")
  return config.get("model_type")
