"""The calls of tools in what models of several families write."""

import json
import time

import pytest

from grpo_jax.environments.schema import schema_of
from grpo_jax.environments.tool_calls import Call, check_arguments, format_for
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
  parsed = format_for("", format_name, schemas).parse(text)
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
    (r"\[(?P<arguments>[^\]]*)\]", 'I take [{"x": 1}].', 1, "I take ."),
    (r"(?P<name>\w+)\((?P<arguments>.*?)\)", 'add({"x": 1})', 1, ""),
  ],
)
def test_each_family_writes_calls_in_its_way(name, text, calls, content):
  found, parsed = calls_of(name, text)
  assert found == [("add", {"x": 1})] * calls
  assert parsed.content == content and not parsed.malformed


def test_the_text_between_the_brackets_is_the_first_argument():
  found, _ = calls_of(r"\[(?P<arguments>[^\]]*)\]", "[3*4] and [5]")
  assert found == [("add", {"x": "3*4"}), ("add", {"x": "5"})]


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
  ],
)
def test_a_call_that_is_not_well_formed_is_told_in_a_line(name, text):
  found, parsed = calls_of(name, text)
  assert parsed.malformed and all("\n" not in one for one in parsed.malformed)
  assert len(found) <= 1


def test_long_texts_are_searched_to_a_bound_for_a_pattern_and_lose_nothing():
  pattern, text = r"\[(?P<arguments>[^\]]*)\]", "[1]" + "x" * 30_000 + "[2]"
  found, parsed = calls_of(pattern, text)
  assert found == [("add", {"x": "1"})] and parsed.content == text[3:]
  found, parsed = calls_of("hermes", "x" * 30_000 + CALL)
  assert found == [("add", {})] and parsed.content == "x" * 30_000


CALL = '<tool_call>{"name": "add"}</tool_call>'
LONG = 300_000


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral", "qwen3_coder"])
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
  ],
)
def test_the_time_of_each_format_is_linear(name, part):
  text = part * (LONG // len(part))
  for hostile in (text, "<tool_call>" + text, "[TOOL_CALLS]" + text):
    start = time.process_time()
    format_for("", name).parse(hostile)
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
  "template, name",
  [
    ("{{ '<tool_call>' }}", "hermes"),
    ("{{ '[TOOL_CALLS]' }}", "mistral"),
    ("Environment: ipython", "llama3"),
    ("<|python_tag|>", "llama3"),
    ("", "hermes"),
  ],
)
def test_the_template_says_which_family_it_is(template, name):
  assert format_for(template) is format_for("", name)


def test_the_schema_says_which_values_of_tags_are_texts():
  def parse(parse):
    (call,) = parse(
      "<tool_call><function=add><parameter=x>\n7\n</parameter><parameter=name>\n7\n</parameter>"
      "</function></tool_call>"
    ).calls
    return json.loads(call.arguments)

  template = "{{ '<tool_call>\n<function=' + name }}"
  assert parse(format_for(template, schemas=[ADD]).parse) == {"x": 7, "name": "7"}
  assert parse(format_for(template).parse) == {"x": 7, "name": 7}


@pytest.mark.parametrize("pattern", ["[", "qwen", r"(?P<name>\w+)"])
def test_a_wrong_pattern_is_refused(pattern):
  with pytest.raises(ConfigError, match="environment.calls"):
    format_for("", pattern, [ADD])


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


def test_a_call_keeps_its_arguments_as_json():
  text = '<tool_call>{"name": "add", "arguments": {"name": "é"}}</tool_call>'
  assert format_for("").parse(text).calls == [Call("add", '{"name": "é"}')]
