"""Table entries for the tensors that several families have."""

from collections.abc import Mapping
from typing import Any

from grpo_jax.model.huggingface.tensor_spec import TensorSpec
from grpo_jax.model.mixers import MIXERS
from grpo_jax.model.mlps import MLPS


def layer(hf_name: str, leaf_name: str, hf_axes: str, leaf_axes: str, **options: Any) -> TensorSpec:
  """The table entry of a tensor in each layer, or in each layer with its mixer or MLP."""
  part = leaf_name.split("/")[0]
  return TensorSpec(
    f"model.layers.{{i}}.{hf_name}",
    f"layers_{{i}}/{leaf_name}",
    hf_axes,
    leaf_axes,
    **({"layers": part if part in (*MIXERS, *MLPS) else "all"} | options),
  )


def joined(hf_name: str, hf_axes: str, leaves: Mapping[str, str]) -> tuple[TensorSpec, ...]:
  """The table entries of a tensor that holds `leaves`: names of leaves -> their axes, in order."""
  return tuple(
    layer(hf_name, leaf_name, hf_axes, leaf_axes, part=part)
    for part, (leaf_name, leaf_axes) in enumerate(leaves.items())
  )


def norms(names: Mapping[str, str], offset: float = 0.0) -> tuple[TensorSpec, ...]:
  """The table entries of a layer's norms. `names` are names of leaves -> names of tensors."""
  return tuple(
    layer(f"{hf_name}.weight", f"{leaf_name}/scale", "D", "D", offset=offset)
    for leaf_name, hf_name in names.items()
  )


def qk_norms(offset: float = 0.0) -> tuple[TensorSpec, ...]:
  """The table entries of the norms of each query and key head, for models with a `qk_norm`."""
  options: dict[str, Any] = {"offset": offset, "when": ("qk_norm",)}
  return (
    layer("self_attn.q_norm.weight", "attention/q_norm/scale", "E", "E", **options),
    layer("self_attn.k_norm.weight", "attention/k_norm/scale", "E", "E", **options),
  )


def mlp(hf_name: str, leaf_name: str, width: str) -> tuple[TensorSpec, ...]:
  """The table entries of a gated MLP: gate, up and down. `width` is the hidden axis letter."""
  inwards, outwards = (f"{width} D", f"D{width}"), (f"D {width}", f"{width}D")
  return (
    layer(f"{hf_name}.gate_proj.weight", f"{leaf_name}/gate/kernel", *inwards),
    layer(f"{hf_name}.up_proj.weight", f"{leaf_name}/up/kernel", *inwards),
    layer(f"{hf_name}.down_proj.weight", f"{leaf_name}/down/kernel", *outwards),
  )


WHOLE_QK_NORMS = (  # norms over all query heads, and over all key heads
  layer("self_attn.q_norm.weight", "attention/q_norm/scale", "HE", "HE"),
  layer("self_attn.k_norm.weight", "attention/k_norm/scale", "KE", "KE"),
)


def final_norm(offset: float = 0.0) -> tuple[TensorSpec, ...]:
  """The table entry of the norm after the last layer."""
  return (TensorSpec("model.norm.weight", "final_norm/scale", "D", "D", offset=offset),)


# Leaf -> tensor. Most families normalise before attention and MLP, OLMo after them, Gemma both.
PRE_NORMS = {
  "attention_norm": "input_layernorm",
  "mlp_norm": "post_attention_layernorm",
}
OUTER_NORMS = {
  "attention_post_norm": "post_attention_layernorm",
  "mlp_post_norm": "post_feedforward_layernorm",
}
SANDWICH_NORMS = {
  "attention_norm": "input_layernorm",
  "attention_post_norm": "post_attention_layernorm",
  "mlp_norm": "pre_feedforward_layernorm",
  "mlp_post_norm": "post_feedforward_layernorm",
}
# fmt: off
QKV = (
  layer("self_attn.q_proj.weight", "attention/q/kernel", "HE D", "DHE"),
  layer("self_attn.k_proj.weight", "attention/k/kernel", "KE D", "DKE"),
  layer("self_attn.v_proj.weight", "attention/v/kernel", "KE D", "DKE"),
)
QKV_BIASES = (
  layer("self_attn.q_proj.bias", "attention/q/bias", "HE", "HE", when=("qkv_bias",)),
  layer("self_attn.k_proj.bias", "attention/k/bias", "KE", "KE", when=("qkv_bias",)),
  layer("self_attn.v_proj.bias", "attention/v/bias", "KE", "KE", when=("qkv_bias",)),
)
BIASES = QKV_BIASES + (
  layer("self_attn.o_proj.bias", "attention/o/bias", "D", "D", when=("o_bias",)),
)
MLP_BIASES = (
  layer("mlp.gate_proj.bias", "mlp/gate/bias", "F", "F", when=("mlp_bias",)),
  layer("mlp.up_proj.bias", "mlp/up/bias", "F", "F", when=("mlp_bias",)),
  layer("mlp.down_proj.bias", "mlp/down/bias", "D", "D", when=("mlp_bias",)),
)
FUSED_QKV = joined(
  "self_attn.qkv_proj.weight",
  "(HE,KE,KE) D",
  {"attention/q/kernel": "DHE", "attention/k/kernel": "DKE", "attention/v/kernel": "DKE"},
)
O = (
  layer("self_attn.o_proj.weight", "attention/o/kernel", "D HE", "HED"),
)
MLP = mlp("mlp", "mlp", "F")
FUSED_MLP = (
  *joined("mlp.gate_up_proj.weight", "(F,F) D", {"mlp/gate/kernel": "DF", "mlp/up/kernel": "DF"}),
  MLP[-1],
)
EXPERTS = (
  layer("mlp.gate.weight", "experts/router", "X D", "DX"),
  layer("mlp.experts.{x}.gate_proj.weight", "experts/gate", "M D", "DM"),
  layer("mlp.experts.{x}.up_proj.weight", "experts/up", "M D", "DM"),
  layer("mlp.experts.{x}.down_proj.weight", "experts/down", "D M", "MD"),
)
# fmt: on
PROJECTIONS = QKV + O + MLP

# Fields of ModelConfig -> fields of config.json, or for NO_BIAS -> values:
BIAS_FIELDS = {"qkv_bias": "attention_bias", "o_bias": "attention_bias"}
ALL_BIAS_FIELDS = BIAS_FIELDS | {"mlp_bias": "mlp_bias"}
NO_BIAS = {"qkv_bias": False, "o_bias": False, "mlp_bias": False}
