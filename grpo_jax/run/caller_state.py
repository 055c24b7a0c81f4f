"""Restores JAX's settings and frees memory after a run in a notebook or a script."""

from collections.abc import Iterator
import contextlib
import gc
import traceback
import warnings

from grpo_jax.foreign import describe
from grpo_jax.lazy import jax
from grpo_jax.settings import RunFailed

# The settings of JAX that a run changes, and that belong to the caller.
_SETTINGS = (
  "jax_default_matmul_precision",
  "jax_compilation_cache_dir",
  "jax_persistent_cache_min_compile_time_secs",
)


@contextlib.contextmanager
def leaving_nothing_behind() -> Iterator[None]:
  """Restores JAX's settings and frees the memory of the devices, however the block ends.

  A notebook keeps the traceback of the last error, whose frames refer to the arrays of the failed
  run. The frames are cleared, because the next run might not find enough memory otherwise.

  Raises:
    RunFailed: Code in the block called sys.exit, which must not end the caller's program.
  """
  before = {name: getattr(jax.config, name) for name in _SETTINGS}
  show_warning = warnings.showwarning
  try:
    yield
  except SystemExit as error:
    line = f"code that the run called ended it: {describe(error)}"
    _clear_frames(error)
    raise RunFailed(line) from error
  except BaseException as error:
    _clear_frames(error)
    raise
  finally:
    for name, value in before.items():
      jax.config.update(name, value)
    from grpo_jax.run import compilation_cache  # here, because it imports jax

    compilation_cache.forget_folder()  # so that JAX reads the restored setting of the folder
    warnings.showwarning = show_warning  # `compilation_cache.use` replaces it
    gc.collect()  # the objects of a run refer to each other


def _clear_frames(error: BaseException | None) -> None:
  """Deletes the local variables in the tracebacks of an error and its causes."""
  seen = set[int]()
  while error is not None and id(error) not in seen:  # an error may be its own cause
    seen.add(id(error))
    traceback.clear_frames(error.__traceback__)
    error = error.__cause__ or error.__context__
