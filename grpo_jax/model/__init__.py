"""The decoder: `init`, `load`, `save`, `forward`, and its two halves `features` and `unembed`."""
from grpo_jax.model.cache import Cache, Prefix, empty, grow, share
from grpo_jax.model.config import ModelConfig
from grpo_jax.model.transformer import Params, features, forward, init, routed_features, unembed
from grpo_jax.model.weights import load, load_config, save
