"""/v1/responses, through the `openai` client."""

import json

import openai
import pydantic
import pytest

import grpo_jax
from grpo_jax.sampler.filters import FILTERS
from grpo_jax.serving import requests
from grpo_jax.serving.responses import response_request
from grpo_jax.serving.traces import Recorder, Trace
from grpo_jax.serving.writer import AnswerWriter
from tests import serving_parts
from tests.serving_parts import PROMPT_TOKENS, TOKENS, Scripted, serving

LIMITS = requests.Limits("m", 10**6, PROMPT_TOKENS, TOKENS, 16)
TOOL = {
  "type": "function",
  "name": "add",
  "description": "adds",
  "parameters": {"type": "object"},
  "strict": True,
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
  return serving_parts.open_policy(serving_parts.write_policy(tmp_path_factory.mktemp("policy")))


@pytest.fixture(scope="module")
def client(policy):
  config, params, tokens = policy
  engine = serving_parts.make_engine(config, params, rows=2)
  with serving(engine, tokens, config.vocab_size) as (_, address):
    yield openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0)


def seen_by_template(policy, body):
  """(messages, tools, options of the template) of a request."""
  seen = []

  def render(*given):
    seen.extend(given)
    return [5]

  response_request(body, LIMITS, requests.Texts(None, render))
  return seen


def test_items_become_messages(policy):
  def part(kind, text):
    return {"type": kind, "text": text}

  def call(number, a):
    arguments = json.dumps({"a": a})
    name = {"call_id": number, "name": "add", "arguments": arguments}
    return {"type": "function_call", "id": f"fc_{number}", "status": "completed", **name}

  items = [
    {"role": "developer", "content": "Be short."},
    {
      "type": "message",
      "role": "user",
      "content": [part("input_text", "How"), part("input_text", "?")],
    },
    {"type": "message", "role": "assistant", "id": "msg", "content": [part("output_text", "Hm.")]},
    call("c1", 1),
    call("c2", 2),
    {"type": "function_call_output", "call_id": "c1", "output": "1"},
    {"type": "function_call_output", "call_id": "c2", "output": [part("input_text", "2")]},
    call("c3", 3),
  ]
  body = {"input": items, "instructions": "Add.", "tools": [TOOL], "reasoning": {"effort": "low"}}
  messages, tools, options, _ = seen_by_template(policy, body)

  def called(number, a):
    return {"id": number, "type": "function", "function": {"name": "add", "arguments": {"a": a}}}

  assert messages == [
    {"role": "system", "content": "Add."},
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "How?"},
    {"role": "assistant", "content": "Hm.", "tool_calls": [called("c1", 1), called("c2", 2)]},
    {"role": "tool", "tool_call_id": "c1", "content": "1"},
    {"role": "tool", "tool_call_id": "c2", "content": "2"},
    {"role": "assistant", "content": "", "tool_calls": [called("c3", 3)]},
  ]
  function = {"name": "add", "description": "adds", "parameters": {"type": "object"}}
  assert tools == [{"type": "function", "function": function}]
  assert options == {"reasoning_effort": "low"}


def test_a_response_is_the_answer_of_a_chat(client):
  messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Pens?"}]
  options = dict(model="m", temperature=0.7, top_p=0.9)
  said = client.chat.completions.create(
    messages=messages, max_tokens=8, extra_body={"seed": 3}, **options
  )
  made = client.responses.create(
    input="Pens?",
    instructions="Be short.",
    max_output_tokens=8,
    store=False,
    include=[],
    metadata={"run": "1"},
    extra_body={"seed": 3},
    **options,
  )
  assert made.output_text == said.choices[0].message.content and made.output_text
  is_cut = said.choices[0].finish_reason == "length"
  assert made.status == ("incomplete" if is_cut else "completed") and made.error is None
  assert (made.incomplete_details is not None) == is_cut
  assert made.usage.input_tokens == said.usage.prompt_tokens
  assert made.usage.output_tokens == said.usage.completion_tokens
  assert 0 <= made.usage.input_tokens_details.cached_tokens <= made.usage.input_tokens
  assert (made.instructions, made.metadata, made.temperature) == ("Be short.", {"run": "1"}, 0.7)
  assert (made.object, made.model, made.weights_version) == ("response", "m", 3)
  # As the client sends it back.
  items = [{"role": "user", "content": "Pens?"}, *(one.model_dump() for one in made.output)]
  again = client.responses.create(
    input=[*items, {"role": "user", "content": "And"}], max_output_tokens=2, **options
  )
  assert again.usage.input_tokens > made.usage.input_tokens


def test_a_stream_of_text(client):
  options = dict(model="m", input="Pens?", max_output_tokens=30, extra_body={"seed": 5})
  whole = client.responses.create(**options)
  events = list(client.responses.create(stream=True, **options))
  kinds = [event.type.removeprefix("response.") for event in events]
  assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
  assert set(kinds[4:-4]) == {"output_text.delta"} and len(kinds) > 10
  done = ["output_text.done", "content_part.done", "output_item.done", whole.status]
  assert kinds[-4:] == done
  assert [event.sequence_number for event in events] == [*range(len(events))]
  deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
  last = events[-1].response
  assert "".join(deltas) == whole.output_text == last.output_text == events[-4].text
  assert last.usage.output_tokens == whole.usage.output_tokens
  assert events[0].response.status == "in_progress" and events[0].response.output == []


def test_log_probs_of_a_response(client):
  made = client.responses.create(
    model="m", input="Pens?", max_output_tokens=4, top_logprobs=3,
    include=["message.output_text.logprobs"], temperature=0,
  )  # fmt: skip
  (part,) = made.output[0].content
  assert "".join(one.token for one in part.logprobs) == part.text
  assert [one.top_logprobs[0].token for one in part.logprobs] == [x.token for x in part.logprobs]
  assert {len(one.top_logprobs) for one in part.logprobs} == {3}


@pytest.mark.parametrize("stop", ["a pen", "pens, \u00fc", "no"])
def test_the_log_probs_of_deltas_are_those_of_the_whole_text(stop, policy):
  """Also of tokens whose text is held back: half of a character, or what may become `stop`."""
  ids = policy[2].encode("Ann has a pencil, pens, \u00fc\U0001f58a")
  with serving(Scripted(lambda job: [[token] for token in ids]), policy[2], 10**6) as (_, address):
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0)
    include = ["message.output_text.logprobs"]
    options = dict(model="m", input="Pens?", include=include, extra_body={"stop": stop})
    events = list(client.responses.create(stream=True, **options))
  deltas = [one for one in events if one.type == "response.output_text.delta"]
  (done,) = [one for one in events if one.type == "response.output_text.done"]
  said = [one.token for delta in deltas for one in delta.logprobs]
  assert said == [one.token for one in done.logprobs] and len(said) == len(ids)
  assert "".join(delta.delta for delta in deltas) == done.text
  assert any(len(delta.logprobs) > 1 for delta in deltas)


def test_calls_and_their_outputs(policy):
  tokens = policy[2]
  ids = tokens.encode("Hm. " + CALL + CALL)

  def script(job):
    del job
    return [[token] for token in ids]

  with serving(Scripted(script), tokens, 10**6) as (_, address):
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0)
    options = dict(model="m", input="1+1?", tools=[TOOL])
    made = client.responses.create(**options)
    message, *calls = made.output
    assert message.content[0].text == "Hm." and made.status == "completed"
    assert [(call.type, call.name, call.arguments) for call in calls] == [
      ("function_call", "add", '{"a": 1}')
    ] * 2
    assert len({call.call_id for call in calls}) == 2 and made.tools[0].name == "add"
    (_, only) = client.responses.create(parallel_tool_calls=False, **options).output
    assert only.name == "add"
    with client.responses.stream(**options) as stream:
      events = list(stream)
      final = stream.get_final_response()
    assert [one.type for one in final.output] == ["message", "function_call", "function_call"]
    added = [one for one in events if one.type == "response.output_item.added"]
    assert [one.output_index for one in added] == [0, 1, 2]
    given = [one for one in events if one.type == "response.function_call_arguments.done"]
    assert [json.loads(one.arguments) for one in given] == [{"a": 1}] * 2
    outputs = [
      {"type": "function_call_output", "call_id": call.call_id, "output": "2"} for call in calls
    ]
    back = [{"role": "user", "content": "1+1?"}, *(x.model_dump() for x in made.output), *outputs]
    more = client.responses.create(model="m", input=back, tools=[TOOL])
    ids_of = {call.call_id for one in (made, more) for call in one.output[1:]}
    assert len(ids_of) == 4  # those of the conversation differ


def test_a_call_without_a_text_is_the_first_item(policy):
  ids = policy[2].encode(CALL)
  with serving(Scripted(lambda job: [ids]), policy[2], 10**6) as (_, address):
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0)
    for stream in (False, True):
      made = client.responses.create(model="m", input="1+1?", tools=[TOOL], stream=stream)
      last = list(made)[-1].response if stream else made
      assert [one.type for one in last.output] == ["function_call"]


def test_a_run_that_records_keeps_the_tokens_of_a_conversation(policy):
  """A harness may ask for responses, too."""
  tokens, recorder = policy[2], Recorder()
  name = recorder.named("x")
  texts = AnswerWriter(Scripted(lambda _: []), tokens, 1.0, recorder).texts(name)
  user = {"role": "user", "content": "Pens?"}
  (prompt,) = response_request({"input": [user]}, LIMITS, texts).prompts
  drawn = [*tokens.encode("A"), *tokens.encode("nn has"), tokens.stop_ids[0]]
  recorder.add(name, Trace([*prompt], drawn, [0.0] * len(drawn), 1, "stop", said="Ann has"))
  part = {"type": "output_text", "text": "Ann has", "annotations": []}
  answer = {"type": "message", "role": "assistant", "status": "completed", "content": [part]}
  (after,) = response_request({"input": [user, answer, user]}, LIMITS, texts).prompts
  assert after[: len(prompt) + len(drawn)] == (*prompt, *drawn)
  assert tokens.encode("Ann has") != drawn[:-1]


@pytest.mark.slow
def test_a_response_follows_a_schema(client):
  pytest.importorskip("llguidance", reason="pip install -e '.[guides]'")

  class Pens(pydantic.BaseModel):
    right: bool

  made = client.responses.parse(model="m", input="Pens?", text_format=Pens, max_output_tokens=40)
  assert isinstance(made.output_parsed, Pens)


WRONG = {
  "input": [None, [], 5, [1], [{"role": "user"}], [{"type": "reasoning", "summary": []}]],
  "instructions": [5],
  "max_output_tokens": [0, "x"],
  "previous_response_id": ["resp_1"],
  "conversation": ["x"],
  "background": [True],
  "truncation": ["auto"],
  "temperature": [-1],
  "tools": [
    5,
    [{"type": "web_search"}],
    [{"type": "function"}],
    [{**TOOL, "description": "half of a pair: \ud800"}],
  ],
  "tool_choice": ["sometimes", {"type": "web_search"}],
  "text": [
    5,
    {"format": {"type": "xml"}},
    {"format": {"type": "json_schema"}},
    {"verbosity": "low"},
    {"formt": {"type": "json_object"}},
    {"format": {"type": "text", "strict": True, "schem": {}}},
    {"format": 5},
    0,
  ],
  "reasoning": [5, {"effort": 5}, {"efort": "low"}, {"max_tokens": 5}, []],
  "top_logprobs": [21],
  "include": ["x", ["web_search_call.results"], ["message.output_text.logprobs", 5], [{}]],
  "max_tokens": [5],
  "tempreature": [1],
  "metadata": [{"a": "\ud800"}, {"\udfff": "a"}],
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_are_refused_by_name(name, policy):
  texts = AnswerWriter(Scripted(lambda _: []), policy[2], 1.0, None).texts("")
  for value in WRONG[name]:
    with pytest.raises(requests.RequestError) as caught:
      response_request({"input": "a", name: value}, LIMITS, texts)
    error = caught.value
    assert error.param == name and name in error.message and "\n" not in error.message
    assert error.status == 400


def test_null_means_that_a_parameter_is_left_out(policy):
  texts = AnswerWriter(Scripted(lambda _: []), policy[2], 1.0, None).texts("")
  named = ("truncation", "background", "previous_response_id", "text", "tools", "reasoning")
  asked = response_request({"input": "a", **dict.fromkeys(named)}, LIMITS, texts)
  assert asked.form is None and asked.tools == () and not asked.logprobs


def test_a_filter_of_a_program_is_a_parameter(policy):
  texts = AnswerWriter(Scripted(lambda _: []), policy[2], 1.0, None).texts("")

  @grpo_jax.register_filter
  def nearest(logits_BV, value_B1):
    return logits_BV > value_B1

  try:
    body = {"input": "a", "nearest": 2, "top_k": 3}
    asked = response_request(body, LIMITS, texts)
    assert asked.settings.own == {"nearest": 2.0} and asked.settings.top_k == 3
    with pytest.raises(requests.RequestError, match="nearest is -1: it must be at least 0"):
      response_request(body | {"nearest": -1}, LIMITS, texts)
  finally:
    del FILTERS["nearest"]


def test_keys_inside_that_change_nothing_are_taken(policy):
  texts = AnswerWriter(Scripted(lambda _: []), policy[2], 1.0, None).texts("")
  named = {"name": "it", "strict": True, "description": "It", "schema": {"type": "object"}}
  body = {
    "reasoning": {"effort": None, "summary": "auto", "generate_summary": None, "other": None},
    "text": {"verbosity": "medium", "format": {"type": "json_schema", **named}},
  }
  asked = response_request({"input": "a", **body}, LIMITS, texts)
  assert asked.form.schema == {"type": "object"}


def test_reasoning_that_no_answer_has_may_be_included(policy):
  """Agents ask for it by default."""
  texts = AnswerWriter(Scripted(lambda _: []), policy[2], 1.0, None).texts("")
  body = {"input": "a", "include": ["reasoning.encrypted_content"]}
  assert not response_request(body, LIMITS, texts).logprobs


def test_errors_of_forms_name_no_parameter_that_responses_lack(policy):
  texts = AnswerWriter(Scripted(lambda _: []), policy[2], 1.0, None).texts("")
  body = {"input": "a", "min_tokens": 2, "text": {"format": {"type": "json_object"}}}
  with pytest.raises(requests.RequestError, match="min_tokens: the form of the answer") as caught:
    response_request(body, LIMITS, texts)
  assert caught.value.param == "min_tokens" and "response_format" not in caught.value.message


def test_errors_name_the_parameters_of_responses(client):
  with pytest.raises(openai.BadRequestError, match="^Error code: 400.*max_output_tokens") as caught:
    client.responses.create(model="m", input="a", max_output_tokens=0)
  assert caught.value.param == "max_output_tokens"
  with pytest.raises(openai.BadRequestError, match="send the whole conversation"):
    client.responses.create(model="m", input="a", previous_response_id="resp_1")
