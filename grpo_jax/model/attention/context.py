"""Attention of groups whose tokens are split over the devices along the mesh's axis `context`."""

from collections.abc import Callable
import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from grpo_jax.model.attention.packing import Packing
from grpo_jax.model.attention.ring import attend_ring, slots_of
from grpo_jax.model.attention.view import View
from grpo_jax.model.config import ModelConfig

AXIS = "context"
# attend(q_PNHE, k_PNKE, v_PNKE, prompt_lengths_P, packing, view) -> out_PNHE: attention of groups
# whose completions lie in the stream of the packing, or in rows where that is None.
AttendStream = Callable[
  [jax.Array, jax.Array, jax.Array, jax.Array, Packing | None, View], jax.Array
]


@dataclasses.dataclass(frozen=True)
class Exchange:
  """A way for devices that have different tokens to compute attention.

  Attributes:
    name: Its name.
    suits: (query heads of a device, its key heads, devices) -> whether to use it.
    sent: The same -> how many vectors of a head a device sends for each of its tokens, in the
      forward pass of a layer.
    make: (attention of all tokens) -> attention as it is computed on each device of the axis.
  """

  name: str
  suits: Callable[[int, int, int], bool]
  sent: Callable[[int, int, int], float]
  make: Callable[[AttendStream], AttendStream]


def by_heads(attend: AttendStream) -> AttendStream:
  """Runs `attend` on all tokens of a few heads on each device (Jacobs et al. 2309.14509).

  The devices exchange the tokens of all heads for all tokens of their own heads, and exchange the
  outputs back. So each computes equally much, whatever the lengths, masks and windows are. Where
  the devices do not divide the key heads, these are repeated as often as is needed, and where they
  then do not divide the query heads, each key head gets some more, which are thrown away.
  """

  def attend_here(
    q_PNHE: jax.Array,
    k_PNKE: jax.Array,
    v_PNKE: jax.Array,
    prompt_lengths_P: jax.Array,
    packing: Packing | None,
    view: View,
  ) -> jax.Array:
    devices = jax.lax.axis_size(AXIS)
    (H, E), K = q_PNHE.shape[2:], k_PNKE.shape[2]
    more = _divisible_heads(H, K, devices) // K - H // K

    def with_more(x: jax.Array, heads: int) -> jax.Array:
      """The query heads, on axis `heads`, with `more` of them for each key head."""
      by_key = x.reshape(*x.shape[:heads], K, H // K, *x.shape[heads + 1 :])
      sides = [(0, 0)] * by_key.ndim
      sides[heads + 1] = (0, more)
      padded = jnp.pad(by_key, sides)
      return padded.reshape(*x.shape[:heads], -1, *x.shape[heads + 1 :])

    sinks_H = view.sinks_H
    if more:
      q_PNHE = with_more(q_PNHE, 2)
      sinks_H = None if sinks_H is None else with_more(sinks_H, 0)
    if sinks_H is not None:
      sinks_H = sinks_H.reshape(devices, -1)[jax.lax.axis_index(AXIS)]
    arrays = q_PNHE, _divided(k_PNKE, devices), _divided(v_PNKE, devices)
    q, k, v = (jax.lax.all_to_all(x, AXIS, 2, 1, tiled=True) for x in arrays)
    of_device = dataclasses.replace(view, sinks_H=sinks_H)
    out = attend(q, k, v, prompt_lengths_P, packing, of_device)
    out = jax.lax.all_to_all(out, AXIS, 1, 2, tiled=True)
    by_key = out.reshape(*out.shape[:2], K, H // K + more, E)
    return by_key[..., : H // K, :].reshape(*out.shape[:2], H, E)

  return attend_here


def _divisible_heads(H: int, K: int, devices: int) -> int:
  """The least query heads, not below H, of which each key head has as many and a device as many."""
  copies = math.lcm(K, devices) // K
  return K * copies * -(-H // (K * copies))


def by_ring(attend: AttendStream) -> AttendStream:
  """Passes keys and values around. Computes in plain JAX, whatever `attend` is."""
  del attend

  def attend_here(
    q_PNHE: jax.Array,
    k_PNKE: jax.Array,
    v_PNKE: jax.Array,
    prompt_lengths_P: jax.Array,
    packing: Packing | None,
    view: View,
  ) -> jax.Array:
    slots = slots_of(prompt_lengths_P, packing, view)
    return attend_ring(q_PNHE, k_PNKE, v_PNKE, slots, view, AXIS)

  return attend_here


# In the order of preference: with all tokens on a device, kernels compute attention. A quarter more
# heads is a guess of what that is worth, not measured.
EXCHANGES = (
  Exchange(
    "all-to-all",
    suits=lambda H, K, n: _divisible_heads(H, K, n) <= 1.25 * H,
    sent=lambda H, K, n: 2 * (_divisible_heads(H, K, n) + math.lcm(K, n)) * (n - 1) / n,
    make=by_heads,
  ),
  Exchange(
    "ring",
    suits=lambda H, K, n: True,
    sent=lambda H, K, n: 2.0 * (H + K) + 2 * K * n,  # into pieces and back, and once around
    make=by_ring,
  ),
)


def exchange_of(config: ModelConfig) -> Exchange:
  """How the devices along `context` compute the attention of a model."""
  heads = _heads_of_device(config)
  return next(exchange for exchange in EXCHANGES if exchange.suits(*heads, config.context))


def exchange_in_words(config: ModelConfig) -> str:
  """A line that says how texts are split, and what that sends."""
  exchange, devices = exchange_of(config), config.context
  numbers = exchange.sent(*_heads_of_device(config), devices) * config.head_dim
  kilobytes = numbers * jnp.dtype(config.dtype).itemsize / 1e3
  return (
    f"a text lies on {devices} devices. Attention by {exchange.name} sends {kilobytes:,.1f} KB for"
    " each token, in the forward pass of a layer"
  )


def _heads_of_device(config: ModelConfig) -> tuple[int, int]:
  """The query heads and the key heads that a device along `tensor` has."""
  H, K, tensor = config.num_heads, config.num_kv_heads, config.rows.mesh.shape["tensor"]
  return (H, K) if H % tensor else (H // tensor, math.lcm(K, tensor) // tensor)


def across(exchange: Exchange, attend: AttendStream) -> AttendStream:
  """Attention of groups whose tokens are split over devices, with heads over `tensor`."""

  def attend_split(
    q_PNHE: jax.Array,
    k_PNKE: jax.Array,
    v_PNKE: jax.Array,
    prompt_lengths_P: jax.Array,
    packing: Packing | None,
    view: View,
  ) -> jax.Array:
    mesh, row_axes = view.rows.mesh, view.rows.spec[0]
    head_axis = "tensor" if q_PNHE.shape[2] % mesh.shape["tensor"] == 0 else None
    if head_axis:
      k_PNKE, v_PNKE = (_divided(x, mesh.shape[head_axis]) for x in (k_PNKE, v_PNKE))

    def attend_here(
      q: jax.Array,
      k: jax.Array,
      v: jax.Array,
      lengths_P: jax.Array,
      packing: Packing | None,
      sinks_H: jax.Array | None,
    ) -> jax.Array:
      of_device = dataclasses.replace(view, rows=None, sinks_H=sinks_H)
      return exchange.make(attend)(q, k, v, lengths_P, packing, of_device)

    tokens, rows = PartitionSpec(row_axes, AXIS, head_axis, None), PartitionSpec(row_axes)
    return jax.shard_map(
      attend_here,
      mesh=mesh,
      in_specs=(tokens, tokens, tokens, rows, rows, PartitionSpec(head_axis)),
      out_specs=tokens,
      check_vma=False,  # the outputs of kernels do not say over which axes they vary
    )(q_PNHE, k_PNKE, v_PNKE, prompt_lengths_P, packing, view.sinks_H)

  return attend_split


def _divided(x_PNKE: jax.Array, devices: int) -> jax.Array:
  """The keys or values with each head repeated so often that the devices divide them."""
  heads = x_PNKE.shape[2]
  copies = math.lcm(heads, devices) // heads
  return x_PNKE if copies == 1 else jnp.repeat(x_PNKE, copies, axis=2)
