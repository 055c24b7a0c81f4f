"""Finds the text part of a model that also sees images: its config and the names of its tensors."""

from collections.abc import Mapping
import re
from typing import Any

from grpo_jax.model.huggingface.config_fields import Refuse, read_object
from grpo_jax.model.huggingface.families import FAMILIES
from grpo_jax.model.huggingface.vision import VISION
from grpo_jax.settings import shown

# `model_type` of the whole model -> transformers' defaults for the fields of its text part.
_DEFAULTS: dict[str, dict[str, Any]] = {
  whole: {"model_type": family.model_type, **defaults}
  for family in FAMILIES.values()
  for whole, defaults in family.whole.items()
}
# A tensor belongs to the vision tower, or to an audio tower, which is never read, if its name
# contains one of these.
_OF_VISION = (
  *("vision_tower.", "multi_modal_projector.", "visual.", "embed_vision."),
  *("model.vision_model.", "model.connector."),
)
_OF_AUDIO = ("audio_tower.", "embed_audio.")
_MROPE = "mrope"  # the rope type in transformers 4 for positions on three axes without a scaling


def has_other_parts(values: Mapping[str, Any]) -> bool:
  """Whether the object in config.json describes a model with parts besides its text part."""
  model_type = str(values.get("model_type"))
  if model_type in VISION:
    return "vision_config" in values
  return model_type in _DEFAULTS and "text_config" in values


def text_values(values: Mapping[str, Any], refuse: Refuse) -> dict[str, Any]:
  """Returns the fields of the text part, as config.json of a language model would hold them."""
  whole = VISION.get(values["model_type"])
  text = values["text_config"] if "text_config" in values else _without_tower(values)
  if not isinstance(text, dict):
    refuse("text_config", f"must be an object, got {shown(text)}")
  defaults = dict(_DEFAULTS.get(values["model_type"], {}))
  for name in ("tie_word_embeddings", "quantization_config"):
    if values.get(name) is not None:
      defaults[name] = values[name]
  # `architectures` of the file names the whole model, so it is dropped.
  fixed: dict[str, Any] = {"architectures": None}
  if values.get("eos_token_id") is not None:  # transformers stops at these tokens of the whole
    fixed["eos_token_id"] = values["eos_token_id"]
  if whole is None:  # a model whose tower is never read
    return {**defaults, **text, **fixed}
  relevant = {k: v for k, v in text.items() if not re.fullmatch(whole.ignored, f"text_config.{k}")}
  for name in ("rope_scaling", "rope_parameters"):
    if relevant.get(name):
      relevant[name] = _without_mrope(read_object(relevant, name, refuse))
  # The head belongs to the whole model, so its field says whether the head is the embedding.
  tied = values.get("tie_word_embeddings", whole.tied)
  fixed |= {"model_type": whole.text, "tie_word_embeddings": tied}
  return {**defaults, **whole.text_defaults, **relevant, **fixed}


def _without_tower(values: Mapping[str, Any]) -> dict[str, Any]:
  """The fields of the text part if config.json mixes them with those of the whole (Qwen2.5-VL)."""
  others = VISION[values["model_type"]].others
  return {k: v for k, v in values.items() if k != "vision_config" and k not in others}


def _without_mrope(rope: Mapping[str, Any]) -> dict[str, Any]:
  """The rotary fields with "default" in place of "mrope", which scales nothing."""
  return {
    k: "default" if k in ("type", "rope_type") and v == _MROPE else v for k, v in rope.items()
  }


def text_name(name: str) -> str | None:
  """Returns the name of a text tensor in a language model, or None for a tensor of another part.

  transformers 4 writes text tensors under `language_model.model`, and transformers 5 under
  `model.language_model` or `model.text_model`.
  """
  if any(part in name for part in _OF_VISION + _OF_AUDIO):
    return None
  return name.replace("language_model.", "", 1).replace("model.text_model.", "model.", 1)


def whole_name(name: str) -> str | None:
  """Like `text_name`, but a tensor of the vision tower gets its name in transformers 5."""
  if any(part in name for part in _OF_VISION):
    return "model." + re.sub(r"^model\.", "", name).replace("tower.vision_model.", "tower.")
  return text_name(name)
