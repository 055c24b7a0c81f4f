"""Reads and writes the fields of config.json that describe a vision tower."""

from collections.abc import Mapping
import re
from typing import Any, NoReturn, get_type_hints

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.huggingface.config_fields import (
  ACTIVATION_NAMES,
  Refuse,
  check_fields,
  read_field,
)
from grpo_jax.model.huggingface.vision.vision_family import VisionFamily
from grpo_jax.model.vision_shape import VisionShape
from grpo_jax.settings import shown

_OF_TOWER = "vision_config."
_ACTIVATIONS = ("hidden_act", "hidden_activation")
_MOST_LAYERS = 4096
# Top-level fields of config.json that are read elsewhere.
_OF_WHOLE = {"text_config", "vision_config", "model_type", "architectures", "tie_word_embeddings"}
# Top-level fields -> the values with which they change nothing. Qwen3.5's checkpoints have this.
_WHOLE_SUPPORTED = {"language_model_only": (False,)}
_HARMLESS = r"vision_config\.(model_type|tie_word_embeddings|architectures|attention_dropout)"


def read_vision(family: VisionFamily, values: Mapping[str, Any], refuse: Refuse) -> VisionShape:
  """Reads the shape of the tower. `values` is the whole object in config.json."""
  found = values.get("vision_config")
  if not isinstance(found, dict):
    refuse("vision_config", f"must be an object, got {shown(found)}")

  def refuse_of_tower(key: str, reason: str) -> NoReturn:
    # All keys of the tower are in `vision_config`, except this one, which belongs to the text.
    refuse(key if key == "mrope_section" else _OF_TOWER + key, reason)

  vision = {**family.defaults, **found}
  _check(family, values, vision, refuse, refuse_of_tower)
  types, fields = get_type_hints(VisionShape), {}
  for name, key in family.fields.items():
    fields[name] = read_field(vision, key, types[name], refuse_of_tower)
  if fields["num_layers"] > _MOST_LAYERS:
    refuse_of_tower(family.fields["num_layers"], "is more than any model has: correct it")
  if fields["dim"] % fields["num_heads"]:
    key = family.fields["dim"]
    refuse_of_tower(key, f"({fields['dim']}) must be a multiple of the heads")
  fields |= family.read(values, vision, refuse_of_tower)
  others = {key: _other(values, vision, key, default) for key, default in family.others.items()}
  other_fields = tuple((key, value) for key, value in others.items() if value is not None)
  return VisionShape(family=family.model_type, others=other_fields, **family.fixed, **fields)


def _check(
  family: VisionFamily,
  values: Mapping[str, Any],
  vision: Mapping[str, Any],
  refuse: Refuse,
  refuse_of_tower: Refuse,
) -> None:
  """Refuses unknown or unsupported fields, in `vision_config` and at the top level of config.json.

  `values` is the whole config.json, and `vision` its `vision_config` with defaults.
  `refuse_of_tower` takes keys of `vision_config`.
  """
  others_of_tower = {
    name.removeprefix(_OF_TOWER) for name in family.others if name.startswith(_OF_TOWER)
  }
  reads = {*family.fields.values(), *family.reads, *others_of_tower, *_ACTIVATIONS}
  pattern = re.compile("|".join(filter(None, (_HARMLESS, family.ignored))))
  of_tower = {k: v for k, v in vision.items() if not pattern.fullmatch(_OF_TOWER + k)}
  check_fields(of_tower, reads, family.supported, refuse_of_tower)
  wanted = ACTIVATION_NAMES[family.fixed["activation"]]
  for name in _ACTIVATIONS:
    if vision.get(name, wanted[0]) not in wanted:
      refuse_of_tower(name, f"is {shown(vision[name])}: towers of this family have {wanted[0]!r}")
  if "text_config" in values:  # otherwise the top level holds the fields of the text part
    rest = {k: v for k, v in values.items() if k not in _OF_WHOLE and not pattern.fullmatch(k)}
    check_fields(rest, {*family.others}, _WHOLE_SUPPORTED, refuse)


def _other(values: Mapping[str, Any], vision: Mapping[str, Any], name: str, default: Any) -> Any:
  """The value for `VisionShape.others`: a top-level field, or one of `vision_config` by prefix."""
  of_tower = name.startswith(_OF_TOWER)
  found = (vision if of_tower else values).get(name.removeprefix(_OF_TOWER), default)
  return tuple(found) if isinstance(found, list) else found


def whole_to_json(
  family: VisionFamily, config: ModelConfig, text: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the object to write to config.json for a model with a vision tower.

  Args:
    family: The family of the whole model.
    config: The model.
    text: The object that config.json of the text part alone would hold.
  """
  shape = config.vision
  text = _merged(text, family.write_text(config) | {"model_type": family.text_type})
  del text["architectures"]  # the whole model's name stands for both
  vision = {key: getattr(shape, name) for name, key in family.fields.items()}
  vision |= {"hidden_act": ACTIVATION_NAMES[shape.activation][0], **family.write(config)}
  others = dict(shape.others)
  vision |= {k.removeprefix(_OF_TOWER): v for k, v in others.items() if k.startswith(_OF_TOWER)}
  return {
    "architectures": [family.architecture],
    "model_type": family.model_type,
    **{k: v for k, v in others.items() if not k.startswith(_OF_TOWER)},
    "tie_word_embeddings": config.tie_embeddings,
    "text_config": text,
    "vision_config": vision,
    "torch_dtype": text["torch_dtype"],
  }


def _merged(values: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
  """Merges two JSON objects. If both have an object under a name, these are merged, too.

  Otherwise the value in `more` wins, but within such inner objects the value in `values` wins.
  """
  both = dict(values)
  for name, value in more.items():
    is_object = isinstance(value, dict) and isinstance(both.get(name), dict)
    both[name] = {**value, **both[name]} if is_object else value
  return both
