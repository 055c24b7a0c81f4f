"""The reward of Countdown: 1.0 if the expression uses each number once and makes the target.

The expression is what follows the last `####` on its line, or what the last <answer> tag holds.
"""

import ast
from fractions import Fraction
import re
from typing import Any

_LONGEST = 200  # characters of an expression
_TAG = re.compile(r"<answer>(?P<inside>(?:(?!<answer>).)*)</answer>", re.DOTALL)


def countdown(
  completions: list[str], numbers: list[list[int]], target: list[int], **columns: Any
) -> list[float]:
  """1.0 where the expression is right, else 0.0.

  Args:
    completions: The texts.
    numbers: The numbers of each problem. Each must be used exactly once.
    target: What the expression must make.
    columns: Not read.
  """
  return [
    float(_is_right(text, own_numbers, own_target))
    for text, own_numbers, own_target in zip(completions, numbers, target, strict=True)
  ]


def _is_right(text: str, numbers: list[int], target: int) -> bool:
  used: list[int] = []
  try:
    tree = ast.parse(_expression(text)[:_LONGEST].strip(), mode="eval")
    value = _value(tree.body, used)
  except (SyntaxError, ValueError, RecursionError, MemoryError, ZeroDivisionError):
    return False
  return sorted(used) == sorted(numbers) and value == target


def _expression(text: str) -> str:
  before, marker, after = text.rpartition("####")
  if marker:
    return after.split("\n")[0]
  tags = list(_TAG.finditer(text))
  return tags[-1]["inside"] if tags else ""


def _value(node: ast.AST, used: list[int]) -> Fraction:
  """The value of an expression of whole numbers and + - * /. Raises ValueError for any other."""
  if isinstance(node, ast.Constant) and type(node.value) is int:
    used.append(node.value)
    return Fraction(node.value)
  if isinstance(node, ast.BinOp):
    left, right = _value(node.left, used), _value(node.right, used)
    if isinstance(node.op, ast.Add):
      return left + right
    if isinstance(node.op, ast.Sub):
      return left - right
    if isinstance(node.op, ast.Mult):
      return left * right
    if isinstance(node.op, ast.Div):
      return left / right
  raise ValueError("it is not an expression of numbers and + - * /")
