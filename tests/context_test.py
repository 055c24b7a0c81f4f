"""Texts whose tokens are split over devices give the numbers of one device."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import learner, model
from grpo_jax.config import Learner, Mesh
from grpo_jax.parallel import sharding
from grpo_jax.parallel.mesh import make_mesh, sampling_mesh
from grpo_jax.types import Batch

CONFIG = model.ModelConfig(
  vocab_size=31, embed_dim=16, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=6, mlp_dim=24
)
P, G, S, T = 4, 3, 7, 9
LENGTHS = [[9, 1, 3], [2, 0, 5], [1, 1, 1], [0, 0, 0]]


def params_of(config):
  shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), config))
  rng = np.random.default_rng(1)
  return jax.tree.map(lambda x: jnp.asarray(rng.normal(0.1, 0.3, x.shape), jnp.float32), shapes)


def make_batch(lengths_PG=LENGTHS, tokens=T, slots=0, seed=0):
  rng = np.random.default_rng(seed)
  lengths_PG = np.asarray(lengths_PG)
  prompts, group = lengths_PG.shape
  mask = np.arange(tokens) < lengths_PG[..., None]
  return Batch(
    prompts_PS=jnp.asarray(rng.integers(0, 31, (prompts, S)), jnp.int32),
    prompt_lengths_P=jnp.asarray(rng.integers(1, S + 1, prompts), jnp.int32),
    completions_PGT=jnp.asarray(rng.integers(0, 31, (prompts, group, tokens)), jnp.int32),
    mask_PGT=jnp.asarray(mask, jnp.float32),
    temperature_P=jnp.linspace(0.5, 1.5, prompts),
    slots=slots,
  )


def mesh_of(**axes):
  sizes = dict(data=1) | axes
  return make_mesh(Mesh(**sizes), jax.devices()[: int(np.prod(list(sizes.values())))])


def on_mesh(config, mesh):
  shardings = sharding.model_shardings(config, mesh, splits_tokens=True)
  return dataclasses.replace(config, **shardings)


@functools.partial(jax.jit, static_argnums=2)
def stats_and_grads(params, batch, options):
  P, G, T = batch.completions_PGT.shape
  weights = jax.random.normal(jax.random.key(2), (2, P, G, T))

  def loss(params):
    stats = learner.batch_stats(params, None, batch, options)
    total = (weights[0] * stats.logprobs_PGT + weights[1] * stats.entropies_PGT).sum()
    return total, stats

  return jax.value_and_grad(loss, has_aux=True)(params)


def assert_same(config, batch, mesh, chunk=16, params=None, **options):
  params = params_of(config) if params is None else params
  given = dict(learner=Learner(logprob_chunk=chunk), entropy_gradient=True)
  (loss, stats), grads = stats_and_grads(
    params, batch, learner.StatsOptions(config, **given | options)
  )
  places = sharding.param_specs(params, mesh)
  options = learner.StatsOptions(on_mesh(config, mesh), **given | options)
  split = stats_and_grads(
    jax.device_put(params, places), jax.device_put(batch, sharding.batch_sharding(mesh)), options
  )
  (split_loss, split_stats), split_grads = split
  np.testing.assert_allclose(split_loss, loss, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(split_stats.logprobs_PGT, stats.logprobs_PGT, atol=1e-5)
  np.testing.assert_allclose(split_stats.entropies_PGT, stats.entropies_PGT, atol=1e-5)
  scale = max(float(np.abs(x).max()) for x in jax.tree.leaves(grads))

  def close(x, y):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5 * scale)

  jax.tree.map(close, split_grads, grads)


@pytest.mark.parametrize("slots", [0, 14])
@pytest.mark.parametrize(
  "axes",
  [dict(context=2), dict(context=4), dict(context=8), dict(data=2, context=2, tensor=2)],
  ids=str,
)
def test_log_probs_and_gradients_are_those_of_one_device(axes, slots):
  assert_same(CONFIG, make_batch(slots=slots), mesh_of(**axes))


GOLDEN = Path(__file__).parent / "golden" / "families"


@pytest.mark.parametrize("family", sorted(x.name for x in GOLDEN.iterdir()))
def test_families_give_the_numbers_of_one_device(family):
  config, params = model.load(GOLDEN / family)
  if config.vision or "delta" in config.mixers:
    pytest.skip("refused")
  assert_same(config, make_batch(slots=14), mesh_of(context=2), params=params)
