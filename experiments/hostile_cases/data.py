# ruff: noqa: E501  (a row is a line)
"""Data folders, and the rows in train.jsonl and test.jsonl."""

import json
from typing import Any

from hostile_cases.case import Case, Step, fifo, link, mode, write

LIMIT = "--config.data.max_prompt_tokens=40"


def row(question: Any = "1+1=", answer: Any = "#### 2", **fields: Any) -> str:
  """A line of train.jsonl."""
  return json.dumps({"question": question, "answer": answer, **fields}) + "\n"


GOOD = row() * 6


def _folder(
  name: str, code: int | tuple[int, ...], *words: str, setup: tuple[Step, ...] = (), **more: Any
) -> Case:
  """The data of the fixture, changed by the steps."""
  return Case(f"data/{name}", f"train $GSM {LIMIT}", code, words, needs="data", setup=setup, **more)


def _train(
  name: str, content: str | bytes, *words: str, code: int | tuple[int, ...] = 2, **more: Any
) -> Case:
  """train.jsonl with this content, and a good test.jsonl."""
  command = f"ulimit -v 30000000; train $GSM {LIMIT}"
  files = {"data/train.jsonl": content, "data/test.jsonl": GOOD}
  return Case(f"data/{name}", command, code, words, files=files, **more)


def _line(name: str, line: str, *words: str, code: int | tuple[int, ...] = 2, **more: Any) -> Case:
  """A bad line in the middle of good ones."""
  where = ("train.jsonl line 7",) if code == 2 else ()
  return _train(name, GOOD + line.rstrip("\n") + "\n" + GOOD, *where, *words, code=code, **more)


FOLDERS = [
  Case("data/no folder", f"train $GSM {LIMIT}", 2, ("data.path", "data/train.jsonl")),
  Case("data/no train", f"train $GSM {LIMIT}", 2, ("train.jsonl",), files={"data/test.jsonl": GOOD}),
  _folder("fifo as test", 2, "test.jsonl", setup=(fifo("data/test.jsonl"),), limit=40),
  _folder("link to nothing", 2, "test.jsonl", setup=(link("data/test.jsonl", "nowhere"),)),
  _folder("unreadable file", 2, "train.jsonl", setup=(mode("data/train.jsonl", 0),), as_user=True),
  _folder("bad test row", 2, "test.jsonl line 2", setup=(write("data/test.jsonl", row() + "{}\n"),)),
  Case("data/math with a number", "train $RUN --config.data.task=math --config.data.path=data", 2,
       ("train.jsonl line 1", "'answer'"), files={"data/train.jsonl": '{"problem": "1", "answer": 1}\n', "data/test.jsonl": GOOD}),
]  # fmt: skip

FILES = [
  _train("only spaces", " \n\t\n\n", "train.jsonl is empty"),
  _train("latin-1", row("caf\xe9").encode("latin-1").replace(b"\\u00e9", b"\xe9"), "train.jsonl"),
  _train("gzip", b"\x1f\x8b\x08\x00" + bytes(100), "train.jsonl"),
  _train("csv", "question,answer\n1+1=,2\n", "train.jsonl line 1"),
]

LINES = [
  _line("single quotes", "{'question': '1', 'answer': '#### 1'}"),
  _line("null byte", '{"question": "1\x00", "answer": "#### 1"}'),
  _line("a number", "17"),
  _line("no answer", '{"question": "1"}', "'answer'"),
  _line("question is true", row(True), "'question'"),
  _line("answer is nan", '{"question": "1", "answer": NaN}', "'answer'"),
  _line("no anchor", row(answer="2"), "####"),
  _line("empty conversation", row([]), "conversation"),
  _line("role is a number", row([{"role": 1, "content": "1"}]), "role"),
  _line("one message among numbers", row([{"role": "user", "content": "1"}, 5]), "message"),
]

WARM = f"train $GSM {LIMIT} --config.warm_start.steps=1 --config.warm_start.batch=4"

CASES = [*FOLDERS, *FILES, *LINES]
