"""Runs one command and measures for how long it is silent."""

from collections.abc import Mapping
import contextlib
import ctypes
import dataclasses
import os
from pathlib import Path
import pty
import selectors
import signal
import subprocess
import time

from hostile_cases.case import Case

PR_CAPBSET_DROP = 24  # of prctl
OVERRIDE_PERMISSIONS = (1, 2)  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
POLL_SECONDS = 0.4


@dataclasses.dataclass(frozen=True)
class Ended:
  """How a command ended.

  Attributes:
    code: Its exit code, 128 + N for signal N, or None if it did not end in time.
    stdout, stderr: What it wrote. On a terminal all is in stdout.
    output: Both, in the order in which they came.
    seconds: From start to end.
    silent: The longest time between two outputs, less the time in which it waited for a core.
  """

  code: int | None = None
  stdout: str = ""
  stderr: str = ""
  output: str = ""
  seconds: float = 0.0
  silent: float = 0.0


def run_process(case: Case, command: str, folder: Path, environment: Mapping[str, str]) -> Ended:
  """Runs a line of bash, sends the signals of the case, and waits for the end."""
  master, slave = pty.openpty() if case.tty else (None, None)
  process = subprocess.Popen(
    ["bash", "-c", command],
    cwd=folder,
    env=dict(environment),
    stdin=subprocess.DEVNULL,
    stdout=slave if case.tty else subprocess.PIPE,
    stderr=slave if case.tty else subprocess.PIPE,
    start_new_session=True,
    preexec_fn=lambda: _prepare_process(case),
  )
  if case.tty:
    os.close(slave)
    streams = {"stdout": master}
  else:
    streams = {"stdout": process.stdout.fileno(), "stderr": process.stderr.fileno()}
  try:
    return _watch(case, process, streams)
  finally:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if case.tty:
      os.close(master)


def _prepare_process(case: Case) -> None:
  for number in (
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGHUP,
  ):  # a job in the background ignores them
    signal.signal(number, signal.SIG_DFL)
  if case.as_user and os.geteuid() == 0:
    _drop_rights()


def _drop_rights() -> None:
  """Makes permissions hold for root, too, in the program that is executed next."""
  libc = ctypes.CDLL(None, use_errno=True)
  for capability in OVERRIDE_PERMISSIONS:
    if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0):
      raise OSError(ctypes.get_errno(), "prctl")


def _watch(case: Case, process: subprocess.Popen, streams: dict[str, int]) -> Ended:
  """Reads until the process has ended."""
  texts = {name: bytearray() for name in (*streams, "output")}
  started = spoke = time.monotonic()
  waited = _Waiting(process.pid)
  silent, wait, wait_before = 0.0, 0.0, 0.0
  signals = list(case.signals)
  with selectors.DefaultSelector() as selector:
    for name, descriptor in streams.items():
      selector.register(descriptor, selectors.EVENT_READ, name)
    while True:
      if not selector.get_map():  # both streams are closed
        time.sleep(0.05)
      events = selector.select(POLL_SECONDS) if selector.get_map() else []
      now = time.monotonic()
      wait += waited.since_last()
      for key, _ in events:
        chunk = _read(key.fd)
        if not chunk:
          selector.unregister(key.fd)
          continue
        texts[key.data] += chunk
        texts["output"] += chunk
        silent = max(silent, now - spoke - wait)
        spoke, wait, wait_before = now, 0.0, wait_before + wait
      if signals and _is_due(signals[0][0], texts["output"], now - started):
        with contextlib.suppress(ProcessLookupError):
          process.send_signal(signals.pop(0)[1])
      if process.poll() is not None and not events:
        break
      if now - started - wait_before - wait > case.limit:
        return _ended(None, texts, now - started, max(silent, now - spoke - wait))
  now = time.monotonic()
  code = process.returncode
  return _ended(
    128 - code if code < 0 else code, texts, now - started, max(silent, now - spoke - wait)
  )


def _ended(code: int | None, texts: dict[str, bytearray], seconds: float, silent: float) -> Ended:
  decoded = {name: bytes(text).decode("utf-8", "replace") for name, text in texts.items()}
  return Ended(code=code, seconds=seconds, silent=silent, **decoded)


def _read(descriptor: int) -> bytes:
  try:
    return os.read(descriptor, 1 << 16)
  except OSError:  # the other end of a terminal is gone
    return b""


def _is_due(text: str, output: bytearray, seconds: float) -> bool:
  return text.encode() in output if text else seconds > 0.5


class _Waiting:
  """Measures for how long the processes of a session waited for a core."""

  def __init__(self, session: int) -> None:
    self._session = session
    self._before: dict[str, float] = {}

  def since_last(self) -> float:
    """Seconds since the last call in which a thread was ready and had no core.

    The largest wait of any thread counts, because threads wait at the same time.
    """
    found: dict[str, float] = {}
    for process in _members(self._session):
      with contextlib.suppress(OSError):
        for task in os.scandir(f"/proc/{process}/task"):
          with contextlib.suppress(OSError, ValueError, IndexError):
            fields = Path(task.path, "schedstat").read_text().split()
            found[f"{process}/{task.name}"] = int(fields[1]) / 1e9
    delta = max((x - self._before.get(name, x) for name, x in found.items()), default=0.0)
    self._before = found
    return delta


def _members(session: int) -> list[str]:
  """The processes of a session that a Linux kernel lists."""
  members = []
  with contextlib.suppress(OSError):
    for entry in os.scandir("/proc"):
      if entry.name.isdecimal():
        with contextlib.suppress(OSError, IndexError):
          stat = Path(entry.path, "stat").read_text()
          if int(stat.rpartition(")")[2].split()[3]) == session:
            members.append(entry.name)
  return members
