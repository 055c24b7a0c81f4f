"""The HTTP server of the endpoint: paths, API keys, streams, limits and timeouts."""

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

_LOOK_SECONDS = 0.5  # how often the server checks whether the engine has failed
_BODY_SECONDS = 30.0  # timeout of a client that sends a body
_WRITE_SECONDS = 30.0  # timeout of a client that reads `_PIECE` bytes or an event
_IDLE_SECONDS = 30.0  # timeout of a client that sends a header, also between two requests
_PIECE = 2**18  # bytes of an answer that are sent together
_SMALL_BODY = 2**16  # bytes up to which a body is parsed by the threads for small ones
_HELD_BYTES = 2**27  # limit of all bodies that are not parsed yet, together
_IMAGE_BYTES = 2**30  # limit of the images of all unanswered requests, together
_DECODED_AT_ONCE = 2  # requests whose images are decoded at the same time
_OPEN_PATHS = ("/health", "/metrics")  # need no key
_CLIENT_LEFT = 499  # in the metrics: the client closed the connection before the answer

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Read = Callable[[dict[str, Any], Limits, requests.Texts], Request]

_OF_CLIENTS = (HttpProcessingError, web.RequestPayloadError, ConnectionError)


class _Defects(logging.Filter):
  """Drops log records of clients' errors, such as malformed HTTP, which would fill the log."""

  def filter(self, record: logging.LogRecord) -> bool:
    kind = record.exc_info and record.exc_info[0]
    return not (kind and issubclass(kind, _OF_CLIENTS))


_LOGGER = logging.getLogger(__name__)
_LOGGER.addFilter(_Defects())


class ByteBudget:
  """Limits the memory that all requests hold together.

  Attributes:
    held: How many bytes are held now.
  """

  def __init__(self, most: int) -> None:
    """Starts with nothing held. `most` is the limit in bytes."""
    self._most, self.held = most, 0

  @contextlib.contextmanager
  def holding(self) -> Iterator[Callable[[int], None]]:
    """Yields hold(bytes) -> None, which reserves memory until the block ends.

    A request calls it before each use. It raises RequestError if the budget does not suffice.
    """
    own = 0  # bytes of this request

    def hold(size: int) -> None:
      nonlocal own
      if own + size > self._most:
        raise RequestError(
          f"the request takes {own + size:,} bytes of memory, and the limit is {self._most:,};"
          " send less"
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
    key: The API key, a bearer token. "" means that clients need none.
    body_bytes: The largest body.
    connections: The most connections.
    choices: The most completions of a request.
    seconds: The timeout of an answer.
    grace: How many seconds running requests may still take after the server is told to stop.
    longest: The flag or config key that sets the longest prompt, for errors.
    calls: How the model writes tool calls, as in environment.calls.
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
    metrics: Statistics of requests.
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
      engine: The engine. It must be started before `run`.
      tokenizer: The tokenizer of the model.
      vocabulary: V, how many token ids the model has.
      settings: The limits and the key.
      reload: () -> the version of the newest weights, which it passes to the engine. Called in a
        thread. None: the weights cannot be reloaded.
      recorder: Records completions by the name behind the API key (see traces.py), or None.
      images: Reads images. None: the model accepts no images.
    """
    self.metrics = Metrics()
    self._engine, self._settings = engine, settings
    options = dict[str, Any](
      longest=settings.longest, calls=settings.calls, vocabulary=vocabulary, images=images
    )
    self._writer = AnswerWriter(engine, tokenizer, settings.seconds, recorder, **options)
    self._records = recorder is not None
    self._reload, self._reloading = reload, asyncio.Lock()
    limits = engine.sizes.prompt_tokens, engine.max_tokens, settings.choices, settings.longest
    self._limits = Limits(settings.model, vocabulary, *limits, engine.filters, images is not None)
    # Threads that parse and tokenise bodies. Small ones need not wait for large ones.
    cores = os.cpu_count() or 1
    self._small = ThreadPoolExecutor(max(2, cores), "small bodies")
    self._large = ThreadPoolExecutor(max(2, cores // 2), "large bodies")
    # Decoding an image takes much more memory than its patches, so few threads decode.
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
    """Answers requests until `stop` is set or the engine fails. Running ones may then finish.

    Args:
      host: The address to listen at.
      port: The port. 0 picks a free port.
      stop: The event that stops the server.
      ready: Called with the address and the port when the server listens.

    Raises:
      ConfigError: The address or the port cannot be used.
    """
    # `handler_cancellation`: if a client leaves, its handler ends, and so do its rows.
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
          if task.done():  # it has failed: raises its error instead of accepting no connections
            task.result()
      self._is_stopping = True  # new requests for completions get status 503 now
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
    """Counts a request, and turns every error into an answer in OpenAI's format."""
    start = time.monotonic()
    status = _CLIENT_LEFT  # unless there is an answer
    resource = request.match_info.route.resource
    # One name for all unknown paths, because clients could invent any number of them.
    path = resource.canonical if resource is not None else "other"
    try:
      try:
        with self._connections.request(request.protocol):
          response = await handler(request)
      except RequestError as error:
        response = _refused(error)
      except web.HTTPException as error:
        response = _refused(RequestError(error.reason, status=error.status))
      except ConnectionError:  # the client has left, so nobody reads this answer
        _cut(request.transport)
        return web.Response(status=_CLIENT_LEFT)
      except Exception:  # a bug: log it, and go on with the next request
        traceback.print_exc(file=sys.stderr)
        response = _refused(RequestError("the server failed; its log says why", status=500))
      status = response.status
      return response
    finally:
      self.metrics.requests[path, status] += 1
      self.metrics.seconds[path] += time.monotonic() - start

  @web.middleware
  async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuses requests without the API key, except for `_OPEN_PATHS`."""
    if self._settings.key and request.path not in _OPEN_PATHS:
      given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
      wanted = f"Bearer {self._settings.key}".encode()
      if self._records:  # the name of the conversation follows the key
        given, _, _ = given.partition(b":")
      if not hmac.compare_digest(given, wanted):  # in constant time, against timing attacks
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
    """Loads the newest checkpoint into the engine. Concurrent requests wait for each other."""
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
    """Reads a request, parses it by `read`, decodes images, and sends the engine's answer."""
    name = _conversation_of(request)
    self._writer.check_name(name)
    with contextlib.ExitStack() as stack:
      with contextlib.ExitStack() as held:  # the memory of the body, until it is parsed
        hold = held.enter_context(self._bodies.holding())
        body = await _body_of(request, self._settings.body_bytes, hold)
        if self._is_stopping:  # checked only now, because the body may take seconds to arrive
          raise stopping()
        stack.enter_context(self._answering(request))
        threads = self._small if len(body) <= _SMALL_BODY else self._large
        asked = await _in_thread(threads, held, self._read, read, body, name)
        del body
      held_images = stack.enter_context(contextlib.ExitStack())  # memory, until the answer ends
      if asked.unread is not None:
        hold = held_images.enter_context(self._images.holding())
        hold(asked.unread.nbytes)
        try:
          asked = await _in_thread(self._decoding, held_images, self._writer.with_images, asked)
        except RequestError as error:  # a request of /v1/responses has other names of parameters
          raise error if asked.repeated is None else renamed(error) from None
      return await self._answer(request, asked, name)

  @contextlib.contextmanager
  def _answering(self, request: web.Request) -> Iterator[None]:
    """Within the block, the server neither stops (in the grace period) nor drops the connection."""
    self.metrics.active += 1
    try:
      with self._connections.kept(request.protocol):
        yield
    finally:
      self.metrics.active -= 1

  async def _answer(self, request: web.Request, asked: Request, name: str) -> web.StreamResponse:
    """Lets the engine write a parsed request, and sends the answer, whole or as a stream."""
    self.metrics.prompt_tokens += sum(map(len, asked.prompts))
    head = self._head(asked)
    if asked.stream:
      return await self._stream(request, head, name)
    async with self._choices(asked, request, name) as (choices, parts):
      async for _ in parts:  # collects all tokens in `choices`
        pass
      made = head.whole(choices)
      self._writer.record(name, choices)  # after `whole`, which takes the texts to record
    response = web.StreamResponse(headers={"X-Weights-Version": str(made["weights_version"])})
    response.content_type = "application/json"
    response.charset = "utf-8"
    data = _dumps(made).encode()
    response.content_length = len(data)
    await response.prepare(request)
    for start in range(0, len(data), _PIECE):  # each piece has its own timeout
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
    """Sends new text of the choices as server-sent events. An error becomes the last event."""
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    response, begun = web.StreamResponse(headers=headers), set[int]()  # choices with an event

    async def send(pieces: Iterable[dict[str, Any]]) -> None:
      for made in pieces:  # only events of /v1/responses have a type
        event = f"event: {made['type']}\n" if "type" in made else ""
        await _in_time(response.write(f"{event}data: {_dumps(made)}\n\n".encode()))

    async with self._choices(head.request, request, name) as (choices, parts):
      await response.prepare(request)
      try:
        await send(head.first())
        async for choice in parts:
          await send(head.piece(choice, choice.index not in begun))
          begun.add(choice.index)
        self._writer.record(name, choices)  # before the client can continue the conversation
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
  """The conversation's name, which follows the API key and a colon. "" if there is none."""
  _, _, name = request.headers.get("Authorization", "").partition(":")
  if not is_text(name):
    raise RequestError("the name behind the key is not UTF-8", status=401, code="invalid_api_key")
  return name


async def _body_of(request: web.Request, most: int, hold: Callable[[int], None]) -> bytes:
  """Reads a body of at most `most` bytes. Raises RequestError if it is too large, slow or broken.

  `hold` is called with the number of bytes of each read, and may raise RequestError.
  """
  # Browsers let any web page send other content types to this address without a preflight request.
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
  """Runs work(*given) in a thread. If cancelled, keeps `held` (its memory) open until work ends.

  A thread cannot be interrupted, so its work uses this memory until then.
  """
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
  """Awaits a write to a client. Raises ConnectionError if the client is gone or too slow."""
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
  """Closes a connection at once, and drops unsent bytes."""
  if transport is not None:
    transport.abort()


def _dumps(value: Any) -> str:
  return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
