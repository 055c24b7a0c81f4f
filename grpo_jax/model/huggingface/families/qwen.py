"""Qwen2 and Qwen3, and Qwen3 with experts."""

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
  window_of,
)
from grpo_jax.settings import shown

EXPERT_FIELDS = {
  "num_experts": "num_experts",
  "experts_per_token": "num_experts_per_tok",
  "expert_dim": "moe_intermediate_size",
  "normalise_shares": "norm_topk_prob",
}
EXPERT_READS = frozenset({"num_local_experts", "decoder_sparse_step", "mlp_only_layers"})


def _read_dense(values: Values, refuse: Refuse) -> dict[str, Any]:
  """Reads the windows. By default, layers from `max_window_layers` on have one, if switched on."""
  is_on, key = bool(values.get("use_sliding_window")), "max_window_layers"
  first = 28 if values.get(key) is None else values[key]
  if type(first) is not int:
    refuse(key, f"must be an int, got {shown(first)}")
  by_default = [is_on and layer >= first for layer in range(values["num_hidden_layers"])]
  return {"windows": read_windows(values, refuse, by_default, needs_switch=True)}


def _write_switch(config: ModelConfig) -> dict[str, Any]:
  """The fields for transformers 4, which counts the first layers, those without a window."""
  types, window = types_to_json(config)["layer_types"], window_of(config)
  first = types.index(SLIDING) if window else len(types)
  return {"use_sliding_window": window is not None, "max_window_layers": first}


def _write_dense(config: ModelConfig) -> dict[str, Any]:
  return types_to_json(config) | _write_switch(config)


def _read_experts(values: Values, refuse: Refuse) -> dict[str, Any]:
  """Reads the windows, which all layers or none must have, and the layers with experts."""
  is_on = [bool(values.get("use_sliding_window"))] * values["num_hidden_layers"]
  windows = read_windows(values, refuse, is_on, needs_switch=True)
  types = read_types(values, (FULL, SLIDING), refuse)
  if is_on[0] and types and len(set(types)) > 1:
    refuse(
      "layer_types",
      "names layers with a window and without, which this family does not have: correct it",
    )
  return {"windows": windows, "sparse_layers": read_sparse_layers(values, refuse)}


def read_sparse_layers(values: Values, refuse: Refuse) -> tuple[int, ...]:
  """Returns the layers with experts: every `decoder_sparse_step`-th, except `mlp_only_layers`."""
  with_default = {"decoder_sparse_step": 1} | dict(values)
  step = read_field(with_default, "decoder_sparse_step", int, refuse)
  dense = values.get("mlp_only_layers") or []
  if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
    refuse("mlp_only_layers", f"must be a list of layers, got {dense!r}")
  layers = range(values["num_hidden_layers"])
  return tuple(layer for layer in layers if (layer + 1) % step == 0 and layer not in dense)


def write_experts(config: ModelConfig) -> dict[str, Any]:
  """The fields for the layers with experts, and the number of experts for transformers 5."""
  dense = [i for i in range(config.num_layers) if i not in config.sparse_layers]
  return {
    "num_local_experts": config.num_experts,
    "decoder_sparse_step": 1,
    "mlp_only_layers": dense,
  }


_QWEN3 = {"mlp_bias": False, "qk_norm": "head"}
_WINDOW = {"sliding_window": 4096}
FAMILIES = (
  Family(
    "qwen2",
    "Qwen2ForCausalLM",
    tensors.norms(tensors.PRE_NORMS)
    + tensors.PROJECTIONS
    + tensors.QKV_BIASES
    + tensors.final_norm(),
    {"qkv_bias": True, "o_bias": False, "mlp_bias": False},
    defaults=_WINDOW,
    read=_read_dense,
    write=_write_dense,
  ),
  Family(
    "qwen3",
    "Qwen3ForCausalLM",
    tensors.norms(tensors.PRE_NORMS)
    + tensors.PROJECTIONS
    + tensors.BIASES
    + tensors.qk_norms()
    + tensors.final_norm(),
    _QWEN3,
    tensors.BIAS_FIELDS,
    defaults=_WINDOW,
    read=_read_dense,
    write=_write_dense,
  ),
  Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    tensors.norms(tensors.PRE_NORMS)
    + tensors.PROJECTIONS
    + tensors.BIASES
    + tensors.EXPERTS
    + tensors.qk_norms()
    + tensors.final_norm(),
    _QWEN3,
    EXPERT_FIELDS | tensors.BIAS_FIELDS,
    defaults=_WINDOW | {"norm_topk_prob": False},
    reads=EXPERT_READS,
    read=_read_experts,
    write=lambda config: write_experts(config) | _write_switch(config),
    varies=("sparse_layers",),
  ),
)
