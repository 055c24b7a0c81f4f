"""The reward of the game Countdown: reach a target with given numbers and + - * /."""

import ast
from collections.abc import Sequence
from fractions import Fraction
import re
from typing import Annotated, Any

from grpo_jax.rewards.functions.stated import in_tags
from grpo_jax.rewards.marks import answers_by, in_process, reads
from grpo_jax.settings import at_least

_ALLOWED = re.compile(r"[0-9+\-*/() ]+")
_LONGEST = 300  # characters of an expression, which limits the tree's depth and the size of numbers
_LARGEST_INT = 10**12


def _expressions(completions: list[str], **columns: Any) -> list[str | None]:
  """The expressions of completions, for maj@k, without spaces, which do not matter."""
  del columns
  found = map(_expression, completions)
  return [None if one is None else one.replace(" ", "") for one in found]


@in_process
@answers_by(_expressions)
@reads(numbers=(list, tuple), target=(int, float))
def countdown(
  completions: list[str],
  numbers: list[Any],
  target: list[Any],
  *,
  format_score: Annotated[float, at_least(0, at_most=1)] = 0.0,
  **columns: Any,
) -> list[float | None]:
  """1.0 if the answer is an expression that uses each number exactly once and has the target value.

  The answer is the text in the last <answer> tags, else the rest of the line after the last `####`.
  It may contain numbers, binary + - * / and parentheses. It is computed in exact fractions, without
  `eval`. The game and format_score are as in TinyZero.

  For example, with numbers 3, 4, 2 and target 10: `3*4-2` is right; `3*4-4+2` uses 4 twice.

  Args:
    completions: The texts.
    numbers: The numbers of each problem.
    target: The target value of each problem.
    format_score: The reward of a completion with a wrong answer. (0.1 in TinyZero.)
    columns: Ignored.

  Returns:
    The scores. None for a problem of another task, which has no numbers and no target.
  """
  return [
    None if not _is_problem(given, goal) else _score(_expression(text), given, goal, format_score)
    for text, given, goal in zip(completions, numbers, target, strict=True)
  ]


def _is_problem(numbers: Any, target: Any) -> bool:
  kinds = (int, float)
  return (
    isinstance(numbers, (list, tuple))
    and all(isinstance(number, kinds) for number in numbers)
    and isinstance(target, kinds)
  )


def evaluate(expression: str) -> tuple[Fraction, list[int]] | None:
  """Returns the value of an expression and the numbers in it.

  None if it has anything but whole numbers, binary + - * / and parentheses, or divides by zero.
  """
  if len(expression) > _LONGEST or not _ALLOWED.fullmatch(expression):
    return None
  try:
    tree = ast.parse(expression.strip(), mode="eval").body
  except (SyntaxError, ValueError, MemoryError, RecursionError):
    return None
  found: list[int] = []
  value = _value(tree, found)
  return None if value is None else (value, found)


def _score(
  expression: str | None, numbers: Sequence[int], target: int, format_score: float
) -> float:
  if expression is None:
    return 0.0
  evaluated = evaluate(expression)
  if evaluated is None:
    return format_score
  value, found = evaluated
  is_right = value == target and sorted(found) == sorted(numbers)
  return 1.0 if is_right else format_score


def _expression(text: str) -> str | None:
  inside = in_tags(text)
  if inside is not None:
    return inside
  _, anchor, tail = text.rpartition("####")
  return tail.partition("\n")[0].strip() if anchor else None


def _value(node: ast.expr, found: list[int]) -> Fraction | None:
  """The value of a tree. Appends its numbers to `found`. None if it is invalid: see `evaluate`."""
  if isinstance(node, ast.Constant):
    if type(node.value) is not int or node.value > _LARGEST_INT:
      return None
    found.append(node.value)
    return Fraction(node.value)
  if not isinstance(node, ast.BinOp):
    return None
  left, right = _value(node.left, found), _value(node.right, found)
  if left is None or right is None:
    return None
  if isinstance(node.op, ast.Add):
    return left + right
  if isinstance(node.op, ast.Sub):
    return left - right
  if isinstance(node.op, ast.Mult):
    return left * right
  if isinstance(node.op, ast.Div) and right != 0:
    return left / right
  return None
