"""The rules of attention within a group: which tokens see each other, for all implementations."""

from collections.abc import Callable
import dataclasses

import jax
from jax.sharding import NamedSharding


@dataclasses.dataclass(frozen=True)
class View:
  """Which tokens of a group see each other, and how scores become weights.

  A group has N = S + G * T slots: its prompt, right-padded, then its completions one after another.
  A token of the prompt sees itself and the tokens before it, and with `pictures_PS` all tokens of
  its picture. A token of a completion sees the prompt's tokens, itself and the tokens before it in
  its own completion.

  Attributes:
    prompt_slots: S.
    completions: G. 0 means that there are only prompts.
    slots: T, the slots of each completion.
    window: How many tokens back a token sees, itself included. Token t of a completion follows
      token t - 1, and token 0 follows the last token of the prompt. 0 means all tokens.
    cap: Scores become cap * tanh(score / cap). 0 leaves them as they are.
    sinks_H: A score of each query head that takes part in its softmax and brings no value, or None.
    pictures_PS: int32, which picture a token of the prompt belongs to, or -1. None where a
      picture's tokens see only earlier tokens.
    rows: The sharding of the groups on the mesh, whose axis `tensor` splits the heads. None means
      one device.
  """

  prompt_slots: int
  completions: int = 0
  slots: int = 0
  _: dataclasses.KW_ONLY
  window: int = 0
  cap: float = 0.0
  sinks_H: jax.Array | None = None
  pictures_PS: jax.Array | None = None
  rows: NamedSharding | None = None

  @property
  def hiding_window(self) -> int:
    """The window, or 0 if it is so long that it hides no token of the group.

    0 saves the implementations work: with a window they mask by distance, and some first move each
    prompt next to its completion.
    """
    longest = self.prompt_slots + (self.slots if self.completions else 0)
    return self.window if self.window < longest else 0


# attend(q_PNHE, k_PNKE, v_PNKE, prompt_lengths_P, view) -> out_PNHE, in the dtype of the queries.
#
# The queries are already scaled and rotated. H = K * R, and query head k * R + r belongs to the key
# and value head k. The outputs at the padding of a prompt are finite and mean nothing.
AttendGroups = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, View], jax.Array]
