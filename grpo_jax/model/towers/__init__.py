"""Vision towers, which turn the patches of pictures into visual tokens. Each has its own file.

A tower is a record (`tower.py`) of Flax modules, which `model/vision.py` connects.
"""

from grpo_jax.model.towers import gemma4, layers, qwen2_5_vl, qwen3_vl, siglip
from grpo_jax.model.towers.tower import Tower

TOWERS: dict[str, Tower] = {  # by VisionShape.tower
  "qwen2_5_vl": qwen2_5_vl.TOWER,
  "qwen3_vl": qwen3_vl.TOWER,
  "siglip": siglip.SIGLIP,
  "gemma4": gemma4.TOWER,
  "idefics3": siglip.IDEFICS3,
}
RULES = layers.RULES + gemma4.RULES
TARGETS = layers.TARGETS
