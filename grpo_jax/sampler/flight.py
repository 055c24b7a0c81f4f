"""Rows in flight as data, and where they lie on the mesh."""

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
  """Rows in flight.

  Attributes:
    cache: The cache of a grid of N places with Q seats each.
    last_ND: The features of each prompt's last token, from which the first logits come.
    rows: The N * Q rows.
    next_N: int32, the position of the first token after each prompt, where images give prompts
      positions of their own. None: it is the prompt's length.
  """

  cache: model.Cache
  last_ND: jax.Array
  rows: Rows
  next_N: jax.Array | None = None

  @property
  def grid(self) -> Grid:
    """Its places and seats."""
    return Grid(*self.cache.lengths_PG.shape)


class NewRows(NamedTuple):
  """Which seats get new rows, and what these are drawn with.

  Attributes:
    is_new_R: bool.
    key_R2: uint32, the data of the key that its random numbers come from.
    number_R: int32, the number of the row, on which they depend, too.
    settings: How the row draws, as arrays [R].
  """

  is_new_R: np.ndarray
  key_R2: np.ndarray
  number_R: np.ndarray
  settings: RowSettings


class Prompts(struct.PyTreeNode):
  """Prompts that are computed together.

  Attributes:
    tokens_nS: int32, right-padded.
    lengths_n: int32, how many tokens each prompt has.
    shared: How many tokens at their start are the same in all of them, and computed once. They
      end before the first image.
    images: The images of the prompts, encoded or not, or None if they have none.
  """

  tokens_nS: Any
  lengths_n: Any
  shared: int = struct.field(pytree_node=False, default=0)
  images: Images | Visual | None = None


class Resumed(NamedTuple):
  """Which rows go on, and with which tokens.

  Attributes:
    is_resumed_R: bool.
    kept_R: int32, how many of its tokens the row keeps. At least 1.
    token_R: int32, the last of them.
    given_RT: int32, the tokens that follow, in their places, and -1 elsewhere.
    limit_R: int32, after so many tokens the row ends again.
  """

  is_resumed_R: np.ndarray
  kept_R: np.ndarray
  token_R: np.ndarray
  given_RT: np.ndarray
  limit_R: np.ndarray


def shard_grid(config: model.ModelConfig, flight: Flight) -> Grid:
  """The part of its grid that one shard of the mesh holds."""
  N, Q = flight.grid
  return Grid(N // config.row_shards, Q)


def on_each_shard(
  config: model.ModelConfig, function: Any, flight: Flight, *arrays: jax.Array
) -> Flight:
  """function(flight, *arrays), where each shard of the mesh sees its own rows alone."""
  rows = config.rows
  if config.row_shards == 1:
    return constrain_flight(config, function(flight, *arrays))
  of_flight = _specs(config, flight)
  in_specs = (of_flight, *[PartitionSpec(*rows.spec)] * len(arrays))
  return jax.shard_map(
    function, mesh=rows.mesh, in_specs=in_specs, out_specs=of_flight, check_vma=False
  )(flight, *arrays)


def _specs(config: model.ModelConfig, flight: Flight) -> Flight:
  """How a Flight lies on the mesh: rows and places over the shards, heads over `tensor`."""
  if config.on_one_device:
    return jax.tree.map(lambda _: PartitionSpec(), flight)
  axes = config.rows.spec[0]

  def own(x: jax.Array) -> PartitionSpec:
    """Keys or values [L, P, K, G, C, E]: places P over the shards, heads K over `tensor`."""
    return PartitionSpec(*[None] * (x.ndim - 5), axes, config.axis_of(x.shape[-4]))

  def of_prompts(x_LPKSE: jax.Array) -> PartitionSpec:
    return PartitionSpec(None, axes, config.axis_of(x_LPKSE.shape[2]))

  by_row = PartitionSpec(axes)
  cache = flight.cache

  def states(of_rows: bool, x: jax.Array) -> PartitionSpec:
    """Heads are the first axis of a state."""
    outer = (None, axes, None) if of_rows else (None, axes)
    return PartitionSpec(*outer, config.axis_of(x.shape[len(outer)]))

  return Flight(
    cache=cache.replace(
      keys=jax.tree.map(own, cache.keys),
      values=jax.tree.map(own, cache.values),
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
  """Fixes the shardings of a Flight's arrays, so that no program is compiled for other ones."""
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
  """Fixes the sharding of an array [R, ...]: its rows are split over the shards."""
  rows = config.rows
  return x if rows is None else jax.lax.with_sharding_constraint(x, rows)


def everywhere(config: model.ModelConfig, tree: Any) -> Any:
  """The arrays, whole on every device."""
  rows = config.rows
  if rows is None:
    return tree
  return jax.lax.with_sharding_constraint(tree, NamedSharding(rows.mesh, PartitionSpec()))
