"""Numpy arrays of the host in checkpoints: counters, curriculum state and the like."""

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.settings import ConfigError
from grpo_jax.storage.checkpoint import Checkpoints
from grpo_jax.storage.manifest import flatten, nested


@flax.struct.dataclass
class State:
  step: jax.Array
  params: dict
  host: dict | None


HOST = {
  "completions": np.array(2**40),
  "curriculum": {
    "seeds": np.array([2**63 + 1, 0], np.uint64),
    "solved": np.array([[True, False], [False, True]]),
    "weights": np.linspace(0, 1, 1000),
  },
  "empty": np.zeros((0, 3), np.int16),
  "half": np.arange(5).astype(jnp.bfloat16),
  "nan": np.array([np.nan, -0.0]),
}


def state_of(step, host=HOST):
  weights = jnp.arange(600, dtype=jnp.float32).reshape(20, 30) + step
  return State(jnp.int32(step), {"layer": {"w": weights}}, host)


def abstract(state):
  """Shapes for the devices' arrays; the host's leaves as they are."""

  def abstract_leaf(leaf):
    if isinstance(leaf, jax.Array):
      return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    return leaf

  return jax.tree.map(abstract_leaf, state)


def save(directory, *states):
  store = Checkpoints(directory, keep=9)
  for state in states:
    store.save(int(state.step), state)
  store.close()


def assert_same_host(found, expected):
  found, expected = flatten(found), flatten(expected)
  assert found.keys() == expected.keys()
  for name, array in expected.items():
    assert type(found[name]) is np.ndarray and found[name].dtype == array.dtype
    assert found[name].shape == array.shape and found[name].tobytes() == array.tobytes()


@pytest.mark.parametrize("optional", [(), ("host",)])
def test_arrays_of_the_host_come_back_bit_identical(tmp_path, optional):
  save(tmp_path, state_of(3))
  step, restored = Checkpoints(tmp_path, 1).restore_latest(abstract(state_of(0)), optional)
  assert step == 3 and isinstance(restored, State)
  assert_same_host(restored.host, HOST)
  assert isinstance(restored.params["layer"]["w"], jax.Array)
  np.testing.assert_array_equal(restored.params["layer"]["w"], state_of(3).params["layer"]["w"])


def test_python_numbers_come_back_as_numpy_arrays(tmp_path):
  save(tmp_path, state_of(1, {"count": 2**40, "loss": 0.1, "scalar": np.float64(0.2)}))
  _, restored = Checkpoints(tmp_path, 1).restore_latest(abstract(state_of(0)), ("host",))
  expected = {"count": np.array(2**40), "loss": np.array(0.1), "scalar": np.array(0.2)}
  assert_same_host(restored.host, expected)


def test_save_does_not_see_later_changes_of_arrays_of_the_host(tmp_path):
  weights = np.zeros(1_000_000)
  store = Checkpoints(tmp_path, keep=1)
  store.save(1, state_of(1, {"weights": weights}))
  weights[:] = 1
  _, restored = store.restore_latest(abstract(state_of(0)), optional=("host",))
  assert not restored.host["weights"].any()


@pytest.mark.parametrize("default", [None, {"count": np.array(7)}])
def test_a_checkpoint_without_the_optional_group_gives_the_default(tmp_path, default):
  save(tmp_path, state_of(2, host=None))
  wanted = abstract(state_of(0, default))
  step, restored = Checkpoints(tmp_path, 1).restore_latest(wanted, optional=("host",))
  assert step == 2 and restored.host == default


def test_a_checkpoint_without_the_group_is_refused_unless_it_is_optional(tmp_path):
  save(tmp_path, state_of(2, host=None))
  wanted = abstract(state_of(0, {"count": np.array(7)}))
  with pytest.raises(ConfigError, match="nothing for host.count where this config needs int64"):
    Checkpoints(tmp_path, 1).restore_latest(wanted)


def test_leaves_of_the_optional_group_may_differ(tmp_path):
  saved = {"old": np.arange(3), "both": np.array([1.0, 2.0])}
  save(tmp_path, state_of(1, saved))
  wanted = {"new": np.array(0), "both": np.array([0], np.int32)}
  _, restored = Checkpoints(tmp_path, 1).restore_latest(abstract(state_of(0, wanted)), ("host",))
  assert_same_host(restored.host, saved)


def test_other_groups_are_still_compared(tmp_path):
  save(tmp_path, state_of(1))
  other = state_of(0).replace(params={"layer": {"w": jnp.zeros((20, 31))}})
  message = r"float32\[20, 30\] for params.layer.w where this config needs float32\[20, 31\]"
  with pytest.raises(ConfigError, match=message):
    Checkpoints(tmp_path, 1).restore_latest(abstract(other), optional=("host",))


def test_the_optional_group_may_be_left_out(tmp_path):
  save(tmp_path, state_of(1))
  wanted = abstract({"step": jnp.int32(0), "params": state_of(0).params})
  store = Checkpoints(tmp_path, 1)
  _, restored = store.restore_latest(wanted, optional=("host",))
  assert restored.keys() == {"step", "params"}
  with pytest.raises(ConfigError, match="host.completions where this config needs nothing"):
    store.restore_latest(wanted)
  step, params = store.restore_params(wanted["params"])
  assert step == 1
  np.testing.assert_array_equal(params["layer"]["w"], state_of(1).params["layer"]["w"])


def largest_file(folder):
  return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def test_damaged_arrays_of_the_host_are_noticed(tmp_path):
  """A file of the same array with other numbers: only the digest can tell."""
  save(tmp_path / "run", state_of(1), state_of(2))
  other = {**HOST, "curriculum": {**HOST["curriculum"], "weights": np.linspace(0, 2, 1000)}}
  save(tmp_path / "other", state_of(2, other))
  damaged = tmp_path / "run" / "2" / "host"
  damaged.rename(tmp_path / "intact")
  (tmp_path / "other" / "2" / "host").rename(damaged)
  warnings = []
  store = Checkpoints(tmp_path / "run", 9, warn=warnings.append)
  step, restored = store.restore_latest(abstract(state_of(0)), optional=("host",))
  assert step == 1 and store.steps() == [1]
  assert_same_host(restored.host, HOST)
  assert "host.curriculum.weights is not what was saved" in warnings[0]


def test_a_truncated_file_of_the_host_is_noticed(tmp_path):
  save(tmp_path, state_of(1), state_of(2))
  file = largest_file(tmp_path / "2" / "host")
  file.write_bytes(file.read_bytes()[:20])
  store = Checkpoints(tmp_path, 9, warn=lambda text: None)
  assert store.restore_latest(abstract(state_of(0)), optional=("host",))[0] == 1


def test_keys_with_dots_are_refused(tmp_path):
  with pytest.raises(ValueError, match="may not contain dots: .*'algo.kl'"):
    save(tmp_path, state_of(1, {"algo.kl": np.array(0)}))


def test_nested_is_the_inverse_of_flatten():
  assert nested(flatten(HOST)).keys() == HOST.keys()
  assert nested(flatten({"a": {"b": 1, "c": {"d": 2}}, "e": 3})) == {
    "a": {"b": 1, "c": {"d": 2}},
    "e": 3,
  }
