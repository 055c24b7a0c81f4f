"""The second start of a run compiles nothing, and a cache that cannot be used stops no run."""

import os
from pathlib import Path
import subprocess
import sys

import pytest

from grpo_jax.run import compilation_cache

ROOT = Path(__file__).parents[1]
FLAGS = """
  model.embed_dim=16 model.num_layers=1 model.num_heads=2 model.num_kv_heads=1 model.head_dim=8
  model.mlp_dim=32 batch.prompts=4 batch.group_size=4 sampling.max_tokens=4 algo.kl_coef=0.5 steps=1
  warm_start.steps=0 eval.every=0
""".split()
# What JAX did, as it counts it. A program that is not written because it is small is no cache miss.
COUNTING = """
import collections, runpy, sys
from jax import monitoring

events = collections.Counter()
monitoring.register_event_listener(lambda name, **_: events.update([name]))
sys.argv = sys.argv[1:]
try:
  runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
except SystemExit as end:
  assert not end.code, end.code
for name in ("compile_requests_use_cache", "cache_hits"):
  print(name, events["/jax/compilation_cache/" + name])
"""
# Compiles two programs, and a few of JAX's own.
COMPILING = """
import sys
import jax
from grpo_jax.run import compilation_cache

compilation_cache.use(sys.argv[1])
print(jax.config.jax_compilation_cache_dir)
assert jax.jit(lambda x: x + 1)(2) == 3
assert jax.jit(lambda x: x + 2)(2) == 4
"""


def python(code, *argv, **environment):
  """Runs the code on one device, with a cache of its own. Returns its output and its stderr."""
  inherited = {key: x for key, x in os.environ.items() if "CACHE" not in key}
  done = subprocess.run(
    [sys.executable, "-c", code, *argv],
    cwd=ROOT,
    env=inherited | {"JAX_NUM_CPU_DEVICES": "1"} | environment,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout, done.stderr


@pytest.mark.slow
def test_the_second_start_of_a_run_compiles_nothing(tmp_path):
  def start(number):
    keys = [f"--config.{key}" for key in FLAGS]
    workdir = f"--workdir={tmp_path / str(number)}"
    train = ("grpo_jax.train", "--config=configs/arithmetic.py", workdir, *keys)
    out, _ = python(COUNTING, *train, XDG_CACHE_HOME=str(tmp_path / "cache"))
    requests, hits = (int(line.split()[1]) for line in out.splitlines()[-2:])
    (folder,) = (tmp_path / "cache" / "grpo_jax").iterdir()
    return requests, hits, {path.name for path in folder.glob("*-cache")}

  requests, _, entries = start(1)
  assert requests > 20 and any("train_step" in name for name in entries)
  requests, hits, entries_then = start(2)
  assert hits == requests > 20 and entries_then == entries


@pytest.mark.parametrize(
  "folder",
  ["auto", pytest.param("here", marks=pytest.mark.slow), pytest.param("", marks=pytest.mark.slow)],
)
def test_where_compiled_programs_are_kept(folder, tmp_path):
  given = str(tmp_path / "here") if folder == "here" else folder
  out, err = python(COMPILING, given, XDG_CACHE_HOME=str(tmp_path / "home"))
  entries = list(tmp_path.rglob("jit__lambda*-cache"))
  assert (len(entries), err) == (2 if folder else 0, "")
  where = {"auto": tmp_path / "home" / "grpo_jax", "here": tmp_path / "here"}.get(folder)
  assert out.startswith(str(where))


def test_a_later_run_of_a_process_has_a_folder_of_its_own(tmp_path):
  code = """
import sys
import jax
from grpo_jax.run import compilation_cache
from grpo_jax.run.caller_state import leaving_nothing_behind

for number, folder in enumerate(sys.argv[1:]):
  with leaving_nothing_behind():
    compilation_cache.use(folder)
    jax.jit(lambda x: x + number)(2)
"""
  python(code, str(tmp_path / "a"), str(tmp_path / "b"))
  assert [*(tmp_path / "a").glob("*-cache")] and [*(tmp_path / "b").glob("*-cache")]


def test_the_environment_variable_has_precedence(tmp_path):
  mine = str(tmp_path / "mine")
  out, _ = python(COMPILING, str(tmp_path / "other"), JAX_COMPILATION_CACHE_DIR=mine)
  assert out == f"{mine}\n" and not (tmp_path / "other").exists()


@pytest.mark.slow
def test_without_a_home_folder_in_the_environment_it_is_that_of_the_system(tmp_path):
  """XDG_CACHE_HOME must be absolute, or it does not count."""
  out, _ = python(COMPILING, "auto", XDG_CACHE_HOME="relative", HOME=str(tmp_path))
  assert out.startswith(f"{tmp_path}/.cache/grpo_jax/jax-")


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
  (tmp_path / "file").write_text("in its place")
  for folder, reason in (
    (tmp_path / "file", "File exists"),
    ("/proc/nothing", "No such file"),
    ("/proc", "No such file"),  # it is there, but takes no file
  ):
    out, err = python(COMPILING, str(folder))
    expected = f"warning: compiled programs are not kept: compilation_cache={folder}: {reason}"
    assert out == "None\n" and err.startswith(expected) and err.count("\n") == 1


@pytest.mark.slow
def test_damaged_entries_are_written_again_without_a_word(tmp_path):
  python(COMPILING, str(tmp_path))
  entries = list(tmp_path.glob("*-cache"))
  sizes = [entry.stat().st_size for entry in entries]
  for entry in entries:
    os.truncate(entry, entry.stat().st_size // 2)
  _, err = python(COMPILING, str(tmp_path))
  assert err == "" and set(tmp_path.glob("*-cache")) == set(entries)
  assert [entry.stat().st_size for entry in entries] == sizes


def test_programs_that_were_not_used_for_longest_are_deleted(tmp_path):
  """Those of other versions of JAX, too. Other files stay."""
  for age, name in enumerate(("jax-2/new-cache", "jax-1/old-cache", "jax-2/oldest-cache")):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(bytes(100))
    os.utime(file, (1e9 - age, 1e9 - age))
  (tmp_path / "jax-2/notes").write_bytes(bytes(1000))

  def left():
    return sorted(file.name for file in tmp_path.rglob("*") if file.is_file())

  compilation_cache.bound(tmp_path, 300)
  assert left() == ["new-cache", "notes", "old-cache", "oldest-cache"]
  compilation_cache.bound(tmp_path, 250)
  assert left() == ["new-cache", "notes", "old-cache"]
  os.utime(tmp_path / "jax-1/old-cache", (2e9, 1e9 - 1))  # it was read since
  compilation_cache.bound(tmp_path, 100)
  assert left() == ["notes", "old-cache"]


def test_a_disk_that_is_full_is_one_line(tmp_path):
  limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
  ignored = "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
  _, err = python(ignored + limited + COMPILING, str(tmp_path))
  assert err.startswith(f"warning: compiled programs in {tmp_path}: Error writing")
  assert err.count("\n") == 1
