"""The gated delta rule: its chunks equal its definition, with gradients, padding and memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.model.config import DeltaShape
from grpo_jax.model.mixers import delta

SHAPE = DeltaShape(key_heads=2, value_heads=6, key_dim=8, value_dim=5, width=4)
B, J, R, A, N = 3, 2, 3, 8, 5


def rows(T, alike=0.0):
  """Random queries, keys, values, decays, strengths and states. `alike` keys have one direction."""
  rng = np.random.default_rng(T)
  q, k = rng.normal(size=(2, B, T, J, A))
  k = (1 - alike) * k + alike
  q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
  v = rng.normal(size=(B, T, J, R, N))
  log_decay = -rng.exponential(0.1, (B, T, J, R)) * (alike == 0)
  strength = rng.uniform(0, 1, (B, T, J, R)) ** (1 if alike == 0 else 0.01)
  return q, k, v, log_decay, strength, rng.normal(size=(B, J, R, A, N))


def by_definition(q, k, v, log_decay, strength, state):
  """Token by token in float64: S <- a S + b k (v - k^T a S)^T, and q^T S is read."""
  out, state = np.zeros(v.shape), state.copy()
  for b, t, j, r in np.ndindex(v.shape[:-1]):
    S = np.exp(log_decay[b, t, j, r]) * state[b, j, r]
    S = S + strength[b, t, j, r] * np.outer(k[b, t, j], v[b, t, j, r] - k[b, t, j] @ S)
    out[b, t, j, r], state[b, j, r] = q[b, t, j] @ S, S
  return out, state


def in_float32(inputs):
  return [jnp.asarray(x, jnp.float32) for x in inputs]


@pytest.mark.parametrize(
  "T, alike", [(1, 0), (2, 0), (3, 0), (64, 0), (65, 0), (150, 0), (150, 0.999)]
)
def test_chunks_equal_the_definition(T, alike):
  """Also where keys are alike and nothing decays, which a series of powers would not survive."""
  inputs = rows(T, alike)
  expected = by_definition(*inputs)
  found = jax.jit(delta.in_chunks)(*in_float32(inputs))
  for ours, theirs in zip(found, expected, strict=True):
    np.testing.assert_allclose(ours, theirs, atol=2e-4 if alike else 2e-5)


def test_one_token_equals_the_definition():
  inputs = rows(1)
  for ours, theirs in zip(
    delta.one_token(*in_float32(inputs)), by_definition(*inputs), strict=True
  ):
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_nothing_of_one_token_reads_the_state_that_is_written():
  """A TPU would keep two copies of all layers' states, and move each of them in every layer."""
  jaxpr = jax.make_jaxpr(delta.one_token)(*in_float32(rows(1))).jaxpr
  _, state = jaxpr.outvars
  assert not [eqn for eqn in jaxpr.eqns if state in eqn.invars]


def test_the_gradient_of_chunks_is_that_of_single_tokens():
  inputs = in_float32(rows(70))

  def token_by_token(*inputs):
    *of_tokens, state = inputs

    def step(state, x):
      out, state = delta.one_token(*(y[:, None] for y in x), state)
      return state, out[:, 0]

    state, out = jax.lax.scan(step, state, [x.swapaxes(0, 1) for x in of_tokens])
    return out.swapaxes(0, 1), state

  def loss(rule, inputs):
    out, state = rule(*inputs)
    return jnp.sin(out).sum() + jnp.cos(state).sum()

  ours = jax.jit(jax.grad(loss, argnums=1), static_argnums=0)(delta.in_chunks, inputs)
  theirs = jax.jit(jax.grad(loss, argnums=1), static_argnums=0)(token_by_token, inputs)
  for x, y in zip(ours, theirs, strict=True):
    np.testing.assert_allclose(x, y, atol=1e-4 * float(jnp.abs(y).max()))


def tails(rng, *outer):
  """Random `Tails` whose arrays begin with these axes."""
  shapes = (J, A), (J, A), (J, R, N)
  return delta.Tails(*(jnp.asarray(rng.normal(size=(*outer, *x)), jnp.float32) for x in shapes))


@jax.jit
def scanned(tokens, memory, is_token_BT=None):
  return delta.scan_tokens(tails(np.random.default_rng(9), 4), tokens, memory, is_token_BT)


def some_tokens(T):
  rng = np.random.default_rng(1)
  return delta.Tokens(
    tails(rng, B, T),
    jnp.asarray(-rng.exponential(0.1, (B, T, J, R)), jnp.float32),
    jnp.asarray(rng.uniform(0, 1, (B, T, J, R)), jnp.float32),
  )


EMPTY = delta.Memory(
  jnp.zeros((B, J, R, A, N)),
  delta.Tails(jnp.zeros((B, J, 3, A)), jnp.zeros((B, J, 3, A)), jnp.zeros((B, J, 3, R, N))),
)


@pytest.mark.parametrize(
  "first", [1, 5, *(pytest.param(x, marks=pytest.mark.slow) for x in (2, 9))]
)
def test_a_row_goes_on_from_its_memory(first):
  tokens = some_tokens(10)
  expected, end = scanned(tokens, EMPTY)
  _, memory = scanned(jax.tree.map(lambda x: x[:, :first], tokens), EMPTY)
  out, found = scanned(jax.tree.map(lambda x: x[:, first:], tokens), memory)
  np.testing.assert_allclose(out, expected[:, first:], atol=1e-5)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), found, end)


def test_padding_does_not_change_the_memory():
  """Rows of 10, 2 and 0 tokens."""
  tokens, lengths = some_tokens(10), (10, 2, 0)
  is_token_BT = jnp.arange(10) < jnp.asarray(lengths)[:, None]
  _, found = scanned(tokens, EMPTY, is_token_BT)
  for row, length in enumerate(lengths):
    own = jax.tree.map(lambda x, n=length: x[:, :n], tokens)
    alone = scanned(own, EMPTY)[1] if length else EMPTY
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(alone), strict=True):
      np.testing.assert_allclose(ours[row], theirs[row], atol=1e-5)


@pytest.mark.parametrize("T", [256, 300])
@pytest.mark.parametrize("is_padded", [False, True])
def test_segments_change_no_number(T, is_padded, monkeypatch):
  """Outputs, memories and gradients of rows in segments of 128 are those of whole rows."""
  tokens = some_tokens(T)
  rng = np.random.default_rng(2)
  memory = delta.Memory(
    jnp.asarray(rng.normal(size=EMPTY.state.shape), jnp.float32),
    jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), EMPTY.tails),
  )
  # The rows end in the first segment, in the last one, and at the end of a segment.
  is_token_BT = jnp.arange(T) < jnp.array([[70], [T - 1], [128]]) if is_padded else None

  def loss(weights, tokens, memory):
    out, memory = delta.scan_tokens(weights, tokens, memory, is_token_BT)
    if is_padded:
      out = jnp.where(is_token_BT[..., None, None, None], out, 0)
    sums = jax.tree.map(lambda x: jnp.sin(x).sum(), (out, memory))
    return sum(jax.tree.leaves(sums)), (out, memory)

  def computed():
    gradient = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
    return jax.jit(gradient)(tails(np.random.default_rng(9), 4), tokens, memory)

  expected = computed()
  monkeypatch.setattr(delta, "SEGMENT", 128)
  found = computed()
  for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(ours, theirs, atol=2e-5 * max(1, float(jnp.abs(theirs).max())))


def test_the_backward_pass_keeps_little_of_a_long_row(monkeypatch):
  tokens = jax.eval_shape(lambda: some_tokens(2048))

  def kept(segment):
    monkeypatch.setattr(delta, "SEGMENT", segment)

    def backward(tokens):
      return jax.vjp(lambda tokens: scanned.__wrapped__(tokens, EMPTY), tokens)[1]

    return sum(x.size for x in jax.tree.leaves(jax.eval_shape(backward, tokens)))

  inputs = sum(x.size for x in jax.tree.leaves(tokens))
  # Without segments, the arrays of all chunks are kept. With them, the inputs and eight memories.
  assert kept(2048) > 5 * inputs
  assert kept(256) < 1.2 * inputs
