"""Layers of groups whose tokens are split over the devices along an axis of the mesh.

The learner splits texts over `context`, and the sampler splits prompts over `slots`. Only attention
and recurrence need tokens of other devices. An `Exchange` is a way to send them.
"""

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from grpo_jax.model.attention.by_rows import divided
from grpo_jax.model.attention.halo import attend_halo
from grpo_jax.model.attention.packing import Packing
from grpo_jax.model.attention.ring import attend_ring, slots_of
from grpo_jax.model.attention.view import View
from grpo_jax.model.config import ModelConfig
from grpo_jax.model.mixers.seen import Recur, Scan

# attend(q_PNHE, k_PNKE, v_PNKE, prompt_lengths_P, packing, view) -> out_PNHE: attention of groups
# whose completions are packed in a stream, or in rows if the packing is None.
AttendStream = Callable[
  [jax.Array, jax.Array, jax.Array, jax.Array, Packing | None, View], jax.Array
]

# Exchanges are compared for texts of this many tokens, so all batches of a run use the same one.
# Only long texts are split.
LONG = 32768
# By the data sheets in parallel/chips.py, a chip does about this many operations while it sends a
# byte over its links (770 to 2,300), and while it reads or writes one in its memory (150 to 560).
_OPERATIONS_PER_BYTE_SENT, _OPERATIONS_PER_BYTE = 1000, 250
# In plain JAX, a score is written and read in float32, and its weight in bfloat16.
_BYTES_OF_SCORE = 12


@dataclasses.dataclass(frozen=True)
class SplitAttention:
  """The sizes of a layer's attention, where each of several devices has some tokens.

  Attributes:
    heads: H, the number of query heads of a device.
    key_heads: K, the number of key heads of a device.
    head_dim: E.
    item: The bytes of a number.
    devices: The number of devices that share the tokens of a text.
    window: As in `View`.
    has_kernel: A kernel can compute heads of which a device has all tokens.
    has_pictures: The tokens of a picture also see its later tokens.
  """

  heads: int
  key_heads: int
  head_dim: int
  item: int
  devices: int
  window: int = 0
  has_kernel: bool = False
  has_pictures: bool = False

  @property
  def divisible_heads(self) -> int:
    """`divisible_heads` of these sizes."""
    return divisible_heads(self.heads, self.key_heads, self.devices)


def divisible_heads(heads: int, key_heads: int, devices: int) -> int:
  """The least number of query heads, at least `heads`, that key heads and devices both divide."""
  copies = math.lcm(key_heads, devices)
  return copies * -(-heads // copies)


@dataclasses.dataclass(frozen=True)
class Exchange:
  """A way for devices that have different tokens to compute attention.

  Attributes:
    name: The name that plans show.
    sent: (sizes) -> how many vectors [E] a device sends for each of its tokens, in a forward pass.
    heads: (sizes) -> how many heads the devices compute together, padding included, instead of H.
    slowness: The time of a head, relative to plain JAX on a device that has all tokens.
    uses_kernel: The exchange can run a kernel.
    sees_pictures: Tokens can see later tokens of their picture.
    needs_window: The exchange is for layers with a window alone.
    make: (attention of all tokens, axis) -> attention as each device along this axis of the mesh
      computes it.
  """

  name: str
  sent: Callable[[SplitAttention], float]
  heads: Callable[[SplitAttention], int]
  slowness: float
  uses_kernel: bool
  sees_pictures: bool
  needs_window: bool
  make: Callable[[AttendStream, str], AttendStream]

  def bytes_sent(self, of: SplitAttention) -> float:
    """The bytes that a device sends for each of its tokens, in the forward pass of a layer."""
    return self.sent(of) * of.head_dim * of.item

  def cost(self, of: SplitAttention) -> float:
    """The estimated time of messages and scores per token of a device, in operations of a chip."""
    of_score = 4.0 * of.head_dim  # products and sums, with the key and with the value
    if not (self.uses_kernel and of.has_kernel):
      of_score = (of_score + _BYTES_OF_SCORE * _OPERATIONS_PER_BYTE) * self.slowness
    # A query sees half of a long text on average, or its window.
    scores = self.heads(of) * min(of.window or LONG, LONG / 2)
    return self.bytes_sent(of) * _OPERATIONS_PER_BYTE_SENT + scores * of_score


def by_heads(attend: AttendStream, axis: str) -> AttendStream:
  """Runs `attend` on all tokens of a few heads on each device (Jacobs et al. 2309.14509).

  An all-to-all gives each device all tokens of some heads, instead of some tokens of all heads. A
  second one sends the outputs back. So all devices compute equally much, whatever the lengths,
  masks and windows are. If the number of devices does not divide the key heads, these are repeated.
  If it then does not divide the query heads, each key head gets extra query heads of zeros, whose
  outputs are dropped.
  """

  def attend_here(
    q_PNHE: jax.Array,
    k_PNKE: jax.Array,
    v_PNKE: jax.Array,
    prompt_lengths_P: jax.Array,
    packing: Packing | None,
    view: View,
  ) -> jax.Array:
    """An `AttendStream` on a device that has some tokens of each of its heads."""
    devices = jax.lax.axis_size(axis)
    (H, E), K = q_PNHE.shape[2:], k_PNKE.shape[2]
    more = divisible_heads(H, K, devices) // K - H // K  # query heads to add to each key head

    def with_more(x: jax.Array, heads: int) -> jax.Array:
      """Appends `more` query heads of zeros for each key head. `heads` is the axis of heads."""
      by_key = x.reshape(*x.shape[:heads], K, H // K, *x.shape[heads + 1 :])
      sides = [(0, 0)] * by_key.ndim
      sides[heads + 1] = (0, more)
      padded = jnp.pad(by_key, sides)
      return padded.reshape(*x.shape[:heads], -1, *x.shape[heads + 1 :])

    sinks_H = view.sinks_H
    if more:
      q_PNHE = with_more(q_PNHE, 2)
      sinks_H = None if sinks_H is None else with_more(sinks_H, 0)
    if sinks_H is not None:  # every device has all sinks, and needs those of its heads
      sinks_H = sinks_H.reshape(devices, -1)[jax.lax.axis_index(axis)]
    arrays = q_PNHE, divided(k_PNKE, devices), divided(v_PNKE, devices)
    # Splits the axis of heads, and joins that of tokens. Below, the outputs go the other way.
    q, k, v = (jax.lax.all_to_all(x, axis, 2, 1, tiled=True) for x in arrays)
    of_device = dataclasses.replace(view, sinks_H=sinks_H)
    out = attend(q, k, v, prompt_lengths_P, packing, of_device)
    out = jax.lax.all_to_all(out, axis, 1, 2, tiled=True)
    by_key = out.reshape(*out.shape[:2], K, H // K + more, E)
    return by_key[..., : H // K, :].reshape(*out.shape[:2], H, E)

  return attend_here


def by_slots(
  attend_tokens: Callable[..., jax.Array],
) -> Callable[[AttendStream, str], AttendStream]:
  """Makes `Exchange.make` for attention in plain JAX on the device's own tokens.

  Args:
    attend_tokens: `ring.attend_ring` or `halo.attend_halo`.
  """

  def make(attend: AttendStream, axis: str) -> AttendStream:
    del attend  # such an exchange computes the attention itself

    def attend_here(
      q_PNHE: jax.Array,
      k_PNKE: jax.Array,
      v_PNKE: jax.Array,
      prompt_lengths_P: jax.Array,
      packing: Packing | None,
      view: View,
    ) -> jax.Array:
      slots = slots_of(prompt_lengths_P, packing, view)
      return attend_tokens(q_PNHE, k_PNKE, v_PNKE, prompt_lengths_P, slots, view, axis)

    return attend_here

  return make


def _sent_by_heads(of: SplitAttention) -> float:
  """Queries, keys and values, and outputs back, less the share that stays on the device."""
  keys = math.lcm(of.key_heads, of.devices)
  return 2 * (of.divisible_heads + keys) * (of.devices - 1) / of.devices


def _sent_by_ring(of: SplitAttention) -> float:
  """Queries, keys, values and outputs for the zigzag, and keys and values once around the ring."""
  return 2.0 * (of.heads + of.key_heads) + 2 * of.key_heads * of.devices


def _sent_by_halo(of: SplitAttention) -> float:
  """Keys and values that the window reaches: of the tokens before, and of the prompt's end.

  An all-reduce gives all devices the end of the prompt, so each sends it about twice.
  """
  tokens = LONG / of.devices
  halo = min(of.window, LONG - tokens)
  return 2 * of.key_heads * (halo + 2 * min(of.window, LONG)) / tokens


EXCHANGES: tuple[Exchange, ...] = (
  Exchange(
    "all-to-all",
    sent=_sent_by_heads,
    heads=lambda of: of.divisible_heads,
    slowness=1.0,
    uses_kernel=True,
    sees_pictures=True,
    needs_window=False,
    make=by_heads,
  ),
  Exchange(
    "ring",
    sent=_sent_by_ring,
    heads=lambda of: of.heads,
    slowness=1.25,  # 1.02 to 1.4 on a CPU (experiments/exchanges.py)
    uses_kernel=False,
    sees_pictures=False,
    needs_window=False,
    make=by_slots(attend_ring),
  ),
  Exchange(
    "halo",
    sent=_sent_by_halo,
    heads=lambda of: of.heads,
    slowness=1.0,
    uses_kernel=False,
    sees_pictures=False,
    needs_window=True,
    make=by_slots(attend_halo),
  ),
)


def cheapest(of: SplitAttention) -> Exchange:
  """The exchange that costs least, of those that can compute this attention."""
  possible = [
    exchange
    for exchange in EXCHANGES
    if (exchange.sees_pictures or not of.has_pictures) and (of.window or not exchange.needs_window)
  ]
  return min(possible, key=lambda exchange: exchange.cost(of))


def across(attend: AttendStream, has_kernel: bool) -> AttendStream:
  """Attention of groups whose tokens are split over devices, with heads over `tensor`.

  Args:
    attend: Attention on a device that has all tokens of some heads.
    has_kernel: Whether `attend` runs a kernel.
  """

  def attend_split(
    q_PNHE: jax.Array,
    k_PNKE: jax.Array,
    v_PNKE: jax.Array,
    prompt_lengths_P: jax.Array,
    packing: Packing | None,
    view: View,
  ) -> jax.Array:
    mesh, pictures_PS, (row_axes, axis) = view.rows.mesh, view.pictures_PS, view.rows.spec
    head_axis = "tensor" if q_PNHE.shape[2] % mesh.shape["tensor"] == 0 else None
    if head_axis:  # a device that holds query heads must hold their key heads
      k_PNKE, v_PNKE = (divided(x, mesh.shape[head_axis]) for x in (k_PNKE, v_PNKE))

    def attend_here(
      q: jax.Array,
      k: jax.Array,
      v: jax.Array,
      lengths_P: jax.Array,
      packing: Packing | None,
      sinks_H: jax.Array | None,
      pictures_PS: jax.Array | None,
    ) -> jax.Array:
      """Attention on a device that has some tokens of some heads, by the cheapest exchange."""
      (H, E), K, item = q.shape[2:], k.shape[2], q.dtype.itemsize
      # With `rows`, `by_rows.on_mesh` would split what is already split.
      here = dataclasses.replace(view, rows=None, sinks_H=sinks_H, pictures_PS=pictures_PS)
      sizes = H, K, E, item, mesh.shape[axis], view.window, has_kernel, pictures_PS is not None
      exchange = cheapest(SplitAttention(*sizes))
      return exchange.make(attend, axis)(q, k, v, lengths_P, packing, here)

    tokens, rows = PartitionSpec(row_axes, axis, head_axis, None), PartitionSpec(row_axes)
    return jax.shard_map(
      attend_here,
      mesh=mesh,
      in_specs=(tokens, tokens, tokens, rows, rows, PartitionSpec(head_axis), rows),
      out_specs=tokens,
      check_vma=False,  # the outputs of kernels do not say over which axes they vary
    )(q_PNHE, k_PNKE, v_PNKE, prompt_lengths_P, packing, view.sinks_H, pictures_PS)

  return attend_split


def recur_by_heads(
  config: ModelConfig,
  recur_of: Callable[[jax.Array, Packing | None], Recur],
  lengths_P: jax.Array,
  packing: Packing | None,
) -> Recur:
  """Runs a recurrence over all tokens of a few heads on each device.

  A state passes from token to token, so devices with different tokens would wait for each other.
  They exchange tokens for heads as in `by_heads`. If their number does not divide the heads, heads
  of zeros are added.

  Args:
    config: The model.
    recur_of: (lengths, packing) -> the recurrence of groups on a device that has all their tokens.
    lengths_P: int32, how many tokens each prompt has.
    packing: The packing of the completions, or None if they are in rows.
  """
  mesh, (row_axes, token_axis) = config.rows.mesh, config.rows.spec
  head_axes = ("tensor", token_axis)
  rows, tokens = PartitionSpec(row_axes), PartitionSpec(row_axes, token_axis, "tensor")
  # The heads are the second axis of weights [W, J, ...], and the first one of a memory [J, ...].
  heads_second, heads_first = PartitionSpec(None, head_axes), PartitionSpec(head_axes)

  def recur(scan: Scan, weights: Any, inputs_PN: Any, empty: Any) -> tuple[Any, Any]:
    """Pads the heads, exchanges tokens for heads, recurs, and exchanges the outputs back."""
    J = jax.tree.leaves(empty)[0].shape[0]
    tensor, devices = (mesh.shape[axis] for axis in head_axes)
    # Each device along `tensor` has a block of heads. Zeros are added at the end of every block, so
    # that no head moves to another device. If `tensor` does not divide J, all heads are one block.
    blocks = 1 if J % tensor else tensor
    in_block = J // blocks
    more = -in_block % (tensor // blocks * devices)

    def with_more(x: jax.Array, axis: int) -> jax.Array:
      """Appends `more` heads of zeros to each block of the axis of heads."""
      in_blocks = x.reshape(*x.shape[:axis], blocks, in_block, *x.shape[axis + 1 :])
      sides = [(0, 0)] * in_blocks.ndim
      sides[axis + 1] = (0, more)
      return jnp.pad(in_blocks, sides).reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])

    def without_more(x: jax.Array, axis: int) -> jax.Array:
      in_blocks = x.reshape(*x.shape[:axis], blocks, in_block + more, *x.shape[axis + 1 :])
      trimmed = jax.lax.slice_in_dim(in_blocks, 0, in_block, axis=axis + 1)
      return trimmed.reshape(*x.shape[:axis], J, *x.shape[axis + 1 :])

    def recur_here(
      weights: Any, inputs_PN: Any, empty: Any, lengths_P: jax.Array, packing: Packing | None
    ) -> tuple[Any, Any]:
      exchange = functools.partial(jax.lax.all_to_all, axis_name=token_axis, tiled=True)
      to_heads = functools.partial(exchange, split_axis=2, concat_axis=1)
      to_tokens = functools.partial(exchange, split_axis=1, concat_axis=2)
      inputs_PN = jax.tree.map(to_heads, inputs_PN)
      out_PN, kept = recur_of(lengths_P, packing)(scan, weights, inputs_PN, empty)
      return jax.tree.map(to_tokens, out_PN), kept

    out_PN, kept = jax.shard_map(
      recur_here,
      mesh=mesh,
      in_specs=(heads_second, tokens, heads_first, rows, rows),
      out_specs=(tokens, PartitionSpec(row_axes, head_axes)),
      check_vma=False,
    )(
      jax.tree.map(lambda x: with_more(x, 1), weights),
      jax.tree.map(lambda x: with_more(x, 2), inputs_PN),
      jax.tree.map(lambda x: with_more(x, 0), empty),
      lengths_P,
      packing,
    )
    out_PN = jax.tree.map(lambda x: without_more(x, 2), out_PN)
    return out_PN, jax.tree.map(lambda x: without_more(x, 1), kept)

  return recur
