"""Servers of openenv as environments."""

import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from small_run import Collected, P, small_config, small_run, with_section

from grpo_jax.environments.adapters.servers import OpenEnv, action_of, text_of
from grpo_jax.settings import ConfigError

SERVER = """
import sys
import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Say(Action):
  message: str

class Heard(Observation):
  text: str = ""

class Counting(Environment):
  SUPPORTS_CONCURRENT_SESSIONS = True

  def __init__(self):
    super().__init__()
    self.turns, self.seed = 0, 0

  def reset(self, seed=None, episode_id=None, **kwargs):
    self.turns, self.seed = 0, seed or 0
    return Heard(text=f"seed {self.seed % 10}", reward=None, done=False)

  def step(self, action, timeout_s=None, **kwargs):
    self.turns += 1
    return Heard(text=f"{self.turns}!", reward=float(len(action.message)), done=self.turns == 3)

  @property
  def state(self):
    return State()

app = create_fastapi_app(Counting, Say, Heard, max_concurrent_envs=64)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory):
  pytest.importorskip("openenv", reason="pip install openenv")
  file = tmp_path_factory.mktemp("server") / "server.py"
  file.write_text(SERVER)
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  process = subprocess.Popen([sys.executable, str(file), str(port)])
  try:
    for _ in range(300):
      try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
        break
      except OSError:
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}"
  finally:
    process.kill()
    process.wait()


@pytest.mark.slow
def test_each_completion_has_a_session_and_its_rewards(address):
  config = with_section(small_config(), "data", task="seeds", prompt="")
  config = with_section(config, "sampling", max_tokens=40)
  config = with_section(config, "environment", name=f"openenv:{address}", turn_tokens=6)
  config = with_section(config, "reward", functions=("environment",), workers=1)
  found = Collected(config)
  assert len(found.rows) == P * 3
  for row in found.rows:
    own = [turn for turn in row["turns"] if turn["role"] == "assistant"]
    said = [turn["text"] for turn in row["turns"] if turn["role"] == "user"]
    assert row["prompt"].startswith("seed ") and said == ["1!", "2!"][: len(own) - 1]
    assert [turn["reward"] for turn in own] == [len(turn["text"]) for turn in own]
    assert len(own) == 3 and row["reward"] == sum(turn["reward"] for turn in own)


def test_without_a_server_the_error_is_one_line():
  config = with_section(small_config(), "data", task="seeds", prompt="")
  config = with_section(config, "environment", name="openenv:http://127.0.0.1:9")
  words = "no openenv server at http://127.0.0.1:9|pip install -e '..openenv"
  with pytest.raises(ConfigError, match=words) as caught:
    small_run(config).prompts("train")
  assert "\n" not in str(caught.value) and OpenEnv.pickles is False


@pytest.mark.parametrize(
  "text, action",
  [
    ("hello", {"message": "hello"}),
    ('{"count": 2}', {"count": 2}),
    ('{"other": 2}', {"message": '{"other": 2}'}),
    ("7", {"message": "7"}),
    ("", {"message": ""}),
  ],
)
def test_a_text_is_an_action(text, action):
  fields = {"count": {"type": "integer"}, "message": {"anyOf": [{"type": "string"}]}}
  assert action_of(text, fields) == action


def test_an_action_without_a_text_must_be_json():
  with pytest.raises(ValueError, match="JSON object with count"):
    action_of("hello", {"count": {"type": "integer"}})


@pytest.mark.parametrize(
  "observation, text",
  [
    ({"text": "a", "x": 1}, "a"),
    ({"message": "", "board": [1], "done": False, "reward": None}, '{"message": "", "board": [1]}'),
    ("plain", "plain"),
  ],
)
def test_an_observation_is_a_text(observation, text):
  assert text_of(observation) == text
