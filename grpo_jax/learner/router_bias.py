"""The biases of sigmoid routers, which follow the loads of the experts and not a gradient."""

from typing import Any

import jax.numpy as jnp

from grpo_jax import model
from grpo_jax.types import Routing


def moved_biases(params: Any, routing: Routing, config: model.ModelConfig, rate: float) -> Any:
  """The parameters with b_x + rate sign(mean load - load of x) for each expert x of each layer.

  Loss-free balancing (2408.15664, algorithm 1), with which DeepSeek-V3 was trained (2412.19437,
  section 2.1.2). The load is the number of tokens that went through the expert.

  Args:
    params: All parameters of a model with "sigmoid" routers.
    routing: The routers' sums for the update's whole batch, in any number of rows.
    config: The model.
    rate: By how much an update changes each bias.
  """
  load_LX = routing.assigned_BLX.sum(0)
  step_LX = rate * jnp.sign(load_LX.mean(-1, keepdims=True) - load_LX)
  moved = dict(params)
  for name, places in model.sparse_stacks(config).items():
    experts = params[name]["experts"]
    # L counts all sparse layers of the model, and the stack has those at `places`.
    balance = experts["balance"] + step_LX[jnp.array(places)]
    moved[name] = {**params[name], "experts": {**experts, "balance": balance}}
  return moved
