"""The fields of config.json that say which layers use the gated delta rule, and their shape."""

from collections.abc import Mapping
from typing import Any

from grpo_jax.model.config import DeltaShape, ModelConfig
from grpo_jax.model.huggingface.config_fields import Refuse, read_field
from grpo_jax.settings import shown

FAMILIES = ("qwen3_5_text",)
FIELDS = {  # field of DeltaShape -> field of config.json
  "key_heads": "linear_num_key_heads",
  "value_heads": "linear_num_value_heads",
  "key_dim": "linear_key_head_dim",
  "value_dim": "linear_value_head_dim",
  "width": "linear_conv_kernel_dim",
}
_MIXERS = {"full_attention": "attention", "linear_attention": "delta"}
_TYPES = {mixer: kind for kind, mixer in _MIXERS.items()}


def read(model_type: str, values: Mapping[str, Any], refuse: Refuse) -> dict[str, Any]:
  """The fields of a ModelConfig: `mixers` and `delta`. Empty where the family has none."""
  if model_type not in FAMILIES:
    return {}
  count, types = values["num_hidden_layers"], values.get("layer_types")
  if types is None:
    every = read_field(
      {"full_attention_interval": 4, **values}, "full_attention_interval", int, refuse
    )
    types = [
      "linear_attention" if (layer + 1) % every else "full_attention" for layer in range(count)
    ]
  if (
    not isinstance(types, list) or len(types) != count or any(x not in list(_MIXERS) for x in types)
  ):
    refuse(
      "layer_types",
      f"is {shown(types)}: it must name full_attention or linear_attention for each of {count}"
      " layers",
    )
  if "full_attention" not in types:
    refuse("layer_types", "names no layer with full_attention: the cache needs one at least")
  shape = DeltaShape(**{name: read_field(values, key, int, refuse) for name, key in FIELDS.items()})
  if shape.value_heads % shape.key_heads:
    refuse(
      FIELDS["value_heads"],
      f"({shape.value_heads}) must be a multiple of {FIELDS['key_heads']} ({shape.key_heads})",
    )
  if shape.width < 2:
    refuse(FIELDS["width"], f"is {shape.width}: the convolution must see 2 tokens at least")
  if "linear_attention" not in types:
    return {"delta": shape}
  return {"mixers": tuple(_MIXERS[kind] for kind in types), "delta": shape}


def to_json(config: ModelConfig) -> dict[str, Any]:
  """The fields of config.json for `mixers` and `delta`."""
  kinds = [config.kind(layer).mixer for layer in range(config.num_layers)]
  shape = {key: getattr(config.delta, name) for name, key in FIELDS.items()}
  return {"layer_types": [_TYPES[kind] for kind in kinds], **shape}
