"""What an update minimises: the GRPO objective, the supervised one, and the routers' balance.

A batch is computed in micro-batches. Whatever depends on the whole batch is computed before it is
split, so that the losses of the parts, and their gradients, add up to those of the whole.
"""

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
from grpo_jax.algo.objective import Totals, objective, totals
from grpo_jax.algo.settings import Algo
from grpo_jax.config import Learner
from grpo_jax.learner.features import completion_features
from grpo_jax.learner.token_stats import (
  StatsOptions,
  batch_stats,
  in_micro_batches,
  whole_batch_stats,
)
from grpo_jax.types import Batch, Coefficients, Routing


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
    join: (trained parameters, base) -> all parameters of the policy. The base is the frozen model
      under LoRA adapters, and None without LoRA.
    prepare: (policy, whole batch, micro-batch size) -> the batch with what its parts need to know
      of the whole.
    totals: (whole batch, coefficients) -> what the parts of the batch share: the divisors of means
      and the coefficients.
    part_loss: (policy, reference, part, totals) -> the part's summand of the loss, and its report.
    adapt: (coefficients, metrics, completions in the batch) -> the next update's coefficients.
  """

  join: Callable[[Any, Any], model.Params]
  prepare: Callable[[model.Params, Batch, int], Batch]
  totals: Callable[[Batch, Coefficients], Any]
  part_loss: Callable[[model.Params, Any, Batch, Any], tuple[jax.Array, PartReport]]
  adapt: Callable[[Coefficients, Metrics, int], Coefficients]


def grpo(config: model.ModelConfig, algo: Algo, learner: Learner) -> Objective:
  """The objective that `algo` describes, plus the routers' balance loss where that is on."""
  options = StatsOptions(config, learner, algo.has_entropy_bonus, algo.needs_full_kl)
  plain = StatsOptions(config, learner)

  def prepare(params: model.Params, batch: Batch, micro_batch: int) -> Batch:
    if not token_selection.is_needed(algo):
      return batch
    stats = whole_batch_stats(params, batch, plain, micro_batch)
    old_PGT = stats.logprobs_PGT if batch.old_logprobs_PGT is None else batch.old_logprobs_PGT
    selected = token_selection.select(
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

  def part_loss(
    params: model.Params, reference: model.Params | None, part: Batch, of_batch: Totals
  ) -> tuple[jax.Array, PartReport]:
    stats = batch_stats(params, reference, part, options)
    loss, measured = objective(stats, part, of_batch, algo)
    measured |= _sampler_gap(stats.logprobs_PGT, part)
    return loss, PartReport(measured, stats.routing)

  def adapt(coefs: Coefficients, measured: Metrics, completions: int) -> Coefficients:
    kl = metrics.mean_value(measured["kl"]) if "kl" in measured else None
    entropy = metrics.mean_value(measured["entropy"])
    return controllers.adapted(coefs, kl, entropy, completions, algo)

  return with_balance_loss(
    Objective(_join(config), prepare, totals_of, part_loss, adapt), config, learner
  )


def supervised(config: model.ModelConfig, learner: Learner) -> Objective:
  """The mean of -log pi over the tokens of given completions, for the warm start."""
  options = StatsOptions(config, learner)

  def prepare(params: model.Params, batch: Batch, micro_batch: int) -> Batch:
    del params, micro_batch
    return batch

  def token_count(batch: Batch, coefs: Coefficients) -> jax.Array:
    del coefs
    return masked.count(batch.mask_PGT)

  def part_loss(
    params: model.Params, reference: None, part: Batch, count: jax.Array
  ) -> tuple[jax.Array, PartReport]:
    del reference
    stats = batch_stats(params, None, part, options)
    return masked.divide(-stats.logprobs_PGT.sum(), count), PartReport({}, stats.routing)

  def adapt(coefs: Coefficients, measured: Metrics, completions: int) -> Coefficients:
    del measured, completions
    return coefs

  return with_balance_loss(
    Objective(_join(config), prepare, token_count, part_loss, adapt), config, learner
  )


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

  def part_loss(
    params: model.Params, reference: Any, part: Batch, of_batch: tuple[Any, Routing | None]
  ) -> tuple[jax.Array, PartReport]:
    own_totals, whole = of_batch
    loss, report = objective.part_loss(params, reference, part, own_totals)
    own = sum_rows(report.routing)
    whole = own if whole is None else whole
    balance = balance_loss(whole.assigned_BLX.sum(0), own.probs_BLX.sum(0), whole.tokens_BL.sum())
    return loss + learner.router_aux_coef * balance, report

  return Objective(objective.join, prepare, totals_and_routing, part_loss, objective.adapt)


def sum_rows(routing: Routing | None) -> Routing | None:
  """The routing of all rows together."""
  return jax.tree.map(lambda x: x.sum(0), routing)


def _join(config: model.ModelConfig) -> Callable[[Any, Any], model.Params]:
  def all_trained(trained: model.Params, base: None) -> model.Params:
    del base
    return trained

  def adapters_on_base(adapters: Any, base: model.Params) -> model.Params:
    return model.join(base, adapters)

  return all_trained if config.lora is None else adapters_on_base


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
