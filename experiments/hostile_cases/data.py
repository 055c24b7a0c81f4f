# ruff: noqa: E501  (a row is a line)
"""Data folders, and the rows in train.jsonl and test.jsonl."""

import json
from typing import Any

from hostile_cases.case import Case, Step, fifo, link, make_folder, mode, move, remove, write

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
  Case("data/a file", f"train $GSM {LIMIT}", 2, ("data.path",), files={"data": "x"}),
  Case("data/no test", f"train $GSM {LIMIT}", 2, ("test.jsonl",), files={"data/train.jsonl": GOOD}),
  Case("data/no train", f"train $GSM {LIMIT}", 2, ("train.jsonl",), files={"data/test.jsonl": GOOD}),
  _folder("good", 0, "finished"),
  _folder("empty folder", 2, "train.jsonl", setup=(remove("data/*"),)),
  _folder("train is a folder", 2, "train.jsonl", setup=(make_folder("data/train.jsonl"),)),
  _folder("fifo as test", 2, "test.jsonl", setup=(fifo("data/test.jsonl"),), limit=40),
  _folder("folder is a fifo", 2, "data", setup=(remove("data"), fifo("data")), limit=40),
  _folder("link to itself", 2, "train.jsonl", setup=(link("data/train.jsonl", "train.jsonl"),)),
  _folder("folder links to itself", 2, "data.path", setup=(remove("data"), link("data", "data"))),
  _folder("link to nothing", 2, "test.jsonl", setup=(link("data/test.jsonl", "nowhere"),)),
  _folder("dev null", 2, "train.jsonl is empty", setup=(link("data/train.jsonl", "/dev/null"),)),
  _folder("dev zero", 2, "train.jsonl", setup=(link("data/train.jsonl", "/dev/zero"),), limit=60),
  _folder("link to a good file", 0, "finished", setup=(move("data", "d"), link("data", "d"))),
  _folder("unreadable file", 2, "train.jsonl", setup=(mode("data/train.jsonl", 0),), as_user=True),
  _folder("unreadable folder", 2, "data", setup=(mode("data", 0),), as_user=True),
  _folder("empty test", 2, "test.jsonl is empty", setup=(write("data/test.jsonl", ""),)),
  _folder("one test row", 0, "finished", setup=(write("data/test.jsonl", row()),)),
  _folder("bad test row", 2, "test.jsonl line 2", setup=(write("data/test.jsonl", row() + "{}\n"),)),
  Case("data/of the other task", "train $RUN --config.data.path=data", 2, ("arithmetic", "data.path"), needs="data"),
  Case("data/math without a folder", "train $RUN --config.data.task=math --config.data.path=''", 2, ("data.path",)),
  Case("data/math without problems", "train $RUN --config.data.task=math --config.data.path=data", 2,
       ("train.jsonl line 1", "'problem'"), files={"data/train.jsonl": '{"answer": "1"}\n', "data/test.jsonl": GOOD}),
  Case("data/math with a number", "train $RUN --config.data.task=math --config.data.path=data", 2,
       ("train.jsonl line 1", "'answer'"), files={"data/train.jsonl": '{"problem": "1", "answer": 1}\n', "data/test.jsonl": GOOD}),
  Case("data/evaluate after it is gone", "train $GSM --config.data.max_prompt_tokens=40 && rm -r data && evaluate --workdir=run",
       2, ("data.path", "finished"), needs="data", may_change=("data/*",)),
]  # fmt: skip

FILES = [
  _train("empty", "", "train.jsonl is empty"),
  _train("only spaces", " \n\t\n\n", "train.jsonl is empty"),
  _train("utf-16", GOOD.encode("utf-16"), "train.jsonl"),
  _train("utf-32", GOOD.encode("utf-32"), "train.jsonl"),
  _train("utf-8 with a mark", b"\xef\xbb\xbf" + GOOD.encode(), code=(0, 2)),
  _train("latin-1", row("caf\xe9").encode("latin-1").replace(b"\\u00e9", b"\xe9"), "train.jsonl"),
  _train("windows lines", GOOD.replace("\n", "\r\n"), "finished", code=0),
  _train("old mac lines", GOOD.replace("\n", "\r"), "train.jsonl line 1"),
  _train("no last newline", GOOD.rstrip("\n"), "finished", code=0),
  _train("empty lines between", GOOD.replace("\n", "\n\n\n"), "finished", code=0),
  _train("last line cut off", GOOD + '{"question": "1+', "train.jsonl line 7"),
  _train("binary", bytes(range(256)) * 20, "train.jsonl"),
  _train("gzip", b"\x1f\x8b\x08\x00" + bytes(100), "train.jsonl"),
  _train("one list", json.dumps([{"question": "1", "answer": "#### 1"}]), "train.jsonl line 1"),
  _train(
    "indented", json.dumps({"question": "1", "answer": "#### 1"}, indent=2), "train.jsonl line 1"
  ),
  _train("csv", "question,answer\n1+1=,2\n", "train.jsonl line 1"),
  _train(
    "two objects in a line",
    '{"question": "1", "answer": "#### 1"} {"question": "2"}\n',
    "train.jsonl line 1",
  ),
  _train("one row", row(), "finished", code=0),
  _train("all prompts too long", row("1" * 99) * 4, "data.max_prompt_tokens"),
  _train("a line of megabytes", GOOD + row("1" * 5_000_000), "finished", "longer than", code=0),
  _train(
    "an answer of megabytes", GOOD + row(answer="1" * 5_000_000 + "#### 2"), "finished", code=0
  ),
  _train("many empty lines", "\n" * 1_000_000 + GOOD, "finished", code=0),
]

LINES = [
  _line("not json", "{question: 1}"),
  _line("single quotes", "{'question': '1', 'answer': '#### 1'}"),
  _line("trailing comma", '{"question": "1", "answer": "#### 1",}'),
  _line("comment", '// {"question": "1"}'),
  _line("null byte", '{"question": "1\x00", "answer": "#### 1"}'),
  _line("raw tab in a text", '{"question": "1\t", "answer": "#### 1"}'),
  _line("null", "null"),
  _line("a number", "17"),
  _line("a text", '"question"'),
  _line("nan", "NaN"),
  _line("empty object", "{}", "'question'"),
  _line("no answer", '{"question": "1"}', "'answer'"),
  _line("question is null", row(None), "'question'"),
  _line("question is a number", row(5), "'question'"),
  _line("question is true", row(True), "'question'"),
  _line("question is an object", row({"text": "1"}), "'question'"),
  _line("answer is a number", row(answer=2), "'answer'"),
  _line("answer is nan", '{"question": "1", "answer": NaN}', "'answer'"),
  _line("answer is a list", row(answer=["#### 2"]), "'answer'"),
  _line("capital keys", '{"Question": "1", "Answer": "#### 1"}', "'question'"),
  _line("key with a space", '{"question ": "1", "answer": "#### 1"}', "'question'"),
  _line("no anchor", row(answer="2"), "####"),
  _line("three signs", row(answer="### 2"), "####"),
  _line("nothing after the anchor", row(answer="1+1=2 ####"), "####"),
  _line("only spaces after the anchor", row(answer="####   "), "####"),
  _line("words after the anchor", row(answer="#### two"), code=(0, 2)),
  _line("empty answer", row(answer=""), "####"),
  _train("empty question", GOOD + row("") + GOOD, "prompt"),
  _line("question of spaces", row("   "), code=(0, 2)),
  _line("empty conversation", row([]), "conversation"),
  _line("conversation of texts", row(["1+1="]), "message"),
  _line("message without a role", row([{"content": "1"}]), "role"),
  _line("message without content", row([{"role": "user"}]), "content"),
  _line("role is a number", row([{"role": 1, "content": "1"}]), "role"),
  _line("content is null", row([{"role": "user", "content": None}]), "content"),
  _line(
    "content is a list",
    row([{"role": "user", "content": [{"type": "text", "text": "1"}]}]),
    "content",
  ),
  _line("one message among numbers", row([{"role": "user", "content": "1"}, 5]), "message"),
  _line(
    "conversation without chat", row([{"role": "user", "content": "1"}]), "data.chat", code=(2,)
  ),
  _line("key twice", '{"question": "1", "question": "2", "answer": "#### 1"}', code=(0, 2)),
  _line(
    "other fields",
    row(prompts=1, completions=[], completion_ids={}, messages=None, solution=3),
    "finished",
    code=0,
  ),
  _line(
    "surrogate in another field",
    '{"question": "1", "answer": "#### 1", "note": "\\ud800"}',
    code=(0, 2),
  ),
  _line("surrogate in the answer", '{"question": "1", "answer": "\\ud83d#### 1"}'),
  _line(
    "long integer in another field",
    '{"question": "1", "answer": "#### 1", "n": ' + "9" * 10_000 + "}",
    code=(0, 2),
  ),
  _line("huge exponent", '{"question": "1", "answer": "#### 1", "n": 1e999999999}', code=(0, 2)),
  _line(
    "deep lists in another field",
    '{"question": "1", "answer": "#### 1", "n": ' + "[" * 99_999 + "]" * 99_999 + "}",
  ),
  _line("deep objects", '{"a":' * 50_000 + "1" + "}" * 50_000),
  _line("answer of digits", row(answer="#### " + "9" * 100_000), "finished", code=0),
  _line("answer with signs", row(answer="#### -1,234.50"), "finished", code=0),
  _line("answer of other digits", row(answer="#### ٣"), code=(0, 2)),
  _line("answer nan", row(answer="#### nan"), code=(0, 2)),
  _line("anchor twice", row(answer="#### 1 #### 2"), "finished", code=0),
  _line("line separators", row("1\u2028+\u2029\x85="), "finished", code=0),
  _line(
    "escape sequences", row("\x1b[2J\x1b]0;x\x07"), "finished", code=0, absent=("\x1b[2J", "\x07")
  ),
  _line("right to left", row("‮1+1="), "finished", code=0),
  _line("emoji of many parts", row("👩‍👩‍👧‍👦"), "finished", code=0),
  _line("special tokens", row("<eos><pad>1"), "finished", code=0),
  _line("markup", row("[bold red]1[/bold red][/]"), "finished", code=0),
  _line("braces", row("{question}{0}{"), "finished", code=0),
  _line(
    "two thousand kinds of signs",
    row("".join(map(chr, range(0x4E00, 0x4E00 + 2000)))),
    "finished",
    code=0,
  ),
]

WARM = f"train $GSM {LIMIT} --config.warm_start.steps=1 --config.warm_start.batch=4"
STARTS = [
  Case("data/warm start of long solutions", WARM, (0, 2), ("warm_start", "solution"), files={
    "data/train.jsonl": row(answer="1" * 99 + "#### 2") * 6, "data/test.jsonl": GOOD}),
  Case("data/warm start of the anchor", WARM, 0, ("finished",), files={
    "data/train.jsonl": GOOD, "data/test.jsonl": GOOD}),
]  # fmt: skip

CASES = [*FOLDERS, *FILES, *LINES, *STARTS]
