"""Gemma 4: layers without a window have other head sizes, and the last layers borrow keys.

The dense models are otherwise similar to Gemma 3. E2B and E4B also have embeddings for each layer.
26B-A4B has experts beside the MLP of each layer.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.huggingface.config_fields import Refuse, Values, read_field
from grpo_jax.model.huggingface.families import tensors
from grpo_jax.model.huggingface.families.family import Family
from grpo_jax.model.huggingface.families.layer_types import (
  FULL,
  SLIDING,
  read_types,
  read_windows,
  types_to_json,
)
from grpo_jax.model.huggingface.families.tensors import joined, layer
from grpo_jax.model.huggingface.tensor_spec import TensorSpec
from grpo_jax.settings import shown

_HEADS = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
_EXPERTS = {  # field of ModelConfig -> field of config.json, of models with experts
  "num_experts": "num_experts",
  "experts_per_token": "top_k_experts",
  "expert_dim": "moe_intermediate_size",
}
_SWITCHES = {"keys_as_values": "attention_k_eq_v", "wide_borrowers": "use_double_wide_mlp"}


def _read(values: Values, refuse: Refuse) -> dict[str, Any]:
  """Reads the fields of ModelConfig whose form in config.json is Gemma 4's own."""
  types = read_types(values, (FULL, SLIDING), refuse)
  if types is None:
    types = [FULL if i % 6 == 5 else SLIDING for i in range(values["num_hidden_layers"])]
  types = [*types[:-1], FULL]  # as transformers does, even if the file says otherwise
  # `types` replaces the default, hence the []. Layers with a window have other rotary frequencies,
  # hence `always`.
  windows = read_windows({**values, "layer_types": types}, refuse, [], always=True)
  if SLIDING in types and not windows:
    refuse("sliding_window", "is missing, and layer_types names layers with a window: add it")
  _check_rope(values["rope_parameters"], types, refuse)
  # "vision": the tokens of a picture see each other, which `vision/gemma4.py` reads.
  if values.get("use_bidirectional_attention") not in (None, False, "vision"):
    found = shown(values["use_bidirectional_attention"])
    refuse("use_bidirectional_attention", f"is {found}: tokens here see those before them alone")
  switches = {name: read_field(values, key, bool, refuse) for name, key in _SWITCHES.items()}
  return {
    "windows": windows,
    **switches,
    **_read_global_heads(values, types, refuse),
    "borrowing_layers": _read_borrowing_layers(values, types, refuse),
    "per_layer_dim": _read_per_layer_dim(values, refuse),
    **_read_experts(values, refuse),
  }


def _check_rope(rope: Mapping[str, Any], types: list[str], refuse: Refuse) -> None:
  """Refuses `rope_parameters` that lack a layer type, and other scalings than Gemma 4's."""
  for kind in sorted(set(types)):
    if not rope.get(kind):
      refuse("rope_parameters", f"has no {kind}, which layer_types names: add it")
  scaling = rope[FULL].get("rope_type", "default")
  if scaling not in ("default", "proportional"):
    refuse("rope_parameters", f"is of type {shown(scaling)}: choose a checkpoint with proportional")


def _read_global_heads(values: Values, types: list[str], refuse: Refuse) -> dict[str, int]:
  """Reads `global_head_dim` and `global_kv_heads`: the heads of the layers without a window.

  `per_layer_config` states them for each layer, or else two fields state them for all. 0 means that
  they equal those of the other layers. `types` is the list `layer_types`.
  """
  found: Any = {key: values.get(name) for key, name in _HEADS.items()}
  if not values["attention_k_eq_v"]:
    found["num_key_value_heads"] = None  # transformers reads it only with attention_k_eq_v
  by_layer = values.get("per_layer_config")
  if by_layer is not None:
    found = _heads_of_full_attention(by_layer, types, refuse)
  heads = {key: found.get(key) or values[key] for key in _HEADS}
  dim, kv_heads = (read_field(heads, key, int, refuse) for key in _HEADS)
  if values["num_attention_heads"] % kv_heads:
    refuse(_HEADS["num_key_value_heads"], f"({kv_heads}) must divide num_attention_heads")
  # Only `per_layer_config` can lead here. A saved folder has `_HEADS` instead, from which
  # transformers would not read this number.
  if kv_heads != values["num_key_value_heads"] and not values["attention_k_eq_v"]:
    refuse("attention_k_eq_v", "is false, where layers differ in num_key_value_heads: set it")
  return {
    "global_head_dim": dim if dim != values["head_dim"] else 0,
    "global_kv_heads": kv_heads if kv_heads != values["num_key_value_heads"] else 0,
  }


def _heads_of_full_attention(by_layer: Any, types: list[str], refuse: Refuse) -> Mapping[str, Any]:
  """Returns the fields that `per_layer_config` sets for each layer without a window.

  Refuses layers whose fields differ, fields other than `_HEADS`, and fields for layers with a
  window. At least the last layer has no window. `by_layer` maps a layer's number to its fields.
  """
  full_layers = [str(i) for i, kind in enumerate(types) if kind == FULL]
  is_object = isinstance(by_layer, dict) and all(isinstance(x, dict) for x in by_layer.values())
  names_only_full = is_object and set(by_layer) <= set(full_layers)
  fields = [by_layer.get(number, {}) for number in full_layers] if names_only_full else []
  are_equal = all(x == fields[0] and set(x) <= set(_HEADS) for x in fields)
  if not (fields and are_equal):
    refuse(
      "per_layer_config",
      f"must give all layers of full_attention the same {' and '.join(_HEADS)}, and others none",
    )
  return fields[0]


def _read_borrowing_layers(values: Values, types: list[str], refuse: Refuse) -> int:
  """Reads how many of the last layers borrow keys. Each type needs an earlier layer that lends."""
  key = "num_kv_shared_layers"
  if values.get(key) in (0, None):
    return 0
  count = read_field(values, key, int, refuse)
  own = types[:-count] if count < len(types) else []
  if set(own) != set(types):
    refuse(key, f"is {count}: of each kind in layer_types, a layer before them must have keys")
  return count


def _read_per_layer_dim(values: Values, refuse: Refuse) -> int:
  """Reads the size of the embeddings for each layer. 0 means that there are none."""
  key, rows = "hidden_size_per_layer_input", "vocab_size_per_layer_input"
  if values.get(key) in (0, None):
    return 0
  if values.get(rows) != values["vocab_size"]:
    refuse(rows, f"is {shown(values.get(rows))}: it must be vocab_size ({values['vocab_size']})")
  return read_field(values, key, int, refuse)


def _read_experts(values: Values, refuse: Refuse) -> dict[str, Any]:
  """Reads the fields of the experts, which all layers have beside an MLP, or returns {}."""
  if not read_field(values, "enable_moe_block", bool, refuse):
    return {}
  fields = {name: read_field(values, key, int, refuse) for name, key in _EXPERTS.items()}
  if fields["experts_per_token"] > fields["num_experts"]:
    refuse("top_k_experts", f"is more than num_experts ({fields['num_experts']}): correct either")
  if values["use_double_wide_mlp"]:
    refuse("use_double_wide_mlp", "is true beside enable_moe_block, which is not supported here")
  return fields | {
    "sparse_layers": tuple(range(values["num_hidden_layers"])),
    "shared_dim": values["intermediate_size"],
    "normalise_shares": True,
    "expert_norms": True,
  }


def _write(config: ModelConfig) -> dict[str, Any]:
  """The fields of config.json that `_read` reads."""
  has_experts = bool(config.num_experts)
  return {
    **types_to_json(config),
    **{key: getattr(config, name) for name, key in _SWITCHES.items()},
    "global_head_dim": config.global_head_dim or config.head_dim,
    "num_global_key_value_heads": config.global_kv_heads or config.num_kv_heads,
    "num_kv_shared_layers": config.borrowing_layers,
    "hidden_size_per_layer_input": config.per_layer_dim,
    "vocab_size_per_layer_input": config.vocab_size,
    "enable_moe_block": has_experts,
    **{key: getattr(config, name) if has_experts else None for name, key in _EXPERTS.items()},
  }


def _surplus(config: ModelConfig) -> list[str]:
  """The unused projections and norms of borrowing layers, which published checkpoints contain."""
  return [
    f"model.layers.{i}.self_attn.{part}.weight"
    for i in range(config.num_layers - config.borrowing_layers, config.num_layers)
    for part in ("k_proj", "v_proj", "k_norm")
  ]


# fmt: off
_BIAS = ("qkv_bias",)
_ATTENTION = (
  layer("self_attn.q_proj.weight", "attention/q/kernel", "HE D", "DHE"),
  layer("self_attn.k_proj.weight", "attention/k/kernel", "KE D", "DKE", layers="keys"),
  layer("self_attn.v_proj.weight", "attention/v/kernel", "KE D", "DKE", layers="values"),
  layer("self_attn.q_proj.bias", "attention/q/bias", "HE", "HE", when=_BIAS),
  layer("self_attn.k_proj.bias", "attention/k/bias", "KE", "KE", when=_BIAS, layers="keys"),
  layer("self_attn.v_proj.bias", "attention/v/bias", "KE", "KE", when=_BIAS, layers="values"),
  layer("self_attn.o_proj.bias", "attention/o/bias", "D", "D", when=("o_bias",)),
  layer("self_attn.q_norm.weight", "attention/q_norm/scale", "E", "E"),
  layer("self_attn.k_norm.weight", "attention/k_norm/scale", "E", "E", layers="keys"),
)
_PER_LAYER = (
  TensorSpec("model.embed_tokens_per_layer.weight", "per_layer/embed/embedding", "V l", "Vl"),
  TensorSpec("model.per_layer_model_projection.weight", "per_layer/projection/kernel", "l D", "Dl"),
  TensorSpec("model.per_layer_projection_norm.weight", "per_layer/norm/scale", "p", "p"),
  layer("per_layer_input_gate.weight", "per_layer/in_proj/kernel", "p D", "Dp"),
  layer("per_layer_projection.weight", "per_layer/out_proj/kernel", "D p", "pD"),
  layer("post_per_layer_input_norm.weight", "per_layer/norm/scale", "D", "D"),
)
_OF_EXPERTS = (
  *tensors.mlp("mlp", "experts/shared", "F"),
  layer("post_feedforward_layernorm_1.weight", "experts/shared_post_norm/scale", "D", "D"),
  layer("router.proj.weight", "experts/router", "X D", "DX"),
  layer("router.scale", "experts/router_scale", "D", "D"),
  layer("router.per_expert_scale", "experts/share_scale", "X", "X"),
  layer("pre_feedforward_layernorm_2.weight", "experts/norm/scale", "D", "D"),
  *joined("experts.gate_up_proj", "X (M,M) D", {"experts/gate": "XDM", "experts/up": "XDM"}),
  layer("experts.down_proj", "experts/down", "X D M", "XMD"),
  layer("post_feedforward_layernorm_2.weight", "experts/post_norm/scale", "D", "D"),
)
# fmt: on
_TABLE = (
  tensors.norms(tensors.SANDWICH_NORMS)
  + _ATTENTION
  + tensors.O
  + tensors.MLP
  + _OF_EXPERTS
  + tuple(dataclasses.replace(entry, when=("per_layer_dim",)) for entry in _PER_LAYER)
  + (layer("layer_scalar", "layer_scale", "1", ""),)
  + tensors.final_norm()
)

FAMILIES = (
  Family(
    "gemma4_text",
    "Gemma4ForCausalLM",
    _TABLE,
    {
      "mlp_bias": False,
      "qk_norm": "head",
      "value_norm": True,
      "activation": "gelu_tanh",
      "post_norms": True,
      "scale_embeddings": True,
      "query_multiplier": 1.0,
      "layer_scale": True,
    },
    {**tensors.BIAS_FIELDS, "logit_cap": "final_logit_softcapping"},
    defaults={
      "vocab_size": 262144,
      "hidden_size": 2304,
      "intermediate_size": 9216,
      "num_hidden_layers": 30,
      "num_attention_heads": 8,
      "num_key_value_heads": 4,
      "head_dim": 256,
      "global_head_dim": 512,
      "max_position_embeddings": 131072,
      "rms_norm_eps": 1e-6,
      "tie_word_embeddings": True,
      "sliding_window": 512,
      "vocab_size_per_layer_input": 262144,
      "hidden_size_per_layer_input": 256,
      "rope_parameters": {
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
      },
      **dict.fromkeys([*_SWITCHES.values(), "enable_moe_block"], False),
    },
    reads=frozenset(
      {
        *_HEADS.values(),
        *_EXPERTS.values(),
        *_SWITCHES.values(),
        "enable_moe_block",
        "per_layer_config",
        "num_kv_shared_layers",
        "hidden_size_per_layer_input",
        "vocab_size_per_layer_input",
        "use_bidirectional_attention",
      }
    ),
    supported={"expert_intermediate_size": (None,)},  # the checkpoint of 31B has it
    read=_read,
    write=_write,
    varies=(
      *("global_head_dim", "global_kv_heads", "borrowing_layers", "per_layer_dim"),
      *(*_SWITCHES, "sparse_layers", "shared_dim", "expert_norms"),
    ),
    has_local_rope=True,
    surplus=_surplus,
  ),
)
