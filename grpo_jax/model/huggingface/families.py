"""The model families: the names and axes of all tensors of a Hugging Face checkpoint, as tables.

A family is data. Its table drives both loading and saving.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import re
from typing import Any

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.huggingface.tensor_spec import TensorSpec
from grpo_jax.settings import ConfigError


@dataclasses.dataclass(frozen=True)
class RewardHead:
  """The head of a kind of reward model, which computes N numbers instead of logits.

  Attributes:
    ending: How the names of the architectures with it end.
    tensors: Its tensors.
  """

  ending: str
  tensors: tuple[TensorSpec, ...]


_SCORE = TensorSpec("score.weight", "score/kernel", "N D", "DN")
_SCORE_BIAS = TensorSpec("score.bias", "score/bias", "N", "N")
REWARD_HEADS = {  # by ModelConfig.labels
  1: RewardHead("ForSequenceClassification", (_SCORE,)),
  2: RewardHead("ForTokenClassification", (_SCORE, _SCORE_BIAS)),
}


@dataclasses.dataclass(frozen=True)
class Family:
  """A model family of Hugging Face.

  Attributes:
    model_type: `model_type` in config.json.
    architecture: The name of its language model in `architectures` of config.json.
    table: Its tensors apart from embedding and head.
    fixed: The fields of ModelConfig that are the same for all its models.
    fields: Fields of ModelConfig -> fields of config.json, in addition to `config_fields.FIELDS`.
    embedding: The embedding.
    head: The head. A checkpoint with tied embeddings does not have it.
    reward_prefix: How the names of its reward models begin, if not as `architecture` does.
  """

  model_type: str
  architecture: str
  table: tuple[TensorSpec, ...]
  fixed: Mapping[str, Any]
  fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
  embedding: TensorSpec = TensorSpec("model.embed_tokens.weight", "embed/embedding", "V D", "VD")
  head: TensorSpec = TensorSpec("lm_head.weight", "head/kernel", "V D", "DV")
  reward_prefix: str = ""

  def architecture_with(self, labels: int) -> str:
    """The name of the architecture whose head has this many labels (see ModelConfig)."""
    if not labels:
      return self.architecture
    beginning = self.reward_prefix or self.architecture.removesuffix("ForCausalLM")
    return beginning + REWARD_HEADS[labels].ending

  def tensors(self, config: ModelConfig) -> Iterator[TensorSpec]:
    """The spec of every leaf's tensor.

    A tensor that holds several leaves has a spec for each of them, in the order of the tensor. A
    leaf that holds several experts has a spec for each of them, one directly after another.
    """
    yield self.embedding
    for entry in self.table:
      for layer in _layers_with(entry, config):
        yield from _per_expert(entry, layer, config)
    if config.labels:
      yield from REWARD_HEADS[config.labels].tensors
    elif not config.tie_embeddings:
      yield self.head


def _layers_with(entry: TensorSpec, config: ModelConfig) -> Sequence[int]:
  """The layers that have the tensor. [0] for a tensor outside of the layers."""
  if "{i}" not in entry.leaf_name:
    return [0]
  if entry.when and not getattr(config, entry.when):
    return []
  kinds = [config.kind(layer) for layer in range(config.num_layers)]
  return [
    layer
    for layer, kind in enumerate(kinds)
    if entry.layers in ("all", kind.mixer, "sparse" if kind.sparse else "dense")
  ]


def _per_expert(entry: TensorSpec, layer: int, config: ModelConfig) -> Iterator[TensorSpec]:
  """The tensors of one layer: one for each expert if the name has an {x}, otherwise one."""
  experts: Sequence[int | None] = range(config.num_experts) if "{x}" in entry.hf_name else [None]
  for expert in experts:
    yield dataclasses.replace(
      entry,
      hf_name=entry.hf_name.format(i=layer, x=expert),
      leaf_name=entry.leaf_name.format(i=layer),
      expert=expert,
    )


def _layer(
  hf_name: str, leaf_name: str, hf_axes: str, leaf_axes: str, **options: Any
) -> TensorSpec:
  """The entry of a tensor that layers have."""
  for module, mixer in (("self_attn", "attention"), ("linear_attn", "delta")):
    if hf_name.startswith(module):
      options = {"layers": mixer, **options}
  return TensorSpec(
    f"model.layers.{{i}}.{hf_name}", f"layers_{{i}}/{leaf_name}", hf_axes, leaf_axes, **options
  )


def _norms(names: Mapping[str, str], offset: float = 0.0) -> tuple[TensorSpec, ...]:
  """The norms of a layer. `names` are names of leaves -> names of tensors."""
  return tuple(
    _layer(f"{hf_name}.weight", f"{leaf_name}/scale", "D", "D", offset=offset)
    for leaf_name, hf_name in names.items()
  )


def _qk_norms(offset: float = 0.0) -> tuple[TensorSpec, ...]:
  return (
    _layer("self_attn.q_norm.weight", "attention/q_norm/scale", "E", "E", offset=offset),
    _layer("self_attn.k_norm.weight", "attention/k_norm/scale", "E", "E", offset=offset),
  )


_WHOLE_QK_NORMS = (
  _layer("self_attn.q_norm.weight", "attention/q_norm/scale", "HE", "HE"),
  _layer("self_attn.k_norm.weight", "attention/k_norm/scale", "KE", "KE"),
)


def _final_norm(offset: float = 0.0) -> tuple[TensorSpec, ...]:
  return (TensorSpec("model.norm.weight", "final_norm/scale", "D", "D", offset=offset),)


# Leaf -> tensor. Most families normalise before attention and MLP, OLMo after, and Gemma both.
_PRE_NORMS = {
  "attention_norm": "input_layernorm",
  "mlp_norm": "post_attention_layernorm",
}
_OUTER_NORMS = {
  "attention_post_norm": "post_attention_layernorm",
  "mlp_post_norm": "post_feedforward_layernorm",
}
_SANDWICH_NORMS = {
  "attention_norm": "input_layernorm",
  "attention_post_norm": "post_attention_layernorm",
  "mlp_norm": "pre_feedforward_layernorm",
  "mlp_post_norm": "post_feedforward_layernorm",
}
# fmt: off
_QKV = (
  _layer("self_attn.q_proj.weight", "attention/q/kernel", "HE D", "DHE"),
  _layer("self_attn.k_proj.weight", "attention/k/kernel", "KE D", "DKE"),
  _layer("self_attn.v_proj.weight", "attention/v/kernel", "KE D", "DKE"),
)
_QKV_BIASES = (
  _layer("self_attn.q_proj.bias", "attention/q/bias", "HE", "HE", when="qkv_bias"),
  _layer("self_attn.k_proj.bias", "attention/k/bias", "KE", "KE", when="qkv_bias"),
  _layer("self_attn.v_proj.bias", "attention/v/bias", "KE", "KE", when="qkv_bias"),
)
_BIASES = _QKV_BIASES + (
  _layer("self_attn.o_proj.bias", "attention/o/bias", "D", "D", when="o_bias"),
)
_MLP_BIASES = (
  _layer("mlp.gate_proj.bias", "mlp/gate/bias", "F", "F", when="mlp_bias"),
  _layer("mlp.up_proj.bias", "mlp/up/bias", "F", "F", when="mlp_bias"),
  _layer("mlp.down_proj.bias", "mlp/down/bias", "D", "D", when="mlp_bias"),
)
_FUSED_QKV = (
  _layer("self_attn.qkv_proj.weight", "attention/q/kernel", "(HE,KE,KE) D", "DHE"),
  _layer("self_attn.qkv_proj.weight", "attention/k/kernel", "(HE,KE,KE) D", "DKE", part=1),
  _layer("self_attn.qkv_proj.weight", "attention/v/kernel", "(HE,KE,KE) D", "DKE", part=2),
)
_GATED_QKV = (
  _layer("self_attn.q_proj.weight", "attention/q/kernel", "Hg D", "DHg"),
  *_QKV[1:],
)
_DELTA = (
  _layer("linear_attn.conv1d.weight", "delta/conv", "c 1 w", "wc"),
  _layer("linear_attn.A_log", "delta/decay", "v", "v"),
  _layer("linear_attn.dt_bias", "delta/decay_bias", "v", "v"),
  _layer("linear_attn.norm.weight", "delta/norm_scale", "b", "b"),
  _layer("linear_attn.out_proj.weight", "delta/out_proj/kernel", "D vb", "vbD"),
  _layer("linear_attn.in_proj_qkv.weight", "delta/in_proj_qkv/kernel", "c D", "Dc"),
  _layer("linear_attn.in_proj_z.weight", "delta/in_proj_z/kernel", "vb D", "Dvb"),
  _layer("linear_attn.in_proj_b.weight", "delta/in_proj_b/kernel", "v D", "Dv"),
  _layer("linear_attn.in_proj_a.weight", "delta/in_proj_a/kernel", "v D", "Dv"),
)
_O = (
  _layer("self_attn.o_proj.weight", "attention/o/kernel", "D HE", "HED"),
)
_GATE_UP = (
  _layer("mlp.gate_proj.weight", "mlp/gate/kernel", "F D", "DF", layers="dense"),
  _layer("mlp.up_proj.weight", "mlp/up/kernel", "F D", "DF", layers="dense"),
)
_FUSED_GATE_UP = (
  _layer("mlp.gate_up_proj.weight", "mlp/gate/kernel", "(F,F) D", "DF"),
  _layer("mlp.gate_up_proj.weight", "mlp/up/kernel", "(F,F) D", "DF", part=1),
)
_DOWN = (
  _layer("mlp.down_proj.weight", "mlp/down/kernel", "D F", "FD", layers="dense"),
)
_EXPERTS = (
  _layer("mlp.gate.weight", "experts/router", "X D", "DX", layers="sparse"),
  _layer("mlp.experts.{x}.gate_proj.weight", "experts/gate", "M D", "DM", layers="sparse"),
  _layer("mlp.experts.{x}.up_proj.weight", "experts/up", "M D", "DM", layers="sparse"),
  _layer("mlp.experts.{x}.down_proj.weight", "experts/down", "D M", "MD", layers="sparse"),
)
# fmt: on
_PROJECTIONS = _QKV + _O + _GATE_UP + _DOWN
_FUSED_PROJECTIONS = _FUSED_QKV + _O + _FUSED_GATE_UP + _DOWN

_NO_BIAS = {"qkv_bias": False, "o_bias": False, "mlp_bias": False}
_GEMMA = {
  "mlp_bias": False,
  "activation": "gelu_tanh",
  "post_norms": True,
  "scale_embeddings": True,
}
# Field of ModelConfig -> field of config.json:
_BIAS_FIELDS = {"qkv_bias": "attention_bias", "o_bias": "attention_bias"}
_ALL_BIAS_FIELDS = _BIAS_FIELDS | {"mlp_bias": "mlp_bias"}
_GEMMA_FIELDS = {
  **_BIAS_FIELDS,
  "query_scalar": "query_pre_attn_scalar",
  "attention_cap": "attn_logit_softcapping",
  "logit_cap": "final_logit_softcapping",
}
_EXPERT_FIELDS = {
  "num_experts": "num_experts",
  "experts_per_token": "num_experts_per_tok",
  "expert_dim": "moe_intermediate_size",
  "normalise_shares": "norm_topk_prob",
}

_GRANITE_FIELDS = {
  **_ALL_BIAS_FIELDS,
  "embedding_multiplier": "embedding_multiplier",
  "residual_multiplier": "residual_multiplier",
  "query_multiplier": "attention_multiplier",
  "logit_divisor": "logits_scaling",
}
_OLMO_TABLE = _norms(_OUTER_NORMS) + _PROJECTIONS + _BIASES + _WHOLE_QK_NORMS + _final_norm()
_OLMO = {"mlp_bias": False, "pre_norms": False, "post_norms": True, "qk_norm": "all"}
_QWEN3 = {"mlp_bias": False, "qk_norm": "head"}
_LLAMA_TABLE = _norms(_PRE_NORMS) + _PROJECTIONS + _BIASES + _MLP_BIASES + _final_norm()
_ALL = (
  Family(
    "qwen2",
    "Qwen2ForCausalLM",
    _norms(_PRE_NORMS) + _PROJECTIONS + _QKV_BIASES + _final_norm(),
    {"qkv_bias": True, "o_bias": False, "mlp_bias": False},
  ),
  Family(
    "qwen3",
    "Qwen3ForCausalLM",
    _norms(_PRE_NORMS) + _PROJECTIONS + _BIASES + _qk_norms() + _final_norm(),
    _QWEN3,
    _BIAS_FIELDS,
  ),
  Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    _norms(_PRE_NORMS) + _PROJECTIONS + _BIASES + _EXPERTS + _qk_norms() + _final_norm(),
    _QWEN3,
    _EXPERT_FIELDS | _BIAS_FIELDS,
  ),
  Family("llama", "LlamaForCausalLM", _LLAMA_TABLE, {}, _ALL_BIAS_FIELDS),
  Family("mistral", "MistralForCausalLM", _LLAMA_TABLE, _NO_BIAS),
  Family("ministral3", "Ministral3ForCausalLM", _LLAMA_TABLE, _NO_BIAS),
  Family("smollm3", "SmolLM3ForCausalLM", _LLAMA_TABLE, {}, _ALL_BIAS_FIELDS),
  Family("granite", "GraniteForCausalLM", _LLAMA_TABLE, {}, _GRANITE_FIELDS),
  Family("olmo2", "Olmo2ForCausalLM", _OLMO_TABLE, _OLMO, _BIAS_FIELDS),
  Family("olmo3", "Olmo3ForCausalLM", _OLMO_TABLE, _OLMO, _BIAS_FIELDS),
  Family(
    "phi3",
    "Phi3ForCausalLM",
    _norms(_PRE_NORMS) + _FUSED_PROJECTIONS + _final_norm(),
    _NO_BIAS,
  ),
  Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    _norms(_PRE_NORMS, offset=1.0)
    + _GATED_QKV
    + _O
    + _GATE_UP
    + _DOWN
    + _BIASES
    + _qk_norms(offset=1.0)
    + _DELTA
    + _final_norm(offset=1.0),
    _QWEN3 | {"output_gate": True},
    _BIAS_FIELDS,
    reward_prefix="Qwen3_5",
  ),
  Family(
    "gemma2",
    "Gemma2ForCausalLM",
    _norms(_SANDWICH_NORMS, offset=1.0) + _PROJECTIONS + _BIASES + _final_norm(offset=1.0),
    _GEMMA,
    _GEMMA_FIELDS,
  ),
  Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    _norms(_SANDWICH_NORMS, offset=1.0)
    + _PROJECTIONS
    + _BIASES
    + _qk_norms(offset=1.0)
    + _final_norm(offset=1.0),
    _GEMMA | {"qk_norm": "head"},
    _GEMMA_FIELDS,
    reward_prefix="Gemma3Text",
  ),
)
FAMILIES = {family.model_type: family for family in _ALL}
# Tensors that can be ignored: what config.json determines, and heads that guess further tokens.
HARMLESS = re.compile(r"rotary_emb\.inv_freq$|^mtp\.")


# What only some families have, and those that say so in another way than by a field of their own.
_ONLY_IN: dict[str, tuple[str, ...]] = {
  **dict.fromkeys(("o_bias", "mlp_bias", "qk_norm", "pre_norms", "post_norms"), ()),
  **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "query_multiplier"), ()),
  "logit_divisor": (),
  "unrotated_layers": ("smollm3",),
  "rotary_dim": ("phi3", "qwen3_5_text"),
  **dict.fromkeys(("mixers", "delta"), ("qwen3_5_text",)),
  "output_gate": (),
  "query_growth": ("ministral3",),
}


def sizes(config: ModelConfig) -> dict[str, int]:
  """The length of each axis letter."""
  delta = config.delta
  of_delta = {}
  if delta:
    of_delta = {"c": delta.channels, "v": delta.value_heads, "b": delta.value_dim, "w": delta.width}
  return {
    **of_delta,
    "g": 2 * config.head_dim,  # a query and its gate
    "V": config.vocab_size,
    "D": config.embed_dim,
    "H": config.num_heads,
    "K": config.num_kv_heads,
    "E": config.head_dim,
    "F": config.mlp_dim,
    "X": config.num_experts,
    "M": config.expert_dim,
    "N": config.labels,
  }


def family_of(config: ModelConfig) -> Family:
  """The family that a model is saved as. Raises ConfigError if no family has such models."""
  family = FAMILIES.get(config.family)
  if family is None:
    raise _unknown_model(f"family={config.family!r}")
  for name, value in family.fixed.items():
    if getattr(config, name) != value:
      raise _unknown_model(f"{name}={getattr(config, name)}")
  for name, families in _ONLY_IN.items():
    value = getattr(config, name)
    is_known = name in (*family.fixed, *family.fields) or family.model_type in families
    if value != ModelConfig.__dataclass_fields__[name].default and not is_known:
      raise _unknown_model(f"family={config.family!r} and {name}={value}")
  if "o_bias" in family.fields and config.o_bias != config.qkv_bias:  # config.json has one field
    raise _unknown_model(f"qkv_bias={config.qkv_bias} and o_bias={config.o_bias}")
  return family


def _unknown_model(description: str) -> ConfigError:
  return ConfigError(
    f"a model with {description} has no Hugging Face family here: it cannot be saved"
  )
