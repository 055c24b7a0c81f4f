"""/v1/responses: translates its requests to chats, and writes the answers as responses.

Nothing is stored: each request must contain the whole conversation.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import json
from typing import Any

from grpo_jax.data.tokenizers.replies import call_id
from grpo_jax.environments.tool_calls import Call
from grpo_jax.serving.answers import AnswerChoice
from grpo_jax.serving.chats import chat_request
from grpo_jax.serving.requests import IGNORED, Limits, Request, RequestError, Texts
from grpo_jax.settings import is_text, shown

# Parameters with the same names in a chat. Filters have the same names, too.
_AS_IN_CHAT = {
  "model", "temperature", "min_tokens", "seed", "stop", "stream", "parallel_tool_calls",
  "top_logprobs", "stop_token_ids", "logit_bias", "skip_special_tokens", "chat_template_kwargs",
}  # fmt: skip
# Parameters with other names in a chat: name in a chat -> name in a response, for errors.
_RENAMED = {
  "max_tokens": "max_output_tokens",
  "messages": "input",
  "response_format": "text",
  "reasoning_effort": "reasoning",
}
_LOGPROBS = "message.output_text.logprobs"
# The second is accepted because agents request it by default. No answer has separate reasoning.
_INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")
_TRANSLATED = {
  "input", "instructions", "tools", "tool_choice", "max_output_tokens", "text", "reasoning",
  "include", "stream_options",
}  # fmt: skip
# Ignored parameters: they limit OpenAI's built-in tools, which are refused.
_IGNORED = IGNORED | {"max_tool_calls", "prompt_cache_retention"}
_NEUTRAL = {"truncation": "disabled", "background": False}
# Known keys of objects. Summaries are ignored, because no answer has separate reasoning.
_OF_REASONING = ("effort", "summary", "generate_summary")
_OF_TEXT = ("format", "verbosity")
_OF_FORMAT = ("type", "schema", "name", "strict", "description")
_TEXT_PARTS = ("input_text", "output_text", "text")


def response_request(body: Mapping[str, Any], limits: Limits, texts: Texts) -> Request:
  """Parses a body of /v1/responses by way of a chat. Raises RequestError if any field is wrong."""
  as_in_chat = {*_AS_IN_CHAT, *limits.filters}
  _check_names(body, as_in_chat)
  chat = {name: body[name] for name in as_in_chat if name in body}
  include = _list(body, "include")
  for entry in include:
    if entry not in _INCLUDED:
      raise RequestError(
        f"include: this server does not know {shown(entry)}; give {' or '.join(_INCLUDED)}",
        "include",
      )
  asks_logprobs = _LOGPROBS in include or bool(body.get("top_logprobs"))
  effort = _object(body.get("reasoning"), "reasoning", _OF_REASONING).get("effort")
  chat |= {
    "messages": _messages(body),
    "tools": _tools(body),
    "tool_choice": _choice(body.get("tool_choice")),
    "max_tokens": body.get("max_output_tokens"),
    "response_format": _format(body),
    "reasoning_effort": effort,
    "logprobs": asks_logprobs,
  }
  try:
    asked = chat_request(chat, limits, texts)
  except RequestError as error:
    raise renamed(error) from None
  form = asked.form  # errors that come later name its parameter
  if form is not None and form.param in _RENAMED:
    form = form._replace(param=_RENAMED[form.param])
  repeated = _repeated(body, asked, effort)
  for name, value in repeated.items():
    if not is_text(json.dumps(value, ensure_ascii=False)):
      raise RequestError(
        f"{name}: it contains half of a surrogate pair; send texts that UTF-8 can encode", name
      )
  return dataclasses.replace(asked, form=form, repeated=repeated)


def renamed(error: RequestError) -> RequestError:
  """Replaces the parameter name of a chat in an error by the name in a response."""
  new = _RENAMED.get(error.param or "")
  if new is None:
    return error
  message = error.message.replace(error.param, new, 1)
  return RequestError(message, new, error.status, error.code)


def _check_names(body: Mapping[str, Any], as_in_chat: set[str]) -> None:
  """Raises RequestError for parameters that are unknown, or have unsupported values."""
  for name, value in body.items():
    if value is None or name in as_in_chat | _TRANSLATED | _IGNORED:
      continue
    if name in ("previous_response_id", "conversation"):
      raise RequestError(
        f"{name}: this server keeps no responses; send the whole conversation as input", name
      )
    if name not in _NEUTRAL:
      raise RequestError(f"{name!s:.100}: this server does not know the parameter", f"{name:.100}")
    if value != _NEUTRAL[name]:
      raise RequestError(
        f"{name} is {shown(value)}: this server does not support it; leave it out", name
      )


def _repeated(body: Mapping[str, Any], asked: Request, effort: Any) -> dict[str, Any]:
  """The fields of the request that a response repeats."""
  return {
    "instructions": body.get("instructions"),
    "max_output_tokens": body.get("max_output_tokens"),
    "metadata": body.get("metadata") or {},
    "parallel_tool_calls": asked.most_calls is None,
    "previous_response_id": None,
    "reasoning": {"effort": effort, "summary": None},
    "store": False,
    "temperature": asked.settings.temperature,
    "text": body.get("text") or {"format": {"type": "text"}},
    "tool_choice": body.get("tool_choice") or "auto",
    "tools": body.get("tools") or [],
    "top_logprobs": asked.alternatives,
    "top_p": asked.settings.top_p,
    "truncation": "disabled",
  }


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Translates `instructions` and `input` to messages of a chat. Raises RequestError."""
  given, instructions = body.get("input"), body.get("instructions")
  if instructions is not None and not isinstance(instructions, str):
    raise RequestError("instructions must be a text", "instructions")
  items = [{"role": "user", "content": given}] if isinstance(given, str) else given
  if not isinstance(items, list) or not items or not all(isinstance(x, dict) for x in items):
    raise RequestError("input must be a text or a list of items, at least one", "input")
  messages = [] if instructions is None else [{"role": "system", "content": instructions}]
  for item in items:
    kind = item.get("type", "message")
    last: dict[str, Any] = messages[-1] if messages else {}
    if kind == "message":
      messages.append({"role": _role(item.get("role")), "content": _content(item.get("content"))})
    elif kind == "function_call":
      function = {"name": item.get("name"), "arguments": item.get("arguments")}
      call = {"id": item.get("call_id"), "type": "function", "function": function}
      if last.get("role") != "assistant":  # in a chat, calls belong to a message of the assistant
        messages.append(last := {"role": "assistant", "content": None})
      last["tool_calls"] = [*last.get("tool_calls", ()), call]
    elif kind == "function_call_output":
      said = _content(item.get("output"))
      messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": said})
    else:
      raise RequestError(
        f"input: this server reads items of type message, function_call and function_call_output,"
        f" not {shown(kind)}",
        "input",
      )
  return messages


def _role(role: Any) -> Any:
  """Replaces the role developer, which chat templates do not know, by system."""
  return "system" if role == "developer" else role


def _content(content: Any) -> Any:
  """Translates texts and images of a content to parts of a chat. Other parts stay unchanged."""
  return [_part_of_chat(part) for part in content] if isinstance(content, list) else content


def _part_of_chat(part: Any) -> Any:
  kind = part.get("type") if isinstance(part, dict) else None
  if kind == "input_image":
    return {"type": "image_url", "image_url": part.get("image_url")}
  return {"type": "text", "text": part.get("text")} if kind in _TEXT_PARTS else part


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
  tools = _list(body, "tools")
  for tool in tools:
    is_function = isinstance(tool, dict) and tool.get("type") == "function"
    if not is_function or not isinstance(tool.get("name"), str):
      raise RequestError(
        "tools: each must be a function, such as {'type': 'function', 'name': ...}", "tools"
      )
  keys = "name", "description", "parameters"
  return [
    {"type": "function", "function": {key: tool[key] for key in keys if tool.get(key) is not None}}
    for tool in tools
  ] or None


def _choice(choice: Any) -> Any:
  if not isinstance(choice, dict):
    return choice
  if choice.get("type") != "function":
    raise RequestError(
      "tool_choice: auto, none, required or {'type': 'function', 'name': ...}", "tool_choice"
    )
  return {"type": "function", "function": {"name": choice.get("name")}}


def _format(body: Mapping[str, Any]) -> dict[str, Any]:
  """Translates `text` to the response_format of a chat. Raises RequestError."""
  text = _object(body.get("text"), "text", _OF_TEXT)
  if text.get("verbosity") not in (None, "medium"):
    raise RequestError("text: this server does not support verbosity; leave it out", "text")
  given = _object(text.get("format"), "text", _OF_FORMAT) or {"type": "text"}
  kind = given.get("type")
  if kind == "json_schema" and isinstance(given.get("schema"), dict):
    return {"type": "json_schema", "json_schema": {"schema": given["schema"]}}
  if kind not in ("text", "json_object"):
    raise RequestError(
      "text: its format must be {'type': 'text'}, {'type': 'json_object'} or"
      " {'type': 'json_schema', 'schema': {...}}",
      "text",
    )
  return {"type": kind}


def _list(body: Mapping[str, Any], name: str) -> list[Any]:
  value = body.get(name)
  if value is not None and not isinstance(value, list):
    raise RequestError(f"{name} must be a list", name)
  return value or []


def _object(value: Any, name: str, known: Sequence[str]) -> dict[str, Any]:
  """Checks that an object of the parameter `name` has only known keys. None becomes {}."""
  found = {} if value is None else value
  if not isinstance(found, dict):
    raise RequestError(f"{name} must be an object, and so must what it holds", name)
  for key, inner in found.items():
    if key not in known and inner is not None:
      raise RequestError(
        f"{name}: this server does not know {shown(key):.100}; give {' or '.join(known)}", name
      )
  return found


class ResponseHead:
  """Makes the JSON of an answer of /v1/responses, with one choice, as `answers.AnswerHead` does."""

  is_ended_by_done = False

  def __init__(self, number: str, created: int, model: str, request: Request) -> None:
    """Starts without output.

    Args:
      number: A unique text that is part of all ids.
      created: When the answer was started, in seconds since 1970.
      model: The name of the model.
      request: The request that is answered.
    """
    self.request = request
    self._number, self._created, self._model = number, created, model
    self._text, self._logprobs = "", list[dict[str, Any]]()
    self._output: list[dict[str, Any]] = []  # completed items
    self._sent_logprobs = self._sent_events = 0
    self._has_message = False  # whether the message was added to the stream

  def whole(self, choices: Sequence[AnswerChoice]) -> dict[str, Any]:
    """The whole response. The choice must have ended."""
    for _ in self.piece(choices[0], True):  # fills `_output`
      pass
    return self._response(choices[0])

  def first(self) -> Iterator[dict[str, Any]]:
    """The events of a stream before the first token."""
    for kind in ("created", "in_progress"):
      yield self._event(f"response.{kind}", response=self._response(None))

  def piece(self, choice: AnswerChoice, is_first: bool) -> Iterator[dict[str, Any]]:
    """Yields the events of a stream with the new text and calls of a choice.

    A response has a message item, unless it only calls tools, and then an item for each call. The
    message starts with the first text. The choice's end completes it and brings the calls.
    `is_first` is ignored, because the first piece may have no text yet.
    """
    del is_first
    text, calls = choice.take_text()
    logprobs = choice.logprobs_of(choice.take_tokens(), True)["content"]
    self._text += text
    self._logprobs += logprobs if self.request.logprobs else []
    # The text of a token may be held back, for example because it may begin a call. Then the
    # log-prob waits for the next text.
    unsent = self._logprobs[self._sent_logprobs :]
    place = {"item_id": f"msg_{self._number}", "output_index": 0, "content_index": 0}
    if not self._has_message and (text or (choice.finish and not calls)):
      self._has_message = True
      empty = {**self._message("in_progress"), "content": []}
      yield self._event("response.output_item.added", output_index=0, item=empty)
      yield self._event("response.content_part.added", **place, part=_part("", []))
    if text or (self._has_message and choice.finish and unsent):
      self._sent_logprobs = len(self._logprobs)
      yield self._event("response.output_text.delta", **place, delta=text, logprobs=unsent)
    if not choice.finish:
      return
    if self._has_message:
      message = self._message("incomplete" if choice.finish == "length" else "completed")
      (part,) = message["content"]
      whole = {"text": self._text, "logprobs": self._logprobs}
      yield self._event("response.output_text.done", **place, **whole)
      yield self._event("response.content_part.done", **place, part=part)
      yield self._event("response.output_item.done", output_index=0, item=message)
      self._output.append(message)
    for number, call in enumerate(calls):
      yield from self._call(number, call)

  def last(self, choices: Sequence[AnswerChoice]) -> Iterator[dict[str, Any]]:
    """The event that ends the stream."""
    made = self._response(choices[0])
    yield self._event(f"response.{made['status']}", response=made)

  def error(self, wrong: RequestError) -> dict[str, Any]:
    """The event that says why the stream ends early."""
    said = {"code": wrong.code or None, "message": wrong.message, "param": wrong.param}
    return self._event("error", **said)

  def _call(self, number: int, call: Call) -> Iterator[dict[str, Any]]:
    """Yields the events of tool call `number` of the answer, and adds it to the output items."""
    item = {
      "type": "function_call",
      "id": f"fc_{self._number}_{number}",
      "call_id": call_id(self.request.calls_before + number),
      "name": call.name,
      "arguments": call.arguments,
      "status": "completed",
    }
    place = {"item_id": item["id"], "output_index": len(self._output)}
    begun = {**item, "arguments": "", "status": "in_progress"}
    added = self._event(
      "response.output_item.added", output_index=place["output_index"], item=begun
    )
    yield added
    arguments = "response.function_call_arguments"
    yield self._event(f"{arguments}.delta", **place, delta=call.arguments)
    said = {"arguments": call.arguments, "name": call.name}
    yield self._event(f"{arguments}.done", **place, **said)
    yield self._event("response.output_item.done", output_index=place["output_index"], item=item)
    self._output.append(item)

  def _message(self, status: str) -> dict[str, Any]:
    return {
      "type": "message",
      "id": f"msg_{self._number}",
      "role": "assistant",
      "status": status,
      "content": [_part(self._text, self._logprobs)],
    }

  def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
    self._sent_events += 1
    return {"type": kind, "sequence_number": self._sent_events - 1, **fields}

  def _response(self, choice: AnswerChoice | None) -> dict[str, Any]:
    """The response with its items so far. `choice` is None until the choice has ended."""
    is_cut = choice is not None and choice.finish == "length"
    status = "in_progress" if choice is None else "incomplete" if is_cut else "completed"
    return {
      "id": f"resp_{self._number}",
      "object": "response",
      "created_at": self._created,
      "model": self._model,
      "status": status,
      "error": None,
      "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
      "output": self._output,
      "usage": None if choice is None else _usage(choice),
      "weights_version": choice and choice.version,
      **self.request.repeated,
    }


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
  return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage(choice: AnswerChoice) -> dict[str, Any]:
  read, written = len(choice.prompt), len(choice.tokens)
  cached = {"cached_tokens": read - choice.computed, "cache_write_tokens": 0}
  return {
    "input_tokens": read,
    "input_tokens_details": cached,
    "output_tokens": written,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": read + written,
  }
