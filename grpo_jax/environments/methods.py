"""Environments whose public methods are tools, as with TRL's `environment_factory`.

  class Safe:

    def reset(self, code, **columns):
      self.code, self.opened = code, False
      return "The safe has one dial."

    def turn(self, number: int) -> str:
      \"\"\"Turns the dial. ...\"\"\"

    def get_reward(self):
      return float(self.opened)

`reset` gets the fields of the example by name. A text that it returns is added to the last message
of the prompt. Each public method except `reset`, `get_reward` and `close` is a tool. A turn without
calls ends the conversation. Its reward is the result of `get_reward`, if the class has it.
"""

import base64
from collections.abc import Callable, Mapping
import inspect
import pickle
from typing import Any, NamedTuple

from grpo_jax.environments import names
from grpo_jax.environments.returned import Mistake
from grpo_jax.rewards.call import taken_by

_NO_TOOLS = ("reset", "get_reward", "close")
APPENDED = "appended"  # marks an opening that is added to the last message


def methods_of(factory: Any) -> dict[str, Callable[..., Any]] | None:
  """Returns the methods of a class that are tools, by name. None if it has a `step`.

  Args:
    factory: The class, or the factory that `names.resolve_environment` returns for it.
  """
  kind = getattr(factory, "func", factory)
  if not inspect.isclass(kind) or callable(getattr(kind, "step", None)):
    return None
  return {
    name: function
    for name, function in inspect.getmembers(kind, _is_method)
    if not name.startswith("_") and name not in _NO_TOOLS
  }


def _is_method(value: Any) -> bool:
  """Whether an attribute of a class is a method. Class methods are bound to it already."""
  return inspect.isfunction(value) or inspect.ismethod(value)


def arguments_of_reset(environment: Any, example: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the fields of an example that `reset` has parameters for, or all if it has **."""
  return taken_by(environment.reset, example)


def opening_of(said: Any) -> list[dict[str, Any]]:
  """Converts the return value of `reset` to the messages with which an environment begins.

  Raises:
    Mistake: The value is neither a text nor None.
  """
  if said is None:
    return []
  if not isinstance(said, str):
    raise Mistake(f"{said!r:.80}: an environment without step() returns a text or None from it")
  return [{"role": "user", "content": said, APPENDED: True}]


class PickledEnvironment(NamedTuple):
  """An environment after its conversation, for reward functions with an argument `environments`.

  Attributes:
    name: The task's entry of environment.name, without the task.
    state: The pickled object in base64.
  """

  name: str
  state: str

  def for_reward(self) -> Any:
    """Unpickles the object, in the process that calls the reward function."""
    pickled = base64.b64decode(self.state)
    try:
      return pickle.loads(pickled)
    except (ModuleNotFoundError, AttributeError):
      # This process has not loaded the file of the class. If it loaded the file each time, it would
      # make the class anew each time.
      names.resolve_environment(self.name)
      return pickle.loads(pickled)
