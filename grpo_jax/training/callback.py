"""Calls the user's function after each step, with the step's metrics."""

from collections.abc import Callable, Mapping
import dataclasses
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_jax.foreign import describe
from grpo_jax.registry import name_of
from grpo_jax.settings import RunFailed
from grpo_jax.storage.reading import read_metrics

if TYPE_CHECKING:
  from grpo_jax.parallel.hosts import Hosts


@dataclasses.dataclass(frozen=True)
class Step:
  """A finished step.

  Attributes:
    workdir: The run's folder.
    step: The number of steps so far, including the warm start.
    last_step: The number of steps of the whole run, including the warm start.
    metrics: The step's row of metrics.jsonl without `step`. It includes the evaluation, if there
      was one.
  """

  workdir: Path
  step: int
  last_step: int
  metrics: Mapping[str, Any] = dataclasses.field(repr=False)

  @property
  def is_last(self) -> bool:
    """Whether the run has no further step."""
    return self.step >= self.last_step


# Called after each step. If it returns True, the run is saved and ends.
Callback = Callable[[Step], bool | None]


class Callbacks:
  """Calls the user's callback on the first process.

  Attributes:
    latest: The step that was reported last, or None before the first step.
    ask_to_stop: Whether the callback asked to stop. It is the same on all processes.
  """

  def __init__(self, callback: Callback | None, workdir: Path, last_step: int, hosts: "Hosts"):
    self._callback, self._hosts = callback, hosts
    self._workdir, self._last_step = workdir, last_step
    self.latest: Step | None = None
    self.ask_to_stop = False

  def __call__(self, step: int, metrics: Mapping[str, Any]) -> None:
    """Calls the callback with a finished step, and sets `latest` and `ask_to_stop`.

    Raises:
      RunFailed: The callback raised an exception. KeyboardInterrupt is passed on unchanged.
    """
    self.latest = self.step_of(step, metrics)
    if self._callback is None:
      return
    answer, error = None, None
    if self._hosts.is_first:
      try:
        answer = self._callback(self.latest)
      except KeyboardInterrupt:
        raise
      except BaseException as caught:  # also sys.exit: a run must not end without a message
        error = caught
    if self._hosts.any_process(error is not None):
      name = name_of(self._callback)
      # Only the first process has the error, but all of them must end.
      message = f"{name} raised {describe(error)}" if error else f"see what {name} raised"
      raise RunFailed(message) from error
    # Other true values do not count: a callback that returns a plot does not ask to stop.
    wants_to_stop = isinstance(answer, (bool, np.bool_)) and bool(answer)
    self.ask_to_stop = self._hosts.any_process(wants_to_stop)

  def step_of(self, step: int, metrics: Mapping[str, Any]) -> Step:
    """The `Step` for a step of this run with these metrics."""
    numbers = {name: float(value) for name, value in metrics.items()}
    return Step(self._workdir, step, self._last_step, MappingProxyType(numbers))


def with_last_row(step: Step) -> Step:
  """A copy of `step` with the metrics in the last row of its run's metrics.jsonl."""
  rows = read_metrics(step.workdir)
  metrics = {name: value for name, value in rows[-1].items() if name != "step"} if rows else {}
  return dataclasses.replace(step, metrics=MappingProxyType(metrics))
