"""Calls of tools through the endpoint: read as the family writes them, typed by the request."""

import json

import openai
import pytest

from grpo_jax.environments.tool_calls import format_for
from grpo_jax.sampler.logits import RowSettings
from grpo_jax.serving.answers import AnswerChoice
from grpo_jax.serving.chats import chat_request
from grpo_jax.serving.endpoint import MODEL, Endpoint
from grpo_jax.serving.engine import AnswerPart
from grpo_jax.serving.requests import Limits, Texts
from grpo_jax.serving.traces import Recorder, Trace
from grpo_jax.serving.writer import AnswerWriter
from tests.call_templates import DEEPSEEK, GEMMA4, GPT_OSS, QWEN35, SHOWS, tokens_for
from tests.serving_parts import Scripted, serving

LIMITS = Limits("m", 10**6, 1000, 100, 16)
MESSAGES = [{"role": "user", "content": "How many pens?"}]
SET = {
  "type": "object",
  "properties": {
    "zip": {"type": "string"},
    "on": {"type": "boolean"},
    "n": {"type": "integer"},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
  },
}
SET_TOOLS = [{"type": "function", "function": {"name": "set", "parameters": SET}}]


def ask(folder, template, text, **options):
  """What a client gets who asks for calls: (the choice, the pieces of the same as a stream)."""
  tokens = tokens_for(folder, template)
  ids = tokens.encode(text)
  engine = Scripted(lambda _: [[token] for token in ids])
  engine.sizes = engine.sizes._replace(prompt_tokens=1000)
  with serving(engine, tokens, 10**6) as (_, address):
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0)
    options = dict(model="m", messages=MESSAGES, tools=SET_TOOLS) | options
    (choice,) = client.chat.completions.create(**options).choices
    return choice, [
      piece.choices[0] for piece in client.chat.completions.create(stream=True, **options)
    ]


@pytest.mark.parametrize(
  "template, text, content, arguments",
  [
    (
      QWEN35,
      "Well.<tool_call>\n<function=set>\n<parameter=zip>\n12345\n</parameter>\n<parameter=on>\n"
      "True\n<parameter=n>\n5.0\n</parameter>\n<parameter=note>\nnull\n</parameter>\n"
      "</function>\n</tool_call>",
      "Well.",
      {"zip": "12345", "on": True, "n": 5, "note": None},
    ),
    (
      GEMMA4,
      'Well.<|tool_call>call:set{zip:<|"|>1{2<|"|>,on:true,n:5.0,note:None}<tool_call|>',
      "Well.",
      {"zip": "1{2", "on": True, "n": 5, "note": None},
    ),
    (
      GPT_OSS,
      "<|channel|>analysis<|message|>Well.<|end|><|start|>assistant<|channel|>commentary"
      ' to=functions.set <|constrain|>json<|message|>{"zip": "1", "n": 5.0}<|call|>',
      "analysisWell.",  # as without tools
      {"zip": "1", "n": 5},
    ),
    (
      DEEPSEEK,
      "Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>set\n```json\n"
      '{"zip": "1", "n": 5.0}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
      "Well.",
      {"zip": "1", "n": 5},
    ),
  ],
)
def test_calls_are_read_as_the_family_writes_them(tmp_path, template, text, content, arguments):
  """Special tokens and all, with arguments as the request's schema wants them."""
  choice, pieces = ask(tmp_path, template, text)
  assert choice.finish_reason == pieces[-1].finish_reason == "tool_calls"
  assert choice.message.content == content
  streamed = "".join(piece.delta.content or "" for piece in pieces)
  assert streamed.removesuffix("assistant") == content
  for call in (*choice.message.tool_calls, *pieces[-1].delta.tool_calls):
    assert call.function.name == "set" and json.loads(call.function.arguments) == arguments
    assert len(call.id) == 9 and call.id.isalnum()  # Mistral's templates want it so


def test_an_answer_without_calls_has_no_marks(tmp_path):
  text = "<|channel|>final<|message|>It is 5."
  choice, pieces = ask(tmp_path, GPT_OSS, text)
  assert choice.message.content == "finalIt is 5." and choice.finish_reason == "stop"
  assert "".join(piece.delta.content or "" for piece in pieces) == choice.message.content
  assert ask(tmp_path, GPT_OSS, text, tools=[])[0].message.content == choice.message.content


@pytest.mark.parametrize(
  "template",
  [SHOWS, QWEN35.replace("<function=", "<invoke name=") + "{# <tool_call> #}"],
)
def test_tools_whose_calls_are_not_read_are_refused(tmp_path, template):
  with pytest.raises(openai.BadRequestError, match="shows tools") as caught:
    ask(tmp_path, template, "Well.")
  assert caught.value.param == "tools"
  assert ask(tmp_path, template, "Well.", tools=[])[0].message.content == "Well."


def test_templates_that_want_arguments_as_a_text_get_them_so(tmp_path):
  call = {"id": "1", "type": "function", "function": {"name": "set", "arguments": '{"n": 1}'}}
  answered = [
    *MESSAGES,
    {"role": "assistant", "content": None, "tool_calls": [call]},
    {"role": "tool", "tool_call_id": "1", "content": "3"},
  ]
  assert ask(tmp_path, DEEPSEEK, "Done.", messages=answered)[0].message.content == "Done."


def test_a_harness_reads_the_same_calls_and_answers_them_by_their_names(tmp_path):
  """The policy's own tokens stay. The template writes the name of the tool that answers."""
  tokens = tokens_for(tmp_path, GEMMA4)
  first = tokens.encode("<|tool_call>call:set{zip:12,on:True}<tool_call|><|im_end|>")
  engine = Scripted(lambda job: [first] if job.prompt == prompts[0] else [tokens.encode("Done.")])
  engine.sizes = engine.sizes._replace(prompt_tokens=1000)
  engine.start = lambda: None
  prompts = [tuple(tokens.encode(tokens.render(MESSAGES, tools=SET_TOOLS)))]
  endpoint = Endpoint(engine, tokens, 10**6)
  try:
    endpoint.recorder.begin(RowSettings(), "seed")
    name = endpoint.recorder.named("0")
    client = openai.OpenAI(base_url=endpoint.url, api_key=f"{endpoint.key}:{name}", max_retries=0)
    options = dict(model=MODEL, tools=SET_TOOLS)
    message = client.chat.completions.create(messages=MESSAGES, **options).choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"zip": "12", "on": True}
    answer = {"role": "tool", "tool_call_id": call.id, "content": "ok"}
    messages = [*MESSAGES, message.model_dump(exclude_none=True), answer]
    assert client.chat.completions.create(messages=messages, **options).choices[0].message.content
    one, two = endpoint.recorder.take(name)
    endpoint.recorder.begin(RowSettings(), "seed of the next batch")
    with pytest.raises(openai.AuthenticationError, match="no completion of the current batch"):
      client.chat.completions.create(messages=MESSAGES, **options)
  finally:
    endpoint.close()
  assert two.prompt[: len(one.prompt) + len(one.tokens)] == [*one.prompt, *one.tokens]
  reply = two.prompt[len(one.prompt) + len(one.tokens) :]
  assert tokens.decode(reply) == "response:set{ok}<|turn>model\n"


def test_options_of_the_template_hold_in_each_turn_of_a_recorded_conversation(tmp_path):
  mark = "{% if add_generation_prompt and effort | default('') == 'low' %}{{ 'user' }}{% endif %}"
  tokens, recorder = tokens_for(tmp_path, QWEN35 + mark), Recorder()
  name = recorder.named("0")
  texts = AnswerWriter(Scripted(lambda _: []), tokens, 1.0, recorder).texts(name)

  def prompt_of(messages, effort):
    body = {"messages": messages, "chat_template_kwargs": {"effort": effort}}
    return chat_request(body, LIMITS, texts).prompts[0]

  for effort in ("low", "high"):
    prompt = prompt_of(MESSAGES, effort)
    drawn = [*tokens.encode("Set it."), tokens.stop_ids[0]]
    recorder.add(name, Trace([*prompt], drawn, [0.0] * len(drawn), 1, "stop", said="Set it."))
    messages = [*MESSAGES, {"role": "assistant", "content": "Set it."}, *MESSAGES]
    after = prompt_of(messages, effort)
    assert after[: len(prompt) + len(drawn)] == (*prompt, *drawn)  # it is a recorded conversation
    for ids in (prompt, after):
      assert tokens.decode([*ids]).endswith("user") == (effort == "low")


def test_arguments_that_are_nested_too_deeply_are_refused(tmp_path):
  for depth, words in ((64, ""), (65, "deeper than 64 levels"), (980, "deeper than 64 levels")):
    arguments = '{"a": ' + "[" * (depth - 1) + "]" * (depth - 1) + "}"
    call = {"id": "1", "type": "function", "function": {"name": "set", "arguments": arguments}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    answer = {"role": "tool", "tool_call_id": "1", "content": "3"}
    given = dict(messages=[*MESSAGES, said, answer])
    if not words:
      assert ask(tmp_path, DEEPSEEK, "Done.", **given)[0].message.content == "Done."
      continue
    with pytest.raises(openai.BadRequestError, match=words) as caught:
      ask(tmp_path, DEEPSEEK, "Done.", **given)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("arguments, is_read", [("null", True), ("[1]", False), ("7", False)])
def test_arguments_are_an_object(tmp_path, arguments, is_read):
  call = {"id": "1", "type": "function", "function": {"name": "set", "arguments": arguments}}
  said = {"role": "assistant", "content": "", "tool_calls": [call]}
  messages = [*MESSAGES, said, {"role": "tool", "tool_call_id": "1", "content": "3"}]
  if is_read:
    assert ask(tmp_path, DEEPSEEK, "Done.", messages=messages)[0].message.content == "Done."
    return
  with pytest.raises(openai.BadRequestError, match="must be a JSON object"):
    ask(tmp_path, DEEPSEEK, "Done.", messages=messages)


def test_an_answer_with_a_call_that_the_limit_cut_is_recorded_as_cut():
  texts = Texts(None, lambda *given: [5])
  asked = chat_request({"messages": MESSAGES, "tools": SET_TOOLS}, LIMITS, texts)
  text = '<tool_call>\n{"name": "set", "arguments": {"n": 1}}\n</tool_call> and then'
  for finish in ("length", "stop"):
    choice = AnswerChoice(0, asked, lambda ids: text if ids else "", format_for(""))
    choice.add(AnswerPart([5], [-0.5], 1, finish))
    choice.take_text()
    assert choice.finish == "tool_calls"  # as clients expect
    assert choice.trace().finish == finish and len(choice.trace().calls) == 1
