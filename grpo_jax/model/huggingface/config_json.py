"""Turns Hugging Face's config.json into a ModelConfig, and back. Opens no file.

It reads the formats of transformers 4 and 5, and writes a format that both versions can read.
"""

from collections.abc import Collection, Mapping
import dataclasses
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.huggingface import fp8
from grpo_jax.model.huggingface.config_fields import (
  ACTIVATION_NAMES,
  OPTIONAL,
  Refuse,
  check_fields,
  read_field,
  read_quotient,
)
from grpo_jax.model.huggingface.families import FAMILIES, Family, family_of
from grpo_jax.model.huggingface.families.layer_types import window_of
from grpo_jax.model.huggingface.rope_json import read_rope, rope_to_json
from grpo_jax.model.huggingface.tensor_spec import TensorSpec
from grpo_jax.model.huggingface.text_part import has_other_parts, text_values
from grpo_jax.model.huggingface.vision import VISION, VisionFamily
from grpo_jax.model.huggingface.vision.vision_json import read_vision, whole_to_json
from grpo_jax.settings import ConfigError, shown

_MOST_LAYERS = 4096


def family_and_config(
  values: Mapping[str, Any], file: Path, labels: Collection[int] = (0,), vision: bool = False
) -> tuple[Family, ModelConfig]:
  """Finds the family of a model and its config from the object in config.json.

  Args:
    values: The object in config.json, for a language model or a model that also sees images.
    file: The file that it came from, for error messages.
    labels: The accepted values of `ModelConfig.labels`. 0 is the head of a language model.
    vision: Read the vision tower, too, if there is one.

  Raises:
    ConfigError: A field is missing, wrong or unknown, or needs mathematics that is not supported.
  """

  def refuse(key: str, reason: str) -> NoReturn:
    raise ConfigError(f"{file}: {key} {reason}")

  tower = None  # the VisionShape, or None if the model is read without a tower
  if has_other_parts(values):
    text = text_values(values, refuse)
    if vision and values["model_type"] in VISION:  # the text part is checked before the tower
      tower = read_vision(VISION[values["model_type"]], values, refuse)
    values = text
  family = FAMILIES.get(str(values.get("model_type")))
  if family is None:
    found = shown(values.get("model_type"))
    refuse("model_type", f"is {found}: choose a checkpoint of {', '.join(FAMILIES)}")
  head_labels = _read_labels(family, values, labels, refuse)
  of_family = {*family.all_fields.values(), *family.reads}
  check_fields(values, of_family, family.supported, refuse)
  if values.get("quantization_config") is not None:
    fp8.check(values["quantization_config"], refuse)
  values = _with_defaults(family, values, refuse)
  fields = _read_fields(family, values, refuse)
  _check_activation(family, values, refuse)
  fields |= read_rope(family, values, refuse)
  scaling = fields["rope_scaling"]
  if scaling and scaling.kind == "dynamic":
    # With dynamic scaling, config.json holds the longest text before the scaling.
    fields["max_positions"] = int(fields["max_positions"] * scaling.factor)
  experts, used = fields.get("num_experts", 0), fields.get("experts_per_token", 0)
  if used > experts:
    refuse("num_experts_per_tok", f"is {used}, of {experts} experts: correct either")
  fields |= family.read(values, refuse)
  config = ModelConfig(
    **fields,
    **family.fixed,
    family=family.model_type,
    vision=tower,
    labels=head_labels,
    stop_ids=read_stop_ids(values, file) or (),
  )
  return family, config


def _read_labels(
  family: Family, values: Mapping[str, Any], labels: Collection[int], refuse: Refuse
) -> int:
  """Reads `ModelConfig.labels` from the architecture and `id2label`. It must be among `labels`.

  A config without `architectures`, such as that of a text part, counts as one of a language model.
  """
  labels_of = {family.architecture_with(count): count for count in labels}
  found = values.get("architectures") or [family.architecture]
  names = [str(name) for name in found] if isinstance(found, list) else []
  architecture = next((name for name in names if name in labels_of), None)
  if architecture is None:
    named = shown(values.get("architectures"))
    refuse("architectures", f"is {named}: choose a checkpoint of {' or '.join(labels_of)}")
  id2label = values.get("id2label")
  # transformers, too, assumes 2 labels if the file has neither field.
  count = len(id2label) if isinstance(id2label, dict) else values.get("num_labels", 2)
  wanted = labels_of[architecture]
  if wanted not in (0, count):  # 0: a language model, to which the fields do not matter
    refuse("id2label", f"has {count} labels: choose a {architecture} with {wanted}")
  return wanted


def _with_defaults(family: Family, values: Mapping[str, Any], refuse: Refuse) -> dict[str, Any]:
  """Returns the fields of config.json, with the defaults of transformers for missing ones."""
  values = {"tie_word_embeddings": False, **family.defaults, **values}
  for name in ("attention_bias", "mlp_bias"):
    values[name] = False if values.get(name) is None else values[name]
  if "num_experts" in family.fields:
    key = family.fields["num_experts"]
    values[key] = _read_num_experts(values, key, refuse)
  if values.get("num_key_value_heads") is None:
    values["num_key_value_heads"] = values.get("num_attention_heads")
  if family.all_fields["head_dim"] == "head_dim" and values.get("head_dim") is None:
    values["head_dim"] = read_quotient(values, "hidden_size", "num_attention_heads", refuse)
  return values


def _read_fields(family: Family, values: Mapping[str, Any], refuse: Refuse) -> dict[str, Any]:
  """The fields of ModelConfig that equal a field of config.json, by their names in ModelConfig."""
  types = get_type_hints(ModelConfig)
  fields = {}
  for name, key in family.all_fields.items():
    if name in OPTIONAL and values.get(key) is None:
      fields[name] = 0.0
    else:
      fields[name] = read_field(values, key, types[name], refuse)
  if fields["num_layers"] > _MOST_LAYERS:
    refuse("num_hidden_layers", f"is {fields['num_layers']}, more than any model has: correct it")
  read_quotient(values, "num_attention_heads", "num_key_value_heads", refuse)
  return fields


def _check_activation(family: Family, values: Mapping[str, Any], refuse: Refuse) -> None:
  """Refuses an activation function other than the family's. The field may be absent."""
  activation = values.get("hidden_activation", values.get("hidden_act"))
  wanted = ACTIVATION_NAMES[family.fixed.get("activation", "silu")]
  if activation not in (None, *wanted):
    refuse(
      "hidden_act",
      f"is {activation!r}, which is not supported: choose a checkpoint with {wanted[0]!r}",
    )


def _read_num_experts(values: Mapping[str, Any], key: str, refuse: Refuse) -> int | None:
  """The number of experts from `key`, or transformers 5's field. None if both are absent."""
  found = [values[name] for name in (key, "num_local_experts") if name in values]
  if any(count != found[0] for count in found):
    refuse(key, f"and num_local_experts differ ({found}): correct one")
  return found[0] if found else None


def read_stop_ids(values: Mapping[str, Any], file: Path) -> tuple[int, ...] | None:
  """Reads `eos_token_id` of config.json or generation_config.json. None if it is absent or null."""
  eos = values.get("eos_token_id")
  if eos is None:
    return None
  ids = eos if isinstance(eos, list) else [eos]
  if any(type(i) is not int for i in ids):
    raise ConfigError(f"{file}: eos_token_id must be a token id or a list of them, got {eos!r}")
  return tuple(ids)


def config_to_json(config: ModelConfig) -> dict[str, Any]:
  """The object to write to config.json. Raises ConfigError if it cannot describe the model."""
  family = family_of(config)
  is_gelu = config.activation == "gelu_tanh"  # only Gemma has it, and calls it hidden_activation
  values = {
    "architectures": [family.architecture_with(config.labels)],
    "model_type": family.model_type,
    **{key: _optional(config, name) for name, key in family.all_fields.items()},
    **rope_to_json(config, family),
    "hidden_activation" if is_gelu else "hidden_act": ACTIVATION_NAMES[config.activation][0],
    "attention_dropout": 0.0,
    "sliding_window": window_of(config),
    **stop_ids_to_json(config),
    "pad_token_id": None,
    "torch_dtype": "float32",
  }
  if config.labels:
    values["id2label"] = {str(i): f"LABEL_{i}" for i in range(config.labels)}
  if config.query_scalar and config.query_scalar.is_integer():
    # transformers 5 accepts only an int here.
    values[family.fields["query_scalar"]] = int(config.query_scalar)
  if config.rope_scaling and config.rope_scaling.kind == "dynamic":
    # The longest text before the scaling, from which reading computes `max_positions`.
    values["max_position_embeddings"] = config.rope_scaling.original_positions
  values |= family.write(config)
  return values if config.vision is None else whole_to_json(whole_of(config), config, values)


def whole_of(config: ModelConfig) -> VisionFamily:
  """The `VisionFamily` of a model that has a vision tower."""
  return VISION[config.vision.family]


def all_tensors(config: ModelConfig) -> list[TensorSpec]:
  """The specs of all tensors. Text tensors have the names that they have in a language model."""
  specs = list(family_of(config).tensors(config))
  return specs + list(whole_of(config).tensors(config)) if config.vision else specs


def saved_tensors(config: ModelConfig) -> list[TensorSpec]:
  """The specs of all tensors, with the names and layout of a folder that transformers reads."""
  family = family_of(config)
  if config.vision is None:
    return list(family.tensors(config))
  whole = whole_of(config)
  if whole.text_table:
    family = dataclasses.replace(family, table=whole.text_table)
  return [whole.saved(spec) for spec in (*family.tensors(config), *whole.tensors(config))]


def _optional(config: ModelConfig, name: str) -> Any:
  """The value of a field of ModelConfig for config.json, where None stands for an optional 0."""
  value = getattr(config, name)
  return None if name in OPTIONAL and not value else value


def stop_ids_to_json(config: ModelConfig) -> dict[str, Any]:
  """The ids that end a text, for config.json and generation_config.json."""
  ids = list(config.stop_ids)
  if not ids:
    return {"eos_token_id": None}
  return {"eos_token_id": ids if len(ids) > 1 else ids[0]}
