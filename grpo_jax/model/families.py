"""Hugging Face's names for the tensors of a decoder. Reads and writes nothing.

A family is data: rows of (their name, our path, their axes, our axes) that drive both loading and saving. Axes are the
letters of grpo_jax/types.py; "HE D" is a matrix whose rows run over H and, within it, E.
"""

import dataclasses
import math
import re
from typing import Any, Iterator, Mapping

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from grpo_jax.model.config import ModelConfig
from grpo_jax.settings import ConfigError

Array = np.ndarray | jax.Array


@dataclasses.dataclass(frozen=True)
class Row:
  """One tensor, or with {i} one per layer; or the part of their tensor's first axis between `before` and `after`.

  With {x} they have one per expert: ours has all of them, on a first axis that our_axes does not name.
  """

  theirs: str
  ours: str
  their_axes: str
  our_axes: str
  offset: float = 0.0  # added to theirs: a norm that multiplies by 1 + w
  before: str = ""  # such as "HE KE": what their tensor holds of other rows
  after: str = ""
  layers: str = "all"  # that have it: all, dense (with an MLP) or sparse (with experts)
  expert: int | None = None  # which one of ours it is

  def their_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Of the part."""
    return tuple(math.prod(sizes[a] for a in axis) for axis in self.their_axes.split())

  def our_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Of all experts, where there are."""
    return tuple(sizes[a] for a in ("" if self.expert is None else "X") + self.our_axes)

  def part(self, sizes: Mapping[str, int]) -> tuple[int, int, int]:
    """(start, end, length of the whole) along the first axis of their tensor."""
    length = lambda axes: sum(math.prod(sizes[a] for a in axis) for axis in axes.split())
    start, own = length(self.before), self.their_shape(sizes)[0]
    return start, start + own, start + own + length(self.after)

  def their_sharding(self, ours: NamedSharding) -> NamedSharding:
    """Where each device reads what it holds of ours."""
    expert = () if self.expert is None else ours.spec[:1]
    axes = dict(zip(self.our_axes, ours.spec[len(expert) :]))
    return NamedSharding(
      ours.mesh, PartitionSpec(*expert, *(axes[group[0]] for group in self.their_axes.split()))
    )

  def from_theirs(self, array: Array, sizes: Mapping[str, int]) -> Array:
    """`array` has all experts' on a first axis, where there are."""
    first = "" if self.expert is None else "X"
    axes = first + self.their_axes.replace(" ", "")
    array = array.reshape([sizes[a] for a in axes]).transpose(
      [axes.index(a) for a in first + self.our_axes]
    )
    return array + np.float32(self.offset) if self.offset else array

  def to_theirs(self, array: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
    """Of one expert, where there are."""
    axes = self.their_axes.replace(" ", "")
    array = array - np.float32(self.offset) if self.offset else array
    array = array.transpose([self.our_axes.index(a) for a in axes]).reshape(self.their_shape(sizes))
    return np.ascontiguousarray(array)


@dataclasses.dataclass(frozen=True)
class Scorer:
  """A reward model: a decoder whose head gives numbers in place of logits."""

  ending: str  # of the name of its architecture
  rows: tuple[Row, ...]  # of its head


_SCORE = Row("score.weight", "score/kernel", "N D", "DN")
SCORERS = {  # ModelConfig.labels
  1: Scorer("ForSequenceClassification", (_SCORE,)),
  2: Scorer("ForTokenClassification", (_SCORE, Row("score.bias", "score/bias", "N", "N"))),
}


@dataclasses.dataclass(frozen=True)
class Family:
  model_type: str
  architecture: str
  rows: tuple[Row, ...]
  fixed: Mapping[str, Any]  # fields of ModelConfig that all its models share
  fields: Mapping[str, str] = dataclasses.field(default_factory=dict)  # ours: theirs, beside FIELDS
  embedding: Row = Row("model.embed_tokens.weight", "embed/embedding", "V D", "VD")
  head: Row = Row("lm_head.weight", "head/kernel", "V D", "DV")  # absent where embeddings are tied
  scorer: str = ""  # how architectures of its reward models begin; "" = as `architecture` does

  def architecture_with(self, labels: int) -> str:
    """With the head of ModelConfig.labels."""
    begins = self.scorer or self.architecture.removesuffix("ForCausalLM")
    return begins + SCORERS[labels].ending if labels else self.architecture

  def tensors(self, config: ModelConfig) -> Iterator[Row]:
    """Every tensor of a model, or part of one, a row each; parts of one in their order."""
    yield self.embedding
    for row in self.rows:
      for i in _layers(row, config):
        for x in range(config.num_experts) if "{x}" in row.theirs else (None,):
          yield dataclasses.replace(
            row, theirs=row.theirs.format(i=i, x=x), ours=row.ours.format(i=i), expert=x
          )
    if config.labels:
      yield from SCORERS[config.labels].rows
    elif not config.tie_embeddings:
      yield self.head


def _layers(row, config):
  if "{i}" not in row.ours:
    return [0]
  return [
    i
    for i in range(config.num_layers)
    if row.layers in ("all", "sparse" if i in config.sparse_layers else "dense")
  ]


def _layer(theirs, ours, their_axes, our_axes, **more):
  return Row(f"model.layers.{{i}}.{theirs}", f"layers_{{i}}/{ours}", their_axes, our_axes, **more)


def _norms(offset=0.0, **names):
  return tuple(
    _layer(f"{theirs}.weight", f"{ours}/scale", "D", "D", offset=offset)
    for ours, theirs in names.items()
  )


def _qk_norms(offset=0.0):
  return tuple(
    _layer(f"self_attn.{n}_norm.weight", f"attention/{n}_norm/scale", "E", "E", offset=offset)
    for n in "qk"
  )


def _final_norm(offset=0.0):
  return (Row("model.norm.weight", "final_norm/scale", "D", "D", offset=offset),)


_PRE = dict(attention_norm="input_layernorm", mlp_norm="post_attention_layernorm")
_SANDWICH = dict(
  attention_norm="input_layernorm",
  attention_post_norm="post_attention_layernorm",
  mlp_norm="pre_feedforward_layernorm",
  mlp_post_norm="post_feedforward_layernorm",
)
_QKV = tuple(
  _layer(f"self_attn.{n}_proj.weight", f"attention/{n}/kernel", f"{heads}E D", f"D{heads}E")
  for n, heads in (("q", "H"), ("k", "K"), ("v", "K"))
)
_BIASES = tuple(
  _layer(f"self_attn.{n}_proj.bias", f"attention/{n}/bias", f"{heads}E", f"{heads}E")
  for n, heads in (("q", "H"), ("k", "K"), ("v", "K"))
)
_O = (_layer("self_attn.o_proj.weight", "attention/o/kernel", "D HE", "HED"),)
_MLP = (
  _layer("mlp.gate_proj.weight", "mlp/gate/kernel", "F D", "DF", layers="dense"),
  _layer("mlp.up_proj.weight", "mlp/up/kernel", "F D", "DF", layers="dense"),
)
_DOWN = (_layer("mlp.down_proj.weight", "mlp/down/kernel", "D F", "FD", layers="dense"),)
_EXPERTS = (
  _layer("mlp.gate.weight", "experts/router", "X D", "DX", layers="sparse"),
  _layer("mlp.experts.{x}.gate_proj.weight", "experts/gate", "M D", "DM", layers="sparse"),
  _layer("mlp.experts.{x}.up_proj.weight", "experts/up", "M D", "DM", layers="sparse"),
  _layer("mlp.experts.{x}.down_proj.weight", "experts/down", "D M", "MD", layers="sparse"),
)
_FUSED_QKV = (
  _layer("self_attn.qkv_proj.weight", "attention/q/kernel", "HE D", "DHE", after="KE KE"),
  _layer("self_attn.qkv_proj.weight", "attention/k/kernel", "KE D", "DKE", before="HE", after="KE"),
  _layer("self_attn.qkv_proj.weight", "attention/v/kernel", "KE D", "DKE", before="HE KE"),
)
_FUSED_MLP = (
  _layer("mlp.gate_up_proj.weight", "mlp/gate/kernel", "F D", "DF", after="F"),
  _layer("mlp.gate_up_proj.weight", "mlp/up/kernel", "F D", "DF", before="F"),
)
_PLAIN = _QKV + _O + _MLP + _DOWN
_GEMMA = dict(qkv_bias=False, activation="gelu_tanh", post_norms=True, scale_embeddings=True)
_CAPS = {
  "query_scalar": "query_pre_attn_scalar",
  "attention_cap": "attn_logit_softcapping",
  "logit_cap": "final_logit_softcapping",
}
_MIXTURE = {
  "num_experts": "num_experts",
  "experts_per_token": "num_experts_per_tok",
  "expert_dim": "moe_intermediate_size",
  "normalise_shares": "norm_topk_prob",
}

FAMILIES = {
  family.model_type: family
  for family in (
    Family(
      "qwen2",
      "Qwen2ForCausalLM",
      _norms(**_PRE) + _PLAIN + _BIASES + _final_norm(),
      dict(qkv_bias=True),
    ),
    Family(
      "qwen3",
      "Qwen3ForCausalLM",
      _norms(**_PRE) + _PLAIN + _qk_norms() + _final_norm(),
      dict(qkv_bias=False, qk_norm=True),
    ),
    Family(
      "qwen3_moe",
      "Qwen3MoeForCausalLM",
      _norms(**_PRE) + _PLAIN + _EXPERTS + _qk_norms() + _final_norm(),
      dict(qkv_bias=False, qk_norm=True),
      _MIXTURE,
    ),
    Family(
      "llama", "LlamaForCausalLM", _norms(**_PRE) + _PLAIN + _final_norm(), dict(qkv_bias=False)
    ),
    Family(
      "mistral", "MistralForCausalLM", _norms(**_PRE) + _PLAIN + _final_norm(), dict(qkv_bias=False)
    ),
    Family(
      "phi3",
      "Phi3ForCausalLM",
      _norms(**_PRE) + _FUSED_QKV + _O + _FUSED_MLP + _DOWN + _final_norm(),
      dict(qkv_bias=False),
    ),
    Family(
      "gemma2",
      "Gemma2ForCausalLM",
      _norms(1.0, **_SANDWICH) + _PLAIN + _final_norm(1.0),
      _GEMMA,
      _CAPS,
    ),
    Family(
      "gemma3_text",
      "Gemma3ForCausalLM",
      _norms(1.0, **_SANDWICH) + _PLAIN + _qk_norms(1.0) + _final_norm(1.0),
      dict(_GEMMA, qk_norm=True),
      _CAPS,
      scorer="Gemma3Text",
    ),
  )
}
HARMLESS = re.compile(
  r"rotary_emb\.inv_freq$"
)  # tensors of old checkpoints that follow from config.json


def sizes(config: ModelConfig) -> dict[str, int]:
  """Axis letter -> length."""
  return dict(
    V=config.vocab_size,
    D=config.embed_dim,
    H=config.num_heads,
    K=config.num_kv_heads,
    E=config.head_dim,
    F=config.mlp_dim,
    X=config.num_experts,
    M=config.expert_dim,
    N=config.labels,
  )


def family_of(config: ModelConfig) -> Family:
  """The family a model of this config is saved as."""
  family = FAMILIES.get(config.family)
  wrong = (
    [f"family={config.family!r}"]
    if family is None
    else [
      f"{name}={getattr(config, name)}"
      for name, value in family.fixed.items()
      if getattr(config, name) != value
    ]
  )
  if wrong:
    raise ConfigError(
      f"a model with {wrong[0]} has no Hugging Face family here: it cannot be saved"
    )
  return family
