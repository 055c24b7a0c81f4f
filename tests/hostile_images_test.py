"""Hostile images and rows: each is one line that names the row, and never a crash."""

import base64
import functools
import http.server
import io
import json
import os
from pathlib import Path
import struct
import threading
import zlib

import numpy as np
from PIL import Image, PngImagePlugin
import pytest

from grpo_jax.config import Data
from grpo_jax.data.images import of_prompts, source
from grpo_jax.data.images import processor as processors
from grpo_jax.data.loader import prompt_batch
from grpo_jax.data.prompts import PromptSet
from grpo_jax.data.tasks.tasks import make_task
from grpo_jax.data.tokenizers import tokenizer as tokenizers
from grpo_jax.settings import ConfigError, RunFailed

FOLDER = Path(__file__).parent / "golden/images"


def png(height=20, width=30, mode="RGB", **options):
  file = io.BytesIO()
  noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
  Image.fromarray(noise).convert(mode).save(file, options.pop("format", "PNG"), **options)
  return file.getvalue()


def chunk(kind, data):
  return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of_size(width, height, body=b""):
  """A PNG whose header says what we like."""
  header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
  parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b"")
  return b"\x89PNG\r\n\x1a\n" + parts


def gif_of_size(width, height):
  return b"GIF89a" + struct.pack("<HH", width, height) + b"\0\0\0,\0\0\0\0\1\0\1\0\0\2\1\0\0;"


def bmp_of_size(width, height):
  return b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, width, height, 1, 24, *[0] * 6)


def code(data):
  return base64.b64encode(data).decode()


def stored(data):
  return {"bytes": code(data), "path": None}


def bitten(data, at, by=b"\xff\x00\xff\x00"):
  return data[:at] + by + data[at + len(by) :]


JPEG = functools.partial(png, format="JPEG")
WEBP = functools.partial(png, format="WEBP")
TIFF = functools.partial(png, format="TIFF")

# Contents of files, and a word that the line has.
FILES = {
  "empty": (b"", "empty"),
  "one byte": (b"\x89", "cannot be read as an image"),
  "text": (b"hello, I am a picture\n", "cannot be read as an image"),
  "html": (b"<html><body>404 not found</body></html>", "cannot be read as an image"),
  "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "cannot be read as an image"),
  "pdf": (b"%PDF-1.7\n" + b"0" * 200, "cannot be read as an image"),
  "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "cannot be read as an image"),
  "ico": (b"\0\0\1\0\1\0\x10\x10" + b"\0" * 64, "cannot be read as an image"),
  "psd": (b"8BPS\0\1" + b"\0" * 64, "cannot be read as an image"),
  "fits": (b"SIMPLE  =                    T" + b" " * 3000, "cannot be read as an image"),
  "zip": (b"PK\3\4" + b"\0" * 100, "cannot be read as an image"),
  "zeros": (b"\0" * 5000, "cannot be read as an image"),
  "signature": (b"\x89PNG\r\n\x1a\n", "cannot be read as an image"),
  "png half": (png()[:700], "damaged PNG"),
  "png header": (png()[:40], "cannot be read as an image"),
  "png bitten": (bitten(png(), 300), "damaged PNG"),
  "png wrong length": (png_of_size(30, 20, b"\0" * 100), "damaged PNG"),
  "png no data": (png_of_size(30, 20), "damaged PNG"),
  "png zero wide": (png_of_size(0, 20), ""),
  "png zero high": (png_of_size(20, 0), ""),
  "png bomb": (png_of_size(60_000, 60_000), "pixels"),
  "png huge": (png_of_size(8_000, 7_000), "pixels"),
  "png largest": (png_of_size(2**31 - 1, 2**31 - 1), "pixels"),
  "png two billion": (png_of_size(2**31 - 1, 1), "pixels"),
  "png bad crc": (bitten(png(), 29, b"\1\2\3\4"), "cannot be read as an image"),
  "png text bomb": (
    png_of_size(30, 20)[:33]
    + chunk(b"zTXt", b"a\0\0" + zlib.compress(b"0" * 90_000_000))
    + png()[33:],
    "cannot be read as an image",
  ),
  "png chunks first": (png()[:33] + chunk(b"abCd", b"") * 10**5 + png()[33:], "10,000 chunks"),
  "png chunks last": (png()[:-12] + chunk(b"abCd", b"") * 10**5 + png()[-12:], "10,000 chunks"),
  "jpeg half": (JPEG()[:700], "damaged JPEG"),
  "jpeg tables": (JPEG()[:500], "cannot be read as an image"),
  "jpeg header": (JPEG()[:30], ""),
  "jpeg start": (b"\xff\xd8\xff", "cannot be read as an image"),
  "webp half": (WEBP()[:200], ""),
  "webp header": (WEBP()[:16], "cannot be read as an image"),
  "tiff half": (TIFF()[:400], ""),
  "tiff loop": (b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", 0) + struct.pack("<I", 8), ""),
  "gif bomb": (gif_of_size(65_535, 65_535), "pixels"),
  "gif empty": (gif_of_size(30, 20)[:13] + b";", ""),
  "gif header": (b"GIF89a", "cannot be read as an image"),
  "bmp bomb": (bmp_of_size(100_000, 100_000), "pixels"),
  "bmp short": (bmp_of_size(40, 40), "damaged BMP"),
  "bmp zero": (bmp_of_size(0, 40), ""),
  "ppm bomb": (b"P6\n99999 99999\n255\n", "pixels"),
  "ppm short": (b"P6\n40 40\n255\n", "damaged PPM"),
  "ppm words": (b"P6\nforty forty\n255\n", "cannot be read as an image"),
  "line": (png(1, 4000), "cannot see"),  # of the family Qwen2.5-VL
  "bad exif": (JPEG(exif=b"Exif\0\0II*\0\xff\xff\xff\xff"), None),
}

# Values of a row's column, and a word that the line has.
VALUES = {
  "missing": ("no/such/file.png", "no file 'no/such/file.png'"),
  "empty text": ("", "empty"),
  "spaces": ("   ", "no file"),
  "a folder": (".", "folder"),
  "a pipe": ("pipe", "pipe"),
  "forbidden": ("forbidden.png", None),  # root may read it
  "a long name": ("x" * 1000, "no file"),
  "a NUL": ("a\0b.png", "no file"),
  "a surrogate": ("\ud800.png", "surrogate pair"),
  "a URL": ("http://127.0.0.1:9/cat.png", "data.image_urls"),
  "another scheme": ("ftp://example.com/cat.png", "no file"),
  "a data URL of text": ("data:image/png,hello", "not base64"),
  "a broken data URL": ("data:image/png;base64,@@@@", "neither a file nor base64"),
  "an empty data URL": ("data:image/png;base64,", "empty"),
  "a data URL of html": ("data:text/html;base64," + code(b"<html>"), "cannot be read as an image"),
  "base64 of text": (code(b"\x89PNG" + b"hello " * 400), "cannot be read as an image"),
  "broken base64": ("A" * 2001 + "!", "neither a file nor base64"),
  "a number": (7, "must be a path"),
  "a truth": (True, "must be a path"),
  "an object": ({"width": 3}, "must be a path"),
  "an empty object": ({}, "must be a path"),
  "an object in an object": ({"bytes": {"bytes": "x"}}, "must be a path"),
  "bytes null": ({"bytes": None, "path": None}, "must be a path"),
  "path missing": ({"bytes": None, "path": "gone.png"}, "no file"),
  "a list of null": ([None], "must be a path"),
  "a list of lists": ([["rgb.png"]], "must be a path"),
  "100,000 images": (["rgb.png"] * 100_000, "100,000 images"),
  "65 images": (["rgb.png"] * 65, "65 images"),
  "two images, one place": (["rgb.png", "rgb.png"], "places for images"),
  "no image, one place": (None, "places for images"),
}


@pytest.fixture(scope="module")
def seeing():
  tokenizer = tokenizers.load(FOLDER / "qwen2_5_vl")
  return tokenizer, processors.load(FOLDER / "qwen2_5_vl", tokenizer)


def run(tmp_path, seeing, rows, **settings):
  """Makes prompts of rows and the images of a batch of all of them."""
  (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  settings = {"prompt": "{question}", "max_prompt_tokens": 10_000} | settings
  data = Data(task="columns", path=str(tmp_path), chat=True, **settings)
  tokenizer, processor = seeing
  prompts = PromptSet(make_task(data).train, tokenizer, data, processor=processor)
  return prompt_batch(prompts, np.arange(len(prompts))).images


def error_of(tmp_path, seeing, rows, line, **settings):
  with pytest.raises((ConfigError, RunFailed)) as raised:
    run(tmp_path, seeing, rows, **settings)
  message = str(raised.value)
  assert "\n" not in message and len(message) < 700, message
  assert f"train.jsonl line {line}" in message, message
  return message


GOOD = {"question": "What is it?", "image": code(png())}


@pytest.mark.parametrize("name", FILES)
def test_hostile_files(tmp_path, seeing, name):
  content, word = FILES[name]
  (tmp_path / "bad").write_bytes(content)
  rows = [GOOD, GOOD | {"image": "bad"}]
  if word is None:
    assert run(tmp_path, seeing, rows) is not None
    return
  message = error_of(tmp_path, seeing, rows, 2)
  assert word in message, message
  assert "bad)" in message  # the file's name


@pytest.mark.parametrize("name", FILES)
def test_hostile_bytes(tmp_path, seeing, name):
  """The same contents in base64, as jsonl has them, and in an object."""
  content, word = FILES[name]
  rows = [GOOD | {"image": None, "images": [code(png())]}] * 2
  rows += [GOOD | {"image": None, "images": [code(png()), stored(content)]}]
  if word is None:
    assert run(tmp_path, seeing, rows) is not None
    return
  message = error_of(tmp_path, seeing, rows, 3)
  assert word in message, message


@pytest.mark.parametrize("name", VALUES)
def test_hostile_values(tmp_path, seeing, name):
  value, word = VALUES[name]
  (tmp_path / "rgb.png").write_bytes(png())
  (tmp_path / "forbidden.png").write_bytes(png())
  os.chmod(tmp_path / "forbidden.png", 0)
  os.mkfifo(tmp_path / "pipe")
  column = "images" if isinstance(value, list) else "image"
  question = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
  row = {"question": question, "image": None, "images": None} | {column: value}
  good = row | {"image": code(png()), "images": None}
  if word is None:
    try:
      run(tmp_path, seeing, [good, row])
    except (ConfigError, RunFailed) as error:
      assert "train.jsonl line 2" in str(error) and "\n" not in str(error)
    return
  message = error_of(tmp_path, seeing, [good, row], 2)
  assert word in message, message


IMAGE, TEXT = {"type": "image"}, {"type": "text", "text": "?"}
MESSAGES = {
  "a video": ([{"type": "video", "video": "x.mp4"}], "must be a text or an image"),
  "a sound": ([{"type": "audio"}], "must be a text or an image"),
  "no type": ([{"text": "?"}], "must be a text or an image"),
  "a number": ([7], "must be a text or an image"),
  "a text that is none": ([{"type": "text", "text": 7}], "must be a text or an image"),
  "a missing file": ([IMAGE | {"image": "gone.png"}], "no file"),
  "a missing path": ([IMAGE | {"path": "gone.png"}], "no file"),
  "a URL": ([{"type": "image_url", "image_url": {"url": "https://x.y/z.png"}}], "data.image_urls"),
  "no URL": ([{"type": "image_url"}], "must be a path"),
  "two places": ([IMAGE, IMAGE, TEXT], "places for images"),
  "100,000 images": ([IMAGE | {"image": "x.png"}] * 100_000, "100,001 images"),
  "a token of images": ([IMAGE, {"type": "text", "text": "<|image_pad|>"}], "places"),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_hostile_messages(tmp_path, seeing, name):
  content, word = MESSAGES[name]
  if name == "100,000 images":
    content = [IMAGE, *content]
  good = {"question": [{"role": "user", "content": [IMAGE, TEXT]}], "image": code(png())}
  row = good | {"question": [{"role": "user", "content": content}]}
  if IMAGE not in content:
    row["image"] = None
  message = error_of(tmp_path, seeing, [good, row], 2)
  assert word in message, message


def test_there_are_enough():
  assert 2 * len(FILES) + len(VALUES) + len(MESSAGES) >= 120


@pytest.mark.parametrize(
  ("mode", "options"),
  [
    ("CMYK", {"format": "JPEG"}),
    ("CMYK", {"format": "TIFF"}),
    ("L", {}),
    ("1", {}),
    ("LA", {}),
    ("P", {}),
    ("RGBA", {"format": "WEBP"}),
    ("RGB", {"format": "GIF", "save_all": True, "append_images": [Image.new("RGB", (30, 20))] * 9}),
    ("RGB", {"format": "WEBP", "save_all": True, "append_images": [Image.new("RGB", (30, 20))]}),
    ("RGB", {"format": "PNG", "save_all": True, "append_images": [Image.new("RGB", (30, 20))]}),
    ("RGB", {"format": "TIFF", "save_all": True, "append_images": [Image.new("RGB", (30, 20))]}),
    ("YCbCr", {"format": "TIFF"}),
    ("LAB", {"format": "TIFF"}),
    ("F", {"format": "TIFF"}),
  ],
)
def test_odd_images_that_are_fine(mode, options):
  """Of an animation, the first frame is read."""
  image = source.source_of(png(20, 30, mode, **options), "here")
  assert image.size() == (20, 30)
  pixels = image.pixels()
  assert pixels.shape == (20, 30, 3) and pixels.dtype == np.uint8
  assert pixels.std() > 20  # not the empty frames that follow


@pytest.mark.parametrize("place", ["before", "behind"])
def test_turned_pngs_are_known_by_their_headers(place):
  """A PNG may have its EXIF behind its pixels, where Pillow finds it when it decodes."""
  exif = Image.Exif()
  exif[0x0112] = 6
  parts = {"before": (33, png()), "behind": (-12, png())}
  at, plain = parts[place]
  turned = plain[:at] + chunk(b"eXIf", exif.tobytes()[6:]) + plain[at:]
  image = source.source_of(turned, "here")
  assert image.size() == (30, 20) == image.pixels().shape[:2]
  assert source.source_of(plain, "here").size() == (20, 30)


# How the pixels of a file become the upright image, by the orientation of EXIF.
UPRIGHT = {
  0: lambda x: x,
  1: lambda x: x,
  2: lambda x: x[:, ::-1],
  3: lambda x: x[::-1, ::-1],
  4: lambda x: x[::-1],
  5: lambda x: x.swapaxes(0, 1),
  6: lambda x: np.rot90(x, -1),
  7: lambda x: x[::-1, ::-1].swapaxes(0, 1),
  8: lambda x: np.rot90(x),
  9: lambda x: x,
}
XMP = (
  '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF><rdf:Description tiff:Orientation="{}"/></rdf:RDF>'
  "</x:xmpmeta>"
)


def xmp_of(orientation):
  return {"xmp": XMP.format(orientation).encode()}


def exif_of(orientation):
  exif = Image.Exif()
  exif[0x0112] = orientation
  return {"exif": exif}


def png_text_of(orientation):
  texts = PngImagePlugin.PngInfo()
  texts.add_itxt("XML:com.adobe.xmp", XMP.format(orientation))
  return {"pnginfo": texts}


TURNED = [
  ({"format": "PNG"}, exif_of),
  ({"format": "PNG"}, png_text_of),
  ({"format": "WEBP", "lossless": True}, exif_of),
  ({"format": "WEBP", "lossless": True}, xmp_of),
  ({"format": "JPEG", "quality": 100, "subsampling": 0}, exif_of),
  ({"format": "JPEG", "quality": 100, "subsampling": 0}, xmp_of),
  ({"format": "MPO", "quality": 100, "subsampling": 0}, exif_of),
  ({"format": "TIFF"}, exif_of),
  ({"format": "TIFF", "compression": "tiff_lzw"}, exif_of),
  ({"format": "TIFF", "compression": "jpeg", "quality": 100}, exif_of),
  ({"format": "TIFF", "big_tiff": True}, exif_of),
  ({"format": "TIFF"}, lambda orientation: {"tiffinfo": {700: xmp_of(orientation)["xmp"]}}),
]


@pytest.mark.parametrize(
  "options, says, orientation",
  [
    (options, says, orientation)
    for options, says in TURNED
    for orientation in UPRIGHT
    if not ("compression" in options and orientation in (0, 9))  # which libtiff does not write
  ],
)
def test_turned_images_are_known_by_their_headers(tmp_path, options, says, orientation):
  """Whoever turns the pixels, our code or Pillow: they are turned once."""
  # Sixteen squares of one colour each, so that JPEG keeps them.
  colors = np.random.default_rng(0).integers(0, 256, (2, 3, 3), np.uint8)
  stored = colors.repeat(16, 0).repeat(16, 1)
  file = tmp_path / "image"
  image = Image.fromarray(stored)
  image.save(file, **options, **says(orientation))
  expected = UPRIGHT[orientation](stored)
  for value in (str(file), file.read_bytes(), Image.open(file)):
    found = source.source_of(value, "here")
    assert found.size() == found.pixels().shape[:2]
    if says is exif_of:  # older versions of Pillow do not write XMP into all of these formats
      assert found.size() == expected.shape[:2]
      assert np.abs(found.pixels().astype(int) - expected).max() <= 8


@pytest.mark.parametrize("format", ["TIFF", "JPEG"])
def test_a_turned_image_reaches_its_batch(tmp_path, seeing, format):
  turned = png(56, 84, format=format, **exif_of(6))
  images = run(tmp_path, seeing, [GOOD | {"image": code(turned)}])
  assert images is not None and images.patches_PINC.shape[1] == 1


def test_limits_on_bytes(tmp_path, monkeypatch):
  monkeypatch.setattr(source, "MOST_BYTES", 1000)
  large = png(40, 40)
  (tmp_path / "large.png").write_bytes(large)
  for value in (large, str(tmp_path / "large.png"), code(large)):
    with pytest.raises(ConfigError, match="at most 1,000 are read"):
      source.source_of(value, "here").size()


def test_a_header_is_enough_at_the_start(tmp_path, seeing):
  """A damaged image is found when its batch comes. Nothing is decoded before."""
  (tmp_path / "train.jsonl").write_text(
    json.dumps(GOOD) + "\n" + json.dumps(GOOD | {"image": code(png()[:700])}) + "\n"
  )
  data = Data(task="columns", path=str(tmp_path), chat=True, max_prompt_tokens=10_000)
  tokenizer, processor = seeing
  prompts = PromptSet(make_task(data).train, tokenizer, data, processor=processor)
  assert len(prompts) == 2
  assert prompt_batch(prompts, np.array([0])).images is not None
  with pytest.raises(RunFailed, match="line 2: image is a damaged PNG"):
    prompt_batch(prompts, np.array([0, 1])).images  # noqa: B018


class Handler(http.server.BaseHTTPRequestHandler):
  def do_GET(self):
    self.server.asked.append(self.path)
    self.send_response(404 if self.path == "/gone" else 200)
    self.end_headers()
    self.wfile.write(png() if self.path == "/cat" else b"no")

  def log_message(self, *args):
    del args


@pytest.fixture
def address():
  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
  server.asked = []
  threading.Thread(target=server.serve_forever, daemon=True).start()
  yield f"http://127.0.0.1:{server.server_address[1]}", server.asked
  server.shutdown()


def test_urls_need_a_key_and_are_downloaded_once(tmp_path, seeing, address):
  url, asked = address
  rows = [{"question": "?", "image": f"{url}/cat"}] * 2
  assert "data.image_urls=True" in error_of(tmp_path, seeing, rows, 1)
  assert not asked
  assert run(tmp_path, seeing, rows, image_urls=True).patches_PINC.any()
  assert asked == ["/cat"]
  for path in ("gone", "text"):
    message = error_of(
      tmp_path, seeing, [rows[0], {"question": "?", "image": f"{url}/{path}"}], 2, image_urls=True
    )
    assert path in message
  closed = [{"question": "?", "image": "http://127.0.0.1:1/cat"}]
  assert "cannot be downloaded" in error_of(tmp_path, seeing, closed, 1, image_urls=True)


def test_an_example_of_a_model_without_a_tower_gets_no_columns():
  example = {"question": "?", "image": of_prompts.GivenImages("cat.png", "here", "")}
  assert of_prompts.without_images(example) == {"question": "?", "image": "cat.png"}


def test_a_smaller_limit(tmp_path, seeing, monkeypatch):
  monkeypatch.setattr(source, "MOST_PIXELS", 599)
  assert "30 x 20 pixels, more than 599" in error_of(tmp_path, seeing, [GOOD], 1)
  monkeypatch.undo()
  monkeypatch.setattr(source, "MOST_IMAGES", 1)
  one, two = ({"question": "?", "images": [code(png())] * count} for count in (1, 2))
  assert "a prompt may have 1" in error_of(tmp_path, seeing, [one, two], 2)
