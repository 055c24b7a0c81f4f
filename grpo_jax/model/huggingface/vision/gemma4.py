"""Gemma 4 with its vision tower. The audio tower is not read."""

import math
from typing import Any

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.huggingface.config_fields import Refuse, Values, read_field, read_object
from grpo_jax.model.huggingface.tensor_spec import TensorSpec
from grpo_jax.model.huggingface.vision.vision_family import VisionFamily, layer, rms_norm
from grpo_jax.settings import shown

_BOTH_WAYS = "use_bidirectional_attention"


def _read(values: Values, vision: Values, refuse: Refuse) -> dict[str, Any]:
  """Reads the fields of VisionShape that differ in form from those of `vision_config`."""
  if vision["num_key_value_heads"] != vision["num_attention_heads"]:
    refuse("num_key_value_heads", "must be num_attention_heads: towers here share no keys")
  rope = read_object(vision, "rope_parameters", refuse)
  if rope.get("rope_type", "axial") not in ("axial", "default"):
    refuse("rope_parameters", f"is of type {shown(rope['rope_type'])}: towers here have axial")
  theta = {"rope_theta": rope.get("rope_theta", 100.0)}
  text = values.get("text_config", values)
  return {
    "patch": (3 * read_field(vision, "patch_size", int, refuse) ** 2,),  # 3 colours of each pixel
    "rope_theta": read_field(theta, "rope_theta", float, refuse),
    "both_ways": "windows" if text.get(_BOTH_WAYS) == "vision" else "",
    "pad_id": text.get("pad_token_id") or 0,  # visual tokens get its layer embeddings
  }


def _write(config: ModelConfig) -> dict[str, Any]:
  return {
    "model_type": "gemma4_vision",
    "patch_size": math.isqrt(config.vision.patch[0] // 3),
    "num_key_value_heads": config.vision.num_heads,
    "rope_parameters": {"rope_type": "axial", "rope_theta": config.vision.rope_theta},
  }


def _write_text(config: ModelConfig) -> dict[str, Any]:
  both_ways = "vision" if config.vision.both_ways else None
  return {_BOTH_WAYS: both_ways, "pad_token_id": config.vision.pad_id}


_LIMITS = ("input_min", "input_max", "output_min", "output_max")


def _clipped(hf_name: str, leaf_name: str, hf_axes: str, leaf_axes: str) -> tuple[TensorSpec, ...]:
  """The table entries of a layer's kernel and, if the model clips, of the limits for clipping."""
  hf_name, leaf_name = f"{_LAYER}{hf_name}", f"layers_{{i}}/{leaf_name}"
  when = ("vision.clipped",)
  return (
    layer(f"{hf_name}.linear.weight", f"{leaf_name}/linear/kernel", hf_axes, leaf_axes),
    *(layer(f"{hf_name}.{x}", f"{leaf_name}/clip_{x}", "", "", when=when) for x in _LIMITS),
  )


# fmt: off
_AT = "model.vision_tower."
_LAYER = f"{_AT}encoder.layers.{{i}}."
_STANDARDISED = ("vision.standardised",)
_TABLE = (
  layer(f"{_AT}patch_embedder.input_proj.weight", "embed/patch/kernel", "W C", "CW"),
  layer(f"{_AT}patch_embedder.position_embedding_table", "embed/positions", "c P W", "cPW"),
  *rms_norm(f"{_LAYER}input_layernorm", "layers_{i}/norm1"),
  *rms_norm(f"{_LAYER}post_attention_layernorm", "layers_{i}/post_norm1"),
  *rms_norm(f"{_LAYER}pre_feedforward_layernorm", "layers_{i}/norm2"),
  *rms_norm(f"{_LAYER}post_feedforward_layernorm", "layers_{i}/post_norm2"),
  *_clipped("self_attn.q_proj", "attention/q", "AB W", "WAB"),
  *_clipped("self_attn.k_proj", "attention/k", "AB W", "WAB"),
  *_clipped("self_attn.v_proj", "attention/v", "AB W", "WAB"),
  *_clipped("self_attn.o_proj", "attention/o", "W AB", "ABW"),
  *rms_norm(f"{_LAYER}self_attn.q_norm", "layers_{i}/attention/q_norm", "B"),
  *rms_norm(f"{_LAYER}self_attn.k_norm", "layers_{i}/attention/k_norm", "B"),
  *_clipped("mlp.gate_proj", "mlp/gate", "I W", "WI"),
  *_clipped("mlp.up_proj", "mlp/up", "I W", "WI"),
  *_clipped("mlp.down_proj", "mlp/down", "W I", "IW"),
  layer(f"{_AT}std_bias", "merge/token_bias", "W", "W", when=_STANDARDISED),
  layer(f"{_AT}std_scale", "merge/token_scale", "W", "W", when=_STANDARDISED),
  layer("model.embed_vision.embedding_projection.weight", "merge/projection/kernel", "D W", "WD"),
)
# fmt: on

FAMILIES = (
  VisionFamily(
    "gemma4",
    "Gemma4ForConditionalGeneration",
    "gemma4_text",
    "gemma4_text",
    "model.language_model.",
    _TABLE,
    {"tower": "gemma4", "activation": "gelu_tanh"},
    {
      "dim": "hidden_size",
      "num_layers": "num_hidden_layers",
      "num_heads": "num_attention_heads",
      "mlp_dim": "intermediate_size",
      "head_size": "head_dim",
      "norm_eps": "rms_norm_eps",
      "merge": "pooling_kernel_size",
      "positions": "position_embedding_size",
      "clipped": "use_clipped_linears",
      "standardised": "standardize",
    },
    _read,
    _write,
    reads=("patch_size", "num_key_value_heads", "rope_parameters"),
    tied=True,
    defaults={
      "hidden_size": 768,
      "intermediate_size": 3072,
      "num_hidden_layers": 16,
      "num_attention_heads": 12,
      "num_key_value_heads": 12,
      "head_dim": 64,
      "rms_norm_eps": 1e-6,
      "pooling_kernel_size": 3,
      "patch_size": 16,
      "position_embedding_size": 10240,
      "use_clipped_linears": False,
      "standardize": False,
    },
    others={
      "boi_token_id": 255999,
      "eoi_token_id": 258882,
      "image_token_id": 258880,
      "video_token_id": 258884,
      "boa_token_id": 256000,
      "eoa_token_index": 258883,
      "audio_token_id": 258881,
      "vision_soft_tokens_per_image": None,
    },
    ignored=(
      "audio_config|vision_config[.](max_position_embeddings|default_output_length"
      "|global_head_dim|layer_types|num_hidden_layers_.*)"
    ),
    write_text=_write_text,
  ),
)
