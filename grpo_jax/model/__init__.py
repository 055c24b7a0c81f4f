"""The decoder: `init`, `load`, `save`, `forward`, and its halves `features` and `unembed`, or `score` of a reward model;
adapters on top of it."""

from grpo_jax.model.cache import Cache, Prefix, empty, grow, share
from grpo_jax.model.config import PROJECTIONS, Lora, ModelConfig
from grpo_jax.model.families import SCORERS
from grpo_jax.model.lora import QUANTISED, join, quantised
from grpo_jax.model.lora import init as init_adapters
from grpo_jax.model.peft import load_adapters, load_lora, save_adapters
from grpo_jax.model.transformer import (
  Params,
  features,
  forward,
  init,
  routed_features,
  score,
  unembed,
)
from grpo_jax.model.weights import load, load_config, save
