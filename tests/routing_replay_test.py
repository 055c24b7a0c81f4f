"""The update of a mixture goes through the experts that the sampler used (routing replay)."""

import dataclasses
import functools
from types import SimpleNamespace

from experts_test import CONFIG, make_folder
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_run import grpo_step, small_config, small_run, with_section

from grpo_jax import learner, model
from grpo_jax.batches.collect import cut
from grpo_jax.config import Learner, Mesh
from grpo_jax.learner.features import completion_features
from grpo_jax.model.mlps.router import route
from grpo_jax.parallel.mesh import make_mesh
from grpo_jax.parallel.sharding import batch_sharding, model_shardings, param_specs
from grpo_jax.run.checks import check_config
from grpo_jax.run.run import Run
from grpo_jax.run.stages import programs
from grpo_jax.sampler import sampling
from grpo_jax.sampler.logits import Decoding
from grpo_jax.sampler.sampling import Draws, Sampler, whole
from grpo_jax.sampler.stop import end_at
from grpo_jax.settings import ConfigError
from grpo_jax.types import Batch

P, G, S, T = 4, 3, 7, 12
MANY = 10**9  # parameters, so that every call is large enough to move rows together
# A pattern of two layers, and of its own the first one, which has an MLP.
MIXTURE = dataclasses.replace(
  CONFIG, num_layers=5, num_experts=8, sparse_layers=(1, 2, 3, 4), windows=(0, 4, 0, 4, 0)
)
L, U, X = 4, MIXTURE.experts_per_token, MIXTURE.num_experts
Y = L * U
STOPS = (1, 9, 17)


@pytest.fixture(scope="module")
def params():
  return jax.jit(model.init, static_argnums=1)(jax.random.key(0), MIXTURE)


# --- One router ---


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_shares_of_given_experts_are_those_of_the_router_s_own_scores(kind):
  """Scores of 0.5, 0.75 and 0.8 for the sigmoid. -1 stands for what the router chooses."""
  config = dataclasses.replace(
    MIXTURE, num_experts=3, router=kind, normalise_shares=True, share_scale=2.0
  )
  logits = jnp.log(jnp.array([[[1.0, 3.0, 4.0]]]))
  balance = jnp.array([9.0, 0, 0]) if kind == "sigmoid" else None
  scores = jnp.array([0.5, 0.75, 0.8]) if kind == "sigmoid" else jnp.array([1, 3, 4]) / 8
  given = jnp.array([[[1, 0]]], jnp.int8)
  choice = route(config, logits, balance, given)
  assert choice.used_BTU.tolist() == [[[1, 0]]]
  expected = 2 * scores[given] / scores[given].sum()
  np.testing.assert_allclose(choice.shares_BTU, expected, rtol=1e-6)
  own = [2, 1] if kind == "softmax" else [0, 2]
  assert choice.own_BTU.tolist() == [[own]]
  routed = route(config, logits, balance, jnp.full((1, 1, 2), -1))
  jax.tree.map(np.testing.assert_array_equal, routed, route(config, logits, balance))

  def first_share(logits):
    return route(config, logits, balance, given).shares_BTU[0, 0, 0]

  # Of s1 / (s0 + s1), where softmax has s_i' = s_i (1 - p_i) and so on, and a sigmoid s (1 - s).
  s0, s1 = float(scores[0]), float(scores[1])
  slopes = [s0 * (1 - s0), s1 * (1 - s1)] if kind == "sigmoid" else [s0, s1]
  total = (s0 + s1) ** 2
  expected = [-2 * s1 * slopes[0] / total, 2 * s0 * slopes[1] / total, 0]
  np.testing.assert_allclose(jax.grad(first_share)(logits)[0, 0], expected, atol=1e-6)


# --- The sampler ---


def prompts():
  rng = np.random.default_rng(0)
  lengths_P = rng.integers(1, S + 1, P).astype(np.int32)
  return rng.integers(2, 31, (P, S)).astype(np.int32), lengths_P


def draw(config, params, rows=0, chunk=64, weights=0, given=None, **draws):
  config = dataclasses.replace(config, keeps_experts=True)
  sampler = Sampler(config, Decoding(T, STOPS), weights, rows)
  sampler.programs.columns = min(sampler.programs.columns, chunk)
  return whole(sampler(params, *(given or prompts()), G, Draws(jax.random.key(3), **draws)))


def sets(experts):
  """The experts of each layer in the order of their numbers."""
  return np.sort(np.asarray(experts).reshape(*experts.shape[:-1], L, U), axis=-1)


def assert_of_model(config, params, given, found):
  """The experts of each row are those of a pass over the whole row, up to its last token."""
  config = dataclasses.replace(config, keeps_experts=True)
  experts = jax.jit(lambda tokens: model.routed_features(params, config, tokens, positions)[2])
  width = given[0].shape[1] + T
  positions = np.arange(width)[None]
  for p, g in np.ndindex(P, G):
    n, own = given[1][p], found.lengths_PG[p, g]
    row = [*given[0][p, :n], *found.tokens_PGT[p, g, :own]]
    expected = sets(experts(np.pad(row, (0, width - len(row)))[None].astype(np.int32))[0])
    np.testing.assert_array_equal(sets(found.prompt_experts_PSY[p, :n]), expected[:n])
    np.testing.assert_array_equal(
      sets(found.experts_PGTY[p, g, : own - 1]), expected[n : n + own - 1]
    )
    assert (found.experts_PGTY[p, g, own - 1 :] == -1).all()


def replies(asked):
  return [None if 30 in row.tokens else [30, 5, 6][: 1 + row.member] for row in asked]


TALK = {"reply": replies, "end": end_at(["c"], lambda ids: "".join("abcd"[i % 4] for i in ids))}


@pytest.mark.slow
@pytest.mark.parametrize(
  "rows, chunk, weights, mesh, draws",
  [
    (0, 64, 0, (), {}),
    (2, 3, MANY, (), TALK),
    (5, 4, MANY, (), {}),
    (0, 5, MANY, (), TALK),
    (4, 5, MANY, (1, 2, 1, 2), {}),
    (4, 4, MANY, (2, 1, 1, 2), TALK),
  ],
)
def test_rows_keep_their_experts_wherever_they_sit(
  rows, chunk, weights, mesh, draws, params, monkeypatch
):
  """With prompts that wait, rows that move together, texts that end turns, and replies."""
  monkeypatch.setattr(sampling, "_FEWEST_ROWS", 1)
  config, placed = on(mesh, params) if mesh else (MIXTURE, params)
  found = draw(config, placed, rows, chunk, weights, **draws)
  assert found.experts_PGTY.dtype == np.int8 and found.experts_PGTY.shape == (P, G, T, Y)
  is_token = np.arange(T) < found.lengths_PG[..., None]
  assert bool(draws) == (is_token & ~found.sampled_PGT).any()
  assert_of_model(MIXTURE, params, prompts(), found)


@pytest.mark.slow
def test_what_prompts_share_has_its_experts_in_each(params):
  tokens_PS, lengths_P = prompts()
  first = np.random.default_rng(1).integers(2, 31, 40)
  tokens_PS = np.concatenate([np.tile(first, (P, 1)), tokens_PS], 1).astype(np.int32)
  given = tokens_PS, lengths_P + 40
  assert sampling.shared_tokens(*given) == 32
  assert_of_model(MIXTURE, params, given, draw(MIXTURE, params, rows=5, given=given))


def test_many_experts_take_two_bytes():
  config = dataclasses.replace(MIXTURE, num_experts=128)
  assert config.experts_dtype == "int8"
  assert dataclasses.replace(config, num_experts=129).experts_dtype == "int16"


def test_experts_are_cut_with_the_tokens():
  tokens, experts = np.zeros((1, 2, 200)), np.zeros((1, 2, 200, Y), np.int8)
  found = cut((tokens, experts), np.array([[3, 90]]), 200)
  assert [x.shape for x in found] == [(1, 2, 100), (1, 2, 100, Y)]


# --- The learner ---


def on(mesh, params, config=MIXTURE):
  """The mixture on a mesh of (data, fsdp, tensor, expert)."""
  made = make_mesh(Mesh(*mesh[:3], mesh[3]), jax.devices()[: int(np.prod(mesh))])
  config = dataclasses.replace(config, **model_shardings(config, made))
  return config, jax.device_put(params, param_specs(params, made))


def batch_of(completions, random_experts=False):
  """A batch of completions. With `random_experts`, tokens go where no router would send them."""
  prompts_PS, lengths_P = prompts()
  experts = completions.experts_PGTY, completions.prompt_experts_PSY
  if random_experts:
    rng = np.random.default_rng(2)
    shapes = [(*x.shape[:-1], L, X) for x in experts]
    all_of = [rng.permuted(np.broadcast_to(np.arange(X), shape), axis=-1) for shape in shapes]
    experts = [x[..., :U].reshape(*x.shape[:-2], Y).astype(np.int8) for x in all_of]
    experts[0][:, :, 3] = -1  # there, the learner's routers choose
  return Batch(
    prompts_PS=jnp.asarray(prompts_PS),
    prompt_lengths_P=jnp.asarray(lengths_P),
    completions_PGT=jnp.asarray(completions.tokens_PGT),
    mask_PGT=jnp.asarray(completions.sampled_PGT, jnp.float32),
    temperature_P=jnp.ones(P),
    experts_PGTY=jnp.asarray(experts[0]),
    prompt_experts_PSY=jnp.asarray(experts[1]),
  )


def random_completions():
  """Completions of all lengths that nothing had to draw."""
  rng = np.random.default_rng(4)
  lengths_PG1 = np.resize(np.arange(1, T + 1), (P, G, 1))
  return SimpleNamespace(
    tokens_PGT=rng.integers(2, MIXTURE.vocab_size, (P, G, T)),
    sampled_PGT=np.arange(T) < lengths_PG1,
    experts_PGTY=np.zeros((P, G, T, Y), np.int8),
    prompt_experts_PSY=np.zeros((*prompts()[0].shape, Y), np.int8),
  )


@functools.partial(jax.jit, static_argnums=(2, 3))
def value_and_grad(params, batch, config=MIXTURE, remat=False):
  options = learner.StatsOptions(config, Learner(logprob_chunk=16, remat=remat))
  weights = jax.random.normal(jax.random.key(2), (P, G, T))

  def loss(params):
    stats = learner.batch_stats(params, None, batch, options)
    return (weights * stats.logprobs_PGT).sum(), stats

  (_, stats), grads = jax.value_and_grad(loss, has_aux=True)(params)
  return stats, grads


def assert_close(ours, theirs):
  (stats, grads), (expected, expected_grads) = ours, theirs
  np.testing.assert_allclose(stats.logprobs_PGT, expected.logprobs_PGT, atol=1e-5)

  def close(x, y):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4 * max(1e-2, np.abs(y).max()))

  jax.tree.map(close, grads, expected_grads)


@pytest.fixture(scope="module")
def drawn(params):
  return draw(MIXTURE, params)


@pytest.mark.slow
def test_experts_of_the_same_numbers_change_nothing(params, drawn):
  """In float32, sampler and learner choose the same experts."""
  batch = batch_of(drawn)
  (stats, grads), without = (
    value_and_grad(params, batch),
    value_and_grad(params, batch.without_experts()),
  )
  assert_close((stats, grads), without)
  assert without[0].routing.compared_BL is None
  np.testing.assert_array_equal(stats.routing.assigned_BLX, without[0].routing.assigned_BLX)
  # All tokens of completions but the last ones, in each layer.
  compared_P = np.maximum(drawn.lengths_PG - 1, 0).sum(1)
  np.testing.assert_array_equal(stats.routing.compared_BL, np.tile(compared_P[:, None], L))
  assert (stats.routing.differs_BL == 0).all()
  router = grads["layers_1"]["experts"]["router"]
  assert (np.abs(router).max((1, 2)) > 1e-4).all()


def used(batch):
  """How many counted tokens each expert has, by the batch: [P, L, X]."""
  S_, T_ = batch.prompts_PS.shape[1], batch.completions_PGT.shape[2]
  lengths_PG = np.asarray(batch.mask_PGT).sum(-1)
  of_prompts = np.arange(S_) < np.asarray(batch.prompt_lengths_P)[:, None]
  predicts = np.arange(T_) < lengths_PG[..., None] - 1
  own = np.eye(X)[sets(batch.experts_PGTY)] * predicts[..., None, None, None]
  prompt = np.eye(X)[sets(batch.prompt_experts_PSY)] * of_prompts[..., None, None, None]
  return own.sum((1, 2, 4)) + prompt.sum((1, 3))


@pytest.mark.slow
def test_what_a_sampler_in_bfloat16_chose_is_used(params):
  """The learner computes in float32, where its routers would choose others for some tokens."""
  batch = batch_of(draw(dataclasses.replace(MIXTURE, dtype="bfloat16"), params))

  @functools.partial(jax.jit, static_argnums=1)
  def routing(batch, replays):
    return completion_features(params, MIXTURE, batch, "", replays)[1]

  replayed, apart = routing(batch, True), routing(batch, False)
  assert apart.differs_BL.sum() > 0
  assert (apart.assigned_BLX != used(batch)).any()
  np.testing.assert_array_equal(replayed.assigned_BLX, used(batch))


@pytest.mark.slow
@pytest.mark.parametrize(
  "slots, remat",
  [
    (20, False),
    (0, True),
    (33, True),
  ],
)
def test_packed_rows_go_through_the_same_experts(slots, remat, params, drawn):
  batch = batch_of(drawn, random_experts=True)
  expected, grads = value_and_grad(params, batch)
  needed = int(np.maximum(drawn.lengths_PG - 1, 0).sum(1).max())
  stats, own_grads = value_and_grad(
    params, batch.replace(slots=slots and max(slots, needed)), MIXTURE, remat
  )
  assert_close((stats, own_grads), (expected, grads))
  np.testing.assert_array_equal(stats.routing.assigned_BLX, expected.routing.assigned_BLX)
  np.testing.assert_array_equal(stats.routing.differs_BL, expected.routing.differs_BL)
  assert expected.routing.differs_BL.sum() > 0.5 * expected.routing.compared_BL.sum() > 0
  plain, _ = value_and_grad(params, batch.without_experts())
  assert np.abs(plain.logprobs_PGT - expected.logprobs_PGT).max() > 1e-2


@pytest.mark.slow
def test_micro_batches_and_the_old_log_probs_use_them(params):
  batch = batch_of(random_completions(), random_experts=True)
  options = learner.StatsOptions(MIXTURE, Learner())
  logprobs = learner.logprobs_pass(options, 2)
  expected = jax.jit(learner.batch_stats, static_argnums=3)(params, None, batch, options)
  found = logprobs(params, batch)
  np.testing.assert_allclose(found, expected.logprobs_PGT, atol=1e-5)
  others = batch.replace(experts_PGTY=(batch.experts_PGTY + 1) % X)
  assert np.abs(logprobs(params, others) - found).max() > 1e-2


@pytest.mark.slow
def test_the_reference_of_a_whole_kl_routes_by_itself(params, drawn):
  """So its KL from the policy of the same parameters is not 0 where the experts are others."""
  options = learner.StatsOptions(MIXTURE, Learner(), full_kl=True)
  stats = jax.jit(learner.batch_stats, static_argnums=3)
  same = stats(params, params, batch_of(drawn), options)
  other = stats(params, params, batch_of(drawn, random_experts=True), options)
  np.testing.assert_allclose(same.full_kl_PGT, 0, atol=1e-6)
  assert np.abs(other.full_kl_PGT).max() > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 2, 1, 2), (2, 1, 2, 1)], ids=str)
def test_a_mesh_changes_no_number(mesh, params, drawn):
  batch = batch_of(drawn, random_experts=True)
  config, placed = on(mesh, params)
  on_mesh = jax.device_put(batch, batch_sharding(config.rows.mesh))
  found = value_and_grad(placed, on_mesh, config)
  assert_close(jax.device_get(found), value_and_grad(params, batch))


# --- A run ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return make_folder(tmp_path_factory.mktemp("mixture") / "hf")


def run_config(folder, replays=True, **algo):
  config = with_section(small_config(**algo), "model", path=str(folder))
  return with_section(config, "learner", router_replay=replays)


def run_of(folder):
  """With a reference, and two updates with the batch, of which the first has the same policy."""
  config = small_config(kl_coef=0.1, updates_per_batch=2, old_logprobs="recomputed")
  config = with_section(config, "model", path=str(folder))
  return small_run(with_section(config, "learner", router_replay=True))


@pytest.mark.slow
def test_a_run_learns_what_it_sampled(folder, tmp_path):
  """The reference routes by itself, and old log-probs that are computed again do not."""
  run, has_experts = run_of(folder), []
  logprobs = run.programs.logprobs

  def watched(params, batch):
    has_experts.append(batch.experts_PGTY is not None)
    return logprobs(params, batch)

  run.programs.logprobs = watched
  step, store, _ = grpo_step(run, tmp_path)
  metrics = step(store.restore_or_init()[0], 0).metrics
  assert has_experts == [False, True]
  assert metrics["router/differs"] == 0 and metrics["sampler/logprob_gap_max"] < 1e-4


@pytest.mark.slow
def test_a_plan_has_the_experts(folder):
  """A byte for each of them in the largest batch, which is an argument of the update."""
  run = run_of(folder)
  sizes = {}
  for program in programs(run):
    for stage in program.stages:
      lowered = stage.lower()
    sizes[program.name] = [x.dtype.name for x in jax.tree.leaves(lowered.args_info)]
  assert {name: "int8" in dtypes for name, dtypes in sizes.items()} == {
    "sample": False,
    "reference": False,
    "old log-probs": True,
    "update": True,
  }


@pytest.mark.parametrize(
  "section, values, message",
  [
    (
      "learner",
      dict(router_replay=True),
      "config key learner.router_replay is True: the model has no experts; set False",
    ),
    (
      "learner",
      dict(router_bias_rate=0.001),
      "config key learner.router_bias_rate is 0.001: the model has no experts; set 0",
    ),
  ],
)
def test_a_model_without_experts_has_no_routers(section, values, message):
  with pytest.raises(ConfigError) as error:
    Run(with_section(small_config(), section, **values))
  assert str(error.value) == message


def test_a_harness_keeps_no_experts():
  config = with_section(small_config(), "learner", router_replay=True)
  config = with_section(config, "environment", harness="file.py:play")
  with pytest.raises(ConfigError, match=r"learner\.router_replay is True: .*environment\.harness"):
    check_config(config)
