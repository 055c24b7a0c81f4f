"""Simulates a run whose batches are sampled ahead of the steps that learn from them.

The simulation follows grpo_jax/asynchronous/ahead.py. The sampler decodes batch after batch in
chunks of rounds. Between two chunks, waiting rows of the batch replace rows that have ended. A
batch whose rows have all ended is scored, and then the learner updates with it. With a staleness
bound s, the sampler starts batch k after step k - s - 1, so it is at most s batches ahead.

With a bound of 0, sampler and learner take turns.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import itertools

import numpy as np

from grpo_jax.sampler.seats import IDLE_SHARE


@dataclasses.dataclass(frozen=True)
class Workload:
  """The work of a run, independent of its devices.

  Attributes:
    prompts: The number of groups in a batch.
    lengths_NG: int, completion lengths in tokens of N groups, which simulated groups use in turn.
    seats: How many rows are decoded together.
    chunk: The most decoding rounds of a chunk. Rows enter only between chunks.
    reward_seconds: How long it takes to score a batch after its last row has ended.
    steps: The number of updates to simulate.
    warm_up: How many of the first updates are not measured.
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
    sampler_idle: The share of time in which the sampler decodes nothing, in [0, 1].
    seats_filled: The mean share of seats that hold a row while the sampler decodes.
    learner_idle: The share of time in which the learner computes no update.
  """

  step_seconds: float
  sampler_idle: float
  seats_filled: float
  learner_idle: float

  @property
  def steps_per_hour(self) -> float:
    """The number of updates in an hour."""
    return 3600 / self.step_seconds


@dataclasses.dataclass(frozen=True)
class Split:
  """How many devices sample and how many learn, a bound on staleness, and the simulated times."""

  sampler: int
  learner: int
  bound: int
  outcome: Outcome


def simulate(
  job: Workload, round_seconds: float, update_seconds: float, bound: int, apart: bool = True
) -> Outcome:
  """Simulates when each batch of a run is sampled and when the learner updates with it.

  Args:
    job: The work of the run.
    round_seconds: How long the sampler takes to decode one token of all rows.
    update_seconds: How long the learner takes to update with a batch.
    bound: rollout.max_staleness, the most steps by which weights that sample a batch may be old.
    apart: Whether sampler and learner have separate devices. If they share their devices, step k
      samples batch k + bound before its update.

  Returns:
    The times after the warm-up.
  """
  batches = [_decoded(job, number) for number in range(job.steps + bound)]
  draws, updates = list[_Span](), list[_Span]()

  def draw(earliest: float) -> None:
    # Decodes the next batch after the previous one, and not before `earliest`.
    begin = max(earliest, draws[-1].end if draws else 0.0)
    draws.append(_Span(begin, begin + batches[len(draws)].rounds * round_seconds))

  while len(updates) < job.steps:
    step, last_end = len(updates), updates[-1].end if updates else 0.0
    while len(draws) <= step + bound:
      # The weights that sample batch n exist after n - bound updates.
      draw(updates[len(draws) - bound - 1].end if len(draws) > bound else 0.0)
    is_free_at = last_end if apart else max(last_end, draws[-1].end)
    is_scored_at = draws[step].end + job.reward_seconds
    begin = max(is_free_at, is_scored_at)
    updates.append(_Span(begin, begin + update_seconds))
  window = _Span(updates[job.warm_up - 1].end, updates[-1].end)  # the measured time
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
  """The seconds at which some work begins and ends."""

  begin: float
  end: float

  def shared(self, other: "_Span") -> float:
    """The seconds in which both spans overlap."""
    return max(0.0, min(self.end, other.end) - max(self.begin, other.begin))


@dataclasses.dataclass(frozen=True)
class _Batch:
  """How many rounds it takes to decode a batch, and how many tokens its completions have."""

  rounds: int
  tokens: int


def _decoded(job: Workload, number: int) -> _Batch:
  """Simulates how batch `number` is decoded: after each chunk, waiting rows replace ended ones."""
  groups = itertools.islice(
    itertools.cycle(job.lengths_NG), *(job.prompts * (number + i) for i in (0, 1))
  )
  waiting = np.concatenate(list(groups)).tolist()[::-1]  # `pop` takes the first row
  tokens, rounds, seated_tokens = sum(waiting), 0, list[int]()
  while waiting or seated_tokens:
    while waiting and len(seated_tokens) < job.seats:
      seated_tokens.append(waiting.pop())
    # A chunk ends early once all rows have ended. While others wait, more than IDLE_SHARE suffice.
    ended = int(IDLE_SHARE * job.seats) if waiting else len(seated_tokens) - 1
    chunk = min(job.chunk, sorted(seated_tokens)[ended])
    rounds += chunk
    seated_tokens = [tokens_left - chunk for tokens_left in seated_tokens if tokens_left > chunk]
  return _Batch(rounds, tokens)


def seconds_on(seconds: Mapping[int, float], count: int) -> float:
  """Estimates how long some work takes on `count` devices from known times by number of devices.

  It scales the time of the largest known number up to `count`, or else of the smallest known one,
  in inverse proportion to the number of devices.
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
  """Simulates every split of the devices with every bound on staleness.

  Args:
    job: The work of the run.
    round_seconds: Known seconds of a decoding round, by the number of the sampler's devices.
    update_seconds: Known seconds of a learner's step, by the number of the learner's devices.
    devices: The number of devices of sampler and learner together.
    bounds: The bounds on staleness.
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
