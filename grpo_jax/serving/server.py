"""The HTTP edge of the endpoint: aiohttp, keys, streams, and what ends a request early."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
import contextlib
import dataclasses
import functools
import hmac
import json
import logging
import os
import sys
import time
import traceback
from typing import Any, TypeVar
import uuid

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from grpo_jax.data.tokenizers.tokenizer import Tokenizer
from grpo_jax.serving import answers, requests
from grpo_jax.serving.chats import chat_request
from grpo_jax.serving.completions import completion_request
from grpo_jax.serving.connections import Connections, listen, room
from grpo_jax.serving.engine import Closed, Engine
from grpo_jax.serving.images import ImageReader
from grpo_jax.serving.metrics import Metrics
from grpo_jax.serving.requests import Limits, Request, RequestError
from grpo_jax.serving.responses import ResponseHead, renamed, response_request
from grpo_jax.serving.traces import Recorder
from grpo_jax.serving.writer import AnswerWriter, Writing, stopping
from grpo_jax.settings import ConfigError, is_text

_LOOK_SECONDS = 0.5  # how often it looks whether the engine has failed
_BODY_SECONDS = 30.0  # to send a body
_WRITE_SECONDS = 30.0  # to read a piece of an answer
_IDLE_SECONDS = 30.0  # to send the header of a request, and between two requests
_PIECE = 2**18  # bytes of an answer
_SMALL_BODY = 2**16  # bytes
_HELD_BYTES = 2**27  # of bodies that are not requests yet
_IMAGE_BYTES = 2**30  # of images of requests that are not answered yet
_DECODED_AT_ONCE = 2  # requests
_OPEN_PATHS = ("/health", "/metrics")  # they need no key
_CLIENT_LEFT = 499  # in the metrics: the client closed the connection before the answer

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Read = Callable[[dict[str, Any], Limits, requests.Texts], Request]

_OF_CLIENTS = (HttpProcessingError, web.RequestPayloadError, ConnectionError)


class _Defects(logging.Filter):
  """Lets pass what is wrong here. Clients that send no HTTP would fill a log."""

  def filter(self, record: logging.LogRecord) -> bool:
    kind = record.exc_info and record.exc_info[0]
    return not (kind and issubclass(kind, _OF_CLIENTS))


_LOGGER = logging.getLogger(__name__)
_LOGGER.addFilter(_Defects())


class ByteBudget:
  """Counts the bytes that requests hold together.

  Attributes:
    held: How many they are now.
  """

  def __init__(self, most: int) -> None:
    """Nothing is held. `most` bytes may be."""
    self._most, self.held = most, 0

  @contextlib.contextmanager
  def holding(self) -> Iterator[Callable[[int], None]]:
    """Gives what a request calls for each piece that it holds until the block ends."""
    own = 0

    def hold(size: int) -> None:
      nonlocal own
      if own + size > self._most:
        raise RequestError(
          f"the request takes {own + size:,} bytes of memory and may take {self._most:,}; send less"
        )
      if self.held + size > self._most:
        raise RequestError("too many large requests arrive at once; try later", status=503)
      self.held += size
      own += size

    try:
      yield hold
    finally:
      self.held -= own


@dataclasses.dataclass(frozen=True)
class ServerSettings:
  """How a server answers.

  Attributes:
    model: The name of the model.
    key: The bearer key, or empty for none.
    body_bytes: The largest body.
    connections: The most connections.
    choices: The most completions of a request.
    seconds: The longest that an answer may take.
    grace: How many seconds requests may still take once the server was asked to stop.
    longest: The flag or key that sets the longest prompt, for errors.
    calls: How the model writes calls of tools, as in environment.calls.
  """

  model: str
  key: str = ""
  body_bytes: int = 4 * 2**20
  connections: int = 4096
  choices: int = 128
  seconds: float = 600.0
  grace: float = 30.0
  longest: str = requests.LONGEST
  calls: str = "auto"


class Server:
  """Answers requests with an engine.

  Attributes:
    app: The application that aiohttp runs.
    metrics: Counts of what it has done.
  """

  def __init__(
    self,
    engine: Engine,
    tokenizer: Tokenizer,
    vocabulary: int,
    settings: ServerSettings,
    reload: Callable[[], int] | None = None,
    recorder: Recorder | None = None,
    images: ImageReader | None = None,
  ):
    """Answers nothing yet.

    Args:
      engine: Decodes. It has been started.
      tokenizer: Texts to ids and back.
      vocabulary: How many ids the model has.
      settings: The limits and the key.
      reload: Gives the engine the newest weights and returns their version. It runs in a thread.
        None means that there are no newer ones.
      recorder: Keeps what clients asked, by the name behind the key: `KEY:NAME`.
      images: Reads images. None: the model sees none.
    """
    self.metrics = Metrics()
    self._engine, self._settings = engine, settings
    told = dict[str, Any](
      longest=settings.longest, calls=settings.calls, vocabulary=vocabulary, images=images
    )
    self._writer = AnswerWriter(engine, tokenizer, settings.seconds, recorder, **told)
    self._records = recorder is not None
    self._reload, self._reloading = reload, asyncio.Lock()
    limits = engine.sizes.prompt_tokens, engine.max_tokens, settings.choices, settings.longest
    self._limits = Limits(settings.model, vocabulary, *limits, engine.filters, images is not None)
    # They parse and tokenise. Many small requests come in the time that a large one takes, so they
    # do not wait for it.
    cores = os.cpu_count() or 1
    self._small = ThreadPoolExecutor(max(2, cores), "small bodies")
    self._large = ThreadPoolExecutor(max(2, cores // 2), "large bodies")
    # An image that is being decoded takes much more memory than its patches.
    self._decoding = ThreadPoolExecutor(_DECODED_AT_ONCE, "images")
    self._bodies, self._images = ByteBudget(_HELD_BYTES), ByteBudget(_IMAGE_BYTES)
    self._connections: Connections
    self._created = int(time.time())
    self._is_stopping = False
    self.app = web.Application(
      client_max_size=settings.body_bytes, middlewares=[self._counted, self._guarded]
    )
    completions = functools.partial(self._complete, completion_request)
    conversations = functools.partial(self._complete, chat_request)
    self.app.add_routes(
      [
        web.get("/health", self._health),
        web.get("/metrics", self._show_metrics),
        web.get("/v1/models", self._models),
        web.get("/v1/models/{name:.+}", self._model),
        web.post("/v1/completions", completions),
        web.post("/v1/chat/completions", conversations),
        web.post("/v1/responses", functools.partial(self._complete, response_request)),
        web.post("/admin/reload", self._load_newest),
      ]
    )

  async def run(
    self, host: str, port: int, stop: asyncio.Event, ready: Callable[[str, int], None]
  ) -> None:
    """Answers requests until `stop` is set or the engine fails, then lets those that run end.

    Args:
      host: The address to listen at.
      port: The port. 0 takes a free one.
      stop: Set to stop.
      ready: Called with the address and the port once it listens.

    Raises:
      ConfigError: It cannot listen there.
    """
    runner = web.AppRunner(
      self.app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0, logger=_LOGGER
    )
    await runner.setup()
    try:
      try:
        listeners = listen(host, port)
      except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"flags --host={host} --port={port}: {why}; choose others") from None
      most = room(self._settings.connections)
      self._connections = Connections(runner.server, most, _IDLE_SECONDS)
      taking = [asyncio.create_task(self._connections.take(listener)) for listener in listeners]
      taking.append(asyncio.create_task(self._connections.watch()))
      ready(host, listeners[0].getsockname()[1])
      while self._engine.is_open and not stop.is_set():
        with contextlib.suppress(TimeoutError):
          await asyncio.wait_for(stop.wait(), _LOOK_SECONDS)
        for task in taking:
          if task.done():  # a defect: without it, nobody would be answered
            task.result()
      self._is_stopping = True
      with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(self._settings.grace):
          while self.metrics.active and self._engine.is_open:
            await asyncio.sleep(0.02)
      for task in taking:
        task.cancel()
      for listener in listeners:
        listener.close()
      await asyncio.to_thread(self._engine.close)
    finally:
      for threads in (self._small, self._large, self._decoding):
        threads.shutdown(wait=False, cancel_futures=True)
      await runner.cleanup()

  @web.middleware
  async def _counted(self, request: web.Request, handler: Handler) -> web.StreamResponse:
    """Counts a request, and makes every error an answer in OpenAI's shape."""
    start = time.monotonic()
    status = _CLIENT_LEFT
    resource = request.match_info.route.resource
    path = resource.canonical if resource is not None else "other"
    try:
      try:
        with self._connections.request(request.protocol):
          response = await handler(request)
      except RequestError as error:
        response = _refused(error)
      except web.HTTPException as error:
        response = _refused(RequestError(error.reason, status=error.status))
      except ConnectionError:  # the client has left, and nobody will read this
        _cut(request.transport)
        return web.Response(status=_CLIENT_LEFT)
      except Exception:  # a defect: its traceback helps, and the next request is answered
        traceback.print_exc(file=sys.stderr)
        response = _refused(RequestError("the server failed; its log says why", status=500))
      status = response.status
      return response
    finally:
      self.metrics.requests[path, status] += 1
      self.metrics.seconds[path] += time.monotonic() - start

  @web.middleware
  async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
    """Asks for the key."""
    if self._settings.key and request.path not in _OPEN_PATHS:
      given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
      wanted = f"Bearer {self._settings.key}".encode()
      if self._records:
        given, _, _ = given.partition(b":")
      if not hmac.compare_digest(given, wanted):  # takes as long wherever they differ
        raise RequestError("the API key is wrong or missing", status=401, code="invalid_api_key")
    return await handler(request)

  async def _health(self, request: web.Request) -> web.Response:
    del request
    is_well = self._engine.is_open and not self._is_stopping
    return web.json_response(
      {"status": "ok" if is_well else "stopping", "weights_version": self._engine.version},
      status=200 if is_well else 503,
    )

  async def _show_metrics(self, request: web.Request) -> web.Response:
    del request
    return web.Response(text=self.metrics.text(self._engine), content_type="text/plain")

  async def _models(self, request: web.Request) -> web.Response:
    del request
    return web.json_response({"object": "list", "data": [self._about_model()]})

  async def _model(self, request: web.Request) -> web.Response:
    name = request.match_info["name"]
    if name != self._settings.model:
      raise RequestError(f"there is no model {name!r:.100}", "model", 404, "model_not_found")
    return web.json_response(self._about_model())

  async def _load_newest(self, request: web.Request) -> web.Response:
    """Loads the newest checkpoint. One caller after another."""
    del request
    if not self._settings.key:
      raise RequestError("this path needs a server with a key (--api_key_file)", status=401)
    if self._reload is None:
      raise RequestError("the server has no --workdir to load from", status=404)
    async with self._reloading:
      try:
        version = await asyncio.to_thread(self._reload)
      except ConfigError as error:
        raise RequestError(str(error), status=503) from None
      except Closed:
        raise stopping() from None
    return web.json_response({"weights_version": version})

  async def _complete(self, read: Read, request: web.Request) -> web.StreamResponse:
    """Answers a request for completions."""
    name = _conversation_of(request)
    with contextlib.ExitStack() as stack:
      with contextlib.ExitStack() as held:
        hold = held.enter_context(self._bodies.holding())
        body = await _body_of(request, self._settings.body_bytes, hold)
        if self._is_stopping:
          raise stopping()
        stack.enter_context(self._answering(request))
        threads = self._small if len(body) <= _SMALL_BODY else self._large
        asked = await _in_thread(threads, held, self._read, read, body, name)
        del body
      held = stack.enter_context(contextlib.ExitStack())
      if asked.unread is not None:
        held.enter_context(self._images.holding())(asked.unread.nbytes)
        try:
          asked = await _in_thread(self._decoding, held, self._writer.with_images, asked)
        except RequestError as error:
          raise error if asked.repeated is None else renamed(error) from None
      return await self._answer(request, asked, name)

  @contextlib.contextmanager
  def _answering(self, request: web.Request) -> Iterator[None]:
    """In the block, the server waits for a request before it stops, and keeps its connection."""
    self.metrics.active += 1
    try:
      with self._connections.kept(request.protocol):
        yield
    finally:
      self.metrics.active -= 1

  async def _answer(self, request: web.Request, asked: Request, name: str) -> web.StreamResponse:
    """Lets the engine write, and sends what it wrote."""
    self.metrics.prompt_tokens += sum(map(len, asked.prompts))
    head = self._head(asked)
    if asked.stream:
      return await self._stream(request, head, name)
    async with self._choices(asked, request, name) as (choices, parts):
      async for _ in parts:
        pass
      made = head.whole(choices)
      self._writer.record(name, choices)
    response = web.StreamResponse(headers={"X-Weights-Version": str(made["weights_version"])})
    response.content_type = "application/json"
    response.charset = "utf-8"
    data = _dumps(made).encode()
    response.content_length = len(data)
    await response.prepare(request)
    for start in range(0, len(data), _PIECE):
      await _in_time(response.write(data[start : start + _PIECE]))
    await _in_time(response.write_eof())
    return response

  def _head(self, asked: Request) -> answers.AnswerHead | ResponseHead:
    number, now, model = uuid.uuid4().hex, int(time.time()), self._settings.model
    if asked.repeated is not None:
      return ResponseHead(number, now, model, asked)
    kind = "chatcmpl" if asked.is_chat else "cmpl"
    return answers.AnswerHead(f"{kind}-{number}", now, model, asked)

  async def _stream(
    self, request: web.Request, head: answers.AnswerHead | ResponseHead, name: str
  ) -> web.StreamResponse:
    """Sends what is new of the choices as it comes."""
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    response, begun = web.StreamResponse(headers=headers), set[int]()

    async def send(pieces: Iterable[dict[str, Any]]) -> None:
      for made in pieces:  # events of responses have a type
        event = f"event: {made['type']}\n" if "type" in made else ""
        await _in_time(response.write(f"{event}data: {_dumps(made)}\n\n".encode()))

    async with self._choices(head.request, request, name) as (choices, parts):
      await response.prepare(request)
      try:
        await send(head.first())
        async for choice in parts:
          await send(head.piece(choice, choice.index not in begun))
          begun.add(choice.index)
        self._writer.record(name, choices)
        await send(head.last(choices))
        if head.is_ended_by_done:
          await _in_time(response.write(b"data: [DONE]\n\n"))
      except RequestError as error:  # the status is sent already
        await send([head.error(error)])
    await _in_time(response.write_eof())
    return response

  def _choices(self, asked: Request, request: web.Request, name: str) -> Writing:
    cut = functools.partial(_cut, request.transport)
    return self._writer.choices(asked, name, cut)

  def _read(self, read: Read, body: bytes, name: str) -> Request:
    asked = read(requests.read_json(body), self._limits, self._writer.texts(name))
    return self._writer.with_guides(asked)

  def _about_model(self) -> dict[str, Any]:
    return {
      "id": self._settings.model,
      "object": "model",
      "created": self._created,
      "owned_by": "grpo_jax",
      "max_model_len": self._limits.prompt_tokens + self._limits.max_tokens,
      "weights_version": self._engine.version,
    }


def _conversation_of(request: web.Request) -> str:
  """The name behind the key of a request."""
  _, _, name = request.headers.get("Authorization", "").partition(":")
  if not is_text(name):
    raise RequestError("the name behind the key is not UTF-8", status=401, code="invalid_api_key")
  return name


async def _body_of(request: web.Request, most: int, hold: Callable[[int], None]) -> bytes:
  """The body, of at most so many bytes. Raises RequestError for one that is not to be read.

  `hold` is called with the size of each piece as it arrives.
  """
  # A page in a browser can send other types to this address without asking.
  if request.content_type != "application/json":
    raise RequestError("the header Content-Type must be application/json")
  too_large = RequestError(f"the body has more than {most} bytes", status=413)
  if (request.content_length or 0) > most:
    raise too_large
  body = bytearray()
  try:
    async with asyncio.timeout(_BODY_SECONDS):
      async for piece in request.content.iter_any():
        hold(len(piece))
        body += piece
        if len(body) > most:
          raise too_large
    return bytes(body)
  except web.RequestPayloadError as error:
    raise RequestError(
      f"the body cannot be read: {' '.join(str(error).split()):.200}", code="invalid_body"
    ) from None
  except TimeoutError:
    raise RequestError(f"the body took more than {_BODY_SECONDS:g} seconds", status=408) from None


async def _in_thread(
  threads: ThreadPoolExecutor, held: contextlib.ExitStack, work: Callable[..., T], *given: Any
) -> T:
  """The result of work in a thread. If its request ends before it does, it keeps what is held."""
  running = threads.submit(work, *given)
  try:
    return await asyncio.wrap_future(running)
  except asyncio.CancelledError:
    kept, loop = held.pop_all(), asyncio.get_running_loop()

    def let_go(_: Any) -> None:
      with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(kept.close)

    running.add_done_callback(let_go)
    raise


async def _in_time(writing: Awaitable[None]) -> None:
  """Sends a piece of an answer. Raises ConnectionError for a reader who is gone or too slow."""
  try:
    async with asyncio.timeout(_WRITE_SECONDS):
      await writing
  except TimeoutError:
    raise ConnectionResetError("the reader is too slow") from None


def _refused(error: RequestError) -> web.Response:
  headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
  return web.Response(
    text=_dumps(answers.error(error)),
    status=error.status,
    content_type="application/json",
    headers=headers,
  )


def _cut(transport: asyncio.Transport | None) -> None:
  """Closes a connection at once, whatever of its data is not sent yet."""
  if transport is not None:
    transport.abort()


def _dumps(value: Any) -> str:
  return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
