"""What each scorer of answers says of answers that are known to be right or wrong.

Command: python experiments/verdicts.py [--errors] [--gsm8k=FOLDER] [--trl]

The answers are in answers.jsonl, written by hand: gold answer, answer, and whether it is right, as
a teacher would decide. A scorer gets each answer in the form that it reads, such as `#### 72`. An
answer with a whole `completion` is given as it is. The table counts

  accepted         right answers with reward 1
  missed           right answers with another reward
  refused          wrong answers with another reward than 1
  fooled           wrong answers with reward 1
  not applicable   reward None, because the gold answer is not of the scorer's kind
  ms               CPU time of a call with one completion, the mean over all answers

and with --errors each answer that was missed or fooled a scorer is listed. --gsm8k scores the
solutions of GSM8K against their own gold answers: train.jsonl and test.jsonl in a folder. --trl
compares `math` with TRL's accuracy_reward (pip install trl), answer by answer. TRL's gets the gold
answer between dollar signs, because it reads LaTeX.
"""

import argparse
from collections.abc import Callable
import functools
import json
from pathlib import Path
import time
from typing import Any, NamedTuple

from grpo_jax.rewards.functions.reasoning import SCORERS as FUNCTIONS
from grpo_jax.rewards.functions.reasoning import reasoning_accuracy

HERE = Path(__file__).parent
COLUMNS = ("accepted", "missed", "refused", "fooled", "not applicable", "ms")


class Scorer(NamedTuple):
  """A reward function, and the form of completions in which it looks for answers."""

  function: Callable[..., list[float | None]]
  form: str


SCORERS = {
  "strict": Scorer(FUNCTIONS["strict"], "#### {}"),
  "flexible": Scorer(FUNCTIONS["flexible"], "The answer is {}."),
  "boxed": Scorer(FUNCTIONS["boxed"], "So it is \\boxed{{{}}}."),
  "math": Scorer(FUNCTIONS["math"], "So it is \\boxed{{{}}}."),
  "math without a mark": Scorer(FUNCTIONS["math"], "So it is ${}$."),
  "reasoning_accuracy": Scorer(
    reasoning_accuracy, "<think>Not \\boxed{{0}}.</think>So it is \\boxed{{{}}}."
  ),
  "reasoning_accuracy(scorer='strict')": Scorer(
    functools.partial(reasoning_accuracy, scorer="strict"), "<think>Not 0.</think>#### {}"
  ),
}


def main() -> None:
  """Prints the tables."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--errors", action="store_true", help="list each missed and fooled answer")
  parser.add_argument("--gsm8k", help="a folder with train.jsonl and test.jsonl")
  parser.add_argument("--scorers", default=",".join(SCORERS), help="some of them")
  parser.add_argument("--trl", action="store_true", help="compare math with TRL's function")
  flags = parser.parse_args()
  names = [name for name in SCORERS if name in flags.scorers.split(",")]
  if flags.trl:
    print_against_trl()
  elif flags.gsm8k:
    print_gsm8k(Path(flags.gsm8k), names)
  else:
    print_table(names, flags.errors)


def print_table(names: list[str], list_errors: bool) -> None:
  """The verdicts on answers.jsonl."""
  rows = read_rows()
  right = sum(row["right"] for row in rows)
  print(f"{len(rows)} answers by hand: {right} right, {len(rows) - right} wrong")
  print(f"| {'scorer':35} | {' | '.join(COLUMNS)} |")
  errors = []
  for name in names:
    verdicts, seconds = verdicts_of(SCORERS[name], rows)
    counts = [verdicts.count(column) for column in COLUMNS[:-1]]
    print(f"| {name:35} | {' | '.join(map(str, counts))} | {1000 * seconds / len(rows):.3f} |")
    errors += [
      f"{verdict:7} {name:20} {row['kind']:12} gold {row['gold']!r}:"
      f" {row.get('answer', row.get('completion'))!r}"
      for verdict, row in zip(verdicts, rows)
      if verdict in ("missed", "fooled")
    ]
  if list_errors:
    print("\n".join(errors))


def read_rows() -> list[dict[str, Any]]:
  """The rows of answers.jsonl."""
  text = (HERE / "answers.jsonl").read_text(encoding="utf-8")
  return [json.loads(line) for line in text.splitlines()]


def print_against_trl() -> None:
  """The answers on which math and TRL's accuracy_reward differ."""
  from trl.rewards import accuracy_reward

  def trl(completions: list[str], answer: list[str]) -> list[float | None]:
    messages = [[{"role": "assistant", "content": text}] for text in completions]
    scores: list[float | None] = accuracy_reward(messages, [f"${gold}$" for gold in answer])
    return scores

  rows = read_rows()
  ours, _ = verdicts_of(SCORERS["math"], rows)
  theirs, _ = verdicts_of(Scorer(trl, SCORERS["math"].form), rows)
  differ = [triple for triple in zip(rows, ours, theirs) if triple[1] != triple[2]]
  print(f"{len(differ)} of {len(rows)} answers differ")
  for name, verdicts in (("math", ours), ("TRL", theirs)):
    print(f"{name:4} {', '.join(f'{verdicts.count(one)} {one}' for one in COLUMNS[:-1])}")
  for row, one, other in differ:
    answer = row.get("answer", row.get("completion"))
    print(f"math {one:8} TRL {other:14} {row['kind']:13} gold {row['gold']!r}: {answer!r}")


def verdicts_of(scorer: Scorer, rows: list[dict[str, Any]]) -> tuple[list[str], float]:
  """The verdict on each row, as a name of `COLUMNS`, and the CPU seconds that all took."""
  verdicts = []
  scorer.function(completions=["1"], answer=["1"])  # imports what it needs
  start = time.process_time()
  for row in rows:
    text = row["completion"] if "completion" in row else scorer.form.format(row["answer"])
    reward = scorer.function(completions=[text], answer=[row["gold"]])[0]
    if reward is None:
      verdicts.append("not applicable")
    elif row["right"]:
      verdicts.append("accepted" if reward == 1 else "missed")
    else:
      verdicts.append("fooled" if reward == 1 else "refused")
  return verdicts, time.process_time() - start


def print_gsm8k(folder: Path, names: list[str]) -> None:
  """How many gold answers of GSM8K each scorer accepts, of solutions with their own answers."""
  solutions = [
    json.loads(line)["answer"]
    for split in ("train", "test")
    for line in (folder / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
  ]
  golds = [solution.rpartition("####")[2].strip() for solution in solutions]
  for name in names:
    scorer, start = SCORERS[name], time.process_time()
    # The last number of a solution is its answer, so strict and flexible read it as it stands.
    whole = name in ("strict", "flexible")
    texts = solutions if whole else [scorer.form.format(gold) for gold in golds]
    scores = scorer.function(completions=texts, answer=golds)
    milliseconds = 1000 * (time.process_time() - start) / len(texts)
    print(f"{name}: {scores.count(1.0):,} of {len(scores):,} accepted, {milliseconds:.3f} ms each")


if __name__ == "__main__":
  main()
