"""What the processes of a run tell one another when they fail."""

from concurrent.futures import ThreadPoolExecutor
import threading
import time

import pytest

from grpo_jax.parallel import watch


@pytest.fixture
def two(monkeypatch):
  """Two watches that are connected, and what each one left with. Leaving closes connections."""
  monkeypatch.setattr(watch, "_SECONDS_TO_AGREE", 0.5)
  left = [[], []]
  offered, offers = threading.Event(), []

  def leave_of(index):
    def leave(line):
      left[index].append(line)
      for connection in watches[index]._connections.values():
        connection.shutdown(2)  # as the kernel does when a process ends

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
def test_the_other_has_left_before_one_that_fails_alone_goes_on(two, failed):
  """Else the end of this process makes the other fail too, and that one says that all failed."""
  watches, left = two
  assert not watches[failed].all_failed()
  assert left[failed] == []
  (line,) = left[1 - failed]
  assert line.startswith(f"process {failed} of 2 (counted from 0) has ended")
