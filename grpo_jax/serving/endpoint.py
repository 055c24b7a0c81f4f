"""An endpoint in a thread of this process, through which programs use the policy in training."""

import asyncio
import secrets
import threading
from typing import Any

from grpo_jax.data.tokenizers.tokenizer import Tokenizer
from grpo_jax.environments.harness import LIMIT
from grpo_jax.serving.engine import Engine
from grpo_jax.serving.server import Server, ServerSettings
from grpo_jax.serving.traces import Recorder
from grpo_jax.settings import RunFailed

_SECONDS_TO_LISTEN = 30.0
MODEL = "policy"  # the name of the model for clients


class Endpoint:
  """Serves an engine at a free port of 127.0.0.1, to clients that have its key.

  Attributes:
    recorder: Records the completions of clients.
    url: The `base_url` for clients.
    key: The API key. A client appends `:` and the name of its conversation, as `Recorder.named`
      returns it.
  """

  def __init__(
    self, engine: Engine, tokenizer: Tokenizer, vocabulary: int, calls: str = "auto"
  ) -> None:
    """Starts the engine and then the server. `vocabulary` is V, and `calls` environment.calls.

    Raises:
      RunFailed: The server cannot listen.
    """
    self.recorder, self.key = Recorder(), secrets.token_urlsafe(16)
    self._engine, self.url = engine, ""
    settings = ServerSettings(MODEL, key=self.key, grace=0.0, longest=LIMIT, calls=calls)
    self._server = Server(engine, tokenizer, vocabulary, settings, recorder=self.recorder)
    self._listens = threading.Event()
    self._problem: BaseException | None = None
    self._loop: asyncio.AbstractEventLoop | None = None
    self._stop: asyncio.Event | None = None
    engine.start()
    self._thread = threading.Thread(target=self._run, name="endpoint", daemon=True)
    self._thread.start()
    if not self._listens.wait(_SECONDS_TO_LISTEN) or self._problem is not None:
      raise RunFailed(f"the endpoint of the run cannot listen at 127.0.0.1: {self._problem}")

  def set_weights(self, params: Any, version: int) -> None:
    """Replaces the engine's weights between two chunks. Returns when that is done."""
    self._engine.set_weights(params, version)

  def close(self) -> None:
    """Stops the server and the engine. Running requests end with an error."""
    if self._loop is not None and self._stop is not None and self._thread.is_alive():
      self._loop.call_soon_threadsafe(self._stop.set)
      self._thread.join(_SECONDS_TO_LISTEN)

  def _run(self) -> None:
    try:
      asyncio.run(self._serve())
    except BaseException as error:  # __init__ waits for `_listens` and raises it
      self._problem = error
      self._listens.set()

  async def _serve(self) -> None:
    self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
    await self._server.run("127.0.0.1", 0, self._stop, self._ready)

  def _ready(self, host: str, port: int) -> None:
    self.url = f"http://{host}:{port}/v1"
    self._listens.set()
