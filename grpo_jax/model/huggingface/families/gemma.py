"""Gemma 2 and 3: norms before and after attention and MLP, and windows in most layers."""

from typing import Any

from grpo_jax.model.huggingface.config_fields import Refuse, Values, read_field
from grpo_jax.model.huggingface.families import tensors
from grpo_jax.model.huggingface.families.family import Family
from grpo_jax.model.huggingface.families.layer_types import read_windows, types_to_json

_FIXED = {
  "mlp_bias": False,
  "activation": "gelu_tanh",
  "post_norms": True,
  "scale_embeddings": True,
}
_FIELDS = {
  **tensors.BIAS_FIELDS,
  "query_scalar": "query_pre_attn_scalar",
  "attention_cap": "attn_logit_softcapping",
  "logit_cap": "final_logit_softcapping",
}
_DEFAULTS = {"sliding_window": 4096, "tie_word_embeddings": True}
_NORMS = tensors.norms(tensors.SANDWICH_NORMS, offset=1.0)


def _read_gemma2(values: Values, refuse: Refuse) -> dict[str, Any]:
  by_default = [layer % 2 == 0 for layer in range(values["num_hidden_layers"])]
  return {"windows": read_windows(values, refuse, by_default)}


def _read_gemma3(values: Values, refuse: Refuse) -> dict[str, Any]:
  key = "sliding_window_pattern"
  found = {key: values.get(key, values.get(f"_{key}", 6))}
  pattern = read_field(found, key, int, refuse)
  by_default = [(layer + 1) % pattern != 0 for layer in range(values["num_hidden_layers"])]
  return {"windows": read_windows(values, refuse, by_default, always=True)}


FAMILIES = (
  Family(
    "gemma2",
    "Gemma2ForCausalLM",
    _NORMS + tensors.PROJECTIONS + tensors.BIASES + tensors.final_norm(offset=1.0),
    _FIXED,
    _FIELDS,
    defaults=_DEFAULTS,
    read=_read_gemma2,
    write=types_to_json,
  ),
  Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    _NORMS
    + tensors.PROJECTIONS
    + tensors.BIASES
    + tensors.qk_norms(offset=1.0)
    + tensors.final_norm(offset=1.0),
    _FIXED | {"qk_norm": "head"},
    _FIELDS,
    defaults=_DEFAULTS,
    reads=frozenset({"sliding_window_pattern"}),
    read=_read_gemma3,
    write=types_to_json,
    has_local_rope=True,
    local_theta=1e4,
    default_theta=1e6,
    reward_prefix="Gemma3Text",
  ),
)
