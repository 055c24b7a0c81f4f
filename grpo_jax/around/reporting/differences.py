"""Finds the first differences of two runs: in metrics, completions, reference and checkpoints."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import functools
import itertools
from pathlib import Path
import re
from typing import Any, NamedTuple

from grpo_jax.settings import ConfigError, shown
from grpo_jax.storage.bucket import folder
from grpo_jax.storage.reading import completion_steps, read_completions, read_metrics
from grpo_jax.storage.workdir import saved_steps
from grpo_jax.timing import is_of_clock

Row = Mapping[str, Any]
Manifest = Mapping[str, Mapping[str, Any]]
Difference = Callable[[Any, Any], str]  # describes the first difference of two values, "" if none
_ABSENT = object()
# The metrics of a batch that is drawn ahead, which include times. Once the step is learned, they
# are compared as a row of metrics.jsonl.
_AHEAD_METRICS = re.compile(r"host\.ahead\.\d+\.metrics")


class Compared(NamedTuple):
  """The result of comparing two runs in one respect.

  Attributes:
    what: The compared data, such as "metrics".
    steps: How many steps are equal before the first difference.
    difference: A line that describes the first difference. "" if there is none.
  """

  what: str
  steps: int
  difference: str = ""


def compare(one: str, other: str) -> Iterator[Compared]:
  """Compares two runs bit by bit, except for metrics that measure time.

  Of the reference and of checkpoints it compares the digests in their manifests, and reads no
  arrays.

  Args:
    one: The folder of a run.
    other: The folder of another run.

  Yields:
    The results for metrics, completions and, if they exist, the frozen reference and checkpoints.

  Raises:
    ConfigError: A folder does not hold a run, or a file is damaged.
  """
  yield compare_rows("metrics", _by_step(read_metrics(one)), _by_step(read_metrics(other)))
  completions = [_completions(run) for run in (one, other)]
  yield _compare_steps("completions", completions, _difference_of_completions)
  references = [_checkpoints(run, "reference") for run in (one, other)]
  if any(references):
    yield _compare_steps("reference", references, _difference_of_leaves)
  checkpoints = [_checkpoints(run, "checkpoints") for run in (one, other)]
  common = checkpoints[0].keys() & checkpoints[1].keys()
  if any(checkpoints) and not common:
    saved = " and ".join(str(sorted(steps)) for steps in checkpoints)
    yield Compared("checkpoints", 0, f"no step is saved in both: {saved}")
    return
  # A run keeps only its newest checkpoints, so a step that one run lacks is no difference.
  both = [{step: steps[step] for step in common} for steps in checkpoints]
  yield _compare_steps("checkpoints", both, _difference_of_leaves)


def compare_rows(what: str, ours: Mapping[int, Row], theirs: Mapping[int, Row]) -> Compared:
  """Compares two runs' rows by step, except for metrics that measure time. `what` names them."""

  def timeless(row: Row) -> Row:
    return {name: value for name, value in row.items() if not is_of_clock(name)}

  reads = [
    {step: functools.partial(timeless, row) for step, row in rows.items()}
    for rows in (ours, theirs)
  ]
  return _compare_steps(what, reads, _difference_of_fields)


def _compare_steps(
  what: str, runs: Sequence[Mapping[int, Callable[[], Any]]], difference: Difference
) -> Compared:
  """Compares two runs step by step, up to the first difference.

  Each of the `runs` maps a step to a function that reads its data, for `difference` to compare.
  """
  ours, theirs = runs
  for count, step in enumerate(sorted(ours.keys() | theirs.keys())):
    if step not in ours or step not in theirs:
      which = "first" if step not in ours else "second"
      return Compared(what, count, f"step {step}: the {which} run has none")
    found = difference(ours[step](), theirs[step]())
    if found:
      return Compared(what, count, f"step {step}: {found}")
  return Compared(what, len(ours))


def _difference_of_fields(ours: Row, theirs: Row) -> str:
  for name in [*ours, *(name for name in theirs if name not in ours)]:
    one, other = ours.get(name, _ABSENT), theirs.get(name, _ABSENT)
    if one is _ABSENT or other is _ABSENT:
      return f"the {'first' if one is _ABSENT else 'second'} run has no {name}"
    if one != other:
      return f"{name} is {shown(one)} and {shown(other)}"
  return ""


def _difference_of_completions(ours: Sequence[Row], theirs: Sequence[Row]) -> str:
  for number, (one, other) in enumerate(itertools.zip_longest(ours, theirs)):
    if one is None or other is None:
      return f"{len(ours)} and {len(theirs)} completions"
    found = _difference_of_fields(one, other)
    if found:
      return f"completion {number}: {found}"
  return ""


def _difference_of_leaves(ours: Manifest, theirs: Manifest) -> str:
  for name in sorted(ours.keys() | theirs.keys()):
    if _AHEAD_METRICS.fullmatch(name):
      continue
    if name not in ours or name not in theirs:
      return f"the {'first' if name not in ours else 'second'} run has no {name}"
    if ours[name] != theirs[name]:
      kinds = [f"{entry['dtype']}{entry['shape']}" for entry in (ours[name], theirs[name])]
      return f"{name} differs" + (f": {kinds[0]} and {kinds[1]}" if kinds[0] != kinds[1] else "")
  return ""


def _by_step(rows: Sequence[Row]) -> dict[int, Row]:
  return {row["step"]: row for row in rows}


def _completions(run: str) -> dict[int, Callable[[], list[dict[str, Any]]]]:
  return {step: (lambda step=step: read_completions(run, step)) for step in completion_steps(run)}


def _checkpoints(run: str, name: str) -> dict[int, Callable[[], Manifest]]:
  path = folder(run) / name
  if not path.is_dir():
    return {}
  return {step: functools.partial(_manifest_of, path / str(step)) for step in saved_steps(path)}


def _manifest_of(path: Path) -> Manifest:
  # Here, because runs without checkpoints are compared without jax and orbax.
  from grpo_jax.storage.checkpoint_reader import Damaged, read_manifest

  try:
    return read_manifest(path)
  except Damaged as error:
    raise ConfigError(f"{path} cannot be read ({error}): move it away") from error
