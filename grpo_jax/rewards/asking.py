"""Finds out in trial calls whether a reward function of a user reads messages or texts.

A trial call gets made-up messages that report when one of their fields is read. It runs in a fork
of the process, so that a function with state does not remember it.
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

Tell = Callable[[bytes], None]  # reports one of the three outcomes below

# The function reads a message, or raises an exception before it reads one, or returns without that.
_READS, _FAILS, _ENDS = b"r", b"f", b"e"
# Python raises these if a text is read as messages: t[0]["content"], t[0].get("content").
_WRONG_TYPE = (TypeError, AttributeError)


class _Noticing(dict[str, Any]):
  """A message that calls `notice` when one of its fields is read.

  items() does not count, because code that only passes a message on, such as json.dumps, calls it.
  If the message is pickled for another process, that process gets a plain dict.
  """

  def __init__(self, message: Mapping[str, Any], notice: Callable[[], None]) -> None:
    super().__init__(message)
    self._notice = notice

  def __getitem__(self, key: str) -> Any:
    self._notice()
    return super().__getitem__(key)

  def __iter__(self) -> Iterator[str]:
    # `dict(message)` and `**message` call __getitem__ only if a subclass defines __iter__.
    return super().__iter__()

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
  """Returns a reward function that scores each completion 1 if `function` reads messages, else 0.

  The result is a reward function itself, so workers can call it in place of `function`, with the
  same limits. It calls `function` with made-up messages, and ignores what it returns or raises. If
  `function` returns without having read a message, another process may have read it. So `function`
  is called again, with texts. If it then raises an error for the wrong type, it reads messages.

  Each call is made in a fork. If the fork ends or hangs without an answer, which can happen when
  threads of this process hold locks, the call is made in this process.

  Args:
    function: A reward function of the user, which may be async.
    seconds: The time limit of a fork. None means no limit.
  """

  def ask(**columns: Any) -> list[float]:
    outcome = _outcome_in_fork(lambda tell: _try_messages(function, columns, tell), seconds)
    if outcome == _ENDS:
      outcome = _outcome_in_fork(lambda tell: _try_texts(function, columns, tell), seconds)
    return [float(outcome == _READS)] * len(columns["completions"])

  return ask


def _try_messages(function: Callable[..., Any], columns: Columns, tell: Tell) -> None:
  """Calls a function with messages. Reports _READS for each read, then _FAILS or _ENDS."""
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
  """Calls a function with texts. Reports _READS if it raises an error for the wrong type."""
  try:
    finished(function(**taken_by(function, columns)))
  except _WRONG_TYPE:
    tell(_READS)
  except Exception:
    tell(_FAILS)
  else:
    tell(_ENDS)


def _outcome_in_fork(act: Callable[[Tell], None], seconds: float | None) -> bytes:
  """Runs `act` in a fork of this process, and returns the first outcome that it reports.

  The fork is killed after that. If it reports none in time, it probably waits for a lock that a
  thread of this process held when it was forked. Then `act` runs in this process.

  Args:
    act: Makes a trial call. Its argument is the function that reports an outcome.
    seconds: How long to wait for the fork. None means no limit.
  """
  outcome = _first_of_fork(act, seconds) if hasattr(os, "fork") else b""  # Windows has no fork
  if not outcome:
    reports: list[bytes] = []
    act(reports.append)
    outcome = reports[0]
  return outcome


def _first_of_fork(act: Callable[[Tell], None], seconds: float | None) -> bytes:
  """The first byte that a fork writes. Empty if it writes none in time, or cannot start."""
  reading, writing = os.pipe()
  # The fork copies the text that the buffers hold, and could print it again.
  sys.stdout.flush()
  sys.stderr.flush()
  with warnings.catch_warnings():
    # Python and JAX warn that a fork may hang. The timeout handles that.
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
        signal.signal(number, signal.SIG_DFL)  # instead of a handler of the run
      act(lambda one: _tell(writing, one))
    finally:
      os._exit(0)  # the fork must not go on with the code of the run
  try:
    os.close(writing)
    has_reported, _, _ = select.select([reading], [], [], seconds)
    return os.read(reading, 1) if has_reported else b""
  finally:
    os.close(reading)
    # The group also has the processes that the function started. It does not exist yet if the fork
    # has not reached setpgid, and then the second call kills the fork.
    for kill in (os.killpg, os.kill):
      with contextlib.suppress(ProcessLookupError, PermissionError):
        kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def _tell(writing: int, one: bytes) -> None:
  with contextlib.suppress(OSError):  # the reader has closed the pipe after the first byte
    os.write(writing, one)
