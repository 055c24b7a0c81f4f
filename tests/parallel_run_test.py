"""Every mesh of eight devices gives the numbers of one device. Nothing is traced twice.

And the compiled functions lower for TPUs and GPUs.
"""

import contextlib
import dataclasses
import itertools
import re
from typing import Any, NamedTuple

import jax
from jax import export
import jax.numpy as jnp
import numpy as np
import pytest
import qwix

from configs import default
from grpo_jax import model
from grpo_jax.algo.metrics import reduced
from grpo_jax.config import from_dict
from grpo_jax.data import loader
from grpo_jax.model.config import ModelConfig
from grpo_jax.rollouts.complete import make_rollout
from grpo_jax.run.run import Run
from grpo_jax.sampler.flight import NewRows, Prompts
from grpo_jax.sampler.rows import Chunk
from grpo_jax.sampler.sampling import settings_of
from grpo_jax.sampler.seats import Grid
from grpo_jax.sampler.stream import by_row
from grpo_jax.types import Batch, Completions, Rewards

ONE, OFTEN = (1, 1, 1), [(2, 2, 2)]


def meshes_of_eight(axes):
  """All meshes of eight devices with so many axes. All but those in OFTEN are slow."""
  return [
    pytest.param(mesh, marks=() if mesh in OFTEN else pytest.mark.slow)
    for mesh in itertools.product((1, 2, 4, 8), repeat=axes)
    if np.prod(mesh) == 8
  ]


EIGHT, MIXTURES = meshes_of_eight(3), meshes_of_eight(4)
FEW_TOKENS = dict(max_tokens=16)
AXES = ("data", "fsdp", "tensor", "expert", "context")  # of tuples, which may lack the last


def config(mesh, **sections):
  c = default.get_config()
  c.model.update(embed_dim=32, num_layers=2, num_heads=8, num_kv_heads=8, head_dim=4, mlp_dim=96)
  c.batch.update(prompts=16, group_size=4, micro_batch=8)
  c.warm_start.batch = c.eval.batch = 8
  c.data.max_prompt_tokens, c.sampling.max_tokens = 12, 40
  c.optimizer.learning_rate = 1e-2
  c.mesh.update(dict(zip(AXES, mesh)))
  for section, values in sections.items():
    c[section].update(values)
  return from_dict(c.to_dict())


def make_run(mesh, **sections):
  c = config(mesh, **sections)
  return Run(c, devices=jax.devices()[: np.prod(mesh)])


@contextlib.contextmanager
def traces():
  """Yields a list that gets an entry for each function that JAX traces."""
  found = []

  def listen(event, seconds, **_):
    if event == "/jax/core/compile/jaxpr_trace_duration":
      found.append(event)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield found
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)


class Trained(NamedTuple):
  """What some steps give: sampled tokens and metrics of each, and the parameters at the end."""

  tokens: list
  metrics: list
  params: Any

  @property
  def largest_gap(self):
    """Between the log-probs of sampler and learner, over all steps."""
    return max(metrics["sampler/logprob_gap_max"] for metrics in self.metrics)


def train_steps(run, steps=2, idle=()):
  """Steps of sampling, reference and update. Only the first one traces.

  Rewards are a function of the tokens. Those of the groups of these numbers are all 0.
  """
  programs, hosts, parameters = run.programs, run.hosts, run.parameters
  prompts = run.prompts("train")
  state = programs.init_state(run.initial_params())
  reference = parameters.base if parameters.model.lora else run.initial_params()
  rollout = make_rollout(run, run.config.batch.group_size)
  tokens, metrics = [], []
  for step in range(steps):
    with traces() as traced:
      batch = loader.prompt_batch(prompts, loader.step_indices(0, step, 16, len(prompts)))
      key = jax.random.fold_in(run.key("sample"), step)
      completions = rollout(parameters.for_sampling(state.params), batch, key).completions
      scores_PG = (completions.tokens_PGT % 3 == 1).sum(-1).astype(np.float32)
      scores_PG[list(idle)] = 0
      ones_P = np.ones(16, np.float32)
      arrays = (completions, batch.prompts_PS, batch.prompt_lengths_P, ones_P, ones_P)
      learned = programs.to_batch(*hosts.put(arrays))
      learned = learned.replace(ref_logprobs_PGT=programs.logprobs(reference, learned))
      rewards = hosts.put(Rewards(scores_PGJ=scores_PG[..., None], weights=(1.0,)))
      learned, _ = programs.with_advantages(learned, rewards, state.coefs.kl)
      state, measured = programs.update(state, parameters.base, reference, learned)
      tokens.append(completions.tokens_PGT)
      metrics.append(reduced(measured))
    assert bool(traced) == (step == 0)
  return Trained(tokens, metrics, jax.device_get(state.params))


def assert_same_numbers(ours, theirs, rel=1e-5, more=()):
  """The same samples, metrics up to rounding, and parameters, where Adam magnifies rounding.

  So later metrics may differ by more than those of the first update.
  """
  np.testing.assert_array_equal(ours.tokens, theirs.tokens)
  for number, (mine, wanted) in enumerate(zip(ours.metrics, theirs.metrics, strict=True)):
    bound = rel if number == 0 else 10 * rel
    for name in ("loss", "kl", "entropy", "grad_norm", *more):
      assert mine[name] == pytest.approx(wanted[name], abs=bound, rel=bound), name
  assert max(ours.largest_gap, theirs.largest_gap) < 1e-4
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), ours.params, theirs.params)


def abstract_batch(run, place=None):
  """The shapes of what `update` reads. `place` is their sharding."""

  def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=place)

  values = shape(16, 4, 40)
  return Batch(
    prompts_PS=shape(16, 12, dtype=jnp.int32),
    prompt_lengths_P=shape(16, dtype=jnp.int32),
    completions_PGT=shape(16, 4, 40, dtype=jnp.int32),
    mask_PGT=values,
    temperature_P=shape(16),
    advantages_PGT=values,
    sampler_logprobs_PGT=values,
    behavior_logprobs_PGT=values,
    ref_logprobs_PGT=values,
  )


@pytest.fixture(scope="module")
def alone():
  return train_steps(make_run(ONE, sampling=FEW_TOKENS))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", EIGHT, ids=str)
def test_eight_devices_give_the_numbers_of_one(mesh, alone):
  """Nothing is traced twice, though lengths and keys differ. One mesh samples on another one."""
  tensor = 4 if mesh == (2, 2, 2) else 0
  run = make_run(mesh, sampling=FEW_TOKENS | dict(tensor=tensor))
  assert_same_numbers(train_steps(run), alone)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 1, 1, 1, 2), (1, 2, 2, 1, 2), (1, 1, 1, 1, 8)], ids=str)
def test_texts_that_are_split_give_the_numbers_of_one_device(mesh, alone):
  run = make_run(mesh, sampling=FEW_TOKENS)
  assert run.parameters.model.context == mesh[-1]
  assert "context" not in run.parameters.sampling.mesh.shape
  assert_same_numbers(train_steps(run), alone)


@pytest.mark.slow
@pytest.mark.parametrize(
  "mesh, sampling",
  [
    ((1, 4, 2), dict(context=2)),
    ((4, 2, 1), dict(context=4, tensor=2)),
    ((1, 2, 2, 1, 2), dict(context=4)),
  ],
  ids=str,
)
def test_caches_that_are_split_give_the_numbers_of_one_device(mesh, sampling, alone):
  run = make_run(mesh, sampling=FEW_TOKENS | sampling)
  assert run.parameters.sampling.mesh.shape["slots"] == sampling["context"]
  assert_same_numbers(train_steps(run), alone)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", EIGHT, ids=str)
def test_idle_groups_are_left_out_on_every_mesh(mesh):
  """Nine of 16 groups are idle, so one of the two micro-batches is not computed."""
  idle, without_kl = range(0, 9), dict(kl_coef=0.0)
  ours = train_steps(make_run(mesh, algo=without_kl), idle=idle)
  alone = train_steps(make_run(ONE, algo=without_kl), idle=idle)
  np.testing.assert_array_equal(ours.tokens, alone.tokens)
  for mine, wanted in zip(ours.metrics, alone.metrics, strict=True):
    assert wanted["update/token_share"] < 0.6
    for name in ("loss", "entropy", "grad_norm", "update/token_share", "perf/padding"):
      assert mine[name] == pytest.approx(wanted[name], abs=1e-5, rel=1e-5), name


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
  """Sections of a config with four experts, two for each token, and the numbers of one device."""
  tokens, path = make_run(ONE).tokenizer, str(tmp_path_factory.mktemp("mixture") / "hf")
  shape = ModelConfig(
    vocab_size=tokens.vocab_size,
    embed_dim=32,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=96,
    family="qwen3_moe",
    qkv_bias=False,
    qk_norm="head",
    num_experts=4,
    experts_per_token=2,
    expert_dim=24,
    normalise_shares=True,
    sparse_layers=(0,),
  )
  model.save(path, shape, jax.jit(model.init, static_argnums=1)(jax.random.key(0), shape))
  tokens.save(path)
  sections = dict(
    model=dict(path=path), sampling=dict(max_tokens=12), learner=dict(router_aux_coef=0.1)
  )
  return sections, train_steps(make_run(ONE, **sections))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MIXTURES, ids=str)
def test_experts_on_eight_devices_give_the_numbers_of_one(mesh, mixture):
  """The four experts are split where the size of their axis divides them.

  One mesh samples on another one, whose `tensor` divides the queries, but not the keys.
  """
  sections, alone = mixture
  routers = [name for name in alone.metrics[0] if name.startswith("router/")]
  tensor = 4 if mesh == (1, 2, 2, 2) else 0
  sampling = sections["sampling"] | dict(tensor=tensor)
  ours = train_steps(make_run(mesh, **sections | dict(sampling=sampling)))
  assert_same_numbers(ours, alone, more=routers)
  assert all(metrics["router/aux_loss"] > 1 for metrics in ours.metrics)


@pytest.mark.slow
def test_sampling_weights_have_a_mesh_and_dtype_of_their_own():
  run = make_run((2, 2, 2), sampling=dict(tensor=4, dtype="bfloat16"))
  params = run.initial_params()
  converted = run.parameters.for_sampling(params)
  trained, sampled = (tree["layers_0"]["mlp"]["gate"]["kernel"] for tree in (params, converted))
  assert (trained.dtype, sampled.dtype) == (jnp.float32, jnp.bfloat16)
  assert trained.addressable_shards[0].data.shape == (2, 16, 48)
  assert sampled.addressable_shards[0].data.shape == (1, 32, 24)  # unrolled on a CPU
  result = train_steps(run, steps=1)
  assert 1e-6 < result.largest_gap < 0.3 and np.isfinite(result.metrics[0]["loss"])


@pytest.mark.slow
def test_quantised_sampling_weights_and_cache_are_near_to_the_trained_ones():
  """On eight devices. The trained weights stay float32, and the update says how far they are."""
  quantised = dict(tensor=4, weights_dtype="int8", cache_dtype="int8")
  run = make_run((2, 2, 2), sampling=quantised)
  params = run.initial_params()
  converted = run.parameters.for_sampling(params)
  trained, sampled = (tree["layers_0"]["mlp"]["gate"]["kernel"] for tree in (params, converted))
  assert (trained.dtype, sampled.qvalue.dtype) == (jnp.float32, jnp.int8)
  first = np.asarray(trained[:1])  # of two layers, which lie apart while sampling on a CPU
  rounded = np.asarray(qwix.dequantize(jax.device_get(sampled)))
  error = np.abs(rounded - first).max() / np.abs(first).max()
  assert 1e-4 < error < 0.51 / 127
  assert sampled.qvalue.addressable_shards[0].data.shape == (1, 32, 24)
  assert converted["embed"]["embedding"].dtype == jnp.float32
  result = train_steps(run, steps=1)
  assert 1e-4 < result.largest_gap < 0.3 and np.isfinite(result.metrics[0]["loss"])


def collectives(lowered):
  """The shapes of the arrays that the devices exchange in a lowered function."""
  text = re.sub(r"/\*.*?\*/", "", lowered.compile().as_text())
  names = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute"
  # A sum over an axis of one device has groups of one device, which exchange nothing.
  alone = r"replica_groups=\{\{\d+\}(,\{\d+\})*\}"
  lines = [line for line in text.splitlines() if not re.search(alone, line)]
  moved = re.findall(rf"= (.*?) (?:{names})(?:-start)?\(", "\n".join(lines))
  return {
    tuple(map(int, filter(None, sizes.split(","))))
    for result in moved
    for sizes in re.findall(r"\[([\d,]*)\]", result)
  }


@pytest.mark.slow
def test_under_fsdp_weights_travel_and_activations_stay():
  """The collectives of sampler and update move parameters, their gradients and scalars.

  And the batch, which is sorted.
  """
  run = make_run((1, 8, 1))
  programs, parameters = run.programs, run.parameters
  batch = abstract_batch(run, parameters.model.rows)
  prompts = batch.prompts_PS, batch.prompt_lengths_P
  weights = parameters.sampling.abstract(parameters.abstract)
  (begin, begun), (chunk, taken) = sampling_stages(run, weights, *prompts)
  # By default, the weights lie whole while sampling. Everyone sees what was drawn in a chunk.
  assert collectives(begin.lower(*begun)) == set()
  assert collectives(chunk.lower(*taken)) <= {(), (64,), (64, 40)}
  V, D, F, heads = parameters.model.vocab_size, 32, 96, (8, 4)
  shapes = collectives(programs.update.whole.lower(programs.abstract_state, None, None, batch))
  layer = {(D, F), (F, D), (D, D), (D,), heads}
  stacks = {(L, *shape) for L in (1, 2) for shape in layer}
  in_batch = {(16,), (16, 12), (16, 4, 40)}
  assert shapes & {(D, F), (1, D, F), (2, D, F)}
  assert shapes <= {(V, D), (2,), ()} | layer | stacks | in_batch


def sampling_stages(run, weights, prompts_PS, lengths_P):
  """The programs of the sampler with their arguments, for 4 completions of 16 prompts."""
  flights, grid = run.programs.sampler().programs, Grid(16, 4)

  def rows(dtype):
    return jax.ShapeDtypeStruct((64,), dtype)

  settings = by_row(settings_of(run.config.sampling, 1.0), 64, 1)
  settings = jax.tree.map(lambda x: rows(x.dtype), settings)
  flight = flights.abstract(grid, 40, weights, prompts_PS.shape[1], settings)

  number = jax.ShapeDtypeStruct((), jnp.int32)
  keys = jax.ShapeDtypeStruct((64, 2), jnp.uint32)
  new, chunk = NewRows(rows("bool"), keys, rows("int32"), settings), Chunk(number, number)
  return (
    (flights.begin, (grid, 40, weights, Prompts(prompts_PS, lengths_P), None, settings)),
    (flights.chunk, (weights, flight, new, rows("bool"), chunk)),
  )


def unplaced(tree):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def assert_has(batch, wanted):
  """Every field that `wanted` has is the same in `batch`."""
  for field in dataclasses.fields(wanted):
    value = getattr(wanted, field.name)
    assert value is None or getattr(batch, field.name) == value, field.name


@pytest.mark.slow
@pytest.mark.parametrize("platform, dtype", [("tpu", "bfloat16"), ("cuda", "float32")])
def test_sampler_and_update_lower_for_accelerators(platform, dtype):
  run = make_run(
    ONE,
    model=dict(dtype=dtype),
    sampling=dict(top_k=5, top_p=0.9, min_p=0.01),
    learner=dict(remat=True),
  )
  programs, wanted = run.programs, abstract_batch(run)
  params, state = unplaced(run.parameters.abstract), unplaced(programs.abstract_state)
  weights = unplaced(run.parameters.sampling.abstract(run.parameters.abstract))
  prompts, temperature_P = (wanted.prompts_PS, wanted.prompt_lengths_P), wanted.temperature_P
  ints_PG = jax.ShapeDtypeStruct((16, 4), jnp.int32)
  completions = Completions(
    tokens_PGT=wanted.completions_PGT,
    lengths_PG=ints_PG,
    sampled_PGT=jax.ShapeDtypeStruct((16, 4, 40), bool),
    logprobs_PGT=wanted.mask_PGT,
    behavior_logprobs_PGT=wanted.mask_PGT,
    stopped_by_PG=ints_PG,
  )
  live_P = jax.ShapeDtypeStruct((16,), jnp.float32)
  batch = unplaced(programs.to_batch.eval_shape(completions, *prompts, temperature_P, live_P))
  assert batch.ref_logprobs_PGT is None and batch.advantages_PGT is None
  batch = batch.replace(ref_logprobs_PGT=wanted.ref_logprobs_PGT)
  rewards = Rewards(scores_PGJ=jax.ShapeDtypeStruct((16, 4, 1), jnp.float32), weights=(1.0,))
  coef = jax.ShapeDtypeStruct((), jnp.float32)
  batch = unplaced(programs.with_advantages.eval_shape(batch, rewards, coef)[0])
  assert_has(batch, wanted)
  for function, arguments in (
    *sampling_stages(run, weights, *prompts),
    (programs.update.whole, (state, None, params, batch)),
    (programs.logprobs.whole, (params, batch)),
  ):
    layouts = export.DisabledSafetyCheck.custom_call("LayoutConstraint")
    function = getattr(function, "jitted", function)
    exported = export.export(function, platforms=[platform], disabled_checks=[layouts])(*arguments)
    assert exported.platforms == (platform,) and "stablehlo" in exported.mlir_module()
