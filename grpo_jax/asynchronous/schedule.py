"""schedule.jsonl: which weights drew each batch of a run whose sampler does not wait for them."""

import itertools
import json
from pathlib import Path
from typing import Any

from grpo_jax import files
from grpo_jax.settings import ConfigError, shown
from grpo_jax.storage.json_files import AppendedFile, json_line, replace_file

# (chunk, version): from this chunk of a sampling call on, these weights drew.
Weights = tuple[tuple[int, int], ...]

_BOUND = 2**31  # of numbers


class Schedule:
  """The weights of each batch. It grows while the run samples.

  Attributes:
    known: By the number of a batch: what drew it, or what is to draw it.
  """

  def __init__(self, workdir: Path, replay: str = "", in_flight: bool = True):
    """Reads what an earlier part of the run wrote, and what is to be replayed.

    Args:
      workdir: The folder of the run.
      replay: The file of another run, or "".
      in_flight: Whether weights may change while a batch is drawn.

    Raises:
      ConfigError: A file is damaged, or says what cannot be, or that of `replay` does not exist.
    """
    path, other = workdir / "schedule.jsonl", Path(replay).expanduser()
    if replay and not other.exists():
      raise ConfigError(f"config key rollout.replay is {replay!r}: there is no such file")
    content = _content(path) if path.exists() else b""
    own, lines = _read(path, content, in_flight)
    if content != lines:
      replace_file(path, lines)  # without a line that is half written
    replayed = _read(other, _content(other), in_flight)[0] if replay else {}
    gap = next((batch for batch in range(max(replayed, default=0)) if batch not in replayed), None)
    if gap is not None:
      raise ConfigError(
        f"{other} does not say which weights drew batch {gap}, and it has later ones: replay the"
        " whole file of a run"
      )
    self.known = replayed | own
    self._written = own
    self._file = AppendedFile(path)

  def add(self, batch: int, weights: Weights) -> None:
    """Writes what drew a batch, unless the file says so already. The last line for it counts."""
    self.known[batch] = weights
    if self._written.get(batch) != weights:
      self._written[batch] = weights
      self._file.append(json_line({"batch": batch, "weights": weights}))

  def close(self) -> None:
    """Closes the file."""
    self._file.close()


def _content(path: Path) -> bytes:
  try:
    return files.read_bytes(path)
  except OSError as error:
    raise ConfigError(
      f"{path} cannot be read as a schedule of weights ({error.strerror or error}): move it away"
    ) from error


def _read(path: Path, content: bytes, in_flight: bool) -> tuple[dict[int, Weights], bytes]:
  """What a file says, and its whole lines. SIGKILL may have cut the last one off."""
  found: dict[int, Weights] = {}
  whole = content[: content.rfind(b"\n") + 1]
  for number, line in enumerate(whole.split(b"\n")[:-1], start=1):
    try:
      batch, weights = _parsed(line)
      if len(weights) > 1 and not in_flight:
        raise ValueError("its weights change in flight, and rollout.weights does not say so")
    except (RecursionError, ValueError) as error:
      why = "it is no JSON" if isinstance(error, (json.JSONDecodeError, RecursionError)) else error
      raise ConfigError(
        f"{path} line {number} does not say which weights drew a batch: {why}. Repair or remove the"
        " file"
      ) from error
    found[batch] = weights
  return found, whole


def _parsed(line: bytes) -> tuple[int, Weights]:
  """The batch of a line and its weights. Raises ValueError, which says what is wrong."""
  row = json.loads(line)
  if not isinstance(row, dict) or row.keys() != {"batch", "weights"}:
    raise ValueError('it must be {"batch": number, "weights": [[chunk, step], ...]}')
  batch, weights = row["batch"], row["weights"]
  if not _is_number(batch):
    raise ValueError(f"batch is {shown(batch)}, which is no whole number from 0 on")
  is_list = isinstance(weights, list) and bool(weights)
  if not is_list or not all(map(_is_pair, weights)):
    raise ValueError(f"weights are {shown(weights)}, and must be a list of [chunk, step]")
  if weights[0][0] != 0:
    raise ValueError(f"weights begin with chunk {weights[0][0]} and not with chunk 0")
  for before, after in itertools.pairwise(weights):
    if not (before[0] < after[0] and before[1] < after[1]):
      raise ValueError(f"{after} cannot follow {before}: chunks and steps grow")
  # The step that learns from a batch waits for it, so no later weights exist then.
  if weights[-1][1] > batch:
    raise ValueError(f"weights of step {weights[-1][1]} come after batch {batch} is learned")
  return batch, tuple((chunk, step) for chunk, step in weights)


def _is_number(value: Any) -> bool:
  return type(value) is int and 0 <= value < _BOUND


def _is_pair(value: Any) -> bool:
  return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))
