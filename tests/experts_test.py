"""A mixture of experts: its mathematics, the loss of the routers, and its use by learner and run.

golden_model_test.py tests the logits.
"""

import dataclasses
import functools
import json
from pathlib import Path

import jax
from jax import export
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import default
from grpo_jax import learner, model
from grpo_jax.algo import metrics as metrics_lib
from grpo_jax.algo import presets
from grpo_jax.algo.balance import balance_loss, balance_metrics
from grpo_jax.config import Learner, Mesh, from_dict, to_dict
from grpo_jax.data.tasks import tasks
from grpo_jax.data.tokenizers import tokenizer
from grpo_jax.learner.train_step import prepared
from grpo_jax.model.layers import ACTIVATIONS
from grpo_jax.model.mlps import experts
from grpo_jax.parallel import sharding
from grpo_jax.parallel.mesh import make_mesh
from grpo_jax.run.run import Run
from grpo_jax.settings import ConfigError
from grpo_jax.storage.workdir import open_run
from grpo_jax.training.loop import run_steps
from grpo_jax.types import Batch, Routing

GOLDEN = Path(__file__).parent / "golden/families"
CONFIG = model.ModelConfig(
  vocab_size=31,
  embed_dim=16,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  mlp_dim=24,
  family="qwen3_moe",
  qkv_bias=False,
  qk_norm="head",
  num_experts=4,
  experts_per_token=2,
  expert_dim=12,
  normalise_shares=True,
  sparse_layers=(0, 1),
)
ALGO = presets.preset("gspo")
P, G, S, T = 4, 3, 6, 5


# --- The mathematics ---


def mixture(X=5, U=2, D=8, M=12):
  keys = jax.random.split(jax.random.key(0), 5)
  gate, up, down = (
    jax.random.normal(k, (X, *shape)) for k, shape in zip(keys, ((D, M), (D, M), (M, D)))
  )
  mixture_BTU, chosen_BTU = jax.lax.top_k(jax.nn.softmax(jax.random.normal(keys[3], (3, 4, X))), U)
  return chosen_BTU, (jax.random.normal(keys[4], (3, 4, D)), mixture_BTU, gate, up, down)


def mix(chosen_BTU, x, mixture_BTU, *weights):
  return experts.mix(
    ACTIVATIONS["silu"], x, chosen_BTU, mixture_BTU, experts.ExpertWeights(*weights)
  )


def test_a_token_is_the_weighted_sum_of_its_experts_alone():
  """Compared with all experts for all tokens, where those that were not chosen have weight 0.

  Compares the values and all gradients.
  """
  chosen_BTU, arguments = mixture()

  def plain(x, mixture_BTU, gate, up, down):
    weights = (jax.nn.one_hot(chosen_BTU, 5) * mixture_BTU[..., None]).sum(-2)
    hidden = jax.nn.silu(jnp.einsum("btd,xdm->btxm", x, gate)) * jnp.einsum("btd,xdm->btxm", x, up)
    return jnp.einsum("btxm,xmd,btx->btd", hidden, down, weights)

  def gradients(f):
    def loss(*args):
      return jnp.sin(f(*args)).sum()

    return jax.jit(jax.value_and_grad(loss, range(5)))(*arguments)

  ours, expected = gradients(functools.partial(mix, chosen_BTU)), gradients(plain)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), ours, expected)


@pytest.mark.slow
def test_parts_of_the_experts_add_up():
  """One device has experts 0 to 2, another 3 and 4, which it counts as 0 and 1.

  A token whose experts are all on another device gets 0.
  """
  chosen_BTU, (x, mixture_BTU, *weights) = mixture()

  def part(first, last):
    return mix(chosen_BTU - first, x, mixture_BTU, *(w[first:last] for w in weights))

  whole = mix(chosen_BTU, x, mixture_BTU, *weights)
  np.testing.assert_allclose(part(0, 3) + part(3, 5), whole, atol=1e-4)
  elsewhere = (chosen_BTU < 3).all(-1)
  assert elsewhere.any() and (part(3, 5)[elsewhere] == 0).all()


def test_the_kernel_takes_experts_that_fill_the_lanes_of_each_device(monkeypatch):
  monkeypatch.setattr(model.ModelConfig, "platform", "tpu")
  wide = dataclasses.replace(CONFIG, embed_dim=256, expert_dim=128)
  split = sharding.model_shardings(wide, make_mesh(Mesh(tensor=2), jax.devices()[:2]))
  assert experts.reads_stacks(wide) and not experts.reads_stacks(CONFIG)
  assert not experts.reads_stacks(dataclasses.replace(wide, **split))
  assert experts.reads_stacks(dataclasses.replace(wide, expert_dim=256, **split))


def test_experts_of_another_dtype_are_not_read_in_their_stack(monkeypatch):
  """Their whole stack would be converted for each layer."""
  monkeypatch.setattr(experts, "reads_stacks", lambda config: True)
  names, stack = ("gate", "up", "down"), jnp.zeros((2, 4, 8, 8))
  layer, stacks = ({"experts": dict.fromkeys(names, x)} for x in (stack[0], stack))
  place = jnp.int32(1)
  taken = experts.in_stacks(CONFIG, layer, stacks, place)["experts"]
  assert taken["place"] is place and all(taken[name] is stack for name in names)
  half = dataclasses.replace(CONFIG, dtype="bfloat16")
  assert experts.in_stacks(half, layer, stacks, place) is layer


@pytest.mark.parametrize("rows, sizes", [(128, [50, 0, 1, 77]), (70, [0, 3, 60, 0]), (3, [0] * 4)])
def test_a_layer_s_experts_are_read_in_their_stack(rows, sizes):
  rng = np.random.default_rng(0)
  x_NI = jnp.asarray(rng.standard_normal((rows, 128)), jnp.float32)
  stack = jnp.asarray(rng.standard_normal((3, 4, 128, 256)), jnp.float32)
  sizes_X = jnp.asarray(sizes, jnp.int32)
  for place in range(3):
    ours = experts.product_in_stack(jnp.int32(place), x_NI, stack, sizes_X, interpret=True)
    wanted = jax.lax.ragged_dot(x_NI, stack[place], sizes_X)
    kept = slice(0, sum(sizes))
    np.testing.assert_allclose(ours[kept], wanted[kept], atol=1e-4)


def test_the_backward_pass_keeps_the_sorted_tokens_once_and_no_mask_of_them():
  mesh = make_mesh(Mesh(expert=2, tensor=2, fsdp=2), jax.devices()[:8])
  config = dataclasses.replace(CONFIG, **sharding.model_shardings(CONFIG, mesh))
  layer = experts.Experts(config)
  x_BTD = jax.ShapeDtypeStruct((8, 3, config.embed_dim), jnp.float32)
  params = jax.eval_shape(layer.init, jax.random.key(0), x_BTD, model.Routes(), x_BTD)

  def apply(params, x_BTD):
    return layer.apply(params, x_BTD, model.Routes(), x_BTD)[0]

  def backward(params, x_BTD):
    return jax.vjp(apply, params, x_BTD)[1]

  kept = jax.tree.leaves(jax.eval_shape(backward, params, x_BTD))
  # Of the 8 devices, each sorts the rows of two: 4 rows of 3 tokens with 2 experts each.
  pairs = [x for x in kept if x.shape == (8 * 4 * 3 * 2, config.embed_dim)]
  assert [x.dtype for x in pairs] == [jnp.float32]


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_accelerators_compute_ragged_products(platform):
  """One for each matrix of the sorted tokens with their experts: three forward, six backward."""
  chosen_BTU, arguments = mixture()
  gradient = jax.jit(jax.grad(lambda *a: mix(chosen_BTU, *a).sum(), range(5)))
  text = export.export(gradient, platforms=[platform])(*arguments).mlir_module()
  assert text.count('composite "chlo.ragged_dot"') == 9


def test_balance_by_hand():
  """Four tokens use one of two experts each.

  If 3 use the first and 1 the second, and P = (.7, .3): 2 (.75 * .7 + .25 * .3) = 1.2. If both
  experts have the same load: 1.
  """

  def loss(assigned, probs):
    return float(balance_loss(jnp.array(assigned), jnp.array(probs), jnp.float32(4)))

  assert loss([3.0, 1.0], [2.8, 1.2]) == pytest.approx(1.2)
  assert loss([2.0, 2.0], [2.0, 2.0]) == pytest.approx(1)
  assert loss([0.0, 0.0], [0.0, 0.0]) == 0
  assert float(balance_loss(jnp.zeros(2), jnp.zeros(2), jnp.float32(0))) == 0


def test_metrics_by_hand():
  """Two prompts, two layers, three experts.

  Of four tokens, the first layer sends 4, 0 and 0 to its experts, the second 2, 1 and 1.
  """
  routing = Routing(
    tokens_BL=jnp.full((2, 2), 2.0),
    assigned_BLX=jnp.array([[[2.0, 0, 0], [2, 0, 0]], [[2, 0, 0], [0, 1, 1]]]),
    probs_BLX=jnp.full((2, 2, 3), 2 / 3),
    entropy_BL=jnp.full((2, 2), 2 * np.log(3)),
  )
  found = balance_metrics(routing)
  expected = {
    "router/aux_loss": 1.0,
    "router/load_max": 3.0,
    "router/load_min": 0.0,
    "router/dead": 2 / 6,
    "router/entropy": np.log(3),
  }
  assert {k: pytest.approx(float(v)) for k, v in found.items()} == expected


@pytest.mark.parametrize(
  "name", ["qwen3_moe", pytest.param("qwen3_moe_mixed", marks=pytest.mark.slow)]
)
def test_the_auxiliary_loss_is_that_of_transformers(name):
  config, params = model.load(GOLDEN / name)
  expected = np.load(GOLDEN / name / "expected.npz")
  tokens_BT = jnp.asarray(expected["tokens"])
  counted_BT = jnp.arange(tokens_BT.shape[1]) < expected["lengths"][:, None]
  groups = model.Groups(jnp.asarray(expected["lengths"], jnp.int32), tokens_BT.shape[1])
  routes = model.Routes(counted_BT)
  routing = jax.jit(lambda p: model.group_features(p, config, tokens_BT, groups, routes)[1])(params)
  assert routing.assigned_BLX.sum() == expected["lengths"].sum() * config.experts_per_token * len(
    config.sparse_layers
  )
  np.testing.assert_allclose(
    balance_metrics(routing)["router/aux_loss"], expected["aux_loss"], rtol=1e-5
  )


# --- The learner ---


@pytest.fixture(scope="module")
def params():
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), CONFIG))
  return jax.tree.map(lambda x: jnp.asarray(rng.normal(0.1, 0.4, x.shape), jnp.float32), shapes)


def make_batch(advantage=1.0, seed=0):
  rng = np.random.default_rng(seed)

  def integers(low, high, *shape):
    return jnp.asarray(rng.integers(low, high, shape), jnp.int32)

  lengths_PG = integers(1, T + 1, P, G).at[3].set(0)  # a group that is left out
  mask = (jnp.arange(T) < lengths_PG[..., None]).astype(jnp.float32)
  normal = jnp.asarray(rng.normal(size=(P, G, T)), jnp.float32)
  return Batch(
    prompts_PS=integers(0, 31, P, S),
    prompt_lengths_P=integers(1, S + 1, P),
    completions_PGT=integers(0, 31, P, G, T),
    mask_PGT=mask,
    temperature_P=jnp.full(P, 0.7),
    advantages_PGT=advantage * normal,
    sampler_logprobs_PGT=normal,
  )


OBJECTIVES = {
  "gspo": functools.partial(learner.grpo, CONFIG, ALGO),
  "warm": functools.partial(learner.supervised, CONFIG),
}


@functools.cache
def jitted(objective, micro, coef):
  objective = OBJECTIVES[objective](Learner(logprob_chunk=20, router_aux_coef=coef))
  rule = learner.UpdateRule(objective, optax.sgd(1.0), micro)
  return jax.jit(functools.partial(learner.train_step, rule=rule))


def step(params, batch, micro=0, coef=0.5, objective="gspo"):
  """The state after one update, and its metrics."""
  state = learner.init_state(params, optax.sgd(1.0), ALGO)
  state, metrics = jitted(objective, micro, coef)(state, None, None, batch)
  return state, metrics_lib.reduced(metrics)


def plain_balance(params, batch):
  """The loss with every row's prompt and completion in one sequence, without a shared prefix.

  A prompt counts only in the first row of its group.
  """

  def rows(x):
    return jnp.repeat(x, G, axis=0)

  def take(x):
    return jnp.take_along_axis(x, jnp.clip(place, 0, T - 1), axis=1)

  lengths, own = rows(batch.prompt_lengths_P)[:, None], batch.completions_PGT.reshape(P * G, T)
  place = jnp.arange(S + T) - lengths  # of each slot within the completion
  tokens = jnp.where(place < 0, jnp.pad(rows(batch.prompts_PS), ((0, 0), (0, T))), take(own))
  is_first = (jnp.arange(P * G) % G == 0) & (jnp.arange(P * G) < 3 * G)
  mask_BT = batch.mask_PGT.reshape(P * G, T)
  predicts_BT = jnp.arange(T) < (mask_BT * jnp.arange(1, T + 1)).max(1, keepdims=True) - 1
  counted = jnp.where(place < 0, is_first[:, None], take(mask_BT * predicts_BT) * (place < T) > 0)
  groups = model.Groups(jnp.full(P * G, S + T), S + T)
  _, r = model.group_features(params, CONFIG, tokens, groups, model.Routes(counted))
  f, P_ = (x.sum((0, 1)) / r.tokens_BL.sum() for x in (r.assigned_BLX, r.probs_BLX))
  return 4 * (jax.lax.stop_gradient(f) * P_).sum()


@pytest.mark.slow
@pytest.mark.parametrize("micro", [0, 2])
def test_the_loss_has_the_gradient_of_the_whole_batch_however_it_is_split(params, micro):
  """With advantages of 0, nothing else has a gradient."""
  batch = make_batch(advantage=0.0)
  value, gradient = jax.jit(jax.value_and_grad(plain_balance))(params, batch)
  state, metrics = step(params, batch, micro)
  np.testing.assert_allclose(
    [metrics["router/aux_loss"], metrics["loss"]], [value, value / 2], rtol=1e-5
  )
  assert (np.abs(gradient["layers_0"]["experts"]["router"]).max((1, 2)) > 1e-3).all()
  jax.tree.map(
    lambda old, new, g: np.testing.assert_allclose(old - new, g / 2, atol=2e-6),
    params,
    state.params,
    gradient,
  )


@pytest.mark.slow
def test_micro_batches_change_nothing_and_a_loss_that_is_off_adds_nothing(params):
  batch = make_batch()
  close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
  (state, metrics), (off, without) = step(params, batch), step(params, batch, coef=0.0)
  jax.tree.map(close, (state, metrics), step(params, batch, 2))
  close(metrics["loss"], without["loss"] + metrics["router/aux_loss"] / 2)
  jax.tree.map(
    close,
    {k: v for k, v in metrics.items() if k.startswith("router/")},
    {k: v for k, v in without.items() if k.startswith("router/")},
  )
  routers = (x.params["layers_0"]["experts"]["router"] for x in (state, off))
  assert (np.abs(np.subtract(*routers)).max((1, 2)) > 1e-4).all()  # of both layers


@pytest.mark.slow
def test_tokens_selected_among_the_whole_batch_and_the_loss_share_a_pass(params):
  """top_entropy_quantile also computes the routing of the whole batch, split or not."""
  batch = make_batch()
  algo = dataclasses.replace(ALGO, top_entropy_quantile=0.5)
  objective = learner.grpo(CONFIG, algo, Learner(logprob_chunk=20, router_aux_coef=0.5))
  routings = []
  for micro in (0, 2):
    prepare = jax.jit(functools.partial(prepared, objective, micro_batch=micro))
    routings.append(prepare(policy=params, batch=batch).routing)
  assert routings[0].tokens_BL.sum() > 0
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), *routings)


@pytest.mark.slow
def test_padding_is_routed_and_counts_nowhere(params):
  """The tokens after the ends of prompts and completions do not change the update."""
  batch = make_batch()
  past = jnp.arange(S) >= batch.prompt_lengths_P[:, None]
  other = batch.replace(
    prompts_PS=jnp.where(past, 7, batch.prompts_PS),
    completions_PGT=jnp.where(batch.mask_PGT > 0, batch.completions_PGT, 9),
  )
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
    step(params, batch),
    step(params, other),
  )


@pytest.mark.slow
def test_the_warm_start_has_it_too(params):
  batch = make_batch()
  losses = [step(params, batch, coef=coef, objective="warm")[1] for coef in (0.0, 0.5)]
  np.testing.assert_allclose(
    losses[1]["loss"] - losses[0]["loss"], losses[1]["router/aux_loss"] / 2, rtol=1e-4
  )


# --- A run ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A tiny mixture of random weights whose vocabulary is that of the arithmetic task."""
  return make_folder(tmp_path_factory.mktemp("mixture") / "hf")


def make_folder(path):
  tokens = tokenizer.characters(
    tasks.make_task(from_dict(default.get_config().to_dict()).data).alphabet
  )
  config = dataclasses.replace(CONFIG, vocab_size=tokens.vocab_size, stop_ids=tokens.stop_ids)
  model.save(path, config, jax.jit(model.init, static_argnums=1)(jax.random.key(3), config))
  tokens.save(path)
  return path


def config(folder, preset="gspo", **mesh):
  c = default.get_config(preset)
  c.steps, c.model.path, c.learner.router_aux_coef = 2, str(folder), 0.01
  c.batch.update(prompts=16, group_size=4, micro_batch=2)
  c.data.max_prompt_tokens, c.sampling.max_tokens, c.optimizer.learning_rate = 12, 8, 1e-2
  c.log.update(tensorboard=False)
  c.mesh.update(dict(data=1, fsdp=1, expert=2, tensor=-1) | mesh)
  return from_dict(c.to_dict())


@pytest.mark.slow
def test_gspo_trains_it_and_what_is_exported_is_what_was_trained(folder, tmp_path):
  """On eight devices. The experts of a layer are split over two of them."""
  state = run_steps(config(folder), str(tmp_path / "run")).state
  rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
  assert len(rows) == 2
  for row in rows:
    assert row["skipped_updates"] == 0 and np.isfinite([row["loss"], row["grad_norm"]]).all()
    assert row["sampler/logprob_gap_max"] < 1e-4
    assert (
      1 <= row["router/load_max"] <= 2
      and 0 <= row["router/load_min"] <= 1
      and 0 <= row["router/dead"] < 1
    )
    assert 0 < row["router/entropy"] <= np.log(4) and row["router/aux_loss"] > 0
  before, shape = model.load(folder)[1], model.load_model_config(folder)
  model.save(tmp_path / "out", shape, state.train.params)
  after = model.load(tmp_path / "out")
  assert after[0] == shape
  jax.tree.map(np.testing.assert_array_equal, after[1], jax.device_get(state.train.params))
  routers = (x["layers_0"]["experts"]["router"] for x in (after[1], before))
  assert (np.abs(np.subtract(*routers)).max((1, 2)) > 1e-4).all()  # of both layers


@pytest.mark.parametrize(
  "change, message",
  [
    (dict(mesh=dict(expert=2)), "config key mesh.expert is 2: the model has no experts; set 1"),
    (
      dict(learner=dict(router_aux_coef=0.1)),
      "config key learner.router_aux_coef is 0.1: the model has no experts; set 0",
    ),
  ],
)
def test_a_model_without_experts_has_nothing_to_split_or_balance(change, message):
  c = default.get_config()
  for section, values in change.items():
    c[section].update(values)
  with pytest.raises(ConfigError) as error:
    Run(from_dict(c.to_dict()))
  assert str(error.value) == message


@pytest.mark.slow
def test_experts_lie_on_their_axis_or_whole_where_it_does_not_divide_them(folder):
  run = Run(config(folder, expert=2, tensor=2, fsdp=2))
  shards = {
    name: x.addressable_shards[0].data.shape
    for name, x in run.initial_params()["layers_0"]["experts"].items()
  }
  assert shards == {
    "router": (2, 8, 4),
    "gate": (2, 2, 8, 6),
    "up": (2, 2, 8, 6),
    "down": (2, 2, 6, 8),
  }
  run = Run(config(folder, expert=8, tensor=1))
  assert run.parameters.model.experts.spec == jax.sharding.PartitionSpec(None, None, "tensor")
  whole = sharding.undivided(run.parameters.abstract, run.mesh)
  assert "layers_0/experts/gate: dimension 1 of 4 is not divisible by expert=8" in whole


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_loss_alone(folder, tmp_path):
  first = config(folder)
  open_run(tmp_path, to_dict(first))
  (tmp_path / "metrics.jsonl").touch()

  def change(**values):
    return dataclasses.replace(first, learner=dataclasses.replace(first.learner, **values))

  open_run(tmp_path, to_dict(change(remat=True)))
  with pytest.raises(ConfigError, match="learner.router_aux_coef = 0.01, this run 0.0"):
    open_run(tmp_path, to_dict(change(router_aux_coef=0.0)))
