"""The learner: log-probs of completions that share their prompt, and one update. Pure; jitted by the caller."""
import dataclasses
import functools
from typing import Any, Callable

import jax
import jax.numpy as jnp
import optax

from grpo_jax import masked, model
from grpo_jax.algo import selection
from grpo_jax.algo.objective import Told, objective, totals
from grpo_jax.config import Algo, Learner
from grpo_jax.types import Batch, TrainState

Metrics = dict[str, jax.Array]


def init_state(params: Any, optimizer: optax.GradientTransformation) -> TrainState:
  """A state before its first update."""
  return TrainState(jnp.int32(0), params, optimizer.init(params))


def completion_features(params: Any, config: model.ModelConfig, batch: Batch, remat: bool = False) -> jax.Array:
  """Hidden states [P, G, T, D] from which completion token t is predicted: those of the token before it.

  The prompt is computed once per group. This is the one place that shifts: token 0 follows the prompt's last one.
  """
  P, G, T = batch.completions_PGT.shape
  config = dataclasses.replace(config, max_positions=batch.prompts_PS.shape[1] + T)
  positions_PS = jnp.broadcast_to(jnp.arange(batch.prompts_PS.shape[1]), batch.prompts_PS.shape)
  prompt_PSD, cache = model.features(params, config, batch.prompts_PS, positions_PS, remat=remat)
  last_PD = jnp.take_along_axis(prompt_PSD, (batch.prompt_lengths_P - 1)[:, None, None], axis=1)[:, 0]
  first_PG1D = jnp.broadcast_to(last_PD[:, None, None], (P, G, 1, last_PD.shape[-1]))
  if T == 1:
    return first_PG1D
  shared = model.empty(config, model.share(cache, batch.prompt_lengths_P), G, capacity=0)
  positions_PGT = jnp.broadcast_to(batch.prompt_lengths_P[:, None, None] + jnp.arange(T - 1), (P, G, T - 1))
  rows = lambda x: x.reshape(P * G, T - 1)
  tokens_BT, positions_BT = rows(batch.completions_PGT[..., :-1]), rows(positions_PGT)
  rest_BTD, _ = model.features(params, config, tokens_BT, positions_BT, shared, remat)
  return jnp.concatenate([first_PG1D, rest_BTD.reshape(P, G, T - 1, -1)], axis=2)


def token_logprobs(params: Any, config: model.ModelConfig, hidden_BTD: jax.Array, tokens_BT: jax.Array,
                   temperature: float, chunk: int, entropy_gradient: bool = False) -> tuple[jax.Array, jax.Array]:
  """log pi(token) and entropy of pi [B, T], float32, pi = softmax(logits / temperature).

  The entropy has a gradient only if asked for.

  A device holds logits of about `chunk` tokens at a time (of one position of its rows at least), in the backward pass
  too. Chunks are slices of T, so that rows stay where they are sharded.
  """
  B, T, D = hidden_BTD.shape
  count = -(-T // max(1, chunk * config.row_shards // B))
  width = -(-T // count)
  pad = lambda x: jnp.pad(x, [(0, 0), (0, count * width - T)] + [(0, 0)] * (x.ndim - 2))
  split = lambda x: jnp.moveaxis(pad(x).reshape(B, count, width, *x.shape[2:]), 1, 0)

  @jax.checkpoint
  def one(chunked):
    hidden, tokens = chunked
    logits = model.unembed(params, config, hidden) / temperature
    log_total = jax.nn.logsumexp(logits, axis=-1)
    # A masked sum, not a gather: its gradient is elementwise, and a vocabulary sharded over devices needs no exchange.
    is_token = jnp.arange(logits.shape[-1]) == tokens[..., None]
    fixed = (logits, log_total) if entropy_gradient else jax.lax.stop_gradient((logits, log_total))
    entropy = fixed[1] - (jnp.exp(fixed[0] - fixed[1][..., None]) * fixed[0]).sum(-1)
    return jnp.where(is_token, logits, 0).sum(-1) - log_total, entropy

  joined = lambda x: jnp.moveaxis(x, 0, 1).reshape(B, count * width)[:, :T]
  return jax.tree.map(joined, jax.lax.map(one, (split(hidden_BTD), split(tokens_BT))))


def logprobs(params: Any, config: model.ModelConfig, batch: Batch, temperature: float, learner: Learner,
             entropy_gradient: bool = False) -> tuple[jax.Array, jax.Array]:
  """log pi and entropy [P, G, T] of a batch's completions, 0 at padding."""
  P, G, T = batch.completions_PGT.shape
  hidden_BTD = completion_features(params, config, batch, learner.remat).reshape(P * G, T, -1)
  tokens_BT = batch.completions_PGT.reshape(P * G, T)
  both = token_logprobs(params, config, hidden_BTD, tokens_BT, temperature, learner.logprob_chunk, entropy_gradient)
  return jax.tree.map(lambda x: masked.masked(x.reshape(P, G, T), batch.mask_PGT), both)


def micro_batches(batch: Batch, size: int) -> Batch:
  """Every leaf [P, ...] as [P / size, size, ...]; size 0 = one micro-batch.

  Micro-batch m takes prompts m, m + M, ...: each device then holds its share of every one of them.
  """
  split = lambda x: x.reshape(size or x.shape[0], -1, *x.shape[1:]).swapaxes(0, 1)
  return jax.tree.map(split, batch)


def batch_logprobs(params: Any, batch: Batch, config: model.ModelConfig, temperature: float, learner: Learner,
                   micro_batch: int) -> tuple[jax.Array, jax.Array]:
  """`logprobs` of a whole batch, one micro-batch at a time. No gradient is meant to flow."""
  one = lambda micro: logprobs(params, config, micro, temperature, learner)
  whole = lambda x: x.swapaxes(0, 1).reshape(batch.completions_PGT.shape)
  return jax.tree.map(whole, jax.lax.map(one, micro_batches(batch, micro_batch)))


@dataclasses.dataclass(frozen=True)
class Objective:
  """What `train_step` minimises, in three parts, as a batch may be computed in parts."""
  share: Callable[[Any, Batch, Any], tuple[jax.Array, Told]]  # params, a part, totals -> its share of the batch's loss
  totals: Callable[[Batch], Any]  # of the whole batch
  prepare: Callable[[Any, Batch, int], Batch]  # params, whole batch, micro-batch size -> batch with what it takes all to know


def grpo(config: model.ModelConfig, algo: Algo, temperature: float, learner: Learner) -> Objective:
  """The objective of `algo`."""
  def share(params, batch, whole):
    logprobs_PGT, entropies_PGT = logprobs(params, config, batch, temperature, learner, bool(algo.entropy_coef))
    loss, told = objective(logprobs_PGT, entropies_PGT, batch, whole, algo)
    gap_PGT = jnp.abs(jax.lax.stop_gradient(logprobs_PGT) - batch.sampler_logprobs_PGT)
    told.means["sampler/logprob_gap_mean"] = masked.total(gap_PGT, batch.mask_PGT), masked.count(batch.mask_PGT)
    told.maxima["sampler/logprob_gap_max"] = masked.masked(gap_PGT, batch.mask_PGT).max()
    return loss, told

  def prepare(params, batch, micro_batch):
    if not selection.is_needed(algo):
      return batch
    logprobs_PGT, entropies_PGT = batch_logprobs(params, batch, config, temperature, learner, micro_batch)
    old_PGT = logprobs_PGT if batch.old_logprobs_PGT is None else batch.old_logprobs_PGT
    return batch.replace(selection=selection.select(logprobs_PGT, old_PGT, entropies_PGT, batch.advantages_PGT,
                                                    batch.mask_PGT, algo))

  return Objective(share, functools.partial(totals, algo=algo), prepare)


def supervised(config: model.ModelConfig, learner: Learner) -> Objective:
  """The mean of -log pi over the tokens of given completions (temperature 1)."""
  def share(params, batch, count):
    return masked.divide(-logprobs(params, config, batch, 1.0, learner)[0].sum(), count), Told({}, {}, {})
  return Objective(share, lambda batch: masked.count(batch.mask_PGT), lambda params, batch, micro_batch: batch)


def train_step(state: TrainState, batch: Batch, loss: Objective, optimizer: optax.GradientTransformation,
               micro_batch: int = 0) -> tuple[TrainState, Metrics]:
  """One update. Each micro-batch's share of the loss has the whole batch's weight, so that their gradients add up.

  A gradient that is not finite leaves parameters and optimizer as they were, and metric `skipped_updates` is 1.
  """
  gradient = jax.value_and_grad(loss.share, has_aux=True)
  batch = loss.prepare(state.params, batch, micro_batch)
  whole = loss.totals(batch)

  def add(total, micro):
    (share, told), grads = gradient(state.params, micro, whole)
    sums = jax.tree.map(jnp.add, total[0], (grads, share, told.means))
    return (sums, jax.tree.map(jnp.maximum, total[1], told.maxima), jax.tree.map(jnp.minimum, total[2], told.minima)), None

  micros = micro_batches(batch, micro_batch)
  first = jax.tree.map(lambda x: x[0], micros)
  (share, told), grads = jax.eval_shape(gradient, state.params, first, whole)
  start = lambda value, tree: jax.tree.map(lambda s: jnp.full(s.shape, value, s.dtype), tree)
  zero = start(0, (grads, share, told.means)), start(-jnp.inf, told.maxima), start(jnp.inf, told.minima)
  ((grads, share, means), maxima, minima), _ = jax.lax.scan(add, zero, micros)

  norm = optax.tree.norm(grads)
  finite = jnp.isfinite(norm)
  updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
  keep = functools.partial(jax.tree.map, lambda new, old: jnp.where(finite, new, old))
  new_state = TrainState(state.step + 1, keep(optax.apply_updates(state.params, updates), state.params),
                         keep(opt_state, state.opt_state))
  metrics = {"loss": share, "grad_norm": norm, "skipped_updates": 1.0 - finite}
  return new_state, metrics | {name: masked.divide(*mean) for name, mean in means.items()} | maxima | minima
