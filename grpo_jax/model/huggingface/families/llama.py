"""Llama, and families that differ from it in little."""

from typing import Any

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.huggingface.config_fields import Refuse, Values
from grpo_jax.model.huggingface.families import tensors
from grpo_jax.model.huggingface.families.family import Family
from grpo_jax.model.huggingface.families.layer_types import (
  every,
  read_windows,
  types_to_json,
  window_of,
)
from grpo_jax.settings import shown

_TABLE = (
  tensors.norms(tensors.PRE_NORMS)
  + tensors.PROJECTIONS
  + tensors.BIASES
  + tensors.MLP_BIASES
  + tensors.final_norm()
)
_GRANITE_FIELDS = {
  **tensors.ALL_BIAS_FIELDS,
  "embedding_multiplier": "embedding_multiplier",
  "residual_multiplier": "residual_multiplier",
  "query_multiplier": "attention_multiplier",
  "logit_divisor": "logits_scaling",
}


def _read_window_of_all(values: Values, refuse: Refuse) -> dict[str, Any]:
  """Reads the windows of a family in which, by default, all layers have one."""
  by_default = [True] * values["num_hidden_layers"]
  return {"windows": read_windows(values, refuse, by_default)}


def _read_smollm3(values: Values, refuse: Refuse) -> dict[str, Any]:
  """Reads the layers whose queries and keys are not rotated. By default, only they have windows."""
  # Despite its name, the list has 1 for the layers that are rotated.
  layers, rotates = range(values["num_hidden_layers"]), values.get("no_rope_layers")
  if rotates is None:
    is_last = every(values, "no_rope_layer_interval", 4, refuse)
    rotates = [int(not last) for last in is_last]
  # The list may be longer, because transformers ignores entries after the last layer.
  is_list = isinstance(rotates, list) and len(rotates) >= len(layers)
  if not is_list or any(x not in (0, 1) for x in rotates):
    found = shown(rotates)
    refuse("no_rope_layers", f"is {found}: it must have 0 or 1 for each of {len(layers)} layers")
  unrotated = tuple(layer for layer in layers if not rotates[layer])
  by_default = [bool(values.get("use_sliding_window")) and i in unrotated for i in layers]
  windows = read_windows(values, refuse, by_default, needs_switch=True)
  return {"unrotated_layers": unrotated, "windows": windows}


def _write_smollm3(config: ModelConfig) -> dict[str, Any]:
  layers = range(config.num_layers)
  return {
    "no_rope_layers": [int(i not in config.unrotated_layers) for i in layers],
    "use_sliding_window": window_of(config) is not None,
    **types_to_json(config),
  }


FAMILIES = (
  Family(
    "llama",
    "LlamaForCausalLM",
    _TABLE,
    {},
    tensors.ALL_BIAS_FIELDS,
    # SmolLM2's checkpoints have these.
    supported={"is_llama_config": (True,), "rope_interleaved": (False,)},
    default_theta=10000.0,
  ),
  Family(
    "mistral",
    "MistralForCausalLM",
    _TABLE,
    tensors.NO_BIAS,
    defaults={"sliding_window": 4096},
    read=_read_window_of_all,
    whole={"mistral3": {"head_dim": 128, "sliding_window": None}},
  ),
  Family(
    "ministral3",
    "Ministral3ForCausalLM",
    _TABLE,
    tensors.NO_BIAS,
    read=_read_window_of_all,
    varies=("query_growth",),
  ),
  Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    _TABLE,
    {},
    tensors.ALL_BIAS_FIELDS,
    defaults={"tie_word_embeddings": True},
    reads=frozenset({"no_rope_layers", "no_rope_layer_interval"}),
    read=_read_smollm3,
    write=_write_smollm3,
    varies=("unrotated_layers",),
  ),
  Family(
    "granite",
    "GraniteForCausalLM",
    _TABLE,
    {},
    _GRANITE_FIELDS,
    defaults=dict.fromkeys(
      ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"), 1.0
    ),
  ),
  Family(
    "phi3",
    "Phi3ForCausalLM",
    tensors.norms(tensors.PRE_NORMS)
    + tensors.FUSED_QKV
    + tensors.O
    + tensors.FUSED_MLP
    + tensors.final_norm(),
    tensors.NO_BIAS,
    # Phi-4-mini's checkpoints have these.
    supported={"full_attn_mod": (1,), "interpolate_factor": (1,), "lm_head_bias": (False, None)},
    read=_read_window_of_all,
    varies=("rotary_dim",),
    rotated=1.0,
  ),
)
