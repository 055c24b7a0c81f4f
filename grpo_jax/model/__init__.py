"""The decoder and its weights: everything that the rest of the program uses of a model.

`forward` computes logits. Its two halves are `features` (hidden states) and `unembed` (logits from
hidden states). `score` takes the place of `unembed` in a reward model. `load` and `save` read and
write Hugging Face folders. `init_adapters`, `join` and their neighbours add LoRA adapters.
"""

from grpo_jax.model.attention import (
  Groups,
  Packing,
  attention_of,
  make_packing,
  move,
  pack,
  unpack,
)
from grpo_jax.model.cache import Cache, Prefix, empty, grow, share
from grpo_jax.model.config import PROJECTIONS, Lora, ModelConfig
from grpo_jax.model.huggingface.family import SCORERS
from grpo_jax.model.huggingface.load_weights import load, load_config
from grpo_jax.model.huggingface.peft import (
  base_of,
  check_adapters,
  load_adapters,
  load_lora,
  save_adapters,
)
from grpo_jax.model.huggingface.save_weights import save
from grpo_jax.model.lora import QUANTISED, join, quantised
from grpo_jax.model.lora import init as init_adapters
from grpo_jax.model.stacks import is_stacked, layer_names, per_layer, unrolled
from grpo_jax.model.transformer import (
  Params,
  features,
  forward,
  group_features,
  init,
  score,
  unembed,
)

__all__ = [
  "PROJECTIONS",
  "QUANTISED",
  "SCORERS",
  "Cache",
  "Groups",
  "Lora",
  "ModelConfig",
  "Packing",
  "Params",
  "Prefix",
  "attention_of",
  "base_of",
  "check_adapters",
  "empty",
  "features",
  "forward",
  "group_features",
  "grow",
  "init",
  "init_adapters",
  "join",
  "is_stacked",
  "layer_names",
  "load",
  "load_adapters",
  "load_config",
  "load_lora",
  "quantised",
  "make_packing",
  "move",
  "pack",
  "per_layer",
  "save",
  "save_adapters",
  "score",
  "share",
  "unembed",
  "unpack",
  "unrolled",
]
