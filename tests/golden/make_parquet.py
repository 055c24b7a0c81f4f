"""Writes Parquet files as the package datasets does, with the calls of two different tools.

pip install datasets==5.2.0
python tests/golden/make_parquet.py tests/golden/parquet
"""

from pathlib import Path
import sys

from datasets import Dataset


def row(question, name, arguments, answer):
  """A conversation in which a tool was called."""
  call = {"type": "function", "function": {"name": name, "arguments": arguments}}
  prompt = [
    {"role": "user", "content": question},
    {"role": "assistant", "tool_calls": [call]},
    {"role": "tool", "name": name, "content": answer},
  ]
  return {"prompt": prompt, "answer": answer}


ROWS = [row("0+2?", "add", {"x": 0, "y": 2}, "2"), row("Rain?", "weather", {"city": None}, "no")]

if __name__ == "__main__":
  folder = Path(sys.argv[1])
  mixed = [one | {"meta": value} for one, value in zip(ROWS, ({"a": 1}, "text"))]
  Dataset.from_list(mixed, on_mixed_types="use_json").to_parquet(folder / "json.parquet")
  Dataset.from_list(ROWS).to_parquet(folder / "structs.parquet")
