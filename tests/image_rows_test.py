"""Rows with images become prompts and batches, as TRL's data sets have them."""

import base64
import concurrent.futures
import io
import json
from pathlib import Path
import subprocess
import sys
import threading

import jax
import numpy as np
from PIL import Image
import pytest

import grpo_jax
from grpo_jax.config import Data
from grpo_jax.data.files.given import OfProgram
from grpo_jax.data.images import processor as processors
from grpo_jax.data.images.batches import padded_sizes
from grpo_jax.data.images.source import source_of
from grpo_jax.data.loader import prompt_batch
from grpo_jax.data.prompts import PromptSet
from grpo_jax.data.tasks.tasks import make_task
from grpo_jax.data.tokenizers import tokenizer as tokenizers
from grpo_jax.settings import ConfigError

GOLDEN = Path(__file__).parent / "golden/images"
FILES = GOLDEN / "files"
IMAGE = {"type": "image"}


def text(words):
  return {"type": "text", "text": words}


@pytest.fixture(scope="module", params=["qwen2_5_vl", "gemma3", "gemma4", "smolvlm"])
def family(request):
  tokenizer = tokenizers.load(GOLDEN / request.param)
  return request.param, tokenizer, processors.load(GOLDEN / request.param, tokenizer)


@pytest.fixture(scope="module")
def qwen():
  tokenizer = tokenizers.load(GOLDEN / "qwen3_vl")
  return tokenizer, processors.load(GOLDEN / "qwen3_vl", tokenizer)


def prompts_of(tmp_path, seeing, rows, **settings):
  (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  tokenizer, processor = seeing
  settings = {"chat": True, "max_prompt_tokens": 5000, "task": "columns"} | settings
  data = Data(path=str(tmp_path), **settings)
  return PromptSet(make_task(data).train, tokenizer, data, processor=processor)


def code(name):
  return base64.b64encode((FILES / name).read_bytes()).decode()


@pytest.mark.parametrize("case", ["rgb.png", "alpha.png", "wide.png+small.png+alpha.png"])
def test_rows_give_the_tokens_of_transformers(tmp_path, family, case):
  """In all the ways in which a row can have its images."""
  name, *seeing = family
  expected = np.load(GOLDEN / name / "expected.npz")[f"{case}/ids"].tolist()
  names = case.split("+")
  for file in names:
    (tmp_path / file).write_bytes((FILES / file).read_bytes())
  lead = [text("In these images: ")] if len(names) > 1 else []
  words = [text(f"What is in picture {number}?\n") for number, _ in enumerate(names)]

  def messages(places):
    both = [part for place, word in zip(places, words) for part in (place, word)]
    return [{"role": "user", "content": [*lead, *both]}]

  url = "data:image/png;base64,"
  rows = [
    {"question": messages([IMAGE] * len(names)), "images": names},
    {"question": messages([IMAGE] * len(names)), "images": [str(FILES / file) for file in names]},
    {"question": messages([IMAGE] * len(names)), "images": [code(file) for file in names]},
    {
      "question": messages([IMAGE] * len(names)),
      "images": [{"bytes": code(file), "path": None} for file in names],
    },
    {"question": messages([IMAGE | {"image": file} for file in names]), "images": None},
    {"question": messages([IMAGE | {"path": file} for file in names]), "images": []},
    {
      "question": messages(
        [{"type": "image_url", "image_url": {"url": url + code(file)}} for file in names]
      ),
      "images": None,
    },
  ]
  prompts = prompts_of(tmp_path, seeing, rows)
  batch = prompt_batch(prompts, np.arange(len(rows)))
  for row, length in zip(batch.prompts_PS, batch.prompt_lengths_P):
    assert row[:length].tolist() == expected
  patches = batch.images.patches_PINC
  assert patches.any() and (patches == patches[:1]).all()


def test_images_come_first_in_the_first_message_of_the_user(tmp_path, qwen):
  """As in TRL, where messages have texts alone."""
  question = [
    {"role": "system", "content": "See."},
    {"role": "user", "content": "What is it?"},
    {"role": "assistant", "content": "A cat."},
    {"role": "user", "content": "And this?"},
  ]
  rows = [{"question": question, "image": str(FILES / "rgb.png")}]
  (prompt,) = prompts_of(tmp_path, qwen, rows).make([0])
  contents = [message["content"] for message in prompt.messages]
  assert contents == [
    [text("See.")],
    [IMAGE, text("What is it?")],
    [text("A cat.")],
    [text("And this?")],
  ]
  assert prompt.text.count("<|image_pad|>") == 1  # before it is expanded
  assert prompt.text.index("<|image_pad|>") < prompt.text.index("What is it?")
  rows = prompts_of(tmp_path, qwen, rows).make([0])
  assert rows[0].example["image"].image().size == (44, 30)


def test_prompts_without_a_chat_template(tmp_path, qwen):
  rows = [{"question": "Count.", "images": [str(FILES / "small.png")] * 2}]
  (prompt,) = prompts_of(tmp_path, qwen, rows, chat=False).make([0])
  mark = "<|vision_start|><|image_pad|><|vision_end|>"
  assert prompt.text == mark * 2 + "Count."
  assert prompt.ids.count(qwen[1].token_id) == 2 * prompt.layouts[0].tokens[0][0] ** 2


def test_a_batch_of_different_images(tmp_path, qwen):
  """Rows with no, one and three images of different sizes, by hand."""
  rows = [
    {"question": "None?", "images": []},
    {"question": "One?", "images": [str(FILES / "wide.png")]},
    {
      "question": "Three?",
      "images": [str(FILES / name) for name in ("small.png", "rgb.png", "tall.png")],
    },
  ]
  prompts = prompts_of(tmp_path, qwen, rows)
  batch = prompt_batch(prompts, np.array([1, 0, 2]))
  images, processor = batch.images, qwen[1]
  P, S = batch.prompts_PS.shape
  assert images.patches_PINC.shape[:2] == (P, 3)
  assert images.patches_PINC.shape[3] == 3 * 2 * 16 * 16
  counts = (images.places_PIN2[..., 0] >= 0).sum(2).tolist()
  made = [
    processor.pictures(source_of(str(FILES / name), ""))
    for name in ("wide.png", "small.png", "rgb.png", "tall.png")
  ]
  sizes = [len(pictures[0].patches_NC) for pictures in made]
  assert counts == [[sizes[0], 0, 0], [0, 0, 0], sizes[1:]]
  np.testing.assert_array_equal(images.patches_PINC[2, 1, : sizes[2]], made[2][0].patches_NC)
  assert not images.patches_PINC[0, 1:].any() and (images.places_PIN2[1] == -1).all()
  is_seen = images.seen_PS2[..., 0] >= 0
  assert (is_seen == (batch.prompts_PS == processor.token_id)).all()
  assert is_seen.sum(1).tolist() == [sizes[0] // 4, 0, sum(sizes[1:]) // 4]
  # A prompt without images has the positions of its tokens on all axes, padding too.
  assert (images.positions_PS3[1] == np.arange(S)[:, None]).all()
  assert images.next_P[1] == batch.prompt_lengths_P[1]
  for p in (0, 2):
    length = batch.prompt_lengths_P[p]
    assert images.next_P[p] == images.positions_PS3[p, :length].max() + 1
  assert images.next_P[2] < batch.prompt_lengths_P[2]  # a square of tokens is as long as its side


def test_a_batch_without_images_has_none(tmp_path, qwen):
  rows = [
    {"question": "None?", "image": None},
    {"question": "One?", "image": str(FILES / "rgb.png")},
  ]
  prompts = prompts_of(tmp_path, qwen, rows)
  assert prompt_batch(prompts, np.array([0, 0])).images is None
  assert prompt_batch(prompts, np.array([0, 1])).images is not None


def test_few_shapes():
  """Sizes grow in steps, and never beyond what the data has."""
  assert [padded_sizes(1, n, 4, None)[1] // 4 for n in (1, 2, 3, 4, 5, 6, 7, 9, 13)] == [
    1, 2, 3, 4, 6, 6, 8, 12, 16,
  ]  # fmt: skip
  assert padded_sizes(3, 100, 9, None) == (3, 128 * 9)
  assert padded_sizes(5, 100, 9, (5, 101)) == (5, 101 * 9)
  assert len({padded_sizes(1, n, 1, None) for n in range(1, 5000)}) <= 25


def test_long_prompts_are_dropped_by_their_headers(tmp_path, qwen):
  rows = [{"question": "?", "image": str(FILES / name)} for name in ("small.png", "wide.png")]
  lengths = [len(prompt.ids) for prompt in prompts_of(tmp_path, qwen, rows).make([0, 1])]
  assert lengths[0] < lengths[1]
  prompts = prompts_of(tmp_path, qwen, rows, max_prompt_tokens=lengths[0])
  assert (len(prompts), prompts.dropped) == (1, 1)


def test_parquet_as_datasets_stores_images(tmp_path, qwen):
  pyarrow = pytest.importorskip("pyarrow")
  parquet = pytest.importorskip("pyarrow.parquet")
  names = ["rgb.png", "cmyk.jpg", "turned.jpg", "small.png"]
  stored = [{"bytes": (FILES / name).read_bytes(), "path": name} for name in names]
  raw = [(FILES / name).read_bytes() for name in names]
  lists = [[value, value] for value in stored]
  table = {"problem": [f"What is it, {name}?" for name in names]}
  counts = []
  for number, column in enumerate(({"image": stored}, {"image": raw}, {"images": lists})):
    folder = tmp_path / str(number)
    folder.mkdir()
    parquet.write_table(pyarrow.table(table | column), folder / "train.parquet")
    data = Data(
      task="columns", path=str(folder), chat=True, prompt="{problem}", max_prompt_tokens=5000
    )
    prompts = PromptSet(make_task(data).train, qwen[0], data, processor=qwen[1])
    batch = prompt_batch(prompts, np.arange(4))
    counts.append((batch.images.places_PIN2[..., 0] >= 0).sum((1, 2)))
    sizes = [made.images[0].size() for made in prompts.make(range(4))]
    assert sizes == [(30, 44), (30, 44), (44, 30), (8, 8)]  # the third is turned
  assert (counts[0] == counts[1]).all() and (counts[2] == 2 * counts[0]).all()


def test_large_rows_of_parquet_are_read_a_few_at_a_time(tmp_path):
  pyarrow = pytest.importorskip("pyarrow")
  parquet = pytest.importorskip("pyarrow.parquet")
  from grpo_jax.data.files.parquet import Parquet

  content = [{"bytes": bytes([number]) * 100_000, "path": None} for number in range(64)]
  parquet.write_table(pyarrow.table({"image": content}), tmp_path / "train.parquet")
  rows = Parquet(tmp_path / "train.parquet")
  assert rows._batches.num_record_batches > 5
  assert [rows[number]["image"]["bytes"][0] for number in (0, 9, 10, 63)] == [0, 9, 10, 63]


def test_texts_named_image_reach_models_that_see_none(tmp_path, qwen):
  """A column of that name is no image for them, unless it holds one."""
  tokenizer, _ = qwen
  rows = [{"question": "Which container?", "image": "ubuntu:24.04", "images": ["a", "b"]}]
  prompts = prompts_of(tmp_path, (tokenizer, None), rows)
  batch = prompt_batch(prompts, np.zeros(1, int))
  assert batch.columns["image"] == ["ubuntu:24.04"] and batch.columns["images"] == [["a", "b"]]
  assert batch.images is None
  rows = [{"question": "What?", "image": {"bytes": code("rgb.png"), "path": None}}]
  with pytest.raises(ConfigError, match="line 1: image holds images, which the model does not see"):
    prompts_of(tmp_path, (tokenizer, None), rows)
  rows = [{"question": [{"role": "user", "content": [IMAGE]}], "image": "x"}]
  with pytest.raises(ConfigError, match="a message has an image, which the model does not see"):
    prompts_of(tmp_path, (tokenizer, None), rows)


def test_images_of_a_program(qwen):
  """A task of the user may have images of Pillow, arrays, bytes and paths."""
  pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
  file = io.BytesIO()
  Image.fromarray(pixels).save(file, "PNG")
  given = [Image.fromarray(pixels), pixels, file.getvalue()]
  examples = OfProgram([{"question": "?", "image": image} for image in given], "examples")
  tokenizer, processor = qwen
  data = Data(chat=True, max_prompt_tokens=500)
  batch = prompt_batch(PromptSet(examples, tokenizer, data, processor=processor), np.arange(3))
  assert (batch.images.patches_PINC == batch.images.patches_PINC[:1]).all()
  assert (batch.columns["image"][0].pixels() == pixels).all()


def test_images_are_decoded_once(tmp_path, qwen, monkeypatch):
  """Prompts that were announced, and batches that are made again, use what threads have decoded."""
  decoded = []
  pictures = type(qwen[1]).pictures

  def counted(self, image):
    decoded.append(image.name)
    return pictures(self, image)

  monkeypatch.setattr(type(qwen[1]), "pictures", counted)
  rows = [{"question": "?", "image": str(FILES / name)} for name in ("small.png", "rgb.png")]
  prompts = prompts_of(tmp_path, qwen, rows)
  assert not decoded
  prompts.begin([0, 1])
  for indices in ([0, 1], [1, 0], [1]):
    assert prompt_batch(prompts, np.array(indices)).images is not None
  assert len(decoded) == 2


def test_data_imports_no_jax():
  program = (
    "import sys; import grpo_jax.data.images.of_prompts, grpo_jax.data.tasks.drawn.clocks;"
    " assert not {'jax', 'torch'} & sys.modules.keys()"
  )
  folder = Path(grpo_jax.__file__).parents[1]
  subprocess.run([sys.executable, "-c", program], check=True, cwd=folder)


class OfTwo:
  """One of two processes, which are threads here."""

  def __init__(self, index, barrier, table):
    self._index, self._barrier, self._table = index, barrier, table

  def own_rows(self, count):
    half = -(-count // 2)
    return (slice(0, half), slice(half, count))[self._index]

  def join_rows(self, tree):
    leaves, kind = jax.tree.flatten(tree)
    self._table[self._index] = leaves
    self._barrier.wait()
    joined = [np.concatenate(parts) for parts in zip(*(self._table[i] for i in (0, 1)))]
    self._barrier.wait()
    return jax.tree.unflatten(kind, joined)

  def on_each(self, act):
    return act()


def test_two_processes_have_the_images_of_one(tmp_path, qwen):
  """Each decodes its rows. Both pad to the largest of all."""
  names = ("small.png", "rgb.png", "wide.png")
  rows = [
    {"question": "?", "images": [str(FILES / name) for name in names[: n + 1]]} for n in range(3)
  ]
  prompts = prompts_of(tmp_path, qwen, rows)
  expected = prompt_batch(prompts, np.arange(3)).images
  barrier, table = threading.Barrier(2, timeout=60), {}

  def images_of(index):
    processes = OfTwo(index, barrier, table)
    own = prompts_of(tmp_path / str(index), qwen, rows)
    # Not `images`, whose lock would make one thread wait for the other.
    return prompt_batch(own, np.arange(3), processes).load_images()

  for index in (0, 1):
    (tmp_path / str(index)).mkdir()
  with concurrent.futures.ThreadPoolExecutor(2) as threads:
    found = [*threads.map(images_of, (0, 1))]
  for images in found:
    assert type(images) is type(expected)
    jax.tree.map(np.testing.assert_array_equal, images, expected)
