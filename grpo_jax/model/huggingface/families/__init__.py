"""The model families: the fields of config.json, and the names and axes of all tensors, as tables.

Each family is a record (`Family`) in one of these files. Loading and saving both use it.
"""

import re

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.huggingface.families import (
  deepseek,
  gemma,
  gemma4,
  glm,
  glm_lite,
  gpt_oss,
  llama,
  olmo,
  qwen,
  qwen_delta,
)
from grpo_jax.model.huggingface.families.family import REWARD_HEADS, Family
from grpo_jax.model.huggingface.families.sizes import sizes
from grpo_jax.settings import ConfigError

__all__ = ["FAMILIES", "HARMLESS", "REWARD_HEADS", "Family", "family_of", "sizes"]

_ALL = (
  *qwen.FAMILIES,
  *llama.FAMILIES,
  *olmo.FAMILIES,
  *qwen_delta.FAMILIES,
  *gemma.FAMILIES,
  *gemma4.FAMILIES,
  *glm.FAMILIES,
  *glm_lite.FAMILIES,
  *deepseek.FAMILIES,
  *gpt_oss.FAMILIES,
)
FAMILIES = {family.model_type: family for family in _ALL}
# Tensors that can be ignored: those that config.json determines, and heads for further tokens.
HARMLESS = re.compile(r"rotary_emb\.inv_freq$|^mtp\.")

# Fields of ModelConfig that only some families have.
_OF_SOME = (
  *("o_bias", "mlp_bias", "qk_norm", "pre_norms", "post_norms", "output_gate"),
  *("embedding_multiplier", "residual_multiplier", "query_multiplier", "logit_divisor"),
  *("unrotated_layers", "rotary_dim", "mixers", "delta", "query_growth", "sparse_layers"),
  *("share_scale", "router", "router_bias", "router_groups", "expert_bias", "shared_dim"),
  *("shared_gate", "attention_sinks", "latent", "expert_norms", "global_head_dim"),
  *("global_kv_heads", "keys_as_values", "value_norm", "borrowing_layers", "wide_borrowers"),
  *("layer_scale", "per_layer_dim"),
)


def family_of(config: ModelConfig) -> Family:
  """Returns the family that `config.family` names, after checking that it can describe the model.

  Its config.json must determine what the model computes, or a saved folder would load as another
  model. So each field that the family fixes must have that value, and each field that only some
  families have (`_OF_SOME`) must keep its default, unless this family can write it.

  Raises:
    ConfigError: There is no such family, or it cannot describe the model.
  """
  family = FAMILIES.get(config.family)
  if family is None:
    raise _unknown_model(f"family={config.family!r}")
  for name, value in family.fixed.items():
    if getattr(config, name) != value:
      raise _unknown_model(f"{name}={getattr(config, name)}")
  for name in _OF_SOME:
    value = getattr(config, name)
    is_known = name in (*family.fixed, *family.fields, *family.varies)
    if value != ModelConfig.__dataclass_fields__[name].default and not is_known:
      raise _unknown_model(f"family={config.family!r} and {name}={value}")
  # config.json has one field for both biases.
  if "o_bias" in family.fields and config.o_bias != config.qkv_bias:
    raise _unknown_model(f"qkv_bias={config.qkv_bias} and o_bias={config.o_bias}")
  return family


def _unknown_model(description: str) -> ConfigError:
  return ConfigError(
    f"a model with {description} has no Hugging Face family here: it cannot be saved"
  )
