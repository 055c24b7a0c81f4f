"""Whether a file can be downloaded, before a library that waits long tries it."""

import sys
import threading

_SECONDS = 8.0  # that a server, or what stands between, has for an answer


def check_connection(url: str, what: str, folder: str) -> None:
  """Says on stderr what is about to be downloaded, and checks that its server answers.

  Args:
    url: The file.
    what: What it is, for the reader.
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
