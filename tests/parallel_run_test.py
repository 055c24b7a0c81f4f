"""Any factorisation of eight devices gives the numbers of one; nothing is traced twice; it all lowers for TPU and GPU."""

import contextlib
import itertools
import re

import jax
from jax import export
import jax.numpy as jnp
import numpy as np
import pytest

from configs import default
from grpo_jax import model
from grpo_jax.config import from_dict
from grpo_jax.data import loader
from grpo_jax.model.config import ModelConfig
from grpo_jax.run.build import Run
from grpo_jax.types import Batch, Scores

ONE, OFTEN = (1, 1, 1), [(2, 2, 2)]
EIGHT = [
  pytest.param(m, marks=() if m in OFTEN else pytest.mark.slow)
  for m in itertools.product((1, 2, 4, 8), repeat=3)
  if np.prod(m) == 8
]


MIXTURES = [
  m for m in itertools.product((1, 2, 4, 8), repeat=4) if np.prod(m) == 8
]  # data, fsdp, tensor, expert


def config(mesh, **sections):
  c = default.get_config()
  c.model.update(embed_dim=32, num_layers=2, num_heads=8, num_kv_heads=8, head_dim=4, mlp_dim=96)
  c.batch.update(prompts=16, group_size=4, micro_batch=8)
  c.warm_start.batch = c.eval.batch = 8
  c.data.max_prompt_tokens, c.sampling.max_tokens = 12, 40
  c.optimizer.learning_rate = 1e-2
  c.mesh.update(dict(zip(("data", "fsdp", "tensor", "expert"), mesh)))
  for section, values in sections.items():
    c[section].update(values)
  return from_dict(c.to_dict())


def make_run(mesh, **sections):
  c = config(mesh, **sections)
  return Run(c, devices=jax.devices()[: np.prod(mesh)])


@contextlib.contextmanager
def traces():
  """Yields a list that gets one entry for each function that JAX traces."""
  found = []
  listen = lambda event, seconds, **_: (
    found.append(event) if event == "/jax/core/compile/jaxpr_trace_duration" else None
  )
  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield found
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)


def one_step(run, steps=2):
  """Two steps of sampling, reference and update, the second without tracing. Rewards are a function of the tokens."""
  prompts = run.prompts("train")
  state = run.init_state(run.initial_params())
  reference = run.parameters.base if run.model.lora else run.initial_params()
  sample = run.sampler(run.config.sampling, run.config.batch.group_size)
  tokens, losses, gaps = [], [], []
  for step in range(steps):
    with traces() as traced:
      batch = loader.prompt_batch(prompts, loader.step_indices(0, step, 16, len(prompts)))
      arrays = run.put((batch.prompts_PS, batch.prompt_lengths_P))
      out = sample(
        run.parameters.for_sampling(state.params),
        *arrays,
        jax.random.fold_in(run.key("sample"), step),
      )
      host = run.fetch(out)
      rewards = (host.tokens_PGT % 3 == 1).sum(-1).astype(np.float32)
      learned = run.to_batch(out, *arrays, *run.put([np.ones(16, np.float32)]))
      learned = learned.replace(ref_logprobs_PGT=run.logprobs(reference, learned))
      learned, _ = run.with_advantages(learned, run.put(Scores(rewards[..., None])), state.coefs.kl)
      state, metrics = run.update(state, reference, learned)
      tokens.append(host.tokens_PGT)
      losses.append({k: float(v) for k, v in metrics.items()})
      gaps.append(losses[-1]["sampler/logprob_gap_max"])
    assert bool(traced) == (step == 0)
  return tokens, losses, gaps, jax.device_get(state.params)


def abstract_batch(run, place=lambda x: x):
  """Shapes of what `update` is given; place(shape) puts one somewhere."""
  shape = lambda *s, dtype=jnp.int32: place(jax.ShapeDtypeStruct(s, dtype))
  real = lambda *s: shape(*s, dtype=jnp.float32)
  values = real(16, 4, 40)
  return Batch(
    shape(16, 12),
    shape(16),
    shape(16, 4, 40),
    values,
    values,
    values,
    values,
    ref_logprobs_PGT=values,
  )


@pytest.fixture(scope="module")
def alone():
  return one_step(make_run(ONE))


@pytest.mark.parametrize("mesh", EIGHT, ids=str)
def test_eight_devices_give_the_numbers_of_one(mesh, alone):
  """One of them with a layout of its own for sampling. And nothing is traced twice, though lengths and keys differ."""
  run = make_run(mesh, sampling=dict(layout="tensor" if mesh == (2, 2, 2) else "train"))
  tokens, losses, gaps, params = one_step(run)
  np.testing.assert_array_equal(tokens, alone[0])
  for ours, theirs in zip(losses, alone[1]):
    for name in ("loss", "kl", "entropy", "grad_norm"):
      assert ours[name] == pytest.approx(theirs[name], abs=1e-5, rel=1e-5), name
  assert max(gaps) < 1e-4
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3), params, alone[3]
  )  # Adam magnifies rounding


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
  """Of four experts, two a token: sections of its config, and the numbers of one device."""
  tokens, path = make_run(ONE).tokenizer, str(tmp_path_factory.mktemp("mixture") / "hf")
  shape = ModelConfig(
    tokens.vocab_size,
    32,
    1,
    4,
    2,
    8,
    96,
    family="qwen3_moe",
    qkv_bias=False,
    qk_norm=True,
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
  return sections, one_step(make_run(ONE, **sections))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MIXTURES, ids=str)
def test_experts_on_eight_devices_give_the_numbers_of_one(mesh, mixture):
  """Split where their axis divides four of them, else whole."""
  sections, alone = mixture
  tokens, losses, gaps, params = one_step(make_run(mesh, **sections))
  np.testing.assert_array_equal(tokens, alone[0])
  for ours, theirs in zip(losses, alone[1]):
    assert ours["router/aux_loss"] > 1
    for name in (
      "loss",
      "kl",
      "entropy",
      "grad_norm",
      *(name for name in theirs if name.startswith("router/")),
    ):
      assert ours[name] == pytest.approx(theirs[name], abs=1e-5, rel=1e-5), name
  assert max(gaps) < 1e-4
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3), params, alone[3])


def test_sampling_weights_have_a_layout_and_dtype_of_their_own():
  run = make_run((2, 2, 2), sampling=dict(layout="tensor", dtype="bfloat16"))
  params = run.initial_params()
  ours = run.parameters.for_sampling(params)
  kernel, sampled = (
    params["layers_0"]["mlp"]["gate"]["kernel"],
    ours["layers_0"]["mlp"]["gate"]["kernel"],
  )
  assert sampled.dtype == jnp.bfloat16 and kernel.dtype == jnp.float32
  assert kernel.addressable_shards[0].data.shape == (16, 48) and sampled.addressable_shards[
    0
  ].data.shape == (32, 48)
  _, losses, gaps, _ = one_step(run, 1)
  assert 1e-6 < gaps[0] < 0.3 and np.isfinite(losses[0]["loss"])


def test_under_fsdp_weights_travel_and_activations_stay():
  """The collectives of sampler and update move parameters, their gradients and scalars, nothing else."""
  run = make_run((1, 8, 1))
  place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=run.model.rows)
  batch, key = abstract_batch(run, place), jax.eval_shape(lambda: jax.random.key(0))
  sampler = run.sampler(run.config.sampling, 4)
  V, D, F, heads = run.model.vocab_size, 32, 96, (8, 4)
  for lowered in (
    sampler.lower(run.parameters.abstract, batch.prompts_PS, batch.prompt_lengths_P, key),
    run.update.lower(run.abstract_state, None, batch),
  ):
    text = re.sub(r"/\*.*?\*/", "", lowered.compile().as_text())
    moved = re.findall(
      r"= (.*?) (?:all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)(?:-start)?\(",
      text,
    )
    shapes = {
      tuple(map(int, filter(None, dims.split(","))))
      for one in moved
      for dims in re.findall(r"\[([\d,]*)\]", one)
    }
    assert (D, F) in shapes and shapes <= {(V, D), (D, F), (F, D), (D, D), (D,), heads, ()}


@pytest.mark.parametrize("platform, dtype", [("tpu", "bfloat16"), ("cuda", "float32")])
def test_sampler_and_update_lower_for_accelerators(platform, dtype):
  run = make_run(
    ONE,
    model=dict(dtype=dtype),
    sampling=dict(top_k=5, top_p=0.9, min_p=0.01),
    learner=dict(remat=True),
  )
  plain = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
  params, state, batch = (
    plain(run.parameters.abstract),
    plain(run.abstract_state),
    abstract_batch(run),
  )
  key = jax.eval_shape(lambda: jax.random.key(0))
  prompts = batch.prompts_PS, batch.prompt_lengths_P
  sampler = run.sampler(run.config.sampling, 4)
  live_P = jax.ShapeDtypeStruct((16,), jnp.float32)
  made = plain(
    run.to_batch.eval_shape(plain(sampler.eval_shape(params, *prompts, key)), *prompts, live_P)
  )
  assert made == batch.replace(ref_logprobs_PGT=None, advantages_PGT=None)
  scores, coef = (
    Scores(jax.ShapeDtypeStruct((16, 4, 1), jnp.float32)),
    jax.ShapeDtypeStruct((), jnp.float32),
  )
  assert (
    plain(run.with_advantages.eval_shape(batch.replace(advantages_PGT=None), scores, coef)[0])
    == batch
  )
  for function, arguments in (
    (sampler, (params, *prompts, key)),
    (run.update, (state, params, batch)),
    (run.logprobs, (params, batch)),
  ):
    exported = export.export(function, platforms=[platform])(*arguments)
    assert exported.platforms == (platform,) and "stablehlo" in exported.mlir_module()
