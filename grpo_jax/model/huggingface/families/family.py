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
  """A head of reward models, which computes N numbers instead of logits.

  Attributes:
    ending: The suffix of the names of architectures with this head.
    tensors: The specs of the head's tensors.
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
    architecture: The name of the family's language model in `architectures` of config.json.
    table: The tensors, except the embedding and the head.
    fixed: Fields of ModelConfig -> the values that they have in all models of the family.
    fields: Fields of ModelConfig -> fields of config.json, in addition to `config_fields.FIELDS`.
    defaults: Fields of config.json that may be missing -> the defaults of transformers.
    reads: The fields of config.json that `read` uses, in addition to `config_fields.READ`.
    supported: Further fields of config.json -> the values with which they change nothing.
    read: read(values, refuse) -> further fields of ModelConfig, such as those with a value for each
      layer. `values` are the fields of config.json, with defaults.
    write: write(config) -> the fields of config.json from which `read` reads these.
    varies: The fields of ModelConfig that `read` or the rotary fields can set.
    rotated: The default share of a head that is rotated. None if models of the family always rotate
      whole heads.
    has_local_rope: Layers with a window have different rotary frequencies.
    local_theta: The default base of these frequencies. None means the base of the other layers.
    default_theta: The default base of the other layers. None: config.json must state it.
    whole: The `model_type` of models whose text part is of this family -> further `defaults` there.
    embedding: The spec of the embedding.
    head: The spec of the head. A checkpoint with tied embeddings has no head.
    surplus: surplus(config) -> names of tensors that checkpoints may have although none is read.
    reward_prefix: The prefix of its reward models' names, if it differs from `architecture`'s.
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
    """Fields of ModelConfig -> the fields of config.json that have the same values."""
    return {k: v for k, v in {**FIELDS, **self.fields}.items() if k not in self.fixed}

  def architecture_with(self, labels: int) -> str:
    """The name in `architectures` for a model with this value of `ModelConfig.labels`."""
    if not labels:
      return self.architecture
    beginning = self.reward_prefix or self.architecture.removesuffix("ForCausalLM")
    return beginning + REWARD_HEADS[labels].ending

  def tensors(self, config: ModelConfig) -> Iterator[TensorSpec]:
    """Yields the specs of all tensors of a model, for the layers and experts that it has.

    A tensor that holds several leaves has a spec for each leaf, in the order of the tensor. A leaf
    that holds several experts has a spec for each expert, in consecutive order.
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
  """The layers of a model that have the tensor, or [0] for a tensor outside of the layers."""
  if not all(operator.attrgetter(name)(config) for name in entry.when):
    return []
  if entry.unless and operator.attrgetter(entry.unless)(config):
    return []
  if "{i}" not in entry.leaf_name:
    return [0]
  layers = range(config.num_layers)
  return [layer for layer in layers if entry.layers in config.kind(layer).parts]


def _with_sizes_of(entry: TensorSpec, layer: int, config: ModelConfig) -> TensorSpec:
  """The entry with other axis letters where the layer's sizes differ from the model's (`sizes`)."""
  if "{i}" not in entry.leaf_name:
    return entry
  kind = config.kind(layer)
  letters: dict[str, str] = {}
  if (kind.num_kv_heads, kind.head_dim) != (config.num_kv_heads, config.head_dim):
    letters |= {"K": "h", "E": "e"}
  if kind.mlp_dim != config.mlp_dim:
    letters |= {"F": "f"}
  new = str.maketrans(letters)
  return dataclasses.replace(
    entry, hf_axes=entry.hf_axes.translate(new), leaf_axes=entry.leaf_axes.translate(new)
  )


def _per_expert(entry: TensorSpec, layer: int, config: ModelConfig) -> Iterator[TensorSpec]:
  """Yields the specs of one layer: one for each expert if the name has an {x}, otherwise one."""
  experts: Sequence[int | None] = range(config.num_experts) if "{x}" in entry.hf_name else [None]
  for expert in experts:
    yield dataclasses.replace(
      entry,
      hf_name=entry.hf_name.format(i=layer, x=expert),
      leaf_name=entry.leaf_name.format(i=layer),
      expert=expert,
    )
