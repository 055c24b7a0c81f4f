"""Parameters of reward functions.

A config writes them as a call: `cosine(max_length=512)`, `my_rewards.py:brevity(scale=0.01)`.
`grpo_jax/calls.py` reads it. The values become keyword arguments of the function, which gives each
a default:

  def brevity(completions, *, scale=0.01, **columns):
    return [-scale * len(text) for text in completions]

The parameter `name` is for all functions. It is the name in metrics and messages, so that a config
can use a function twice: `regex(name='has_code', pattern='.*def .*')`.

An annotation such as `Annotated[int, at_least(1)]` gives a parameter a range. A function of this
package may have an attribute `check_options`, a function that gets the name and all parameters
before the run starts and raises ConfigError.
"""

from collections.abc import Callable, Mapping
import difflib
import functools
import inspect
import re
import typing
from typing import Any

from grpo_jax.settings import ConfigError, Range, shown

_KINDS = {
  int: "a whole number",
  float: "a number",
  bool: "True or False",
  str: "a string",
  list: "a list",
  tuple: "a list",
  dict: "a dict",
}


def bind(
  function: Callable[..., Any], name: str, options: Mapping[str, Any], key: str
) -> Callable[..., Any]:
  """The function with its parameters set.

  Args:
    function: A reward function.
    name: Its name in the config, without parameters.
    options: Values of its parameters, by name.
    key: The config key that names it, for error messages.

  Returns:
    A callable with the attributes of the function, or the function itself if there is nothing to
    set. A column of the data set with the name of a parameter that is set does not reach it.

  Raises:
    ConfigError: It has no such parameter, or a value has the wrong type or is out of its range.
  """
  given, where = dict(options), f"{key}: {name}"
  is_ours = getattr(function, "__module__", "").startswith("grpo_jax.rewards.")
  shown_name = given.pop("name", "")
  if not isinstance(shown_name, str) or (shown_name and not re.fullmatch(r"[\w.-]+", shown_name)):
    raise ConfigError(f"{where}(name={shown(shown_name)}): name must be letters, digits and _.-")
  parameters = _parameters(function, is_ours)
  for option, value in given.items():
    if option not in parameters:
      raise ConfigError(f"{where}({option}=...): {_unknown(option, list(parameters))}")
    problem = _problem(value, parameters[option])
    if problem:
      raise ConfigError(f"{where}({option}={shown(value)}): {option} {problem}")
  if is_ours:
    given = {parameter.name: parameter.default for parameter in parameters.values()} | given
    if hasattr(function, "check_options"):
      function.check_options(where, given)
  if not given and not shown_name:
    return function
  bound = _Bound(function, **given)
  bound.__name__ = shown_name or getattr(function, "__name__", type(function).__name__)
  return bound


class _Bound(functools.partial[Any]):
  """A partial function whose keyword arguments a call cannot replace.

  It has the attributes of the function.
  """

  __name__: str

  def __call__(self, /, **columns: Any) -> Any:
    return self.func(**(columns | self.keywords))

  @property
  def __signature__(self) -> inspect.Signature:
    """The arguments that are left to give, as error messages show them."""
    parameters = inspect.signature(self.func).parameters.values()
    left = [one for one in parameters if one.name not in self.keywords]
    return inspect.Signature([one.replace(annotation=one.empty) for one in left])

  def __getattr__(self, name: str) -> Any:
    if name.startswith("__"):
      raise AttributeError(name)
    return getattr(self.func, name)


def _parameters(function: Callable[..., Any], is_ours: bool) -> dict[str, inspect.Parameter]:
  """The arguments that a config can set: those that have a default.

  In a function of this package these are the arguments after the `*`. Others may be columns that a
  data set need not have. All parameters of such a function are set, so that no column is taken for
  one of them.
  """
  try:
    parameters = inspect.signature(function).parameters
  except (TypeError, ValueError):  # some functions that are written in C have none
    return {}
  kinds: list[Any] = [inspect.Parameter.KEYWORD_ONLY]
  if not is_ours:
    kinds.append(inspect.Parameter.POSITIONAL_OR_KEYWORD)
  return {
    name: parameter
    for name, parameter in parameters.items()
    if parameter.kind in kinds and parameter.default is not inspect.Parameter.empty
  }


def _unknown(option: str, names: list[str]) -> str:
  if not names:
    return "it has no parameters, which are keyword arguments with defaults"
  close = difflib.get_close_matches(option, names, n=1)
  return f"did you mean {close[0]}?" if close else f"it has the parameters {', '.join(names)}"


def _problem(value: Any, parameter: inspect.Parameter) -> str:
  """The requirement that the value of a parameter breaks. Empty if it breaks none."""
  kind: Any = parameter.annotation
  metadata: list[Any] = []
  if typing.get_origin(kind) is typing.Annotated:
    kind, *metadata = typing.get_args(kind)
  kind = typing.get_origin(kind) or kind
  if kind not in _KINDS:
    kind = type(parameter.default)
  fits = type(value) is kind or (kind is float and type(value) is int)
  fits = fits or (kind in (list, tuple) and type(value) in (list, tuple))
  if kind in _KINDS and not fits and value is not parameter.default:
    return f"must be {_KINDS[kind]}"
  ranges = [one for one in metadata if isinstance(one, Range)]
  problems = [one.requirement for one in ranges if not one.contains(value)]
  return f"is out of its range: {problems[0]}" if problems else ""
