"""Parameters of reward functions.

A config writes them as a call: `cosine(max_length=512)`, `my_rewards.py:brevity(scale=0.01)`.
`grpo_jax/calls.py` parses it. The values become keyword arguments of the function, which must have
a default for each:

  def brevity(completions, *, scale=0.01, **columns):
    return [-scale * len(text) for text in completions]

Every function also has the parameter `name`. It sets the name in metrics and messages, so that a
config can use a function twice: `regex(name='has_code', pattern='.*def .*')`.

An annotation such as `Annotated[int, at_least(1)]` sets the range of a parameter. A function of
this package may have an attribute `check_options(name, parameters)`: a function that checks all
parameters before the run starts, and raises ConfigError.
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
  """Binds parameters to a reward function.

  Args:
    function: A reward function.
    name: The name of the function in the config, without parameters.
    options: The values of parameters, by name.
    key: The config key that names the function, for error messages.

  Returns:
    A callable with the attributes of the function, or the function itself if there is nothing to
    bind. A column of the data does not replace a bound parameter of the same name.

  Raises:
    ConfigError: The function has no such parameter, or a value has the wrong type or is out of
      range.
  """
  values, where = dict(options), f"{key}: {name}"
  is_ours = getattr(function, "__module__", "").startswith("grpo_jax.rewards.")
  new_name = values.pop("name", "")  # a parameter that every function has
  if not isinstance(new_name, str) or (new_name and not re.fullmatch(r"[\w.-]+", new_name)):
    raise ConfigError(f"{where}(name={shown(new_name)}): name must be letters, digits and _.-")
  parameters = _parameters(function, is_ours)
  for option, value in values.items():
    if option not in parameters:
      raise ConfigError(f"{where}({option}=...): {_unknown(option, list(parameters))}")
    problem = _problem(value, parameters[option])
    if problem:
      raise ConfigError(f"{where}({option}={shown(value)}): {option} {problem}")
  # Defaults are bound, too, so that a column of the data cannot replace them. A default of a user's
  # function may also be meant for a column that the data can lack, so it stays unbound.
  if is_ours:
    values = {parameter.name: parameter.default for parameter in parameters.values()} | values
    if hasattr(function, "check_options"):
      function.check_options(where, values)
  if not values and not new_name:
    return function
  bound = _Bound(function, **values)
  bound.__name__ = new_name or getattr(function, "__name__", type(function).__name__)
  return bound


class _Bound(functools.partial[Any]):
  """A partial function with the function's attributes. A call cannot replace bound arguments."""

  __name__: str

  def __call__(self, /, **columns: Any) -> Any:
    return self.func(**(columns | self.keywords))

  @property
  def __signature__(self) -> inspect.Signature:
    """The signature without the bound arguments, and without annotations, for error messages."""
    parameters = inspect.signature(self.func).parameters.values()
    left = [one for one in parameters if one.name not in self.keywords]
    return inspect.Signature([one.replace(annotation=one.empty) for one in left])

  def __getattr__(self, name: str) -> Any:
    if name.startswith("__"):
      raise AttributeError(name)
    return getattr(self.func, name)


def _parameters(function: Callable[..., Any], is_ours: bool) -> dict[str, inspect.Parameter]:
  """The arguments that a config can set: those that have a default.

  In a function of this package (`is_ours`), they must also come after the `*`. Arguments before it
  with a default are columns that a data set may lack.
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
  """Why a value is invalid for a parameter: wrong type, or out of range. Empty if it is valid."""
  kind: Any = parameter.annotation
  metadata: list[Any] = []
  if typing.get_origin(kind) is typing.Annotated:
    kind, *metadata = typing.get_args(kind)
  kind = typing.get_origin(kind) or kind  # list[str] is list
  if kind not in _KINDS:  # an annotation such as Any, or none
    kind = type(parameter.default)
  # By type and not by isinstance, for which True is an int.
  fits = type(value) is kind or (kind is float and type(value) is int)
  fits = fits or (kind in (list, tuple) and type(value) in (list, tuple))
  # The default may be of another type, such as None.
  if kind in _KINDS and not fits and value is not parameter.default:
    return f"must be {_KINDS[kind]}"
  ranges = [interval for interval in metadata if isinstance(interval, Range)]
  problems = [interval.requirement for interval in ranges if not interval.contains(value)]
  return f"is out of its range: {problems[0]}" if problems else ""
