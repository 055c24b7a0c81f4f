import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from grpo_jax import rewards
from grpo_jax.data.arithmetic import Arithmetic
from grpo_jax.rewards import symbolic
from grpo_jax.rewards.answers import boxed, flexible, strict
from grpo_jax.rewards.overlong import overlong
from grpo_jax.settings import ConfigError


def one(function, text, gold="72"):
  return function(completions=[text], answer=[gold], prompts=["?"])[0]


def gsm8k(split):
  folder = os.environ.get("GSM8K_DIR", pathlib.Path(__file__).parents[2] / "shared/data/gsm8k")
  path = pathlib.Path(folder) / f"{split}.jsonl"
  if not path.is_file():
    pytest.skip(f"GSM8K's text is not at {path}; set GSM8K_DIR to its folder")
  return [json.loads(line)["answer"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("split, size", [("train", 7473), ("test", 1319)])
def test_every_gsm8k_gold_scores_one(split, size):
  solutions = gsm8k(split)
  golds = [text.split("####")[1].strip() for text in solutions]
  plain = [gold.replace(",", "") for gold in golds]
  assert len(solutions) == size
  for answers in (golds, plain):
    assert sum(strict(completions=solutions, answer=answers)) == size
    assert sum(strict(completions=[f"... #### {g}" for g in golds], answer=answers)) == size
    assert sum(flexible(completions=solutions, answer=answers)) == size
    assert sum(boxed(completions=[f"So \\boxed{{{g}}}." for g in golds], answer=answers)) == size
    assert sum(strict(completions=[s.replace("####", "=") for s in solutions], answer=answers)) == 0


@pytest.mark.parametrize(
  "text, gold",
  [
    ("#### 72", "72"),
    ("#### 72.", "72"),
    ("#### 72.0", "72"),
    ("#### 72.00", "72"),
    ("#### $72", "72"),
    ("####72", "72"),
    ("#### **72**", "72"),
    ("**#### 72**", "72"),
    ("#### \\$72", "72"),
    ("#### $72.50", "72.5"),
    ("#### 1,000", "1000"),
    ("#### 1000", "1,000"),
    ("#### 1,234,567.", "1234567"),
    ("#### -5", "-5"),
    ("#### −5", "-5"),
    ("#### -$5", "-5"),
    ("#### 72%", "72"),
    ("#### 72 apples", "72"),
    ("#### +72", "72"),
    ("#### .5", "0.50"),
    ("#### -0", "0"),
    ("#### $\\boxed{72}$", "72"),
    ("#### `72`", "72"),
    ("####\n72", "72"),
    ("#### 072", "72"),
    ("##### 72", "72"),
    ("#### 5\n#### 72", "72"),
    ("#### 72\nNext question: 15 apples", "72"),
    ("#### 72 apples.", "72"),
  ],
)
def test_strict_accepts(text, gold):
  assert one(strict, text, gold) == 1.0


@pytest.mark.parametrize(
  "text",
  [
    "72",
    "The answer is 72.",
    "#### no idea. Problem mentions 72",
    "#### 72 or 73",
    "#### 73 or 72",
    "#### 71, 72",
    "#### 71,72",
    "#### 72,000",
    "#### 7,2",
    "#### 72/100",
    "#### 72e0",
    "#### 7.2e1",
    "#### 72²",
    "#### 72½",
    "#### 72.5",
    "#### -72",
    "#### 720",
    "#### 172",
    "#### 72\\pi",
    "#### 72\n#### 73",
    "#### 72\n####",
    "### 72",
    "####",
    "",
    "#### 7 2",
    "#### 72.0000000000000000000000000001",
    "#### 71.99999999999999999999999",
    "#### 72-3",
    "#### ..72",
    "#### x72",
  ],
)
def test_strict_refuses(text):
  assert one(strict, text) == 0.0


@pytest.mark.parametrize(
  "text, gold",
  [
    ("The answer is 72.", "72"),
    ("so 72.0", "72"),
    ("it costs $72", "72"),
    ("####72", "72"),
    ("**72**", "72"),
    ("1,000", "1000"),
    ("3 then 72...", "72"),
    ("10-5=5", "5"),
    ("10-5", "5"),
    ("(3)-5", "5"),
    ("it is -5 degrees", "-5"),
    ("-$5", "-5"),
    ("(3,72)", "72"),
    ("3,4,72.", "72"),
    ("72, as I said", "72"),
    ("it is.72", "72"),
    ("it is .72", "0.72"),
    ("1,234,567.89", "1234567.890"),
  ],
)
def test_flexible_accepts(text, gold):
  assert one(flexible, text, gold) == 1.0


@pytest.mark.parametrize(
  "text, gold",
  [
    ("72 or 73", "72"),
    ("none", "72"),
    ("", "72"),
    ("72e0", "0"),
    ("72e0", "72"),
    ("1,072", "72"),
    ("-72", "72"),
    ("2.7.72", "72"),
  ],
)
def test_flexible_refuses(text, gold):
  assert one(flexible, text, gold) == 0.0


@pytest.mark.parametrize(
  "text, gold",
  [
    ("\\boxed{72}", "72"),
    ("\\boxed{5} no: \\boxed{72}.", "72"),
    ("\\boxed{ 72.0 }", "72"),
    ("\\boxed{\\$72}", "72"),
    ("\\boxed{72\\%}", "72"),
    ("\\boxed{72\\text{ apples}}", "72"),
    ("\\boxed{\\text{72}}", "72"),
    ("\\boxed{72^\\circ}", "72"),
    ("\\boxed{10{,}000}", "10000"),
    ("\\boxed{10\\,000}", "10,000"),
    ("\\boxed{10,\\!000}", "10000"),
    ("\\boxed{{72}}", "72"),
    ("\\boxed{\\boxed{72}}", "72"),
    ("\\boxed {72} for 3 reasons", "72"),
    ("\\boxed{-5}", "-5"),
  ],
)
def test_boxed_accepts(text, gold):
  assert one(boxed, text, gold) == 1.0


@pytest.mark.parametrize(
  "text",
  [
    "72",
    "#### 72",
    "\\boxed{72",
    "\\boxed{72} or \\boxed{73}",
    "\\boxed{72 or 73}",
    "\\boxed{72}, no, \\boxed{",
    "\\boxed{}",
    "\\boxed{\\frac{72}{2}}",
    "\\boxed{\\sqrt{72}}",
    "\\boxed{72\\pi}",
    "\\boxed{72\n73}",
    "\\boxed 72",
    "\\boxed{72^2}",
  ],
)
def test_boxed_refuses(text):
  assert one(boxed, text) == 0.0


def written(number, decimals, commas, zeros):
  whole, _, fraction = (
    f"{abs(number):,}".partition(".") if commas else f"{abs(number)}".partition(".")
  )
  return f"{'-' if number < 0 else ''}{whole}" + (
    f".{decimals}{'0' * zeros}" if decimals or zeros else ""
  )


@given(
  st.integers(-(10**12), 10**12),
  st.sampled_from(["", "5", "25", "07"]),
  st.booleans(),
  st.integers(0, 3),
  st.sampled_from(["{}", "{}.", "${}", "**{}**", " {} ", "{}%", "{} apples", "\\({}\\)"]),
)
@example(0, "", False, 2, "{}")
def test_a_number_scores_one_however_it_is_written(number, decimals, commas, zeros, form):
  gold = written(number, decimals, False, 0)
  text = form.format(written(number, decimals, commas, zeros))
  for completion, function in (
    (f"#### {text}", strict),
    (f"It is {text}", flexible),
    (f"\\boxed{{{text}}}", boxed),
  ):
    assert one(function, completion, gold) == 1.0
    assert one(function, completion, written(number + 1, decimals, True, 0)) == 0.0


@given(st.text(alphabet="0123456789.,-$#\\boxed{} \nea%", max_size=60), st.integers(0, 99))
def test_any_text_scores_zero_or_one(text, gold):
  for function in (strict, flexible, boxed):
    assert one(function, text, str(gold)) in (0.0, 1.0)
    assert (
      one(function, f"{text}\n#### {gold} or {gold + 1} \\boxed{{{gold},{gold + 1}}}", str(gold))
      == 0.0
    )


@pytest.mark.parametrize(
  "body",
  [
    "1" * 10**6,
    "1," * 500_000,
    "1,000," * 170_000,
    "1." * 500_000,
    "1e" * 500_000,
    "-" * 10**6,
    "$" * 10**6,
    "\\" * 10**6,
    "{" * 10**6,
    "1 " * 500_000,
    ".1" * 500_000,
    "#" * 10**6,
    "\\boxed{" * 140_000,
    "\\text" * 200_000,
    "1,000\\," * 140_000,
  ],
  ids=range(15),
)
def test_a_million_characters_take_linear_time(body):
  start = time.process_time()
  for function in (strict, flexible, boxed):
    one(function, body)
    one(function, f"#### {body} \\boxed{{{body}}}")
  assert time.process_time() - start < 10  # quadratic would be hours


def test_a_gold_that_is_no_number_is_not_scored():
  assert strict(completions=["#### 72", "#### 72"], answer=["seventy", "72"]) == [None, 1.0]


def test_score_sums_what_is_there():
  def length(completions, **columns):
    return [len(text) for text in completions]

  def sometimes(completions, prompts, **columns):
    return [1 if prompt == "a" else None for prompt in prompts]

  columns = {"prompts": ["a", "b"], "answer": ["3", "3"]}
  total, scores, steps = rewards.score(
    [length, sometimes, strict], [0.5, 2.0, 1.0], ["#### 3", "four"], columns
  )
  assert total.dtype == np.float32 and total.tolist() == [0.5 * 6 + 2 + 1, 0.5 * 4]  # 6 and 2
  assert list(scores) == ["length", "sometimes", "strict"]
  np.testing.assert_array_equal(scores["sometimes"], [1, np.nan])
  total, _, _ = rewards.score([sometimes], [2.0], ["x", "y"], columns)
  np.testing.assert_array_equal(total, [2, np.nan])


def test_a_list_of_steps_counts_its_mean_and_a_number_is_one_step_at_the_end():
  def steps(completions, **_):
    return [[(2, 1), (5, 0.5)], [], None]

  def whole(completions, **_):
    return [2, None, 3.0]

  total, scores, found = rewards.score([steps, whole], [1.0, 10.0], ["abcde", "abc", ""], {})
  np.testing.assert_array_equal(scores["steps"], np.float32([0.75, np.nan, np.nan]))
  np.testing.assert_array_equal(total, np.float32([20.75, np.nan, 30]))
  assert found == {"steps": [[(2, 1.0), (5, 0.5)], [], []], "whole": [[(5, 2.0)], [], [(1, 3.0)]]}


@pytest.mark.parametrize(
  "text, expected",
  [
    ("7+15=22;22-6=16;16+9=25;#### 25", [(8, 1), (16, 1), (24, 1), (31, 1)]),
    (
      "7+15=22;22-6=17;17+9=26;#### 26",
      [(8, 1), (16, 0), (24, 0), (31, 0)],
    ),  # after an error nothing is as it should be
    ("#### 25", [(7, 1)]),
    ("#### 24", [(7, 0)]),
    ("7+15=22;#### 25", [(8, 1), (15, 1)]),  # the answer is right wherever it comes
    ("7+15=22;7+15=22;", [(8, 1), (16, 0)]),  # a step said twice earns once
    ("7+15=22;22-6=16;16+9=25;25+1=26;", [(8, 1), (16, 1), (24, 1), (32, 0)]),
    ("7+15=22", [(7, 0)]),  # unfinished
    ("", [(1, 0)]),
    (";;", [(1, 0), (2, 0)]),
  ],
)
def test_worked_steps(text, expected):
  found = rewards.REWARDS["worked_steps"](completions=[text], question=["7+15-6+9="], answer=["25"])
  assert found == [[(end, float(reward)) for end, reward in expected]]


def test_every_worked_solution_of_the_task_earns_all_its_steps():
  for example in Arithmetic("train")[:300]:
    (steps,) = rewards.REWARDS["worked_steps"](
      completions=[example["solution"]], question=[example["question"]], answer=[example["answer"]]
    )
    assert len(steps) == example["solution"].count(";") + 1 and all(
      reward == 1 for _, reward in steps
    )


def test_overlong_by_hand():
  """DAPO's: 20480 tokens, of which 4096 are the margin."""
  lengths = [16384, 17408, 18432, 20480, 20481]
  np.testing.assert_array_equal(
    overlong(np.array(lengths), 20480, 4096), np.float32([0, -0.25, -0.5, -1, -1])
  )


@pytest.mark.parametrize(
  "bad, message",
  [
    (lambda completions, **_: [1.0], "returned 1 scores for 2 completions"),
    (lambda completions, **_: 1.0, "must return a list"),
    (lambda completions, **_: ["x", 1], "must return a list"),
    (lambda completions, **_: [1, float("inf")], "infinite"),
    (lambda completions, **_: [1, [2, 3]], "must return a list"),
    (lambda completions, **_: [1, [(2, 1)]], "ends outside"),
    (lambda completions, **_: [[(1, float("nan"))], 1], "infinite"),
  ],
)
def test_score_names_the_function_that_misbehaves(bad, message):
  bad.__name__ = "my_reward"
  with pytest.raises(ConfigError, match=f"my_reward.*{message}"):
    rewards.score([bad], [1.0], ["a", "b"], {})


@pytest.mark.parametrize(
  "functions, weights, message",
  [
    ([strict], [1.0, 2.0], "reward.weights"),
    ([], [], "reward.weights"),
  ],
)
def test_score_refuses_functions_and_weights_that_do_not_match(functions, weights, message):
  with pytest.raises(ConfigError, match=message):
    rewards.score(functions, weights, ["a"], {"answer": ["1"]})


def test_two_rewards_of_one_name_are_refused_at_the_start(tmp_path):
  file = tmp_path / "mine.py"
  file.write_text("def strict(completions, **columns):\n  return [0.0] * len(completions)\n")
  with pytest.raises(ConfigError, match="same name"):
    rewards.resolve_all(["strict", f"{file}:strict"], None)
  assert rewards.resolve_all(["strict", "flexible"], None) == [strict, rewards.REWARDS["flexible"]]


def test_a_folder_with_a_config_is_a_model(tmp_path):
  (tmp_path / "learned").mkdir()
  (tmp_path / "learned" / "config.json").write_text("{}")
  found = rewards.resolve_all(["strict", str(tmp_path / "learned")], lambda name: boxed)
  assert found == [strict, boxed]
  with pytest.raises(
    ConfigError,
    match="eval.function: .*learned' is a model's folder, which only reward.functions may name",
  ):
    rewards.resolve(str(tmp_path / "learned"), "eval.function")


def test_resolve(tmp_path):
  file = tmp_path / "mine.py"
  file.write_text(
    "def shout(completions, **columns):\n  return [float(t.isupper()) for t in completions]\nthree = 3\n"
  )
  assert rewards.resolve("strict") is strict
  assert rewards.resolve(f"{file}:shout")(completions=["A", "a"]) == [1.0, 0.0]
  for name in (
    "strikt",
    f"{tmp_path}/none.py:f",
    f"{file}:absent",
    f"{file}:three",
    str(file),
    f"{file}:",
  ):
    with pytest.raises(ConfigError, match="reward.functions") as error:
      rewards.resolve(name)
    assert name in str(error.value) and "\n" not in str(error.value)


def test_rewards_and_data_need_no_jax():
  code = (
    "import sys; import grpo_jax.rewards, grpo_jax.data.loader, grpo_jax.data.tasks, grpo_jax.data.tokenizer;"
    "print(sorted({'jax', 'flax', 'ml_collections', 'tensorflow', 'tensorflow_datasets'} & set(sys.modules)))"
  )
  root = pathlib.Path(__file__).parents[1]
  out = subprocess.run(
    [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
  )
  assert out.stdout.strip() == "[]"


@pytest.mark.parametrize(
  "text, gold, expected",
  [
    (r"so \boxed{\frac{1}{2}}", r"\frac12", 1),
    (r"\boxed{0.5}", "1/2", 1),
    (r"\boxed{1 + 2x + x^2}", "(x+1)^2", 1),
    (r"\boxed{(1,2)}", "(1, 2)", 1),
    (r"\boxed{(2,1)}", "(1, 2)", 0),
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1),
    (r"\boxed{3}", r"2\sqrt{2}", 0),
    ("nothing", "5", 0),
    (r"\boxed{3}", "", None),
  ],
)
def test_formulas(text, gold, expected):
  assert symbolic.math(completions=[text], answer=[gold]) == [expected]


def test_a_formula_that_would_take_for_ever_is_wrong(monkeypatch):
  monkeypatch.setattr(symbolic, "SECONDS", 1)
  start = time.monotonic()
  assert symbolic.math(completions=[r"\boxed{9^{9^{9^{9^9}}}}"], answer=["7"]) == [0.0]
  assert time.monotonic() - start < 10
