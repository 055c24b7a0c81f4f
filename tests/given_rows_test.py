"""Data that a program gives: rows by number, read when they are needed, and no file."""

import dataclasses
import json

import numpy as np
import pytest
from small_run import small_config, with_section

import grpo_jax
from grpo_jax.config import Data
from grpo_jax.data.files.given import keep_rows
from grpo_jax.data.prompts import PromptSet
from grpo_jax.data.tasks.tasks import make_task
from grpo_jax.data.tokenizers.tokenizer import characters
from grpo_jax.training import loop


class ByNumber:
  """Rows by number, without an end that an iteration would see."""

  def __init__(self, count, **columns):
    self.count, self.columns, self.read = count, columns, []

  def __len__(self):
    return self.count

  def __getitem__(self, index):
    assert type(index) is int
    self.read.append(index)
    return {"question": f"{index % 9}+1=", "answer": str(index % 9 + 1), **self.columns}


def registered(train, test=None, **data):
  @grpo_jax.register_task
  def by_number(path):
    return grpo_jax.Task(train, test or ByNumber(3), alphabet="0123456789+=")

  return make_task(Data(task="by_number", **data))


def test_rows_of_a_registered_task_are_read_by_their_number():
  rows = ByNumber(10**6)
  task = registered(rows, count_at_start=500)
  assert len(task.train) == 10**6 and len(rows.read) < 4
  prompts = PromptSet(task.train, characters("0123456789+="), Data(count_at_start=500))
  assert len({*rows.read}) < 300
  assert prompts.make([999_999])[0].text == f"{999_999 % 9}+1="


def test_few_rows_of_a_registered_task_are_all_checked_at_the_start():
  rows = ByNumber(20)
  assert len(registered(rows, count_at_start=500).train) == 20 and {*rows.read} == {*range(20)}

  class Odd(ByNumber):
    def __getitem__(self, index):
      return super().__getitem__(index) if index < 7 else {"answer": "1"}

  with pytest.raises(
    grpo_jax.ConfigError, match=r"by_number: train\[7\] must be a dict with a que"
  ):
    registered(Odd(20))
  with pytest.raises(
    grpo_jax.ConfigError, match=r"by_number: train\[7\] must be a dict with a que"
  ):
    registered(Odd(1000), count_at_start=10).train[7]


def test_a_registered_task_may_hold_rows_out():
  @grpo_jax.register_task
  def alone(path):
    return grpo_jax.Task(ByNumber(100), ())

  task = make_task(Data(task="alone", held_out=0.2))
  assert len(task.train) + len(task.test) == 100 and 5 < len(task.test) < 40


@pytest.fixture
def trained(monkeypatch):
  """The configs with which `grpo_jax.train` begins."""
  configs = []

  def run_steps(config, *arguments):
    configs.append(config)
    raise grpo_jax.Stopped("seen")

  monkeypatch.setattr(loop, "run_steps", run_steps)
  return configs


def of_columns(**data):
  return with_section(small_config(), "data", task="columns", prompt="{question}", **data)


ROWS = [{"question": f"{n}+1=", "answer": n + 1, "who": "me"} for n in range(6)]


@pytest.mark.parametrize(
  "data, sizes",
  [
    (ROWS, (6, 0)),
    ({"train": ROWS, "test": ROWS[:2]}, (6, 2)),
    (ByNumber(1000), (1000, 0)),
    ([{**row, "answer": np.int64(row["answer"])} for row in ROWS], (6, 0)),
  ],
)
def test_rows_go_into_train(data, sizes, trained, tmp_path):
  for _ in range(2):
    with pytest.raises(grpo_jax.Stopped):
      grpo_jax.train(of_columns(), tmp_path, data=data)
  first, second = trained
  assert first == second  # so that the same call goes on
  task = make_task(first.data)
  assert (len(task.train), len(task.test)) == sizes
  assert task.train[0]["answer"] == "1" and task.train[0]["question"] == "0+1="


def test_other_rows_have_another_name(trained, tmp_path):
  assert keep_rows(ROWS) != keep_rows(ROWS[:-1]) != keep_rows({"train": ROWS, "test": ROWS})
  assert keep_rows(ROWS) == keep_rows([dict(row) for row in ROWS])
  assert keep_rows(ROWS) == keep_rows([dict(reversed(row.items())) for row in ROWS])
  other = [*ROWS[:2], {**ROWS[2], "who": "you"}, *ROWS[3:]]
  assert keep_rows(ROWS) != keep_rows(other)
  assert make_task(of_columns(path=keep_rows(ROWS)).data).train[2]["who"] == "me"
  assert keep_rows(ROWS) != keep_rows([{**row, "who": {1: 2, "b": [b"3"]}} for row in ROWS])


class Odd(ByNumber):
  """The same rows but for one, which is far from all that are looked at."""

  def __getitem__(self, index):
    return super().__getitem__(index) | ({"answer": "odd"} if index == 1002 else {})


def test_a_name_stands_for_the_same_rows_as_before():
  first, second = ByNumber(5000), Odd(5000)
  name = keep_rows(first)
  assert keep_rows(first) == name == keep_rows(ByNumber(5000))
  assert keep_rows(second) != name and keep_rows(second) == keep_rows(Odd(5000))
  assert make_task(of_columns(path=name).data).train[1002]["answer"] == "4"
  assert make_task(of_columns(path=keep_rows(second)).data).train[1002]["answer"] == "odd"


class Broken(ByNumber):
  where = columns = None  # as a DataFrame has them

  def __getitem__(self, index):
    raise KeyError(index)


@pytest.mark.parametrize(
  "config, data, message",
  [
    (
      small_config(),
      ROWS,
      "data: data.task is 'arithmetic', which reads other data: set data.task",
    ),
    (of_columns(mixture=("countdown",)), ROWS, "data: data.mixture is set, which reads other data"),
    (of_columns(), [], "data: train has no rows"),
    (of_columns(), {"test": ROWS}, "data has test: it must have the key train"),
    (of_columns(), iter(ROWS), "data: train is of type list_iterator: give a list of dicts"),
    (of_columns(), "train.jsonl", "data: train is of type str"),
    (of_columns(), Broken(3), r"data: train\[0\] cannot be read \(KeyError: 0\)"),
    (of_columns(), [5], r"data: train\[0\] is of type int: it must be a dict"),
  ],
)
def test_what_is_no_data_is_one_line(config, data, message, trained, tmp_path):
  with pytest.raises(grpo_jax.ConfigError, match=message):
    grpo_jax.train(config, tmp_path, data=data)
  assert not trained


def test_rows_of_another_program_are_asked_for():
  with pytest.raises(grpo_jax.ConfigError, match="stands for rows that a program gave: run that"):
    make_task(Data(task="columns", path="python:0123456789ab"))


class LikeDataset(ByNumber):
  """As Arrow has it, all messages have the keys of all others."""

  column_names = ["question", "answer", "note"]

  def __getitem__(self, index):
    message = {"role": "user", "content": "1", "name": None}
    return {"question": [message], "answer": "1", "note": {"a": None}}


def test_nulls_that_arrow_added_are_left_out_of_messages():
  (row,) = make_task(Data(task="columns", chat=True, path=keep_rows(LikeDataset(1)))).train
  assert row["question"] == [{"role": "user", "content": "1"}] and row["note"] == {"a": None}


def test_rows_of_the_package_datasets():
  datasets = pytest.importorskip("datasets")
  messages = [
    [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2", "name": "x"}],
    [{"role": "user", "content": "2+1="}],
  ]
  rows = datasets.Dataset.from_list([{"question": m, "answer": str(len(m))} for m in messages])
  whole = datasets.DatasetDict(train=rows, test=rows)
  for data in (rows, whole):
    task = make_task(Data(task="columns", prompt="{question}", chat=True, path=keep_rows(data)))
    assert [row["question"] for row in task.train] == messages
  assert keep_rows(rows) == keep_rows(rows.select(range(2)))


@pytest.mark.slow
def test_a_run_learns_from_rows_and_goes_on_with_them(tmp_path):
  config = with_section(of_columns(), "eval", every=1, examples=2, batch=2, samples=0)
  config = dataclasses.replace(config, steps=2)
  step = grpo_jax.train(config, tmp_path, lambda step: True, data={"train": ROWS, "test": ROWS[:2]})
  assert step.step == 1
  step = grpo_jax.train(config, tmp_path, data={"train": ROWS, "test": ROWS[:2]})
  assert step.step == 2 and "eval/accuracy" in step.metrics
  saved = json.loads((tmp_path / "config.json").read_text())
  assert saved["data"]["path"].startswith("python:")
  with pytest.raises(grpo_jax.ConfigError, match="data.path"):
    grpo_jax.train(config, tmp_path, data=ROWS[:-1])
