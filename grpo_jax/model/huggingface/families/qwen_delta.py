"""Qwen3.5: three of four layers mix tokens by the gated delta rule, the fourth by attention."""

from typing import Any

from grpo_jax.model.config import DeltaShape, ModelConfig
from grpo_jax.model.huggingface.config_fields import Refuse, read_field
from grpo_jax.model.huggingface.families import tensors
from grpo_jax.model.huggingface.families.family import Family, Values
from grpo_jax.model.huggingface.families.layer_types import FULL, every, read_types
from grpo_jax.model.huggingface.families.tensors import layer

_LINEAR = "linear_attention"
_SHAPE = {  # field of DeltaShape -> field of config.json
  "key_heads": "linear_num_key_heads",
  "value_heads": "linear_num_value_heads",
  "key_dim": "linear_key_head_dim",
  "value_dim": "linear_value_head_dim",
  "width": "linear_conv_kernel_dim",
}


def read_mixers(values: Values, refuse: Refuse) -> dict[str, Any]:
  """`mixers` and `delta`."""
  types = read_types(values, (FULL, _LINEAR), refuse)
  if types is None:
    is_full = every(values, "full_attention_interval", 4, refuse)
    types = [FULL if full else _LINEAR for full in is_full]
  if FULL not in types:
    refuse("layer_types", "names no layer with full_attention: the cache needs one at least")
  shape = DeltaShape(**{name: read_field(values, key, int, refuse) for name, key in _SHAPE.items()})
  if shape.value_heads % shape.key_heads:
    refuse(
      _SHAPE["value_heads"],
      f"({shape.value_heads}) must be a multiple of {_SHAPE['key_heads']} ({shape.key_heads})",
    )
  if shape.width < 2:
    refuse(_SHAPE["width"], f"is {shape.width}: the convolution must see 2 tokens at least")
  if _LINEAR not in types:
    return {"delta": shape}
  return {"mixers": tuple("attention" if x == FULL else "delta" for x in types), "delta": shape}


def write_mixers(config: ModelConfig) -> dict[str, Any]:
  """The inverse of `read_mixers`."""
  mixers = [config.kind(i).mixer for i in range(config.num_layers)]
  shape = {key: getattr(config.delta, name) for name, key in _SHAPE.items()}
  types = [FULL if mixer == "attention" else _LINEAR for mixer in mixers]
  return {"layer_types": types, "use_sliding_window": False, **shape}


# fmt: off
GATED_QKV = (
  layer("self_attn.q_proj.weight", "attention/q/kernel", "Hg D", "DHg"),
  *tensors.QKV[1:],
)
_OF_DELTA = (
  layer("linear_attn.conv1d.weight", "delta/conv", "c 1 w", "wc"),
  layer("linear_attn.A_log", "delta/decay", "v", "v"),
  layer("linear_attn.dt_bias", "delta/decay_bias", "v", "v"),
  layer("linear_attn.norm.weight", "delta/norm_scale", "b", "b"),
  layer("linear_attn.out_proj.weight", "delta/out_proj/kernel", "D vb", "vbD"),
)
_PROJECTED = (
  layer("linear_attn.in_proj_qkv.weight", "delta/in_proj_qkv/kernel", "c D", "Dc"),
  layer("linear_attn.in_proj_z.weight", "delta/in_proj_z/kernel", "vb D", "Dvb"),
  layer("linear_attn.in_proj_b.weight", "delta/in_proj_b/kernel", "v D", "Dv"),
  layer("linear_attn.in_proj_a.weight", "delta/in_proj_a/kernel", "v D", "Dv"),
)
# fmt: on
_ALL_LAYERS = (
  tensors.norms(tensors.PRE_NORMS, offset=1.0)
  + GATED_QKV
  + tensors.O
  + tensors.BIASES
  + tensors.qk_norms(offset=1.0)
  + _OF_DELTA
  + tensors.final_norm(offset=1.0)
)
_DENSE = tensors.GATE_UP + tensors.DOWN
_FIXED = {"mlp_bias": False, "qk_norm": "head", "output_gate": True}
_READS = frozenset({"full_attention_interval", *_SHAPE.values()})
_VARIES = ("mixers", "delta", "rotary_dim")

FAMILIES = (
  Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    _ALL_LAYERS + _PROJECTED + _DENSE,
    _FIXED,
    tensors.BIAS_FIELDS,
    reads=_READS,
    read=read_mixers,
    write=write_mixers,
    varies=_VARIES,
    rotated=0.25,
    whole={"qwen3_5": {}},
    reward_prefix="Qwen3_5",
  ),
)
