"""What a model family and a kind of reward model are: which tensors their checkpoints have."""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
from typing import Any

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.huggingface.tensor_spec import TensorSpec


@dataclasses.dataclass(frozen=True)
class Scorer:
  """A kind of reward model: a decoder whose head computes N numbers instead of logits.

  Attributes:
    ending: How the names of its architectures end.
    tensors: The tensors of its head.
  """

  ending: str
  tensors: tuple[TensorSpec, ...]


_SCORE = TensorSpec("score.weight", "score/kernel", "N D", "DN")
_SCORE_BIAS = TensorSpec("score.bias", "score/bias", "N", "N")
SCORERS = {  # by ModelConfig.labels
  1: Scorer("ForSequenceClassification", (_SCORE,)),
  2: Scorer("ForTokenClassification", (_SCORE, _SCORE_BIAS)),
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
    scorer: How the names of its reward models begin, if not as `architecture` does.
  """

  model_type: str
  architecture: str
  table: tuple[TensorSpec, ...]
  fixed: Mapping[str, Any]
  fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
  embedding: TensorSpec = TensorSpec("model.embed_tokens.weight", "embed/embedding", "V D", "VD")
  head: TensorSpec = TensorSpec("lm_head.weight", "head/kernel", "V D", "DV")
  scorer: str = ""

  def architecture_with(self, labels: int) -> str:
    """The name of the architecture whose head has this many labels (see ModelConfig)."""
    if not labels:
      return self.architecture
    beginning = self.scorer or self.architecture.removesuffix("ForCausalLM")
    return beginning + SCORERS[labels].ending

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
      yield from SCORERS[config.labels].tensors
    elif not config.tie_embeddings:
      yield self.head


def _layers_with(entry: TensorSpec, config: ModelConfig) -> Sequence[int]:
  """The layers that have the tensor. [0] for a tensor outside of the layers."""
  if "{i}" not in entry.leaf_name:
    return [0]
  sparse = config.sparse_layers
  kinds = ["sparse" if layer in sparse else "dense" for layer in range(config.num_layers)]
  return [layer for layer, kind in enumerate(kinds) if entry.layers in ("all", kind)]


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
