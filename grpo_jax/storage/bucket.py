"""Folders in Google Cloud Storage, named gs://BUCKET/FOLDER.

A bucket holds objects by name, which cannot be appended to or locked. A folder is only a common
prefix of names. Orbax writes checkpoints into a bucket directly, and `bucket_files.py` copies all
other files there.
"""

from collections.abc import Iterator
import contextlib
import importlib.util
import logging
import os
from pathlib import Path
from typing import Any

from grpo_jax.progress import doing
from grpo_jax.settings import ConfigError, RunFailed, path_of, path_text

_SCHEME = "gs://"
COMMITTED = "commit_success.txt"  # the object that orbax writes last for a checkpoint in a bucket


def is_bucket(path: Any) -> bool:
  """Whether a path, or its name, is in a bucket."""
  return str(path).startswith(_SCHEME)


def folder(name: str | Path) -> Path:
  """The folder with this name: a Path, or for a bucket an epath.Path, which has the same methods.

  Raises:
    ConfigError: The name is not a path, or it is in object storage that cannot be used.
  """
  text = path_text(name, "workdir")
  if "://" not in text:
    return path_of(text, "workdir")
  bucket, _, inside = text.removeprefix(_SCHEME).partition("/")
  if not is_bucket(name) or not bucket or not inside.strip("/"):
    raise ConfigError(
      f"--workdir={name}: object storage is supported as gs://BUCKET/FOLDER; name such a folder,"
      " or one of this machine"
    )
  if importlib.util.find_spec("gcsfs") is None:
    raise ConfigError(f"--workdir={name} needs the package gcsfs: pip install -e '.[gcs]'")
  _set_up()
  from etils import epath  # here, because runs on disks do not need it

  return epath.Path(text)


@contextlib.contextmanager
def reaching(path: Any, fails_with: type[Exception] = RunFailed) -> Iterator[None]:
  """Turns any error while accessing a bucket into `fails_with`, and shows that the access is slow.

  gcsfs, google.auth, aiohttp and tensorstore raise different exceptions. If `path` is not in a
  bucket, this does nothing.
  """
  try:
    with doing(f"waiting for {path}") if is_bucket(path) else contextlib.nullcontext():
      yield
  except (ConfigError, RunFailed):  # they say already what is wrong
    raise
  except Exception as error:
    if not is_bucket(path):
      raise
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    raise fails_with(
      f"{path} cannot be used ({reason:.300}): check the name, the credentials and the network;"
      " then the same command goes on"
    ) from error


def _set_up() -> None:
  """Configures how epath accesses buckets. Call it before the first access."""
  import fsspec  # here, because runs on disks do not need it

  # If TensorFlow is installed, epath would use it, and it would take the memory of the GPUs.
  os.environ.setdefault("EPATH_USE_TF", "false")
  # Tensorstore and other processes write, too, so a cached listing would be out of date.
  fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
  logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it also raises the errors that it logs
