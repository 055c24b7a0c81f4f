"""Answers requests in the workers: calls a tool, or an environment's `step` or methods.

Requests and outcomes are plain values. An exception in a user's code becomes an outcome.
"""

import asyncio
import base64
from collections.abc import (
  AsyncIterator,
  Awaitable,
  Callable,
  Coroutine,
  Iterable,
  Mapping,
  Sequence,
)
import contextlib
import functools
import inspect
import pickle
from typing import Any, NamedTuple

from grpo_jax.environments import names
from grpo_jax.environments.arguments import check_arguments
from grpo_jax.environments.methods import arguments_of_reset, methods_of
from grpo_jax.environments.names import EnvironmentObject, Factory, Tool
from grpo_jax.environments.returned import (
  Mistake,
  Unreachable,
  as_text,
  content_of,
  reward_of,
  step_of,
)
from grpo_jax.foreign import Ended, as_exceptions, describe, run, text_of
from grpo_jax.registry import name_of
from grpo_jax.rewards.call import in_thread, is_async
from grpo_jax.settings import ConfigError

Request = Mapping[str, Any]
Outcome = dict[str, Any]


class ToolsAndEnvironments(NamedTuple):
  """The tools and environments that a config names.

  Attributes:
    tools: The tools by their names.
    environments: By task, the factory of the environment. The task "" means all tasks.
  """

  tools: dict[str, Tool]
  environments: dict[str, Factory]

  @property
  def are_async(self) -> bool:
    """Whether calls need an event loop: a function is async, or an environment stays."""
    # A factory is a `functools.partial` of the class, or the class itself.
    classes = [getattr(one, "func", one) for one in self.environments.values()]
    methods = [
      getattr(one, name, None)
      for one in classes
      for name in ("reset", "step", "get_reward", *(methods_of(one) or ()))
    ]
    functions = [*self.tools.values(), *methods]
    return self.stay or any(map(is_async, functions))

  @property
  def stay(self) -> bool:
    """Whether the objects of some environment cannot move from one worker to another."""
    classes = [getattr(one, "func", one) for one in self.environments.values()]
    return not all(getattr(one, "pickles", True) for one in classes)

  def methods_of_task(self, task: str) -> dict[str, Tool] | None:
    """Returns the methods that are tools for a task. None if no environment of it has such."""
    factory = self.of_task(task)
    return None if factory is None else methods_of(factory)

  def of_task(self, task: str) -> Factory | None:
    """Returns the factory of a task's environment, or None if the task has none."""
    return self.environments.get(task, self.environments.get(""))


def load(tools: tuple[str, ...], name: str) -> ToolsAndEnvironments:
  """Loads environment.tools and environment.name. Raises ConfigError if one cannot be found."""
  entries = names.by_task(name)
  environments = {task: names.resolve_environment(entry) for task, entry in entries.items()}
  found: dict[str, Tool] = {}
  for one in (tool for entry in tools for tool in names.resolve_tools(entry)):
    if name_of(one) in found:
      raise ConfigError(
        f"environment.tools: two tools are called {name_of(one)}, and a model can call only one of"
        " them; rename one"
      )
    found[name_of(one)] = one
  return ToolsAndEnvironments(found, environments)


_loaded = functools.lru_cache(8)(load)  # a cache for the worker process, which serves one run


def callable_tools(
  tools: tuple[str, ...], schemas: Sequence[Mapping[str, Any]] | None
) -> dict[str, Callable[..., Awaitable[str]]]:
  """Returns tools as functions, by name, for a harness that calls them itself.

  Args:
    tools: environment.tools.
    schemas: The schemas of the tools that the harness may call.

  Returns:
    Async functions that return a text for the model: the tool's result, or a line that begins with
    "error: ". They raise Unreachable if the tool's server is gone. Under any other name there is a
    function that returns such a line, because a model may call what does not exist.
  """
  parts = _loaded(tools, "")  # "": a harness has no environment

  def function_for(schema: Mapping[str, Any]) -> Callable[..., Awaitable[str]]:
    async def call(**arguments: Any) -> str:
      name = schema["function"]["name"]
      if problem := check_arguments(schema, arguments):
        return f"error: {problem}"
      request = {"tool": name, "arguments": arguments}
      # In a thread, because the harnesses of other completions run in this event loop.
      answer = await _outcome(parts, request, as_thread=True)
      if "error" in answer:  # the server is gone. The error of a tool itself is `content`
        raise Unreachable(answer["error"])
      return as_text(answer["content"])

    return call

  return _Callables({schema["function"]["name"]: function_for(schema) for schema in schemas or ()})


class _Callables(dict[str, Callable[..., Awaitable[str]]]):
  """Functions by name. A name that is missing gives a function that says so to the model."""

  def __missing__(self, name: str) -> Callable[..., Awaitable[str]]:
    async def call(**arguments: Any) -> str:
      del arguments
      return f"error: {no_tool(name, self)}"

    return call


def no_tool(name: str, names: Iterable[str]) -> str:
  """Returns the error of a call of a tool that does not exist. `names` are those that do."""
  return f"there is no tool {name!r:.80}; there are {', '.join(names)}"


def act(
  requests: Sequence[Request],
  log_extra: Any,
  *,
  tools: tuple[str, ...] = (),
  environment: str = "",
  parts: ToolsAndEnvironments | None = None,
  **columns: Any,
) -> list[float]:
  """Answers requests in a worker, and logs the outcomes.

  Workers call only reward functions, so this has their signature, and returns rewards of 0 that
  nothing reads.

  Args:
    requests: The requests, as `_outcome` describes them.
    log_extra: Receives ("outcome", the list of outcomes).
    tools: environment.tools.
    environment: environment.name.
    parts: The tools and environments with these names. None looks them up.
    **columns: The other arguments of reward functions, which are ignored.
  """
  del columns
  parts = parts or _loaded(tuple(tools), environment)
  log_extra("outcome", [outcome(parts, request) for request in requests])
  return [0.0] * len(requests)


async def act_async(
  requests: Sequence[Request],
  log_extra: Any,
  *,
  tools: tuple[str, ...] = (),
  environment: str = "",
  parts: ToolsAndEnvironments | None = None,
  **columns: Any,
) -> list[float]:
  """Does what `act` does, for all requests concurrently. Functions without async run in threads."""
  del columns
  parts = parts or _loaded(tuple(tools), environment)
  outcomes = await asyncio.gather(*(_outcome(parts, one, as_thread=True) for one in requests))
  log_extra("outcome", outcomes)
  return [0.0] * len(requests)


def outcome(parts: ToolsAndEnvironments, request: Request) -> Outcome:
  """Answers a request in this process. See `_outcome`."""
  coroutine = _outcome(parts, request, as_thread=False)
  if parts.are_async:
    return in_thread(lambda: run(coroutine)).result()
  try:
    coroutine.send(None)
  except StopIteration as end:  # without async functions, the coroutine ends without awaiting
    return end.value
  raise RuntimeError("a function that is not async waits")


async def _outcome(parts: ToolsAndEnvironments, request: Request, as_thread: bool) -> Outcome:
  """Answers a request.

  Args:
    parts: The tools and environments.
    request: One of three forms. A tool call has `tool` and `arguments`. A turn of an environment
      has `task`, `example`, `is_first`, `state`, `key` and `is_last`, and either `message`, for
      `step`, or `calls`, for methods. {"close": key, "state": state} closes the environment of a
      conversation that has ended.
    as_thread: Whether functions that are not async run in another thread.

  Returns:
    A dict. For a tool, `content`, as `content_of` makes it, and `failed`, or `error` if its server
    is gone. For `step`, `messages`, `reward`, `done` and `state`, or `error`. For methods, the same
    with `contents`, a tool's outcome for each call, instead of `messages`, and `environment`, which
    is "" before the last turn and then the pickled object. For `close`, {} or `error`.
  """
  try:
    with as_exceptions():
      if "close" in request:
        return await _close_ended(request["close"], request["state"], as_thread)
      if "tool" in request:
        value = await _call(as_thread, parts.tools[request["tool"]], **request["arguments"])
        return {"content": content_of(value), "failed": False}
      if "calls" in request:
        return await _call_methods(parts, request, as_thread)
      return await _step(parts, request, as_thread)
  except Unreachable as error:
    return {"error": str(error)}
  except Exception as error:
    if "tool" in request:
      return {"content": f"error: {_message(error)}", "failed": True}
    # The error of a wrong return value names the method. Of these two alone, values are checked.
    method = "get_reward()" if "calls" in request else "step()"
    return {"error": problem_with(error, method, parts.of_task(request.get("task", "")))}


def problem_with(error: Exception, method: str, factory: Any) -> str:
  """Describes the error of an environment or a harness in a line that begins with a verb.

  Args:
    error: The exception that the user's code raised, or a `Mistake` for a wrong return value.
    method: The method that was called, or "".
    factory: The class or function, or a partial of it.
  """
  if not isinstance(error, Mistake):
    return f"raised {describe(error)}"
  whose = name_of(getattr(factory, "func", factory))
  return f"returned {error} ({f'{method} of ' if method else ''}{whose})"


async def _step(parts: ToolsAndEnvironments, request: Request, as_thread: bool) -> Outcome:
  """Calls `step` of a conversation's environment."""
  environment = await _environment_of(parts, request, as_thread)
  async with closed_on_error(environment, as_thread):
    messages, reward, done = step_of(await _call(as_thread, environment.step, request["message"]))
  state = await _state_of(environment, request["key"], done or request["is_last"], as_thread)
  return {"messages": messages, "reward": reward, "done": done, "state": state}


async def _call_methods(parts: ToolsAndEnvironments, request: Request, as_thread: bool) -> Outcome:
  """Calls methods of an environment in order. In the last turn, also calls `get_reward`."""
  environment: Any = await _environment_of(parts, request, as_thread)
  contents, reward, is_last = list[Outcome](), None, request["is_last"]
  async with closed_on_error(environment, as_thread):
    for call in request["calls"]:
      try:
        with as_exceptions():
          value = await _call(as_thread, getattr(environment, call["tool"]), **call["arguments"])
          contents.append({"content": content_of(value), "failed": False})
      except Exception as error:  # for the policy to read, as that of any tool
        contents.append({"content": f"error: {_message(error)}", "failed": True})
    if is_last and callable(get_reward := getattr(environment, "get_reward", None)):
      reward = reward_of(await _call(as_thread, get_reward))
  # Reward functions get the object as it is now, before `_state_of` closes it.
  pickles = getattr(environment, "pickles", True)
  ended = base64.b64encode(_pickled(environment)).decode() if is_last and pickles else ""
  state = await _state_of(environment, request["key"], is_last, as_thread)
  found = {"contents": contents, "reward": reward, "done": is_last, "state": state}
  return found | {"environment": ended}


async def _environment_of(
  parts: ToolsAndEnvironments, request: Request, as_thread: bool
) -> EnvironmentObject:
  """Finds or unpickles the environment of a conversation. The first request creates it."""
  # Taken out while it is called, so that one that fails does not stay. `_state_of` puts it back.
  environment: EnvironmentObject | None = _KEPT.pop(request["key"], None)
  if environment is not None:
    return environment
  if request["state"]:
    return pickle.loads(base64.b64decode(request["state"]))
  if not request["is_first"]:  # neither kept nor pickled, so it was kept by another process
    raise RuntimeError("the worker process that had this conversation has ended")
  factory, example = parts.of_task(request["task"]), request["example"]
  environment = factory()
  async with closed_on_error(environment, as_thread):
    # The messages that `reset` returns are in the prompt already, by `Environments.openings`.
    if methods_of(factory) is None:
      await _call(as_thread, environment.reset, example)
    else:
      await _call(as_thread, environment.reset, **arguments_of_reset(environment, example))
  return environment


async def _state_of(
  environment: EnvironmentObject, key: str, is_last: bool, as_thread: bool
) -> str:
  """Pickles the environment in base64. "" if it stays in `_KEPT` or the last turn closes it."""
  if is_last:
    await _close(environment, as_thread)
  elif getattr(environment, "pickles", True):
    return base64.b64encode(_pickled(environment)).decode()
  else:
    _KEPT[key] = environment
  return ""


# The environments that cannot be pickled, by the key of their conversation.
_KEPT: dict[str, EnvironmentObject] = {}


async def _close_ended(key: str, state: str, as_thread: bool) -> Outcome:
  """Closes the environment that stays in `_KEPT` or is pickled in `state`, if there is one."""
  environment = _KEPT.pop(key, None)
  if environment is None and state:
    environment = pickle.loads(base64.b64decode(state))
  if environment is not None:
    await _close(environment, as_thread)
  return {}


async def _close(environment: EnvironmentObject, as_thread: bool) -> None:
  if callable(close := getattr(environment, "close", None)):
    await _call(as_thread, close)


@contextlib.asynccontextmanager
async def closed_on_error(
  environment: EnvironmentObject, as_thread: bool = False
) -> AsyncIterator[None]:
  """Closes an environment if the block raises. Ignores errors of `close` itself."""
  try:
    yield
  except BaseException:
    with contextlib.suppress(Exception), as_exceptions():
      await _close(environment, as_thread)
    raise


async def _call(as_thread: bool, function: Any, /, *values: Any, **named: Any) -> Any:
  """Calls a function of a user, async or not. `as_thread` moves other functions to a thread."""
  if inspect.iscoroutinefunction(function):
    return await function(*values, **named)
  if as_thread:
    value = await asyncio.to_thread(_called, function, *values, **named)
  else:
    value = _called(function, *values, **named)
  return await value if isinstance(value, Coroutine) else value


def _called(function: Any, /, *values: Any, **named: Any) -> Any:
  """Calls a function. Turns StopIteration into `Ended`: coroutines and futures cannot raise it."""
  try:
    return function(*values, **named)
  except StopIteration as error:
    raise Ended(f"it ended with {error!r}") from error


def _pickled(environment: EnvironmentObject) -> bytes:
  try:
    return pickle.dumps(environment)
  except Exception:
    import cloudpickle  # imported here because it is an optional package

    return cloudpickle.dumps(environment)  # it can pickle classes that a notebook defines


def _message(error: Exception) -> str:
  """Returns an exception's message as one line for the model, without file names and lines."""
  text = " ".join(text_of(error).split())[:300].encode("utf-8", "replace").decode()
  return text or type(error).__name__
