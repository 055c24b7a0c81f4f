import json
import os
import pathlib
import subprocess
import sys
import time

from hypothesis import example, given
from hypothesis import strategies as st
import numpy as np
import pytest

from grpo_jax import rewards
from grpo_jax.algo.advantages import ADVANTAGES
from grpo_jax.algo.settings import Algo
from grpo_jax.data.tasks.arithmetic import Arithmetic
from grpo_jax.rewards.call import call, check_arguments
from grpo_jax.rewards.functions import stated, symbolic
from grpo_jax.rewards.functions.final_number import boxed, flexible, strict
from grpo_jax.rewards.functions.lengths import overlong
from grpo_jax.rewards.options import bind
from grpo_jax.settings import ConfigError
from grpo_jax.types import Rewards


def scores_of(functions, weights, completions, columns):
  """The scores of completions by each function, as a run without workers finds them."""
  columns = {"completions": completions, **columns}
  found = rewards.Caller(None).start(functions, columns, 1, len(completions))
  answers = {
    rewards.name_of(function): answer.result()
    for function, answer in zip(functions, found, strict=True)
  }
  return rewards.scores_of(answers, weights), answers


def score_of(function, completion, gold="72"):
  """What a reward function returns for one completion."""
  return function(completions=[completion], answer=[gold], prompts=["?"])[0]


def gsm8k_solutions(split):
  folder = os.environ.get("GSM8K_DIR", pathlib.Path(__file__).parents[2] / "shared/data/gsm8k")
  path = pathlib.Path(folder) / f"{split}.jsonl"
  if not path.is_file():
    pytest.skip(f"GSM8K's text is not at {path}; set GSM8K_DIR to its folder")
  return [json.loads(line)["answer"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("split, size", [("train", 7473), ("test", 1319)])
def test_every_gsm8k_gold_scores_one(split, size):
  solutions = gsm8k_solutions(split)
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
  assert score_of(strict, text, gold) == 1.0


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
  assert score_of(strict, text) == 0.0


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
  assert score_of(flexible, text, gold) == 1.0


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
  assert score_of(flexible, text, gold) == 0.0


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
  assert score_of(boxed, text, gold) == 1.0


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
  assert score_of(boxed, text) == 0.0


def write(number, decimals, commas, zeros):
  """A number as text, with or without thousands separators and with extra zeros at the end."""
  sign = "-" if number < 0 else ""
  whole = f"{abs(number):,}" if commas else f"{abs(number)}"
  fraction = f".{decimals}{'0' * zeros}" if decimals or zeros else ""
  return f"{sign}{whole}{fraction}"


@given(
  st.integers(-(10**12), 10**12),
  st.sampled_from(["", "5", "25", "07"]),
  st.booleans(),
  st.integers(0, 3),
  st.sampled_from(["{}", "{}.", "${}", "**{}**", " {} ", "{}%", "{} apples", "\\({}\\)"]),
)
@example(0, "", False, 2, "{}")
def test_a_number_scores_one_however_it_is_written(number, decimals, commas, zeros, form):
  gold = write(number, decimals, False, 0)
  other_gold = write(number + 1, decimals, True, 0)
  text = form.format(write(number, decimals, commas, zeros))
  for completion, function in (
    (f"#### {text}", strict),
    (f"It is {text}", flexible),
    (f"\\boxed{{{text}}}", boxed),
  ):
    assert score_of(function, completion, gold) == 1.0
    assert score_of(function, completion, other_gold) == 0.0


@given(st.text(alphabet="0123456789.,-$#\\boxed{} \nea%", max_size=60), st.integers(0, 99))
def test_any_text_scores_zero_or_one(text, gold):
  for function in (strict, flexible, boxed):
    assert score_of(function, text, str(gold)) in (0.0, 1.0)
    undecided = f"{text}\n#### {gold} or {gold + 1} \\boxed{{{gold},{gold + 1}}}"
    assert score_of(function, undecided, str(gold)) == 0.0


@pytest.mark.parametrize(
  "body",
  [
    "1" * 10**6,
    "1," * 500_000,
    "1,000," * 170_000,
    "1." * 500_000,
    "1e" * 500_000,
    "\\boxed{" * 140_000,
    *(
      pytest.param(body, marks=pytest.mark.slow)
      for body in (
        "-" * 10**6,
        "$" * 10**6,
        "\\" * 10**6,
        "{" * 10**6,
        "1 " * 500_000,
        ".1" * 500_000,
        "#" * 10**6,
        "\\text" * 200_000,
        "1,000\\," * 140_000,
      )
    ),
  ],
  ids=range(15),
)
def test_a_million_characters_take_linear_time(body):
  start = time.process_time()
  for function in (strict, flexible, boxed):
    score_of(function, body)
    score_of(function, f"#### {body} \\boxed{{{body}}}")
  assert time.process_time() - start < 10  # quadratic would be hours


def test_a_gold_answer_that_is_not_a_number_gives_no_score():
  assert strict(completions=["#### 72", "#### 72"], answer=["seventy", "72"]) == [None, 1.0]


def test_the_scores_of_several_functions():
  def length(completions, **columns):
    return [len(text) for text in completions]

  def sometimes(completions, prompts, **columns):
    return [1 if prompt == "a" else None for prompt in prompts]

  columns = {"prompts": ["a", "b"], "answer": ["3", "3"]}
  functions = [length, sometimes, strict]
  scores, _ = scores_of(functions, [0.5, 2.0, 1.0], ["#### 3", "four"], columns)
  assert list(scores) == ["length", "sometimes", "strict"]
  assert all(scores_N.dtype == np.float32 for scores_N in scores.values())
  np.testing.assert_array_equal(list(scores.values()), [[6, 4], [1, np.nan], [1, 0]])


def test_steps_score_their_mean_and_a_number_is_one_step_at_the_end():
  def steps(completions, **_):
    return [[(2, 1), (5, 0.5)], [], None]

  def whole(completions, **_):
    return [2, None, 3.0]

  scores, answers = scores_of([steps, whole], [1.0, 10.0], ["abcde", "abc", ""], {})
  np.testing.assert_array_equal(scores["steps"], np.float32([0.75, np.nan, np.nan]))
  np.testing.assert_array_equal(scores["whole"], np.float32([2, np.nan, 3]))
  assert answers["steps"].steps == [[(2, 1.0), (5, 0.5)], [], []]
  assert answers["whole"].steps == [[(5, 2.0)], [], [(1, 3.0)]]


def test_a_weighted_sum_whose_square_float32_cannot_hold_is_refused():
  def large(completions, **_):
    return [5e14, -5e14, 5e14, -5e14]

  with pytest.raises(rewards.RewardError, match="the weighted sum of the rewards is 5e.15"):
    scores_of([large], [10.0], ["a"] * 4, {})
  scores, _ = scores_of([large], [2.0], ["a"] * 4, {})
  mask_PGT = np.ones((1, 4, 1), np.float32)
  of_group = Rewards(scores_PGJ=scores["large"].reshape(1, 4, 1), weights=(2.0,))
  advantages_PG = ADVANTAGES[Algo().advantage].compute(of_group, mask_PGT, Algo())
  np.testing.assert_allclose(np.abs(advantages_PG), np.sqrt(3 / 4), rtol=1e-3)


class Scores:
  """An object of a user."""

  def __call__(self, completions, *, scale=1.0, **columns):
    return [scale * len(columns)] * len(completions)


def test_a_column_named_self_does_not_reach_an_object():
  columns = {"completions": ["a"], "self": ["x"], "answer": ["1"]}
  bound = bind(Scores(), "scores", {"scale": 2.0}, "reward.functions")
  named = bind(Scores(), "scores", {"name": "n"}, "reward.functions")
  for function, expected in ((Scores(), 4), (bound, 8), (named, 4)):
    check_arguments(function, "scores", "reward.functions", list(columns))
    assert call(function, "scores", columns).steps == [[(1, expected)]]  # answer and three extras


@pytest.mark.parametrize(
  "text, expected",
  [
    ("7+15=22;22-6=16;16+9=25;#### 25", [(8, 1), (16, 1), (24, 1), (31, 1)]),
    (
      "7+15=22;22-6=17;17+9=26;#### 26",
      [(8, 1), (16, 0), (24, 0), (31, 0)],
    ),  # after an error, all later steps are wrong
    ("#### 25", [(7, 1)]),
    ("#### 24", [(7, 0)]),
    ("7+15=22;#### 25", [(8, 1), (15, 1)]),  # the answer may come at any place
    ("7+15=22;7+15=22;", [(8, 1), (16, 0)]),  # a repeated step is rewarded once
    ("7+15=22;22-6=16;16+9=25;25+1=26;", [(8, 1), (16, 1), (24, 1), (32, 0)]),
    ("7+15=22", [(7, 0)]),  # unfinished
    ("", [(1, 0)]),
    (";;", [(1, 0), (2, 0)]),
  ],
)
def test_worked_steps(text, expected):
  found = rewards.REWARDS["worked_steps"](completions=[text], question=["7+15-6+9="], answer=["25"])
  assert found == [[(end, float(reward)) for end, reward in expected]]


def test_all_steps_of_the_worked_solutions_score_one():
  for problem in Arithmetic("train")[:300]:
    (steps,) = rewards.REWARDS["worked_steps"](
      completions=[problem["solution"]], question=[problem["question"]], answer=[problem["answer"]]
    )
    assert len(steps) == problem["solution"].count(";") + 1
    assert all(reward == 1 for _, reward in steps)


def test_overlong_by_hand():
  """DAPO's setting: a limit of 20480 tokens, the last 4096 of which are the margin."""
  lengths = [16384, 17408, 18432, 20480, 20481]
  np.testing.assert_array_equal(
    overlong(np.array(lengths), 20480, 4096), np.float32([0, -0.25, -0.5, -1, -1])
  )


class Unprintable(Exception):
  def __repr__(self):
    raise KeyError

  __str__ = __repr__


def throw(error):
  raise error


@pytest.mark.parametrize(
  "bad, message",
  [
    (lambda completions, **_: [1.0], "returned 1 scores for 2 completions"),
    (lambda completions, **_: 1.0, "must return a list"),
    (lambda completions, **_: ["x", 1], "must return a list"),
    (lambda completions, **_: ["1", 1], "must return a list"),
    (lambda completions, **_: "12", "must return a list"),
    (lambda completions, **_: b"12", "must return a list"),
    (lambda completions, **_: {0: 1.0, 1: 2.0}, "must return a list"),
    (lambda completions, **_: {1.0, 2.0}, "must return a list"),
    (lambda completions, **_: Unprintable(), "must return a list.*Unprintable"),
    (lambda completions, **_: throw(Unprintable()), "raised Unprintable"),
    (lambda completions, **_: [1, float("inf")], "not finite"),
    (lambda completions, **_: [1, 1e39], "not finite or beyond 1e.15"),
    (lambda completions, **_: [1, -3e38], "not finite or beyond 1e.15"),
    (lambda completions, **_: [1, [2, 3]], "must return a list"),
    (lambda completions, **_: [1, [(2, 1)]], "ends outside"),
    (lambda completions, **_: [[(1, float("nan"))], 1], "not finite"),
  ],
)
def test_a_function_that_returns_invalid_values_is_named(bad, message):
  bad.__name__ = "my_reward"
  with pytest.raises(rewards.RewardError, match=f"my_reward.*{message}"):
    scores_of([bad], [1.0], ["a", "b"], {})


def is_learned(name):
  """An `is_model` for which models are the folders with the name "learned"."""
  return name.endswith("/learned")


def test_two_functions_with_the_same_name_are_refused(tmp_path):
  file = tmp_path / "mine.py"
  file.write_text("def strict(completions, **columns):\n  return [0.0] * len(completions)\n")
  with pytest.raises(ConfigError, match="same name"):
    rewards.resolve_all(["strict", f"{file}:strict"], None, is_learned)
  found = rewards.resolve_all(["strict", "flexible"], None, is_learned)
  assert found == [strict, rewards.REWARDS["flexible"]]


def test_only_reward_functions_may_name_a_model(tmp_path):
  loaded = []

  def load_model(name):
    loaded.append(name)
    return boxed

  learned = str(tmp_path / "learned")
  assert rewards.resolve_all(["strict", learned], load_model, is_learned) == [strict, boxed]
  assert loaded == [learned]
  with pytest.raises(
    ConfigError,
    match="eval.function: .*learned' is a model, which only reward.functions may name",
  ):
    rewards.resolve(learned, "eval.function", is_learned)


def test_a_built_in_function_comes_before_a_model_of_its_name():
  assert rewards.resolve_all(["strict"], None, lambda name: True) == [strict]
  assert rewards.resolve("strict", "eval.function", lambda name: True) is strict


def test_resolve(tmp_path):
  file = tmp_path / "mine.py"
  file.write_text(
    "def shout(completions, **columns):\n"
    "  return [float(t.isupper()) for t in completions]\n"
    "three = 3\n"
  )
  assert rewards.resolve("strict", "reward.functions", is_learned) is strict
  shout = rewards.resolve(f"{file}:shout", "reward.functions", is_learned)
  assert shout(completions=["A", "a"]) == [1.0, 0.0]
  for name in (
    "strikt",
    f"{tmp_path}/none.py:f",
    f"{file}:absent",
    f"{file}:three",
    str(file),
    f"{file}:",
  ):
    with pytest.raises(ConfigError, match="reward.functions") as error:
      rewards.resolve(name, "reward.functions", is_learned)
    assert name in str(error.value) and "\n" not in str(error.value)


def test_rewards_and_data_need_no_jax():
  code = (
    "import sys; import grpo_jax.rewards, grpo_jax.data.loader, grpo_jax.data.tasks.tasks,"
    " grpo_jax.data.tokenizers.tokenizer;"
    "others = {'jax', 'flax', 'ml_collections', 'openai', 'tensorflow', 'tensorflow_datasets'};"
    "print(sorted(others & set(sys.modules)))"
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
    ("The answer is not 42.", "42", 0),
    ("The answer is not 42, it is 43.", "43", 1),
    ("The answer is 5 hours 30 minutes.", "5", 0),
    (r"\boxed{5}", "5 hours 30 minutes", None),
    (r"\boxed{41} no, \boxed{42}", "42", 1),
    (r"\boxed{41} or \boxed{42}", "42", 0),
    (r"\boxed{\frac{1}{2}", r"\frac{1}{2}", 0),
    (r"\boxed{1 234 567}", "1234567", 1),
    (r"\boxed{1\,234\,567}", "1234567", 1),
    (r"\boxed{2 1/2}", "2.5", 1),
    (r"\boxed{1.5e3}", "1500", 1),
    (r"\boxed{–5}", "-5", 1),
    (r"\boxed{\text{(C) } 42}", "42", 1),
    (r"\boxed{0\le x<1}", "[0, 1)", 1),
    (r"\boxed{40, 41, 42}", "42", 0),
    (r"\boxed{41 \to 42}", "42", 0),
    (r"\boxed{z = 2x + 3}", "y = 2x + 3", 0),
    (r"\boxed{AB = 72}", "72", 1),
    (r"The answer is $42$ because $6\cdot7=42$.", "42", 1),
    (r"\boxed{12}", r"12 \text{ m}^2", 1),
    (r"So it is $1\,234\,567$.", "1234567", 1),
    (r"We get\n\[2 1/2\]\nas wanted.", "2.5", 1),
    (r"$\text{(C) } 42$", "42", 1),
    ("So it is 1.5e3.", "1500", 1),
    ("1.5e3", "1.5", 0),
    ("3 + 4 = 7\nSo it is $–5$.", "-5", 1),
    ("It costs $5.", "5", 1),
    ("We have $3$ boxes, so 15.", "15", 1),
    (r"1) $x^2 = 4$ 2) hence 42", "42", 1),
  ],
)
def test_formulas(text, gold, expected):
  assert symbolic.math(completions=[text], answer=[gold]) == [expected]


@pytest.mark.parametrize(
  "gold, right, wrong",
  [
    (r"1.6 \times 10^{-19}", r"16 \cdot 10^{-20}", r"6.63 \times 10^{-34}"),
    (r"1.6 \times 10^{-19}", "1.6e-19", r"-1.6 \times 10^{-19}"),
    (r"6.63 \times 10^{-34}", r"\frac{6.63}{10^{34}}", r"6.6301 \times 10^{-34}"),
    ("1/2^{98}", r"\frac{2}{2^{99}}", "1/2^{99}"),
    (r"\frac{1}{10^{20}}", "10^{-20}", r"-\frac{1}{10^{20}}"),
    ("0", r"\sqrt{8} - 2\sqrt{2}", "10^{-20}"),
    ("10^{-20}", r"\frac{5}{5 \cdot 10^{20}}", "0"),
    ("0.0000000015", r"1.5 \times 10^{-9}", r"1.6 \times 10^{-9}"),
    ("2^{-100}", r"7.8886 \times 10^{-31}", r"7.9 \times 10^{-31}"),
    (r"\pi \cdot 10^{-20}", r"\frac{\pi}{10^{20}}", r"3 \cdot 10^{-20}"),
    ("e^{-50}", r"\frac{1}{e^{50}}", "e^{-60}"),
    ("1 - 2^{-60}", r"\frac{2^{60} - 1}{2^{60}}", "1 - 2^{-61}"),
    (r"0.00000001\%", r"0.000000010\%", r"0.00000002\%"),
    (r"6.02 \times 10^{23}", "602000000000000000000000", r"6.03 \times 10^{23}"),
    ("10^{20} + 1", "1 + 10^{20}", "10^{20}"),
    (r"\{10^{-20}, 1\}", r"\{1, 10^{-20}\}", r"\{2 \cdot 10^{-20}, 1\}"),
    ("(10^{-20}, 1)", "(1/10^{20}, 1)", r"(2 \cdot 10^{-20}, 1)"),
    ("[0, 10^{-20}]", r"0 \le x \le 10^{-20}", "[0, 10^{-21}]"),
    (
      r"\begin{pmatrix} \pi 10^{-20} \\ 1 \end{pmatrix}",
      r"\begin{pmatrix} \frac{\pi}{10^{20}} \\ 1 \end{pmatrix}",
      r"\begin{pmatrix} \pi 10^{-21} \\ 1 \end{pmatrix}",
    ),
    ("x = 10^{-20}", "10^{-20}", "10^{-21}"),
    ("x < 10^{-20}", "10^{-20} > x", "x < 10^{-21}"),
    ("x + 10^{-20}", "10^{-20} + x", "x + 10^{-21}"),
    ("1/3", "0.333333", "0.33333"),
    (r"\frac{1}{3000}", "0.000333", "0.000334"),
    (r"\frac{1}{30000}", "0.0000333", "0.0000334"),
    (r"\frac{\pi}{18000}", "0.000175", "-0.000175"),
    ("e^{-10}", r"4.54 \times 10^{-5}", r"4.53 \times 10^{-5}"),
  ],
)
def test_math_compares_numbers_at_their_size(gold, right, wrong):
  completions = [rf"\boxed{{{answer}}}" for answer in (right, wrong)]
  assert symbolic.math(completions=completions, answer=[gold] * 2) == [1.0, 0.0]


@pytest.mark.parametrize(
  "unit", ["\\boxed{", "\\boxed{1}, ", "answer is ", "1 234 ", "not a ", "####", "$1 ", "\\[1"]
)
def test_an_answer_is_found_in_linear_time(unit):
  start = time.process_time()
  assert stated.as_formula(stated.stated_answer(unit * 50_000) or "") == ""
  assert len(stated.last_formula(unit * 50_000)) <= 5000
  assert stated.as_formula("1" + " " * 900 + "!") == "1 !"
  assert time.process_time() - start < 5


def test_a_formula_beyond_the_time_limit_is_wrong(monkeypatch):
  monkeypatch.setattr(symbolic, "SECONDS", 1)
  start = time.monotonic()
  assert symbolic.math(completions=[r"\boxed{9^{9^{9^{9^9}}}}"], answer=["7"]) == [0.0]
  assert time.monotonic() - start < 10
