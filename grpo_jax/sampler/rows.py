"""The decoding loop: rows draw token after token until they end, each at its own position.

The loop calls a step function with a cache, and knows no model.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from flax import struct
import jax
import jax.numpy as jnp

from grpo_jax.sampler.logits import (
  Decoding,
  RowSettings,
  draws_per_token,
  likeliest,
  sample_token,
)


class Extras(struct.PyTreeNode):
  """Rarely used options of the draw. Each combination has a program, compiled at first use.

  Attributes:
    allowed_RW: int32, a mask of the tokens that the row may draw next: bit t % 32 of word t // 32
      is 1 if token t is allowed. None if all rows may draw all tokens.
    biased_RN: int32, N tokens of each row with a bias. Ids >= V are padding.
    bias_RN: float32, the number added to the logit of each biased token before the draw. Log-probs
      ignore it. None if no row has a bias.
    alternatives: A, how many of the likeliest tokens are returned with each drawn one.
  """

  allowed_RW: Any = None
  biased_RN: Any = None
  bias_RN: Any = None
  alternatives: int = struct.field(pytree_node=False, default=0)


class Rows(struct.PyTreeNode):
  """The rows that are decoded together.

  Attributes:
    token_R: int32, the last token of each row.
    drawn_R: int32, how many tokens the row has drawn or taken from replies.
    goes_on_R: bool, False for rows that have ended or pause, and for free seats.
    settings: How each row draws, as arrays [R].
    uniforms_RTU: Uniform numbers in [0, 1) for each token, from `row_uniforms`.
    idle_R: int32, how many rounds have passed since the row drew its last token.
    given_RT: int32, the tokens of replies, which the row takes instead of drawing. -1 elsewhere.
    extras: Further options of the draw, or None.
  """

  token_R: jax.Array
  drawn_R: jax.Array
  goes_on_R: jax.Array
  settings: RowSettings
  uniforms_RTU: jax.Array
  idle_R: jax.Array
  given_RT: jax.Array
  extras: Extras | None = None


# step(cache, rows) -> (logits_RV of the next token, cache). The step reads token_R, the token with
# index drawn_R - 1 of each row. Logits of rows that have ended are not used.
Step = Callable[[Any, Rows], tuple[jax.Array, Any]]


class Drawn(struct.PyTreeNode):
  """The tokens of a chunk: column 0 has first tokens of new rows, column n those of round n.

  Attributes:
    is_drawn_RN: bool, whether the row drew a token in the column, or took one from a reply. Tokens
      and log-probs are 0 elsewhere.
    tokens_RN: int32.
    logprobs_RN: float32, under softmax(logits / temperature). 0 for tokens of replies.
    behavior_logprobs_RN: float32, under the distribution of the draw. 0 for tokens of replies.
    stopped_by_R: int32, the stop id that ended the row in this chunk, or -1.
    experts_RNY: The experts of the row's previous token. None without `keeps_experts`.
    alternatives_RNA: int32, the likeliest tokens for the position of each token, likeliest first.
      None if `Extras.alternatives` is 0.
    alternative_logprobs_RNA: float32, their log-probs under softmax(logits / temperature).
  """

  is_drawn_RN: jax.Array
  tokens_RN: jax.Array
  logprobs_RN: jax.Array
  behavior_logprobs_RN: jax.Array
  stopped_by_R: jax.Array
  experts_RNY: jax.Array | None = None
  alternatives_RNA: jax.Array | None = None
  alternative_logprobs_RNA: jax.Array | None = None


class Chunk(NamedTuple):
  """When a chunk ends: at the first of two limits.

  Attributes:
    rounds: int32 scalar, the most rounds.
    ended: int32 scalar. The chunk ends when more rows than this have ended during the chunk.
  """

  rounds: Any
  ended: Any


def draw_first(
  rows: Rows, first_logits: Callable[[], jax.Array], decoding: Decoding, columns: int
) -> tuple[Rows, Drawn]:
  """Draws the first tokens of new rows, which are rows that go on with drawn_R = 0.

  Args:
    rows: The rows.
    first_logits: () -> the logits [R, V] after the prompts. Only computed if there are new rows.
    decoding: Stop ids and the longest completion.
    columns: N, how many columns the chunk has.

  Returns:
    The updated rows, and the chunk's `Drawn`, in which only column 0 is filled.
  """
  shape = (len(rows.token_R), columns)
  count = rows.extras.alternatives if rows.extras else 0
  drawn = Drawn(
    is_drawn_RN=jnp.zeros(shape, bool),
    tokens_RN=jnp.zeros(shape, jnp.int32),
    logprobs_RN=jnp.zeros(shape, jnp.float32),
    behavior_logprobs_RN=jnp.zeros(shape, jnp.float32),
    stopped_by_R=jnp.full(shape[0], -1, jnp.int32),
    alternatives_RNA=jnp.zeros((*shape, count), jnp.int32) if count else None,
    alternative_logprobs_RNA=jnp.zeros((*shape, count), jnp.float32) if count else None,
  )
  is_new_R = rows.goes_on_R & (rows.drawn_R == 0)

  def draw() -> tuple[Rows, Drawn]:
    return _draw(rows, drawn, first_logits(), is_new_R, jnp.int32(0), decoding)

  return jax.lax.cond(is_new_R.any(), draw, lambda: (rows, drawn))


def decode_chunk(
  step: Step, cache: Any, rows: Rows, drawn: Drawn, decoding: Decoding, chunk: Chunk
) -> tuple[Any, Rows, Drawn]:
  """Draws tokens until the chunk ends, its columns are full or every row has ended.

  Args:
    step: Computes the next logits and updates the cache.
    cache: Passed to `step`. Its type is up to the step.
    rows: The rows, as `draw_first` returns them.
    drawn: The chunk's tokens, as `draw_first` returns them. Round n fills column n, from 1.
    decoding: Stop ids and the longest completion.
    chunk: When the chunk ends.

  Returns:
    The updated cache, rows and `drawn`.
  """
  columns = drawn.tokens_RN.shape[1]
  going_at_start = rows.goes_on_R.sum()

  def unfinished(loop: tuple) -> jax.Array:
    column, _, rows, _ = loop
    going = rows.goes_on_R.sum()
    within = (column < columns) & (column <= chunk.rounds)
    return within & (going > 0) & (going_at_start - going <= chunk.ended)

  def body(loop: tuple) -> tuple:
    column, cache, rows, drawn = loop
    logits_RV, cache = step(cache, rows)
    idle_R = jnp.where(rows.goes_on_R, 0, rows.idle_R + 1)
    rows, drawn = _draw(rows, drawn, logits_RV, rows.goes_on_R, column, decoding)
    return column + 1, cache, rows.replace(idle_R=idle_R), drawn

  loop = jnp.int32(1), cache, rows, drawn
  _, cache, rows, drawn = jax.lax.while_loop(unfinished, body, loop)
  return cache, rows, drawn


def _draw(
  rows: Rows,
  drawn: Drawn,
  logits_RV: jax.Array,
  draws_R: jax.Array,
  column: jax.Array,
  decoding: Decoding,
) -> tuple[Rows, Drawn]:
  """Draws a token for each row in `draws_R` (bool), and writes it into a column of `drawn`."""
  # The next token of a row has the index drawn_R in these arrays.
  uniforms_RU = jnp.take_along_axis(rows.uniforms_RTU, rows.drawn_R[:, None, None], 1)[:, 0]
  given_R = jnp.take_along_axis(rows.given_RT, rows.drawn_R[:, None], 1)[:, 0]
  is_given_R = given_R >= 0  # the row takes the token of a reply instead of drawing
  stop_ids, extras = jnp.asarray(decoding.stop_ids, jnp.int32), rows.extras or Extras()
  limit = decoding.max_tokens
  if rows.settings.max_tokens is not None:
    limit = jnp.minimum(limit, rows.settings.max_tokens)
  is_barred_RV = None  # every row may draw every token
  if rows.settings.min_tokens is not None:  # too short rows draw no stop id
    is_stop_V = jnp.zeros(logits_RV.shape[1], bool).at[stop_ids].set(True)
    is_barred_RV = (rows.drawn_R < rows.settings.min_tokens)[:, None] & is_stop_V
  if extras.allowed_RW is not None:
    is_masked_RV = ~_bits(extras.allowed_RW, logits_RV.shape[1])
    is_barred_RV = is_masked_RV if is_barred_RV is None else is_barred_RV | is_masked_RV
  token_R, *logprobs = sample_token(  # also for rows that do not draw, whose tokens are not stored
    logits_RV,
    uniforms_RU,
    rows.settings,
    is_barred_RV,
    decoding.sharding,
    _bias(extras, logits_RV.shape),
  )
  # The policy did not choose tokens of replies, so they have no log-prob and never stop a row.
  token_R = jnp.where(is_given_R, given_R, token_R.astype(jnp.int32))
  logprobs = [jnp.where(is_given_R, 0, x_R) for x_R in logprobs]
  stops_R = draws_R & ~is_given_R & (token_R[:, None] == stop_ids).any(-1)
  drawn_R = rows.drawn_R + draws_R
  ends_R = stops_R | (draws_R & (drawn_R >= limit))

  def put(x_RN: jax.Array, x_R: jax.Array) -> jax.Array:
    x_R = jnp.where(draws_R, x_R, 0).astype(x_RN.dtype)
    return jax.lax.dynamic_update_index_in_dim(x_RN, x_R, column, 1)

  if extras.alternatives:
    drawn = _with_alternatives(drawn, logits_RV, rows.settings, column)

  drawn = drawn.replace(
    is_drawn_RN=put(drawn.is_drawn_RN, draws_R),
    tokens_RN=put(drawn.tokens_RN, token_R),
    logprobs_RN=put(drawn.logprobs_RN, logprobs[0]),
    behavior_logprobs_RN=put(drawn.behavior_logprobs_RN, logprobs[1]),
    stopped_by_R=jnp.where(stops_R, token_R, drawn.stopped_by_R),
  )
  rows = rows.replace(
    token_R=jnp.where(draws_R, token_R, rows.token_R),
    drawn_R=drawn_R,
    goes_on_R=rows.goes_on_R & ~ends_R,
  )
  return rows, drawn


def _with_alternatives(
  drawn: Drawn, logits_RV: jax.Array, settings: RowSettings, column: jax.Array
) -> Drawn:
  """Writes the likeliest tokens of all rows into a column, even of rows that draw nothing."""
  count = drawn.alternatives_RNA.shape[2]
  tokens_RA, logprobs_RA = likeliest(logits_RV, settings.temperature, count)
  put = jax.lax.dynamic_update_index_in_dim
  return drawn.replace(
    alternatives_RNA=put(drawn.alternatives_RNA, tokens_RA, column, 1),
    alternative_logprobs_RNA=put(drawn.alternative_logprobs_RNA, logprobs_RA, column, 1),
  )


def _bias(extras: Extras, shape: tuple[int, int]) -> jax.Array | None:
  """Spreads the biases over the vocabulary: float32 [R, V], or None without biases."""
  if extras.bias_RN is None:
    return None
  rows_R1 = jnp.arange(shape[0])[:, None]
  return jnp.zeros(shape).at[rows_R1, extras.biased_RN].add(extras.bias_RN, mode="drop")


def _bits(words_RW: jax.Array, count: int) -> jax.Array:
  """Unpacks the first `count` bits of each row's int32 words, lowest bit first: bool [R, count]."""
  bits = (words_RW[:, :, None] >> jnp.arange(32)) & 1
  return bits.reshape(len(words_RW), -1)[:, :count] == 1


def row_uniforms(
  keys_R: jax.Array, rows_R: jax.Array, max_tokens: int, vocabulary: int
) -> jax.Array:
  """Returns the uniform numbers for all draws, float32 [R, T, U], U = draws_per_token(V).

  Row r uses the key fold_in(keys_R[r], rows_R[r]), so its tokens do not depend on other rows.
  """
  shape = (max_tokens, draws_per_token(vocabulary))
  row_keys_R = jax.vmap(jax.random.fold_in)(keys_R, rows_R)
  return jax.vmap(lambda row_key: jax.random.uniform(row_key, shape))(row_keys_R)
