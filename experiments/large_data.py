"""Measures what a data set of many rows costs at the start of a run, and per step.

  python experiments/large_data.py write FOLDER [ROWS]
    Writes FOLDER/jsonl and FOLDER/parquet, each with a train and a test file. A row is a question
    of about 250 characters and an answer of about 150. By default, there are 1,000,000 for
    training.
  python experiments/large_data.py read FOLDER/jsonl TOKENIZER [COUNT_AT_START]
    Opens the data as a run does, with the tokenizer of a model, and makes ten batches of 256
    prompts. Prints one line of JSON: seconds of the CPU and of the clock, and bytes.

`start` is the time until the first batch can be made, `memory` the peak of the process above what
it had after its imports, and `batch` the time of a later batch. COUNT_AT_START is
data.count_at_start; a number above that of the rows counts all prompts at the start.
"""

import json
from pathlib import Path
import random
import resource
import sys
import time

import numpy as np

from grpo_jax.config import Data
from grpo_jax.data import loader
from grpo_jax.data.prompts import PromptSet
from grpo_jax.data.tasks import tasks
from grpo_jax.data.tokenizers import tokenizer

BATCHES, PROMPTS = 10, 256
_WORDS = (
  "a box holds seven apples and each of the children takes two more than the other one".split()
)


def write(folder: Path, rows: int) -> None:
  """Writes the files, the Parquet file in row groups of pyarrow's default size."""
  from pyarrow import json as arrow_json
  from pyarrow import parquet

  for split, count in (("train", rows), ("test", 1000)):
    file = folder / "jsonl" / f"{split}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    rng = random.Random(split)
    with open(file, "w") as lines:
      for i in range(count):
        question = f"Problem {i}: {' '.join(rng.choices(_WORDS, k=50))}?"
        answer = f"{' '.join(rng.choices(_WORDS, k=30))}.\n#### {rng.randrange(1000)}"
        lines.write(json.dumps({"question": question, "answer": answer}) + "\n")
    table = folder / "parquet" / f"{split}.parquet"
    table.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow_json.read_json(file), table)


def read(folder: str, tokens: str, count_at_start: int) -> dict[str, float]:
  """Opens the data and makes batches. Returns what that took."""
  data = Data(task="gsm8k", path=folder, max_prompt_tokens=256, count_at_start=count_at_start)
  codec = tokenizer.load(tokens)
  if any(Path(folder).glob("*.parquet")):
    import pyarrow.parquet  # noqa: F401
  before, wall, cpu = _peak(), time.perf_counter(), time.process_time()
  prompts = PromptSet(tasks.make_task(data).train, codec, data)
  loader.step_indices(0, 0, PROMPTS, len(prompts))
  start = {"start_cpu": time.process_time() - cpu, "start_wall": time.perf_counter() - wall}
  cpu = time.process_time()
  for step in range(BATCHES):
    loader.prompt_batch(prompts, loader.step_indices(0, step, PROMPTS, len(prompts)))
  batch = (time.process_time() - cpu) / BATCHES
  return {"rows": len(prompts), **start, "memory": _peak() - before, "batch_cpu": batch}


def _peak() -> int:
  """The most bytes that this process has held."""
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def main(arguments: list[str]) -> None:
  match arguments:
    case ["write", folder, *rows] if len(rows) < 2:
      write(Path(folder), int(rows[0]) if rows else 1_000_000)
    case ["read", folder, tokens, *count] if len(count) < 2:
      at_start = int(count[0]) if count else Data().count_at_start
      figures = read(folder, tokens, at_start)
      print(json.dumps({key: float(np.round(value, 4)) for key, value in figures.items()}))
    case _:
      sys.exit(__doc__)


if __name__ == "__main__":
  main(sys.argv[1:])
