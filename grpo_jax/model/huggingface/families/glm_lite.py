"""GLM-4.7-Flash: the experts of GLM-4.5 with the latent attention of DeepSeek-V3."""

from typing import Any

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.huggingface.config_fields import Refuse, Values
from grpo_jax.model.huggingface.families import deepseek, glm
from grpo_jax.model.huggingface.families.family import Family
from grpo_jax.settings import shown

_TYPES = "mlp_layer_types"


def _read(values: Values, refuse: Refuse) -> dict[str, Any]:
  """Reads DeepSeek-V3's fields, but takes the layers with experts from `mlp_layer_types`."""
  layers = values["num_hidden_layers"]
  types = values.get(_TYPES)
  if types is None:
    return deepseek.read({"first_k_dense_replace": 1, **values}, refuse)
  is_list = isinstance(types, list) and len(types) == layers
  if not is_list or any(kind not in ("dense", "sparse") for kind in types):
    refuse(_TYPES, f"is {shown(types)}: it must name dense or sparse for each of {layers} layers")
  sparse = tuple(layer for layer, kind in enumerate(types) if kind == "sparse")
  return deepseek.read({**values, "first_k_dense_replace": 0}, refuse) | {"sparse_layers": sparse}


def _write(config: ModelConfig) -> dict[str, Any]:
  layers = range(config.num_layers)
  types = ["sparse" if layer in config.sparse_layers else "dense" for layer in layers]
  return {**deepseek.write(config), _TYPES: types}


FAMILIES = (
  Family(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    deepseek.TABLE,
    {"mlp_bias": False, "router": "sigmoid"},
    deepseek.FIELDS,
    defaults={
      "norm_topk_prob": True,
      "rope_interleave": True,
      "q_lora_rank": 768,
      "n_group": 1,
      "topk_group": 1,
    },
    reads=deepseek.READS | {_TYPES},
    supported=glm.SUPPORTED,
    read=_read,
    write=_write,
    varies=deepseek.VARIES,
  ),
)
