"""Which layers have a sliding window and which have experts, as config.json describes it."""

from collections.abc import Mapping
from typing import Any

from grpo_jax.model.huggingface.config_fields import Refuse, read_field
from grpo_jax.model.huggingface.family import Family
from grpo_jax.settings import shown

_QWEN = ("qwen2", "qwen3", "qwen3_moe")
_WITH_DEFAULT_WINDOW = (*_QWEN, "mistral", "gemma2", "gemma3_text")


def read_windows(model_type: str, values: Mapping[str, Any], refuse: Refuse) -> tuple[int, ...]:
  """The window of each layer, or () if no window hides anything.

  Absent fields stand for the defaults of transformers.
  """
  default_window = 4096 if model_type in _WITH_DEFAULT_WINDOW else None
  window = values.get("sliding_window", default_window)
  if values.get("layer_types") is None:
    has_window = _default_pattern(model_type, values)
  else:
    has_window = _listed_pattern(model_type, values, refuse)
  if model_type == "qwen3_moe" and any(has_window) != all(has_window):
    refuse(
      "layer_types",
      "names layers with a window and without, which this family does not have: correct it",
    )
  if any(has_window) and window is not None and (type(window) is not int or window < 1):
    refuse("sliding_window", f"must be a positive int, got {window!r}")
  # A window as long as the longest text hides nothing. Gemma 3 keeps it, because its layers with a
  # window have other rotary frequencies.
  if not any(has_window) or not window:
    return ()
  if window >= values["max_position_embeddings"] and model_type != "gemma3_text":
    return ()
  return tuple(window if has else 0 for has in has_window)


def _default_pattern(model_type: str, values: Mapping[str, Any]) -> list[bool]:
  """Which layers have a window if config.json does not list `layer_types`."""
  layers = range(values["num_hidden_layers"])
  use_window = bool(values.get("use_sliding_window"))
  if model_type in ("qwen2", "qwen3"):
    first = values.get("max_window_layers", 28)
    return [use_window and layer >= first for layer in layers]
  if model_type == "qwen3_moe":
    return [use_window for _ in layers]
  if model_type == "gemma2":
    return [layer % 2 == 0 for layer in layers]
  if model_type == "gemma3_text":
    pattern = values.get("sliding_window_pattern", values.get("_sliding_window_pattern", 6))
    return [(layer + 1) % pattern != 0 for layer in layers]
  return [model_type in ("mistral", "phi3") for _ in layers]


def _listed_pattern(model_type: str, values: Mapping[str, Any], refuse: Refuse) -> list[bool]:
  """Which layers have a window according to `layer_types`."""
  types, count = values["layer_types"], values["num_hidden_layers"]
  kinds = ("full_attention", "sliding_attention")
  if not isinstance(types, list) or len(types) != count or any(kind not in kinds for kind in types):
    refuse(
      "layer_types",
      f"is {shown(types)}: it must name full_attention or sliding_attention for each of {count}"
      " layers",
    )
  if model_type in _QWEN and not values.get("use_sliding_window"):
    return [False] * count
  return [kind == "sliding_attention" for kind in types]


def read_num_experts(values: Mapping[str, Any], refuse: Refuse) -> int | None:
  """The number of experts: `num_experts` in transformers 4, `num_local_experts` in 5."""
  found = [values[key] for key in ("num_experts", "num_local_experts") if key in values]
  if any(count != found[0] for count in found):
    refuse("num_experts", f"and num_local_experts differ ({found}): correct one")
  return found[0] if found else None


def read_sparse_layers(
  family: Family, values: Mapping[str, Any], refuse: Refuse
) -> tuple[int, ...]:
  """The layers with experts: every `decoder_sparse_step`-th, except those of `mlp_only_layers`."""
  if "num_experts" not in family.fields:
    return ()
  with_default = {"decoder_sparse_step": 1} | dict(values)
  step = read_field(with_default, "decoder_sparse_step", int, refuse)
  dense = values.get("mlp_only_layers") or []
  if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
    refuse("mlp_only_layers", f"must be a list of layers, got {dense!r}")
  layers = range(values["num_hidden_layers"])
  return tuple(layer for layer in layers if (layer + 1) % step == 0 and layer not in dense)
