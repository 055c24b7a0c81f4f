"""Exams by name: rows in the layout in which each is published, their answers and metrics."""

import csv
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from small_run import small_config, small_run, with_section
from votes_test import Said

from grpo_jax import calls, load_policy, train
from grpo_jax.config import Config
from grpo_jax.data.files import download
from grpo_jax.data.tasks import exams
from grpo_jax.evaluation.evaluator import Evaluators, table
from grpo_jax.recipes import with_absolute_paths
from grpo_jax.rewards import resolve
from grpo_jax.rewards.sandbox import runner
from grpo_jax.run.checks import check_config
from grpo_jax.scoring.scorers import Scorers
from grpo_jax.settings import ConfigError
from grpo_jax.storage.reading import read_metrics


def boxed(right, wrong):
  return f"So it is \\boxed{{{right}}}.", f"It is \\boxed{{{wrong}}}."


def letter(right, wrong):
  return f"Because ...\n\nAnswer: {right}", f"Answer: {wrong}"


def block(right, wrong):
  return f"```python\n{right}\n```", f"```python\n{wrong}\n```"


_CASE = {"testtype": "stdin"}
_FOLLOWS = {"testtype": "functional"}
_METADATA = {"year": "2024", "url": "https://example.com", "id": 60}


def aime24(number, answer):
  return {
    "problem": f"Find n if n + 1 = {number}.",
    "solution": "...",
    "answer": answer,
    **_METADATA,
  }


def aime25(number, answer):
  row = {"problem_idx": number, "problem": f"Find {number} + 1.", "answer": answer}
  return row | {"problem_type": ["Algebra"]}


def math500(problem, answer):
  row = {"problem": problem, "solution": f"It is \\boxed{{{answer}}}.", "answer": answer}
  return row | {"subject": "Algebra", "level": 2, "unique_id": "test/algebra/1.json"}


def gpqa(number):
  row = {"Record ID": f"rec{number}", "Question": f"Which number is {number}?"}
  wrong = {f"Incorrect Answer {i}": f" {number + i}\n" for i in (1, 2, 3)}
  return row | {"Correct Answer": str(number), **wrong, "Subdomain": 'Arithmetic, "small"'}


def mmlu_pro(number, letter_of_right):
  options = [
    f"{number} apples" if name == letter_of_right else f"a {name}" for name in "ABCDEFGHIJ"
  ]
  row = {"question_id": number, "question": f"Choose {number} apples.", "options": options}
  more = {"answer_index": ord(letter_of_right) - 65, "cot_content": "", "category": "math"}
  return row | {"answer": letter_of_right, **more, "src": "own"}


_NO_ARGUMENTS = dict.fromkeys(("num_words", "relation", "keywords", "end_phrase", "letter"))


def ifeval(*instructions):
  names, given = zip(*instructions)
  row = {"key": 1, "prompt": "Write.", "instruction_id_list": list(names)}
  return row | {"kwargs": [_NO_ARGUMENTS | one for one in given]}


def humaneval(name, body, *asserts):
  row = {"task_id": "HumanEval/1", "prompt": f'def {name}(x):\n    """{name} of x."""\n'}
  test = "def check(candidate):\n" + "".join(f"    assert {one}\n" for one in asserts)
  return row | {"canonical_solution": f"    return {body}\n", "test": test, "entry_point": name}


def livecodebench(content, public, private, name=""):
  row = {"question_title": "t", "question_content": content, "platform": "own", "question_id": "1"}
  row |= {"contest_id": "1", "contest_date": "2026-01-01T00:00:00", "difficulty": "easy"}
  starter = f"class Solution:\n    def {name}(self, x: int) -> int:\n" if name else ""
  kind = _FOLLOWS if name else _CASE
  cases = [[{"input": a, "output": b, **kind} for a, b in some] for some in (public, private)]
  row |= {"starter_code": starter, "metadata": json.dumps({"func_name": name} if name else {})}
  row["public_test_cases"], row["private_test_cases"] = map(json.dumps, cases)
  return row


def svamp(have, more):
  row = {"ID": f"chal-{have}", "Body": f"Ann has {have} pens. She gets {more} pens"}
  row |= {"Question": "How many pens has she?", "Equation": f"( {have}.0 + {more}.0 )"}
  return row | {"Answer": f"{have + more}.0", "Type": "Addition"}


_READ = "print(sum(map(int, open(0))))"
# Of each exam: (row, a right answer, a wrong one). None where the order of options decides.
PAPERS = {
  "aime24": [
    (aime24(34, "033"), *boxed("33", "34")),
    (aime24(205, "204"), *boxed("204", "205")),
    (aime24(1, "0"), *boxed("0", "1")),
    (aime24(1000, "999"), "The answer is 999.", "The answer is 998."),
    (aime24(26, "025"), *boxed("025", "52")),
  ],
  "aime25": [(aime25(n, n + 1), *boxed(n + 1, n)) for n in (69, 587, 15, 278, 503)],
  "amc23": [
    ({"id": i, "problem": f"Add 1 to {n}.", "answer": n + 1.0, "url": "u"}, *boxed(n + 1, n))
    for i, n in enumerate((26, 35, 44, 9, 359))
  ],
  "math500": [
    (
      math500("Convert (0,3).", "\\left( 3, \\frac{\\pi}{2} \\right)"),
      *boxed("(3, \\pi/2)", "(3, \\pi)"),
    ),
    (math500("Sum?", "p - q"), *boxed("p-q", "q-p")),
    (math500("Divide 14 by 3.", "\\frac{14}{3}"), *boxed("14/3", "3/14")),
    (math500("Count.", "9"), *boxed("9", "8")),
    (math500("Solve.", "[0, 1)"), *boxed("[0,1)", "(0,1)")),
  ],
  "gpqa_diamond": [(gpqa(n), None, None) for n in (10, 20, 30, 40, 50)],
  "mmlu_pro": [(mmlu_pro(n, name), *letter(name, "H")) for n, name in enumerate("AIJCF")],
  "ifeval": [
    (ifeval(("punctuation:no_comma", {})), "no comma here", "one, two"),
    (
      ifeval(("length_constraints:number_words", {"num_words": 3, "relation": "at least"})),
      "one two three",
      "one two",
    ),
    (ifeval(("keywords:existence", {"keywords": ["pen"]})), "A pen.", "A cup."),
    (ifeval(("startend:end_checker", {"end_phrase": "The end."})), "So. The end.", "The end. So."),
    (
      ifeval(("change_case:english_lowercase", {}), ("punctuation:no_comma", {})),
      "all of these words are in lower case letters of english",
      "all of these words, too, are in lower case letters of english",
    ),
  ],
  "humaneval": [
    (
      humaneval("twice", "2 * x", "candidate(2) == 4"),
      *block("def twice(x): return x + x", "def twice(x): return x"),
    ),
    (humaneval("inc", "x + 1", "candidate(2) == 3"), "    return 1 + x\n\nprint(", "    return x"),
    (humaneval("neg", "-x", "candidate(2) == -2"), *block("def neg(x): return 0 - x", "")),
    (humaneval("first", "x[0]", "candidate('ab') == 'a'"), "    return x[:1]", "    return x[1]"),
    (
      humaneval("empty", "not x", "candidate('')", "not candidate('a')"),
      *block("def empty(x): return x == ''", "def empty(x): return True"),
    ),
  ],
  "livecodebench": [
    (livecodebench("Add.", [("1\n2\n", "3")], [("5\n6\n", "11")]), *block(_READ, "print(3)")),
    (
      livecodebench("Half.", [("1\n", "0.5")], [("4\n", "2")]),
      *block("print(int(input()) / 2)", "print(int(input()) // 2)"),
    ),
    (livecodebench("Say.", [("", "yes\nno")], []), *block("print('yes\\nno ')", "print('yes no')")),
    (
      livecodebench("Twice.", [("2", "4")], [("3", "6")], "twice"),
      *block("class Solution:\n  def twice(self, x): return 2 * x", "def twice(x): return 4"),
    ),
    (
      livecodebench("List.", [("2", "[0, 1]")], [], "upto"),
      *block(
        "class Solution:\n  def upto(self, x): return [*range(x)]",
        "class Solution:\n  def upto(self, x): return [x]",
      ),
    ),
  ],
  "svamp": [
    (svamp(a, b), *boxed(a + b, a)) for a, b in ((8, 3), (52, 41), (1, 1), (20, 7), (6, 9))
  ],
  "gsm8k": [
    (
      {"question": f"Add 1 to {n}.", "answer": f"<<{n}+1={n + 1}>>So.\n#### {n + 1:,}"},
      f"So. #### {n + 1}",
      f"#### {n}",
    )
    for n in (3, 71, 999, 11, 4)
  ],
}


def write(folder, name, rows):
  """The rows in the kind of file in which the exam is published."""
  if name == "gpqa_diamond":
    with open(folder / f"{name}.csv", "w", newline="") as file:
      writer = csv.DictWriter(file, list(rows[0]))
      writer.writeheader()
      writer.writerows(rows)
    return folder / f"{name}.csv"
  if name == "svamp":
    (folder / "SVAMP.json").write_text(json.dumps(rows))
    return folder / "SVAMP.json"
  if name in ("aime24", "mmlu_pro", "humaneval"):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{name}.parquet")
    return folder / f"{name}.parquet"
  (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
  return folder / f"{name}.jsonl"


def paper(folder, name):
  """The examples of an exam, and pairs of a right and a wrong answer."""
  file = write(folder, name, [row for row, _, _ in PAPERS[name]])
  found = exams.problems(exams.entries_of([f"{name}:{file}"])[0])
  pairs = [pair for _, *pair in PAPERS[name]]
  if name == "gpqa_diamond":
    pairs = [letter(one["answer"], chr(65 + (ord(one["answer"]) - 64) % 4)) for one in found]
  return list(found), pairs


@pytest.mark.parametrize("name", PAPERS)
def test_answers_are_judged_as_they_should_be(name, tmp_path):
  assert {*PAPERS} == {*exams.EXAMS} - {"columns"} and sum(map(len, PAPERS.values())) >= 55
  function = exams.EXAMS[name].function
  if function == "math":
    pytest.importorskip("math_verify")
  if function == "ifeval":
    pytest.importorskip("lm_eval")
  if function.startswith("code"):
    try:
      runner.find()
    except ConfigError as error:
      pytest.skip(str(error))
  examples, pairs = paper(tmp_path, name)
  assert len(examples) == 5
  columns = {key: [one[key] for one in examples for _ in range(2)] for key in examples[0]}
  judge = resolve(function, "eval.tasks", lambda name: False)
  found = judge(completions=[text for pair in pairs for text in pair], **columns)
  assert found == [1, 0] * 5


def test_the_seed_orders_the_options(tmp_path):
  file = write(tmp_path, "gpqa_diamond", [row for row, _, _ in PAPERS["gpqa_diamond"]] * 8)

  def answers(seed):
    entry = exams.entries_of([f"gpqa_diamond(seed={seed}):{file}"])[0]
    found = exams.problems(entry)
    for one in found:
      number = one["question"].split("is ")[1].split("?")[0]
      assert f"{one['answer']}) {number}\n" in one["question"] + "\n"
    return [one["answer"] for one in found]

  assert answers(0)[:5] == answers(0)[5:10] and answers(0) != answers(1)
  assert len({letter for seed in range(9) for letter in answers(seed)}) == 4


def test_a_part_of_an_exam_is_drawn_from_all_of_it(tmp_path):
  rows = [aime25(number, number + 1) for number in range(100)]
  file = write(tmp_path, "aime25", rows)
  some = exams.problems(exams.entries_of([f"aime25(examples=20):{file}"])[0])
  numbers = [int(one["answer"]) - 1 for one in some]
  assert len(numbers) == 20 == len({*numbers}) and numbers == sorted(numbers)
  assert numbers[0] < 20 and numbers[-1] > 80
  assert len(exams.problems(exams.entries_of([f"aime25(examples=999):{file}"])[0])) == 100


@pytest.mark.parametrize(
  "tasks, error",
  [
    (["math"], "'math' is no exam: choose one of aime24, aime25"),
    (["math500:a", "math500:b"], "two entries named math500: write NAME=math500:PATH"),
    (["math500(tokens=5):a"], "it takes function, prompt, samples, max_tokens, .* and not tokens"),
    (["math500(samples=-1):a"], "samples must be a whole number of at least 0, got -1"),
    (["math500(max_tokens='5'):a"], "max_tokens must be a whole number of at least 1"),
    (["math500(function=5):a"], "function must be a text"),
    (["math500(:a"], "write EXAM:FILE"),
    (["math500(samples):a"], "write parameters as math500"),
    (["columns"], "write columns:FILE"),
  ],
)
def test_wrong_entries_are_refused(tasks, error):
  with pytest.raises(ConfigError, match=f"eval.tasks.*{error}"):
    check_config(with_section(small_config(), "eval", tasks=tuple(tasks)))


def test_entries_have_names_paths_and_options(tmp_path, monkeypatch):
  (tmp_path / "a(1).jsonl").write_text("")
  text = "own=math500(function='regex(pattern=\"a)\")', samples=4):a(1).jsonl"
  (entry,) = exams.entries_of([text])
  assert (entry.name, entry.path, entry.samples) == ("own", "a(1).jsonl", 4)
  assert entry.function == 'regex(pattern="a)")'
  monkeypatch.chdir(tmp_path)
  config = with_section(small_config(), "eval", tasks=(text, "aime24"))
  first, second = with_absolute_paths(config).eval.tasks
  assert first == text.replace(":a(1)", f":{tmp_path}/a(1)") and second == "aime24"


def made(folder, tasks, **changes):
  config = with_section(small_config(), "eval", tasks=tuple(tasks), examples=4, **changes)
  run = small_run(config)
  scorers = Scorers(run)
  return Evaluators(run, scorers), scorers


def test_metrics_of_an_exam_are_those_of_a_plain_count(tmp_path):
  pytest.importorskip("math_verify")
  maths = write(tmp_path, "math500", [row for row, _, _ in PAPERS["math500"]])
  choices = write(tmp_path, "mmlu_pro", [row for row, _, _ in PAPERS["mmlu_pro"]])
  tasks = [f"math500(samples=5,max_tokens=7):{maths}", f"mmlu_pro(examples=5):{choices}"]
  evaluate, scorers = made(tmp_path, tasks, samples=3)
  own, first, second = evaluate.parts
  assert [part.name for part in evaluate.parts] == ["", "math500", "mmlu_pro"]
  assert (first.max_tokens, second.max_tokens, own.max_tokens) == (7, 5, 5)
  assert first.config.samples == 5 and second.config.samples == 3
  text = first.prompts.make([3])[0].text
  assert text == "Count.\n\nReason step by step, and put the final answer into \\boxed{}."
  # By hand. math500: votes of five, ties at random. The third problem is a tie of two against two.
  said = [
    [r"\boxed{(3,\frac{\pi}{2})}", r"\boxed{(3,\pi/2)}", r"\boxed{1}", r"\boxed{1}", "none at all"],
    [r"\boxed{q-p}"] * 3 + [r"\boxed{p-q}"] * 2,
    [r"\boxed{14/3}", r"\boxed{\frac{14}{3}}", r"\boxed{4}", r"\boxed{4.0}", r"\boxed{5}"],
    [r"\boxed{9}"] * 5,
    [r"\boxed{[0,1]}"] * 5,
  ]
  maj = (1 / 2 + 0 + 1 / 2 + 1 + 0) / 5
  right = np.array([2, 2, 2, 5, 0])
  first._sampled, first._greedy = Said(said), Said([[texts[0]] for texts in said])
  letters = [["A"] * 3, ["I", "I", "B"], ["J", "B", "B"], ["B", "C", "D"], ["B"] * 3]
  said = [[f"Answer: {one}" for one in texts] for texts in letters]
  second._sampled, second._greedy = Said(said), Said([[texts[0]] for texts in said])
  own._greedy, own._sampled = Said([["#### 1"]] * 4), None
  found = evaluate(None, 0)
  scorers.close()
  assert found["eval/math500/maj@5"] == pytest.approx(maj)
  assert found["eval/math500/mean@5"] == pytest.approx(right.mean() / 5)
  assert found["eval/math500/accuracy"] == 3 / 5  # the first, the third and the fourth
  assert found["eval/math500/pass@5"] == 4 / 5
  assert found["eval/mmlu_pro/maj@3"] == pytest.approx((1 + 1 + 0 + 1 / 3 + 0) / 5)
  assert found["eval/mmlu_pro/mean@3"] == pytest.approx((3 + 2 + 1 + 1 + 0) / 15)
  assert found["eval/accuracy"] == 0 and "eval/math500/mean_length" in found
  part = {name: value for name, value in found.items() if name.startswith("eval/math500/")}
  lines = table(part, first.config, first.max_tokens, first.name)
  assert lines[0].endswith("cut off at 7") and "eval/math500/accuracy" in lines[1]


def test_a_task_by_name_has_votes_of_its_own(tmp_path):
  rows = [{"question": "1", "answer": "3", "task": name} for name in ("a", "b", "a")]
  for split in ("train", "test"):
    (tmp_path / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
  data = dict(task="columns", path=str(tmp_path), columns=("task=task",))
  config = with_section(small_config(), "data", **data)
  config = with_section(config, "eval", function="rewards", samples=3)
  config = with_section(config, "reward", functions=("strict",), tasks=("a,b",))
  run = small_run(config)
  scorers = Scorers(run)
  (part,) = Evaluators(run, scorers).parts
  said = [["#### 3", "#### 3", "#### 4"], ["#### 3", "#### 5", "#### 5"], ["#### 4"] * 3]
  part._sampled, part._greedy = Said(said), Said([texts[:1] for texts in said])
  found = part(None, 0)
  scorers.close()
  assert (found["eval/maj@3/a"], found["eval/maj@3/b"]) == (1 / 2, 0)
  assert found["eval/maj@3"] == pytest.approx(1 / 3)
  assert found["eval/mean@3/b"] == pytest.approx(1 / 3) and "eval/maj@3/a_low" in found


@pytest.mark.parametrize(
  "text, error",
  [
    ('{"problem": "x"}', "FILE line 1 has no text field 'answer' or 'Answer'"),
    ("{", "FILE line 1 is not JSON"),
    ("", "FILE is empty"),
    (None, "cannot read FILE (No such file or directory)"),
  ],
)
def test_an_exam_that_cannot_be_read_is_named(text, error, tmp_path):
  file = tmp_path / "x.jsonl"
  if text is not None:
    file.write_text(text)
  with pytest.raises(ConfigError) as caught:
    made(tmp_path, [f"math500:{file}"])
  assert str(caught.value).startswith("eval.tasks: math500: ")
  assert error.replace("FILE", str(file)) in str(caught.value)
  assert "data.path" not in str(caught.value)


def test_a_test_file_of_ones_own_needs_no_train_file(tmp_path):
  rows = [{"problem": "1+1", "answer": 2}, {"problem": "1+2", "answer": "3", "more": [1]}]
  (tmp_path / "own.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
  evaluate, scorers = made(tmp_path, [f"own=columns(prompt='{{problem}}='):{tmp_path}/own.jsonl"])
  _, part = evaluate.parts
  assert [prompt.text for prompt in part.prompts.make([0, 1])] == ["1+1=", "1+2="]
  part._greedy = Said([["2"], ["4"]])
  assert part(None, 0)["eval/own/accuracy"] == 1 / 2
  scorers.close()


def test_a_completion_leaves_room_for_a_prompt(tmp_path):
  file = write(tmp_path, "math500", [row for row, _, _ in PAPERS["math500"]])
  with pytest.raises(
    ConfigError, match="math500: the model has 32768 positions, .* set max_tokens"
  ):
    made(tmp_path, [f"math500(max_tokens=32768):{file}"])
  config = with_section(small_config(), "eval", tasks=(f"math500(max_tokens=2):{file}",))
  run = small_run(with_section(config, "sampling", min_tokens=3))
  with pytest.raises(ConfigError, match="math500: .* sampling.min_tokens is 3, .* set max_tokens"):
    Evaluators(run, Scorers(run))
  with pytest.raises(ConfigError, match="math500: .*drops all 5 prompts"):
    made(tmp_path, [f"math500(max_tokens=32760):{file}"])


def test_files_and_folders_of_exams(tmp_path):
  (tmp_path / "x.txt").write_text("")
  with pytest.raises(ConfigError, match="x.txt is none of .jsonl, .parquet, .csv, .json"):
    exams.problems(exams.entries_of([f"math500:{tmp_path}/x.txt"])[0])
  with pytest.raises(ConfigError, match="has no test file"):
    exams.problems(exams.entries_of([f"math500:{tmp_path}"])[0])
  write(tmp_path, "math500", [row for row, _, _ in PAPERS["math500"]])
  assert len(exams.problems(exams.entries_of([f"math500:{tmp_path}"])[0])) == 5
  (tmp_path / "broken.csv").write_text('a,b\n"1')
  (tmp_path / "short.csv").write_text("a,b\n1\n")
  (tmp_path / "unnamed.csv").write_text("a,\n1,2\n")
  (tmp_path / "twice.csv").write_text("a,b,a\n1,2,3\n")
  for name, error in (
    ("broken", "is not CSV in UTF-8"),
    ("short", "row 1 has not the columns"),
    ("unnamed", "first line has no name for column 2"),
    ("twice", "first line has the name 'a' twice"),
  ):
    with pytest.raises(ConfigError, match=error):
      exams.problems(exams.entries_of([f"gpqa_diamond:{tmp_path}/{name}.csv"])[0])
  (tmp_path / "one.json").write_text('{"a": 1}')
  with pytest.raises(ConfigError, match="must be a list of objects"):
    exams.problems(exams.entries_of([f"svamp:{tmp_path}/one.json"])[0])


def test_an_exam_without_a_file_is_downloaded(tmp_path, monkeypatch):
  asked = []

  def snapshot_download(name, repo_type, allow_patterns):
    asked.append((name, repo_type, allow_patterns))
    if "nowhere" in name:
      raise OSError("no network")
    return str(tmp_path)

  monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
  file = write(tmp_path, "math500", [row for row, _, _ in PAPERS["math500"]])
  file.rename(tmp_path / "test.jsonl")
  assert len(exams.problems(exams.entries_of(["math500"])[0])) == 5
  assert len(exams.problems(exams.entries_of(["math500:me/mine/test*.jsonl"])[0])) == 5
  assert asked == [
    ("HuggingFaceH4/MATH-500", "dataset", ["test.jsonl"]),
    ("me/mine", "dataset", ["test*.jsonl"]),
  ]
  for path, error in (
    (
      "nowhere/x/test.jsonl",
      "cannot be downloaded from huggingface.co .OSError: no network.; give",
    ),
    ("me/mine/none.jsonl", "me/mine on huggingface.co has no file none.jsonl"),
  ):
    with pytest.raises(ConfigError, match=error):
      exams.problems(exams.entries_of([f"math500:{path}"])[0])
  assert all(download.is_name(exam.hub) for exam in exams.EXAMS.values() if exam.hub)


@pytest.mark.slow
def test_exams_are_evaluated_during_training_and_afterwards(tmp_path):
  file = write(tmp_path, "aime25", [row for row, _, _ in PAPERS["aime25"]])
  changes = {
    "eval.tasks": [f"aime25(function='flexible',samples=2,max_tokens=9):{file}"],
    "eval.every": 1,
    "eval.examples": 4,
    "eval.batch": 8,
  }
  config = small_config().replace(changes)
  config = with_section(config, "mesh", data=-1, tensor=1)
  config = with_section(config, "batch", prompts=8)
  step = train(config, tmp_path / "run")
  names = {name for name in step.metrics if name.startswith("eval/aime25/") and "_" not in name}
  assert names == {f"eval/aime25/{name}" for name in ("accuracy", "mean@2", "pass@2", "maj@2")}
  assert "eval/accuracy" in read_metrics(tmp_path / "run")[0]
  policy = load_policy(tmp_path / "run")
  alone = policy.evaluate(tasks=changes["eval.tasks"])
  assert alone["eval/aime25/accuracy"] == step.metrics["eval/aime25/accuracy"]
  assert "eval/accuracy" not in alone
  policy.export(tmp_path / "model")
  command = [sys.executable, "-m", "grpo_jax.evaluate", "--config=gsm8k"]
  command += [f"--config.model.path={tmp_path}/model", "--config.data.path=/nowhere"]
  command += ["--config.data.chat=False"]
  command += [f"--tasks={changes['eval.tasks'][0]}"]
  done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
  assert done.returncode == 0, done.stderr
  assert "5 problems of aime25" in done.stdout and "eval/aime25/maj@2" in done.stdout
  done = subprocess.run([*command, "--examples=3"], capture_output=True, text=True, env=os.environ)
  assert done.returncode == 2 and "write EXAM(examples=N):FILE" in done.stderr


@pytest.mark.parametrize("answer", ["", "AB", "K", "a"])
def test_the_answer_of_a_choice_is_one_letter(answer, tmp_path):
  write(tmp_path, "mmlu_pro", [mmlu_pro(1, "A") | {"answer": answer}])
  with pytest.raises(ConfigError, match="the letter of no option"):
    exams.problems(exams.entries_of([f"mmlu_pro:{tmp_path}"])[0])[0]


def test_programs_of_exams_have_the_limits_of_the_data_sets():
  for name in ("livecodebench", "humaneval"):
    _, options = calls.parse(exams.EXAMS[name].function, "x")
    assert options["case_seconds"] == 6 and options["memory"] == 4
    assert options["seconds"] < Config().reward.timeout
  (entry,) = exams.entries_of(["livecodebench(function='code(seconds=300,case_seconds=6)'):x"])
  assert entry.function == "code(seconds=300,case_seconds=6)"
