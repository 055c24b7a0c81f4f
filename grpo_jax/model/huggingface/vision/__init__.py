"""The models of Hugging Face that see images: config.json and their towers' tensors, as tables.

A model is a record (`VisionFamily`) in one of these files. It drives both loading and saving.
"""

from grpo_jax.model.huggingface.vision import gemma4, qwen, siglip
from grpo_jax.model.huggingface.vision.vision_family import VisionFamily

VISION: dict[str, VisionFamily] = {
  family.model_type: family for family in (*qwen.FAMILIES, *siglip.FAMILIES, *gemma4.FAMILIES)
}
