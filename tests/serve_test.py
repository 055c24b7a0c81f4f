"""The OpenAI-compatible endpoint, through the `openai` client and through raw sockets."""

import asyncio
import dataclasses
import http.client
import json
import os
from pathlib import Path
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import openai
import pytest

import grpo_jax
from grpo_jax.serving import requests
from grpo_jax.serving import tools as tools_lib
from grpo_jax.serving.chats import chat_request
from grpo_jax.serving.server import ServerSettings
from grpo_jax.serving.writer import AnswerWriter
from tests import serving_parts
from tests.serving_parts import KEY, PROMPT_TOKENS, ROWS, TOKENS, TOOLS, Scripted, serving
from tests.small_run import small_config

ROOT = Path(__file__).parents[1]
IDS = {"return_token_ids": True}
MESSAGES = [{"role": "user", "content": "How many pens?"}]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
  folder = serving_parts.write_policy(tmp_path_factory.mktemp("policy"))
  return serving_parts.open_policy(folder)


@pytest.fixture(scope="module")
def served(policy):
  config, params, tokens = policy
  engine = serving_parts.make_engine(config, params)
  settings = ServerSettings("m", body_bytes=2**16, choices=16, grace=0.5)
  with serving(engine, tokens, config.vocab_size, settings) as (server, address):
    yield server, address


@pytest.fixture
def address(served):
  """The address, after which the test must leave a server that answers and no row in flight."""
  server, address = served
  yield address
  wait_until(lambda: server._engine.in_flight == 0 and server.metrics.active == 0)
  assert server._engine.waiting == 0
  assert post(address, prompt="a", max_tokens=2)[0] == 200


@pytest.fixture
def client(address):
  with openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0) as client:
    yield client


def wait_until(condition, seconds=10):
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.01)


def send(address, method, path, body=None, headers=None):
  """(status, the body as JSON or text)"""
  connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=20)
  headers = {"Content-Type": "application/json"} | (headers or {})
  connection.request(method, path, body, headers)
  answer = connection.getresponse()
  text = answer.read().decode()
  connection.close()
  is_json = answer.getheader("Content-Type", "").startswith("application/json")
  return answer.status, json.loads(text) if is_json else text


def post(address, path="/v1/completions", **body):
  return send(address, "POST", path, json.dumps(body))


def refusal(address, path="/v1/completions", **body):
  """(the parameter, the message) of a request that is refused with status 400."""
  status, answer = post(address, path, **body)
  assert status == 400 and answer["error"]["type"] == "invalid_request_error", answer
  return answer["error"]["param"], answer["error"]["message"]


def test_a_completion(client, policy):
  tokens = policy[2]
  made = client.completions.create(
    model="m", prompt="Ann has", max_tokens=12, seed=1, logprobs=0, extra_body=IDS
  )
  (choice,) = made.choices
  assert choice.prompt_token_ids == tokens.encode("Ann has")
  assert choice.text == tokens.decode(choice.token_ids) and choice.text
  assert made.usage.prompt_tokens == len(choice.prompt_token_ids)
  assert made.usage.completion_tokens == len(choice.token_ids) <= 12
  assert choice.finish_reason == ("length" if len(choice.token_ids) == 12 else "stop")
  assert made.weights_version == 3 and choice.token_versions == [3] * len(choice.token_ids)
  seen = choice.logprobs
  assert len(seen.token_logprobs) == len(choice.token_ids) and max(seen.token_logprobs) < 0
  assert "".join(seen.tokens) == choice.text
  assert [choice.text[i:][: len(t)] for i, t in zip(seen.text_offset, seen.tokens)] == seen.tokens
  assert (made.object, made.model) == ("text_completion", "m")


def test_the_version_is_in_a_header(client):
  raw = client.completions.with_raw_response.create(model="m", prompt="Ann", max_tokens=2)
  assert raw.headers["X-Weights-Version"] == "3"


def test_choices_differ_and_a_seed_repeats_them(client):
  def texts(**options):
    made = client.completions.create(
      model="m", prompt=["Ann has", "She"], max_tokens=10, extra_body=IDS, **options
    )
    assert [choice.index for choice in made.choices] == [*range(len(made.choices))]
    return [choice.token_ids for choice in made.choices]

  first = texts(n=4, seed=5)
  assert len(first) == 8 and len({tuple(ids) for ids in first}) == 8
  assert texts(n=4, seed=5) == first != texts(n=4, seed=6)
  assert texts() != texts()  # without a seed
  assert texts(temperature=0, seed=1) == texts(temperature=0, seed=2)


def test_token_ids_in(client, policy):
  ids = policy[2].encode("Ann has")
  options = dict(model="m", max_tokens=8, seed=3)
  text = client.completions.create(prompt="Ann has", **options).choices[0].text
  assert client.completions.create(prompt=ids, **options).choices[0].text == text
  made = client.completions.create(prompt=[ids, ids[:1]], extra_body=IDS, **options)
  assert made.choices[0].text == text
  assert [choice.prompt_token_ids for choice in made.choices] == [ids, ids[:1]]
  assert made.usage.prompt_tokens == len(ids) + 1


def test_limits_and_filters(client):
  def ids(**options):
    made = client.completions.create(model="m", prompt="Ann", seed=1, **options)
    return made.choices[0].token_ids

  greedy = ids(max_tokens=9, temperature=0, extra_body=IDS)
  assert ids(max_tokens=9, extra_body=IDS | {"top_k": 1}) == greedy
  assert ids(max_tokens=9, top_p=1e-6, extra_body=IDS) == greedy
  assert ids(max_tokens=9, extra_body=IDS | {"min_p": 1.0}) == greedy
  assert len(ids(max_tokens=9, extra_body=IDS | {"min_tokens": 9})) == 9
  assert len(ids(extra_body=IDS | {"min_tokens": 1})) <= 16  # the default


def test_a_stop_text_is_not_returned(client):
  options = dict(model="m", prompt="Ann has", seed=1, max_tokens=30, extra_body=IDS)
  whole = client.completions.create(**options).choices[0]
  stop = whole.text[4:6]
  cut = client.completions.create(stop=["\0", stop], **options).choices[0]
  assert cut.text == whole.text[: whole.text.index(stop)] and cut.finish_reason == "stop"
  assert cut.token_ids == whole.token_ids[: len(cut.token_ids)] != whole.token_ids
  stream = client.completions.create(stop=stop, stream=True, **options)
  pieces = [piece.choices[0] for piece in stream]
  assert "".join(piece.text for piece in pieces) == cut.text
  assert sum((piece.token_ids for piece in pieces), []) == cut.token_ids


def test_a_stop_text_may_lie_in_two_parts(client, policy):
  decode = policy[2].decode
  options = dict(model="m", prompt="Ann has", seed=1, max_tokens=30, extra_body=IDS)
  ids = client.completions.create(**options).choices[0].token_ids
  for start in range(4, 14):
    stop = decode(ids[start : start + 2])
    count = next(n for n in range(len(ids) + 1) if stop in decode(ids[:n]))
    (cut,) = client.completions.create(stop=stop, **options).choices
    assert (cut.token_ids, cut.finish_reason) == (ids[:count], "stop")


def test_echo(client):
  options = dict(model="m", prompt="Ann has", seed=1, max_tokens=5)
  text = client.completions.create(**options).choices[0].text
  assert client.completions.create(echo=True, **options).choices[0].text == "Ann has" + text


def test_a_stream_has_the_same_tokens(client):
  options = dict(model="m", prompt=["Ann has", "She"], n=2, seed=1, max_tokens=TOKENS, logprobs=0)
  whole = client.completions.create(extra_body=IDS, **options)
  stream = client.completions.create(
    stream=True, stream_options={"include_usage": True}, extra_body=IDS, **options
  )
  *pieces, last = stream
  assert last.choices == [] and last.usage == whole.usage
  assert len(pieces) > 8
  for choice in whole.choices:
    own = [piece.choices[0] for piece in pieces if piece.choices[0].index == choice.index]
    assert "".join(piece.text for piece in own) == choice.text
    assert sum((piece.token_ids for piece in own), []) == choice.token_ids
    offsets = sum((piece.logprobs.text_offset for piece in own), [])
    assert offsets == choice.logprobs.text_offset
    assert own[0].prompt_token_ids == choice.prompt_token_ids
    assert [piece.finish_reason for piece in own][:-1] == [None] * (len(own) - 1)
    assert own[-1].finish_reason == choice.finish_reason


def test_chat(client, policy):
  tokens = policy[2]
  options = dict(model="m", messages=MESSAGES, seed=1, max_completion_tokens=20, logprobs=True)
  made = client.chat.completions.create(extra_body=IDS, **options)
  (choice,) = made.choices
  assert choice.prompt_token_ids == tokens.encode(tokens.render(MESSAGES))
  assert choice.message.role == "assistant"
  assert choice.message.content == tokens.decode(choice.token_ids)
  content = choice.logprobs.content
  assert "".join(one.token for one in content) == choice.message.content
  assert all(bytes(one.bytes).decode() == one.token and one.logprob < 0 for one in content)
  pieces = list(client.chat.completions.create(stream=True, **options))
  assert pieces[0].choices[0].delta.role == "assistant"
  texts = [piece.choices[0].delta.content or "" for piece in pieces]
  assert "".join(texts) == choice.message.content
  assert pieces[-1].choices[0].finish_reason == choice.finish_reason


def test_parts_of_contents_and_tools_reach_the_template(client, policy):
  tokens = policy[2]

  def prompt(messages, **options):
    made = client.chat.completions.create(
      model="m", messages=messages, max_tokens=1, extra_body=IDS, **options
    )
    return tokens.codec._engine.decode(made.choices[0].prompt_token_ids, skip_special_tokens=False)

  parts = [{"type": "text", "text": "How many"}, {"type": "text", "text": " pens?"}]
  assert prompt([{"role": "user", "content": parts}]) == tokens.render(MESSAGES)
  assert prompt(MESSAGES, tools=TOOLS) == "add" + tokens.render(MESSAGES)
  assert prompt(MESSAGES, tools=TOOLS, tool_choice="none") == tokens.render(MESSAGES)
  call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
  answered = [
    *MESSAGES,
    {"role": "assistant", "content": None, "tool_calls": [call]},
    {"role": "tool", "tool_call_id": "1", "content": "3"},
  ]
  assert "<|im_start|>tool\n3" in prompt(answered, tools=TOOLS)
  read = tools_lib.messages_for_template(answered)[1]
  assert read["tool_calls"][0]["function"]["arguments"] == {"a": 1} and read["content"] == ""


def test_options_of_templates_reach_them(policy):
  tokens = policy[2]

  def prompt(messages, **body):
    body = chat_request({"messages": messages, "max_tokens": 3, **body}, LIMITS, texts)
    return tokens.codec._engine.decode(body.prompts[0], skip_special_tokens=False)

  template = tokens.template.replace("{% for", "{{ reasoning_effort }}{{ shout }}{% for", 1)
  files = {**tokens.files, "chat_template.jinja": template.encode()}
  told = dataclasses.replace(tokens, files=files)
  engine = Scripted(lambda _: [])
  texts = AnswerWriter(engine, told, 1.0, None).texts("")
  said = prompt(MESSAGES, reasoning_effort="low", chat_template_kwargs={"shout": "AH"})
  assert said == "lowAH" + tokens.render(MESSAGES)
  begun = [*MESSAGES, {"role": "assistant", "content": "Ann has"}]
  assert prompt(begun, continue_final_message=True) == tokens.render(MESSAGES) + "Ann has"
  for text in ("end", "im", "s", "t", "\n", "Sure: ", "user"):  # as in the marks that follow it
    begun[-1] = {"role": "assistant", "content": text}
    said = prompt(begun, continue_final_message=True, add_generation_prompt=False)
    assert said == tokens.render(MESSAGES) + text
  for wrong in (
    {"add_generation_prompt": False},
    {"chat_template_kwargs": {"messages": []}},
    {"chat_template_kwargs": 1},
    {"reasoning_effort": 1},
    {"continue_final_message": True},
  ):
    with pytest.raises(requests.RequestError) as caught:
      prompt(MESSAGES, **wrong)
    assert caught.value.param == [*wrong][0]


def test_a_template_that_trims_messages_trims_one_that_goes_on(policy):
  tokens = policy[2]
  template = "{% for m in messages %}<{{ m.content | trim }}|{% endfor %}"
  files = {**tokens.files, "chat_template.jinja": template.encode()}
  told = dataclasses.replace(tokens, files=files)
  writer = AnswerWriter(Scripted(lambda _: []), told, 1.0, None)
  begun = [*MESSAGES, {"role": "assistant", "content": " Sure:  "}]
  said = writer._rendered(begun, None, {requests.GOES_ON: True})
  assert said == "<How many pens?|<Sure:"


LIMITS = requests.Limits("m", 10**6, PROMPT_TOKENS, TOKENS, 16)


def test_what_does_not_fit_is_cut_and_ids_may_stop(client):
  options = dict(model="m", prompt="Ann has", seed=1, max_tokens=10**6)
  (choice,) = client.completions.create(**options, extra_body=IDS | {"min_tokens": TOKENS}).choices
  assert len(choice.token_ids) == TOKENS and choice.finish_reason == "length"
  stop = choice.token_ids[4]
  (again,) = client.completions.create(
    **options, extra_body=IDS | {"min_tokens": TOKENS, "stop_token_ids": [stop]}
  ).choices
  first = choice.token_ids.index(stop) + 1
  assert again.token_ids == choice.token_ids[:first] and again.finish_reason == "stop"


def test_ids_of_calls_go_on_in_a_conversation(policy):
  tokens = policy[2]
  text = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>' * 2
  ids = tokens.encode(text)
  with serving(Scripted(lambda _: [ids]), tokens, 10**6) as (_, address):
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0)
    options = dict(model="m", tools=TOOLS)
    message = client.chat.completions.create(messages=MESSAGES, **options).choices[0].message
    messages = [*MESSAGES, message.model_dump(exclude_none=True)]
    messages += [{"role": "tool", "tool_call_id": c.id, "content": "2"} for c in message.tool_calls]
    later = client.chat.completions.create(messages=messages, **options).choices[0].message
    one = client.chat.completions.create(
      messages=MESSAGES, parallel_tool_calls=False, **options
    ).choices[0]
  named = [call.id for call in (*message.tool_calls, *later.tool_calls)]
  assert named == [f"call0000{i}" for i in range(4)]
  assert len(one.message.tool_calls) == 1


def test_calls_of_tools(policy):
  tokens = policy[2]
  text = 'Hm. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
  ids = tokens.encode(text)

  def script(job):
    del job
    return [[token] for token in ids]

  with serving(Scripted(script), tokens, 10**6) as (_, address):
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0)
    options = dict(model="m", messages=MESSAGES)
    (choice,) = client.chat.completions.create(tools=TOOLS, **options).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Hm."
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    assert client.chat.completions.create(**options).choices[0].message.content == text
    pieces = [
      piece.choices[0]
      for piece in client.chat.completions.create(tools=TOOLS, stream=True, **options)
    ]
    assert "".join(piece.delta.content or "" for piece in pieces) == "Hm. "
    assert pieces[-1].finish_reason == "tool_calls"
    (call,) = pieces[-1].delta.tool_calls
    assert (call.index, call.function.name) == (0, "add")


def test_models_health_and_metrics(client, address):
  (about,) = client.models.list().data
  assert (about.id, about.max_model_len) == ("m", PROMPT_TOKENS + TOKENS)
  assert client.models.retrieve("m").id == "m"
  with pytest.raises(openai.NotFoundError):
    client.models.retrieve("other")
  assert send(address, "GET", "/health")[0] == 200
  post(address, prompt="a", max_tokens=3)
  status, text = send(address, "GET", "/metrics")
  numbers = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
  assert status == 200 and float(numbers["grpo_jax_completion_tokens_total"]) >= 1
  assert int(numbers['grpo_jax_requests_total{path="/v1/completions",status="200"}']) >= 1
  assert int(numbers["grpo_jax_prompt_tokens_computed_total"]) >= 1
  assert {"grpo_jax_prefix_cache_entries", "grpo_jax_prefix_cache_drops_total"} <= numbers.keys()
  assert {"grpo_jax_rows_waiting", "grpo_jax_rows_in_flight"} <= numbers.keys()


def test_a_conversation_goes_on_where_it_stopped(address):
  def computed():
    text = send(address, "GET", "/metrics")[1]
    return int(re.search(r"\ngrpo_jax_prompt_tokens_computed_total (\d+)", text)[1])

  options = {"max_tokens": 9, "seed": 4, "min_tokens": 9, "return_token_ids": True}
  first = post(address, prompt=[*range(40, 60)], **options)[1]["choices"][0]
  known, before = [*range(40, 60), *first["token_ids"]], computed()
  (_, made) = post(address, prompt=[*known, 7, 8, 9], **options)
  assert computed() - before == 4  # with the token that was drawn last
  assert made["usage"]["prompt_tokens"] == 32


WRONG = {
  "temperature": [-1, 1e9, 1e-40, "warm", True, [1], float("nan"), float("inf")],
  "top_p": [0, 1.5, -1, "x"],
  "top_k": [-2, 1.5, 2**40],
  "min_p": [-0.1, 1.1],
  "n": [0, -1, 17, 10**9, 10**400, "2", 1.5, True],
  "max_tokens": [0, -1, 2**70, "x"],
  "stop_token_ids": [5, ["x"], [-1], [10**6], [1] * 17],
  "min_tokens": [-1, 17, None.__class__.__name__],
  "seed": ["x", 1.5, 2**70],
  "stop": [1, [1], [""], "", ["a"] * 17, "a" * 2000, {}],
  "logprobs": [-1, 6, True, "x"],
  "stream": [1, "yes"],
  "stream_options": [1, []],
  "echo": ["x"],
  "return_token_ids": [1],
  "presence_penalty": [0.5, "x"],
  "frequency_penalty": [1],
  "logit_bias": [{"5": 101}, {"x": 1}, {"-1": 1}, {"1000000": 1}, {"5": "x"}, {"5": True}, [5]],
  "skip_special_tokens": [1],
  "best_of": [2],
  "response_format": [{"type": "json_object"}],
  "suffix": ["x"],
  "tempreature": [1],
  "model": [1, {}],
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_are_refused_by_name(name, address):
  for value in WRONG[name]:
    param, message = refusal(address, **{"prompt": "a", name: value})
    assert param == name and name in message


@pytest.mark.parametrize(
  "prompt",
  [None, "", [], [[]], 5, {}, [1.5], [True], [-1], [10**6], [2**70], [["a"]], [1, "a"], [[[1]]]],
  ids=repr,
)
def test_wrong_prompts_are_refused(prompt, address):
  assert refusal(address, prompt=prompt)[0] == "prompt"


def test_prompts_that_are_too_long_or_too_many(address):
  message = refusal(address, prompt=[5] * (PROMPT_TOKENS + 1))[1]
  assert f"has {PROMPT_TOKENS + 1} tokens" in message and f"at most {PROMPT_TOKENS}" in message
  assert post(address, prompt=[5] * PROMPT_TOKENS, max_tokens=1)[0] == 200
  assert "17 prompts" in refusal(address, prompt=["a"] * 17)[1]
  assert refusal(address, prompt=["a"] * 9, n=2)[0] == "n"


@pytest.mark.parametrize(
  "messages",
  [
    None,
    [],
    "x",
    [1],
    [{}],
    [{"role": "user"}],
    [{"role": 1, "content": "x"}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": "assistant", "content": None, "tool_calls": [1]}],
    [{"role": "user", "content": "\ud800"}],
  ],
  ids=repr,
)
def test_wrong_messages_are_refused(messages, address):
  assert refusal(address, "/v1/chat/completions", messages=messages)[0] == "messages"


def test_wrong_tools_are_refused(address):
  def param(**body):
    return refusal(address, "/v1/chat/completions", messages=MESSAGES, **body)[0]

  assert {param(tools=tools) for tools in ([1], {}, "add", [{"type": "function"}])} == {"tools"}
  assert param(tools=TOOLS, tool_choice="sometimes") == "tool_choice"
  assert param(logprobs=True, top_logprobs=21) == param(top_logprobs=2) == "top_logprobs"
  assert param(logprobs=1) == "logprobs"
  assert param(prompt="x") == "prompt"


@pytest.mark.parametrize(
  "body",
  [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"a":' * 1000 + b"1", b"[" * 60000, b"9" * 5000],
  ids=range(8),
)
def test_what_is_no_json_is_refused(body, address):
  status, answer = send(address, "POST", "/v1/completions", body)
  assert (status, answer["error"]["code"]) == (400, "invalid_json")


def test_deep_nesting_is_refused(address):
  for deep in ("[" * 500 + "]" * 500, '{"a":' * 100 + "1" + "}" * 100):
    body = f'{{"prompt": "a", "user": {deep}}}'
    status, answer = send(address, "POST", "/v1/completions", body)
    assert status == 400 and "nested" in answer["error"]["message"]


def test_a_large_body_is_refused(address):
  status, answer = post(address, prompt="a" * 10 * 2**20)
  assert status == 413 and str(2**16) in answer["error"]["message"]


def test_other_paths_methods_and_types(address):
  assert send(address, "GET", "/v2")[0] == 404
  assert send(address, "GET", "/v1/completions")[0] == 405
  status, answer = send(address, "POST", "/v1/completions", "{}", {"Content-Type": "text/plain"})
  assert status == 400 and "Content-Type" in answer["error"]["message"]
  assert post(address, prompt="a", model="other")[0] == 404


def test_errors_are_those_of_the_client(client):
  with pytest.raises(openai.BadRequestError, match="presence_penalty"):
    client.completions.create(model="m", prompt="a", presence_penalty=1)
  with pytest.raises(openai.NotFoundError, match="this server has 'm'"):
    client.completions.create(model="gpt", prompt="a")


def test_the_key(policy):
  config, _, tokens = policy
  with serving(
    Scripted(lambda job: [[5]]), tokens, config.vocab_size, ServerSettings("m", key=KEY, grace=0.1)
  ) as (_, address):
    for given in ("", KEY, "Bearer", "Bearer ", f"Bearer {KEY}x", "Bearer \xfc"):
      status, answer = send(address, "GET", "/v1/models", headers={"Authorization": given})
      assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    assert send(address, "POST", "/admin/reload")[0] == 401
    assert send(address, "GET", "/health")[0] == send(address, "GET", "/metrics")[0] == 200
    client = openai.OpenAI(base_url=f"{address}/v1", api_key=KEY)
    assert client.completions.create(model="m", prompt="a").choices[0].finish_reason == "stop"
    headers = {"Authorization": f"Bearer {KEY}"}
    assert send(address, "POST", "/admin/reload", headers=headers)[0] == 404  # no folder


@pytest.mark.slow
def test_new_weights_without_a_restart(policy):
  config, params, tokens = policy
  engine = serving_parts.make_engine(config, params, rows=2)

  def reload():
    engine.set_weights(params, 9)
    return 9

  settings = ServerSettings("m", key=KEY, grace=0.5)
  with serving(engine, tokens, config.vocab_size, settings, reload) as (_, address):
    headers = {"Authorization": f"Bearer {KEY}"}
    client = openai.OpenAI(base_url=f"{address}/v1", api_key=KEY)
    assert client.completions.create(model="m", prompt="a").weights_version == 3
    assert send(address, "POST", "/admin/reload", headers=headers) == (200, {"weights_version": 9})
    made = client.completions.create(model="m", prompt="a", extra_body=IDS)
    assert made.weights_version == 9 and {*made.choices[0].token_versions} == {9}


def test_without_a_key_nobody_reloads(address):
  assert send(address, "POST", "/admin/reload")[0] == 401


@pytest.mark.slow
def test_a_full_queue(policy):
  config, params, tokens = policy
  engine = serving_parts.make_engine(config, params, rows=1, waiting=4)
  with serving(engine, tokens, config.vocab_size) as (_, address):
    status, answer = post(address, prompt="a", n=5)
    assert (status, answer["error"]["code"]) == (429, "queue_full")
    assert post(address, prompt="a", n=4)[0] == 200


def test_an_answer_that_takes_too_long(policy):
  config, _, tokens = policy

  def script(job):
    del job
    time.sleep(1)
    return [[5]]

  engine, settings = Scripted(script), ServerSettings("m", seconds=0.1, grace=0.1)
  with serving(engine, tokens, config.vocab_size, settings) as (_, address):
    status, answer = post(address, prompt="a")
    assert (status, answer["error"]["code"]) == (503, "timeout") and len(engine.cancelled) == 1
    status, text = post(address, prompt="a", stream=True)
    assert status == 200 and "timeout" in text and "[DONE]" not in text


def raw_request(address, **body):
  """A socket on which a request was sent."""
  host, port = address.removeprefix("http://").split(":")
  data = json.dumps(body).encode()
  connection = socket.create_connection((host, int(port)))
  head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
  connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
  return connection


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_seats(stream, policy):
  config, params, tokens = policy
  engine = serving_parts.make_engine(config, params, rows=2, tokens=4000)
  with serving(engine, tokens, config.vocab_size) as (server, address):
    more = dict(max_tokens=4000, min_tokens=4000)
    connection = raw_request(address, prompt="a", n=5, stream=stream, **more)
    wait_until(lambda: engine.in_flight == 2 and engine.waiting == 3)
    connection.close()
    wait_until(lambda: engine.in_flight == engine.waiting == server.metrics.active == 0, 2)
    assert server.metrics.requests["/v1/completions", 499] == 1
    assert engine.counts.tokens < 8000
    assert post(address, prompt="a", max_tokens=2)[0] == 200


@pytest.mark.slow
def test_a_slow_reader_is_cut_and_the_others_are_not_held_up(policy):
  config, _, tokens = policy
  begun = threading.Event()

  def slowly(ids):
    time.sleep(0.001)
    return ids

  def script(job):
    if len(job.prompt) > 1:  # of the slow one, who would have to read a gigabyte
      begun.set()
      return (slowly([5] * 1000) for _ in range(100_000))
    return [[5]]

  engine = Scripted(script)
  with serving(engine, tokens, config.vocab_size) as (server, address):
    slow = raw_request(
      address, prompt=[5, 5], stream=True, logprobs=0, max_tokens=10**6, return_token_ids=True
    )
    assert begun.wait(5)
    start = time.monotonic()
    assert post(address, prompt=[5], max_tokens=5)[0] == 200
    wait_until(lambda: len(engine.cancelled) == 1, 30)
    wait_until(lambda: server.metrics.active == 0)
    assert time.monotonic() - start < 30
    slow.close()


def ids_of_stream(text):
  pieces = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
  assert text.rstrip().endswith("data: [DONE]")
  return sum((piece["choices"][0]["token_ids"] for piece in pieces), [])


def test_many_at_once_get_the_tokens_that_they_get_alone(address):
  bodies = [
    dict(prompt=f"Ann has {i} " * (1 + i % 5), seed=i, max_tokens=10 + i % 20, n=1)
    | dict(temperature=[1.0, 0.0, 0.7][i % 3], stream=True, top_k=[0, 9][i % 2], **IDS)
    for i in range(24)
  ]
  alone = [ids_of_stream(post(address, **body)[1]) for body in bodies]
  found = [None] * len(bodies)

  def ask(i):
    found[i] = ids_of_stream(post(address, **bodies[i])[1])

  threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(bodies))]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(60)
  assert found == alone and len(bodies) > 2 * ROWS


@pytest.mark.slow
def test_two_hundred_streams_at_once_get_the_tokens_that_they_get_alone(client, address):
  options = [
    dict(prompt=f"Ann has {i} boxes", seed=i, max_tokens=TOKENS, temperature=float(i % 4 > 0))
    for i in range(200)
  ]

  async def ask(client, i):
    made = await client.completions.create(model="m", stream=True, extra_body=IDS, **options[i])
    return sum([piece.choices[0].token_ids async for piece in made], [])

  async def crowd():
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0) as client:
      return await asyncio.gather(*(ask(client, i) for i in range(200)))

  start = time.monotonic()
  found = asyncio.run(crowd())
  seconds = time.monotonic() - start
  print(f"{sum(map(len, found))} tokens in {seconds:.2f} s")
  for i, ids in enumerate(found):
    made = client.completions.create(model="m", extra_body=IDS, **options[i])
    assert made.choices[0].token_ids == ids


TASK = """
task: pens
dataset_path: json
dataset_kwargs: {data_files: {test: "%s"}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n\\n"], temperature: 0.0, max_gen_toks: 30}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.mark.slow
def test_lm_eval_reads_the_greedy_completions(client, address, tmp_path):
  """A task over a local file. Its answers are right for half of the problems."""
  pytest.importorskip("lm_eval", reason="pip install 'lm_eval[api]'")
  options = dict(model="m", max_tokens=30, temperature=0, stop="\n\n")
  rows = [{"question": f"Ann has {i} boxes"} for i in range(12)]
  for i, row in enumerate(rows):
    text = client.completions.create(prompt=row["question"], **options).choices[0].text
    row["answer"] = text if i % 2 else "other"
  (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  (tmp_path / "pens.yaml").write_text(TASK % (tmp_path / "rows.jsonl"))
  server = f"model=m,base_url={address}/v1/completions,num_concurrent=4"
  command = [sys.executable, "-m", "lm_eval", "--model=local-completions", "--tasks=pens"]
  command += [f"--include_path={tmp_path}", f"--output_path={tmp_path / 'out'}"]
  command += [f"--model_args={server},tokenizer_backend=None,tokenized_requests=False"]
  offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
  done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  (file,) = (tmp_path / "out").rglob("results*.json")
  assert json.loads(file.read_text())["results"]["pens"]["exact_match,none"] == 0.5


def command(*flags):
  """The process of `python -m grpo_jax.serve`, once it serves, and its address."""
  process = subprocess.Popen(
    [sys.executable, "-m", "grpo_jax.serve", "--port=0", "--rows=2", "--model_name=m", *flags],
    cwd=ROOT,
    env=os.environ | {"JAX_NUM_CPU_DEVICES": "1", "GRPO_JAX_API_KEY": KEY},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  said = ""
  for line in process.stdout:
    said += line
    if found := re.search(r"serving m at (http://127\.0\.0\.1:\d+)/v1", line):
      return process, found[1]
  raise AssertionError(said + process.stderr.read())


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
@pytest.mark.slow
def test_the_command_stops_once_what_runs_has_ended(number, code, tmp_path):
  process, address = command(
    "--config=configs/default.py",
    f"--config.model.path={serving_parts.write_policy(tmp_path)}",
    "--max_prompt_tokens=32",
    "--max_tokens=900",
  )
  assert send(address, "GET", "/v1/models")[0] == 401
  client = openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0)
  options = dict(max_tokens=900, extra_body={"min_tokens": 900})
  stream = client.completions.create(model="m", prompt="a", stream=True, **options)
  first = next(iter(stream))
  process.send_signal(number)
  rest = list(stream)
  assert first.choices[0].finish_reason is None and rest[-1].choices[0].finish_reason == "length"
  said = process.communicate(timeout=20)[1]
  assert process.returncode == code
  assert f"{number.name}: stopping once what runs has ended" in said
  assert said.endswith("interrupted\n") == (code == 130) and "Traceback" not in said


@pytest.mark.slow
def test_a_run_that_goes_on_is_served(tmp_path):
  """Its newest checkpoint is loaded at the start, and on demand the one after it."""

  def train(steps):
    keys = {"steps": steps, "checkpoint.every": 1, "eval.every": 0}
    grpo_jax.train(small_config().replace(keys), tmp_path)

  train(1)
  process, address = command(f"--workdir={tmp_path}")
  client = openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0)
  options = dict(model="m", prompt="1+2=", max_tokens=5, temperature=0, extra_body=IDS)
  assert client.completions.create(**options).weights_version == 1
  train(2)
  headers = {"Authorization": f"Bearer {KEY}"}
  assert send(address, "POST", "/admin/reload", headers=headers) == (200, {"weights_version": 2})
  made = client.completions.create(**options)
  assert made.weights_version == 2
  (expected,) = grpo_jax.load_policy(tmp_path).sample("1+2=", n=1, temperature=0.0, max_tokens=5)
  assert made.choices[0].text == expected.text
  process.send_signal(signal.SIGTERM)
  process.communicate(timeout=20)
  assert process.returncode == 0


@pytest.mark.parametrize(
  "flags, message",
  [
    (["--rows=0"], "flag --rows=0: it must be at least 1"),
    (["--step=5"], "flag --step=5 is for the checkpoints of --workdir"),
    (["--prefix_cache_mib=-1"], "flag --prefix_cache_mib=-1: it must be at least 0"),
    (["--port=70000"], "flag --port=70000: it must be between 0 and 65535"),
    (["--api_key_file=/no/such"], "flag --api_key_file=/no/such: it cannot be read"),
    pytest.param(
      ["--max_tokens=2000"],
      "together they must be at most the model's 1024 positions",
      marks=pytest.mark.slow,
    ),
    pytest.param(["--host=1.2.3.4"], "flags --host=1.2.3.4 --port=8000: ", marks=pytest.mark.slow),
    ([], "give either --workdir=DIR or --config"),
  ],
)
def test_bad_flags_are_one_line(flags, message, start, tmp_path):
  small = ["--rows=1", "--max_tokens=4", "--max_prompt_tokens=8"]
  config = ["--config=configs/default.py"] if flags else []
  if flags:
    config.append(f"--config.model.path={serving_parts.write_policy(tmp_path)}")
  code, _, said = start("serve", *config, *small, *flags)
  # On a busy machine, lines before it say what takes long.
  *before, last = said.splitlines()
  assert code == 2 and last.startswith("error: ") and message in last
  assert not any("error" in line for line in before)


def test_a_missing_package_is_one_line(start, monkeypatch):
  monkeypatch.setitem(sys.modules, "aiohttp", None)
  monkeypatch.delitem(sys.modules, "grpo_jax.serving.server")
  code, _, said = start("serve", "--config=configs/default.py")
  assert code == 2 and "pip install -e '.[serve]'" in said and said.count("\n") == 1
