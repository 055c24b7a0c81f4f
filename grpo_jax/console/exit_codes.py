"""Ends a program: with its exit code, and a line on stderr that says why."""

import _thread
import contextlib
import os
from pathlib import Path
import signal
import sys
import threading
import traceback
import types
from typing import NoReturn

from grpo_jax.console.stdout import discard
from grpo_jax.console.text import shorten, visible
from grpo_jax.foreign import describe
from grpo_jax.settings import ConfigError, OneLineError, RunFailed
from grpo_jax.storage import write_errors

DONE = 0
FAILED = 1
BAD_INPUT = 2
DOES_NOT_FIT = 3
STOPPED = 75  # EX_TEMPFAIL of sysexits.h: running the same command again resumes the run

_PACKAGE = Path(__file__).parents[1]
_LONGEST_LINE = 1500  # the most characters of a message, which may quote a long value
_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory")


class Stopped(OneLineError):
  """A run was asked to stop before its last step. Its state is saved."""


class DoesNotFit(Exception):
  """A run needs more memory than its devices have. Its plan is printed."""


def open_standard_streams() -> None:
  """Makes printing safe: opens missing streams, and escapes characters that cannot be encoded.

  The next file to be opened would otherwise reuse the descriptor of a closed stream, and printed
  text would be written into that file.
  """
  for number in range(3):
    try:
      os.fstat(number)
    except OSError:
      os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
  # Python has set the stream of a closed descriptor to None.
  sys.stdout = sys.stdout or open(os.devnull, "w")
  sys.stderr = sys.stderr or open(os.devnull, "w")
  for stream in (sys.stdout, sys.stderr):
    if hasattr(stream, "reconfigure"):  # a test's stream may lack it
      stream.reconfigure(errors="backslashreplace")


def interruptible() -> None:
  """Makes Ctrl-C raise KeyboardInterrupt after startup, unless the parent process ignored it."""
  if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
    signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: types.FrameType | None) -> None:
  """Raises KeyboardInterrupt, or kills the process during an import.

  An import may swallow the exception or leave a broken module. Killing loses nothing, because
  commands import large packages before they write anything, and a run installs other handlers.
  """
  if frame is not None and frame.f_code.co_name == "_xla_gc_callback":
    # JAX's garbage collection callback swallows exceptions, so this tries again when it has ended.
    threading.Timer(0.02, _thread.interrupt_main, (number,)).start()
    return
  inner = frame
  while inner is not None:
    if inner.f_code.co_filename.startswith("<frozen importlib"):
      signal.signal(number, signal.SIG_DFL)
      signal.raise_signal(number)
    inner = inner.f_back
  signal.default_int_handler(number, frame)


def leave(code: int, line: str) -> NoReturn:
  """Prints the line to stderr, unless it is empty, and raises SystemExit with the code."""
  if line:
    with contextlib.suppress(OSError):  # stderr is closed
      print(line, file=sys.stderr)
  sys.exit(code)


def leave_at_once(error: BaseException, ended: tuple[int, str] | None) -> NoReturn:
  """Ends the process without waiting for anything, such as other processes.

  Args:
    error: The error that ends the process.
    ended: The result of `exit_of`. If it is None, the traceback is printed and the code is FAILED.
  """
  code, line = ended or (FAILED, "".join(traceback.format_exception(error)))
  with contextlib.suppress(OSError, ValueError):
    print(line, file=sys.stderr, end="\n" if line else "")
  flush_standard_streams()
  os._exit(code)


def flush_standard_streams() -> None:
  """Flushes stdout and stderr. If that fails, it discards their buffers.

  The interpreter's flush at exit would otherwise fail and change the exit code to 120.
  """
  for stream in filter(None, (sys.stdout, sys.stderr)):
    try:
      stream.flush()
    except (OSError, ValueError):  # ValueError: the stream is closed
      discard(stream)


def exit_of(error: BaseException, workdir: str | None = None) -> tuple[int, str] | None:
  """The exit code and the line for stderr with which an error ends a program.

  Args:
    error: The error that the program raised.
    workdir: The folder of the run, or None.

  Returns:
    (exit code, line). The line is "" if the reason was already printed. None for an unexpected
    error, whose traceback helps to fix the program, and for a SystemExit of this package.
  """
  if isinstance(error, ConfigError):
    return BAD_INPUT, f"error: {_one_line(error)}"
  if isinstance(error, RunFailed):
    return FAILED, f"error: {_one_line(error)}"
  if isinstance(error, Stopped):
    return STOPPED, ""
  if isinstance(error, DoesNotFit):
    return DOES_NOT_FIT, ""
  if isinstance(error, SystemExit) and not _is_ours(error):  # even code 0 is no success
    return FAILED, f"error: code that the program called ended it: {_one_line(describe(error))}"
  if isinstance(error, KeyboardInterrupt):
    return 128 + signal.SIGINT, "interrupted"
  if isinstance(error, BrokenPipeError):
    return FAILED, "error: stdout was closed before everything was printed"
  if _is_out_of_memory(error):
    return FAILED, f"error: {_memory_line(error)}"
  if isinstance(error, RuntimeError) and "Unable to initialize backend" in str(error):
    platforms = os.environ.get("JAX_PLATFORMS", "")
    return BAD_INPUT, f"error: JAX_PLATFORMS={_one_line(platforms)}: {_one_line(error)}"
  # A SystemExit of this package keeps its code, even if a failed write is among its causes.
  failed_write = write_errors.explain(error, workdir) if isinstance(error, Exception) else None
  return (FAILED, f"error: {_one_line(failed_write)}") if failed_write else None


def _is_ours(end: SystemExit) -> bool:
  """Whether a file of this package called sys.exit, and not another program's code."""
  frames = traceback.extract_tb(end.__traceback__)
  return bool(frames) and Path(frames[-1].filename).is_relative_to(_PACKAGE)


def _is_out_of_memory(error: BaseException) -> bool:
  """Whether the host or a device ran out of memory."""
  from_xla = type(error).__name__ == "JaxRuntimeError"
  return isinstance(error, MemoryError) or (
    from_xla and any(words in str(error) for words in _OUT_OF_MEMORY)
  )


def _memory_line(error: BaseException) -> str:
  """The line for an out-of-memory error: its text, and the config keys to change."""
  details = f" ({str(error).splitlines()[0]:.120})" if str(error) else ""
  return (
    f"out of memory{details}: lower batch.micro_batch, sampling.rows, learner.logprob_chunk,"
    " batch.prompts, batch.group_size, eval.batch, sampling.max_tokens or the size of the model, or"
    " set learner.remat=True and learner.remat_policy=nothing_saveable"
  )


def _one_line(text: object) -> str:
  """Printable text in one line of at most `_LONGEST_LINE` characters."""
  return shorten(visible(" ".join(str(text).splitlines())), _LONGEST_LINE)
