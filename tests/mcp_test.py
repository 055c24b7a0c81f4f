"""Tools of MCP servers."""

import asyncio
import os
import sys
import types

import pytest
from small_run import Collected, small_config, with_section

from grpo_jax.environments import acting
from grpo_jax.environments.adapters import mcp_tools
from grpo_jax.environments.returned import Unreachable
from grpo_jax.environments.schema import schema_of
from grpo_jax.settings import ConfigError

SERVER = '''
from mcp.server import MCPServer

server = MCPServer("toy")

@server.tool()
def repeat(text: str, times: int = 2) -> str:
  """Says a text again."""
  if times > 9:
    raise ValueError("too often")
  return text * times

server.run()
'''


@pytest.fixture(scope="module")
def server(tmp_path_factory):
  pytest.importorskip("mcp", reason="pip install -e '.[mcp]'")
  file = tmp_path_factory.mktemp("mcp") / "server.py"
  file.write_text(SERVER)
  return f"mcp:{sys.executable} {file}"


def test_tools_of_a_server_have_its_schemas_and_answer(server):
  parts = acting.load((server,), "")
  schema = schema_of(parts.tools["repeat"])
  assert schema["function"]["description"] == "Says a text again."
  assert schema["function"]["parameters"]["required"] == ["text"]

  def said(**arguments):
    return acting.outcome(parts, {"tool": "repeat", "arguments": arguments})

  assert said(text="ab") == {"content": "abab", "failed": False}
  failed = said(text="ab", times=10)
  assert failed["failed"] and failed["content"].startswith("error: ")


DIES = """
import os
import sys
from mcp.server import MCPServer

server = MCPServer("dies")

@server.tool()
def count(text: str) -> str:
  if text == "always" or not os.path.exists(sys.argv[1]):
    open(sys.argv[1], "w").close()
    os._exit(1)
  return text

server.run()
"""


def test_a_server_that_ends_is_connected_to_again_and_else_is_an_error_of_the_environment(tmp_path):
  pytest.importorskip("mcp", reason="pip install -e '.[mcp]'")
  (tmp_path / "server.py").write_text(DIES)
  name = f"mcp:{sys.executable} {tmp_path}/server.py {tmp_path}/died"
  parts = acting.load((name,), "")

  def said(text):
    return acting.outcome(parts, {"tool": "count", "arguments": {"text": text}})

  assert said("ab") == {"content": "ab", "failed": False} and (tmp_path / "died").exists()
  found = said("always")
  assert [*found] == ["error"] and found["error"].startswith("called count: ")
  of_harness = acting.callable_tools((name,), [schema_of(parts.tools["count"])])
  with pytest.raises(Unreachable, match="called count: "):
    asyncio.run(of_harness["count"](text="always"))
  assert said("ab") == {"content": "ab", "failed": False}


def test_a_server_with_pages_without_end_is_refused():
  class Endless:
    async def list_tools(self, cursor="0"):
      self.asked = int(cursor) + 1
      return types.SimpleNamespace(tools=[], next_cursor=str(self.asked))

  client = Endless()
  with pytest.raises(RuntimeError, match="more than"):
    asyncio.run(mcp_tools._listed(client))
  assert client.asked == mcp_tools._MOST_PAGES + 1


def test_a_server_that_says_nothing_in_time_is_ended(monkeypatch, tmp_path):
  pytest.importorskip("mcp", reason="pip install -e '.[mcp]'")
  monkeypatch.setattr(mcp_tools, "_SECONDS", 1.0)
  (tmp_path / "mute.py").write_text(
    f"import os, sys\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
    "for line in sys.stdin: pass\n"
  )
  with pytest.raises(ConfigError, match="no MCP server answers"):
    mcp_tools.tools_of(f"mcp:{sys.executable} {tmp_path}/mute.py")
  with pytest.raises(ProcessLookupError):
    os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.slow
def test_the_policy_calls_them_in_workers(server):
  config = with_section(small_config(), "sampling", max_tokens=24)
  config = with_section(
    config, "environment", tools=(server,), calls=r"(?P<arguments>\d)", turn_tokens=6
  )
  found = Collected(with_section(config, "reward", workers=2))
  said = [turn["text"] for row in found.rows for turn in row["turns"] if turn["role"] == "tool"]
  assert said and all(len(text) == 2 and text[0] == text[1] for text in said)


@pytest.mark.parametrize("name", ["mcp:no_such_program", "mcp:true", "mcp:http://127.0.0.1:9/mcp"])
def test_without_the_package_or_a_server_the_error_is_one_line(name):
  with pytest.raises(ConfigError, match="environment.tools: .*(mcp|MCP)") as caught:
    mcp_tools.tools_of(name)
  assert "\n" not in str(caught.value)


def test_ctrl_c_while_a_server_does_not_answer_is_not_its_error(monkeypatch):
  def interrupted(future, timeout):
    raise KeyboardInterrupt

  monkeypatch.setitem(sys.modules, "mcp", types.SimpleNamespace(Client=None))
  monkeypatch.setattr(mcp_tools._Connection, "_run", lambda connection: None)
  monkeypatch.setattr(mcp_tools.Future, "result", interrupted)
  with pytest.raises(KeyboardInterrupt):
    mcp_tools._Connection("http://nobody")
