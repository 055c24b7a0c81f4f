"""Servers of the package openenv: `environment.name=openenv:http://127.0.0.1:8000`.

Each completion has its own session at the server.
"""

from collections.abc import Mapping
import json
from typing import Any
import urllib.request

from grpo_jax.settings import ConfigError

_SECONDS = 30.0  # timeout to get the schema of the actions
# Fields that may hold the text of an observation, the likeliest first.
_TEXTS = ("prompt", "message", "text", "observation", "content", "output", "echoed_message")
_NO_TEXT = ("reward", "done", "metadata")


class OpenEnv:
  """A session at a server. Its connection cannot move to another worker."""

  pickles = False

  def __init__(self, address: str) -> None:
    """Does not connect yet. `address` is the URL of the server."""
    self._address = address.rstrip("/")
    self._client: Any = None
    self._fields: dict[str, Any] = {}  # by name, the schemas of an action's fields

  async def reset(self, example: Mapping[str, Any]) -> list[dict[str, str]]:
    """Begins a session, with the example's `seed` if it has one. Returns the first message.

    Raises:
      ConfigError: openenv is not installed, or no openenv server answers at the address.
    """
    try:
      from openenv import GenericEnvClient  # imported here because it is an optional package
    except ImportError:
      raise ConfigError(
        "environment.name: servers need the package openenv: pip install -e '.[openenv]'"
      ) from None
    seed = {"seed": example["seed"]} if isinstance(example.get("seed"), int) else {}
    try:
      self._fields = self._fields_of_actions()
      self._client = GenericEnvClient(base_url=self._address)
      found = await self._client.reset(**seed)
    except Exception as error:
      await self.close()
      said = " ".join(str(error).split())[:200] or type(error).__name__
      raise ConfigError(f"environment.name: no openenv server at {self._address}: {said}") from None
    return [{"role": "user", "content": text_of(found.observation)}]

  async def step(
    self, message: Mapping[str, Any]
  ) -> tuple[list[dict[str, str]], float | None, bool]:
    """Sends the policy's text as an action. Returns (messages, reward or None, done)."""
    found = await self._client.step(action_of(message["content"], self._fields))
    reward = None if found.reward is None else float(found.reward)
    messages = [] if found.done else [{"role": "user", "content": text_of(found.observation)}]
    return messages, reward, bool(found.done)

  async def close(self) -> None:
    """Ends the session."""
    if self._client is not None:
      await self._client.close()

  def _fields_of_actions(self) -> dict[str, Any]:
    """Gets the schemas of an action's fields, by name, without the field `metadata`."""
    with urllib.request.urlopen(f"{self._address}/schema", timeout=_SECONDS) as answer:
      properties = json.load(answer)["action"].get("properties", {})
    return {name: schema for name, schema in properties.items() if name != "metadata"}


def action_of(text: str, fields: Mapping[str, Any]) -> dict[str, Any]:
  """Converts the policy's text to an action.

  Args:
    text: A JSON object of the fields, or the value of the first field that is a string.
    fields: The schemas of the action's fields, by name.

  Raises:
    ValueError: The text is not a JSON object of the fields, and no field is a string.
  """
  try:
    value = json.loads(text)
  except (ValueError, RecursionError):
    value = None
  if isinstance(value, dict) and value and set(value) <= set(fields):
    return value
  for name, schema in fields.items():  # anyOf: a field such as str | None
    kinds = [schema.get("type"), *(one.get("type") for one in schema.get("anyOf", ()))]
    if "string" in kinds:
      return {name: text}
  raise ValueError(f"an action is a JSON object with {', '.join(fields)}, and no text")


def text_of(observation: Any) -> str:
  """Returns the text field of an observation, or else all its fields as JSON."""
  if not isinstance(observation, Mapping):
    return str(observation)
  for name in _TEXTS:
    if isinstance(observation.get(name), str) and observation[name]:
      return observation[name]
  rest = {name: value for name, value in observation.items() if name not in _NO_TEXT}
  return json.dumps(rest, ensure_ascii=False, default=str)
