"""Traces some steps of a run, for XProf, TensorBoard and Perfetto."""

from collections.abc import Callable, Iterator
import contextlib
from pathlib import Path

import jax

from grpo_jax.progress import doing


class Profiler:
  """Writes a trace of the steps that log.profile names, and what is in the memory after them.

  The trace has all threads of this process and its devices. So it has the batches that are drawn
  ahead meanwhile, too. A trace that cannot be made ends no run.
  """

  def __init__(self, steps: tuple[int, ...], folder: Path, say: Callable[[str], None]) -> None:
    """Traces nothing yet.

    Args:
      steps: The first step and the last one, or nothing.
      folder: The folder that gets the files.
      say: Gets a line that says where they are, or why there are none.
    """
    self._steps = range(steps[0], steps[1] + 1) if steps else range(0)
    self._folder, self._say = folder, say
    self._is_tracing = False

  def remarks(self, step: int) -> tuple[str, ...]:
    """Says so if a run that goes on after `step` has no step left to trace."""
    if not self._steps or step < self._steps[-1]:
      return ()
    return (f"log.profile: step {self._steps[-1]} is over, so nothing is traced",)

  @contextlib.contextmanager
  def step(self, step: int) -> Iterator[None]:
    """Names a step in the trace, which the first step begins and the last one ends."""
    if step not in self._steps:
      yield
      return
    is_last = step == self._steps[-1]
    if not self._is_tracing:
      with self._saying_why_not():
        jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
        self._is_tracing = True
    with jax.profiler.StepTraceAnnotation("step", step_num=step):
      yield
    if is_last:
      self.close()

  def close(self) -> None:
    """Writes the trace if one has begun."""
    if not self._is_tracing:
      return
    self._is_tracing = False
    with self._saying_why_not(), doing("writing the trace"):
      jax.profiler.stop_trace()
      jax.profiler.save_device_memory_profile(str(self._folder / "memory.prof"))
      self._say(f"the trace is in {self._folder}")

  @contextlib.contextmanager
  def _saying_why_not(self) -> Iterator[None]:
    try:
      yield
    except Exception as error:  # such as a trace that somebody else makes, or a full disk
      self._say(f"warning: log.profile: there is no trace: {' '.join(str(error).split())}")
      self._steps = range(0)
