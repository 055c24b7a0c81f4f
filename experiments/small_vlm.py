"""Writes a small vision-language model with random weights, for configs/shapes.py.

python experiments/small_vlm.py /tmp/small_vlm [--seed=0]

It is a Qwen3-VL with a tokenizer of characters and an image processor. An image of 48 x 48 pixels
becomes nine visual tokens.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import tokenizers

from grpo_jax import model
from grpo_jax.data.tasks.drawn.canvas import ALPHABET
from grpo_jax.data.tokenizers import character_files

SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PATCH, MERGE, SIDE = 8, 2, 48  # pixels, patches and pixels


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("folder", type=Path)
  parser.add_argument("--seed", type=int, default=0)
  given = parser.parse_args()
  files = tokenizer_files()
  ids = json.loads(files["tokenizer.json"])["added_tokens"]
  shape = shape_of({token["content"]: token["id"] for token in ids})
  model.save(given.folder, shape, model.init(jax.random.key(given.seed), shape))
  files["preprocessor_config.json"] = json.dumps(PROCESSOR, indent=2).encode()
  for name, content in files.items():
    (given.folder / name).write_bytes(content)


def tokenizer_files() -> dict[str, bytes]:
  """A token for each character of the tasks that draw, and those of images."""
  files = character_files.make(ALPHABET)
  engine = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
  engine.add_special_tokens([*SPECIAL])
  return files | {"tokenizer.json": engine.to_str(pretty=True).encode()}


def shape_of(ids: dict[str, int]) -> model.ModelConfig:
  """The model's shape.

  Args:
    ids: Of the special tokens.
  """
  start, end, image, video = (ids[token] for token in SPECIAL)
  others: tuple[tuple[str, Any], ...] = (
    ("image_token_id", image),
    ("video_token_id", video),
    ("vision_start_token_id", start),
    ("vision_end_token_id", end),
  )
  tower = model.VisionShape(
    tower="qwen3_vl",
    family="qwen3_vl",
    patch=(3, 1, PATCH, PATCH),
    dim=64,
    num_layers=2,
    num_heads=4,
    mlp_dim=128,
    merge=MERGE,
    positions=(SIDE // PATCH) ** 2,
    rope_theta=10000.0,
    rope_sections=(3, 3, 2),
    rope_interleaved=True,
    others=others,
  )
  return model.ModelConfig(
    vocab_size=video + 1,
    embed_dim=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    mlp_dim=256,
    rope_theta=100.0,
    max_positions=256,
    qk_norm="head",
    qkv_bias=False,
    family="qwen3",
    vision=tower,
    stop_ids=(1,),
  )


PROCESSOR = {
  "image_processor_type": "Qwen2VLImageProcessor",
  "patch_size": PATCH,
  "temporal_patch_size": 1,
  "merge_size": MERGE,
  "image_mean": [0.5, 0.5, 0.5],
  "image_std": [0.5, 0.5, 0.5],
  "size": {"shortest_edge": SIDE**2, "longest_edge": SIDE**2},
}


if __name__ == "__main__":
  main()
