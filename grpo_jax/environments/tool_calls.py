"""Finds the tool calls in a model's text. Each model family has its own format:

  hermes   <tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>
           (Qwen2.5, Qwen3, Hermes, SmolLM3, Granite 4)
  llama3   {"name": "add", "parameters": {"x": 1}}, the whole message, with ; between several
  mistral  [TOOL_CALLS][{"name": "add", "arguments": {"x": 1}}], or [TOOL_CALLS]add[ARGS]{"x": 1},
           with an optional [CALL_ID]ID before [ARGS] (Mistral, Ministral)
  qwen3_coder  <tool_call><function=add><parameter=x>1</parameter></function></tool_call>
           (Qwen3-Coder, Qwen3.5)
  gemma4   <|tool_call>call:add{x:1,name:<|"|>sum<|"|>}<tool_call|>
  gpt_oss  <|channel|>commentary to=functions.add <|constrain|>json<|message|>{"x": 1}<|call|>
  deepseek  <｜tool▁call▁begin｜>function<｜tool▁sep｜>add and {"x": 1} as a block of json, or
           <｜tool▁call▁begin｜>add<｜tool▁sep｜>{"x": 1}, and then <｜tool▁call▁end｜>
  glm4     <tool_call>add<arg_key>x</arg_key><arg_value>1</arg_value></tool_call> (GLM-4.5 to 4.7)
  granite  <|tool_call|>[{"name": "add", "arguments": {"x": 1}}] (Granite 3, Phi-4-mini)
  olmo3    <function_calls>add(x=1)</function_calls>, with one line per call

The tokenizer normally drops special tokens when it decodes. `Format.marks` are the special tokens
that a format needs, so the tokenizer keeps them. For a user's pattern, they are the special tokens
that the pattern contains. call_formats.py parses the formats, and arguments.py converts the
arguments to values.
"""

from collections.abc import Callable, Sequence
import json
import re
from typing import NamedTuple

from grpo_jax.environments import call_formats
from grpo_jax.environments.arguments import Schema, UnquotedText, first_json, parameters_of, typed
from grpo_jax.environments.call_formats import Names, Read
from grpo_jax.settings import ConfigError, is_text, shown

_LONGEST = 20_000  # characters that a user's pattern searches, because it may be slow
# Matches a possible special token in a pattern without its escapes: <tool_call>, <|"|>, [ARGS].
_MARK = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
_ESCAPE = re.compile(r"\\(?=[^\w\s])")
KEY = "environment.calls"


class Call(NamedTuple):
  """A call of a tool.

  Attributes:
    name: The name of the function.
    arguments: The arguments, a JSON object as text.
  """

  name: str
  arguments: str


class Parsed(NamedTuple):
  """The calls in a message, and the rest of the message.

  Attributes:
    content: The text without the well-formed calls. Malformed calls remain in it.
    calls: The well-formed calls.
    malformed: For each malformed call, an error line for the model.
  """

  content: str
  calls: list[Call]
  malformed: list[str]


class Format(NamedTuple):
  """The format in which a model family writes calls.

  Attributes:
    read: Finds the calls in a text, given the tools' parameters by name.
    opens: Texts with which a call may begin. While it streams, the endpoint holds back the text
      from there on until it knows whether this is a call.
    marks: The texts in this format that may be special tokens.
  """

  read: Callable[[str, Names], Read]
  opens: tuple[str, ...]
  marks: tuple[str, ...]

  def parse(self, text: str, schemas: Sequence[Schema] = ()) -> Parsed:
    """Finds the calls in a text, and converts their arguments to the types of the schemas.

    Args:
      text: The text of a model, with the special tokens of `marks`.
      schemas: The schemas of the tools. They decide the types of unquoted arguments.
    """
    by_name = {schema["function"]["name"]: schema for schema in schemas}
    names = {name: tuple(_properties(schema)) for name, schema in by_name.items()}
    read = self.read(text, names)
    calls, malformed = list[Call](), [*read.malformed]
    for name, written in read.calls:
      try:
        arguments = json.dumps(typed(by_name.get(name, {}), written), ensure_ascii=False)
      except RecursionError:
        malformed.append("the call is not well-formed: it is nested too deeply")
        continue
      except ValueError:  # Python refuses to write integers of more than 4,300 digits
        malformed.append("the call is not well-formed: it has a number that is too long")
        continue
      if is_text(name + arguments):
        calls.append(Call(name, arguments))
      else:
        malformed.append("the call is not well-formed: it has half of a character")
    # If no call is left after these checks, the whole text is content.
    return Parsed(read.content if calls or not read.calls else text, calls, malformed)


_TAGS = call_formats.HERMES
FORMATS = {
  "hermes": Format(call_formats.hermes, _TAGS[:1], _TAGS),
  "llama3": Format(call_formats.llama3, ("{",), ("<|python_tag|>",)),
  "mistral": Format(call_formats.mistral, ("[",), ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")),
  "qwen3_coder": Format(call_formats.qwen3_coder, _TAGS[:1], _TAGS),
  "gemma4": Format(
    call_formats.gemma4, call_formats.GEMMA4[:1], (*call_formats.GEMMA4, call_formats.QUOTE)
  ),
  "gpt_oss": Format(
    call_formats.gpt_oss,
    (" to=functions.", "<|channel|>commentary"),
    ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>")
    + ("<|return|>",),
  ),
  "deepseek": Format(
    call_formats.deepseek,
    (call_formats.DEEPSEEK_LIST[0], call_formats.DEEPSEEK[0]),
    (*call_formats.DEEPSEEK_LIST, *call_formats.DEEPSEEK, call_formats.DEEPSEEK_NAME),
  ),
  "glm4": Format(
    call_formats.glm4,
    _TAGS[:1],
    (*_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
  ),
  "granite": Format(call_formats.granite, call_formats.GRANITE[:1], call_formats.GRANITE),
  "olmo3": Format(call_formats.olmo3, call_formats.OLMO3[:1], call_formats.OLMO3),
}
# Texts in a chat template, and the format of calls that each shows. The first one found counts.
_SIGNS = {
  "<|tool_call>call:": "gemma4",
  "<|channel|>": "gpt_oss",
  call_formats.DEEPSEEK[0]: "deepseek",
  "<arg_key>": "glm4",
  "<function=": "qwen3_coder",
  "<function_calls>": "olmo3",
  "[TOOL_CALLS]": "mistral",
  "<|python_tag|>": "llama3",
  "Environment: ipython": "llama3",
  "<|tool_call|>": "granite",
  "<|tool|>": "granite",
  "<tool_call>": "hermes",
}


def family_of(template: str) -> str:
  """Returns the name in `FORMATS` of a chat template's format, or "" if the format is unknown."""
  return next((name for sign, name in _SIGNS.items() if sign in template), "")


def format_for(template: str, name: str = "auto", schemas: Sequence[Schema] = ()) -> Format:
  """Finds the format in which a model writes calls.

  Args:
    template: The source of the chat template, or "".
    name: A key of `FORMATS`, a regular expression, or "auto" for the format that the template
      uses, or hermes if that is unknown. The expression has a group `arguments`, which matches a
      JSON object or the text of a tool's first argument. With several tools, it also has a group
      `name`.
    schemas: The schemas of the tools.

  Raises:
    ConfigError: `name` is none of these.
  """
  if name == "auto":
    name = family_of(template) or "hermes"
  return FORMATS[name] if name in FORMATS else _by_pattern(name, schemas)


def _properties(schema: Schema) -> Sequence[str]:
  """Returns the names of a tool's parameters."""
  properties = parameters_of(schema).get("properties")
  return list(properties) if isinstance(properties, dict) else []


def _by_pattern(pattern: str, schemas: Sequence[Schema]) -> Format:
  """Makes the format for a regular expression in environment.calls. Raises ConfigError."""
  try:
    compiled = re.compile(pattern, re.DOTALL)
  except re.error as error:
    raise ConfigError(
      f"{KEY}: {shown(pattern)} is none of auto, {', '.join(FORMATS)}, and no regular expression:"
      f" {error}"
    ) from None
  groups = compiled.groupindex
  if "arguments" not in groups or ("name" not in groups and len(schemas) > 1):
    raise ConfigError(
      f"{KEY}: {shown(pattern)} must be auto, {', '.join(FORMATS)}, or a regular expression with"
      " a group (?P<arguments>...), and (?P<name>...) where there are several tools"
    )

  def read(text: str, names: Names) -> Read:
    """Finds the matches. Without a group `name`, each is a call of the only tool."""
    calls: call_formats.Calls = []
    problems = list[str]()
    searched, rest = text[:_LONGEST], text[_LONGEST:]
    for match in compiled.finditer(searched):
      name = match["name"] if "name" in groups else next(iter(names), "")
      written = match["arguments"] or ""
      value, _, problem = first_json(written)
      if problem or not isinstance(value, dict):
        # Not a JSON object, so the text is the value of the tool's first parameter.
        parameter = next(iter(names.get(name, ())), "text")
        value = {parameter: UnquotedText(written)}
      calls += call_formats.checked({"name": name or "", "arguments": value}, problems)
    content = (compiled.sub("", searched) + rest).strip() if calls else text
    return Read(content, calls, problems)

  # A call may begin with any text (""), because a pattern does not tell how its matches begin.
  return Format(read, ("",), tuple(dict.fromkeys(_MARK.findall(_ESCAPE.sub("", pattern)))))
