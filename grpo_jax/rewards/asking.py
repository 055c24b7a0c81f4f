"""Sees whether a reward function of a user reads messages or texts, in calls that are made up.

A call is made in a fork of the process, so that a function that remembers what it got keeps nothing
of it. Its messages notice when they are read.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import copy
import os
import select
import signal
import sys
from typing import Any
import warnings

from grpo_jax.rewards.call import Columns, finished, taken_by
from grpo_jax.rewards.conversation import as_messages

Tell = Callable[[bytes], None]

# A function reads messages, or raises something without that, or does neither.
_READS, _FAILS, _ENDS = b"r", b"f", b"e"
# The errors of Python for a text that is read as messages: t[0]["content"], t[0].get("content").
_WRONG_TYPE = (TypeError, AttributeError)


class _Noticing(dict[str, Any]):
  """A message that notices when one of its fields is read.

  What only hands a message on reads none, such as json.dumps, which calls items(). Another process
  gets a plain dict.
  """

  def __init__(self, message: Mapping[str, Any], notice: Callable[[], None]) -> None:
    super().__init__(message)
    self._notice = notice

  def __getitem__(self, key: str) -> Any:
    self._notice()
    return super().__getitem__(key)

  def __iter__(self) -> Iterator[str]:
    return super().__iter__()  # a dict with an __iter__ of its own is copied by its __getitem__

  def __deepcopy__(self, memo: dict[int, Any]) -> "_Noticing":
    return _Noticing(copy.deepcopy(dict(self.items()), memo), self._notice)

  def __reduce_ex__(self, protocol: Any) -> Any:
    return dict, (list(self.items()),)

  def get(self, key: str, default: Any = None) -> Any:
    self._notice()
    return super().get(key, default)

  def pop(self, *key_and_default: Any) -> Any:
    self._notice()
    return super().pop(*key_and_default)

  def values(self) -> Any:
    self._notice()
    return super().values()


def asking(function: Callable[..., Any], seconds: float | None = None) -> Callable[..., Any]:
  """A reward function that gives 1 to each completion if `function` reads messages, else 0.

  It calls the function with messages, whose texts are made up. What that returns, or raises because
  of such a text, says nothing. A function that ends without having read one may have let another
  process read it. So it is called with the texts, too. It reads messages if these are of the wrong
  type for it.

  Each call is made in a fork. It is made in this process if the fork ends or hangs without an
  answer, as it may where threads of this process hold locks.

  Args:
    function: A reward function of the user, which may be async.
    seconds: How long a fork may take. None means for ever.
  """

  def ask(**columns: Any) -> list[float]:
    outcome = _told_by_fork(lambda tell: _try_messages(function, columns, tell), seconds)
    if outcome == _ENDS:
      outcome = _told_by_fork(lambda tell: _try_texts(function, columns, tell), seconds)
    return [float(outcome == _READS)] * len(columns["completions"])

  return ask


def _try_messages(function: Callable[..., Any], columns: Columns, tell: Tell) -> None:
  """Tells whether a function reads a message, or else whether it ends without raising anything."""
  given = as_messages(columns)
  for name in ("prompts", "completions"):
    given[name] = [
      [_Noticing(message, lambda: tell(_READS)) for message in messages] for messages in given[name]
    ]
  try:
    finished(function(**taken_by(function, given)))
  except Exception:
    tell(_FAILS)
  else:
    tell(_ENDS)


def _try_texts(function: Callable[..., Any], columns: Columns, tell: Tell) -> None:
  """Tells whether texts are of the wrong type for a function."""
  try:
    finished(function(**taken_by(function, columns)))
  except _WRONG_TYPE:
    tell(_READS)
  except Exception:
    tell(_FAILS)
  else:
    tell(_ENDS)


def _told_by_fork(act: Callable[[Tell], None], seconds: float | None) -> bytes:
  """The first thing that `act` tells. It acts in a fork of this process, which is killed then.

  Args:
    act: Gets the function to tell with.
    seconds: How long to wait. None means for ever.

  Returns:
    One byte. If the fork tells none in time, `act` acts in this process.
  """
  told = _first_of_fork(act, seconds) if hasattr(os, "fork") else b""
  if not told:
    heard: list[bytes] = []
    act(heard.append)
    told = heard[0]
  return told


def _first_of_fork(act: Callable[[Tell], None], seconds: float | None) -> bytes:
  """The first byte that a fork tells. Empty if it tells none in time, or cannot start."""
  reading, writing = os.pipe()
  sys.stdout.flush()
  sys.stderr.flush()
  with warnings.catch_warnings():
    # Python and JAX warn that a fork may hang. It is not waited for.
    warnings.simplefilter("ignore")
    try:
      process = os.fork()
    except OSError:  # no memory, or too many processes
      os.close(reading)
      os.close(writing)
      return b""
  if not process:
    try:
      os.setpgid(0, 0)
      for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
      act(lambda one: _tell(writing, one))
    finally:
      os._exit(0)
  try:
    os.close(writing)
    is_there, _, _ = select.select([reading], [], [], seconds)
    return os.read(reading, 1) if is_there else b""
  finally:
    os.close(reading)
    for kill in (os.killpg, os.kill):  # with all that the function started
      with contextlib.suppress(ProcessLookupError, PermissionError):
        kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def _tell(writing: int, one: bytes) -> None:
  with contextlib.suppress(OSError):  # the other side has heard enough
    os.write(writing, one)
