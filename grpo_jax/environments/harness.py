"""Harnesses: programs that play with the policy through its endpoint, in the workers.

A harness is an async function, `environment.harness=path/file.py:function`:

  async def play(example, base_url, api_key, model):
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
    answer = await client.chat.completions.create(model=model, messages=[...])
    return 1.0

It is called once for each completion of a prompt. It gets what an OpenAI client needs, and the
fields of the example, with `prompt_text`, the prompt as the policy reads it, and with data.chat
`messages`. It may ask as often as it likes, and returns the reward. What it asked and what the
policy wrote is recorded token by token.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
import functools
import inspect
import os
from typing import Any

from grpo_jax.data.tasks import verifiers_tasks
from grpo_jax.environments import verifiers_player
from grpo_jax.environments.acting import Outcome, Request, problem_with
from grpo_jax.environments.names import is_portable
from grpo_jax.environments.returned import reward_of
from grpo_jax.environments.workers import start
from grpo_jax.foreign import as_exceptions, run
from grpo_jax.rewards import Pool
from grpo_jax.rewards.call import in_thread
from grpo_jax.rewards.names import named
from grpo_jax.rewards.workers.messages import Call
from grpo_jax.settings import ConfigError

KEY = "environment.harness"
_WORKER = "grpo_jax.environments.harness:play"

Play = Callable[..., Awaitable[float]]


def resolve(name: str) -> Play:
  """The harness of environment.harness.

  Raises:
    ConfigError: There is none of this name, or it is not async, or it lacks an argument.
  """
  adapter, _, id = name.partition(":")
  if adapter == "verifiers":
    verifiers_tasks.load(id)
    return functools.partial(verifiers_player.play, id=id)
  function = named(name, KEY, "give path/file.py:function, package.module:function or verifiers:ID")
  if not inspect.iscoroutinefunction(function):
    raise ConfigError(f"{KEY}: {name!r} is no async function: write async def")
  try:
    inspect.signature(function).bind(example={}, base_url="", api_key="", model="")
  except TypeError as error:
    raise ConfigError(
      f"{KEY}: {name!r} cannot be called ({error}): it gets the arguments example, base_url,"
      " api_key and model"
    ) from None
  return function


_resolved = functools.lru_cache(8)(resolve)  # in a worker, which lives as long as its run


async def play(
  requests: Sequence[Request], log_extra: Any, *, harness: str = "", **columns: Any
) -> list[float]:
  """Plays what requests ask for, side by side, as a reward function that logs the outcomes."""
  del columns
  log_extra("outcome", await _side_by_side(harness, requests))
  return [0.0] * len(requests)


async def _side_by_side(harness: str, requests: Sequence[Request]) -> list[Outcome]:
  return await asyncio.gather(*(_play(harness, request) for request in requests))


async def _play(harness: str, request: Request) -> Outcome:
  function = _resolved(harness)
  try:
    with as_exceptions():
      return {"reward": reward_of(await function(**request))}
  except Exception as error:
    return {"error": problem_with(error, "", function)}


class Players:
  """Calls a harness in the workers, or in threads of this process."""

  def __init__(self, harness: str, pool: Pool | None) -> None:
    """Prepares the workers. Raises ConfigError for a harness that cannot be used."""
    resolve(harness)
    of_verifiers = harness.startswith("verifiers:")
    if pool is None and of_verifiers:
      raise ConfigError(f"config key reward.workers is 0: {harness} needs a worker; set 1 or more")
    self._harness, self._pool = harness, pool
    self._call = Call(
      key=f"{_WORKER}(harness={harness!r})",
      name="of the harness",
      columns={},
      is_async=True,
      one_worker=True,
      at_once=2 * (os.cpu_count() or 1) if of_verifiers else 0,  # each agent is a process
    )
    if pool is not None:
      pool.add(self._call.key, play, is_portable(harness))

  def __call__(self, requests: Sequence[Request]) -> list[Outcome]:
    """The outcomes of requests: `reward` or `error`, or `failure` as in `workers.ask`."""
    if self._pool is not None:
      return start(self._pool, self._call, requests).result()
    return in_thread(lambda: run(_side_by_side(self._harness, requests))).result()
