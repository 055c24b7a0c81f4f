"""Draws batches before the steps that learn from them.

`AheadInTurn` uses the devices that also learn: step i draws batch i + max_staleness before its
update. While it samples and learns, workers score the batches before it. `InFlightInTurn` differs
in that rows stay in flight across updates. In `Beside`, a thread samples with separate devices or
sampler processes while the others learn. All draw at most max_staleness batches ahead.

With rollout.weights=fixed, the policy after step k - max_staleness draws batch k, so a run's
numbers depend only on its config. The same holds for sampling in turn. In `Beside` with newest or
in_flight, they also depend on when weights arrive, which the run's schedule records. For a batch in
its schedule, a run waits for the same weights and draws the same batch again.

A checkpoint saves the batches that are drawn and not learned yet.
"""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import functools
import threading
import time
from typing import Any, Protocol

import jax
import numpy as np

from grpo_jax.algo.metrics import disjoint
from grpo_jax.asynchronous.learner import SamplingClosed
from grpo_jax.asynchronous.schedule import FromChunk, WeightSchedule
from grpo_jax.batches.collect import Collected, Collector, HostState
from grpo_jax.batches.flow import VersionedParams
from grpo_jax.batches.rollout_metrics import staleness_metrics
from grpo_jax.batches.scored import Scored, from_arrays, to_arrays
from grpo_jax.config import Config
from grpo_jax.parallel.hosts import SAMPLER_THREAD
from grpo_jax.pending import Pending, there
from grpo_jax.progress import doing
from grpo_jax.settings import RunFailed
from grpo_jax.timing import Clock

# Keys of the host state: batches for later steps, and the number of the run's next chunk.
_AHEAD, _CHUNK = "ahead", "chunk"


def has_drawn_ahead(host: HostState) -> bool:
  """Whether the host state in a checkpoint has batches for later steps."""
  return bool(host.get(_AHEAD))


class Ahead:
  """Draws batches ahead, and keeps those that are drawn and not learned yet.

  Attributes:
    devices: Returns a context manager. An evaluation enters it while it uses the sampling devices.
  """

  def __init__(self, collector: Collector, config: Config):
    """`collector` draws the batches."""
    self._collector, self._steps = collector, config.steps
    self._bound = config.rollout.max_staleness
    self._drawn: dict[int, Pending[Scored]] = {}  # by the number of the batch, without gaps
    self._next = -1  # the number of the next batch to draw, -1 before this process's first step
    self.devices: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

  def __call__(self, params: Any, index: int, host: HostState, clock: Clock) -> Collected:
    """Returns the batch of a GRPO step, and draws batches for later steps.

    Args:
      params: The policy before the step's update, as `Parameters.for_sampling` returns it.
      index: The number of the GRPO step, from 0.
      host: The host state before the step. In the first call after a resume, the state in the
        checkpoint.
      clock: Measures the time of the step.
    """
    raise NotImplementedError

  def saved(self, index: int, host: HostState, params: Callable[[], Any]) -> HostState:
    """The host state for a checkpoint, with the drawn batches for step `index` and later steps.

    Waits for the batches that only weights before this step can draw, and for their scores.

    Args:
      index: The number of the next GRPO step.
      host: The host state before this step.
      params: Returns the policy before this step, as `Parameters.for_sampling` does.
    """
    del params  # subclasses need them to finish rows in flight
    if self._next < 0:  # this process took no step, so `host` still has the checkpoint's batches
      return host
    batches: HostState = {}
    for number in range(index, self._next):
      try:
        batches[str(number)] = to_arrays(self._drawn[number].result())
      except Exception:  # the step that learns from the batch raises it
        break  # `_restore` would not read batches after a gap
    without_batches = {key: value for key, value in host.items() if key != _AHEAD}
    return without_batches | ({_AHEAD: batches} if batches else {})

  def close(self) -> None:
    """Ends sampling."""

  def _restore(self, index: int, host: HostState) -> None:
    """Starts at GRPO step `index` with the batches in the host state of a checkpoint."""
    kept = host.get(_AHEAD, {})
    self._collector.restart(index, {key: x for key, x in host.items() if key != _AHEAD})
    self._next = index
    while str(self._next) in kept:
      scored = from_arrays(kept[str(self._next)], self._collector.reward_weights)
      self._collector.skip(scored)
      self._drawn[self._next] = there(scored)
      self._next += 1

  def _draw(self, policy: VersionedParams) -> Pending[Scored]:
    """Draws the next batch, which workers start to score."""
    clock = Clock()
    return self._collector.draw(policy, clock).then(functools.partial(_with_times, clock))

  def _take(self, policy: VersionedParams, clock: Clock) -> Pending[Scored]:
    """Takes the next batch, whose groups are all drawn. `clock` has measured the sampling."""
    return self._collector.take(policy, clock).then(functools.partial(_with_times, clock))

  def _drop_learned(self, index: int) -> None:
    """Drops the batches of steps before GRPO step `index`."""
    for number in [number for number in self._drawn if number < index]:
      del self._drawn[number]

  def _collected(self, index: int, clock: Clock) -> Collected:
    """Waits for a step's batch and puts it on the mesh. Raises RunFailed if a token is too old."""
    with doing("scoring"):
      scored = self._drawn[index].result()
    clock.lap("wait")
    completions, versions = scored.completions, scored.version_P[:, None, None]
    if completions.versions_PGT is not None:  # weights changed in flight
      versions = completions.versions_PGT
    learned_PGT = completions.sampled_PGT & (scored.live_P != 0)[:, None, None]
    ages = staleness_metrics(versions, index, learned_PGT)
    if ages["staleness/max"] > self._bound:
      raise RunFailed(
        f"a token of batch {index} is {ages['staleness/max']:.0f} steps old, and"
        f" rollout.max_staleness is {self._bound}"
      )
    collected = self._collector.put_on_mesh(scored)
    self._collector.forget(index)
    # If the update fails, the checkpoint before it needs this batch, so the next step drops it. The
    # prompts are freed now, because they may have visual tokens, and no checkpoint saves them.
    self._drawn[index] = there(dataclasses.replace(scored, prompts=None))
    clock.lap("put")
    return dataclasses.replace(collected, metrics=disjoint(collected.metrics, ages))


def _with_times(clock: Clock, scored: Scored) -> Scored:
  """Adds the clock's times to the metrics of a batch."""
  seconds = {f"time/{name}": spent for name, spent in clock.laps.items()}
  return dataclasses.replace(scored, metrics=disjoint(scored.metrics, seconds))


class AheadInTurn(Ahead):
  """Draws ahead on the devices that also learn."""

  def __call__(self, params: Any, index: int, host: HostState, clock: Clock) -> Collected:
    if self._next < 0:
      self._restore(index, host)
    self._drop_learned(index)
    while self._next < min(index + self._bound + 1, self._steps):
      self._drawn[self._next] = self._draw(VersionedParams(params, index))
      self._next += 1
    clock.lap("ahead")
    return self._collected(index, clock)


class InFlightInTurn(Ahead):
  """Draws on the devices that also learn. Rows that have not ended at an update continue after it.

  Step i draws until batch i is complete. Groups of later steps fill the seats that become free in
  the meantime, so no seat idles until the slowest row of a batch has ended.
  """

  def __init__(self, collector: Collector, config: Config):
    super().__init__(collector, config)
    self._clock = Clock()

  def __call__(self, params: Any, index: int, host: HostState, clock: Clock) -> Collected:
    if self._next < 0:
      self._restore(index, host)
    self._drop_learned(index)
    last = min(index + self._bound, self._steps - 1)
    self._draw_until(index + 1, VersionedParams(params, index), last)
    clock.lap("ahead")
    return self._collected(index, clock)

  def saved(self, index: int, host: HostState, params: Callable[[], Any]) -> HostState:
    flow = self._collector.flow
    if self._next >= 0 and flow.next > flow.first:
      # A checkpoint has no rows in flight, so all steps with opened groups are drawn to their end.
      # `step_of` may be too high with dynamic sampling.
      last = min(flow.step_of(flow.next - 1), index + self._bound, self._steps - 1)
      with contextlib.suppress(Exception):  # the step that learns from the batch raises it
        self._draw_until(last + 1, VersionedParams(params(), index), last)
    return super().saved(index, host, params)

  def _draw_until(self, end: int, policy: VersionedParams, last: int) -> None:
    """Draws all batches before batch `end`. Opens no groups for steps after step `last`."""
    self._clock.restart()
    while self._next < end:
      self._collector.advance(policy, last)
      while self._collector.flow.is_drawn:
        self._clock.lap("sample")
        self._drawn[self._next] = self._take(policy, self._clock)
        self._next, self._clock = self._next + 1, Clock()
    self._clock.lap("sample")


def ahead_in_turn(collector: Collector, config: Config) -> Ahead:
  """Makes the `Ahead` for rollout.weights that draws on the devices that also learn."""
  in_turn = InFlightInTurn if config.rollout.weights == "in_flight" else AheadInTurn
  return in_turn(collector, config)


class KeepsWeights(Protocol):
  """A sampler that does not use the devices of the run."""

  def weights(self, params: Any) -> Any:
    """Copies weights. The copy stays valid after an update donates the arrays."""


class Beside(Ahead):
  """Draws ahead in a thread, on separate devices, with sampler processes or with an engine."""

  def __init__(
    self,
    collector: Collector,
    config: Config,
    schedule: WeightSchedule | None,
    remote: KeepsWeights | None = None,
  ):
    """Starts no thread yet. The first request for a batch (`__call__`) starts it.

    Args:
      collector: Draws the batches.
      config: The config of the run.
      schedule: The record of which weights drew which batch. None if the weights are fixed.
      remote: The sampler that the collector uses. None for devices of this process.
    """
    super().__init__(collector, config)
    # Makes weights that outlast the next update, which donates the arrays of the learning devices.
    # Devices that sample have arrays of their own.
    self._lasting: Callable[[Any], Any] = remote.weights if remote else lambda params: params
    self._drawing = threading.Lock()  # the thread holds it while it samples
    # An evaluation must wait for the thread if it samples with the same devices or engine.
    if remote is None or config.eval.engine:
      # All processes must draw the same batches before an evaluation.
      self.devices = self._all_drawn if jax.process_count() > 1 else lambda: self._drawing
    # `_changes`: the weights change while rows are drawn.
    self._schedule, self._changes = schedule, config.rollout.weights == "in_flight"
    self._changed = threading.Condition()
    self._weights: dict[int, Any] = {}  # by version
    self._first_version = 0  # of the step at which this process began: it has no older weights
    self._chunk = 0  # with in_flight, the number of the run's next chunk
    # `_is_drawing`: the thread draws a batch, or with in_flight may have rows in flight.
    self._is_drawing = self._is_closed = False
    # The step before which a checkpoint is saved. Until the step begins, the thread draws only what
    # the checkpoint still needs. None at other times.
    self._checkpoint_step: int | None = None
    self._error: BaseException | None = None  # that ended the thread
    self._thread: threading.Thread | None = None
    self._idle = _Stopwatch()

  def __call__(self, params: Any, index: int, host: HostState, clock: Clock) -> Collected:
    """Passes the weights before a step to the thread, and waits for the step's batch."""
    params = self._lasting(params)
    clock.lap("weights")
    with self._changed:
      self._weights[index] = params
      if self._thread is None:
        self._chunk = int(host.get(_CHUNK, 0))
        self._restore(index, host)
        self._first_version = index
        run = self._stream if self._changes else self._draw_batches
        self._thread = threading.Thread(
          target=self._run, args=(run,), name=SAMPLER_THREAD, daemon=True
        )
        self._thread.start()
      self._free_weights()
      self._drop_learned(index)
      self._checkpoint_step = None  # a checkpoint before this step may have paused the thread
      self._changed.notify_all()
      queue = self._next - index  # how many batches wait for their steps
      with doing("waiting for completions"):
        self._changed.wait_for(lambda: index in self._drawn or self._error)
      if index not in self._drawn and self._error is not None:  # drawn batches are still learned
        raise self._error
      idle = self._idle.share()
    collected = self._collected(index, clock)
    waited = {"rollout/queue": queue, "rollout/sampler_idle": idle}
    return dataclasses.replace(collected, metrics=disjoint(collected.metrics, waited))

  def saved(self, index: int, host: HostState, params: Callable[[], Any]) -> HostState:
    """See `Ahead.saved`. Waits until the thread has drawn all batches that the checkpoint needs."""
    if self._thread is not None:
      # The weights before the next step, if scheduled batches that must be drawn now need them.
      next_weights = self._lasting(params()) if index in self._known_versions() else None
      with self._changed:
        # A checkpoint has no older weights, so all batches that they draw must be drawn now. With
        # newest or in_flight, newer weights may draw the other batches. So the thread ends what it
        # has begun, and draws only what the schedule gives older weights.
        end = min(index + self._bound, self._steps) if self._schedule is None else 0
        if self._schedule is not None:
          self._checkpoint_step = index
          if next_weights is not None:  # the schedule may change to these weights in flight
            self._weights[index] = next_weights
          self._changed.notify_all()
        self._changed.wait_for(
          lambda: (
            self._error
            or (self._next >= end and not self._is_drawing and not self._needs_older_weights())
          )
        )
        self._fail_with_others()  # in a run of one process, the step that needs the batch fails
    host = super().saved(index, host, params)
    has_chunk = self._changes and self._thread is not None  # else `host` still has the number
    return host | {_CHUNK: np.int64(self._chunk)} if has_chunk else host

  def close(self) -> None:
    with self._changed:
      self._is_closed = True
      self._changed.notify_all()
    if self._thread is not None:
      self._thread.join()

  def take(self, version: int | None) -> VersionedParams:
    """Waits for the weights of a version, and returns them with their version.

    Newer weights cannot arrive while a checkpoint waits for the thread, or while the step of the
    newest weights waits for its batch. Then the newest weights are returned instead.

    Args:
      version: The version. None means the newest.

    Raises:
      RunFailed: The version is older than all versions of this process.
      SamplingClosed: The run has ended.
    """
    with self._changed:
      if version is None:
        version = max(self._weights)
      if version < self._first_version:
        raise RunFailed(
          f"schedule.jsonl has weights of step {version}, and what they draw should be in the"
          f" checkpoint of step {self._first_version}: the file is of another run"
        )
      self._changed.wait_for(
        lambda: (
          version in self._weights
          or self._checkpoint_step is not None
          or self._is_closed
          or self._next <= max(self._weights)
        )
      )
      if self._is_closed:
        raise SamplingClosed("the run has ended")
      if version not in self._weights:
        version = max(self._weights)
      return VersionedParams(self._weights[version], version)

  def _run(self, draw: Callable[[], None]) -> None:
    """Runs `draw` in the thread, and stores the error that ends it."""
    error = None
    try:
      draw()
    except BaseException as raised:  # the step that waits for the batch raises it
      error = raised
    with self._changed:
      self._error, self._is_drawing = error, False
      self._changed.notify_all()

  def _draw_batches(self) -> None:
    """Draws batch after batch, each with one version of the weights."""
    while self._next < self._steps:
      with self._changed, self._idle.running():
        self._changed.wait_for(lambda: self._is_closed or self._may_draw())
        self._is_drawing = True
        number = self._next
      policy = self.take(self._version_of(number))
      with self._drawing:
        pending = self._draw(policy)
      if self._schedule is not None:
        self._schedule.add(number, ((0, policy.version),))
      del policy  # so that the weights can be freed while the thread waits
      self._add(pending)

  def _stream(self) -> None:
    """Draws chunk after chunk. Rows in flight continue with the newest or the scheduled weights."""
    flow, clock = self._collector.flow, Clock()
    while self._next < self._steps:
      with self._changed, self._idle.running():
        self._changed.wait_for(self._may_go_on)
        is_paused, self._is_drawing = self._checkpoint_step is not None, True
      scheduled = self._schedule.chunk(self._chunk)
      if is_paused and scheduled is not None and scheduled.version not in self._weights:
        # These weights arrive only after the checkpoint, which waits for the thread.
        scheduled = None
      if scheduled is not None and flow.is_idle and flow.step > scheduled.version + self._bound:
        scheduled = None  # the run has diverged from the schedule: these weights would be too old
      policy = self.take(None if scheduled is None else scheduled.version)
      last_step = min(policy.version + self._bound, self._steps - 1)
      # The schedule says how many groups to open, but an idle flow must open some to continue.
      limit = None if scheduled is None or flow.is_idle else scheduled.groups
      if is_paused and scheduled is None:  # draws all steps with opened groups to their end
        last_step = max(flow.step, min(flow.step_of(flow.next - 1), last_step))
      with self._drawing:
        has_drawn = self._collector.advance(policy, last_step, limit)
      if has_drawn:
        self._schedule.add_chunk(self._chunk, FromChunk(policy.version, flow.next))
        self._chunk += 1
      while flow.is_drawn:
        clock.lap("sample")
        self._add(self._take(policy, clock))
        clock = Clock()
      del policy  # so that the weights can be freed while the thread waits
    self._schedule.end(self._chunk - 1)

  def _may_go_on(self) -> bool:
    """Whether the thread can draw a chunk, or the run has ended. Notifies `saved` of a pause."""
    flow = self._collector.flow
    if self._is_closed:
      return True
    if flow.next > flow.first:  # groups of the next step are open, and must be drawn to their end
      return True
    if self._checkpoint_step is not None:
      self._is_drawing = self._needs_older_weights()
      self._changed.notify_all()
      return self._is_drawing
    # A scheduled chunk waits for newer weights, unless the learner itself waits for the next batch.
    newest, scheduled = max(self._weights), self._schedule.chunk(self._chunk)
    comes_later = scheduled is not None and scheduled.version > newest
    if comes_later and self._next > newest:
      return False
    return flow.step <= newest + self._bound

  def _add(self, pending: Pending[Scored]) -> None:
    """Adds a drawn batch, and notifies the learner."""
    with self._changed:
      self._drawn[self._next] = pending
      self._next, self._is_drawing = self._next + 1, self._changes
      self._free_weights()
      self._changed.notify_all()

  @contextlib.contextmanager
  def _all_drawn(self) -> Iterator[None]:
    """Waits until the thread has drawn all batches that the existing weights can draw."""
    with self._changed:
      self._changed.wait_for(
        lambda: (
          self._error
          or self._thread is None
          or (not self._is_drawing and (self._next >= self._steps or not self._may_draw()))
        )
      )
      self._fail_with_others()
    yield

  def _fail_with_others(self) -> None:
    """Raises the thread's error if there are several processes, because the others would wait."""
    if self._error is not None and jax.process_count() > 1:
      raise self._error

  def _may_draw(self) -> bool:
    """Whether the next batch can be drawn: the bound allows it, and scheduled weights exist."""
    if self._checkpoint_step is not None and not self._needs_older_weights():
      return False
    if self._next > max(self._weights) + self._bound:
      return False
    known = self._schedule and self._schedule.known.get(self._next)
    return not known or known[0][1] <= max(self._weights)

  def _needs_older_weights(self) -> bool:
    """Whether the schedule gives what is drawn next weights that a waiting checkpoint will lack."""
    if self._checkpoint_step is None or self._next >= self._steps:
      return False
    if self._changes:
      scheduled = self._schedule.chunk(self._chunk)
      version = None if scheduled is None else scheduled.version
      step = self._collector.flow.step
    else:
      version, step = self._version_of(self._next), self._next
    if version not in self._weights or version >= self._checkpoint_step:
      return False
    # Weights that are too old for the step are not used: a schedule of another bound says so.
    return step <= version + self._bound

  def _version_of(self, number: int) -> int | None:
    """The version of the weights that draw a batch. None means the newest."""
    if self._schedule is None:
      return max(number - self._bound, self._first_version)
    known = self._schedule.known.get(number)
    return None if known is None else known[0][1]

  def _free_weights(self) -> None:
    """Frees the weights that no later batch needs."""
    newest = max(self._weights)
    needed = {newest, *self._known_versions()}
    if self._schedule is None:
      needed.update(range(self._next - self._bound, newest))
    for version in self._weights.keys() - needed:
      del self._weights[version]

  def _known_versions(self) -> set[int]:
    """The versions of the weights that the known part of the schedule still needs."""
    if self._schedule is None:
      return set()
    if self._changes:
      return self._schedule.versions_from(self._chunk)
    known = self._schedule.known
    return {version for batch in [*known] if batch >= self._next for _, version in known[batch]}


class _Stopwatch:
  """Measures the share of time that a thread waits."""

  def __init__(self) -> None:
    self._since = self._last = time.perf_counter()
    self._waited, self._is_running = 0.0, False

  @contextlib.contextmanager
  def running(self) -> Any:
    """Counts the time of its block as waiting."""
    self._since, self._is_running = time.perf_counter(), True
    try:
      yield
    finally:
      self._waited += time.perf_counter() - self._since
      self._is_running = False

  def share(self) -> float:
    """The share of waiting in the time since the last call, in [0, 1]."""
    now = time.perf_counter()
    if self._is_running:
      self._waited, self._since = self._waited + now - self._since, now
    share = self._waited / max(now - self._last, 1e-9)
    self._last, self._waited = now, 0.0
    return share
