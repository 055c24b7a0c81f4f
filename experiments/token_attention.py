"""Attention of one token of each row over its own tokens and its prompt, in three ways.

For accelerator_variants.py. `plain` is what the sampler computes. All return [P, K, G, R, E].
"""

import functools
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
import jax.numpy as jnp

from grpo_jax.model.attention.softmax import Own, Scoring, softmax_attention

HIDDEN = -1e30
QUERIES = 16  # the tensor cores of a GPU take no fewer


class Token(NamedTuple):
  """The queries of one token of each row, and what they may see.

  Attributes:
    q: [P, K, G, R, E].
    keys, values: Of the rows' own tokens, [P, K, G, C, E].
    prompt_keys, prompt_values: [P, K, S, E].
    time: The slot of the newest token, modulo C.
    visible_PG: How many of the newest tokens each row sees.
    lengths_P: The tokens of each prompt.
  """

  q: Any
  keys: Any
  values: Any
  prompt_keys: Any
  prompt_values: Any
  time: Any
  visible_PG: Any
  lengths_P: Any

  @property
  def masks(self) -> tuple[jax.Array, jax.Array]:
    """[P, G, C] and [P, G, S]: the slots that each row sees."""
    C, S = self.keys.shape[3], self.prompt_keys.shape[2]
    own_PGC = (self.time - jnp.arange(C)) % C < self.visible_PG[..., None]
    of_prompt_PGS = jnp.arange(S) < self.lengths_P[:, None, None]
    return own_PGC, jnp.broadcast_to(of_prompt_PGS, (*self.visible_PG.shape, S))


def plain(x: Token) -> jax.Array:
  """As XLA compiles the definition."""
  own_mask, prompt_mask = (mask[:, None, :, None, None] for mask in x.masks)
  prompts = x.prompt_keys, x.prompt_values
  own = Own(x.keys, x.values)
  return softmax_attention(x.q[..., None, :], own, own_mask, prompts, prompt_mask, Scoring())[
    ..., 0, :
  ]


def cudnn(x: Token) -> jax.Array:
  """cuDNN on rows from slot 0 on, without prompts. Equal where each row sees slots 0 to `time`."""
  P, K, G, R, E = x.q.shape
  C = x.keys.shape[3]
  rows = [y.transpose(0, 2, 3, 1, 4).reshape(P * G, C, K, E) for y in (x.keys, x.values)]
  out = jax.nn.dot_product_attention(
    x.q.transpose(0, 2, 1, 3, 4).reshape(P * G, 1, K * R, E),
    *rows,
    scale=1.0,
    query_seq_lengths=jnp.ones(P * G, jnp.int32),
    key_value_seq_lengths=x.visible_PG.reshape(-1).astype(jnp.int32),
    implementation="cudnn",
  )
  return out.reshape(P, G, K, R, E).transpose(0, 2, 1, 3, 4)


def pallas(x: Token) -> jax.Array:
  """One kernel, of the same masks as `plain`."""
  own_PGC, of_prompt_PGS = x.masks
  return masked(x.q, x.keys, x.values, own_PGC, x.prompt_keys, x.prompt_values, of_prompt_PGS)


def masked(
  q: Any, keys: Any, values: Any, mask_PGC: Any, pkeys: Any, pvalues: Any, mask_PGS: Any
) -> jax.Array:
  """Softmax attention over [prompt | own tokens] by a kernel that keeps scores on the chip.

  It skips blocks of slots of which a row sees none.
  """
  P, K, G, R, E = q.shape
  C, S = keys.shape[3], pkeys.shape[2]
  own = next(size for size in (64, 32, 16) if C % size == 0)
  of_prompt = next(size for size in (64, 32, 16) if S % size == 0)
  padded = jnp.pad(q, ((0, 0),) * 3 + ((0, QUERIES - R), (0, 0)))
  whole = pl.BlockSpec(memory_space=pl.ANY)
  out = pl.pallas_call(
    functools.partial(_kernel, (own, C // own), (of_prompt, S // of_prompt)),
    grid=(G, K, P),
    in_specs=[whole] * 7,
    out_specs=whole,
    out_shape=jax.ShapeDtypeStruct(padded.shape, q.dtype),
    compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
    name="token_attention",
  )(padded, keys, values, mask_PGC.astype(jnp.int32), pkeys, pvalues, mask_PGS.astype(jnp.int32))
  return out[..., :R, :]


def _kernel(own: tuple[int, int], of_prompt: tuple[int, int], *refs: Any) -> None:
  q_ref, keys_ref, values_ref, mask_ref, pkeys_ref, pvalues_ref, pmask_ref, out_ref = refs
  g, k, p = (pl.program_id(axis) for axis in range(3))
  q = plt.load(q_ref.at[p, k, g])
  E = q.shape[-1]

  def add(state: Any, pair: Any, sees: Any) -> Any:
    (largest, total, out), (keys, values) = state, pair
    scores = jnp.where(sees[None, :], plt.dot(q, keys, trans_b=True), HIDDEN)
    new = jnp.maximum(largest, scores.max(-1))
    shrink = jnp.exp(largest - new)
    weights = jnp.where(sees[None, :], jnp.exp(scores - new[:, None]), 0.0)
    added = plt.dot(weights.astype(values.dtype), values)
    return new, total * shrink + weights.sum(-1), out * shrink[:, None] + added

  def over(sizes: tuple[int, int], read: Any, mask: Any, state: Any) -> Any:
    size, number = sizes

    def block(n: Any, state: Any) -> Any:
      here = pl.ds(n * size, size)
      sees = mask(here) > 0
      is_seen = jnp.max(sees.astype(jnp.int32)) > 0
      return jax.lax.cond(is_seen, lambda: add(state, read(here), sees), lambda: state)

    return jax.lax.fori_loop(0, number, block, state)

  def read_own(here: Any) -> Any:
    return plt.load(keys_ref.at[p, k, g, here]), plt.load(values_ref.at[p, k, g, here])

  def read_prompt(here: Any) -> Any:
    return plt.load(pkeys_ref.at[p, k, here]), plt.load(pvalues_ref.at[p, k, here])

  state = jnp.full(QUERIES, HIDDEN), jnp.zeros(QUERIES), jnp.zeros((QUERIES, E))
  state = over(own, read_own, lambda here: plt.load(mask_ref.at[p, g, here]), state)
  state = over(of_prompt, read_prompt, lambda here: plt.load(pmask_ref.at[p, g, here]), state)
  _, total, out = state
  plt.store(out_ref.at[p, k, g], (out / total[:, None]).astype(out_ref.dtype))
