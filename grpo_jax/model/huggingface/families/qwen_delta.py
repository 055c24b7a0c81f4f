"""Qwen3.5 and Qwen3-Next: most layers mix tokens by the gated delta rule, the rest by attention."""

from typing import Any

from grpo_jax.model.config import DeltaShape, ModelConfig
from grpo_jax.model.huggingface.config_fields import Refuse, Values, read_field
from grpo_jax.model.huggingface.families import qwen, tensors
from grpo_jax.model.huggingface.families.family import Family
from grpo_jax.model.huggingface.families.layer_types import FULL, every, read_types
from grpo_jax.model.huggingface.families.tensors import joined, layer

_LINEAR = "linear_attention"
_SHAPE = {  # field of DeltaShape -> field of config.json
  "key_heads": "linear_num_key_heads",
  "value_heads": "linear_num_value_heads",
  "key_dim": "linear_key_head_dim",
  "value_dim": "linear_value_head_dim",
  "width": "linear_conv_kernel_dim",
}


def read_mixers(values: Values, refuse: Refuse) -> dict[str, Any]:
  """Reads the fields `mixers` and `delta` of ModelConfig, from the fields of config.json."""
  types = read_types(values, (FULL, _LINEAR), refuse)
  if types is None:
    is_full = every(values, "full_attention_interval", 4, refuse)
    types = [FULL if full else _LINEAR for full in is_full]
  if FULL not in types:
    refuse("layer_types", "names no layer with full_attention: the cache needs one at least")
  shape = DeltaShape(**{name: read_field(values, key, int, refuse) for name, key in _SHAPE.items()})
  if shape.value_heads % shape.key_heads:
    refuse(
      _SHAPE["value_heads"],
      f"({shape.value_heads}) must be a multiple of {_SHAPE['key_heads']} ({shape.key_heads})",
    )
  if shape.width < 2:
    refuse(_SHAPE["width"], f"is {shape.width}: the convolution must see 2 tokens at least")
  if _LINEAR not in types:  # without `mixers`, all layers have attention
    return {"delta": shape}
  return {"mixers": tuple("attention" if x == FULL else "delta" for x in types), "delta": shape}


def write_mixers(config: ModelConfig) -> dict[str, Any]:
  """The fields of config.json that `read_mixers` reads."""
  mixers = [config.kind(i).mixer for i in range(config.num_layers)]
  shape = {key: getattr(config.delta, name) for name, key in _SHAPE.items()}
  types = [FULL if mixer == "attention" else _LINEAR for mixer in mixers]
  return {"layer_types": types, "use_sliding_window": False, **shape}


# fmt: off
GATED_QKV = (
  layer("self_attn.q_proj.weight", "attention/q/kernel", "Hg D", "DHg"),
  *tensors.QKV[1:],
)
_OF_DELTA = (
  *joined(
    "linear_attn.conv1d.weight",
    "(ja,ja,jib) 1 w",
    {"delta/conv_q": "wja", "delta/conv_k": "wja", "delta/conv_v": "wjib"},
  ),
  layer("linear_attn.A_log", "delta/decay", "ji", "ji"),
  layer("linear_attn.dt_bias", "delta/decay_bias", "ji", "ji"),
  layer("linear_attn.norm.weight", "delta/norm_scale", "b", "b"),
  layer("linear_attn.out_proj.weight", "delta/out/kernel", "D jib", "jibD"),
)
_QKV = {
  "delta/in_proj_q/kernel": "Dja",
  "delta/in_proj_k/kernel": "Dja",
  "delta/in_proj_v/kernel": "Djib",
}
_IN_QWEN3_5 = (
  *joined("linear_attn.in_proj_qkv.weight", "(ja,ja,jib) D", _QKV),
  layer("linear_attn.in_proj_z.weight", "delta/in_proj_z/kernel", "jib D", "Djib"),
  layer("linear_attn.in_proj_b.weight", "delta/in_proj_b/kernel", "ji D", "Dji"),
  layer("linear_attn.in_proj_a.weight", "delta/in_proj_a/kernel", "ji D", "Dji"),
)
_IN_QWEN3_NEXT = (
  *joined(
    "linear_attn.in_proj_qkvz.weight",
    "j(a,a,ib,ib) D",
    {**_QKV, "delta/in_proj_z/kernel": "Djib"},
  ),
  *joined(
    "linear_attn.in_proj_ba.weight",
    "j(i,i) D",
    {"delta/in_proj_b/kernel": "Dji", "delta/in_proj_a/kernel": "Dji"},
  ),
)
_SHARED = (
  *tensors.mlp("mlp.shared_expert", "experts/shared", "s"),
  layer("mlp.shared_expert_gate.weight", "experts/shared_gate", "1 D", "D"),
)
# fmt: on
_ALL_LAYERS = (
  tensors.norms(tensors.PRE_NORMS, offset=1.0)
  + GATED_QKV
  + tensors.O
  + tensors.BIASES
  + tensors.qk_norms(offset=1.0)
  + _OF_DELTA
  + tensors.final_norm(offset=1.0)
)
_FIXED = {"mlp_bias": False, "qk_norm": "head", "output_gate": True}
_READS = frozenset({"full_attention_interval", *_SHAPE.values()}) | {
  *("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),  # for heads that are not read
}
_SUPPORTED = {
  "attn_output_gate": (True,),
  "output_gate_type": ("swish",),
  "mamba_ssm_dtype": ("float32",),
  "mlp_only_layers": ([], None),
}
_VARIES = ("mixers", "delta", "rotary_dim")
_EXPERT_FIELDS = qwen.EXPERT_FIELDS | {"shared_dim": "shared_expert_intermediate_size"}


def _read_qwen3_5_moe(values: Values, refuse: Refuse) -> dict[str, Any]:
  """Reads the mixers. All layers have experts."""
  return {**read_mixers(values, refuse), "sparse_layers": tuple(range(values["num_hidden_layers"]))}


def _read_qwen3_next(values: Values, refuse: Refuse) -> dict[str, Any]:
  sparse = qwen.read_sparse_layers(values, refuse)
  return {**read_mixers(values, refuse), "sparse_layers": sparse}


FAMILIES = (
  Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    _ALL_LAYERS + _IN_QWEN3_5 + tensors.MLP,
    _FIXED,
    tensors.BIAS_FIELDS,
    reads=_READS,
    read=read_mixers,
    write=write_mixers,
    varies=_VARIES,
    rotated=0.25,
    supported=_SUPPORTED,
    reward_prefix="Qwen3_5Text",
  ),
  Family(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    _ALL_LAYERS + _IN_QWEN3_5 + tensors.EXPERTS + _SHARED,
    _FIXED | {"shared_gate": True, "normalise_shares": True, "mlp_dim": 0},
    tensors.BIAS_FIELDS | {k: v for k, v in _EXPERT_FIELDS.items() if k != "normalise_shares"},
    reads=_READS | {"num_local_experts", "norm_topk_prob", "intermediate_size"},
    read=_read_qwen3_5_moe,
    write=write_mixers,
    varies=(*_VARIES, "sparse_layers"),
    rotated=0.25,
    supported=_SUPPORTED,
    reward_prefix="Qwen3_5MoeText",
  ),
  Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    _ALL_LAYERS + _IN_QWEN3_NEXT + tensors.MLP + tensors.EXPERTS + _SHARED,
    _FIXED | {"shared_gate": True},
    tensors.BIAS_FIELDS | _EXPERT_FIELDS,
    defaults={"norm_topk_prob": True},
    reads=_READS | qwen.EXPERT_READS,
    read=_read_qwen3_next,
    write=lambda config: write_mixers(config) | qwen.write_experts(config),
    varies=(*_VARIES, "sparse_layers"),
    rotated=0.25,
  ),
)
