"""The tools and environments of a config, as a run uses them."""

import asyncio
from collections.abc import Mapping, Sequence
import functools
import inspect
from typing import Any

from grpo_jax.config import Config, Environment
from grpo_jax.data.tokenizers.tokenizer import Tokenizer
from grpo_jax.environments import acting, names
from grpo_jax.environments.acting import Outcome, Request
from grpo_jax.environments.schema import schema_of
from grpo_jax.environments.tool_calls import format_for
from grpo_jax.rewards import Pool
from grpo_jax.rewards.call import describe, in_thread
from grpo_jax.rewards.workers.messages import Call, NotPortable
from grpo_jax.settings import ConfigError, RunFailed

_WORKER = "grpo_jax.environments.acting"
_KEY = "environment.name"


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

  def openings(self, examples: Sequence[Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
    """The messages with which environments begin, after the prompts of the data set.

    Raises:
      ConfigError: An environment refuses an example.
    """
    made = [self.parts.of_task(str(example.get("task", ""))) for example in examples]
    if not any(made):
      return [[] for _ in examples]
    try:
      return in_thread(lambda: asyncio.run(_openings(made, examples))).result()
    except ConfigError:
      raise
    except Exception as error:
      raise ConfigError(
        f"{_KEY}: reset() of {self.settings.name} raised {describe(error)}"
      ) from None

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


class Runner:
  """Calls tools and environments, in workers or in this process."""

  def __init__(self, environments: Environments, pool: Pool | None) -> None:
    """Prepares the workers.

    Raises:
      ConfigError: A worker cannot load what the config names.
    """
    self._parts, self._pool = environments.parts, pool
    self.remarks: tuple[str, ...] = ()
    settings = environments.settings
    function = acting.act_async if self._parts.are_async else acting.act
    options = f"tools={list(settings.tools)!r}, environment={settings.name!r}"
    self._source = f"{_WORKER}:{function.__name__}({options})"
    if pool is None and self._parts.stay:
      raise ConfigError(
        f"config key reward.workers is 0: {settings.name} needs a worker that keeps its"
        " conversations; set 1 or more"
      )
    if pool is None:
      return
    bound = functools.partial(function, parts=self._parts)
    try:
      pool.add(self._source, bound, environments.is_portable)
    except NotPortable as error:
      self._pool = None
      self.remarks = (
        "tools and environments are called in the process of the run, without limits of time and"
        f" memory, because they cannot be sent to a worker: {error}",
      )

  def __call__(self, requests: Sequence[Request]) -> list[Outcome]:
    """The outcomes of requests, in their order.

    One that failed with its worker is {"failure": KIND}, KIND being "timeout" or "crash".
    """
    if not requests:
      return []
    if self._pool is None:
      return [acting.outcome(self._parts, request) for request in requests]
    calls = [
      Call(
        key=self._source,
        name="of the environment",
        columns={"completions": [""], "requests": [request]},
        is_async=self._parts.are_async,
        one_worker=self._parts.stay,
        again=False,
      )
      for request in requests
    ]
    found = []
    for answer in self._pool.start(calls).result():
      (failure,) = answer.failures or [None]
      if failure is None:
        found.append(answer.extras["outcome"][0])
      elif failure.kind == "error":
        raise RunFailed(failure.text)
      else:
        found.append({"failure": failure.kind})
    return found

  def close(self, keys: Sequence[str]) -> None:
    """Says that conversations have ended, to environments that stay in a worker."""
    if self._parts.stay and keys:
      self([{"close": key} for key in keys])
