"""The text part of a model that also sees images: its config and the names of its tensors."""

from collections.abc import Mapping
import re
from typing import Any

from grpo_jax.model.huggingface.config_fields import Refuse
from grpo_jax.model.huggingface.families import FAMILIES
from grpo_jax.model.huggingface.vision import VISION
from grpo_jax.settings import shown

# model_type -> the fields of its text part that may be missing, as transformers fills them in.
_DEFAULTS: dict[str, dict[str, Any]] = {
  whole: {"model_type": family.model_type, **defaults}
  for family in FAMILIES.values()
  for whole, defaults in family.whole.items()
}
# Parts of names by which a tensor belongs to a vision tower, and to a part that is never read.
_OF_VISION = (
  *("vision_tower.", "multi_modal_projector.", "visual.", "embed_vision."),
  *("model.vision_model.", "model.connector."),
)
_OF_AUDIO = ("audio_tower.", "embed_audio.")
_MROPE = "mrope"  # how transformers 4 calls positions of three axes without a scaling


def has_other_parts(values: Mapping[str, Any]) -> bool:
  """Whether the object in config.json describes a text part among others."""
  model_type = str(values.get("model_type"))
  if model_type in VISION:
    return "vision_config" in values
  return model_type in _DEFAULTS and "text_config" in values


def text_values(values: Mapping[str, Any], refuse: Refuse) -> dict[str, Any]:
  """The config of the text part, as the config.json of a language model has it."""
  whole = VISION.get(values["model_type"])
  text = values.get("text_config", {} if whole is None else _without_tower(values))
  if not isinstance(text, dict):
    refuse("text_config", f"must be an object, got {shown(text)}")
  defaults = dict(_DEFAULTS.get(values["model_type"], {}))
  for name in ("tie_word_embeddings", "eos_token_id", "quantization_config"):
    if values.get(name) is not None:
      defaults[name] = values[name]
  if whole is None:
    return {**defaults, **text, "architectures": None}
  known = {k: v for k, v in text.items() if not re.fullmatch(whole.ignored, f"text_config.{k}")}
  for name in ("rope_scaling", "rope_parameters"):
    if isinstance(known.get(name), dict):
      known[name] = _without_mrope(known[name])
  # The head belongs to the whole, so that it says whether the head is the embedding.
  tied = values.get("tie_word_embeddings", whole.tied)
  own = {"architectures": None, "model_type": whole.text, "tie_word_embeddings": tied}
  return {**defaults, **whole.text_defaults, **known, **own}


def _without_tower(values: Mapping[str, Any]) -> dict[str, Any]:
  """The fields of the text part where the file has them beside those of the whole (Qwen2.5-VL)."""
  others = VISION[values["model_type"]].others
  return {k: v for k, v in values.items() if k != "vision_config" and k not in others}


def _without_mrope(rope: Mapping[str, Any]) -> dict[str, Any]:
  """The rotary fields, in which positions of three axes are no scaling."""
  return {
    k: "default" if k in ("type", "rope_type") and v == _MROPE else v for k, v in rope.items()
  }


def text_name(name: str) -> str | None:
  """The name that a language model has for a tensor, or None if it belongs to another part.

  The text part lies at `language_model.model` in files of transformers 4 and at
  `model.language_model` or `model.text_model` in those of 5.
  """
  if any(part in name for part in _OF_VISION + _OF_AUDIO):
    return None
  return name.replace("language_model.", "", 1).replace("model.text_model.", "model.", 1)


def whole_name(name: str) -> str | None:
  """`text_name`, and of a tensor of the vision tower its name in files of transformers 5."""
  if any(part in name for part in _OF_VISION):
    return "model." + re.sub(r"^model\.", "", name).replace("tower.vision_model.", "tower.")
  return text_name(name)
