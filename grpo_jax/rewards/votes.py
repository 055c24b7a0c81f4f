"""Votes: which completions of a prompt give the same answer, for maj@k.

The marks `answer_of` and `same_answer` of a reward function extract and compare answers: see
`marks.py`. `voting` wraps them as a reward function, which runs in the same process and with the
same limits as others.
"""

from collections.abc import Callable, Sequence
from typing import Any

from grpo_jax.registry import name_of
from grpo_jax.rewards.call import finished, taken_by
from grpo_jax.rewards.marks import whole_groups


def has_votes(function: Callable[..., Any]) -> bool:
  """Whether a reward function has the mark `answer_of`."""
  return callable(getattr(function, "answer_of", None))


def voting(function: Callable[..., Any], group_size: int = 0) -> Callable[..., Any]:
  """Returns a reward function whose scores are equal for completions with equal answers.

  Args:
    function: A reward function for which `has_votes` is true.
    group_size: How many consecutive completions belong to a prompt. 0 means all.

  Returns:
    The function. Its score for a completion is the index of the first completion of the prompt with
    an equal answer, or None for a completion without an answer.
  """

  answer_of: Callable[..., Any] = getattr(function, "answer_of")  # noqa: B009  for mypy

  @whole_groups
  def votes(**columns: Any) -> list[int | None]:
    arguments = columns | getattr(function, "keywords", {})  # with the parameters in the config
    answers = finished(answer_of(**taken_by(answer_of, arguments)))
    count = len(columns["completions"])
    if not isinstance(answers, (list, tuple)) or len(answers) != count:
      raise ValueError(f"answer_of must return a list of {count} answers")
    same = getattr(function, "same_answer", None)
    scores: list[int | None] = []
    for start in range(0, count, group_size or max(1, count)):  # the step of a range is not 0
      group = answers[start : start + (group_size or count)]
      firsts = _first_equals(group, same)  # indices within the group
      scores += [None if first is None else start + first for first in firsts]
    return scores

  votes.__name__ = f"{name_of(function)}.answer_of"
  return votes


def _first_equals(
  answers: Sequence[Any], same: Callable[[Any, Any], bool] | None
) -> list[int | None]:
  """For each answer, finds the index of the first equal answer. None for no answer."""
  firsts = list[int]()  # the first answer of each set of equal answers
  found: list[int | None] = []
  for index, answer in enumerate(answers):
    if answer is None:
      found.append(None)
      continue
    # == comes first: `same` may be slow, and most equal answers are written alike.
    first = next((one for one in firsts if answers[one] == answer), None)
    if first is None and same is not None:
      first = next((one for one in firsts if same(answers[one], answer)), None)
    if first is None:
      firsts.append(index)
    found.append(index if first is None else first)
  return found
