"""The endpoint and hostile clients: what they send and do not read costs others nothing."""

import asyncio
import dataclasses
import errno
import gzip
import http.client
import json
import resource
import socket
import threading
import time
import zlib

from aiohttp import web
import pytest

from grpo_jax.data.tokenizers import tokenizer
from grpo_jax.data.tokenizers.tokenizer import Tokenizer
from grpo_jax.serving import connections, server
from grpo_jax.serving.requests import RequestError
from grpo_jax.serving.server import ServerSettings
from grpo_jax.serving.writer import AnswerWriter
from tests.serving_parts import PROMPT_TOKENS, Scripted, serving

TOKENS = tokenizer.characters("".join(chr(33 + i) for i in range(90)))
GOOD = json.dumps({"prompt": "abc"}).encode()


@pytest.fixture(scope="module")
def address():
  settings = ServerSettings("m", grace=0.1, body_bytes=2**16, connections=40)
  with serving(Scripted(lambda job: [[5]]), TOKENS, 92, settings) as (_, address):
    yield address


@pytest.fixture(autouse=True)
def no_traceback(address, capfd):
  """After each test, the server answers, and its log is empty."""
  yield
  assert get(address, "/health") == 200
  assert send(address, request(GOOD))[0] == 200
  assert capfd.readouterr().err == ""


def connect(address):
  host, port = address.removeprefix("http://").split(":")
  return socket.create_connection((host, int(port)), timeout=20)


def request(body, *headers, length=None):
  lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
  if length != "none":
    lines.append(f"Content-Length: {len(body) if length is None else length}")
  return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def answer(connection):
  """(status, the body as JSON or text)"""
  got = http.client.HTTPResponse(connection)
  got.begin()
  text = got.read().decode()
  return got.status, json.loads(text) if got.headers.get_content_subtype() == "json" else text


def send(address, data):
  with connect(address) as connection:
    connection.sendall(data)
    return answer(connection)


def get(address, path, seconds=5):
  connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=seconds)
  connection.request("GET", path)
  status = connection.getresponse().status
  connection.close()
  return status


def chunks(*parts):
  return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)


BROKEN = {
  "no gzip": (request(GOOD, "Content-Encoding: gzip"), 400),
  "gzip, then anything": (request(gzip.compress(GOOD) + b"junk", "Content-Encoding: gzip"), 400),
  "half of gzip": (request(gzip.compress(GOOD)[:-12], "Content-Encoding: gzip"), 400),
  "no deflate": (request(b"\xff" + zlib.compress(GOOD), "Content-Encoding: deflate"), 400),
  "a bomb": (request(gzip.compress(b"a" * 2**25), "Content-Encoding: gzip"), 413),
  "a length": (request(b"", length=99999999999999), 413),
  "a longer length": (request(b"", length=10**30), 400),
  "two lengths": (request(GOOD, "Content-Length: 3"), 400),
  "length and chunks": (request(GOOD, "Transfer-Encoding: chunked"), 400),
  "chunks without end": (
    request(chunks(*[b"a" * 1000] * 80), "Transfer-Encoding: chunked", length="none"),
    413,
  ),
  "chunks of no size": (request(b"zz\r\n", "Transfer-Encoding: chunked", length="none"), 400),
  "no http": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
  "a long line": (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n", 400),
}


@pytest.mark.parametrize("data, status", BROKEN.values(), ids=BROKEN)
def test_what_is_no_request_gets_a_status_at_once(data, status, address):
  start = time.monotonic()
  assert send(address, data)[0] == status
  assert time.monotonic() - start < 5


def test_bodies_that_are_packed_well_are_read(address):
  assert send(address, request(gzip.compress(GOOD), "Content-Encoding: gzip"))[0] == 200
  data = request(chunks(GOOD, b""), "Transfer-Encoding: chunked", length="none")
  assert send(address, data)[0] == 200


@pytest.mark.parametrize(
  "body, param",
  [
    ({"\ud800": 1}, "\\ud800"),
    ({"model": "\ud800"}, "model"),
    ({"stop": "\ud800"}, "stop"),
    ({"stream": True, "stream_options": {"includ_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "include_usage"),
    ({"prompt": ["text", [3]]}, "prompt"),
    ({"prompt": [[3], "text"]}, "prompt"),
    ({"prompt": [[3], 4]}, "prompt"),
  ],
  ids=repr,
)
def test_what_cannot_be_written_or_is_not_known_is_refused(body, param, address):
  data = json.dumps({"prompt": "a"} | body).encode()
  status, said = send(address, request(data))
  assert status in (400, 404) and said["error"]["param"] == param


def test_parts_of_other_types_are_no_texts(address):
  for kind, words in (("audio", "parts of type text"), ("image_url", "sees no images")):
    message = {"role": "user", "content": [{"type": kind, "text": "x"}]}
    data = request(json.dumps({"messages": [message]}).encode())
    status, said = send(address, data.replace(b"/v1/completions", b"/v1/chat/completions"))
    assert status == 400 and words in said["error"]["message"]


def test_a_name_of_half_a_surrogate_behind_the_key_is_refused(address):
  data = request(GOOD).replace(b"Host: x", b"Host: x\r\nAuthorization: Bearer key:\xed\xa0\x80")
  assert send(address, data)[0] == 401


def test_a_client_that_leaves_a_stream_leaves_no_traceback(address, capfd):
  del address

  def script(job):
    for _ in range(200 if len(job.prompt) > 1 else 1):
      time.sleep(0.001)
      yield [5] * 100

  with serving(Scripted(script), TOKENS, 92) as (served, other):
    for stream in (True, False):
      body = {"prompt": "ab", "max_tokens": 10**5, "stream": stream, "return_token_ids": True}
      with connect(other) as connection:
        connection.sendall(request(json.dumps(body).encode()))
        time.sleep(0.05)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset
    assert send(other, request(b'{"prompt": "a"}'))[0] == 200
    wait_until(lambda: served.metrics.active == 0)
    assert served.metrics.requests["/v1/completions", 499] == 2
  assert capfd.readouterr().err == ""


def wait_until(condition, seconds=10):
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.01)


def is_closed(connection):
  """Whether the other side has closed a connection."""
  connection.settimeout(0)
  try:
    return connection.recv(1) == b""
  except BlockingIOError:
    return False
  except ConnectionError:
    return True


def half_headers(address, count):
  made = [connect(address) for _ in range(count)]
  for one in made:
    one.sendall(b"GET /health HTTP/1.1\r\nHost")
  return made


def test_half_headers_make_room_for_others(address):
  """The server takes 40 connections, and these are 300."""
  half = half_headers(address, 300)
  assert get(address, "/health") == 200
  wait_until(lambda: sum(map(is_closed, half)) >= 260)
  assert not is_closed(half[-1])
  half[-1].settimeout(5)
  half[-1].sendall(b": x\r\n\r\n")
  assert answer(half[-1])[0] == 200
  for one in half:
    one.close()


def test_half_bodies_make_room_and_requests_that_run_keep_theirs():
  goes_on = threading.Event()

  def script(job):
    del job
    goes_on.wait(20)
    return [[5]]

  settings = ServerSettings("m", grace=0.1, connections=6)
  with serving(Scripted(script), TOKENS, 92, settings) as (served, address):
    running = [connect(address) for _ in range(5)]
    for one in running:
      one.sendall(request(GOOD))
    wait_until(lambda: served.metrics.active == 5)
    half = [connect(address) for _ in range(20)]
    for one in half:
      one.sendall(request(GOOD, length=500))
      assert get(address, "/health") == 200
    goes_on.set()
    assert [answer(one)[0] for one in running] == [200] * 5
    for one in (*running, *half):
      one.close()


def test_connections_without_a_request_are_closed_in_time(monkeypatch):
  monkeypatch.setattr(server, "_IDLE_SECONDS", 0.8)

  def script(job):
    time.sleep(0.01 if len(job.prompt) == 1 else 1)
    return [[5]]

  with serving(Scripted(script), TOKENS, 92) as (served, address):
    half = half_headers(address, 5)
    used, busy = connect(address), connect(address)
    used.sendall(request(b'{"prompt": "a"}'))
    busy.sendall(request(GOOD))
    assert answer(used)[0] == 200
    wait_until(lambda: all(map(is_closed, [*half, used])), 5)
    assert answer(busy)[0] == 200  # which took longer
    wait_until(lambda: not served._connections._waiting, 5)
    for one in (*half, used, busy):
      one.close()


def test_the_files_of_the_process_bound_its_connections(monkeypatch):
  limits, asked = [256, 256], []
  monkeypatch.setattr(resource, "getrlimit", lambda which: tuple(limits))
  monkeypatch.setattr(resource, "setrlimit", lambda which, values: asked.append(values))
  assert connections.room(4096) == 192 and not asked
  limits[:] = 1024, 2**20
  assert connections.room(4096) == 4096 and asked == [(8192, 2**20)]
  assert connections.room(100) == 100


def test_a_server_without_a_free_file_waits_in_silence(monkeypatch, address):
  """As if too many files were open for half a second."""

  async def fails(listener):
    raise OSError(24, "too many open files")

  async def take():
    loop = asyncio.get_running_loop()
    (listener,) = connections.listen("127.0.0.1", 0)
    monkeypatch.setattr(loop, "sock_accept", fails)
    taking = asyncio.create_task(connections.Connections(None, 1, 1.0).take(listener))
    await asyncio.sleep(0.3)
    assert not taking.done()
    taking.cancel()
    listener.close()

  asyncio.run(take())


def test_names_and_both_families_are_listened_at():
  listeners = connections.listen("localhost", 0)
  try:
    assert len({one.getsockname()[1] for one in listeners}) == 1
  finally:
    for one in listeners:
      one.close()
  with pytest.raises(OSError):
    connections.listen("no.such.host.invalid", 0)


def test_a_text_too_long_for_the_prompt_is_not_tokenised(monkeypatch):
  engine = Scripted(lambda job: [[5]])

  class Codec:
    longest_token = 3000
    encoded = 0

    def token_to_id(self, token):
      return None

    def encode_batch(self, texts):
      Codec.encoded += 1
      return [[5] for _ in texts]

  tokens = dataclasses.replace(TOKENS, codec=Codec(), prefix_ids=())
  texts = AnswerWriter(engine, tokens, 1.0, None).texts("")
  most = PROMPT_TOKENS * Codec.longest_token
  assert texts.encode("a" * most) == [5]
  with pytest.raises(RequestError, match=f"prompt: {most + 1} characters.*at most {most}") as error:
    texts.encode("a" * (most + 1))
  assert error.value.code == "context_length_exceeded" and Codec.encoded == 1
  # Of messages, what the template writes counts: it may leave out what they thought before.
  monkeypatch.setattr(Tokenizer, "render", lambda self, messages, *_: messages[-1]["content"])
  told = [{"role": "assistant", "content": "a" * 2 * most}, {"role": "user", "content": "a" * most}]
  assert texts.render(told, None, {}) == [5]
  told[-1]["content"] += "a"
  with pytest.raises(RequestError, match=f"messages: {most + 1} characters"):
    texts.render(told, None, {})
  assert Codec.encoded == 2


def test_small_requests_do_not_wait_for_large_ones(monkeypatch):
  begun, goes_on = threading.Event(), threading.Event()
  encode = AnswerWriter._encode

  def slowly(self, text):
    if len(text) > 10:
      begun.set()
      assert goes_on.wait(20)
    return encode(self, text)

  monkeypatch.setattr(AnswerWriter, "_encode", slowly)
  with serving(Scripted(lambda job: [[5]]), TOKENS, 92) as (_, address):
    body = json.dumps({"prompt": "a" * 2**17}).encode()
    large = [connect(address) for _ in range(12)]
    for one in large:
      one.sendall(request(body))
    assert begun.wait(5)
    assert send(address, request(GOOD))[0] == 200
    goes_on.set()
    assert [answer(one)[0] for one in large] == [400] * len(large)
    for one in large:
      one.close()


def test_uploads_that_stop_do_not_hold_up_another_large_request():
  """Twenty clients promise 100,000 bytes and send none. Eight once held all slots for 30 s."""
  with serving(Scripted(lambda job: [[5]]), TOKENS, 92) as (_, address):
    slow = [connect(address) for _ in range(20)]
    for one in slow:
      one.sendall(request(b"", length=100000))
    start = time.monotonic()
    assert send(address, request(json.dumps({"prompt": "a" * 70000}).encode()))[0] == 400
    assert time.monotonic() - start < 5
    for one in slow:
      one.close()


def test_bodies_that_are_held_are_bounded_together(monkeypatch):
  monkeypatch.setattr(server, "_HELD_BYTES", 2**17)
  large = request(json.dumps({"prompt": "a" * 70000}).encode())
  with serving(Scripted(lambda job: [[5]]), TOKENS, 92) as (served, address):
    assert send(address, large)[0] == 400  # too long for a prompt
    with connect(address) as first:
      first.sendall(request(b"", length=2**17) + b" " * (2**17 - 100))
      wait_until(lambda: served._bodies.held == 2**17 - 100, 5)
      assert send(address, large)[0] == 503
    wait_until(lambda: served._bodies.held == 0, 5)
    assert send(address, large)[0] == 400


def test_an_answer_whose_end_nobody_reads_is_cut(monkeypatch):
  """`write_eof` waits for the client, too."""
  monkeypatch.setattr(server, "_WRITE_SECONDS", 0.2)

  async def never(self, data=b""):
    await asyncio.Event().wait()

  monkeypatch.setattr(web.StreamResponse, "write_eof", never)
  with serving(Scripted(lambda job: [[5]]), TOKENS, 92) as (served, address):
    for count, body in enumerate((b'{"prompt": "a", "stream": true}', GOOD), start=1):
      with connect(address) as one:
        one.sendall(request(body))
        wait_until(lambda: served.metrics.requests["/v1/completions", 499] == count, 5)  # noqa: B023
    assert served.metrics.active == 0 and not served._connections._kept
  monkeypatch.undo()


class Unread:
  """A connection whose client has not read so many bytes of the last answer yet."""

  def __init__(self, unread):
    self.unread, self.is_cut, self.transport = unread, False, self

  def get_write_buffer_size(self):
    return self.unread

  def is_closing(self):
    return self.is_cut

  def abort(self):
    self.is_cut = True


def test_an_answer_that_is_still_read_is_not_cut():
  async def run():
    kept = connections.Connections(None, 3, 0.3)
    reads, stands, idle = Unread(10**6), Unread(10**6), Unread(0)
    for one in (reads, stands, idle):
      with kept.request(one):
        pass
    assert kept._close_first() and idle.is_cut  # the others have an answer to read
    watching = asyncio.create_task(kept.watch())
    for _ in range(40):
      await asyncio.sleep(0.02)
      reads.unread = max(1, reads.unread - 20000)
    assert stands.is_cut and not reads.is_cut
    await asyncio.sleep(0.6)
    assert reads.is_cut  # it has stopped reading
    watching.cancel()

  asyncio.run(run())


def test_an_address_that_the_machine_does_not_have_is_left_out(monkeypatch):
  """Many hosts files give localhost an address of IPv6, which a container may lack."""
  create = socket.create_server

  def without_ipv6(address, *, family, **others):
    if family == socket.AF_INET6:
      raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
    return create(address, family=family, **others)

  found = [
    (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0)),
    (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
  ]
  monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **others: found)
  monkeypatch.setattr(socket, "create_server", without_ipv6)
  (listener,) = connections.listen("localhost", 0)
  assert listener.getsockname()[0] == "127.0.0.1"
  listener.close()
  del found[1]
  with pytest.raises(OSError, match="not supported"):
    connections.listen("localhost", 0)


def test_an_answer_that_nobody_reads_is_cut(monkeypatch):
  monkeypatch.setattr(server, "_WRITE_SECONDS", 0.3)
  many = [5] * 10**6
  with serving(Scripted(lambda job: [many]), TOKENS, 92) as (served, address):
    with connect(address) as slow:
      slow.sendall(request(b'{"prompt": "a", "max_tokens": 1000000, "return_token_ids": true}'))
      wait_until(lambda: served.metrics.requests["/v1/completions", 499] == 1, 20)
    assert served.metrics.active == 0
