"""Runs whose prompts have images: a folder in, GRPO steps, a folder out."""

from flax.traverse_util import flatten_dict
import jax
import numpy as np
import pytest
from small_run import grpo_step, small_run
from small_vision import FAMILIES, vision_config

from grpo_jax import model


def take_steps(config, folder, count=2):
  """(run, state, metrics of each step) after so many steps."""
  run = small_run(config)
  step, store, _ = grpo_step(run, folder / "run")
  state, _, _ = store.restore_or_init()
  measured = []
  for index in range(count):
    state, metrics, _, _ = step(state, index)
    measured.append(metrics)
  return run, state, measured


@pytest.mark.parametrize("vision", ["frozen", "trained"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_in_two_steps_a_folder_out(family, vision, tmp_path):
  config = vision_config(tmp_path, vision, family)
  run, state, measured = take_steps(config, tmp_path)
  for metrics in measured:
    assert metrics["sampler/logprob_gap_max"] < 1e-4 and metrics["grad_norm"] > 0
  shape, before = model.load(tmp_path / "model", vision=True)
  learned = jax.device_get(run.parameters.policy(state.train.params))
  model.save(tmp_path / "out", shape, learned)
  found, after = model.load(tmp_path / "out", vision=True)
  assert found == shape
  jax.tree.map(np.testing.assert_array_equal, after, learned)
  before, after = flatten_dict(before, sep="/"), flatten_dict(after, sep="/")
  still = {name for name, x in before.items() if (x == after[name]).all()}
  tower = {name for name in before if name.startswith("vision/")}
  assert tower and still == (tower if vision == "frozen" else set())
