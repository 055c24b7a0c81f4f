"""Tasks that a program brings itself."""

from collections.abc import Callable, Sequence
import functools
from typing import Any

from grpo_jax.data import chat
from grpo_jax.data.tasks import TASKS, Task
from grpo_jax.registry import register
from grpo_jax.settings import ConfigError

MakeTask = Callable[[str], Task]


def register_task(make: MakeTask) -> MakeTask:
  """Gives a task of this program a name in configs: that of its function.

  It can be used as a decorator. `data.task` then finds the name. The config that a run saves holds
  the name alone, so a program that goes on with the run registers the function first.

  Args:
    make: It gets data.path and returns a `Task`. An example is a dict with `question`, which is a
      text or a list of messages, `solution` if there is a warm start, and whatever the reward
      functions read, such as `answer`. All examples have the same fields.

  Returns:
    The function.

  Raises:
    ConfigError: A task of grpo_jax has this name, or it has none.
  """

  @functools.wraps(make)
  def make_and_check(path: str) -> Task:
    task = make(path)
    _check(task, f"task {make.__name__}")
    return task

  register("task", TASKS, make.__name__, make_and_check)
  return make


def _check(task: Any, name: str) -> None:
  if not isinstance(task, Task):
    raise ConfigError(f"{name} returned a {type(task).__name__}: it must be a grpo_jax.Task")
  for split, examples in (("train", task.train), ("test", task.test)):
    _check_split(examples, f"{name}: {split}")


def _check_split(examples: Sequence[Any], where: str) -> None:
  if not len(examples):
    raise ConfigError(f"{where} has no examples")
  for number, example in enumerate(examples):
    if not isinstance(example, dict) or "question" not in example:
      raise ConfigError(f"{where}[{number}] must be a dict with a question")
    if example.keys() != examples[0].keys():
      fields, expected = ", ".join(example), ", ".join(examples[0])
      raise ConfigError(f"{where}[{number}] has the fields {fields}, and the first one {expected}")
    if not isinstance(example["question"], str):
      chat.check(example["question"], f"{where}[{number}]")
