"""Every implementation of attention computes what the definition says, and what the others do."""

import dataclasses
import functools

import jax
from jax._src.cudnn import fused_attention_stablehlo as cudnn_in_jax
from jax.experimental.pallas.ops.tpu.splash_attention import LocalMask
from jax.extend.core import jaxprs_in_params
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np
import pytest

from grpo_jax.model import attention
from grpo_jax.model.attention import View, chunked, cudnn, dense, splash
from grpo_jax.model.attention.by_rows import by_rows

# Each implementation as it runs on a CPU.
HERE = {
  "dense": dense.attend,
  "chunked": chunked.attend,
  "splash": by_rows(splash.make_attend_rows(interpret=True)),
  "cudnn": cudnn.make_attend("xla"),
}


@dataclasses.dataclass(frozen=True)
class Case:
  view: View
  lengths: tuple[int, ...]
  heads: int = 4
  kv_heads: int = 2
  size: int = 16

  def arrays(self, dtype=np.float32):
    """Queries, keys, values and a cotangent, which is 0 at the padding of prompts."""
    rng = np.random.default_rng(0)
    v, P = self.view, len(self.lengths)
    N = v.prompt_slots + v.completions * v.slots
    q, k, values, cotangent = (
      rng.standard_normal((P, N, heads, self.size)).astype(np.float32)
      for heads in (self.heads, self.kv_heads, self.kv_heads, self.heads)
    )
    cotangent[~self.real()] = 0
    return tuple(jnp.asarray(x, dtype) for x in (2 * q / self.size**0.5, k, values, cotangent))

  def real(self):
    """[P, N]: True where there is a token."""
    v = self.view
    lengths_P1 = np.array(self.lengths)[:, None]
    prompt = np.arange(v.prompt_slots) < lengths_P1
    return np.pad(prompt, ((0, 0), (0, v.completions * v.slots)), constant_values=True)

  def mask(self):
    """[P, N, N]: True where one token sees another, token by token."""
    v, real = self.view, self.real()
    P, N = real.shape
    mask = np.zeros((P, N, N), bool)
    for p, i, j in np.ndindex(P, N, N):
      row_i, place_i = self.where(p, i)
      row_j, place_j = self.where(p, j)
      sees = row_j in (0, row_i) and place_j <= place_i and real[p, j]
      mask[p, i, j] = (sees and (not v.window or place_i - place_j < v.window)) or i == j
    return mask

  def where(self, p, slot):
    """The row of a slot, 0 for the prompt, and the position of its token."""
    v = self.view
    if slot < v.prompt_slots:
      return 0, slot
    return 1 + (slot - v.prompt_slots) // v.slots, self.lengths[p] + (
      slot - v.prompt_slots
    ) % v.slots


CASES = {
  "odd": Case(View(7, 3, 5), (1, 7), heads=6, kv_heads=2, size=20),
  "prompts only": Case(View(9), (4, 9)),
  "prompts with a window": Case(View(9, window=3), (4, 9)),
  "one token": Case(View(6, 4, 1, window=1), (6, 2), heads=2, kv_heads=2),
  "window and cap": Case(View(8, 2, 6, window=5, cap=1.5), (8, 3, 1), heads=2, size=80),
  "long window": Case(View(9, 2, 3, window=7), (4, 9)),
  "idle window": Case(View(4, 2, 3, window=7), (2, 4), heads=2, kv_heads=1, size=64),
}
# Several blocks and chunks.
LONG = {
  "long": Case(View(131, 1, 140), (100,), heads=2, kv_heads=1),
  "long with a window": Case(View(130, 1, 200, window=9, cap=2.0), (120,), heads=2, kv_heads=1),
}


def naive(q_PNHE, k_PNKE, v_PNKE, mask_PNN, cap):
  repeats = q_PNHE.shape[2] // k_PNKE.shape[2]
  k_PNHE, v_PNHE = (jnp.repeat(x, repeats, axis=2) for x in (k_PNKE, v_PNKE))
  scores = jnp.einsum("pihe,pjhe->phij", q_PNHE, k_PNHE)
  scores = cap * jnp.tanh(scores / cap) if cap else scores
  weights = jax.nn.softmax(jnp.where(mask_PNN[:, None], scores, -jnp.inf))
  return jnp.einsum("phij,pjhe->pihe", weights, v_PNHE)


def with_gradients(attend, case, view=None, dtype=np.float32):
  """The outputs, 0 at the padding of prompts, and the gradients of queries, keys and values.

  The cotangent of the outputs at the padding is 0. With any other one, all must be finite.
  """
  *arrays, cotangent = case.arrays(dtype)
  lengths_P = jnp.array(case.lengths, jnp.int32)

  @jax.jit
  def run(arrays, cotangent):
    out, vjp = jax.vjp(lambda *x: attend(*x, lengths_P, view or case.view), *arrays)
    return out, *vjp(cotangent)

  assert all(bool(jnp.isfinite(x).all()) for x in run(arrays, jnp.ones_like(cotangent)))
  results = run(arrays, cotangent)
  assert all(x.dtype == dtype and bool(jnp.isfinite(x).all()) for x in results)
  out, *gradients = (np.asarray(x, np.float32) for x in results)
  return [np.where(case.real()[..., None, None], out, 0), *gradients]


@functools.lru_cache
def expected(case):
  mask = jnp.asarray(case.mask())
  return with_gradients(lambda q, k, v, _, view: naive(q, k, v, mask, view.cap), case)


def assert_close(results, wanted, bound=1e-5):
  for name, result, want in zip(("out", "dq", "dk", "dv"), results, wanted, strict=True):
    largest = max(1, np.abs(want).max())
    np.testing.assert_allclose(result / largest, want / largest, rtol=0, atol=bound, err_msg=name)


# Slow tests, but for `dense`. The other cases have prompts, windows, caps and groups, too.
_SLOW = {"odd", "prompts only", "prompts with a window", "one token", "long window", "idle window"}


@pytest.mark.parametrize(
  "name, case",
  [
    pytest.param(
      name,
      case,
      id=f"{name}-{title}",
      marks=pytest.mark.slow if name != "dense" and title in _SLOW else (),
    )
    for name in HERE
    for title, case in CASES.items()
  ],
)
def test_outputs_and_gradients_are_those_of_the_definition(name, case):
  if name == "cudnn" and case.view.cap:
    pytest.skip("cudnn has no caps")
  assert_close(with_gradients(HERE[name], case), expected(case))


def naive_with_sinks(q_PNHE, k_PNKE, v_PNKE, mask_PNN, sinks_H):
  """A sink is one more key of each head, of this score and with a value of 0."""
  repeats = q_PNHE.shape[2] // k_PNKE.shape[2]
  k_PNHE, v_PNHE = (jnp.repeat(x, repeats, axis=2) for x in (k_PNKE, v_PNKE))
  scores = jnp.einsum("pihe,pjhe->phij", q_PNHE, k_PNHE)
  scores = jnp.where(mask_PNN[:, None], scores, -jnp.inf)
  sinks = jnp.broadcast_to(sinks_H[:, None, None], (*scores.shape[:-1], 1))
  weights = jax.nn.softmax(jnp.concatenate([scores, sinks], -1))[..., :-1]
  return jnp.einsum("phij,pjhe->pihe", weights, v_PNHE)


@pytest.mark.parametrize(
  "name, mesh_shape",
  [
    ("dense", None),
    ("chunked", None),
    pytest.param("splash", None, marks=pytest.mark.slow),
    pytest.param("chunked", (2, 2), marks=pytest.mark.slow),
  ],
)
def test_sinks_take_part_in_the_softmax(name, mesh_shape):
  """Some far above all scores and some far below, with a gradient of their own."""
  case = Case(View(8, 2, 6, window=5), (8, 3), heads=4)
  *arrays, cotangent = case.arrays()
  arrays.append(jnp.asarray([20.0, 1.0, -0.5, -30.0]))
  mask, lengths_P, view = jnp.asarray(case.mask()), jnp.array(case.lengths), case.view
  if mesh_shape:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(mesh_shape), ("data", "tensor"))
    view = dataclasses.replace(view, rows=NamedSharding(mesh, PartitionSpec(("data",))))

  def found(q, k, v, sinks_H):
    return HERE[name](q, k, v, lengths_P, dataclasses.replace(view, sinks_H=sinks_H))

  def by_definition(q, k, v, sinks_H):
    return naive_with_sinks(q, k, v, mask, sinks_H)

  def results(attend):
    out, vjp = jax.vjp(attend, *arrays)
    return np.where(case.real()[..., None, None], out, 0), *vjp(cotangent)

  for ours, theirs in zip(results(jax.jit(found)), results(jax.jit(by_definition)), strict=True):
    np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", LONG.values(), ids=LONG)
@pytest.mark.parametrize("name", ["chunked", "splash"])
def test_blocks_and_chunks_join_without_a_seam(name, case, monkeypatch):
  monkeypatch.setattr(chunked, "MAX_CHUNK", 24)
  monkeypatch.setattr(splash, "BLOCKS", (128,))
  assert_close(with_gradients(HERE[name], case), with_gradients(dense.attend, case))


@pytest.mark.parametrize(
  "name",
  [pytest.param(x, marks=pytest.mark.slow if x == "splash" else ()) for x in HERE],
)
def test_bfloat16(name):
  case = CASES["odd"]
  assert_close(with_gradients(HERE[name], case, dtype=jnp.bfloat16), expected(case), bound=0.02)


@pytest.mark.parametrize(
  "name, mesh_shape, heads, kv_heads",
  [
    pytest.param("splash", (2, 2), 4, 2, marks=pytest.mark.slow),
    ("chunked", (1, 4), 4, 2),  # keys and values are repeated
    pytest.param("chunked", (2, 2), 3, 1, marks=pytest.mark.slow),  # the heads stay whole
    ("cudnn", (2, 2), 4, 2),
  ],
)
def test_groups_and_heads_split_over_a_mesh(name, mesh_shape, heads, kv_heads):
  case = Case(View(5, 2, 4), (5, 3), heads, kv_heads)
  mesh = Mesh(np.array(jax.devices()[:4]).reshape(mesh_shape), ("data", "tensor"))
  rows = NamedSharding(mesh, PartitionSpec(("data",)))
  view = dataclasses.replace(case.view, rows=rows)
  assert_close(with_gradients(HERE[name], case, view), expected(case))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chunked", "splash"])
def test_no_array_is_as_large_as_the_scores(name):
  S, T = 512, 8192
  view = View(S, 1, T)

  def loss(q, k, v, lengths_P):
    return attention.implementation(name)(q, k, v, lengths_P, view).sum()

  x = jax.ShapeDtypeStruct((1, S + T, 1, 64), jnp.bfloat16)
  lengths_P = jax.ShapeDtypeStruct((1,), jnp.int32)
  jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(x, x, x, lengths_P)
  assert largest_size(jaxpr.jaxpr) <= 512 * (S + T)


def largest_size(jaxpr):
  """The number of elements of the largest array in a program."""
  sizes = [x.aval.size for e in jaxpr.eqns for x in e.outvars if hasattr(x.aval, "size")]
  inner = [largest_size(sub) for e in jaxpr.eqns for sub in jaxprs_in_params(e.params)]
  return max(sizes + inner, default=0)


@pytest.mark.parametrize("window", [0, 1, 130, 255, 256, 700])
def test_splash_classifies_blocks_as_the_library_does(window):
  mask = splash.mask_of(512, 384, window)
  for i, j in np.ndindex(4, 7):
    block = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
    entries = LocalMask.__getitem__(mask, block)
    assert mask[block].any() == entries.any() and mask[block].all() == entries.all()


def test_cudnn_lowers_to_its_kernels(monkeypatch):
  monkeypatch.setattr(cudnn_in_jax, "check_cudnn_version", lambda: 91000)
  view = View(7, 3, 5, window=4)

  def loss(q, k, v, lengths_P):
    return cudnn.attend(q, k, v, lengths_P, view).astype(jnp.float32).sum()

  q, k = (jax.ShapeDtypeStruct((2, 22, heads, 16), jnp.bfloat16) for heads in (4, 2))
  lengths_P = jax.ShapeDtypeStruct((2,), jnp.int32)
  traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(q, k, k, lengths_P)
  text = traced.lower(lowering_platforms=("cuda",)).as_text()
  assert text.count("@__cudnn$fmhaSoftmax(") == text.count("@__cudnn$fmhaSoftmaxBackward(") == 1
  assert text.count(r"\22sliding_window_length\22: 4,") == 2
  assert text.count(r"\22mask_type\22: \22CAUSAL\22") == 2


@pytest.mark.parametrize(
  "arguments, name, reason",
  [
    (("auto", "cpu", "float32", 64), "dense", ""),
    (("auto", "tpu", "bfloat16", 64), "splash", ""),
    (("auto", "tpu", "float32", 64, 50.0), "splash", ""),
    (("auto", "gpu", "bfloat16", 128), "cudnn", ""),
    (("auto", "gpu", "float32", 128), "chunked", "bfloat16 and float16, not float32"),
    (("auto", "gpu", "bfloat16", 256), "chunked", "heads of up to 128 in steps of 8, not 256"),
    (("auto", "gpu", "bfloat16", 20), "chunked", "heads of up to 128 in steps of 8, not 20"),
    (("auto", "gpu", "bfloat16", 64, 50.0), "chunked", "cannot cap the scores"),
    (("dense", "tpu", "bfloat16", 64), "dense", ""),
    (("chunked", "cpu", "float32", 64), "chunked", ""),
    (("splash", "cpu", "float32", 64), "chunked", "splash runs on TPUs, not on a cpu"),
    (("cudnn", "tpu", "bfloat16", 64), "chunked", "cudnn runs on GPUs, not on a tpu"),
  ],
)
def test_choose(arguments, name, reason):
  chosen, remark = attention.choose(*arguments)
  assert chosen == name and remark.endswith(reason) and bool(remark) == bool(reason)
