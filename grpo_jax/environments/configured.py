"""The tools and environments of a config, as a run uses them."""

import asyncio
from collections.abc import Mapping, Sequence
import functools
import inspect
import json
from typing import Any

from grpo_jax.config import Config, Environment
from grpo_jax.data import row_tools
from grpo_jax.data.tokenizers.tokenizer import Tokenizer
from grpo_jax.environments import acting, names
from grpo_jax.environments.schema import schema_of
from grpo_jax.environments.tool_calls import format_for
from grpo_jax.rewards.call import describe, in_thread
from grpo_jax.settings import ConfigError

_KEY = "environment.name"
_MOST_KNOWN = 10_000  # openings that are kept


class Environments:
  """The tools and environments of a config.

  Attributes:
    settings: The section of the config.
    schemas: Of the tools, as chat templates read them.
    format: How the model writes calls.
  """

  def __init__(self, settings: Environment, template: str) -> None:
    """Looks up what the config names.

    Args:
      settings: The section of the config.
      template: The source of the chat template, or "".

    Raises:
      ConfigError: There is no such tool or environment.
    """
    self.settings = settings
    self.parts = acting.load(settings.tools, settings.name)
    self.schemas = [schema_of(tool) for tool in self.parts.tools.values()]
    self.format = format_for(template, settings.calls, self.schemas)
    self._known: dict[str, list[dict[str, Any]]] = {}  # openings by example

  def tools_of(self, example: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The schemas of the tools that the policy may call in an example. See `data/row_tools.py`.

    Raises:
      ConfigError: Its column `tools` names others than those of the config.
    """
    return row_tools.of_row(example.get(row_tools.COLUMN), self.schemas) if self.schemas else []

  def openings(self, examples: Sequence[Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
    """The messages with which environments begin, after the prompts of the data set.

    Raises:
      ConfigError: An environment refuses an example.
    """
    if not self.parts.environments:
      return [[] for _ in examples]
    keys = [json.dumps(example, sort_keys=True, default=str) for example in examples]
    # A step makes its prompts several times.
    new = {key: one for key, one in zip(keys, examples) if key not in self._known}
    if len(self._known) + len(new) > _MOST_KNOWN:
      self._known, new = {}, dict(zip(keys, examples))
    made = [self.parts.of_task(str(example.get("task", ""))) for example in new.values()]
    try:
      openings = in_thread(lambda: asyncio.run(_openings(made, list(new.values())))).result()
    except ConfigError:
      raise
    except Exception as error:
      raise ConfigError(
        f"{_KEY}: reset() of {self.settings.name} raised {describe(error)}"
      ) from None
    self._known |= dict(zip(new, openings, strict=True))
    return [self._known[key] for key in keys]

  @functools.cached_property
  def is_portable(self) -> bool:
    """Whether any process finds what the config names."""
    found = [*self.settings.tools, *names.by_task(self.settings.name).values()]
    return all(map(names.is_portable, found))


def of_config(config: Config, tokenizer: Tokenizer) -> Environments | None:
  """The tools and environments of a config, or None if completions have one turn.

  Raises:
    ConfigError: There is no such tool or environment, or no chat template.
  """
  if not config.environment.has_turns:
    return None
  return Environments(config.environment, tokenizer.template if config.data.chat else "")


async def _openings(
  made: Sequence[names.Factory | None], examples: Sequence[Mapping[str, Any]]
) -> list[list[dict[str, Any]]]:
  return [
    await _opening(one, example) if one else [] for one, example in zip(made, examples, strict=True)
  ]


async def _opening(made: names.Factory, example: Mapping[str, Any]) -> list[dict[str, Any]]:
  environment = made()
  found = environment.reset(dict(example))
  messages = acting.checked(await found if inspect.isawaitable(found) else found)
  close = getattr(environment, "close", None)
  closed = close() if callable(close) else None
  if inspect.isawaitable(closed):
    await closed
  return messages
