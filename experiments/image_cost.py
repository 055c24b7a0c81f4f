"""Times GRPO steps on prompts with an image against steps on texts of as many tokens.

python experiments/image_cost.py [--steps=12]

The model is that of small_vlm.py, and its tower is frozen. Both runs have 32 prompts with 8
completions of 32 tokens, in turn, twice. Prints the median seconds of a step of each run, and the
ratio of the two.
"""

import argparse
import json
from pathlib import Path
import statistics
import subprocess
import sys
import tempfile

import grpo_jax
from grpo_jax.data.tasks import tasks
from grpo_jax.training.loop import run_steps

ROWS, TOKENS = 512, 32
# An image of 48 x 48 pixels has nine tokens between two others.
AS_MANY = "." * 11


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--steps", type=int, default=12)
  given = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    model_folder, texts = Path(folder, "model"), Path(folder, "texts.jsonl")
    script = Path(__file__).with_name("small_vlm.py")
    subprocess.run([sys.executable, str(script), str(model_folder)], check=True)
    write_texts(texts)
    seconds: dict[str, list[float]] = {"images": [], "texts": []}
    for attempt in range(2):
      for name, data in (("images", {}), ("texts", {"task": "columns", "path": str(texts)})):
        workdir = Path(folder, f"{name}{attempt}")
        seconds[name] += timed(workdir, str(model_folder), data, given.steps)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    print(json.dumps(medians | {"ratio": medians["images"] / medians["texts"]}))


def write_texts(file: Path) -> None:
  """The questions about images, with other tokens in the place of the images."""
  examples = tasks.count_shapes("48").train[:ROWS]
  rows = ({"question": AS_MANY + x["question"], "answer": x["answer"]} for x in examples)
  file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def timed(workdir: Path, model_folder: str, data: dict[str, str], steps: int) -> list[float]:
  """The seconds of each step of a run but the first two, which compile."""
  changes = {f"data.{key}": value for key, value in data.items()} | {
    "steps": steps,
    "model.path": model_folder,
    "model.vision": "frozen",
    "sampling.max_tokens": TOKENS,
    "sampling.min_tokens": TOKENS,
    "warm_start.steps": 0,
    "eval.every": 0,
    "checkpoint.every": 0,
  }
  run_steps(grpo_jax.load_config("shapes", changes), workdir)
  rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
  return [row["time/step"] for row in rows][2:]


if __name__ == "__main__":
  main()
