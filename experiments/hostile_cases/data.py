# ruff: noqa: E501  (a row is a line)
"""Data folders, and the rows in train.jsonl and test.jsonl."""

from collections.abc import Mapping
import datetime
import json
from pathlib import Path
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
  command = f"ulimit -v 30000000; train $GSM {LIMIT} {more.pop('flags', '')}"
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
  _train("mark of windows", b"\xef\xbb\xbf" + GOOD.encode(), "finished", code=0),
  _train("mark of windows alone", b"\xef\xbb\xbf\n", "train.jsonl"),
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
  _line("no content", row([{"role": "user"}]), "may be missing beside tool_calls"),
  _line("role is a number", row([{"role": 1, "content": "1"}]), "role"),
  _line("one message among numbers", row([{"role": "user", "content": "1"}, 5]), "message"),
]

MIX = "train $RUN --config.data.path='' --config.data.mixture=\"('arithmetic','countdown')\" --config.data.max_prompt_tokens=20"

# Every second question is too long, where not all are counted.
TURNS = (row("1+1=") + row("1" * 50 + "=")) * 150

MIXTURES = [
  Case(
    "data/weights that overflow",
    f"{MIX} --config.data.weights='(1e-30,1e30)'",
    2,
    ("data.weights", "closer together"),
  ),
  Case(
    "data/weights one to 1e9",
    f"{MIX} --config.data.weights='(1.0,1e9)'",
    2,
    ("data.weights", "closer together"),
  ),
  Case(
    "data/weights of nan",
    f"{MIX} --config.data.weights=\"(float('nan'),1.0)\"",
    2,
    ("data.weights",),
  ),
  Case("data/weights 3000 to one", f"{MIX} --config.data.weights='(3000.0,1.0)'", 0, ("finished",)),
  _train(
    "every second row is too long",
    TURNS,
    code=0,
    flags="--config.data.count_at_start=100",
  ),
]


def _parquet(file: str, **columns: Any) -> Step:
  """Writes a Parquet file with these columns, each a list or an array of pyarrow."""

  def step(folder: Path) -> None:
    from pyarrow import parquet, table  # an optional package

    (folder / file).parent.mkdir(exist_ok=True)
    parquet.write_table(table(columns), folder / file)

  return step


def _invalid() -> Any:
  """Six texts that are not UTF-8."""
  import pyarrow

  return pyarrow.array([b"\xff\xfe"] * 6).view(pyarrow.string())


def _json(values: list[str | None]) -> Any:
  """Six texts that Arrow calls JSON, as the package datasets stores values of mixed types."""
  import pyarrow

  return pyarrow.array(values, pyarrow.json_())


def _columns(
  name: str, flags: str, code: int, *words: str, parts: tuple[Mapping[str, Any], ...]
) -> Case:
  """A run on Parquet files with these columns. The first one is the test, too."""
  setup = [_parquet("d/test.parquet", **parts[0])]
  setup += [_parquet(f"d/train-{number}.parquet", **part) for number, part in enumerate(parts)]
  command = f"train $RUN {LIMIT} --config.data.task=columns --config.data.path=d {flags}"
  return Case(f"data/{name}", command, code, words, setup=tuple(setup))


ASKED, ANSWERS = ["1+1=", "1+2=", "2+1=", "2+2=", "3+1=", "1+3="], ["2", "3", "3", "4", "4", "4"]
SUMS: Mapping[str, Any] = {"question": ASKED, "answer": ANSWERS}
VERL = {
  "data_source": ["gsm8k", "math"] * 3,
  "reward_model": [{"style": "rule", "ground_truth": answer} for answer in ANSWERS],
  "extra_info": [{"index": index, "question": text} for index, text in enumerate(ASKED)],
}
BY_SOURCE = (
  "--config.data.prompt='{extra_info.question}' --config.data.columns="
  "\"('answer=reward_model.ground_truth','question={extra_info.question}','task=data_source')\""
  " --config.reward.functions=\"('strict','flexible')\" --config.reward.weights='(1.0,1.0)'"
)

TOOLS = "--config.environment.tools=\"('calculator',)\""

COLUMNS = [
  _columns("parquet of bytes", "", 0, parts=({**SUMS, "question": [x.encode() for x in ASKED]},)),
  _columns("parquet of images", "", 2, "row 1: image holds images", "vision tower", parts=({**SUMS, "image": [b"\xff\xd8"] * 6},)),
  _columns("parquet that is not utf-8", "", 2, "column 'answer'", "UTF-8", parts=({**SUMS, "answer": _invalid()},)),
  _columns("parquet of dates", "", 0, parts=({**SUMS, "day": [datetime.date(2020, 1, 1)] * 6},)),
  _columns("parquet parts with different columns", "", 0, "finished", parts=(SUMS, {**SUMS, "gold": ANSWERS})),
  _columns("a prompt of a column that one part lacks", "--config.data.prompt='{gold}'", 2, "row 1 has no 'gold'", parts=(SUMS, {**SUMS, "gold": ANSWERS})),
  _columns("a column that no part has", "--config.data.columns=\"('answer=gold',)\"", 2, "no row has a column 'gold'", "have question, answer", parts=(SUMS, SUMS)),
  _columns("parquet of json that is damaged", "", 2, "row 1 column 'more'", "must be JSON", parts=({**SUMS, "more": _json(["{", *"123456"][:6])},)),
  _columns("parquet of json", "", 0, "finished", parts=({**SUMS, "more": _json(['{"a": null}', "[]", "1", "null", '"x"', None])},)),
  _columns("parquet of tools that the run lacks", TOOLS, 2, "row 2: the column tools names 'search'", "environment.tools has calculator",
           parts=({**SUMS, "tools": [["calculator"], ["search"], None, [], [], []]},)),
  _columns("parquet of tools that are numbers", TOOLS, 2, "row 1: the column tools must be a list of names or schemas", parts=({**SUMS, "tools": [1] * 6},)),
  _columns("parquet of tools", TOOLS, 0, "finished", parts=({**SUMS, "tools": [["calculator"], None, [], [], [], []]},)),
  _columns("two columns for one name", "--config.data.columns=\"('answer=a','answer=b')\"", 2, "two entries for 'answer'",
           parts=({"question": ASKED, "a": ANSWERS, "b": ANSWERS},)),
  _columns("verl by data source", BY_SOURCE + " --config.reward.tasks=\"('gsm8k','math')\" --config.eval.function=rewards", 0, parts=(VERL,)),
  _columns("verl by a wrong data source", BY_SOURCE + " --config.reward.tasks=\"('gsm9k','math')\"", 2, "'gsm9k'", "gsm8k, math", parts=(VERL,)),
  _columns("reward.tasks without a task", "--config.reward.tasks=\"('gsm8k',)\"", 2, "have no field task", parts=(SUMS,)),
  _columns("an object as a prompt", "--config.data.prompt='{extra_info}'", 2, "name a field of it: {extra_info.index}", parts=(VERL,)),
]  # fmt: skip

# A row with each of these answers, or with none, after four good ones.
ODD: tuple[dict[str, Any], ...] = (
  {},
  {"answer": None},
  {"answer": ["1"]},
  {"answer": {"a": 1}},
  {"answer": True},
  {"answer": 7.0},
)
ANSWERED = [{"question": f"{i}+1=", "answer": f"{i + 1}"} for i in range(1, 5)]


def _odd(
  name: str, rows: list[dict[str, Any]], code: int, *words: str, flags: str = "", **more: Any
) -> Case:
  """A run on rows whose answers no function reads, evaluation included."""
  lines = "".join(json.dumps(one) + "\n" for one in rows)
  command = f"train $RUN {LIMIT} --config.data.task=columns --config.data.path=d --config.eval.every=1 {flags}"
  files = {f"d/{split}.jsonl": lines for split in ("train", "test")}
  return Case(f"data/{name}", command, code, words, files=files, **more)


NAMED = (
  "d/train.jsonl line 5 has no answer;",
  "line 6 has no answer;",
  "line 7 has ['1'] as answer; and 1 more",
  "finished",
)
ALL = "--config.reward.functions=\"('flexible','math','choice','cosine','reasoning_accuracy')\" --config.reward.weights='(1.0,1.0,1.0,1.0,1.0)' --config.eval.function=math --config.reward.workers=2"
UNREADABLE = [
  _odd("answers that no function reads", ANSWERED + [{"question": "1+1=", **one} for one in ODD], 0, "no reward of strict for 4 of 10 rows:", *NAMED),
  _odd("answers that no function of five reads", ANSWERED + [{"question": "1+1=", **one} for one in ODD], 0, "no reward of flexible, math, choice, cosine, reasoning_accuracy for 4 of 10 rows:", *NAMED, flags=ALL),
  _odd("answers of many rows that no function reads", ANSWERED + [{"question": "1+1=", **one} for one in ODD], 0, "no reward of strict for 4 of 10 rows that were looked at:", *NAMED, flags="--config.data.count_at_start=3"),
  _odd("answers that are all lists", [{**one, "answer": [one["answer"]]} for one in ANSWERED], 1, "no reward of strict for 4 of 4 rows", "returned no score for any completion (the first answer in the data is ['", saved=3),
]  # fmt: skip

WARM = f"train $GSM {LIMIT} --config.warm_start.steps=1 --config.warm_start.batch=4"
SOLUTIONS = [
  Case("data/solutions that fit", f"{WARM} --config.sampling.max_tokens=12", 0, ("finished",), needs="data"),
  Case("data/solutions that are all too long", f"{WARM} --config.sampling.max_tokens=2", 1, ("sampling.max_tokens", "learn nothing"), needs="data"),
]  # fmt: skip

CASES = [*FOLDERS, *FILES, *LINES, *MIXTURES, *COLUMNS, *UNREADABLE, *SOLUTIONS]
