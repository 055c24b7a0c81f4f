"""Several servers share rows. One that goes away costs its rows, which others draw again.

Each server has a thread that looks whether it is there, brings it the weights that draw, and proves
them. Rows wait in threads of their own for a server that is ready.
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

from grpo_jax.asynchronous.learner import Closed
from grpo_jax.engine.client import Gone, Refused
from grpo_jax.engine.proof import Probe, what_is_wrong
from grpo_jax.engine.vllm import Ask, Drawn, VllmServer
from grpo_jax.engine.weights import Written
from grpo_jax.settings import RunFailed

_LOOK = 0.5  # seconds between two looks at a server that is not there
_BEAT = 5.0  # and at one that draws
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

  def __call__(self, server: VllmServer, written: Written, before: Written | None) -> str:
    """Lets the server have these weights, after others.

    Returns:
      The name of what then draws.
    """


@dataclasses.dataclass(eq=False)
class Job:
  """Tokens that are wanted.

  Attributes:
    ask: Which.
    group: Rows of one group go to one server, which computes their prompt once.
    done: Gets (job, what was drawn).
    is_dropped: Nobody wants them any more.
  """

  ask: Ask
  group: Any
  done: "queue.SimpleQueue[tuple[Job, Drawn]]"
  is_dropped: bool = False


@dataclasses.dataclass(eq=False)
class _Place:
  """A server, and what is known of it.

  Attributes:
    server: The server.
    weights: What it draws with, which is proven. None before the first.
    scores: Its log-probs of the probe under them.
    name: Of the model, or of adapters.
    is_gone: It does not answer.
    is_known: Its settings were looked at since it was there last.
    returns: How often it has come back.
    jobs: What it draws.
  """

  server: VllmServer
  weights: Written | None = None
  scores: Sequence[Sequence[float]] = ()
  name: str = ""
  is_gone: bool = False
  is_known: bool = False
  returns: int = 0
  jobs: set[Job] = dataclasses.field(default_factory=set)


class Servers:
  """Servers that draw with the same weights."""

  def __init__(
    self,
    servers: Sequence[VllmServer],
    bring: Brings,
    check: Callable[[VllmServer], None],
    probe: Probe,
    should_stop: Callable[[], bool] = lambda: False,
  ):
    """Begins to look for the servers.

    Args:
      servers: At least one.
      bring: Brings weights to a server.
      check: Raises Refused for a server with settings that do not fit the run.
      probe: What proves weights.
      should_stop: Whether the run was asked to stop.
    """
    self._bring, self._check, self._probe, self._should_stop = bring, check, probe, should_stop
    self._places = [_Place(server) for server in servers]
    self._changed = threading.Condition()
    self._wanted: Written | None = None
    self._homes: dict[Any, _Place] = {}  # of groups
    self._failure: RunFailed | None = None
    self._is_closed, self._told_at = False, time.monotonic()
    self._threads = [
      threading.Thread(target=self._keep, args=(place,), name=f"engine {place.server.url}")
      for place in self._places
    ]
    self._waiting: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
    self._threads += [
      threading.Thread(target=self._work, name="a row of the engine")
      for _ in range(_MOST_ROWS * len(servers))
    ]
    for thread in self._threads:
      thread.daemon = True
      thread.start()

  def use(self, weights: Written) -> None:
    """Draws with these weights from now on. It waits for rows that draw with others.

    Raises:
      RunFailed: A server does not load them, or does not have them although it says so.
      Closed: The run has ended, or it was asked to stop and no server is there.
    """
    with self._changed:
      if self._wanted is weights and any(self._is_ready(place) for place in self._places):
        return
      self._wait("rows that were begun", lambda: not any(place.jobs for place in self._places))
      self._wanted = weights
      self._homes.clear()
      self._changed.notify_all()
      self._wait("a server", self._are_ready)

  def wait_for_one(self) -> None:
    """Waits for a server whose settings fit the run. Raises as `use`."""
    with self._changed:
      self._wait("a server", lambda: any(place.is_known for place in self._places))

  def submit(self, job: Job) -> None:
    """A row is drawn as soon as a server is free."""
    self._waiting.put(job)

  def drop(self, jobs: Sequence[Job]) -> None:
    """Nobody wants these jobs any more: their calls end."""
    with self._changed:
      for job in jobs:
        job.is_dropped = True
      held = [(place.server, job.ask) for place in self._places for job in place.jobs & {*jobs}]
      self._changed.notify_all()
    for server, ask in held:
      server.drop(ask)

  def next(
    self, done: "queue.SimpleQueue[tuple[Job, Drawn]]", seconds: float
  ) -> list[tuple[Job, Drawn]]:
    """Waits so long for rows. Returns those that have been drawn.

    Raises:
      RunFailed: A server refuses one.
      Closed: As `use`.
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

  def _is_ready(self, place: _Place) -> bool:
    return not place.is_gone and self._wanted is not None and place.weights is self._wanted

  def _are_ready(self) -> bool:
    """Whether every server that is there is ready, and one is."""
    there = [place for place in self._places if not place.is_gone]
    return bool(there) and all(map(self._is_ready, there))

  def _wait(self, what: str, holds: Callable[[], bool]) -> None:
    """Waits until something holds."""
    while not holds():
      self._look_around(what)
      self._changed.wait(_LOOK)
    self._look_around(what)

  def _look_around(self, what: str) -> None:
    """Raises what has failed, and says every few seconds if no server is there to wait for."""
    if self._is_closed:
      raise Closed("the run has ended")
    if self._failure is not None:
      raise self._failure
    now = time.monotonic()
    if any(not place.is_gone for place in self._places):
      self._told_at = now
    elif self._should_stop():
      raise Closed("the run was asked to stop, and no server of the engine is there")
    elif now - self._told_at >= _TELL:
      self._told_at = now
      urls = ", ".join(place.server.url for place in self._places)
      _say(f"waiting for {what} of the engine at {urls}: python -m grpo_jax.engine --config=...")

  def _fail(self, why: str) -> None:
    with self._changed:
      self._failure = self._failure or RunFailed(why)
      self._changed.notify_all()

  def _keep(self, place: _Place) -> None:
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
      except Gone as error:
        self._lose(place, str(error))
      except Refused as error:
        self._fail(str(error))
      except Exception as error:  # nobody would hear of it, and the run would wait for ever
        self._fail(f"{place.server.url}: {type(error).__name__}: {error}")

  def _has_work(self, place: _Place) -> bool:
    return not place.is_gone and self._wanted is not None and place.weights is not self._wanted

  def _prove(self, place: _Place, wanted: Written) -> None:
    """Brings weights to a server, and finds out whether it has them."""
    before = place.weights if place.is_known else None
    name = self._bring(place.server, wanted, before)
    scores = place.server.score(self._probe.tokens_BN.tolist(), name)
    known = None if before is None else (before.logprobs_BN, place.scores)
    gap = self._probe.largest_gap
    wrong = what_is_wrong(wanted.logprobs_BN, scores, known, gap)
    if wrong:
      raise Refused(
        f"{place.server.url} does not have the weights that it was given: {wrong}. It has another"
        f" model or dtype, or did not load them, whatever it said: {self._bring.advice}"
      )
    with self._changed:
      place.weights, place.scores, place.name = wanted, scores, name

  def _is_back(self, place: _Place) -> None:
    with self._changed:
      if place.is_gone:
        _say(f"{place.server.url} is back")
        place.returns += 1
      place.is_known, place.is_gone = True, False
      self._changed.notify_all()

  def _lose(self, place: _Place, why: str) -> None:
    """A server does not answer: what it draws is lost."""
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
      except Refused as error:
        self._fail(str(error))
      except Exception as error:  # as above
        self._fail(f"a row of the engine: {type(error).__name__}: {error}")
      else:
        if drawn is not None:
          job.done.put((job, drawn))

  def _drawn(self, job: Job) -> Drawn | None:
    """What a server draws for a job. None if nobody wants it any more. Raises Refused."""
    lost = refused = 0
    while True:
      with self._at(job) as place:
        if place is None:
          return None
        returns = place.returns
        try:
          return place.server.draw(job.ask, place.name)
        except Gone as error:
          lost += 1
          if job.is_dropped or self._is_closed:
            return None
          if lost == _MOST_LOST:
            raise Refused(f"{lost} servers went away while they drew a row: {error}") from None
          if place.returns == returns:  # it has not come back meanwhile
            self._lose(place, str(error))
        except Refused as error:
          if job.is_dropped:
            return None
          refused += 1
          if error.status < 500 or refused == _MOST_LOST:
            raise
          self._wait_after(job, place, returns, _LOOK if refused == 1 else _BEAT)

  def _wait_after(self, job: Job, place: _Place, returns: int, seconds: float) -> None:
    """Lets time pass after a server failed, which is lost if it is not well."""
    try:
      place.server.is_there()
    except (Gone, Refused) as error:
      if place.returns == returns:
        self._lose(place, str(error))
    with self._changed:
      self._homes.pop(job.group, None)  # it may move to another server
      self._changed.wait_for(lambda: self._is_closed or job.is_dropped, seconds)

  @contextlib.contextmanager
  def _at(self, job: Job) -> Iterator[_Place | None]:
    """Waits for the server of a job. None if nobody wants the job any more."""
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

  def _home(self, group: Any) -> _Place:
    """The server of a group: the one that has fewest rows when its first row comes."""
    home = self._homes.get(group)
    if home is None or not self._is_ready(home):
      ready = [place for place in self._places if self._is_ready(place)]
      home = self._homes[group] = min(ready, key=lambda place: len(place.jobs))
    return home


def _say(line: str) -> None:
  # In one piece, because threads say something at the same time.
  print(f"{line}\n", end="", file=sys.stderr, flush=True)
