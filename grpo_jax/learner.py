"""The learner: log-probs of completions that share their prompt, and one update. Pure; jitted by the caller."""
import dataclasses
import functools
from typing import Any, Callable

import jax
import jax.numpy as jnp
import optax

from grpo_jax import masked, model
from grpo_jax.algo.objective import objective
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
                   temperature: float, chunk: int) -> tuple[jax.Array, jax.Array]:
  """log pi(token) and entropy of pi [B, T], float32, pi = softmax(logits / temperature).

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
    fixed = jax.lax.stop_gradient(logits)
    probs = jnp.exp(fixed - jax.lax.stop_gradient(log_total)[..., None])
    entropy = jax.lax.stop_gradient(log_total) - (probs * fixed).sum(-1)
    return jnp.where(is_token, logits, 0).sum(-1) - log_total, entropy

  joined = lambda x: jnp.moveaxis(x, 0, 1).reshape(B, count * width)[:, :T]
  return jax.tree.map(joined, jax.lax.map(one, (split(hidden_BTD), split(tokens_BT))))


def logprobs(params: Any, config: model.ModelConfig, batch: Batch, temperature: float,
             learner: Learner) -> tuple[jax.Array, jax.Array]:
  """log pi and entropy [P, G, T] of a batch's completions, 0 at padding."""
  P, G, T = batch.completions_PGT.shape
  hidden_BTD = completion_features(params, config, batch, learner.remat).reshape(P * G, T, -1)
  tokens_BT = batch.completions_PGT.reshape(P * G, T)
  both = token_logprobs(params, config, hidden_BTD, tokens_BT, temperature, learner.logprob_chunk)
  return jax.tree.map(lambda x: masked.masked(x.reshape(P, G, T), batch.mask_PGT), both)


def micro_batches(batch: Batch, size: int) -> Batch:
  """Every leaf [P, ...] as [P / size, size, ...]; size 0 = one micro-batch.

  Micro-batch m takes prompts m, m + M, ...: each device then holds its share of every one of them.
  """
  split = lambda x: x.reshape(size or x.shape[0], -1, *x.shape[1:]).swapaxes(0, 1)
  return jax.tree.map(split, batch)


def reference_logprobs(params: Any, batch: Batch, config: model.ModelConfig, temperature: float, learner: Learner,
                       micro_batch: int) -> jax.Array:
  """log-probs [P, G, T] under frozen parameters, one micro-batch at a time."""
  one = lambda micro: logprobs(params, config, micro, temperature, learner)[0]
  out = jax.lax.map(one, micro_batches(batch, micro_batch))
  return out.swapaxes(0, 1).reshape(batch.completions_PGT.shape)


Loss = Callable[[Any, Batch], tuple[jax.Array, tuple[jax.Array, dict, dict]]]


def grpo_loss(params: Any, batch: Batch, config: model.ModelConfig, algo: Algo, temperature: float, learner: Learner):
  """(sum, (weight, means, maxima)) of the objective over a batch or a part of it; the loss is sum / weight."""
  logprobs_PGT, entropy_PGT = logprobs(params, config, batch, temperature, learner)
  loss, weight, means = objective(logprobs_PGT, batch, algo)
  gap_PGT = jnp.abs(jax.lax.stop_gradient(logprobs_PGT) - batch.sampler_logprobs_PGT)
  count = (batch.mask_PGT != 0).sum()
  means |= {"entropy": (entropy_PGT.sum(), count),
            "sampler/logprob_gap_mean": (masked.total(gap_PGT, batch.mask_PGT), count)}
  return loss, (weight, means, {"sampler/logprob_gap_max": masked.masked(gap_PGT, batch.mask_PGT).max()})


def supervised_loss(params: Any, batch: Batch, config: model.ModelConfig, learner: Learner):
  """As `grpo_loss`, for the mean of -log pi over the tokens of given completions (temperature 1)."""
  logprobs_PGT, _ = logprobs(params, config, batch, 1.0, learner)
  return -logprobs_PGT.sum(), ((batch.mask_PGT != 0).sum(), {}, {})


def train_step(state: TrainState, batch: Batch, loss: Loss, optimizer: optax.GradientTransformation,
               micro_batch: int = 0) -> tuple[TrainState, Metrics]:
  """One update. Gradients of the sums are added over micro-batches and divided once by the whole batch's weight.

  A gradient that is not finite leaves parameters and optimizer as they were, and metric `skipped_updates` is 1.
  """
  gradient = jax.value_and_grad(loss, has_aux=True)

  def add(total, micro):
    (loss_sum, (weight, means, maxima)), grads = gradient(state.params, micro)
    sums = jax.tree.map(jnp.add, total[0], (grads, loss_sum, weight, means))
    return (sums, jax.tree.map(jnp.maximum, total[1], maxima)), None

  micros = micro_batches(batch, micro_batch)
  shapes = jax.eval_shape(gradient, state.params, jax.tree.map(lambda x: x[0], micros))
  (loss_sum, (weight, means, maxima)), grads = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
  zeros = (grads, loss_sum, weight, means), maxima
  ((grads, loss_sum, weight, means), maxima), _ = jax.lax.scan(add, zeros, micros)

  grads = jax.tree.map(lambda g: masked.divide(g, weight), grads)
  norm = optax.tree.norm(grads)
  finite = jnp.isfinite(norm)
  updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
  keep = functools.partial(jax.tree.map, lambda new, old: jnp.where(finite, new, old))
  new_state = TrainState(state.step + 1, keep(optax.apply_updates(state.params, updates), state.params),
                         keep(opt_state, state.opt_state))
  metrics = {"loss": masked.divide(loss_sum, weight), "grad_norm": norm, "skipped_updates": 1.0 - finite}
  metrics |= {name: masked.divide(*mean) for name, mean in means.items()} | maxima
  return new_state, metrics
