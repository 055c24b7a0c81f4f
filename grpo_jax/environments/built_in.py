"""The tools and environments of this package."""

import ast
from collections.abc import Callable, Mapping
import operator
from typing import Any

from grpo_jax.registry import name_of
from grpo_jax.rewards import Reward, resolve
from grpo_jax.rewards.call import is_async
from grpo_jax.settings import ConfigError

# Limits of the calculator, so that no expression of a policy takes long to compute.
_MOST_CHARACTERS = 200
_LARGEST = 1e300  # floats end at 1.8e308
_NO_VALUE = "the value is no number or too large"
_LARGEST_EXPONENT = 64
_RETRY = "environment.name: retry"  # begins error messages
_OPERATORS: dict[type, Callable[..., Any]] = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: operator.truediv,
  ast.FloorDiv: operator.floordiv,
  ast.Mod: operator.mod,
  ast.Pow: operator.pow,
  ast.USub: operator.neg,
  ast.UAdd: operator.pos,
}


def calculator(expression: str) -> str:
  """Computes an arithmetic expression.

  Args:
    expression: Numbers with + - * / // % ** and parentheses, such as 3 * (4 + 5).

  Returns:
    The value.
  """
  if len(expression) > _MOST_CHARACTERS:
    raise ValueError(f"the expression has more than {_MOST_CHARACTERS} characters")
  try:
    tree = ast.parse(expression.strip().replace(",", ""), mode="eval")  # "1,000" becomes 1000
  except (SyntaxError, ValueError, MemoryError, RecursionError):
    raise ValueError(f"{expression!r} is not an arithmetic expression") from None
  value = _value(tree.body)
  if not abs(value) <= _LARGEST:  # 1e999 is infinite, and 1e999 - 1e999 is not a number
    raise ValueError(_NO_VALUE)
  # 6 / 3 gives "2", not "2.0". From 2**53 on, a float may not be exact.
  if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
    value = int(value)
  return str(value)


def _value(node: ast.AST) -> int | float:
  """Evaluates a syntax tree of numbers and operators. Raises ValueError or ArithmeticError."""
  if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
    return node.value + 0  # True becomes 1
  if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
    return _OPERATORS[type(node.op)](_value(node.operand))
  if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
    left, right = _value(node.left), _value(node.right)
    # A large power would take too long to compute.
    if isinstance(node.op, ast.Pow) and abs(right) > _LARGEST_EXPONENT:
      raise ValueError(f"an exponent is larger than {_LARGEST_EXPONENT}")
    value = _OPERATORS[type(node.op)](left, right)
    if isinstance(value, complex) or abs(value) > _LARGEST:  # complex: (-1) ** 0.5
      raise ValueError(_NO_VALUE)
    return value
  raise ValueError("only numbers, + - * / // % ** and parentheses are allowed")


# The reward functions of `Retry` by their names. A process keeps them, because finding one may
# execute a file.
_JUDGES: dict[str, Reward] = {}


def check_retry(*, function: str = "strict", **options: Any) -> None:
  """Finds the function of `Retry` before a run starts. Later turns in this process then use it.

  Args:
    function: As for `Retry`.
    **options: The other parameters of `Retry`, which are ignored.

  Raises:
    ConfigError: There is no such function, or it is async.
  """
  del options
  # No name counts as that of a reward model, because a worker cannot compute models.
  judge = resolve(function, _RETRY, lambda name: False)
  if is_async(judge):
    raise ConfigError(
      f"{_RETRY}(function={function!r}): {name_of(judge)} is async, and retry calls only functions"
      " that are not: choose another function"
    )
  _JUDGES[function] = judge


class Retry:
  """Says that an answer is wrong, and lets the policy try again.

  A right answer ends the conversation with a reward of 1, minus `discount` for each earlier try.
  """

  def __init__(
    self,
    *,
    function: str = "strict",
    tries: int = 3,
    message: str = "That is wrong. Try again.",
    discount: float = 0.0,
  ) -> None:
    """Makes the environment of a completion.

    Args:
      function: The name of the reward function that judges an answer. A score of 1 is right.
      tries: How often the policy may answer.
      message: The message that the policy reads after a wrong answer.
      discount: How much each try before the right one lowers the reward.
    """
    self._function, self._tries, self._message = function, tries, message
    self._discount, self._tried = discount, 0
    self._example: dict[str, Any] = {}

  def reset(self, example: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Stores the example. Returns no messages: the data set's prompt is the whole prompt."""
    self._example = dict(example)
    return []

  def step(self, message: Mapping[str, Any]) -> tuple[list[dict[str, Any]], float | None, bool]:
    """Judges an answer. The conversation ends after a right answer or the last try."""
    self._tried += 1
    if self._function not in _JUDGES:  # this process got the environment by value
      check_retry(function=self._function)
    score = _JUDGES[self._function]
    columns = {name: [value] for name, value in self._example.items()}
    text = message["content"]
    (value,) = score(**columns | {"completions": [text], "prompts": [""], "completion_ids": [[]]})
    if value == 1:
      return [], max(0.0, 1.0 - self._discount * (self._tried - 1)), True
    is_last = self._tried >= self._tries
    answer = [] if is_last else [{"role": "user", "content": self._message}]
    return answer, 0.0, is_last
