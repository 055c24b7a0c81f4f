"""Programs that threads compile before they are called, beside other work."""

from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
import os
import sys
import threading
from typing import Any

import jax

from grpo_jax.progress import doing

# A program for an accelerator takes a minute. Several compile at once where there are cores.
_MOST_THREADS = 4


class Compiler:
  """Threads that compile programs, in the order in which they are asked for."""

  def __init__(self) -> None:
    threads = max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2))
    self._pool = ThreadPoolExecutor(threads, "compiler", initializer=_say_nothing)

  def submit(self, compile: Callable[[], Any]) -> Future[Any]:
    """Compiles something when a thread is free."""
    return self._pool.submit(compile)

  def prepare(self, ask: Callable[[], None]) -> None:
    """Lets a thread find out what to compile, and ask for it. Says on stderr if that fails."""

    def safely() -> None:
      try:
        ask()
      except Exception as error:  # a call compiles what it needs
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        print(f"warning: programs are not compiled ahead: {why}", file=sys.stderr, flush=True)

    self.submit(safely)

  def close(self) -> None:
    """Compiles nothing more. Returns when what is being compiled now is ready."""
    with doing("finishing what is being compiled"):
      self._pool.shutdown(wait=True, cancel_futures=True)


class Jitted:
  """A function that `jax.jit` compiles, at its first call or ahead of it.

  JAX keeps what `lower(...).compile()` made, and a call with arguments of the same shapes, dtypes
  and places finds it. So a call is right whether or not something was compiled ahead.

  Attributes:
    jitted: The function as `jax.jit` makes it, for what takes nothing else.
  """

  def __init__(
    self,
    function: Callable[..., Any],
    key: Callable[..., Hashable] = lambda *args, **kwargs: None,
    **options: Any,
  ):
    """Compiles nothing yet.

    Args:
      function: The function to compile.
      key: (arguments of a call) -> a key that differs where calls need different programs.
      options: Options of `jax.jit`.
    """
    self._key, self.jitted = key, jax.jit(function, **options)
    self._ahead: dict[Hashable, Future[Any]] = {}

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Calls the function. Waits where a thread is compiling the program that the call needs."""
    if self._ahead:
      future = self._ahead.pop(self._key(*args, **kwargs), None)
      if future is not None and not future.cancel():
        _wait(future)
    return self.jitted(*args, **kwargs)

  def lower(self, *args: Any, **kwargs: Any) -> Any:
    """Lowers the program for arguments, or their shapes, as `jax.jit` does."""
    return self.jitted.lower(*args, **kwargs)

  def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
    """The shapes of the result of a call, without places."""
    return self.jitted.eval_shape(*args, **kwargs)

  def compile_ahead(self, compiler: Compiler, *args: Any, **kwargs: Any) -> None:
    """Has the program compiled that a call will need.

    Args:
      compiler: Compiles it in the background.
      args: The arguments of the call, or their shapes, dtypes and places.
      kwargs: The named arguments, in the same way.
    """

    def compile() -> None:
      self.jitted.lower(*args, **kwargs).compile()

    self._ahead[self._key(*args, **kwargs)] = compiler.submit(compile)


class _Thread(threading.local):
  """A thread of this process."""

  is_ahead = False


_thread = _Thread()


def is_ahead() -> bool:
  """Whether this thread compiles what others will call."""
  return _thread.is_ahead


def _say_nothing() -> None:
  _thread.is_ahead = True


def _wait(future: Future[Any]) -> None:
  """Waits for a program. If it could not be compiled, the call compiles it and says why."""
  if not future.done():
    with doing("compiling"):
      future.exception()
