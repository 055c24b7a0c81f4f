"""Tasksets of the package verifiers: `data.task=verifiers` with `data.path=ID`.

An ID may have arguments, as in `guess_turns(digits=2)`: values of the taskset's config. `harness`
is the ID of a harness that replaces the taskset's default.

The package is optional, and its import takes seconds, so functions import it when they need it.
"""

from collections.abc import Sequence
import functools
from typing import Any

from grpo_jax import calls
from grpo_jax.data.files.rows import Example
from grpo_jax.settings import ConfigError, shown

_MOST = 10_000  # the most tasks that are read from a taskset


@functools.lru_cache(8)  # a run's task and its harness load the same taskset
def load(id: str) -> tuple[Any, Sequence[Any]]:
  """Loads the environment of a taskset, and its tasks.

  The agent runs as a subprocess of this machine. Its harness is the ID's argument `harness`, or
  else the taskset's harness, or else "null", which calls the policy and the taskset's tools.

  Returns:
    (the environment of the package verifiers, at most `_MOST` tasks)

  Raises:
    ConfigError: verifiers is not installed, or the taskset cannot be loaded.
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
      default = loaders.default_harness_id(name)
      harness = default if default == name else "null"  # a taskset's harness has the taskset's ID
    agent = {"harness": {"id": harness}, "runtime": {"type": "subprocess"}}
    config = loaders.resolve_env_config({"taskset": {"id": name, **options}, "agent": agent})
    environment = loaders.load_environment(config)
    taskset = environment.taskset
    return environment, list(taskset.take(_MOST))
  except Exception as error:  # the code of a taskset may raise anything
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    raise ConfigError(f"the verifiers taskset {shown(id)} cannot be loaded: {reason}") from None


def examples(id: str) -> list[Example]:
  """The tasks of a taskset as examples, with messages as `question` and the index as `number`.

  Raises:
    ConfigError: The taskset cannot be loaded, or the prompt of a task is missing or not only texts.
  """
  _, tasks = load(id)
  made: list[Example] = []  # the taskset scores, so that an example needs no answer
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
