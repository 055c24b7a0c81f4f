"""The decoder and its weights: the interface that the rest of the program uses.

`forward` computes logits. Its two halves are `features` (hidden states) and `unembed` (logits from
hidden states). A reward model calls `score` instead of `unembed`. `load` and `save` read and write
Hugging Face folders. `init_adapters` and `join` add LoRA adapters.

Besides these names, other packages import `huggingface.hub` (names on huggingface.co),
`huggingface.folders`, and modules that say how arrays are named and laid out. Only this file and
huggingface/ import huggingface/. The decoder does not.
"""

from grpo_jax.model.attention import (
  Groups,
  Packing,
  after_prompts,
  attention_of,
  exchanges_in_words,
  make_packing,
  move,
  pack,
  unpack,
)
from grpo_jax.model.cache import (
  Cache,
  Prefix,
  begin_rows,
  empty_cache,
  roll_rows,
  slots_step,
  take_prompts,
  take_rows,
  with_slots,
)
from grpo_jax.model.cache_bytes import cache_bytes
from grpo_jax.model.cached_prompts import (
  add_to_prompts,
  as_prefix,
  copy_prompts,
  put_prompts,
  rows_as_prefix,
  rows_as_prompts,
  within_windows,
)
from grpo_jax.model.config import AdapterShape, ModelConfig
from grpo_jax.model.huggingface.families import REWARD_HEADS
from grpo_jax.model.huggingface.load_weights import (
  ignores_parts,
  load,
  load_model_config,
  to_float32,
)
from grpo_jax.model.huggingface.peft import (
  base_of_adapters,
  check_adapters,
  load_adapter_shape,
  load_adapters,
  save_adapters,
)
from grpo_jax.model.huggingface.save_weights import save
from grpo_jax.model.lora import (
  ADAPTABLE,
  QUANTISED_DTYPES,
  adaptable_modules,
  init_adapters,
  is_projection,
  join,
  kernels_of,
  modules_of,
  quantised,
  rounded,
)
from grpo_jax.model.mlps.router import Routes
from grpo_jax.model.on_devices import on_devices
from grpo_jax.model.remat import OFFLOAD
from grpo_jax.model.stacks import (
  is_stacked,
  layer_names,
  per_layer,
  sparse_stacks,
  unrolled,
)
from grpo_jax.model.transformer import (
  Params,
  features,
  forward,
  group_features,
  init,
  routed_features,
  score,
  unembed,
)
from grpo_jax.model.vision import encode
from grpo_jax.model.vision_shape import VisionShape

load_config = load_model_config  # the name by which other programs call it

__all__ = [
  # The decoder.
  "ModelConfig",
  "VisionShape",
  "Params",
  "init",
  "forward",
  "features",
  "routed_features",
  "group_features",
  "encode",
  "unembed",
  "score",
  "Routes",
  "OFFLOAD",
  "after_prompts",
  "attention_of",
  "exchanges_in_words",
  "on_devices",
  # The layout of tokens.
  "Groups",
  "Packing",
  "make_packing",
  "pack",
  "unpack",
  "move",
  # The key/value cache.
  "Cache",
  "Prefix",
  "begin_rows",
  "cache_bytes",
  "empty_cache",
  "put_prompts",
  "roll_rows",
  "rows_as_prefix",
  "rows_as_prompts",
  "add_to_prompts",
  "copy_prompts",
  "slots_step",
  "take_prompts",
  "take_rows",
  "with_slots",
  "within_windows",
  "as_prefix",
  # The layout of the layers' parameters.
  "is_stacked",
  "layer_names",
  "per_layer",
  "sparse_stacks",
  "unrolled",
  # Hugging Face folders.
  "REWARD_HEADS",
  "load",
  "load_config",
  "load_model_config",
  "ignores_parts",
  "save",
  "to_float32",
  # Adapters.
  "ADAPTABLE",
  "AdapterShape",
  "QUANTISED_DTYPES",
  "adaptable_modules",
  "init_adapters",
  "is_projection",
  "kernels_of",
  "modules_of",
  "join",
  "quantised",
  "rounded",
  "base_of_adapters",
  "check_adapters",
  "load_adapter_shape",
  "load_adapters",
  "save_adapters",
]
