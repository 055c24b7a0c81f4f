"""Counts the rows of a data set of programming problems that the reward `code` can use.

python experiments/code_rows.py FILE.jsonl [--seconds=10] [--at_once=2]

A row is in one of the layouts of `grpo_jax/code_tests.py`, and has a solution. It is usable if its
own solution passes its tests and a text that is no program does not.
"""

import argparse
import json
import time
from typing import Any

from grpo_jax.code_tests import TEST_COLUMNS, layout_of
from grpo_jax.rewards.functions.code import code


def main() -> None:
  """Prints the rows that cannot be used, and how many can."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("file", help="a file of rows")
  parser.add_argument("--seconds", type=float, default=10.0, help="for a solution and its tests")
  parser.add_argument("--at_once", type=int, default=2, help="how many run at a time")
  flags = parser.parse_args()
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
