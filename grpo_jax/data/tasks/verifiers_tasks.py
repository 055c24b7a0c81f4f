"""Tasksets of the package verifiers: `data.task=verifiers` with `data.path=ID`.

An ID may have arguments, as in `guess_turns(digits=2)`: values of the taskset's config. `harness`
is the ID of another program for the agent than the taskset's own.

The package is optional, and its import takes seconds, so nothing is imported before it is needed.
"""

from collections.abc import Sequence
import functools
from typing import Any

from grpo_jax import calls
from grpo_jax.data.files.rows import Example
from grpo_jax.settings import ConfigError, shown

_MOST = 10_000  # tasks that are read of a taskset


@functools.lru_cache(8)
def load(id: str) -> tuple[Any, Sequence[Any]]:
  """The environment of a taskset, and its tasks.

  Its agent is a program of this machine: the taskset's own, or else one that asks the policy and
  calls the taskset's tools.

  Raises:
    ConfigError: verifiers is not installed, or there is no such taskset.
  """
  name, options = calls.parse(id, "data.path")
  try:
    from verifiers.v1.utils import loaders
  except ImportError:
    raise ConfigError(
      "data.task=verifiers and environment.harness=verifiers:ID need the package verifiers: pip"
      " install 'verifiers>=0.4'"
    ) from None
  try:
    harness = options.pop("harness", "")
    if not harness:
      own = loaders.default_harness_id(name)
      harness = own if own == name else "null"
    agent = {"harness": {"id": harness}, "runtime": {"type": "subprocess"}}
    config = loaders.resolve_env_config({"taskset": {"id": name, **options}, "agent": agent})
    environment = loaders.load_environment(config)
    taskset = environment.taskset
    return environment, list(taskset.take(_MOST))
  except Exception as error:  # whatever its parts raise
    said = " ".join(str(error).split())[:200] or type(error).__name__
    raise ConfigError(f"the verifiers taskset {shown(id)} cannot be loaded: {said}") from None


def examples(id: str) -> list[Example]:
  """The tasks as examples: `question` has the messages, and `number` the place of the task.

  Raises:
    ConfigError: A task has no prompt, or one that is not of texts.
  """
  _, tasks = load(id)
  made: list[Example] = []
  for number, task in enumerate(tasks):
    prompt, system = task.data.prompt, task.data.system_prompt
    messages = [{"role": "system", "content": system}] if system else []
    if isinstance(prompt, str):
      messages.append({"role": "user", "content": prompt})
    else:
      messages += [dict(_plain(message)) for message in prompt or ()]
    if not messages or not all(isinstance(one.get("content"), str) for one in messages):
      raise ConfigError(f"data.path={id}: task {number} has no prompt of texts")
    made.append({"question": messages, "answer": "", "number": number})
  return made


def _plain(message: Any) -> dict[str, Any]:
  return message if isinstance(message, dict) else message.model_dump(exclude_none=True)
