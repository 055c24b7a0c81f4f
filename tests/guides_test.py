"""Answers that must have a form, through the endpoint and OpenAI's client."""

import json
import threading
import types

import jax.numpy as jnp
import jsonschema
import numpy as np
import openai
import pytest

from grpo_jax.sampler.logits import RowSettings
from grpo_jax.sampler.rows import _bits
from grpo_jax.serving import requests
from grpo_jax.serving.decoder import Counts
from grpo_jax.serving.engine import Engine, Job, Row
from grpo_jax.serving.guides import Guides, _any_call
from grpo_jax.settings import shown
from tests.serving_parts import TOKENS, Scripted, make_engine, open_policy, serving, write_policy

MESSAGES = [{"role": "user", "content": "How many pens?"}]
HERMES = (
  "{% if tools %}<tool_call>{{ tools[0].function.name }}{% endif %}{% for m in messages %}"
  "{{ m.content }}{% endfor %}"
)
SCHEMA = {
  "type": "object",
  "properties": {
    "pens": {"type": "integer", "minimum": 0, "maximum": 99},
    "right": {"type": "boolean"},
    "who": {"enum": ["Ann", "Bob"]},
  },
  "required": ["pens", "right", "who"],
  "additionalProperties": False,
}


def tool(name, **properties):
  parameters = {
    "type": "object",
    "properties": properties,
    "required": [*properties],
    "additionalProperties": False,
  }
  return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("add", a={"enum": [1, 2]}), tool("no", b={"type": "boolean"})]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
  folder = tmp_path_factory.mktemp("policy")
  write_policy(folder)
  (folder / "chat_template.jinja").write_text(HERMES)
  return open_policy(folder)


@pytest.fixture(scope="module")
def client(policy):
  pytest.importorskip("llguidance", reason="pip install -e '.[guides]'")
  config, params, tokens = policy
  engine = make_engine(config, params, tokens=2 * TOKENS)
  with serving(engine, tokens, config.vocab_size) as (_, address):
    yield openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0)


def format_of(schema):
  return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}


@pytest.mark.slow
def test_answers_follow_a_schema_beside_rows_that_have_none(client):
  options = dict(model="m", max_tokens=2 * TOKENS, seed=3)
  free = dict(prompt="Ann has", extra_body={"return_token_ids": True, "min_tokens": 9})
  alone = client.completions.create(**options, **free).choices[0].token_ids
  made = client.chat.completions.create(
    messages=MESSAGES, n=4, response_format=format_of(SCHEMA), **options
  )
  stream = client.chat.completions.create(
    messages=MESSAGES, response_format=format_of(SCHEMA), stream=True, **options
  )
  beside = client.completions.create(**options, **free).choices[0].token_ids
  said = "".join(piece.choices[0].delta.content or "" for piece in stream)
  for text in [*(choice.message.content for choice in made.choices), said]:
    jsonschema.validate(json.loads(text), SCHEMA)
  assert {choice.finish_reason for choice in made.choices} == {"stop"}
  assert len({choice.message.content for choice in made.choices}) > 1
  assert beside == alone


@pytest.mark.slow
def test_a_call_may_be_required_and_named(client):
  options = dict(model="m", messages=MESSAGES, tools=TOOLS, max_tokens=2 * TOKENS)
  names = set()
  for seed in range(4):
    for choice in ("required", {"type": "function", "function": {"name": "no"}}):
      made = client.chat.completions.create(tool_choice=choice, seed=seed, **options).choices[0]
      (call,) = made.message.tool_calls
      given = json.loads(call.function.arguments)
      assert made.finish_reason == "tool_calls"
      assert given in (
        [{"a": 1}, {"a": 2}] if call.function.name == "add" else [{"b": True}, {"b": False}]
      )
      names.add((shown(choice), call.function.name))
  assert (shown({"type": "function", "function": {"name": "no"}}), "add") not in names


@pytest.mark.slow
@pytest.mark.parametrize(
  "param, body",
  [
    ("response_format", {"response_format": {"type": "xml"}}),
    ("response_format", {"response_format": {"type": "json_schema"}}),
    ("response_format", {"response_format": format_of({"type": "nothing"})}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"function": {"name": "absent"}}}),
    ("tool_choice", {"tool_choice": "required"}),
    ("min_tokens", {"response_format": {"type": "json_object"}, "extra_body": {"min_tokens": 3}}),
  ],
)
def test_forms_that_cannot_be_are_refused_by_name(client, param, body):
  with pytest.raises(openai.BadRequestError) as caught:
    client.chat.completions.create(model="m", messages=MESSAGES, **body)
  assert caught.value.param == param and "\n" not in caught.value.body["message"]


@pytest.mark.slow
def test_without_the_package_the_error_says_what_to_install(policy, monkeypatch):
  monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
  with pytest.raises(requests.RequestError, match="pip install -e '.\\[guides\\]'"):
    Guides(policy[2], 100).of(requests.Form("response_format", {}), 1)


def whole_after(guides, form, text, tokens):
  """Whether a form is whole after a text, and how many tokens it allowed."""
  (guide,) = guides.of(form, 1)
  bits_W, taken = np.zeros(guides._vocabulary // 32 + 1, np.int32), 0
  for token in tokens.encode(text):
    guide.fill(bits_W)
    taken += guide.take([token])
  return guide.is_whole, taken


def test_parameters_of_tools_may_point_to_their_definitions(policy):
  """As pydantic writes them."""
  pytest.importorskip("llguidance", reason="pip install -e '.[guides]'")

  def parameters(own):
    return {
      "$defs": {"Item": own},
      "type": "object",
      "properties": {"$ref": {"$ref": "#/$defs/Item"}, "next": {"$ref": "#"}},
      "required": ["$ref"],
      "additionalProperties": False,
      "default": {"$ref": "#/x"},
    }

  schemas = [parameters({"enum": [1]}), parameters({"type": "boolean"})]
  functions = [{"name": f"f{i}", "parameters": one} for i, one in enumerate(schemas)]
  form = requests.Form("tool_choice", _any_call(functions, "arguments"))
  guides, tokens = Guides(policy[2], policy[0].vocab_size), policy[2]
  for name, value, is_right in [("f0", 1, True), ("f1", True, True), ("f1", 1, False)]:
    given = {"$ref": value, "next": {"$ref": value}}
    text = json.dumps({"name": name, "arguments": given})
    assert whole_after(guides, form, text, tokens)[0] == is_right
    call = {"name": name, "arguments": given}
    jsonschema_ok = jsonschema.Draft202012Validator(form.schema).is_valid(call)
    assert jsonschema_ok == is_right
  told = [{"type": "function", "function": one} for one in functions]
  assert guides.of(requests.Form("tool_choice", {}, tuple(told)), 1)


@pytest.mark.parametrize("function", [{"name": "now"}, {"name": "now", "parameters": {}}])
def test_a_function_without_parameters_is_called_without_arguments(policy, function):
  pytest.importorskip("llguidance", reason="pip install -e '.[guides]'")
  guides, tokens = Guides(policy[2], policy[0].vocab_size), policy[2]
  form = requests.Form("tool_choice", _any_call([function], "arguments"))
  for given, is_right in [({}, True), ({"a": 1}, False)]:
    text = json.dumps({"name": "now", "arguments": given})
    assert whole_after(guides, form, text, tokens)[0] == is_right


def test_an_answer_whose_form_became_too_large_has_reached_a_limit(policy):
  pytest.importorskip("llguidance", reason="pip install -e '.[guides]'")
  config, _, tokens = policy
  guides = Guides(tokens, config.vocab_size)
  large = {"type": "string", "pattern": "^(([a-z]{1,300}){1,300}){1,300}$"}
  form = requests.Form("response_format", large)
  is_whole, taken = whole_after(guides, form, f'"{"a" * 40}"', tokens)
  assert not is_whole and taken < 42
  small = requests.Form("response_format", SCHEMA["properties"]["who"])
  assert whole_after(guides, small, '"Ann"', tokens)[0]
  for is_whole, finish in [(True, "stop"), (False, "length")]:
    for drawn in ("", "stop"):  # the form takes no more; it allowed the end alone
      guide = types.SimpleNamespace(is_whole=is_whole, take=lambda ids: False)
      row = Row(Job((1,), 0, RowSettings(), print, None, guide))
      engine = types.SimpleNamespace(_version=1, counts=Counts())
      assert Engine._part(engine, row, [5], [-1.0], drawn).finish == finish


def test_forms_are_read_in_the_threads_of_requests(policy):
  pytest.importorskip("llguidance", reason="pip install -e '.[guides]'")
  config, _, tokens = policy
  seen = []

  class Told(Guides):
    def of(self, form, count):
      seen.append(threading.current_thread().name)
      return super().of(form, count)

  engine = Scripted(lambda job: [tokens.encode("Ann")] if job.guide else [])
  with serving(engine, tokens, config.vocab_size) as (server, address):
    server._writer._guides = Told(tokens, config.vocab_size)
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0)
    made = client.chat.completions.create(
      model="m", messages=MESSAGES, n=2, response_format=format_of(SCHEMA)
    )
  assert [choice.message.content for choice in made.choices] == ["Ann", "Ann"]
  (name,) = seen
  assert name.startswith("small bodies")


def test_rows_draw_only_tokens_whose_bits_are_set():
  words_RW = jnp.array([[0b101, 1], [-1, 0]], jnp.int32)
  bits = np.array(_bits(words_RW, 34))
  assert np.flatnonzero(bits[0]).tolist() == [0, 2, 32]
  assert np.flatnonzero(bits[1]).tolist() == [*range(32)]
