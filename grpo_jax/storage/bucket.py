"""Folders of Google Cloud Storage, named gs://BUCKET/FOLDER.

A bucket holds whole objects by name. None of them can be appended to, none can be locked, and a
folder is only what their names have in common. Orbax writes checkpoints into a bucket directly, and
`bucket_files.py` copies everything else there.
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
COMMITTED = "commit_success.txt"  # what orbax writes last into a checkpoint in a bucket


def is_bucket(path: Any) -> bool:
  """Whether the path, or the name of one, lies in a bucket."""
  return str(path).startswith(_SCHEME)


def folder(name: str | Path) -> Path:
  """The folder of this name: a Path, or for a bucket an epath.Path, which is used like one.

  Raises:
    ConfigError: It is no path, or in object storage that cannot be used.
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
  """Makes one line of what fails in a bucket, and says what takes long. Leaves other folders alone.

  Each of gcsfs, google.auth, aiohttp and tensorstore has exceptions of its own.
  """
  try:
    with doing(f"waiting for {path}") if is_bucket(path) else contextlib.nullcontext():
      yield
  except (ConfigError, RunFailed):
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
  """Sets how epath reaches buckets. It must happen before the first access."""
  import fsspec  # here, because runs on disks do not need it

  # With TensorFlow installed, epath would use that, and it would take the memory of the GPUs.
  os.environ.setdefault("EPATH_USE_TF", "false")
  # Tensorstore and other processes write, too, so a listing that is kept would be out of date.
  fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
  logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it raises what it logs
