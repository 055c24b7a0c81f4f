"""Rows in flight (the completions that are decoded together) as arrays, and their shardings."""

import functools
from typing import Any, NamedTuple

from flax import struct
import jax
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from grpo_jax import model
from grpo_jax.sampler.logits import RowSettings
from grpo_jax.sampler.rows import Rows
from grpo_jax.sampler.seats import Grid
from grpo_jax.types import Images, Visual


class Flight(struct.PyTreeNode):
  """The rows in flight with their prompts and cache: N places, one prompt each, with Q seats each.

  Attributes:
    cache: The keys, values and states of the N prompts and the N * Q rows.
    last_ND: The features of each prompt's last token. The first logits of new rows need them.
    rows: The R = N * Q rows. Row n * Q + q is in seat q of place n.
    next_N: int32, the position of the first token after each prompt. It is not the prompt's length
      if image tokens have positions in several axes. None for models without such positions.
  """

  cache: model.Cache
  last_ND: jax.Array
  rows: Rows
  next_N: jax.Array | None = None

  @property
  def grid(self) -> Grid:
    """The places N and the seats Q of each."""
    return Grid(*self.cache.lengths_PG.shape)

  @property
  def prompts_only(self) -> "Flight":
    """The flight without the arrays of rows, for programs that change prompts alone.

    Such a program is then the same for every size of the rows' cache, so it is compiled once.
    """
    cache = self.cache.replace(keys={}, values={}, states={}, slots=0)
    return self.replace(cache=cache, rows=None)

  def with_prompts(self, changed: "Flight") -> "Flight":
    """The flight with the prompts of `changed`, the result of a program for `prompts_only`."""
    cache = changed.cache.replace(
      keys=self.cache.keys,
      values=self.cache.values,
      states=self.cache.states,
      slots=self.cache.slots,
    )
    return changed.replace(cache=cache, rows=self.rows)


class NewRows(NamedTuple):
  """Describes the rows that start in a chunk, in arrays over all R seats.

  Attributes:
    is_new_R: bool, True for seats that get a new row. The other arrays are not read elsewhere.
    key_R2: uint32, the data of each row's random key.
    number_R: int32, the number that is folded into the key (see `row_uniforms`).
    settings: How each row draws, as arrays [R].
  """

  is_new_R: np.ndarray
  key_R2: np.ndarray
  number_R: np.ndarray
  settings: RowSettings


class Prompts(struct.PyTreeNode):
  """A batch of n prompts for one forward pass.

  Attributes:
    tokens_nS: int32, right-padded.
    lengths_n: int32, how many tokens each prompt has.
    shared: The length of the common beginning of all prompts, which is computed once. It ends
      before the first image.
    images: The images of the prompts, as patches or encoded. None without images.
  """

  tokens_nS: Any
  lengths_n: Any
  shared: int = struct.field(pytree_node=False, default=0)
  images: Images | Visual | None = None


class Resumed(NamedTuple):
  """Describes the paused rows whose cache is rolled, in arrays over all R seats.

  Attributes:
    is_resumed_R: bool, True for paused rows, with or without a reply. Other seats do not change.
    kept_R: int32, how many of its first tokens the row keeps. At least 1.
    token_R: int32, the last of the kept tokens.
    given_RT: int32, entry t is the reply's token for index t of the completion, or -1.
    limit_R: int32, the number of tokens at which the row ends next. Kept tokens count.
  """

  is_resumed_R: np.ndarray
  kept_R: np.ndarray
  token_R: np.ndarray
  given_RT: np.ndarray
  limit_R: np.ndarray


def shard_grid(config: model.ModelConfig, flight: Flight) -> Grid:
  """The grid of one shard of the mesh, which holds an equal share of the places."""
  N, Q = flight.grid
  return Grid(N // config.row_shards, Q)


def on_each_shard(
  config: model.ModelConfig, function: Any, flight: Flight, *arrays: jax.Array
) -> Flight:
  """Runs function(flight, *arrays) -> Flight on each shard of the mesh, with that shard's rows.

  The first axis of each array is split over the shards. Without `shard_map`, XLA could not know
  that the indices by which `function` takes rows and places stay within a shard.
  """
  rows = config.rows
  if config.row_shards == config.slot_shards == 1:
    return constrain_flight(config, function(flight, *arrays))
  flight_specs = _specs(config, flight)
  in_specs = (flight_specs, *[PartitionSpec(*rows.spec)] * len(arrays))
  return jax.shard_map(
    function, mesh=rows.mesh, in_specs=in_specs, out_specs=flight_specs, check_vma=False
  )(flight, *arrays)


def _specs(config: model.ModelConfig, flight: Flight) -> Flight:
  """The PartitionSpecs of a Flight. The axes `tensor` and `slots` split heads and slots."""
  if config.on_one_device:  # where keys and values may lack the axes that the code below splits
    return jax.tree.map(lambda _: PartitionSpec(), flight)
  axes = config.rows.spec[0]

  def of_rows(x: jax.Array) -> PartitionSpec:  # keys or values [L, P, K, G, C, E], maybe without L
    of_slots = config.slots_axis(x.shape[-2])
    return PartitionSpec(*[None] * (x.ndim - 5), axes, config.axis_of(x.shape[-4]), None, of_slots)

  def of_prompts(x_LPKSE: jax.Array) -> PartitionSpec:
    of_slots = config.slots_axis(x_LPKSE.shape[3])
    return PartitionSpec(None, axes, config.axis_of(x_LPKSE.shape[2]), of_slots)

  by_row = PartitionSpec(axes)
  cache = flight.cache

  def states(has_rows: bool, x: jax.Array) -> PartitionSpec:
    """Splits states [L, P, heads, ...] or, of rows, [L, P, G, heads, ...]."""
    outer = (None, axes, None) if has_rows else (None, axes)
    return PartitionSpec(*outer, config.axis_of(x.shape[len(outer)]))

  return Flight(
    cache=cache.replace(
      keys=jax.tree.map(of_rows, cache.keys),
      values=jax.tree.map(of_rows, cache.values),
      time=PartitionSpec(),
      lengths_PG=by_row,
      prefix=cache.prefix.replace(
        keys=jax.tree.map(of_prompts, cache.prefix.keys),
        values=jax.tree.map(of_prompts, cache.prefix.values),
        lengths_P=by_row,
        states=jax.tree.map(functools.partial(states, False), cache.prefix.states),
      ),
      states=jax.tree.map(functools.partial(states, True), cache.states),
    ),
    last_ND=by_row,
    rows=jax.tree.map(lambda _: by_row, flight.rows),
    next_N=None if flight.next_N is None else by_row,
  )


def constrain_flight(config: model.ModelConfig, flight: Flight) -> Flight:
  """Fixes the shardings of a Flight's arrays, so that programs are not recompiled for others."""
  if config.rows is None:
    return flight
  return jax.lax.with_sharding_constraint(flight, flight_shardings(config, flight))


def flight_shardings(config: model.ModelConfig, flight: Flight) -> Flight:
  """The shardings of a Flight's arrays on the mesh."""
  return jax.tree.map(
    lambda spec: NamedSharding(config.rows.mesh, spec),
    _specs(config, flight),
    is_leaf=lambda x: isinstance(x, PartitionSpec),
  )


def constrain_rows(config: model.ModelConfig, x: jax.Array) -> jax.Array:
  """Fixes the sharding of an array [R, ...], whose first axis is split over the shards."""
  rows = config.rows
  return x if rows is None else jax.lax.with_sharding_constraint(x, rows)


def everywhere(config: model.ModelConfig, tree: Any) -> Any:
  """Replicates the arrays of a tree on every device."""
  rows = config.rows
  if rows is None:
    return tree
  return jax.lax.with_sharding_constraint(tree, NamedSharding(rows.mesh, PartitionSpec()))
