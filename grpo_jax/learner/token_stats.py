"""Log-probs, entropies and KL of completion tokens, without holding all their logits at once."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

from flax import struct
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from grpo_jax import masked, model
from grpo_jax.algo import kl
from grpo_jax.config import Learner
from grpo_jax.learner.features import completion_features, targets_of
from grpo_jax.learner.packed import joined, split_batch
from grpo_jax.types import Batch, Images, TokenStats, Visual

# (log-probs, entropies, KL), as `TokenStats` explains them, but [B, T] each.
Stats = tuple[jax.Array, jax.Array, jax.Array | None]
_KEPT = "sums over the vocabulary"


@dataclasses.dataclass(frozen=True)
class StatsOptions:
  """Which statistics to compute, and how.

  Attributes:
    model: The policy's model.
    learner: The chunk size and the rematerialisation.
    entropy_gradient: Whether entropies have a gradient.
    full_kl: Whether to compute KL(policy || reference) over the whole vocabulary.
  """

  model: model.ModelConfig
  learner: Learner
  entropy_gradient: bool = False
  full_kl: bool = False


class TokenInputs(struct.PyTreeNode):
  """Rows of tokens and the hidden states that predict them.

  Attributes:
    hidden_BTD: The policy's hidden states.
    reference_hidden_BTD: The reference's hidden states, or None where its KL is not requested.
    tokens_BT: int32.
  """

  hidden_BTD: jax.Array
  reference_hidden_BTD: jax.Array | None
  tokens_BT: jax.Array


def batch_stats(
  params: model.Params, reference: model.Params | None, batch: Batch, options: StatsOptions
) -> TokenStats:
  """Statistics of a batch's completion tokens under softmax(logits / temperature).

  They are 0 outside of the loss mask.

  Args:
    params: All parameters of the policy.
    reference: All parameters of the reference. Read only with `options.full_kl`.
    batch: Prompts, completions, the loss mask and temperatures.
    options: Which statistics to compute, and how.
  """
  options = dataclasses.replace(options, model=options.model.within_shard_map)
  P, G, T = batch.completions_PGT.shape
  targets = targets_of(batch, options.model)  # the packing of the W targets, or None for rows

  def features(params: model.Params, batch: Batch) -> tuple[jax.Array, Any]:
    return completion_features(params, options.model, batch, options.learner.saved_activations)

  hidden_PWD, routing = features(params, batch)
  reference_PWD = None
  if options.full_kl:
    reference_PWD = jax.lax.stop_gradient(features(reference, batch.without_experts())[0])
  tokens = batch.completions_PGT.reshape(P, G * T)
  tokens_PW = tokens if targets is None else model.pack(tokens, targets)
  inputs = TokenInputs(hidden_PWD, reference_PWD, tokens_PW)
  stats = token_stats(params, reference, inputs, batch.temperature_P, options)

  def in_rows(x_PW: jax.Array) -> jax.Array:
    """[P, W] -> [P, G, T], with 0 outside of the loss mask."""
    rows = x_PW if targets is None else model.unpack(x_PW, targets)
    return masked.masked(rows.reshape(P, G, T), batch.mask_PGT)

  logprobs_PGT, entropies_PGT, full_kl_PGT = jax.tree.map(in_rows, stats)
  return TokenStats(
    logprobs_PGT=logprobs_PGT,
    entropies_PGT=entropies_PGT,
    full_kl_PGT=full_kl_PGT,
    routing=routing,
  )


def token_stats(
  params: model.Params,
  reference: model.Params | None,
  inputs: TokenInputs,
  temperature_B: jax.Array,
  options: StatsOptions,
) -> Stats:
  """Statistics of rows of tokens, computed in chunks on the devices that hold them.

  A device holds the logits of about `logprob_chunk` tokens at a time, in the backward pass too, but
  at least those of one position in all its rows. The backward pass recomputes the logits of each
  chunk, unless there is only one chunk.

  Each device first gets the whole head, or its share if the axis `tensor` splits the vocabulary.
  Its gradient is summed over devices at the end. Without a shard_map, XLA would gather the head and
  sum its gradient for each chunk (experiments/LOG.md, 2026-11-29).

  Args:
    params: All parameters of the policy.
    reference: All parameters of the reference. Read only with `options.full_kl`.
    inputs: Rows of tokens and the hidden states that predict them.
    temperature_B: float32, the sampling temperature of each row.
    options: Which statistics to compute, and how.
  """
  shape = options.model
  heads = _head(params), None if reference is None else _head(reference)
  stats = functools.partial(_stats_here, options=options)
  if shape.row_shards * shape.context == 1:  # a device has all tokens
    return stats(*heads, inputs, temperature_B)
  mesh, by_token = shape.rows.mesh, shape.rows.spec
  # XLA splits what is left by `tensor`, if there is anything to split.
  axes = {axis for axis in mesh.axis_names if axis != "tensor" or mesh.shape[axis] == 1}
  in_specs = PartitionSpec(), PartitionSpec(), by_token, PartitionSpec(by_token[0])
  stats_apart = model.on_devices(stats, mesh, in_specs, by_token, frozenset(axes))
  return stats_apart(*heads, inputs, temperature_B)


def _head(params: model.Params) -> model.Params:
  """The parameters that `model.unembed` reads: the embedding if there is no other head."""
  name = "head" if "head" in params else "embed"
  return {name: params[name]}


def _stats_here(
  params: model.Params,
  reference: model.Params | None,
  inputs: TokenInputs,
  temperature_B: jax.Array,
  options: StatsOptions,
) -> Stats:
  """Computes `token_stats` of a device's own tokens, from the heads of policy and reference."""
  B, T = inputs.tokens_BT.shape
  shape = options.model
  chunk = options.learner.logprob_chunk or default_chunk(shape.vocab_size, shape.platform)
  positions_per_chunk = max(1, chunk // B)
  chunks = -(-T // positions_per_chunk)
  width = -(-T // chunks)
  if chunks == 1:
    return _stats_of_chunk(params, reference, inputs, temperature_B, options)

  def split(x: jax.Array) -> jax.Array:
    """[B, T, ...] -> [chunks, B, width, ...]"""
    padding = [(0, 0), (0, chunks * width - T)] + [(0, 0)] * (x.ndim - 2)
    return jnp.moveaxis(jnp.pad(x, padding).reshape(B, chunks, width, *x.shape[2:]), 1, 0)

  def join(x: jax.Array) -> jax.Array:
    """[chunks, B, width] -> [B, T], the inverse of `split`."""
    return jnp.moveaxis(x, 0, 1).reshape(B, chunks * width)[:, :T]

  # Maxima and sums are saved, so that the backward pass reads the logits only once.
  keep_sums = jax.checkpoint_policies.save_only_these_names(_KEPT)

  @functools.partial(jax.checkpoint, policy=keep_sums)
  def chunk_stats(chunk: TokenInputs) -> Stats:
    return _stats_of_chunk(params, reference, chunk, temperature_B, options)

  return jax.tree.map(join, jax.lax.map(chunk_stats, jax.tree.map(split, inputs)))


def default_chunk(vocabulary: int, platform: str) -> int:
  """For how many tokens a device holds logits at once, so that they take less than 1 GiB.

  There are about two float32 arrays of that size: the logits and, in the backward pass, their
  gradient. Each chunk also adds to the gradient of the head, an array as large as the head. GPUs
  have memory for twice as many tokens, and a CPU is no slower with an eighth.
  """
  most_bytes = {"cpu": 2**27, "gpu": 2**31}.get(platform, 2**30)
  return max(1, most_bytes // (8 * vocabulary))


def _stats_of_chunk(
  params: model.Params,
  reference: model.Params | None,
  chunk: TokenInputs,
  temperature_B: jax.Array,
  options: StatsOptions,
) -> Stats:
  """The statistics of a chunk of tokens, from all their logits."""
  temperature_B11 = temperature_B[:, None, None]
  logits = model.unembed(params, options.model, chunk.hidden_BTD) / temperature_B11
  # The maximum cancels out of log-probs and entropies, so it needs no gradient.
  largest_BT = checkpoint_name(jax.lax.stop_gradient(logits.max(-1)), _KEPT)
  weights = jnp.exp(logits - largest_BT[..., None])
  total_BT = checkpoint_name(weights.sum(-1), _KEPT)
  log_total_BT = largest_BT + jnp.log(total_BT)
  # A sum of products instead of a gather: its gradient is elementwise, and the logits of a
  # vocabulary that is sharded over devices are not exchanged.
  is_token = jnp.arange(logits.shape[-1]) == chunk.tokens_BT[..., None]
  logprobs_BT = (logits * is_token).sum(-1) - log_total_BT
  full_kl_BT = None
  if options.full_kl:
    reference_logits = model.unembed(reference, options.model, chunk.reference_hidden_BTD)
    full_kl_BT = kl.full(logits, reference_logits / temperature_B11)
  if not options.entropy_gradient:
    stopped = jax.lax.stop_gradient((logits, weights, total_BT, log_total_BT))
    logits, weights, total_BT, log_total_BT = stopped
  # As an einsum: XLA's CPU code takes five times as long for the sum of an expression with exp.
  means_BT = jnp.einsum("btv,btv->bt", weights, logits, precision=jax.lax.Precision.HIGHEST)
  entropies_BT = log_total_BT - means_BT / total_BT
  return logprobs_BT, entropies_BT, full_kl_BT


def in_micro_batches(function: Callable[[Batch], Any], batch: Batch, size: int) -> Any:
  """Computes function(batch), a tree of arrays [P, ...], one micro-batch of `size` at a time.

  The results are meant to be used without a gradient.
  """
  return joined(jax.lax.map(function, split_batch(batch, size)))


def encoded(params: Any, config: model.ModelConfig, images: Images, micro_batch: int) -> Visual:
  """Computes the visual tokens of a batch's images in micro-batches, without gradients."""
  encode = functools.partial(model.encode, params, config)
  return joined(jax.lax.map(encode, split_batch(images, micro_batch)))
