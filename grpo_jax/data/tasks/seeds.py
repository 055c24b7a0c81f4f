"""Seeds for an environment that makes its own prompts: `data.task=seeds` with `data.prompt=''`."""

import functools
import random

from grpo_jax.data.tasks.generated import Generated

SIZES = {"train": 2_000, "test": 256}
_LARGEST = 2**30  # random numbers are below it, and are doubled: test seeds are even, others odd


class Seeds(Generated):
  """The examples of a split, "train" or "test". Example i depends only on the split and i."""

  def __init__(self, split: str) -> None:
    super().__init__(split, SIZES[split], functools.partial(_example, split))


def _example(split: str, index: int) -> dict[str, str | int]:
  # Only random() is called, because Python promises that its sequence never changes.
  number = int(random.Random(f"seeds/{split}/{index}").random() * _LARGEST)
  return {"question": "", "answer": "", "seed": 2 * number + (split == "train")}
