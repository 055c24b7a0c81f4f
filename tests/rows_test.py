"""Rows of large files: what is indexed equals what is read whole, and bad rows are named."""

import dataclasses
import datetime
import errno
import json
import os
from pathlib import Path
import shutil

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
from small_qwen import trained_tokenizer

from grpo_jax import read_metrics, train
from grpo_jax.config import Data, from_dict
from grpo_jax.data import loader
from grpo_jax.data.files import rows
from grpo_jax.data.files.parquet import Parquet
from grpo_jax.data.files.splits import hold_out
from grpo_jax.data.prompts import OneProcess, PromptSet
from grpo_jax.data.tasks import examples, tasks
from grpo_jax.data.tokenizers import tokenizer
from grpo_jax.model.huggingface import folders
from grpo_jax.scoring.scorers import Scorers
from grpo_jax.settings import LARGEST_INT, ConfigError, RunFailed
from tests.small_run import small_config, small_run, with_section

LINES = st.lists(
  st.one_of(
    st.just(""),
    st.just(" \t"),
    st.just("\r"),
    st.builds(json.dumps, st.dictionaries(st.text(max_size=3), st.text(max_size=9), max_size=2)),
    st.builds(lambda text: f' {{"ä\u2028": {json.dumps(text, ensure_ascii=False)}}} \r', st.text()),
  ),
  max_size=12,
)
GOLDEN = Path(__file__).parent / "golden"
TOKENIZER = tokenizer.characters("abcdefghijklmnopqrstuvwxyz0123456789 ")


def write(path, values):
  """Writes a jsonl file."""
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("".join(json.dumps(value) + "\n" for value in values))
  return path


def questions(count, longest=6):
  """Rows in the layout of MATH, some with a longer question than others."""
  return [{"problem": "a" * (1 + i % longest), "answer": str(i)} for i in range(count)]


def prompts_of(split, **changes):
  """Prompts with data.count_at_start=10."""
  data = Data(max_prompt_tokens=4, count_at_start=10)
  return PromptSet(split, TOKENIZER, dataclasses.replace(data, **changes))


@given(LINES, st.booleans(), st.integers(1, 40))
@settings(max_examples=80)
def test_the_index_finds_what_reading_the_whole_file_finds(tmp_path_factory, lines, ends, at_once):
  path = tmp_path_factory.mktemp("rows") / "train.jsonl"
  path.write_bytes(("\n".join(lines) + "\n" * ends).encode("utf-8", "surrogatepass"))
  expected = [(i, json.loads(line)) for i, line in enumerate(lines, 1) if line.strip()]
  before, rows._AT_ONCE = rows._AT_ONCE, at_once  # lines that lie across parts of a file
  try:
    found = rows.JsonLines(path)
  finally:
    rows._AT_ONCE = before
  assert [found[i] for i in range(len(found))] == [value for _, value in expected]
  assert [found.where(i) for i in range(len(found))] == [f"{path} line {i}" for i, _ in expected]


KEYS = st.sampled_from(["a", "b", "question", "a question", 'a"b', "a\\", "é", "\u2028", ":", '":'])
VALUES = st.recursive(
  st.one_of(st.none(), st.integers(), KEYS, st.sampled_from(['"b": 1', '\\"a\\":'])),
  lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(KEYS, inner, max_size=2)),
  max_leaves=4,
)


@given(
  st.lists(st.dictionaries(KEYS, VALUES, max_size=3), min_size=1, max_size=9),
  st.sampled_from([(",", ":"), (", ", " : "), (",", "\t:"), (",", "  :")]),
  st.booleans(),
  st.integers(1, 60),
)
@settings(max_examples=300)
def test_the_columns_are_those_of_all_rows(tmp_path_factory, values, separators, ascii, at_once):
  """Keys inside other values, and texts that look like keys, are no columns."""
  path = tmp_path_factory.mktemp("rows") / "train.jsonl"
  lines = [json.dumps(x, ensure_ascii=ascii, separators=separators) for x in values]
  path.write_text("\n".join(lines), encoding="utf-8")
  found = rows.JsonLines(path)
  before, rows._AT_ONCE = rows._AT_ONCE, at_once
  try:
    columns = found.columns()
  finally:
    rows._AT_ONCE = before
  assert columns == list(dict.fromkeys(name for value in values for name in value))


def test_only_parts_with_other_columns_are_parsed(tmp_path, monkeypatch):
  values = [{"question": "a" * 100, "answer": i} for i in range(200)]
  values[150]["image"] = "x"
  parsed = []
  real = rows._keys
  monkeypatch.setattr(rows, "_AT_ONCE", 1300)  # ten rows
  monkeypatch.setattr(rows, "_keys", lambda line: parsed.append(line) or real(line))
  found = rows.JsonLines(write(tmp_path / "train.jsonl", values))
  assert found.columns() == ["question", "answer", "image"]
  assert len(parsed) < 30


def test_a_large_file_gives_the_batches_of_a_small_one(tmp_path):
  write(tmp_path / "train.jsonl", questions(60, longest=4))
  write(tmp_path / "test.jsonl", questions(3))
  data = Data(task="math", path=str(tmp_path), max_prompt_tokens=4)
  read, indexed = (
    PromptSet(tasks.make_task(each).train, TOKENIZER, each)
    for each in (data, dataclasses.replace(data, count_at_start=20))
  )
  assert isinstance(tasks.make_task(data).train, list)
  for step in range(5):
    indices = loader.step_indices(1, step, 16, 60)
    expected, found = (loader.prompt_batch(prompts, indices) for prompts in (read, indexed))
    np.testing.assert_array_equal(found.prompts_PS, expected.prompts_PS)
    assert found.columns == expected.columns


def test_parquet_has_the_rows_of_the_same_table(tmp_path):
  pyarrow = pytest.importorskip("pyarrow")
  from pyarrow import parquet

  values = [
    {"question": f"é{i}", "numbers": [i, 2], "share": i / 2, "kind": "ab"[i % 2]}
    for i in range(700)
  ]
  table = pyarrow.Table.from_pylist(values)
  table = table.set_column(3, "kind", table["kind"].dictionary_encode())
  parquet.write_table(table, tmp_path / "train.parquet", row_group_size=300)
  found = Parquet(tmp_path / "train.parquet")
  assert [found[i] for i in range(len(found))] == values
  assert found.where(41).endswith("train.parquet row 42")


def not_utf8():
  """A column of text that is not UTF-8, as writers that do not check leave it."""
  import pyarrow

  return pyarrow.StringArray.from_buffers(
    1, pyarrow.py_buffer(np.array([0, 2], np.int32)), pyarrow.py_buffer(b"\xff\xfe")
  )


@pytest.mark.parametrize(
  "column, words",
  [
    (lambda pyarrow: pyarrow.array(["ab".encode("utf-16")]), "holds bytes that are no text"),
    (lambda pyarrow: not_utf8(), "cannot be read .*can't decode byte 0xff"),
    (lambda pyarrow: pyarrow.StructArray.from_arrays([not_utf8()], ["x"]), "cannot be read"),
    (lambda pyarrow: pyarrow.array([2**62], pyarrow.timestamp("us")), "cannot be read"),
  ],
)
def test_a_parquet_column_that_is_no_text_is_named(tmp_path, column, words):
  pyarrow = pytest.importorskip("pyarrow")
  from pyarrow import parquet

  table = pyarrow.table({"problem": ["a"], "answer": ["1"], "more": column(pyarrow)})
  for split in ("train", "test"):
    parquet.write_table(table, tmp_path / f"{split}.parquet")
  words = f"train.parquet row 1 column 'more' {words}.*texts are in UTF-8"
  with pytest.raises(ConfigError, match=words) as error:
    tasks.make_task(Data(task="math", path=str(tmp_path)))
  assert "\n" not in str(error.value)


def test_bytes_that_are_text_are_read_as_text(tmp_path):
  pyarrow = pytest.importorskip("pyarrow")
  from pyarrow import parquet

  values = [{"problem": "é".encode(), "answer": "1", "more": [{"x": b"y"}]}]
  for split in ("train", "test"):
    parquet.write_table(pyarrow.Table.from_pylist(values), tmp_path / f"{split}.parquet")
  data = Data(task="columns", path=str(tmp_path), prompt="{problem}")
  assert tasks.make_task(data).train == [{"problem": "é", "answer": "1", "more": [{"x": "y"}]}]


def test_files_of_a_split_may_have_different_columns(tmp_path):
  pyarrow = pytest.importorskip("pyarrow")
  from pyarrow import parquet

  rows = {"train-0": {"q": "a", "answer": "1"}, "train-1": {"q": "b", "gold": "2"}}
  for name, row in {**rows, "test": rows["train-0"]}.items():
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / f"{name}.parquet")
  assert tasks.make_task(Data(task="columns", path=str(tmp_path), prompt="{q}")).train == [
    {"q": "a", "answer": "1", "gold": None},
    {"q": "b", "answer": None, "gold": "2"},
  ]


def test_files_of_a_split_are_joined_in_the_order_of_their_names(tmp_path):
  parts = [questions(7)[:3], questions(7)[3:4], questions(7)[4:]]
  for number, part in enumerate(parts):
    write(tmp_path / f"train-0{number}-of-03.jsonl", part)
  write(tmp_path / "test.jsonl", questions(1))
  task = tasks.math(str(tmp_path))
  assert [example["answer"] for example in task.train] == list("0123456")
  (tmp_path / "train-02-of-03.jsonl").write_text('{"problem": "a"}\n')
  with pytest.raises(ConfigError, match="train-02-of-03.jsonl line 1 has no text field 'answer'"):
    tasks.math(str(tmp_path)).train[4]


# Prompts of large splits.


def test_another_prompt_stands_in_for_one_that_is_too_long():
  split = [{"question": row["problem"], "answer": row["answer"]} for row in questions(6000)]
  prompts = prompts_of(split)
  assert len(prompts) == 6000 and prompts.dropped == 0
  assert abs(prompts.replaced - 2 / 6) < 0.1
  made = prompts.make(range(6000))
  short = [i for i in range(6000) if i % 6 < 4]
  assert [made[i].example for i in short] == [split[i] for i in short]
  stand_ins = [made[i].example["answer"] for i in range(6000) if i % 6 >= 4]
  assert max(len(prompt.ids) for prompt in made) == 4
  # They are always the same, whatever else is in the batch, and are spread over the others.
  alone = [prompts.make([i])[0].example["answer"] for i in (4, 5, 5999)]
  assert alone == [stand_ins[0], stand_ins[1], stand_ins[-1]]
  assert len(set(stand_ins)) > 1400 and max(map(stand_ins.count, stand_ins)) < 10
  assert stand_ins[:3] == ["230", "4129", "4302"]  # they never change


def test_a_run_of_an_earlier_version_counts_all_its_prompts():
  assert Data().count_at_start == 50_000
  assert from_dict({}, saved=True).data.count_at_start == LARGEST_INT
  split = [{"question": row["problem"]} for row in questions(60)]
  counted = prompts_of(split, count_at_start=LARGEST_INT)
  assert (len(counted), counted.dropped, counted.replaced) == (40, 20, 0)


def test_prompts_that_are_all_too_long_are_an_error_before_the_run():
  with pytest.raises(
    ConfigError, match=r"drops each of [0-9]+ drawn prompts; the shortest one has 6 tokens"
  ):
    prompts_of([{"question": "a" * 6}] * 60_000)
  with pytest.raises(ConfigError, match="drops all 600 prompts; the shortest one has 6 tokens"):
    prompts_of([{"question": "a" * 6}] * 600)


@pytest.mark.parametrize("short_of", [2, 4, 400])
def test_a_file_is_usable_whatever_the_order_of_its_rows(short_of):
  """Every second row fits, or few do. A sample in strides would see only the others."""
  split = [{"question": "a" * (2 if i % short_of == 1 else 6)} for i in range(1200)]
  prompts = prompts_of(split, count_at_start=100)
  assert prompts.replaced == pytest.approx(1 - 1 / short_of, abs=0.1)
  assert {len(prompt.ids) for prompt in prompts.make(range(12))} == {2}


def test_a_large_permutation_is_made_once():
  first = loader.step_indices(0, 0, 4, 1_000_000)
  loader._permutation.cache_clear()
  for step in range(20):
    loader.step_indices(0, step, 4, 1_000_000)
  assert loader._permutation.cache_info().misses == 1
  assert loader.step_indices(0, 0, 4, 1_000_000).tolist() == first.tolist()


# Held-out rows.


@given(st.integers(2, 3000), st.floats(0.05, 0.95))
@settings(max_examples=40)
def test_held_out_rows_are_a_stable_part(count, share):
  values = [{"question": str(i)} for i in range(count)]
  try:
    train, test = hold_out(values, share)
  except ConfigError as error:
    assert "data.held_out" in str(error) and count < 400
    return
  numbers = [[int(example["question"]) for example in split] for split in (train, test)]
  assert sorted(numbers[0] + numbers[1]) == list(range(count)) and all(numbers)
  longer = hold_out([*values, *values], share)
  assert [int(e["question"]) for e in longer[1][: len(test)]] == numbers[1]
  assert abs(len(test) / count - share) < 4 * np.sqrt(share * (1 - share) / count)


def test_which_rows_are_held_out_never_changes():
  _, test = hold_out([{"question": str(i)} for i in range(100)], 0.05)
  assert [example["question"] for example in test] == ["27", "33", "44", "50"]


@pytest.mark.parametrize("count, left", [(0, 200), (7, 7), (1000, 200)])
def test_training_takes_the_first_rows(tmp_path, count, left):
  path = write(tmp_path / "problems.jsonl", questions(200))
  task = tasks.make_task(Data(task="math", path=str(path), train_examples=count))
  everything = tasks.make_task(Data(task="math", path=str(path))).train
  assert list(task.train) == list(everything)[:left]
  assert rows.place_of(task.train, left - 1) == rows.place_of(everything, left - 1)
  assert rows.is_in_memory(task.train)


def test_the_first_rows_are_those_that_are_not_held_out(tmp_path):
  path = str(write(tmp_path / "problems.jsonl", questions(200)))
  data = Data(task="math", path=path, held_out=0.3)
  whole = tasks.make_task(data)
  few = tasks.make_task(dataclasses.replace(data, train_examples=5))
  assert list(few.train) == list(whole.train)[:5] and list(few.test) == list(whole.test)


def test_a_single_file_needs_a_held_out_part(tmp_path):
  path = str(write(tmp_path / "problems.jsonl", questions(200)))
  task = tasks.make_task(Data(task="math", path=path, held_out=0.1))
  assert len(task.train) + len(task.test) == 200 and 5 < len(task.test) < 40
  without = with_section(small_config(), "data", task="math", path=path)
  assert not len(tasks.make_task(without.data).test)  # training alone needs none
  with pytest.raises(ConfigError, match="no test split in .*problems.jsonl .*data.held_out=0.05"):
    small_run(without).prompts("test")
  with pytest.raises(ConfigError, match="no test split in .*problems.jsonl .*data.held_out=0.05"):
    tasks.make_task(Data(mixture=(f"math:{path}", "countdown")))
  with pytest.raises(ConfigError, match="data.held_out is 0.1: task arithmetic has a test split"):
    tasks.make_task(Data(held_out=0.1))


# Bad rows and files.


@pytest.mark.parametrize(
  "line, words",
  [
    (b'{"problem": "a"}', "line 32 has no text field 'answer'"),
    (b'{"problem": "a", "answer": }', "line 32 is not JSON"),
    (b'{"problem": "\xff", "answer": "1"}', "line 32 is not JSON .*utf-8"),
    (b'{"problem": "a", "answer": "\\ud800"}', "line 32 has half of a surrogate pair"),
  ],
)
def test_a_bad_row_of_a_large_file_is_named_when_it_is_read(tmp_path, line, words):
  path = write(tmp_path / "train.jsonl", questions(1000))
  lines = path.read_bytes().split(b"\n")
  path.write_bytes(b"\n".join([*lines[:31], line, *lines[31:]]))
  write(tmp_path / "test.jsonl", questions(3))
  data = Data(task="math", path=str(tmp_path), max_prompt_tokens=9, count_at_start=100)
  with pytest.raises(ConfigError, match=words):
    tasks.make_task(dataclasses.replace(data, count_at_start=1001))
  prompts = PromptSet(tasks.make_task(data).train, TOKENIZER, data)
  with pytest.raises(RunFailed, match=words) as error:
    prompts.make([29, 31])
  assert str(path) in str(error.value) and "\n" not in str(error.value)
  assert prompts.make([29])[0].example["answer"] == "29"


@pytest.mark.parametrize("line", ["[1]", '{"problem": "a", "answer": "1"', "oops", "3"])
def test_what_is_no_object_is_named_at_the_start(tmp_path, line):
  path = write(tmp_path / "train.jsonl", questions(400))
  path.write_text(f"{path.read_text()}\n{line}")
  with pytest.raises(ConfigError, match="train.jsonl line 402 is not (JSON|an object)"):
    rows.JsonLines(path)


def test_a_file_that_changes_is_named(tmp_path):
  path = write(tmp_path / "train.jsonl", questions(5))
  found = rows.JsonLines(path)
  with open(path, "a") as file:
    file.write("{}\n")
  with pytest.raises(ConfigError, match="train.jsonl was changed while it was in use"):
    found[0]


@pytest.mark.parametrize(
  "damage", [lambda b: b"", lambda b: b[:-40], lambda b: b[:4] + b"\xff" * 30 + b[34:]]
)
def test_a_damaged_parquet_file_is_named(tmp_path, damage):
  pyarrow = pytest.importorskip("pyarrow")
  from pyarrow import parquet

  path = tmp_path / "train.parquet"
  parquet.write_table(pyarrow.Table.from_pylist(questions(50)), path)
  path.write_bytes(damage(path.read_bytes()))
  with pytest.raises(ConfigError, match="train.parquet is not a whole Parquet file") as error:
    tasks.math(str(tmp_path))
  assert "\n" not in str(error.value)


def test_a_copy_without_space_is_named(tmp_path, monkeypatch):
  pyarrow = pytest.importorskip("pyarrow")
  from pyarrow import parquet

  parquet.write_table(pyarrow.Table.from_pylist(questions(50)), tmp_path / "train.parquet")

  def full(*arguments):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(pyarrow, "OSFile", full)
  with pytest.raises(ConfigError, match="No space left on device.*TMPDIR"):
    Parquet(tmp_path / "train.parquet")


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
  (tmp_path / "train.parquet").write_bytes(b"PAR1")
  monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
  with pytest.raises(
    ConfigError, match=r"needs the package pyarrow: pip install -e '\.\[parquet\]'"
  ):
    tasks.math(str(tmp_path))


# Several processes.


def test_a_process_reads_only_its_rows(tmp_path):
  write(tmp_path / "train.jsonl", questions(2000, longest=3))
  write(tmp_path / "test.jsonl", questions(3))
  read = []

  class Counted(rows.JsonLines):
    def __getitem__(self, index):
      read.append(index)
      return super().__getitem__(index)

  class Second(OneProcess):
    """The second of two processes."""

    def own_rows(self, count):
      return slice(count // 2, count)

  data = Data(task="math", path=str(tmp_path), max_prompt_tokens=4, count_at_start=10)
  split = rows.Examples(Counted(tmp_path / "train.jsonl"), examples.math)
  prompts = PromptSet(split, TOKENIZER, data, Second())
  assert len(read) < 150  # half of a sample of 256, and the first row
  read.clear()
  indices = loader.step_indices(0, 0, 16, 2000)
  loader.prompt_batch(prompts, indices, Second())
  assert read == indices[8:].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("count_at_start", [500, 5])
def test_rows_without_a_readable_answer_are_named_and_the_run_goes_on(
  tmp_path, capsys, count_at_start
):
  values = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(12)]
  values[3]["answer"], values[5]["answer"], values[7]["answer"] = None, ["6"], {"value": 8}
  del values[9]["answer"]
  for split in ("train", "test"):
    write(tmp_path / f"{split}.jsonl", values)
  config = small_config()
  data = {"task": "columns", "path": str(tmp_path), "count_at_start": count_at_start}
  config = with_section(config, "data", **data)
  config = with_section(config, "reward", functions=("flexible", "strict"), weights=(1.0, 1.0))
  config = with_section(config, "eval", function="flexible", every=3, examples=6, batch=6)
  train(dataclasses.replace(config, steps=3), tmp_path / "run")  # 12 prompts: each row once
  said = capsys.readouterr().err
  some = "" if count_at_start > 12 else " that were looked at"
  file = tmp_path / "train.jsonl"
  assert (
    f"warning: reward.functions: no reward of flexible, strict for 4 of 12 rows{some}:"
    f" {file} line 4 has no answer; {file} line 6 has ['6'] as answer;"
    f" {file} line 8 has {{'value': 8}} as answer; and 1 more" in said
  )
  assert "eval.function: no reward of flexible for 2 of 6 rows, whose completions count as" in said
  assert f"{tmp_path}/test.jsonl line 4 has no answer" in said
  metrics = [row for row in read_metrics(tmp_path / "run") if "reward" in row]
  assert sum(row["rewards/flexible/unscored"] for row in metrics) == 4 * config.batch.group_size


def test_a_source_without_the_column_is_not_named(tmp_path, capsys):
  write(tmp_path / "a" / "train.jsonl", [{"question": "1", "answer": one} for one in ("1", None)])
  write(tmp_path / "b" / "train.jsonl", [{"question": "1", "gold": "1"}] * 3)
  for source in "ab":
    (tmp_path / source / "test.jsonl").write_bytes((tmp_path / source / "train.jsonl").read_bytes())
  mixture = tuple(f"{source}=columns:{tmp_path}/{source}" for source in "ab")
  config = with_section(small_config(), "data", task="", path="", mixture=mixture)
  config = with_section(config, "reward", functions=("strict",), weights=(1.0,))
  scorers = Scorers(small_run(config))
  scorers.training.check_arguments(scorers._run.prompts("train"), "reward.functions")
  said = capsys.readouterr().err
  assert f"no reward of strict for 1 of 2 rows: a: {tmp_path}/a/train.jsonl line 2 has no" in said


# Conversations with calls of tools.

CALLS = """
{%- for m in messages %}{{ m.role + ":" + m.content }}
{%- for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}|{% endfor %}"""


@pytest.fixture(scope="module")
def calls_tokenizer(tmp_path_factory):
  """A tokenizer whose chat template writes everything that a call has."""
  folder = tmp_path_factory.mktemp("tokenizer")
  trained_tokenizer(["user assistant tool add weather city {} :|"]).save(
    str(folder / "tokenizer.json")
  )
  config = {"eos_token": "<|im_end|>", "chat_template": CALLS}
  (folder / "tokenizer_config.json").write_text(json.dumps(config))
  return tokenizer.load(folder)


def call(name, arguments):
  return {"function": {"name": name, "arguments": arguments}}


def prompts_with_calls(file, tokens):
  """The texts of the prompts of a file with a column `prompt`."""
  data = Data(task="columns", path=str(file), prompt="{prompt}", chat=True, max_prompt_tokens=400)
  task = tasks.make_task(dataclasses.replace(data, held_out=0.5))
  examples = sorted([*task.train, *task.test], key=lambda one: len(one["prompt"]))
  made = PromptSet(examples, tokens, data).make(range(len(examples)))
  return [prompt.text for prompt in made], [prompt.messages for prompt in made]


@pytest.mark.parametrize("name, rain", [("structs", "{}"), ("json", '{"city": null}')])
def test_calls_in_parquet_are_as_they_were_written(start, tmp_path, calls_tokenizer, name, rain):
  """The package datasets wrote the files. Its structs cannot say that somebody wrote a null."""
  pytest.importorskip("pyarrow")
  file = GOLDEN / f"parquet/{name}.parquet"
  read = Parquet(file)
  texts = []
  for index in range(2):
    data = Data(prompt="{prompt}", chat=True, max_prompt_tokens=400)
    (made,) = PromptSet([read[index]], calls_tokenizer, data).make([0])
    texts.append(made.text)
  add = '{"name": "add", "arguments": {"x": 0, "y": 2}}'
  weather = f'{{"name": "weather", "arguments": {rain}}}'
  assert texts == [
    f"user:0+2?|assistant:{add}|tool:2|",
    f"user:Rain?|assistant:{weather}|tool:no|",
  ]
  for split in ("train", "test"):
    shutil.copy(file, tmp_path / f"{split}.parquet")
  (tmp_path / "tokenizer").mkdir()
  calls_tokenizer.save(tmp_path / "tokenizer")
  keys = ["task=columns", f"path={tmp_path}", "chat=True", "prompt={prompt}"]
  keys += [f"tokenizer={tmp_path}/tokenizer", "max_prompt_tokens=400"]
  flags = ["--config=configs/default.py", "--config.batch.prompts=2", "--step=1"]
  flags += [f"--config.data.{key}" for key in keys]
  code, out, err = start("data", *flags)
  assert code == 0, err
  assert any(text in out for text in texts)  # the first prompt in full
  if name == "json":
    assert [read[index]["meta"] for index in range(2)] == [{"a": 1}, "text"]


def test_nulls_of_objects_that_are_no_messages_stay(tmp_path):
  """A reward may read them by their names."""
  pyarrow = pytest.importorskip("pyarrow")
  from pyarrow import parquet

  function = {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}, "y": None}}}
  values = [
    {"own": {"a": 1, "b": None}, "list": [{"c": None}], "tools": [{"function": function}]},
    {"own": {"a": 1, "b": 2}, "list": [{"c": 3}], "tools": [{"function": function | {"z": 1}}]},
    {"own": {"chat": [[{"role": "user", "content": "a", "name": None}]]}},
  ]
  cast = [{"name": "Bob", "role": "villain", "age": None}, {"name": None, "role": "user"}]
  posts = [{"role": "villain", "content": "Ha!", "age": None}, {"role": "user", "content": None}]
  values[0] |= {"cast": cast, "posts": posts, "extra": {"tools": [{"id": 1, "cost": None}]}}
  values[1]["tools"][0]["function"]["parameters"] = {"properties": {"y": {"enum": ["a"]}}}
  parquet.write_table(pyarrow.Table.from_pylist(values), tmp_path / "a.parquet")
  read = Parquet(tmp_path / "a.parquet")
  first, second, third = (read[index] for index in range(3))
  assert first["own"] == {"a": 1, "b": None, "chat": None} and first["list"] == [{"c": None}]
  assert first["tools"] == [
    {"function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}}
  ]
  assert second["tools"][0]["function"]["parameters"] == {"properties": {"y": {"enum": ["a"]}}}
  assert third["own"]["chat"] == [[{"role": "user", "content": "a"}]] and third["tools"] is None
  assert first["cast"] == [{"age": None, **one} for one in cast]
  assert first["posts"] == [{"age": None, **one} for one in posts]
  assert first["extra"] == {"tools": [{"id": 1, "cost": None}]}


def test_templates_write_dates_of_tools_and_of_messages(calls_tokenizer, tmp_path):
  """Only Parquet files have them."""
  template = "{{ tools[0].function.made }} {{ messages[0].sent }} {{ tools | tojson }}|"
  files = calls_tokenizer.files | {"chat_template.jinja": template.encode()}
  for name, content in files.items():
    (tmp_path / name).write_bytes(content)
  date = datetime.date(2020, 1, 2)
  row = {
    "prompt": [{**USER, "sent": date}],
    "tools": [{"type": "function", "function": {"name": "f", "made": date}}],
  }
  data = Data(prompt="{prompt}", chat=True, max_prompt_tokens=400)
  (made,) = PromptSet([row], tokenizer.load(tmp_path), data).make([0])
  assert made.text.startswith("2020-01-02 2020-01-02 [{")


def test_texts_that_the_package_datasets_calls_json_are_read(tmp_path):
  """Where the types of Arrow do not say so, as in files of older versions."""
  pyarrow = pytest.importorskip("pyarrow")
  from pyarrow import parquet

  table = pyarrow.Table.from_pylist(
    [
      {"a": '{"x": null}', "b": [{"c": "1"}], "d": ["[]", None], "e": "2"},
      {"a": "{", "b": [], "d": [], "e": "3"},
    ]
  )
  features = {
    "a": {"_type": "Json"},
    "b": {"_type": "List", "feature": {"c": {"_type": "Json"}}},
    "d": [{"_type": "Json"}],
    "e": {"_type": "Value", "dtype": "string"},
  }
  about = json.dumps({"info": {"features": features}})
  parquet.write_table(table.replace_schema_metadata({"huggingface": about}), tmp_path / "a.parquet")
  read = Parquet(tmp_path / "a.parquet")
  assert read[0] == {"a": {"x": None}, "b": [{"c": 1}], "d": [[], None], "e": "2"}
  with pytest.raises(ConfigError, match="row 2 column 'a' must be JSON, as its type says, and is"):
    read[1]
  for damaged in ("{", "[]", '{"info": null}', '{"info": {"features": [1]}}'):
    other = table.replace_schema_metadata({"huggingface": damaged})
    parquet.write_table(other, tmp_path / "b.parquet")
    assert Parquet(tmp_path / "b.parquet")[0]["a"] == '{"x": null}'


CALL = {"id": None, "function": {"strict": None, **call("add", {"x": 0, "city": None})["function"]}}
USER, TOOL = {"role": "user", "content": "?"}, {"role": "tool", "content": "1"}
ASKED = {"role": "assistant", "tool_calls": [CALL]}


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": []}, {"content": ""}])
def test_a_call_needs_no_content(tmp_path, calls_tokenizer, content):
  """As the endpoint takes it. A null that somebody wrote in JSON is an argument."""
  row = {"prompt": [USER, ASKED | content, TOOL]}
  path = write(tmp_path / "train.jsonl", [row] * 9)
  texts, messages = prompts_with_calls(path, calls_tokenizer)
  expected = 'user:?|assistant:{"name": "add", "arguments": {"x": 0, "city": null}}|tool:1|'
  assert {*texts} == {expected}
  assert [one["content"] for one in messages[0]] == ["?", "", "1"]


@pytest.mark.parametrize(
  "message",
  [
    {"role": "assistant"},
    {"role": "assistant", "content": None, "tool_calls": []},
    {"role": "user", "content": None},
  ],
)
def test_a_message_without_content_and_calls_is_refused(tmp_path, calls_tokenizer, message):
  path = write(tmp_path / "train.jsonl", [{"prompt": [USER, message]}] * 9)
  words = "train.jsonl line [0-9]: prompt: .* may be missing beside tool_calls; got"
  with pytest.raises(ConfigError, match=words):
    prompts_with_calls(path, calls_tokenizer)


def test_files_may_begin_with_the_mark_of_windows(tmp_path, calls_tokenizer):
  mark = "\ufeff".encode()
  lines = [json.dumps({"question": letter}).encode() for letter in "abc"]
  path = tmp_path / "data/train.jsonl"
  path.parent.mkdir()
  path.write_bytes(mark + lines[0] + b"\n" + lines[1] + b"\n" + mark + lines[2] + b"\n")
  found = rows.JsonLines(path)
  assert [found[i]["question"] for i in range(3)] == [*"abc"] and found.columns() == ["question"]
  template = "<{{ messages[0].content }}>"
  config = {"eos_token": "<|im_end|>"}
  files = {
    "tokenizer.json": calls_tokenizer.files["tokenizer.json"],
    "tokenizer_config.json": json.dumps(config).encode(),
    "chat_template.jinja": template.encode(),
  }
  for name, content in files.items():
    (tmp_path / name).write_bytes(mark + content)
  tokens = tokenizer.load(tmp_path)
  assert tokens.render([USER]) == "<?>" and tokens.decode(tokens.encode("add")) == "add"
  values = json.dumps({"model_type": "qwen2"}).encode()
  (tmp_path / "config.json").write_bytes(mark + values)
  assert folders.read_json(tmp_path / "config.json") == {"model_type": "qwen2"}
