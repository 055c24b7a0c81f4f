"""Tools of MCP servers."""

import sys

import pytest
from small_run import Collected, small_config, with_section

from grpo_jax.environments import acting
from grpo_jax.environments.adapters import mcp_tools
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
