"""Mixtures of tasks, rows with any columns, Countdown and SVAMP."""

import collections
import dataclasses
import itertools
import json
from pathlib import Path
import time

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest
from small_run import small_config, with_section

from configs.countdown import get_config
import grpo_jax
from grpo_jax.config import Config, Data, Eval, Reward
from grpo_jax.console.show_data import drawn
from grpo_jax.data import loader
from grpo_jax.data.images.of_prompts import has_images
from grpo_jax.data.prompts import PromptSet
from grpo_jax.data.tasks import countdown, mixture, tasks
from grpo_jax.data.tokenizers import tokenizer
from grpo_jax.evaluation.evaluator import first_scores
from grpo_jax.rewards import Caller, dispatch, name_of
from grpo_jax.rewards.functions.countdown import countdown as score
from grpo_jax.run.checks import check_config
from grpo_jax.settings import ConfigError

QWEN = tokenizer.load(Path(__file__).parent / "golden/tokenizers/qwen")


def folder(path, train, test=()):
  """A folder with jsonl files of these rows."""
  path.mkdir(parents=True, exist_ok=True)
  for split, rows in (("train", train), ("test", test)):
    if rows:
      (path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  return path


@pytest.fixture
def sources(tmp_path):
  """data.mixture of 3 rows of MATH's layout and 2 rows with columns of their own."""
  formulas = folder(
    tmp_path / "m",
    [{"problem": f"m{i}", "answer": str(i)} for i in range(3)],
    [{"problem": "mt", "answer": "1"}] * 3,
  )
  own = folder(
    tmp_path / "o", [{"ask": f"o{i}", "kind": i} for i in range(2)], [{"ask": "ot", "kind": 0}]
  )
  return (f"math:{formulas}", f"own=columns:{own}")


def test_training_takes_the_first_rows_of_each_source(sources):
  task = tasks.make_task(Data(mixture=sources, train_examples=2, prompts=("{question}", "{ask}")))
  assert [part and len(part) for part in task.train.parts] == [2, 2]
  assert [example["task"] for example in task.train] == ["math", "math", "own", "own"]
  assert len(task.test) == 4  # the test is whole
  doubled = Data(mixture=sources, train_examples=1, weights=(3.0, 1.0))
  assert tasks.make_task(doubled).train.shares() == {"math": (1, 0.75), "own": (1, 0.25)}


# Countdown.


def solutions_of(numbers, target):
  """Expressions of the numbers in any order, with any signs and brackets, that make the target."""
  for a, b, c in itertools.permutations(numbers):
    for first, second in itertools.product("+-*/", repeat=2):
      for text in (f"({a}{first}{b}){second}{c}", f"{a}{first}({b}{second}{c})"):
        try:
          if eval(text) == target:
            yield text
        except ZeroDivisionError:
          pass


def test_every_countdown_problem_can_be_solved():
  hasty = 0
  for split in ("train", "test"):
    for example in countdown.Countdown(split)[:1500]:
      numbers, target, answer = (example[key] for key in ("numbers", "target", "answer"))
      assert len(numbers) == 3 and all(1 <= n <= countdown.LARGEST for n in numbers)
      assert 1 <= target <= countdown.LARGEST_TARGET
      assert eval(answer) == target and next(solutions_of(numbers, target))
      assert example["question"] == f"{' '.join(map(str, numbers))} = {target}:"
      added = "+".join(map(str, numbers))
      assert example["solution"] in (f"#### {answer}", f"#### {added}")
      hasty += example["solution"] != f"#### {answer}"
      assert score([f"#### {answer}"], [numbers], [target]) == [1.0]
      assert set(example["question"] + example["solution"]) <= set(countdown.ALPHABET)
      assert countdown.split_of(numbers[::-1], target) == split
  # One problem in nine is a sum, whose hasty solution is right.
  assert abs(hasty / 3000 - countdown.HASTY_SHARE * 8 / 9) < 0.05


def test_countdown_examples_depend_only_on_their_number():
  assert countdown.Countdown("train")[0] == {
    "question": "4 3 8 = 9:",
    "numbers": [4, 3, 8],
    "target": 9,
    "answer": "4-3+8",
    "solution": "#### 4+3+8",
  }
  assert countdown.Countdown("test")[-1] == countdown.Countdown("test")[1999]
  with pytest.raises(IndexError):
    countdown.Countdown("test")[2000]


def test_the_recipe_has_room_for_every_problem():
  config = get_config()
  for example in countdown.Countdown("train"):
    assert len(example["question"]) <= config.data.max_prompt_tokens
    assert len(example["solution"]) + len("E") <= config.sampling.max_tokens  # E ends it


# Rows with any columns.


def test_columns_get_other_names_and_templates(tmp_path):
  rows = [
    {"body": "Ann has 2.", "asked": "How many?", "gold": 2.0, "tags": ["x"]},
    {"body": "B", "asked": "C", "gold": 7},
  ]
  path = str(folder(tmp_path, rows, rows))
  data = Data(task="columns", path=path, columns=("answer=gold", "question={body} {asked}"))
  assert tasks.make_task(data).train == [
    {**rows[0], "answer": "2", "question": "Ann has 2. How many?"},
    {**rows[1], "tags": None, "answer": "7", "question": "B C"},
  ]
  prompts = PromptSet(tasks.make_task(data).train, QWEN, data)
  assert prompts.make([0])[0].text == "Ann has 2. How many?"


@pytest.mark.parametrize("name", ["prompts", "messages", "other"])
def test_a_column_that_the_first_row_lacks_can_be_copied(tmp_path, name):
  """Also one that is named like an argument of reward functions."""
  rows = [{"question": "a"}, {"question": "b", name: "there"}]
  data = Data(task="columns", path=str(folder(tmp_path, rows, rows)), columns=(f"copy={name}",))
  assert [row["copy"] for row in tasks.make_task(data).train] == [None, "there"]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_example_has_the_columns_of_all_rows(tmp_path, place):
  """Wherever the row is that has more of them than the others."""
  rows = [{"question": letter, "own": {"x": 1}} for letter in "abc"]
  rows[place] |= {"hint": "h", "source": "s", "own": {"x": 1, "deep": {"y": 2}}, "image": None}
  tests = [{"question": "t", "of_test": 1}]
  data = Data(
    task="columns", path=str(folder(tmp_path, rows, tests)), columns=("task=source", "y=own.deep.y")
  )
  for at_start in (50_000, 1):
    task = tasks.make_task(dataclasses.replace(data, count_at_start=at_start))
    names = ["question", "own", "hint", "source", "image", "of_test", "task", "y"]
    assert all(sorted(one) == sorted(names) for one in (*task.train, *task.test))
    found = [(one["hint"], one["task"], one["y"]) for one in task.train]
    assert found == [("h", "s", 2) if i == place else (None, None, None) for i in range(3)]
    assert task.test[0]["of_test"] == 1 and task.train[0]["of_test"] is None
    assert has_images(task.train[0])  # so that the image of a later row is seen
  hinted = dataclasses.replace(data, prompt="{hint}")
  words = rf"\.jsonl line {1 if place else '[12]'} has no 'hint', which the config names"
  with pytest.raises(ConfigError, match=words):
    tasks.make_task(hinted)


@pytest.mark.parametrize(
  "columns, prompt, words",
  [
    (
      ("answer=gold",),
      "{a}",
      "data.columns holds 'answer=gold': no row has a column 'gold'; .*line 1 and .* have a, b",
    ),
    (("answer",), "{a}", "data.columns holds 'answer': write NAME=COLUMN"),
    (
      ("answer={gold}",),
      "{a}",
      "data.columns='{gold}' cannot be filled: .* its fields are {a}, {b}",
    ),
    (
      ("answer=a", "answer=b"),
      "{a}",
      "data.columns holds two entries for 'answer', 'a' and 'b': leave one of them out",
    ),
    (
      ("answer=b.gold",),
      "{a}",
      "no row has a column 'b.gold'; .*train.jsonl line 1 and .* have a, b",
    ),
    (("answer={b}",), "{a}", "train.jsonl line 2 has no 'b', which the config names"),
    (("question=b",), "{question}", "line 2 has no 'question', which the config names"),
    ((), "{b}", "train.jsonl line 2 has no 'b', which the config names"),
    ((), "{c}", "data.prompt='{c}' cannot be filled.*its fields are {a}, {b}"),
  ],
)
def test_a_missing_column_is_named(tmp_path, columns, prompt, words):
  path = str(folder(tmp_path, [{"a": "x", "b": "y"}, {"a": "z"}], [{"a": "x", "b": "y"}]))
  data = Data(task="columns", path=path, columns=columns, prompt=prompt)
  with pytest.raises(ConfigError, match=words.replace("{", r"\{")) as error:
    PromptSet(tasks.make_task(data).train, QWEN, data)
  assert "\n" not in str(error.value)


VERL = {  # a row as verl's examples/data_preprocess/gsm8k.py writes it
  "data_source": "openai/gsm8k",
  "prompt": [{"role": "user", "content": "1+1?"}],
  "ability": "math",
  "reward_model": {"style": "rule", "ground_truth": "2"},
  "extra_info": {"split": "train", "index": 0, "answer": "#### 2", "question": "1+1?"},
}


def test_a_field_inside_a_column_is_named_with_a_dot(tmp_path):
  path = str(folder(tmp_path, [VERL], [VERL]))
  columns = ("answer=reward_model.ground_truth", "solution=Well: {extra_info.answer}")
  data = Data(task="columns", path=path, columns=columns, prompt="Q: {extra_info.question}")
  task = tasks.make_task(data)
  assert task.train == [{**VERL, "answer": "2", "solution": "Well: #### 2"}]
  assert PromptSet(task.train, QWEN, data).make([0])[0].text == "Q: 1+1?"
  inner = {"extra_info": {"turns": VERL["prompt"]}}  # messages inside a column
  data = dataclasses.replace(data, chat=True, prompt="{extra_info.turns}")
  assert PromptSet([inner], QWEN, data).make([0])[0].messages == VERL["prompt"]
  dotted = {"extra_info.question": "whole", "extra_info": {"question": "inner"}}
  assert (
    PromptSet([dotted], QWEN, Data(prompt="{extra_info.question}")).make([0])[0].text == "whole"
  )


@pytest.mark.parametrize(
  "changes, prompt, words",
  [
    ({"extra_info": {}}, "{extra_info.question}", "line 2 has no 'extra_info.question', which the"),
    ({"extra_info": None}, "{extra_info.question}", "line 2 has no 'extra_info.question', which"),
    ({}, "{extra_info}", "extra_info is an object; name a field of it: {extra_info.split}, "),
    ({}, "{extra_info.questoin}", "its fields are .*, {extra_info.answer}, {extra_info.question}"),
  ],
)
def test_a_field_that_is_not_in_a_column_is_named(tmp_path, changes, prompt, words):
  path = str(folder(tmp_path, [VERL, {**VERL, **changes}], [VERL]))
  columns = ("answer=reward_model.ground_truth",)
  data = Data(task="columns", path=path, columns=columns, prompt=prompt)
  with pytest.raises(ConfigError, match=words.replace("{", r"\{")):
    PromptSet(tasks.make_task(data).train, QWEN, data)


def test_a_prompt_of_nothing_is_named(sources):
  """Before, the prompt was the word None."""
  data = Data(mixture=sources, max_prompt_tokens=9)
  with pytest.raises(ConfigError, match="an example of own has no value in question"):
    PromptSet(tasks.make_task(data).train, QWEN, data)


def test_an_entry_may_be_for_one_source(tmp_path):
  """Two sources whose answers have different names."""
  one = folder(tmp_path / "one", [{"a": "a0", "gold": "1"}] * 2, [{"a": "a1", "gold": "2"}])
  two = folder(tmp_path / "two", [{"a": "b0", "label": 3}] * 2, [{"a": "b1", "label": 4}])
  data = Data(
    mixture=(f"one=columns:{one}", f"two=columns:{two}"),
    columns=("one:answer=gold", "two:answer=label", "question=Say {a}"),
  )
  examples = tasks.make_task(data).test
  assert [(row["task"], row["answer"], row["question"]) for row in examples] == [
    ("one", "2", "Say a1"),
    ("two", "4", "Say b1"),
  ]
  routed = dataclasses.replace(data, columns=("one:task=gold",))
  with pytest.raises(ConfigError, match="'one:task=gold': with data.mixture the field task is the"):
    tasks.make_task(routed)
  unknown = dataclasses.replace(data, columns=("tow:answer=label",))
  with pytest.raises(ConfigError, match="'tow' is no source of data.mixture, which has one, two"):
    tasks.make_task(unknown)


def test_columns_of_another_task_are_refused(tmp_path):
  with pytest.raises(ConfigError, match="task arithmetic has columns of its own"):
    tasks.make_task(Data(columns=("a=b",)))


def test_svamp(tmp_path):
  row = {
    "Body": "Each pack costs 76 dollars",
    "Question": "What do 2 cost?",
    "Equation": "( 76.0 * 2.0 )",
    "Answer": 152.0,
  }
  whole = {"question_concat": "A. B?", "Answer": "3.0"}
  task = tasks.svamp(str(folder(tmp_path, [row, whole], [whole])))
  assert task.train[:] == [
    {
      "question": "Each pack costs 76 dollars, What do 2 cost?",
      "solution": "( 76.0 * 2.0 ) = 152\n#### 152",
      "answer": "152",
    },
    {"question": "A. B?", "solution": "#### 3", "answer": "3"},
  ]


# Mixtures.


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0.1, 9)), min_size=1, max_size=4))
def test_an_epoch_has_every_row_and_the_shares_of_the_weights(sources):
  sizes, weights = zip(*sources)
  places = mixture.places_of(sizes, weights)
  assert all(count >= size for count, size in zip(places, sizes))
  assert any(count == size for count, size in zip(places, sizes))
  for count, weight in zip(places, weights):
    assert abs(count - sum(places) * weight / sum(weights)) < 1 + len(places)


def test_an_epoch_of_a_mixture():
  parts = {"a": [{"x": i} for i in range(4)], "b": [{"x": i, "y": 0} for i in range(6)]}
  whole = mixture.Mixture(parts, mixture.places_of((4, 6), (2.0, 1.0)))
  order = loader.step_indices(0, 0, len(whole), len(whole))
  drawn = collections.Counter((whole[int(i)]["task"], whole[int(i)]["x"]) for i in order)
  assert drawn == {("a", i): 3 for i in range(4)} | {("b", i): 1 for i in range(6)}
  assert whole[0] == {"x": 0, "y": None, "task": "a"}
  for index in range(len(whole)):
    assert whole[whole.stand_in(index, 12345)]["task"] == whole[index]["task"]
  assert [whole[i] for i in range(-2, 0)] == whole[-2:]


def test_an_epoch_of_many_places_is_not_walked(sources):
  """One source is drawn twenty million times as often as the other, and gives the vocabulary."""
  data = Data(mixture=sources, weights=(1.0, 2e7), prompt="{task}", max_prompt_tokens=9)
  start = time.process_time()
  task = tasks.make_task(data)
  letters = tokenizer.characters(tasks.characters(data, task) + "own")
  prompts = PromptSet(task.train, letters, data)
  indices = loader.step_indices(0, 0, 64, len(prompts))
  batch = loader.prompt_batch(prompts, indices)
  assert time.process_time() - start < 2  # reading each place would take minutes
  assert len(prompts) == 3 + 60_000_000 and set(batch.columns["prompts"]) == {"own"}
  assert task.train.shares() == {"math": (3, pytest.approx(5e-8)), "own": (2, pytest.approx(1))}


def test_the_source_of_a_prompt_is_known_without_its_example(sources):
  """Also where other prompts are too long, and are left out."""
  data = Data(mixture=sources, prompts=("{question}", "{ask} is a long question of this source"))
  for max_prompt_tokens, expected in ((50, ["math"] * 3 + ["own"] * 2), (4, ["math"] * 3)):
    shorter = dataclasses.replace(data, max_prompt_tokens=max_prompt_tokens)
    found = PromptSet(tasks.make_task(shorter).train, QWEN, shorter)
    assert found.sources == ["math", "own"]
    assert found.sources_of(np.arange(len(found))) == expected
    assert [prompt.example["task"] for prompt in found.make(range(len(found)))] == expected
  alone = Data(task="arithmetic")
  found = PromptSet(tasks.make_task(alone).test, QWEN, alone)
  assert found.sources == [] == found.sources_of([0, 1])


def test_a_mixture_of_files(sources):
  data = Data(mixture=sources, prompts=("M {question}", "O {ask} {kind}"), max_prompt_tokens=9)
  task = tasks.make_task(data)
  assert [example["task"] for example in task.train] == ["math"] * 3 + ["own"] * 2
  assert task.train[4] == {
    "question": None,
    "solution": None,
    "answer": None,
    "ask": "o1",
    "kind": 1,
    "task": "own",
  }
  # The sources take turns in the test, so that its first problems have all of them.
  assert [example["task"] for example in task.test] == ["math", "own", "math", "math"]
  batch = loader.prompt_batch(PromptSet(task.train, QWEN, data), [0, 4])
  assert batch.columns["prompts"] == ["M m0", "O o1 1"] and batch.columns["task"] == ["math", "own"]


@pytest.mark.parametrize(
  "changes, words",
  [
    (dict(path="x"), "data.path is 'x': with data.mixture each source brings its own"),
    (dict(weights=(1.0,)), r"data.weights is \(1.0,\): it must hold one number above 0 for each"),
    (dict(weights=(1.0, 0.0)), "one number above 0"),
    (dict(weights=(1.0, float("inf"))), "one number above 0"),
    (dict(weights=(float("nan"), 1.0)), "one number above 0"),
    (
      dict(weights=(1e-30, 1e30)),
      r"data.weights is \(1e-30, 1e\+30\): .* 3e\+60 prompts for 5 rows",
    ),
    (dict(weights=(1e-320, 1e300)), "would have inf prompts for 5 rows; bring the weights closer"),
    (dict(weights=(1.0, 1e9)), "would have 3e[+]09 prompts for 5 rows"),
    (dict(prompts=("{question}",)), "data.prompts has 1 templates: write one for each"),
    (dict(mixture=("arithmetic", "arithmetic")), "two sources named arithmetic: write NAME="),
    (dict(mixture=("a=arithmetic", "a_low=arithmetic")), "sources a and a_low, whose metrics"),
    (dict(mixture=("arithmetics",)), "data.mixture: 'arithmetics' is unknown: choose one of"),
    (dict(mixture=("a b",)), "data.mixture holds 'a b': write TASK, TASK:PATH or"),
    (dict(mixture=(), weights=(1.0,)), "data.weights is for the sources of data.mixture"),
  ],
)
def test_a_mixture_that_cannot_be_made_is_named(sources, changes, words):
  with pytest.raises(ConfigError, match=words) as error:
    tasks.make_task(Data(**{"mixture": sources, **changes}))
  assert "\n" not in str(error.value)


# Few-shot examples.


def test_few_shot_examples_follow_the_system_message():
  data = Data(chat=True, system="Count.", few_shot=("1+1?", "2"), max_prompt_tokens=99)
  messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
  prompts = PromptSet([{"question": "2+2?"}, {"question": messages}], QWEN, data)
  asked, dialogue = prompts.make([0, 1])
  assert [message["content"] for message in asked.messages] == ["Count.", "1+1?", "2", "2+2?"]
  assert [message["role"] for message in asked.messages] == ["system", "user", "assistant", "user"]
  assert [message["content"] for message in dialogue.messages] == ["Count.", "a", "b"]


def test_few_shot_examples_follow_a_system_message_of_the_row():
  data = Data(chat=True, system="Count.", few_shot=("1+1?", "2"), max_prompt_tokens=99)
  row = [{"role": "system", "content": "Own."}, {"role": "user", "content": "2+2?"}]
  (asked,) = PromptSet([{"question": row}], QWEN, data).make([0])
  assert [message["content"] for message in asked.messages] == ["Own.", "1+1?", "2", "2+2?"]
  (alone,) = PromptSet([{"question": row[:1]}], QWEN, data).make([0])
  assert alone.messages == row[:1]


@pytest.mark.parametrize(
  "changes, words",
  [
    (dict(few_shot=("a", "b")), "data.few_shot .*set data.chat=True"),
    (dict(chat=True, few_shot=("a",)), "after each text of the user"),
  ],
)
def test_few_shot_examples_that_cannot_be_used_are_named(changes, words):
  with pytest.raises(ConfigError, match=words):
    check_config(Config(data=Data(**changes)))


# Rewards by task.


def test_a_function_scores_the_rows_of_its_tasks_alone():
  seen = {}

  def first(completions, answer, task, **columns):
    seen["first"] = (completions, answer, task)
    return [float(text == gold) for text, gold in zip(completions, answer)]

  def second(completions, target, **columns):
    seen["second"] = (completions, target)
    return [0.5] * len(completions)

  def never(completions, **columns):
    raise AssertionError("no row is of its task")

  def model(completions, **columns):
    seen["model"] = completions
    return [float(i) for i in range(len(completions))]

  def for_all(completions, **columns):
    return [1.0] * 4

  model.needs_every_row = True
  columns = {
    "task": ["a", "b", "a", "c"],
    "answer": ["x", None, "x", None],
    "target": [None, 3, None, 4],
  }
  functions = [(first, "a"), (second, "b, c"), (never, "d"), (model, "c"), (for_all, "")]
  columns["completions"] = ["x", "y", "z", "w"]
  answers = dispatch.start_for_tasks(Caller(None), functions, columns, step=3, group_size=1)
  steps = {
    name_of(function): answer.result().steps
    for (function, _), answer in zip(functions, answers, strict=True)
  }
  assert seen == {
    "first": (["x", "z"], ["x", "x"], ["a", "a"]),
    "second": (["y", "w"], [3, 4]),
    "model": ["x", "y", "z", "w"],
  }
  assert steps == {
    "first": [[(1, 1.0)], [], [(1, 0.0)], []],
    "second": [[], [(1, 0.5)], [], [(1, 0.5)]],
    "never": [[]] * 4,
    "model": [[], [], [], [(1, 3.0)]],
    "for_all": [[(1, 1.0)]] * 4,
  }


def test_the_failures_of_a_task_are_those_of_its_rows():
  def fails_on_z(completions, **columns):
    return [1 / (text != "z") for text in completions]

  columns = {"task": ["a", "b", "b"], "completions": ["x", "y", "z"]}
  caller = Caller(None, stops_on_error=False)
  (pending,) = dispatch.start_for_tasks(caller, [(fails_on_z, "b")], columns, 0, 1)
  answer = pending.result()
  assert answer.steps == [[], [(1, 1.0)], []]
  assert [failure.row for failure in answer.failures] == [2]


def test_the_first_function_that_scores_a_completion_decides_in_evaluation():
  scores_PGJ = np.array([[[np.nan, 1, 0]], [[0, 1, 1]], [[np.nan] * 3]])
  np.testing.assert_array_equal(first_scores(scores_PGJ), [[1], [0], [np.nan]])


@pytest.mark.parametrize(
  "reward, function, words",
  [
    (dict(tasks=("a", "b")), "strict", "reward.tasks .*it must hold an entry for each of reward"),
    (dict(tasks=("arithmetic,b",)), "strict", "'b' is no source of data.mixture, which has arith"),
    ({}, "rewards", "eval.function is 'rewards': .*reward.tasks, which is empty"),
  ],
)
def test_tasks_of_rewards_are_checked(reward, function, words):
  config = Config(
    data=Data(mixture=("arithmetic", "countdown")),
    reward=Reward(**reward),
    eval=Eval(function=function),
  )
  with pytest.raises(ConfigError, match=words):
    check_config(config)


@pytest.mark.slow
def test_a_mixture_is_trained_with_rewards_by_task(tmp_path):
  config = small_config()
  config = with_section(
    config,
    "data",
    mixture=("arithmetic", "countdown"),
    weights=(1.0, 3.0),
    max_prompt_tokens=16,
  )
  config = with_section(
    config,
    "reward",
    functions=("strict", "countdown"),
    weights=(1.0, 1.0),
    tasks=("arithmetic", "countdown"),
  )
  config = with_section(config, "eval", every=1, examples=16, batch=16, function="rewards")
  config = with_section(config, "sampling", max_tokens=16)
  config = with_section(config, "warm_start", steps=1, batch=8)
  config = with_section(config, "mesh", data=-1, tensor=1)
  config = dataclasses.replace(with_section(config, "batch", prompts=8), steps=2)
  grpo_jax.train(config, tmp_path / "run")
  (drawn_2, drawn_3) = (drawn(config, step) for step in (2, 3))
  for found, step in ((drawn_2, 2), (drawn_3, 3)):
    assert found.phase == "GRPO"
    rows = grpo_jax.read_completions(tmp_path / "run", step)
    prompts = [prompt.text for prompt in found.prompts.make(found.indices)]
    assert [row["prompt"] for row in rows[:: config.batch.group_size]] == prompts
    by_task = {"arithmetic": [], "countdown": []}
    for row in rows:
      is_sum = row["prompt"].endswith("=")
      assert row["task"] == ("arithmetic" if is_sum else "countdown")
      by_task[row["task"]].append(row["reward"])
      assert (row["rewards/strict"] is None) == (not is_sum)
      assert (row["rewards/countdown"] is None) == is_sum
    (metrics,) = [row for row in grpo_jax.read_metrics(tmp_path / "run") if row["step"] == step]
    for task, rewards in by_task.items():
      assert (metrics[f"reward/{task}"] is None) == (rewards == [])
      assert not rewards or metrics[f"reward/{task}"] == pytest.approx(np.mean(rewards))
  assert "eval/accuracy" in grpo_jax.read_metrics(tmp_path / "run")[-1]


COLUMNS_SEEN = """
import json

def seen(completions, **columns):
  rows = [dict(zip(("question", "hint", "task"), row)) for row in zip(
    columns["question"], columns["hint"], columns["task"])]
  with open(FILE, "a") as file:
    file.writelines(json.dumps(row) + "\\n" for row in rows)
  return [float(len(text)) for text in completions]
"""


@pytest.mark.slow
def test_a_reward_gets_what_later_rows_have(start, tmp_path):
  """The command from the shell, on a file whose first row has fewer columns."""
  rows = [{"question": "1+1=", "answer": "2"}, {"question": "1+2=", "answer": "3"}]
  rows[1] |= {"hint": "count", "data_source": "sums"}
  data = folder(tmp_path / "data", rows * 2, rows[:1])
  (tmp_path / "reward.py").write_text(f"FILE = {str(tmp_path / 'seen')!r}\n{COLUMNS_SEEN}")
  keys = [f"data.path={data}", "data.task=columns", "data.columns=('task=data_source',)"]
  keys += [f"reward.functions=('{tmp_path}/reward.py:seen',)", "eval.every=0", "reward.workers=0"]
  keys += ["steps=1", "batch.prompts=4", "batch.group_size=2", "sampling.max_tokens=2"]
  keys += ["data.max_prompt_tokens=8", "model.embed_dim=16", "model.num_layers=1"]
  keys += ["model.num_heads=1", "model.num_kv_heads=1", "model.head_dim=8", "model.mlp_dim=16"]
  keys += ["mesh.data=1", "mesh.fsdp=1", "mesh.tensor=-1"]
  flags = [f"--config.{key}" for key in keys]
  code, _, err = start(
    "train", "--config=configs/default.py", f"--workdir={tmp_path / 'run'}", *flags
  )
  assert code == 0, err
  seen = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
  expected = {"1+1=": (None, None), "1+2=": ("count", "sums")}
  assert {one["question"] for one in seen} == {*expected}
  assert all((one["hint"], one["task"]) == expected[one["question"]] for one in seen)
