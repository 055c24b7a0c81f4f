"""What workers do for environments: they call a tool, or take a step of an environment.

A request and its outcome are plain values. Nothing here is raised for what a user's code raises.
"""

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
import contextlib
import functools
import inspect
import json
import pickle
from typing import Any, NamedTuple

from grpo_jax.environments import names
from grpo_jax.environments.arguments import check_arguments
from grpo_jax.environments.methods import arguments_of_reset, methods_of
from grpo_jax.environments.names import Environment, Factory, Tool
from grpo_jax.environments.returned import Mistake, Unreachable, reward_of, step_of
from grpo_jax.foreign import Ended, as_exceptions, describe, run, text_of
from grpo_jax.registry import name_of
from grpo_jax.rewards.call import in_thread, is_async
from grpo_jax.settings import ConfigError

LONGEST_MESSAGE = 20_000  # characters of what a tool returns; the rest is cut off

Request = Mapping[str, Any]
Outcome = dict[str, Any]


class Parts(NamedTuple):
  """What is called.

  Attributes:
    tools: By their names.
    environments: What makes one, by task. "" means all tasks.
  """

  tools: dict[str, Tool]
  environments: dict[str, Factory]

  @property
  def are_async(self) -> bool:
    """Whether an event loop must call them."""
    made = [getattr(one, "func", one) for one in self.environments.values()]
    methods = [
      getattr(one, name, None)
      for one in made
      for name in ("reset", "step", "get_reward", *(methods_of(one) or ()))
    ]
    functions = [*self.tools.values(), *methods]
    return self.stay or any(map(is_async, functions))

  @property
  def stay(self) -> bool:
    """Whether an environment cannot move from one worker to another."""
    made = [getattr(one, "func", one) for one in self.environments.values()]
    return not all(getattr(one, "pickles", True) for one in made)

  def methods_of_task(self, task: str) -> dict[str, Tool] | None:
    """The methods that are tools for a task. None where a `step` answers, or nobody."""
    made = self.of_task(task)
    return None if made is None else methods_of(made)

  def of_task(self, task: str) -> Factory | None:
    """The environment of a task, or None if it has none."""
    return self.environments.get(task, self.environments.get(""))


def load(tools: tuple[str, ...], name: str) -> Parts:
  """The tools and environments of these names. Raises ConfigError if one cannot be found."""
  environments = {task: names.resolve_environment(own) for task, own in names.by_task(name).items()}
  found: dict[str, Tool] = {}
  for one in (tool for name in tools for tool in names.resolve_tools(name)):
    if name_of(one) in found:
      raise ConfigError(
        f"environment.tools: two tools are called {name_of(one)}, and a model can call only one of"
        " them; rename one"
      )
    found[name_of(one)] = one
  return Parts(found, environments)


_loaded = functools.lru_cache(8)(load)  # in a worker, which lives as long as its run


def callable_tools(
  tools: tuple[str, ...], schemas: Sequence[Mapping[str, Any]] | None
) -> dict[str, Callable[..., Awaitable[str]]]:
  """Tools for a program that calls them itself, by name.

  Args:
    tools: environment.tools.
    schemas: Of those that it may call.

  Returns:
    Async functions that return what the model is to read: what the tool returns, or a line that
    begins with "error: ". They raise Unreachable where the tool's server is gone.
  """
  parts = _loaded(tools, "")

  def called(schema: Mapping[str, Any]) -> Callable[..., Awaitable[str]]:
    async def call(**arguments: Any) -> str:
      name = schema["function"]["name"]
      if problem := check_arguments(schema, arguments):
        return f"error: {problem}"
      request = {"tool": name, "arguments": arguments}
      found = await _outcome(parts, request, as_thread=True)
      if "error" in found:
        raise Unreachable(found["error"])
      return found["content"]

    return call

  return {schema["function"]["name"]: called(schema) for schema in schemas or ()}


def act(
  requests: Sequence[Request],
  log_extra: Any,
  *,
  tools: tuple[str, ...] = (),
  environment: str = "",
  parts: Parts | None = None,
  **columns: Any,
) -> list[float]:
  """Does what requests ask for, as a reward function that logs the outcomes.

  Args:
    requests: See `_outcome`.
    log_extra: Gets the outcomes.
    tools: environment.tools.
    environment: environment.name.
    parts: What these two name, or None to look it up.
    **columns: What else reward functions get.
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
  parts: Parts | None = None,
  **columns: Any,
) -> list[float]:
  """As `act`, side by side. What is not async runs in threads."""
  del columns
  parts = parts or _loaded(tuple(tools), environment)
  outcomes = await asyncio.gather(*(_outcome(parts, one, as_thread=True) for one in requests))
  log_extra("outcome", outcomes)
  return [0.0] * len(requests)


def outcome(parts: Parts, request: Request) -> Outcome:
  """What a request gives, in this process. See `_outcome`."""
  doing = _outcome(parts, request, as_thread=False)
  if parts.are_async:
    return in_thread(lambda: run(doing)).result()
  try:
    doing.send(None)
  except StopIteration as end:  # nothing in it waits
    return end.value
  raise RuntimeError("a function that is not async waits")


async def _outcome(parts: Parts, request: Request, as_thread: bool) -> Outcome:
  """The outcome of a request.

  Args:
    parts: What is called.
    request: `tool` and `arguments`; or `task`, `example`, `is_first`, `state`, `key`, `is_last`
      and `message`, or `calls` of methods in its place; or `close`, a key.
    as_thread: Whether functions that are not async run in a thread of their own.

  Returns:
    Of a tool: `content`, and `failed`, or `error` where its server is gone. Of an environment:
    `messages`, `reward`, `done` and `state`, or `error`. Of methods: `contents`, which are those of
    tools, in place of `messages`, and at the end `environment`, the pickled object. Of `close`:
    nothing, or `error`.
  """
  try:
    with as_exceptions():
      if "close" in request:
        return await _close_kept(request["close"], as_thread)
      if "tool" in request:
        value = await _call(as_thread, parts.tools[request["tool"]], **request["arguments"])
        return {"content": _as_text(value), "failed": False}
      if "calls" in request:
        return await _call_methods(parts, request, as_thread)
      return await _step(parts, request, as_thread)
  except Unreachable as error:
    return {"error": str(error)}
  except Exception as error:
    if "tool" in request:
      return {"content": f"error: {_message(error)}", "failed": True}
    what = "get_reward()" if "calls" in request else "step()"
    return {"error": problem_with(error, what, parts.of_task(request.get("task", "")))}


def problem_with(error: Exception, what: str, made: Any) -> str:
  """What an environment or a harness did wrong, in a line that begins with a verb.

  Args:
    error: What it raised, or the `Mistake` that it returned.
    what: Its method, or "".
    made: Its class or function, or what makes its objects.
  """
  if not isinstance(error, Mistake):
    return f"raised {describe(error)}"
  whose = name_of(getattr(made, "func", made))
  return f"returned {error} ({f'{what} of ' if what else ''}{whose})"


async def _step(parts: Parts, request: Request, as_thread: bool) -> Outcome:
  environment = await _environment_of(parts, request, as_thread)
  async with closed_on_error(environment, as_thread):
    messages, reward, done = step_of(await _call(as_thread, environment.step, request["message"]))
  state = await _state_of(environment, request["key"], done or request["is_last"], as_thread)
  return {"messages": messages, "reward": reward, "done": done, "state": state}


async def _call_methods(parts: Parts, request: Request, as_thread: bool) -> Outcome:
  """Calls methods of an environment, one after the other, or asks for its reward at the end."""
  environment: Any = await _environment_of(parts, request, as_thread)
  contents, reward, is_last = list[Outcome](), None, request["is_last"]
  async with closed_on_error(environment, as_thread):
    for call in request["calls"]:
      try:
        with as_exceptions():
          value = await _call(as_thread, getattr(environment, call["tool"]), **call["arguments"])
          contents.append({"content": _as_text(value), "failed": False})
      except Exception as error:
        contents.append({"content": f"error: {_message(error)}", "failed": True})
    if is_last and callable(pay := getattr(environment, "get_reward", None)):
      reward = reward_of(await _call(as_thread, pay))
  pickles = getattr(environment, "pickles", True)
  ended = base64.b64encode(_pickled(environment)).decode() if is_last and pickles else ""
  state = await _state_of(environment, request["key"], is_last, as_thread)
  found = {"contents": contents, "reward": reward, "done": is_last, "state": state}
  return found | {"environment": ended}


async def _environment_of(parts: Parts, request: Request, as_thread: bool) -> Environment:
  """The object of a conversation. The first request makes it."""
  environment: Environment | None = _KEPT.pop(request["key"], None)
  if environment is not None:
    return environment
  if request["state"]:
    return pickle.loads(base64.b64decode(request["state"]))
  if not request["is_first"]:
    raise RuntimeError("the worker process that had this conversation has ended")
  factory, example = parts.of_task(request["task"]), request["example"]
  environment = factory()
  async with closed_on_error(environment, as_thread):
    if methods_of(factory) is None:
      await _call(as_thread, environment.reset, example)
    else:
      await _call(as_thread, environment.reset, **arguments_of_reset(environment, example))
  return environment


async def _state_of(environment: Environment, key: str, is_last: bool, as_thread: bool) -> str:
  """What the next request of a conversation needs. Its object is kept here if that is nothing."""
  if is_last:
    await _close(environment, as_thread)
  elif getattr(environment, "pickles", True):
    return base64.b64encode(_pickled(environment)).decode()
  else:
    _KEPT[key] = environment
  return ""


# The objects of environments that cannot be pickled, by conversation.
_KEPT: dict[str, Environment] = {}


async def _close_kept(key: str, as_thread: bool) -> Outcome:
  environment = _KEPT.pop(key, None)
  if environment is not None:
    await _close(environment, as_thread)
  return {}


async def _close(environment: Environment, as_thread: bool) -> None:
  if callable(close := getattr(environment, "close", None)):
    await _call(as_thread, close)


@contextlib.asynccontextmanager
async def closed_on_error(environment: Environment, as_thread: bool = False) -> AsyncIterator[None]:
  """Closes an environment if the block raises something. What `close` then raises is left out."""
  try:
    yield
  except BaseException:
    with contextlib.suppress(Exception), as_exceptions():
      await _close(environment, as_thread)
    raise


async def _call(as_thread: bool, function: Any, /, *values: Any, **named: Any) -> Any:
  if inspect.iscoroutinefunction(function):
    return await function(*values, **named)
  if as_thread:
    value = await asyncio.to_thread(_called, function, *values, **named)
  else:
    value = _called(function, *values, **named)
  return await value if isinstance(value, Coroutine) else value


def _called(function: Any, /, *values: Any, **named: Any) -> Any:
  """What a function returns. No coroutine and no future can carry the StopIteration of one."""
  try:
    return function(*values, **named)
  except StopIteration as error:
    raise Ended(f"it ended with {error!r}") from error


def _pickled(environment: Environment) -> bytes:
  try:
    return pickle.dumps(environment)
  except Exception:
    import cloudpickle  # imported here because it is an optional package

    return cloudpickle.dumps(environment)  # a class of a notebook, by its value


def _as_text(value: Any) -> str:
  text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
  if len(text) > LONGEST_MESSAGE:
    text = f"{text[:LONGEST_MESSAGE]}... (cut off)"
  return text.encode("utf-8", "replace").decode()  # half of a surrogate pair is no text


def _message(error: Exception) -> str:
  """An exception as a line for the model: its message, without the places of a user's files."""
  text = " ".join(text_of(error).split())[:300].encode("utf-8", "replace").decode()
  return text or type(error).__name__
