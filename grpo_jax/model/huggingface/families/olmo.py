"""OLMo 2 and 3: norms after attention and MLP, and norms over all query and all key heads."""

from typing import Any

from grpo_jax.model.huggingface.config_fields import Refuse, Values
from grpo_jax.model.huggingface.families import tensors
from grpo_jax.model.huggingface.families.family import Family
from grpo_jax.model.huggingface.families.layer_types import read_windows, types_to_json

_TABLE = (
  tensors.norms(tensors.OUTER_NORMS)
  + tensors.PROJECTIONS
  + tensors.BIASES
  + tensors.WHOLE_QK_NORMS
  + tensors.final_norm()
)
_FIXED = {"mlp_bias": False, "pre_norms": False, "post_norms": True, "qk_norm": "all"}


def _read_olmo3(values: Values, refuse: Refuse) -> dict[str, Any]:
  by_default = [(layer + 1) % 4 != 0 for layer in range(values["num_hidden_layers"])]
  return {"windows": read_windows(values, refuse, by_default, always=True)}


FAMILIES = (
  Family("olmo2", "Olmo2ForCausalLM", _TABLE, _FIXED, tensors.BIAS_FIELDS),
  Family(
    "olmo3",
    "Olmo3ForCausalLM",
    _TABLE,
    _FIXED,
    tensors.BIAS_FIELDS,
    defaults={"sliding_window": 4096},
    read=_read_olmo3,
    write=types_to_json,
    has_local_rope=True,
  ),
)
