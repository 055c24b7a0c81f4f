"""Keeps a server running: restarts it after it has exited and, if asked, for new weights."""

from collections.abc import Callable
import os
from pathlib import Path
import signal
import subprocess
import sys
import time

from grpo_jax.settings import ConfigError
from grpo_jax.storage.json_files import replace_file

_CURRENT = "current"  # the file that names the folder to serve
_LOOK = 0.2  # seconds between two checks of the server and of the file
_PAUSE = 5.0  # seconds between two starts of a server that exits by itself
_GRACE = 20.0  # seconds that a server has to exit after each of SIGTERM and SIGKILL


def serve_now(folder: Path, weights: Path) -> None:
  """Tells every `keep` with this rollout.engine_folder to serve the folder `weights`."""
  replace_file(folder / _CURRENT, str(weights))


def served(folder: Path) -> str:
  """Returns the folder that servers should serve. "" before the first weights and after a run."""
  try:
    weights = (folder / _CURRENT).read_text()
  except FileNotFoundError:
    return ""
  return weights if Path(weights).is_dir() else ""


def keep(
  command: Callable[[str], list[str]], environment: dict[str, str], folder: Path | None
) -> None:
  """Runs a server until this process receives SIGTERM or Ctrl-C.

  Args:
    command: Returns the server's command line for a folder of weights, or for "" (none yet).
    environment: Environment variables of the server, added to those of this process.
    folder: rollout.engine_folder, if new weights restart the server. None if they do not.

  Raises:
    ConfigError: The program cannot be started.
  """
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # so that `finally` ends the server
  process: subprocess.Popen | None = None
  try:
    while True:
      weights = served(folder) if folder is not None else ""
      process, began = _start(command(weights), environment), time.monotonic()
      # A finished run removes its weights. Its server keeps running until another run names some.
      while process.poll() is None and (folder is None or served(folder) in ("", weights)):
        time.sleep(_LOOK)
      has_ended = process.poll() is not None
      # Always, because child processes that survive would keep the port and the memory.
      _end(process)
      if not has_ended:
        continue
      print(f"the server has ended with code {process.returncode}", file=sys.stderr, flush=True)
      time.sleep(max(_LOOK, _PAUSE - (time.monotonic() - began)))
  finally:
    if process is not None:
      _end(process)


def _start(words: list[str], environment: dict[str, str]) -> subprocess.Popen:
  """Starts a server with the command `words`. Raises ConfigError if that fails."""
  try:
    # A new session, so that `_end` can signal the server with all its child processes.
    return subprocess.Popen(words, env=os.environ | environment, start_new_session=True)
  except OSError as error:
    raise ConfigError(
      f"{words[0]} cannot be started ({error.strerror}): set --program to vLLM's program, or to the"
      " Python that has SGLang"
    ) from None


def _end(process: subprocess.Popen) -> None:
  """Sends SIGTERM and then SIGKILL to the server and its children, and waits after each."""
  for number, seconds in ((signal.SIGTERM, _GRACE), (signal.SIGKILL, _GRACE)):
    try:
      os.killpg(process.pid, number)
      process.wait(seconds)
    except (ProcessLookupError, subprocess.TimeoutExpired):
      continue
