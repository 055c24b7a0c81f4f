"""Devices along `data` add up gradients of their own prompts, and exchange the sums once."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_batch
from small_run import small_config, with_section

from grpo_jax import learner, model
from grpo_jax.algo import metrics as metrics_lib
from grpo_jax.algo.settings import Algo
from grpo_jax.around.planning.cost import count
from grpo_jax.around.planning.phases import compiled
from grpo_jax.config import Learner, Mesh
from grpo_jax.learner.by_slots import sizes_of, with_places
from grpo_jax.learner.packed import PackedSegment
from grpo_jax.learner.train_step import Given, add_gradients, begin, no_gradients
from grpo_jax.model.config import DeltaShape
from grpo_jax.parallel import sharding
from grpo_jax.parallel.mesh import make_mesh
from grpo_jax.run.run import Run
from grpo_jax.run.stages import programs

SGD = optax.sgd(1.0)
T = 9
DENSE = model.ModelConfig(
  vocab_size=31, embed_dim=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6, mlp_dim=24
)
CONFIGS = {
  "dense": DENSE,
  "windows": dataclasses.replace(DENSE, windows=(3, 0), attention_sinks=True),
  "mixture": dataclasses.replace(
    DENSE, num_experts=6, experts_per_token=2, expert_dim=12, sparse_layers=(0, 1)
  ),
  "delta": dataclasses.replace(
    DENSE,
    mixers=("delta", "attention"),
    delta=DeltaShape(key_heads=2, value_heads=4, key_dim=5, value_dim=3, width=4),
  ),
}
ALGO = Algo(kl_coef=0.1, entropy_coef=0.01, correction="truncate")


def slow(*values):
  return pytest.param(*values, marks=pytest.mark.slow)


def mesh_of(**axes):
  sizes = dict(data=1) | axes
  return make_mesh(Mesh(**sizes), jax.devices()[: int(np.prod(list(sizes.values())))])


def make_batch():
  """Eight groups of unequal lengths. Three of them have no token."""
  lengths_PG = [
    [9, 1, 3],
    [2, 0, 5],
    [1, 1, 1],
    [0, 0, 0],
    [4, 4, 9],
    [0, 0, 0],
    [0, 0, 0],
    [7, 2, 0],
  ]
  batch = small_batch.make_batch(lengths_PG, 7, T)
  rng = np.random.default_rng(5)
  draws = jnp.asarray(rng.normal(size=(3, *batch.mask_PGT.shape)), jnp.float32)
  return batch.replace(
    advantages_PGT=draws[0],
    sampler_logprobs_PGT=-3 + 0.3 * draws[1],
    ref_logprobs_PGT=-3 + 0.3 * draws[2],
  )


def updated(config, params, batch, mesh=None, micro=2):
  """Parameters and metrics after an update on a mesh, or on one device."""
  shape = config
  if mesh is not None:
    shape = dataclasses.replace(
      config, **sharding.model_shardings(config, mesh, splits_tokens=True)
    )
    params = jax.device_put(params, sharding.param_specs(params, mesh))
    batch = jax.device_put(batch, sharding.batch_sharding(mesh))
  options = Learner(logprob_chunk=16, router_aux_coef=0.1 if config.num_experts else 0.0)
  objective = learner.grpo(shape, ALGO, options)
  rule = learner.UpdateRule(objective, SGD, micro, mesh=mesh)
  state = learner.init_state(params, SGD, ALGO)
  step = jax.jit(functools.partial(learner.train_step, rule=rule))
  state, measured = step(state, None, None, batch)
  return state.params, metrics_lib.reduced(measured)


@pytest.mark.parametrize(
  "name, axes",
  [
    ("dense", dict(data=2)),
    ("mixture", dict(data=2, expert=2)),
    slow("dense", dict(data=4)),
    slow("dense", dict(data=2, fsdp=2, tensor=2)),
    slow("dense", dict(data=2, fsdp=2, context=2)),
    slow("windows", dict(data=2, context=4)),
    slow("windows", dict(data=2, tensor=2)),
    slow("mixture", dict(data=2, fsdp=2)),
    slow("mixture", dict(data=2, tensor=2)),
    slow("mixture", dict(data=2, expert=2, context=2)),
    slow("delta", dict(data=2, tensor=2)),
    slow("delta", dict(data=2, context=2)),
  ],
  ids=str,
)
def test_an_update_is_that_of_one_device(name, axes):
  config, batch, mesh = CONFIGS[name], make_batch(), mesh_of(**axes)
  params = small_batch.params_of(config, mean=0.1)
  micro = int(np.prod([axes.get(axis, 1) for axis in sharding.ROW_AXES]))
  wanted, expected = updated(config, params, batch)
  found, measured = updated(config, params, batch, mesh, micro=micro)
  assert measured.keys() == expected.keys()
  for metric, value in expected.items():
    if metric == "perf/padding":  # it counts the slots of the micro-batches that are computed
      continue
    assert measured[metric] == pytest.approx(value, rel=1e-4, abs=1e-5, nan_ok=True), metric
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), found, wanted)


VISION = Path(__file__).parent / "golden" / "vision"


@pytest.mark.slow
def test_a_trained_tower_has_the_gradient_of_one_device():
  expected = np.load(VISION / "gemma3" / "expected.npz")
  golden = model.load_config(VISION / "gemma3", vision=True)
  tower = dataclasses.replace(golden.vision, trained=True, num_layers=1)
  config = dataclasses.replace(DENSE, vocab_size=golden.vocab_size, vision=tower)
  images = small_batch.images_of(expected)
  batch = make_batch()
  batch = jax.tree.map(lambda x: x[:4], batch).replace(
    prompts_PS=twice(expected["tokens"])[:4],
    prompt_lengths_P=twice(expected["lengths"])[:4].astype(jnp.int32),
    images=jax.tree.map(lambda x: twice(x)[:4], images),
  )
  params = small_batch.params_of(config, mean=0.1)
  wanted, _ = updated(config, params, batch)
  found, _ = updated(config, params, batch, mesh_of(data=2))
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), found, wanted)


def twice(x):
  return jnp.concatenate([jnp.asarray(x)] * 2)


def test_metrics_of_devices_are_merged_as_those_of_micro_batches():
  rng = np.random.default_rng(0)
  x, mask = jnp.asarray(rng.normal(size=(4, 7)), jnp.float32), jnp.asarray(rng.random((4, 7)) < 0.6)

  def measured(x, mask):
    mask = mask.astype(jnp.float32)
    return {
      "mean": metrics_lib.mean(x, mask),
      "largest": metrics_lib.largest(x, mask),
      "smallest": metrics_lib.smallest(x, mask),
      "sum": metrics_lib.summed(x.sum()),
      "effective": metrics_lib.effective(jnp.exp(x), mask),
      "weighted": metrics_lib.weighted(x[0, 0], mask.sum()),
    }

  parts = [measured(x[i : i + 1], mask[i : i + 1]) for i in range(4)]
  wanted = metrics_lib.reduced(functools.reduce(metrics_lib.merge, parts))
  together = jax.tree.map(lambda *x: jnp.stack(x), *parts)
  found = metrics_lib.reduced(metrics_lib.merge_all(together))
  assert found == pytest.approx(wanted, rel=1e-6)


def test_segments_add_up():
  """Each device adds to its own sums of earlier segments, whose completions are packed."""
  config, batch, mesh = DENSE, make_batch(), mesh_of(data=2)
  params = small_batch.params_of(config, mean=0.1)
  objective = learner.grpo(config, ALGO, Learner(logprob_chunk=16))

  @functools.partial(jax.jit, static_argnums=(2, 3))
  def sums_of(params, batch, mesh, ends):
    rule = learner.UpdateRule(objective, SGD, 2, mesh=mesh)
    begun = begin(learner.init_state(params, SGD, ALGO).coefs, batch, rule)
    given = Given(params, None, None, begun)
    sums, first = no_gradients(given, rule), 0
    for end in ends:
      sums = add_gradients(given, sums, PackedSegment(24, first, end), rule)
      first = end
    return sums

  wanted = sums_of(params, batch, None, (4,))
  found = sums_of(params, batch, mesh, (1, 4))
  ours, theirs = (jax.tree.leaves((sums.grads, sums.loss)) for sums in (found, wanted))
  for x, y in zip(ours, theirs, strict=True):
    assert x.shape == (2, *y.shape)
    np.testing.assert_allclose(x.sum(0), y, rtol=1e-4, atol=1e-5)
  measured = metrics_lib.reduced(metrics_lib.merge_all(found.report.metrics))
  expected = metrics_lib.reduced(wanted.report.metrics)
  assert measured == pytest.approx(expected, rel=1e-4, abs=1e-5)


def sent_in_segment(run, arguments):
  """The bytes that a device sends in the program of packed micro-batches."""
  update = run.programs.update
  state, base, reference, batch = arguments
  begun = with_places(update._begin.eval_shape(state.coefs, batch, None), update._begun_places)
  given = Given(state.params, base, reference, begun)
  sums = with_places(update._zeros.eval_shape(given), update._sums_places)
  lowered = update._add.lower(given, sums, 0, 4, slots=sizes_of(batch, "cpu")[0])
  return count(lowered.compile().as_text()).whole.link_bytes


@pytest.mark.parametrize("axes", [dict(data=4), slow(dict(data=2, fsdp=2))], ids=str)
def test_gradients_travel_over_data_once(axes):
  """However many micro-batches there are. Along fsdp they must travel in each."""
  mesh = dict(data=1) | axes
  sent, in_segment = {}, {}
  for micro in (4, 8):
    config = with_section(small_config(), "mesh", **mesh)
    config = with_section(config, "batch", prompts=16, micro_batch=micro)
    run = Run(with_section(config, "eval", every=0), devices=jax.devices()[:4])
    (update,) = [program for program in programs(run) if program.name == "update"]
    sent[micro] = compiled(update).counted.whole.link_bytes
    (stage,) = update.stages
    in_segment[micro] = sent_in_segment(run, stage.arguments)
  weights = 4 * sum(x.size for x in jax.tree.leaves(run.parameters.abstract_policy))
  if mesh.get("fsdp", 1) == 1:
    assert weights < sent[4] < 1.05 * sent[8]
    assert max(in_segment.values()) < 0.05 * weights  # the update ends with the exchange
  else:  # weights and gradients of a half, in two more micro-batches
    assert sent[4] - sent[8] < 2.5 * weights
