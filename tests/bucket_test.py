"""What a run in a bucket adds. Folders stand for buckets; `bucket_run_test.py` has a real one."""

import contextlib
import errno
import fcntl
import importlib.util
import json
from pathlib import Path
import socket
import threading
import time

from etils import epath
import fsspec
import pytest

from grpo_jax import progress
from grpo_jax.settings import ConfigError, RunFailed
from grpo_jax.storage import bucket, bucket_files, bucket_lock
from grpo_jax.storage.bucket_lock import BucketLock, Times
from grpo_jax.storage.workdir import LOCK_FILE, saved_steps, unfinished

QUICK = Times(renewed=0.02, expires=0.5, settles=0.02, looks=0.01)


def no_warning(text):
  raise AssertionError(text)


def test_names_of_folders(monkeypatch):
  assert bucket.folder("runs/a") == Path("runs/a")
  assert bucket.folder("~/a") == Path.home() / "a"
  for name in ("s3://bucket/a", "gs://", "gs://bucket", "gs://bucket/", "gs:///a"):
    with pytest.raises(ConfigError, match="gs://BUCKET/FOLDER"):
      bucket.folder(name)
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ConfigError) as error:
    bucket.folder("gs://bucket/a")
  message = "--workdir=gs://bucket/a needs the package gcsfs: pip install -e '.[gcs]'"
  assert str(error.value) == message


def test_a_folder_in_a_bucket_keeps_its_name():
  pytest.importorskip("gcsfs")
  workdir = bucket.folder("gs://bucket/runs/a")
  assert str(workdir / "checkpoints") == "gs://bucket/runs/a/checkpoints"
  assert bucket.folder(workdir) == workdir and bucket.is_bucket(workdir)


def test_failures_in_a_bucket_become_one_line(monkeypatch, capfd):
  monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LOOKS", 0.01)
  monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.05)
  with pytest.raises(RunFailed, match=r"gs://b/a cannot be used \(OSError: no route\)"):
    with bucket.reaching("gs://b/a"):
      time.sleep(0.2)
      raise OSError("no\nroute")
  assert "waiting for gs://b/a\n" in capfd.readouterr().err
  with pytest.raises(OSError, match="no route"), bucket.reaching("/a"):
    raise OSError("no route")
  with pytest.raises(ConfigError, match="other"), bucket.reaching("gs://b/a"):
    raise ConfigError("other")


def test_checkpoints_in_a_bucket_are_complete_when_orbax_says_so(tmp_path, monkeypatch):
  for name in ("2", "4", "6", "6.damaged", "notes"):
    (tmp_path / name).mkdir()
  (tmp_path / "2" / "commit_success.txt").touch()
  (tmp_path / "4" / "commit_success.txt").touch()
  assert saved_steps(tmp_path) == [2, 4, 6] and not unfinished(tmp_path)  # on a disk
  monkeypatch.setattr("grpo_jax.storage.workdir.is_bucket", lambda path: True)
  assert saved_steps(tmp_path) == [2, 4]
  assert unfinished(tmp_path) == [tmp_path / "6"]


def lock_in(workdir, holder):
  return BucketLock(epath.Path(workdir), holder, QUICK)


@contextlib.contextmanager
def held(lock, workdir, lost=no_warning):
  with bucket_lock.held(lock, workdir, "", no_warning, lost):
    yield


def test_a_second_run_is_refused_while_the_first_one_lives(tmp_path):
  with held(lock_in(tmp_path, "process 1"), tmp_path):
    said = []
    with pytest.raises(ConfigError, match="is in use by process 1: wait for its end"):
      lock_in(tmp_path, "process 2").take("", said.append)
    assert len(said) == 1 and f"you can remove {tmp_path / LOCK_FILE}" in said[0]
  assert not (tmp_path / LOCK_FILE).exists()
  with held(lock_in(tmp_path, "process 2"), tmp_path):  # waits for nobody
    assert json.loads((tmp_path / LOCK_FILE).read_text())["holder"] == "process 2"


def test_the_lock_of_a_dead_run_expires_and_one_that_is_known_to_be_dead_counts_at_once(tmp_path):
  lock_in(tmp_path, "process 1").take("", no_warning)
  start, said = time.monotonic(), []
  lock_in(tmp_path, "process 2").take("", said.append)
  assert 0.3 < time.monotonic() - start < 5
  assert "waiting up to" in said[0] and "left by process 1, which counts as dead" in said[1]
  lock_in(tmp_path, "process 3").take("process 2", no_warning)


def test_a_run_that_waits_goes_on_when_the_other_one_ends(tmp_path):
  first, said = lock_in(tmp_path, "process 1"), []
  first.take("", no_warning)

  def release(text):
    said.append(text)
    threading.Timer(0.1, first.release).start()

  lock_in(tmp_path, "process 2").take("", release)
  assert len(said) == 1  # it does not count as dead


def test_of_two_runs_that_start_together_one_is_refused(tmp_path):
  times = Times(renewed=9, expires=9, settles=0.3, looks=9)
  first = BucketLock(epath.Path(tmp_path), "process 1", times)
  second = lock_in(tmp_path, "process 2")
  thread = threading.Timer(0.1, second._write)  # as if it had read before the first one wrote
  thread.start()
  with pytest.raises(ConfigError, match="in use by process 2"):
    first.take("", no_warning)
  thread.join()
  second.check()


def test_a_run_whose_folder_was_taken_stops_and_leaves_the_lock_of_the_other(tmp_path):
  lost = threading.Event()
  first = lock_in(tmp_path, "process 1")
  with held(first, tmp_path, lambda reason: lost.set()):
    lock_in(tmp_path, "process 2")._write()
    assert lost.wait(10)
    with pytest.raises(RunFailed, match="taken over by process 2"):
      first.check()
  assert json.loads((tmp_path / LOCK_FILE).read_text())["holder"] == "process 2"


def test_another_object_in_the_place_of_the_lock_is_named(tmp_path):
  (tmp_path / LOCK_FILE).write_text("process 1 on a disk")
  with pytest.raises(ConfigError, match="run.lock is not a run's lock"):
    lock_in(tmp_path, "process 2").take("", no_warning)


class FilesOfFolder(bucket_files.BucketFiles):
  """With a folder for the bucket. In both, writing a file makes the folders above it."""

  def _bucket(self):
    return fsspec.core.url_to_fs(str(self._workdir), auto_mkdir=True)


class Run:
  """A bucket and the copy of a machine, both folders."""

  def __init__(self, tmp_path):
    self.bucket, self.copy = tmp_path / "bucket", tmp_path / "copy"
    self.bucket.mkdir()
    self.said = []

  def files(self):
    return FilesOfFolder(epath.Path(self.bucket), self.copy, self.said.append, no_warning, QUICK)

  def in_bucket(self):
    paths = (path for path in self.bucket.rglob("*") if path.is_file())
    found = {path.relative_to(self.bucket).as_posix(): path.read_text() for path in paths}
    found.pop(LOCK_FILE, None)
    return found


@pytest.fixture
def run(tmp_path):
  return Run(tmp_path)


def test_changed_files_are_uploaded_whole_and_removed_ones_are_removed(run):
  files = run.files()
  with files.held():
    files.upload()  # before the copy is made, there is nothing to upload
    files.download()
    (run.copy / "completions").mkdir()
    (run.copy / "completions" / "000001.jsonl").write_text("a\n")
    (run.copy / "metrics.jsonl").write_text("1\n")
    files.upload()
    first = {"completions/000001.jsonl": "a\n", "metrics.jsonl": "1\n"}
    assert run.in_bucket() == first
    (run.bucket / "completions" / "000001.jsonl").write_text("not uploaded again")
    (run.copy / "metrics.jsonl").write_text("1\n2\n")
    files.upload()
    assert run.in_bucket()["completions/000001.jsonl"] == "not uploaded again"
    (run.copy / "completions").rename(run.copy / "completions.1")
    assert run.in_bucket()["metrics.jsonl"] == "1\n2\n"
  # What is left is uploaded at the end.
  assert run.in_bucket() == {"completions.1/000001.jsonl": "a\n", "metrics.jsonl": "1\n2\n"}


def test_a_run_that_goes_on_starts_with_the_files_of_the_bucket(run):
  (run.bucket / "metrics.jsonl").write_text("1\n")
  for name in ("checkpoints/2", "reference/0", "completions"):
    (run.bucket / name).mkdir(parents=True)
    (run.bucket / name / "000001.jsonl").write_text("a")
  (run.copy / "completions").mkdir(parents=True)
  (run.copy / "metrics.jsonl").write_text("1\n2\n3\n")  # of a run that was killed here
  (run.copy / "completions" / "000002.jsonl").write_text("b")
  files = run.files()
  with files.held():
    files.download()
    assert (run.copy / "metrics.jsonl").read_text() == "1\n"
    assert [path.name for path in (run.copy / "completions").iterdir()] == ["000001.jsonl"]
    assert not (run.copy / "checkpoints").exists() and not (run.copy / "reference").exists()
    (run.copy / "completions" / "000001.jsonl").unlink()
  assert set(run.in_bucket()) == {
    "metrics.jsonl",
    "checkpoints/2/000001.jsonl",
    "reference/0/000001.jsonl",
  }


def test_what_a_failed_run_has_written_is_uploaded_and_its_error_stays(run):
  files = run.files()
  with pytest.raises(ValueError, match="defect"), files.held():
    files.download()
    (run.copy / "metrics.jsonl").write_text("1\n")
    raise ValueError("defect")
  assert run.in_bucket() == {"metrics.jsonl": "1\n"}


def test_nothing_is_uploaded_into_a_folder_that_another_run_has_taken(run):
  files = FilesOfFolder(
    epath.Path(run.bucket), run.copy, run.said.append, no_warning, Times(settles=0)
  )
  with pytest.raises(RunFailed, match="taken over by process 2"), files.held():
    files.download()
    (run.copy / "metrics.jsonl").write_text("1\n")
    lock_in(run.bucket, "process 2")._write()
  assert not run.in_bucket()


def test_between_checkpoints_files_are_uploaded_now_and_then_and_a_failure_is_a_warning(
  run, monkeypatch
):
  files = run.files()
  with files.held():
    files.download()
    (run.copy / "metrics.jsonl").write_text("1\n")
    files.upload_if_due()
    assert not run.in_bucket()
    monkeypatch.setattr(bucket_files, "UPLOAD_EVERY_S", 0.0)
    with monkeypatch.context() as broken:
      broken.setattr(files, "_bucket", lambda: 1 / 0)
      broken.setattr(bucket, "is_bucket", lambda path: True)
      files.upload_if_due()
    (warning,) = run.said
    assert "tried again later" in warning and "division by zero" in warning
    files.upload_if_due()
    assert run.in_bucket() == {"metrics.jsonl": "1\n"}


def test_the_lock_of_a_run_that_was_killed_on_this_machine_counts_at_once(run):
  with run.files().held():
    here = (run.copy / LOCK_FILE).read_text()
    there = (run.bucket / LOCK_FILE).read_text()
    with pytest.raises(ConfigError, match=f"--workdir={run.bucket} is in use by process"):
      with run.files().held():
        raise AssertionError
  assert json.loads(there)["holder"] == here
  (run.copy / LOCK_FILE).write_text(here)  # as a kill leaves them
  (run.bucket / LOCK_FILE).write_text(json.dumps({"holder": here, "renewed": time.time()}))
  with run.files().held():
    assert not run.said


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_lock_file_proves_nothing_without_file_locks_or_from_another_machine(
  run, monkeypatch, is_elsewhere
):
  """Such as in a cache folder that machines share. The other run may live, so its lock must age."""
  holder = f"process 1 on {'elsewhere' if is_elsewhere else socket.gethostname()} since 2026"
  run.copy.mkdir()
  (run.copy / LOCK_FILE).write_text(holder)
  (run.bucket / LOCK_FILE).write_text(json.dumps({"holder": holder, "renewed": time.time()}))

  def flock(descriptor, operation):
    raise OSError(errno.ENOLCK, "no locks")

  if not is_elsewhere:
    monkeypatch.setattr(fcntl, "flock", flock)
  with run.files().held():
    assert any("waiting up to" in line for line in run.said)
