"""Reports what JAX compiles, which takes most of the time at the start of a run."""

import threading
from typing import Any

import jax

from grpo_jax.compiling import is_ahead
from grpo_jax.progress import PROGRESS, Work

# The names of JAX's events. If a version of JAX renames them, compilations are not reported.
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"  # compilation follows
_COMPILED = "/jax/core/compile/backend_compile_duration"


class _Compiling(threading.local):
  """The compilation that the current thread is doing, or None."""

  work: Work | None = None


_compiling = _Compiling()


def tell() -> None:
  """Starts to report compilations. Later calls in the same process do nothing."""
  if not _is_told.is_set():
    _is_told.set()
    jax.monitoring.register_event_duration_secs_listener(_on_event)


_is_told = threading.Event()


def _on_event(event: str, seconds: float, **details: Any) -> None:
  if event not in (_LOWERED, _COMPILED) or is_ahead():
    return
  if _compiling.work is not None:
    PROGRESS.end(_compiling.work)
    _compiling.work = None
  if event == _LOWERED:
    name = str(details.get("fun_name", "")).removeprefix("jit(").removesuffix(")").lstrip("_")
    _compiling.work = PROGRESS.begin(f"compiling {name}", is_once=True)
  PROGRESS.once(seconds)
