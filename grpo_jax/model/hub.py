"""Names of huggingface.co as folders on this machine."""

import dataclasses
import re
from pathlib import Path

from grpo_jax.config import Config
from grpo_jax.settings import ConfigError

# owner/model, or owner/model@revision; not a file of a tokenizer or of rewards
_NAME = re.compile(r"(?!.*\.(?:json|model|py)$)([\w-][\w.-]*/[\w.-]+)(?:@([\w./-]+))?")
_WEIGHTS = ["model*.safetensors", "adapter_model.safetensors"]  # no pickles
_TEXTS = ["*.json", "*.model", "*.jinja", "merges.txt", "vocab.txt"]  # no code


def is_name(path: str) -> bool:
  """Whether it is no path here and may be a name there."""
  return _NAME.fullmatch(path) is not None and not Path(path).expanduser().exists()


def parts(path: str) -> tuple[str, str | None]:
  """(name, revision) of what is a name, else (path, None)."""
  return _NAME.fullmatch(path).groups() if is_name(path) else (path, None)


def folder(path: str, key: str) -> str:
  """`path` where it exists or is no name, else what it names, downloaded once into the cache of huggingface_hub.

  HF_HUB_OFFLINE=1 takes it from there. Raises ConfigError, naming config key `key`, where it cannot be had.
  """
  if not is_name(path):
    return path
  from huggingface_hub import snapshot_download  # here: slow to import

  name, revision = parts(path)
  files = _TEXTS if key == "data.tokenizer" else _TEXTS + _WEIGHTS
  try:
    return snapshot_download(name, revision=revision, allow_patterns=files)
  except Exception as error:  # no such model, a gate, no network, offline and not there: each is an exception of its own
    why = " ".join(str(error).split())
    raise ConfigError(
      f"config key {key} is {path!r}: there is no such folder, and from huggingface.co it cannot be had"
      f" ({type(error).__name__}: {why:.200})"
    ) from None


def local(config: Config) -> Config:
  """The config with folders for the names in it."""
  model, data, lora = config.model, config.data, config.lora
  return dataclasses.replace(
    config,
    model=dataclasses.replace(model, path=folder(model.path, "model.path")),
    data=dataclasses.replace(data, tokenizer=folder(data.tokenizer, "data.tokenizer")),
    lora=dataclasses.replace(lora, path=folder(lora.path, "lora.path")),
  )
