"""Downloads models from huggingface.co, and uploads them."""

import dataclasses
from pathlib import Path
import re
import shlex
from typing import TYPE_CHECKING

from grpo_jax.settings import ConfigError, RunFailed

if TYPE_CHECKING:
  from grpo_jax.config import Config

# OWNER/NAME or OWNER/NAME@REVISION, but not the path of a tokenizer, GGUF or rewards file.
_NAME = re.compile(r"(?!.*\.(?:json|model|py|gguf)$)([\w-][\w.-]*/[\w.-]+)(?:@([\w./-]+))?")
_CARD = "README.md"
_MODEL = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
_ADAPTERS = ("adapter_config.json", "adapter_model.safetensors")
_WEIGHTS = ["model*.safetensors", "adapter_model.safetensors"]  # no pickles, which can run code
# No code files. README.md is downloaded because it names the licence.
_TEXTS = ["*.json", "*.model", "*.jinja", "merges.txt", "vocab.txt", "README.md"]


def is_name(path: str) -> bool:
  """Whether `path` looks like a name on huggingface.co and does not exist on this machine."""
  return _NAME.fullmatch(path) is not None and not Path(path).expanduser().exists()


def parts(path: str) -> tuple[str, str | None]:
  """Splits OWNER/NAME@REVISION at "@". The revision is None if it is absent, or for a path."""
  match = _NAME.fullmatch(path)
  if match is None or not is_name(path):
    return path, None
  return match[1], match[2]


def short_name(path: str) -> str:
  """The name of a model in lower case, without its owner, revision and folder: qwen2.5-0.5b.

  The cache of huggingface_hub keeps a model in models--OWNER--NAME/snapshots/REVISION.
  """
  cached = re.search(r"models--(?:.*--)?([^/]+)/snapshots/", path + "/")
  name = cached[1] if cached else Path(path.partition("@")[0]).name
  return name.lower()


def folder(path: str, key: str) -> str:
  """Returns the folder of a model. Downloads it if `path` is a name on huggingface.co.

  huggingface_hub caches downloads, so each model is downloaded once. With HF_HUB_OFFLINE=1, the
  cache is used without a connection.

  Args:
    path: A path on this machine, which is returned unchanged, or a name on huggingface.co.
    key: The config key that holds `path`, for the error message. For "data.tokenizer", the weights
      are not downloaded.

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
  # Each cause raises another exception: no such model, a model whose licence must be accepted, no
  # network, or offline and not in the cache.
  except Exception as error:
    reason = " ".join(str(error).split())
    raise ConfigError(
      f"config key {key} is {path!r}: there is no such folder, and the download from"
      f" huggingface.co failed ({type(error).__name__}: {reason:.200})"
    ) from None


def check_repository(name: str, key: str) -> None:
  """Raises ConfigError, naming the option `key`, unless `name` is OWNER/NAME."""
  match = _NAME.fullmatch(name)
  if match is None or match[2]:
    raise ConfigError(f"{key}={name}: it must be OWNER/NAME, a repository of huggingface.co")


def push(folder: Path, name: str) -> list[str]:
  """Uploads a model folder to huggingface.co. Creates a private repository if there is none.

  A README.md in the repository is kept, because somebody may have written it. If the folder holds a
  whole model, weights and adapters in the repository that it does not overwrite are deleted,
  because programs would load them too, or instead. Subfolders of the repository stay unchanged.

  Args:
    folder: The folder of the model or of adapters.
    name: The repository, as OWNER/NAME.

  Returns:
    Lines of text for the user that say where the model is.

  Raises:
    RunFailed: There is no token, or the upload failed.
  """
  from huggingface_hub import HfApi, get_token  # imported here because it is slow

  later = ["hf", "upload", name, str(folder), "--private"]  # does the same as this function
  if get_token() is None:
    raise RunFailed(
      f"{folder} is written, and not uploaded to {name}, because there is no token: run hf auth"
      f" login, or set HF_TOKEN; {shlex.join(later)} does that later"
    )
  try:
    api = HfApi()
    url = api.create_repo(name, private=True, exist_ok=True)
    existing = api.list_repo_files(name)
    has_card, outdated = _CARD in existing, _outdated(existing, folder)
    later += ["--exclude", _CARD] if has_card else []
    later += [part for file in outdated for part in ("--delete", file)]
    api.upload_folder(
      repo_id=name,
      folder_path=folder,
      commit_message="Upload of grpo_jax",
      ignore_patterns=[_CARD] if has_card else None,
      delete_patterns=outdated or None,
    )
  except Exception as error:  # no network, no write access: each raises another exception
    # What the server says follows a link to a page about the status code.
    text = re.sub(r"For more information check: \S+", "", str(error))
    reason = " ".join(text.split())
    raise RunFailed(
      f"{folder} is written, and not uploaded to {name} ({type(error).__name__}: {reason:.300});"
      f" {shlex.join(later)} does that later"
    ) from error
  lines = [f"uploaded to {url}, which is private if it is new"]
  if has_card:
    lines.append(f"{name} has a {_CARD}, which stays as it is; the new one is in {folder}")
  return lines


def _outdated(existing: list[str], folder: Path) -> list[str]:
  """The files of a repository that programs would load beside, or instead of, the new model."""
  if (folder / _ADAPTERS[0]).exists():
    return []
  weights = [file for file in existing if _MODEL.fullmatch(file) or file in _ADAPTERS]
  return [file for file in weights if not (folder / file).exists()]


def local(config: "Config") -> "Config":
  """Downloads the models that a config names, and returns the config with their folders."""
  model, data, lora = config.model, config.data, config.lora
  return dataclasses.replace(
    config,
    model=dataclasses.replace(model, path=folder(model.path, "model.path")),
    data=dataclasses.replace(data, tokenizer=folder(data.tokenizer, "data.tokenizer")),
    lora=dataclasses.replace(lora, path=folder(lora.path, "lora.path")),
  )
