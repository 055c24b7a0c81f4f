import collections
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from configs.arithmetic import get_config
from grpo_jax import config
from grpo_jax.data.files import tfds as ours
from grpo_jax.data.tasks import arithmetic, tasks, word_problems
from grpo_jax.rewards.functions.final_number import strict
from grpo_jax.settings import ConfigError

ROW = {
  "question": "How many\u2028are 5+6?",
  "answer": "5+6 = <<5+6=11>>11 é\nTimes 100: <<11*100=1100>>1,100.\n#### 1,100",
}


def data(task="gsm8k", path=""):
  return config.Data(
    task=task,
    path=str(path),
    tokenizer="",
    prompt="{question}",
    chat=False,
    system="",
    max_prompt_tokens=64,
  )


def write_folder(path, train):
  """Writes the text `train` to train.jsonl and one valid example to test.jsonl."""
  (path / "train.jsonl").write_text(train)
  (path / "test.jsonl").write_text(json.dumps(ROW))
  return path


@pytest.fixture(scope="module")
def task():
  return tasks.make_task(data("arithmetic"))


def test_arithmetic_is_right(task):
  worked = 0
  for example in [*task.train[:3000], *task.test]:
    question, solution = example["question"], example["solution"]
    assert re.fullmatch(r"\d+([+-]\d+){3}=", question) and all(
      1 <= int(n) <= 20 for n in re.findall(r"\d+", question)
    )
    assert eval(question[:-1]) == int(example["answer"])
    *steps, last = solution.split(";")
    assert last == f"#### {example['answer']}" and len(steps) in (0, 3)
    assert set(question + solution) <= set(task.alphabet)
    running = re.match(r"\d+", question)[0]
    for step, term in zip(steps, re.findall(r"[+-]\d+", question)):
      left, right = step.split("=")
      assert left == running + term
      assert eval(left) == int(right)
      assert 0 <= int(right) <= arithmetic.MAX_TOTAL
      running = right
    worked += bool(steps)
    assert strict(completions=[solution], answer=[example["answer"]]) == [1.0]
  assert abs(worked / 5000 - arithmetic.WORKED_SHARE) < 0.03  # 4 standard deviations


def test_the_quick_start_has_room_for_every_sum(task):
  quick_start = get_config()
  for example in [*task.train, *task.test]:
    assert len(example["question"]) <= quick_start.data.max_prompt_tokens
    assert len(example["solution"]) + len("E") <= quick_start.sampling.max_tokens  # E ends it
  longest = "20+20=40;40+20=60;60+20=80;#### 80"
  assert len(longest) < quick_start.sampling.max_tokens


def test_arithmetic_splits_share_no_problem(task):
  train, test = ({e["question"] for e in split} for split in (task.train, task.test))
  assert len(task.train) == 20_000 and len(task.test) == 2_000
  assert not train & test
  assert len(train) > 19_000 and len(test) > 1_900
  is_test = [
    arithmetic.split_of(f"{a}+{b}-{c}+3=") == "test"
    for a in range(20)
    for b in range(20)
    for c in range(20)
  ]
  assert 0.08 < sum(is_test) / len(is_test) < 0.12


def test_arithmetic_examples_depend_only_on_their_number(task):
  assert task.train[0] == {
    "question": "2+12+8-15=",
    "solution": "2+12=14;14+8=22;22-15=7;#### 7",
    "answer": "7",
  }
  assert task.test[1] == {"question": "7+14-5+5=", "solution": "#### 21", "answer": "21"}
  other = tasks.arithmetic("")
  assert other.train[17] == task.train[17] and task.train[-1] == task.train[19_999]
  assert task.test[3:5] == [task.test[3], task.test[4]]
  with pytest.raises(IndexError):
    task.test[2_000]


def story_of(question):
  """A question with its numbers, names and things left out."""
  words = re.split(r"(\W+)", question)
  varied = {*word_problems._NAMES, *word_problems._THINGS, *word_problems._PLACES}
  return "".join("_" if word in varied or word.isdigit() else word for word in words)


def test_word_problems_are_right_and_have_every_number_that_is_needed():
  task = tasks.make_task(data("word_problems"))
  operations = collections.Counter()
  for example in [*task.train[:4000], *task.test]:
    sum_of_two, result = example["solution"].split("\n")
    left, right = sum_of_two.split(" = ")
    assert eval(left) == int(right) == int(example["answer"]) >= 1
    assert result == f"#### {example['answer']}"
    numbers = sorted(map(int, re.findall(r"\d+", example["question"])))
    a, operation, b = left.split()
    assert numbers == sorted((int(a), int(b))) and min(numbers) >= 2
    assert "{" not in example["question"] and operation == example["operation"]
    operations[operation] += 1
  assert set(operations.values()) == {1500}


def test_no_story_of_the_test_is_in_training():
  task = tasks.make_task(data("word_problems"))
  train, test = ({story_of(e["question"]) for e in split} for split in (task.train, task.test))
  assert len(train) == 28 and len(test) == 12 and not train & test
  assert {task.train[-1]["question"]} == {task.train[19_999]["question"]}
  assert task.train[0]["question"] == tasks.word_problems("").train[0:1][0]["question"]
  assert task.train[0] == {
    "question": "Finn bought 13 pencils on Monday and 2 on Tuesday. How many pencils did Finn buy?",
    "answer": "15",
    "solution": "13 + 2 = 15\n#### 15",
    "operation": "+",
  }
  with pytest.raises(IndexError):
    task.test[2_000]


@pytest.mark.parametrize(
  ("path", "largest", "factor"),
  [("largest=999,largest_factor=99", 999, 99), ("largest=(5, 50)", 50, 10)],
)
def test_the_numbers_of_word_problems_are_as_large_as_asked(path, largest, factor):
  examples = tasks.make_task(data("word_problems", path)).train[:2000]
  assert story_of(examples[0]["question"]) == story_of(tasks.word_problems("").train[0]["question"])
  most = collections.Counter()
  for example in examples:
    left, operation, right = example["solution"].split(" = ")[0].split()
    assert eval(f"{left} {operation} {right}") == int(example["answer"]) >= 1
    numbers = (left, right) if operation in "+-*" else (right, example["answer"])
    most[operation] = max(most[operation], *map(int, numbers))
  assert most["*"] == most["/"] == factor
  assert most["+"] <= largest and largest * 0.98 <= most["-"] <= largest + 1


@pytest.mark.parametrize(
  ("path", "match"),
  [
    ("folder", "data.path: 'word_problems.folder.': write parameters as"),
    ("digits=3", "data.path: word_problems has no digits; it has largest and largest_factor"),
    ("largest=1", "data.path: 1 is no whole number from 2 to 1,000,000,000"),
    ("largest=True", "data.path: True is no whole number"),
    ("largest=()", "data.path: largest has no number"),
    ("largest_factor='9'", "data.path: '9' is no whole number"),
  ],
)
def test_wrong_numbers_of_word_problems_are_refused(path, match):
  with pytest.raises(ConfigError, match=match):
    tasks.make_task(data("word_problems", path))


def test_gsm8k_folder(tmp_path):
  lines = f"{json.dumps(ROW)}\n\n{json.dumps(ROW, ensure_ascii=False)}\n"
  task = tasks.make_task(data(path=write_folder(tmp_path, lines)))
  expected = {
    "question": ROW["question"],
    "solution": "5+6 = 11 é\nTimes 100: 1,100.\n#### 1,100",
    "answer": "1100",
  }
  assert task.train == [expected, expected] and task.test == [expected]
  assert set(task.characters()) == set(expected["question"] + expected["solution"])
  assert "<" not in task.characters()
  assert len(task.characters()) == len(set(task.characters()))
  with pytest.raises(dataclasses.FrozenInstanceError):
    task.train = []


def test_the_real_gsm8k():
  path = pathlib.Path(
    os.environ.get("GSM8K_DIR", pathlib.Path(__file__).parents[2] / "shared/data/gsm8k")
  )
  if not (path / "train.jsonl").is_file():
    pytest.skip(f"GSM8K's text is not at {path}; set GSM8K_DIR to its folder")
  task = tasks.make_task(data(path=path))
  assert (len(task.train), len(task.test)) == (7473, 1319)
  assert task.train[0]["solution"].endswith(
    "48+24 = 72 clips altogether in April and May.\n#### 72"
  )
  for split in (task.train, task.test):
    assert not any("<<" in e["solution"] or "," in e["answer"] for e in split)
    solutions, answers = zip(*((e["solution"], e["answer"]) for e in split))
    assert set(strict(completions=solutions, answer=answers)) == {1.0}


def test_questions_may_be_lists_of_messages(tmp_path):
  messages = [{"role": "system", "content": "Ä"}, {"role": "user", "content": "5+6?"}]
  path = write_folder(tmp_path, json.dumps(ROW | {"question": messages}))
  task = tasks.make_task(data(path=path))
  assert task.train[0]["question"] == messages
  assert set("Ä5+6?H\u2028") <= set(task.characters())


@pytest.mark.parametrize(
  "train, message",
  [
    (
      json.dumps(ROW | {"question": []}),
      "data.path: .*train.jsonl line 1: a conversation must be a list of messages, at least one",
    ),
    (
      json.dumps(ROW | {"question": ["Hi"]}),
      "a message must be an object with a text role and a content, .*; got 'Hi'",
    ),
    (json.dumps(ROW) + '\n{"question": "?"}', r"train.jsonl line 2 has no text field 'answer'"),
    ('{"answer": "#### 1"}', r"train.jsonl line 1 has no text field 'question'"),
    ('{"question": "?", "answer": 3}', r"train.jsonl line 1 has no text field 'answer'"),
    ("[1]", r"train.jsonl line 1 is not an object"),
    ("\n{oops", r"train.jsonl line 2 is not JSON"),
    (
      '{"question": "?", "answer": "3"}',
      r"train.jsonl line 1: the answer must end in '#### NUMBER'",
    ),
    ("\n \n", r"train.jsonl is empty"),
  ],
)
def test_gsm8k_refuses_bad_files(tmp_path, train, message):
  with pytest.raises(ConfigError, match=message) as error:
    tasks.make_task(data(path=write_folder(tmp_path, train)))
  assert "\n" not in str(error.value)


@pytest.mark.parametrize("answer, text", [(12, "12"), (27.0, "27"), (0.5, "0.5"), ("12", "12")])
def test_answers_of_math_may_be_numbers(answer, text, tmp_path):
  line = json.dumps({"problem": "?", "answer": answer})
  (example,) = tasks.make_task(data("math", write_folder(tmp_path, line))).train
  assert example == {"question": "?", "solution": text, "answer": text}


def test_math_folder(tmp_path):
  row = {"problem": "1/2?", "answer": r"\frac12", "solution": r"So $\boxed{\frac12}$.", "level": 5}
  bare = {"question": "2?", "answer": "2"}
  lines = json.dumps(row) + "\n" + json.dumps(bare)
  task = tasks.make_task(data("math", write_folder(tmp_path, lines)))
  assert task.train == [
    {"question": "1/2?", "solution": row["solution"], "answer": r"\frac12"},
    {"question": "2?", "solution": "2", "answer": "2"},
  ]
  with pytest.raises(ConfigError, match="line 1 has no text field 'answer'"):
    tasks.make_task(data("math", write_folder(tmp_path, json.dumps({"problem": "?"}))))
  with pytest.raises(ConfigError, match="data.path is empty"):
    tasks.make_task(data("math"))


def test_bad_sources_are_named(tmp_path):
  with pytest.raises(ConfigError, match="data.path: cannot read .*train.jsonl"):
    tasks.make_task(data(path=tmp_path))
  with pytest.raises(
    ConfigError, match="data.task='gsm9k' is unknown: choose one of arithmetic, gsm8k"
  ):
    tasks.make_task(data("gsm9k"))
  with pytest.raises(ConfigError, match="data.path='x'"):
    tasks.make_task(data("arithmetic", "x"))


def test_gsm8k_through_tfds_without_tensorflow(tmp_path):
  """TFDS writes its files from three rows. A new process then reads them as a user does."""
  pytest.importorskip("tensorflow_datasets")
  rows = [dict(ROW, question=f"{ROW['question']} {i}") for i in range(3)]
  (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  from tensorflow_datasets.text.gsm8k import Gsm8k

  builder = Gsm8k(data_dir=tmp_path, file_format="array_record")
  file = tmp_path / "rows.jsonl"
  builder._split_generators = lambda _: {
    s: builder._generate_examples(file) for s in ("train", "test")
  }
  builder.download_and_prepare()
  code = (
    "import sys, json; from grpo_jax.data.tasks import tasks; task = tasks.gsm8k('');"
    "own = tasks.columns(sys.argv[1], ('text={question}!',), ('question',));"
    "own = [*own.train, *own.test];"
    "print(json.dumps([task.train, task.test, own, 'tensorflow' in sys.modules]))"
  )
  root = pathlib.Path(__file__).parents[1]
  out = subprocess.run(
    [sys.executable, "-c", code, str(builder.data_dir)],
    cwd=root,
    capture_output=True,
    text=True,
    env={**os.environ, "TFDS_DATA_DIR": str(tmp_path)},
  )
  assert out.returncode == 0, out.stderr
  train, test, own, tensorflow = json.loads(out.stdout.splitlines()[-1])
  assert sorted(e["question"] for e in train) == sorted(row["question"] for row in rows)
  assert train[0]["solution"] == "5+6 = 11 é\nTimes 100: 1,100.\n#### 1,100"
  assert train[0]["answer"] == "1100"
  assert sorted(e["question"] for e in test) == sorted(e["question"] for e in train)
  assert not tensorflow
  # The folder that TFDS prepared is data.path of the task columns.
  texts = sorted(row["question"] + "!" for row in rows)
  assert sorted(example["text"] for example in own) == sorted(texts * 2)
  assert own[0]["answer"] == ROW["answer"]


def test_gsm8k_that_tfds_cannot_provide(monkeypatch):
  tfds = pytest.importorskip("tensorflow_datasets")

  def damaged(*args, **kwargs):
    raise OSError("Failed to resolve\nthe host")

  monkeypatch.setattr(ours, "check_connection", str.format)  # as if there were a network
  monkeypatch.setattr(tfds, "data_source", damaged)
  message = "OSError: Failed to resolve the host.*--config.data.path=FOLDER with train.jsonl"
  with pytest.raises(ConfigError, match=message) as error:
    tasks.make_task(data())
  assert "\n" not in str(error.value)


def test_a_question_and_a_solution_that_are_lists_have_characters():
  rows = [{"question": ["ab", 7], "solution": ["not", "a", "text"], "answer": "1"}]
  assert tasks.Task(rows, rows).characters() == "7ab"
