"""Saves and restores checkpoints through orbax, asynchronously and atomically.

A checkpoint is a folder named by its step. When it is complete, orbax renames it from a temporary
name, or in a bucket adds a last object, so unfinished checkpoints can be recognised. The newest few
checkpoints are kept. `manifest.py` explains how damaged checkpoints are detected.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
import logging
from pathlib import Path
import re
import sys
import traceback
from types import CodeType
from typing import TYPE_CHECKING, Any

from absl import logging as absl_logging
from etils import epath
import jax
from jax.experimental import multihost_utils
import numpy as np

from grpo_jax.lazy import ocp
from grpo_jax.settings import ConfigError
from grpo_jax.storage import checkpoint_reader
from grpo_jax.storage import manifest as fmt
from grpo_jax.storage.bucket import folder, is_bucket, reaching
from grpo_jax.storage.json_files import naming
from grpo_jax.storage.workdir import saved_steps, unfinished


class Checkpoints:
  """The checkpoints of one run, which alone may call methods that save or remove checkpoints."""

  def __init__(
    self,
    directory: str | Path,
    keep: int,
    warn: Callable[[str], None] = logging.warning,
    layers_of: checkpoint_reader.LayersOf = checkpoint_reader.no_layers,
  ) -> None:
    """Does not touch the disk.

    Args:
      directory: The folder of the checkpoints. The first save creates it.
      keep: How many checkpoints to keep. A save deletes older ones.
      warn: warn(line) is called for each damaged checkpoint.
      layers_of: layers_of(name of a stacked leaf) -> the names of its single layers, which
        checkpoints of earlier versions hold instead.
    """
    self.directory = folder(directory) if is_bucket(directory) else Path(directory).absolute()
    self._keep = keep
    self._warn = warn
    self._layers_of = layers_of
    self._manager: ocp.CheckpointManager | None = None

  def steps(self) -> list[int]:
    """The steps with complete checkpoints (damaged or not), in ascending order."""
    return saved_steps(self.directory)

  def has(self, step: int) -> bool:
    """Whether the checkpoint of a step is complete. Waits for a save that is still running."""
    self.wait()
    return step in self.steps()

  def remove_unfinished(self) -> None:
    """Removes the files of saves that were killed or failed, because they may fill the disk."""
    if jax.process_index() == 0:
      for path in unfinished(self.directory):
        epath.Path(path).rmtree()

  def save(self, step: int, state: Any) -> None:
    """Copies `state` and starts to write it. Does nothing if the step is already saved.

    Returns as soon as the copy is made, so the caller may donate or change `state`. The writing
    continues in the background.

    Args:
      step: The step, which names the checkpoint.
      state: A dict or dataclass of groups, each a tree of arrays. Leaves that are not JAX arrays
        are saved as numpy arrays. They must be equal on all processes, and the first process writes
        them.

    Raises:
      ValueError: A key in `state` contains a dot.
      Exception: The previous save failed. `write_errors.explain` tells whether the disk is to
        blame.
    """
    if self.has(step):
      return
    flat = {name: _own_array(leaf) for name, leaf in fmt.flatten(state).items()}
    on_disk = {name: leaf for name, leaf in flat.items() if not fmt.is_manifest_only(leaf)}
    items: dict[str, Any] = {
      group: ocp.args.StandardSave(arrays) for group, arrays in fmt.by_group(on_disk).items()
    }
    items["manifest"] = ocp.args.JsonSave(fmt.seal(fmt.describe(flat)))
    # `force`, because the caller and not orbax decides which steps are saved.
    with naming(self.directory), reaching(self.directory):
      self._writer().save(step, args=ocp.args.Composite(**items), force=True)

  def restore_latest(
    self, abstract_state: Any, optional: Collection[str] = ()
  ) -> tuple[int, Any] | None:
    """Restores the newest checkpoint that is not damaged.

    Renames newer, damaged checkpoints to STEP.damaged, and warns about them.

    Args:
      abstract_state: A state whose leaves have the shapes, dtypes and shardings to restore.
      optional: Names of groups on the host that older checkpoints may lack, such as "host". See
        `checkpoint_reader.read`.

    Returns:
      (step, state), or None if there are no checkpoints.

    Raises:
      ConfigError: All checkpoints are damaged, or the checkpoint holds another tree.
    """
    self.close()  # so that no save is running, and the next one lists the folder anew
    steps = self.steps()
    if not steps:
      return None
    step, state, damaged = self._read_first_intact(steps[::-1], abstract_state, optional)
    if jax.process_index() == 0:
      for path, reason in damaged.items():
        self._warn(
          f"checkpoint {path} is damaged ({reason}): moved to {_set_aside(path)}, "
          f"going on from step {step}"
        )
    if jax.process_count() > 1:  # the others wait until the folders are renamed
      multihost_utils.sync_global_devices("damaged checkpoints set aside")
    return step, state

  def restore(self, step: int, abstract_state: Any) -> Any:
    """Restores the state of `step`. ConfigError if it is missing, damaged or another tree."""
    return self._read_first_intact([step], abstract_state)[1]

  def restore_params(self, abstract_params: Any, step: int | None = None) -> tuple[int, Any]:
    """Restores only the parameters of a checkpoint. Returns (step, parameters).

    Args:
      abstract_params: The shapes, dtypes and shardings of the parameters.
      step: The step of the checkpoint. None means the newest one that is not damaged.

    Raises:
      ConfigError: No such checkpoint exists, it is damaged, or it holds other parameters.
    """
    steps = self.steps()[::-1] if step is None else [step]
    if not steps:
      raise ConfigError(
        f"{self.directory} holds no checkpoint: train first, or name another folder"
      )
    abstract = {"params": abstract_params}
    # Not `whole`: checkpoints also have other groups, such as the optimizer's state.
    step, state, damaged = self._read_first_intact(steps, abstract, whole=False)
    for path, reason in damaged.items():
      self._warn(f"checkpoint {path} is damaged ({reason}): taking step {step}")
    return step, state["params"]

  def wait(self) -> None:
    """Waits until all saves are on disk. Raises the error of a save that failed."""
    if self._manager is not None:
      with naming(self.directory), reaching(self.directory):
        self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits like `wait`, then frees the threads. The object can be used again."""
    manager, self._manager = self._manager, None
    if manager is not None:
      with naming(self.directory), reaching(self.directory):
        manager.close()

  def _writer(self) -> ocp.CheckpointManager:
    """The manager that writes, which is made at the first save."""
    if self._manager is None:
      options = ocp.CheckpointManagerOptions(
        preservation_policy=ocp.checkpoint_managers.LatestN(self._keep),
        # In a bucket, orbax would also remove objects that others have put there.
        cleanup_tmp_directories=not is_bucket(self.directory),
        # Otherwise damaged metadata of an old checkpoint would stop the run.
        lightweight_initialize=True,
      )
      self._manager = ocp.CheckpointManager(self.directory, options=options)
    return self._manager

  def _read_first_intact(
    self, steps: list[int], abstract: Any, optional: Collection[str] = (), whole: bool = True
  ) -> tuple[int, Any, dict[Path, checkpoint_reader.Damaged]]:
    """Restores the first of the checkpoints `steps` that is not damaged (see `checkpoint_reader`).

    Returns (its step, its state, the damaged checkpoints before it in `steps` and their errors).
    Raises ConfigError if all are damaged.
    """
    damaged: dict[Path, checkpoint_reader.Damaged] = {}
    for step in steps:
      path = self.directory / str(step)
      if not path.exists():
        raise ConfigError(
          f"{self.directory} has no checkpoint of step {step}: there are {self.steps()}"
        )
      try:
        state = checkpoint_reader.read(path, abstract, optional, whole, self._layers_of)
        return step, state, damaged
      except checkpoint_reader.Damaged as error:
        damaged[path] = error
    reason = next(iter(damaged.values()))
    which = f": every checkpoint of steps {steps}" if len(steps) > 1 else f"/{steps[0]}"
    raise ConfigError(
      f"{self.directory}{which} is damaged ({reason}): "
      "put back a copy, or start over in another workdir"
    )


def save_tree(path: str | Path, tree: Any) -> None:
  """Writes a tree of arrays and waits. If it is killed, `path` keeps the earlier tree."""
  store = Checkpoints(path, keep=1)
  store.save(max(store.steps(), default=-1) + 1, {"tree": tree})
  store.close()


def restore_tree(
  path: str | Path,
  abstract: Any,
  layers_of: checkpoint_reader.LayersOf = checkpoint_reader.no_layers,
) -> Any:
  """Restores the tree that `save_tree` wrote to `path`.

  Args:
    path: The folder of the tree.
    abstract: The shapes, dtypes and shardings of the tree.
    layers_of: As in `Checkpoints`.

  Raises:
    ConfigError: The folder does not exist, is damaged, or holds another tree.
  """
  store = Checkpoints(path, keep=1, layers_of=layers_of)
  steps = store.steps()
  if not steps:
    raise ConfigError(
      f"{path} does not exist or holds nothing: put back a copy, or start over in another workdir"
    )
  return store.restore(steps[-1], {"tree": abstract})["tree"]


def _own_array(leaf: Any) -> jax.Array | np.ndarray:
  """Returns a JAX array unchanged, and a numpy copy of anything else, which may change later."""
  return leaf if isinstance(leaf, jax.Array) else np.array(leaf)


def _set_aside(path: Path) -> str:
  """Renames a damaged checkpoint to an unused name, and returns that name."""
  name = f"{path.name}.damaged"
  number = 2
  while path.with_name(name).exists():
    name = f"{path.name}.damaged-{number}"
    number += 1
  path.rename(path.with_name(name))
  return name


if TYPE_CHECKING:
  from sys import UnraisableHookArgs


def silence_orbax() -> None:
  """Filters orbax's log messages and reports. Call it once, before orbax reads or writes."""
  report = sys.unraisablehook

  def report_unless_orbax(unraisable: UnraisableHookArgs) -> None:
    if not _is_orbax_noise(unraisable):
      report(unraisable)

  sys.unraisablehook = report_unless_orbax
  logging.getLogger("asyncio").addFilter(_keep_asyncio_record)
  absl_logging.get_absl_logger().addFilter(_keep_absl_record)


def _is_orbax_noise(unraisable: UnraisableHookArgs) -> bool:
  """Whether the report is about a task that orbax abandons when it cannot read an array."""
  code: CodeType | None = getattr(unraisable.object, "cr_code", None)
  abandoned = code is not None and "orbax" in code.co_filename
  return abandoned or str(unraisable.exc_value) == "Event loop is closed"


def _keep_asyncio_record(record: logging.LogRecord) -> bool:
  """Drops asyncio's messages about tasks of orbax, because orbax also raises their errors."""
  frames = traceback.extract_tb(record.exc_info[2]) if record.exc_info else []
  places = [record.getMessage(), *(frame.filename for frame in frames)]
  return not any(re.search("orbax|tensorstore", place) for place in places)


def _keep_absl_record(record: logging.LogRecord) -> bool:
  """Drops orbax's messages other than warnings, because orbax also raises its errors."""
  return record.levelno == logging.WARNING or "orbax" not in record.pathname


silence_orbax()
