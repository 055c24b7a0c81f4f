"""A reward for the answer that follows the reasoning of a completion."""

from collections.abc import Callable
from typing import Annotated, Any

from grpo_jax.rewards import answers, symbolic
from grpo_jax.settings import ConfigError, one_of

# The functions that compare a completion with the gold answer, for functions that build on one.
SCORERS: dict[str, Callable[..., list[float | None]]] = {
  "math": symbolic.math,
  "strict": answers.strict,
  "flexible": answers.flexible,
  "boxed": answers.boxed,
}


def reasoning_accuracy(
  completions: list[str],
  answer: list[str],
  *,
  scorer: Annotated[str, one_of(SCORERS)] = "math",
  delimiter: str = "</think>",
  **columns: Any,
) -> list[float | None]:
  """1.0 if the answer after the reasoning is right, else 0.0.

  Only what follows the last delimiter counts. A completion without it did not end its reasoning and
  gets 0.0, even where the scorer does not apply, as in TRL's `reasoning_accuracy_reward`.

  Args:
    completions: The texts.
    answer: The gold answers.
    scorer: The reward function that decides what is right.
    delimiter: What ends the reasoning.
    columns: Not read.
  """
  tails = [text.rpartition(delimiter)[2] if delimiter in text else "" for text in completions]
  scores = SCORERS[scorer](completions=tails, answer=answer)
  return [score if delimiter in text else 0.0 for text, score in zip(completions, scores)]


def _check_delimiter(where: str, options: dict[str, Any]) -> None:
  if not options["delimiter"]:
    raise ConfigError(f"{where}(delimiter=''): give what ends the reasoning, such as '</think>'")


reasoning_accuracy.__dict__["check_options"] = _check_delimiter
