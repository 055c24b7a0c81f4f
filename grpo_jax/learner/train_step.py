"""One update: accumulate gradients, check that they are finite, apply them, report metrics.

The functions are pure. The caller compiles them.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from grpo_jax import masked, model
from grpo_jax.algo import controllers, metrics
from grpo_jax.algo.balance import balance_metrics
from grpo_jax.algo.metrics import Metrics
from grpo_jax.algo.settings import Algo
from grpo_jax.learner.objectives import Objective, PartReport
from grpo_jax.learner.packed import (
  computed_tokens,
  real_tokens,
  sorted_by_tokens,
  with_fewest_slots,
)
from grpo_jax.learner.token_stats import split_batch
from grpo_jax.types import Batch, TrainState


@dataclasses.dataclass(frozen=True)
class UpdateRule:
  """How an update is made.

  Attributes:
    objective: What is minimised.
    optimizer: From optax.
    micro_batch: Prompts per forward and backward pass. 0 means all. It does not change the update.
  """

  objective: Objective
  optimizer: optax.GradientTransformation
  micro_batch: int = 0


def init_state(params: Any, optimizer: optax.GradientTransformation, algo: Algo) -> TrainState:
  """The state before the first update."""
  return TrainState(
    step=jnp.int32(0),
    params=params,
    opt_state=optimizer.init(params),
    coefs=controllers.initial(algo),
  )


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
    base: With LoRA, the frozen parameters that the adapters are added to. None without LoRA.
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
  policy = objective.join(state.params, base)
  batch = objective.prepare(policy, batch, rule.micro_batch)
  grads, loss, report = _accumulate_gradients(state, base, reference, batch, rule)
  tokens, parts = masked.count(batch.mask_PGT), _in_parts(batch, rule.micro_batch)
  grad_norm = optax.tree.norm(grads)
  is_finite = jnp.isfinite(grad_norm) | (tokens == 0)
  next_state = _apply(state, grads, report.metrics, batch, rule)
  next_state = _where(is_finite & (tokens > 0), next_state, state).replace(step=state.step + 1)
  measured = _metrics(loss, grad_norm, is_finite, tokens, report)
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
  state: TrainState,
  base: model.Params | None,
  reference: model.Params | None,
  batch: Batch,
  rule: UpdateRule,
) -> tuple[Any, jax.Array, PartReport]:
  """The gradient, the loss and the report of the whole batch, one micro-batch at a time."""
  objective = rule.objective
  of_batch = objective.totals(batch, state.coefs)

  def loss_of(trained: Any, part: Batch) -> tuple[jax.Array, PartReport]:
    return objective.part_loss(objective.join(trained, base), reference, part, of_batch)

  def part_of(part: Batch) -> tuple[Any, jax.Array, PartReport]:
    (loss, report), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params, part)
    return grads, loss, report

  def add(total: tuple, part: Batch) -> tuple[tuple, None]:
    grads, loss, report = with_fewest_slots(part_of, part)
    sums = jax.tree.map(jnp.add, total[:3], (grads, loss, report.routing))
    return (*sums, metrics.merge(total[3], report.metrics)), None

  parts = _in_parts(batch, rule.micro_batch)
  if len(parts.prompts_PS) == 1:  # no second array of gradients to add up in
    return with_fewest_slots(part_of, jax.tree.map(lambda x: x[0], parts))
  shapes = jax.eval_shape(part_of, jax.tree.map(lambda x: x[0], parts))
  grads, loss, report = shapes
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (grads, loss, report.routing))
  start = (*zeros, metrics.neutral(report.metrics))
  (grads, loss, routing, measured), _ = jax.lax.scan(add, start, parts)
  return grads, loss, PartReport(measured, routing)


def _apply(
  state: TrainState, grads: Any, measured: Metrics, batch: Batch, rule: UpdateRule
) -> TrainState:
  P, G, _ = batch.completions_PGT.shape
  updates, opt_state = rule.optimizer.update(grads, state.opt_state, state.params)
  return state.replace(
    params=optax.apply_updates(state.params, updates),
    opt_state=opt_state,
    coefs=rule.objective.adapt(state.coefs, measured, P * G),
  )


def _in_parts(batch: Batch, micro_batch: int) -> Batch:
  """The micro-batches of a batch: arrays [parts, micro_batch, ...]."""
  return split_batch(sorted_by_tokens(batch, micro_batch)[0], micro_batch)


def _padding(parts: Batch) -> metrics.Metric:
  """How many tokens the layers compute for each token that there is."""
  real = jax.vmap(real_tokens)(parts).sum()
  return metrics.weighted(jax.vmap(computed_tokens)(parts).sum() / real, real)


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
