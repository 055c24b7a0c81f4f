"""schedule.jsonl: which weights drew each batch of a run whose sampler does not wait for them."""

import json
from pathlib import Path

from grpo_jax import files
from grpo_jax.settings import ConfigError
from grpo_jax.storage.json_files import AppendedFile, json_line, replace_file

# (chunk, version): from this chunk of a sampling call on, these weights drew.
Weights = tuple[tuple[int, int], ...]


class Schedule:
  """The weights of each batch. It grows while the run samples.

  Attributes:
    known: By the number of a batch: what drew it, or what is to draw it.
  """

  def __init__(self, workdir: Path, replay: str = ""):
    """Reads what an earlier part of the run wrote, and what is to be replayed.

    Args:
      workdir: The folder of the run.
      replay: The file of another run, or "".

    Raises:
      ConfigError: A file is damaged, or that of `replay` does not exist.
    """
    path, other = workdir / "schedule.jsonl", Path(replay).expanduser()
    if replay and not other.is_file():
      raise ConfigError(f"config key rollout.replay is {replay!r}: there is no such file")
    own, lines = _read(path) if path.exists() else ({}, b"")
    if path.exists() and path.read_bytes() != lines:
      replace_file(path, lines)  # without a line that is half written
    self.known = (_read(other)[0] if replay else {}) | own
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


def _read(path: Path) -> tuple[dict[int, Weights], bytes]:
  """What a file says, and its whole lines."""
  found: dict[int, Weights] = {}
  content = files.read_bytes(path)
  whole = content[: content.rfind(b"\n") + 1]
  for number, line in enumerate(whole.splitlines(), start=1):
    try:
      row = json.loads(line)
      weights = tuple((int(chunk), int(version)) for chunk, version in row["weights"])
      if not weights or weights[0][0] != 0:
        raise ValueError
      found[int(row["batch"])] = weights
    except (KeyError, TypeError, ValueError) as error:
      raise ConfigError(
        f"{path} line {number} does not say which weights drew a batch: repair or remove the file"
      ) from error
  return found, whole
