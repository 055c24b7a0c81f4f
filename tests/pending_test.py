"""Values that are not there yet: who computes them, once, and who waits."""

from concurrent.futures import Future, ThreadPoolExecutor
import threading
import time

import pytest

from grpo_jax.pending import Pending, there, together, wait_for_all, wait_for_one


def of_future(future):
  return Pending(future.result, [future])


def test_whoever_asks_first_computes_the_value_and_nobody_computes_it_again():
  asked = []
  pending = Pending(lambda: asked.append(1) or len(asked))
  assert pending.is_ready and asked == []
  doubled = pending.then(lambda value: asked.append("then") or 2 * value)
  assert asked == []
  assert [doubled.result(), doubled.result(), pending.result()] == [2, 2, 1]
  assert asked == [1, "then"]


def test_a_value_may_be_none():
  asked = []
  pending = Pending(lambda: asked.append(1))
  assert pending.result() is None and pending.result() is None and asked == [1]


def test_values_together_keep_their_order_and_are_ready_when_all_are():
  first, second = Future(), Future()
  both = together([of_future(first), there("there"), of_future(second)])
  assert not both.is_ready
  second.set_result(2)
  assert not both.is_ready and both.futures == [first, second]
  first.set_result(1)
  assert both.is_ready and both.result() == [1, "there", 2]
  assert together([]).is_ready and together([]).result() == []


def test_an_error_is_raised_for_each_who_asks_and_a_later_value_counts():
  answers = iter([ValueError("first"), ValueError("second"), 3])

  def finish():
    answer = next(answers)
    if isinstance(answer, Exception):
      raise answer
    return answer

  pending = Pending(finish)
  after = pending.then(lambda value: value + 1)
  with pytest.raises(ValueError, match="first"):
    pending.result()
  with pytest.raises(ValueError, match="second"):
    after.result()
  assert (after.result(), pending.result(), after.result()) == (4, 3, 4)
  failed = Future()
  failed.set_exception(KeyError("of a worker"))
  assert of_future(failed).is_ready
  with pytest.raises(KeyError, match="of a worker"):
    together([there(1), of_future(failed)]).result()


def test_threads_that_ask_together_get_one_value():
  asked = []

  def finish():
    time.sleep(0.05)
    asked.append(threading.get_ident())
    return object()

  pending = Pending(finish)
  with ThreadPoolExecutor(8) as pool:
    found = list(pool.map(lambda _: pending.result(), range(8)))
  assert len(asked) == 1 and len({*map(id, found)}) == 1


def test_waits_end_when_they_should():
  late, done = Future(), Future()
  done.set_result(1)
  begin = time.monotonic()
  wait_for_one([])
  wait_for_one([of_future(late), of_future(done)])
  wait_for_all([of_future(done), there(2)], 9)
  wait_for_all([of_future(done), of_future(late)], 0.05)
  assert 0.05 <= time.monotonic() - begin < 5
  # One of two futures of the first is there at once, and that is not enough.
  both = Pending(lambda: None, [done, late])
  threading.Timer(0.1, late.set_result, [1]).start()
  wait_for_one([both])
  assert both.is_ready
