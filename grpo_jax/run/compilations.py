"""Says what JAX compiles, because that is most of what a user waits for at the start of a run."""

import threading
from typing import Any

import jax

from grpo_jax.compiling import is_ahead
from grpo_jax.progress import PROGRESS, Work

# The names of JAX's reports. If a version has other names, nothing is said of its compilations.
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"  # it compiles next
_COMPILED = "/jax/core/compile/backend_compile_duration"


class _Compiling(threading.local):
  """The compilation that a thread is busy with."""

  work: Work | None = None


_compiling = _Compiling()


def tell() -> None:
  """Says from now on what is compiled. Once is enough for a process."""
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
