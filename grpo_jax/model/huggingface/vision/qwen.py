"""Qwen2.5-VL, Qwen3-VL and Qwen3.5 with their vision towers."""

from typing import Any

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.huggingface.config_fields import Refuse, Values, read_field, read_object
from grpo_jax.model.huggingface.families import FAMILIES as TEXTS
from grpo_jax.model.huggingface.families import tensors
from grpo_jax.model.huggingface.families.tensors import joined
from grpo_jax.model.huggingface.vision.vision_family import (
  VisionFamily,
  dense,
  layer,
  layer_norm,
  rms_norm,
)
from grpo_jax.settings import shown

_ROPE_THETA = 10000.0  # the default rotary base of the tower, for rows and columns
_TOKENS = {  # fields that only processors and other programs read
  "image_token_id": None,
  "video_token_id": None,
  "vision_start_token_id": None,
  "vision_end_token_id": None,
}
_FIELDS = {
  "dim": "hidden_size",
  "num_layers": "depth",
  "num_heads": "num_heads",
  "mlp_dim": "intermediate_size",
  "merge": "spatial_merge_size",
}
_VISION_READS = (
  *("in_channels", "in_chans", "patch_size", "spatial_patch_size", "temporal_patch_size"),
  *("out_hidden_size", "num_position_embeddings", "deepstack_visual_indexes"),
  *("rope_parameters", "window_size", "fullatt_block_indexes"),
)


def read_layers(values: Values, key: str, refuse: Refuse) -> tuple[int, ...]:
  """Reads a list of numbers of the tower's layers, in ascending order."""
  found, count = values.get(key), values["depth"]
  is_list = isinstance(found, list) and all(type(x) is int and 0 <= x < count for x in found)
  if not is_list or found != sorted(set(found)):
    refuse(key, f"is {shown(found)}: it must list some of {count} layers in their order")
  return tuple(found)


def _read_common(
  values: Values, vision: Values, refuse: Refuse, sections: tuple[int, ...]
) -> dict[str, Any]:
  """Reads the fields `patch`, `rope_theta` and `rope_sections` of VisionShape.

  Refuses a tower whose visual tokens are not as wide as the decoder.

  Args:
    values: The whole config.json.
    vision: `vision_config`, with defaults.
    refuse: refuse(key, reason) raises ConfigError.
    sections: The default of `mrope_section`: how many of the decoder's frequencies rotate by time,
      height and width.
  """
  text = values.get("text_config", values)
  rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
  found = rope.get("mrope_section", list(sections))
  is_list = isinstance(found, list) and all(type(x) is int and x >= 0 for x in found)
  if not is_list or len(found) != 3:
    refuse("mrope_section", f"is {shown(found)}: it must have a number for each of three axes")
  axial = read_object(vision, "rope_parameters", refuse)
  if axial.get("rope_type", "axial") != "axial":
    refuse("rope_parameters", f"is of type {shown(axial['rope_type'])}: towers here have axial")
  theta = {"rope_theta": axial.get("rope_theta", _ROPE_THETA)}
  names = ("temporal_patch_size", "patch_size")
  frames, side = (read_field(vision, name, int, refuse) for name in names)
  channels = {"in_channels": vision.get("in_channels", vision.get("in_chans", 3))}
  width = text.get("hidden_size")
  if vision.get("out_hidden_size") != width:
    out = shown(vision.get("out_hidden_size"))
    refuse("out_hidden_size", f"is {out}: it must be the hidden_size of the text ({shown(width)})")
  return {
    "patch": (read_field(channels, "in_channels", int, refuse), frames, side, side),
    "rope_theta": read_field(theta, "rope_theta", float, refuse),
    "rope_sections": tuple(found),
  }


def _read_interleaved(values: Values, vision: Values, refuse: Refuse) -> dict[str, Any]:
  """Reads Qwen3-VL and Qwen3.5, whose decoders interleave the three axes (`mrope_interleaved`).

  Frequencies 0, 1, 2, 3, ... rotate by time, height, width, time, ...
  """
  count = read_field(vision, "num_position_embeddings", int, refuse)
  side = int(count**0.5)
  if side**2 != count:
    refuse("num_position_embeddings", f"is {count}: it must be a square")
  # transformers' defaults of `mrope_section`, for 32 and for 64 frequencies.
  sections = (11, 11, 10) if "qwen3_5" in values["model_type"] else (24, 20, 20)
  # DeepStack: the tower's layers whose outputs the decoder's first layers add. Qwen3.5 has none.
  levels: tuple[int, ...] = ()
  if "deepstack_visual_indexes" in vision and "qwen3_vl" in values["model_type"]:
    levels = read_layers(vision, "deepstack_visual_indexes", refuse)
  elif vision.get("deepstack_visual_indexes"):
    refuse("deepstack_visual_indexes", "names layers, which models of this family do not have")
  return _read_common(values, vision, refuse, sections) | {
    "positions": count,
    "level_layers": levels,
  }


def _read_windows(values: Values, vision: Values, refuse: Refuse) -> dict[str, Any]:
  """Reads Qwen2.5-VL, in whose tower most layers attend within windows of patches."""
  common = _read_common(values, vision, refuse, sections=(16, 24, 24))
  size = read_field(vision, "window_size", int, refuse)
  side, merge = common["patch"][-1], vision["spatial_merge_size"]
  # The side of a window in patches, rounded down to whole visual tokens, as in transformers.
  window = size // merge // side * merge
  if not window:
    refuse("window_size", f"is {size}: a window must hold the patches of a visual token at least")
  layers = read_layers(vision, "fullatt_block_indexes", refuse)
  return common | {"window": window, "full_layers": layers}


def write_common(config: ModelConfig) -> dict[str, Any]:
  """The fields of `vision_config` that all these families have."""
  channels, frames, side, _ = config.vision.patch
  return {
    "in_channels": channels,
    "temporal_patch_size": frames,
    "patch_size": side,
    "out_hidden_size": config.embed_dim,
    "rope_parameters": {"rope_type": "axial", "rope_theta": config.vision.rope_theta},
  }


def _write_interleaved(config: ModelConfig) -> dict[str, Any]:
  values = write_common(config) | {"num_position_embeddings": config.vision.positions}
  if "qwen3_vl" in config.vision.family:
    values["deepstack_visual_indexes"] = list(config.vision.level_layers)
  return values


def _write_windows(config: ModelConfig) -> dict[str, Any]:
  return write_common(config) | {
    "window_size": config.vision.window * config.vision.patch[-1],
    "fullatt_block_indexes": list(config.vision.full_layers),
  }


def _write_sections(config: ModelConfig) -> dict[str, Any]:
  """The axes by which the decoder rotates, as additions to the objects of `rope_to_json`."""
  sections: dict[str, Any] = {"mrope_section": list(config.vision.rope_sections)}
  if config.vision.rope_interleaved:
    sections["mrope_interleaved"] = True
  return {"rope_parameters": sections, "rope_scaling": {"rope_type": "default"} | sections}


# The axis letters are those of `families.sizes`.
# fmt: off
_AT = "model.visual."
_PATCH = f"{_AT}patch_embed.proj"
_BLOCK = f"{_AT}blocks.{{i}}."
_PATCHES = (
  layer(f"{_PATCH}.weight", "embed/patch/kernel", "W T t y x", "TtyxW"),
)
_ATTENTION = (
  layer(f"{_BLOCK}attn.qkv.weight", "layers_{i}/attention/qkv/kernel", "TAB W", "WTAB"),
  layer(f"{_BLOCK}attn.qkv.bias", "layers_{i}/attention/qkv/bias", "TAB", "TAB"),
  layer(f"{_BLOCK}attn.proj.weight", "layers_{i}/attention/proj/kernel", "W AB", "ABW"),
  layer(f"{_BLOCK}attn.proj.bias", "layers_{i}/attention/proj/bias", "W", "W"),
)
_WINDOWS = (
  *_PATCHES,
  *rms_norm(f"{_BLOCK}norm1", "layers_{i}/norm1"),
  *rms_norm(f"{_BLOCK}norm2", "layers_{i}/norm2"),
  *_ATTENTION,
  *dense(f"{_BLOCK}mlp.gate_proj", "layers_{i}/mlp/gate", "W", "I"),
  *dense(f"{_BLOCK}mlp.up_proj", "layers_{i}/mlp/up", "W", "I"),
  *dense(f"{_BLOCK}mlp.down_proj", "layers_{i}/mlp/down", "I", "W"),
  *rms_norm(f"{_AT}merger.ln_q", "merge/norm"),
  *dense(f"{_AT}merger.mlp.0", "merge/up", "O", "o"),
  *dense(f"{_AT}merger.mlp.2", "merge/down", "O", "D"),
)
_INTERLEAVED = (
  *_PATCHES,
  layer(f"{_PATCH}.bias", "embed/patch/bias", "W", "W"),
  layer(f"{_AT}pos_embed.weight", "embed/positions", "P W", "PW"),
  *layer_norm(f"{_BLOCK}norm1", "layers_{i}/norm1"),
  *layer_norm(f"{_BLOCK}norm2", "layers_{i}/norm2"),
  *_ATTENTION,
  *dense(f"{_BLOCK}mlp.linear_fc1", "layers_{i}/mlp/fc1", "W", "I"),
  *dense(f"{_BLOCK}mlp.linear_fc2", "layers_{i}/mlp/fc2", "I", "W"),
  *layer_norm(f"{_AT}merger.norm", "merge/norm"),
  *dense(f"{_AT}merger.linear_fc1", "merge/up", "O", "o"),
  *dense(f"{_AT}merger.linear_fc2", "merge/down", "O", "D"),
)
_LEVELS = (
  *layer_norm(f"{_AT}deepstack_merger_list.{{k}}.norm", "levels_{k}/norm", "O"),
  *dense(f"{_AT}deepstack_merger_list.{{k}}.linear_fc1", "levels_{k}/up", "O", "o"),
  *dense(f"{_AT}deepstack_merger_list.{{k}}.linear_fc2", "levels_{k}/down", "O", "D"),
)
_PACKED_EXPERTS = (
  *joined("mlp.experts.gate_up_proj", "X (M,M) D", {"experts/gate": "XDM", "experts/up": "XDM"}),
  tensors.layer("mlp.experts.down_proj", "experts/down", "X D M", "XMD"),
)
# fmt: on
_MOE_TEXT = _PACKED_EXPERTS + tuple(
  entry for entry in TEXTS["qwen3_moe"].table if "{x}" not in entry.hf_name
)
_DEFAULTS = {
  "depth": 27,
  "hidden_size": 1152,
  "intermediate_size": 4304,
  "num_heads": 16,
  "patch_size": 16,
  "spatial_merge_size": 2,
  "temporal_patch_size": 2,
  "out_hidden_size": 3584,
  "num_position_embeddings": 2304,
}
_COMMON: dict[str, Any] = {
  "text_at": "model.language_model.",
  "reads": _VISION_READS,
  "supported": {"tokens_per_second": (2, 4, None)},  # for videos only
  "fields": _FIELDS,
  "others": _TOKENS,
  "write_text": _write_sections,
}
_OF_QWEN3_VL = _COMMON | {
  "table": _INTERLEAVED + _LEVELS,
  "fixed": {"tower": "qwen3_vl", "activation": "gelu_tanh", "rope_interleaved": True},
  "defaults": _DEFAULTS | {"deepstack_visual_indexes": [8, 16, 24]},
  "read": _read_interleaved,
  "write": _write_interleaved,
}
_OF_QWEN3_5 = _OF_QWEN3_VL | {"table": _INTERLEAVED, "defaults": _DEFAULTS}

FAMILIES = (
  VisionFamily(
    "qwen2_5_vl",
    "Qwen2_5_VLForConditionalGeneration",
    "qwen2",
    "qwen2_5_vl_text",
    table=_WINDOWS,
    fixed={"tower": "qwen2_5_vl", "activation": "silu"},
    defaults={
      "depth": 32,
      "hidden_size": 3584,
      "intermediate_size": 3420,
      "num_heads": 16,
      "patch_size": 14,
      "spatial_merge_size": 2,
      "temporal_patch_size": 2,
      "window_size": 112,
      "out_hidden_size": 3584,
      "fullatt_block_indexes": [7, 15, 23, 31],
    },
    read=_read_windows,
    write=_write_windows,
    **_COMMON,
  ),
  VisionFamily(
    "qwen3_vl",
    "Qwen3VLForConditionalGeneration",
    "qwen3",
    "qwen3_vl_text",
    text_defaults={"head_dim": 128},
    **_OF_QWEN3_VL,
  ),
  VisionFamily(
    "qwen3_vl_moe",
    "Qwen3VLMoeForConditionalGeneration",
    "qwen3_moe",
    "qwen3_vl_moe_text",
    text_table=_MOE_TEXT,
    text_defaults={"norm_topk_prob": True},
    ignored=r"text_config\.norm_topk_prob",  # transformers does not read it
    **_OF_QWEN3_VL,
  ),
  VisionFamily(
    "qwen3_5",
    "Qwen3_5ForConditionalGeneration",
    "qwen3_5_text",
    "qwen3_5_text",
    **_OF_QWEN3_5,
  ),
  VisionFamily(
    "qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_moe_text",
    "qwen3_5_moe_text",
    **_OF_QWEN3_5,
  ),
)
