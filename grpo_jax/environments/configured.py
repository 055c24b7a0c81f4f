"""The tools and environments of a config: their schemas, call format and opening messages."""

from collections.abc import Mapping, Sequence
import functools
import inspect
import json
import sys
from typing import Any

from grpo_jax.config import Config, Environment
from grpo_jax.data import row_tools
from grpo_jax.data.tokenizers.tokenizer import Tokenizer
from grpo_jax.environments import acting, names
from grpo_jax.environments.methods import arguments_of_reset, methods_of, opening_of
from grpo_jax.environments.returned import checked
from grpo_jax.environments.schema import schema_of
from grpo_jax.environments.tool_calls import format_for
from grpo_jax.foreign import as_exceptions, run
from grpo_jax.rewards.call import in_thread
from grpo_jax.settings import ConfigError, shown

_KEY = "environment.name"
_MOST_KNOWN = 10_000  # openings in the cache
_MOST_CHARACTERS = 50_000_000  # characters of all openings in the cache

# The messages with which an environment begins, or a line that says why it cannot begin.
Opening = list[dict[str, Any]] | str


class Environments:
  """The tools and environments of a config.

  Attributes:
    settings: The section `environment` of the config.
    parts: The tools and the factories of environments.
    schemas: The schemas of the tools, in the form that chat templates expect.
    of_tasks: By task, the schemas of the methods that are tools. Tasks whose environment has a
      `step` are absent. The task "" means all tasks.
    format: The format in which the model writes calls.
  """

  def __init__(self, settings: Environment, template: str, stops_on_error: bool = True) -> None:
    """Looks up the tools and environments that the config names.

    Args:
      settings: The section `environment` of the config.
      template: The source of the chat template, or "".
      stops_on_error: Whether an environment that cannot begin ends the run.

    Raises:
      ConfigError: A tool or environment does not exist, or two tools have the same name.
    """
    self.settings = settings
    self.parts = acting.load(settings.tools, settings.name)
    self.schemas = [schema_of(tool) for tool in self.parts.tools.values()]
    self.of_tasks = {
      task: [schema_of(one) for one in methods.values()]
      for task, factory in self.parts.environments.items()
      if (methods := methods_of(factory)) is not None
    }
    # Methods of two environments may share a name, because a conversation has one environment.
    tool_names = [schema["function"]["name"] for schema in self.schemas]
    for methods_of_task in self.of_tasks.values():
      for method in methods_of_task:
        if method["function"]["name"] in tool_names:
          raise ConfigError(
            f"environment.tools: a tool and a method of {settings.name} are both called"
            f" {method['function']['name']}; rename one"
          )
    self.format = format_for(template, settings.calls, self.all_schemas)
    self._stops_on_error, self._has_warned = stops_on_error, False
    self._known: dict[str, Opening] = {}  # the cache: openings by example
    self._characters = 0  # in the cache

  def tools_of(self, example: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the schemas of the tools that the prompt of an example shows to the policy.

    With `environment.tools`, the column `tools` selects some of them, and the methods of the task's
    environment are added. Without, only the methods are shown. If no environment has such methods,
    the policy reads the schemas in the row's column, and nothing answers its calls. A harness
    writes its own prompts, so that column is ignored.

    Raises:
      ConfigError: The column `tools` names a tool that the config does not have.
    """
    value = example.get(row_tools.COLUMN)
    of_task = self.of_tasks.get(str(example.get("task", "")), self.of_tasks.get("", []))
    if self.schemas:
      return row_tools.of_row(value, self.schemas) + of_task
    if self.of_tasks:
      return of_task
    return [] if self.settings.harness else row_tools.given(value)

  @property
  def all_schemas(self) -> list[dict[str, Any]]:
    """The schemas of all tools and of the methods of all environments."""
    return self.schemas + [one for methods in self.of_tasks.values() for one in methods]

  @property
  def has_steps(self) -> bool:
    """Whether any environment has a method `step`, which answers with user messages."""
    return len(self.of_tasks) < len(self.parts.environments)

  @property
  def gives_columns(self) -> bool:
    """Whether completions add columns to the data's: a harness's columns, or `environments`."""
    return bool(self.settings.harness or self.of_tasks)

  def openings(self, examples: Sequence[Mapping[str, Any]]) -> list[Opening]:
    """Returns the messages with which environments begin, after the prompts of the data set.

    Returns:
      For each example, the messages. With reward.on_error=none, if an environment cannot begin
      with an example, a line that says why replaces the messages.

    Raises:
      ConfigError: An environment cannot begin with an example, and reward.on_error=stop.
    """
    if not self.parts.environments:
      return [[] for _ in examples]
    keys = [json.dumps(example, sort_keys=True, default=str) for example in examples]
    # A cache, because a step builds its prompts several times.
    new = {key: one for key, one in zip(keys, examples) if key not in self._known}
    if len(self._known) + len(new) > _MOST_KNOWN or self._characters > _MOST_CHARACTERS:
      # Empty the cache, and make the openings of all these examples again.
      self._known, self._characters, new = {}, 0, dict(zip(keys, examples))
    openings = in_thread(lambda: run(self._open(new))).result()
    self._known |= openings
    self._characters += sum(map(_characters_of, openings.values()))
    return [self._known[key] for key in keys]

  async def _open(self, examples: Mapping[str, Mapping[str, Any]]) -> dict[str, Opening]:
    """Makes the openings of `examples`. Both dicts have the same keys."""
    factories = {key: self.parts.of_task(str(one.get("task", ""))) for key, one in examples.items()}
    return {
      key: await self._opening(factories[key], example) if factories[key] else []
      for key, example in examples.items()
    }

  async def _opening(self, factory: names.Factory, example: Mapping[str, Any]) -> Opening:
    """Makes an environment for an example, gets its first messages and closes it.

    Each completion makes its own object later (`acting._environment_of`).
    """
    method = "__init__()"  # the method that runs, for the error line
    try:
      with as_exceptions():
        environment = factory()
        method = "reset()"
        async with acting.closed_on_error(environment):
          messages = await _begun(factory, environment, dict(example))
        method = "close()"
        if callable(close := getattr(environment, "close", None)):
          await _result(close())
        return messages
    except ConfigError:  # from an adapter, such as for a missing package
      raise
    except Exception as error:
      problem = acting.problem_with(error, method, factory)
      return self._refused(f"{_KEY}: {method} of {self.settings.name} {problem}", example)

  def _refused(self, problem: str, example: Mapping[str, Any]) -> str:
    """Returns the line that replaces an opening, and warns once. Raises if errors stop the run."""
    where = str(example.get("place") or shown(dict(example)))
    line = f"{problem}, for the example {where}"
    if self._stops_on_error:
      raise ConfigError(f"{line}; with reward.on_error=none it would be left out")
    if not self._has_warned:
      print(f"warning: {line}: it is left out", file=sys.stderr, flush=True)
      self._has_warned = True
    return line

  @functools.cached_property
  def is_portable(self) -> bool:
    """Whether any process can load the tools and environments by the names in the config."""
    found = [*self.settings.tools, *names.by_task(self.settings.name).values()]
    return all(map(names.is_portable, found))


def make_environments(config: Config, tokenizer: Tokenizer) -> Environments | None:
  """Makes the tools and environments of a config. Returns None if completions have one turn.

  Raises:
    ConfigError: A tool or environment does not exist, or two tools have the same name.
  """
  if not config.environment.has_turns:
    return None
  return Environments(
    config.environment,
    tokenizer.template if config.data.chat else "",
    stops_on_error=config.reward.on_error == "stop",
  )


def _characters_of(opening: Opening) -> int:
  """Returns a rough size of an opening, for the limit of the cache."""
  return len(opening) + sum(len(one["content"]) for one in opening if isinstance(one, dict))


async def _begun(factory: names.Factory, environment: Any, example: dict[str, Any]) -> list[Any]:
  """Calls `reset` of a new environment, and returns the messages with which it begins."""
  if methods_of(factory) is None:
    return checked(await _result(environment.reset(example)))
  return opening_of(await _result(environment.reset(**arguments_of_reset(environment, example))))


async def _result(value: Any) -> Any:
  """Awaits the return value of a function that may be async."""
  return await value if inspect.isawaitable(value) else value
