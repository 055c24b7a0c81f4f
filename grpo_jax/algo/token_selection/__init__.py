"""Token selection. It needs statistics of the whole batch, so it runs before micro-batching.

It computes a weight of each token for the surrogate, and chooses the tokens that the surrogate
treats specially. Neither has a gradient. `weights.py` declares the weights, and `select.py`
computes the selection.
"""

from grpo_jax.algo.token_selection.weights import (
  TOKEN_WEIGHTS,
  SelectionSettings,
  TokenWeight,
  has_weights,
  is_needed,
)

__all__ = ["TOKEN_WEIGHTS", "SelectionSettings", "TokenWeight", "has_weights", "is_needed"]
