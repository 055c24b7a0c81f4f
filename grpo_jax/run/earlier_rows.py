"""What a start does with the rows and completions that earlier starts of a run have written."""

from collections.abc import Callable
from pathlib import Path
import re

from grpo_jax.run.json_files import read_metrics, replace_file


def keep_what_was_there(workdir: Path, warn: Callable[[str], None]) -> None:
  """Renames the rows and completions of a run whose checkpoints are gone, to metrics.jsonl.1."""
  metrics, completions = workdir / "metrics.jsonl", workdir / "completions"
  old = [completions] if any(completions.glob("[0-9]*.jsonl")) else []
  if metrics.exists() and metrics.stat().st_size:
    old.append(metrics)
  number = 1
  while any(path.with_name(f"{path.name}.{number}").exists() for path in (metrics, completions)):
    number += 1
  kept = [path.rename(path.with_name(f"{path.name}.{number}")).name for path in old]
  if kept:
    warn(f"{workdir} has no checkpoint: starting over; what was there is in {' and '.join(kept)}")


def truncate_metrics(path: Path, start_step: int) -> int | None:
  """Removes the rows after `start_step` and a half-written row.

  Returns:
    The last step that is left, or None without one.
  """
  if not path.exists():
    return None
  kept = [(row, line) for row, line in read_metrics(path) if row["step"] <= start_step]
  content = b"".join(line for _, line in kept)
  if content != path.read_bytes():
    replace_file(path, content)
  if not kept:
    return None
  last_row, _ = kept[-1]
  return last_row["step"]


def remove_completions(folder: Path, start_step: int) -> None:
  """Removes the files of steps after `start_step` and half-written files, and no others."""
  for path in folder.glob("*"):
    match = re.fullmatch(r"(\d{6,})\.jsonl(\.new)?", path.name)
    if match and (match[2] or int(match[1]) > start_step):
      path.unlink()
