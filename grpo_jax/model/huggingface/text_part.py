"""The text part of a model that also sees images: its config and the names of its tensors.

Only the text part is computed, trained and saved. The rest of the folder is not read.
"""

from collections.abc import Mapping
from typing import Any

from grpo_jax.model.huggingface.config_fields import Refuse
from grpo_jax.model.huggingface.families import FAMILIES
from grpo_jax.settings import shown

# model_type -> the fields of its text part that may be missing, as transformers fills them in.
_DEFAULTS: dict[str, dict[str, Any]] = {
  whole: {"model_type": family.model_type, **defaults}
  for family in FAMILIES.values()
  for whole, defaults in family.whole.items()
}
_OTHER_PARTS = (
  *("vision_tower.", "multi_modal_projector.", "visual."),
  *("audio_tower.", "embed_vision.", "embed_audio."),
)


def has_other_parts(values: Mapping[str, Any]) -> bool:
  """Whether the object in config.json describes a text part among others."""
  return str(values.get("model_type")) in _DEFAULTS and "text_config" in values


def text_values(values: Mapping[str, Any], refuse: Refuse) -> dict[str, Any]:
  """The config of the text part, as the config.json of a language model has it."""
  text = values["text_config"]
  if not isinstance(text, dict):
    refuse("text_config", f"must be an object, got {shown(text)}")
  defaults = dict(_DEFAULTS[values["model_type"]])
  for name in ("tie_word_embeddings", "eos_token_id", "quantization_config"):
    if values.get(name) is not None:
      defaults[name] = values[name]
  return {**defaults, **text, "architectures": None}


def text_name(name: str) -> str | None:
  """The name that a language model has for a tensor, or None if it belongs to another part.

  The text part lies at `language_model.model` in files of transformers 4 and at
  `model.language_model` in those of 5.
  """
  if any(part in name for part in _OTHER_PARTS):
    return None
  return name.replace("language_model.", "", 1)
