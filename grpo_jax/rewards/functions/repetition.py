"""A penalty for completions that repeat themselves."""

from collections.abc import Sequence
from typing import Annotated, Any

from grpo_jax.rewards.marks import in_process
from grpo_jax.settings import Range, at_least, one_of

_NOT_POSITIVE = Range(lambda value: value <= 0, "it must be at most 0")


@in_process
def repetition(
  completions: list[str],
  completion_ids: list[list[int]],
  *,
  size: Annotated[int, at_least(1, at_most=64)] = 3,
  penalty: Annotated[float, _NOT_POSITIVE] = -1.0,
  unit: Annotated[str, one_of(("words", "tokens"))] = "words",
  **columns: Any,
) -> list[float]:
  """The share of n-grams that are repetitions, times `penalty`.

    penalty * (1 - number of different n-grams / number of n-grams)

  It is 0 for a completion of less than `size` words. This is the penalty of "Demystifying Long
  Chain-of-Thought Reasoning" (arXiv 2502.03373, appendix C.2), over words in lower case as in
  Open-R1, or over tokens as in TRL.

  Worked with size 2: "a b a b a" has the pairs ab, ba, ab, ba, of which 2 of 4 are different: -0.5.

  Args:
    completions: The texts.
    completion_ids: The token ids of the completions.
    size: The n of the n-grams.
    penalty: The reward of a completion that only repeats, at most 0.
    unit: What an n-gram consists of.
    columns: Not read.
  """
  if unit == "tokens":
    return [penalty * _repeated(ids, size) for ids in completion_ids]
  return [penalty * _repeated(text.lower().split(), size) for text in completions]


def _repeated(units: Sequence[Any], size: int) -> float:
  """The share of n-grams that occurred before."""
  count = len(units) - size + 1
  if count < 1:
    return 0.0
  different = {tuple(units[i : i + size]) for i in range(count)}
  return 1 - len(different) / count
