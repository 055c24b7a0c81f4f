"""A run's folder: config.json, metrics.jsonl, completions/ and TensorBoard's event files.

metrics.jsonl is the record: one strict JSON object a line, `step` first, written by the time `write` returns. NaN and
the infinities, which JSON has not, are null. The event files are a view of it for TensorBoard, and may lack the last
seconds before a kill.
"""

import json
import math
import os
import re
import secrets
from pathlib import Path
from typing import Any, Mapping

from tensorboardX import SummaryWriter

from grpo_jax.settings import ConfigError

# Keys that change nothing of what was done, and where and in which parts an update is computed.
_MAY_DIFFER = (
  "checkpoint.",
  "eval.",
  "log.",
  "mesh.",
  "learner.remat",
  "learner.logprob_chunk",
  "batch.micro_batch",
  "reward.batch",
)


def open_run(workdir: str | Path, config: Mapping[str, Any]) -> None:
  """Creates the folder and its config.json, or checks that the run in it can go on under `config`, and stores that.

  `config` is nested plain values (config.to_dict). Raises ConfigError for another run's folder, and for a folder of
  other things.
  """
  workdir = Path(workdir)
  path = workdir / "config.json"
  config = json.loads(json.dumps(config))
  try:
    workdir.mkdir(parents=True, exist_ok=True)
  except OSError as e:
    raise ConfigError(f"--workdir={workdir} cannot be created: {e.strerror}") from e
  if path.exists():
    old = _load_config(path)
    begun = any((workdir / name).exists() for name in ("metrics.jsonl", "checkpoints"))
    if (
      begun or old.keys() != config.keys()
    ):  # a run that failed before its first file may be given another config
      _check_same_run(path, old, config)
  elif any(
    p.name != "config.json.new" for p in workdir.iterdir()
  ):  # that is what a kill leaves here
    raise ConfigError(f"--workdir={workdir} is not empty and has no config.json: name a new folder")
  _replace(path, json.dumps(config, indent=2) + "\n")


class Writer:
  """Appends to a run's folder. One process writes; `start_step` is the step of the restored checkpoint, -1 if none."""

  def __init__(self, workdir: str | Path, start_step: int, tensorboard: bool, wandb: str = ""):
    """Drops what was written of later steps, which are done again. `wandb`: a project of Weights & Biases, or none."""
    workdir = Path(workdir)
    self._wandb = _open_wandb(wandb, workdir) if wandb else None
    self._completions = workdir / "completions"
    self._last = _truncate(workdir / "metrics.jsonl", start_step)
    for path in self._completions.glob("*"):
      ours = re.fullmatch(r"(\d{6,})\.jsonl(\.new)?", path.name)
      if ours and (ours[2] or int(ours[1]) > start_step):
        path.unlink()
    self._file = open(workdir / "metrics.jsonl", "ab")
    self._board = None
    if tensorboard:
      # The library names a file by the second and overwrites: the suffix keeps two starts in one second apart.
      suffix = f".{len(list(workdir.glob('events.out.tfevents.*')))}"
      self._board = SummaryWriter(
        str(workdir), purge_step=start_step + 1, flush_secs=5, filename_suffix=suffix
      )

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """One row; a killed process loses none that was written. Raises ValueError unless `step` is later than the last."""
    if self._last is not None and step <= self._last:
      raise ValueError(f"step {step} is not later than step {self._last}, which is written already")
    row = _plain({"step": step, **values})
    self._file.write(_line(row))
    self._file.flush()
    self._last = step
    scalars = {name: value for name, value in row.items() if name != "step" and value is not None}
    if self._board is not None:
      for name, value in scalars.items():
        self._board.add_scalar(name, value, step)
    if self._wandb is not None:
      self._wandb.log(scalars, step=step)

  def completions(self, step: int, rows: list[dict[str, Any]]) -> None:
    """completions/NNNNNN.jsonl, whole or not at all."""
    self._completions.mkdir(exist_ok=True)
    _replace(self._completions / f"{step:06d}.jsonl", b"".join(_line(_plain(row)) for row in rows))

  def close(self) -> None:
    self._file.close()
    if self._board is not None:
      self._board.close()
    if self._wandb is not None:
      self._wandb.finish()


def read(workdir: str | Path) -> list[dict[str, Any]]:
  """The rows of metrics.jsonl, without a last line that is only half there. Raises ConfigError if there is no file."""
  path = Path(workdir) / "metrics.jsonl"
  if not path.is_file():
    raise ConfigError(f"{path} does not exist: is {workdir} a run's folder?")
  return [row for row, _ in _rows(path)]


def _rows(path):
  """-> [(row, its line)]."""
  lines = path.read_bytes().split(b"\n")
  rows = []
  for number, line in enumerate(lines, start=1):
    try:
      row = json.loads(line)
      if type(row["step"]) is not int:
        raise TypeError
      rows.append((row, line + b"\n"))
    except (ValueError, TypeError, KeyError) as e:
      if number < len(
        lines
      ):  # what follows the last newline is nothing, or what a kill left of a row
        raise ConfigError(
          f"{path} line {number} is not a row of metrics: repair or remove that line"
        ) from e
  return rows


def _open_wandb(project, workdir):
  """The run of this folder: one that goes on is the same run there. What it has already of a step done again stays."""
  try:
    import wandb  # here: an extra
  except ImportError:
    raise ConfigError(
      "config key log.wandb needs the package wandb: pip install -e '.[wandb]'"
    ) from None
  path = workdir / "wandb_id"
  if not path.exists():
    _replace(path, secrets.token_hex(8))
  try:
    return wandb.init(
      project=project,
      id=path.read_text(),
      resume="allow",
      name=workdir.name,
      dir=str(workdir),
      config=_load_config(workdir / "config.json"),
      settings=wandb.Settings(console="off"),
    )
  except Exception as e:  # no key, no network, no such project: each is an exception of its own
    why = " ".join(str(e).split())
    raise ConfigError(
      f"config key log.wandb is {project!r}: {why:.200}; WANDB_MODE=offline needs no network"
    ) from e


def _truncate(path, start_step):
  """Rows after `start_step` and a half-written one go. -> the last step that is left, None if there is none."""
  if not path.exists():
    return None
  kept = [(row, line) for row, line in _rows(path) if row["step"] <= start_step]
  content = b"".join(line for _, line in kept)
  if content != path.read_bytes():
    _replace(path, content)
  return kept[-1][0]["step"] if kept else None


def _line(row):
  """Lone surrogates, which a sampled text may hold, become the escapes that JSON has for them."""
  return (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode(
    "utf-8", "backslashreplace"
  )


def _plain(value):
  """As JSON holds it: array scalars become numbers; what is not finite, None."""
  if isinstance(value, Mapping):
    return {k: _plain(v) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [_plain(v) for v in value]
  if hasattr(value, "item"):
    value = value.item()
  return None if isinstance(value, float) and not math.isfinite(value) else value


def _replace(path, content):
  """Atomic: a reader, or a kill, sees the old file or the new one."""
  new = path.with_name(path.name + ".new")
  with open(new, "wb") as f:
    f.write(content.encode() if isinstance(content, str) else content)
    f.flush()
    os.fsync(f.fileno())
  os.replace(new, path)


def _load_config(path):
  try:
    config = json.loads(path.read_bytes())
  except (OSError, ValueError) as e:
    raise ConfigError(f"{path} cannot be read ({e}): put it back, or name another --workdir") from e
  if not isinstance(config, dict):
    raise ConfigError(f"{path} is not a config: put it back, or name another --workdir")
  return config


def _check_same_run(path, old, new):
  """Raises ConfigError at the first key that would make the run another one."""
  old, new = _flat(old), _flat(new)
  for key in [*new, *old]:
    same = key in old and key in new and old[key] == new[key]
    if same or key.startswith(_MAY_DIFFER):
      continue
    if (
      key == "steps"
      and old.get("optimizer.schedule") == new.get("optimizer.schedule") == "constant"
    ):
      continue
    was, now = (repr(values[key]) if key in values else "no such key" for values in (old, new))
    why = " (its learning-rate schedule ends at the last step)" if key == "steps" else ""
    raise ConfigError(
      f"{path} has {key} = {was}, this run {now}{why}: name another --workdir, or keep the old value"
    )


def _flat(config, prefix=""):
  flat = {}
  for key, value in config.items():
    if isinstance(value, dict):
      flat.update(_flat(value, f"{prefix}{key}."))
    else:
      flat[prefix + key] = value
  return flat
