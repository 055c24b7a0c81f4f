"""The learner: log-probs of completions that share their prompt, and one update. Pure; jitted by the caller."""

import dataclasses
import functools
from typing import Any, Callable

import jax
import jax.numpy as jnp
import optax

from grpo_jax import masked, model
from grpo_jax.algo import controllers, selection
from grpo_jax.algo.balance import balance_loss, balance_metrics
from grpo_jax.algo.kl import full
from grpo_jax.algo.objective import Told, has_entropy_bonus, objective, whole
from grpo_jax.config import Algo, Learner
from grpo_jax.types import Batch, Coefs, Routing, TokenStats, TrainState

Metrics = dict[str, jax.Array]


def init_state(params: Any, optimizer: optax.GradientTransformation, algo: Algo) -> TrainState:
  """A state before its first update."""
  reference = jax.tree.map(jnp.copy, params) if algo.ref_sync_steps else None
  return TrainState(
    jnp.int32(0), params, optimizer.init(params), controllers.initial(algo), reference
  )


def sync_reference(state: TrainState, mixup: float) -> TrainState:
  """reference <- (1 - mixup) reference + mixup params (TR-DPO 2404.09656, eq. 6-7; 1: DeepSeekMath's iterative GRPO)."""
  mixed = lambda ref, param: (1 - mixup) * ref + mixup * param
  return state.replace(reference=jax.tree.map(mixed, state.reference, state.params))


def completion_features(
  params: Any, config: model.ModelConfig, batch: Batch, remat: bool = False
) -> tuple[jax.Array, Routing | None]:
  """Hidden states [P, G, T, D] from which completion token t is predicted: those of the token before it. And the routing
  of each group: of its prompt, once, if one of its tokens is in the loss, and of its tokens in the loss but the T-th.

  The prompt is computed once per group. This is the one place that shifts: token 0 follows the prompt's last one.
  """
  P, G, T = batch.completions_PGT.shape
  config = dataclasses.replace(config, length=batch.prompts_PS.shape[1] + T)
  positions_PS = jnp.broadcast_to(jnp.arange(batch.prompts_PS.shape[1]), batch.prompts_PS.shape)
  counted_PS = (positions_PS < batch.prompt_lengths_P[:, None]) & (batch.mask_PGT != 0).any((1, 2))[
    :, None
  ]
  prompt_PSD, cache, routing = model.routed_features(
    params, config, batch.prompts_PS, positions_PS, counted_PS, remat=remat
  )
  last_PD = jnp.take_along_axis(prompt_PSD, (batch.prompt_lengths_P - 1)[:, None, None], axis=1)[
    :, 0
  ]
  first_PG1D = jnp.broadcast_to(last_PD[:, None, None], (P, G, 1, last_PD.shape[-1]))
  if T == 1:
    return first_PG1D, routing
  shared = model.empty(config, model.share(cache, batch.prompt_lengths_P), G, capacity=0)
  positions_PGT = jnp.broadcast_to(
    batch.prompt_lengths_P[:, None, None] + jnp.arange(T - 1), (P, G, T - 1)
  )
  rows = lambda x: x.reshape(P * G, T - 1)
  tokens_BT, positions_BT, counted_BT = map(
    rows, (batch.completions_PGT[..., :-1], positions_PGT, batch.mask_PGT[..., :-1])
  )
  rest_BTD, _, of_rest = model.routed_features(
    params, config, tokens_BT, positions_BT, counted_BT, shared, remat
  )
  routing = jax.tree.map(
    lambda once, each: once + each.reshape(P, G, *each.shape[1:]).sum(1), routing, of_rest
  )
  return jnp.concatenate([first_PG1D, rest_BTD.reshape(P, G, T - 1, -1)], axis=2), routing


@dataclasses.dataclass(frozen=True)
class Asked:
  """What `token_stats` is to give beside log-probs and entropies."""

  entropy_gradient: bool = False  # else the entropies have none
  full_kl: bool = False  # to the frozen parameters


def token_stats(
  params: Any,
  frozen: Any,
  config: model.ModelConfig,
  hidden: tuple[jax.Array, jax.Array | None],
  tokens_BT: jax.Array,
  temperature: float,
  chunk: int,
  asked: Asked = Asked(),
) -> TokenStats:
  """Of tokens [B, T] that follow hidden states [B, T, D] of params and, where the KL is asked for, of frozen.

  pi = softmax(logits / temperature). A device holds logits of about `chunk` tokens at a time (of one position of its
  rows at least), in the backward pass too. Chunks are slices of T, so that rows stay where they are sharded.
  """
  B, T = tokens_BT.shape
  count = -(-T // max(1, chunk * config.row_shards // B))
  width = -(-T // count)
  pad = lambda x: jnp.pad(x, [(0, 0), (0, count * width - T)] + [(0, 0)] * (x.ndim - 2))
  split = lambda x: jnp.moveaxis(pad(x).reshape(B, count, width, *x.shape[2:]), 1, 0)

  @jax.checkpoint
  def one(chunked):
    (hidden, frozen_hidden), tokens = chunked
    logits = model.unembed(params, config, hidden) / temperature
    log_total = jax.nn.logsumexp(logits, axis=-1)
    # A masked sum, not a gather: its gradient is elementwise, and a vocabulary sharded over devices needs no exchange.
    is_token = jnp.arange(logits.shape[-1]) == tokens[..., None]
    fixed = (
      (logits, log_total) if asked.entropy_gradient else jax.lax.stop_gradient((logits, log_total))
    )
    entropy = fixed[1] - (jnp.exp(fixed[0] - fixed[1][..., None]) * fixed[0]).sum(-1)
    kl = (
      full(logits, model.unembed(frozen, config, frozen_hidden) / temperature)
      if asked.full_kl
      else None
    )
    return TokenStats(jnp.where(is_token, logits, 0).sum(-1) - log_total, entropy, kl)

  joined = lambda x: jnp.moveaxis(x, 0, 1).reshape(B, count * width)[:, :T]
  return jax.tree.map(joined, jax.lax.map(one, jax.tree.map(split, (hidden, tokens_BT))))


def stats(
  params: Any,
  frozen: Any,
  config: model.ModelConfig,
  batch: Batch,
  temperature: float,
  learner: Learner,
  asked: Asked = Asked(),
) -> TokenStats:
  """Of a batch's completions. `frozen`, the reference's parameters, is read where its KL is asked for."""
  P, G, T = batch.completions_PGT.shape
  features = lambda params: completion_features(params, config, batch, learner.remat)
  rows = lambda hidden_PGTD: hidden_PGTD.reshape(P * G, T, -1)
  hidden_PGTD, routing = features(params)
  hidden = (
    rows(hidden_PGTD),
    jax.lax.stop_gradient(rows(features(frozen)[0])) if asked.full_kl else None,
  )
  of_rows = token_stats(
    params,
    frozen,
    config,
    hidden,
    batch.completions_PGT.reshape(P * G, T),
    temperature,
    learner.logprob_chunk,
    asked,
  )
  return jax.tree.map(lambda x: masked.masked(x.reshape(P, G, T), batch.mask_PGT), of_rows).replace(
    routing=routing
  )


def micro_batches(batch: Batch, size: int) -> Batch:
  """Every leaf [P, ...] as [P / size, size, ...]; size 0 = one micro-batch.

  Micro-batch m takes prompts m, m + M, ...: each device then holds its share of every one of them.
  """
  split = lambda x: x.reshape(size or x.shape[0], -1, *x.shape[1:]).swapaxes(0, 1)
  return jax.tree.map(split, batch)


def in_parts(one: Callable[[Batch], Any], batch: Batch, micro_batch: int) -> Any:
  """one(batch), a tree of arrays [P, ...], one micro-batch at a time. No gradient is meant to flow."""
  joined = lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:])
  return jax.tree.map(joined, jax.lax.map(one, micro_batches(batch, micro_batch)))


def batch_stats(
  params: Any,
  batch: Batch,
  config: model.ModelConfig,
  temperature: float,
  learner: Learner,
  micro_batch: int,
) -> TokenStats:
  """`stats` of a whole batch."""
  return in_parts(
    lambda micro: stats(params, None, config, micro, temperature, learner), batch, micro_batch
  )


@dataclasses.dataclass(frozen=True)
class Objective:
  """What `train_step` minimises. A batch may be computed in parts: what takes all of it to know comes first."""

  policy: Callable[
    [Any, Any], Any
  ]  # what is trained, frozen -> all that the policy is computed from
  prepare: Callable[
    [Any, Batch, int], Batch
  ]  # params, whole batch, micro-batch size -> batch with its selection
  whole: Callable[[Batch, Coefs], Any]  # of the whole batch
  share: Callable[
    [Any, Any, Batch, Any], tuple[jax.Array, Told]
  ]  # params, reference, a part, whole -> its share of the loss
  adapted: Callable[
    [Coefs, Metrics, int], Coefs
  ]  # coefs, metrics, completions -> coefs of the next update


def grpo(config: model.ModelConfig, algo: Algo, temperature: float, learner: Learner) -> Objective:
  """The objective of `algo`."""
  asked = Asked(has_entropy_bonus(algo), bool(algo.kl_coef) and algo.kl == "full")

  def prepare(params, batch, micro_batch):
    if not selection.is_needed(algo):
      return batch
    x = batch_stats(params, batch, config, temperature, learner, micro_batch)
    old_PGT = x.logprobs_PGT if batch.old_logprobs_PGT is None else batch.old_logprobs_PGT
    selected = selection.select(
      x.logprobs_PGT, old_PGT, x.entropies_PGT, batch.advantages_PGT, batch.mask_PGT, algo
    )
    return batch.replace(selection=selected, routing=jax.lax.stop_gradient(x.routing))

  def share(params, reference, batch, of_all):
    x = stats(params, reference, config, batch, temperature, learner, asked)
    loss, told = objective(x, batch, of_all, algo)
    gap_PGT = jnp.abs(jax.lax.stop_gradient(x.logprobs_PGT) - batch.sampler_logprobs_PGT)
    told.means["sampler/logprob_gap_mean"] = (
      masked.total(gap_PGT, batch.mask_PGT),
      masked.count(batch.mask_PGT),
    )
    told.maxima["sampler/logprob_gap_max"] = masked.masked(gap_PGT, batch.mask_PGT).max()
    return loss, told.replace(routing=x.routing)

  def adapted(coefs, metrics, sequences):
    return controllers.adapted(coefs, metrics.get("kl"), metrics["entropy"], sequences, algo)

  plain = Objective(policy_of(config), prepare, functools.partial(whole, algo=algo), share, adapted)
  return balanced(plain, config, learner)


def policy_of(config: model.ModelConfig) -> Callable[[Any, Any], Any]:
  """(what is trained, frozen) -> the policy's parameters."""
  return (
    (lambda trained, frozen: trained)
    if config.lora is None
    else (lambda trained, frozen: model.join(frozen, trained))
  )


def supervised(config: model.ModelConfig, learner: Learner) -> Objective:
  """The mean of -log pi over the tokens of given completions (temperature 1)."""

  def share(params, reference, batch, count):
    x = stats(params, None, config, batch, 1.0, learner)
    return masked.divide(-x.logprobs_PGT.sum(), count), Told({}, {}, {}, x.routing)

  plain = Objective(
    policy_of(config),
    lambda params, batch, micro_batch: batch,
    lambda batch, coefs: masked.count(batch.mask_PGT),
    share,
    lambda coefs, metrics, sequences: coefs,
  )
  return balanced(plain, config, learner)


def balanced(plain: Objective, config: model.ModelConfig, learner: Learner) -> Objective:
  """`plain` and learner.router_aux_coef times the routers' `balance_loss` over all that the batch has them route."""
  if not learner.router_aux_coef:
    return plain

  def prepare(params, batch, micro_batch):
    batch = plain.prepare(params, batch, micro_batch)
    if batch.routing is not None or micro_batch in (
      0,
      len(batch.prompts_PS),
    ):  # it is known, or the one part is all
      return batch
    route = lambda micro: completion_features(params, config, micro, learner.remat)[1]
    return batch.replace(routing=jax.lax.stop_gradient(in_parts(route, batch, micro_batch)))

  def of_all(batch, coefs):
    return plain.whole(batch, coefs), jax.tree.map(lambda x: x.sum(0), batch.routing)

  def share(params, reference, batch, known):
    loss, told = plain.share(params, reference, batch, known[0])
    part = jax.tree.map(lambda x: x.sum(0), told.routing)
    all_ = part if known[1] is None else known[1]
    loss = loss + learner.router_aux_coef * balance_loss(
      all_.given_BLX.sum(0), part.probs_BLX.sum(0), all_.tokens_BL.sum()
    )
    return loss, told

  return Objective(plain.policy, prepare, of_all, share, plain.adapted)


def train_step(
  state: TrainState,
  frozen: Any,
  batch: Batch,
  loss: Objective,
  optimizer: optax.GradientTransformation,
  micro_batch: int = 0,
) -> tuple[TrainState, Metrics]:
  """One update. Each micro-batch's share of the loss has the whole batch's weight, so that their gradients add up.

  `frozen` are the reference's parameters, None where the loss does not read them, or where the state has them. With adapters
  they are those under them: alone, the reference.
  A batch without a token of the loss, or a gradient that is not finite, leaves all but the step as it was, and metric
  `skipped_updates` is 1. Metric `tokens` counts the loss's tokens: what the others are means over.
  """
  gradient = jax.value_and_grad(
    lambda trained, *rest: loss.share(loss.policy(trained, frozen), *rest), has_aux=True
  )
  reference = frozen if state.reference is None else loss.policy(state.reference, frozen)
  batch = loss.prepare(loss.policy(state.params, frozen), batch, micro_batch)
  of_all = loss.whole(batch, state.coefs)

  def add(total, micro):
    (share, told), grads = gradient(state.params, reference, micro, of_all)
    sums = jax.tree.map(jnp.add, total[0], (grads, share, told.means, told.routing))
    return (
      sums,
      jax.tree.map(jnp.maximum, total[1], told.maxima),
      jax.tree.map(jnp.minimum, total[2], told.minima),
    ), None

  micros = micro_batches(batch, micro_batch)
  first = jax.tree.map(lambda x: x[0], micros)
  (share, told), grads = jax.eval_shape(gradient, state.params, reference, first, of_all)
  start = lambda value, tree: jax.tree.map(lambda s: jnp.full(s.shape, value, s.dtype), tree)
  zero = (
    start(0, (grads, share, told.means, told.routing)),
    start(-jnp.inf, told.maxima),
    start(jnp.inf, told.minima),
  )
  ((grads, share, means, routing), maxima, minima), _ = jax.lax.scan(add, zero, micros)

  norm, tokens = optax.tree.norm(grads), masked.count(batch.mask_PGT)
  good = jnp.isfinite(norm) & (tokens > 0)
  updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
  metrics = {"loss": share, "grad_norm": norm, "skipped_updates": 1.0 - good, "tokens": tokens}
  metrics |= {name: masked.divide(*mean) for name, mean in means.items()} | maxima | minima
  metrics |= {} if routing is None else balance_metrics(routing)
  P, G, _ = batch.completions_PGT.shape
  keep = functools.partial(jax.tree.map, lambda new, old: jnp.where(good, new, old))
  return TrainState(
    state.step + 1,
    keep(optax.apply_updates(state.params, updates), state.params),
    keep(opt_state, state.opt_state),
    keep(loss.adapted(state.coefs, metrics, P * G), state.coefs),
    state.reference,
  ), metrics
