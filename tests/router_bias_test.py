"""The biases of sigmoid routers follow the loads of experts, and nothing else changes them."""

import dataclasses
import json

from experts_test import ALGO, CONFIG, make_batch
from families_run_test import FAMILIES
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_qwen import make_checkpoint, problems
from small_run import grpo_step, small_config, small_run, with_reward, with_section

from grpo_jax import learner, model
from grpo_jax.config import Learner, Optimizer
from grpo_jax.learner.optimizer import OPTIMIZERS, make_optimizer
from grpo_jax.run.checks import check_config
from grpo_jax.run.run import check_experts
from grpo_jax.settings import ConfigError
from grpo_jax.types import Routing

# Layers 1 and 3 lie in one stack, layer 2 in another.
MIXTURE = dataclasses.replace(
  CONFIG, num_layers=5, sparse_layers=(1, 2, 3, 4), windows=(0, 4, 0, 4, 0), router="sigmoid"
)


@pytest.fixture(scope="module")
def params():
  return jax.jit(model.init, static_argnums=1)(jax.random.key(0), MIXTURE)


def biases(params):
  """Those of the sparse layers, [L, X]."""
  places = model.sparse_stacks(MIXTURE)
  found = {
    place: params[name]["experts"]["balance"][i]
    for name, own in places.items()
    for i, place in enumerate(own)
  }
  return np.stack([found[place] for place in range(4)])


@pytest.mark.slow
def test_a_bias_moves_towards_an_even_load(params):
  """Two rows. The mean load is 2 in the first layer: 4, 3, 1 and 0 of two rows together."""
  zeros = jnp.zeros((2, 4, 4))
  assigned = zeros.at[0, 0].set(jnp.array([4.0, 1, 0, 0])).at[1, 0].set(jnp.array([0.0, 2, 1, 0]))
  assigned = assigned.at[:, 1].set(1).at[0, 3].set(jnp.array([0, 0, 0, 1.0]))
  tokens_BL = jnp.zeros((2, 4))
  routing = Routing(tokens_BL, assigned, zeros, tokens_BL)
  moved = learner.moved_biases(params, routing, MIXTURE, rate=0.5)
  expected = [[-0.5, -0.5, 0.5, 0.5], [0] * 4, [0] * 4, [0.5, 0.5, 0.5, -0.5]]
  np.testing.assert_array_equal(biases(moved) - biases(params), expected)
  for name in model.sparse_stacks(MIXTURE):
    moved[name]["experts"]["balance"] = params[name]["experts"]["balance"]
  jax.tree.map(np.testing.assert_array_equal, moved, params)


def update(params, optimizer, rate=0.0, micro=0, batch=None):
  objective = learner.grpo(MIXTURE, ALGO, Learner())

  def move(params, routing):
    return learner.moved_biases(params, routing, MIXTURE, rate)

  rule = learner.UpdateRule(objective, optimizer, micro, move if rate else None)
  state = learner.init_state(params, optimizer, ALGO)
  step = jax.jit(lambda state, batch: learner.train_step(state, None, None, batch, rule))
  return step(state, batch or make_batch())[0].params


@pytest.mark.slow
@pytest.mark.parametrize("micro", [0, 2])
def test_an_update_moves_biases_by_the_loads_of_its_batch(micro, params):
  """Also where it has several parts. Without a token in the loss nothing moves."""
  moved = update(params, optax.sgd(0.1), rate=0.25, micro=micro)
  options = learner.StatsOptions(MIXTURE, Learner())
  stats = jax.jit(learner.batch_stats, static_argnums=3)(params, None, make_batch(), options)
  load_LX = np.asarray(stats.routing.assigned_BLX).sum(0)
  expected = 0.25 * np.sign(load_LX.mean(1, keepdims=True) - load_LX)
  np.testing.assert_array_equal(biases(moved) - biases(params), expected)
  assert (expected != 0).any(1).all()
  if micro:
    batch = make_batch()
    empty = batch.replace(mask_PGT=jnp.zeros_like(batch.mask_PGT))
    moved = update(params, optax.sgd(0.1), rate=0.25, batch=empty)
    jax.tree.map(np.testing.assert_array_equal, moved, params)


@pytest.mark.slow
@pytest.mark.parametrize(
  "name",
  [pytest.param(x, marks=() if x == "adamw" else pytest.mark.slow) for x in OPTIMIZERS],
)
def test_no_optimizer_touches_a_bias(name):
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), MIXTURE))
  params = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), shapes)
  settings = Optimizer(name=name, learning_rate=0.1, weight_decay=0.1)
  optimizer = make_optimizer(settings, steps=3)
  state = optimizer.init(params)
  grads = jax.tree.map(jnp.ones_like, params)
  for stack in model.sparse_stacks(MIXTURE):
    grads[stack]["experts"]["balance"] *= 0
  updates, _ = jax.jit(optimizer.update)(grads, state, params)
  np.testing.assert_array_equal(biases(updates), 0)
  assert (updates["layers_1"]["experts"]["router"] != 0).all()


@pytest.mark.slow
def test_a_run_moves_the_biases_of_its_routers(tmp_path):
  """GLM-4.5 routes with them."""
  rows = list(problems(12))
  corpus = [row["question"] + row["answer"] for row in rows]
  make_checkpoint(
    tmp_path / "in",
    corpus,
    every_id_is_text=True,
    head_dim=4,
    **FAMILIES["glm4_moe"],
    family="glm4_moe",
    qkv_bias=False,
  )
  for split in ("train", "test"):
    (tmp_path / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
  config = with_section(small_config(), "model", path=str(tmp_path / "in"))
  config = with_section(
    config, "data", task="gsm8k", path=str(tmp_path), chat=True, max_prompt_tokens=96
  )
  source = "def reward(completions, **_):\n  return [float(len(set(x))) for x in completions]\n"
  config = with_reward(config, tmp_path, source)
  run = small_run(with_section(config, "learner", router_bias_rate=0.25, router_replay=True))
  step, store, _ = grpo_step(run, tmp_path / "run")
  state, _, _ = store.restore_or_init()
  for index in range(2):
    before = np.array(state.train.params["layers_1"]["experts"]["balance"])
    state, metrics, _, _ = step(state, index)
    moves = np.array(state.train.params["layers_1"]["experts"]["balance"]) - before
    assert set(moves.ravel()) <= {-0.25, 0, 0.25} and (moves != 0).any()
    assert metrics["router/differs"] == 0  # the sampler has the moved biases, too


def test_routers_of_a_softmax_have_no_such_bias():
  config = with_section(small_config(), "learner", router_bias_rate=0.001)
  with pytest.raises(ConfigError, match=r"learner\.router_bias_rate is 0\.001: .*router_aux_coef"):
    check_experts(config, CONFIG, expert_axis=1)
  check_experts(config, MIXTURE, expert_axis=1)


def test_frozen_routers_keep_their_biases():
  config = with_section(small_config(), "learner", router_bias_rate=0.001)
  config = with_section(config, "lora", rank=4)
  config = with_section(config, "model", path="folder")
  with pytest.raises(ConfigError, match=r"learner\.router_bias_rate is 0\.001: with lora\.rank"):
    check_config(config)
