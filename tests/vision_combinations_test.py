"""Images with several processes, with routing replay, and in runs that are killed at any moment."""

import dataclasses
from pathlib import Path
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from processes_test import assert_same, train
import pytest
from small_run import Collected, grpo_step, small_run, with_section
from small_vision import vision_config

from grpo_jax import model

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
  "keys",
  [
    {"model.vision": "frozen", "sampling.rows": 16},  # prompts wait for a place
    {"model.vision": "frozen", "rollout.max_staleness": 1, "algo.old_logprobs": "sampler"},
    {"model.vision": "trained"},
  ],
  ids=str,
)
def test_two_processes_give_the_numbers_of_one(keys, tmp_path):
  """Each decodes the images of its rows."""
  vision_config(tmp_path)
  keys |= {
    "steps": 3,
    "warm_start.steps": 0,
    "algo.kl_coef": 0.1,
    "data.task": "columns",
    "data.path": tmp_path,
    "data.chat": True,
    "data.max_prompt_tokens": 160,
    "eval.examples": 12,
    "model.path": tmp_path / "model",
    "reward.functions": (f"{tmp_path}/reward.py:reward",),
  }
  one, two = (train(count, tmp_path / str(count), **keys) for count in (1, 2))
  assert_same(two, one)
  steps = [row for row in one if "loss" in row]
  assert len(steps) == 3 and all(row["grad_norm"] > 0 for row in steps)
  assert steps[0]["sampler/logprob_gap_max"] < 1e-4


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_5_moe"])
@pytest.mark.parametrize("vision", ["frozen", "trained"])
def test_a_mixture_that_sees_images_learns_what_it_sampled(vision, family, tmp_path):
  """In float32, routers of the learner would choose the same experts as those of the sampler."""
  config = with_section(vision_config(tmp_path, vision, family), "learner", router_replay=True)
  step, store, _ = grpo_step(small_run(config), tmp_path / "run")
  metrics = step(store.restore_or_init()[0], 0).metrics
  assert metrics["router/differs"] == 0 and metrics["sampler/logprob_gap_max"] < 1e-4


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_tokens_of_images_have_the_experts_of_a_pass_over_the_prompt(family, tmp_path):
  config = with_section(vision_config(tmp_path, "frozen", family), "learner", router_replay=True)
  collected = Collected(config)
  run, batch = collected.run, collected.found.batch
  shape = dataclasses.replace(run.parameters.model, keeps_experts=True)
  params = run.parameters.policy(run.initial_params())
  S = batch.prompts_PS.shape[1]
  positions_PS = jnp.broadcast_to(jnp.arange(S), batch.prompts_PS.shape)

  @jax.jit
  def experts_PSY(visual):
    return model.routed_features(params, shape, batch.prompts_PS, positions_PS, visual=visual)[2]

  def differ_PS(visual):
    of_layers = (*batch.prompts_PS.shape, -1, shape.experts_per_token)
    found, expected = batch.prompt_experts_PSY, experts_PSY(visual)
    sorted_sets = (np.sort(np.asarray(x).reshape(of_layers)) for x in (found, expected))
    return np.not_equal(*sorted_sets).any((2, 3)) & is_prompt_PS

  is_prompt_PS = np.arange(S) < np.asarray(batch.prompt_lengths_P)[:, None]
  assert not differ_PS(batch.visual).any()
  # The test would see if tokens of images were taken for text.
  assert differ_PS(batch.visual.replace(seen_PS=jnp.full_like(batch.visual.seen_PS, -1))).any()


DRAWN_AHEAD = ["rollout.max_staleness=1", "algo.old_logprobs=sampler"]


@pytest.mark.parametrize("further", [[], DRAWN_AHEAD, ["model.vision=trained"]])
def test_a_run_that_is_killed_at_random_moments_ends_with_the_same_bits(further):
  script = ROOT / "experiments/kill.py"
  settings = [word for one in further for word in ("--set", one)]
  command = [sys.executable, script, "--kills=3", "--images", *settings]
  found = subprocess.run(command, capture_output=True, text=True, timeout=1500)
  print(found.stdout)
  assert found.returncode == 0, found.stderr
