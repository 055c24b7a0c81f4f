"""Asks a model behind an address that speaks OpenAI's chat completions, and keeps its replies."""

import hashlib
import http.client
import json
import os
from pathlib import Path
import random
import tempfile
import time
from typing import Any, NamedTuple
import urllib.error
import urllib.request

_LONGEST_REPLY = 2**22  # bytes
_MOST_IN_MEMORY = 100_000  # replies
_TRY_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)


class JudgeError(Exception):
  """A request that got no reply: why, in one line."""


class Request(NamedTuple):
  """What a model is asked. Two requests are the same if these are the same."""

  model: str
  prompt: str
  max_tokens: int


class Client:
  """One address. Several threads may use it."""

  def __init__(self, url: str, key: str, cache: str) -> None:
    """`url` ends in /v1. `key` may be empty. `cache` is a folder for replies, or empty."""
    self._url, self._key = url.rstrip("/") + "/chat/completions", key
    self._folder = Path(cache).expanduser() if cache else None
    self._replies: dict[str, str] = {}

  def reply(self, request: Request, attempts: int, deadline: float) -> str:
    """The model's reply: an earlier one to the same request, or a new one.

    Args:
      request: What to ask, at temperature 0.
      attempts: How often to try.
      deadline: When to give up, in seconds of time.monotonic().

    Raises:
      JudgeError: There is no reply.
    """
    name = hashlib.sha256(json.dumps([self._url, *request]).encode()).hexdigest()
    kept = self._kept(name)
    if kept is not None:
      return kept
    for attempt in range(attempts):
      try:
        reply = self._ask(request, deadline)
      except _Again as again:
        pause = again.pause or 2**attempt * random.uniform(0.75, 1.25)
        if attempt + 1 == attempts or time.monotonic() + pause >= deadline:
          raise JudgeError(f"{again}, tried {attempt + 1} times") from None
        time.sleep(pause)
      else:
        self._keep(name, reply)
        return reply
    raise JudgeError("it was not asked")

  def _ask(self, request: Request, deadline: float) -> str:
    body = {
      "model": request.model,
      "messages": [{"role": "user", "content": request.prompt}],
      "max_tokens": request.max_tokens,
      "temperature": 0,
    }
    headers = {"Content-Type": "application/json"}
    if self._key:
      headers["Authorization"] = f"Bearer {self._key}"
    post = urllib.request.Request(self._url, json.dumps(body).encode(), headers)
    try:
      with urllib.request.urlopen(post, timeout=_left(deadline)) as response:
        text = _read(response, deadline)
    except urllib.error.HTTPError as error:
      said = " ".join(error.read(2000).decode(errors="replace").split())
      if error.code in _TRY_AGAIN:
        raise _Again(f"status {error.code} {said:.200}", _seconds(error.headers)) from None
      raise JudgeError(f"status {error.code} {said:.200}") from None
    except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
      raise _Again(f"{getattr(error, 'reason', None) or error or type(error).__name__}") from None
    try:
      content = json.loads(text)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
      raise JudgeError(f"it is no chat completion: {text[:100]!r}") from None
    if not isinstance(content, str):
      raise JudgeError("its reply has no text")
    return content

  def _kept(self, name: str) -> str | None:
    if name in self._replies or self._folder is None:
      return self._replies.get(name)
    try:
      return (self._folder / name[:2] / name).read_text(encoding="utf-8")
    except (OSError, ValueError):
      return None

  def _keep(self, name: str, reply: str) -> None:
    if len(self._replies) < _MOST_IN_MEMORY:
      self._replies[name] = reply
    if self._folder is None:
      return
    folder = self._folder / name[:2]
    try:
      folder.mkdir(parents=True, exist_ok=True)
      # Renamed when it is whole, because other processes read and write the same folder.
      with tempfile.NamedTemporaryFile("wb", dir=folder, delete=False) as file:
        file.write(reply.encode("utf-8", "replace"))
      os.replace(file.name, folder / name)
    except OSError as error:
      raise JudgeError(f"its reply cannot be kept in {folder}: {error.strerror}") from None


class _Again(Exception):
  """A failure that may be over soon."""

  def __init__(self, text: str, pause: float = 0.0) -> None:
    """`pause`: how long the server wants to be left alone, in seconds."""
    super().__init__(text)
    self.pause = pause


def _read(response: Any, deadline: float) -> bytes:
  """The body. It may come byte by byte, so the time limit of the socket alone is not enough."""
  parts, size = [], 0
  while part := response.read1(65536):
    parts.append(part)
    size += len(part)
    if size > _LONGEST_REPLY:
      raise JudgeError("its reply is too long")
    _left(deadline)
  return b"".join(parts)


def _left(deadline: float) -> float:
  left = deadline - time.monotonic()
  if left <= 0:
    raise _Again("no reply in time")
  return left


def _seconds(headers: Any) -> float:
  """What Retry-After says, if it is a number of seconds."""
  try:
    return max(0.0, float(headers.get("Retry-After", 0)))
  except ValueError:
    return 0.0
