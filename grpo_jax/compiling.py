"""Compiles programs in background threads, before they are first called."""

from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
import os
import sys
import threading
from typing import Any

import jax

from grpo_jax.progress import doing

# Compiling a program for an accelerator takes a minute, so several threads compile.
_MOST_THREADS = 4


class Compiler:
  """A pool of threads that compile programs in the order in which they were submitted."""

  def __init__(self) -> None:
    threads = max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2))
    self._pool = ThreadPoolExecutor(threads, "compiler", initializer=_mark_thread)

  def submit(self, compile: Callable[[], Any]) -> Future[Any]:
    """Calls `compile`, which compiles a program, when a thread is free. Returns its future."""
    return self._pool.submit(compile)

  def prepare(self, ask: Callable[[], None]) -> None:
    """Calls `ask`, which submits programs, in a thread. Prints a warning to stderr if it raises."""

    def safely() -> None:
      try:
        ask()
      except Exception as error:  # not fatal: a call compiles the program that it needs
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        print(f"warning: programs are not compiled ahead: {why}", file=sys.stderr, flush=True)

    self.submit(safely)

  def close(self) -> None:
    """Cancels programs that no thread has begun to compile, and waits for the others."""
    with doing("finishing what is being compiled"):
      self._pool.shutdown(wait=True, cancel_futures=True)


class Jitted:
  """A function that `jax.jit` compiles, at its first call or ahead of it.

  JAX caches the program of `lower(...).compile()`, and a call whose arguments have the same shapes,
  dtypes and shardings uses it. So compiling ahead saves time and never changes a result.

  Attributes:
    jitted: The result of `jax.jit`, for code that cannot use a `Jitted`.
  """

  def __init__(
    self,
    function: Callable[..., Any],
    key: Callable[..., Hashable] = lambda *args, **kwargs: None,
    **options: Any,
  ):
    """Wraps a function, and compiles nothing yet.

    Args:
      function: The function to compile.
      key: (arguments of a call) -> a key, which must differ for calls that need different programs.
        The default is for a function whose calls all need the same program.
      options: Options of `jax.jit`.
    """
    self._key, self.jitted = key, jax.jit(function, **options)
    self._ahead: dict[Hashable, Future[Any]] = {}  # programs that are compiled ahead, by key

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Calls the function. If a thread compiles the program that the call needs, waits for it."""
    if self._ahead:
      future = self._ahead.pop(self._key(*args, **kwargs), None)
      if future is not None and not future.cancel():  # True if no thread has begun
        _wait(future)
    return self.jitted(*args, **kwargs)

  def lower(self, *args: Any, **kwargs: Any) -> Any:
    """Lowers the program for arguments, or their shapes, as `jax.jit` does."""
    return self.jitted.lower(*args, **kwargs)

  def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
    """The shapes and dtypes of the result of a call, without shardings."""
    return self.jitted.eval_shape(*args, **kwargs)

  def compile_ahead(self, compiler: Compiler, *args: Any, **kwargs: Any) -> None:
    """Lets a thread compile the program that a later call needs.

    Args:
      compiler: The pool of threads that compiles the program.
      args: The arguments of the call, or their shapes, dtypes and shardings.
      kwargs: The named arguments, in the same way.
    """

    def compile() -> None:
      self.jitted.lower(*args, **kwargs).compile()

    self._ahead[self._key(*args, **kwargs)] = compiler.submit(compile)


class _Thread(threading.local):
  """Thread-local state. `is_ahead` is True in the threads of a `Compiler`."""

  is_ahead = False


_thread = _Thread()


def is_ahead() -> bool:
  """Whether this thread belongs to a `Compiler`, so that nobody waits while it compiles."""
  return _thread.is_ahead


def _mark_thread() -> None:
  _thread.is_ahead = True


def _wait(future: Future[Any]) -> None:
  """Waits for a program. If compiling it failed, the call tries again and raises the error."""
  if not future.done():
    with doing("compiling"):
      future.exception()  # waits and, unlike `result`, does not raise
