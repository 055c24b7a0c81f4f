"""One update: how gradients are accumulated, checked and applied.

A batch is computed in micro-batches. Values that depend on the whole batch are computed before it
is split, so that the losses and gradients of the parts add up to those of the whole batch.

The functions are pure. The caller compiles `train_step` or, with by_slots.py, the three steps
`begin`, `add_gradients` and `finish`.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NamedTuple

from flax import struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import optax

from grpo_jax import masked, model
from grpo_jax.algo import controllers, metrics
from grpo_jax.algo.balance import balance_metrics
from grpo_jax.algo.metrics import Metrics
from grpo_jax.algo.settings import Algo
from grpo_jax.learner.objectives import Objective, PartReport
from grpo_jax.learner.packed import PackedSegment, Parts, in_parts, real_tokens
from grpo_jax.learner.token_stats import in_micro_batches
from grpo_jax.parallel.mesh import CONTEXT, DATA
from grpo_jax.types import Batch, Coefficients, Routing, TrainState


@dataclasses.dataclass(frozen=True)
class UpdateRule:
  """How an update is made.

  Attributes:
    objective: The function to minimise.
    optimizer: An optimizer of optax.
    micro_batch: Prompts per forward and backward pass. 0 means all. It does not change the update.
    move: (trained parameters after the optimizer's step, routing of the batch) -> the parameters,
      with changes that follow no gradient, such as those of router biases. None changes nothing.
    mesh: The mesh of the devices. Those along `data` then add up the gradients of their own
      prompts, and exchange the sums once (`sums_apart`). With None, XLA exchanges the gradients of
      each micro-batch.
  """

  objective: Objective
  optimizer: optax.GradientTransformation
  micro_batch: int = 0
  move: Callable[[Any, Routing | None], Any] | None = None
  mesh: jax.sharding.Mesh | None = None


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
  """Makes one update.

  Args:
    state: The state before the update.
    base: The frozen parameters, which are joined with the trained ones: those under adapters, or a
      vision tower. None if all are trained.
    reference: All parameters of the reference policy, or None where the objective does not read
      them.
    batch: Prompts and completions to learn from.
    rule: Objective, optimizer and micro-batch size.

  Returns:
    The state after the update, and metrics that are not reduced yet. If no token is in the loss, or
    the gradient is not finite, only the step number changes. The metric `skipped_updates` is 1 if
    the gradient is not finite.
  """
  policy = model.join(base, state.params)
  batch = prepared(rule.objective, policy, batch, rule.micro_batch)
  begun = begin(state.coefs, batch, rule)
  given = Given(state.params, base, reference, begun)
  M, m, G, T = begun.parts.batch.completions_PGT.shape
  sums = no_gradients(given, rule) if M > 1 else None
  sums = add_gradients(given, sums, PackedSegment(0, 0, M), rule)  # in rows of T
  # The tokens computed in a part, with padding. A TPU or GPU computes one more in each row, which
  # is not counted here.
  in_part = m * (batch.prompts_PS.shape[1] + G * (T - 1))
  computed_parts = (begun.parts.needed_M >= 0).sum()  # not those without loss tokens
  return finish(state, begun, sums, in_part * computed_parts, rule)


class Begun(struct.PyTreeNode):
  """A batch whose gradient is about to be computed.

  Attributes:
    parts: The micro-batches.
    of_batch: `Objective.totals`: the values that all micro-batches share.
    tokens: int32 scalar, how many tokens are in the loss mask of the whole batch.
  """

  parts: Parts
  of_batch: Any
  tokens: jax.Array


class Given(NamedTuple):
  """The inputs of the gradient of an update.

  Attributes:
    params: The trained parameters.
    base: The frozen parameters, which are joined with the trained ones, or None.
    reference: All parameters of the reference policy, or None where the objective reads none.
    begun: The batch.
  """

  params: Any
  base: Any
  reference: Any
  begun: Begun


class Sums(struct.PyTreeNode):
  """The sums over the micro-batches of an update.

  Attributes:
    grads: The gradient of the loss.
    loss: The loss.
    report: The merged metrics, and the sum of the routing.
  """

  grads: Any
  loss: jax.Array
  report: PartReport


def prepared(objective: Objective, policy: model.Params, batch: Batch, micro_batch: int) -> Batch:
  """Runs `Objective.look` where needed, and `Objective.prepare`: the batch, ready to be split."""
  P, stats = len(batch.prompts_PS), None
  if objective.looks_at(P // (micro_batch or P)):
    look = functools.partial(objective.look, policy)
    stats = in_micro_batches(look, batch, micro_batch)
  return objective.prepare(batch, stats)


def begin(coefs: Coefficients, batch: Batch, rule: UpdateRule) -> Begun:
  """Splits a `prepared` batch into micro-batches, and drops the groups that have no gradient."""
  of_batch, tokens = rule.objective.totals(batch, coefs), masked.count(batch.mask_PGT)
  return Begun(in_parts(rule.objective.drop(batch), rule.micro_batch), of_batch, tokens)


def sums_apart(mesh: jax.sharding.Mesh | None) -> int:
  """How many devices add up gradients of their own prompts, along `data`. 1 means that none does.

  Beside an axis `context`, XLA aborts where they do and another axis splits prompts (jaxlib 0.10.2,
  in a gather of tokens), so none does.
  """
  return 1 if mesh is None or CONTEXT in mesh.shape else mesh.shape[DATA]


def no_gradients(given: Given, rule: UpdateRule) -> Sums:
  """The sums before the first micro-batch.

  If devices along `data` have sums of their own (`sums_apart`), all arrays but those of the routing
  have a first axis of devices.
  """
  loss, report = jax.eval_shape(_loss_of(given, rule), given.params, _micro_batch(given.begun, 0))
  grads, loss, routing = jax.tree.map(
    lambda x: jnp.zeros(x.shape, x.dtype), (given.params, loss, report.routing)
  )
  measured, devices = metrics.neutral(report.metrics), sums_apart(rule.mesh)
  if devices > 1:
    grads, loss, measured = jax.tree.map(
      lambda x: jnp.broadcast_to(x, (devices, *x.shape)), (grads, loss, measured)
    )
  return Sums(grads, loss, PartReport(measured, routing))


def add_gradients(
  given: Given, sums: Sums | None, segment: PackedSegment, rule: UpdateRule
) -> Sums:
  """Adds the gradients, losses and reports of the micro-batches of a segment, one after another.

  Args:
    given: The parameters and the batch.
    sums: The sums over earlier micro-batches. None if there is only one micro-batch, which saves a
      second copy of the gradients.
    segment: The micro-batches. `slots` is static, `first` and `end` may be arrays. The loop ends at
      the first one without a token in the loss, because only such ones follow (see `Parts`).
    rule: Objective and micro-batch size.

  Returns:
    `sums` with those of the segment added.
  """
  if sums is None:
    return _part_sums(given, 0, segment.slots, rule)
  if sums_apart(rule.mesh) == 1:
    return _with_segment(given, sums, segment, rule)
  return _with_segment_apart(given, sums, segment, rule)


def _with_segment(given: Given, sums: Sums, segment: PackedSegment, rule: UpdateRule) -> Sums:
  """Adds the sums of a segment's micro-batches, one after another."""
  has_tokens = given.begun.parts.needed_M >= 0

  def goes_on(loop: tuple[jax.Array, Sums]) -> jax.Array:
    i, _ = loop
    # The second bound, which may be an array, implies the first. But the first is a constant, from
    # which `grpo_jax.plan` knows the most rounds of this loop.
    return (i < len(has_tokens)) & (i < segment.end) & has_tokens[i]

  def add(loop: tuple[jax.Array, Sums]) -> tuple[jax.Array, Sums]:
    i, before = loop
    return i + 1, _add_sums(before, _part_sums(given, i, segment.slots, rule))

  return jax.lax.while_loop(goes_on, add, (jnp.int32(segment.first), sums))[1]


def _with_segment_apart(given: Given, sums: Sums, segment: PackedSegment, rule: UpdateRule) -> Sums:
  """`_with_segment`, but each device along `data` adds to its own sums.

  The devices have the same parameters and different prompts. Without the `shard_map`, XLA would add
  up the gradients of all devices in each micro-batch.
  """

  def own_segment(given: Given, sums: Sums, first: jax.Array, end: jax.Array) -> Sums:
    own = _map_apart(lambda x: x[0], sums)
    own = _with_segment(given, own, segment._replace(first=first, end=end), rule)
    return _map_apart(lambda x: x[None], own)

  # The specs name `data` alone, because XLA splits arrays over the other axes.
  everywhere, own = PartitionSpec(), PartitionSpec(DATA)
  parts = Parts(PartitionSpec(None, DATA), everywhere, everywhere)
  begun = Begun(parts, everywhere, everywhere)
  return jax.shard_map(
    own_segment,
    mesh=rule.mesh,
    in_specs=(Given(everywhere, everywhere, everywhere, begun), own, everywhere, everywhere),
    out_specs=own,
    axis_names={DATA},
    check_vma=False,  # the outputs of kernels do not say over which axes they vary
  )(given, sums, jnp.int32(segment.first), jnp.int32(segment.end))


def _map_apart(function: Callable[[jax.Array], jax.Array], sums: Sums) -> Sums:
  """Applies a function to all arrays that have an axis of devices, which are all but the routing.

  The routing has an axis of prompts, which is split over the same devices.
  """
  grads, loss, measured = jax.tree.map(function, (sums.grads, sums.loss, sums.report.metrics))
  return Sums(grads, loss, sums.report.replace(metrics=measured))


def _of_all_devices(sums: Sums) -> Sums:
  """Adds up the sums of the devices along `data`: this is where their gradients are exchanged."""
  grads, loss = jax.tree.map(lambda x: x.sum(0), (sums.grads, sums.loss))
  measured = metrics.merge_all(sums.report.metrics)
  return Sums(grads, loss, sums.report.replace(metrics=measured))


def _part_sums(given: Given, number: jax.Array | int, slots: int, rule: UpdateRule) -> Sums:
  """The gradient, the loss and the report of the micro-batch of this number."""
  part = _micro_batch(given.begun, number).replace(slots=slots)
  gradient = jax.value_and_grad(_loss_of(given, rule), has_aux=True)
  (loss, report), grads = gradient(given.params, part)
  return Sums(grads, loss, report)


def finish(
  state: TrainState, begun: Begun, sums: Sums, computed: jax.Array | float, rule: UpdateRule
) -> tuple[TrainState, Metrics]:
  """Applies the gradient, and returns the results of `train_step`.

  Args:
    state: The state before the update.
    begun: The batch.
    sums: The sums over all micro-batches.
    computed: How many tokens, padding included, the layers computed.
    rule: Objective, optimizer and micro-batch size.
  """
  tokens, batch = begun.tokens, begun.parts.batch
  if len(begun.parts.needed_M) > 1 and sums_apart(rule.mesh) > 1:
    sums = _of_all_devices(sums)
  grad_norm = optax.tree.norm(sums.grads)
  # Without tokens the gradient does not matter, and the update does not count as skipped.
  is_finite = jnp.isfinite(grad_norm) | (tokens == 0)
  next_state = _apply_gradient(state, sums, batch, rule)
  # Without tokens, or with a gradient that is not finite, only the number of the step and the
  # position in the schedule of the learning rate change.
  skipped = state.replace(opt_state=_with_schedules_of(state.opt_state, next_state.opt_state))
  next_state = _select(is_finite & (tokens > 0), next_state, skipped).replace(step=state.step + 1)
  measured = _metrics(sums, grad_norm, is_finite, tokens)
  # `begin` dropped groups that have no gradient: `kept` counts the loss tokens that remain.
  kept, real = masked.count(batch.mask_PGT), jax.vmap(real_tokens)(batch).sum()
  measured["update/token_share"] = metrics.weighted(masked.divide(kept, tokens), tokens)
  measured["perf/padding"] = metrics.weighted(masked.divide(computed, real), real)
  return next_state, measured


def _with_schedules_of(opt_state: Any, next_state: Any) -> Any:
  """The state of an optimizer with the positions in schedules of the state after an update."""

  def is_schedule(part: Any) -> bool:
    return isinstance(part, optax.ScaleByScheduleState)

  def chosen(old: Any, new: Any) -> Any:
    return new if is_schedule(old) else old

  return jax.tree.map(chosen, opt_state, next_state, is_leaf=is_schedule)


def sync_reference(reference: Any, params: Any, mixup: float) -> Any:
  """Moves the reference to (1 - mixup) reference + mixup params, in the reference's dtype.

  TR-DPO 2404.09656, equations 6 and 7. With mixup 1 it is the iterative GRPO of DeepSeekMath.
  """

  def moved(ref: jax.Array, param: jax.Array) -> jax.Array:
    return ((1 - mixup) * ref + mixup * param).astype(ref.dtype)

  return jax.tree.map(moved, reference, params)


def _loss_of(
  given: Given, rule: UpdateRule
) -> Callable[[Any, Batch], tuple[jax.Array, PartReport]]:
  """Makes (trained parameters, part) -> (the part's summand of the loss, its report)."""
  base, reference, of_batch = given.base, given.reference, given.begun.of_batch

  def loss_of(trained: Any, part: Batch) -> tuple[jax.Array, PartReport]:
    return rule.objective.part_loss(model.join(base, trained), reference, part, of_batch)

  return loss_of


def _micro_batch(begun: Begun, number: jax.Array | int) -> Batch:
  """The micro-batch of this number."""
  return jax.tree.map(lambda x: x[number], begun.parts.batch)


def _add_sums(before: Sums, of_part: Sums) -> Sums:
  """Adds the sums of one more micro-batch."""
  old, new = ((x.grads, x.loss, x.report.routing) for x in (before, of_part))
  grads, loss, routing = jax.tree.map(jnp.add, old, new)
  merged = metrics.merge(before.report.metrics, of_part.report.metrics)
  return Sums(grads, loss, PartReport(merged, routing))


def _apply_gradient(state: TrainState, sums: Sums, parts: Batch, rule: UpdateRule) -> TrainState:
  """The state after the optimizer's step, even if the gradient is not finite."""
  M, m, G, _ = parts.completions_PGT.shape
  updates, opt_state = rule.optimizer.update(sums.grads, state.opt_state, state.params)
  params = optax.apply_updates(state.params, updates)
  report = sums.report
  return state.replace(
    params=params if rule.move is None else rule.move(params, report.routing),
    opt_state=opt_state,
    coefs=rule.objective.adapt(state.coefs, report.metrics, M * m * G),
  )


def _select(condition: jax.Array, first: Any, second: Any) -> Any:
  """The first tree where the condition holds, else the second."""
  return jax.tree.map(lambda x, y: jnp.where(condition, x, y), first, second)


def _metrics(sums: Sums, grad_norm: jax.Array, is_finite: jax.Array, tokens: jax.Array) -> Metrics:
  """The metrics of an update. An update without a token in its loss counts in no mean."""
  has_tokens, report = tokens > 0, sums.report
  out = report.metrics | {
    "loss": metrics.weighted(sums.loss, has_tokens),
    "grad_norm": metrics.weighted(grad_norm, has_tokens),
    "skipped_updates": metrics.summed(1.0 - is_finite),
  }
  if report.routing is not None:
    for name, value in balance_metrics(report.routing).items():
      out[name] = metrics.weighted(value, tokens)
  return out
