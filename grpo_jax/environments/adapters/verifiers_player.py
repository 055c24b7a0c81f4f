"""The harness `verifiers:ID`: the package verifiers plays and scores the tasks of a taskset."""

import asyncio
from collections.abc import Mapping, Sequence
import contextlib
import os
import secrets
from typing import Any

from grpo_jax.data.tasks import verifiers_tasks

# By taskset, the open servers of its agents in this worker. They end with the worker.
_SERVED: dict[str, contextlib.AsyncExitStack] = {}
_LOCKS: dict[str, asyncio.Lock] = {}


async def play(
  example: Mapping[str, Any], base_url: str, api_key: str, model: str, *, id: str
) -> dict[str, Any]:
  """Lets the taskset's agent work on a task, with the policy as its model.

  Args:
    example: An example. Its field `number` is the index of the task.
    base_url: The URL of the policy's endpoint.
    api_key: The key of the endpoint.
    model: The policy's name at the endpoint.
    id: The name of the taskset.

  Returns:
    {"reward": the reward, "metrics": as `metrics_of` returns them}.

  Raises:
    RuntimeError: The agent failed.
  """
  from verifiers.v1.clients import EvalClientConfig, ModelContext

  environment, tasks = verifiers_tasks.load(id)
  # The first of the concurrent calls starts the servers, which the others wait for.
  async with _LOCKS.setdefault(id, asyncio.Lock()):
    if id not in _SERVED:
      stack = contextlib.AsyncExitStack()
      await stack.enter_async_context(environment.serving())
      _SERVED[id] = stack
  # The client reads its key from an environment variable, and concurrent calls have other keys.
  variable = f"GRPO_JAX_KEY_{secrets.token_hex(8)}"
  os.environ[variable] = api_key
  try:
    client = EvalClientConfig(base_url=base_url, api_key_var=variable)
    context = ModelContext(model=model, client=client)
    episode = await environment.run_episode(tasks[example["number"]], context)
  finally:
    del os.environ[variable]
  errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
  if not episode.ok:
    raise RuntimeError(f"verifiers: {errors[0].message if errors else 'the episode failed'}")
  reward = float(sum(trace.reward or 0.0 for trace in episode.traces))
  return {"reward": reward, "metrics": metrics_of(episode.traces)}


def metrics_of(traces: Sequence[Any]) -> dict[str, float]:
  """Returns an episode's unweighted rewards, as `rewards/NAME`, and its metrics.

  If several traces have the same name, their values are added.
  """
  found: dict[str, float] = {}
  for trace in traces:
    scores = {f"rewards/{name}": one and one.score for name, one in trace.rewards.items()}
    for name, value in {**scores, **trace.metrics}.items():
      if value is not None:
        found[name] = found.get(name, 0.0) + value
  return found
