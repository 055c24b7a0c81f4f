"""What follows a turn of the policy: the tokens are those of the template, and the turn's stay."""

import json

from call_templates import BEFORE_LAST_USER
import pytest
from small_qwen import trained_tokenizer

from grpo_jax.data.tokenizers import tokenizer as tokenizer_lib
from grpo_jax.data.tokenizers.replies import Replies
from grpo_jax.settings import ConfigError

# Written after those of the families, with what matters here.
QWEN25 = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == "tool" %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{ "<|im_start|>user" }}{% endif %}
{{- "\\n<tool_response>\\n" + m.content + "\\n</tool_response>" }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{ "<|im_end|>\\n" }}{% endif %}
{%- else %}
{{- "<|im_start|>" + m.role + "\\n" + m.content + "<|im_end|>\\n" }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}"""
# Drops the thinking of turns that are not the last.
QWEN3 = """
{%- for m in messages %}
{%- set content = m.content.split("</think>")[-1].lstrip("\\n") %}
{%- if m.role == "assistant" and loop.last %}{% set content = "<think>\\n\\n</think>" + content %}
{%- endif %}
{{- "<|im_start|>" + m.role + "\\n" + content + "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}"""
# Writes the call of an assistant in the place of its text, and wants one before a tool's answer.
LLAMA3 = """
{%- for m in messages %}
{%- if m.role == "tool" and not messages[loop.index0 - 1].tool_calls %}
{{- raise_exception("a tool answers without a call") }}{% endif %}
{{- "<|im_start|>" + ("ipython" if m.role == "tool" else m.role) + "\\n\\n" }}
{%- if m.tool_calls %}
{%- set call = m.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + "}" }}
{%- else %}{{ m.content }}{% endif %}
{{- "<|im_end|>" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n\\n" }}{% endif %}"""
# Has no mark before the assistant, ends its turns with the stop token, and takes no tools.
PLAIN = """
{%- for m in messages %}
{%- if m.role == "user" %}{{ " [INST] " + m.content + " [/INST]" }}
{%- elif m.role == "assistant" %}{{ " " + m.content + eos_token }}
{%- else %}{{ raise_exception("only user and assistant") }}{% endif %}
{%- endfor %}"""
# Writes a tool's answer only after its call, with the name that the call has.
GEMMA4 = """
{%- for m in messages if m.role != "tool" %}{{ "<|turn>" + m.role + m.content }}
{%- for call in m.tool_calls or () %}{{ "<call>" + call.function.name + "{" }}
{{- call.function.arguments | tojson + "}" }}{% endfor %}{{ "<|im_end|>" }}
{%- set calls = m.tool_calls or () %}
{%- for answer in messages if calls and answer.role == "tool" %}
{%- for call in calls if call.id == answer.tool_call_id %}
{{- "response:" + call.function.name + "{" + answer.content + "}" }}{% endfor %}{% endfor %}
{%- endfor %}"""
FORGETS = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"

USER = [{"role": "user", "content": "Wrong, try again."}]
TOOLS = [
  {"role": "tool", "name": "add", "content": "12"},
  {"role": "tool", "name": "add", "content": '{"x": [1]}'},
]
SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {}}}


def tokens_of(tmp_path, template):
  engine = trained_tokenizer(["Wrong, try again. user assistant system tool 12 {} thinking"])
  engine.save(str(tmp_path / "tokenizer.json"))
  config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": template}
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
  return tokenizer_lib.load(tmp_path)


@pytest.mark.parametrize(
  "template, messages, tools",
  [
    (QWEN25, USER, []),
    (QWEN25, TOOLS, [SCHEMA]),
    (QWEN25, [*TOOLS, *USER], [SCHEMA]),
    (PLAIN, USER, []),
    (LLAMA3, USER, []),
  ],
)
def test_a_reply_continues_the_conversation_as_the_template_does(
  template, messages, tools, tmp_path
):
  """The tokens are those of the whole conversation, rendered at once."""
  tokens = tokens_of(tmp_path, template)
  replies = Replies(tokens, True, tools)
  first = [{"role": "user", "content": "What is 5 + 7?"}]
  turn = {"role": "assistant", "content": "It is 13"}
  prompt = tokens.encode(tokens.render(first, tools=tools or None))
  own = tokens.encode_batch_after([(" " if template == PLAIN else "") + turn["content"]])[0]
  stop = tokens.stop_ids[0]
  whole = tokens.encode(tokens.render([*first, turn, *messages], tools=tools or None))
  assert [*prompt, *own, stop, *replies.ids(messages, stop)] == whole
  # A turn that a limit cut off gets its end from the reply.
  assert [*prompt, *own, *replies.ids(messages, own[-1])] == whole


def test_thinking_stays_where_the_template_drops_it(tmp_path):
  """Only what follows a turn is rendered. The template alone would change the turn itself."""
  tokens = tokens_of(tmp_path, QWEN3)
  text = tokens.decode(Replies(tokens, True).ids(USER, tokens.stop_ids[0]))
  assert text == "\nuser\nWrong, try again.\nassistant\n"
  thought = {"role": "assistant", "content": "<think>Hm.</think>It is 13"}
  whole = tokens.render([USER[0], thought, USER[0]])
  assert "Hm." not in whole and whole.endswith(
    "It is 13<|im_end|>\n<|im_start|>"
    + text[1:].replace("\nassistant", "<|im_end|>\n<|im_start|>assistant")
  )


def test_a_template_that_wants_a_call_before_a_tool_gets_one(tmp_path):
  tokens = tokens_of(tmp_path, LLAMA3)
  ids = Replies(tokens, True, [SCHEMA]).ids(TOOLS[:1], tokens.stop_ids[0])
  expected = "<|im_start|>ipython\n\n12<|im_end|><|im_start|>assistant\n\n"
  assert ids == tokens.encode_batch_after([expected])[0]


def test_a_template_that_shows_answers_only_after_calls_gets_calls_of_their_names(tmp_path):
  """Gemma 4's leaves a tool's answer out after a text, and gpt-oss's refuses it."""
  tokens = tokens_of(tmp_path, GEMMA4)
  replies = Replies(tokens, True, [SCHEMA])
  answers = [TOOLS[0], TOOLS[1] | {"name": "other"}]
  ids = replies.ids(answers, tokens.stop_ids[0])
  assert tokens.decode(ids) == 'response:add{12}response:other{{"x": [1]}}'
  with pytest.raises(ConfigError, match="eos_token_id"):
    Replies(tokens_of(tmp_path, GEMMA4.replace("<|im_end|>", "")), True, [SCHEMA]).check(["tool"])


def test_a_template_that_does_not_show_tools_is_known(tmp_path):
  for template, hides in ((QWEN25, False), (PLAIN, True)):
    tokens = tokens_of(tmp_path, template)
    assert Replies(tokens, True, [SCHEMA]).hides_tools() == hides
    assert not Replies(tokens, True).hides_tools()


def test_a_reply_shows_the_tools_of_its_conversation(tmp_path):
  """Mistral's templates write them before the last message of the user."""
  tokens = tokens_of(tmp_path, BEFORE_LAST_USER)
  schemas = [{"type": "function", "function": {"name": name}} for name in ("add", "try")]
  replies, stop = Replies(tokens, True, schemas), tokens.stop_ids[0]
  for tools, shown in ((None, "tools add try"), (schemas[1:], "tools try"), ([], "")):
    assert tokens.decode(replies.ids(USER, stop, tools)) == shown + "Wrong, try again."


def test_another_stop_token_does_not_stand_for_the_end_of_the_turn(tmp_path):
  tokens = tokens_of(tmp_path, QWEN25)
  replies, (stop, *_) = Replies(tokens, True), tokens.stop_ids
  assert replies.ids(USER, stop + 1) == [stop, *replies.ids(USER, stop)]


@pytest.mark.parametrize(
  "template, roles, words",
  [
    (PLAIN, ["tool"], "only user and assistant"),
    (FORGETS, ["user"], "leaves out what the assistant said before a message of the role user"),
  ],
)
def test_a_template_that_cannot_render_a_reply_is_refused(template, roles, words, tmp_path):
  replies = Replies(tokens_of(tmp_path, template), True)
  with pytest.raises(ConfigError, match=words):
    replies.check(roles)


def test_a_reply_of_nothing_has_no_tokens(tmp_path):
  template = "{% for m in messages %}{{ m.content }}{% endfor %}"
  replies = Replies(tokens_of(tmp_path, template), True)
  assert replies.ids([{"role": "user", "content": ""}], -1) == []


def test_without_a_chat_template_a_reply_is_its_text_without_unknown_characters():
  tokens = tokenizer_lib.characters("0123456789=")
  replies = Replies(tokens, False)
  assert tokens.decode(replies.ids([{"role": "tool", "content": "= 12"}], -1)) == "=12"
  assert replies.ids([{"role": "tool", "content": "no"}], -1) == []
