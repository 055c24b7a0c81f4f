"""What `shape_letters` finds, and that the tests run under its checks."""

import ast
import re
import sys

import jax
import jax.numpy as jnp
import pytest
from shape_letters import PACKAGE, Loader, WrongLetters, checked, in_rooms, letters

from grpo_jax import types
from grpo_jax.algo.distillation import teacher_advantages
from grpo_jax.types import Batch, Routing, TokenSelection

PGT = jnp.zeros((2, 3, 4))


def function(*lines):
  """The function f that these lines define, with its checks."""
  names = {"Batch": Batch}
  exec(checked("\n".join(lines), "text.py"), names)
  return names["f"]


def finds(message, f, *arguments):
  """Whether f(*arguments) raises this, outside jit and inside."""
  for call in (f, jax.jit(f)):
    with pytest.raises(WrongLetters) as found:
      call(*arguments)
    assert str(found.value) == message


def test_right_names_pass():
  body = "P, G, T = x_PGT.shape; y_P1T = x_PGT[:, :1]; return y_P1T"
  f = function("def f(x_PGT):", f"  {body}")
  assert f(PGT).shape == jax.jit(f)(PGT).shape == (2, 1, 4)


def test_an_argument_with_a_wrong_name():
  finds("f:1: x_PG has 3 axes, (2, 3, 4)", function("def f(x_PG): return 0"), PGT)


def test_a_transposed_array():
  f = function("def f(x_PGT, y_PGT): return 0")
  finds("f:1: G is 4 in y_PGT and 3 in x_PGT", f, PGT, PGT.swapaxes(1, 2))


@pytest.mark.parametrize(
  "line, message",
  [
    ("y_PT = x_PGT[:, 0, 1:]", "T is 3 in y_PT and 4 in x_PGT"),
    ("x_PGT = x_PGT.sum(1)", "x_PGT has 2 axes, (2, 4)"),
    ("x_PGT: object = x_PGT[0]", "x_PGT has 2 axes, (3, 4)"),
    ("P, T, G = x_PGT.shape", "T is 3 in T and 4 in x_PGT"),
    ("y_P1T = x_PGT", "1 is 3 in y_P1T and 1 in its name"),
  ],
)
def test_a_variable_is_checked_where_it_is_assigned(line, message):
  """The name is right again before the function returns."""
  undo = "x_PGT = start; y_PT = y_P1T = T = G = 0"
  f = function("def f(x_PGT):", f"  start = x_PGT; {line}", f"  {undo}")
  finds(f"f:2: {message}", f, PGT)


def test_a_variable_of_a_loop():
  f = function("def f(x_PGT):", "  for x_GT in x_PGT[:, 0]:", "    pass")
  finds("f:2: x_GT has 1 axes, (4,)", f, PGT)


def test_a_function_inside_shares_the_letters():
  f = function("def f(x_PGT):", "  def g(y_T):", "    return x_PGT + y_T", "  g(x_PGT[0, 0, :2])")
  finds("g:2: T is 4 in x_PGT and 2 in y_T", f, PGT)


def test_the_name_of_a_function_tells_its_result():
  f = function("def f(x_PGT):", "  def x_PG():", "    return x_PGT.sum(0)", "  return x_PG()")
  finds("x_PG:3: P is 3 in x_PG and 2 in x_PGT", f, PGT)


def test_a_struct_with_a_wrong_field():
  f = function("def f(x, y):", "  return 0, Batch(completions_PGT=x, mask_PGT=y)")
  finds("f:2: f.mask_PGT has 2 axes, (2, 4)", f, PGT, PGT.sum(1))
  finds("f:2: G is 4 in f.mask_PGT and 3 in f.completions_PGT", f, PGT, PGT.swapaxes(1, 2))


def test_a_struct_in_a_struct():
  batch = Batch(selection=TokenSelection(weights_PGT=PGT, chosen_PGT=PGT[:1]))
  message = "P is 1 in b.selection.chosen_PGT and 2 in b.selection.weights_PGT"
  finds(f"f:1: {message}", function("def f(b): return 0"), batch)


def test_a_stack_of_structs_has_the_same_axes_in_front():
  f = function("def f(b): return b")
  sums = {"tokens_BL": jnp.zeros((5, 2, 3)), "entropy_BL": jnp.zeros((5, 2, 3))}
  sums |= {"assigned_BLX": jnp.zeros((5, 2, 3, 4)), "probs_BLX": jnp.zeros((5, 2, 3, 4))}
  stack = Routing(**sums)
  f(stack)
  jax.vmap(f)(stack)
  finds(
    "f:1: b.entropy_BL is (2, 3) in a stack of (5,)", f, stack.replace(entropy_BL=jnp.zeros((2, 3)))
  )
  finds("f:1: b.tokens_BL has 1 axes, (3,)", f, jax.tree.map(lambda x: x[0, 0], stack))


def test_the_tests_run_under_the_checks():
  modules = [module for name, module in sys.modules.items() if name.startswith("grpo_jax.")]
  rooms = [module for module in modules if in_rooms(module.__file__)]
  assert {type(module.__spec__.loader) for module in rooms} == {Loader}
  with pytest.raises(WrongLetters, match=r"^teacher_advantages:\d+: G is 3 in policy_logprobs_PGT"):
    teacher_advantages(PGT.swapaxes(1, 2), PGT, PGT)


def test_every_letter_is_in_the_legend():
  legend = set(re.findall(r"(?:^| ) ([A-Z])  \w", types.__doc__, re.M))
  assert {"P", "T", "R", "X", "N", "W"} <= legend
  for file in filter(in_rooms, PACKAGE.rglob("*.py")):
    for node in ast.walk(ast.parse(file.read_text())):
      names = [getattr(node, key, "") for key in ("id", "arg", "attr", "name")]
      used = set("".join(letters(name) for name in names if isinstance(name, str)))
      unknown = used - legend - set("0123456789")
      assert not unknown, f"{file}:{node.lineno} {names}: {unknown}"
