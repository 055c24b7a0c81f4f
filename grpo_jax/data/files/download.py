"""Downloads of data: files of huggingface.co, and whether a server answers at all."""

from fnmatch import fnmatch
from pathlib import Path
import re
import sys
import threading

from grpo_jax.settings import ConfigError

_SECONDS = 8.0  # that a server, or what stands between, has for an answer

_ON_HUB = re.compile(r"([\w-][\w.-]*/[\w.-]+)/([\w./*-]+)")


def is_name(path: str) -> bool:
  """Whether `path` looks like OWNER/NAME/FILE on huggingface.co."""
  return _ON_HUB.fullmatch(path) is not None


def dataset_files(name: str) -> list[Path]:
  """Files of a data set of huggingface.co, which are downloaded once.

  Args:
    name: OWNER/NAME/FILE. FILE may be a pattern, whose * stands for folders, too.

  Raises:
    ConfigError: They cannot be downloaded, or there are none.
  """
  from huggingface_hub import snapshot_download  # imported here because it is slow

  match = _ON_HUB.fullmatch(name)
  repository, pattern = match.groups()
  try:
    folder = snapshot_download(repository, repo_type="dataset", allow_patterns=[pattern])
  # Each cause has an exception of its own: no such data set, one that needs an agreement, no
  # network, offline and not in the cache.
  except Exception as error:
    reason = " ".join(str(error).split())
    raise ConfigError(
      f"data.path: {name} cannot be downloaded from huggingface.co ({type(error).__name__}:"
      f" {reason:.200}); give a file of your own: EXAM:FILE"
    ) from None
  files = sorted(file for file in Path(folder).rglob("*") if file.is_file())
  found = [file for file in files if fnmatch(file.relative_to(folder).as_posix(), pattern)]
  if not found:
    raise ConfigError(f"data.path: {repository} on huggingface.co has no file {pattern}")
  return found


def check_connection(url: str, what: str, folder: str) -> None:
  """Says on stderr what is about to be downloaded, and checks that its server answers.

  Args:
    url: The file.
    what: The name of the file's contents, for the reader.
    folder: Where it will be kept.

  Raises:
    ConnectionError: The server cannot be reached, or does not answer in time.
  """
  import requests  # imported here because nothing else needs it

  print(f"downloading {what} ({url}) to {folder}", file=sys.stderr, flush=True)
  answers: list[BaseException | None] = []

  def ask() -> None:
    try:
      requests.head(url, timeout=_SECONDS)
      answers.append(None)
    except Exception as error:  # of DNS, of a proxy, of a certificate, of the server
      answers.append(error)

  # In a thread, because the timeout of `requests` does not limit the search for an address.
  asking = threading.Thread(target=ask, daemon=True)
  asking.start()
  asking.join(_SECONDS)
  if not answers:
    raise ConnectionError(f"{url} has not answered for {_SECONDS:g} seconds")
  if answers[0] is not None:
    raise ConnectionError(f"{url} cannot be reached: {answers[0]}")
