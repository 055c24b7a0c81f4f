"""Writes a tiny random checkpoint of every family that sees images, and the logits it computes.

  python tests/golden/make_vision.py [NAME ...]
  python tests/golden/make_vision.py compare [NAME ...]

Without a NAME, a command covers all folders. `compare` loads and saves each checkpoint with
grpo_jax, lets transformers read what was saved, and compares the logits.

Made with transformers 5.23.0 and torch 2.13.0 (CPU). Three right-padded rows see 0, 1 and 3 images
of odd sizes. expected.npz has what transformers' image processor and `get_rope_index` make of
them, in the form of `grpo_jax.types.Images`, and the logits in float64, as float32.
"""

from pathlib import Path
import sys
import tempfile
import zlib

from make_qwen2 import make_model
import numpy as np
import torch
import transformers

FOLDER, IMAGE = Path(__file__).parent / "vision", 60
COMMON = dict(
  vocab_size=64,
  hidden_size=16,
  intermediate_size=24,
  num_hidden_layers=3,
  num_attention_heads=4,
  num_key_value_heads=2,
  head_dim=16,
  max_position_embeddings=128,
  rms_norm_eps=1e-5,
  eos_token_id=3,
  pad_token_id=0,
  bos_token_id=1,
)
DELTA = dict(
  COMMON,
  layer_types=["linear_attention", "full_attention", "linear_attention"],
  linear_num_key_heads=2,
  linear_num_value_heads=4,
  linear_key_head_dim=6,
  linear_value_head_dim=4,
  linear_conv_kernel_dim=4,
  rms_norm_eps=1e-3,
  rope_parameters=dict(
    rope_theta=1e4,
    rope_type="default",
    partial_rotary_factor=0.75,
    mrope_section=[2, 2, 2],
    mrope_interleaved=True,
  ),
)
QWEN_TOWER = dict(
  depth=3,
  hidden_size=16,
  intermediate_size=20,
  num_heads=2,
  patch_size=4,
  spatial_merge_size=2,
  temporal_patch_size=2,
  out_hidden_size=16,
)
SIGLIP = dict(
  hidden_size=16,
  intermediate_size=20,
  num_hidden_layers=2,
  num_attention_heads=2,
  patch_size=4,
  layer_norm_eps=1e-5,
)
QWEN_IDS = dict(
  image_token_id=IMAGE, video_token_id=61, vision_start_token_id=62, vision_end_token_id=63
)
QWEN_SIZES = ((17, 30), (40, 24), (9, 7), (33, 12))  # height and width in pixels
FAMILIES = {  # folder: (family, fields of the text part, of the tower, other fields)
  "qwen2_5_vl": (
    "Qwen2_5_VL",
    dict(
      COMMON,
      hidden_size=32,
      num_attention_heads=2,
      num_key_value_heads=1,
      rope_parameters=dict(rope_theta=1e4, rope_type="default", mrope_section=[2, 3, 3]),
    ),
    dict(QWEN_TOWER, out_hidden_size=32, window_size=16, fullatt_block_indexes=[1]),
    dict(QWEN_IDS, tie_word_embeddings=False),
  ),
  "qwen3_vl": (
    "Qwen3VL",
    dict(
      COMMON,
      rope_parameters=dict(
        rope_theta=1e4, rope_type="default", mrope_section=[3, 3, 2], mrope_interleaved=True
      ),
    ),
    dict(QWEN_TOWER, num_position_embeddings=25, deepstack_visual_indexes=[0, 1]),
    dict(QWEN_IDS, tie_word_embeddings=True),
  ),
  "qwen3_vl_moe": (
    "Qwen3VLMoe",
    dict(
      COMMON,
      num_experts=4,
      num_experts_per_tok=2,
      moe_intermediate_size=12,
      mlp_only_layers=[1],
      rope_parameters=dict(
        rope_theta=1e4, rope_type="default", mrope_section=[3, 3, 2], mrope_interleaved=True
      ),
    ),
    dict(QWEN_TOWER, num_position_embeddings=16, deepstack_visual_indexes=[1]),
    dict(QWEN_IDS, tie_word_embeddings=False),
  ),
  "qwen3_5": (
    "Qwen3_5",
    DELTA,
    dict(QWEN_TOWER, num_position_embeddings=36),
    dict(QWEN_IDS, tie_word_embeddings=True),
  ),
  "qwen3_5_moe": (
    "Qwen3_5Moe",
    dict(
      {k: v for k, v in DELTA.items() if k != "intermediate_size"},
      num_experts=4,
      num_experts_per_tok=2,
      moe_intermediate_size=12,
      shared_expert_intermediate_size=10,
    ),
    dict(QWEN_TOWER, depth=2, num_position_embeddings=16),
    dict(QWEN_IDS, tie_word_embeddings=False),
  ),
  "gemma3": (
    "Gemma3",
    dict(
      COMMON,
      query_pre_attn_scalar=20,
      sliding_window=6,
      layer_types=["sliding_attention", "full_attention", "sliding_attention"],
      rope_parameters=dict(
        full_attention=dict(rope_type="linear", rope_theta=1e5, factor=8.0),
        sliding_attention=dict(rope_type="default", rope_theta=1e4),
      ),
    ),
    dict(SIGLIP, model_type="siglip_vision_model", image_size=24, vision_use_head=False),
    dict(
      mm_tokens_per_image=9,
      image_token_index=IMAGE,
      boi_token_index=61,
      eoi_token_index=62,
      tie_word_embeddings=True,
    ),
  ),
  "idefics3": (
    "Idefics3",
    dict(COMMON, model_type="llama", rope_parameters=dict(rope_theta=1e4, rope_type="default")),
    dict(SIGLIP, image_size=40),
    dict(image_token_id=IMAGE, scale_factor=5, tie_word_embeddings=False),
  ),
  "smolvlm": (
    "SmolVLM",
    dict(COMMON, model_type="llama", rope_parameters=dict(rope_theta=1e4, rope_type="default")),
    dict(SIGLIP, image_size=16),
    dict(image_token_id=IMAGE, scale_factor=2, tie_word_embeddings=True),
  ),
}
GRADIENTS = ("qwen3_vl",)


def pictures_of(sizes):
  """Smooth pictures with some noise, uint8 [H, W, 3]."""
  rng = np.random.default_rng(0)
  for height, width in sizes:
    rows, columns = np.mgrid[:height, :width]
    waves = [np.sin(rows / (3 + i) + columns / (5 - i)) for i in range(3)]
    noise = rng.integers(0, 20, (height, width, 3))
    yield (np.stack(waves, -1) * 100 + 118 + noise).clip(0, 255).astype(np.uint8)


def qwen_inputs(model):
  """The inputs of transformers, and the same as `Images`."""
  config = model.config.vision_config
  processor = transformers.Qwen2VLImageProcessor(
    patch_size=config.patch_size,
    temporal_patch_size=config.temporal_patch_size,
    merge_size=config.spatial_merge_size,
    min_pixels=64,
    max_pixels=1024,
  )
  found = processor(images=list(pictures_of(QWEN_SIZES)), return_tensors="pt")
  grids, merge = found["image_grid_thw"], config.spatial_merge_size
  counts = [int(grid.prod()) // merge**2 for grid in grids]
  rows = rows_of([[], [0], [1, 2, 3]], counts)
  tokens, mask = padded(rows)
  types = (tokens == IMAGE).long()
  inputs = dict(
    input_ids=tokens,
    attention_mask=mask,
    mm_token_type_ids=types,
    pixel_values=found["pixel_values"].double(),
    image_grid_thw=grids,
  )
  positions, deltas = model.model.get_rope_index(
    tokens, types, image_grid_thw=grids, attention_mask=mask
  )
  patches = torch.split(found["pixel_values"], [int(grid.prod()) for grid in grids])
  places = [blocks(int(h), int(w), merge) for _, h, w in grids]
  images = in_rows([[], [0], [1, 2, 3]], [x.numpy() for x in patches], places)
  images |= dict(
    seen=seen_of(rows, tokens.shape[1], counts),
    positions=positions.permute(1, 2, 0).numpy(),
    lengths=mask.sum(1).numpy(),
    next=(mask.sum(1) + deltas[:, 0]).numpy(),
  )
  return inputs, images


def squares_of(model):
  """Pictures as squares of the tower's size, float32 [I, 3, H, W]."""
  side = model.config.vision_config.image_size
  pictures = np.stack(list(pictures_of([(side, side)] * 4))).transpose(0, 3, 1, 2)
  return (pictures / 127.5 - 1).astype(np.float32)


def siglip_inputs(model):
  """The inputs of transformers, and the same as `Images`, whose patches lie in rows."""
  squares, patch = squares_of(model), model.config.vision_config.patch_size
  grid, is_gemma = squares.shape[-1] // patch, "Gemma" in type(model).__name__
  merge = (
    model.config.scale_factor
    if not is_gemma
    else grid // model.model.multi_modal_projector.tokens_per_side
  )
  counts = [(grid // merge) ** 2] * 4
  rows = rows_of([[], [0], [1, 2, 3]], counts)
  tokens, mask = padded(rows)
  inputs = dict(input_ids=tokens, attention_mask=mask)
  if is_gemma:
    # Padding is on the right, so no token sees it. With a mask, padding beyond a window is NaN.
    inputs = dict(input_ids=tokens, pixel_values=torch.tensor(squares).double())
    inputs |= dict(token_type_ids=(tokens == IMAGE).long())
  else:
    pixels = np.zeros((3, 3, *squares.shape[1:]))  # transformers leaves out pictures of zeros
    pixels[1, 0], pixels[2] = squares[0], squares[1:]
    inputs |= dict(pixel_values=torch.tensor(pixels))
  parts = squares.reshape(4, 3, grid, patch, grid, patch).transpose(0, 2, 4, 1, 3, 5)
  places = [np.stack(np.indices((grid, grid)), -1).reshape(-1, 2)] * 4
  images = in_rows([[], [0], [1, 2, 3]], list(parts.reshape(4, grid**2, -1)), places)
  return inputs, images | dict(
    seen=seen_of(rows, tokens.shape[1], counts), lengths=mask.sum(1).numpy()
  )


def blocks(height, width, merge):
  """Row and column of each patch, in the order of the image processor: blocks of merge^2."""
  places = np.stack(np.indices((height, width)), -1)
  shape = height // merge, merge, width // merge, merge, 2
  return places.reshape(shape).swapaxes(1, 2).reshape(-1, 2)


def rows_of(pictures_of_rows, counts):
  """Token ids of rows of different lengths, in which each picture has its visual tokens."""
  rng, rows = np.random.default_rng(1), []
  for pictures, texts in zip(pictures_of_rows, (9, 7, 3)):
    row = list(rng.integers(4, 60, texts))
    for picture in pictures:
      row += [IMAGE] * counts[picture] + list(rng.integers(4, 60, 4))
    rows.append(row)
  return rows


def padded(rows):
  length = max(map(len, rows))
  tokens = torch.tensor([list(row) + [0] * (length - len(row)) for row in rows])
  return tokens, torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])


def seen_of(rows, length, counts):
  """`Images.seen_PS2` of rows whose pictures follow each other in the order of `counts`."""
  seen, picture = np.full((len(rows), length, 2), -1), 0
  for row, tokens in enumerate(rows):
    first, number = picture, 0
    for place, token in enumerate(tokens):
      if token == IMAGE:
        seen[row, place] = picture - first, number
        number += 1
        if number == counts[picture]:
          picture, number = picture + 1, 0
  return seen


def in_rows(pictures_of_rows, patches, places):
  """`patches_PINC` and `places_PIN2`, padded."""
  P, I, N = len(pictures_of_rows), max(map(len, pictures_of_rows)), max(map(len, patches))
  all_patches = np.zeros((P, I, N, patches[0].shape[-1]), np.float32)
  all_places = np.full((P, I, N, 2), -1)
  for row, pictures in enumerate(pictures_of_rows):
    for number, picture in enumerate(pictures):
      count = len(patches[picture])
      all_patches[row, number, :count] = patches[picture]
      all_places[row, number, :count] = places[picture]
  return dict(patches=all_patches, places=all_places)


INPUTS = dict.fromkeys(FAMILIES, qwen_inputs) | dict.fromkeys(
  ("gemma3", "idefics3", "smolvlm"), siglip_inputs
)


def model_of(name):
  family, text, tower, others = FAMILIES[name]
  config = getattr(transformers, f"{family}Config")(text_config=text, vision_config=tower, **others)
  return getattr(transformers, f"{family}ForConditionalGeneration")(config)


def read(folder):
  return transformers.AutoModelForImageTextToText.from_pretrained(
    folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
  ).eval()


def main(names):
  for name in names or FAMILIES:
    seed = zlib.crc32(name.encode())
    folder = FOLDER / name
    make_model(model_of(name), seed).to(torch.bfloat16).save_pretrained(folder)
    model = read(folder)
    inputs, images = INPUTS[name](model)
    outputs = model(**inputs).logits
    arrays = dict(tokens=inputs["input_ids"].numpy(), **images)
    arrays = {k: v.astype(np.int32) if v.dtype == np.int64 else v for k, v in arrays.items()}
    logits = outputs.detach().float().numpy()
    np.savez_compressed(folder / "expected.npz", **arrays, logits=logits)
    if name in GRADIENTS:
      loss = (outputs.softmax(-1).square().sum(-1) * inputs["attention_mask"]).sum()
      loss.backward()
      gradients = {k: p.grad.float().numpy() for k, p in model.named_parameters()}
      np.savez_compressed(folder / "gradients.npz", **gradients)


def compare(names):
  from grpo_jax import model  # imported here because the checkpoints are made without it

  for folder in sorted(FOLDER.iterdir()):
    if names and folder.name not in names:
      continue
    expected = np.load(folder / "expected.npz")
    with tempfile.TemporaryDirectory() as parent:
      model.save(Path(parent) / "saved", *model.load(folder, vision=True))
      ours = read(Path(parent) / "saved")
      inputs, images = INPUTS[folder.name](ours)
      with torch.no_grad():
        logits = ours(**inputs).logits.numpy()
    valid = np.arange(logits.shape[1]) < images["lengths"][:, None]
    largest = np.abs(logits - expected["logits"])[valid].max()
    print(f"{folder.name}: largest difference of a logit {largest:.1e}", flush=True)


if __name__ == "__main__":
  compare(sys.argv[2:]) if sys.argv[1:2] == ["compare"] else main(sys.argv[1:])
