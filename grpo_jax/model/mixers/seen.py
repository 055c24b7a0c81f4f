"""The arguments of a mixer besides the tokens: their angles, and the tokens before them.

A mixer of attention keeps keys and values of every token. One that recurs keeps a memory of fixed
size for each row: a tree of arrays whose first axis are the heads, so that a mesh can split them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from grpo_jax.model.rope import Rotation

KeysAndValues = tuple[jax.Array, jax.Array]
# attend(q_BTHE, k_BTKE, v_BTKE, sinks_H, kept) -> (out_BTHE, what the caller keeps). The queries
# are rotated and scaled. Without keys and values, they meet those that are borrowed. `sinks_H` is
# as in `View`. The caller keeps keys and values, or else other ones, `kept`, whose values may be
# None where the keys are the values, too.
Attend = Callable[..., tuple[jax.Array, Any]]
# scan(weights, inputs_BT, memory_B, is_token_BT) -> (outputs_BT, memory_B): trees of arrays
# [W, J, ...] for J heads, [B, T, J, ...] and [B, J, ...]. Heads do not read each other. Where
# is_token_BT is False, a row has ended: what follows does not change its memory. None means that no
# token is padding.
Scan = Callable[[Any, Any, Any, jax.Array | None], tuple[Any, Any]]
# recur(scan, weights, inputs_BT, empty) -> (outputs_BT, what the caller keeps). `empty` is the
# memory [J, ...] of one row that has no token yet.
Recur = Callable[[Scan, Any, Any, Any], tuple[Any, Any]]


class Kept(NamedTuple):
  """The numbers that a layer keeps of earlier tokens. A mesh splits them by heads.

  Attributes:
    of_token: The heads and the numbers of each vector that is kept of a token, keys first.
    of_row: The heads and the bytes of what is kept of a row, however long it is.
  """

  of_token: tuple[tuple[int, int], ...] = ()
  of_row: tuple[tuple[int, float], ...] = ()


class Seen(NamedTuple):
  """The functions and angles by which a mixer lets tokens see each other in a pass.

  Attributes:
    rope: The rotary angles of the tokens, or None where nothing is rotated.
    attend: Attention of the tokens to themselves and to those before them.
    recur: Scans the tokens of each row, from the memory of those before them.
    is_cached: The tokens before these are in a cache, from which `attend` reads what was kept.
    keys: `LayerKind.keys`.
  """

  rope: Rotation | None
  attend: Attend
  recur: Recur
  is_cached: bool = False
  keys: str = "own"
