"""Statistics of the prompts of a data set: lengths and duplicates."""

from collections.abc import Mapping, Sequence
import dataclasses
import hashlib
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_jax.data.images.of_prompts import GivenImages
from grpo_jax.data.images.processor import Processor
from grpo_jax.data.prompts import Opens, Prompt, PromptSet
from grpo_jax.data.tokenizers.tokenizer import Tokenizer
from grpo_jax.settings import ConfigError, RunFailed

if TYPE_CHECKING:
  from grpo_jax.config import Data

_AT_ONCE = 1024  # prompts that are in memory together
_BINS = 8  # the approximate number of bins of a histogram
_BAR = 40  # characters of the longest bar of a histogram
_ANY_LENGTH = 2**24  # tokens, more than any prompt has


@dataclasses.dataclass(frozen=True)
class Statistics:
  """Statistics of the N examples of a split.

  Attributes:
    prompt_tokens: int32 [N], the tokens of each prompt.
    solution_tokens: int32 [N], the tokens of each solution including the stop token. 0 without a
      solution.
    prompt_hashes: uint64 [N], equal for equal prompts.
    tasks: The value of `task` in each example, or None.
    filled: The number of examples in which a field has a value, keyed by the field.
  """

  prompt_tokens: np.ndarray
  solution_tokens: np.ndarray
  prompt_hashes: np.ndarray
  tasks: Sequence[Any] = ()
  filled: Mapping[str, int] = dataclasses.field(default_factory=dict)


def statistics(
  split: Sequence[Any],
  tokenizer: Tokenizer,
  data: "Data",
  environment: Opens | None = None,
  processor: Processor | None = None,
) -> Statistics:
  """Computes statistics from every example of a split, which also finds unreadable rows.

  Args:
    split: The examples.
    tokenizer: Encodes prompts and solutions.
    data: The section `data` of the config.
    environment: The environment, whose openings are a part of the prompts.
    processor: The image processor, or None if the model sees no images.

  Raises:
    ConfigError: An example cannot be read, or no prompt can be made of it.
  """
  # No prompt is too long. The set counts only a sample at the start, because the loop makes all.
  data = dataclasses.replace(data, max_prompt_tokens=_ANY_LENGTH, count_at_start=0)
  prompts = PromptSet(split, tokenizer, data, environment=environment, processor=processor)
  lengths = np.zeros(len(split), np.int32)
  solutions = np.zeros(len(split), np.int32)
  hashes = np.zeros(len(split), np.uint64)
  tasks: list[Any] = []
  filled = dict.fromkeys(prompts.fields, 0)
  for start in range(0, len(split), _AT_ONCE):
    try:
      made = prompts.make(range(start, min(start + _AT_ONCE, len(split))))
    except RunFailed as error:  # no run is under way that could save its state
      raise ConfigError(str(error)) from None
    tasks += [prompt.example.get("task") for prompt in made]
    for name in filled:
      filled[name] += sum(_has_value(prompt.example.get(name)) for prompt in made)
    values = [prompt.example.get("solution") for prompt in made]
    texts = [value if isinstance(value, str) else "" for value in values]
    part = slice(start, start + len(made))
    lengths[part] = [len(prompt.ids) for prompt in made]
    hashes[part] = [_hash(prompt) for prompt in made]
    encoded = tokenizer.encode_batch_after(texts)
    solutions[part] = [len(ids) + 1 if text else 0 for text, ids in zip(texts, encoded)]
  return Statistics(lengths, solutions, hashes, tasks, filled)


def histogram(lengths: np.ndarray) -> list[str]:
  """Formats int lengths in tokens as lines with bars, and a last line with quantiles.

  The width of a bin is 1, 2 or 5 times a power of ten.
  """
  low, high = int(lengths.min()), int(lengths.max())
  width = _round_up((high - low + 1) / _BINS)
  first = low // width
  counts = np.bincount(lengths // width - first)
  lines = []
  for number, count in enumerate(counts, start=first):
    begin = number * width
    label = f"{begin}-{begin + width - 1}" if width > 1 else str(begin)
    bar = "#" * math.ceil(_BAR * count / counts.max())
    lines.append(f"  {label:>13}  {count:>9,}  {bar}".rstrip())
  median, most = np.percentile(lengths, [50, 95], method="higher").astype(int)
  return [*lines, f"  half have at most {median}, 95% at most {most}, the longest has {high}"]


def duplicates(found: Statistics) -> tuple[int, int]:
  """(how many prompts occur more than once, how many examples repeat an earlier prompt)."""
  _, counts = np.unique(found.prompt_hashes, return_counts=True)
  return int((counts > 1).sum()), int((counts - 1).sum())


def overlap(train: Statistics, test: Statistics) -> np.ndarray:
  """The indices of the test examples whose prompt is also in the training split."""
  return np.flatnonzero(np.isin(test.prompt_hashes, train.prompt_hashes))


def _round_up(value: float) -> int:
  """The least of 1, 2, 5, 10, 20, 50, ... that is at least `value`."""
  power = 10 ** math.floor(math.log10(max(1.0, value)))
  return int(next(step * power for step in (1, 2, 5, 10) if step * power >= value))


def _has_value(value: Any) -> bool:
  return value is not None and not (isinstance(value, GivenImages) and value.value is None)


def _hash(prompt: Prompt) -> int:
  """A 64-bit hash, equal for prompts with the same text and the same images."""
  text = "\0".join([prompt.text, *(str(hash(image)) for image in prompt.images)])
  return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
