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
of the prompt. Each public method but `reset`, `get_reward` and `close` is a tool. A turn without
calls ends the conversation, whose reward `get_reward` then gives, if there is one.
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
  """The methods of a class that are tools, by name. None for an environment with a `step`.

  Args:
    factory: The class, or the factory that `names.resolve_environment` returns for it.
  """
  kind = getattr(factory, "func", factory)
  if not inspect.isclass(kind) or callable(getattr(kind, "step", None)):
    return None
  return {
    name: function
    for name, function in inspect.getmembers(kind, inspect.isfunction)
    if not name.startswith("_") and name not in _NO_TOOLS
  }


def arguments_of_reset(environment: Any, example: Mapping[str, Any]) -> dict[str, Any]:
  """The fields of an example that `reset` names, or all if it takes any."""
  return taken_by(environment.reset, example)


def opening_of(said: Any) -> list[dict[str, Any]]:
  """The return value of `reset`, as the messages with which an environment begins.

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
    name: The name of the environment, as environment.name has it for the task.
    state: The pickled object in base64.
  """

  name: str
  state: str

  def for_reward(self) -> Any:
    """The object, where the function is called."""
    names.resolve_environment(self.name)  # its file must have been loaded
    return pickle.loads(base64.b64decode(self.state))
