"""Checkpoints: bit-identical, and never restored if they are damaged."""

import json
import os
from pathlib import Path
import random
import re
import shutil

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax.settings import ConfigError
from grpo_jax.storage.checkpoint import Checkpoints, restore_tree, save_tree
from grpo_jax.storage.manifest import device_digest

# pytest replaces the hook that keeps orbax's abandoned reads of damaged files quiet.
pytestmark = [
  pytest.mark.filterwarnings(f"ignore:{warning}")
  for warning in (
    "coroutine .* was never awaited:RuntimeWarning",
    ":pytest.PytestUnraisableExceptionWarning",
  )
]


@flax.struct.dataclass
class State:
  step: jax.Array
  params: dict
  opt_state: object


# Its state has empty nodes and named tuples.
ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def state_of(step, optimizer=ADAM, width=30):
  rng = np.random.default_rng(step)
  random_bits = jnp.asarray(rng.integers(0, 2**32, (40, width), np.uint32))
  params = {
    "layers_0": {"w": jnp.asarray(rng.standard_normal((20, width)), jnp.float32)},
    # NaNs with payloads, denormals, infinities and -0.
    "any_bits": jax.lax.bitcast_convert_type(random_bits, jnp.float32),
    "half": jnp.asarray(rng.standard_normal(7), jnp.bfloat16),
    "flags": jnp.array([True, False, True]),
  }
  return State(jnp.int32(step), params, optimizer.init(params))


def abstract(tree):
  """The shapes, dtypes and shardings of a tree of arrays."""
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def bits(tree):
  return [(x.dtype, x.shape, np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]


def same(a, b):
  """Whether two trees have the same structure, dtypes, shapes and bits."""
  return jax.tree.structure(a) == jax.tree.structure(b) and bits(a) == bits(b)


def fill(directory, steps, keep=9):
  """Saves a checkpoint for each of the steps."""
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
  store.save(10, state_of(99))  # does nothing, because the step is there already
  assert same(store.restore(10, abstract(state_of(0))), state_of(10))
  assert same(store.restore(5, abstract(state_of(0))), state_of(5))
  with pytest.raises(ConfigError, match=r"no checkpoint of step 7: there are \[5, 10\]"):
    store.restore(7, abstract(state_of(0)))
  store.close()


def test_save_does_not_see_later_changes_of_donated_buffers(tmp_path):
  def add_one(state):
    return jax.tree.map(lambda x: x + x.dtype.type(1), state)

  change = jax.jit(add_one, donate_argnums=0)
  state = {"params": {f"w{i}": jnp.full((500, 500), i, jnp.float32) for i in range(6)}}
  expected = jax.tree.map(np.array, state)
  wanted = abstract(state)
  store = Checkpoints(tmp_path, keep=1)
  store.save(1, state)
  for _ in range(20):
    state = change(state)
  jax.block_until_ready(state)
  _, restored = store.restore_latest(wanted)
  assert same(restored, expected)


def test_params_can_be_read_without_the_optimizer(saved):
  wanted = abstract(state_of(0).params)
  step, params = Checkpoints(saved, 1).restore_params(wanted)
  assert step == 2 and same(params, state_of(2).params)
  step, params = Checkpoints(saved, 1).restore_params(wanted, step=1)
  assert step == 1 and same(params, state_of(1).params)
  with pytest.raises(ConfigError, match="nowhere holds no checkpoint"):
    Checkpoints(saved / "nowhere", 1).restore_params(wanted)
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
def test_another_tree_is_an_error_in_the_config_and_not_damage(saved, other, message):
  with pytest.raises(ConfigError, match=message):
    Checkpoints(saved, 9).restore_latest(abstract(other))
  assert Checkpoints(saved, 9).steps() == [1, 2]


def largest(step_folder, below):
  """The largest file below a folder of a checkpoint."""
  return max(
    (p for p in (step_folder / below).rglob("*") if p.is_file()), key=lambda p: p.stat().st_size
  )


def edit(path, change):
  path.write_bytes(change(path.read_bytes()))


def flip(content, bit):
  out = bytearray(content)
  out[bit // 8] ^= 1 << bit % 8
  return bytes(out)


def flip_middle_bit(content):
  return flip(content, 4 * len(content))


def random_bytes(content):
  return random.Random(0).randbytes(len(content))


def change_a_shape(content):
  return re.sub(rb"\[20, *30\]", b"[20, 31]", content)


def delete_items(path):
  shutil.rmtree(path)
  path.mkdir()


def replace_by_file(path):
  shutil.rmtree(path)
  path.write_text("garbage")


def replace_params_by_those_of_step_1(path):
  shutil.rmtree(path / "params")
  shutil.copytree(path.with_name("1") / "params", path / "params")


# Each damages the checkpoint in the folder `p`.
DAMAGES = {
  "data flipped": lambda p: edit(largest(p, "params"), flip_middle_bit),
  "data truncated": lambda p: edit(largest(p, "opt_state"), lambda b: b[: len(b) // 2]),
  "data empty": lambda p: edit(largest(p, "params"), lambda b: b""),
  "data zeroed": lambda p: edit(largest(p, "params"), lambda b: bytes(len(b))),
  "data garbage": lambda p: edit(largest(p, "params"), random_bytes),
  "data deleted": lambda p: largest(p, "params").unlink(),
  "index deleted": lambda p: (p / "params/manifest.ocdbt").unlink(),
  "item deleted": lambda p: shutil.rmtree(p / "opt_state"),
  "everything deleted": delete_items,
  "a file in its place": replace_by_file,
  "manifest deleted": lambda p: shutil.rmtree(p / "manifest"),
  "manifest garbage": lambda p: edit(p / "manifest/metadata", lambda b: b"\x00" * len(b)),
  "a shape in the manifest changed": lambda p: edit(p / "manifest/metadata", change_a_shape),
  "other numbers": replace_params_by_those_of_step_1,
}


# What another damage of the same file tests, too.
_SLOW = {"data truncated", "data empty", "data zeroed", "data deleted", "manifest garbage"}


@pytest.mark.parametrize(
  "damage", [pytest.param(x, marks=pytest.mark.slow if x in _SLOW else ()) for x in DAMAGES]
)
def test_damaged_newest_falls_back_and_is_set_aside(saved, damage):
  DAMAGES[damage](saved / "2")
  warnings = []
  store = Checkpoints(saved, 2, warn=warnings.append)
  wanted = abstract(state_of(0))

  with pytest.raises(ConfigError, match=r"checkpoints/2 is damaged .*: put back a copy"):
    store.restore(2, wanted)
  assert store.steps() == [1, 2]  # `restore` changes nothing

  step, state = store.restore_latest(wanted)
  assert step == 1 and same(state, state_of(1))
  assert len(warnings) == 1 and "moved to 2.damaged, going on from step 1" in warnings[0]
  assert (saved / "2.damaged").exists() and store.steps() == [1]
  for new in (2, 3):
    store.save(new, state_of(new))
  store.close()
  assert store.steps() == [2, 3] and (saved / "2.damaged").exists()
  assert same(store.restore_latest(wanted)[1], state_of(3))


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
  """Damage to files that do not matter is allowed, but no number ever comes back changed."""
  rng = random.Random(0)
  files = [p.relative_to(pristine) for p in (pristine / "2").rglob("*") if p.is_file()]
  for number, file in enumerate(files):
    folder = tmp_path / str(number)
    shutil.copytree(pristine / "2", folder / "2")
    edit(folder / file, lambda content: flip(content, rng.randrange(8 * len(content))))
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


def raise_disk_full(*_):
  raise OSError("disk full")


def test_a_save_that_fails_is_reported(tmp_path, monkeypatch):
  store = Checkpoints(tmp_path / "c", 2)
  store.save(1, state_of(1))
  store.wait()
  monkeypatch.setattr(os, "rename", raise_disk_full)
  monkeypatch.setattr(Path, "rename", raise_disk_full)
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


def test_what_older_versions_wrote_stays_readable(pristine):
  """The names on disk, the keys of the manifest and the digests do not change."""
  entries = json.loads((pristine / "2/manifest/metadata").read_text())["leaves"]
  expected = {"shape": [20, 30], "dtype": "float32", "digest": 117552225}
  assert entries["params.layers_0.w"] == expected
  assert {"step", "params", "opt_state", "manifest"} <= {p.name for p in (pristine / "2").iterdir()}
  assert int(device_digest(jnp.arange(6, dtype=jnp.float32))) == 3757635346


def test_save_tree_overwrites(tmp_path):
  path = tmp_path / "reference"
  with pytest.raises(ConfigError, match="reference does not exist .*: put back a copy"):
    restore_tree(path, abstract(state_of(0).params))
  for step in (1, 2):
    save_tree(path, state_of(step).params)
    assert same(restore_tree(path, abstract(state_of(0).params)), state_of(step).params)
  (newest,) = path.iterdir()
  largest(newest, "tree").unlink()
  with pytest.raises(
    ConfigError, match="reference/1 is damaged .*: put back a copy, or start"
  ) as e:
    restore_tree(path, abstract(state_of(0).params))
  assert "\n" not in str(e.value)
