"""Code of the user in this process."""

import sys
import threading

from grpo_jax.foreign import printing_to_stderr


def test_prints_of_two_threads_at_once_leave_stdout_as_it_was():
  before, is_inside, may_end = sys.stdout, threading.Event(), threading.Event()

  def other():
    with printing_to_stderr():
      is_inside.set()
      may_end.wait()

  thread = threading.Thread(target=other)
  with printing_to_stderr():
    thread.start()
    is_inside.wait()
  assert sys.stdout is sys.stderr  # the other thread is still in its block
  may_end.set()
  thread.join()
  assert sys.stdout is before
