"""The calls of tools in what a model wrote, as its family writes them.

  hermes   <tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>   (Qwen, Hermes, SmolLM)
  llama3   {"name": "add", "parameters": {"x": 1}}, the whole message, with ; between several
  mistral  [TOOL_CALLS][{"name": "add", "arguments": {"x": 1}}], or [TOOL_CALLS]add[ARGS]{"x": 1},
           where [CALL_ID]ID may stand before [ARGS]
  qwen3_coder  <tool_call><function=add><parameter=x>1</parameter></function></tool_call>

A decoder leaves special tokens out, so marks that are special tokens may be missing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import functools
import json
import re
from typing import Any, NamedTuple

from grpo_jax.settings import ConfigError, is_text, shown

Schema = Mapping[str, Any]

_LONGEST = 20_000  # characters that are searched for a pattern of a user, which may be slow
_HERMES_OPEN, _HERMES_CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _PARAMETER = ("<function=", "</function>"), ("<parameter=", "</parameter>")
_MISTRAL_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]+\s*)?\[ARGS\]\s*")
_KEY = "environment.calls"
_TYPES: dict[str, tuple[type, ...]] = {
  "integer": (int,),
  "number": (int, float),
  "string": (str,),
  "boolean": (bool,),
  "array": (list,),
  "object": (dict,),
  "null": (type(None),),
}


class Call(NamedTuple):
  """A call of a tool.

  Attributes:
    name: Of the function.
    arguments: A text in JSON, of an object.
  """

  name: str
  arguments: str


class Parsed(NamedTuple):
  """What a message says.

  Attributes:
    content: The text without its calls. A call that is not well-formed is content.
    calls: The calls.
    malformed: What is wrong with each call that is not well-formed, in a line for the model.
  """

  content: str
  calls: list[Call]
  malformed: list[str]


class Format(NamedTuple):
  """How a family writes calls.

  Attributes:
    parse: Finds the calls in a text.
    opens: A text from here on is no content until it is known to be no call.
  """

  parse: Callable[[str], Parsed]
  opens: str


def _tagged(read: Callable[[str], tuple[list[Call], list[str]]], text: str) -> Parsed:
  """Calls between tags. `read` finds those of one pair of tags, and what is wrong with others."""
  calls, malformed, content = list[Call](), list[str](), list[str]()
  place = 0
  # Not a regular expression: it would search to the end from each mark that has no end.
  while (start := text.find(_HERMES_OPEN, place)) >= 0:
    end = text.find(_HERMES_CLOSE, start)
    if end < 0:
      if not calls and not malformed:
        malformed.append(f"the call has no end: {_HERMES_CLOSE} is missing")
      break
    made, problems = read(text[start + len(_HERMES_OPEN) : end].strip())
    calls += made
    malformed += problems
    after = end + len(_HERMES_CLOSE)
    content.append(text[place : after if problems else start])
    place = after
  whole = "".join([*content, text[place:]])
  return Parsed(whole.strip() if calls else whole, calls, malformed)


def _hermes(text: str) -> Parsed:
  return _tagged(lambda body: _calls(body, ("arguments",)), text)


def _qwen3_coder(schemas: Sequence[Schema], text: str) -> Parsed:
  """A value is JSON if it reads as JSON, unless the schema wants a text."""
  by_name = {schema["function"]["name"]: schema["function"]["parameters"] for schema in schemas}

  def value_of(function: str, name: str, value: str) -> Any:
    wanted = by_name.get(function, {}).get("properties", {}).get(name, {}).get("type")
    found, rest, problem = _first_json(value)
    return value if wanted == "string" or problem or rest else found

  def read(body: str) -> tuple[list[Call], list[str]]:
    calls, problems = list[Call](), list[str]()
    for function, inner in _elements(body, *_FUNCTION):
      arguments = {
        name: value_of(function, name, value.removeprefix("\n").removesuffix("\n"))
        for name, value in _elements(inner, *_PARAMETER)
      }
      calls += _checked({"name": function, "arguments": arguments}, ("arguments",), problems)
    if not calls and not problems:
      problems.append("the call is not well-formed: it needs <function=NAME> and </function>")
    return calls, problems

  return _tagged(read, text)


def _elements(text: str, opens: str, closes: str) -> Iterator[tuple[str, str]]:
  """(name, what lies inside) of each element, as <function=NAME>...</function>."""
  place = 0
  while (start := text.find(opens, place)) >= 0:
    name_end = text.find(">", start)
    end = text.find(closes, name_end)
    if name_end < 0 or end < 0:
      return
    yield text[start + len(opens) : name_end].strip(), text[name_end + 1 : end]
    place = end + len(closes)


def _llama3(text: str) -> Parsed:
  body = text.replace("<|python_tag|>", "").strip()
  if not body.startswith("{"):
    return Parsed(text, [], [])
  calls, problems = _calls(body, ("parameters", "arguments"), separator=";")
  return Parsed("" if calls else text, calls, problems)


def _mistral(text: str) -> Parsed:
  content, mark, body = text.partition("[TOOL_CALLS]")
  if not mark:
    content, body = "", text
  if (named := _MISTRAL_NAMED.match(body)) is not None:
    calls, problems = list[Call](), list[str]()
    while named is not None:
      value, rest, problem = _first_json(body[named.end() :])
      if problem:
        problems.append(problem)
        break
      calls += _checked({"name": named[1], "arguments": value}, ("arguments",), problems)
      named = _MISTRAL_NAMED.match(body := rest.removeprefix("[TOOL_CALLS]"))
    return Parsed(content.strip() if calls else text, calls, problems)
  if not mark and not body.lstrip().startswith('[{"name"'):
    return Parsed(text, [], [])
  calls, problems = _calls(body, ("arguments",))
  return Parsed(content.strip() if calls else text, calls, problems)


FORMATS = {
  "hermes": Format(_hermes, _HERMES_OPEN),
  "llama3": Format(_llama3, "{"),
  "mistral": Format(_mistral, "["),
  "qwen3_coder": Format(functools.partial(_qwen3_coder, ()), _HERMES_OPEN),
}


def format_for(template: str, name: str = "auto", schemas: Sequence[Schema] = ()) -> Format:
  """How a model writes calls.

  Args:
    template: The source of its chat template, or "".
    name: A name of `FORMATS`, a regular expression, or "auto": what the template says, or else
      hermes. The expression has a group `arguments`, and a group `name` where there are several
      tools. Its arguments are a JSON object or the text of a tool's first argument.
    schemas: Of the tools.

  Raises:
    ConfigError: The name is none of these.
  """
  if name == "qwen3_coder" or (name == "auto" and _FUNCTION[0] in template):
    return Format(functools.partial(_qwen3_coder, tuple(schemas)), _HERMES_OPEN)
  if name in FORMATS:
    return FORMATS[name]
  if name != "auto":
    return _by_pattern(name, schemas)
  if "[TOOL_CALLS]" in template:
    return FORMATS["mistral"]
  is_llama = "<|python_tag|>" in template or "Environment: ipython" in template
  return FORMATS["llama3" if is_llama else "hermes"]


def check_arguments(schema: Schema, arguments: Any) -> str:
  """What is wrong with the arguments of a call, in a line for the model, or ""."""
  function = schema["function"]
  properties = function["parameters"].get("properties", {})
  for name in function["parameters"].get("required", ()):
    if name not in arguments:
      return f"{function['name']}: the argument {name} is missing"
  for name, value in arguments.items():
    if name not in properties:
      return f"{function['name']}: there is no argument {name!r:.80}"
    problem = _problem(properties[name], value)
    if problem:
      return f"{function['name']}: the argument {name} must be {problem}"
  return ""


def _problem(schema: Schema, value: Any) -> str:
  """What a value must be, or "" if it is that. What lies inside lists and objects is not read."""
  if value is None and schema.get("nullable"):
    return ""
  names = schema.get("type", [])
  names = [names] if isinstance(names, str) else names
  kinds = [kind for name in names for kind in _TYPES.get(name, ())]
  if kinds and type(value) not in kinds:  # True is no integer
    return f"of the type {' or '.join(names)}"
  if "enum" in schema and value not in schema["enum"]:
    return f"one of {json.dumps(schema['enum'])}"
  return ""


def _by_pattern(pattern: str, schemas: Sequence[Schema]) -> Format:
  try:
    compiled = re.compile(pattern, re.DOTALL)
  except re.error as error:
    raise ConfigError(
      f"{_KEY}: {shown(pattern)} is none of auto, {', '.join(FORMATS)}, and no regular expression:"
      f" {error}"
    ) from None
  groups = compiled.groupindex
  if "arguments" not in groups or ("name" not in groups and len(schemas) > 1):
    raise ConfigError(
      f"{_KEY}: {shown(pattern)} must be auto, {', '.join(FORMATS)}, or a regular expression with"
      " a group (?P<arguments>...), and (?P<name>...) where there are several tools"
    )
  by_name = {schema["function"]["name"]: schema for schema in schemas}

  def parse(text: str) -> Parsed:
    calls, problems = list[Call](), list[str]()
    searched, rest = text[:_LONGEST], text[_LONGEST:]
    for match in compiled.finditer(searched):
      name = match["name"] if "name" in groups else next(iter(by_name), "")
      given = match["arguments"] or ""
      value, _, problem = _first_json(given)
      if problem or not isinstance(value, dict):
        properties = (
          by_name[name]["function"]["parameters"]["properties"] if name in by_name else {}
        )
        value = {next(iter(properties), "text"): given}
      calls += _checked({"name": name or "", "arguments": value}, ("arguments",), problems)
    content = (compiled.sub("", searched) + rest).strip() if calls else text
    return Parsed(content, calls, problems)

  return Format(parse, "")


def _calls(text: str, keys: Sequence[str], separator: str = "") -> tuple[list[Call], list[str]]:
  """The calls in JSON: objects, or lists of them, and what is wrong with others.

  Args:
    text: The JSON.
    keys: Where the arguments are.
    separator: What may lie between two values.
  """
  calls, problems, rest = list[Call](), list[str](), text
  while rest:
    value, rest, problem = _first_json(rest)
    if not problem and rest and not (separator and rest.startswith(separator)):
      problem = "there is more behind its JSON"
    if problem:
      return calls, [*problems, f"the call is not well-formed: {problem}"]
    rest = rest.removeprefix(separator).strip()
    for one in value if isinstance(value, list) else [value]:
      calls += _checked(one, keys, problems)
  return calls, problems


def _checked(value: Any, keys: Sequence[str], problems: list[str]) -> list[Call]:
  """The call that a value is. What is wrong with another value is added to `problems`."""
  if not isinstance(value, dict) or not isinstance(value.get("name"), str):
    problems.append('the call is not well-formed: it needs a "name" and "arguments"')
    return []
  arguments: Any = next((value[key] for key in keys if key in value), {})
  if isinstance(arguments, str):  # some models write the object as a text
    arguments, _, _ = _first_json(arguments)
  text = json.dumps([value["name"], arguments], ensure_ascii=False)
  if not is_text(text):
    problems.append("the call is not well-formed: it has half of a character")
    return []
  if not isinstance(arguments, dict):
    problems.append(f"the call of {value['name']!r:.80}: its arguments must be a JSON object")
    return []
  return [Call(value["name"], json.dumps(arguments, ensure_ascii=False))]


def _refuse_constant(name: str) -> None:
  raise ValueError(f"{name} is no number")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _first_json(text: str) -> tuple[Any, str, str]:
  """(the JSON value with which a text begins, what follows it, what is wrong)."""
  text = text.strip()
  try:
    value, end = _DECODER.raw_decode(text)
  except (ValueError, RecursionError) as error:
    return None, "", f"it is not JSON ({' '.join(str(error).split()):.80})"
  return value, text[end:].strip(), ""
