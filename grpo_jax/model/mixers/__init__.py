"""How the tokens of a layer learn of those before them. Each mixer has a file of its own.

A mixer is a module that is called with the tokens and with what it may use of the pass (`Seen`). It
says what it keeps of a token or of a row (`kept`), where its parameters lie on a mesh (`RULES`),
and which of its projections can have an adapter (`TARGETS`).
"""

from typing import Any

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.mixers import attention, delta, latent
from grpo_jax.model.mixers.attention import Attention
from grpo_jax.model.mixers.delta import GatedDelta
from grpo_jax.model.mixers.latent import LatentAttention
from grpo_jax.model.mixers.seen import Kept

# By LayerKind.mixer, which is also the name in the tree of parameters.
MIXERS: dict[str, Any] = {
  "attention": Attention,
  "delta": GatedDelta,
  "latent": LatentAttention,
}
RULES = attention.RULES + delta.RULES + latent.RULES
TARGETS = attention.TARGETS | delta.TARGETS | latent.TARGETS
_KEPT = {"attention": attention.kept, "delta": delta.kept, "latent": latent.kept}


def kept_by_layers(config: ModelConfig) -> list[Kept]:
  """The heads and the sizes of what each layer of a model keeps."""
  kinds = map(config.kind, range(config.num_layers))
  return [_KEPT[kind.mixer](config, kind) for kind in kinds]
