"""Gemma 3, SmolVLM and Idefics3, which have SigLIP's tower."""

import math
from typing import Any

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.huggingface.config_fields import Refuse, Values, read_field, read_quotient
from grpo_jax.model.huggingface.tensor_spec import TensorSpec
from grpo_jax.model.huggingface.vision.vision_family import VisionFamily, dense, layer, layer_norm

_FIELDS = {
  "dim": "hidden_size",
  "num_layers": "num_hidden_layers",
  "num_heads": "num_attention_heads",
  "mlp_dim": "intermediate_size",
  "norm_eps": "layer_norm_eps",
}
_READS = ("image_size", "patch_size", "num_channels")
_TOKENS_PER_IMAGE, _SCALE = "mm_tokens_per_image", "scale_factor"


def _read_common(vision: Values, refuse: Refuse) -> dict[str, Any]:
  """Reads the fields `patch` and `positions` of VisionShape."""
  side, channels = (read_field(vision, x, int, refuse) for x in ("patch_size", "num_channels"))
  return {"patch": (channels, side, side), "positions": (vision["image_size"] // side) ** 2}


def _read_pooled(values: Values, vision: Values, refuse: Refuse) -> dict[str, Any]:
  """Reads the fields of Gemma 3, which pools square blocks of patches into visual tokens."""
  read_quotient(vision, "image_size", "patch_size", refuse)
  common = _read_common(vision, refuse)
  tokens = read_field({_TOKENS_PER_IMAGE: 256, **values}, _TOKENS_PER_IMAGE, int, refuse)
  side, grid = math.isqrt(tokens), math.isqrt(common["positions"])
  if side**2 != tokens or grid % side:
    refuse(_TOKENS_PER_IMAGE, f"is {tokens}: blocks of {grid}^2 patches must be squares")
  return common | {"merge": grid // side}


def _read_shuffled(values: Values, vision: Values, refuse: Refuse) -> dict[str, Any]:
  """Reads the fields of Idefics3 and SmolVLM, which concatenate blocks of patches."""
  read_field(vision, "image_size", int, refuse)
  merge = read_field({_SCALE: 2, **values}, _SCALE, int, refuse)
  return _read_common(vision, refuse) | {"merge": merge}


def _write(config: ModelConfig) -> dict[str, Any]:
  """The fields of `vision_config` that `_read_common` reads."""
  channels, side, _ = config.vision.patch
  return {"num_channels": channels, "patch_size": side, "image_size": config.vision.grid * side}


def _write_gemma3(config: ModelConfig) -> dict[str, Any]:
  return _write(config) | {"model_type": "siglip_vision_model", "vision_use_head": False}


# The axis letters are those of `families.sizes`: W the width, I the hidden units of an MLP, A the
# heads, B the size of a head, T the colours, y and x the pixels of a patch, P the positions.
# fmt: off
def _table(at: str) -> tuple[TensorSpec, ...]:
  """The table of SigLIP. In the checkpoint, the names of its tensors begin with `at`."""
  of_layer = f"{at}encoder.layers.{{i}}."
  return (
    layer(f"{at}embeddings.patch_embedding.weight", "embed/patch/kernel", "W T y x", "TyxW"),
    layer(f"{at}embeddings.patch_embedding.bias", "embed/patch/bias", "W", "W"),
    layer(f"{at}embeddings.position_embedding.weight", "embed/positions", "P W", "PW"),
    *layer_norm(f"{of_layer}layer_norm1", "layers_{i}/norm1"),
    *layer_norm(f"{of_layer}layer_norm2", "layers_{i}/norm2"),
    *(
      spec for x in "qkv" for spec in (
        layer(f"{of_layer}self_attn.{x}_proj.weight", f"layers_{{i}}/attention/{x}/kernel",
              "AB W", "WAB"),
        layer(f"{of_layer}self_attn.{x}_proj.bias", f"layers_{{i}}/attention/{x}/bias", "AB", "AB"),
      )
    ),
    layer(f"{of_layer}self_attn.out_proj.weight", "layers_{i}/attention/out/kernel", "W AB", "ABW"),
    layer(f"{of_layer}self_attn.out_proj.bias", "layers_{i}/attention/out/bias", "W", "W"),
    *dense(f"{of_layer}mlp.fc1", "layers_{i}/mlp/fc1", "W", "I"),
    *dense(f"{of_layer}mlp.fc2", "layers_{i}/mlp/fc2", "I", "W"),
    *layer_norm(f"{at}post_layernorm", "merge/post_norm"),
  )


_PROJECTOR = "model.multi_modal_projector.mm_"
_POOLED = (
  *_table("model.vision_tower."),
  layer(f"{_PROJECTOR}soft_emb_norm.weight", "merge/norm/scale", "W", "W", offset=1.0),
  layer(f"{_PROJECTOR}input_projection_weight", "merge/projection/kernel", "W D", "WD"),
)
_SHUFFLED = (
  *_table("model.vision_model."),
  layer("model.connector.modality_projection.proj.weight", "merge/projection/kernel", "D O", "OD"),
)
# fmt: on
_DEFAULTS = {
  "num_channels": 3,
  "image_size": 224,
  "intermediate_size": 3072,
  "num_hidden_layers": 12,
  "layer_norm_eps": 1e-6,
}
_OF_IDEFICS3: dict[str, Any] = {
  "text": "llama",
  "text_type": "llama",
  "text_at": "model.text_model.",
  "table": _SHUFFLED,
  "fixed": {"tower": "idefics3", "activation": "gelu_tanh"},
  "fields": _FIELDS,
  "reads": _READS,
  "read": _read_shuffled,
  "write": _write,
  "defaults": _DEFAULTS | {"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32},
  "text_defaults": {"rms_norm_eps": 1e-5, "rope_theta": 10000.0},
  "others": {"image_token_id": 128257, _SCALE: 2},
  # Fields in the published files that only their authors' training code uses.
  "ignored": (
    r"vision_config\.(max_image_size|size|use_base_siglip)|vocab_size"
    r"|use_reentrant_checkpointing"
    r"|text_config\.(is_llama_config|neftune_noise_alpha|perceiver_config|pixel_shuffle_factor"
    r"|qk_layer_norms|rope_interleaved|use_resampler|architectures|_.*)"
  ),
}

FAMILIES = (
  VisionFamily(
    "gemma3",
    "Gemma3ForConditionalGeneration",
    "gemma3_text",
    "gemma3_text",
    "model.language_model.",
    _POOLED,
    {"tower": "siglip", "activation": "gelu_tanh", "both_ways": "all"},
    _FIELDS,
    _read_pooled,
    _write_gemma3,
    reads=_READS,
    tied=True,
    defaults=_DEFAULTS | {"hidden_size": 768, "num_attention_heads": 12, "patch_size": 16},
    text_defaults={
      "vocab_size": 262208,
      "num_attention_heads": 8,
      "num_key_value_heads": 4,
      "head_dim": 256,
      "max_position_embeddings": 131072,
      "query_pre_attn_scalar": 256,
      "rms_norm_eps": 1e-6,
      "tie_word_embeddings": True,
    },
    others={
      "boi_token_index": 255999,
      "eoi_token_index": 256000,
      "image_token_index": 262144,
      _TOKENS_PER_IMAGE: 256,
    },
    ignored=r"vision_config\.vision_use_head",  # the decoder does not use this head
    surplus=r"vision_tower\.head\.",
  ),
  VisionFamily("idefics3", "Idefics3ForConditionalGeneration", **_OF_IDEFICS3),
  VisionFamily("smolvlm", "SmolVLMForConditionalGeneration", **_OF_IDEFICS3),
)
