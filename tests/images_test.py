"""Images become the patches, the tokens and the positions that transformers makes of them.

tests/golden/make_images.py wrote down what transformers returned.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from grpo_jax.data.images import processor as processors
from grpo_jax.data.images.resize import resize
from grpo_jax.data.images.source import ImageSource
from grpo_jax.data.tokenizers import tokenizer as tokenizers

GOLDEN = Path(__file__).parent / "golden/images"
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "gemma3", "gemma4", "smolvlm", "idefics3_whole")
CASES = [*sorted(path.name for path in (GOLDEN / "files").iterdir())]
CASES += ["wide.png+small.png+alpha.png"]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
  folder = GOLDEN / request.param
  tokenizer = tokenizers.load(folder)
  expected = np.load(folder / "expected.npz")
  return request.param, processors.load(folder, tokenizer), tokenizer, expected


def conversation(names):
  parts = [{"type": "text", "text": "In these images: "}] if len(names) > 1 else []
  for number, _ in enumerate(names):
    parts += [{"type": "image"}, {"type": "text", "text": f"What is in picture {number}?\n"}]
  return [{"role": "user", "content": parts}]


def whole(picture, kind):
  """The numbers of a picture in the order of its channels, where patches are a convolution's."""
  rows, columns = picture.places_N2.max(0) + 1
  shape = (rows, columns, 3, kind.patch, kind.patch)
  return picture.patches_NC.reshape(shape).transpose(2, 0, 3, 1, 4)


def as_bytes(numbers, scale, axis):
  """The bytes that were scaled to these numbers."""
  numbers = np.asarray(numbers, np.float64)
  if scale.mean is not None:
    shape = [3 if number == axis else 1 for number in range(numbers.ndim)]
    numbers = numbers * np.reshape(scale.std, shape) + np.reshape(scale.mean, shape)
  found = np.rint(numbers * 255)
  assert np.abs(numbers * 255 - found).max() < 1e-3
  return found.astype(np.uint8)


def ordered(picture, name, kind):
  """(the numbers of a picture in the order of transformers, the axis of their channels)."""
  if name.startswith("qwen"):
    return picture.patches_NC.reshape(-1, 3, kind.frames * kind.patch**2), 1
  if name == "gemma4":
    return picture.patches_NC, None
  return whole(picture, kind), 0


@pytest.mark.parametrize("case", CASES)
def test_prompts_and_pixels_are_those_of_transformers(family, case):
  name, processor, tokenizer, expected = family
  if f"{case}/ids" not in expected:
    assert (case, name[:4]) == ("line.png", "qwen")  # transformers refuses it, and so do we
    pytest.skip("this family does not see lines")
  images = [ImageSource(file, path=str(GOLDEN / "files" / file)) for file in case.split("+")]
  layouts = [processor.layout(image) for image in images]
  text = tokenizer.render(conversation(images))
  ids = tokenizer.encode(processor.expand(text, layouts, case))
  assert ids == expected[f"{case}/ids"].tolist()
  pictures = [picture for image in images for picture in processor.pictures(image)]
  in_order = [ordered(picture, name, processor.kind) for picture in pictures]
  first = np.concatenate([numbers.reshape(-1)[:60] for numbers, _ in in_order])[:600]
  np.testing.assert_allclose(first, expected[f"{case}/first"], atol=1e-5, rtol=0)
  pixels = [as_bytes(numbers, processor.kind.scale, axis) for numbers, axis in in_order]
  digest = hashlib.sha256(b"".join(part.tobytes() for part in pixels)).digest()
  assert digest == expected[f"{case}/digest"].tobytes()


@pytest.mark.parametrize("case", CASES)
def test_places_of_visual_tokens(family, case):
  """Every patch has a place, and every visual token takes the place of one token."""
  name, processor, tokenizer, expected = family
  if f"{case}/ids" not in expected:
    return
  images = [ImageSource(file, path=str(GOLDEN / "files" / file)) for file in case.split("+")]
  layouts = [processor.layout(image) for image in images]
  placed = processor.place(expected[f"{case}/ids"].tolist(), layouts, case)
  grids = [grid for layout in layouts for grid in layout.tokens]
  pictures = [picture for image in images for picture in processor.pictures(image)]
  assert len(pictures) == len(grids)
  side = round(processor.kind.patches_per_token**0.5)
  for picture, (rows, columns) in zip(pictures, grids):
    every = {(r, c) for r in range(rows * side) for c in range(columns * side)}
    assert {*map(tuple, picture.places_N2.tolist())} == every
    assert picture.patches_NC.shape == (len(every), processor.kind.patch_numbers)
    assert picture.patches_NC.dtype == np.float32 and picture.places_N2.dtype == np.int32
  seen = placed.seen_S2[placed.seen_S2[:, 0] >= 0]
  tokens = [(i, n) for i, (rows, columns) in enumerate(grids) for n in range(rows * columns)]
  assert seen.tolist() == [list(token) for token in tokens]
  if name.startswith("qwen"):
    assert placed.positions_S3.tolist() == expected[f"{case}/positions"].tolist()
    assert placed.next == expected[f"{case}/next"]
  else:
    assert placed.positions_S3 is None and placed.next == len(placed.seen_S2)


def test_texts_without_images(family):
  _, _, tokenizer, expected = family
  text = tokenizer.render([{"role": "user", "content": [{"type": "text", "text": "Count them."}]}])
  assert tokenizer.encode(text) == expected["text/ids"].tolist()


def test_the_patches_of_a_token_follow_each_other():
  """Qwen's first four patches are the two rows and columns of the first visual token."""
  processor = processors.load(GOLDEN / "qwen3_vl", tokenizers.load(GOLDEN / "qwen3_vl"))
  (picture,) = processor.pictures(ImageSource("rgb", path=str(GOLDEN / "files/rgb.png")))
  assert picture.places_N2[:4].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
  assert picture.places_N2[4:6].tolist() == [[0, 2], [0, 3]]


def test_resizing_by_hand():
  """Two pixels to one are their mean, rounded half up; a constant stays."""
  image = np.array([[[10], [21]]], np.uint8)
  assert resize(image, 1, 1, 2).tolist() == [[[16]]]
  for resample in (1, 2, 3):
    assert (resize(np.full((5, 7, 3), 255, np.uint8), 3, 11, resample) == 255).all()


# What the model cards of these folders say, with the names of older versions of transformers.
PUBLISHED = {
  "Qwen2.5-VL-3B-Instruct": {
    "preprocessor_config.json": {
      "min_pixels": 3136,
      "max_pixels": 12845056,
      "patch_size": 14,
      "temporal_patch_size": 2,
      "merge_size": 2,
      "image_mean": [0.48145466, 0.4578275, 0.40821073],
      "image_std": [0.26862954, 0.26130258, 0.27577711],
      "image_processor_type": "Qwen2VLImageProcessor",
      "processor_class": "Qwen2_5_VLProcessor",
    }
  },
  "Qwen3-VL-4B-Instruct": {
    "preprocessor_config.json": {
      "size": {"longest_edge": 16777216, "shortest_edge": 65536},
      "patch_size": 16,
      "temporal_patch_size": 2,
      "merge_size": 2,
      "image_mean": [0.5, 0.5, 0.5],
      "image_std": [0.5, 0.5, 0.5],
      "processor_class": "Qwen3VLProcessor",
      "image_processor_type": "Qwen2VLImageProcessorFast",
    }
  },
  "gemma-3-4b-it": {
    "preprocessor_config.json": {
      "do_convert_rgb": None,
      "do_normalize": True,
      "do_pan_and_scan": None,
      "do_rescale": True,
      "do_resize": True,
      "image_mean": [0.5, 0.5, 0.5],
      "image_processor_type": "Gemma3ImageProcessor",
      "image_seq_length": 256,
      "image_std": [0.5, 0.5, 0.5],
      "pan_and_scan_max_num_crops": None,
      "resample": 2,
      "rescale_factor": 0.00392156862745098,
      "size": {"height": 896, "width": 896},
    },
    "processor_config.json": {"image_seq_length": 256, "processor_class": "Gemma3Processor"},
    "config.json": {"vision_config": {"image_size": 896, "patch_size": 14}},
  },
  "SmolVLM-256M-Instruct": {
    "preprocessor_config.json": {
      "do_convert_rgb": True,
      "do_image_splitting": True,
      "do_normalize": True,
      "do_pad": True,
      "do_rescale": True,
      "do_resize": True,
      "image_mean": [0.5, 0.5, 0.5],
      "image_processor_type": "Idefics3ImageProcessor",
      "image_std": [0.5, 0.5, 0.5],
      "max_image_size": {"longest_edge": 512},
      "resample": 1,
      "rescale_factor": 0.00392156862745098,
      "size": {"longest_edge": 2048},
    },
    "processor_config.json": {"image_seq_len": 64, "processor_class": "Idefics3Processor"},
    "config.json": {"vision_config": {"image_size": 512, "patch_size": 16}},
  },
}
# (height, width) and the grids of visual tokens, by hand.
GRIDS = {
  "Qwen2.5-VL-3B-Instruct": ((280, 421), [(10, 15)]),  # 421 / 28 = 15.04
  "Qwen3-VL-4B-Instruct": ((128, 128), [(8, 8)]),  # 256 x 256 pixels, the fewest
  "gemma-3-4b-it": ((37, 501), [(16, 16)]),
  "SmolVLM-256M-Instruct": ((100, 200), [(8, 8)] * 9),  # 1024 x 2048: two by four tiles, and all
}


def folder_of(tmp_path, name, tokens="gemma3", **changes):
  for file, values in PUBLISHED[name].items():
    changed = changes if file == "preprocessor_config.json" else {}
    (tmp_path / file).write_text(json.dumps(values | changed))
  return tmp_path, tokenizers.load(GOLDEN / tokens)


TOKENIZERS = {
  "Qwen2.5-VL-3B-Instruct": "qwen2_5_vl",
  "Qwen3-VL-4B-Instruct": "qwen3_vl",
  "gemma-3-4b-it": "gemma3",
  "SmolVLM-256M-Instruct": "smolvlm",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_folders(tmp_path, name):
  processor = processors.load(*folder_of(tmp_path, name, TOKENIZERS[name]))
  size, grids = GRIDS[name]
  assert [*processor.kind.layout(*size).tokens] == grids
  image = np.full((*size, 3), 200, np.uint8)
  for picture, (rows, columns) in zip(processor.kind.pictures(image), grids, strict=True):
    assert len(picture.patches_NC) == rows * columns * processor.kind.patches_per_token


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("do_resize", False),
    ("do_convert_rgb", False),
    ("do_center_crop", True),
    ("do_pan_and_scan", True),
    ("do_normalize", "yes"),
    ("resample", 0),
    ("resample", "bicubic"),
    ("rescale_factor", -1),
    ("image_mean", [0.5, 0.5]),
    ("image_mean", 0.5),
    ("image_std", [0.5, 0.5, 0]),
    ("image_std", [0.5, 0.5, float("inf")]),
    ("size", 224),
    ("size", {"height": 100, "width": 100}),
    ("size", {"height": 896, "width": 448}),
    ("size", {"height": "896", "width": 896}),
    ("image_processor_type", "PixtralImageProcessor"),
    ("image_processor_type", None),
  ],
)
def test_unknown_values_are_refused_by_name(tmp_path, field, value):
  from grpo_jax.settings import ConfigError

  folder, tokenizer = folder_of(tmp_path, "gemma-3-4b-it", **{field: value})
  with pytest.raises(ConfigError) as raised:
    processors.load(folder, tokenizer)
  message = str(raised.value)
  inside = {"size": "size"}.get(field, field)
  assert "\n" not in message and inside in message and "preprocessor_config.json" in message


def test_folders_without_images_have_no_processor(tmp_path):
  tokenizer = tokenizers.load(GOLDEN / "gemma3")
  assert processors.load(tmp_path, tokenizer) is None
  assert processors.load(tmp_path / "model.gguf", tokenizer) is None
