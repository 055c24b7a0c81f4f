"""How evenly the routers of a mixture of experts spread tokens: the auxiliary loss, and metrics.

Arguments are sums over the tokens that count: of each prompt, once, and of the loss. Sums of the parts of a batch add up.
"""

import jax

from grpo_jax import masked
from grpo_jax.types import Routing


def balance_loss(given_X: jax.Array, probs_X: jax.Array, tokens: jax.Array) -> jax.Array:
  """X sum_x f_x P_x (Switch 2101.03961, eq. 4-6; with several experts a token, f sums to their number, as in transformers).

  f: tokens of a whole batch given to each expert / tokens; no gradient. P: probabilities of the batch, or of a part of
  it, / tokens of all of it: the parts' losses add up. All are sums over layers, too. 0 without a token.
  """
  return given_X.size * masked.divide((jax.lax.stop_gradient(given_X) * probs_X).sum(), tokens**2)


def balance_metrics(routing: Routing) -> dict[str, jax.Array]:
  """Of the routing of a whole batch. load: an expert's share of its layer's tokens, relative to all experts' mean."""
  x: Routing = jax.tree.map(lambda x: x.sum(0), routing)
  load_LX = masked.divide(x.given_BLX, x.given_BLX.mean(-1, keepdims=True))
  return {
    "router/aux_loss": balance_loss(x.given_BLX.sum(0), x.probs_BLX.sum(0), x.tokens_BL.sum()),
    "router/load_max": load_LX.max(),
    "router/load_min": load_LX.min(),
    "router/dead": (load_LX == 0).mean(),
    "router/entropy": masked.divide(x.entropy_BL.sum(), x.tokens_BL.sum()),
  }
