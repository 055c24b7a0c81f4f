"""drawn.jsonl records the groups that an engine drew, a line for each group.

An engine computes sums in an order that depends on its load, so it does not draw the same tokens
twice. A run that resumes after a kill reads its groups from the file. Another run can replay the
file: it learns from the same completions without the engine.
"""

from collections.abc import Sequence
import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from grpo_jax import files
from grpo_jax.sampler.requests import GroupRequest
from grpo_jax.settings import ConfigError, RunFailed
from grpo_jax.storage.json_files import AppendedFile, json_line


class RecordedTurn(NamedTuple):
  """A turn: the tokens that a row drew before it ended or paused, and the reply to them.

  Attributes:
    tokens: The token ids.
    logprobs: The log-prob of each token.
    reply: The token ids of the reply after which the row continued. None if the row ended.
  """

  tokens: list[int]
  logprobs: list[float]
  reply: list[int] | None = None


class GroupTerms(NamedTuple):
  """The prompt and the sampling settings of a group.

  Attributes:
    prompt: The token ids of its prompt.
    temperatures: The temperature of each row.
    limits: The token limit of each row, replies included and the prompt excluded.
    turn_tokens: The token limit of a turn. 0 means that only the row's limit applies.
    stop_ids: Tokens that end a row.
    stop: Texts that end a row.
    vocabulary: The vocabulary size. Token ids are smaller.
  """

  prompt: list[int]
  temperatures: list[float]
  limits: list[int]
  turn_tokens: int
  stop_ids: tuple[int, ...]
  stop: tuple[str, ...]
  vocabulary: int

  def digest(self) -> str:
    """Returns a hash of all fields, 16 hex digits."""
    return hashlib.sha256(json.dumps(self).encode()).hexdigest()[:16]


class Recorded(NamedTuple):
  """A group that was drawn, as the file holds it.

  Attributes:
    version: The version of the weights that drew the group.
    asked: The digest of the group's `GroupTerms`.
    rows: For each row of the group, its turns.
  """

  version: int
  asked: str
  rows: list[list[RecordedTurn]]


def name_of(request: GroupRequest, members: int) -> str:
  """Returns a group's name in the file. The random key makes it unique. `members` is G."""
  key = "".join(f"{word:08x}" for word in np.asarray(request.key).tolist())
  is_greedy = bool(np.all(np.asarray(request.settings.temperature) == 0))
  return f"{key}-{request.first_row}-{members}{'-greedy' if is_greedy else ''}"


class DrawnFile:
  """The record of groups in a file."""

  def __init__(self, path: Path, replay: str = ""):
    """Indexes the groups in the files by name, and opens the run's own file to append to it.

    Args:
      path: The file of this run.
      replay: The file of another run, which is only read. "" if no run is replayed.

    Raises:
      ConfigError: A file cannot be read, or `replay` does not exist.
    """
    self._replayed = Path(replay).expanduser() if replay else None
    self._places: dict[str, tuple[Path, int, int]] = {}  # file, offset and length of a line
    if self._replayed is not None:
      if not self._replayed.is_file():
        raise ConfigError(f"config key rollout.replay is {replay!r}: there is no such file")
      self._look_up(self._replayed)
    if path.exists():
      complete = self._look_up(path)
      if path.stat().st_size > complete:  # the last line is incomplete after a SIGKILL
        os.truncate(path, complete)
    self._file = AppendedFile(path)

  def find(self, name: str, version: int, asked: GroupTerms) -> Recorded | None:
    """Returns the recorded group `name`, or None if weights of this version have not drawn it.

    Raises:
      RunFailed: The record has other terms or is damaged, or another run is replayed and its file
        lacks the group.
    """
    place, recorded = self._places.get(name), None
    if place is not None:
      recorded = _read(*place)
      if recorded.version == version:
        _check(place[0], recorded, asked)
        return recorded
    if self._replayed is None:
      return None
    drew = "does not have" if recorded is None else f"has from weights of step {recorded.version}"
    raise RunFailed(
      f"config key rollout.replay: {self._replayed} {drew} a group that this run draws with weights"
      f" of step {version}: it is of another run, or of a shorter one"
    )

  def add(self, name: str, group: Recorded) -> None:
    """Appends a group. A kill loses nothing once this has returned."""
    rows = [[turn._asdict() for turn in row] for row in group.rows]
    self._file.append(json_line({"group": name} | group._asdict() | {"rows": rows}))

  def close(self) -> None:
    """Closes the file."""
    self._file.close()

  def _look_up(self, path: Path) -> int:
    """Indexes a file's groups. Returns the bytes in its complete lines. Raises ConfigError.

    A group that was drawn again has several lines, of which the last counts.
    """
    offset = 0
    try:
      files.check_regular(path)
      with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
          if not line.endswith(b"\n"):
            break
          name = _name(line)
          if not name:
            raise ConfigError(
              f"{path} line {number} does not say what was drawn: repair or remove the file"
            )
          self._places[name] = path, offset, len(line)
          offset += len(line)
    except OSError as error:
      raise ConfigError(
        f"{path} cannot be read ({error.strerror or error}): move it away"
      ) from error
    return offset


def _name(line: bytes) -> str:
  """Returns the group name in a line, without parsing the whole line. "" if there is none."""
  begins = b'{"group": "'
  return (
    line[len(begins) :].split(b'"', 1)[0].decode("utf-8", "replace")
    if line.startswith(begins)
    else ""
  )


def _read(path: Path, offset: int, length: int) -> Recorded:
  """Parses the line of `length` bytes at `offset`. Raises RunFailed if it is damaged."""
  try:
    with open(path, "rb") as file:
      file.seek(offset)
      row: Any = json.loads(file.read(length))
    rows = [[_turn(turn) for turn in turns] for turns in row["rows"]]
    return Recorded(int(row["version"]), str(row["asked"]), rows)
  except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
    raise RunFailed(
      f"{path} does not say what was drawn for a group ({error}): move the file away"
    ) from error


def _check(path: Path, recorded: Recorded, asked: GroupTerms) -> None:
  """Raises RunFailed if a record in the file `path` does not fit the terms of the new group."""
  if recorded.asked != asked.digest():
    raise RunFailed(
      f"{path} has a group that was drawn for another prompt, temperature, limit or stop: the"
      " config differs from that of the record; take that one, or move the file away"
    )
  is_so = len(recorded.rows) == len(asked.limits) and all(
    _can_be(row, limit, asked) for row, limit in zip(recorded.rows, asked.limits)
  )
  if not is_so:
    raise RunFailed(
      f"{path} says that tokens were drawn for a group which cannot be: move the file away"
    )


def _can_be(row: Sequence[RecordedTurn], limit: int, asked: GroupTerms) -> bool:
  """Returns whether a row's turns fit its token limit, the vocabulary and the log-prob range."""
  sizes = [len(turn.tokens) for turn in row]
  replies = [turn.reply or [] for turn in row]
  ids = [token for turn, reply in zip(row, replies) for token in (*turn.tokens, *reply)]
  # The last reply is not counted: a reply that does not fit ends the row and is not added to it.
  # Rounding may put a log-prob slightly above 0.
  return (
    bool(sizes)
    and 1 <= min(sizes)  # a turn has at least one token
    and max(sizes) <= (asked.turn_tokens or limit)
    and sum(sizes) + sum(map(len, replies[:-1])) <= limit
    and max(ids) < asked.vocabulary
    and all(math.isfinite(x) and x < 1e-3 for turn in row for x in turn.logprobs)
  )


def _turn(turn: Any) -> RecordedTurn:
  """Checks a turn from JSON. Raises ValueError, TypeError or KeyError if it is malformed."""
  tokens, logprobs, reply = turn["tokens"], turn["logprobs"], turn["reply"]
  for ids in (tokens, reply or []):
    if not all(type(token) is int and token >= 0 for token in ids):
      raise ValueError("its tokens are not all token ids")
  if len(tokens) != len(logprobs):
    raise ValueError("it has other numbers of tokens and log-probs")
  return RecordedTurn(tokens, [float(x) for x in logprobs], reply)
