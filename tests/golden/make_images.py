"""Writes images of many kinds, and what transformers' processors make of them.

  python tests/golden/make_images.py

Each folder of a family has the files that `processor.save_pretrained` writes, with a small
tokenizer, and expected.npz. The pixels are those of the processors that AutoProcessor takes where
torchvision is installed. An image is opened as the package datasets opens it: upright. A digest is
of all pixels, as bytes before they were scaled. The first numbers after scaling are beside it.

Made with transformers 5.23.0, torch 2.15.0, torchvision 0.29.2 and Pillow 13.0.0.
"""

# ruff: noqa: E501, because templates are long lines

import hashlib
import io
import json
from pathlib import Path
import shutil
import types

import numpy as np
from PIL import Image, ImageOps
import tokenizers
from tokenizers import decoders, pre_tokenizers
import torch
import transformers
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_vl import modeling_qwen3_vl

FOLDER = Path(__file__).parent / "images"
WORDS = "What is in the picture of these images? Count them. user model assistant system"
QWEN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
GEMMA3 = "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }}\n{% if m.content is string %}{{ m.content | trim }}{% else %}{% for c in m.content %}{% if c.type == 'image' %}<start_of_image>{% else %}{{ c.text | trim }}{% endif %}{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
GEMMA4 = (
  GEMMA3.replace("<start_of_image>", "<|image|>")
  .replace("<start_of_turn>", "<|turn>")
  .replace("<end_of_turn>", "<turn|>")
)
SMOL = "<|im_start|>{% for m in messages %}{{ m.role | capitalize }}{% if m.content[0].type == 'image' %}:{% else %}: {% endif %}{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% else %}<image>{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
QWEN_TOKENS = (
  "<|im_start|>",
  "<|im_end|>",
  "<|vision_start|>",
  "<|vision_end|>",
  "<|image_pad|>",
  "<|video_pad|>",
)
SMOL_TOKENS = (
  "<|im_start|>",
  "<end_of_utterance>",
  "<image>",
  "<fake_token_around_image>",
  "<global-img>",
  *(f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)),
)
SMALL = {"max_image_size": {"longest_edge": 64}, "size": {"longest_edge": 192}}


def picture(height, width, channels=3):
  """Bands and a bright square, which compress well and whose edges every filter rounds."""
  y, x = np.mgrid[:height, :width]
  planes = [(x * (7 + c) + y * 5 * (c + 1)) % 256 for c in range(channels)]
  image = np.stack(planes, -1).astype(np.uint8)
  image[height // 3 : height // 2 + 1, width // 4 : width // 2 + 1] = 255
  image[height // 2 + 1 :, : width // 5] = 0
  return image


def write_files(folder):
  """The images, one of each kind."""
  rgb = Image.fromarray(picture(30, 44))
  rgba = Image.fromarray(picture(26, 35, 4), "RGBA")
  rgb.save(folder / "rgb.png")
  Image.fromarray(picture(1, 4000)).save(folder / "line.png")
  Image.fromarray(picture(37, 501)).save(folder / "wide.png")
  Image.fromarray(picture(8, 8)).save(folder / "small.png")
  Image.fromarray(picture(25, 44)).save(folder / "odd.png")  # 109 x 192 for tiles, made even
  Image.fromarray(picture(190, 61)).save(folder / "tall.png")
  rgb.convert("L").save(folder / "grey.png")
  rgba.save(folder / "alpha.png")
  rgba.convert("LA").save(folder / "grey_alpha.png")
  palette = rgb.quantize(16)
  palette.save(folder / "palette.png", transparency=3)
  rgb.convert("CMYK").save(folder / "cmyk.jpg", quality=90)
  deep = (picture(20, 33, 1)[..., 0].astype(np.uint16) * 2).astype(np.uint16)
  Image.fromarray(deep).save(folder / "deep.png")
  exif = Image.Exif()
  exif[0x0112] = 6
  rgb.save(folder / "turned.jpg", quality=95, exif=exif)
  rgb.save(folder / "turned.png", exif=exif)
  frames = [rgb.quantize(8), rgb.rotate(180).quantize(8)]
  frames[0].save(folder / "moving.gif", save_all=True, append_images=frames[1:])
  rgb.save(folder / "still.webp", lossless=True)


def tokenizer(tokens, **roles):
  """Bytes, a few words and special tokens."""
  made = tokenizers.Tokenizer(tokenizers.models.BPE())
  made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  made.decoder = decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
  )
  made.train_from_iterator([WORDS] * 3 + ["\n\n\n\n"] * 9, trainer)
  made.add_special_tokens(
    [tokenizers.AddedToken(t, special=True, normalized=False) for t in tokens]
  )
  return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **roles)


def families():
  """Processors by the names of their folders, with the vision_config of their models."""
  qwen = dict(tokens=QWEN_TOKENS, eos_token="<|im_end|>")
  video = transformers.Qwen2VLVideoProcessor()
  image = transformers.Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=28 * 28 * 40)
  made = transformers.Qwen2_5_VLProcessor(image, tokenizer(**qwen), video, chat_template=QWEN)
  yield "qwen2_5_vl", made, {"patch_size": 14}
  image = transformers.Qwen2VLImageProcessor(
    size={"shortest_edge": 8192, "longest_edge": 32768},
    patch_size=16,
    image_mean=[0.5] * 3,
    image_std=[0.5] * 3,
  )
  made = transformers.Qwen3VLProcessor(
    image, tokenizer(**qwen), transformers.Qwen3VLVideoProcessor(), chat_template=QWEN
  )
  yield "qwen3_vl", made, {"patch_size": 16}
  roles = dict(bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")
  named = dict(
    image_token="<image_soft_token>", boi_token="<start_of_image>", eoi_token="<end_of_image>"
  )
  tokens = (*roles.values(), *named.values(), "<start_of_turn>", "<end_of_turn>")
  image = transformers.Gemma3ImageProcessor(size={"height": 112, "width": 112})
  made = transformers.Gemma3Processor(
    image,
    tokenizer(tokens, extra_special_tokens=named, **roles),
    chat_template=GEMMA3,
    image_seq_length=16,
  )
  yield "gemma3", made, {"patch_size": 14}
  named = dict(image_token="<|image|>", boi_token="<|image>", eoi_token="<image|>")
  named |= dict(audio_token="<|audio|>", boa_token="<|audio>", eoa_token="<audio|>")
  tokens = (*roles.values(), *named.values(), "<|turn>", "<turn|>")
  made = transformers.Gemma4Processor(
    transformers.Gemma4AudioFeatureExtractor(),
    transformers.Gemma4ImageProcessor(max_soft_tokens=70),
    tokenizer(tokens, extra_special_tokens=named, **roles),
    transformers.Gemma4VideoProcessor(),
    chat_template=GEMMA4,
  )
  yield "gemma4", made, {"patch_size": 16}
  smol = dict(tokens=SMOL_TOKENS, eos_token="<end_of_utterance>")
  image = transformers.SmolVLMImageProcessor(**SMALL)
  made = transformers.SmolVLMProcessor(
    image,
    tokenizer(**smol),
    transformers.SmolVLMVideoProcessor(),
    image_seq_len=4,
    chat_template=SMOL,
  )
  yield "smolvlm", made, {"patch_size": 16}
  image = transformers.Idefics3ImageProcessor(**SMALL | {"do_image_splitting": False})
  made = transformers.Idefics3Processor(
    image, tokenizer(**smol), image_seq_len=4, chat_template=SMOL
  )
  yield "idefics3_whole", made, {"patch_size": 16}


def conversation(names):
  """Texts between images, as parts."""
  parts = [{"type": "text", "text": "In these images: "}] if len(names) > 1 else []
  for number, _ in enumerate(names):
    parts += [{"type": "image"}, {"type": "text", "text": f"What is in picture {number}?\n"}]
  return [{"role": "user", "content": parts}]


def as_bytes(pixels, image_processor):
  """The bytes that were scaled to these numbers."""
  pixels = np.asarray(pixels, np.float64)
  if image_processor.do_normalize:
    shape = [3 if size == 3 else 1 for size in pixels.shape]
    std, mean = (
      np.reshape(x, shape) for x in (image_processor.image_std, image_processor.image_mean)
    )
    pixels = pixels * std + mean
  found = np.rint(pixels * 255)
  assert np.abs(pixels * 255 - found).max() < 1e-3
  return found.astype(np.uint8)


def pictures_of(inputs, processor):
  """(numbers of each picture, their bytes) in the order in which grpo_jax has them."""
  own, values = processor.image_processor, inputs["pixel_values"]
  if "image_grid_thw" in inputs:
    counts = inputs["image_grid_thw"].prod(-1).tolist()
    parts = [part.numpy() for part in values.split(counts)]
    shape = (-1, 3, own.temporal_patch_size * own.patch_size**2)
    return parts, [as_bytes(part.reshape(shape), own) for part in parts]
  if "image_position_ids" in inputs:
    kept = (inputs["image_position_ids"] >= 0).all(-1)
    parts = [value[keep].numpy() for value, keep in zip(values, kept)]
    return parts, [as_bytes(part, own) for part in parts]
  values = values.reshape(-1, *values.shape[-3:])
  if "pixel_attention_mask" in inputs:  # a batch is padded with empty tiles
    values = values[inputs["pixel_attention_mask"].reshape(len(values), -1).bool().all(1)]
  parts = [value.numpy() for value in values]
  return parts, [as_bytes(part, own) for part in parts]


MODELS = {
  "qwen2_5_vl": [modeling_qwen2_5_vl.Qwen2_5_VLModel],
  "qwen3_vl": [modeling_qwen3_vl.Qwen3VLModel, modeling_qwen3_5.Qwen3_5Model],
}


def positions(name, inputs, merge):
  """The positions on three axes, in which the models agree, and the next one."""
  found = []
  for model in MODELS[name]:
    config = types.SimpleNamespace(spatial_merge_size=merge, tokens_per_second=2)
    fake = types.SimpleNamespace(config=types.SimpleNamespace(vision_config=config))
    fake.get_vision_position_ids = types.MethodType(model.get_vision_position_ids, fake)
    ids, delta = model.get_rope_index(
      fake,
      inputs["input_ids"],
      inputs["mm_token_type_ids"],
      image_grid_thw=inputs["image_grid_thw"],
    )
    found.append((ids[:, 0].T.numpy(), int(delta[0, 0]) + inputs["input_ids"].shape[1]))
  for ids, following in found[1:]:
    assert (ids == found[0][0]).all() and following == found[0][1]
  return found[0]


def main():
  shutil.rmtree(FOLDER, ignore_errors=True)
  files = FOLDER / "files"
  files.mkdir(parents=True)
  write_files(files)
  names = sorted(path.name for path in files.iterdir())
  cases = [[name] for name in names] + [["wide.png", "small.png", "alpha.png"]]
  for name, processor, vision in families():
    folder = FOLDER / name
    processor.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"vision_config": vision}))
    loaded = transformers.AutoImageProcessor.from_pretrained(folder)
    assert loaded.backend == "torchvision" and type(loaded) is type(processor.image_processor), (
      loaded
    )
    expected = {}
    for case in cases:
      key = "+".join(case)
      images = [ImageOps.exif_transpose(Image.open(files / file)) for file in case]
      talk = conversation(case)
      text = processor.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
      try:
        inputs = processor(text=[text], images=[images], return_tensors="pt")
      except ValueError as error:
        print(name, key, error)
        continue
      numbers, pixels = pictures_of(inputs, processor)
      digest = hashlib.sha256(b"".join(part.tobytes() for part in pixels)).digest()
      expected[f"{key}/ids"] = inputs["input_ids"][0].numpy().astype(np.int16)
      expected[f"{key}/digest"] = np.frombuffer(digest, np.uint8)
      expected[f"{key}/first"] = np.concatenate([part.reshape(-1)[:60] for part in numbers])[
        :600
      ].astype(np.float32)
      if name in MODELS:
        axes, following = positions(name, inputs, processor.image_processor.merge_size)
        expected[f"{key}/positions"] = axes.astype(np.int16)
        expected[f"{key}/next"] = np.int32(following)
    plain = processor.apply_chat_template(
      [{"role": "user", "content": [{"type": "text", "text": "Count them."}]}],
      tokenize=False,
      add_generation_prompt=True,
    )
    expected["text/ids"] = np.array(processor.tokenizer(plain)["input_ids"], np.int16)
    file = io.BytesIO()
    np.savez_compressed(file, **expected)
    (folder / "expected.npz").write_bytes(file.getvalue())


if __name__ == "__main__":
  torch.manual_seed(0)
  main()
