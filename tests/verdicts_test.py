"""The table of verdicts on answers that were written by hand."""

import pytest

from experiments import verdicts

rows = verdicts.read_rows


def test_there_are_at_least_200_different_answers_of_both_kinds():
  texts = {(row["gold"], row.get("answer"), row.get("completion")) for row in rows()}
  assert len(texts) == len(rows()) >= 200
  assert min(sum(row["right"] for row in rows()), sum(not row["right"] for row in rows())) >= 90


def test_every_answer_has_one_verdict():
  for name in ("strict", "flexible", "boxed", "reasoning_accuracy(scorer='strict')"):
    found, seconds = verdicts.verdicts_of(verdicts.SCORERS[name], rows())
    assert len(found) == len(rows()) and set(found) <= set(verdicts.COLUMNS[:-1])
    right = [row["right"] for row in rows()]
    assert all(verdict in ("accepted", "missed") for verdict in verdicts_at(found, right, True))
    assert all(verdict in ("refused", "fooled") for verdict in verdicts_at(found, right, False))
    assert seconds < 1


def verdicts_at(found, right, value):
  kept = zip(found, right)
  return [verdict for verdict, one in kept if one == value and verdict != "not applicable"]


def wrong_verdicts(name, kinds=("missed", "fooled")):
  """The answers that a scorer judges wrongly, in the order of the file."""
  found, _ = verdicts.verdicts_of(verdicts.SCORERS[name], rows())
  return [row.get("answer") for row, verdict in zip(rows(), found) if verdict in kinds]


def test_what_fools_the_strict_scorers_is_known():
  # It answers before </think>, which only reasoning_accuracy sees.
  assert wrong_verdicts("strict", ["fooled"]) == [None]
  assert wrong_verdicts("reasoning_accuracy(scorer='strict')", ["fooled"]) == []


def test_strict_reads_equations_and_quotients():
  for text in ("x = 72", "x=72", "144/2", r"\frac{144}{2}", "144 / 2"):
    assert verdicts.SCORERS["strict"].function([f"#### {text}"], answer=["72"]) == [1.0], text


@pytest.mark.slow
def test_what_math_judges_wrongly_is_known():
  assert wrong_verdicts("math", ["fooled"]) == [None]  # the same
  assert wrong_verdicts("math", ["missed"]) == ["five", "$1.8k", "2^{0.5}", r"1>x\ge 0"]
  assert len(wrong_verdicts("math without a mark", ["fooled"])) == 10


def test_the_forms_hold_the_answer_where_the_scorer_looks():
  for name, scorer in verdicts.SCORERS.items():
    text = scorer.form.format("7")
    assert scorer.function(completions=[text], answer=["7"]) == [1.0], name
    assert scorer.function(completions=[text], answer=["8"]) == [0.0], name
