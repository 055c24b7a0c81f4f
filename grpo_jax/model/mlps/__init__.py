"""The MLPs of layers, which compute each token by itself. Each kind has its own file.

An MLP is a Flax module that is called with the tokens, the instructions to its router (`Routes`)
and the residual stream. It returns its output, and the router's results (`Routed`) or None.
`RULES` say how a mesh splits the parameters, and `TARGETS` which projections can have an adapter.
"""

from typing import Any

from grpo_jax.model.mlps import dense, experts
from grpo_jax.model.mlps.dense import MLP
from grpo_jax.model.mlps.experts import Experts

# By LayerKind.mlp, which is also the name in the tree of parameters.
MLPS: dict[str, Any] = {"mlp": MLP, "experts": Experts}
RULES = dense.RULES + experts.RULES
TARGETS = dense.TARGETS
