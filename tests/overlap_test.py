"""The simulator of sampler and learner side by side: schedules by hand, and a run on a clock."""

import dataclasses
import heapq
import json
import types

import jax
import numpy as np
import pytest
from small_run import small_config, with_section

from grpo_jax.around.planning import plan, split
from grpo_jax.around.planning.overlap import Workload, best, seconds_on, simulate, splits
from grpo_jax.config import to_dict
from grpo_jax.parallel import chips
from grpo_jax.settings import ConfigError


def job(*lengths, **changes):
  """Batches of one group. Groups have these lengths in turn."""
  given = np.array(lengths)
  values = dict(prompts=1, lengths_NG=given, seats=given.shape[1], chunk=8) | changes
  return Workload(**values)


@pytest.mark.parametrize(
  "update, bound, step, sampler_idle, learner_idle",
  [
    # In turn: 8 s of decoding and the update.
    (4, 0, 12, 4 / 12, 8 / 12),
    (8, 0, 16, 1 / 2, 1 / 2),
    # Side by side, a step takes as long as the slower side. The next batch is drawn meanwhile.
    (4, 1, 8, 0, 1 / 2),
    (8, 1, 8, 0, 0),
    (16, 1, 16, 1 / 2, 0),
    # More room does not make the faster side faster.
    (16, 3, 16, 1 / 2, 0),
    (4, 3, 8, 0, 1 / 2),
  ],
)
def test_equal_lengths_by_hand(update, bound, step, sampler_idle, learner_idle):
  """Rows of 8 tokens, a second for each."""
  found = dataclasses.asdict(simulate(job([8, 8]), 1, update, bound))
  expected = dict(
    step_seconds=step, sampler_idle=sampler_idle, seats_filled=1, learner_idle=learner_idle
  )
  assert found == pytest.approx(expected)


@pytest.mark.parametrize(
  "apart, bound, step",
  [
    # 8 s of decoding, 4 of scoring, 8 of update.
    (True, 0, 20),
    # Updates end at 20, 28, 40, 48, ...: the third batch waits for the first update.
    (True, 1, 10),
    (True, 2, 8),
    (False, 0, 20),
    (False, 1, 16),  # only the scoring is beside the rest
    (False, 3, 16),
  ],
)
def test_slow_rewards_by_hand(apart, bound, step):
  found = simulate(job([8, 8], reward_seconds=4), 1, 8, bound, apart)
  assert found.step_seconds == pytest.approx(step)


def test_several_batches_are_scored_at_the_same_time():
  """8 s of decoding, 40 of scoring, 8 of update: 56 s for each bound + 1 batches."""
  found = [
    simulate(job([8, 8], reward_seconds=40), 1, 8, bound, apart=False).step_seconds
    for bound in (0, 1, 2)
  ]
  assert found == pytest.approx([56, 56 / 2, 56 / 3], rel=0.01)


def test_two_lengths_by_hand():
  """One row draws 4 tokens and then leaves its seat empty for 4 s. The update takes 2 s."""
  for bound, step in ((0, 10), (1, 8), (2, 8)):
    found = simulate(job([4, 8], chunk=4), 1, 2, bound)
    assert (found.step_seconds, found.seats_filled) == pytest.approx((step, 3 / 4))
  # With one seat, rows follow each other.
  found = simulate(job([4, 8], chunk=4, seats=1), 1, 2, 1)
  assert (found.step_seconds, found.seats_filled) == pytest.approx((12, 1))


def test_a_chunk_ends_when_more_than_a_tenth_of_the_rows_have_ended_and_others_wait():
  """Of 10 seats, two are free after 2 rounds. The last two rows take them, and none waits."""
  found = simulate(job([1, 2] + [8] * 8 + [3, 3], chunk=8, seats=10), 1, 1, 0)
  assert found.step_seconds == pytest.approx(8 + 1)


def test_room_hides_a_long_tail():
  """Every fourth batch takes 20 rounds, the others one. On average, both sides need 5.75 s."""
  tail = [[1], [1], [1], [20]]
  steps = [
    simulate(job(*tail, chunk=1, steps=100), 1, 5.75, bound).step_seconds for bound in (0, 1, 2, 4)
  ]
  assert steps[0] == pytest.approx(11.5)
  assert steps == sorted(steps, reverse=True) and steps[-1] == pytest.approx(5.75, rel=0.05)


def test_the_best_split_is_the_freshest_of_the_fastest():
  """On m devices, 8 tokens take 32 / m s, and an update 20 / m s: 16 and 10 s on two each."""
  found = splits(job([8, 8]), {1: 4.0}, {1: 20.0}, 4, (0, 1, 2))
  assert [(x.sampler, x.learner, x.bound) for x in found[:4]] == [
    (1, 3, 0),
    (1, 3, 1),
    (1, 3, 2),
    (2, 2, 0),
  ]
  assert len(found) == 9
  chosen = best(found)
  assert (chosen.sampler, chosen.learner, chosen.bound) == (2, 2, 1)
  assert chosen.outcome.step_seconds == pytest.approx(16)


def test_times_of_other_numbers_of_devices():
  seconds = {1: 8.0, 4: 3.0}
  assert [seconds_on(seconds, count) for count in (1, 2, 4, 6)] == [8, 4, 3, 2]
  assert seconds_on({4: 3.0}, 2) == 6


# What the simulation starts from, and what is printed.


def saved_run(folder, group_size, lengths_by_step):
  """The folder of a run with completions of these lengths."""
  config = with_section(small_config(), "batch", group_size=group_size)
  (folder / "config.json").write_text(json.dumps(to_dict(config)))
  (folder / "completions").mkdir()
  for step, lengths in lengths_by_step.items():
    rows = "".join(json.dumps({"length": length}) + "\n" for length in lengths)
    (folder / f"completions/{step:06d}.jsonl").write_text(rows)
  return str(folder)


def test_lengths_are_those_of_a_run_group_by_group(tmp_path):
  workdir = saved_run(tmp_path, 2, {1: [1, 2, 3, 4], 5: [50, 60]})
  assert sorted(map(tuple, split.lengths_of(workdir, 2))) == [(1, 2), (3, 4), (50, 60)]
  for group in split.lengths_of(workdir, 3):  # three members of one of the groups
    assert any(set(group) <= {a, b} for a, b in ((1, 2), (3, 4), (50, 60)))
  config = with_section(small_config(), "batch", prompts=4, group_size=2)
  config = with_section(config, "sampling", max_tokens=40, rows=0)
  given = split.job_of(config, workdir, 1.5)
  assert given.lengths_NG.max() == 40 and given.seats == 8 and given.reward_seconds == 1.5
  assert (split.job_of(config, None, 0.0).lengths_NG == 40).all()


def test_a_run_without_completions_is_refused(tmp_path):
  with pytest.raises(ConfigError, match="log.completions_every"):
    split.lengths_of(saved_run(tmp_path, 2, {}), 2)


def test_measured_times():
  assert split.times_of_flag("update_s", "2:9.1,4:5") == {2: 9.1, 4: 5.0}
  for value in ("9.1", "0:2", "2:", "2:0", "2:1,2:3", "a:b"):
    with pytest.raises(ConfigError, match="--update_s=.*write DEVICES:TIME"):
      split.times_of_flag("update_s", value)


def test_the_table_of_splits(capsys):
  plan.plan_apart(job([8, 8]), {1: 4.0}, {1: 20.0}, 4, (0, 1, 2))
  lines = capsys.readouterr().out.splitlines()
  assert max(map(len, lines)) <= 100
  in_turn = next(line for line in lines if "in turn " in line).split()
  assert in_turn[:6] == ["4", "in", "turn", "0", f"{3600 / 13:.1f}", "1.00"]  # 8 + 5 s
  assert sum(line.split()[:1] in (["1"], ["2"], ["3"]) for line in lines) == 9 + 1  # and of times
  assert lines[-1] == "best: in turn on all devices; no split is faster"
  plan.plan_apart(job([8, 8], reward_seconds=20), {1: 4.0}, {1: 20.0}, 4, (0, 4))
  *_, last = capsys.readouterr().out.splitlines()
  # (13 + 20) / 16 s
  assert last == "best: sampler 2, learner 2, bound 4: 2.06 times as fast as in turn"


@pytest.mark.slow
def test_times_of_compiled_programs(monkeypatch, capsys):
  """A chip that reads a byte in a nanosecond: half of the rows take less time, not more."""
  config = with_section(small_config(), "mesh", data=-1, tensor=1)
  devices = jax.devices()[:2]
  with pytest.raises(ConfigError, match="give measured times"):
    plan.compiled_times(config, devices)
  monkeypatch.setitem(chips.CHIPS, "cpu", chips.Chip(1e12, 1e15, 1e9, 1e15))
  rounds, updates = plan.compiled_times(config, devices)
  assert rounds.keys() == updates.keys() == {1, 2}
  assert 0 < rounds[2] < rounds[1] and 0 < updates[2] < updates[1]
  rounds, _ = plan.compiled_times(with_section(config, "mesh", data=2), devices)
  assert rounds.keys() == {2}
  assert "not on 1: mesh.data=2" in capsys.readouterr().out


# A run of processes on a clock that jumps. Nothing of it is shared with the simulation: what a side
# may begin is decided by what has happened until then.


class Clock:
  """Runs generators that yield what they wait for: seconds, or a function that says when."""

  def __init__(self):
    self.now, self.count, self.asleep, self.waiting = 0.0, 0, [], []

  def start(self, process):
    self._wake(process)

  def run(self):
    """Until nothing is left to happen."""
    while self.asleep:
      self.now, _, process = heapq.heappop(self.asleep)
      self._wake(process)
      ready = True
      while ready:
        ready = [entry for entry in self.waiting if entry[0]()]
        self.waiting = [entry for entry in self.waiting if entry not in ready]
        for _, waiter in ready:
          self._wake(waiter)
    assert not self.waiting, "something waits for ever"

  def _wake(self, process):
    for awaited in process:
      if callable(awaited):
        if awaited():
          continue
        self.waiting.append((awaited, process))
      else:
        self.count += 1  # among those that wake at the same time, the first one that slept
        heapq.heappush(self.asleep, (self.now + awaited, self.count, process))
      return


class TwoSides:
  """A sampler, a learner and rewards on a clock."""

  def __init__(self, job, round_seconds, update_seconds, bound):
    self.job, self.bound = job, bound
    self.round_seconds, self.update_seconds = round_seconds, update_seconds
    self.clock = Clock()
    self.scored = set()
    self.updates = []  # when each ended

  def run(self):
    """The seconds of a step after the warm-up."""
    self.clock.start(self.sample())
    self.clock.start(self.learn())
    self.clock.run()
    measured = self.updates[self.job.warm_up - 1 :]
    return (measured[-1] - measured[0]) / (len(measured) - 1)

  def sample(self):
    P, lengths_NG = self.job.prompts, self.job.lengths_NG
    for number in range(self.job.steps):
      yield lambda: number <= len(self.updates) + self.bound  # noqa: B023
      groups = [lengths_NG[n % len(lengths_NG)] for n in range(P * number, P * (number + 1))]
      to_come, in_seats = [int(length) for group in groups for length in group], []
      while to_come or in_seats:
        free = self.job.seats - len(in_seats)
        in_seats, to_come = in_seats + to_come[:free], to_come[free:]
        # While rows wait, a chunk ends once more than a tenth of the rows have ended.
        rounds = min(self.job.chunk, max(in_seats))
        while to_come and sum(left < rounds for left in in_seats) > self.job.seats // 10:
          rounds -= 1
        yield rounds * self.round_seconds
        in_seats = [left - rounds for left in in_seats if left > rounds]
      self.clock.start(self.score(number))

  def score(self, number):
    yield self.job.reward_seconds
    self.scored.add(number)

  def learn(self):
    for number in range(self.job.steps):
      yield lambda: number in self.scored  # noqa: B023
      yield self.update_seconds
      self.updates.append(self.clock.now)


@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("reward_seconds", [0.0, 0.16, 1.0])
@pytest.mark.parametrize("update_seconds", [0.05, 0.16])
def test_a_run_on_a_clock_takes_as_long(bound, reward_seconds, update_seconds):
  """Lengths with a long tail, and either side may be the longer one."""
  rng = np.random.default_rng(1)
  lengths = np.minimum(40, rng.lognormal(2, 0.8, (20, 4)).astype(int) + 1)
  given = Workload(2, lengths, seats=6, chunk=8, reward_seconds=reward_seconds, steps=14, warm_up=4)
  predicted = simulate(given, 0.008, update_seconds, bound)
  seconds = TwoSides(given, 0.008, update_seconds, bound).run()
  assert seconds == pytest.approx(predicted.step_seconds, rel=1e-9)


@pytest.mark.parametrize("staleness", [["x"], ["-1"], [""], []])
def test_bounds_that_are_no_whole_numbers_are_refused(staleness):
  given = dict(workdir=None, reward_s=0.0, round_ms="1:9,4:5", update_s="1:40,4:11", chips=None)
  values = types.SimpleNamespace(**given, staleness=staleness)
  with pytest.raises(ConfigError, match="flag --staleness is .*: give whole numbers"):
    plan._plan_apart_by_flags(small_config(), values)
