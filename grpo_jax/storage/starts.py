"""Records the starts of a run in environment.json, with their times, versions and devices."""

import datetime
import json
from pathlib import Path
import subprocess
from typing import Any

from grpo_jax.lazy import jax
from grpo_jax.storage.json_files import replace_file

FILE = "environment.json"


def here() -> dict[str, Any]:
  """The entry for this start: UTC time, commit of the code, version of JAX, devices, processes."""
  device = jax.devices()[0]
  return {
    "started": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
    "commit": _commit(Path(__file__).parents[2]),
    "jax": jax.__version__,
    "devices": jax.device_count(),
    "device_kind": device.device_kind,
    "platform": device.platform,
    "processes": jax.process_count(),
  }


def add(workdir: Path, start: dict[str, Any]) -> None:
  """Appends the entry of a start to the file in `workdir`."""
  replace_file(workdir / FILE, json.dumps([*read(workdir), start], indent=2) + "\n")


def read(workdir: Path) -> list[dict[str, Any]]:
  """The starts of a run, oldest first. Empty for a run of an older version, or a damaged file."""
  try:
    starts = json.loads((workdir / FILE).read_text())
  except (OSError, ValueError):
    return []
  return [start for start in starts if isinstance(start, dict)] if isinstance(starts, list) else []


def _commit(folder: Path) -> str | None:
  """The commit of a git checkout, with "+" if files differ from it. None if it is no checkout."""

  def git(*arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(
      command, capture_output=True, text=True, check=True, timeout=10
    ).stdout.strip()

  try:
    if not (folder / ".git").exists():  # otherwise git would find a checkout around it
      return None
    changed = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")
  except (OSError, subprocess.SubprocessError):
    return None
