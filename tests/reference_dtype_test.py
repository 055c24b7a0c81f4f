"""A reference in bfloat16: where its numbers are those of float32, where it lies, and limits."""

import dataclasses

import jax
import jax.numpy as jnp
from lora_run_test import make_checkpoint
import numpy as np
import pytest
from small_run import (
  batch_of,
  grpo_step,
  random_completions,
  small_config,
  small_run,
  with_reward,
  with_section,
)

from grpo_jax.batches.collect import Collector
from grpo_jax.run.checks import check_config
from grpo_jax.scoring.scorers import Scorers
from grpo_jax.settings import ConfigError
from grpo_jax.storage.checkpoint import Checkpoints
from grpo_jax.training.loop import run_steps
from grpo_jax.training.state import StateStore

CODES = "def reward(completions, **_):\n  return [sum(map(ord, c)) / 100 for c in completions]\n"


def config_with(dtype, reference_dtype, **algo):
  config = small_config(**{"kl_coef": 0.5} | algo)
  return with_section(config, "model", dtype=dtype, reference_dtype=reference_dtype)


def dtypes(params):
  """Those of the matrices and those of the vectors."""
  leaves = jax.tree_util.tree_leaves_with_path(params)
  return [
    {str(x.dtype) for path, x in leaves if is_matrix(path, x) == wanted} for wanted in (True, False)
  ]


def is_matrix(path, x):
  """Without the axis of stacked layers."""
  return x.ndim - path[0].key.startswith("layers_") > 1


def assert_same(found, expected):
  jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("kl", ["k3", "full"])
def test_where_computation_is_in_bfloat16_a_bfloat16_reference_changes_no_bit(kl, tmp_path):
  """Two steps with both references, on a policy that has left them."""
  results = []
  for reference_dtype in ("float32", "bfloat16"):
    config = config_with("bfloat16", reference_dtype, kl=kl)
    run = small_run(with_reward(dataclasses.replace(config, steps=2), tmp_path, CODES))
    step, store, _ = grpo_step(run, tmp_path / reference_dtype, Collector(run, Scorers(run)))
    state, _, _ = store.restore_or_init()
    assert dtypes(state.reference) == [{reference_dtype}, {"float32"}]
    assert dtypes(state.train.params) == [{"float32"}, {"float32"}]
    rows = []
    for index in range(2):
      state, metrics, _, _ = step(state, index)
      rows.append({k: x for k, x in metrics.items() if not k.startswith(("time/", "perf/"))})
    results.append((rows, state.train))
  (rows, state), (expected_rows, expected_state) = results
  assert rows == expected_rows and rows[1]["kl"] > 1e-6
  assert_same(state, expected_state)


@pytest.mark.slow
def test_where_computation_is_in_float32_the_first_kl_is_that_of_the_rounded_weights():
  """It is 0 without rounding. With it, it is small beside the KL of a policy that has moved."""
  run = small_run(config_with("float32", "bfloat16"))
  params = run.initial_params()
  batch = batch_of(run, random_completions())
  reference = run.parameters.reference(params)
  d_PGT = run.programs.logprobs(reference, batch) - run.programs.logprobs(params, batch)
  k3_PGT = jnp.exp(d_PGT) - d_PGT - 1
  assert 0 < float(k3_PGT.max()) < 1e-4


def test_a_copy_is_as_large_as_its_dtype_says_and_shares_no_memory():
  for reference_dtype, share in (("bfloat16", 0.5), ("float32", 1.0)):
    run = small_run(config_with("float32", reference_dtype))
    params = run.initial_params()
    reference = run.parameters.reference(params)
    pairs = zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(reference))
    matrices = [(x, y) for (path, x), y in pairs if is_matrix(path, x)]
    assert sum(y.nbytes for _, y in matrices) == share * sum(x.nbytes for x, _ in matrices)
    jax.tree.map(lambda x: x.delete(), params)  # as an update does, which takes the arrays over
    assert all(np.isfinite(np.asarray(y, np.float32)).all() for y in jax.tree.leaves(reference))


@pytest.mark.slow
def test_the_reference_made_again_from_the_checkpoint_is_the_first_one(tmp_path, monkeypatch):
  """No float32 copy of the checkpoint is made on the way."""
  folder = make_checkpoint(tmp_path / "hf")
  config = with_section(config_with("float32", "bfloat16"), "model", path=folder)
  run = small_run(config)
  expected = run.parameters.reference(run.initial_params())
  monkeypatch.setattr(run.parameters, "initial", None)
  found = run.initial_reference()
  assert dtypes(found) == [{"bfloat16"}, {"float32"}]
  assert_same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
  "warm_steps, algo",
  [
    (0, {}),
    (1, {}),
    (0, dict(ref_sync_steps=1, ref_mixup=1.0)),
  ],
)
def test_a_resumed_run_finds_the_same_reference(warm_steps, algo, tmp_path):
  """Frozen: made again, or from the folder `reference`. Moving: from the checkpoint."""
  config = with_reward(config_with("float32", "bfloat16", **algo), tmp_path, CODES)
  config = with_section(config, "warm_start", steps=warm_steps, batch=4)
  config = with_section(config, "sampling", max_tokens=16)
  state = run_steps(config, tmp_path / "run").state
  assert dtypes(state.reference) == [{"bfloat16"}, {"float32"}]
  run = small_run(config)
  checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep=1)
  store = StateStore(run, tmp_path / "run", checkpoints, {"num_tokens": np.int64(0)})
  found, step, _ = store.restore_or_init()
  assert step == warm_steps + 1
  assert dtypes(found.reference) == [{"bfloat16"}, {"float32"}]
  assert_same(found.reference, state.reference)
  if algo:
    assert_same(found.reference, run.parameters.reference(found.train.params))


@pytest.mark.slow
def test_adapters_as_the_reference_stay_float32(tmp_path):
  """They are small. The weights under them are in lora.base_dtype."""
  algo = dict(ref_sync_steps=1, ref_mixup=1.0)
  path = make_checkpoint(tmp_path / "hf")
  config = with_section(config_with("float32", "bfloat16", **algo), "model", path=path)
  run = small_run(with_section(config, "lora", rank=2))
  assert dtypes(run.parameters.reference(run.initial_params())) == [{"float32"}, set()]
  assert {x.dtype for x in jax.tree.leaves(run.parameters.abstract_reference)} == {
    jnp.dtype("float32")
  }


def test_a_reference_that_moves_gradually_is_refused():
  with pytest.raises(ConfigError, match=r"^config key model\.reference_dtype is 'bfloat16': a ref"):
    check_config(config_with("bfloat16", "bfloat16", ref_sync_steps=5, ref_mixup=0.6))
  check_config(config_with("bfloat16", "bfloat16", ref_sync_steps=5, ref_mixup=1.0))
  check_config(config_with("bfloat16", "bfloat16", ref_mixup=0.6))
  check_config(config_with("bfloat16", "float32", ref_sync_steps=5, ref_mixup=0.6))
