"""Images in conversations of the endpoint: answers are the policy's, and wrong ones one line."""

import base64
from concurrent.futures import ThreadPoolExecutor
import dataclasses
import functools
import io
import json
import re
import socket
import threading
import time
import zlib

import numpy as np
import openai
from PIL import Image
import pytest
from serving_parts import Scripted, serving
from small_run import small_run
from small_vision import FAMILIES, make_checkpoint, vision_config

from grpo_jax.data.images import processor, source
from grpo_jax.data.tokenizers import tokenizer
from grpo_jax.evaluation.policy import Policy
from grpo_jax.sampler.sampling import decoding_of
from grpo_jax.serving.chats import chat_request
from grpo_jax.serving.device_flight import Sizes
from grpo_jax.serving.engine import Engine
from grpo_jax.serving.images import ImageReader, UnreadImages
from grpo_jax.serving.requests import Limits
from grpo_jax.serving.server import ServerSettings
from grpo_jax.serving.writer import AnswerWriter
from tests.serve_test import post

S, T = 320, 8
IDS = {"return_token_ids": True}


def picture(seed=0, height=20, width=24):
  pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
  return Image.fromarray(pixels)


def url(image, kind="PNG"):
  file = io.BytesIO()
  image.save(file, kind)
  return f"data:image/{kind.lower()};base64," + base64.b64encode(file.getvalue()).decode()


def shown(image, **rest):
  return {"type": "image_url", "image_url": {"url": url(image), **rest}}


def text(said):
  return {"type": "text", "text": said}


class Served:
  """A policy that sees images, and an endpoint around it."""

  def __init__(self, folder, family):
    config = vision_config(folder, family=family)
    run = small_run(config)
    self.policy = Policy("it", run, run.initial_params(), 0)
    shape = run.parameters.sampling.model
    sizes = Sizes(rows=4, prompt_tokens=S, waiting=40, texts=4)
    params = run.parameters.for_sampling(self.policy.params)
    decoding = dataclasses.replace(decoding_of(config.sampling, shape.stop_ids), max_tokens=T)
    self.engine = Engine(shape, decoding, sizes, params, 1)
    self.engine.start()
    reader = ImageReader(run.processor)
    self.serving = serving(
      self.engine, run.tokenizer, shape.vocab_size, ServerSettings("m", grace=0.5), images=reader
    )

  def __enter__(self):
    _, self.address = self.serving.__enter__()
    self.client = openai.OpenAI(base_url=f"{self.address}/v1", api_key="x", max_retries=0)
    return self

  def __exit__(self, *error):
    self.serving.__exit__(*error)

  def asked(self, messages, **options):
    """The first choice of a greedy answer."""
    made = self.client.chat.completions.create(
      model="m", messages=messages, max_tokens=T, temperature=0, extra_body=IDS, **options
    )
    return made.choices[0]

  def assert_same(self, messages, images, choice):
    """The choice is what the policy of training says to this."""
    [found] = self.policy.sample(messages, n=1, temperature=0, max_tokens=T, images=images)
    prompt = self.policy.prompt(messages, images=images)
    length = int(prompt.prompt_lengths_P[0])
    assert choice.prompt_token_ids == prompt.prompts_PS[0, :length].tolist()
    assert choice.message.content == found.text and len(choice.token_ids) == found.length
    total = sum(one.logprob for one in choice.logprobs.content)
    assert total == pytest.approx(found.logprob, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_an_image_is_answered_as_by_the_policy(family, tmp_path):
  """Also in the next turn, of which only what is new is computed, and beside another image."""
  with Served(tmp_path, family) as served:
    said = [text("What is it?"), shown(picture())]
    place = [text("What is it?"), {"type": "image"}]
    first = served.asked([{"role": "user", "content": said}], logprobs=True)
    served.assert_same([{"role": "user", "content": place}], [picture()], first)
    # Another image of the same size has the same tokens, and is not taken for the first.
    other = [text("What is it?"), shown(picture(1))]
    second = served.asked([{"role": "user", "content": other}], logprobs=True)
    assert second.prompt_token_ids == first.prompt_token_ids
    served.assert_same([{"role": "user", "content": place}], [picture(1)], second)
    before = served.engine.counts.computed_tokens
    again = served.asked([{"role": "user", "content": said}], logprobs=True)
    assert again.token_ids == first.token_ids
    answer = {"role": "assistant", "content": first.message.content}
    rest = [answer, {"role": "user", "content": "And now?"}]
    third = served.asked([{"role": "user", "content": said}, *rest], logprobs=True)
    served.assert_same([{"role": "user", "content": place}, *rest], [picture()], third)
    new, whole = served.engine.counts.computed_tokens - before, len(third.prompt_token_ids)
    # Windows of others have forgotten the beginning. Qwen3.5 recurs, so it knows whole texts or
    # nothing, and the random answer is no valid UTF-8: in the next prompt, it has other tokens.
    if family.startswith("qwen3_vl"):
      assert new <= whole - len(first.prompt_token_ids) + 8
    two = [shown(picture(2, 30, 12)), text("and"), shown(picture(3))]
    places = [{"type": "image"}, text("and"), {"type": "image"}]
    both = served.asked([{"role": "user", "content": two}], logprobs=True)
    served.assert_same(
      [{"role": "user", "content": places}], [picture(2, 30, 12), picture(3)], both
    )
    plain = served.asked([{"role": "user", "content": "What is it?"}], logprobs=True)
    served.assert_same([{"role": "user", "content": "What is it?"}], [], plain)


@pytest.mark.slow
def test_choices_streams_and_responses_see_the_same_image(tmp_path):
  with Served(tmp_path, "qwen3_vl") as served:
    said = [text("What?"), shown(picture(), detail="low")]
    messages = [{"role": "user", "content": said}]
    first = served.asked(messages)
    options = dict(model="m", messages=messages, max_tokens=T, temperature=0)
    many = served.client.chat.completions.create(n=3, extra_body=IDS, **options)
    assert [choice.token_ids for choice in many.choices] == [first.token_ids] * 3
    stream = served.client.chat.completions.create(stream=True, **options)
    pieces = [piece.choices[0].delta.content or "" for piece in stream]
    assert "".join(pieces) == first.message.content
    item = [
      {"type": "input_text", "text": "What?"},
      {"type": "input_image", "image_url": url(picture()), "detail": "auto"},
    ]
    made = served.client.responses.create(
      model="m",
      input=[{"role": "user", "content": item}],
      max_output_tokens=T,
      temperature=0,
    )
    assert made.output_text == first.message.content
    assert made.usage.input_tokens == len(first.prompt_token_ids)
    goes_on = served.client.chat.completions.create(
      **options | {"messages": [*messages, {"role": "assistant", "content": "It is"}]},
      extra_body={**IDS, "continue_final_message": True, "add_generation_prompt": False},
    )
    tokens = served.policy.run.tokenizer
    assert tokens.decode(goes_on.choices[0].prompt_token_ids).endswith("It is")


@pytest.fixture(scope="module")
def eyes(tmp_path_factory):
  """(tokenizer, what reads images) of a model that is not run."""
  folder = tmp_path_factory.mktemp("model")
  make_checkpoint(folder)
  tokens = tokenizer.load(folder)
  reader = ImageReader(processor.load(folder, tokens))
  return tokens, reader


@pytest.fixture(scope="module")
def address(eyes):
  tokens, reader = eyes
  settings = ServerSettings("m", grace=0.1, body_bytes=2**20)
  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(source, "MOST_PIXELS", 10**4)
    patched.setattr(source, "MOST_IMAGES", 3)
    with serving(Scripted(lambda job: [[5]]), tokens, 10**6, settings, images=reader) as (_, found):
      yield found


def bomb():
  """A PNG of a few bytes with a header of 10**9 pixels."""
  data = base64.b64decode(url(picture()).partition(",")[2])
  size = (10**5).to_bytes(4, "big") + (10**4).to_bytes(4, "big")
  head = b"IHDR" + size + data[24:29]
  made = data[:12] + head + zlib.crc32(head).to_bytes(4, "big") + data[33:]
  return "data:image/png;base64," + base64.b64encode(made).decode()


def cut():
  return url(picture(0, 40, 40))[:-1600]


WRONG = {
  "http": ({"url": "http://127.0.0.1:9/a.png"}, "fetches no address and reads no file"),
  "https": ({"url": "https://example.com/a.png"}, "fetches no address and reads no file"),
  "file": ({"url": "file:///etc/passwd"}, "fetches no address and reads no file"),
  "path": ({"url": "/etc/passwd"}, "fetches no address and reads no file"),
  "bare base64": ({"url": url(picture()).partition(",")[2]}, "fetches no address"),
  "null": (None, "fetches no address"),
  "no url": ({}, "fetches no address"),
  "number": ({"url": 5}, "fetches no address"),
  "list": ([1], "fetches no address"),
  "no base64": ({"url": "data:image/png,abc"}, "not base64"),
  "bad base64": ({"url": "data:image/png;base64,@@@"}, "neither a file nor base64"),
  "lines": ({"url": "data:a\nb,c"}, "not base64"),
  "empty": ({"url": "data:image/png;base64,"}, "empty"),
  "text": ({"url": "data:image/png;base64,aGVsbG8="}, "cannot be read as an image"),
  "svg": ({"url": "data:image/svg+xml;base64,PHN2Zy8+"}, "cannot be read as an image"),
  "damaged": ({"url": cut()}, "damaged"),
  "bomb": ({"url": bomb()}, "more than 10,000"),
  "large": ({"url": url(picture(0, 101, 100))}, "pixels, more than 10,000"),
  "thin": ({"url": url(picture(0, 1, 500))}, "which the model cannot see"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_image_is_one_line(name, address):
  given, words = WRONG[name]
  parts = [text("Look"), shown(picture()), {"type": "image_url", "image_url": given}]
  status, answer = post(
    address, "/v1/chat/completions", messages=[{"role": "user", "content": parts}]
  )
  error = answer["error"]
  assert status == 400 and error["param"] == "messages", answer
  assert error["message"].startswith("messages: image 2") and words in error["message"]
  assert "\n" not in error["message"] and len(error["message"]) < 300
  item = {
    "type": "input_image",
    "image_url": given.get("url") if isinstance(given, dict) else given,
  }
  status, answer = post(address, "/v1/responses", input=[{"role": "user", "content": [item]}])
  error = answer["error"]
  assert status == 400 and error["param"] == "input", answer
  assert error["message"].startswith("input: image 1") and "\n" not in error["message"]


def refusal(address, *parts):
  status, answer = post(
    address, "/v1/chat/completions", messages=[{"role": "user", "content": list(parts)}]
  )
  assert status == 400
  return answer["error"]["message"]


def test_images_with_more_tokens_than_fit_are_refused_before_they_are_decoded(eyes, monkeypatch):
  tokens, reader = eyes
  engine = Scripted(lambda job: [[5]])
  engine.sizes = Sizes(8, 5, 64)
  monkeypatch.setattr(UnreadImages, "decode", lambda *_: pytest.fail("decoded"))
  with serving(engine, tokens, 10**6, images=reader) as (_, address):
    said = refusal(address, *[shown(picture(0, 40, 40))] * 3)
    assert re.fullmatch(r"messages: the images have \d+ tokens and a prompt may have 5; .*", said)
    assert "tokens and this server takes at most 5" in refusal(address, shown(picture(0, 9, 9)))


def test_too_many_images_and_other_parts_are_refused(address):
  refused = functools.partial(refusal, address)
  assert "there are 4 images; a prompt may have 3" in refused(*[shown(picture())] * 4)
  word = "<|image_pad|>"
  assert f"has 2 places {word!r} for 1 images" in refused(shown(picture()), text(word))
  assert "parts of type text and image_url" in refused({"type": "input_audio"})


def test_a_body_that_is_too_large_is_refused_before_it_is_read(address):
  parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 2**20}}]
  status, answer = post(
    address, "/v1/chat/completions", messages=[{"role": "user", "content": parts}]
  )
  assert status == 413 and "the body has more than 1048576 bytes" in answer["error"]["message"]


def test_a_model_without_a_tower_refuses_images(eyes):
  tokens, _ = eyes
  with serving(Scripted(lambda job: [[5]]), tokens, 10**6) as (_, address):
    status, answer = post(
      address, "/v1/chat/completions", messages=[{"role": "user", "content": [shown(picture())]}]
    )
  assert status == 400 and answer["error"]["message"] == (
    "messages: image 1: the model sees no images here; send texts alone"
  )


def test_an_image_of_any_format_has_its_own_names_for_the_prefix_cache(eyes):
  tokens, reader = eyes
  writer = AnswerWriter(Scripted(lambda _: []), tokens, 1.0, None, images=reader)
  ids = {}
  for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):
    parts = [{"type": "image_url", "image_url": {"url": url(picture(), kind)}}]
    limits = Limits("m", 10**6, S, T, 4, sees_images=True)
    asked = chat_request(
      {"messages": [{"role": "user", "content": parts}]}, limits, writer.texts("")
    )
    seen = writer.with_images(asked).seen
    ids[kind] = seen.known_as
    assert seen.ids == asked.prompts[0] and len(seen.known_as) == len(seen.ids)
    names = [name for name in seen.known_as if name < 0]
    assert len({*names}) == len(names) == seen.ids.count(reader._processor.token_id)
    assert min(names) >= -(2**31) and max(names) < -1
    assert seen.known_as[seen.end - 1] < 0 and min(seen.known_as[seen.end :]) >= 0
  assert len({*ids.values()}) == 5


def test_images_that_are_held_are_counted(eyes, monkeypatch):
  tokens, reader = eyes
  monkeypatch.setattr("grpo_jax.serving.server._IMAGE_BYTES", 10)
  with serving(Scripted(lambda job: [[5]]), tokens, 10**6, images=reader) as (server, address):
    said = refusal(address, shown(picture()))
    assert re.fullmatch(
      r"the request takes [\d,]+ bytes of memory, and the limit is 10; send less", said
    )
    server._images._most = 10**6
    with server._images.holding() as hold:
      hold(10**6 - 10)
      status, answer = post(address, "/v1/chat/completions", **chat(shown(picture())))
      assert status == 503 and "too many large requests" in answer["error"]["message"]
    assert server._images.held == 0
    assert post(address, "/v1/chat/completions", **chat(text("a")))[0] == 200


def chat(*parts):
  return {"messages": [{"role": "user", "content": list(parts)}]}


def test_images_take_the_memory_of_their_own_sizes(eyes):
  """One large image and many small ones: none is padded to the largest."""
  _, reader = eyes
  images = [source.source_of(url(picture(i, *size)), "it") for i, size in enumerate(SIZES)]
  unread = reader.look(images)
  text = reader._processor.kind.placeholder * len(images)
  count = sum(rows * columns for layout in unread.layouts for rows, columns in layout.tokens)
  expanded = unread.expand(text, count)
  assert expanded.count(reader._processor.kind.token) == count
  seen = unread.decode([reader._processor.token_id] * count, S)
  taken = sum(x.nbytes for one in seen.pictures for x in one)
  assert unread.nbytes == taken + sum(len(image.data) for image in images)
  patches, per_token = [len(one.patches_NC) for one in seen.pictures], 4
  assert patches[0] == max(patches) and sum(patches) <= 1.5 * per_token * count
  for number, one in enumerate(seen.pictures):
    own = seen.tokens_of(number)
    assert own[own >= 0].tolist() == [*range((one.places_N2[:, 0] >= 0).sum() // per_token)]


SIZES = [(96, 96), *[(9, 9)] * 20]


def test_an_image_of_more_patches_than_the_tower_takes_is_refused(eyes, monkeypatch):
  tokens, reader = eyes
  monkeypatch.setattr(UnreadImages, "decode", lambda *_: pytest.fail("decoded"))
  monkeypatch.setattr("grpo_jax.serving.images.MOST_PATCHES", 4)
  with serving(Scripted(lambda job: [[5]]), tokens, 10**6, images=reader) as (_, address):
    said = refusal(address, shown(picture(0, 40, 40)))
    assert re.fullmatch(r"messages: an image has \d+ patches, padded, and it may have 4; .*", said)


class Slow:
  """Lets images be decoded once a test says so."""

  def __init__(self, monkeypatch):
    self.begun, self.may_end = threading.Semaphore(0), threading.Event()
    decode = UnreadImages.decode

    def slowly(*given):
      self.begun.release()
      assert self.may_end.wait(20)
      return decode(*given)

    monkeypatch.setattr(UnreadImages, "decode", slowly)


def test_texts_do_not_wait_for_images(eyes, monkeypatch):
  tokens, reader = eyes
  slow = Slow(monkeypatch)
  engine = Scripted(lambda job: [[5]])
  with (
    serving(engine, tokens, 10**6, images=reader) as (server, address),
    ThreadPoolExecutor(40) as clients,
  ):
    ask = functools.partial(post, address, "/v1/chat/completions")
    asked = [clients.submit(ask, **chat(shown(picture()))) for _ in range(40)]
    assert slow.begun.acquire(timeout=10) and slow.begun.acquire(timeout=10)
    assert ask(**chat(text("a")))[0] == 200
    assert not slow.begun.acquire(timeout=0.1)  # two are decoded at once
    one = reader.look([source.source_of(url(picture()), "it")]).nbytes
    until(lambda: server._images.held == 40 * one)  # before they are decoded
    slow.may_end.set()
    assert {future.result()[0] for future in asked} == {200}
    until(lambda: server._images.held == 0)


def left(address, body):
  """A client that sends a request and will leave."""
  host, port = address.removeprefix("http://").split(":")
  client = socket.create_connection((host, int(port)))
  data = json.dumps(body).encode()
  head = "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
  client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
  return client


def until(holds):
  deadline = time.monotonic() + 10
  while not holds():
    assert time.monotonic() < deadline
    time.sleep(0.01)


def test_work_for_a_client_who_has_left_is_counted_until_it_ends(eyes, monkeypatch):
  tokens, reader = eyes
  slow = Slow(monkeypatch)
  with serving(Scripted(lambda job: [[5]]), tokens, 10**6, images=reader) as (server, address):
    clients = [left(address, chat(shown(picture()))) for _ in range(3)]
    assert slow.begun.acquire(timeout=10) and slow.begun.acquire(timeout=10)
    one = reader.look([source.source_of(url(picture()), "it")]).nbytes
    until(lambda: server._images.held == 3 * one)
    for client in clients:
      client.close()
    until(lambda: not server.metrics.active)
    until(lambda: server._images.held == 2 * one)  # the third is never decoded
    slow.may_end.set()
    until(lambda: server._images.held == 0)


def test_a_body_is_counted_until_it_is_read(eyes, monkeypatch):
  tokens, _ = eyes
  begun, may_end = threading.Event(), threading.Event()

  def slowly(*_):
    begun.set()
    assert may_end.wait(20)

  monkeypatch.setattr("grpo_jax.serving.server.requests.read_json", slowly)
  with serving(Scripted(lambda job: [[5]]), tokens, 10**6) as (server, address):
    client = left(address, chat(text("a")))
    assert begun.wait(10)
    held = server._bodies.held
    client.close()
    until(lambda: not server.metrics.active)
    assert server._bodies.held == held > 0
    may_end.set()
    until(lambda: server._bodies.held == 0)


@pytest.mark.slow
def test_images_that_the_tower_cannot_encode_end_their_request_alone(tmp_path, monkeypatch):
  """And the tower is compiled for sizes of pictures, whatever their number."""
  with Served(tmp_path, "qwen3_vl") as served:
    programs = served.engine._decoder._device.programs
    one, many = [text("What?"), shown(picture())], [shown(picture(i)) for i in range(3)]
    first = served.asked([{"role": "user", "content": one}])
    served.asked([{"role": "user", "content": many}])
    assert programs.see._cache_size() == 1
    see = programs.see

    def lacks_memory(*_):
      raise RuntimeError("RESOURCE_EXHAUSTED")

    with monkeypatch.context() as patched:
      patched.setitem(vars(programs), "see", lacks_memory)
      ask = functools.partial(post, served.address, "/v1/chat/completions")
      status, answer = ask(**chat(shown(picture(9))), n=2)
      assert status == 500 and "could not encode the images" in answer["error"]["message"]
      assert ask(**chat(text("a")))[0] == 200
    assert programs.see is see and served.engine.is_open
    assert served.asked([{"role": "user", "content": one}]).token_ids == first.token_ids
    again = served.asked([{"role": "user", "content": [shown(picture(9))]}], logprobs=True)
    said = [{"role": "user", "content": [{"type": "image"}]}]
    served.assert_same(said, [picture(9)], again)
