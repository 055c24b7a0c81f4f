"""Rewards for the length of a completion, and a penalty for repetition."""

from collections.abc import Sequence
import math
from typing import Annotated, Any

import numpy as np

from grpo_jax.rewards.functions.reasoning import SCORERS, check_scorer, prepare_scorers
from grpo_jax.rewards.gold import READABLE
from grpo_jax.rewards.marks import checked_by, in_process, prepared_by, reads
from grpo_jax.settings import ConfigError, Range, above, at_least, one_of

_NOT_POSITIVE = Range(lambda value: value <= 0, "it must be at most 0")


@prepared_by(prepare_scorers)
@checked_by(check_scorer)
@reads(answer=READABLE)
def cosine(
  completions: list[str],
  answer: list[Any],
  completion_ids: list[list[int]],
  *,
  max_length: Annotated[int, at_least(1)] = 1000,
  right_short: float = 1.0,
  right_long: float = 0.5,
  wrong_short: float = -1.0,
  wrong_long: float = -0.5,
  scorer: Annotated[str, one_of(SCORERS)] = "math",
  **columns: Any,
) -> list[float | None]:
  """Rewards short right completions more than long ones, and long wrong ones more than short ones.

  The reward follows half a cosine wave from the value `short` at length 0 to the value `long` at
  max_length, and is constant beyond:

    long + (short - long) * (1 + cos(pi * min(1, length / max_length))) / 2

  This is the cosine reward of "Demystifying Long Chain-of-Thought Reasoning" (arXiv 2502.03373,
  appendix C.1), with the defaults of Open-R1 and with the length in tokens, as in TRL.

  With max_length 100, a right completion of 50 tokens gets 0.75, a wrong one -0.75.

  Args:
    completions: The texts.
    answer: The gold answers.
    completion_ids: The token ids of the completions.
    max_length: The length in tokens from which the reward is constant.
    right_short: The reward of a right completion of length 0.
    right_long: The reward of a right completion of max_length tokens or more.
    wrong_short: The reward of a wrong completion of length 0.
    wrong_long: The reward of a wrong completion of max_length tokens or more.
    scorer: The reward function that compares a completion with the gold answer: see `SCORERS`.
    columns: Ignored.

  Returns:
    The rewards. None if the scorer returns None.
  """
  scores = SCORERS[scorer](completions=completions, answer=answer)
  rewards: list[float | None] = []
  for score, ids in zip(scores, completion_ids, strict=True):
    if score is None:
      rewards.append(None)
      continue
    short, long = (right_short, right_long) if score == 1 else (wrong_short, wrong_long)
    wave = math.cos(math.pi * min(1.0, len(ids) / max_length))
    rewards.append(long + (short - long) * (1 + wave) / 2)
  return rewards


def _check_margin(where: str, options: dict[str, Any]) -> None:
  if options["margin"] > options["max_length"]:
    raise ConfigError(
      f"{where}(margin={options['margin']}): margin must be at most max_length ="
      f" {options['max_length']}"
    )


@in_process
@checked_by(_check_margin)
def soft_overlong(
  completion_ids: list[list[int]],
  *,
  max_length: Annotated[int, at_least(1)] = 1024,
  margin: Annotated[int, above(0)] = 256,
  **columns: Any,
) -> list[float]:
  """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13) as a reward function.

  It is 0 up to max_length - margin tokens, falls linearly to -1 at max_length, and stays there. The
  setting algo.overlong adds the same penalty without a reward function.

  Args:
    completion_ids: The token ids of the completions.
    max_length: The length limit in tokens.
    margin: The number of tokens before the limit over which the penalty grows.
    columns: Ignored.
  """
  lengths = np.array([len(ids) for ids in completion_ids])
  return [float(penalty) for penalty in overlong(lengths, max_length, margin)]


def overlong(lengths: np.ndarray, max_tokens: int, margin: int) -> np.ndarray:
  """The soft overlong punishment of DAPO (arXiv 2503.14476, equation 13).

  It is 0 up to max_tokens - margin tokens. From there it falls linearly to -1 at max_tokens, and it
  stays at -1 beyond.

  With max_tokens 20480 and margin 4096: 16384 -> 0, 17408 -> -0.25, 18432 -> -0.5, 20481 -> -1.

  Args:
    lengths: Completion lengths in tokens, an array of any shape. The end token counts.
    max_tokens: The length limit.
    margin: The number of tokens before the limit over which the penalty grows.

  Returns:
    The penalties, float32, with the shape of `lengths`.
  """
  tokens_left = max_tokens - margin - np.asarray(lengths)
  return np.clip(tokens_left / margin, -1, 0).astype(np.float32)


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
  """The fraction of n-grams that are repetitions, times `penalty`.

    penalty * (1 - number of different n-grams / number of n-grams)

  It is 0 for a completion of fewer than `size` units. This is the penalty of "Demystifying Long
  Chain-of-Thought Reasoning" (arXiv 2502.03373, appendix C.2), over lower-case words as in Open-R1,
  or over tokens as in TRL.

  With size 2, "a b a b a" has the pairs ab, ba, ab, ba, of which 2 of 4 are different: -0.5.

  Args:
    completions: The texts.
    completion_ids: The token ids of the completions.
    size: The n of the n-grams.
    penalty: The limit of the reward for a completion that only repeats, at most 0.
    unit: The unit of n-grams, "words" or "tokens".
    columns: Ignored.
  """
  if unit == "tokens":
    return [penalty * _repeated(ids, size) for ids in completion_ids]
  return [penalty * _repeated(text.lower().split(), size) for text in completions]


def _repeated(units: Sequence[Any], size: int) -> float:
  """The fraction of n-grams that repeat an earlier one. 0 if there are fewer than `size` units."""
  count = len(units) - size + 1
  if count < 1:
    return 0.0
  different = {tuple(units[i : i + size]) for i in range(count)}
  return 1 - len(different) / count
