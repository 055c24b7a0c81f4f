"""gpt-oss: attention with sinks, windows in every other layer, and experts in all layers."""

from typing import Any

from grpo_jax.model.huggingface.config_fields import Refuse, Values
from grpo_jax.model.huggingface.families import tensors
from grpo_jax.model.huggingface.families.family import Family
from grpo_jax.model.huggingface.families.layer_types import read_windows, types_to_json
from grpo_jax.model.huggingface.families.tensors import joined, layer

_CONSTANTS = {"swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)}  # constants in clamped_silu
# fmt: off
_EXPERTS = (
  layer("mlp.router.weight", "experts/router", "X D", "DX"),
  layer("mlp.router.bias", "experts/router_bias", "X", "X"),
  *joined(  # the columns of gate and up alternate
    "mlp.experts.gate_up_proj", "X D M(1,1)", {"experts/gate": "XDM", "experts/up": "XDM"}
  ),
  *joined(
    "mlp.experts.gate_up_proj_bias",
    "X M(1,1)",
    {"experts/gate_bias": "XM", "experts/up_bias": "XM"},
  ),
  layer("mlp.experts.down_proj", "experts/down", "X M D", "XMD"),
  layer("mlp.experts.down_proj_bias", "experts/down_bias", "X D", "XD"),
)
# fmt: on


def _read(values: Values, refuse: Refuse) -> dict[str, Any]:
  layers = range(values["num_hidden_layers"])
  windows = read_windows(values, refuse, [layer % 2 == 0 for layer in layers])
  return {"windows": windows, "sparse_layers": tuple(layers)}


FAMILIES = (
  Family(
    "gpt_oss",
    "GptOssForCausalLM",
    tensors.norms(tensors.PRE_NORMS)
    + tensors.QKV
    + tensors.O
    + tensors.BIASES
    + (layer("self_attn.sinks", "attention/sinks", "H", "H"),)
    + _EXPERTS
    + tensors.final_norm(),
    {
      "mlp_dim": 0,
      "mlp_bias": False,
      "activation": "clamped_silu",
      "attention_sinks": True,
      "router_bias": True,
      "expert_bias": True,
      "normalise_shares": True,
    },
    tensors.BIAS_FIELDS
    | {
      "num_experts": "num_local_experts",
      "experts_per_token": "num_experts_per_tok",
      "expert_dim": "intermediate_size",
    },
    defaults={"sliding_window": 128, "attention_bias": True},
    reads=frozenset({"experts_per_token", "initial_context_length"}),
    supported=_CONSTANTS,
    read=_read,
    write=types_to_json,
    varies=("sparse_layers",),
    default_theta=150000.0,
  ),
)
