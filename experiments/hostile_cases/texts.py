# ruff: noqa: E501  (a row is a line)
"""Tokenizers and chat templates."""

import json
from typing import Any

from hostile_cases.case import (
  Case,
  Step,
  cut,
  edit_json,
  fifo,
  flip,
  link,
  make_folder,
  remove,
  write,
)  # fmt: skip

FILE, CONFIG = "model/tokenizer.json", "model/tokenizer_config.json"
SPECIAL, GENERATION = "model/special_tokens_map.json", "model/generation_config.json"


def _tokens(
  name: str,
  steps: Step | tuple[Step, ...],
  *words: str,
  code: int | tuple[int, ...] = 2,
  **more: Any,
) -> Case:
  """A run from the model of the fixture, whose tokenizer is changed."""
  setup = steps if isinstance(steps, tuple) else (steps,)
  return Case(
    f"tokenizer/{name}",
    more.pop("command", "train $MODEL"),
    code,
    words,
    needs="model",
    setup=setup,
    **more,
  )


def _part(name: str, *words: str, code: int | tuple[int, ...] = 2, **changes: Any) -> Case:
  """tokenizer.json with other parts."""
  return _tokens(name, edit_json(FILE, **changes), *words, code=code)


def _vocab(name: str, old: str, new: str, *words: str, code: int | tuple[int, ...] = 2) -> Case:
  def step(folder: Any) -> None:
    values = json.loads((folder / FILE).read_text())
    text = json.dumps(values)
    assert old in text
    (folder / FILE).write_text(text.replace(old, new, 1))

  return _tokens(name, step, *words, code=code)


def _no_eos() -> tuple[Step, ...]:
  return (
    edit_json(CONFIG, eos_token=...), edit_json(SPECIAL, eos_token=...),
    edit_json("model/config.json", eos_token_id=None),
    lambda folder: (folder / GENERATION).unlink(missing_ok=True),
  )  # fmt: skip


TOKENIZERS = [
  _tokens("missing", remove(FILE), "tokenizer"),
  _tokens("cut off", cut(FILE), "tokenizer.json"),
  _tokens("empty", write(FILE, ""), "tokenizer.json"),
  _tokens("a list", write(FILE, "[]"), "tokenizer.json"),
  _tokens("null", write(FILE, "null"), "tokenizer.json"),
  _tokens("an empty object", write(FILE, "{}"), "tokenizer.json"),
  _tokens("binary", write(FILE, bytes(range(256))), "tokenizer.json"),
  _tokens("utf-16", write(FILE, "{}".encode("utf-16")), "tokenizer.json"),
  _tokens("deep lists", write(FILE, '{"a":' + "[" * 99_999 + "]" * 99_999 + "}"), "tokenizer.json"),
  _tokens("a folder", make_folder(FILE), "tokenizer"),
  _tokens("a fifo", fifo(FILE), "tokenizer", limit=40),
  _tokens("links to itself", link(FILE, "tokenizer.json"), "tokenizer"),
  _tokens("a flipped byte", flip(FILE, 0.9), code=(0, 2)),
  _part("model unknown", "tokenizer.json", model={"type": "Magic", "vocab": {}}),
  _part("model a number", "tokenizer.json", model=3),
  _part("no vocabulary", "tokenizer.json", model={"type": "WordLevel", "vocab": {}, "unk_token": "x"}, added_tokens=[]),
  _part("merges of missing pieces", "tokenizer.json", model={"type": "BPE", "vocab": {"a": 0}, "merges": ["b c"]}),
  _part("merges of numbers", "tokenizer.json", model={"type": "BPE", "vocab": {"a": 0}, "merges": [[1, 2]]}),
  _part("added tokens a text", "tokenizer.json", added_tokens="x"),
  _part("added token without an id", "tokenizer.json", added_tokens=[{"content": "x"}]),
  _part("normalizer a text", "tokenizer.json", normalizer="NFC"),
  _part("normalizer of a bad pattern", "tokenizer.json", normalizer={"type": "Replace", "pattern": {"Regex": "("}, "content": ""}),
  _part("decoder unknown", "tokenizer.json", decoder={"type": "Magic"}),
  _part("pre-tokenizer without a type", "tokenizer.json", pre_tokenizer={"pretokenizers": []}),
  _part("truncation to one token", "finished", code=0, truncation={"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}),
  _part("normalizer removes all", "data.prompt", normalizer={"type": "Replace", "pattern": {"Regex": "."}, "content": ""}),
  _vocab("negative id", '"9": 14', '"9": -14', "tokenizer.json"),
  _vocab("id beyond the model", '"9": 14', '"9": 5000', "5001 ids do not fit"),
  _vocab("id beyond int32", '"9": 14', '"9": 99999999999', "tokenizer.json"),
  _vocab("id twice", '"9": 14', '"9": 13', code=(0, 2)),
  _vocab("a digit is missing", '"9": 14', '"x": 14', "'9'"),
  _tokens("config is no json", write(CONFIG, "{"), "tokenizer_config.json"),
  _tokens("config is a list", write(CONFIG, "[]"), "tokenizer_config.json"),
  _tokens("config is a number", write(CONFIG, "3"), "tokenizer_config.json"),
  _tokens("config is binary", write(CONFIG, bytes(range(128, 256))), "tokenizer_config.json"),
  _tokens("special tokens are a list", write(SPECIAL, "[]"), "special_tokens_map.json"),
  _tokens("special tokens are null", write(SPECIAL, "null"), "special_tokens_map.json"),
  _tokens("end token is a number", edit_json(CONFIG, eos_token=3), code=(0, 2)),
  _tokens("end token without content", edit_json(CONFIG, eos_token={"id": 1}), "tokenizer_config.json"),
  _tokens("end token is unknown", edit_json(CONFIG, eos_token="<nothing>"), code=(0, 2)),
  _tokens("generation ids of texts", write(GENERATION, '{"eos_token_id": ["a"]}'), "eos_token_id"),
  _tokens("generation ids of lists", write(GENERATION, '{"eos_token_id": [[1]]}'), "eos_token_id"),
  _tokens("generation id beyond", write(GENERATION, '{"eos_token_id": 99999}'), "eos_token_id"),
  _tokens("no end token", _no_eos(), code=(0, 2)),
  _tokens("no end token to teach", _no_eos(), "end", command="train $MODEL --config.warm_start.steps=1 --config.warm_start.batch=4"),
  Case("tokenizer/no such folder", "train $RUN --config.data.tokenizer=nothing", 2, ("data.tokenizer",)),
  Case("tokenizer/of another kind", "train $RUN --config.data.tokenizer=tiny.py", 2, ("data.tokenizer",)),
  Case("tokenizer/an empty folder", "train $RUN --config.data.tokenizer=tmp", 2, ("tokenizer.json",)),
  Case("tokenizer/name without a network", "train $RUN --config.data.tokenizer=Qwen/Qwen2.5-0.5B", 2, ("data.tokenizer",)),
  Case("tokenizer/empty tokenizer.model", "train $RUN --config.data.tokenizer=t", 2, ("tokenizer.model",), files={"t/tokenizer.model": ""}),
  Case("tokenizer/binary tokenizer.model", "train $RUN --config.data.tokenizer=t", 2, ("tokenizer.model",), files={"t/tokenizer.model": bytes(range(256)) * 9}),
  Case("tokenizer/cut tokenizer.model", "train $RUN --config.data.tokenizer=sentencepiece", 2, ("tokenizer.model",), needs="sentencepiece", setup=(cut("sentencepiece/tokenizer.model"),)),
  Case("tokenizer/added tokens a list", "train $RUN --config.data.tokenizer=sentencepiece", 2, ("added_tokens.json",), needs="sentencepiece", setup=(write("sentencepiece/added_tokens.json", "[1]"),)),
  Case("tokenizer/added ids are texts", "train $RUN --config.data.tokenizer=sentencepiece", 2, ("added_tokens",), needs="sentencepiece", setup=(write("sentencepiece/added_tokens.json", '{"<x>": "y"}'),)),
  Case("tokenizer/sentencepiece on random weights", "train $RUN --config.data.tokenizer=sentencepiece", 0, ("finished",), needs="sentencepiece"),
  Case("tokenizer/larger than the model", "train $MODEL --config.data.tokenizer=bpe", 2, ("do not fit",), needs="model bpe"),
  Case("tokenizer/of bytes on random weights", "train $RUN --config.data.tokenizer=bpe", 0, ("finished",), needs="bpe"),
]  # fmt: skip


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
  _chat("plain", PLAIN, "finished", code=0),
  _chat("syntax error", "{% for m in %}", "chat_template.jinja"),
  _chat("unclosed", "{{ messages", "chat_template.jinja"),
  _chat("unknown tag", "{% teleport %}", "chat_template.jinja", "teleport"),
  _chat("unknown filter", "{{ messages | teleport }}", "chat_template.jinja", "teleport"),
  _chat("empty", "", "prompt"),
  _chat("only spaces", "   ", code=(0, 2)),
  _chat("not utf-8", b"\xff\xfe{{ messages }}", "chat_template.jinja"),
  _chat("utf-16", PLAIN.encode("utf-16"), "chat_template.jinja"),
  _chat("utf-8 with a mark", b"\xef\xbb\xbf" + PLAIN.encode(), code=(0, 2)),
  _chat("raises", "{{ raise_exception('no\\nway') }}", "chat_template.jinja", "no way"),
  _chat("raises megabytes", "{{ raise_exception('no' * 1000000) }}", "chat_template.jinja"),
  _chat("divides by zero", "{{ 1 / 0 }}", "chat_template.jinja", "ZeroDivisionError"),
  _chat("message that is missing", "{{ messages[5].content }}", "chat_template.jinja"),
  _chat("class of a text", "{{ ''.__class__.__mro__ }}", "chat_template.jinja"),
  _chat("globals of a function", "{{ raise_exception.__globals__ }}", "prompt"),
  _chat("changes the messages", "{{ messages.append(1) }}", "chat_template.jinja"),
  _chat("changes a message", "{{ messages[0].update(content='x') }}", "chat_template.jinja"),
  _chat("includes a file", "{% include '/etc/passwd' %}", "chat_template.jinja"),
  _chat("imports a file", "{% import 'tiny.py' as t %}", "chat_template.jinja"),
  _chat("extends a file", "{% extends 'x' %}", "chat_template.jinja"),
  _chat("long range", "{% for i in range(10 ** 9) %}x{% endfor %}", "chat_template.jinja"),
  _chat("long text", "{{ '1' * 10 ** 11 }}", "chat_template.jinja"),
  _chat("long power", "{{ 9 ** (9 ** 9) }}", "chat_template.jinja", limit=60),
  _chat("long padding", "{{ '1'.center(10 ** 11) }}", "chat_template.jinja"),
  _chat("long format", "{{ '%0999999999d' | format(1) }}", "chat_template.jinja", limit=60),
  _chat("doubles a text", "{% set ns = namespace(x='1') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}", "chat_template.jinja", limit=60),
  _chat("endless recursion", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "chat_template.jinja"),
  _chat("deep nesting", "{% if 1 %}" * 5000 + "{% endif %}" * 5000, "chat_template.jinja"),
  _chat("deep brackets", "{{ " + "(" * 50_000 + ")" * 50_000 + " }}", "chat_template.jinja"),
  _chat("other characters", "<|user|>" + PLAIN, "not in the vocabulary"),
  _chat("escape sequences", "\x1b[2J" + PLAIN, "not in the vocabulary", absent=("\x1b",)),
  _chat("ignores the messages", "1+1=", "finished", code=0),
  _chat("only a special token", "{{ eos_token }}", "finished", code=0),
  _chat("refuses a system message", "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN, "no system", flags=SYSTEM),
  _chat("drops the system message", "{{ messages[-1].content }}", "finished", code=0, flags=SYSTEM),
  _chat("breaks out", "{% for m in messages %}{{ m.content }}{% break %}{% endfor %}", "finished", code=0),
  _chat("bad date", "{{ strftime_now(3) }}", "chat_template.jinja"),
  _chat("date of a surrogate", "{{ strftime_now('\\ud800') }}", code=2),
  _chat("tools", "{{ tools | length }}", "chat_template.jinja"),
  _chat("json of what is missing", "{{ nothing | tojson }}", "chat_template.jinja"),
  _chat("a field of lists", PLAIN, "data.prompt", flags=" --config.data.prompt='{solution[0]}{answer.x}'"),
  _config_template("a number", 3, "chat"),
  _config_template("an object", {"a": "b"}, "chat"),
  _config_template("a list of texts", ["a"], "chat"),
  _config_template("a list without default", [{"name": "rag", "template": "x"}], "chat template"),
  _config_template("a list without names", [{"template": "x"}], "chat"),
  _config_template("a default that is a list", [{"name": "default", "template": ["x"]}], "chat"),
  _config_template("a plain text", PLAIN, "finished", code=0),
  Case("chat/template is a folder", "train $CHAT", 2, ("chat",), needs="model", setup=(make_folder("model/chat_template.jinja"),)),
  Case("chat/sample renders", "sample --config=tiny.py --config.model.path=model --config.data.chat=True --question=1+1=",
       0, ("--- 4:",), needs="model", setup=(write("model/chat_template.jinja", PLAIN),)),
  Case("chat/sample of a raising template", "sample --config=tiny.py --config.model.path=model --config.data.chat=True --question=1",
       2, ("no way",), needs="model", setup=(write("model/chat_template.jinja", "{{ raise_exception('no way') }}"),)),
  Case("chat/template of the tokenizer's other file", "train $CHAT", 2, ("chat_template.json",), needs="model",
       setup=(write("model/chat_template.json", "{"),)),
]  # fmt: skip

CASES = [*TOKENIZERS, *TEMPLATES]
