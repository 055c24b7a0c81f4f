"""Shares rows among several servers. If a server goes away, others draw its rows again.

Each server has a thread that checks that it is there, brings it the weights to draw with, and
proves that it has them. Each row waits in a thread of its own for a server that is ready.
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

_LOOK = 0.5  # seconds between two looks at a server that is not there
_BEAT = 5.0  # seconds between two looks at a server that draws
_TELL = 8.0  # seconds between two lines that say what the run waits for
_MOST_LOST = 5  # servers that may go away while they draw a row, before it is the row's fault
_MOST_ROWS = 256  # in flight at a server

ADVICE = (
  "set rollout.engine_restart=True, so that a server is started again with each new weights, and"
  " start it with python -m grpo_jax.engine"
)


class Brings(Protocol):
  """Brings weights to a server."""

  advice: str

  def __call__(self, server: EngineServer, written: Written, before: Written | None) -> str:
    """Brings weights to a server. `before` are the weights that it has, or None.

    Returns:
      The name of the model or adapters that then draw.
    """


@dataclasses.dataclass(eq=False)
class RowRequest:
  """A request for the next tokens of a row.

  Attributes:
    ask: The prompt and the settings.
    group: Identifies the group. Its rows go to one server, which computes their prompt once.
    done: Gets (request, drawn tokens).
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
    weights: The weights that it was proven to draw with. None before the first.
    scores: Its log-probs of the probe under these weights.
    name: The name of the model or adapters that draw.
    is_gone: Whether it does not answer.
    is_known: Whether its settings were checked since it came back.
    returns: How often it has come back.
    jobs: The requests that it draws.
  """

  server: EngineServer
  weights: Written | None = None
  scores: Sequence[Sequence[float]] = ()
  name: str = ""
  is_gone: bool = False
  is_known: bool = False
  returns: int = 0
  jobs: set[RowRequest] = dataclasses.field(default_factory=set)


class Servers:
  """Servers that draw with the same weights."""

  def __init__(
    self,
    servers: Sequence[EngineServer],
    bring: Brings,
    check: Callable[[EngineServer], None],
    probe: Probe,
    should_stop: Callable[[], bool] = lambda: False,
  ):
    """Starts the threads, which begin to look for the servers.

    Args:
      servers: The servers, at least one.
      bring: Brings weights to a server.
      check: Raises ServerRefused for a server with settings that do not fit the run.
      probe: The rows that prove weights.
      should_stop: Whether the run was asked to stop.
    """
    self._bring, self._check, self._probe, self._should_stop = bring, check, probe, should_stop
    self._places = [_ServerState(server) for server in servers]
    self._changed = threading.Condition()
    self._wanted: Written | None = None
    self._homes: dict[Any, _ServerState] = {}  # of groups
    self._failure: RunFailed | None = None
    self._is_closed, self._told_at = False, time.monotonic()
    self._threads = [
      threading.Thread(target=self._keep, args=(place,), name=f"engine {place.server.url}")
      for place in self._places
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
    """Draws with these weights from now on. Waits for rows in flight with other weights.

    Raises:
      RunFailed: A server does not load them, or says that it did and does not have them.
      SamplingClosed: The run has ended, or it was asked to stop and no server is there.
    """
    with self._changed:
      if self._wanted is weights and any(self._is_ready(place) for place in self._places):
        return
      self._wait("rows that were begun", lambda: not any(place.jobs for place in self._places))
      self._wanted = weights
      self._homes.clear()
      self._changed.notify_all()
      with doing("bringing the weights to the engine", is_routine=True):
        self._wait("a server", self._are_ready)

  def wait_for_one(self) -> None:
    """Waits for a server whose settings fit the run. Raises the same errors as `use`."""
    with self._changed:
      self._wait("a server", lambda: any(place.is_known for place in self._places))

  def submit(self, job: RowRequest) -> None:
    """Queues a row. A server draws it as soon as one is free."""
    self._waiting.put(job)

  def drop(self, jobs: Sequence[RowRequest]) -> None:
    """Drops requests that are no longer wanted, and ends their calls."""
    with self._changed:
      for job in jobs:
        job.is_dropped = True
      held = [(place.server, job.ask) for place in self._places for job in place.jobs & {*jobs}]
      self._changed.notify_all()
    for server, ask in held:
      server.drop(ask)

  def next(
    self, done: "queue.SimpleQueue[tuple[RowRequest, DrawnTokens]]", seconds: float
  ) -> list[tuple[RowRequest, DrawnTokens]]:
    """Waits up to `seconds` for rows. Returns those that have been drawn.

    Raises:
      RunFailed: A server refuses one.
      SamplingClosed: As `use`.
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
    """Ends all calls and threads."""
    with self._changed:
      self._is_closed = True
      self._changed.notify_all()
    for place in self._places:
      place.server.drop()
    for _ in self._threads:
      self._waiting.put(None)
    until = time.monotonic() + 2.0
    for thread in self._threads:
      thread.join(max(0.0, until - time.monotonic()))

  def _is_ready(self, place: _ServerState) -> bool:
    return not place.is_gone and self._wanted is not None and place.weights is self._wanted

  def _are_ready(self) -> bool:
    """Whether there is a server, and each one that is there is ready."""
    there = [place for place in self._places if not place.is_gone]
    return bool(there) and all(map(self._is_ready, there))

  def _wait(self, what: str, holds: Callable[[], bool]) -> None:
    """Waits until something holds."""
    while not holds():
      self._look_around(what)
      self._changed.wait(_LOOK)
    self._look_around(what)

  def _look_around(self, what: str) -> None:
    """Raises an error of a thread. Prints every few seconds that no server is there."""
    if self._is_closed:
      raise SamplingClosed("the run has ended")
    if self._failure is not None:
      raise self._failure
    now = time.monotonic()
    if any(not place.is_gone for place in self._places):
      self._told_at = now
    elif self._should_stop():
      raise SamplingClosed("the run was asked to stop, and no server of the engine is there")
    elif now - self._told_at >= _TELL:
      self._told_at = now
      urls = ", ".join(place.server.url for place in self._places)
      _say(f"waiting for {what} of the engine at {urls}: python -m grpo_jax.engine --config=...")

  def _fail(self, why: str) -> None:
    with self._changed:
      self._failure = self._failure or RunFailed(why)
      self._changed.notify_all()

  def _keep(self, place: _ServerState) -> None:
    """Looks after a server until the run has ended. This is a thread."""
    looked_at = -math.inf
    while True:
      with self._changed:
        self._changed.wait_for(lambda: self._is_closed or self._has_work(place), _LOOK)
        if self._is_closed or self._failure:
          return
        wanted, is_due = self._wanted, time.monotonic() - looked_at >= _BEAT
        if not (place.is_gone or not place.is_known or self._has_work(place) or is_due):
          continue
      looked_at = time.monotonic()
      try:
        place.server.is_there()
        if not place.is_known:
          self._check(place.server)
        if wanted is not None and (place.weights is not wanted or not place.is_known):
          self._prove(place, wanted)
        self._is_back(place)
      except ServerGone as error:
        self._lose(place, str(error))
      except ServerRefused as error:
        self._fail(str(error))
      except Exception as error:  # else the thread would end unseen, and the run wait for ever
        self._fail(f"{place.server.url}: {type(error).__name__}: {error}")

  def _has_work(self, place: _ServerState) -> bool:
    return not place.is_gone and self._wanted is not None and place.weights is not self._wanted

  def _prove(self, place: _ServerState, wanted: Written) -> None:
    """Brings weights to a server, and finds out whether it has them."""
    before = place.weights if place.is_known else None
    name = self._bring(place.server, wanted, before)
    scores = place.server.score(self._probe.tokens_BN.tolist(), name)
    known = None if before is None else (before.logprobs_BN, place.scores)
    gap = self._probe.largest_gap
    wrong = mismatch(wanted.logprobs_BN, scores, known, gap)
    if wrong:
      raise ServerRefused(
        f"{place.server.url} does not have the weights that it was given: {wrong}. It has another"
        f" model or dtype, or did not load them, whatever it said: {self._bring.advice}"
      )
    with self._changed:
      place.weights, place.scores, place.name = wanted, scores, name

  def _is_back(self, place: _ServerState) -> None:
    with self._changed:
      if place.is_gone:
        _say(f"{place.server.url} is back")
        place.returns += 1
      place.is_known, place.is_gone = True, False
      self._changed.notify_all()

  def _lose(self, place: _ServerState, why: str) -> None:
    """Marks a server as gone. The rows that it draws are lost."""
    with self._changed:
      if not place.is_gone and not self._is_closed:
        lost = f": {len(place.jobs)} rows are drawn again" if place.jobs else ""
        _say(f"{why}{lost}")
      place.is_gone, place.is_known, place.weights = True, False, None
      self._changed.notify_all()
    place.server.drop()

  def _work(self) -> None:
    """Draws rows, one after the other. This is one of many threads."""
    while (job := self._waiting.get()) is not None and not self._is_closed:
      try:
        drawn = self._drawn(job)
      except ServerRefused as error:
        self._fail(str(error))
      except Exception as error:  # as above
        self._fail(f"a row of the engine: {type(error).__name__}: {error}")
      else:
        if drawn is not None:
          job.done.put((job, drawn))

  def _drawn(self, job: RowRequest) -> DrawnTokens | None:
    """The tokens that a server draws. None if they are no longer wanted. Raises ServerRefused."""
    lost = refused = 0
    while True:
      with self._server_for(job) as place:
        if place is None:
          return None
        returns = place.returns
        try:
          return place.server.draw(job.ask, place.name)
        except ServerGone as error:
          lost += 1
          if job.is_dropped or self._is_closed:
            return None
          if lost == _MOST_LOST:
            raise ServerRefused(
              f"{lost} servers went away while they drew a row: {error}"
            ) from None
          if place.returns == returns:  # it has not come back meanwhile
            self._lose(place, str(error))
        except ServerRefused as error:
          if job.is_dropped:
            return None
          refused += 1
          if error.status < 500 or refused == _MOST_LOST:
            raise
          self._wait_after(job, place, returns, _LOOK if refused == 1 else _BEAT)

  def _wait_after(self, job: RowRequest, place: _ServerState, returns: int, seconds: float) -> None:
    """Waits after an error of a server. Marks the server as gone if its health check fails."""
    try:
      place.server.is_there()
    except (ServerGone, ServerRefused) as error:
      if place.returns == returns:
        self._lose(place, str(error))
    with self._changed:
      self._homes.pop(job.group, None)  # it may move to another server
      self._changed.wait_for(lambda: self._is_closed or job.is_dropped, seconds)

  @contextlib.contextmanager
  def _server_for(self, job: RowRequest) -> Iterator[_ServerState | None]:
    """Waits until a server is ready, and gives the request to that of its group.

    Yields:
      The server, among whose jobs the request is until the block ends. None if the request was
      dropped, or all is closed.
    """
    with self._changed:
      self._changed.wait_for(
        lambda: self._is_closed or job.is_dropped or any(map(self._is_ready, self._places))
      )
      place = None if self._is_closed or job.is_dropped else self._home(job.group)
      if place is not None:
        place.jobs.add(job)
    try:
      yield place
    finally:
      if place is not None:
        with self._changed:
          place.jobs.discard(job)
          self._changed.notify_all()

  def _home(self, group: Any) -> _ServerState:
    """The server of a group: the one with the fewest rows when its first row comes."""
    home = self._homes.get(group)
    if home is None or not self._is_ready(home):
      ready = [place for place in self._places if self._is_ready(place)]
      home = self._homes[group] = min(ready, key=lambda place: len(place.jobs))
    return home


def _say(line: str) -> None:
  # In one piece, because threads say something at the same time.
  print(f"{line}\n", end="", file=sys.stderr, flush=True)
