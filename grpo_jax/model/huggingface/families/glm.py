"""GLM-4.5: dense layers, then layers with a sigmoid router, experts and an MLP for all tokens."""

from typing import Any

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.huggingface.config_fields import Refuse, Values, read_field
from grpo_jax.model.huggingface.families import tensors
from grpo_jax.model.huggingface.families.family import Family
from grpo_jax.model.huggingface.families.layer_types import read_full
from grpo_jax.model.huggingface.families.tensors import layer

EXPERTS = (
  *tensors.EXPERTS,
  layer("mlp.gate.e_score_correction_bias", "experts/balance", "X", "X"),
  *tensors.mlp("mlp.shared_experts", "experts/shared", "s"),
)
EXPERT_FIELDS = {
  "num_experts": "n_routed_experts",
  "experts_per_token": "num_experts_per_tok",
  "expert_dim": "moe_intermediate_size",
  "normalise_shares": "norm_topk_prob",
  "share_scale": "routed_scaling_factor",
  "router_groups": "n_group",
  "router_groups_used": "topk_group",
}
EXPERT_READS = frozenset(
  {"num_local_experts", "n_shared_experts", "first_k_dense_replace", "num_nextn_predict_layers"}
)
SUPPORTED = {"moe_layer_freq": (1,), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
EXPERT_VARIES = ("sparse_layers", "shared_dim")


def read_experts(values: Values, refuse: Refuse) -> dict[str, Any]:
  """Reads the layers with experts, and the hidden units of the MLP beside the experts."""
  read_full(values, refuse)  # refuses windows
  shared, layers = values.get("n_shared_experts"), values["num_hidden_layers"]
  dense = values.get("first_k_dense_replace")
  if type(dense) is not int or not 0 <= dense <= layers:
    refuse("first_k_dense_replace", f"is {dense}: it must be a number of {layers} layers or less")
  count, groups = values["n_routed_experts"], values["n_group"]
  # The router judges a group by its two best experts.
  if count % groups or count // groups < 2:
    refuse(
      "n_group", f"is {groups}: groups must have the same number of {count} experts, 2 or more"
    )
  if values["topk_group"] > groups:
    refuse("topk_group", f"is {values['topk_group']}, of {groups} groups: correct either")
  shared_count = read_field(values, "n_shared_experts", int, refuse) if shared else 0
  return {
    "sparse_layers": tuple(range(dense, layers)),
    "shared_dim": shared_count * values["moe_intermediate_size"],
  }


def write_experts(config: ModelConfig) -> dict[str, Any]:
  """The fields of config.json that `read_experts` reads."""
  return {
    "n_shared_experts": config.shared_dim // config.expert_dim,
    "first_k_dense_replace": min(config.sparse_layers, default=config.num_layers),
    "num_nextn_predict_layers": 0,
  }


FAMILIES = (
  Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    tensors.norms(tensors.PRE_NORMS)
    + tensors.PROJECTIONS
    + tensors.QKV_BIASES
    + tensors.qk_norms()
    + EXPERTS
    + tensors.final_norm(),
    {"o_bias": False, "mlp_bias": False, "router": "sigmoid"},
    EXPERT_FIELDS | {"qkv_bias": "attention_bias"},
    defaults={"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "use_qk_norm": False},
    reads=EXPERT_READS | {"use_qk_norm"},
    read=lambda values, refuse: {
      **read_experts(values, refuse),
      "qk_norm": "head" if read_field(values, "use_qk_norm", bool, refuse) else "",
    },
    supported=SUPPORTED,
    write=lambda config: {**write_experts(config), "use_qk_norm": bool(config.qk_norm)},
    varies=(*EXPERT_VARIES, "qk_norm", "rotary_dim"),
    rotated=0.5,
  ),
)
