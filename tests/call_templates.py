"""Chat templates that show tools and write calls as families do, and tokenizers for them."""

from grpo_jax.data.tokenizers import tokenizer
from tests import small_qwen

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
{%- endfor %}{{ '<|im_end|>' }}
{%- for answer in messages if m.tool_calls and answer.role == 'tool' %}
{%- for call in m.tool_calls if call.id == answer.tool_call_id %}
{{- 'response:' + call.function.name + '{' + answer.content + '}' }}{% endfor %}{% endfor %}
{%- endfor %}
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
# Written after Mistral's, which shows tools before the last message of the user.
BEFORE_LAST_USER = """{% for m in messages %}
{%- set users = messages | selectattr("role", "equalto", "user") | list %}
{%- if tools and m == users[-1] %}
{{- "tools" }}{% for tool in tools %}{{ " " + tool.function.name }}{% endfor %}{% endif %}
{{- m.content }}{% if m.role == "assistant" %}{{ "<|im_end|>" }}{% endif %}{% endfor %}"""
SHOWS = "{% if tools %}{{ tools | tojson }}{% endif %}"
SHOWS += "{% for m in messages %}{{ m.content + '<|im_end|>' }}{% endfor %}"
SPECIAL = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|start|>", "<|channel|>", "<|constrain|>")
SPECIAL += ("<|message|>", "<|end|>", "<|call|>", "<tool_call>", "</tool_call>")


def tokens_for(folder, template, corpus="Set it. user assistant"):
  """A tokenizer with this chat template, in which the marks of calls are special tokens."""
  engine = small_qwen.trained_tokenizer([corpus])
  engine.add_special_tokens([*SPECIAL])
  small_qwen.write_tokenizer(folder, engine)
  (folder / "chat_template.jinja").write_text(template)
  return tokenizer.load(folder)
