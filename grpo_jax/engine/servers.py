"""Shares rows among several servers. If a server fails, others draw its rows again.

For each server, a thread checks its health, brings it the current weights, and proves that it has
loaded them. Worker threads wait for a ready server and then for its answer, one row at a time.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import math
import queue
import sys
import threading
import time
from typing import Any, Protocol

from grpo_jax.asynchronous.learner import SamplingClosed
from grpo_jax.engine.client import ServerGone, ServerRefused
from grpo_jax.engine.proof import Probe, mismatch
from grpo_jax.engine.server import Ask, DrawnTokens, EngineServer
from grpo_jax.engine.weights import Written
from grpo_jax.progress import doing
from grpo_jax.settings import RunFailed

_CHECK_GONE = 0.5  # seconds between two health checks of a server that does not answer
_CHECK_READY = 5.0  # seconds between two health checks of a server that draws
# Seconds before a row is tried again after a server's error: after the first, and after later ones.
_FIRST_RETRY, _LATER_RETRY = 0.5, 5.0
_TELL = 8.0  # seconds between two lines that say what the run waits for
_MOST_LOST = 5  # failures while servers draw a row, after which the row itself is the suspect
_MOST_ROWS = 256  # rows in flight per server

ADVICE = (
  "set rollout.engine_restart=True, so that a server is started again with each new weights, and"
  " start it with python -m grpo_jax.engine"
)


class Brings(Protocol):
  """Brings weights to a server."""

  advice: str

  def __call__(self, server: EngineServer, written: Written, before: Written | None) -> str:
    """Brings weights to a server. `before` are its previous weights, or None if not known.

    Returns:
      The name of the model or adapters to draw with.
    """


@dataclasses.dataclass(eq=False)
class RowRequest:
  """A request for the next turn of a row.

  Attributes:
    ask: The prompt and the settings.
    group: Identifies the group. The rows of a group go to one server, which can then share the
      cache of their prompt.
    done: The queue that receives (request, drawn tokens).
    is_dropped: Whether the tokens are no longer wanted.
  """

  ask: Ask
  group: Any
  done: "queue.SimpleQueue[tuple[RowRequest, DrawnTokens]]"
  is_dropped: bool = False


@dataclasses.dataclass(eq=False)
class _ServerState:
  """A server and its state.

  Attributes:
    server: The server.
    weights: The weights that the server has provably loaded. None before the first.
    scores: The log-probs of the probe that the server returned under these weights.
    name: The name of the model or adapters that draw.
    is_gone: Whether the server does not answer.
    is_known: Whether the server's settings were checked since it last began to answer.
    comebacks: How often the server has come back.
    jobs: The requests in flight at the server.
  """

  server: EngineServer
  weights: Written | None = None
  scores: Sequence[Sequence[float]] = ()
  name: str = ""
  is_gone: bool = False
  is_known: bool = False
  comebacks: int = 0
  jobs: set[RowRequest] = dataclasses.field(default_factory=set)


class Servers:
  """Servers that all draw with the same weights."""

  def __init__(
    self,
    servers: Sequence[EngineServer],
    bring: Brings,
    check: Callable[[EngineServer], None],
    probe: Probe,
    should_stop: Callable[[], bool] = lambda: False,
  ):
    """Starts the threads, which begin to connect to the servers.

    Args:
      servers: The servers, at least one.
      bring: Brings weights to a server.
      check: Raises ServerRefused for a server whose settings do not fit the run.
      probe: The rows that prove that a server has loaded weights.
      should_stop: Returns whether the user has asked the run to stop.
    """
    self._bring, self._check, self._probe, self._should_stop = bring, check, probe, should_stop
    self._places = [_ServerState(server) for server in servers]
    self._changed = threading.Condition()  # guards all state, and is notified of its changes
    self._wanted: Written | None = None
    self._homes: dict[Any, _ServerState] = {}  # by `RowRequest.group`, the server of the group
    self._failure: RunFailed | None = None
    self._is_closed = False
    self._told_at = time.monotonic()  # the last time when a server was there or a line was printed
    self._threads = [
      threading.Thread(target=self._keep, args=(state,), name=f"engine {state.server.url}")
      for state in self._places
    ]
    self._waiting: queue.SimpleQueue[RowRequest | None] = queue.SimpleQueue()
    self._threads += [
      threading.Thread(target=self._work, name="a row of the engine")
      for _ in range(_MOST_ROWS * len(servers))
    ]
    for thread in self._threads:
      thread.daemon = True
      thread.start()

  def use(self, weights: Written) -> None:
    """Sets the weights of all later rows. First waits for rows in flight with other weights.

    Returns when at least one server is reachable and all reachable ones have the weights. If they
    were set before, one server that has them is enough.

    Raises:
      RunFailed: A server did not load the weights, whether it reported an error or success.
      SamplingClosed: The run has ended, or it was asked to stop and no server is reachable.
    """
    with self._changed:
      if self._wanted is weights and any(self._is_ready(state) for state in self._places):
        return
      self._wait("rows that were begun", lambda: not any(state.jobs for state in self._places))
      self._wanted = weights
      self._homes.clear()  # the caches of prompts are of no use under new weights
      self._changed.notify_all()
      with doing("bringing the weights to the engine", is_routine=True):
        self._wait("a server", self._are_ready)

  def wait_for_one(self) -> None:
    """Waits for a server whose settings fit the run. Raises what `use` raises."""
    with self._changed:
      self._wait("a server", lambda: any(state.is_known for state in self._places))

  def submit(self, job: RowRequest) -> None:
    """Queues a row. A server draws it as soon as a worker thread is free and a server is ready."""
    self._waiting.put(job)

  def drop(self, jobs: Sequence[RowRequest]) -> None:
    """Drops requests that are no longer wanted, and ends their calls."""
    with self._changed:
      for job in jobs:
        job.is_dropped = True
      pending = [(state.server, job.ask) for state in self._places for job in state.jobs & {*jobs}]
      self._changed.notify_all()
    for server, ask in pending:
      server.drop(ask)

  def next(
    self, done: "queue.SimpleQueue[tuple[RowRequest, DrawnTokens]]", seconds: float
  ) -> list[tuple[RowRequest, DrawnTokens]]:
    """Waits up to `seconds` for the first drawn row. Returns all rows in the queue `done`.

    Raises:
      RunFailed: A server refused a row, or another thread failed.
      SamplingClosed: As for `use`.
    """
    found = []
    with contextlib.suppress(queue.Empty):
      found.append(done.get(timeout=seconds))
      while True:
        found.append(done.get_nowait())
    with self._changed:
      self._look_around("a server")
    return found

  def close(self) -> None:
    """Aborts all calls and ends the threads. Waits up to 2 seconds for them."""
    with self._changed:
      self._is_closed = True
      self._changed.notify_all()
    for state in self._places:
      state.server.drop()
    for _ in self._threads:
      self._waiting.put(None)
    until = time.monotonic() + 2.0
    for thread in self._threads:
      thread.join(max(0.0, until - time.monotonic()))

  def _is_ready(self, state: _ServerState) -> bool:
    return not state.is_gone and self._wanted is not None and state.weights is self._wanted

  def _are_ready(self) -> bool:
    """Returns whether at least one server is reachable and all reachable ones are ready."""
    there = [state for state in self._places if not state.is_gone]
    return bool(there) and all(map(self._is_ready, there))

  def _wait(self, what: str, holds: Callable[[], bool]) -> None:
    """Waits until `holds()` is true. `what` names the awaited state in progress lines."""
    while not holds():
      self._look_around(what)
      self._changed.wait(_CHECK_GONE)
    self._look_around(what)

  def _look_around(self, what: str) -> None:
    """Raises any error of a thread. If no server is reachable, prints that it waits for `what`.

    Only then does a request to stop end the wait: with a server, the run completes the batch first.
    """
    if self._is_closed:
      raise SamplingClosed("the run has ended")
    if self._failure is not None:
      raise self._failure
    now = time.monotonic()
    if any(not state.is_gone for state in self._places):
      self._told_at = now
    elif self._should_stop():
      raise SamplingClosed("the run was asked to stop, and no server of the engine is there")
    elif now - self._told_at >= _TELL:
      self._told_at = now
      urls = ", ".join(state.server.url for state in self._places)
      _say(f"waiting for {what} of the engine at {urls}: python -m grpo_jax.engine --config=...")

  def _fail(self, why: str) -> None:
    with self._changed:
      self._failure = self._failure or RunFailed(why)
      self._changed.notify_all()

  def _keep(self, state: _ServerState) -> None:
    """Checks a server and brings it weights, until the run ends. Each server has such a thread."""
    looked_at = -math.inf
    while True:
      with self._changed:
        self._changed.wait_for(lambda: self._is_closed or self._lacks_weights(state), _CHECK_GONE)
        if self._is_closed or self._failure:
          return
        # A server that draws is checked every _CHECK_READY seconds, and others each time.
        wanted, is_due = self._wanted, time.monotonic() - looked_at >= _CHECK_READY
        if state.is_known and not self._lacks_weights(state) and not is_due:
          continue
      looked_at = time.monotonic()
      try:
        state.server.is_there()
        if not state.is_known:
          self._check(state.server)
        if wanted is not None and state.weights is not wanted:
          self._prove(state, wanted)
        self._mark_back(state)
      except ServerGone as error:
        self._lose(state, str(error))
      except ServerRefused as error:
        self._fail(str(error))
      except Exception as error:  # otherwise the thread would die silently and the run would hang
        self._fail(f"{state.server.url}: {type(error).__name__}: {error}")

  def _lacks_weights(self, state: _ServerState) -> bool:
    return not state.is_gone and self._wanted is not None and state.weights is not self._wanted

  def _prove(self, state: _ServerState, wanted: Written) -> None:
    """Brings weights to a server, and scores the probe. Raises ServerRefused on a mismatch."""
    before = state.weights
    name = self._bring(state.server, wanted, before)
    scores = state.server.score(self._probe.tokens_BN.tolist(), name)
    previous = None if before is None else (before.logprobs_BN, state.scores)
    gap = self._probe.largest_gap
    wrong = mismatch(wanted.logprobs_BN, scores, previous, gap)
    if wrong:
      raise ServerRefused(
        f"{state.server.url} does not have the weights that it was given: {wrong}. It has another"
        f" model or dtype, or did not load them, whatever it said: {self._bring.advice}"
      )
    with self._changed:
      state.weights, state.scores, state.name = wanted, scores, name

  def _mark_back(self, state: _ServerState) -> None:
    with self._changed:
      if state.is_gone:
        _say(f"{state.server.url} is back")
        state.comebacks += 1
      state.is_known, state.is_gone = True, False
      self._changed.notify_all()

  def _lose(self, state: _ServerState, why: str) -> None:
    """Prints `why`, marks a server as gone and aborts its calls, so that others draw its rows."""
    with self._changed:
      if not state.is_gone and not self._is_closed:
        lost = f": {len(state.jobs)} rows are drawn again" if state.jobs else ""
        _say(f"{why}{lost}")
      state.is_gone, state.is_known, state.weights = True, False, None
      self._changed.notify_all()
    state.server.drop()

  def _work(self) -> None:
    """Draws queued rows one after the other, in one of many worker threads."""
    while (job := self._waiting.get()) is not None and not self._is_closed:
      try:
        drawn = self._drawn(job)
      except ServerRefused as error:
        self._fail(str(error))
      except Exception as error:  # see `_keep`
        self._fail(f"a row of the engine: {type(error).__name__}: {error}")
      else:
        if drawn is not None:
          job.done.put((job, drawn))

  def _drawn(self, job: RowRequest) -> DrawnTokens | None:
    """Lets servers draw a row until one succeeds.

    Returns None if the request was dropped or the servers are closed. Raises ServerRefused after a
    4xx status or a wrong answer, or after repeated failures.
    """
    lost = refused = 0  # how often servers went away, and how often they answered with an error
    while True:
      with self._server_for(job) as state:
        if state is None:
          return None
        comebacks = state.comebacks  # before the request is sent
        try:
          return state.server.draw(job.ask, state.name)
        except ServerGone as error:
          lost += 1
          if job.is_dropped or self._is_closed:
            return None
          if lost == _MOST_LOST:
            raise ServerRefused(
              f"a server went away {lost} times while it drew a row: {error}"
            ) from None
          if state.comebacks == comebacks:  # otherwise it has already come back
            self._lose(state, str(error))
        except ServerRefused as error:
          if job.is_dropped:
            return None
          refused += 1
          if error.status < 500 or refused == _MOST_LOST:
            raise
          wait = _FIRST_RETRY if refused == 1 else _LATER_RETRY
          self._wait_after(job, state, comebacks, wait)

  def _wait_after(
    self, job: RowRequest, state: _ServerState, comebacks: int, seconds: float
  ) -> None:
    """Waits before a row is tried again after a server's 5xx status. Then any server may draw it.

    If the health check fails, it marks the server as gone.

    Args:
      job: The row.
      state: The server.
      comebacks: `state.comebacks` when the request was sent. If that has changed, the server was
        gone meanwhile, and its own thread has taken care of it.
      seconds: How long to wait.
    """
    try:
      state.server.is_there()
    except (ServerGone, ServerRefused) as error:
      if state.comebacks == comebacks:
        self._lose(state, str(error))
    with self._changed:
      self._homes.pop(job.group, None)  # so that another server may draw the rest of the group
      self._changed.wait_for(lambda: self._is_closed or job.is_dropped, seconds)

  @contextlib.contextmanager
  def _server_for(self, job: RowRequest) -> Iterator[_ServerState | None]:
    """Waits until a server is ready, and assigns the request to the server of its group.

    Yields:
      The server. Its `jobs` contain the request until the block ends. None if the request was
      dropped or the servers were closed.
    """
    with self._changed:
      self._changed.wait_for(
        lambda: self._is_closed or job.is_dropped or any(map(self._is_ready, self._places))
      )
      state = None if self._is_closed or job.is_dropped else self._home(job.group)
      if state is not None:
        state.jobs.add(job)
    try:
      yield state
    finally:
      if state is not None:
        with self._changed:
          state.jobs.discard(job)
          self._changed.notify_all()

  def _home(self, group: Any) -> _ServerState:
    """Returns the server of a group: the ready one with the fewest rows when the group began."""
    home = self._homes.get(group)
    if home is None or not self._is_ready(home):
      ready = [state for state in self._places if self._is_ready(state)]
      home = self._homes[group] = min(ready, key=lambda state: len(state.jobs))
    return home


def _say(line: str) -> None:
  # In one call, because several threads may print at the same time.
  print(f"{line}\n", end="", file=sys.stderr, flush=True)
