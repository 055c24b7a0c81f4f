"""Profiles some steps of a run, for XProf, TensorBoard and Perfetto."""

from collections.abc import Callable, Iterator
import contextlib
from pathlib import Path

import jax

from grpo_jax.progress import doing


class Profiler:
  """Writes a trace of the steps in log.profile, and a memory profile of the devices after them.

  The trace shows all threads of this process and its devices, and so also batches that are drawn
  ahead. If the trace fails, the run continues without it.
  """

  def __init__(self, steps: tuple[int, ...], folder: Path, say: Callable[[str], None]) -> None:
    """Does not start tracing yet.

    Args:
      steps: The first and the last step to trace, or () to trace nothing.
      folder: The folder for the files.
      say: say(line) prints where the files are, or why there are none.
    """
    self._steps = range(steps[0], steps[1] + 1) if steps else range(0)
    self._folder, self._say = folder, say
    self._is_tracing = False

  def remarks(self, step: int) -> tuple[str, ...]:
    """A line for the user if a run that resumes after `step` has no step left to trace, or ()."""
    if not self._steps or step < self._steps[-1]:
      return ()
    return (f"log.profile: step {self._steps[-1]} is over, so nothing is traced",)

  @contextlib.contextmanager
  def step(self, step: int) -> Iterator[None]:
    """Traces the block as step `step`. The first traced step starts the trace, the last ends it."""
    if step not in self._steps:
      yield
      return
    is_last = step == self._steps[-1]  # asked first, because a failure empties `_steps`
    if not self._is_tracing:
      with self._saying_why_not():
        jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
        self._is_tracing = True
    with jax.profiler.StepTraceAnnotation("step", step_num=step):
      yield
    if is_last:
      self.close()

  def close(self) -> None:
    """Stops and writes the trace, if it was started."""
    if not self._is_tracing:
      return
    self._is_tracing = False
    with self._saying_why_not(), doing("writing the trace"):
      jax.profiler.stop_trace()
      jax.profiler.save_device_memory_profile(str(self._folder / "memory.prof"))
      self._say(f"the trace is in {self._folder}")

  @contextlib.contextmanager
  def _saying_why_not(self) -> Iterator[None]:
    """Turns an error of the block into a warning, and stops tracing."""
    try:
      yield
    except Exception as error:  # such as another trace that is already running, or a full disk
      self._say(f"warning: log.profile: there is no trace: {' '.join(str(error).split())}")
      self._steps = range(0)
