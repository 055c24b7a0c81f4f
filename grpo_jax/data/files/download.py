"""Downloads data sets of huggingface.co, and checks whether a server responds."""

from fnmatch import fnmatch
from pathlib import Path
import re
import sys
import threading

from grpo_jax.settings import ConfigError

_SECONDS = 8.0  # timeout of a server's response, including DNS and proxies

_ON_HUB = re.compile(r"([\w-][\w.-]*/[\w.-]+)/([\w./*-]+)")


def is_name(path: str) -> bool:
  """Whether `path` looks like OWNER/NAME/FILE on huggingface.co."""
  return _ON_HUB.fullmatch(path) is not None


def dataset_files(name: str) -> list[Path]:
  """Downloads files of a data set from huggingface.co into the cache. Returns their sorted paths.

  Args:
    name: OWNER/NAME/FILE for which `is_name` is true. FILE may be a pattern, whose * also matches
      slashes.

  Raises:
    ConfigError: The download fails, or no file matches.
  """
  from huggingface_hub import snapshot_download  # imported here because it is slow

  match = _ON_HUB.fullmatch(name)
  repository, pattern = match.groups()
  try:
    folder = snapshot_download(repository, repo_type="dataset", allow_patterns=[pattern])
  # The exceptions differ: no such data set, a gated data set, no network, not in the cache.
  except Exception as error:
    reason = " ".join(str(error).split())
    raise ConfigError(
      f"data.path: {name} cannot be downloaded from huggingface.co ({type(error).__name__}:"
      f" {reason:.200}); give a file of your own: EXAM:FILE"
    ) from None
  # The folder also has files of earlier downloads.
  files = sorted(file for file in Path(folder).rglob("*") if file.is_file())
  found = [file for file in files if fnmatch(file.relative_to(folder).as_posix(), pattern)]
  if not found:
    raise ConfigError(f"data.path: {repository} on huggingface.co has no file {pattern}")
  return found


def check_connection(url: str, what: str, folder: str) -> None:
  """Announces a download on stderr, and checks that the server responds.

  Args:
    url: The URL of the file.
    what: The name of the file's contents in the announcement.
    folder: The folder of the download, for the announcement.

  Raises:
    ConnectionError: The server cannot be reached, or does not respond in time.
  """
  import requests  # imported here because nothing else needs it

  print(f"downloading {what} ({url}) to {folder}", file=sys.stderr, flush=True)
  answers: list[BaseException | None] = []

  def ask() -> None:
    try:
      requests.head(url, timeout=_SECONDS)
      answers.append(None)
    except Exception as error:  # errors of DNS, a proxy, a certificate or the server
      answers.append(error)

  # In a thread, because the timeout of `requests` does not limit the DNS lookup.
  asking = threading.Thread(target=ask, daemon=True)
  asking.start()
  asking.join(_SECONDS)
  if not answers:
    raise ConnectionError(f"{url} has not answered for {_SECONDS:g} seconds")
  if answers[0] is not None:
    raise ConnectionError(f"{url} cannot be reached: {answers[0]}")
