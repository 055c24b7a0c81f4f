"""Token selection. It needs statistics of the whole batch, so it runs before micro-batching.

It gives each token a weight for the surrogate, and it chooses the tokens that the surrogate treats
in its own special way. Neither has a gradient. `weights.py` has the weights and `select.py` what is
computed.
"""

from grpo_jax.algo.token_selection.weights import (
  TOKEN_WEIGHTS,
  SelectionSettings,
  TokenWeight,
  has_weights,
  is_needed,
)

__all__ = ["TOKEN_WEIGHTS", "SelectionSettings", "TokenWeight", "has_weights", "is_needed"]
