"""A reward for problems of the package reasoning_gym, which has a verifier for each task.

Install it with pip install -e '.[reasoning-gym]'.
"""

from collections.abc import Iterator
import functools
import math
import re
from typing import Any
import warnings

from grpo_jax.problems import gym
from grpo_jax.rewards.functions.stated import in_tags
from grpo_jax.rewards.marks import answers_by, checked_by, prepared_by, reads
from grpo_jax.settings import ConfigError

_RIGHT = 1 - 1e-6  # scores from here on become 1, because evaluation counts only 1 as right

# Tasks whose verifiers evaluate an answer as Python. Right answers need no calls or attributes.
_READ_LISTS = frozenset(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"))
_READ_FORMULAS = frozenset(
  (
    "countdown",
    "intermediate_integration",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
  )
)
_NO_LIST = re.compile(r"\(|\.\s*[^\W\d]|__")
_NO_FORMULA = re.compile(r"[\"'\[\]{}\\:;=@]|\.\s*[^\W\d]|__")
_WORD = re.compile(r"[^\W\d]\w*")
_FUNCTIONS = frozenset(
  "sin cos tan cot sec csc asin acos atan acot asec acsc sinh cosh tanh asinh acosh atanh exp log"
  " ln sqrt Abs abs pi erf erfi Si Ci Ei li Rational".split()
)
# Markup around an answer: delimiters of a formula, emphasis, code, and a LaTeX command.
_SET_OFF = re.compile(
  r"\$\$(?P<a>[^$]+)\$\$|\$(?P<b>[^$]+)\$|\\\((?P<c>.+)\\\)|\\\[(?P<d>.+)\\\]"
  r"|\*\*(?P<e>(?:[^*]|\*(?!\*)|(?<=[\w)])\*\*(?=[\w(]))+)\*\*"
  r"|`(?P<f>[^`]+)`|```\w*\n(?P<g>[^`]+)```",
  re.DOTALL,
)
_COMMAND = re.compile(r"\\(?:boxed|fbox|text(?:bf|it|rm|tt)?|math(?:bf|it|rm|tt)|mbox)\s*\{")
_MOST_READINGS = 8
_LONGEST = 10_000  # characters of an answer that is evaluated


def _prepare() -> None:
  """Imports the package, before workers are forked."""
  gym.names()


def _check_options(where: str, options: dict[str, Any]) -> None:
  if not re.fullmatch(r"\w+", options["tag"]):
    raise ConfigError(f"{where}(tag={options['tag']!r}): a tag is letters, digits and _")
  gym.names()


def _answers(
  completions: list[str], *, tag: str = "answer", tagged: bool = False, **columns: Any
) -> list[str | None]:
  """The answers of completions, for maj@k, without markup."""
  del columns
  found = [answer_of(text, tag, tagged) for text in completions]
  return [None if one is None else [*readings(one)][-1] for one in found]


@prepared_by(_prepare)
@answers_by(_answers)
@checked_by(_check_options)
@reads(verifier=(str,), entry=(dict,))
def reasoning_gym(
  completions: list[str],
  verifier: list[Any],
  entry: list[Any],
  *,
  tag: str = "answer",
  tagged: bool = False,
  partial: bool = True,
  **columns: Any,
) -> list[float | None]:
  """The score of the answer by the verifier of a problem's task, from 0 to 1.

  Many verifiers return a score between 0 and 1 for an answer that is almost right, or that contains
  the right answer. A missing answer gets 0, and so does an answer for which the verifier fails.

  Some verifiers evaluate an answer as Python. They get only lists or formulas: an answer with other
  names or calls gets 0.

  Args:
    completions: The texts.
    verifier: The task of each problem, with parameters. None for a problem of another source.
    entry: The problems, as the package returns them.
    tag: The answer is between <tag> and </tag>. See `answer_of`.
    tagged: Whether a completion without these tags gets 0.
    partial: Whether to keep scores between 0 and 1. Otherwise they become 0.
    columns: Ignored.

  Returns:
    The scores. None without a verifier.
  """
  return [
    None
    if not isinstance(task, str) or not isinstance(problem, dict)
    else _best_score(answer_of(text, tag, tagged), task, problem, partial)
    for text, task, problem in zip(completions, verifier, entry, strict=True)
  ]


def answer_of(text: str, tag: str = "answer", tagged: bool = False) -> str | None:
  """Finds the answer in a completion, after any `</think>`.

  It is the text in the last pair of tags. Without tags, it is the rest of the line after the last
  `####`, or all later lines if that rest is empty. Without `####`, it is the content of the last
  `\\boxed{}`, and without that, or if that box is not closed, the whole text.

  Args:
    text: The completion.
    tag: The name of the tags.
    tagged: Whether to return None for a text without tags.
  """
  text = text.rpartition("</think>")[2]
  inside = in_tags(text, tag)
  if inside is not None:
    return inside
  if tagged:
    return None
  _, anchor, tail = text.rpartition("####")
  if anchor:
    return tail.partition("\n")[0].strip() or tail.strip()
  _, box, tail = text.rpartition("\\boxed{")
  end = _end_of_box(tail) if box else -1
  return (tail[:end] if end >= 0 else text).strip()


def readings(answer: str) -> Iterator[str]:
  r"""Yields an answer as it is written, and then without markup, one layer after the other.

  For `**$62$.**` it yields the answer itself, `$62$.`, `$62$` and `62`.
  """
  for _ in range(_MOST_READINGS):
    yield answer
    inner = _without_a_layer(answer).strip()
    if not inner or inner == answer:
      return
    answer = inner


def _without_a_layer(answer: str) -> str:
  found = _SET_OFF.fullmatch(answer)
  if found:
    return str(found[found.lastgroup or 0])
  command = _COMMAND.match(answer)
  if command and _end_of_box(answer[command.end() :]) == len(answer) - command.end() - 1:
    return answer[command.end() : -1]
  return answer[:-1] if answer.endswith(".") and not answer.endswith("..") else answer


def _end_of_box(tail: str) -> int:
  """The index of the brace that closes one which is open at the start of the text, or -1."""
  depth = 1
  for index, character in enumerate(tail):
    depth += {"{": 1, "}": -1}.get(character, 0)
    if depth == 0:
      return index
  return -1


def _best_score(answer: str | None, call: str, entry: dict[str, Any], partial: bool) -> float:
  """1 if any of the `readings` of an answer is right, else the better score of the first and last.

  Readings between them still contain markup, and could be partly right by chance.
  """
  scores = []
  for reading in readings(answer or ""):
    scores.append(_score(reading, call, entry, partial))
    if scores[-1] == 1:
      return 1.0
  return max(scores[0], scores[-1])


def _score(answer: str, call: str, entry: dict[str, Any], partial: bool) -> float:
  """The score of an answer by the verifier of a task, from 0 to 1.

  Args:
    answer: The answer.
    call: The task with parameters, as in the column `verifier`.
    entry: The problem, as the package returns it.
    partial: Whether to keep scores between 0 and 1. Otherwise they become 0.
  """
  if not answer and entry.get("answer") != "":  # some verifiers return more than 0 for ""
    return 0.0
  task, dataset = _task_and_dataset(call)
  if not _can_be_evaluated(task, answer):
    return 0.0
  try:
    # A verifier may warn, print, or draw from the generators that the process shares.
    with warnings.catch_warnings(), gym.same_everywhere(0):
      warnings.simplefilter("ignore")
      score = float(dataset.score_answer(answer, entry))
  except Exception:  # the verifier expects another form, such as a number
    return 0.0
  if math.isnan(score):
    return 0.0
  if score >= _RIGHT:
    return 1.0
  return max(0.0, score) if partial else 0.0


def _can_be_evaluated(task: str, answer: str) -> bool:
  """Whether the verifier of a task may evaluate an answer: False for long answers and for code."""
  if task in _READ_LISTS:
    return len(answer) <= _LONGEST and not _NO_LIST.search(answer)
  if task in _READ_FORMULAS:
    words = _WORD.findall(answer)
    are_known = all(len(word) == 1 or word in _FUNCTIONS for word in words)
    return len(answer) <= _LONGEST and are_known and not _NO_FORMULA.search(answer)
  return True


@functools.lru_cache(maxsize=512)
def _task_and_dataset(call: str) -> tuple[str, Any]:
  """The name of a task, and a dataset of the task, whose verifier has the task's parameters."""
  task = gym.parse(call, "column verifier")
  return task.name, gym.open_dataset(task, seed=0, size=1, key="column verifier")
