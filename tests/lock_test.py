"""A run's folder belongs to one run at a time, and a dead run's folder to nobody."""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys

import pytest
from small_run import small_config

from grpo_jax.settings import ConfigError
from grpo_jax.storage.lock import held
from grpo_jax.storage.workdir import LOCK_FILE, open_run
from grpo_jax.train import train


def no_warning(text):
  raise AssertionError(text)


def test_a_second_run_is_refused_and_told_who_holds_the_folder(tmp_path):
  workdir = tmp_path / "new" / "run"
  with held(workdir, no_warning):
    with pytest.raises(ConfigError) as error:
      with held(workdir, no_warning):
        raise AssertionError
    (name,) = os.listdir(workdir)
  message = str(error.value)
  holder = f"is in use by process {os.getpid()} on {socket.gethostname()} since 20"
  assert holder in message and "name another folder" in message and "\n" not in message
  assert name == LOCK_FILE and not os.listdir(workdir)
  with held(workdir, no_warning):
    open_run(workdir, {"seed": 0})  # a folder with nothing but the lock is a new one


def test_train_reads_and_writes_nothing_in_a_folder_that_another_run_holds(tmp_path):
  (tmp_path / "config.json").write_text("half wri")
  (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
  with held(tmp_path, no_warning):
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match="is in use by process"):
      train(small_config(), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


HOLD = """
import os, sys, time
from pathlib import Path
from grpo_jax.storage.lock import held

with held(Path(sys.argv[1]), print):
  if not os.fork():
    print(os.getpid(), flush=True)  # by the child, which has closed its copy of the lock by then
  time.sleep(600)
"""


def test_a_killed_run_holds_nothing_even_if_its_children_live_on(tmp_path):
  process = subprocess.Popen(
    [sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True
  )
  child = int(process.stdout.readline())
  try:
    with pytest.raises(ConfigError, match=f"in use by process {process.pid} on "):
      with held(tmp_path, no_warning):
        raise AssertionError
    process.kill()
    process.wait()
    assert (tmp_path / LOCK_FILE).read_text()  # it says who held the folder, and blocks nobody
    with held(tmp_path, no_warning):
      os.kill(child, 0)  # still there
  finally:
    process.kill()
    os.kill(child, signal.SIGKILL)


def test_a_file_that_another_machine_left_is_mentioned(tmp_path):
  (tmp_path / LOCK_FILE).write_text("process 7 on elsewhere since 2026-11-22 10:00:00 UTC")
  warnings = []
  with held(tmp_path, warnings.append):
    assert f"process {os.getpid()} on" in (tmp_path / LOCK_FILE).read_text()
  (line,) = warnings
  assert "was left by process 7 on elsewhere since 2026" in line and "stop one of the two" in line


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_file_locks_the_run_goes_on_and_says_so(tmp_path, monkeypatch, number):
  def flock(descriptor, operation):
    raise OSError(number, os.strerror(number))

  monkeypatch.setattr(fcntl, "flock", flock)
  warnings = []
  with held(tmp_path, warnings.append):
    pass
  assert warnings == [f"{tmp_path} has no file locks: make sure that no other run uses it"]


def test_a_lock_of_a_file_that_its_holder_has_just_removed_does_not_count(tmp_path, monkeypatch):
  original, calls = fcntl.flock, []

  def flock(descriptor, operation):
    if not calls:
      (tmp_path / LOCK_FILE).unlink()
    calls.append(descriptor)
    original(descriptor, operation)

  monkeypatch.setattr(fcntl, "flock", flock)
  with held(tmp_path, no_warning):
    assert len(calls) == 2
    with pytest.raises(ConfigError, match="in use"):
      with held(tmp_path, no_warning):
        raise AssertionError


def test_a_folder_that_cannot_be_written_is_no_bad_input(tmp_path, monkeypatch):
  def read_only(path, *_):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

  monkeypatch.setattr(os, "open", read_only)
  with pytest.raises(OSError, match="Read-only file system.*run.lock"):
    with held(tmp_path, no_warning):
      raise AssertionError
