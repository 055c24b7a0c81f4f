"""Checkpoints of several processes, on other meshes, and after a kill at any moment."""

import json
import os
from pathlib import Path
import socket
import subprocess
import sys

from checkpoint_test import abstract, same
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.storage.checkpoint import Checkpoints

ROOT = Path(__file__).parents[1]


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
from grpo_jax.storage.checkpoint import Checkpoints
assert len(jax.devices()) == 8
def abstract(mesh, specs):
  params = {}
  for name, spec in specs.items():
    sharding = NamedSharding(mesh, spec)
    params[name] = jax.ShapeDtypeStruct((64, 24), np.float32, sharding=sharding)
  return {"params": params}
def bits(tree):
  return {k: np.asarray(v).tobytes() for k, v in tree["params"].items()}
meshes = [(jax.make_mesh((8, 1), ("a", "b")), {"v": P("a"), "w": P(None)}),
          (jax.make_mesh((2, 4), ("a", "b")), {"v": P("b", "a"), "w": P(("a", "b"), None)}),
          (jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4]),
           {"v": P("a", "b"), "w": P("a")})]
store = Checkpoints(sys.argv[1], 9)
first = None
for step, (mesh, specs) in enumerate(meshes):
  wanted = abstract(mesh, specs)
  latest, tree = store.restore_latest(wanted)
  assert latest == step
  assert all(tree["params"][k].sharding == wanted["params"][k].sharding for k in specs)
  first = first or bits(tree)
  assert bits(tree) == first
  store.save(step + 1, tree)
store.close()
"""


@pytest.mark.slow
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


# Forks after the imports, so that each child lives only a fraction of a second. A child checks what
# its killed predecessor left, and continues from there.
KILLED = """
import json, os, random, signal, sys, time, warnings
from pathlib import Path
import numpy as np
import jax, jax.numpy as jnp
from grpo_jax.storage.checkpoint import Checkpoints, restore_tree, save_tree
warnings.simplefilter("ignore")

def tree(step):
  rng = np.random.default_rng(step)
  weights = jnp.asarray(rng.standard_normal((400, 500)), jnp.float32)
  return {"params": {"w": weights, "n": jnp.int32(step)}}

def abstract(x):
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)

def bits(tree):
  return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]

def check(step, got):
  assert bits(got) == bits(tree(step))

def life(folder):
  wanted = jax.tree.map(abstract, tree(0))
  store = Checkpoints(folder / "run", 2, warn=lambda text: os._exit(3))
  step, state = store.restore_latest(wanted) or (0, tree(0))
  check(step, state)
  if (folder / "reference").exists() and Checkpoints(folder / "reference", 1).steps():
    reference = restore_tree(folder / "reference", wanted)
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


@pytest.mark.slow
def test_killed_in_the_midst_of_saves_many_times(tmp_path):
  kills = 8
  done = run(KILLED, tmp_path, kills)
  assert done.returncode == 0, done.stderr
  report = json.loads(done.stdout)
  # Every life ended by the signal, and not by a check that failed.
  assert report["endings"] == kills * [9], done.stderr
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
from grpo_jax.storage.checkpoint import Checkpoints
mesh = jax.make_mesh((2,), ("data",))
make_weights = jax.jit(lambda seed: jax.random.normal(jax.random.key(seed), (400, 30)),
                       out_shardings=NamedSharding(mesh, P("data")))
def make(seed):
  host = {"count": np.array(2**40 + seed), "weights": np.linspace(0, seed, 1000)}
  return {"params": {"w": make_weights(seed)}, "host": host}
weights = make_weights(0)
abstract = jax.ShapeDtypeStruct(weights.shape, weights.dtype, sharding=weights.sharding)
wanted = {"params": {"w": abstract}, "host": None}
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
restored, expected = state["params"]["w"], make_weights(1)
np.testing.assert_array_equal(restored.addressable_data(0), expected.addressable_data(0))
for name, array in make(1)["host"].items():
  assert state["host"][name].dtype == array.dtype
  np.testing.assert_array_equal(state["host"][name], array)
store.save(2, make(2))
store.close()
assert store.steps() == [1, 2]
"""


@pytest.mark.slow
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
from grpo_jax.storage.checkpoint import Checkpoints
tree = {"params": {f"w{i}": jnp.full((100, 100), i, jnp.float32) for i in range(20)}}
wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
store = Checkpoints(sys.argv[1], 2, warn=print)
for step in (1, 2):
  store.save(step, tree)
store.close()
files = [p for p in Path(sys.argv[1], "2").rglob("*") if p.is_file()]
data = max(files, key=lambda p: p.stat().st_size)
data.write_bytes(data.read_bytes()[:100])
store.restore_latest(wanted)
"""


@pytest.mark.slow
def test_only_the_warning_reaches_the_terminal(tmp_path):
  done = run(QUIET, tmp_path)
  assert done.returncode == 0, done.stderr
  assert done.stderr == ""
  assert len(done.stdout.splitlines()) == 1 and "damaged" in done.stdout
