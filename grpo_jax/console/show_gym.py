"""Formats the tasks of reasoning_gym as text: a list of all tasks, and the knobs of one task."""

from collections.abc import Iterator
import itertools

from grpo_jax.console.text import shorten, visible
from grpo_jax.data.tasks.reasoning_gym import Problems
from grpo_jax.problems import gym
from grpo_jax.settings import shown


def task_lines() -> Iterator[str]:
  """Yields lines with all tasks by category, their knobs and defaults, and the refused tasks."""
  names = sorted(gym.names(), key=lambda name: (gym.category_of(name), name))
  width = max(map(len, names))
  for category, tasks in itertools.groupby(names, gym.category_of):
    yield f"{category}:"
    for name in tasks:
      knobs = ", ".join(f"{knob}={shown(value)}" for knob, value in gym.knobs_of(name).items())
      yield f"  {name:{width}}  {knobs}".rstrip()
  yield ""
  yield f"{len(names)} tasks. --knobs=NAME shows the knobs and a problem of one. Not used:"
  for name, reason in gym.REFUSED.items():
    yield f"  {name:{width}}  {reason}"


def knob_lines(call: str) -> Iterator[str]:
  """Yields lines with the knobs of a task and its first training problem.

  Args:
    call: The name of the task, perhaps with knobs, such as `chain_sum(min_terms=2)`.

  Raises:
    ConfigError: There is no such task, or the values of the knobs are invalid.
  """
  task = gym.parse(call, "flag --knobs")
  example = Problems(task, "train")[0]
  knobs = gym.knobs_of(task.name)
  yield f"{task.name} ({gym.category_of(task.name)})"
  width = max(map(len, knobs), default=0)
  for knob, default in knobs.items():
    value = task.knobs.get(knob, default)
    note = "" if knob not in task.knobs else f"   (default {shown(default)})"
    yield f"  {knob:{width}}  {shown(value)}{note}"
  yield ""
  yield "a problem:"
  yield from (visible(line) for line in example["question"].split("\n"))
  yield ""
  yield f"answer: {shorten(visible(example['answer']), 400) or 'only a verifier knows'}"
