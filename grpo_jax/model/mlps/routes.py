"""What routers are told besides the tokens, and what they tell."""

from typing import NamedTuple

from flax import struct
import jax

from grpo_jax.types import Routing


class Routes(struct.PyTreeNode):
  """What routers are told of the tokens of a pass.

  Attributes:
    counted_BT: The statistics count a token where this is not 0. None skips the statistics.
    given: The experts that tokens go through instead of those that the router chooses: integers
      [B, T, U] for one layer, and [B, T, Y] for a pass, those of all its sparse layers. A router
      chooses where they are -1, or everywhere without them.
    compared_BT: The statistics compare the experts given to a token with those that the router
      would choose where this is not 0. Read where there are `given` ones.
    replays: False compares the given experts only.
  """

  counted_BT: jax.Array | None = None
  given: jax.Array | None = None
  compared_BT: jax.Array | None = None
  replays: bool = struct.field(pytree_node=False, default=True)


class Routed(NamedTuple):
  """What routers did.

  Attributes:
    sums: The statistics, or None where none were asked for.
    experts_BTU: int32, the experts of each token with `config.keeps_experts`, otherwise None.
  """

  sums: Routing | None = None
  experts_BTU: jax.Array | None = None
