"""Converts OpenAI's messages and tools to the format that chat templates read."""

from collections.abc import Iterator, Mapping, Sequence
import itertools
import json
from typing import Any

from grpo_jax.serving.images import image_of
from grpo_jax.serving.requests import DEEPEST, is_too_deep


def are_tools(value: Any) -> bool:
  """Whether a value is a list of function tools in OpenAI's format."""
  return isinstance(value, list) and all(
    isinstance(tool, dict)
    and tool.get("type") == "function"
    and isinstance(tool.get("function"), dict)
    and isinstance(tool["function"].get("name"), str)
    for tool in value
  )


def messages_for_template(messages: Any, sees_images: bool = False) -> list[dict[str, Any]]:
  """Converts messages: contents become texts, and arguments of tool calls become objects.

  A content with images becomes a list of parts, with {"type": "image", "image": SOURCE} for images.

  Args:
    messages: The messages in OpenAI's format, not checked yet.
    sees_images: Whether the model accepts images.

  Raises:
    ValueError: The messages are malformed. The error is one line.
  """
  if not isinstance(messages, list) or not messages:
    raise ValueError("messages must be a list of messages, at least one")
  numbers = itertools.count(1)  # of images, for errors
  return [_for_template(message, sees_images, numbers) for message in messages]


def with_texts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """Copies messages with the arguments of calls as JSON texts, as DeepSeek's templates expect."""
  return [
    {**message, "tool_calls": [_with_text(call) for call in message["tool_calls"]]}
    if message.get("tool_calls")
    else {**message}
    for message in messages
  ]


def with_names(
  calls: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
  """Adds function names to the tool messages in `after`, which answer `calls`, by tool_call_id."""
  names = {call.get("id"): {"name": call["function"]["name"]} for call in calls}
  return [{**names.get(one.get("tool_call_id"), {}), **one} for one in after]


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
  function = call["function"]
  text = json.dumps(function.get("arguments"), ensure_ascii=False)
  return {**call, "function": {**function, "arguments": text}}


def _for_template(message: Any, sees_images: bool, numbers: Iterator[int]) -> dict[str, Any]:
  if not isinstance(message, dict) or not isinstance(message.get("role"), str):
    raise ValueError("messages: each must be an object with a text role and a content")
  made = message | {"content": _content(message.get("content"), sees_images, numbers)}
  calls = message.get("tool_calls")
  if calls:
    if not isinstance(calls, list):
      raise ValueError("messages: tool_calls must be a list")
    made["tool_calls"] = [_with_object(call) for call in calls]
  elif message.get("content") is None:
    raise ValueError("messages: a message without tool_calls must have a content")
  return made


def _content(content: Any, sees_images: bool, numbers: Iterator[int]) -> str | list[dict[str, Any]]:
  """A content as a text or, if it has images, as parts. `numbers` counts images, for errors."""
  if content is None or isinstance(content, str):
    return content or ""
  parts = content if isinstance(content, list) else [None]  # None is refused below
  if not all(isinstance(part, Mapping) and (_is_text(part) or _is_image(part)) for part in parts):
    raise ValueError(
      "messages: a content must be a text, or a list of parts of type text and image_url"
    )
  if not any(map(_is_image, parts)):
    return "".join(part["text"] for part in parts)
  return [
    {"type": "image", "image": image_of(part, f"messages: image {next(numbers)}", sees_images)}
    if _is_image(part)
    else {"type": "text", "text": part["text"]}
    for part in parts
  ]


def _is_image(part: Mapping[str, Any]) -> bool:
  return part.get("type") == "image_url"


def _is_text(part: Mapping[str, Any]) -> bool:
  return part.get("type", "text") == "text" and isinstance(part.get("text"), str)


def _with_object(call: Any) -> dict[str, Any]:
  """Copies a tool call with its arguments parsed from JSON text."""
  function = call.get("function") if isinstance(call, dict) else None
  if not isinstance(function, dict) or not isinstance(function.get("name"), str):
    raise ValueError("messages: a call must have a function with a name")
  arguments = function.get("arguments")
  if isinstance(arguments, str):
    try:
      arguments = json.loads(arguments or "{}") or {}  # some clients write null for none
    except (ValueError, RecursionError):
      raise ValueError("messages: the arguments of a call must be JSON") from None
    if is_too_deep(arguments):  # `read_json` could not see into this text
      raise ValueError(
        f"messages: the arguments of a call are nested deeper than {DEEPEST} levels; send flatter"
        " ones"
      )
    if not isinstance(arguments, dict):
      raise ValueError("messages: the arguments of a call must be a JSON object")
  return call | {"function": function | {"arguments": arguments}}
