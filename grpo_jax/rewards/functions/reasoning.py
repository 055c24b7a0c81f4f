"""A reward for the answer after the reasoning of a completion."""

from collections.abc import Callable
import importlib.util
from typing import Annotated, Any

from grpo_jax.rewards.functions import final_number, symbolic
from grpo_jax.rewards.gold import READABLE, gold_text
from grpo_jax.rewards.marks import answers_by, checked_by, prepared_by, reads
from grpo_jax.settings import ConfigError, one_of

# Reward functions that compare a completion with the gold answer, for use in other functions.
SCORERS: dict[str, Callable[..., list[float | None]]] = {
  "math": symbolic.math,
  "strict": final_number.strict,
  "flexible": final_number.flexible,
  "boxed": final_number.boxed,
}


def prepare_scorers() -> None:
  """Imports what the scorer `math` needs, if it is installed, before workers are forked."""
  if importlib.util.find_spec("math_verify"):
    symbolic.warm_up()


def check_scorer(where: str, options: dict[str, Any]) -> None:
  """Raises ConfigError if the package of the scorer is not installed."""
  if options["scorer"] == "math" and not importlib.util.find_spec("math_verify"):
    raise ConfigError(
      f"{where}(scorer='math') needs the package math-verify: pip install -e '.[math]'"
    )


def _check_options(where: str, options: dict[str, Any]) -> None:
  check_scorer(where, options)
  if not options["delimiter"]:
    raise ConfigError(f"{where}(delimiter=''): give what ends the reasoning, such as '</think>'")


def _answers(
  completions: list[str], *, scorer: str = "math", delimiter: str = "</think>", **columns: Any
) -> list[Any]:
  del columns
  tails = [_tail(text, delimiter) for text in completions]
  found: list[Any] = SCORERS[scorer].__dict__["answer_of"](completions=tails)
  return found


def _same_answer(first: Any, second: Any) -> bool:
  """Compares answers of the scorer `math`, which are texts. Other answers are compared with ==."""
  return isinstance(first, str) and symbolic.same_formula(first, second)


def _tail(text: str, delimiter: str) -> str:
  return text.rpartition(delimiter)[2] if delimiter in text else ""


@prepared_by(prepare_scorers)
@answers_by(_answers, _same_answer)
@checked_by(_check_options)
@reads(answer=READABLE)
def reasoning_accuracy(
  completions: list[str],
  answer: list[Any],
  *,
  scorer: Annotated[str, one_of(SCORERS)] = "math",
  delimiter: str = "</think>",
  **columns: Any,
) -> list[float | None]:
  """1.0 if the answer after the reasoning is right, else 0.0.

  The scorer scores the text after the last delimiter. A completion without a delimiter has not
  ended the reasoning and gets 0.0, even if the scorer would return None, as in TRL's
  `reasoning_accuracy_reward`. If the gold answer is missing, the score is None.

  Args:
    completions: The texts.
    answer: The gold answers.
    scorer: The reward function that compares a text with the gold answer: see `SCORERS`.
    delimiter: The text that ends the reasoning.
    columns: Ignored.
  """
  tails = [_tail(text, delimiter) for text in completions]
  scores = SCORERS[scorer](completions=tails, answer=answer)
  return [
    score if delimiter in text or gold_text(gold) is None else 0.0
    for text, score, gold in zip(completions, scores, answer, strict=True)
  ]
