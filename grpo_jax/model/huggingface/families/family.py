"""The record that describes a model family of Hugging Face as data."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
import dataclasses
import operator
from typing import Any

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.huggingface.config_fields import FIELDS, Refuse, Values
from grpo_jax.model.huggingface.families.layer_types import read_full
from grpo_jax.model.huggingface.tensor_spec import TensorSpec


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
    defaults: Fields of config.json that may be missing -> what transformers then takes.
    reads: The fields of config.json that `read` looks at, besides `config_fields.READ`.
    supported: Fields of config.json -> the values with which they do not change the mathematics.
    read: read(values, refuse) -> fields of ModelConfig, such as what differs from layer to layer.
    write: write(config) -> the fields of config.json for them.
    varies: The fields of ModelConfig that `read` or the rotary fields can set.
    rotated: The share of a head that is rotated if config.json does not say. None if models of the
      family rotate whole heads.
    has_local_rope: Layers with a window have rotary frequencies of their own.
    local_theta: The base of these frequencies if config.json does not say. None means that of the
      other layers.
    default_theta: The base of the other layers if config.json does not say. None: it must say.
    whole: The `model_type` of models of which this is the text part -> further `defaults` there.
    embedding: The embedding.
    head: The head. A checkpoint with tied embeddings does not have it.
    surplus: surplus(config) -> names of tensors that folders may have and no layer reads.
    reward_prefix: How the names of its reward models begin, if not as `architecture` does.
  """

  model_type: str
  architecture: str
  table: tuple[TensorSpec, ...]
  fixed: Mapping[str, Any]
  fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
  defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  reads: frozenset[str] = frozenset()
  supported: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
  read: Callable[[Values, Refuse], dict[str, Any]] = read_full
  write: Callable[[ModelConfig], dict[str, Any]] = lambda config: {}
  varies: tuple[str, ...] = ()
  rotated: float | None = None
  has_local_rope: bool = False
  local_theta: float | None = None
  default_theta: float | None = None
  whole: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
  embedding: TensorSpec = TensorSpec("model.embed_tokens.weight", "embed/embedding", "V D", "VD")
  head: TensorSpec = TensorSpec("lm_head.weight", "head/kernel", "V D", "DV")
  surplus: Callable[[ModelConfig], Collection[str]] = lambda config: ()
  reward_prefix: str = ""

  @property
  def all_fields(self) -> dict[str, str]:
    """Field of ModelConfig -> field of config.json, for all that have the same value in both."""
    return {k: v for k, v in {**FIELDS, **self.fields}.items() if k not in self.fixed}

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
        yield from _per_expert(_with_sizes_of(entry, layer, config), layer, config)
    if config.labels:
      yield from REWARD_HEADS[config.labels].tensors
    elif not config.tie_embeddings:
      yield self.head


def _layers_with(entry: TensorSpec, config: ModelConfig) -> Sequence[int]:
  """The layers that have the tensor. [0] for a tensor outside of the layers."""
  if not all(operator.attrgetter(name)(config) for name in entry.when):
    return []
  if entry.unless and operator.attrgetter(entry.unless)(config):
    return []
  if "{i}" not in entry.leaf_name:
    return [0]
  layers = range(config.num_layers)
  return [layer for layer in layers if entry.layers in config.kind(layer).parts]


def _with_sizes_of(entry: TensorSpec, layer: int, config: ModelConfig) -> TensorSpec:
  """The entry with the letters of the layer's own sizes (see `sizes`)."""
  if "{i}" not in entry.leaf_name:
    return entry
  kind = config.kind(layer)
  letters: dict[str, str] = {}
  if (kind.num_kv_heads, kind.head_dim) != (config.num_kv_heads, config.head_dim):
    letters |= {"K": "h", "E": "e"}
  if kind.mlp_dim != config.mlp_dim:
    letters |= {"F": "f"}
  own = str.maketrans(letters)
  return dataclasses.replace(
    entry, hf_axes=entry.hf_axes.translate(own), leaf_axes=entry.leaf_axes.translate(own)
  )


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
