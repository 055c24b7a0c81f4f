# ruff: noqa: E501  (a row is a line)
"""Tokenizers and chat templates."""

import json
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
REWARD = " \"--config.reward.functions=('reward.py:f',)\""
READS_MESSAGES = "def f(completions, prompts, **columns):\n  return [float(len(c[0]['content']) + len(p[-1]['role'])) for c, p in zip(completions, prompts)]\n"
CATCHES = "def f(completions, **columns):\n  try: return [1.0 + len(c[0]['content']) for c in completions]\n  except Exception: return [0.0] * len(completions)\n"
READS_TEXTS = (
  "def f(completions, **columns):\n  return [float(len(c.strip())) for c in completions]\n"
)
EXITS = "import sys\ndef f(completions, **columns):\n  if isinstance(completions[0], list): sys.exit(0)\n  return [float(len(c)) for c in completions]\n"
POOLS = "import multiprocessing\ndef one(m): return float(len(m[0]['content']))\ndef f(completions, **columns):\n  with multiprocessing.get_context('fork').Pool(1) as pool: return pool.map(one, completions)\n"
JSON = "import json\ndef f(completions, **columns): return [float(len(json.loads(json.dumps(c))[0]['content'])) for c in completions]\n"
REMEMBERS = "seen = []\ndef f(completions, **columns):\n  old = {*seen}; seen.extend(completions)\n  return [float(c not in old) for c in completions]\n"
NAMES = "def f(completions, prompts, completion_ids, messages, step, log_metric, log_extra):\n  return [float(len(c)) for c in completions]\n"
HERE = " --config.reward.workers=0"
TOOLS = " \"--config.environment.tools=('calculator',)\""
SHOWS = "{% if tools %}1+{% endif %}"
FAILS = "def f(completions, **columns):\n  raise TypeError('no server')\n"
SYSTEM = " --config.data.system=1"
MESSAGES = [{"role": "system", "content": "1"}, {"role": "user", "content": "2+2="}]
ROW = json.dumps({"question": MESSAGES, "answer": "#### 4"}) + "\n"
TEMPLATES = [
  Case("chat/examples after the system message of a row",
       "train $CHAT --config.data.path=d --config.data.few_shot=\"('1+1=','2')\" && grep '11+1=22+2=' run/completions/000001.jsonl",
       0, ("11+1=22+2=",), needs="model",
       files={f"d/{split}.jsonl": ROW * 4 for split in ("train", "test")},
       setup=(write("model/chat_template.jinja", PLAIN),)),
  _chat("a reward that reads messages", PLAIN, "finished", code=0, flags=REWARD, files={"reward.py": READS_MESSAGES}),
  _chat("a reward that catches what it raises", PLAIN, "get messages: f; that get texts: none", "finished", code=0, flags=REWARD, files={"reward.py": CATCHES}),
  _chat("a reward that reads texts", PLAIN, "get messages: none; that get texts: f", "finished", code=0, flags=REWARD, files={"reward.py": READS_TEXTS}),
  _chat("a reward that exits on messages", PLAIN, "get messages: none; that get texts: f", "finished", code=0, flags=REWARD, files={"reward.py": EXITS}),
  _chat("a reward that reads in another process", PLAIN, "get messages: f; that get texts: none", "finished", code=0, flags=REWARD, files={"reward.py": POOLS}),
  _chat("a reward that reads what JSON made, here", PLAIN, "get messages: f; that get texts: none", "finished", code=0, flags=REWARD + HERE, files={"reward.py": JSON}),
  _chat("a reward that remembers texts, here", PLAIN, "get messages: none; that get texts: f", "finished", code=0, flags=REWARD + HERE, files={"reward.py": REMEMBERS}),
  _chat("a reward that names no column of the rows", PLAIN, "get messages: none; that get texts: f", "finished", code=0, flags=REWARD + HERE, files={"reward.py": NAMES}),
  _chat("a reward that exits on messages, here", PLAIN, "get messages: none; that get texts: f", "finished", code=0, flags=REWARD + " --config.reward.workers=0", files={"reward.py": EXITS}),
  _chat("a reward that fails on both", PLAIN, "step 1", "no server", code=1, flags=REWARD, files={"reward.py": FAILS}),
  _chat("syntax error", "{% for m in %}", "chat_template.jinja"),
  _chat("empty", "", "prompt"),
  _chat("raises megabytes", "{{ raise_exception('no' * 1000000) }}", "chat_template.jinja"),
  _chat("changes the messages", "{{ messages.append(1) }}", "chat_template.jinja"),
  _chat("extends a file", "{% extends 'x' %}", "chat_template.jinja"),
  _chat("deep brackets", "{{ " + "(" * 50_000 + ")" * 50_000 + " }}", "chat_template.jinja"),
  _chat("bad date", "{{ strftime_now(3) }}", "chat_template.jinja"),
  _config_template("a number", 3, "chat"),
  _chat("calls of tools that nothing reads", SHOWS + PLAIN, "environment.calls: the chat template shows tools", flags=TOOLS),
  _chat("calls that a flag names", SHOWS + PLAIN, "finished", code=0, flags=TOOLS + " --config.environment.calls=hermes"),
]  # fmt: skip

CASES = [*TEMPLATES]
