"""A full disk, or one that cannot be written: one line, nothing lost, and the run can go on."""

import contextlib
import dataclasses
import errno
import os
from pathlib import Path
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_run import small_config, small_run, with_section

from grpo_jax import cli, export
from grpo_jax.data.tokenizers import tokenizer
from grpo_jax.evaluation.policy import Policy
from grpo_jax.model import save
from grpo_jax.storage import write_errors
from grpo_jax.storage.checkpoint import Checkpoints
from grpo_jax.storage.json_files import AppendedFile, replace_file
from grpo_jax.storage.reading import read_metrics
from grpo_jax.storage.row_writer import RowWriter
from grpo_jax.storage.workdir import open_run
from grpo_jax.train import train

NO_ROOM = "No space left on device"
TENSORSTORE = (
  'RESOURCE_EXHAUSTED: Error writing "params.w/0" in OCDBT database at local file'
  ' "/w/checkpoints/4.orbax-checkpoint-tmp/params.orbax-checkpoint-tmp/ocdbt.process_0/": Failed'
  " to write 177 bytes to file 25: No space left on device [os_error_code='28']"
  " [tensorstore_spec='{}']"
)


@pytest.fixture
def small_disk(tmp_path):
  """(a mounted disk of 800 KB, a function that fills it but for some bytes)."""
  mount = tmp_path / "disk"
  mount.mkdir()
  command = ["mount", "-t", "tmpfs", "-o", "size=800k", "tmpfs", str(mount)]
  if sys.platform != "linux" or subprocess.run(command, capture_output=True).returncode:
    pytest.skip("a small disk needs Linux and the right to mount a tmpfs")

  def leave(free):
    status = os.statvfs(mount)
    (mount / "ballast").write_bytes(bytes(status.f_bavail * status.f_frsize - free))

  yield mount, leave
  subprocess.run(["umount", "-l", str(mount)], check=True)


def caused_by(cause):
  try:
    raise RuntimeError("a thread failed") from cause
  except RuntimeError as error:
    return error


def raised_while_handling(first):
  try:
    try:
      raise first
    finally:
      raise RuntimeError("closing failed, too")
  except RuntimeError as error:
    return error


@pytest.mark.parametrize(
  "error, words",
  [
    (OSError(errno.ENOSPC, NO_ROOM, "/w/a"), ["/w/a: No space left", "again when there is room"]),
    (OSError(errno.EDQUOT, "", "/w/a"), ["/w/a: Disk quota exceeded", "the quota has room"]),
    (OSError(errno.EROFS, "", "/w/a"), ["/w/a: Read-only file system", "when it can be written"]),
    (PermissionError(errno.EACCES, "", "/w/a"), ["/w/a: Permission denied"]),
    (OSError(errno.EIO, "", "/w/a"), ["/w/a: Input/output error", "when the disk works"]),
    (OSError(errno.ENOSPC, NO_ROOM), ["No space left on device"]),
    (ValueError(TENSORSTORE), ["/w/checkpoints/4: No space left on device"]),
    (ValueError("I/O error: No space left on device (os error 28)"), [NO_ROOM]),
    (caused_by(OSError(errno.ENOSPC, NO_ROOM, "/w/a")), ["/w/a: No space left"]),
    (raised_while_handling(OSError(errno.ENOSPC, NO_ROOM, "/w/a")), ["/w/a: No space left"]),
  ],
)
def test_failures_to_write_are_one_line(error, words):
  line = write_errors.explain(error)
  assert all(word in line for word in words) and "\n" not in line
  assert "orbax" not in line and "tensorstore" not in line


@pytest.mark.parametrize(
  "error",
  [
    ValueError("28"),
    FileNotFoundError(errno.ENOENT, "", "/w/a"),
    RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 28 bytes."),
  ],
)
def test_other_failures_are_not_the_disk(error):
  assert write_errors.explain(error) is None


def test_the_line_names_the_newest_checkpoint(tmp_path):
  error = OSError(errno.ENOSPC, NO_ROOM, "/w/a")
  assert "; no checkpoint is saved yet; run" in write_errors.explain(error, tmp_path)
  for name in ("4", "12", "14.orbax-checkpoint-tmp", "13.damaged"):
    (tmp_path / "checkpoints" / name).mkdir(parents=True)
  assert "; the newest checkpoint is of step 12; run" in write_errors.explain(error, tmp_path)


def test_every_program_ends_with_the_line_and_exit_code_1(monkeypatch, capsys):
  def main(argv):
    raise caused_by(OSError(errno.ENOSPC, NO_ROOM, "/w/a"))

  monkeypatch.setattr(sys, "argv", ["program"])
  with pytest.raises(SystemExit) as left:
    cli.run(main)
  assert left.value.code == 1
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("error: /w/a: No space left on device; ")


class Full:
  """A file that takes `room` bytes more, and that takes at most 5 at a time."""

  def __init__(self, file, room):
    self._file, self._room = file, room

  def write(self, content):
    if not self._room:
      raise OSError(errno.ENOSPC, NO_ROOM)
    count = min(5, self._room, len(content))
    self._room -= count
    return self._file.write(content[:count])

  def __getattr__(self, name):
    return getattr(self._file, name)


@pytest.mark.parametrize("room", [0, 1, 12])
def test_what_cannot_be_appended_leaves_no_part(tmp_path, room):
  path = tmp_path / "rows"
  file = AppendedFile(path)
  file.append(b"the first row\n")
  real = file._file
  file._file = Full(real, room)
  with pytest.raises(OSError, match=f"{NO_ROOM}.*rows"):
    file.append(b"a row that is longer than the room\n")
  assert path.read_bytes() == b"the first row\n"
  file._file = Full(real, 100)
  file.append(b"the second row\n")
  assert path.read_bytes() == b"the first row\nthe second row\n"


def test_rows_on_a_full_disk(small_disk):
  """Each row is there once: none is half there, and the run goes on when there is room."""
  workdir, leave = small_disk
  open_run(workdir, {"seed": 0})
  writer = RowWriter(workdir, -1, tensorboard=True)
  leave(free=8192)
  with pytest.raises(OSError, match=NO_ROOM) as error:
    for step in range(1000):
      writer.write(step, {"reward": step / 7, "a longer name of a metric": 0.5})
  assert str(workdir / "metrics.jsonl") in str(error.value) or "tfevents" in str(error.value)
  with pytest.raises(OSError, match="000007.jsonl"):
    writer.completions(7, [{"completion": "x" * 10_000}])
  assert not list((workdir / "completions").iterdir())
  with pytest.raises(OSError, match="config.json"):
    replace_file(workdir / "config.json", "y" * 10_000)
  assert (workdir / "config.json").read_text() == '{\n  "seed": 0\n}\n'
  writer.close()
  assert (workdir / "metrics.jsonl").read_bytes().endswith(b"}\n")
  steps = [row["step"] for row in read_metrics(workdir)]
  assert steps == list(range(len(steps))) and len(steps) > 10

  (workdir / "ballast").unlink()
  again = RowWriter(workdir, 5, tensorboard=True)
  again.write(6, {})
  again.close()
  assert [row["step"] for row in read_metrics(workdir)] == [*range(7)]


def tree(seed, size=4000):
  return {"params": {"w": jnp.asarray(np.random.default_rng(seed).standard_normal(size))}}


def test_a_save_on_a_full_disk_keeps_the_older_checkpoint(small_disk, capfd, caplog):
  directory, leave = small_disk
  store = Checkpoints(directory / "checkpoints", keep=1)
  store.save(1, tree(1))
  store.wait()
  leave(free=30_000)
  with pytest.raises(Exception) as error:  # noqa: B017 - each library has its own
    store.save(2, tree(2))
    store.wait()
  with contextlib.suppress(OSError, ValueError):
    store.close()
  assert f"{directory}/checkpoints" in str(write_errors.explain(error.value))
  assert capfd.readouterr().err == "" and not caplog.records
  assert store.steps() == [1]

  (directory / "ballast").unlink()
  again = Checkpoints(directory / "checkpoints", keep=1)
  assert list((directory / "checkpoints").glob("*tmp*"))
  again.remove_unfinished()
  assert [path.name for path in (directory / "checkpoints").iterdir()] == ["1"]
  abstract = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree(0)
  )
  np.testing.assert_array_equal(again.restore(1, abstract)["params"]["w"], tree(1)["params"]["w"])
  again.save(2, tree(2))
  again.close()
  assert again.steps() == [2]


@pytest.mark.parametrize("free", [4096, 20_000])
def test_an_export_to_a_full_disk_leaves_nothing(small_disk, free):
  folder, leave = small_disk
  run = small_run(with_section(small_config(), "model", mlp_dim=2000))
  params = run.parameters.policy(run.initial_params())
  leave(free)
  with pytest.raises(OSError, match=f"{NO_ROOM}: '{folder}/out'"):
    save(folder / "out", run.parameters.model, params)
  assert [path.name for path in folder.iterdir()] == ["ballast"]


def test_an_export_whose_tokenizer_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
  run = small_run(small_config())
  policy = Policy("policy", run, run.initial_params(), 0)
  out, written = tmp_path / "out", []

  def fail(self, folder):
    written.extend(path.name for path in Path(folder).iterdir())
    raise OSError(errno.ENOSPC, NO_ROOM)

  monkeypatch.setattr(tokenizer.Tokenizer, "save", fail)
  monkeypatch.setattr(cli, "open_policy", lambda: policy)
  values = types.SimpleNamespace(out=str(out), adapter=False, push=None)
  monkeypatch.setattr(export, "flags", types.SimpleNamespace(FLAGS=values))
  with pytest.raises(OSError, match=f"{NO_ROOM}: '{out}'"):
    export.main([])
  assert "model.safetensors" in written and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_run_goes_on_when_there_is_room(small_disk, capfd):
  disk_folder, leave = small_disk
  config = with_section(small_config(), "log", tensorboard=True)
  config = with_section(config, "warm_start", steps=1, batch=8)
  config = with_section(config, "sampling", max_tokens=16)
  config = dataclasses.replace(config, steps=0)  # one program is enough
  workdir = disk_folder / "run"
  leave(free=60_000)
  with pytest.raises(Exception) as error:  # noqa: B017 - each library has its own
    train(config, workdir)
  assert f"{workdir}/checkpoints" in str(write_errors.explain(error.value, workdir))
  lines = capfd.readouterr().err.splitlines()
  assert not [line for line in lines if not line.startswith("still ")]  # said on a slow machine
  (disk_folder / "ballast").unlink()
  train(config, workdir)
  assert [row["step"] for row in read_metrics(workdir)] == [1]
  assert not list(workdir.glob("*/*tmp*"))

  (workdir / "metrics.jsonl").unlink()
  train(config, workdir)
  shown = capfd.readouterr().out
  assert "warning: metrics.jsonl ends at step 0 and the checkpoint is of step 1" in shown
