"""Parses a body of /v1/chat/completions into a `Request`. Pure functions."""

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_jax.serving import tools as tools_lib
from grpo_jax.serving.device_flight import MOST_ALTERNATIVES
from grpo_jax.serving.images import last_text, taken_out
from grpo_jax.serving.requests import (
  GOES_ON,
  SHARED,
  Form,
  Limits,
  Request,
  RequestError,
  Texts,
  check_names,
  flag,
  make_request,
  whole,
)
from grpo_jax.settings import ConfigError

_OF_TEMPLATES = {"messages", "tools", "add_generation_prompt", GOES_ON}  # set by this server alone
_KNOWN = SHARED | {
  "messages", "tools", "tool_choice", "max_completion_tokens", "chat_template_kwargs",
  "reasoning_effort", "continue_final_message", "parallel_tool_calls", "response_format",
  "top_logprobs",
}  # fmt: skip


def chat_request(body: Mapping[str, Any], limits: Limits, texts: Texts) -> Request:
  """Parses a body of /v1/chat/completions. Raises RequestError if any field is wrong."""
  check_names(body, _KNOWN | {*limits.filters})
  if body.get("max_completion_tokens") is not None:
    body = {**body, "max_tokens": body["max_completion_tokens"]}
  tools, choice = body.get("tools"), body.get("tool_choice") or "auto"
  if tools is not None and not tools_lib.are_tools(tools):
    raise RequestError(
      "tools must be a list of objects such as {'type': 'function', 'function': {'name': ...}}",
      "tools",
    )
  form = _form(body, tools or [], choice)
  tools = tools if tools and choice != "none" else None  # "none": the model sees no tools
  try:
    messages = tools_lib.messages_for_template(body.get("messages"), limits.sees_images)
    messages, images = taken_out(messages, limits.sees_images)
  except ValueError as error:
    raise RequestError(str(error), "messages") from None
  options = _template_options(body, messages)
  try:
    unread = texts.look(images) if images else None
    prompt = tuple(texts.render(messages, tools, options, unread))
  except ConfigError as error:
    raise RequestError(str(error), "messages") from None
  alternatives = whole(body, "top_logprobs", 0, (0, MOST_ALTERNATIVES))
  if alternatives and not flag(body, "logprobs"):
    raise RequestError("top_logprobs: set logprobs to true, too", "top_logprobs")
  logprobs = alternatives if flag(body, "logprobs") else None
  calls_before = sum(len(message.get("tool_calls") or ()) for message in messages)
  one_call = body.get("parallel_tool_calls") is not None and not flag(body, "parallel_tool_calls")
  extra = {
    "is_chat": True,
    "tools": tuple(tools or ()),
    "calls_before": calls_before,
    "most_calls": 1 if one_call else None,
    "form": form,
    "unread": unread,
  }
  return make_request(body, limits, (prompt,), logprobs, extra)


def _form(body: Mapping[str, Any], tools: Sequence[dict[str, Any]], choice: Any) -> Form | None:
  """The form that tool_choice (`choice`) or else response_format demands. None if there is none."""
  if choice not in ("auto", "none"):
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    # Without a name ("required"), the answer may call any of the tools.
    chosen = tuple(one for one in tools if name in (None, one["function"]["name"]))
    if (choice != "required" and name is None) or not chosen:
      raise RequestError(
        "tool_choice: auto, none, required or {'type': 'function', 'function': {'name': ...}} with"
        " the name of one of the tools",
        "tool_choice",
      )
    return Form("tool_choice", {}, chosen)
  given = body.get("response_format")
  if given is None or given == {"type": "text"}:
    return None
  kind = given.get("type") if isinstance(given, dict) else None
  if kind == "json_object":
    return Form("response_format", {"type": "object"})
  inner = given.get("json_schema") if kind == "json_schema" else None
  schema = inner.get("schema") if isinstance(inner, dict) else None
  if not isinstance(schema, dict):
    raise RequestError(
      "response_format: give {'type': 'json_object'} or {'type': 'json_schema', 'json_schema':"
      " {'schema': {...}}}",
      "response_format",
    )
  return Form("response_format", schema)


def _template_options(body: Mapping[str, Any], messages: list[dict[str, Any]]) -> dict[str, Any]:
  """The variables of the chat template, with `GOES_ON` if the answer continues the last message."""
  given = body.get("chat_template_kwargs")
  options = {} if given is None else given
  if not isinstance(options, dict) or not {*options}.isdisjoint(_OF_TEMPLATES):
    raise RequestError(
      "chat_template_kwargs must be an object without messages, tools and add_generation_prompt",
      "chat_template_kwargs",
    )
  effort = body.get("reasoning_effort")
  if effort is not None and not isinstance(effort, str):
    raise RequestError("reasoning_effort must be a text, such as low", "reasoning_effort")
  effort_of_template = {} if effort is None else {"reasoning_effort": effort}
  goes_on = flag(body, "continue_final_message")
  if goes_on and (messages[-1]["role"] != "assistant" or not last_text(messages[-1]["content"])):
    raise RequestError(
      "continue_final_message: the last message must be a text of the assistant",
      "continue_final_message",
    )
  return {**options, **effort_of_template} | ({GOES_ON: True} if goes_on else {})
