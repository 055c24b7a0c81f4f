"""Tools of MCP servers: `environment.tools=("mcp:COMMAND",)` or `("mcp:http://HOST/mcp",)`.

Each process that calls tools has a connection of its own, which its event loop keeps in a thread.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
import os
import shlex
import threading
from typing import Any

from grpo_jax.settings import ConfigError, shown

PREFIX = "mcp:"
_SECONDS = 60.0  # to start a server and to list its tools

_CONNECTIONS: dict[tuple[str, int], "_Connection"] = {}  # by server and process
_LOCK = threading.Lock()


def tools_of(name: str) -> list[Callable[..., Any]]:
  """The tools of a server, as async functions with the attribute `schema`.

  Args:
    name: As in environment.tools: mcp:COMMAND or mcp:URL.

  Raises:
    ConfigError: The package mcp is not installed, or no server answers.
  """
  server = name.removeprefix(PREFIX).strip()
  return [_tool(server, found) for found in _connection(server).tools]


def _tool(server: str, found: Any) -> Callable[..., Any]:
  async def call(**arguments: Any) -> str:
    future = await asyncio.to_thread(lambda: _connection(server).call(found.name, arguments))
    return await asyncio.wrap_future(future)

  call.__name__ = call.__qualname__ = found.name
  call.schema = {  # type: ignore[attr-defined]  # schema_of reads it
    "type": "function",
    "function": {
      "name": found.name,
      "description": found.description or found.name,
      "parameters": found.input_schema,
    },
  }
  return call


def _connection(server: str) -> "_Connection":
  """That of this process. One that has ended is made anew."""
  key = server, os.getpid()
  with _LOCK:
    if key not in _CONNECTIONS or not _CONNECTIONS[key].is_open:
      _CONNECTIONS[key] = _Connection(server)
    return _CONNECTIONS[key]


class _Connection:
  """A connection to a server.

  Attributes:
    tools: What it offers.
  """

  def __init__(self, server: str) -> None:
    """Connects. Raises ConfigError as `tools_of` does."""
    try:
      from mcp import Client  # noqa: F401  imported here because it is an optional package
    except ImportError:
      raise ConfigError(
        "environment.tools: tools of MCP servers need the package mcp: pip install -e '.[mcp]'"
      ) from None
    self._server = server
    self._ready: Future[tuple[asyncio.AbstractEventLoop, Any, list[Any]]] = Future()
    self._thread = threading.Thread(target=self._run, name="mcp", daemon=True)
    self._thread.start()
    try:
      self._loop, self._client, self.tools = self._ready.result(_SECONDS)
    except BaseException as error:
      said = " ".join(str(_first_of(error)).split())[:200] or type(_first_of(error)).__name__
      raise ConfigError(
        f"environment.tools: no MCP server answers at {shown(PREFIX + server)}: {said}"
      ) from None

  @property
  def is_open(self) -> bool:
    """Whether it can be asked."""
    return self._thread.is_alive()

  def call(self, name: str, arguments: dict[str, Any]) -> "Future[str]":
    """Calls a tool. The text that it returns is the result."""
    return asyncio.run_coroutine_threadsafe(self._call(name, arguments), self._loop)

  async def _call(self, name: str, arguments: dict[str, Any]) -> str:
    answer = await self._client.call_tool(name, arguments)
    text = "\n".join(getattr(one, "text", f"[{one.type}]") for one in answer.content)
    if answer.is_error:
      raise RuntimeError(text)
    return text

  def _run(self) -> None:
    try:
      asyncio.run(self._serve())
    except BaseException as error:
      if not self._ready.done():
        self._ready.set_exception(error)

  async def _serve(self) -> None:
    import mcp
    from mcp.client.stdio import StdioServerParameters

    server: Any = self._server
    if not server.startswith(("http://", "https://")):
      command, *arguments = shlex.split(server)
      server = StdioServerParameters(command=command, args=arguments, env=dict(os.environ))
    async with mcp.Client(server) as client:
      tools, page = [], await client.list_tools()
      tools += page.tools
      while page.next_cursor is not None:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
      self._ready.set_result((asyncio.get_running_loop(), client, tools))
      await asyncio.Event().wait()  # the connection ends with the process


def _first_of(error: BaseException) -> BaseException:
  """The error itself, where a group of tasks wraps it."""
  while isinstance(error, BaseExceptionGroup):
    error = error.exceptions[0]
  return error
