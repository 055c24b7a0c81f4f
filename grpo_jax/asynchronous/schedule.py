"""Records in schedule.jsonl which weights drew which batch or chunk, to replay runs."""

import bisect
import json
from pathlib import Path
from typing import Any, NamedTuple

from grpo_jax import files
from grpo_jax.settings import ConfigError, shown
from grpo_jax.storage.json_files import AppendedFile, json_line, replace_file

# The weights that drew a batch: (chunk, version) for each chunk of the sampling call from which on
# the version draws. Only files of an earlier version of grpo_jax have more than one entry.
Weights = tuple[tuple[int, int], ...]


class FromChunk(NamedTuple):
  """The state from a chunk on, if weights change in flight.

  Attributes:
    version: The version of the weights that draw.
    groups: How many groups of the run have been opened.
  """

  version: int
  groups: int


_BOUND = 2**31  # all numbers must be below it


class WeightSchedule:
  """The record of which weights drew what. It grows while the run samples.

  With rollout.weights=newest it has a line for each batch. With in_flight it has a line for each
  chunk at which the weights change or before which groups were opened, and for the last chunk.

  Attributes:
    known: With newest, the weights that drew each batch or shall draw it, by the batch's number.
  """

  def __init__(self, workdir: Path, replay: str = "", in_flight: bool = True):
    """Reads the record of the run so far, and the record to replay.

    Args:
      workdir: The folder of the run.
      replay: The path of another run's schedule.jsonl, which this run shall follow, or "".
      in_flight: Whether weights may change while rows are drawn.

    Raises:
      ConfigError: A file is damaged or lacks batches, or the file `replay` does not exist.
    """
    path, replay_path = workdir / "schedule.jsonl", Path(replay).expanduser()
    if replay and not replay_path.exists():
      raise ConfigError(f"config key rollout.replay is {replay!r}: there is no such file")
    content = _content(path) if path.exists() else b""
    parse = _parsed_chunk if in_flight else _parsed
    recorded, complete_lines = _read(path, content, parse)
    if content != complete_lines:
      replace_file(path, complete_lines)  # drops an incomplete last line
    replayed = _read(replay_path, _content(replay_path), parse)[0] if replay else {}
    # With in_flight, chunks in which nothing changed have no line.
    gap = next((batch for batch in range(max(replayed, default=0)) if batch not in replayed), None)
    if gap is not None and not in_flight:
      raise ConfigError(
        f"{replay_path} does not say which weights drew batch {gap}, and it has later ones: replay"
        " the whole file of a run"
      )
    # For what is in both, this run's own record counts.
    self.known: dict[int, Weights] = {} if in_flight else replayed | recorded
    self._chunks: dict[int, FromChunk] = replayed | recorded if in_flight else {}
    self._written = dict(recorded)  # the entries in the run's file
    self._file = AppendedFile(path)

  def add(self, batch: int, weights: Weights) -> None:
    """Records which weights drew a batch, if that is new. The last line of a batch counts."""
    self.known[batch] = weights
    if self._written.get(batch) != weights:
      self._written[batch] = weights
      self._file.append(json_line({"batch": batch, "weights": weights}))

  def add_chunk(self, chunk: int, now: FromChunk) -> None:
    """Records the state from a chunk on, if it has changed. The last line of a chunk counts."""
    if _in_force(self._written, chunk) != now:
      self._append(chunk, now)

  def end(self, chunk: int) -> None:
    """Records the state of a run's last chunk, so that a replay draws it with these weights."""
    now = _in_force(self._written, chunk)
    if now is not None and chunk not in self._written:
      self._append(chunk, now)

  def _append(self, chunk: int, now: FromChunk) -> None:
    self._chunks[chunk] = self._written[chunk] = now
    self._file.append(json_line({"chunk": chunk} | now._asdict()))

  def chunk(self, number: int) -> FromChunk | None:
    """The known state of a chunk of the run. None after the last known chunk."""
    if number > max(self._chunks, default=-1):
      return None
    return _in_force(self._chunks, number)

  def versions_from(self, chunk: int) -> set[int]:
    """The versions of the weights that draw in this chunk and later known ones."""
    now, chunks = self.chunk(chunk), [*self._chunks.items()]  # a copy, as the thread adds chunks
    later = {one.version for number, one in chunks if number >= chunk}
    return later | ({now.version} if now else set())

  def close(self) -> None:
    """Closes the file."""
    self._file.close()


def _in_force(chunks: dict[int, FromChunk], number: int) -> FromChunk | None:
  """The entry of the last chunk up to `number`, which still holds there. None without one."""
  order = sorted(chunks)
  place = bisect.bisect_right(order, number)
  return chunks[order[place - 1]] if place else None


def _content(path: Path) -> bytes:
  try:
    return files.read_bytes(path)
  except OSError as error:
    raise ConfigError(
      f"{path} cannot be read as a schedule of weights ({error.strerror or error}): move it away"
    ) from error


def _read(path: Path, content: bytes, parse: Any) -> tuple[dict[int, Any], bytes]:
  """Parses the complete lines of a file: (entries by batch or chunk, the bytes of these lines).

  SIGKILL may have cut the last line. `parse` returns (number, entry) or raises ValueError.
  """
  found: dict[int, Any] = {}
  complete_lines = content[: content.rfind(b"\n") + 1]
  for number, line in enumerate(complete_lines.split(b"\n")[:-1], start=1):
    try:
      key, entry = parse(line)
    except (RecursionError, ValueError) as error:
      why = "it is no JSON" if isinstance(error, (json.JSONDecodeError, RecursionError)) else error
      raise ConfigError(
        f"{path} line {number} does not say which weights drew: {why}. Repair or remove the file"
      ) from error
    found[key] = entry
  return found, complete_lines


def _parsed_chunk(line: bytes) -> tuple[int, FromChunk]:
  """Parses a line with in_flight: (chunk, state). Raises ValueError, which says what is wrong."""
  row = json.loads(line)
  keys = ("chunk", "version", "groups")
  if isinstance(row, dict) and row.keys() == {"batch", "weights"}:
    raise ValueError("it is of a run that an earlier version began, or with rollout.weights=newest")
  if not isinstance(row, dict) or row.keys() != {*keys}:
    raise ValueError('it must be {"chunk": number, "version": step, "groups": number}')
  for key in keys:
    if not _is_number(row[key]):
      raise ValueError(f"{key} is {shown(row[key])}, which is no whole number from 0 on")
  return row["chunk"], FromChunk(row["version"], row["groups"])


def _parsed(line: bytes) -> tuple[int, Weights]:
  """Parses a line with rollout.weights=newest: (batch, weights).

  Raises:
    ValueError: The line is malformed, or has several weights, as an earlier version of grpo_jax
      wrote with in_flight.
  """
  row = json.loads(line)
  if not isinstance(row, dict) or row.keys() != {"batch", "weights"}:
    raise ValueError('it must be {"batch": number, "weights": [[chunk, step], ...]}')
  batch, weights = row["batch"], row["weights"]
  if not _is_number(batch):
    raise ValueError(f"batch is {shown(batch)}, which is no whole number from 0 on")
  is_list = isinstance(weights, list) and bool(weights)
  if not is_list or not all(map(_is_pair, weights)):
    raise ValueError(f"weights are {shown(weights)}, and must be a list of [chunk, step]")
  if len(weights) > 1:
    raise ValueError("its weights change in flight, and rollout.weights does not say so")
  if weights[0][0] != 0:
    raise ValueError(f"weights begin with chunk {weights[0][0]} and not with chunk 0")
  # The step that learns from a batch waits for it, so no later weights can draw it.
  if weights[-1][1] > batch:
    raise ValueError(f"weights of step {weights[-1][1]} come after batch {batch} is learned")
  return batch, tuple((chunk, step) for chunk, step in weights)


def _is_number(value: Any) -> bool:
  return type(value) is int and 0 <= value < _BOUND


def _is_pair(value: Any) -> bool:
  return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))
