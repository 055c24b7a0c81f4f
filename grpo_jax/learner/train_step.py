"""One update: what it minimises, and how gradients are accumulated, checked and applied.

A batch is computed in micro-batches. Whatever depends on the whole batch is computed before it is
split, so that the losses of the parts, and their gradients, add up to those of the whole.

The functions are pure. The caller compiles them.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import optax

from grpo_jax import masked, model
from grpo_jax.algo import controllers, metrics, token_selection
from grpo_jax.algo.balance import balance_loss, balance_metrics
from grpo_jax.algo.metrics import Metrics
from grpo_jax.algo.objective import Totals, objective, totals, without_idle_groups
from grpo_jax.algo.settings import Algo
from grpo_jax.algo.token_selection.select import select
from grpo_jax.config import Learner
from grpo_jax.learner.features import completion_features
from grpo_jax.learner.packed import (
  computed_tokens,
  real_tokens,
  sorted_by_tokens,
  with_fewest_slots,
)
from grpo_jax.learner.token_stats import (
  StatsOptions,
  batch_stats,
  in_micro_batches,
  split_batch,
  whole_batch_stats,
)
from grpo_jax.types import Batch, Coefficients, Routing, TrainState


class PartReport(struct.PyTreeNode):
  """What a part of a batch reports beside its loss.

  Attributes:
    metrics: Not reduced yet.
    routing: The routing of each prompt's group, with its gradient, or None without experts.
  """

  metrics: Metrics
  routing: Routing | None = None


@dataclasses.dataclass(frozen=True)
class Objective:
  """What `train_step` minimises.

  Attributes:
    prepare: (policy, whole batch, micro-batch size) -> the batch with what its parts need to know
      of the whole.
    totals: (whole batch, coefficients) -> what the parts of the batch share: the divisors of means
      and the coefficients.
    drop: (whole batch) -> the batch with a mask of 0 for the groups that have no gradient.
    part_loss: (policy, reference, part, totals) -> the part's summand of the loss, and its report.
    adapt: (coefficients, metrics, completions in the batch) -> the next update's coefficients.
  """

  prepare: Callable[[model.Params, Batch, int], Batch]
  totals: Callable[[Batch, Coefficients], Any]
  drop: Callable[[Batch], Batch]
  part_loss: Callable[[model.Params, Any, Batch, Any], tuple[jax.Array, PartReport]]
  adapt: Callable[[Coefficients, Metrics, int], Coefficients]


@dataclasses.dataclass(frozen=True)
class UpdateRule:
  """How an update is made.

  Attributes:
    objective: What is minimised.
    optimizer: From optax.
    micro_batch: Prompts per forward and backward pass. 0 means all. It does not change the update.
    move: (trained parameters after the optimizer, routing of the batch) -> what follows no
      gradient, moved. None moves nothing.
  """

  objective: Objective
  optimizer: optax.GradientTransformation
  micro_batch: int = 0
  move: Callable[[Any, Routing | None], Any] | None = None


def init_state(params: Any, optimizer: optax.GradientTransformation, algo: Algo) -> TrainState:
  """The state before the first update."""
  return TrainState(
    step=jnp.int32(0),
    params=params,
    opt_state=optimizer.init(params),
    coefs=controllers.initial(algo),
  )


def grpo(config: model.ModelConfig, algo: Algo, learner: Learner) -> Objective:
  """The objective that `algo` describes, plus the routers' balance loss where that is on."""
  options = StatsOptions(config, learner, algo.has_entropy_bonus, algo.needs_full_kl)
  plain = StatsOptions(config, learner)

  def prepare(params: model.Params, batch: Batch, micro_batch: int) -> Batch:
    if not token_selection.is_needed(algo):
      return batch
    stats = whole_batch_stats(params, batch, plain, micro_batch)
    old_PGT = stats.logprobs_PGT if batch.old_logprobs_PGT is None else batch.old_logprobs_PGT
    selected = select(
      stats.logprobs_PGT,
      old_PGT,
      stats.entropies_PGT,
      batch.advantages_PGT,
      batch.mask_PGT,
      algo,
    )
    return batch.replace(selection=selected, routing=jax.lax.stop_gradient(stats.routing))

  def totals_of(batch: Batch, coefs: Coefficients) -> Totals:
    return totals(batch, coefs, algo)

  def drop(batch: Batch) -> Batch:
    return without_idle_groups(batch, algo)

  def part_loss(
    params: model.Params, reference: model.Params | None, part: Batch, of_batch: Totals
  ) -> tuple[jax.Array, PartReport]:
    stats = batch_stats(params, reference, part, options)
    loss, measured = objective(stats, part, of_batch, algo)
    measured |= _sampler_gap(stats.logprobs_PGT, part) | _router_gap(stats.routing)
    return loss, PartReport(measured, stats.routing)

  def adapt(coefs: Coefficients, measured: Metrics, completions: int) -> Coefficients:
    kl = metrics.mean_value(measured["kl"]) if "kl" in measured else None
    entropy = metrics.mean_value(measured["entropy"])
    return controllers.adapted(coefs, kl, entropy, completions, algo)

  return with_balance_loss(Objective(prepare, totals_of, drop, part_loss, adapt), config, learner)


def train_step(
  state: TrainState,
  base: model.Params | None,
  reference: model.Params | None,
  batch: Batch,
  rule: UpdateRule,
) -> tuple[TrainState, Metrics]:
  """One update.

  Args:
    state: The state before the update.
    base: The frozen parameters that are joined with those that are trained: those under adapters,
      or a vision tower. None if all are trained.
    reference: All parameters of the reference policy, or None where the objective does not read
      them.
    batch: What to learn from.
    rule: Objective, optimizer and micro-batch size.

  Returns:
    The state after the update, and metrics that are not reduced yet. A batch without a token in the
    loss, or a gradient that is not finite, changes only the step. The metric `skipped_updates` is 1
    where the gradient was not finite.
  """
  objective = rule.objective
  policy = model.join(base, state.params)
  batch = objective.prepare(policy, batch, rule.micro_batch)
  of_batch, tokens = objective.totals(batch, state.coefs), masked.count(batch.mask_PGT)
  batch = objective.drop(batch)
  parts = split_batch(sorted_by_tokens(batch, rule.micro_batch)[0], rule.micro_batch)

  def loss_of(trained: Any, part: Batch) -> tuple[jax.Array, PartReport]:
    return objective.part_loss(model.join(base, trained), reference, part, of_batch)

  grads, loss, report = _accumulate_gradients(loss_of, state.params, parts)
  grad_norm = optax.tree.norm(grads)
  is_finite = jnp.isfinite(grad_norm) | (tokens == 0)
  next_state = _apply(state, grads, report, batch, rule)
  next_state = _where(is_finite & (tokens > 0), next_state, state).replace(step=state.step + 1)
  measured = _metrics(loss, grad_norm, is_finite, tokens, report)
  computed = masked.count(batch.mask_PGT)
  measured["update/token_share"] = metrics.weighted(masked.divide(computed, tokens), tokens)
  return next_state, measured | {"perf/padding": _padding(parts)}


def sync_reference(reference: Any, params: Any, mixup: float) -> Any:
  """Moves the reference: (1 - mixup) reference + mixup params.

  TR-DPO 2404.09656, equations 6 and 7. With mixup 1 it is the iterative GRPO of DeepSeekMath. The
  reference keeps its dtype.
  """

  def moved(ref: jax.Array, param: jax.Array) -> jax.Array:
    return ((1 - mixup) * ref + mixup * param).astype(ref.dtype)

  return jax.tree.map(moved, reference, params)


def _accumulate_gradients(
  loss_of: Callable[[Any, Batch], tuple[jax.Array, PartReport]], params: Any, parts: Batch
) -> tuple[Any, jax.Array, PartReport]:
  """The gradient, the loss and the report of the whole batch, one micro-batch at a time.

  Args:
    loss_of: (trained parameters, part) -> the part's summand of the loss, and its report.
    params: The trained parameters.
    parts: The micro-batches, [parts, micro_batch, ...]. Those without a token in the loss come
      last, and are not computed unless there is only one.
  """

  def part_of(part: Batch) -> tuple[Any, jax.Array, PartReport]:
    (loss, report), grads = jax.value_and_grad(loss_of, has_aux=True)(params, part)
    return grads, loss, report

  def part_number(i: jax.Array | int) -> Batch:
    return jax.tree.map(lambda x: x[i], parts)

  if len(parts.prompts_PS) == 1:  # no second array of gradients to add up in
    return with_fewest_slots(part_of, part_number(0))

  has_tokens = _with_tokens(parts)

  def goes_on(loop: tuple) -> jax.Array:
    i = loop[0]
    return (i < len(has_tokens)) & has_tokens[i]

  def add(loop: tuple) -> tuple:
    i, *sums, measured = loop
    grads, loss, report = with_fewest_slots(part_of, part_number(i))
    sums = jax.tree.map(jnp.add, tuple(sums), (grads, loss, report.routing))
    return i + 1, *sums, metrics.merge(measured, report.metrics)

  grads, loss, report = jax.eval_shape(part_of, part_number(0))
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (grads, loss, report.routing))
  start = (jnp.int32(0), *zeros, metrics.neutral(report.metrics))
  _, grads, loss, routing, measured = jax.lax.while_loop(goes_on, add, start)
  return grads, loss, PartReport(measured, routing)


def _with_tokens(parts: Batch) -> jax.Array:
  """bool [parts], which micro-batches have a token in the loss."""
  return (parts.mask_PGT != 0).any((1, 2, 3))


def _apply(
  state: TrainState, grads: Any, report: PartReport, batch: Batch, rule: UpdateRule
) -> TrainState:
  P, G, _ = batch.completions_PGT.shape
  updates, opt_state = rule.optimizer.update(grads, state.opt_state, state.params)
  params = optax.apply_updates(state.params, updates)
  return state.replace(
    params=params if rule.move is None else rule.move(params, report.routing),
    opt_state=opt_state,
    coefs=rule.objective.adapt(state.coefs, report.metrics, P * G),
  )


def _padding(parts: Batch) -> metrics.Metric:
  """How many tokens the layers compute for each token that there is, in the parts computed."""
  is_computed = _with_tokens(parts)
  real = masked.total(jax.vmap(real_tokens)(parts), is_computed)
  computed = masked.total(jax.vmap(computed_tokens)(parts), is_computed)
  return metrics.weighted(masked.divide(computed, real), real)


def _where(condition: jax.Array, first: Any, second: Any) -> Any:
  return jax.tree.map(lambda x, y: jnp.where(condition, x, y), first, second)


def _metrics(
  loss: jax.Array, grad_norm: jax.Array, is_finite: jax.Array, tokens: jax.Array, report: PartReport
) -> Metrics:
  """The metrics of an update. An update without a token in its loss counts in no mean."""
  has_tokens = tokens > 0
  out = report.metrics | {
    "loss": metrics.weighted(loss, has_tokens),
    "grad_norm": metrics.weighted(grad_norm, has_tokens),
    "skipped_updates": metrics.summed(1.0 - is_finite),
  }
  if report.routing is not None:
    for name, value in balance_metrics(report.routing).items():
      out[name] = metrics.weighted(value, tokens)
  return out


def supervised(config: model.ModelConfig, learner: Learner) -> Objective:
  """The mean of -log pi over the tokens of given completions, for the warm start."""
  options = StatsOptions(config, learner)

  def prepare(params: model.Params, batch: Batch, micro_batch: int) -> Batch:
    del params, micro_batch
    return batch

  def token_count(batch: Batch, coefs: Coefficients) -> jax.Array:
    del coefs
    return masked.count(batch.mask_PGT)

  def drop(batch: Batch) -> Batch:
    return batch

  def part_loss(
    params: model.Params, reference: None, part: Batch, count: jax.Array
  ) -> tuple[jax.Array, PartReport]:
    del reference
    stats = batch_stats(params, None, part, options)
    return masked.divide(-stats.logprobs_PGT.sum(), count), PartReport({}, stats.routing)

  def adapt(coefs: Coefficients, measured: Metrics, completions: int) -> Coefficients:
    del measured, completions
    return coefs

  return with_balance_loss(Objective(prepare, token_count, drop, part_loss, adapt), config, learner)


def with_balance_loss(
  objective: Objective, config: model.ModelConfig, learner: Learner
) -> Objective:
  """The objective plus learner.router_aux_coef times the routers' `balance_loss`.

  The balance loss is a product of two means over the whole batch. One of them has no gradient, so
  it is computed in a forward pass before the batch is split.
  """
  if not learner.router_aux_coef:
    return objective

  def prepare(params: model.Params, batch: Batch, micro_batch: int) -> Batch:
    batch = objective.prepare(params, batch, micro_batch)
    is_one_part = micro_batch in (0, len(batch.prompts_PS))
    if batch.routing is not None or is_one_part:
      return batch

    def route(part: Batch) -> Routing | None:
      return completion_features(params, config, part, learner.saved_activations)[1]

    routing = in_micro_batches(route, batch, micro_batch)
    return batch.replace(routing=jax.lax.stop_gradient(routing))

  def totals_and_routing(batch: Batch, coefs: Coefficients) -> tuple[Any, Routing | None]:
    return objective.totals(batch, coefs), sum_rows(batch.routing)

  def keep_all(batch: Batch) -> Batch:
    return batch  # the balance loss has a gradient for every token

  def part_loss(
    params: model.Params, reference: Any, part: Batch, of_batch: tuple[Any, Routing | None]
  ) -> tuple[jax.Array, PartReport]:
    own_totals, whole = of_batch
    loss, report = objective.part_loss(params, reference, part, own_totals)
    own = sum_rows(report.routing)
    whole = own if whole is None else whole
    assigned_X, probs_X = whole.assigned_BLX.sum((0, 1)), own.probs_BLX.sum((0, 1))
    balance = balance_loss(assigned_X, probs_X, whole.tokens_BL.sum())
    return loss + learner.router_aux_coef * balance, report

  return dataclasses.replace(
    objective, prepare=prepare, totals=totals_and_routing, drop=keep_all, part_loss=part_loss
  )


def sum_rows(routing: Routing | None) -> Routing | None:
  """The routing of all rows together, as one row."""
  return jax.tree.map(lambda x: x.sum(0, keepdims=True), routing)


def _sampler_gap(logprobs_PGT: jax.Array, batch: Batch) -> Metrics:
  """How far the sampler's log-probs are from the learner's, for the policy that sampled."""
  gap_PGT = jnp.abs(jax.lax.stop_gradient(logprobs_PGT) - batch.sampler_logprobs_PGT)
  gap_PGT = masked.masked(gap_PGT, batch.mask_PGT)
  # Padding, where the gap is 0, counts in the maximum: without a token it is 0 and not -inf.
  gaps = {
    "sampler/logprob_gap_mean": metrics.mean(gap_PGT, batch.mask_PGT),
    "sampler/logprob_gap_max": metrics.largest(gap_PGT, jnp.ones_like(gap_PGT)),
  }
  return {name: gap.replace(first_update_only=True) for name, gap in gaps.items()}


def _router_gap(routing: Routing | None) -> Metrics:
  """How often the routers would choose other experts than the sampler used, if these are known."""
  if routing is None or routing.compared_BL is None:
    return {}
  share = masked.divide(routing.differs_BL.sum(), routing.compared_BL.sum())
  differs = metrics.weighted(share, routing.compared_BL.sum())
  return {"router/differs": differs.replace(first_update_only=True)}
