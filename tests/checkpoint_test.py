import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax.run.checkpoint import Checkpoints, restore_tree, save_tree
from grpo_jax.run.checkpoint_format import device_digest
from grpo_jax.settings import ConfigError

ROOT = Path(__file__).parents[1]

# pytest takes the hook that keeps orbax's abandoned reads of damaged files quiet.
pytestmark = [
  pytest.mark.filterwarnings(f"ignore:{what}")
  for what in (
    "coroutine .* was never awaited:RuntimeWarning",
    ":pytest.PytestUnraisableExceptionWarning",
  )
]


@flax.struct.dataclass
class State:
  step: jax.Array
  params: dict
  opt_state: object


ADAM = optax.chain(
  optax.clip_by_global_norm(1.0), optax.adamw(1e-3)
)  # has empty nodes and named tuples


def state_of(step, optimizer=ADAM, width=30):
  rng = np.random.default_rng(step)
  bits = jnp.asarray(rng.integers(0, 2**32, (40, width), np.uint32))
  params = {
    "layers_0": {"w": jnp.asarray(rng.standard_normal((20, width)), jnp.float32)},
    "any_bits": jax.lax.bitcast_convert_type(
      bits, jnp.float32
    ),  # NaNs with payloads, denormals, infinities, -0
    "half": jnp.asarray(rng.standard_normal(7), jnp.bfloat16),
    "flags": jnp.array([True, False, True]),
  }
  return State(jnp.int32(step), params, optimizer.init(params))


def abstract(tree):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def bits(tree):
  return [(x.dtype, x.shape, np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]


def same(a, b):
  return jax.tree.structure(a) == jax.tree.structure(b) and bits(a) == bits(b)


def fill(directory, steps, keep=9):
  store = Checkpoints(directory, keep)
  for step in steps:
    store.save(step, state_of(step))
  store.close()


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
  directory = tmp_path_factory.mktemp("pristine") / "checkpoints"
  fill(directory, [1, 2])
  return directory


@pytest.fixture
def saved(pristine, tmp_path):
  """Checkpoints of steps 1 and 2, to be damaged."""
  return shutil.copytree(pristine, tmp_path / "checkpoints")


@pytest.mark.parametrize(
  "optimizer",
  [
    ADAM,
    optax.sgd(0.1),
    optax.multi_transform(
      {"a": optax.adam(0.1), "b": optax.set_to_zero()},
      {"layers_0": "a", "any_bits": "b", "half": "a", "flags": "b"},
    ),
  ],
)
def test_round_trip_is_bit_identical(tmp_path, optimizer):
  state = state_of(3, optimizer)
  store = Checkpoints(tmp_path / "c", keep=2)
  assert store.restore_latest(abstract(state)) is None and store.steps() == []
  store.save(3, state)
  step, restored = store.restore_latest(abstract(state))
  assert step == 3 and same(restored, state)
  assert [x.sharding for x in jax.tree.leaves(restored)] == [
    x.sharding for x in jax.tree.leaves(state)
  ]


def test_keeps_the_newest(tmp_path):
  store = Checkpoints(tmp_path, keep=2)
  for step in [0, 3, 5, 10]:
    store.save(step, state_of(step))
  store.wait()
  assert store.steps() == [5, 10]
  store.save(10, state_of(99))  # there already
  assert same(store.restore(10, abstract(state_of(0))), state_of(10))
  assert same(store.restore(5, abstract(state_of(0))), state_of(5))
  with pytest.raises(ConfigError, match=r"no checkpoint of step 7: there are \[5, 10\]"):
    store.restore(7, abstract(state_of(0)))
  store.close()


def test_save_does_not_see_later_changes_of_donated_buffers(tmp_path):
  change = jax.jit(lambda s: jax.tree.map(lambda x: x + x.dtype.type(1), s), donate_argnums=0)
  state = {"params": {f"w{i}": jnp.full((500, 500), i, jnp.float32) for i in range(6)}}
  expected = jax.tree.map(np.array, state)
  asked = abstract(state)
  store = Checkpoints(tmp_path, keep=1)
  store.save(1, state)
  for _ in range(20):
    state = change(state)
  jax.block_until_ready(state)
  _, restored = store.restore_latest(asked)
  assert same(restored, expected)


def test_params_can_be_read_without_the_optimizer(saved):
  asked = abstract(state_of(0).params)
  step, params = Checkpoints(saved, 1).restore_params(asked)
  assert step == 2 and same(params, state_of(2).params)
  step, params = Checkpoints(saved, 1).restore_params(asked, step=1)
  assert step == 1 and same(params, state_of(1).params)
  with pytest.raises(ConfigError, match="nowhere holds no checkpoint"):
    Checkpoints(saved / "nowhere", 1).restore_params(asked)
  assert not (saved / "nowhere").exists()


@pytest.mark.parametrize(
  "other, message",
  [
    (
      state_of(0, width=31),
      r"float32\[40, 30\] for params.any_bits where this config needs float32\[40, 31\]",
    ),
    (
      state_of(0, optax.sgd(0.1)),
      r"has int32\[\] for opt_state.1.0.count where this config needs nothing",
    ),
    (
      state_of(0, optax.sgd(0.1, 0.9)),
      r"nothing for opt_state.0.trace.any_bits where this config needs float32",
    ),
    (
      state_of(0).replace(step=jnp.float32(0)),
      r"int32\[\] for step where this config needs float32\[\]",
    ),
  ],
)
def test_another_tree_is_an_error_of_the_config_not_damage(saved, other, message):
  with pytest.raises(ConfigError, match=message):
    Checkpoints(saved, 9).restore_latest(abstract(other))
  assert Checkpoints(saved, 9).steps() == [1, 2]


def largest(step_folder, below):
  return max(
    (p for p in (step_folder / below).rglob("*") if p.is_file()), key=lambda p: p.stat().st_size
  )


def edit(path, change):
  path.write_bytes(change(path.read_bytes()))


def flip(content, bit):
  out = bytearray(content)
  out[bit // 8] ^= 1 << bit % 8
  return bytes(out)


def delete_items(path):
  shutil.rmtree(path)
  path.mkdir()


def replace_by_file(path):
  shutil.rmtree(path)
  path.write_text("garbage")


DAMAGES = {
  "data flipped": lambda p: edit(largest(p, "params"), lambda b: flip(b, 4 * len(b))),
  "data truncated": lambda p: edit(largest(p, "opt_state"), lambda b: b[: len(b) // 2]),
  "data empty": lambda p: edit(largest(p, "params"), lambda b: b""),
  "data zeroed": lambda p: edit(largest(p, "params"), lambda b: bytes(len(b))),
  "data garbage": lambda p: edit(
    largest(p, "params"), lambda b: random.Random(0).randbytes(len(b))
  ),
  "data deleted": lambda p: largest(p, "params").unlink(),
  "index deleted": lambda p: (p / "params/manifest.ocdbt").unlink(),
  "item deleted": lambda p: shutil.rmtree(p / "opt_state"),
  "everything deleted": delete_items,
  "a file in its place": replace_by_file,
  "manifest deleted": lambda p: shutil.rmtree(p / "manifest"),
  "manifest garbage": lambda p: edit(p / "manifest/metadata", lambda b: b"\x00" * len(b)),
  "a shape in the manifest changed": lambda p: edit(
    p / "manifest/metadata", lambda b: re.sub(rb"\[20, *30\]", b"[20, 31]", b)
  ),
  "other numbers": lambda p: (
    shutil.rmtree(p / "params"),
    shutil.copytree(p.with_name("1") / "params", p / "params"),
  ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_newest_falls_back_and_is_set_aside(saved, damage):
  DAMAGES[damage](saved / "2")
  warnings = []
  store = Checkpoints(saved, 2, warn=warnings.append)
  asked = abstract(state_of(0))

  with pytest.raises(ConfigError, match=r"checkpoints: every checkpoint of steps \[2\] is damaged"):
    store.restore(2, asked)
  assert store.steps() == [1, 2]  # reading alone changes nothing

  step, state = store.restore_latest(asked)
  assert step == 1 and same(state, state_of(1))
  assert len(warnings) == 1 and "moved to 2.damaged, going on from step 1" in warnings[0]
  assert (saved / "2.damaged").exists() and store.steps() == [1]
  for new in (2, 3):
    store.save(new, state_of(new))
  store.close()
  assert store.steps() == [2, 3] and (saved / "2.damaged").exists()
  assert same(store.restore_latest(asked)[1], state_of(3))


def test_params_of_a_damaged_newest_come_from_the_one_before_and_nothing_moves(saved):
  DAMAGES["data flipped"](saved / "2")
  warnings = []
  step, params = Checkpoints(saved, 2, warn=warnings.append).restore_params(
    abstract(state_of(0).params)
  )
  assert step == 1 and same(params, state_of(1).params)
  assert len(warnings) == 1 and sorted(p.name for p in saved.iterdir()) == ["1", "2"]


def test_all_damaged_is_an_error_and_nothing_moves(saved):
  for step in "12":
    DAMAGES["data flipped"](saved / step)
  with pytest.raises(ConfigError, match=rf"{saved}: every checkpoint of steps \[2, 1\] is damaged"):
    Checkpoints(saved, 2).restore_latest(abstract(state_of(0)))
  assert sorted(p.name for p in saved.iterdir()) == ["1", "2"]


def test_any_flipped_bit_is_harmless_or_noticed(pristine, tmp_path):
  """Files that do not matter may be damaged; numbers never come back changed."""
  rng = random.Random(0)
  files = [p.relative_to(pristine) for p in (pristine / "2").rglob("*") if p.is_file()]
  for n, file in enumerate(files):
    folder = tmp_path / str(n)
    shutil.copytree(pristine / "2", folder / "2")
    edit(folder / file, lambda b: flip(b, rng.randrange(8 * len(b))))
    try:
      assert same(Checkpoints(folder, 1).restore(2, abstract(state_of(0))), state_of(2))
    except ConfigError as e:
      assert "is damaged" in str(e)


def test_garbled_metadata_of_an_older_checkpoint_does_not_stop_the_next_save(saved):
  (saved / "1/_CHECKPOINT_METADATA").write_text('{"commit_timestamp_nsecs": "soon"}')
  fill(saved, [3], keep=2)
  assert Checkpoints(saved, 2).steps() == [2, 3]


def test_leftovers_of_a_killed_save_are_ignored_and_removed(saved):
  leftover = saved / "3.orbax-checkpoint-tmp"
  shutil.copytree(saved / "2", leftover)
  (leftover / "commit_success.txt").unlink(missing_ok=True)  # orbax before 0.12 writes none
  store = Checkpoints(saved, 9)
  assert store.steps() == [1, 2]
  assert store.restore_latest(abstract(state_of(0)))[0] == 2
  store.save(5, state_of(5))
  store.close()
  assert sorted(p.name for p in saved.iterdir()) == ["1", "2", "5"]


def test_a_save_that_fails_is_reported(tmp_path, monkeypatch):
  store = Checkpoints(tmp_path / "c", 2)
  store.save(1, state_of(1))
  store.wait()
  monkeypatch.setattr(os, "rename", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
  monkeypatch.setattr(Path, "rename", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
  with pytest.raises(Exception, match="disk full"):
    store.save(2, state_of(2))
    store.wait()
  assert store.steps() == [1]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8, jnp.bool])
def test_digest_changes_with_the_lowest_bit_of_any_element_and_with_order(dtype):
  x = np.asarray(jnp.arange(24).reshape(4, 6) % 5 > 2).astype(dtype)
  variants = [x, x[::-1]]
  for i in range(x.size):
    variants.append(x.copy())
    variants[-1].view(np.uint8).reshape(24, -1)[i, 0] ^= 1
  digests = {int(device_digest(v)) for v in variants}
  assert len(digests) == len(variants) == 26


def test_save_tree_overwrites(tmp_path):
  path = tmp_path / "reference"
  with pytest.raises(ConfigError, match="reference does not exist"):
    restore_tree(path, abstract(state_of(0).params))
  for step in (1, 2):
    save_tree(path, state_of(step).params)
    assert same(restore_tree(path, abstract(state_of(0).params)), state_of(step).params)
  (newest,) = path.iterdir()
  largest(newest, "tree").unlink()
  with pytest.raises(ConfigError, match="is damaged"):
    restore_tree(path, abstract(state_of(0).params))


def run(script, *args):
  return subprocess.run(
    [sys.executable, "-c", script, *map(str, args)],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=120,
  )


SHARDED = """
import sys, jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from grpo_jax.run.checkpoint import Checkpoints
assert len(jax.devices()) == 8
def asked(mesh, specs):
  shardings = {k: NamedSharding(mesh, s) for k, s in specs.items()}
  return {"params": {k: jax.ShapeDtypeStruct((64, 24), np.float32, sharding=s) for k, s in shardings.items()}}
def bits(tree):
  return {k: np.asarray(v).tobytes() for k, v in tree["params"].items()}
meshes = [(jax.make_mesh((8, 1), ("a", "b")), {"v": P("a"), "w": P(None)}),
          (jax.make_mesh((2, 4), ("a", "b")), {"v": P("b", "a"), "w": P(("a", "b"), None)}),
          (jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4]), {"v": P("a", "b"), "w": P("a")})]
store = Checkpoints(sys.argv[1], 9)
first = None
for step, (mesh, specs) in enumerate(meshes):
  want = asked(mesh, specs)
  latest, tree = store.restore_latest(want)
  assert latest == step and all(tree["params"][k].sharding == want["params"][k].sharding for k in specs)
  first = first or bits(tree)
  assert bits(tree) == first
  store.save(step + 1, tree)
store.close()
"""


def test_restores_onto_other_device_counts(tmp_path):
  rng = np.random.default_rng(0)
  tree = {"params": {k: jnp.asarray(rng.standard_normal((64, 24)), jnp.float32) for k in "vw"}}
  store = Checkpoints(tmp_path, 9)
  store.save(0, tree)
  store.close()
  done = run(SHARDED, tmp_path)
  assert done.returncode == 0, done.stderr
  step, restored = store.restore_latest(abstract(tree))
  assert step == 3 and same(restored, tree)


# Forks after the imports, so that a life takes a fraction of a second. The child goes on from whatever its killed
# predecessor left, and checks it.
KILLED = """
import json, os, random, signal, sys, time, warnings
from pathlib import Path
import numpy as np
import jax, jax.numpy as jnp
from grpo_jax.run.checkpoint import Checkpoints, restore_tree, save_tree
warnings.simplefilter("ignore")

def tree(step):
  rng = np.random.default_rng(step)
  return {"params": {"w": jnp.asarray(rng.standard_normal((400, 500)), jnp.float32), "n": jnp.int32(step)}}

def bits(tree):
  return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]

def check(step, got):
  assert bits(got) == bits(tree(step))

def life(folder):
  asked = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree(0))
  store = Checkpoints(folder / "run", 2, warn=lambda text: os._exit(3))
  step, state = store.restore_latest(asked) or (0, tree(0))
  check(step, state)
  if (folder / "reference").exists() and Checkpoints(folder / "reference", 1).steps():
    reference = restore_tree(folder / "reference", asked)
    check(int(reference["params"]["n"]), reference)
  while True:
    step += 1
    store.save(step, tree(step))
    if step % 3 == 0:
      save_tree(folder / "reference", tree(step))

folder, rng = Path(sys.argv[1]), random.Random(1)
endings, leftovers, steps = [], 0, []
for _ in range(int(sys.argv[2])):
  pid = os.fork()
  if pid == 0:
    try:
      life(folder)
    finally:
      sys.excepthook(*sys.exc_info())
      os._exit(1)
  newest = max(Checkpoints(folder / "run", 2).steps(), default=0)
  deadline = time.time() + 30
  while max(Checkpoints(folder / "run", 2).steps(), default=0) <= newest and time.time() < deadline:
    time.sleep(0.005)
  time.sleep(rng.uniform(0, 0.15))
  os.kill(pid, signal.SIGKILL)
  endings.append(os.waitpid(pid, 0)[1])
  leftovers += any("tmp" in p.name for p in (folder / "run").iterdir())
  steps.append(max(Checkpoints(folder / "run", 2).steps()))
print(json.dumps({"endings": endings, "leftovers": leftovers, "steps": steps}))
"""


def test_killed_in_the_midst_of_saves_many_times(tmp_path):
  kills = 8
  done = run(KILLED, tmp_path, kills)
  assert done.returncode == 0, done.stderr
  report = json.loads(done.stdout)
  assert report["endings"] == kills * [9], (
    done.stderr
  )  # by the signal, and not by a check that failed
  assert report["leftovers"] > 0  # some kills hit a save
  assert report["steps"] == sorted(set(report["steps"]))


HOSTS = """
import sys
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from pathlib import Path
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec as P
from grpo_jax.run.checkpoint import Checkpoints
mesh = jax.make_mesh((2,), ("data",))
make_weights = jax.jit(lambda seed: jax.random.normal(jax.random.key(seed), (400, 30)),
                       out_shardings=NamedSharding(mesh, P("data")))
def make(seed):
  host = {"count": np.array(2**40 + seed), "weights": np.linspace(0, seed, 1000)}
  return {"params": {"w": make_weights(seed)}, "host": host}
weights = make_weights(0)
wanted = {"params": {"w": jax.ShapeDtypeStruct(weights.shape, weights.dtype, sharding=weights.sharding)}, "host": None}
store = Checkpoints(sys.argv[3], 2, warn=lambda text: None)
for step in (1, 2):
  store.save(step, make(step))
store.close()
if jax.process_index() == 0:  # only the other process reads this file
  parts = [p for p in Path(sys.argv[3], "2/params/ocdbt.process_1").rglob("*") if p.is_file()]
  part = max(parts, key=lambda p: p.stat().st_size)
  part.write_bytes(part.read_bytes()[:10])
multihost_utils.sync_global_devices("damaged")
step, state = store.restore_latest(wanted, optional=("host",))
assert step == 1 and store.steps() == [1]
np.testing.assert_array_equal(state["params"]["w"].addressable_data(0), make_weights(1).addressable_data(0))
for name, array in make(1)["host"].items():
  assert state["host"][name].dtype == array.dtype
  np.testing.assert_array_equal(state["host"][name], array)
store.save(2, make(2))
store.close()
assert store.steps() == [1, 2]
"""


def test_two_hosts_agree_on_what_is_damaged(tmp_path):
  with socket.socket() as s:
    s.bind(("localhost", 0))
    address = f"localhost:{s.getsockname()[1]}"
  hosts = [
    subprocess.Popen(
      [sys.executable, "-c", HOSTS, address, str(i), tmp_path],
      cwd=ROOT,
      stderr=subprocess.PIPE,
      text=True,
      env={**os.environ, "JAX_NUM_CPU_DEVICES": "1"},
    )
    for i in range(2)
  ]
  try:
    for host in hosts:
      _, errors = host.communicate(timeout=60)
      assert host.returncode == 0, errors
  finally:
    for host in hosts:
      host.kill()


QUIET = """
import sys
from absl import logging
logging.set_verbosity(logging.INFO)
logging.set_stderrthreshold("info")
import jax, jax.numpy as jnp
from pathlib import Path
from grpo_jax.run.checkpoint import Checkpoints
tree = {"params": {f"w{i}": jnp.full((100, 100), i, jnp.float32) for i in range(20)}}
asked = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
store = Checkpoints(sys.argv[1], 2, warn=print)
for step in (1, 2):
  store.save(step, tree)
store.close()
data = max((p for p in Path(sys.argv[1], "2").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
data.write_bytes(data.read_bytes()[:100])
store.restore_latest(asked)
"""


def test_only_the_warning_reaches_the_terminal(tmp_path):
  done = run(QUIET, tmp_path)
  assert done.returncode == 0, done.stderr
  assert done.stderr == ""
  assert len(done.stdout.splitlines()) == 1 and "damaged" in done.stdout
