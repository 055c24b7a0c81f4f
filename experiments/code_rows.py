"""Counts the rows of a data set of programming problems that the reward `code` can use.

python experiments/code_rows.py FILE.jsonl [--seconds=10] [--at_once=2]

A row is in the layout of MBPP, or of HumanEval: prompt, canonical_solution, test, entry_point. It
is usable if its own solution passes its tests and a text that is no program does not.
"""

import argparse
import json
import time
from typing import Any

from grpo_jax.rewards.functions.code import code


def columns_of(row: dict[str, Any]) -> dict[str, Any]:
  """What the reward function reads of a row."""
  if "entry_point" in row:
    return {
      "test_list": f"{row['test']}\ncheck({row['entry_point']})",
      "test_setup_code": "",
      "code": row["prompt"] + row["canonical_solution"],
    }
  setup = row.get("test_setup_code") or row.get("test_imports") or ""
  return {"test_list": row["test_list"], "test_setup_code": setup, "code": row["code"]}


def main() -> None:
  """Prints the rows that cannot be used, and how many can."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("file", help="a file of rows")
  parser.add_argument("--seconds", type=float, default=10.0, help="for a solution and its tests")
  parser.add_argument("--at_once", type=int, default=2, help="how many run at a time")
  flags = parser.parse_args()
  limits: dict[str, Any] = {"seconds": flags.seconds, "at_once": flags.at_once}
  with open(flags.file) as lines:
    rows = [columns_of(json.loads(line)) for line in lines]
  columns: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
  columns["place"] = [f"line {number}" for number in range(1, len(rows) + 1)]
  started = time.monotonic()
  right = code(completions=columns["code"], **columns, **limits)
  nothing = code(completions=["I give up."] * len(rows), **columns, **limits)
  for place, of_right, of_nothing in zip(columns["place"], right, nothing):
    if (of_right, of_nothing) != (1.0, 0.0):
      print(f"{place}: its solution gets {of_right}, and no program gets {of_nothing}")
  print(
    f"{len(rows)} rows: {right.count(1.0)} solutions pass, {nothing.count(0.0)} texts fail;"
    f" {time.monotonic() - started:.0f} s"
  )


if __name__ == "__main__":
  main()
