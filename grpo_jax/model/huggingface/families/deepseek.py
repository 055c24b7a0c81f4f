"""DeepSeek-V3: latent attention, and the same experts as in GLM-4.5."""

from typing import Any

from grpo_jax.model.config import LatentShape, ModelConfig
from grpo_jax.model.huggingface.config_fields import Refuse, Values, read_field
from grpo_jax.model.huggingface.families import glm, tensors
from grpo_jax.model.huggingface.families.family import Family
from grpo_jax.model.huggingface.families.tensors import layer

_SHAPE = {  # field of LatentShape -> field of config.json
  "rank": "kv_lora_rank",
  "key_dim": "qk_nope_head_dim",
  "rope_dim": "qk_rope_head_dim",
  "value_dim": "v_head_dim",
}
READS = (
  glm.EXPERT_READS
  | {"head_dim", "qk_head_dim"}  # determined by other fields
  | {"q_lora_rank", "rope_interleave", *_SHAPE.values()}
  | {"ep_size", "seq_aux", "aux_loss_alpha"}  # used only in pretraining
)
_RANK = "latent.query_rank"
# fmt: off
LATENT = (
  layer("self_attn.q_proj.weight", "latent/q/kernel", "HE D", "DHE", unless=_RANK),
  layer("self_attn.q_a_proj.weight", "latent/q_a/kernel", "q D", "Dq", when=(_RANK,)),
  layer("self_attn.q_a_proj.bias", "latent/q_a/bias", "q", "q", when=(_RANK, "qkv_bias")),
  layer("self_attn.q_a_layernorm.weight", "latent/q_a_norm/scale", "q", "q", when=(_RANK,)),
  layer("self_attn.q_b_proj.weight", "latent/q_b/kernel", "HE q", "qHE", when=(_RANK,)),
  layer("self_attn.kv_a_proj_with_mqa.weight", "latent/kv_a/kernel", "k D", "Dk"),
  layer("self_attn.kv_a_proj_with_mqa.bias", "latent/kv_a/bias", "k", "k", when=("qkv_bias",)),
  layer("self_attn.kv_a_layernorm.weight", "latent/kv_a_norm/scale", "n", "n"),
  layer("self_attn.kv_b_proj.weight", "latent/kv_b/kernel", "Hu n", "nHu"),
  layer("self_attn.o_proj.weight", "latent/o/kernel", "D Hv", "HvD"),
  layer("self_attn.o_proj.bias", "latent/o/bias", "D", "D", when=("o_bias",)),
)
# fmt: on


def read(values: Values, refuse: Refuse) -> dict[str, Any]:
  """Reads the shape of latent attention and the layers with experts."""
  sizes = {name: read_field(values, key, int, refuse) for name, key in _SHAPE.items()}
  has_rank = values.get("q_lora_rank") is not None  # null: queries have no latent
  query_rank = read_field(values, "q_lora_rank", int, refuse) if has_rank else 0
  if sizes["rope_dim"] % 2:  # pairs of numbers are rotated
    refuse(_SHAPE["rope_dim"], f"is {sizes['rope_dim']}: it must be even")
  interleaved = read_field(values, "rope_interleave", bool, refuse)
  return {
    **glm.read_experts(values, refuse),
    "head_dim": sizes["key_dim"] + sizes["rope_dim"],
    "rotary_dim": sizes["rope_dim"],
    "mixers": ("latent",) * values["num_hidden_layers"],
    "latent": LatentShape(query_rank=query_rank, interleaved=interleaved, **sizes),
  }


def write(config: ModelConfig) -> dict[str, Any]:
  """The fields of config.json that `read` reads."""
  shape = config.latent
  return {
    **glm.write_experts(config),
    **{key: getattr(shape, name) for name, key in _SHAPE.items()},
    "q_lora_rank": shape.query_rank or None,
    "rope_interleave": shape.interleaved,
  }


# Here `head_dim` counts the rotated numbers of a key. `read` adds the others.
FIELDS = glm.EXPERT_FIELDS | tensors.BIAS_FIELDS | {"head_dim": "qk_rope_head_dim"}
VARIES = (*glm.EXPERT_VARIES, "rotary_dim", "mixers", "latent")
TABLE = tensors.norms(tensors.PRE_NORMS) + LATENT + tensors.MLP + glm.EXPERTS + tensors.final_norm()
FAMILIES = (
  Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    TABLE,
    {"mlp_bias": False, "router": "sigmoid"},
    FIELDS,
    defaults={"norm_topk_prob": True, "rope_interleave": True, "q_lora_rank": 1536},
    reads=READS,
    supported=glm.SUPPORTED,
    read=read,
    write=write,
    varies=VARIES,
  ),
)
