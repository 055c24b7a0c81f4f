"""The record that describes a family of models with a vision tower as data."""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import operator
import re
from typing import Any

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.huggingface.config_fields import Refuse, Values
from grpo_jax.model.huggingface.tensor_spec import TensorSpec


@dataclasses.dataclass(frozen=True)
class VisionFamily:
  """A family of models with a text part, which is a family in families/, and a vision tower.

  Attributes:
    model_type: `model_type` in config.json.
    architecture: The name in `architectures` of config.json.
    text: The `model_type` of the entry of families.FAMILIES that describes the text part.
    text_type: The `model_type` in `text_config`.
    text_at: The prefix of the text part's tensors, in place of "model." in a language model.
    table: The tensors of the tower. {i} stands for the layer and {k} for the number of a level.
    fixed: Fields of VisionShape -> the values that they have in all models of the family.
    fields: Fields of VisionShape -> fields of `vision_config`.
    defaults: Fields of `vision_config` that may be missing -> the defaults of transformers.
    text_defaults: The same for `text_config`.
    supported: Further fields of `vision_config` -> the values with which they change nothing.
    others: Further fields that `VisionShape.others` keeps -> the defaults of transformers, or None.
      Names of fields of the tower begin with `vision_config.`.
    ignored: A regular expression for fields of config.json that change nothing. Names of nested
      fields are like "text_config.perceiver_config".
    read: read(values, vision_config, refuse) -> further fields of VisionShape. `values` is the
      whole config.json.
    write: write(config) -> the fields of `vision_config` from which `read` reads these.
    write_text: write_text(config) -> further fields of `text_config`.
    tied: By default, the embedding is also the head.
    text_table: The table of the text part in saved folders, if it differs from that of `text`.
    reads: The fields of `vision_config` that `read` uses.
    surplus: A regular expression for names of tensors that may exist although none is read.
  """

  model_type: str
  architecture: str
  text: str
  text_type: str
  text_at: str
  table: tuple[TensorSpec, ...]
  fixed: Mapping[str, Any]
  fields: Mapping[str, str]
  read: Callable[[Values, Values, Refuse], dict[str, Any]]
  write: Callable[[ModelConfig], dict[str, Any]]
  defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  text_defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  supported: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
  others: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  ignored: str = ""
  write_text: Callable[[ModelConfig], dict[str, Any]] = lambda config: {}
  tied: bool = False
  text_table: tuple[TensorSpec, ...] = ()
  reads: tuple[str, ...] = ()
  surplus: str = ""

  def tensors(self, config: ModelConfig) -> Iterator[TensorSpec]:
    """Yields the specs of all tensors of the tower, as `Family.tensors` does for a language model.

    It replaces {i} in the table's names by the number of each layer, and {k} by the number of each
    further level of visual tokens.
    """
    v = config.vision
    for entry in self.table:
      if not all(operator.attrgetter(name)(config) for name in entry.when):
        continue
      count = 1
      if "{i}" in entry.leaf_name:
        count = v.num_layers
      elif "{k}" in entry.leaf_name:
        count = len(v.level_layers)
      for number in range(count):
        names = dict(i=number, k=number)  # a name has at most one of them
        yield dataclasses.replace(
          entry, hf_name=entry.hf_name.format(**names), leaf_name=entry.leaf_name.format(**names)
        )

  def saved(self, spec: TensorSpec) -> TensorSpec:
    """The spec of a text or tower tensor with the tensor's name in a folder of the whole model."""
    if spec.leaf_name.startswith("vision/"):
      return spec
    return dataclasses.replace(spec, hf_name=re.sub(r"^model\.", self.text_at, spec.hf_name))


def layer(hf_name: str, leaf_name: str, hf_axes: str, leaf_axes: str, **options: Any) -> TensorSpec:
  """The table entry of a tower's tensor. `leaf_name` is relative to the tower's parameters."""
  return TensorSpec(hf_name, f"vision/{leaf_name}", hf_axes, leaf_axes, **options)


def dense(hf_name: str, leaf_name: str, inputs: str, outputs: str) -> tuple[TensorSpec, ...]:
  """The table entries of a projection's kernel and bias, with these axis letters."""
  return (
    layer(f"{hf_name}.weight", f"{leaf_name}/kernel", f"{outputs} {inputs}", inputs + outputs),
    layer(f"{hf_name}.bias", f"{leaf_name}/bias", outputs, outputs),
  )


def layer_norm(hf_name: str, leaf_name: str, letter: str = "W") -> tuple[TensorSpec, ...]:
  """The table entries of a norm's scale and bias. `letter` is their axis."""
  return rms_norm(hf_name, leaf_name, letter) + (
    layer(f"{hf_name}.bias", f"{leaf_name}/bias", letter, letter),
  )


def rms_norm(hf_name: str, leaf_name: str, letter: str = "W") -> tuple[TensorSpec, ...]:
  """The table entry of a norm's scale. `letter` is its axis."""
  return (layer(f"{hf_name}.weight", f"{leaf_name}/scale", letter, letter),)
