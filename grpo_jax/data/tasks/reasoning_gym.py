"""Problems of the package reasoning_gym: generated, and scored by the verifiers of their tasks.

Problem i of a split depends only on the task, its knobs, the split, i, and the versions of the
package and of Python. New versions of either may change the problems.
"""

import re
from typing import Any
import zlib

from grpo_jax import calls
from grpo_jax.data.tasks.generated import Generated
from grpo_jax.problems import gym
from grpo_jax.settings import ConfigError

SIZES = {"train": 60_000, "test": 2_000}
SEEDS = {"train": 2, "test": 30}  # seeds that problem i tries before those of i + 1
FIRST_SEED = {"train": 0, "test": 10_000_000}
MOST_TRIED = 400  # the most seeds that are tried for one problem
MOST_FAILURES = 20  # the most errors of the task for one problem
# Seeds of a dataset. word_ladder allows no more, and acre makes all problems when it is opened.
_BLOCK = 20_000
_BLOCKS = {"acre": 1_000}
_ENTRY = re.compile(r"(?:(?P<name>\w+)=)?(?P<call>.+)", re.DOTALL)


class Problems(Generated):
  """The problems of a split, "train" or "test", of one task.

  Reading a problem generates it. A problem has the fields

    question, answer  from the package. "" is the answer of tasks that have only a verifier
    solution          the answer between <answer> tags, or None without an answer
    verifier          the task with its knobs, such as chain_sum(min_terms=2)
    entry             the package's dict of the problem, which the verifier reads
  """

  def __init__(self, task: gym.GymTask, split: str) -> None:
    super().__init__(split, SIZES[split], self._problem)
    self._task = task
    self._datasets: dict[int, Any] = {}

  def _problem(self, index: int) -> dict[str, Any]:
    """Problem `index`: tries seeds from those of this index on, until a problem is in the split."""
    seeds, failures = SEEDS[self._split], list[str]()
    for tried in range(MOST_TRIED):
      try:
        entry = self._entry((index * seeds + tried) % (len(self) * seeds))  # wraps at the end
      except ConfigError:  # the knobs are wrong, so no other seed helps
        raise
      except Exception as error:  # a task may fail to make a problem of some seeds
        failures.append(f"{type(error).__name__}: {' '.join(str(error).split()):.200}")
        if len(failures) == MOST_FAILURES:
          break
        continue
      if split_of(entry["question"]) == self._split:
        return self._example(entry)
    # The message gives this reason, or the last error if the task failed for a seed.
    reason = f"each of {MOST_TRIED} belongs to the other split, so the task has too few"
    raise ConfigError(
      f"data.path: {self._task.call}: there is no problem {index} for {self._split}:"
      f" {[reason, *failures][-1]}; choose other knobs"
    )

  def _entry(self, place: int) -> dict[str, Any]:
    """The package's problem for the split's first seed plus `place`."""
    size = _BLOCKS.get(self._task.name, _BLOCK)
    block, within = divmod(place, size)
    seed = FIRST_SEED[self._split] + block * size
    if block not in self._datasets:
      self._datasets[block] = gym.open_dataset(self._task, seed, size)
    try:
      with gym.same_everywhere(seed + within):
        entry: dict[str, Any] = self._datasets[block][within]
    except Exception:
      del self._datasets[block]  # word_ladder would refuse the seeds after this one, too
      raise
    return entry

  def _example(self, entry: dict[str, Any]) -> dict[str, Any]:
    answer = entry["answer"]
    return {
      "question": entry["question"],
      "answer": "" if answer is None else str(answer),
      "solution": None if answer is None else f"<answer>{answer}</answer>",
      "verifier": self._task.call,
      "entry": entry,
    }


def split_of(question: str) -> str:
  """The split that a question belongs to: "test" for about one in four, else "train".

  The split depends on the text alone. In tasks with few different problems, several seeds make the
  same problem, which must not be in both splits.
  """
  return "test" if zlib.crc32(question.encode()) % 4 == 0 else "train"


def sources(path: str) -> tuple[str, ...]:
  """Turns the data.path of reasoning_gym into entries of data.mixture, one for each task.

  Args:
    path: Tasks, such as `chain_sum(min_terms=2),gsm_symbolic`. NAME=TASK renames a task.

  Raises:
    ConfigError: The path is empty or has a malformed entry.
  """
  entries = [_ENTRY.fullmatch(entry) for entry in calls.split_list(path)]
  found = [
    (match["name"] or calls.split(match["call"])[0], match["call"]) for match in entries if match
  ]
  if not found:
    raise ConfigError(
      "data.path is empty: the task reasoning_gym needs names of its tasks, such as"
      " chain_sum,gsm_symbolic; python -m grpo_jax.data --list shows all"
    )
  for name, call in found:
    if not name.isidentifier():
      raise ConfigError(f"data.path: {call!r:.200} is no task: write TASK, or TASK(KNOB=VALUE)")
  return tuple(f"{name}=reasoning_gym:{call}" for name, call in found)
