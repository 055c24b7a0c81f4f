"""The record that describes a model of Hugging Face with a vision tower as data."""

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
  """A model of Hugging Face: a text part, which is a family of families/, and a vision tower.

  Attributes:
    model_type: `model_type` in config.json.
    architecture: The name in `architectures` of config.json.
    text: The `model_type` of the family here that computes its text part.
    text_type: The `model_type` of its text part in `text_config`.
    text_at: How the names of the text part's tensors begin, where those of `text` begin "model.".
    table: The tensors of the tower. {i} stands for the layer and {k} for the number of a level.
    fixed: The fields of VisionShape that are the same for all its models.
    fields: Fields of VisionShape -> fields of `vision_config`.
    defaults: Fields of `vision_config` that may be missing -> what transformers then takes.
    text_defaults: The same for `text_config`.
    supported: Fields of `vision_config` -> the values with which they change no mathematics.
    others: `VisionShape.others` -> what transformers takes if they are missing.
    ignored: The fields of the whole config.json, "text_config" and "vision_config" included, that
      change nothing, as a pattern of names such as "text_config.perceiver_config".
    read: read(values, vision_config, refuse) -> further fields of VisionShape. `values` is the
      whole config.json.
    write: write(config) -> the fields of `vision_config` for them.
    write_text: write_text(config) -> further fields of `text_config`.
    tied: The embedding is the head if config.json does not say.
    text_table: The table of the text part in saved folders, where it is not that of `text`.
    reads: The fields of `vision_config` that `read` looks at.
    surplus: The tensors that folders may have and that nothing reads, as a pattern of names.
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
    """The spec of every leaf's tensor of the tower, as `Family.tensors` gives those of the text.

    In the table, {i} in a name stands for the number of a layer, and {k} for that of a further
    level of visual tokens.
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
        names = dict(i=number, k=number)
        yield dataclasses.replace(
          entry, hf_name=entry.hf_name.format(**names), leaf_name=entry.leaf_name.format(**names)
        )

  def saved(self, spec: TensorSpec) -> TensorSpec:
    """The spec of a tensor of text part or tower, with its name in the file of the whole."""
    if spec.leaf_name.startswith("vision/"):
      return spec
    return dataclasses.replace(spec, hf_name=re.sub(r"^model\.", self.text_at, spec.hf_name))


def layer(hf_name: str, leaf_name: str, hf_axes: str, leaf_axes: str, **options: Any) -> TensorSpec:
  """An entry of the table of a tower."""
  return TensorSpec(hf_name, f"vision/{leaf_name}", hf_axes, leaf_axes, **options)


def dense(hf_name: str, leaf_name: str, inputs: str, outputs: str) -> tuple[TensorSpec, ...]:
  """The kernel and the bias of a projection, whose axes are these letters."""
  return (
    layer(f"{hf_name}.weight", f"{leaf_name}/kernel", f"{outputs} {inputs}", inputs + outputs),
    layer(f"{hf_name}.bias", f"{leaf_name}/bias", outputs, outputs),
  )


def layer_norm(hf_name: str, leaf_name: str, letter: str = "W") -> tuple[TensorSpec, ...]:
  """The scale and the bias of a norm."""
  return rms_norm(hf_name, leaf_name, letter) + (
    layer(f"{hf_name}.bias", f"{leaf_name}/bias", letter, letter),
  )


def rms_norm(hf_name: str, leaf_name: str, letter: str = "W") -> tuple[TensorSpec, ...]:
  """The scale of a norm."""
  return (layer(f"{hf_name}.weight", f"{leaf_name}/scale", letter, letter),)
