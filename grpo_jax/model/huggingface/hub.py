"""Replaces names of models on huggingface.co by folders on this machine."""

import dataclasses
from pathlib import Path
import re
from typing import TYPE_CHECKING

from grpo_jax.settings import ConfigError, RunFailed

if TYPE_CHECKING:
  from grpo_jax.config import Config

# owner/model or owner/model@revision, but not the path of a tokenizer, GGUF or rewards file.
_NAME = re.compile(r"(?!.*\.(?:json|model|py|gguf)$)([\w-][\w.-]*/[\w.-]+)(?:@([\w./-]+))?")
_CARD = "README.md"
_MODEL = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
_ADAPTERS = ("adapter_config.json", "adapter_model.safetensors")
_WEIGHTS = ["model*.safetensors", "adapter_model.safetensors"]  # no pickles
# No code. README.md has the licence.
_TEXTS = ["*.json", "*.model", "*.jinja", "merges.txt", "vocab.txt", "README.md"]


def is_name(path: str) -> bool:
  """Whether `path` looks like a name on huggingface.co and does not exist on this machine."""
  return _NAME.fullmatch(path) is not None and not Path(path).expanduser().exists()


def parts(path: str) -> tuple[str, str | None]:
  """Splits a name into (name, revision). Anything else becomes (path, None)."""
  match = _NAME.fullmatch(path)
  if match is None or not is_name(path):
    return path, None
  return match[1], match[2]


def short_name(path: str) -> str:
  """The name of a model without its owner, revision and place, such as qwen2.5-0.5b.

  In the cache of huggingface_hub, a model lies in models--OWNER--NAME/snapshots/REVISION.
  """
  cached = re.search(r"models--(?:.*--)?([^/]+)/snapshots/", path + "/")
  name = cached[1] if cached else Path(path.partition("@")[0]).name
  return name.lower()


def folder(path: str, key: str) -> str:
  """The folder of a model. Downloads it if `path` is a name on huggingface.co.

  Downloads are kept in the cache of huggingface_hub, and happen once. HF_HUB_OFFLINE=1 takes the
  model from that cache without a connection.

  Args:
    path: A path on this machine, which is returned as it is, or a name.
    key: The config key that holds `path`, for the error message.

  Raises:
    ConfigError: The model cannot be downloaded.
  """
  if not is_name(path):
    return path
  from huggingface_hub import snapshot_download  # imported here because it is slow

  name, revision = parts(path)
  files = _TEXTS if key == "data.tokenizer" else _TEXTS + _WEIGHTS
  try:
    return snapshot_download(name, revision=revision, allow_patterns=files)
  # Each cause has an exception of its own: no such model, a model that needs an agreement, no
  # network, offline and not in the cache.
  except Exception as error:
    reason = " ".join(str(error).split())
    raise ConfigError(
      f"config key {key} is {path!r}: there is no such folder, and the download from"
      f" huggingface.co failed ({type(error).__name__}: {reason:.200})"
    ) from None


def check_repository(name: str, key: str) -> None:
  """Raises ConfigError, which names `key`, unless `name` is OWNER/NAME."""
  match = _NAME.fullmatch(name)
  if match is None or match[2]:
    raise ConfigError(f"{key}={name}: it must be OWNER/NAME, a repository of huggingface.co")


def push(folder: Path, name: str) -> list[str]:
  """Uploads a folder with a model to huggingface.co. A repository that is made now is private.

  A README.md that is there stays, because somebody may have written it. With the weights of a
  whole model, those that are there go, and adapters, because programs would read them beside the
  new ones, or instead of them. Files in folders of the repository stay.

  Args:
    folder: The folder.
    name: OWNER/NAME.

  Returns:
    Lines that say where the model is.

  Raises:
    RunFailed: It cannot be uploaded.
  """
  from huggingface_hub import HfApi, get_token  # imported here because it is slow

  later = f"hf upload {name} {folder} does that later"
  if get_token() is None:
    raise RunFailed(
      f"{folder} is written, and not uploaded to {name}, because there is no token: run hf auth"
      f" login, or set HF_TOKEN; {later}"
    )
  try:
    api = HfApi()
    url = api.create_repo(name, private=True, exist_ok=True)
    there = api.list_repo_files(name)
    has_card = _CARD in there
    api.upload_folder(
      repo_id=name,
      folder_path=folder,
      commit_message="Upload of grpo_jax",
      ignore_patterns=[_CARD] if has_card else None,
      delete_patterns=_outdated(there, folder) or None,
    )
  except Exception as error:  # no network, no right to write: each has an exception of its own
    reason = " ".join(str(error).split())
    raise RunFailed(
      f"{folder} is written, and not uploaded to {name} ({type(error).__name__}: {reason:.200});"
      f" {later}"
    ) from error
  lines = [f"uploaded to {url}, which is private if it is new"]
  if has_card:
    lines.append(f"{name} has a {_CARD}, which stays as it is; the new one is in {folder}")
  return lines


def _outdated(there: list[str], folder: Path) -> list[str]:
  """The files of a repository that would be read beside the model in `folder`, or instead."""
  if (folder / _ADAPTERS[0]).exists():
    return []
  weights = [file for file in there if _MODEL.fullmatch(file) or file in _ADAPTERS]
  return [file for file in weights if not (folder / file).exists()]


def local(config: "Config") -> "Config":
  """The same config with folders in place of names on huggingface.co."""
  model, data, lora = config.model, config.data, config.lora
  return dataclasses.replace(
    config,
    model=dataclasses.replace(model, path=folder(model.path, "model.path")),
    data=dataclasses.replace(data, tokenizer=folder(data.tokenizer, "data.tokenizer")),
    lora=dataclasses.replace(lora, path=folder(lora.path, "lora.path")),
  )
