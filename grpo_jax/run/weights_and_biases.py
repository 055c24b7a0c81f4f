"""A run at Weights & Biases, an optional service that shows metrics."""

from collections.abc import Sequence
from pathlib import Path
import secrets
from typing import Any

from grpo_jax.run.json_files import replace_file
from grpo_jax.run.saved_config import load_config
from grpo_jax.run.shown_completions import MOST_SHOWN, columns
from grpo_jax.settings import ConfigError


def open_wandb(project: str, workdir: Path) -> Any:
  """The run of this folder at Weights & Biases, which a resumed run continues.

  Rows that are there already stay, even if their steps run again.
  """
  try:
    import wandb  # here, because it is an optional dependency
  except ImportError:
    raise ConfigError(
      "config key log.wandb needs the package wandb: pip install -e '.[wandb]'"
    ) from None
  id_path = workdir / "wandb_id"
  if not id_path.exists():
    replace_file(id_path, secrets.token_hex(8))
  try:
    return wandb.init(
      project=project,
      id=id_path.read_text(),
      resume="allow",
      name=workdir.name,
      dir=str(workdir),
      config=load_config(workdir / "config.json"),
      settings=wandb.Settings(console="off"),
    )
  except Exception as error:  # no key, no network, no such project: each has its own exception
    reason = " ".join(str(error).split())
    raise ConfigError(
      f"config key log.wandb is {project!r}: {reason:.200}; WANDB_MODE=offline needs no network"
    ) from error


def completions_table(rows: Sequence[dict[str, Any]]) -> Any:
  """A table of the first completions of a step."""
  import wandb

  names = columns(rows)
  data = [[row.get(name) for name in names] for row in rows[:MOST_SHOWN]]
  return wandb.Table(columns=names, data=data)
