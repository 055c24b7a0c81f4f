"""Votes: which completions of a prompt give the same answer, for maj@k.

A reward function says which answer it reads with the mark `answer_of`, and when two answers are
equal with `same_answer`: see `marks.py`. `voting` makes of it a function that is called as a reward
function is: in the same place, with the same limits.
"""

from collections.abc import Callable, Sequence
from typing import Any

from grpo_jax.registry import name_of
from grpo_jax.rewards.call import finished, taken_by
from grpo_jax.rewards.marks import whole_groups


def has_votes(function: Callable[..., Any]) -> bool:
  """Whether a reward function says which answer it reads."""
  return callable(getattr(function, "answer_of", None))


def voting(function: Callable[..., Any], group_size: int = 0) -> Callable[..., Any]:
  """A reward function that gives equal numbers to the completions of a prompt with equal answers.

  Args:
    function: A reward function for which `has_votes`.
    group_size: How many completions a prompt has, one after the other. 0 means that all are of one.

  Returns:
    The function. It gives None to a completion without an answer.
  """

  answer_of: Callable[..., Any] = getattr(function, "answer_of")  # noqa: B009  for mypy

  @whole_groups
  def votes(**columns: Any) -> list[int | None]:
    given = columns | getattr(function, "keywords", {})  # the parameters in the config
    answers = finished(answer_of(**taken_by(answer_of, given)))
    count = len(columns["completions"])
    if not isinstance(answers, (list, tuple)) or len(answers) != count:
      raise ValueError(f"answer_of must return a list of {count} answers")
    same = getattr(function, "same_answer", None)
    found: list[int | None] = []
    for start in range(0, count, group_size or max(1, count)):
      group = answers[start : start + (group_size or count)]
      found += [None if one is None else start + one for one in _first_equals(group, same)]
    return found

  votes.__name__ = f"{name_of(function)}.answer_of"
  return votes


def _first_equals(
  answers: Sequence[Any], same: Callable[[Any, Any], bool] | None
) -> list[int | None]:
  """For each answer the place of the first one that it is equal to. None for no answer."""
  firsts = list[int]()
  found: list[int | None] = []
  for place, answer in enumerate(answers):
    if answer is None:
      found.append(None)
      continue
    # `same` may be slow, and most answers are written alike.
    first = next((one for one in firsts if answers[one] == answer), None)
    if first is None and same is not None:
      first = next((one for one in firsts if same(answers[one], answer)), None)
    if first is None:
      firsts.append(place)
    found.append(place if first is None else first)
  return found
