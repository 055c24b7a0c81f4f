"""Models of Hugging Face that see images: their config.json and their towers' tensors, as tables.

Each family is a record (`VisionFamily`) in one of these files. Loading and saving both use it.
"""

from grpo_jax.model.huggingface.vision import gemma4, qwen, siglip
from grpo_jax.model.huggingface.vision.vision_family import VisionFamily

VISION: dict[str, VisionFamily] = {
  family.model_type: family for family in (*qwen.FAMILIES, *siglip.FAMILIES, *gemma4.FAMILIES)
}
