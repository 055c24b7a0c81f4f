"""Batches that are drawn ahead: by which weights, what a checkpoint keeps, and whole runs."""

import collections
import dataclasses
import json
import os
from pathlib import Path
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from small_qwen import make_checkpoint
from small_run import (
  G,
  P,
  T,
  random_completions,
  small_config,
  small_run,
  with_reward,
  with_section,
)
import turns_test

from grpo_jax import model
from grpo_jax.asynchronous.ahead import AheadInTurn, Beside, InFlightInTurn
from grpo_jax.asynchronous.schedule import FromChunk, WeightSchedule
from grpo_jax.batches.collect import Collected
from grpo_jax.batches.rollout_metrics import staleness_metrics
from grpo_jax.batches.scored import Scored, from_arrays, to_arrays
from grpo_jax.config import Mesh, to_dict
from grpo_jax.parallel import mesh as mesh_lib
from grpo_jax.pending import Pending, there
from grpo_jax.rollouts import player
from grpo_jax.run.checks import check_config
from grpo_jax.run.device_checks import check_apart
from grpo_jax.run.run import Run
from grpo_jax.settings import ConfigError, RunFailed
from grpo_jax.storage.checkpoint import Checkpoints
from grpo_jax.storage.reading import read_completions, read_metrics
from grpo_jax.timing import Clock
from grpo_jax.training.loop import GrpoStep, run_steps
from grpo_jax.training.state import RunState, StateStore
from grpo_jax.types import Rewards, TrainState

STEPS = 9
WAYS = ("in turn", "beside")
WAYS_AND_FLIGHT = (*WAYS, "in flight", "in flight in turn")


def config_of(staleness, weights="fixed", **algo):
  config = small_config(**{"old_logprobs": "sampler", "kl_coef": 0.0} | algo)
  config = dataclasses.replace(config, steps=STEPS)
  return with_section(config, "rollout", max_staleness=staleness, weights=weights)


class Draws:
  """Stands for a Collector. It draws nothing, and notes which weights were to draw what.

  Attributes:
    log: (number of the batch, version, weights), in the order in which batches were drawn.
    scored: The numbers of the batches whose scores were waited for, in order.
    step: The next batch.
  """

  reward_weights = (1.0,)

  def __init__(self, pause=lambda number: None, fails_at=None):
    self.log, self.scored = [], []
    self._pause, self._fails_at = pause, fails_at

  def restart(self, index, host):
    self.step, self._host = index, there(host)

  def skip(self, scored):
    self.restart(self.step + 1, scored.host)

  def draw(self, policy, clock):
    del clock
    self._pause(self.step)
    self.log.append((self.step, policy.version, policy.params))
    return self._begun(policy.version)

  def _begun(self, versions):
    number, before = self.step, self._host

    def finish():
      if number == self._fails_at:
        raise RunFailed("a reward function failed")
      host = before.result()
      self.scored.append(number)
      return scored_of(number, versions, host={"drawn": host["drawn"] + 1})

    pending = Pending(finish)
    self.step, self._host = number + 1, pending.then(lambda scored: scored.host)
    return pending

  def forget(self, index):
    pass

  def put_on_mesh(self, scored):
    return Collected(scored.indices_P[0], None, scored.rows, scored.metrics, scored.host)


class InFlight(Draws):
  """Stands for a Collector whose weights change in flight, and for its flow.

  All batches that are opened draw in each chunk. Batch n takes `chunks[n % len(chunks)]` of them.

  Attributes:
    log: (number of the batch, the versions of its chunks), in order.
    drawn: (version, weights, groups that are opened) of each chunk.
    first, next: As in `Flow`.
  """

  def __init__(self, chunks=(3,), pause=lambda chunk: None):
    super().__init__(pause)
    self.drawn, self._chunks = [], chunks

  @property
  def flow(self):
    return self

  def restart(self, index, host):
    super().restart(index, host)
    self.first = self.next = index * P
    self._versions = collections.defaultdict(list)

  def _needs(self, number):
    return self._chunks[number % len(self._chunks)] - len(self._versions[number])

  @property
  def is_drawn(self):
    return not self._needs(self.step)

  @property
  def is_idle(self):
    return not any(self._needs(number) for number in range(self.step, self.step_of(self.next)))

  def step_of(self, number):
    return number // P

  def advance(self, policy, until, limit=None):
    self._pause(len(self.drawn))
    most = P * (until + 1)
    self.next = max(self.next, most if limit is None else min(most, limit))
    going = [n for n in range(self.step, self.step_of(self.next)) if self._needs(n)]
    for number in going:
      self._versions[number].append(policy.version)
    if going:
      self.drawn.append((policy.version, policy.params, self.next))
    return bool(going)

  def take(self, policy, clock):
    del policy, clock
    versions, self.first = self._versions.pop(self.step), self.first + P
    self.log.append((self.step, versions))
    return self._begun(versions[0])


def scored_of(number, version, **fields):
  completions = jax.tree.map(np.asarray, random_completions(number))
  rewards = Rewards(scores_PGJ=np.full((P, G, 1), np.float32(number)), weights=(1.0,))
  plain = dict(
    indices_P=np.full(P, number),
    temperature_P=np.ones(P, np.float32),
    version_P=np.full(P, version),
    live_P=np.ones(P, np.float32),
    completions=completions,
    rewards=rewards,
    rollout_PB=None,
    rows=[{"completion": "a\ud800", "reward": float("nan")}],
    metrics={"seen": 0.1 + number, "never": float("nan")},
    host={"drawn": np.int64(0)},
    why_unscored="",
    prompts=f"prompts of {number}",
  )
  return Scored(**plain | fields)


def made(way, draws, config, schedule=None):
  if way == "in turn":
    return AheadInTurn(draws, config)
  return Beside(draws, config, schedule)


def learned(ahead, start=0, end=STEPS, host=None):
  """The batches of steps, whose weights are 'w' and the step, and the host state after them."""
  found, host = [], host or {"drawn": np.int64(0)}
  for index in range(start, end):
    collected = ahead(f"w{index}", index, host, Clock())
    host = collected.host
    found.append((int(collected.batch), collected.metrics["staleness/max"]))
  return found, host


# Which weights draw which batch.


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("staleness", [1, 2, 4, 16])
def test_the_policy_of_so_many_steps_before_draws_each_batch(way, staleness):
  draws = Draws()
  ahead = made(way, draws, config_of(staleness))
  found, host = learned(ahead)
  ahead.close()
  ages = [min(number, staleness) for number in range(STEPS)]
  assert found == [(number, age) for number, age in enumerate(ages)]
  assert draws.log == [(n, n - age, f"w{n - age}") for n, age in enumerate(ages)]
  assert host["drawn"] == STEPS and draws.scored == sorted(draws.scored)


def test_no_more_than_the_bound_are_drawn_ahead():
  draws = Draws()
  ahead = Beside(draws, config_of(3), None)
  learned(ahead, end=2)
  limit = time.monotonic() + 10
  while len(draws.log) < 5 and time.monotonic() < limit:
    time.sleep(0.01)
  time.sleep(0.1)
  # The policies of steps 0 and 1 draw batches 0 to 4, and batch 5 waits for that of step 2.
  assert [number for number, *_ in draws.log] == [0, 1, 2, 3, 4]
  ahead.close()


def test_the_newest_weights_draw_and_a_schedule_repeats_what_they_drew(tmp_path):
  def run(folder, pause, replay=""):
    (tmp_path / folder).mkdir()
    schedule, draws = WeightSchedule(tmp_path / folder, replay, in_flight=False), Draws(pause)
    ahead = Beside(draws, config_of(2, "newest"), schedule)
    learned(ahead)
    ahead.close()
    schedule.close()
    return draws.log

  # The learner's first steps take longer than the others.
  slow = run("slow", lambda number: time.sleep(0.05 if number > 2 else 0.4))
  # The learner waits for each batch, so each but those that began at once has the newest weights.
  assert [number - version for number, version, _ in slow][2:] == [1] * (STEPS - 2)
  file = tmp_path / "slow" / "schedule.jsonl"
  assert json.loads(file.read_text().splitlines()[3]) == {"batch": 3, "weights": [[0, 2]]}
  quick = run("quick", lambda number: None)
  again = run("again", lambda number: None, str(file))
  assert again == slow
  assert (tmp_path / "again" / "schedule.jsonl").read_bytes() == file.read_bytes()
  assert all(0 <= number - version <= 2 for number, version, _ in quick)


def in_flight(folder, draws, bound, replay=""):
  """(what draws ahead, its schedule)."""
  folder.mkdir(exist_ok=True)
  schedule = WeightSchedule(folder, str(replay))
  return Beside(draws, config_of(bound, "in_flight"), schedule), schedule


def lines_of(folder):
  return [json.loads(line) for line in (folder / "schedule.jsonl").read_text().splitlines()]


def slowly(chunk):
  del chunk
  time.sleep(0.02)


@pytest.mark.parametrize("slow", [None, slowly])
def test_weights_change_in_flight_and_a_schedule_repeats_the_chunks(slow, tmp_path):
  """Batch 1 takes 7 chunks, of which the weights of step 1 draw the last two."""
  published = threading.Event()
  first = InFlight((3, 7, 4), lambda chunk: chunk == 4 and published.wait(10))
  ahead, schedule = in_flight(tmp_path / "first", first, 1)
  _, host = learned(ahead, end=1)
  publish = threading.Timer(0.1, published.set)  # step 1 publishes before it waits for batch 1
  publish.start()
  learned(ahead, 1, STEPS, host)
  ahead.close()
  schedule.close()
  assert first.log[:2] == [(0, [0, 0, 0]), (1, [0, 0, 0, 0, 0, 1, 1])]
  assert first.drawn[:6] == [(0, "w0", 2 * P)] * 5 + [(1, "w1", 3 * P)]
  assert lines_of(tmp_path / "first")[:2] == [
    {"chunk": 0, "version": 0, "groups": 2 * P},
    {"chunk": 5, "version": 1, "groups": 3 * P},
  ]
  again = InFlight((3, 7, 4), slow or first._pause)
  replay = tmp_path / "first" / "schedule.jsonl"
  ahead, schedule = in_flight(tmp_path / "again", again, 1, replay)
  learned(ahead)
  ahead.close()
  schedule.close()
  assert (again.log, again.drawn) == (first.log, first.drawn)
  assert (tmp_path / "again" / "schedule.jsonl").read_bytes() == replay.read_bytes()


def test_a_batch_in_flight_is_opened_as_soon_as_it_may_be_and_no_earlier(tmp_path):
  """No token is older than the bound, and no seat waits for a whole batch to end."""
  draws = InFlight((5, 2, 8, 3), slowly)
  ahead, schedule = in_flight(tmp_path, draws, 2)
  learned(ahead)
  ahead.close()
  schedule.close()
  assert [groups for _, _, groups in draws.drawn] == [
    P * min(version + 3, STEPS) for version, _, _ in draws.drawn
  ]
  for number, versions in draws.log:
    assert max(0, number - 2) <= versions[0] <= versions[-1] <= number
    assert versions == sorted(versions)
  assert any(versions[0] < versions[-1] for _, versions in draws.log)


def test_a_schedule_ends_with_the_last_chunk_so_that_newer_weights_draw_nothing_there(tmp_path):
  """The last batch takes long. The learner that repeats the run publishes weights meanwhile."""
  chunks = (3,) * (STEPS - 1) + (12,)
  first = InFlight(chunks)
  ahead, schedule = in_flight(tmp_path / "first", first, 2)
  _, host = learned(ahead, end=STEPS - 2)
  while len(first.log) < STEPS:
    time.sleep(0.01)
  learned(ahead, STEPS - 2, STEPS, host)
  ahead.close()
  schedule.close()
  assert first.log[-1][1][-1] <= STEPS - 3
  again = InFlight(chunks, slowly)
  ahead, schedule = in_flight(tmp_path / "again", again, 2, tmp_path / "first" / "schedule.jsonl")
  learned(ahead)
  ahead.close()
  schedule.close()
  assert again.log == first.log and lines_of(tmp_path / "again") == lines_of(tmp_path / "first")


@pytest.mark.parametrize("bound", [1, 2])
def test_rows_stay_in_flight_across_updates_on_the_devices_that_learn(bound):
  """Batches of 5, 2, 8 and 3 chunks. A step draws until its own batch is there, and no longer."""
  draws = InFlight((5, 2, 8, 3))
  ahead = InFlightInTurn(draws, config_of(bound, "in_flight"))
  found, host = learned(ahead)
  assert [number for number, _ in found] == [*range(STEPS)] and host["drawn"] == STEPS
  for version, weights, groups in draws.drawn:
    assert weights == f"w{version}" and groups == P * min(version + bound + 1, STEPS)
  assert draws.log[0] == (0, [0] * 5) and draws.log[2][1][-1] == 2
  # Batch 2 was opened before its step, by which it has got as far as the others took.
  before = 5 if bound == 2 else 0
  assert draws.log[2][1] == [0] * before + [2] * (8 - before)
  for number, versions in draws.log:
    assert max(0, number - bound) <= versions[0] <= versions[-1] <= number


@pytest.mark.parametrize("stop", [1, 4, 8])
def test_a_checkpoint_draws_what_is_in_flight_in_turn(stop):
  first, second = InFlight((3, 7)), InFlight((3, 7))
  ahead = InFlightInTurn(first, config_of(2, "in_flight"))
  _, host = learned(ahead, end=stop)
  saved = ahead.saved(stop, host, lambda: f"w{stop}")
  batches = [number for number, _ in first.log]
  assert batches == [*range(min(stop + 2, STEPS))]
  assert sorted(saved["ahead"]) == [str(number) for number in batches[stop:]]
  again = ahead.saved(stop, host, lambda: 1 / 0)  # nothing is in flight now
  assert again["ahead"].keys() == saved["ahead"].keys()
  _, after = learned(ahead, stop, host=host)  # the process goes on, and another one does the same
  ahead = InFlightInTurn(second, config_of(2, "in_flight"))
  assert ahead.saved(stop, saved, lambda: f"w{stop}") is saved
  _, host = learned(ahead, stop, host=saved)
  assert second.log == first.log[len(batches) :] and host["drawn"] == after["drawn"] == STEPS


def test_a_checkpoint_that_cannot_draw_on_has_what_was_drawn_before():
  def pause(chunk):
    if chunk == 3:
      raise MemoryError("of the sampler")

  ahead = InFlightInTurn(InFlight((3, 3, 7), pause), config_of(2, "in_flight"))
  _, host = learned(ahead, end=1)
  assert sorted(ahead.saved(1, host, lambda: "w1")["ahead"]) == ["1"]
  _, host = learned(ahead, 1, 2, host)
  with pytest.raises(MemoryError, match="of the sampler"):
    learned(ahead, 2, 3, host)


def from_chunks(folder, *lines):
  """A file that says what held from some chunks on."""
  text = "".join(json.dumps({"chunk": c, "version": v, "groups": n}) + "\n" for c, v, n in lines)
  (folder / "other.jsonl").write_text(text)
  return folder / "other.jsonl"


def test_a_checkpoint_does_not_wait_for_weights_that_come_later(tmp_path):
  """Batch 4 was to change to the weights of step 5, and the run stops at step 3."""
  lines = (0, 0, 3 * P), (3, 1, 4 * P), (6, 2, 5 * P), (7, 5, 5 * P), (20, 5, 5 * P)
  draws = InFlight()
  ahead, schedule = in_flight(tmp_path / "run", draws, 2, from_chunks(tmp_path, *lines))
  _, host = learned(ahead, end=3)
  while len(draws.drawn) < 7:
    time.sleep(0.01)
  time.sleep(0.05)
  assert len(draws.drawn) == 7  # the thread waits for the weights of step 5
  saved = ahead.saved(3, host, lambda: "w3")
  assert sorted(saved["ahead"]) == ["3", "4"] and saved["chunk"] == 9
  assert draws.log[-1] == (4, [2, 2, 2]) and draws.drawn[6:] == [(2, "w2", 5 * P)] * 3
  _, host = learned(ahead, 3, host=host)
  ahead.close()
  schedule.close()
  assert host["drawn"] == STEPS and len(draws.log) == STEPS


def test_a_checkpoint_draws_what_the_schedule_gives_older_weights_in_flight(tmp_path):
  """The thread draws batch 3 when the run stops, and batch 4 was drawn by the weights of step 2."""
  lines = [(3 * version, version, (version + 3) * P) for version in range(6)]
  replay, may_draw = from_chunks(tmp_path, *lines), threading.Event()
  first = InFlight(pause=lambda chunk: chunk == 3 and may_draw.wait(20))
  ahead, schedule = in_flight(tmp_path / "run", first, 2, replay)
  _, host = learned(ahead, end=3)
  threading.Timer(0.1, may_draw.set).start()
  saved = ahead.saved(3, host, lambda: "w3")
  ahead.close()
  schedule.close()
  assert sorted(saved["ahead"]) == ["3", "4"] and saved["chunk"] == 9
  second = InFlight(pause=slowly)
  ahead, schedule = in_flight(tmp_path / "run", second, 2, replay)
  learned(ahead, 3, host=saved)
  ahead.close()
  schedule.close()
  assert first.log[3:] == [(3, [1, 1, 1]), (4, [2, 2, 2])]
  assert second.log[:2] == [(5, [3, 3, 3]), (6, [4, 4, 4])]


def test_a_checkpoint_does_not_wait_for_what_the_bound_forbids(tmp_path):
  """The schedule is of a run with a larger bound."""
  lines = [json.dumps({"batch": n, "weights": [[0, max(0, n - 3)]]}) + "\n" for n in range(STEPS)]
  (tmp_path / "other.jsonl").write_text("".join(lines))
  (tmp_path / "run").mkdir()
  schedule = WeightSchedule(tmp_path / "run", str(tmp_path / "other.jsonl"), in_flight=False)
  ahead = Beside(Draws(), config_of(1, "newest"), schedule)
  _, host = learned(ahead, end=1)
  found = []
  thread = threading.Thread(
    target=lambda: found.append(ahead.saved(1, host, lambda: "w1")), daemon=True
  )
  thread.start()
  thread.join(20)
  assert found and sorted(found[0]["ahead"]) == ["1"]
  ahead.close()
  schedule.close()


def test_a_checkpoint_draws_what_the_schedule_gives_older_weights(tmp_path):
  """A run was killed before its first checkpoint, and began again. It had drawn less by then."""
  lines = [json.dumps({"batch": batch, "weights": [[0, 0]]}) + "\n" for batch in range(3)]
  (tmp_path / "schedule.jsonl").write_text("".join(lines))
  may_draw, config = threading.Event(), config_of(2, "newest")
  first = Draws(lambda number: number == 1 and may_draw.wait(20))
  schedule = WeightSchedule(tmp_path, in_flight=False)
  ahead = Beside(first, config, schedule)
  _, host = learned(ahead, end=1)
  threading.Timer(0.1, may_draw.set).start()
  saved = ahead.saved(1, host, lambda: "w1")
  ahead.close()
  schedule.close()
  assert sorted(saved["ahead"]) == ["1", "2"]
  schedule, second = WeightSchedule(tmp_path, in_flight=False), Draws()
  ahead = Beside(second, config, schedule)
  found, _ = learned(ahead, 1, host=saved)
  ahead.close()
  schedule.close()
  assert found[:2] == [(1, 1), (2, 2)] and second.log[0][0] == 3


@pytest.mark.parametrize("stop", [1, 4, 8])
def test_a_process_goes_on_in_flight_with_what_was_drawn(stop, tmp_path):
  """What was begun is drawn to its end, and chunks are counted on."""
  first, second = InFlight((3, 5)), InFlight((3, 5))
  ahead, schedule = in_flight(tmp_path, first, 2)
  _, host = learned(ahead, end=stop)
  saved = ahead.saved(stop, host, lambda: f"w{stop}")
  ahead.close()
  schedule.close()
  assert saved["chunk"] == len(first.drawn)
  batches = [number for number, _ in first.log]
  assert batches == [*range(len(batches))] and sorted(saved["ahead"]) == [
    str(number) for number in batches[stop:]
  ]
  ahead, schedule = in_flight(tmp_path, second, 2)
  assert ahead.saved(stop, saved, lambda: f"w{stop}") is saved
  _, host = learned(ahead, stop, host=saved)
  ahead.close()
  schedule.close()
  assert [number for number, _ in first.log + second.log] == [*range(STEPS)]
  assert host["drawn"] == STEPS and "ahead" not in host
  known, drawn = WeightSchedule(tmp_path), first.drawn + second.drawn
  for chunk, (version, weights, groups) in enumerate(drawn):
    assert weights == f"w{version}"
    assert known.chunk(chunk) == FromChunk(version, groups)


def test_weights_that_cannot_come_before_the_batch_is_drawn_are_not_waited_for(tmp_path):
  """Such a file is of another run. The learner waits for batch 0, so weights 7 would never come."""
  draws = InFlight()
  lines = (0, 0, P), (1, 7, P), (9, 7, P)
  ahead, schedule = in_flight(tmp_path / "run", draws, 2, from_chunks(tmp_path, *lines))
  thread = threading.Thread(target=learned, args=(ahead,), daemon=True)
  thread.start()
  thread.join(20)
  assert not thread.is_alive()
  ahead.close()
  schedule.close()
  assert draws.log[0] == (0, [0, 0, 0])


# Checkpoints.


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stop", [1, 4, 8])
def test_another_process_goes_on_with_what_was_drawn(way, stop):
  config, whole, first, second = config_of(2), Draws(), Draws(), Draws()
  expected = learned(made(way, whole, config))
  before = made(way, first, config)
  found, host = learned(before, end=stop)
  saved = before.saved(stop, host, lambda: f"w{stop}")
  before.close()
  assert all(isinstance(x, np.ndarray | np.generic) for x in jax.tree.leaves(saved))
  after = made(way, second, config)
  assert after.saved(stop, saved, lambda: f"w{stop}") is saved  # before its first step, too
  rest, host = learned(after, stop, host=saved)
  after.close()
  assert (found + rest, host) == expected
  assert first.log + second.log == whole.log
  assert "ahead" not in host


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_that_fails_is_an_error_of_its_own_step(way):
  draws = Draws(fails_at=4)
  ahead = made(way, draws, config_of(2))
  found, host = learned(ahead, end=4)
  assert len(found) == 4
  saved = ahead.saved(4, host, lambda: "w4")
  assert "ahead" not in saved
  with pytest.raises(RunFailed, match="a reward function failed"):
    learned(ahead, 4, 5, host)
  ahead.close()


def test_the_thread_hands_on_its_error():
  def pause(number):
    if number == 3:
      raise MemoryError("of the sampler")

  ahead = Beside(Draws(pause), config_of(2), None)
  found, host = learned(ahead, end=3)
  kept = ahead.saved(3, host, lambda: "w3")
  assert len(found) == 3 and "ahead" not in kept
  with pytest.raises(MemoryError, match="of the sampler"):
    learned(ahead, 3, 4, host)
  ahead.close()


def test_in_several_processes_nobody_goes_on_after_the_thread_has_failed(monkeypatch):
  """The others would wait for this process."""

  def pause(number):
    if number == 3:
      raise MemoryError("of the sampler")

  ahead = Beside(Draws(pause), config_of(2), None)
  _, host = learned(ahead, end=3)
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  with pytest.raises(MemoryError, match="of the sampler"):
    ahead.saved(3, host, lambda: "w3")
  with pytest.raises(MemoryError, match="of the sampler"), ahead._all_drawn():
    raise AssertionError("an evaluation has begun")
  ahead.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_learned_batch_is_forgotten_with_all_that_its_prompts_see(way):
  ahead = made(way, Draws(), config_of(2))
  learned(ahead, end=3)
  assert not ahead._drawn.keys() & {0, 1}
  assert ahead._drawn[2].result().prompts is None
  ahead.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_step_whose_update_fails_is_saved_with_its_batch_and_those_after_it(way):
  config, whole, first, second = config_of(2), Draws(), Draws(), Draws()
  expected = learned(made(way, whole, config))
  before = made(way, first, config)
  found, host = learned(before, end=3)
  before("w3", 3, host, Clock())  # the update that follows fails
  saved = before.saved(3, host, lambda: "w3")
  before.close()
  assert sorted(saved["ahead"]) == ["3", "4", "5"]
  after = made(way, second, config)
  rest, host = learned(after, 3, host=saved)
  after.close()
  assert (found + rest, host) == expected
  assert first.log + second.log == whole.log


def test_scored_batches_become_arrays_and_back():
  scored = scored_of(3, 1)
  back = from_arrays(to_arrays(scored), (1.0,))
  jax.tree.map(np.testing.assert_array_equal, to_arrays(back), to_arrays(scored))
  assert back.rows[0]["completion"] == "a\ud800" and back.metrics["seen"] == 3.1
  assert np.isnan(back.metrics["never"]) and back.host == scored.host


def test_a_batch_that_is_too_old_is_an_error():
  config = config_of(2)
  old = scored_of(3, 0)
  ahead = AheadInTurn(Draws(), config)
  with pytest.raises(RunFailed, match="a token of batch 3 is 3 steps old, and rollout.max_stal"):
    ahead("w3", 3, {"drawn": np.int64(3), "ahead": {"3": to_arrays(old)}}, Clock())


def test_ages_are_of_the_tokens_that_are_learned():
  versions_PGT = np.array([[[3, 3, 1, 9], [2, 2, 2, 2]]])
  mask_PGT = np.array([[[1, 1, 1, 0], [1, 0, 0, 0]]])
  found = staleness_metrics(versions_PGT, 3, mask_PGT)
  assert found["staleness/mean"] == pytest.approx((0 + 0 + 2 + 1) / 4)
  assert found["staleness/max"] == 2 and found["staleness/share_0"] == 0.5


def test_a_step_that_is_saved_asks_for_nothing_again(tmp_path):
  asked = []

  class Notes(AheadInTurn):
    def saved(self, index, host, params):
      asked.append(index)
      return host

  config, checkpoints = config_of(2), Checkpoints(tmp_path, keep=2)
  host = {"num_tokens": np.int64(0)}
  store = StateStore(small_run(config), tmp_path, checkpoints, host, Notes(Draws(), config))
  train = TrainState(step=np.int64(1), params={"a": np.ones(2)}, opt_state={}, coefs={})
  for step in (1, 1, 2):
    store.save(step, RunState(train=train, reference=None, host=host))
  checkpoints.close()
  assert asked == [1, 2]


def test_a_checkpoint_converts_weights_only_if_a_known_schedule_needs_them(tmp_path):
  def converts():
    raise AssertionError("nothing needs them")

  schedule = WeightSchedule(tmp_path, in_flight=False)
  ahead = Beside(Draws(), config_of(2, "newest"), schedule)
  _, host = learned(ahead, end=3)
  ahead.saved(3, host, converts)
  schedule.known[8] = ((0, 3),)
  with pytest.raises(AssertionError, match="nothing needs them"):
    ahead.saved(3, host, converts)
  ahead.close()
  schedule.close()


@pytest.mark.parametrize("weights, bound", [("fixed", 1), ("fixed", 3), ("newest", 3)])
@pytest.mark.parametrize("slow", ["sampler", "learner"])
def test_so_many_versions_of_the_weights_are_held(weights, bound, slow, tmp_path):
  """Which the plan and sampling.rows=0 count."""
  held = []

  class Counts(Draws):
    def put_on_mesh(self, scored):
      if slow == "learner":
        time.sleep(0.02)
      held.append(len(ahead._weights))
      return super().put_on_mesh(scored)

  config = with_section(config_of(bound, weights), "mesh", sampler=1)
  schedule = WeightSchedule(tmp_path, in_flight=False) if weights == "newest" else None
  pause = 0.02 if slow == "sampler" else 0
  ahead = Beside(Counts(lambda number: time.sleep(pause)), config, schedule)
  learned(ahead)
  ahead.close()
  assert max(held) <= config.sampling_copies == (1 + bound if weights == "fixed" else 3)
  if slow == "sampler":
    assert max(held) == (bound if weights == "fixed" else 1)


# schedule.jsonl.


NEWEST = '{"batch": 0, "weights": [[0, 0]]}', '{"batch": 1, "weights": [[0, 1]]}'
FLIGHT = '{"chunk": 0, "version": 0, "groups": 4}', '{"chunk": 3, "version": 1, "groups": 8}'


@pytest.mark.parametrize("changes, lines", [(False, NEWEST), (True, FLIGHT)])
def test_a_half_written_line_is_dropped_and_a_damaged_one_is_an_error(changes, lines, tmp_path):
  def known(schedule):
    return schedule.known if not changes else [schedule.chunk(n) for n in range(5)]

  file = tmp_path / "schedule.jsonl"
  file.write_text(f"{lines[0]}\n{lines[1][:-3]}")
  schedule = WeightSchedule(tmp_path, in_flight=changes)
  first, second = FromChunk(0, 4), FromChunk(1, 8)
  assert known(schedule) == ([first, None, None, None, None] if changes else {0: ((0, 0),)})
  if changes:
    schedule.add_chunk(1, first)  # which holds already
    schedule.add_chunk(3, second)
  else:
    schedule.add(1, ((0, 1),))
  schedule.close()
  assert file.read_text() == "".join(f"{line}\n" for line in lines)
  after = known(WeightSchedule(tmp_path, in_flight=changes))
  assert after == ([first] * 3 + [second, None] if changes else {0: ((0, 0),), 1: ((0, 1),)})
  file.write_text('{"batch": 0, "weights": []}\n')
  with pytest.raises(ConfigError, match="schedule.jsonl line 1 does not say"):
    WeightSchedule(tmp_path, in_flight=changes)
  with pytest.raises(ConfigError, match="rollout.replay is 'nowhere'"):
    WeightSchedule(tmp_path, "nowhere", changes)


@pytest.mark.parametrize(
  "line, why",
  [
    ('{"batch": 7, "weights": [[0, 999]]}', "weights of step 999 come after batch 7"),
    ('{"batch": 7, "weights": [[0, 5], [3, 6]]}', "change in flight, and rollout.weights"),
    ('{"batch": 7, "weights": [[1, 5]]}', "begin with chunk 1"),
    ('{"batch": 7, "weights": [[0, 1e400]]}', "weights are [[0, inf]]"),
    ('{"batch": 7, "weights": [[0, NaN]]}', "weights are [[0, nan]]"),
    ('{"batch": 7, "weights": [[0, 5.0]]}', "weights are [[0, 5.0]]"),
    ('{"batch": 7, "weights": [[0, -1]]}', "weights are [[0, -1]]"),
    ('{"batch": 7, "weights": [[0, true]]}', "weights are [[0, True]]"),
    ('{"batch": 7, "weights": [[0, 1, 2]]}', "weights are [[0, 1, 2]]"),
    ('{"batch": 7, "weights": {"0": 5}}', "weights are {'0': 5}"),
    ('{"batch": 7, "weights": ["05"]}', "weights are ['05']"),
    ('{"batch": 1e400, "weights": [[0, 0]]}', "batch is inf"),
    ('{"batch": "7", "weights": [[0, 0]]}', "batch is '7'"),
    ('{"batch": -1, "weights": [[0, 0]]}', "batch is -1"),
    ('{"batch": %s, "weights": [[0, 0]]}' % ("9" * 5000), "4300 digits"),
    ('{"batch": 7}', "it must be"),
    ('{"batch": 7, "weights": [[0, 5]], "more": 1}', "it must be"),
    ("[7]", "it must be"),
    ("", "it is no JSON"),
    ("[" * 100_000, "it is no JSON"),
    ("\xff", "codec"),
    ('{"chunk": 7, "version": 5, "groups": 8}', "it must be"),
  ],
)
def test_a_line_that_cannot_be_is_named(line, why, tmp_path):
  assert_named(NEWEST[0], line, why, tmp_path, in_flight=False)


@pytest.mark.parametrize(
  "line, why",
  [
    ('{"chunk": -1, "version": 5, "groups": 8}', "chunk is -1, which is no whole number"),
    ('{"chunk": 7, "version": 5.0, "groups": 8}', "version is 5.0, which is no whole number"),
    ('{"chunk": 7, "version": true, "groups": 8}', "version is True, which is no whole number"),
    ('{"chunk": 7, "version": 5, "groups": "8"}', "groups is '8', which is no whole number"),
    ('{"chunk": 7, "version": 5, "groups": 1e400}', "groups is inf, which is no whole number"),
    ('{"chunk": %s, "version": 5, "groups": 8}' % ("9" * 5000), "4300 digits"),
    ('{"chunk": %s, "version": 5, "groups": 8}' % ("9" * 50), "which is no whole number"),
    ('{"chunk": 7, "version": 5}', "it must be"),
    ('{"chunk": 7, "version": 5, "groups": 8, "more": 1}', "it must be"),
    (NEWEST[0], "it is of a run that an earlier version began, or with rollout.weights=newest"),
    ("[7]", "it must be"),
    ("", "it is no JSON"),
    ("[" * 100_000, "it is no JSON"),
    ("\xff", "codec"),
  ],
)
def test_a_line_of_a_chunk_that_cannot_be_is_named(line, why, tmp_path):
  assert_named(FLIGHT[0], line, why, tmp_path, in_flight=True)


def assert_named(first, line, why, tmp_path, in_flight):
  file = tmp_path / "schedule.jsonl"
  file.write_bytes(f"{first}\n".encode() + line.encode("latin-1") + b"\n")
  (tmp_path / "other").mkdir()
  for folder, replay in ((tmp_path, ""), (tmp_path / "other", str(file))):
    with pytest.raises(ConfigError) as error:
      WeightSchedule(folder, replay, in_flight)
    message = str(error.value)
    assert f"{file} line 2 does not say" in message and why in message
    assert len(message.splitlines()) == 1 and len(message) < 600


def test_a_schedule_must_be_a_file_and_whole(tmp_path):
  lines = [json.dumps({"batch": n, "weights": [[0, n]]}) + "\n" for n in (0, 1, 3)]
  other = tmp_path / "other.jsonl"
  other.write_text("".join(lines))
  with pytest.raises(ConfigError, match="does not say which weights drew batch 2"):
    WeightSchedule(tmp_path, str(other), in_flight=False)
  other.write_text('{"batch": 2, "weights": [[0, 1], [4, 2]]}\n')
  (tmp_path / "schedule.jsonl").write_text(other.read_text())
  with pytest.raises(ConfigError, match="line 1 .* change in flight, and rollout.weights"):
    WeightSchedule(tmp_path, in_flight=False)
  (tmp_path / "schedule.jsonl").unlink()
  for make in (Path.mkdir, os.mkfifo):
    path = tmp_path / make.__name__ / "schedule.jsonl"
    path.parent.mkdir()
    make(path)
    with pytest.raises(ConfigError, match="cannot be read as a schedule"):
      WeightSchedule(path.parent)
    with pytest.raises(ConfigError, match="cannot be read as a schedule"):
      WeightSchedule(tmp_path, str(path))


def test_the_last_line_of_a_batch_or_chunk_counts(tmp_path):
  """A run that was killed may draw a batch once more, with other weights."""
  lines = [[3, 1], [4, 2], [3, 2]]
  text = "".join(json.dumps({"batch": n, "weights": [[0, v]]}) + "\n" for n, v in lines)
  (tmp_path / "schedule.jsonl").write_text(text)
  assert WeightSchedule(tmp_path, in_flight=False).known == {3: ((0, 2),), 4: ((0, 2),)}
  text = "".join(json.dumps({"chunk": n, "version": v, "groups": 8}) + "\n" for n, v in lines)
  (tmp_path / "schedule.jsonl").write_text(text)
  known = WeightSchedule(tmp_path)
  assert [known.chunk(n) for n in (2, 3, 4, 5)] == [None, *[FromChunk(2, 8)] * 2, None]


@pytest.mark.parametrize(
  "section, changes, message",
  [
    ("algo", dict(old_logprobs="recomputed"), "rollout.max_staleness is 2: log-probs"),
    ("rollout", dict(weights="newest"), "rollout.weights is 'newest': it needs mesh.sampler"),
    (
      "rollout",
      dict(weights="in_flight", max_staleness=0),
      "rollout.weights is 'in_flight': it needs rollout.max_staleness above 0; set 'fixed'",
    ),
    (
      "rollout",
      dict(weights="in_flight", replay="x"),
      "rollout.replay is 'x': it needs rollout.engine",
    ),
    ("rollout", dict(replay="x"), "rollout.replay is 'x': it needs rollout.engine as"),
    ("rollout", dict(weights="old"), "rollout.weights is 'old'"),
    ("rollout", dict(max_staleness=-1), "rollout.max_staleness is -1"),
  ],
)
def test_configs_that_cannot_be_run(section, changes, message):
  config = with_section(config_of(2), section, **changes)
  with pytest.raises(ConfigError, match=message):
    check_config(config)


def test_weights_of_another_run_are_an_error(tmp_path):
  schedule = WeightSchedule(tmp_path)
  schedule.known[5] = ((0, 1),)
  ahead = Beside(Draws(), config_of(2, "newest"), schedule)
  with pytest.raises(RunFailed, match="the file is of another run"):
    learned(ahead, 4, 7, {"drawn": np.int64(4)})
  ahead.close()


# Whole runs.

REWARD = """
def reward(completion_ids, log_extra, **_):
  scores = [float(sum(ids) % 7) for ids in completion_ids]
  log_extra("doubled", [2 * score for score in scores])
  return scores
"""


def whole_config(folder, steps=6, **changes):
  folder.mkdir()
  config = with_reward(config_of(2), folder, REWARD)
  config = dataclasses.replace(config, steps=steps)
  for section, values in changes.items():
    config = with_section(config, section, **values)
  return config


def whole_run(folder, stops=(), **changes):
  """The trained parameters of a run, which ends and goes on at some steps, and its folder."""
  config = whole_config(folder, **changes)
  for stop in (*stops, None):
    ended = run_steps(config, folder / "run", lambda step: step.step == stop)  # noqa: B023
  return jax.device_get(ended.state.train.params), folder / "run"


def equal(a, b):
  return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [0, 4])
def test_a_run_that_stops_and_goes_on_is_the_same_run(sampler, tmp_path):
  mesh = dict(sampler=sampler, data=-1, fsdp=1, tensor=1)
  changes = dict(mesh=mesh, batch=dict(prompts=8))
  whole, folder = whole_run(tmp_path / "whole", **changes)
  stopped, other = whole_run(tmp_path / "stopped", (1, 4), **changes)
  assert equal(whole, stopped)
  for mine, theirs in zip(read_metrics(folder), read_metrics(other), strict=True):
    timed = [name for name in mine if name.startswith(("time/", "perf/", "rollout/"))]
    assert [mine[n] for n in mine if n not in timed] == [theirs[n] for n in mine if n not in timed]
    assert mine["staleness/max"] == min(mine["step"] - 1, 2)
  for step in range(1, 7):
    rows = read_completions(other, step)
    assert rows == read_completions(folder, step)
    for row in rows:
      assert row["version"] == max(0, step - 3)
      assert row["extra/doubled"] == 2 * row["reward"]
  fresh, _ = whole_run(tmp_path / "fresh", rollout=dict(max_staleness=0), **changes)
  assert not equal(fresh, whole)


def prolonged(folder, staleness):
  """The parameters and the ages of a run of 3 steps that is then made 6 long."""
  rollout = dict(max_staleness=staleness)
  optimizer = dict(schedule="constant")
  config = whole_config(folder, rollout=rollout, optimizer=optimizer)
  run_steps(dataclasses.replace(config, steps=3), folder / "run")
  ended = run_steps(config, folder / "run")
  ages = [row.get("staleness/max") for row in read_metrics(folder / "run")]
  return jax.device_get(ended.state.train.params), ages


@pytest.mark.slow
def test_a_run_that_is_prolonged_begins_again_with_batches_of_its_own_policy(tmp_path, capsys):
  first, ages = prolonged(tmp_path / "first", 2)
  assert ages == [0, 1, 2, 0, 1, 2]
  said = " ".join(capsys.readouterr().out.split())
  assert "has no batch that was drawn ahead: its policy draws the next 2, which older" in said
  second, _ = prolonged(tmp_path / "second", 2)
  assert equal(first, second)
  capsys.readouterr()
  whole, _ = whole_run(tmp_path / "whole", (3,), optimizer=dict(schedule="constant"))
  assert not equal(first, whole)
  assert "no batch that was drawn" not in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_a_run_without_staleness_that_is_prolonged_is_the_run_that_was_that_long(tmp_path):
  short, _ = prolonged(tmp_path / "short", 0)
  changes = dict(rollout=dict(max_staleness=0), optimizer=dict(schedule="constant"))
  whole, _ = whole_run(tmp_path / "whole", **changes)
  assert equal(short, whole)


@pytest.mark.slow
def test_a_run_in_flight_is_repeated_from_its_schedule(tmp_path):
  changes = dict(
    mesh=dict(sampler=4, data=4, fsdp=1, tensor=1),
    sampling=dict(max_tokens=12, rows=4),
    checkpoint=dict(every=1),  # each waits for the batch in flight, so both must save alike
  )
  rollout = dict(max_staleness=2, weights="in_flight")
  whole, folder = whole_run(tmp_path / "whole", rollout=rollout, **changes)
  replay = rollout | dict(replay=str(folder / "schedule.jsonl"))
  stopped, other = whole_run(tmp_path / "stopped", (2, 3), rollout=replay, **changes)
  assert equal(whole, stopped)
  schedule = (folder / "schedule.jsonl").read_text()
  assert (other / "schedule.jsonl").read_text() == schedule and T < 12


@pytest.mark.slow
def test_no_seat_waits_for_a_batch_to_end_in_turn_and_no_copy_of_the_weights_stays(
  tmp_path, monkeypatch
):
  """With a few seats of 32 rows. The update finds the rows in flight, and no int8 weights."""
  changes = dict(
    mesh=dict(data=1),
    batch=dict(prompts=8),
    sampling=dict(max_tokens=12, rows=8, weights_dtype="int8", stop_ids=(3, 4, 5)),
    checkpoint=dict(every=100),
  )
  idle, copies = {}, {}

  def counted(self, state, batch):
    alive = [x for x in jax.live_arrays() if x.dtype == "int8"]
    copies[weights] = copies.get(weights, 0) + len(alive)
    return update(self, state, batch)

  update = GrpoStep._update
  monkeypatch.setattr(GrpoStep, "_update", counted)
  for weights in ("fixed", "in_flight"):
    rollout = dict(max_staleness=1, weights=weights)
    _, folder = whole_run(tmp_path / weights, rollout=rollout, **changes)
    rows = read_metrics(folder)
    idle[weights] = np.mean([row["rollout/seats_idle"] for row in rows[1:-1]])
    assert not (folder / "schedule.jsonl").exists()
    assert all(row["staleness/max"] <= 1 for row in rows)
  assert copies == {"fixed": 0, "in_flight": 0}
  assert idle["in_flight"] < 0.6 * idle["fixed"], idle
  versions = {row["version"] for row in read_completions(folder, 4)}
  assert versions <= {2, 3}


@pytest.mark.slow
def test_a_slow_reward_changes_no_number_in_flight_in_turn(tmp_path):
  """Dynamic sampling opens a group in the same chunk, whenever scores come."""
  changes = dict(
    mesh=dict(data=1),
    batch=dict(prompts=8),
    sampling=dict(max_tokens=12, rows=8),
    algo=dict(dynamic_sampling=True, max_resample_rounds=2),
    rollout=dict(max_staleness=1, weights="in_flight"),
    reward=dict(workers=1),
  )
  quick, folder = whole_run(tmp_path / "quick", **changes)
  slow = REWARD.replace("  scores", "  import time; time.sleep(0.3)\n  scores", 1)
  (tmp_path / "slow").mkdir()
  config = with_reward(config_of(2), tmp_path / "slow", slow)
  config = dataclasses.replace(config, steps=6)
  for section, values in changes.items():
    config = with_section(config, section, **values)
  ended = run_steps(config, tmp_path / "slow" / "run")
  assert equal(quick, jax.device_get(ended.state.train.params))
  assert read_completions(folder, 6) == read_completions(tmp_path / "slow" / "run", 6)


def started(folder, config, **environment):
  """A process that takes the steps of a run which are left."""
  (folder / "config.json").write_text(json.dumps(to_dict(config)))
  call = f"run_steps(from_dict(json.load(open({str(folder / 'config.json')!r}))), {str(folder)!r})"
  source = (
    "import json; from grpo_jax.config import from_dict;"
    f" from grpo_jax.training.loop import run_steps; {call}"
  )
  said, env = open(folder.parent / "said.txt", "a"), os.environ | environment
  return subprocess.Popen([sys.executable, "-c", source], env=env, stdout=said, stderr=said)


def steps_of(folder):
  file = folder / "metrics.jsonl"
  return len(file.read_bytes().splitlines()) if file.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS_AND_FLIGHT)
def test_a_run_that_is_killed_ten_times_is_the_same_run(way, tmp_path):
  """At staleness 2, at random moments. In flight, both follow one schedule."""
  seed, steps = WAYS_AND_FLIGHT.index(way), 30
  changes = dict(
    mesh=dict(sampler=0 if "in turn" in way else 4, data=-1, fsdp=1, tensor=1),
    batch=dict(prompts=8),
    sampling=dict(max_tokens=12, rows=8),
    checkpoint=dict(every=2 if way == "in flight in turn" else 1),
  )
  rollout = dict(max_staleness=2, weights="in_flight" if "in flight" in way else "fixed")
  whole, folder = whole_run(tmp_path / "whole", steps=steps, rollout=rollout, **changes)
  if way == "in flight":
    rollout["replay"] = str(folder / "schedule.jsonl")
  config = whole_config(tmp_path / "killed", steps=steps, rollout=rollout, **changes)
  killed, rng = tmp_path / "killed" / "run", np.random.default_rng(seed)
  killed.mkdir()
  kills = 0
  while True:
    process, before = started(killed, config), steps_of(killed)
    while process.poll() is None and (steps_of(killed) < before + 1 or kills == 10):
      time.sleep(0.01)
    if kills < 10 and process.poll() is None:
      time.sleep(rng.uniform(0, 0.3))
      process.kill()
      kills += 1
    if process.wait() == 0:
      break
  assert kills == 10, f"the run ended after {kills} kills"
  ended = run_steps(config, killed)
  assert equal(whole, jax.device_get(ended.state.train.params))
  assert [row["step"] for row in read_metrics(killed)] == list(range(1, steps + 1))


@pytest.mark.slow
@pytest.mark.parametrize("sampler, weights", [(0, "fixed"), (4, "fixed"), (0, "in_flight")])
@pytest.mark.parametrize(
  "changes",
  [
    dict(algo=dict(dynamic_sampling=True, max_resample_rounds=2)),
    dict(curriculum=dict(rest=2, floor=0.5)),
    dict(algo=dict(advantage="greedy_baseline")),
    dict(
      algo=dict(minibatches=2, correction="mask", correction_high=5.0, old_logprobs="recomputed")
    ),
    dict(algo=dict(kl_coef=0.1, updates_per_batch=2), lora=dict(rank=2)),
    dict(sampling=dict(temperature_schedule="linear", temperature_end=0.5, stop=("7",))),
  ],
  ids=["dynamic", "curriculum", "greedy", "minibatches", "lora", "stops"],
)
def test_other_settings_go_together_with_batches_that_are_drawn_ahead(
  sampler, weights, changes, tmp_path
):
  mesh = dict(sampler=sampler, data=4, fsdp=1, tensor=1 if sampler else 2)
  changes = dict(mesh=mesh, batch=dict(prompts=8), checkpoint=dict(every=1)) | changes
  changes["rollout"] = dict(max_staleness=2, weights=weights)
  if "lora" in changes:
    folder = make_checkpoint(tmp_path / "model", ["1+2=3"], every_id_is_text=True)
    changes |= dict(model=dict(path=str(folder)), data=dict(max_prompt_tokens=64))
  whole, _ = whole_run(tmp_path / "whole", **changes)
  stopped, folder = whole_run(tmp_path / "stopped", (1, 4), **changes)
  assert equal(whole, stopped)
  ages = [row["staleness/max"] for row in read_metrics(folder)]
  assert max(ages) <= 2
  assert weights == "in_flight" or ages == [0, 1, 2, 2, 2, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
  "sampler, weights", [(0, "fixed"), (0, "in_flight"), (4, "fixed"), (4, "in_flight")]
)
def test_an_environment_answers_rows_that_are_drawn_ahead(sampler, weights, tmp_path, monkeypatch):
  """To the last bit, as long as all answers come soon, which a busy machine may not keep to."""
  monkeypatch.setattr(player, "SOON", 60.0)
  config = turns_test.config_of(tmp_path, turns_test.COUNTING, "Counting", workers=1)
  config = with_section(dataclasses.replace(config, steps=4), "batch", prompts=8)
  mesh = dict(sampler=sampler, data=4, fsdp=1, tensor=1 if sampler else 2)
  config = with_section(config, "mesh", **mesh)
  rollout = dict(max_staleness=1, weights=weights)
  config = with_section(with_section(config, "rollout", **rollout), "checkpoint", every=1)
  whole = run_steps(config, tmp_path / "whole").state
  if sampler and weights == "in_flight":
    rollout["replay"] = str(tmp_path / "whole" / "schedule.jsonl")
    config = with_section(config, "rollout", **rollout)
  for stop in (1, 3, None):
    stopped = run_steps(config, tmp_path / "stopped", lambda step: step.step == stop)  # noqa: B023
  rows, others = (read_completions(tmp_path / name, 4) for name in ("stopped", "whole"))
  if weights == "fixed" or not sampler:
    assert equal(whole.train.params, stopped.state.train.params)
    assert rows == others
  else:  # the schedule does not say in which chunk an answer came
    ours, theirs = map(jax.tree.leaves, (whole.train.params, stopped.state.train.params))
    for own, other in zip(ours, theirs, strict=True):
      np.testing.assert_allclose(own, other, atol=1e-4)
    assert [row["completion_ids"] for row in rows] == [row["completion_ids"] for row in others]
  assert all(len(row["turns"]) > 1 for row in rows)
  if weights == "fixed":
    assert {row["version"] for row in rows} == {2}


@pytest.mark.slow
def test_devices_apart_that_wait_for_each_other_give_the_numbers_of_a_run_in_turn(tmp_path):
  """At staleness 0. Numbers in metrics.jsonl have all their digits."""
  changes = dict(batch=dict(prompts=8), rollout=dict(max_staleness=0))
  mesh = dict(data=4, fsdp=1, tensor=1)
  _, folder = whole_run(tmp_path / "apart", mesh=mesh | dict(sampler=4), **changes)
  config = whole_config(tmp_path / "in_turn", mesh=mesh, **changes)
  in_turn = tmp_path / "in_turn" / "run"
  in_turn.mkdir()
  assert started(in_turn, config, JAX_NUM_CPU_DEVICES="4").wait() == 0
  for mine, theirs in zip(read_metrics(folder), read_metrics(in_turn), strict=True):
    assert mine.keys() == theirs.keys() and "grad_norm" in mine
    timed = ("time/", "perf/")
    assert all(mine[name] == theirs[name] for name in mine if not name.startswith(timed))


# Devices of their own.


def test_the_last_devices_sample():
  learn, apart = mesh_lib.split(Mesh(sampler=3), jax.devices())
  assert [device.id for device in learn] == [0, 1, 2, 3, 4]
  assert [device.id for device in apart] == [5, 6, 7]
  assert mesh_lib.split(Mesh(), jax.devices())[1] == []
  with pytest.raises(ConfigError, match="mesh.sampler is 8: there are 8 devices, and at least one"):
    mesh_lib.split(Mesh(sampler=8), jax.devices())


def test_the_last_devices_of_each_process_sample():
  Place = collections.namedtuple("Place", "id process_index")
  devices = [Place(i, i // 4) for i in range(8)]
  learn, apart = mesh_lib.split(Mesh(sampler=1), devices)
  assert [device.id for device in learn] == [0, 1, 2, 4, 5, 6]
  assert [device.id for device in apart] == [3]  # this is process 0
  with pytest.raises(ConfigError, match="mesh.sampler is 4: there are 4 devices in a process, and"):
    mesh_lib.split(Mesh(sampler=4), devices)


@pytest.mark.parametrize(
  "section, changes, message",
  [
    ("rollout", dict(weights="newest"), "rollout.weights must be 'fixed'"),
    ("algo", dict(dynamic_sampling=True), "algo.dynamic_sampling must be False"),
    ("curriculum", dict(rest=2), "the curriculum must choose no prompts"),
    ("algo", dict(advantage="greedy_baseline"), "algo.advantage must need no greedy"),
    ("environment", dict(tools=("calculator",)), "there must be no tools and no environment"),
  ],
)
def test_what_devices_of_several_processes_do_not_sample(section, changes, message):
  shape = model.ModelConfig(8, 8, 1, 1, 1, 8, 8)
  config = with_section(config_of(1), "mesh", sampler=1)
  refused = with_section(config, section, **changes)
  check_apart(config, shape, processes=2)
  check_apart(refused, shape, processes=1)
  with pytest.raises(ConfigError, match=f"mesh.sampler is 1: in a run of several .*, {message}"):
    check_apart(refused, shape, processes=2)


def test_the_axes_of_the_learner_divide_the_devices_that_sample():
  learn = mesh_lib.make_mesh(Mesh(data=1, fsdp=2, tensor=2), jax.devices()[:4])
  apart = mesh_lib.mesh_apart(learn, jax.devices()[4:])
  assert dict(apart.shape) == dict(data=1, fsdp=2, expert=1, tensor=2)
  assert dict(mesh_lib.sampling_mesh(apart, 4).shape) == dict(data=1, fsdp=1, expert=1, tensor=4)
  with pytest.raises(ConfigError, match="mesh.sampler is 3: it must be a multiple of .* = 2"):
    mesh_lib.mesh_apart(learn, jax.devices()[4:7])


def test_batches_are_split_evenly_on_both_sides():
  config = with_section(config_of(1), "mesh", data=5, tensor=1, sampler=3)
  run = Run(with_section(config, "batch", prompts=15))
  assert run.hosts.row_shards == 15
  with pytest.raises(ConfigError, match="batch.prompts is 5: it must be a multiple of 15, so that"):
    run.hosts.check_rows({"batch.prompts": 5})
