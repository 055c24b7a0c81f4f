"""Counts the rows of a data set of programming problems that the reward `code` can use.

python experiments/code_rows.py FILE.jsonl [--seconds=10] [--at_once=2]
python experiments/code_rows.py --speed    judgements a second of made-up programs, without a file

A row is in one of the layouts of `grpo_jax/problems/layouts.py`, and has a solution. It is usable
if its own solution passes its tests and a text that is no program does not.
"""

import argparse
import json
import time
from typing import Any

from grpo_jax.problems.layouts import TEST_COLUMNS, layout_of
from grpo_jax.rewards.functions.code import code

_ADD = "a, b = map(int, input().split())\nprint(a + b)"
_SPEEDS: dict[str, tuple[str, dict[str, Any]]] = {
  "20 cases, all right": (_ADD, {"input_output": (20,)}),
  "20 cases, the first one wrong": ("print(7)", {"input_output": (20,)}),
  "no Python": ("print(", {"input_output": (20,)}),
  "20 calls, all right": ("def add(a, b): return a + b", {"input_output": (20, "add")}),
  "3 asserts, all right": ("def f(x): return x", {"test_list": ["assert f(1) == 1"] * 3}),
}


def cases_of_sums(count: int, function: str = "") -> str:
  """Cases of sums in the layout of APPS."""
  pairs = [(i, i + 1) for i in range(count)]
  if function:
    inputs, outputs = [[*pair] for pair in pairs], [[sum(pair)] for pair in pairs]
    return json.dumps({"fn_name": function, "inputs": inputs, "outputs": outputs})
  texts = [f"{a} {b}\n" for a, b in pairs], [f"{a + b}\n" for a, b in pairs]
  return json.dumps(dict(zip(("inputs", "outputs"), texts)))


def print_speeds(at_once: int, count: int = 60) -> None:
  """Prints how many completions of each kind are judged in a second."""
  for name, (program, columns) in _SPEEDS.items():
    if "input_output" in columns:
      columns = {"input_output": cases_of_sums(*columns["input_output"])}
    given: dict[str, Any] = {column: [value] * count for column, value in columns.items()}
    code(completions=[program], **{column: values[:1] for column, values in given.items()})
    started = time.monotonic()
    scores = code(completions=[program] * count, at_once=at_once, **given)
    seconds = time.monotonic() - started
    print(
      f"{name}: {count / seconds:.1f} judgements a second, {scores.count(1.0)} of {count} right"
    )


def main() -> None:
  """Prints the rows that cannot be used, and how many can."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("file", nargs="?", help="a file of rows")
  parser.add_argument("--speed", action="store_true", help="judge made-up programs instead")
  parser.add_argument("--seconds", type=float, default=10.0, help="for a solution and its tests")
  parser.add_argument("--at_once", type=int, default=2, help="how many run at a time")
  flags = parser.parse_args()
  if flags.speed or not flags.file:
    return print_speeds(flags.at_once)
  limits: dict[str, Any] = {"seconds": flags.seconds, "at_once": flags.at_once}
  with open(flags.file) as lines:
    rows = [json.loads(line) for line in lines]
  columns: dict[str, Any] = {name: [row.get(name) for row in rows] for name in TEST_COLUMNS}
  columns["code"] = [layout_of(row).solution(row) for row in rows]
  columns["place"] = [f"line {number}" for number in range(1, len(rows) + 1)]
  started = time.monotonic()
  right = code(completions=columns["code"], **columns, **limits)
  nothing = code(completions=["I give up."] * len(rows), **columns, **limits)
  for place, of_right, of_nothing in zip(columns["place"], right, nothing):
    if (of_right, of_nothing) != (1.0, 0.0):
      print(f"{place}: its solution gets {of_right}, and no program gets {of_nothing}")
  seconds = time.monotonic() - started
  print(
    f"{len(rows)} rows: {right.count(1.0)} solutions pass, {nothing.count(0.0)} texts fail;"
    f" {seconds:.0f} s, {2 * len(rows) / seconds:.1f} judgements a second"
  )


if __name__ == "__main__":
  main()
