"""The arguments of a mixer besides the tokens: rotary angles, and access to earlier tokens.

An attention mixer keeps keys and values of every token. A recurrent mixer keeps a memory of fixed
size for each row: a tree of arrays whose first axis is that of heads, so that a mesh can split it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from grpo_jax.model.rope import Rotation

KeysAndValues = tuple[jax.Array, jax.Array]
# attend(q_BTHE, k_BTKE, v_BTKE, sinks_H, kept) -> (out_BTHE, the keys and values to keep or None).
# The queries are rotated and scaled. If keys and values are None, the queries attend to borrowed
# ones. `sinks_H` is as in `View`. The caller keeps `kept` if it is given, and otherwise the keys
# and values. In a kept pair, values of None mean that the keys are the values, too.
Attend = Callable[..., tuple[jax.Array, Any]]
# scan(weights, inputs_BT, memory_B, is_token_BT) -> (outputs_BT, memory_B): trees of arrays
# [W, J, ...] for J heads, [B, T, J, ...] and [B, J, ...]. Heads do not read each other. Where
# is_token_BT is False there is padding, which does not change the memory. None means no padding.
Scan = Callable[[Any, Any, Any, jax.Array | None], tuple[Any, Any]]
# recur(scan, weights, inputs_BT, empty) -> (outputs_BT, the memory to keep or None). `empty` is the
# memory [J, ...] of one row that has no token yet.
Recur = Callable[[Scan, Any, Any, Any], tuple[Any, Any]]


class Kept(NamedTuple):
  """The sizes of what a layer keeps of earlier tokens. A mesh splits it by heads.

  Attributes:
    of_token: (heads, size of a head) of each vector that is kept for every token, keys first.
    of_row: (heads, bytes) of each state that is kept for a row, whatever its length.
  """

  of_token: tuple[tuple[int, int], ...] = ()
  of_row: tuple[tuple[int, float], ...] = ()


class Seen(NamedTuple):
  """The functions and angles by which a mixer lets tokens see each other in a pass.

  Attributes:
    rope: The rotary angles of the tokens, or None where nothing is rotated.
    attend: Attention of the tokens to themselves and to earlier tokens.
    recur: Scans the tokens of each row, starting from the memory of earlier tokens.
    is_cached: Earlier tokens are in a cache, so `attend` also reads the keys and values kept there.
    keys: `LayerKind.keys`.
  """

  rope: Rotation | None
  attend: Attend
  recur: Recur
  is_cached: bool = False
  keys: str = "own"
