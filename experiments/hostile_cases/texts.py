# ruff: noqa: E501  (a row is a line)
"""Tokenizers and chat templates."""

from typing import Any

from hostile_cases.case import (
  Case,
  edit_json,
  write,
)  # fmt: skip

FILE, CONFIG = "model/tokenizer.json", "model/tokenizer_config.json"
SPECIAL, GENERATION = "model/special_tokens_map.json", "model/generation_config.json"


def _chat(
  name: str, template: str | bytes, *words: str, code: int | tuple[int, ...] = 2, **more: Any
) -> Case:
  """A run with data.chat and this template."""
  command = "ulimit -v 30000000; train $CHAT" + more.pop("flags", "")
  setup = (write("model/chat_template.jinja", template),)
  return Case(f"chat/{name}", command, code, words, needs="model", setup=setup, **more)


def _config_template(name: str, value: Any, *words: str, code: int = 2) -> Case:
  """A run with data.chat and this value of chat_template in tokenizer_config.json."""
  setup = (edit_json(CONFIG, chat_template=value),)
  return Case(f"chat/{name}", "train $CHAT", code, words, needs="model", setup=setup)


PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
SYSTEM = " --config.data.system=1"
TEMPLATES = [
  _chat("syntax error", "{% for m in %}", "chat_template.jinja"),
  _chat("empty", "", "prompt"),
  _chat("raises megabytes", "{{ raise_exception('no' * 1000000) }}", "chat_template.jinja"),
  _chat("changes the messages", "{{ messages.append(1) }}", "chat_template.jinja"),
  _chat("extends a file", "{% extends 'x' %}", "chat_template.jinja"),
  _chat("deep brackets", "{{ " + "(" * 50_000 + ")" * 50_000 + " }}", "chat_template.jinja"),
  _chat("bad date", "{{ strftime_now(3) }}", "chat_template.jinja"),
  _config_template("a number", 3, "chat"),
]  # fmt: skip

CASES = [*TEMPLATES]
