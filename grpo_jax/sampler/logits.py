"""Draws tokens from logits: filters, the draw, and the log-probs of the drawn tokens."""

from collections.abc import Mapping
import dataclasses
import math
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from grpo_jax.model.layouts import in_order
from grpo_jax.sampler.filters import BUILT_IN, FILTERS

BRANCH = 16  # children of each node in the tree over the vocabulary (see `draw`)
_FEWEST_FASTEST = 64  # from so many rows on, padding them costs a TPU less than copies


@dataclasses.dataclass(frozen=True)
class Decoding:
  """The settings that all rows of a sampler share.

  Attributes:
    max_tokens: T, the longest completion.
    stop_ids: The token ids that end a completion.
    sharding: The sharding of the rows on a mesh of several devices. None on one device.
  """

  max_tokens: int
  stop_ids: tuple[int, ...] = ()
  sharding: NamedSharding | None = None


class RowSettings(struct.PyTreeNode):
  """How rows draw their tokens. Each setting is a number, or an array with an entry for each row.

  None turns a setting off for all rows, and programs are compiled without it.

  Attributes:
    temperature: The divisor of the logits. At 0, rows take the likeliest token.
    top_k: Draw from the k likeliest tokens. 0 is off.
    top_p: Draw from the fewest likeliest tokens whose probability reaches p. 1 is off.
    min_p: Drop tokens that are less likely than min_p times the likeliest. 0 is off.
    min_tokens: Rows draw no stop id before they have this many tokens.
    max_tokens: The longest completion of the row. `Decoding.max_tokens` limits all rows.
    own: The values of filters that the user's program has registered, by name. 0 is off.
  """

  temperature: Any = 1.0
  top_k: Any = None
  top_p: Any = None
  min_p: Any = None
  min_tokens: Any = None
  max_tokens: Any = None
  own: Any = None

  @property
  def filter_values(self) -> dict[str, Any]:
    """The values of all filters that are not None, by name, in the order of application."""
    own = self.own or {}
    built_in = {name: getattr(self, name) for name in BUILT_IN}
    known = {name: x for name, x in built_in.items() if x is not None}
    return known | {name: own[name] for name in sorted(own)}

  @property
  def filters(self) -> bool:
    """Whether a draw may differ from softmax(logits / temperature)."""
    return bool(self.filter_values) or self.min_tokens is not None

  def with_filters(self, values: Mapping[str, Any]) -> "RowSettings":
    """A copy with other values of filters, by name. Registered filters not in `values` are off."""
    built_in = {name: x for name, x in values.items() if name in BUILT_IN}
    own = {name: x for name, x in values.items() if name not in BUILT_IN}
    return self.replace(**built_in, own=own or None)


def filtered(logits_BV: jax.Array, settings: RowSettings) -> jax.Array:
  """Applies all filters: returns the logits [B, V] with -inf for dropped tokens.

  Args:
    logits_BV: float32, already divided by the temperature.
    settings: The values of the filters, as arrays [B].
  """
  for name, value_B in settings.filter_values.items():
    logits_BV = FILTERS[name].apply(logits_BV, value_B)
  return logits_BV


def draws_per_token(vocabulary: int) -> int:
  """How many uniform numbers a draw needs: one for each level of the tree that `draw` descends."""
  return 1 + (draws_per_token(-(-vocabulary // BRANCH)) if vocabulary > BRANCH else 0)


def draw(logits_BV: jax.Array, uniforms_BN: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Draws a token from softmax(logits) for each row.

  The tokens are the leaves of a tree. Each node holds the sum of exp(logits) below it. The draw
  descends from the root and picks one of at most BRANCH children at each level by inverse transform
  sampling. This reads the logits once, whereas Gumbel noise for each token would take most of a
  decoding step. Each choice compares few sums, so rounding rarely changes it: the same key draws
  the same tokens on another mesh.

  Args:
    logits_BV: float32, may contain -inf.
    uniforms_BN: Uniform numbers in [0, 1), N = draws_per_token(V).

  Returns:
    The tokens, integers [B], and logsumexp(logits), float32 [B].
  """
  V, largest_B = logits_BV.shape[1], logits_BV.max(-1)

  def weights(logits_BN: jax.Array) -> jax.Array:
    return jnp.exp(logits_BN - largest_B[:, None])

  # The weights of single tokens are summed and not stored, because they need as much memory as the
  # logits. levels[0] has the sums of BRANCH tokens each, and the last level at most BRANCH nodes.
  levels = [weights(logits_BV) if V <= BRANCH else _sums_of_weights(logits_BV, largest_B)]
  while levels[-1].shape[1] > BRANCH:
    levels[-1] = _padded(levels[-1], 0.0)
    levels.append(_sums(levels[-1]))
  log_total_B = largest_B + jnp.log(levels[-1].sum(-1))
  node_B = _invert(levels.pop(), uniforms_BN[:, 0])
  # `zip` leaves out the last uniform number, which chooses among the tokens below the last node.
  for level, uniform_B in zip(reversed(levels), uniforms_BN.T[1:]):
    children = node_B[:, None] * BRANCH + jnp.arange(BRANCH)
    node_B = node_B * BRANCH + _invert(jnp.take_along_axis(level, children, axis=1), uniform_B)
  if V <= BRANCH:
    return node_B, log_total_B
  tokens = node_B[:, None] * BRANCH + jnp.arange(BRANCH)
  # The last node may have fewer than BRANCH tokens.
  logits = jnp.take_along_axis(logits_BV, tokens, axis=1, mode="fill", fill_value=-jnp.inf)
  return node_B * BRANCH + _invert(weights(logits), uniforms_BN[:, -1]), log_total_B


def _padded(x_BN: jax.Array, value: float) -> jax.Array:
  """Pads the columns with `value` to a multiple of BRANCH."""
  padding = -x_BN.shape[1] % BRANCH
  return jnp.pad(x_BN, ((0, 0), (0, padding)), constant_values=value)


def _sums(x_BN: jax.Array) -> jax.Array:
  """Sums each BRANCH adjacent columns: [B, N] -> [B, N / BRANCH]."""
  # A sum over [B, N / BRANCH, BRANCH] would be slow: a TPU pads the last axis of an array to 128.
  block = (1, BRANCH)
  return jax.lax.reduce_window(x_BN, 0.0, jax.lax.add, block, block, "VALID")


def _sums_of_weights(logits_BV: jax.Array, largest_B: jax.Array) -> jax.Array:
  """Sums exp(logits - largest) over each BRANCH adjacent tokens: [B, ceil(V / BRANCH)]."""
  logits_BV = _padded(logits_BV, -jnp.inf)

  def by_window(logits_BV: jax.Array, largest_B: jax.Array) -> jax.Array:
    return _sums(jnp.exp(logits_BV - largest_B[:, None]))

  # With windows, the compiler for TPUs would write all weights to memory before it adds them. A sum
  # along an axis adds them as they are computed, given `_with_rows_varying_fastest`.
  return jax.lax.platform_dependent(logits_BV, largest_B, tpu=sums_by_axis, default=by_window)


def sums_by_axis(logits_BV: jax.Array, largest_B: jax.Array) -> jax.Array:
  """Sums exp(logits - largest) over each BRANCH adjacent tokens. V is a multiple of BRANCH."""
  by_node = logits_BV.reshape(len(logits_BV), -1, BRANCH)
  return jnp.exp(by_node - largest_B[:, None, None]).sum(-1)


def _with_rows_varying_fastest(x_BV: jax.Array, sharding: NamedSharding | None) -> jax.Array:
  """Fixes the layout of logits in the memory of a TPU: rows vary fastest. A no-op elsewhere.

  A TPU pads the axis that varies fastest to 128. If rows do, [B, V] is reshaped to [B, V / BRANCH,
  BRANCH] without a copy. XLA itself would let the vocabulary vary fastest, and would write all
  weights, copy them into the other layout and read them again. Few rows cost too much padding.
  """
  shards = 1
  if sharding is not None:
    shards = math.prod(sharding.mesh.shape[axis] for axis in sharding.spec[0])
  if len(x_BV) // shards < _FEWEST_FASTEST:
    return x_BV

  def on_tpu(x_BV: jax.Array) -> jax.Array:
    spec = PartitionSpec()
    if sharding is not None:
      size = sharding.mesh.shape["tensor"]
      # As in the head, `tensor` splits the vocabulary only if its size divides V.
      spec = PartitionSpec(sharding.spec[0], None if x_BV.shape[1] % size else "tensor")
    return in_order(x_BV, (1, 0), sharding, spec)

  return jax.lax.platform_dependent(x_BV, tpu=on_tpu, default=lambda x_BV: x_BV)


def _of_token(x_BV: jax.Array, tokens_B: jax.Array) -> jax.Array:
  """Returns x_BV[b, tokens_B[b]] of each row b."""
  return jnp.take_along_axis(x_BV, tokens_B[:, None], axis=-1)[:, 0]


def likeliest(logits_BV: jax.Array, temperature_B: Any, count: int) -> tuple[jax.Array, jax.Array]:
  """Finds the A = `count` likeliest tokens of each row, in order of falling probability.

  Args:
    logits_BV: float32.
    temperature_B: float32. 0 is treated as 1.
    count: At most V.

  Returns:
    Tokens, int32 [B, A], and their log-probs under softmax(logits / temperature), float32 [B, A].
  """
  tempered_BV = logits_BV / jnp.where(temperature_B == 0, 1, temperature_B)[:, None]
  best_BA, tokens_BA = jax.lax.top_k(tempered_BV, count)
  return tokens_BA, best_BA - jax.nn.logsumexp(tempered_BV, axis=-1, keepdims=True)


def sample_token(
  logits_BV: jax.Array,
  uniforms_BN: jax.Array,
  settings: RowSettings,
  is_barred_BV: jax.Array | None = None,
  sharding: NamedSharding | None = None,
  bias_BV: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Draws the next token of each row.

  Args:
    logits_BV: float32.
    uniforms_BN: Uniform numbers in [0, 1), N = draws_per_token(V).
    settings: Temperature and filters of each row, as arrays [B].
    is_barred_BV: bool, True for tokens that a row may not draw now. None if all may be drawn.
    sharding: The sharding of the rows on a mesh of several devices. None on one device.
    bias_BV: float32, added to the logits before the draw, or None.

  Returns:
    (token, logprob, behavior_logprob), each [B]. `logprob` is under softmax(logits / temperature).
    `behavior_logprob` is under the distribution of the draw, with the bias and the filters and
    without barred tokens. At temperature 0, `logprob` is under softmax(logits), and
    `behavior_logprob` is 0 because the choice is certain.
  """
  is_greedy_B = settings.temperature == 0
  logits_BV = _with_rows_varying_fastest(logits_BV, sharding)
  divisor_B1 = jnp.where(is_greedy_B, 1, settings.temperature)[:, None]
  tempered_BV = logits_BV / divisor_B1
  kept_BV = tempered_BV
  if bias_BV is not None:
    kept_BV = kept_BV + bias_BV / divisor_B1
  if is_barred_BV is not None:  # before the filters, which might drop all tokens but barred ones
    kept_BV = jnp.where(is_barred_BV, -jnp.inf, kept_BV)
  kept_BV = filtered(kept_BV, settings)
  drawn_B, log_total_B = draw(kept_BV, uniforms_BN)

  def with_likeliest() -> jax.Array:  # no filter drops the likeliest token
    # XLA chooses layouts within a branch of `cond` anew.
    return jnp.where(is_greedy_B, _with_rows_varying_fastest(kept_BV, sharding).argmax(-1), drawn_B)

  tokens_B = jax.lax.cond(is_greedy_B.any(), with_likeliest, lambda: drawn_B)
  # Unless something changes the draw, both distributions are the same.
  logprobs_B = behavior_B = _of_token(kept_BV, tokens_B) - log_total_B
  if settings.filters or bias_BV is not None or is_barred_BV is not None:
    total_B = jax.nn.logsumexp(tempered_BV, axis=-1)
    logprobs_B = _of_token(tempered_BV, tokens_B) - total_B
  return tokens_B, logprobs_B, jnp.where(is_greedy_B, 0, behavior_B)


def _invert(weights_BN: jax.Array, uniform_B: jax.Array) -> jax.Array:
  """Samples an index [B] in proportion to weights, by inverse transform sampling.

  It is the first whose cumulative weight exceeds uniform_B * (the sum of all weights). Despite
  rounding, it never has weight 0.
  """
  cumulative_BN = jnp.cumsum(weights_BN, axis=-1)
  index_B = (cumulative_BN <= uniform_B[:, None] * cumulative_BN[:, -1:]).sum(-1)
  # Rounding can put the threshold at the sum of all weights, which no cumulative weight exceeds.
  return jnp.where(index_B < weights_BN.shape[-1], index_B, weights_BN.argmax(-1))
