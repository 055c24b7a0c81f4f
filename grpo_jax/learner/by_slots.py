"""Computes each micro-batch in the fewest slots that hold its tokens.

The number of slots is part of the shapes (see packed.py), so each number needs its own program. It
is compiled when the number first occurs, and computes all micro-batches of a batch that need that
number. Before the host chooses the programs, it reads how many slots each micro-batch needs.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from grpo_jax import model
from grpo_jax.algo.metrics import Metrics
from grpo_jax.compiling import Compiler, Jitted
from grpo_jax.learner import train_step as pieces
from grpo_jax.learner.packed import (
  PackedSegment,
  Parts,
  in_parts,
  joined,
  row_slots,
  segments,
  slot_sizes,
)
from grpo_jax.learner.token_stats import StatsOptions, batch_stats, in_micro_batches
from grpo_jax.learner.train_step import Begun, Given, Sums, UpdateRule
from grpo_jax.parallel import sharding
from grpo_jax.parallel.mesh import DATA
from grpo_jax.types import Batch, Coefficients, TrainState


class SlotPlaces(NamedTuple):
  """The shardings of arrays on a mesh. None leaves a sharding to the compiler.

  Attributes:
    rows: The sharding of arrays [P, ...].
    parts: The sharding of arrays [M, m, ...], micro-batches of m prompts.
    everywhere: The sharding of scalars and small arrays: replicated on all devices.
    state: The shardings of a `TrainState`.
  """

  rows: Any = None
  parts: Any = None
  everywhere: Any = None
  state: TrainState | None = None


def places_on(mesh: Mesh, state: TrainState | None = None) -> SlotPlaces:
  """The shardings on a mesh. `state` has those of a `TrainState`, for updates."""
  rows, parts = sharding.batch_sharding(mesh), sharding.parts_sharding(mesh)
  return SlotPlaces(rows, parts, NamedSharding(mesh, PartitionSpec()), state)


class MicroBatchPass:
  """A pass over a batch in micro-batches without a gradient, such as the pass for log-probs.

  Calling it returns the results for the whole batch, in the order of the batch.

  Attributes:
    whole: The pass in one program, compiled by `jax.jit`, with completions in rows of T.
  """

  def __init__(
    self,
    function: Callable[[Any, Batch], Any],
    micro_batch: int,
    platform: str,
    places: SlotPlaces | None = None,
  ):
    """Prepares the programs, which are compiled later.

    Args:
      function: (parameters, part) -> a tree of arrays [m, ...]. It must return 0 for groups without
        a token in the loss, because such groups may be skipped.
      micro_batch: m, the prompts of a part. 0 means all prompts of the batch.
      platform: The platform of the devices.
      places: The shardings of arrays on a mesh. None means one device.
    """
    places = places or SlotPlaces()
    self._function, self._micro_batch, self._platform = function, micro_batch, platform
    self.whole = Jitted(self._plain, out_shardings=places.rows)
    # The shardings of a `Parts`: of its batch, of order_P and of needed_M.
    self._parts_places = Parts(places.parts, places.everywhere, places.everywhere)
    # batch -> its micro-batches
    split = functools.partial(in_parts, micro_batch=micro_batch)
    self._split = Jitted(split, out_shardings=None if places.rows is None else self._parts_places)
    # (parameters, micro-batches) -> zeros with the shapes of the results
    self._zeros = Jitted(self._zero_results, out_shardings=places.parts)
    # (parameters, micro-batches, results so far, first, end) -> the results, with those of the
    # micro-batches first to end - 1 filled in. There is a program for each number of slots.
    self._fill = Jitted(
      self._fill_results,
      _slots_of_call,
      static_argnames="slots",
      donate_argnames="found",
      out_shardings=places.parts,
    )
    # (results of micro-batches, order_P) -> results in the order of the batch
    self._in_batch_order = Jitted(_in_batch_order, out_shardings=places.rows)

  def __call__(self, params: Any, batch: Batch) -> Any:
    sizes = sizes_of(batch, self._platform)
    if len(sizes) == 1:  # only rows
      return self.whole(params, batch)
    parts = self._split(batch)
    found = self._zeros(params, parts)
    for slots, first, end in segments(np.asarray(parts.needed_M), sizes):
      found = self._fill(params, parts, found, first, end, slots=slots)
    return self._in_batch_order(found, parts.order_P)

  def compile_ahead(self, compiler: Compiler, params: Any, batch: Batch) -> None:
    """Starts to compile what every call needs and, on accelerators, what a call may need.

    Args:
      compiler: Compiles the programs in the background.
      params: The shapes and shardings of the parameters.
      batch: The shapes and shardings of the batch.
    """
    sizes = sizes_of(batch, self._platform)
    if len(sizes) == 1:
      self.whole.compile_ahead(compiler, params, batch)
      return
    self._split.compile_ahead(compiler, batch)
    parts = with_places(self._split.eval_shape(batch), self._parts_places)
    self._zeros.compile_ahead(compiler, params, parts)
    found = with_places(self._zeros.eval_shape(params, parts), self._parts_places.batch)
    for slots in _sizes_compiled_ahead(sizes, self._platform):  # each for any first and end
      self._fill.compile_ahead(compiler, params, parts, found, 0, 1, slots=slots)
    self._in_batch_order.compile_ahead(compiler, found, parts.order_P)

  def _plain(self, params: Any, batch: Batch) -> Any:
    return in_micro_batches(functools.partial(self._function, params), batch, self._micro_batch)

  def _zero_results(self, params: Any, parts: Parts) -> Any:
    """Zeros [M, m, ...]: the results of micro-batches without a token in the loss stay zeros."""
    part = jax.tree.map(lambda x: x[0], parts.batch)
    found, M = jax.eval_shape(self._function, params, part), len(parts.needed_M)
    return jax.tree.map(lambda x: jnp.zeros((M, *x.shape), x.dtype), found)

  def _fill_results(
    self, params: Any, parts: Parts, found: Any, first: jax.Array, end: jax.Array, slots: int
  ) -> Any:
    """Computes parts first to end - 1 in `slots` slots, and writes their results into `found`."""

    def fill_one(i: jax.Array, found: Any) -> Any:
      part = jax.tree.map(lambda x: x[i], parts.batch).replace(slots=slots)
      results = self._function(params, part)
      return jax.tree.map(lambda all_, new: all_.at[i].set(new), found, results)

    return jax.lax.fori_loop(first, end, fill_one, found)


def logprobs_pass(
  options: StatsOptions, micro_batch: int, places: SlotPlaces | None = None
) -> MicroBatchPass:
  """Makes the pass (all parameters, batch) -> log-probs of the completions, float32 [P, G, T]."""

  def logprobs(params: Any, part: Batch) -> jax.Array:
    return batch_stats(params, None, part, options).logprobs_PGT

  return MicroBatchPass(logprobs, micro_batch, options.model.platform, places)


class Update:
  """`train_step` in several programs, with each micro-batch in the fewest slots for its tokens.

  Calling it as (state, base, reference, batch) returns the state after an update, and metrics. The
  call donates the state.

  Attributes:
    whole: `train_step` in one program, compiled by `jax.jit`, with completions in rows of T.
  """

  def __init__(self, rule: UpdateRule, platform: str, places: SlotPlaces | None = None):
    """Prepares the programs, which are compiled later.

    One program begins an update, one finishes it, and for each number of slots one adds the
    gradients of micro-batches, or computes that of the only one.

    Args:
      rule: The objective, the optimizer and the size of micro-batches.
      platform: The platform of the devices.
      places: The shardings of arrays on a mesh. None means one device.
    """
    places = places or SlotPlaces()
    self._rule, self._platform = rule, platform
    # The shardings of the programs' outputs, as structs like the outputs. None leaves them to XLA.
    updated = begun = only = sums = None
    if places.state is not None:
      updated = places.state, places.everywhere
      parts = Parts(places.parts, places.everywhere, places.everywhere)
      begun = Begun(parts, places.everywhere, places.everywhere)
      # Gradients lie where their parameters lie.
      only = sums = Sums(places.state.params, places.everywhere, places.everywhere)
      if pieces.sums_apart(rule.mesh) > 1:
        sums = _places_apart(places.state.params, rule.mesh)
    self._begun_places, self._sums_places, self._only_places = begun, sums, only
    self.whole = Jitted(self._train_step, donate_argnums=0, out_shardings=updated)
    self._begin = Jitted(self._prepare_and_begin, out_shardings=begun)
    zeros = functools.partial(pieces.no_gradients, rule=rule)
    self._zeros = Jitted(zeros, out_shardings=sums)
    self._add = Jitted(
      self._add_gradients,
      _slots_of_call,
      static_argnames="slots",
      donate_argnames="sums",
      out_shardings=sums,
    )
    self._only = Jitted(
      self._add_gradients, _slots_of_call, static_argnames="slots", out_shardings=only
    )
    finish = functools.partial(pieces.finish, rule=rule)
    self._finish = Jitted(finish, donate_argnums=0, out_shardings=updated)
    self._look: MicroBatchPass | None = None
    if rule.objective.look is not None:
      look = rule.objective.look
      # A `MicroBatchPass` takes one tree of parameters: here (frozen, trained).
      self._look = MicroBatchPass(
        lambda parameters, part: look(model.join(*parameters), part),
        rule.micro_batch,
        platform,
        places,
      )

  def __call__(
    self, state: TrainState, base: Any, reference: Any, batch: Batch
  ) -> tuple[TrainState, Metrics]:
    """Makes an update, and returns the new state and the metrics (see `train_step`)."""
    P, G, T = batch.completions_PGT.shape
    m = self._rule.micro_batch or P
    sizes = sizes_of(batch, self._platform)
    if len(sizes) == 1:  # only rows
      return self.whole(state, base, reference, batch)
    stats = None
    if self._rule.objective.looks_at(P // m):
      stats = self._look((base, state.params), batch)
    begun = self._begin(state.coefs, batch, stats)
    given = Given(state.params, base, reference, begun)
    sums = None if m == P else self._zeros(given)  # one micro-batch needs no sums
    add = self._only if m == P else self._add
    chosen = segments(np.asarray(begun.parts.needed_M), sizes)
    if sums is None and not chosen:
      # No group is left in the only micro-batch. Its gradient of 0 still moves the momentum.
      chosen = [PackedSegment(sizes[0], 0, 1)]
    computed = 0  # tokens, padding included
    for slots, first, end in chosen:
      sums = add(given, sums, first, end, slots=slots)
      in_group = slots or G * row_slots(T, self._platform)  # 0 slots means rows of T
      computed += (end - first) * m * (batch.prompts_PS.shape[1] + in_group)
    return self._finish(state, begun, sums, float(computed))

  def compile_ahead(
    self, compiler: Compiler, state: TrainState, base: Any, reference: Any, batch: Batch
  ) -> None:
    """Starts to compile what every call needs and, on accelerators, what a call may need.

    Args:
      compiler: Compiles the programs in the background.
      state: The shapes and shardings of the state.
      base: The shapes and shardings of the frozen parameters.
      reference: The shapes and shardings of the reference's parameters.
      batch: The shapes and shardings of the batch.
    """
    sizes, P = sizes_of(batch, self._platform), len(batch.prompts_PS)
    if len(sizes) == 1:
      self.whole.compile_ahead(compiler, state, base, reference, batch)
      return
    m = self._rule.micro_batch or P
    if self._rule.objective.looks_at(P // m):
      self._look.compile_ahead(compiler, (base, state.params), batch)
      return  # `_begin` reads the results of `_look`, whose shardings are not known yet
    begin = state.coefs, batch, None
    self._begin.compile_ahead(compiler, *begin)
    begun = with_places(self._begin.eval_shape(*begin), self._begun_places)
    given = Given(state.params, base, reference, begun)
    sums = with_places(self._zeros.eval_shape(given), self._sums_places)
    if m < P:
      self._zeros.compile_ahead(compiler, given)
    for slots in _sizes_compiled_ahead(sizes, self._platform):
      if m < P:
        self._add.compile_ahead(compiler, given, sums, 0, 1, slots=slots)
      else:
        self._only.compile_ahead(compiler, given, None, 0, 1, slots=slots)
        only = self._only.eval_shape(given, None, 0, 1, slots=slots)
        sums = with_places(only, self._only_places)
    self._finish.compile_ahead(compiler, state, begun, sums, 0.0)

  def _train_step(
    self, state: TrainState, base: Any, reference: Any, batch: Batch
  ) -> tuple[TrainState, Metrics]:
    return pieces.train_step(state, base, reference, batch, self._rule)

  def _prepare_and_begin(self, coefs: Coefficients, batch: Batch, seen: Any) -> Begun:
    return pieces.begin(coefs, self._rule.objective.prepare(batch, seen), self._rule)

  def _add_gradients(
    self, given: Given, sums: Sums | None, first: jax.Array, end: jax.Array, slots: int
  ) -> Sums:
    return pieces.add_gradients(given, sums, PackedSegment(slots, first, end), self._rule)


def _places_apart(params: Any, mesh: Mesh) -> Sums:
  """The shardings of sums with a first axis, of devices along `data`."""
  of_devices = NamedSharding(mesh, PartitionSpec(DATA))
  grads = jax.tree.map(lambda x: NamedSharding(mesh, PartitionSpec(DATA, *x.spec)), params)
  return Sums(grads, of_devices, of_devices)


def sizes_of(batch: Batch, platform: str) -> list[int]:
  """The numbers of slots in which the completions of a batch can be computed (`slot_sizes`)."""
  _, G, T = batch.completions_PGT.shape
  return slot_sizes(G, T, platform)


def with_places(shapes: Any, places: Any) -> Any:
  """Adds shardings to shapes. Each leaf of `places` applies to a whole subtree. None adds none."""
  if places is None:
    return shapes

  def place(where: Any, part: Any) -> Any:
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where, weak_type=x.weak_type), part
    )

  return jax.tree.map(place, places, shapes, is_leaf=lambda x: x is None)


def _slots_of_call(*args: Any, slots: int) -> int:
  return slots


def _sizes_compiled_ahead(sizes: list[int], platform: str) -> list[int]:
  """The sizes to compile before any batch needs them, the largest first: all, or none on a CPU.

  With an accelerator, the host's cores are idle. On a CPU, the cores sample, and the compilation of
  programs that may never be called would slow that down.
  """
  return [] if platform == "cpu" else sizes[::-1]


def _in_batch_order(found: Any, order_P: jax.Array) -> Any:
  """Joins the results of micro-batches, in the order of the batch before it was sorted."""
  return jax.tree.map(lambda x: joined(x)[jnp.argsort(order_P)], found)
