"""A tiny random model of each family that sees images, and problems with 0, 1 and 3 of them."""

import dataclasses
import json
from pathlib import Path
import shutil

import jax
import numpy as np
from PIL import Image
from small_run import small_config, with_reward, with_section

from grpo_jax import model

GOLDEN = Path(__file__).parent / "golden"
FAMILIES = sorted(x.name for x in (GOLDEN / "vision").iterdir())
# Where the golden files of a family's processor have another name.
_PROCESSORS = {
  "qwen3_vl_moe": "qwen3_vl",
  "qwen3_5": "qwen3_vl",
  "qwen3_5_moe": "qwen3_vl",
  "idefics3": "idefics3_whole",
}
COUNTS = (1, 0, 3)  # images of a row, in turn
REWARD = "def reward(completions, **_):\n  return [float(len(set(x))) for x in completions]\n"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def make_checkpoint(folder, family="qwen3_vl", seed=7, **fields):
  """A random model of the family, with the tokenizer and the processor of its golden files."""
  images = GOLDEN / "images" / _PROCESSORS.get(family, family)
  tokenizer = json.loads((images / "tokenizer.json").read_text())
  ids = [token["id"] for token in tokenizer["added_tokens"]]
  # Every id is text, so that the random model writes texts that are not empty.
  given = dict(vocab_size=max(ids) + 1, max_positions=1024, stop_ids=(0,)) | fields
  shape = model.load_config(GOLDEN / "vision" / family, vision=True)
  if family == "gemma4":  # which has as many places for the least number of tokens of an image
    given["vision"] = dataclasses.replace(shape.vision, positions=64)
  shape = dataclasses.replace(shape, **given)
  model.save(folder, shape, jax.jit(model.init, static_argnums=1)(jax.random.key(seed), shape))
  for name in _TOKENIZER:
    shutil.copy(images / name, folder / name)
  processor = json.loads((images / "processor_config.json").read_text())
  own, around = _small_images(shape.vision)
  processor["image_processor"] |= own
  (folder / "processor_config.json").write_text(json.dumps(processor | around))


def _small_images(vision):
  """Fields of the image processor, and of the processor around it, that fit a small tower."""
  if vision.tower == "gemma4":
    return {"patch_size": 4, "pooling_kernel_size": vision.merge, "max_soft_tokens": 70}, {}
  patch = vision.patch[-1]
  side, tokens = vision.grid * patch, (vision.grid // vision.merge) ** 2
  if vision.family == "gemma3":
    return {"size": {"height": side, "width": side}}, {"image_seq_length": tokens}
  if vision.tower == "idefics3":
    tiles = {"max_image_size": {"longest_edge": side}, "size": {"longest_edge": 2 * side}}
    return tiles, {"image_seq_len": tokens}
  return {"patch_size": patch, "size": {"shortest_edge": 64, "longest_edge": 640}}, {}


def make_problems(folder, count=12, counts=COUNTS, column="images"):
  """Rows with so many images each, in turn. Their sizes differ."""
  rng = np.random.default_rng(0)
  rows = []
  for row in range(count):
    paths = []
    for number in range(counts[row % len(counts)]):
      height, width = rng.integers(9, 28, 2)
      pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
      paths.append(f"{row}_{number}.png")
      Image.fromarray(pixels).save(folder / paths[-1])
    images = paths if column == "images" else paths[0]
    rows.append({"question": f"What is it? {row}", "answer": str(row), column: images})
  for split in ("train", "test"):
    (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def vision_config(folder, vision="frozen", family="qwen3_vl", **algo):
  """The config of a small run. `folder` gets the model, the problems and the reward."""
  if not (folder / "model").exists():
    make_checkpoint(folder / "model", family)
    make_problems(folder)
  config = small_config(**{"kl_coef": 0.1} | algo)
  config = with_section(config, "model", path=str(folder / "model"), vision=vision)
  config = with_section(
    config,
    "data",
    task="columns",
    path=str(folder),
    chat=True,
    max_prompt_tokens=320 if family == "gemma4" else 160,
  )
  config = with_section(config, "sampling", max_tokens=8)
  return with_reward(config, folder, REWARD)
