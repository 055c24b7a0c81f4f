"""maj@k counts the answers that the reward function of the evaluation reads."""

import json

import numpy as np
import pytest
from rollout_test import completions
from small_run import small_config, small_run, with_section

from grpo_jax.evaluation.evaluator import Evaluator, table
from grpo_jax.rewards.names import resolve
from grpo_jax.rewards.votes import voting
from grpo_jax.rollouts.player import Played
from grpo_jax.rollouts.rollout import Rollouts
from grpo_jax.scoring.scorers import Scorers
from grpo_jax.settings import RunFailed


class Said:
  """A rollout whose completions are these texts, [P][G]."""

  def __init__(self, texts):
    self.texts = texts

  def parts(self, params, prompts, key, temperature=1.0, on_ended=None):
    del params, key, temperature, on_ended
    texts_PG = np.empty((len(self.texts), len(self.texts[0])), object)
    texts_PG[:] = self.texts
    assert len(prompts.prompt_lengths_P) == len(texts_PG)
    for numbers in ([len(texts_PG) - 1], list(range(len(texts_PG) - 1))):  # in any order
      if numbers:
        found = completions([["1"] * texts_PG.shape[1]] * len(numbers))
        yield Played(numbers, Rollouts(found, texts_PG[numbers]))


def evaluated(folder, function, golds, texts, workers=0, tasks=(), reward=()):
  """The metrics of an evaluation in which each problem has these texts."""
  rows = [{"question": "1", "answer": gold} for gold in golds]
  for row, task in zip(rows, tasks):
    row["task"] = task
  for split in ("train", "test"):
    (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
  columns = ("answer=answer", *(("task=task",) if tasks else ()))
  data = dict(task="columns", path=str(folder), prompt="{question}", columns=columns)
  config = with_section(small_config(), "data", **data)
  samples = len(texts[0])
  config = with_section(config, "eval", function=function, samples=samples, examples=len(golds))
  config = with_section(config, "reward", workers=workers)
  if reward:
    functions, entries = zip(*reward)
    weights = (1.0,) * len(reward)
    config = with_section(config, "reward", functions=functions, tasks=entries, weights=weights)
  run = small_run(config)
  scorers = Scorers(run)
  evaluator = Evaluator(run, scorers)
  evaluator._greedy, evaluator._sampled = Said([own[:1] for own in texts]), Said(texts)
  try:
    return evaluator(None, 0), config
  finally:
    scorers.close()


PAIRS = [r"\boxed{(1,2)}", "So it is $(1, 2)$."], [r"\boxed{(3,2)}"] * 3
ROOTS = [r"\boxed{2\sqrt3}", r"<answer>\sqrt{12}</answer>"], [r"\boxed{\sqrt3}"] * 3
LETTERS = ["Answer: B", r"\boxed{B}", "The answer is (B)"], ["Answer: C"] * 2
NUMBERS = ["#### 3", "5 #### 3.0"], ["#### 4"]


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
  "function, gold, texts, expected",
  [
    ("math", "(1,2)", PAIRS, 0),
    ("math", "(3,2)", PAIRS, 1),
    ("math", r"2\sqrt{3}", ROOTS, 0),
    ("math", r"\sqrt{3}", ROOTS, 1),
    ("math", "1/2", ([r"\boxed{0.5}", r"\boxed{\frac12}"], [r"\boxed{2}"]), 1),
    ("math", "72", ([r"\boxed{x = 72}", r"\boxed{72}"], [r"\boxed{7}"]), 1),
    ("choice", "B", LETTERS, 1),
    ("choice", "C", LETTERS, 0),
    ("choice(marker='####')", "B", (["#### B"] * 2, ["#### C", "Answer: C", "Answer: C"]), 1),
    ("strict", "3", NUMBERS, 1),
    # The last number of both is 9, and only one is an answer.
    ("strict", "3", (["#### 3"], ["It is 9", "or 9"]), 1),
    ("flexible", "3", (["so 3", "3."], ["4 3 4"]), 1),
    ("boxed", "3", ([r"\boxed{3} 1", r"\boxed{3} 2"], [r"\boxed{4} 1"]), 1),
    ("reasoning_accuracy", "3", (["</think>$3$", "4</think>3"], ["</think>$4$", "3 4"]), 1),
    ("reasoning_accuracy(scorer='strict')", "3", (["</think>#### 3"] * 2, ["</think>#### 4"]), 1),
  ],
)
def test_votes_are_those_of_the_answers_that_the_function_reads(
  function, gold, texts, expected, workers, tmp_path
):
  if "math" in function or function == "reasoning_accuracy":
    pytest.importorskip("math_verify")
  elif workers:
    pytest.skip("the process of the run calls it")
  first, others = texts
  # A second problem, so that votes of one do not count for the other.
  metrics, _ = evaluated(
    tmp_path, function, [gold, gold], [[*others, *first], [*first, *others]], workers
  )
  assert metrics[f"eval/maj@{len(first + others)}"] == expected


def test_each_task_counts_the_answers_of_its_own_function(tmp_path):
  metrics, _ = evaluated(
    tmp_path,
    "rewards",
    ["B", "3"],
    [["Answer: B 1", "Answer: B 2", "Answer: C"], ["#### 3", "#### 4", "#### 4.0"]],
    tasks=("letters", "sums"),
    reward=(("choice", "letters"), ("strict", "sums"), ("think_format", "")),
  )
  assert metrics["eval/maj@3"] == 0.5 and metrics["eval/mean@3"] == pytest.approx(1 / 2)


OWN = """
def right(completions, answer, **_):
  return [float(text.strip().lower() == gold) for text, gold in zip(completions, answer)]

def read(completions, **_):
  return [text.strip() or None for text in completions]

def marked(completions, answer, **_):
  return right(completions, answer)

marked.answer_of = read
marked.same_answer = lambda first, second: first.lower() == second.lower()

def fails(completions, answer, **_):
  return right(completions, answer)

fails.answer_of = lambda completions, **_: ["a"]
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_a_function_of_a_user_says_what_it_reads_or_there_is_no_vote(workers, tmp_path, capfd):
  (tmp_path / "own.py").write_text(OWN)
  texts = [["Pen", "pen ", "", "", "", "ink"]]
  metrics, _ = evaluated(tmp_path, f"{tmp_path}/own.py:marked", ["pen"], texts, workers)
  assert metrics["eval/maj@6"] == 1
  assert "left out" not in capfd.readouterr().err
  metrics, config = evaluated(tmp_path, f"{tmp_path}/own.py:right", ["pen"], texts, workers)
  assert "eval/mean@6" in metrics and not [name for name in metrics if "maj@" in name]
  assert "maj@6 is left out, because right does not say" in capfd.readouterr().err
  assert not [line for line in table(metrics, config.eval, 5) if "maj@" in line]


def test_a_wrong_answer_of_is_said_in_a_line(tmp_path):
  (tmp_path / "own.py").write_text(OWN)
  with pytest.raises(RunFailed, match=r"fails.answer_of raised ValueError: answer_of must return"):
    evaluated(tmp_path, f"{tmp_path}/own.py:fails", ["pen"], [["pen", "ink"]])


@pytest.mark.parametrize(
  "name, texts, expected",
  [
    ("countdown", ["#### 1 + 2", "<answer>1+2</answer>", "#### 2+1", "3"], [0, 0, 2, None]),
    ("reasoning_gym", ["<answer>**62**</answer>", "#### $62$", "</think>63", "6 2"], [0, 0, 2, 3]),
    ("reasoning_gym(tagged=True)", ["<answer>6</answer>", "6"], [0, None]),
    ("choice", ["Answer: A or B", "Answer: A", "", "ANSWER: A"], [None, 1, None, 1]),
  ],
)
def test_what_else_votes(name, texts, expected):
  function = resolve(name, "eval.function", lambda name: False)
  assert voting(function)(completions=texts, answer=["1"] * len(texts)) == expected


def test_completions_of_another_prompt_do_not_vote():
  votes = voting(resolve("strict", "eval.function", lambda name: False), 2)
  assert votes(completions=["#### 1", "#### 2", "#### 1", "#### 1.0"]) == [0, 1, 2, 2]
