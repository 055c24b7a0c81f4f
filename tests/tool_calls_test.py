"""The calls of tools in what models of several families write."""

import json
import time

import pytest

from grpo_jax.environments.arguments import check_arguments, parameters_of
from grpo_jax.environments.methods import methods_of
from grpo_jax.environments.schema import schema_of
from grpo_jax.environments.tool_calls import FORMATS, Call, family_of, format_for
from grpo_jax.settings import ConfigError


def add(x: int, y: float = 0.0, name: str | None = None) -> float:
  """Adds.

  Args:
    x: A number.
    y: Another one.
    name: Of the sum.
  """
  return x + y


ADD = schema_of(add)


def calls_of(format_name, text, schemas=(ADD,)):
  parsed = format_for("", format_name, schemas).parse(text, schemas)
  return [(call.name, json.loads(call.arguments)) for call in parsed.calls], parsed


@pytest.mark.parametrize(
  "name, text, calls, content",
  [
    ("hermes", 'Hm.<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>', 1, "Hm."),
    (
      "hermes",
      '<tool_call>{"name":"add","arguments":{"x":1}}</tool_call>\n'
      '<tool_call>{"name":"add","arguments":"{\\"x\\": 1}"}</tool_call>',
      2,
      "",
    ),
    ("hermes", "No call, {}.", 0, "No call, {}."),
    ("llama3", '{"name": "add", "parameters": {"x": 1}}', 1, ""),
    ("llama3", '<|python_tag|>{"name": "add", "parameters": {"x": 1}}', 1, ""),
    (
      "llama3",
      '{"name": "add", "parameters": {"x": 1}}; {"name": "add", "parameters": {"x": 1}}',
      2,
      "",
    ),
    ("llama3", 'It is {"x": 1}.', 0, 'It is {"x": 1}.'),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"x": 1}}]', 1, ""),
    ("mistral", '[{"name": "add", "arguments": {"x": 1}}]', 1, ""),
    ("mistral", 'So[TOOL_CALLS]add[ARGS]{"x": 1}[TOOL_CALLS]add[ARGS]{"x": 1}', 2, "So"),
    ("mistral", "[1, 2] are numbers", 0, "[1, 2] are numbers"),
    ("mistral", '[TOOL_CALLS]add[CALL_ID]a1B2c3D4e[ARGS]{"x": 1}', 1, ""),
    (
      "qwen3_coder",
      "So.<tool_call>\n<function=add>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
      1,
      "So.",
    ),
    ("qwen3_coder", "<function=add> is a call", 0, "<function=add> is a call"),
    ("mistral", '[TOOL_CALLS]add{"x": 1}', 1, ""),
    ("mistral", 'sets {"x": 1}', 0, 'sets {"x": 1}'),
    ("gemma4", "So.<|tool_call>call:add{x:1}<tool_call|>", 1, "So."),
    ("gemma4", '<|tool_call>call:add{ "x" : 1 , }<tool_call|>'.replace('"', '<|"|>'), 1, ""),
    ("gemma4", "<|tool_call>call:add{x:1}<tool_call|><|tool_call>call:add{x:1}<tool_call|>", 2, ""),
    ("gemma4", "call:add{x:1}", 0, "call:add{x:1}"),
    (
      "gpt_oss",
      "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
      ' to=functions.add <|constrain|>json<|message|>{"x": 1}<|call|>',
      1,
      "<|channel|>analysis<|message|>Hm.<|end|>",
    ),
    (
      "gpt_oss",
      ' to=functions.add<|channel|>commentary json<|message|>{"x": 1}<|call|>'
      '<|start|>assistant<|channel|>commentary to=functions.add<|message|>{"x": 1}',
      2,
      "",
    ),
    ("gpt_oss", "<|channel|>final<|message|>to=functions.add{}", 0, None),
    (
      "deepseek",
      "So.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
      '{"x": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n'
      '{"x": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
      2,
      "So.",
    ),
    (
      "deepseek",
      '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>'
      "<｜tool▁calls▁end｜>",
      1,
      "",
    ),
    (
      "glm4",
      "So.\n<tool_call>add\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
      1,
      "So.",
    ),
    ("glm4", "<tool_call>add<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>", 1, ""),
    ("granite", '<|tool_call|>[{"name": "add", "arguments": {"x": 1}}]', 1, ""),
    ("granite", '<|tool_call|>[{"name":"add","arguments":{"x":1}}]<|/tool_call|>', 1, ""),
    ("olmo3", "So.<function_calls>\nadd(x=1)\nadd(x=1)\n</function_calls>", 2, "So."),
    (r"\[(?P<arguments>[^\]]*)\]", 'I take [{"x": 1}].', 1, "I take ."),
    (r"(?P<name>\w+)\((?P<arguments>.*?)\)", 'add({"x": 1})', 1, ""),
  ],
)
def test_each_family_writes_calls_in_its_way(name, text, calls, content):
  found, parsed = calls_of(name, text)
  assert found == [("add", {"x": 1})] * calls
  assert parsed.content == (text if content is None else content) and not parsed.malformed


def test_the_text_between_the_brackets_is_the_first_argument():
  found, _ = calls_of(r"\[(?P<arguments>[^\]]*)\]", "[3*4] and [5]")
  assert found == [("add", {"x": "3*4"}), ("add", {"x": 5})]  # the tool wants an integer


NESTED = "[" * 10_000


@pytest.mark.parametrize(
  "name, text",
  [
    ("hermes", "<tool_call>{'name': 'add'}</tool_call>"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"x": 1}}'),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"x": NaN}}</tool_call>'),
    ("hermes", "<tool_call>7</tool_call>"),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"x": "\\udc00"}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {}} {}</tool_call>'),
    ("hermes", f"<tool_call>{NESTED}</tool_call>"),
    ("llama3", '{"name": "add", "parameters": '),
    ("llama3", '{"name": "add", "parameters": {"x": 1}} and more'),
    ("mistral", '[TOOL_CALLS][{"name": "add"'),
    ("mistral", "[TOOL_CALLS]add[ARGS]x=1"),
    ("mistral", f"[TOOL_CALLS]{NESTED}"),
    ("qwen3_coder", "<tool_call><function=add></tool_call>"),
    ("qwen3_coder", "<tool_call><function=add</function></tool_call>"),
    ("qwen3_coder", '<tool_call>{"name": "add"}</tool_call>'),
    ("gemma4", "<|tool_call>call:add{x:1}"),
    ("gemma4", "<|tool_call>call:add{x:1<tool_call|>"),
    ("gemma4", "<|tool_call>call:add{x}<tool_call|>"),
    ("gemma4", "<|tool_call>call:add[1]<tool_call|>"),
    ("gemma4", "<|tool_call>call:add{x:1} and more<tool_call|>"),
    ("gemma4", '<|tool_call>call:add{x:<|"|>1}<tool_call|>'),
    ("gemma4", '<|tool_call>call:add{x:"1}<tool_call|>'),
    ("gemma4", f"<|tool_call>call:add{{x:{NESTED}}}<tool_call|>"),
    ("gemma4", "<|tool_call>add(1)<tool_call|>"),
    ("gpt_oss", "<|channel|>commentary to=functions.add<|message|>x=1<|call|>"),
    ("gpt_oss", '<|channel|>commentary to=functions.add<|message|>{"x": '),
    ("gpt_oss", '<|channel|>commentary to=functions.add<|message|>{"x": 1} {}<|call|>'),
    ("gpt_oss", "<|channel|>commentary to=functions.add<|message|>[1]<|call|>"),
    ("deepseek", "<｜tool▁call▁begin｜>add{}<｜tool▁call▁end｜>"),
    ("deepseek", "<｜tool▁call▁begin｜>add<｜tool▁sep｜>x=1<｜tool▁call▁end｜>"),
    ("deepseek", "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{}"),
    ("glm4", "<tool_call>\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"),
    ("glm4", "<tool_call>add\n<arg_key>x\n<arg_value>1</arg_value>\n</tool_call>"),
    ("glm4", '<tool_call>{"name": "add"}</tool_call>'),
    ("granite", "<|tool_call|>add(1)"),
    ("olmo3", "<function_calls>add(1)</function_calls>"),
    ("olmo3", "<function_calls>add(x=y)</function_calls>"),
    ("olmo3", "<function_calls>add(**{})</function_calls>"),
    ("olmo3", "<function_calls>import os</function_calls>"),
    ("olmo3", f"<function_calls>add(x={NESTED})</function_calls>"),
    ("olmo3", f"<function_calls>add(x={'-' * 100_000}1)</function_calls>"),
    ("olmo3", "<function_calls>(lambda: 1)(x=1)</function_calls>"),
    ("olmo3", f"<function_calls>add(x=0x{'F' * 4_000})</function_calls>"),
    ("olmo3", f"<function_calls>add(x=[1, 0b{'1' * 20_000}])</function_calls>"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"x": 1e400}}</tool_call>'),
  ],
)
def test_a_call_that_is_not_well_formed_is_told_in_a_line(name, text):
  found, parsed = calls_of(name, text)
  assert parsed.malformed and all("\n" not in one for one in parsed.malformed)
  assert len(found) <= 1


def test_long_texts_are_searched_to_a_bound_for_a_pattern_and_lose_nothing():
  pattern, text = r"\[(?P<arguments>[^\]]*)\]", "[1]" + "x" * 30_000 + "[2]"
  found, parsed = calls_of(pattern, text)
  assert found == [("add", {"x": 1})] and parsed.content == text[3:]
  found, parsed = calls_of("hermes", "x" * 30_000 + CALL)
  assert found == [("add", {})] and parsed.content == "x" * 30_000


CALL = '<tool_call>{"name": "add"}</tool_call>'
LONG = 300_000


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize(
  "part",
  [
    "<tool_call>",
    " ",
    "<tool_call> ",
    CALL,
    "{",
    "[",
    "[TOOL_CALLS]",
    "a",
    "a[ARGS]",
    "<function=a>",
    "<tool_call><function=a><parameter=b>",
    "<function=a></function>",
    "<parameter=x>",
    "<arg_key>",
    "<|message|>",
    "<|message|> to=a",
    ":",
    ",",
    '<|"|>',
    "<｜tool▁call▁begin｜>",
    "<|tool_call>call:a{",
    "a(",
    "a\n",
  ],
)
def test_the_time_of_each_format_is_linear(name, part):
  text = part * (LONG // len(part))
  opens = ("<tool_call>", "[TOOL_CALLS]", "<function_calls>", "<|tool_call|>")
  closed = (
    f"<tool_call><function=add>{text}</function></tool_call>",
    f"<tool_call>{text}</tool_call>",
    f"<|tool_call>call:a{{{text}}}<tool_call|>",
    f"<function_calls>{text}</function_calls>",
  )
  for hostile in (text, *(mark + text for mark in opens), *closed):
    start = time.process_time()
    format_for("", name).parse(hostile, [ADD])
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
  "template, name",
  [
    ("{{ '<tool_call>' }}", "hermes"),
    ("{{ '[TOOL_CALLS]' }}", "mistral"),
    ("Environment: ipython", "llama3"),
    ("<|python_tag|>", "llama3"),
    ("", "hermes"),
    ("{{ '<tool_call>\n<function=' + name }}", "qwen3_coder"),
    ("{{ '<|tool_call>call:' + name }}", "gemma4"),
    ("{{ '<|start|>assistant to=functions.' + name + '<|channel|>commentary' }}", "gpt_oss"),
    ("{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' }}", "deepseek"),
    ("<tool_call>{{ name }}<arg_key>", "glm4"),
    ("respond with <|tool_call|> followed by a JSON list", "granite"),
    ("{{ '<|tool|>' + message.tools + '<|/tool|>' }}", "granite"),
    ("{{ '<function_calls>' }}", "olmo3"),
  ],
)
def test_the_template_says_which_family_it_is(template, name):
  assert format_for(template) is format_for("", name)
  assert family_of(template) == (name if template else "")


def of(kind=None, **more):
  return more | ({"type": kind} if kind else {})


NULLABLE = of(anyOf=[of("string"), of("null")])
POINT = of("object", properties={"x": of("integer"), "label": of("string")})
# (the schema of an argument, what the model writes without quotes, the value)
VALUES = [
  (of("string"), "12345", "12345"),
  (of("string"), "1e5", "1e5"),
  (of("string"), "true", "true"),
  (of("string"), "True", "True"),
  (of("string"), "null", "null"),
  (of("string"), '"a"', '"a"'),
  (of("string"), "[1]", "[1]"),
  (of("string"), " a\nb ", " a\nb "),
  (of("string", enum=["1", "2"]), "1", "1"),
  (of(enum=["1", "2"]), "1", "1"),
  (of(enum=[1, 2]), "1", 1),
  (of(const=True), "True", True),
  (of("boolean"), "True", True),
  (of("boolean"), "False", False),
  (of("boolean"), "true", True),
  (of("boolean"), "FALSE", False),
  (of("boolean"), "yes", "yes"),
  (of("boolean"), "1", "1"),
  (of("integer"), "5", 5),
  (of("integer"), "5.0", 5),
  (of("integer"), "1e3", 1000),
  (of("integer"), "5.5", "5.5"),
  (of("integer"), "True", "True"),
  (of("integer"), "9" * 5000, "9" * 5000),
  (of("number"), "5", 5),
  (of("number"), "5.0", 5.0),
  (of("number"), "-1e-3", -1e-3),
  (of("number"), "NaN", "NaN"),
  (of("number"), "1e400", "1e400"),
  (of("string", nullable=True), "null", None),
  (of("string", nullable=True), "None", None),
  (of("string", nullable=True), "12", "12"),
  (NULLABLE, "null", None),
  (NULLABLE, "None", None),
  (NULLABLE, "12", "12"),
  (of(["string", "null"]), "None", None),
  (of(["integer", "null"]), "5.0", 5),
  (of("string"), "None", "None"),
  (of(oneOf=[of("integer"), of("string")]), "5", 5),
  (of(oneOf=[of("integer"), of("string")]), "five", "five"),
  (of("array", items=of("integer")), "[1, 2.0]", [1, 2]),
  (of("array"), "a, b", "a, b"),
  (of("array"), '{"a": 1}', '{"a": 1}'),
  (of("object"), '{"a": null}', {"a": None}),
  (POINT, '{"x": 1.0, "label": "7"}', {"x": 1, "label": "7"}),
  ({"$ref": "#/$defs/Point"}, '{"x": 1.0, "label": "7"}', {"x": 1, "label": "7"}),
  ({"$ref": "#/$defs/Loop"}, "7", 7),
  ({}, "7", 7),
  ({}, "True", True),
  ({}, "a", "a"),
  (None, "7", 7),
  (None, "a", "a"),
]
WRITTEN = {
  "qwen3_coder": "<tool_call>\n<function=set>\n<parameter=to>\n{}\n</parameter>\n</function>\n"
  "</tool_call>",
  "glm4": "<tool_call>set\n<arg_key>to</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
}


def tool(properties):
  parameters = of("object", properties=properties) | {
    "$defs": {"Point": POINT, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}] * 9}}
  }
  return {"type": "function", "function": {"name": "set", "parameters": parameters}}


@pytest.mark.parametrize("schema, text, value", VALUES)
@pytest.mark.parametrize("name", list(WRITTEN))
def test_the_schema_says_what_an_argument_without_quotes_is(name, schema, text, value):
  schemas = [tool({} if schema is None else {"to": schema})]
  ((_, arguments),), parsed = calls_of(name, WRITTEN[name].replace("{}", text), schemas)
  assert arguments == {"to": value} and type(arguments["to"]) is type(value)
  assert "NaN" not in parsed.calls[0].arguments or text == "NaN"


def test_arguments_in_json_are_values_and_whole_numbers_are_integers():
  schemas = [tool({"n": of("integer"), "f": of("number"), "s": of("string")})]
  text = '<tool_call>{"name": "set", "arguments": {"n": 5.0, "f": 5.0, "s": "5"}}</tool_call>'
  assert '{"n": 5, "f": 5.0, "s": "5"}' == format_for("").parse(text, schemas).calls[0].arguments


def test_gemma4_quotes_texts_with_a_mark():
  text = (
    '<|tool_call>call:set{a:<|"|>1, {b}: "c"\n<|"|>,b:True,c:None,d:[1,<|"|>x<|"|>,[]],'
    'e:{k:{},<|"|>a b<|"|>:-1.5},f:"q",g:null,h:1.0,i:word}<tool_call|>'
  )
  schemas = [tool({"c": of("string", nullable=True), "h": of("integer"), "g": of("string")})]
  ((_, found),), _ = calls_of("gemma4", text, schemas)
  assert found == {
    "a": '1, {b}: "c"\n',
    "b": True,
    "c": None,
    "d": [1, "x", []],
    "e": {"k": {}, "a b": -1.5},
    "f": "q",
    "g": "null",
    "h": 1,
    "i": "word",
  }
  assert type(found["h"]) is int


def test_olmo3_writes_python_or_json():
  text = "<function_calls>set(a='x', b=True, c=true, d=null, e=[1, {'k': -2.5}], f=(1,))"
  ((name, found),), _ = calls_of("olmo3", f"{text}</function_calls>", [tool({})])
  assert name == "set"
  assert found == {"a": "x", "b": True, "c": True, "d": None, "e": [1, {"k": -2.5}], "f": [1]}


@pytest.mark.parametrize(
  "inner, arguments",
  [
    ("<parameter=a>\n1\n<parameter=b>\n2\n</parameter>\n", {"a": "1", "b": 2}),
    ("<parameter=a>1<parameter=b>2</parameter>", {"a": "1", "b": 2}),
    ("<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n", {"a": "1", "b": 2}),
    ("<parameter=a>\n1\n<parameter=b>\n2\n", {"a": "1", "b": 2}),
    # A text may say how calls are written.
    ("<parameter=a>x\n<parameter=z>\n</parameter>", {"a": "x\n<parameter=z>"}),
    ("<parameter=a>x<parameter=a>y</parameter>", {"a": "x<parameter=a>y"}),
    ("<parameter=a>x<parameter=</parameter>", {"a": "x<parameter="}),
  ],
)
def test_a_missing_end_of_a_parameter_does_not_swallow_the_next_one(inner, arguments):
  schemas = [tool({"a": of("string"), "b": of("integer")})]
  text = f"<tool_call>\n<function=set>\n{inner}</function>\n</tool_call>"
  ((_, found),), parsed = calls_of("qwen3_coder", text, schemas)
  assert found == arguments and not parsed.malformed


def test_a_missing_end_of_a_value_does_not_swallow_the_next_one():
  text = "<tool_call>set\n<arg_key>a</arg_key>\n<arg_value>1\n<arg_key>b</arg_key><arg_value>2"
  ((_, found),), _ = calls_of("glm4", f"{text}</tool_call>", [tool({"b": of("integer")})])
  assert found == {"a": 1, "b": 2}


@pytest.mark.parametrize(
  "function",
  [
    {},
    {"parameters": None},
    {"parameters": [1]},
    {"parameters": {"properties": [1]}},
    {"parameters": {"properties": {"to": "string"}}},
    {"parameters": {"properties": {"to": {"type": 3, "enum": 4, "anyOf": 5, "items": 6}}}},
    {"parameters": {"properties": {"to": {"$ref": "#/no/where"}}}},
    {"parameters": {"properties": {"to": {"type": ["no", {}], "properties": [], "anyOf": [7]}}}},
  ],
)
@pytest.mark.parametrize("name", list(WRITTEN))
def test_schemas_of_requests_may_be_anything(name, function):
  schemas = [{"type": "function", "function": {"name": "set"} | function}]
  ((_, found),), _ = calls_of(name, WRITTEN[name].replace("{}", "[1.0]"), schemas)
  assert found == {"to": [1.0]}


def test_the_family_s_own_spelling_is_right_for_the_tool():
  def set(on: bool, count: int, note: str | None = None) -> str:
    """Sets.

    Args:
      on: Whether.
      count: How many.
      note: What.
    """
    return f"{on}{count}{note}"

  schema = schema_of(set)
  values = {"on": "True", "count": "5.0", "note": "null"}
  inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
  text = f"<tool_call>\n<function=set>\n{inner}</function>\n</tool_call>"
  ((_, found),), _ = calls_of("qwen3_coder", text, [schema])
  assert found == {"on": True, "count": 5, "note": None}
  assert check_arguments(schema, found) == ""


@pytest.mark.parametrize("pattern", ["[", "qwen", r"(?P<name>\w+)"])
def test_a_wrong_pattern_is_refused(pattern):
  with pytest.raises(ConfigError, match="environment.calls"):
    format_for("", pattern, [ADD])


@pytest.mark.parametrize(
  "pattern, marks",
  [
    (r"<tool_call>(?P<arguments>.*?)</tool_call>", {"<tool_call>", "</tool_call>"}),
    (r"<\|tool_call\|>\s*(?P<arguments>\{.*\})", {"<|tool_call|>"}),
    (r"\[TOOL_CALLS\](?P<name>\w+)\[ARGS\](?P<arguments>\{.*\})", {"[TOOL_CALLS]", "[ARGS]"}),
    (r"<｜tool▁call▁begin｜>(?P<arguments>.*)", {"<｜tool▁call▁begin｜>"}),
  ],
)
def test_the_special_tokens_of_a_pattern_are_those_that_stand_in_it(pattern, marks):
  found = format_for("", pattern, [ADD]).marks
  assert marks <= set(found) and not set(found) & {"<|im_end|>", "</s>"}


def test_several_tools_need_a_name():
  with pytest.raises(ConfigError, match="several tools"):
    format_for("", r"\[(?P<arguments>.*?)\]", [ADD, ADD])


@pytest.mark.parametrize(
  "arguments, words",
  [
    ({"x": 1}, ""),
    ({"x": 1, "y": 2, "name": None}, ""),
    ({"x": 1, "y": 2.5, "name": "a"}, ""),
    ({}, "x is missing"),
    ({"x": 1, "z": 1}, "no argument 'z'"),
    ({"x": "1"}, "of the type integer"),
    ({"x": True}, "of the type integer"),
    ({"x": 1.5}, "of the type integer"),
    ({"x": 1, "name": 3}, "of the type string"),
    ({"x": None}, "of the type integer"),
  ],
)
def test_arguments_are_checked_by_the_schema(arguments, words):
  said = check_arguments(ADD, arguments)
  assert words in said and bool(said) == bool(words)


@pytest.mark.parametrize(
  "parameters, words",
  [
    ({"properties": {"x": True}}, ""),  # a schema that allows everything
    ({"properties": {"x": {"type": None, "enum": None}}}, ""),
    ({"properties": {"x": {"type": ["string", {}]}}}, "of the type string"),
    ({"properties": None, "required": None}, "no argument 'x'"),
    ({}, "no argument 'x'"),
    ({"additionalProperties": False}, "no argument 'x'"),
    ({"additionalProperties": True}, ""),
    ({"additionalProperties": {}}, ""),
    ({"additionalProperties": {"type": "string"}}, "of the type string"),
  ],
)
def test_schemas_of_servers_may_be_anything_where_arguments_are_checked(parameters, words):
  schema = {"type": "function", "function": {"name": "f", "parameters": parameters}}
  said = check_arguments(schema, {"x": 1})
  assert words in said and bool(said) == bool(words)


class Dials:
  """An environment as in TRL, whose methods are tools."""

  def reset(self):
    """Is no tool."""

  def turn(self, x: int) -> int:
    """Turns.

    Args:
      x: How far.
    """
    return x

  @classmethod
  def count(cls, most: int) -> int:
    """Counts.

    Args:
      most: At most this.
    """
    return most


def test_class_methods_of_an_environment_are_tools_like_other_methods():
  schemas = [schema_of(one) for one in methods_of(Dials).values()]
  assert [one["function"]["name"] for one in schemas] == ["count", "turn"]
  assert [[*parameters_of(one)["properties"]] for one in schemas] == [["most"], ["x"]]


def test_a_call_keeps_its_arguments_as_json():
  text = '<tool_call>{"name": "add", "arguments": {"name": "é"}}</tool_call>'
  assert format_for("").parse(text).calls == [Call("add", '{"name": "é"}')]
