"""Simulates a run whose batches are drawn ahead of the steps that learn from them.

It follows grpo_jax/asynchronous/ahead.py. The sampler draws batch after batch in chunks of rounds:
between two chunks, rows that have ended leave their seats and others of the batch enter. A batch
whose rows have all ended is scored, and then the learner takes it. With a bound of s, batch k is
drawn once step k - s - 1 has made the weights for it, so at most s batches are drawn ahead.

With a bound of 0 the two sides take turns. On all devices that is a run without overlap.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import itertools

import numpy as np


@dataclasses.dataclass(frozen=True)
class Workload:
  """The work of a run, whatever its devices.

  Attributes:
    prompts: Groups of a batch.
    lengths_NG: int, the lengths of the completions of N groups. Simulated groups have them in turn.
    seats: How many rows are decoded together.
    chunk: The most rounds between two moments at which rows enter and weights change.
    reward_seconds: How long the scoring of a batch takes after its last row.
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
  """The times that a simulation measured after its warm-up.

  Attributes:
    step_seconds: The mean time from one update to the next.
    sampler_idle: The share of time in which the sampler decodes nothing.
    seats_filled: The mean share of seats with a row, while it decodes.
    learner_idle: The share of time without an update.
  """

  step_seconds: float
  sampler_idle: float
  seats_filled: float
  learner_idle: float

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


def simulate(
  job: Workload, round_seconds: float, update_seconds: float, bound: int, apart: bool = True
) -> Outcome:
  """Simulates a run: when each batch is drawn, and when the learner updates with it.

  Args:
    job: The work of the run.
    round_seconds: How long the sampler takes for a token of all rows.
    update_seconds: How long the learner takes for a batch.
    bound: rollout.max_staleness, how many steps a token may be old when it is learned from.
    apart: Whether sampler and learner have devices of their own. Otherwise step k draws batch
      k + bound before its update.

  Returns:
    The times that were measured.
  """
  batches = [_decoded(job, number) for number in range(job.steps + bound)]
  draws, updates = list[_Span](), list[_Span]()

  def draw(earliest: float) -> None:
    begin = max(earliest, draws[-1].end if draws else 0.0)
    draws.append(_Span(begin, begin + batches[len(draws)].rounds * round_seconds))

  while len(updates) < job.steps:
    step, last_end = len(updates), updates[-1].end if updates else 0.0
    while len(draws) <= step + bound:
      # Batch n may be drawn by the weights after n - bound updates.
      draw(updates[len(draws) - bound - 1].end if len(draws) > bound else 0.0)
    is_free_at = last_end if apart else max(last_end, draws[-1].end)
    is_scored_at = draws[step].end + job.reward_seconds
    begin = max(is_free_at, is_scored_at)
    updates.append(_Span(begin, begin + update_seconds))
  window = _Span(updates[job.warm_up - 1].end, updates[-1].end)
  measured = batches[job.warm_up : job.steps]
  seconds = window.end - window.begin
  return Outcome(
    step_seconds=seconds / (job.steps - job.warm_up),
    sampler_idle=1 - sum(window.shared(span) for span in draws) / seconds,
    seats_filled=sum(batch.tokens for batch in measured)
    / (job.seats * sum(batch.rounds for batch in measured)),
    learner_idle=1 - sum(window.shared(span) for span in updates) / seconds,
  )


@dataclasses.dataclass(frozen=True)
class _Span:
  """From when to when something was done."""

  begin: float
  end: float

  def shared(self, other: "_Span") -> float:
    """The seconds that both have in common."""
    return max(0.0, min(self.end, other.end) - max(self.begin, other.begin))


@dataclasses.dataclass(frozen=True)
class _Batch:
  """The rounds that it takes to decode a batch, and its tokens."""

  rounds: int
  tokens: int


def _decoded(job: Workload, number: int) -> _Batch:
  """Decodes a batch of the run in chunks. Rows that have ended give their seats to others."""
  groups = itertools.islice(
    itertools.cycle(job.lengths_NG), *(job.prompts * (number + i) for i in (0, 1))
  )
  waiting = np.concatenate(list(groups)).tolist()[::-1]
  tokens, rounds, seated = sum(waiting), 0, list[int]()
  while waiting or seated:
    while waiting and len(seated) < job.seats:
      seated.append(waiting.pop())
    chunk = min(job.chunk, max(seated))
    rounds += chunk
    seated = [left - chunk for left in seated if left > chunk]
  return _Batch(rounds, tokens)


def seconds_on(seconds: Mapping[int, float], count: int) -> float:
  """How long something takes on `count` devices, if it is known for some counts.

  From the largest known count up to `count`, or else the smallest known one, the time falls as the
  number of devices grows.
  """
  known = max((each for each in seconds if each <= count), default=min(seconds))
  return seconds[known] * known / count


def splits(
  job: Workload,
  round_seconds: Mapping[int, float],
  update_seconds: Mapping[int, float],
  devices: int,
  bounds: Sequence[int],
) -> list[Split]:
  """Every split of the devices under every bound.

  Args:
    job: The work of the run.
    round_seconds: Seconds of a round of the sampler, by its number of devices.
    update_seconds: Seconds of a step of the learner, by its number of devices.
    devices: The number of devices of both sides together.
    bounds: Bounds on staleness.
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


def best(found: Sequence[Split]) -> Split:
  """The split with the freshest tokens among those that are at most 2% slower than the fastest."""
  fastest = min(split.outcome.step_seconds for split in found)
  good = [x for x in found if x.outcome.step_seconds <= 1.02 * fastest]
  return min(good, key=lambda x: (x.bound, x.outcome.step_seconds))
