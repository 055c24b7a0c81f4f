"""Tools of MCP servers: `environment.tools=("mcp:COMMAND",)` or `("mcp:http://HOST/mcp",)`.

Each process that calls tools has its own connection, whose event loop runs in a thread. If the
server has ended, a call connects again, once.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
import contextlib
import os
import shlex
import threading
from typing import Any

from grpo_jax.environments.returned import Unreachable
from grpo_jax.settings import ConfigError, shown

PREFIX = "mcp:"
_SECONDS = 60.0  # timeout to start a server and to list its tools
_SECONDS_OF_CALL = 600.0  # timeout of a call
_SECONDS_OF_END = 10.0  # timeout to close a connection, and to check whether a server answers
_MOST_PAGES, _MOST_TOOLS = 100, 1000

_CONNECTIONS: dict[tuple[str, int], "_Connection"] = {}  # by server and process
_LOCK = threading.Lock()


def tools_of(name: str) -> list[Callable[..., Any]]:
  """Returns the tools of a server as async functions with the attribute `schema`.

  Args:
    name: An entry of environment.tools: mcp:COMMAND or mcp:URL.

  Raises:
    ConfigError: The package mcp is not installed, or no server answers.
  """
  server = name.removeprefix(PREFIX).strip()
  return [_tool(server, found) for found in _connection(server).tools]


def _tool(server: str, found: Any) -> Callable[..., Any]:
  """Makes an async function that calls a tool of a server. It has the server's schema.

  Args:
    server: The command or URL of the server.
    found: The server's entry for the tool, with `name`, `description` and `input_schema`.
  """

  async def call(**arguments: Any) -> str:
    for _ in range(2):  # once more if the connection of earlier calls was lost
      try:  # in a thread, because connecting blocks
        connection = await asyncio.to_thread(_connection, server)
      except ConfigError as error:
        raise Unreachable(f"called {found.name}: {error}") from None
      try:
        return await asyncio.wrap_future(connection.call(found.name, arguments))
      except _Lost:
        connection.close()
    raise Unreachable(f"called {found.name}: {shown(PREFIX + server)} ends at each call")

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
  """Returns this process's connection to a server. Connects if there is none, or it has ended."""
  key = server, os.getpid()  # a forked process cannot use the connection of its parent
  with _LOCK:
    if key not in _CONNECTIONS or not _CONNECTIONS[key].is_open:
      _CONNECTIONS[key] = _Connection(server)
    return _CONNECTIONS[key]


class _Lost(Exception):
  """The server of a connection has ended."""


class _Connection:
  """A connection to a server.

  Attributes:
    tools: The tools that the server offers.
  """

  def __init__(self, server: str) -> None:
    """Connects, in a new thread. Raises ConfigError as `tools_of` does."""
    try:
      from mcp import Client  # noqa: F401  imported here because it is an optional package
    except ImportError:
      raise ConfigError(
        "environment.tools: tools of MCP servers need the package mcp: pip install -e '.[mcp]'"
      ) from None
    self._server = server
    self._ready: Future[tuple[asyncio.AbstractEventLoop, Any, list[Any]]] = Future()
    self._is_closed = False
    self._thread = threading.Thread(target=self._run, name="mcp", daemon=True)
    self._thread.start()
    try:
      # The thread's own limit is _SECONDS. It then closes the connection, and passes its error on.
      self._loop, self._client, self.tools = self._ready.result(_SECONDS + 2 * _SECONDS_OF_END)
    except (KeyboardInterrupt, SystemExit):
      raise
    except BaseException as error:  # mostly the thread's, such as a group of errors
      first_error = _first_of(error)
      said = " ".join(str(first_error).split())[:200] or type(first_error).__name__
      raise ConfigError(
        f"environment.tools: no MCP server answers at {shown(PREFIX + server)}: {said}"
      ) from None

  @property
  def is_open(self) -> bool:
    """Whether the connection can still be used."""
    return self._thread.is_alive() and not self._is_closed

  def call(self, name: str, arguments: dict[str, Any]) -> "Future[str]":
    """Calls a tool. The future has the tool's text, or raises `_Lost` if the server is gone."""
    coroutine = self._call(name, arguments)
    try:
      return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
    except RuntimeError:  # the loop is closed
      coroutine.close()
      raise _Lost from None

  def close(self) -> None:
    """Ends the connection, and the server if this connection started it."""
    self._is_closed = True
    with contextlib.suppress(RuntimeError):  # the loop is closed
      self._loop.call_soon_threadsafe(self._end.set)

  async def _call(self, name: str, arguments: dict[str, Any]) -> str:
    """Calls a tool, in the connection's event loop. Raises RuntimeError if the tool fails."""
    try:
      async with asyncio.timeout(_SECONDS_OF_CALL):
        answer = await self._client.call_tool(name, arguments)
    except TimeoutError:
      raise RuntimeError(f"{name} took more than {_SECONDS_OF_CALL:g} seconds") from None
    except Exception as error:
      if not await self._is_there():
        raise _Lost from error
      raise
    text = "\n".join(getattr(one, "text", f"[{one.type}]") for one in answer.content)
    if answer.is_error:
      raise RuntimeError(text)
    return text

  async def _is_there(self) -> bool:
    """Returns whether the server still answers. The errors of calls have no codes that tell."""
    try:
      async with asyncio.timeout(_SECONDS_OF_END):
        await self._client.list_tools(cache_mode="bypass")
    except Exception:
      return False
    return True

  def _run(self) -> None:
    try:
      asyncio.run(self._serve())
    except BaseException as error:
      if not self._ready.done():
        self._ready.set_exception(error)

  async def _serve(self) -> None:
    """Connects, passes (loop, client, tools) to `_ready`, and stays connected until `close`."""
    import mcp
    from mcp.client.stdio import StdioServerParameters, stdio_client

    server: Any = self._server
    if not server.startswith(("http://", "https://")):
      command, *arguments = shlex.split(server)
      # Without `env`, a server would get only a few of this process's environment variables.
      parameters = StdioServerParameters(command=command, args=arguments, env=dict(os.environ))
      server = stdio_client(parameters)  # the client of mcp 2.0 does not take the parameters
    self._end = asyncio.Event()
    async with asyncio.timeout(_SECONDS) as limit, mcp.Client(server) as client:
      tools = await _listed(client)
      limit.reschedule(None)  # the timeout is for the start only
      self._ready.set_result((asyncio.get_running_loop(), client, tools))
      await self._end.wait()


async def _listed(client: Any) -> list[Any]:
  """Lists all tools of a server, page by page. Raises RuntimeError if there are too many."""
  page = await client.list_tools()
  tools = list(page.tools)
  for _ in range(_MOST_PAGES):
    if page.next_cursor is None or len(tools) > _MOST_TOOLS:
      break
    page = await client.list_tools(cursor=page.next_cursor)
    tools += page.tools
  if page.next_cursor is not None or len(tools) > _MOST_TOOLS:
    raise RuntimeError(f"it lists more than {_MOST_TOOLS} tools, or {_MOST_PAGES} pages of them")
  return tools


def _first_of(error: BaseException) -> BaseException:
  """Returns the first error inside nested exception groups, which task groups raise."""
  while isinstance(error, BaseExceptionGroup):
    error = error.exceptions[0]
  return error
