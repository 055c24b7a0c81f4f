"""Simulates a run whose sampler and learner have devices of their own and work at the same time.

The sampler decodes rows in chunks of rounds. Between two chunks, rows that have ended leave their
seats, new ones enter, and newer weights take the place of the old. A group whose rows have all
ended is scored, and then waits. The learner takes the oldest groups that wait, a batch at a time,
and each update makes a new version of the policy. A group may start only if it can still be used
within the bound on staleness, as in AReaL (2505.24298, section 5.1). One that is too old when its
turn comes is dropped, and another group may start in its place.

With a bound of 0 the two sides take turns. On all devices that is a run without overlap.
"""

from collections import deque
from collections.abc import Mapping, Sequence
import dataclasses
import heapq
import math

import numpy as np


@dataclasses.dataclass(frozen=True)
class Job:
  """What a run does, whatever its devices.

  Attributes:
    prompts: Groups of a batch.
    lengths_NG: int, the lengths of the completions of N groups. Simulated groups have them in turn.
    seats: How many rows are decoded together.
    chunk: The most rounds between two moments at which rows enter and weights change.
    reward_seconds: How long the scoring of a group takes. Groups are scored at the same time.
    steps: Updates to simulate.
    warm_up: How many of them, from the first on, are not measured.
  """

  prompts: int
  lengths_NG: np.ndarray
  seats: int
  chunk: int
  reward_seconds: float = 0.0
  steps: int = 60
  warm_up: int = 20


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What a simulation measured after its warm-up.

  Attributes:
    step_seconds: The mean time from one update to the next.
    sampler_idle: The share of time in which the sampler decodes nothing.
    seats_filled: The mean share of seats with a row, while it decodes.
    learner_idle: The share of time without an update.
    staleness: The mean over tokens of the versions between their draw and their use.
    dropped: Groups that were dropped, for each group that was used.
  """

  step_seconds: float
  sampler_idle: float
  seats_filled: float
  learner_idle: float
  staleness: float
  dropped: float

  @property
  def steps_per_hour(self) -> float:
    """Updates in an hour."""
    return 3600 / self.step_seconds


@dataclasses.dataclass(frozen=True)
class Split:
  """Devices to each side, a bound on staleness, and what a run of it does."""

  sampler: int
  learner: int
  bound: int
  outcome: Outcome


def simulate(job: Job, round_seconds: float, update_seconds: float, bound: int) -> Outcome:
  """Simulates a run.

  Args:
    job: What the run does.
    round_seconds: How long the sampler takes for a token of all rows.
    update_seconds: How long the learner takes for a batch.
    bound: How many versions a token may be old when it is used.

  Returns:
    What was measured.
  """
  return _Simulation(job, round_seconds, update_seconds, bound).run()


def seconds_on(seconds: Mapping[int, float], count: int) -> float:
  """How long something takes on `count` devices, if it is known for some counts.

  From the largest known count up to `count`, or else the smallest known one, the time falls as the
  number of devices grows.
  """
  known = max((each for each in seconds if each <= count), default=min(seconds))
  return seconds[known] * known / count


def splits(
  job: Job,
  round_seconds: Mapping[int, float],
  update_seconds: Mapping[int, float],
  devices: int,
  bounds: Sequence[int],
) -> list[Split]:
  """Every split of the devices under every bound.

  Args:
    job: What the run does.
    round_seconds: Of the sampler, by its number of devices.
    update_seconds: Of the learner, by its number of devices.
    devices: Of both sides together.
    bounds: On staleness.
  """
  return [
    Split(
      sampler,
      devices - sampler,
      bound,
      simulate(
        job,
        seconds_on(round_seconds, sampler),
        seconds_on(update_seconds, devices - sampler),
        bound,
      ),
    )
    for sampler in range(1, devices)
    for bound in bounds
  ]


def best(found: Sequence[Split], tolerance: float = 0.02) -> Split:
  """The split with the freshest tokens among those that are at most 2% slower than the fastest."""
  fastest = min(split.outcome.step_seconds for split in found)
  good = [x for x in found if x.outcome.step_seconds <= (1 + tolerance) * fastest]
  return min(good, key=lambda x: (x.bound, x.outcome.step_seconds))


@dataclasses.dataclass
class _Group:
  """A group that has started: its rows that have not ended, and the versions of its tokens."""

  number: int
  rows_left: int
  oldest: int
  tokens: int = 0
  versions: int = 0  # the sum over its tokens

  def draw(self, tokens: int, version: int) -> None:
    self.tokens += tokens
    self.versions += tokens * version


@dataclasses.dataclass
class _Counters:
  """Sums since the start."""

  time: float = 0.0
  sampling: float = 0.0
  filled: float = 0.0  # seconds of sampling times the share of seats with a row
  learning: float = 0.0
  tokens: int = 0
  staleness: int = 0  # the sum over tokens that were used
  used: int = 0
  dropped: int = 0

  def since(self, start: "_Counters", steps: int) -> Outcome:
    passed = {name: value - getattr(start, name) for name, value in vars(self).items()}
    time = passed["time"]
    return Outcome(
      step_seconds=time / steps,
      sampler_idle=1 - passed["sampling"] / time,
      seats_filled=passed["filled"] / passed["sampling"],
      learner_idle=1 - passed["learning"] / time,
      staleness=passed["staleness"] / passed["tokens"],
      dropped=passed["dropped"] / passed["used"],
    )


class _Simulation:
  """The state of a simulated run at the time `counters.time`."""

  def __init__(self, job: Job, round_seconds: float, update_seconds: float, bound: int):
    self.job, self.bound = job, bound
    self.round_seconds, self.update_seconds = round_seconds, update_seconds
    self.version = 0
    self.started = 0
    self.rows: list[tuple[_Group, int]] = []  # in seats, with the tokens that they still draw
    self.waiting: deque[tuple[_Group, int]] = deque()  # of groups that have started
    self.scored: list[tuple[int, _Group]] = []  # by age
    self.scoring: list[tuple[float, int, _Group]] = []  # by when they are scored
    self.chunk_end = self.update_end = math.inf
    self.rounds = 0  # of the chunk
    self.counters = _Counters()

  def run(self) -> Outcome:
    start = dataclasses.replace(self.counters)
    while self.version < self.job.steps:
      self._begin_update()
      self._begin_chunk()
      next_scored = self.scoring[0][0] if self.scoring else math.inf
      self._advance(min(self.chunk_end, self.update_end, next_scored))
      if self.counters.time == self.chunk_end:
        self._end_chunk()
      while self.scoring and self.scoring[0][0] <= self.counters.time:
        _, number, group = heapq.heappop(self.scoring)
        heapq.heappush(self.scored, (number, group))
      if self.counters.time == self.update_end:
        self.update_end = math.inf
        self.version += 1
        if self.version == self.job.warm_up:
          start = dataclasses.replace(self.counters)
    return self.counters.since(start, self.job.steps - self.job.warm_up)

  def _advance(self, time: float) -> None:
    counters, passed = self.counters, time - self.counters.time
    if self.chunk_end < math.inf:
      counters.sampling += passed
      drawn = sum(min(left, self.rounds) for _, left in self.rows)
      counters.filled += passed * drawn / (self.rounds * self.job.seats)
    if self.update_end < math.inf:
      counters.learning += passed
    counters.time = time

  def _begin_update(self) -> None:
    if self.update_end < math.inf:
      return
    fresh = [x for x in self.scored if x[1].oldest >= self.version - self.bound]
    self.counters.dropped += len(self.scored) - len(fresh)
    self.scored = fresh  # still a heap: what is left of a sorted or heap order is made one again
    heapq.heapify(self.scored)
    if len(self.scored) < self.job.prompts:
      return
    for _ in range(self.job.prompts):
      _, group = heapq.heappop(self.scored)
      self.counters.tokens += group.tokens
      self.counters.staleness += group.tokens * self.version - group.versions
      self.counters.used += 1
    self.update_end = self.counters.time + self.update_seconds

  def _begin_chunk(self) -> None:
    if self.chunk_end < math.inf:
      return
    while len(self.rows) < self.job.seats and (self.waiting or self._may_start()):
      if not self.waiting:
        self._start_group()
      self.rows.append(self.waiting.popleft())
    if self.rows:
      self.rounds = min(self.job.chunk, max(left for _, left in self.rows))
      for group, left in self.rows:
        group.draw(min(left, self.rounds), self.version)
      self.chunk_end = self.counters.time + self.rounds * self.round_seconds

  def _may_start(self) -> bool:
    usable = (self.version + self.bound + 1) * self.job.prompts
    return self.started - self.counters.dropped < usable

  def _start_group(self) -> None:
    lengths_G = self.job.lengths_NG[self.started % len(self.job.lengths_NG)]
    group = _Group(self.started, len(lengths_G), self.version)
    self.waiting.extend((group, int(length)) for length in lengths_G)
    self.started += 1

  def _end_chunk(self) -> None:
    self.chunk_end = math.inf
    rows, self.rows = self.rows, []
    for group, left in rows:
      if left > self.rounds:
        self.rows.append((group, left - self.rounds))
        continue
      group.rows_left -= 1
      if not group.rows_left:
        scored = self.counters.time + self.job.reward_seconds
        heapq.heappush(self.scoring, (scored, group.number, group))
