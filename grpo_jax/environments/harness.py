"""Harnesses: programs of the user that call the policy through its endpoint, in the workers.

A harness is an async function, `environment.harness=path/file.py:function`:

  async def play(example, base_url, api_key, model):
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
    answer = await client.chat.completions.create(model=model, messages=[...])
    return 1.0

The run calls it once for each completion of a prompt. It gets what an OpenAI client needs, and the
fields of the example, with `prompt_text`, the prompt as the policy reads it, and with data.chat
`messages`. It may call the policy any number of times. The run records the harness's prompts and
the policy's answers token by token.

It returns the reward, or a dict with `reward`, `metrics` (numbers by name) and columns for reward
functions and completions/.

With environment.tools, the field `tools` of the example has the schemas of these tools, in the form
that a client sends. A harness with an argument `tools` gets the functions by name: `await
tools["search"](query="x")` returns the text for the model.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
import functools
import inspect
import os
from typing import Any

from grpo_jax.data.tasks import verifiers_tasks
from grpo_jax.environments import acting
from grpo_jax.environments.acting import Outcome, Request, problem_with
from grpo_jax.environments.adapters import verifiers_player
from grpo_jax.environments.names import is_portable
from grpo_jax.environments.returned import played_of
from grpo_jax.environments.workers import start
from grpo_jax.foreign import as_exceptions, run, text_of
from grpo_jax.rewards import Pool
from grpo_jax.rewards.call import in_thread
from grpo_jax.rewards.names import named
from grpo_jax.rewards.workers.messages import WorkerCall
from grpo_jax.settings import ConfigError

KEY = "environment.harness"
_WORKER = "grpo_jax.environments.harness:play"
TOO_LONG = "context_length_exceeded"  # the error code of the endpoint for a prompt without room
LIMIT = "config keys data.max_prompt_tokens + sampling.max_tokens"  # a part of that error's text
_TOOLS = "tools"  # an argument of harnesses, and a field of examples

Play = Callable[..., Awaitable[Any]]


def resolve(name: str) -> Play:
  """Finds the harness that environment.harness names.

  Raises:
    ConfigError: No harness has this name, or it is not async, or its arguments are wrong.
  """
  adapter, _, id = name.partition(":")
  if adapter == "verifiers":
    verifiers_tasks.load(id)  # only to raise its errors here
    return functools.partial(verifiers_player.play, id=id)
  function = named(name, KEY, "give path/file.py:function, package.module:function or verifiers:ID")
  if not inspect.iscoroutinefunction(function):
    raise ConfigError(f"{KEY}: {name!r} is no async function: write async def")
  values = dict.fromkeys(("example", "base_url", "api_key", "model"))
  try:
    inspect.signature(function).bind(**values | ({_TOOLS: None} if _takes_tools(function) else {}))
  except TypeError as error:
    raise ConfigError(
      f"{KEY}: {name!r} cannot be called ({error}): it gets the arguments example, base_url,"
      " api_key and model, and tools if it names that"
    ) from None
  return function


def _takes_tools(function: Play) -> bool:
  """Returns whether a harness has an argument `tools`."""
  return _TOOLS in inspect.signature(function).parameters


_resolved = functools.lru_cache(8)(resolve)  # in a worker, which lives as long as its run


async def play(
  requests: Sequence[Request],
  log_extra: Any,
  *,
  harness: str = "",
  tools: Sequence[str] = (),
  **columns: Any,
) -> list[float]:
  """Calls the harness for all requests concurrently, and logs the outcomes with `log_extra`.

  A request has the keyword arguments of a call: example, base_url, api_key and model. Workers call
  only reward functions, so this has their signature, and returns rewards of 0 that nothing reads.
  """
  del columns
  log_extra("outcome", await _side_by_side(harness, tuple(tools), requests))
  return [0.0] * len(requests)


async def _side_by_side(
  harness: str, tools: tuple[str, ...], requests: Sequence[Request]
) -> list[Outcome]:
  return await asyncio.gather(*(_play(harness, tools, request) for request in requests))


async def _play(harness: str, tools: tuple[str, ...], request: Request) -> Outcome:
  """Calls the harness once. Returns what `played_of` returns, or {"error": a line}."""
  function = _resolved(harness)
  if _takes_tools(function):
    request = {**request, _TOOLS: acting.callable_tools(tools, request["example"].get(_TOOLS))}
  try:
    with as_exceptions():
      return played_of(await function(**request))
  except Exception as error:
    # The token limit ended this completion, which is no failure: it has no reward. The text is
    # compared, too, because errors of other servers may have the same code.
    if getattr(error, "code", None) == TOO_LONG and LIMIT in text_of(error):
      return played_of(None)
    return {"error": problem_with(error, "", function)}


class Players:
  """Calls a harness in the workers, or in threads of this process."""

  def __init__(self, harness: str, pool: Pool | None, tools: tuple[str, ...] = ()) -> None:
    """Prepares the workers. Raises ConfigError for a harness that cannot be used.

    Args:
      harness: environment.harness.
      pool: The workers. With None, the harness runs in threads of this process.
      tools: environment.tools.
    """
    resolve(harness)  # only to raise its errors here
    of_verifiers = harness.startswith("verifiers:")
    # The servers of verifiers need an event loop that lasts, and `__call__` makes one per batch.
    if pool is None and of_verifiers:
      raise ConfigError(f"config key reward.workers is 0: {harness} needs a worker; set 1 or more")
    self._harness, self._pool, self._tools = harness, pool, tools
    # Calls are async, so one worker can make all of them concurrently.
    self._call = WorkerCall(
      key=f"{_WORKER}(harness={harness!r}, tools={list(tools)!r})",
      name="of the harness",
      columns={},
      is_async=True,
      one_worker=True,
      at_once=2 * (os.cpu_count() or 1) if of_verifiers else 0,  # each agent is a process
    )
    if pool is not None:
      pool.add(self._call.key, play, all(map(is_portable, (harness, *tools))))

  def __call__(self, requests: Sequence[Request]) -> list[Outcome]:
    """Calls the harness for each request. The outcomes come from `played_of`, or are failures."""
    if self._pool is not None:
      return start(self._pool, self._call, requests).result()
    return in_thread(lambda: run(_side_by_side(self._harness, self._tools, requests))).result()
