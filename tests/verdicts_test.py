"""The table of verdicts on answers that were written by hand."""

import json

from experiments import verdicts


def rows():
  text = (verdicts.HERE / "answers.jsonl").read_text(encoding="utf-8")
  return [json.loads(line) for line in text.splitlines()]


def test_there_are_at_least_200_different_answers_of_both_kinds():
  texts = {(row["gold"], row.get("answer"), row.get("completion")) for row in rows()}
  assert len(texts) == len(rows()) >= 200
  assert min(sum(row["right"] for row in rows()), sum(not row["right"] for row in rows())) >= 90


def test_every_answer_has_one_verdict():
  for name in ("strict", "flexible", "boxed", "reasoning_accuracy(scorer='strict')"):
    found, seconds = verdicts.verdicts_of(verdicts.SCORERS[name], rows())
    assert len(found) == len(rows()) and set(found) == set(verdicts.COLUMNS[:-1])
    right = [row["right"] for row in rows()]
    assert all(verdict in ("accepted", "missed") for verdict in verdicts_at(found, right, True))
    assert all(verdict in ("refused", "fooled") for verdict in verdicts_at(found, right, False))
    assert seconds < 1


def verdicts_at(found, right, value):
  kept = zip(found, right)
  return [verdict for verdict, one in kept if one == value and verdict != "not applicable"]


def test_what_fools_the_strict_scorers_is_known():
  found, _ = verdicts.verdicts_of(verdicts.SCORERS["strict"], rows())
  fooled = [row.get("answer") for row, verdict in zip(rows(), found) if verdict == "fooled"]
  assert fooled == ["5!", "2x", "2i", None]
  # The last one answers before </think>, which only reasoning_accuracy sees.
  found, _ = verdicts.verdicts_of(verdicts.SCORERS["reasoning_accuracy(scorer='strict')"], rows())
  fooled = [row.get("answer") for row, verdict in zip(rows(), found) if verdict == "fooled"]
  assert fooled == ["5!", "2x", "2i"]


def test_the_forms_hold_the_answer_where_the_scorer_looks():
  for name, scorer in verdicts.SCORERS.items():
    text = scorer.form.format("7")
    assert scorer.function(completions=[text], answer=["7"]) == [1.0], name
    assert scorer.function(completions=[text], answer=["8"]) == [0.0], name
