"""How evenly the routers of a mixture of experts spread tokens: an auxiliary loss, and metrics."""

import jax

from grpo_jax import masked
from grpo_jax.types import Routing


def balance_loss(assigned_X: jax.Array, probs_X: jax.Array, tokens: jax.Array) -> jax.Array:
  """X sum_x f_x P_x (Switch 2101.03961, eq. 4-6).

  f_x is the fraction of the tokens that are sent to expert x, and P_x is the mean probability of
  expert x. If a token uses several experts, f sums to their number, as in transformers.

  The losses of micro-batches add up if `assigned_X` and `tokens` are of the whole batch and
  `probs_X` is of the micro-batch.

  Args:
    assigned_X: How many tokens were sent to each expert, summed over layers. It gets no gradient.
    probs_X: The sum of the routers' probabilities, over layers and tokens.
    tokens: How many tokens were counted, summed over layers, a scalar.

  Returns:
    A scalar, 0 if no token was counted.
  """
  products_X = jax.lax.stop_gradient(assigned_X) * probs_X
  return assigned_X.size * masked.divide(products_X.sum(), tokens**2)


def balance_metrics(routing: Routing) -> dict[str, jax.Array]:
  """Metrics of the routing of a whole batch.

  The load of an expert is the number of tokens that were sent to it, divided by the mean over the
  experts of the layer.

  Args:
    routing: Sums over groups of tokens, with the groups on the first axis.

  Returns:
    float32 scalars by name.
  """
  assigned_LX, probs_LX = routing.assigned_BLX.sum(0), routing.probs_BLX.sum(0)
  tokens_L, entropy_L = routing.tokens_BL.sum(0), routing.entropy_BL.sum(0)
  load_LX = masked.divide(assigned_LX, assigned_LX.mean(-1, keepdims=True))
  return {
    "router/aux_loss": balance_loss(assigned_LX.sum(0), probs_LX.sum(0), tokens_L.sum()),
    "router/load_max": load_LX.max(),
    "router/load_min": load_LX.min(),
    "router/dead": (load_LX == 0).mean(),
    "router/entropy": masked.divide(entropy_L.sum(), tokens_L.sum()),
  }
