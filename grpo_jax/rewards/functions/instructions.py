"""A reward for following verifiable instructions, as in IFEval (arXiv 2311.07911).

The package lm-eval implements the checks.
"""

from typing import Any

from grpo_jax.rewards.answer import NoReward
from grpo_jax.rewards.marks import checked_by, prepared_by, reads
from grpo_jax.settings import ConfigError


def _checks() -> Any:
  """Imports the module with the checks, which takes seconds. Raises ConfigError if it fails."""
  try:
    from lm_eval.tasks.ifeval import utils
  except ImportError as error:
    raise ConfigError(
      f"the reward ifeval needs the package lm-eval: pip install -e '.[ifeval]' ({error})"
    ) from None
  return utils


def _check_package(where: str, options: dict[str, Any]) -> None:
  del options
  try:
    _checks()
  except ConfigError as error:
    raise ConfigError(f"{where}: {error}") from None


@checked_by(_check_package)
@prepared_by(_checks)
@reads(instruction_id_list=(list, tuple), kwargs=(list, tuple))
def ifeval(
  completions: list[str],
  instruction_id_list: list[Any],
  kwargs: list[Any],
  question: list[Any] | None = None,
  *,
  loose: bool = False,
  partial: bool = False,
  **columns: Any,
) -> list[float | NoReward | None]:
  """1.0 if the completion follows all instructions of its prompt, else 0.0.

  Args:
    completions: The texts.
    instruction_id_list: The names of each prompt's instructions, such as `punctuation:no_comma`.
    kwargs: For each prompt, a list with the arguments of each instruction, a dict.
    question: The prompts, which some instructions require to repeat.
    loose: Whether to accept a text that passes without its first or last line, or asterisks.
    partial: Whether to score the fraction of instructions that are followed instead.
    columns: Ignored.

  Returns:
    The scores. None if a prompt has no instructions, and NoReward if one is unknown.

  Raises:
    ConfigError: The package lm-eval is not installed.
  """
  checks = _checks()
  check = checks.test_instruction_following_strict
  if loose:
    check = checks.test_instruction_following_loose
  prompts = question or [""] * len(completions)
  scores: list[float | NoReward | None] = []
  for text, names, dicts, prompt in zip(
    completions, instruction_id_list, kwargs, prompts, strict=True
  ):
    if not isinstance(names, (list, tuple)) or not names or not isinstance(dicts, (list, tuple)):
      scores.append(None)
      continue
    # 0 is the key of the example, which the checks do not read.
    example = checks.InputExample(0, list(names), str(prompt), list(dicts))
    try:
      followed = check(example, text).follow_instruction_list
    # An unknown instruction, an argument that it does not take, or fewer dicts than instructions.
    except (KeyError, TypeError, IndexError) as error:
      scores.append(NoReward(f"an instruction of {names!r:.80} is not known ({error!r:.80})"))
      continue
    share = sum(followed) / len(followed)
    scores.append(share if partial else float(share == 1))
  return scores
