"""The part of a layer that computes each token by itself. Each kind has a file of its own.

A kind is a module that is called with the tokens, with the instructions to its router (`Routes`),
and with the residual stream. It returns its output, and its router's choices (`Routed`) or None.
`RULES` say where its parameters lie on a mesh, and `TARGETS` which of its projections can have an
adapter.
"""

from typing import Any

from grpo_jax.model.mlps import dense, experts
from grpo_jax.model.mlps.dense import MLP
from grpo_jax.model.mlps.experts import Experts

# By LayerKind.mlp, which is also the name in the tree of parameters.
MLPS: dict[str, Any] = {"mlp": MLP, "experts": Experts}
RULES = dense.RULES + experts.RULES
TARGETS = dense.TARGETS
