"""Sends requests for tools and environments to workers, as calls of a special reward function."""

from collections.abc import Mapping, Sequence
import dataclasses
import functools

from grpo_jax.environments import acting
from grpo_jax.environments.acting import Outcome, Request
from grpo_jax.environments.configured import Environments
from grpo_jax.pending import Pending, there
from grpo_jax.rewards import Answer, Pool
from grpo_jax.rewards.workers.messages import NotPortable, WorkerCall
from grpo_jax.settings import ConfigError, RunFailed

_ACTING = "grpo_jax.environments.acting"
FAILURES = {"timeout": "did not answer in time", "crash": "ended without an answer"}


def start(pool: Pool, call: WorkerCall, requests: Sequence[Request]) -> Pending[list[Outcome]]:
  """Sends requests to the workers. Each request is one call of the function.

  Args:
    pool: The workers.
    call: The call without its requests. The function gets `requests` and logs a column `outcome`.
    requests: The requests.

  Returns:
    Pending outcomes in the order of the requests, as the function logs them. If the worker failed,
    the outcome is {"failure": "timeout"} or {"failure": "crash"}. result() raises RunFailed if the
    function itself failed.
  """
  if not requests:
    return there([])
  calls = [
    dataclasses.replace(call, columns={"completions": [""], "requests": [request]})
    for request in requests
  ]
  future = pool.start(calls)
  return Pending(future.result, [future]).then(lambda answers: [*map(_outcome_of, answers)])


def _outcome_of(answer: Answer) -> Outcome:
  (failure,) = answer.failures or [None]
  if failure is None:
    return answer.extras["outcome"][0]
  if failure.kind in FAILURES:
    return {"failure": failure.kind}
  raise RunFailed(failure.text)


def problem_of(outcome: Outcome, who: str) -> tuple[str, str]:
  """Returns (a line that begins with `who`, "timeout", "crash" or "error"), or ("", "")."""
  if "failure" in outcome:
    return f"{who} {FAILURES[outcome['failure']]}", outcome["failure"]
  return (f"{who} {outcome['error']}", "error") if "error" in outcome else ("", "")


class Runner:
  """Calls tools and environments, in workers or in this process.

  Attributes:
    remarks: Lines for the user, if the calls cannot run in workers: how they differ, and why.
  """

  def __init__(self, environments: Environments, pool: Pool | None) -> None:
    """Prepares the workers. Without `pool`, calls run in this process.

    Raises:
      ConfigError: A worker cannot load the tools and environments, or an environment needs a worker
        and there is none.
    """
    self._parts, self._pool = environments.parts, pool
    self.remarks: tuple[str, ...] = ()
    settings = environments.settings
    function = acting.act_async if self._parts.are_async else acting.act
    options = f"tools={list(settings.tools)!r}, environment={settings.name!r}"
    self._call = WorkerCall(
      key=f"{_ACTING}:{function.__name__}({options})",
      name="of the environment",
      columns={},
      is_async=self._parts.are_async,
      one_worker=self._parts.stay,
      again=False,  # no second try after a failure, because a tool may have side effects
    )
    if pool is None and self._parts.stay:
      raise ConfigError(
        f"config key reward.workers is 0: {settings.name} needs a worker that keeps its"
        " conversations; set 1 or more"
      )
    if pool is None:
      return
    # A worker loads portable parts by the names in the key. It gets others pickled in `bound`.
    bound = functools.partial(function, parts=self._parts)
    try:
      pool.add(self._call.key, bound, environments.is_portable)
    except NotPortable as error:
      self._pool = None
      self.remarks = (
        "tools and environments are called in the process of the run, without limits of time and"
        f" memory, because they cannot be sent to a worker: {error}",
      )

  def start(self, requests: Sequence[Request]) -> Pending[list[Outcome]]:
    """Starts requests, as `start` does. Without workers, they have finished when this returns."""
    if self._pool is None:
      return there([acting.outcome(self._parts, request) for request in requests])
    return start(self._pool, self._call, requests)

  def close(self, states: Mapping[str, str]) -> Pending[list[Outcome]]:
    """Closes the environments of conversations that have ended, unless their last turn did.

    Args:
      states: By key of a conversation, its pickled environment. "" if it is closed or in a worker.
    """
    # With `stay`, only a worker knows which environments are still open, so it is asked for all.
    is_open = {key: state for key, state in states.items() if state or self._parts.stay}
    return self.start([{"close": key, "state": state} for key, state in is_open.items()])
