"""Calls of tools through the endpoint: read as the family writes them, typed by the request."""

import json

import openai
import pytest

from grpo_jax.data.tokenizers import tokenizer
from tests import small_qwen
from tests.serving_parts import Scripted, serving

MESSAGES = [{"role": "user", "content": "How many pens?"}]
# Written after those of the families, with what matters here. Each shows a tool and writes calls.
QWEN35 = """{% if tools %}{{ tools[0].function.name }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for call in m.tool_calls or () %}{{ '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, value in call.function.arguments.items() %}
{{- '<parameter=' + name + '>\\n' + value | string + '\\n</parameter>\\n' }}{% endfor %}
{{- '</function>\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
GEMMA4 = """{% if tools %}{{ '<|tool>' + tools[0].function.name + '<tool|>' }}{% endif %}
{%- for m in messages if m.role != 'tool' %}{{ '<|turn>' + m.role + '\\n' + m.content }}
{%- for call in m.tool_calls or () %}{{ '<|tool_call>call:' + call.function.name + '{' }}
{%- for name, value in call.function.arguments.items() %}
{{- name + ':<|"|>' + value | string + '<|"|>' }}{% endfor %}{{ '}<tool_call|>' }}
{%- endfor %}{{ '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|turn>model\\n' }}{% endif %}"""
GPT_OSS = """{% if tools %}{{ 'type ' + tools[0].function.name }}{% endif %}
{%- for m in messages %}{% if m.tool_calls %}
{{- '<|start|>assistant to=functions.' + m.tool_calls[0].function.name + '<|channel|>commentary ' }}
{{- 'json<|message|>' + m.tool_calls[0].function.arguments | tojson + '<|call|>' }}{% else %}
{{- '<|start|>' + m.role + '<|channel|>final<|message|>' + m.content + '<|im_end|>' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
DEEPSEEK = """{% if tools %}{{ tools[0].function.name }}{% endif %}
{%- for m in messages %}{{ '<｜' + m.role + '｜>' + m.content }}{% for call in m.tool_calls or () %}
{{- '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name }}
{{- '\\n```json\\n' + call.function.arguments + '\\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>' }}
{%- endfor %}{{ '<|im_end|>' }}{% endfor %}"""
SHOWS = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[0].content }}"
SPECIAL = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|start|>", "<|channel|>", "<|constrain|>")
SPECIAL += ("<|message|>", "<|end|>", "<|call|>")
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


def tokens_for(folder, template):
  """A tokenizer with this chat template, in which the marks of calls are special tokens."""
  engine = small_qwen.trained_tokenizer(["Set it. user assistant"])
  engine.add_special_tokens([*SPECIAL])
  small_qwen.write_tokenizer(folder, engine)
  (folder / "chat_template.jinja").write_text(template)
  return tokenizer.load(folder)


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
