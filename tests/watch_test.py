"""What the processes of a run tell one another when they fail."""

from concurrent.futures import ThreadPoolExecutor
import threading
import time

import pytest

from grpo_jax.parallel import watch


@pytest.fixture
def two(monkeypatch):
  """Two watches that are connected, and the lines with which each one left."""
  monkeypatch.setattr(watch, "_SECONDS_TO_AGREE", 0.5)
  left = [[], []]
  offered, offers = threading.Event(), []

  def leave_of(index):
    def leave(line):
      left[index].append(line)

    return leave

  def agree(offer):
    if offer.any():
      offers.append(offer)
      offered.set()
    assert offered.wait(10)
    return offers[0]

  watches = [watch.Watch(i, 2, leave_of(i)) for i in range(2)]
  with ThreadPoolExecutor(2) as threads:
    list(threads.map(lambda w: w.start("localhost", agree), watches))
  started = time.monotonic()
  while not watches[0]._connections:  # the first process takes the connection in a thread
    assert time.monotonic() - started < 10
    time.sleep(0.01)
  return watches, left


def test_processes_that_fail_together_agree(two):
  watches, left = two
  with ThreadPoolExecutor(2) as threads:
    assert list(threads.map(watch.Watch.all_failed, watches)) == [True, True]
  assert left == [[], []]


@pytest.mark.parametrize("failed", [0, 1])
def test_a_process_that_another_one_drags_along_does_not_say_that_all_failed(two, failed):
  """The end of the one that fails alone makes the other fail a moment later."""
  watches, left = two
  assert not watches[failed].all_failed()
  assert left == [[], []]  # nobody ends before the one that failed has said why
  assert not watches[1 - failed].all_failed()


@pytest.mark.parametrize("failed", [0, 1])
def test_the_others_end_when_one_ends_that_has_failed_alone(two, failed):
  watches, left = two
  assert not watches[failed].all_failed()
  for connection in watches[failed]._connections.values():
    connection.shutdown(2)  # as the kernel does when a process ends
  started = time.monotonic()
  while not left[1 - failed]:
    assert time.monotonic() - started < 10
    time.sleep(0.01)
  (line,) = left[1 - failed]
  assert line.startswith(f"process {failed} of 2 (counted from 0) has ended")
  assert left[failed] == []
