"""Conversations whose answers come late, in any order, or not at all."""

from concurrent.futures import Future
import threading
import time

from call_templates import BEFORE_LAST_USER
import numpy as np
import pytest
from turns_test import talk_of

from grpo_jax.pending import Pending, there
from grpo_jax.rollouts.talk import Talk
from grpo_jax.sampler.requests import StoppedRow
from grpo_jax.settings import RunFailed


class Later:
  """A `Runner` whose answers are there when the test says so."""

  def __init__(self):
    self.futures, self.closing, self.closed = [], None, {}

  def start(self, requests):
    future = Future()
    self.futures.append(future)
    return Pending(future.result, [future])

  def close(self, states):
    self.closed |= states
    if not states or self.closing is None:
      return there([])
    return Pending(self.closing.result, [self.closing])

  def answer(self, number, **outcome):
    said = {"messages": [{"role": "user", "content": f"Answer {number}."}], "state": f"s{number}"}
    self.futures[number].set_result([said | {"reward": float(number), "done": False} | outcome])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  return talk_of(tmp_path_factory.mktemp("talk"), BEFORE_LAST_USER, name="Says", calls="hermes")


@pytest.fixture
def late(made):
  """(a talk, what answers it, four rows, the tokenizer)."""
  talk, tokens = made
  runner = Later()
  fresh = Talk(talk._talkers._replace(runner=runner), 2)
  for group, (prompts, place) in talk._prompts.items():
    fresh.begin(group, prompts, place)
  stop = tokens.stop_ids[0]
  rows = [StoppedRow(group, member, [5, stop], stop, 500) for group in (0, 1) for member in (0, 1)]
  return fresh, runner, rows, tokens


def test_a_late_answer_does_not_hold_up_the_rows_that_have_theirs(late):
  talk, runner, rows, tokens = late
  talk.ask(rows)
  runner.answer(2)
  begin = time.monotonic()
  assert [found[:2] for found in talk.answers(0.01, until_one=True)] == [(1, 0)] and talk.waits
  assert talk.answers(0.01) == [] and time.monotonic() - begin < 5
  threading.Timer(0.1, runner.answer, [0]).start()
  ((number, member, ids),) = talk.answers(0.01, until_one=True)  # it waits for one
  assert (number, member) == (0, 0) and "Answer 0." in tokens.decode(ids)
  talk.ask([rows[0]._replace(tokens=[*rows[0].tokens, *ids, 7, rows[0].stopped_by])])
  for number in (1, 3, 4):
    runner.answer(number)
  found = talk.answers(0.01)
  assert sorted(one[:2] for one in found) == [(0, 0), (0, 1), (1, 1)] and not talk.waits
  assert [turn.reward for turn in talk.take([0])[0, 0].own] == [0.0, 4.0]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)])
def test_answers_in_any_order_give_the_same_conversations(order, late):
  talk, runner, rows, tokens = late
  talk.ask(rows[:3])
  talk.ask(rows[3:])
  found = {}
  for number in order:
    runner.answer(number, done=number == 3)
    found |= {one[:2]: one[2] for one in talk.answers(0.01, until_one=True)}
  assert not talk.waits and found[1, 1] is None  # it has ended
  texts = [tokens.decode(found[divmod(number, 2)]) for number in range(3)]
  assert all(f"Answer {number}." in text for number, text in enumerate(texts))
  turns_PG = talk.take([1, 0])
  for place, group in enumerate((1, 0)):
    for member in range(2):
      own, *rest = turns_PG[place, member].turns
      number = 2 * group + member
      assert (own.reward, own.start, own.end) == (float(number), 0, 2)
      assert [turn.text for turn in rest] == ([f"Answer {number}."] if number < 3 else [])
      assert all(turn.end == 2 + len(found[group, member]) for turn in rest)
  assert isinstance(turns_PG, np.ndarray) and not talk._conversations and not talk._states


def test_an_error_of_an_environment_ends_its_row_or_the_run(late, capfd):
  talk, runner, rows, _ = late
  talk._talkers = talk._talkers._replace(stops_on_error=False)
  talk.ask(rows[:2])
  runner.futures[0].set_result([{"error": "raised KeyError: no move"}])
  runner.futures[1].set_result([{"failure": "timeout"}])
  assert sorted(talk.answers(0.01, until_one=True)) == [(0, 0, None), (0, 1, None)]
  assert capfd.readouterr().err.count("the completion ends there") == 1  # once for all
  kinds = [(one.problem, one.kind) for one in talk.take([0])[0]]
  assert [kind for _, kind in kinds] == ["error", "timeout"] and "no move" in kinds[0][0]
  talk._talkers = talk._talkers._replace(stops_on_error=True)
  talk.ask(rows[2:])
  runner.futures[2].set_result([{"error": "raised KeyError: no move"}])
  with pytest.raises(RunFailed, match="the environment raised KeyError: no move; with reward.on"):
    talk.answers(0.01, until_one=True)


def test_what_the_workers_raise_is_raised_where_the_answer_is_taken(late):
  talk, runner, rows, _ = late
  talk.ask(rows[:1])
  runner.futures[0].set_exception(RunFailed("no worker is left"))
  with pytest.raises(RunFailed, match="no worker is left"):
    talk.answers(0.01, until_one=True)


class Together:
  """`Hosts` that know whether a function runs on each process."""

  def __init__(self, hosts):
    self.hosts, self.is_inside = hosts, False

  def __getattr__(self, name):
    return getattr(self.hosts, name)

  def on_each(self, act):
    self.is_inside = True
    try:
      return self.hosts.on_each(act)
    finally:
      self.is_inside = False


def test_an_error_of_a_late_close_is_raised_on_each_process(late):
  """Otherwise, the processes without the error would wait for the one that has it."""
  old, runner, rows, _ = late
  hosts, runner.closing = Together(old._talkers.hosts), Future()
  talk = Talk(old._talkers._replace(hosts=hosts), 1)
  talk.begin(0, *old._prompts[0])
  problem_of, were_inside = talk._problem_of, []
  talk._problem_of = lambda outcome: were_inside.append(hosts.is_inside) or problem_of(outcome)
  talk.ask(rows[:1])
  runner.answer(0, done=True)
  assert talk.answers(0.01, until_one=True) == [(0, 0, None)]
  runner.closing.set_result([{"error": "raised ConnectionError: gone"}])
  with pytest.raises(RunFailed, match="the environment raised ConnectionError: gone"):
    talk.take([0])
  assert were_inside[-1]  # not the first, which is the answer


def test_a_reply_that_does_not_fit_closes_the_environment(late):
  talk, runner, rows, _ = late
  talk.ask([rows[0]._replace(room=3), rows[1], rows[2]])
  runner.answer(0)
  runner.answer(1)
  runner.answer(2, done=True, state="")  # its last turn has closed it
  assert [one[2] is None for one in sorted(talk.answers(0.01))] == [True, False, True]
  assert runner.closed == {talk._key(0, 0): "s0", talk._key(1, 0): ""}


def test_a_tool_without_a_server_closes_the_environment_whose_methods_answered(late):
  talk, runner, rows, _ = late
  talk._talkers = talk._talkers._replace(stops_on_error=False)
  asked = talk._requests_of_turn(rows[0])._replace(methods=("dial",))
  talk._requests_of_turn = lambda row: asked
  talk.ask(rows[:1])
  of_methods = {"contents": [], "reward": None, "done": False, "state": "s", "environment": ""}
  runner.futures[0].set_result([{"error": "raised ConnectionError: gone"}, of_methods])
  assert talk.answers(0.01, until_one=True) == [(0, 0, None)]
  assert runner.closed == {talk._key(0, 0): "s"}


def test_answers_that_come_soon_are_taken_together_so_that_numbers_repeat(late):
  """Also where no row can draw meanwhile."""
  talk, runner, rows, _ = late
  talk.ask(rows)
  runner.answer(2)
  for number in (0, 1, 3):
    threading.Timer(0.05, runner.answer, [number]).start()
  assert len(talk.answers(9, until_one=True)) == 4


def test_a_late_answer_holds_up_the_others_once(late):
  talk, runner, rows, _ = late
  talk.ask(rows)
  for number in (0, 1, 2):
    runner.answer(number)
  assert len(talk.answers(0.2)) == 3
  begin = time.monotonic()
  assert [talk.answers(0.2) for _ in range(5)] == [[]] * 5
  assert time.monotonic() - begin < 0.2
  runner.answer(3)
  assert len(talk.answers(0.2)) == 1
