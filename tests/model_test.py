"""The decoder: causality, the cache, the shared prefix and dtypes."""

import dataclasses
import functools

from flax.traverse_util import flatten_dict
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import model
from grpo_jax.model.attention.softmax import as_int8
from grpo_jax.model.layers import einsum, matmul
from grpo_jax.model.rope import angles, rotate

CONFIG = model.ModelConfig(
  vocab_size=37, embed_dim=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=24
)


forward = jax.jit(model.forward, static_argnums=1)
features = jax.jit(model.features, static_argnums=1)


@pytest.fixture(scope="module")
def params():
  """Random parameters, biases and norms included."""
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), CONFIG))
  return jax.tree.map(lambda x: jnp.asarray(rng.normal(0.2, 0.4, x.shape), jnp.float32), shapes)


def tokens(B, T, seed=0):
  return jax.random.randint(jax.random.key(seed), (B, T), 0, CONFIG.vocab_size)


def positions(B, T, start=0):
  return jnp.broadcast_to(start + jnp.arange(T), (B, T))


def test_a_token_sees_only_itself_and_earlier_tokens(params):
  """The gradient of the features of token t by the embedding of token s is 0 exactly if s > t."""
  x = tokens(1, 6)

  def shifted_features(shift_TD):
    shifted = dict(
      params, embed={"embedding": jnp.concatenate([params["embed"]["embedding"][x[0]] + shift_TD])}
    )
    config = dataclasses.replace(CONFIG, vocab_size=6)
    return model.features(shifted, config, jnp.arange(6)[None], positions(1, 6))[0][0].sum(-1)

  jacobian = jnp.abs(jax.jit(jax.jacrev(shifted_features))(jnp.zeros((6, 16)))).sum(-1)
  np.testing.assert_array_equal(np.array(jacobian) > 0, np.tril(np.ones((6, 6), bool)))


def test_attention_depends_on_relative_positions_only(params):
  """Rotary embeddings: the logits stay the same if all positions move by 100."""
  x = tokens(2, 7)
  near, _ = forward(params, CONFIG, x, positions(2, 7))
  far, _ = forward(params, CONFIG, x, positions(2, 7, 100))
  np.testing.assert_allclose(near, far, atol=2e-4)
  assert np.abs(np.array(near - forward(params, CONFIG, x, 2 * positions(2, 7))[0])).max() > 1e-2


def test_rotation_by_hand():
  """With E = 2 the only frequency is theta^0 = 1, so position p turns (1, 0) by p radians."""
  for table in (False, True):
    rope = angles(jnp.array([[0, 2]]), 2, 10000.0, None, 3, table)
    out = rotate(jnp.array([[[[1.0, 0.0]], [[1.0, 0.0]]]]), rope)
    np.testing.assert_allclose(out[0, :, 0], [[1, 0], [np.cos(2), np.sin(2)]], atol=1e-6)


def grouped(params, P=2, G=3, S=5, T=6, lengths=(5, 3)):
  """A batch whose rows share prompts, and its logits computed without sharing.

  Returns:
    The prefix of the prompts, the rows' own tokens [P * G, T], their positions, and the logits of
    these tokens, computed row by row without a cache.
  """
  prompts, own, lengths = tokens(P, S), tokens(P * G, T, 1), jnp.array(lengths)
  _, cache = features(params, CONFIG, prompts, positions(P, S))
  plain = []
  for row in range(P * G):
    n = int(lengths[row // G])
    padding = jnp.zeros(S - n, jnp.int32)
    whole = jnp.concatenate([prompts[row // G, :n], own[row], padding])[None]
    logits, _ = forward(params, CONFIG, whole, positions(1, S + T))
    plain.append(logits[0, n : n + T])
  own_positions = jnp.repeat(lengths, G)[:, None] + jnp.arange(T)
  return model.as_prefix(cache, lengths), own, own_positions, jnp.stack(plain)


@pytest.mark.slow
def test_decoding_with_a_growing_cache_equals_one_pass_without_a_cache(params):
  prefix, own, at, plain = grouped(params)
  cache = model.empty_cache(CONFIG, prefix, 3, slots=3)
  for t in range(6):
    if t == 3:
      cache = model.with_slots(CONFIG, cache, 6)
    logits, cache = forward(params, CONFIG, own[:, t : t + 1], at[:, t : t + 1], cache)
    np.testing.assert_allclose(logits[:, 0], plain[:, t], atol=5e-5)


def test_int8_rounds_each_vector_by_half_of_its_127th_at_most():
  x = jax.random.normal(jax.random.key(0), (40, 3, 16)) * jnp.logspace(-6, 6, 40)[:, None, None]
  x = x.at[7].set(0)
  found = as_int8(x)
  assert found.values.dtype == jnp.int8 and found.scales.shape == (40, 3, 1)
  error = jnp.abs(found.values * found.scales - x) / jnp.abs(x).max(-1, keepdims=True).clip(1e-30)
  assert 0.4 / 127 < error.max() <= 0.501 / 127 and (error[7] == 0).all()


@pytest.mark.slow
def test_decoding_with_a_cache_of_int8_is_near_to_one_pass_without_a_cache(params):
  prefix, own, at, plain = grouped(params)
  config = dataclasses.replace(CONFIG, cache_dtype="int8")
  cache = model.empty_cache(config, prefix, 3, slots=6)
  gaps = []
  for t in range(6):
    logits, cache = forward(params, config, own[:, t : t + 1], at[:, t : t + 1], cache)
    gaps.append(float(jnp.abs(logits[:, 0] - plain[:, t]).max()))
  assert all(leaf.dtype == jnp.int8 for leaf in (stack.values for stack in cache.keys.values()))
  assert 1e-5 < max(gaps) < 0.02 * float(plain.std())


@pytest.mark.slow
@pytest.mark.parametrize("windows", [(), (4, 4)])
def test_rows_that_come_and_go_are_what_they_are_alone(params, windows):
  """Rows start at different times in three seats of a group. The slots are used again and again."""
  config = dataclasses.replace(CONFIG, windows=windows, local_rope_theta=1e4 if windows else 0.0)
  P, G, S, T = 2, 3, 5, 6
  prompts, own, lengths = tokens(P, S), tokens(P * G, T, 1), jnp.array([5, 3])
  _, cache = features(params, config, prompts, positions(P, S))
  prefix = model.as_prefix(cache, lengths)
  alone = []
  for row in range(P * G):
    one = model.take_prompts(prefix, jnp.array([row // G]))
    cache = model.empty_cache(config, one, 1, slots=T)
    at = lengths[row // G] + jnp.arange(T)[None]
    alone.append(forward(params, config, own[row : row + 1], at, cache)[0][0])
  cache = model.empty_cache(config, prefix, G, slots=T)
  # Seat g of a prompt starts its row anew at times g, g + T, g + 2 T.
  for time in range(3 * T):
    age_G = np.array([(time - g) % T if time >= g else 0 for g in range(G)])
    age_B = np.tile(age_G, P)
    starts = jnp.asarray(age_G == 0)
    cache = cache.replace(lengths_PG=jnp.where(starts, 0, cache.lengths_PG))
    at = jnp.repeat(lengths, G)[:, None] + age_B[:, None]
    logits, cache = forward(params, config, own[np.arange(P * G), age_B][:, None], at, cache)
    for row in range(P * G):
      np.testing.assert_allclose(logits[row, 0], alone[row][age_B[row]], atol=5e-5)
    if time in (7, 12):  # the rows change places, and the second prompt is there twice
      order = np.array([[1, 0, 2], [5, 3, 4]])
      back = np.array([[1, 0, 2], [4, 5, 3]])
      moved = model.with_slots(config, model.take_rows(config, cache, order, np.arange(2)), T + 3)
      assert moved.slots == T + 3 and moved.time == T
      cache = model.with_slots(config, model.take_rows(config, moved, back, np.arange(2)), T)


def test_one_pass_after_a_shared_prefix_equals_one_pass_without_a_cache(params):
  prefix, own, at, plain = grouped(params)
  logits, cache = forward(params, CONFIG, own, at, model.empty_cache(CONFIG, prefix, 3, slots=6))
  np.testing.assert_allclose(logits, plain, atol=5e-5)
  assert cache.time == 6 and (cache.lengths_PG == 6).all()


def test_prompts_and_their_completions_in_one_pass_equal_rows_apart(params):
  """Neither what lies behind a prompt's end nor another completion changes a completion."""
  P, G, S, T = 2, 3, 5, 6
  prefix, own, at, plain = grouped(params)
  groups = model.Groups(prefix.lengths_P, S, G, T)
  np.testing.assert_array_equal(groups.positions[:, S:], at.reshape(P, G * T))
  tokens_PN = jnp.concatenate([tokens(P, S), own.reshape(P, G * T)], 1)
  hidden, routing = jax.jit(lambda p: model.group_features(p, CONFIG, tokens_PN, groups))(params)
  logits = model.unembed(params, CONFIG, hidden[:, S:].reshape(P * G, T, -1))
  np.testing.assert_allclose(logits, plain, atol=5e-5)
  alone, _ = features(params, CONFIG, tokens(P, S), positions(P, S))
  np.testing.assert_allclose(hidden[0, :S], alone[0], atol=5e-5)
  assert routing is None


def test_padding_does_not_change_the_tokens_before_it(params):
  x = tokens(1, 8)
  short, _ = forward(params, CONFIG, x[:, :5], positions(1, 5))
  long, _ = forward(params, CONFIG, x.at[:, 5:].set(0), positions(1, 8))
  np.testing.assert_allclose(short, long[:, :5], atol=1e-5)


def test_matmul_has_the_gradients_of_a_product():
  keys = jax.random.split(jax.random.key(0), 3)
  for n_in, n_out in ((3, 7), (7, 3)):
    shapes = (5, n_in), (n_in, n_out), (5, n_out)
    x, w, dy = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes))

    def gradients(f, x=x, w=w, dy=dy):
      return jax.jit(lambda x, w: jax.vjp(f, x, w)[1](dy))(x, w)

    for on_cpu in (True, False):
      of_ours = gradients(functools.partial(matmul, on_cpu))
      for ours, plain in zip(of_ours, gradients(jnp.matmul), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)


def test_bfloat16_computes_near_float32_and_master_weights_stay_float32(params):
  config = dataclasses.replace(CONFIG, dtype="bfloat16")
  x, at = tokens(2, 6), positions(2, 6)
  hidden, cache = features(params, config, x, at)
  logits, _ = forward(params, config, x, at)
  assert (
    hidden.dtype == cache.keys["layers_0"].dtype == jnp.bfloat16 and logits.dtype == jnp.float32
  )
  assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
  exact, _ = forward(params, CONFIG, x, at)
  assert 0 < np.abs(np.array(logits - exact)).max() < 0.05 * np.abs(np.array(exact)).max()


@pytest.mark.parametrize("tied", [True, False])
def test_init_makes_a_head_unless_embeddings_are_tied(tied):
  config = dataclasses.replace(CONFIG, tie_embeddings=tied)
  tree = jax.eval_shape(functools.partial(model.init, config=config), jax.random.key(0))
  assert ("head" in tree) != tied
  assert tree["layers_0"]["attention"]["k"]["kernel"].shape == (2, 16, 2, 8)
  assert tree["layers_0"]["mlp"]["down"]["kernel"].shape == (2, 24, 16)


MOE = dict(num_experts=4, experts_per_token=2, expert_dim=12)
# Of a model: how it differs from CONFIG, and the `checksum` of the parameters that `init` draws.
DRAWN = [
  (dict(), 14600.6942),
  (dict(tie_embeddings=False), 16579.0524),
  (dict(labels=1), 14643.9872),
  (dict(labels=2, tie_embeddings=False), 14701.4401),
  (dict(qkv_bias=False, qk_norm="head", post_norms=True, windows=(4, 0, 4)), 38169.1163),
  (dict(sparse_layers=(0, 1, 2), tie_embeddings=False, **MOE), 28342.3184),
  (dict(sparse_layers=(1,), **MOE), 41599.1829),
]


@pytest.mark.parametrize(
  "changes, expected",
  [DRAWN[0], *(pytest.param(*drawn, marks=pytest.mark.slow) for drawn in DRAWN[1:])],
)
def test_a_seed_gives_the_same_parameters_for_ever(changes, expected):
  """Old runs and the results of the quick start depend on it."""
  config = dataclasses.replace(CONFIG, num_layers=3, **changes)
  leaves = flatten_dict(model.init(jax.random.key(7), config), sep="/")
  checksum = sum(
    number * np.abs(np.asarray(leaves[name], np.float64)).sum()
    for number, name in enumerate(sorted(leaves), 1)
  )
  np.testing.assert_allclose(checksum, expected, rtol=1e-6)


@pytest.mark.parametrize("product", ["matmul", "einsum"])
def test_a_policy_of_remat_sees_the_products_of_a_layer(product):
  """One forward product, two backward, and one that is computed again if it was not kept."""
  x, kernel = jnp.ones((3, 4)), jnp.ones((4, 5))

  def layer(x, kernel):
    multiply = {"matmul": matmul, "einsum": einsum}[product]
    return jnp.sin(multiply({"matmul": False, "einsum": "ni,io->no"}[product], x, kernel))

  def products(policy):
    kept = jax.checkpoint(layer, policy=getattr(jax.checkpoint_policies, policy))
    gradient = jax.grad(lambda *given: kept(*given).sum(), argnums=(0, 1))
    return str(jax.make_jaxpr(gradient)(x, kernel)).count("dot_general[")

  assert products("nothing_saveable") == 4
  assert products("dots_with_no_batch_dims_saveable") == 3
