"""The mixers of layers, through which tokens read earlier tokens. Each mixer has its own file.

A mixer is a Flax module that is called with the tokens and `Seen`, which gives access to earlier
tokens. Its file also says what it keeps of a token or of a row (`kept`), how a mesh splits its
parameters (`RULES`), and which of its projections can have an adapter (`TARGETS`).
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
  """For each layer, the heads and the sizes of the vectors and states that it keeps."""
  kinds = map(config.kind, range(config.num_layers))
  return [_KEPT[kind.mixer](config, kind) for kind in kinds]
