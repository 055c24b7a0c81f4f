"""The objectives of updates: that of GRPO, and that of the warm start, the mean of -log pi."""

from collections.abc import Callable
import dataclasses
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from grpo_jax import masked, model
from grpo_jax.algo import controllers, metrics, token_selection
from grpo_jax.algo.balance import balance_loss
from grpo_jax.algo.metrics import Metrics
from grpo_jax.algo.objective import Totals, objective, totals, without_idle_groups
from grpo_jax.algo.settings import Algo
from grpo_jax.algo.token_selection.select import select
from grpo_jax.config import Learner
from grpo_jax.learner.features import completion_features
from grpo_jax.learner.token_stats import StatsOptions, batch_stats
from grpo_jax.types import Batch, Coefficients, Routing, TokenStats


class PartReport(struct.PyTreeNode):
  """The metrics and the routing of a part of a batch, beside its loss.

  Attributes:
    metrics: The metrics, not reduced yet.
    routing: The routing of each prompt's group, with its gradient, or None without experts.
  """

  metrics: Metrics
  routing: Routing | None = None


@dataclasses.dataclass(frozen=True)
class Objective:
  """The function that `train_step` minimises, in the steps that micro-batches need.

  Attributes:
    totals: (whole batch, coefficients) -> the values that all parts of the batch share: the
      divisors of means and the coefficients.
    part_loss: (policy, reference, part, totals) -> the part's summand of the loss, and a report.
    adapt: (coefficients, metrics, completions in the batch) -> the next update's coefficients.
    drop: (whole batch) -> the batch with a mask of 0 for the groups that have no gradient.
    look: (policy, part) -> the statistics of each part that `prepare` needs, as arrays [P, ...]
      without a gradient. None if `prepare` needs none.
    looks_at_one_part: Whether `look` also runs if the batch is a single part.
    prepare: (whole batch, the results of `look` or None) -> the batch with the fields that parts
      need but that depend on the whole batch.
  """

  totals: Callable[[Batch, Coefficients], Any]
  part_loss: Callable[[model.Params, Any, Batch, Any], tuple[jax.Array, PartReport]]
  adapt: Callable[[Coefficients, Metrics, int], Coefficients] = lambda coefs, measured, number: (
    coefs
  )
  drop: Callable[[Batch], Batch] = lambda batch: batch
  look: Callable[[model.Params, Batch], Any] | None = None
  looks_at_one_part: bool = True
  prepare: Callable[[Batch, Any], Batch] = lambda batch, seen: batch

  def looks_at(self, parts: int) -> bool:
    """Whether `look` runs before the update of a batch with this number of parts."""
    return self.look is not None and (parts > 1 or self.looks_at_one_part)


def grpo(config: model.ModelConfig, algo: Algo, learner: Learner) -> Objective:
  """The objective that `algo` describes, plus the routers' balance loss (`with_balance_loss`)."""
  options = StatsOptions(config, learner, algo.has_entropy_bonus, algo.needs_full_kl)
  options_of_look = StatsOptions(config, learner)  # without a gradient of entropies or a full KL

  def look(params: model.Params, part: Batch) -> TokenStats:
    return batch_stats(params, None, part, options_of_look)

  def prepare(batch: Batch, stats: TokenStats | None) -> Batch:
    """Selects tokens by statistics of the whole batch, if the algorithm selects tokens."""
    if stats is None:
      return batch
    old_PGT = stats.logprobs_PGT if batch.old_logprobs_PGT is None else batch.old_logprobs_PGT
    selected = select(
      stats.logprobs_PGT,
      old_PGT,
      stats.entropies_PGT,
      batch.advantages_PGT,
      batch.mask_PGT,
      algo,
    )
    # `with_balance_loss` reads the routing.
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
    measured |= _router_gap(stats.routing)
    if not algo.has_rejection:  # with rejection, the gap is measured before tokens are rejected
      measured |= sampler_gap(stats.logprobs_PGT, part.sampler_logprobs_PGT, part.mask_PGT)
    return loss, PartReport(measured, stats.routing)

  def adapt(coefs: Coefficients, measured: Metrics, completions: int) -> Coefficients:
    kl = metrics.mean_value(measured["kl"]) if "kl" in measured else None
    entropy = metrics.mean_value(measured["entropy"])
    return controllers.adapted(coefs, kl, entropy, completions, algo)

  goal = Objective(totals=totals_of, part_loss=part_loss, adapt=adapt, drop=drop, prepare=prepare)
  if token_selection.is_needed(algo):
    goal = dataclasses.replace(goal, look=look)
  return with_balance_loss(goal, config, learner)


def supervised(config: model.ModelConfig, learner: Learner) -> Objective:
  """The objective of the warm start: the mean of -log pi over the completions' tokens."""
  options = StatsOptions(config, learner)

  def token_count(batch: Batch, coefs: Coefficients) -> jax.Array:
    del coefs
    return masked.count(batch.mask_PGT)

  def part_loss(
    params: model.Params, reference: None, part: Batch, count: jax.Array
  ) -> tuple[jax.Array, PartReport]:
    del reference
    stats = batch_stats(params, None, part, options)
    return masked.divide(-stats.logprobs_PGT.sum(), count), PartReport({}, stats.routing)

  return with_balance_loss(Objective(token_count, part_loss), config, learner)


def with_balance_loss(
  objective: Objective, config: model.ModelConfig, learner: Learner
) -> Objective:
  """The objective plus learner.router_aux_coef times the routers' `balance_loss`.

  The balance loss is a product of two means over the whole batch. The mean of the loads has no
  gradient, so a forward pass computes it before the batch is split.
  """
  if not learner.router_aux_coef:
    return objective

  def route(params: model.Params, part: Batch) -> Routing | None:
    return completion_features(params, config, part, learner.saved_activations)[1]

  def prepare(batch: Batch, routing: Routing | None) -> Batch:
    # The routing has the loads. The gradient goes through the probabilities of each part's pass.
    return batch.replace(routing=jax.lax.stop_gradient(routing))

  def totals_and_routing(batch: Batch, coefs: Coefficients) -> tuple[Any, Routing | None]:
    return objective.totals(batch, coefs), sum_rows(batch.routing)

  def part_loss(
    params: model.Params, reference: Any, part: Batch, of_batch: tuple[Any, Routing | None]
  ) -> tuple[jax.Array, PartReport]:
    inner_totals, batch_routing = of_batch
    loss, report = objective.part_loss(params, reference, part, inner_totals)
    part_routing = sum_rows(report.routing)
    if batch_routing is None:  # a single part is the whole batch
      batch_routing = part_routing
    assigned_X = batch_routing.assigned_BLX.sum((0, 1))
    probs_X = part_routing.probs_BLX.sum((0, 1))
    balance = balance_loss(assigned_X, probs_X, batch_routing.tokens_BL.sum())
    return loss + learner.router_aux_coef * balance, report

  # Otherwise the objective's `prepare` already stores the routing. A single part needs no look,
  # because its own pass has the loads of the whole batch.
  if objective.look is None:
    objective = dataclasses.replace(objective, look=route, looks_at_one_part=False, prepare=prepare)
  # No group is dropped, because the balance loss has a gradient for every token.
  return dataclasses.replace(
    objective, totals=totals_and_routing, part_loss=part_loss, drop=lambda batch: batch
  )


def sum_rows(routing: Routing | None) -> Routing | None:
  """The sums of a routing over all rows, as one row."""
  return jax.tree.map(lambda x: x.sum(0, keepdims=True), routing)


def sampler_gap(
  logprobs_PGT: jax.Array, sampler_logprobs_PGT: jax.Array, mask_PGT: jax.Array
) -> Metrics:
  """Metrics of how far the sampler's log-probs are from the learner's, for the same policy."""
  gap_PGT = jnp.abs(jax.lax.stop_gradient(logprobs_PGT) - sampler_logprobs_PGT)
  gap_PGT = masked.masked(gap_PGT, mask_PGT)
  # Padding, where the gap is 0, counts in the maximum, which is then 0 without tokens, not -inf.
  # In later updates of a batch, the policy is no longer that of the sampler.
  gaps = {
    "sampler/logprob_gap_mean": metrics.mean(gap_PGT, mask_PGT),
    "sampler/logprob_gap_max": metrics.largest(gap_PGT, jnp.ones_like(gap_PGT)),
  }
  return {name: gap.replace(first_update_only=True) for name, gap in gaps.items()}


def _router_gap(routing: Routing | None) -> Metrics:
  """How often routers would choose other experts than the sampler. Empty if that is not known."""
  if routing is None or routing.compared_BL is None:
    return {}
  share = masked.divide(routing.differs_BL.sum(), routing.compared_BL.sum())
  differs = metrics.weighted(share, routing.compared_BL.sum())
  return {"router/differs": differs.replace(first_update_only=True)}
