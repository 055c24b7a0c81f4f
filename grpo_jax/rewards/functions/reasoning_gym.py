"""The reward of problems of the package reasoning_gym, whose tasks have verifiers for answers.

It is installed with pip install -e '.[reasoning_gym]'.
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

_RIGHT = 1 - 1e-6  # a score from here on is 1: evaluation counts no other one as right

# Verifiers that evaluate an answer as Python. What they are for needs no call and no attribute.
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
# What only sets an answer off: signs of a formula, emphasis, code, and a command of LaTeX.
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
  """Imports the package, once, in the parent of the workers."""
  gym.names()


def _check_options(where: str, options: dict[str, Any]) -> None:
  if not re.fullmatch(r"\w+", options["tag"]):
    raise ConfigError(f"{where}(tag={options['tag']!r}): a tag is letters, digits and _")
  gym.names()


def _answers(
  completions: list[str], *, tag: str = "answer", tagged: bool = False, **columns: Any
) -> list[str | None]:
  """Without what sets them off."""
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

  Many verifiers give a part of 1 to an answer that is nearly right, or that has the right one in
  it. No answer gets 0, and so does one that a verifier fails on.

  Some verifiers evaluate an answer as Python. They get it only if it is a list or a formula: what
  calls or names anything else gets 0.

  Args:
    completions: The texts.
    verifier: The task of each problem with its knobs. None is a problem of another source.
    entry: The problems, as the package makes them.
    tag: The answer stands between <tag> and </tag>. See `answer_of`.
    tagged: Whether a completion without these tags gets 0.
    partial: Whether scores between 0 and 1 stay. Otherwise they are 0.
    columns: Not read.

  Returns:
    The scores. None where there is no verifier.
  """
  return [
    None
    if not isinstance(call, str) or not isinstance(one, dict)
    else _best_score(answer_of(text, tag, tagged), call, one, partial)
    for text, call, one in zip(completions, verifier, entry, strict=True)
  ]


def answer_of(text: str, tag: str = "answer", tagged: bool = False) -> str | None:
  """The answer in a completion.

  It is what stands in the last pair of tags. Without tags it is what follows the last `####` on its
  line, or on the next lines if that is empty, else the content of the last `\\boxed{}`, else the
  whole text. Nothing before `</think>` counts.

  Args:
    text: The completion.
    tag: The name in the tags.
    tagged: Whether a text without tags has no answer. It is then None.
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
  r"""An answer as it is written, then without what sets it off, a layer at a time.

  Of `**$62$.**`, these are the answer itself, `$62$.`, `$62$` and `62`.
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
  """Where the brace closes that was open at the start of a text. -1 if it does not."""
  depth = 1
  for place, character in enumerate(tail):
    depth += {"{": 1, "}": -1}.get(character, 0)
    if depth == 0:
      return place
  return -1


def _best_score(answer: str | None, call: str, entry: dict[str, Any], partial: bool) -> float:
  """1 if a reading of an answer is right, else the better score of the first and the last one.

  Those between hold a part of what sets the answer off, and could be nearly right by chance.
  """
  scores = []
  for reading in readings(answer or ""):
    scores.append(_score(reading, call, entry, partial))
    if scores[-1] == 1:
      return 1.0
  return max(scores[0], scores[-1])


def _score(answer: str, call: str, entry: dict[str, Any], partial: bool) -> float:
  """The score that a task's verifier gives to an answer, from 0 to 1.

  Args:
    answer: The answer.
    call: The task with its knobs, as the column `verifier` has it.
    entry: The problem, as the package makes it.
    partial: Whether scores between 0 and 1 stay. Otherwise they are 0.
  """
  if not answer and entry.get("answer") != "":  # some verifiers give a part of 1 for nothing
    return 0.0
  task, dataset = _opened(call)
  if not _can_be_evaluated(task, answer):
    return 0.0
  try:
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
  """Whether a verifier that evaluates answers may get this one. Others get all."""
  if task in _READ_LISTS:
    return len(answer) <= _LONGEST and not _NO_LIST.search(answer)
  if task in _READ_FORMULAS:
    words = _WORD.findall(answer)
    are_known = all(len(word) == 1 or word in _FUNCTIONS for word in words)
    return len(answer) <= _LONGEST and are_known and not _NO_FORMULA.search(answer)
  return True


@functools.lru_cache(maxsize=512)
def _opened(call: str) -> tuple[str, Any]:
  """The name of a task, and a dataset of it, whose verifier knows the knobs."""
  task = gym.parse(call, "column verifier")
  return task.name, gym.open_dataset(task, seed=0, size=1, key="column verifier")
