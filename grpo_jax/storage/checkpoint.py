"""Saves and restores checkpoints through orbax: asynchronous, atomic, and never silently damaged.

A checkpoint is a folder named by its step. When it is complete, orbax renames it from a temporary
name, or adds a last object in a bucket, so what a killed save leaves is known. The newest few
checkpoints are kept. `manifest.py` says how damage is noticed.
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
  """The checkpoints of one run.

  Only `save`, `restore_latest` and `remove_unfinished` change the folder, and only one run may call
  them.
  """

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
      keep: How many checkpoints are kept. A save deletes older ones.
      warn: Receives one line for each damaged checkpoint.
      layers_of: The name of a leaf -> the names of the single layers that it holds, which
        checkpoints of earlier versions have instead.
    """
    self.directory = folder(directory) if is_bucket(directory) else Path(directory).absolute()
    self._keep = keep
    self._warn = warn
    self._layers_of = layers_of
    self._manager: ocp.CheckpointManager | None = None

  def steps(self) -> list[int]:
    """The steps whose checkpoints are complete (damaged or not), ascending."""
    return saved_steps(self.directory)

  def has(self, step: int) -> bool:
    """Whether the checkpoint of a step is complete. It waits for the save before."""
    self.wait()
    return step in self.steps()

  def remove_unfinished(self) -> None:
    """Removes what saves have left that were killed or that failed. It may fill the disk."""
    if jax.process_index() == 0:
      for path in unfinished(self.directory):
        epath.Path(path).rmtree()

  def save(self, step: int, state: Any) -> None:
    """Copies `state` and starts to write it. Does nothing if the step is already there.

    Returns as soon as the copy is made, so the caller may donate or change `state`. The writing
    continues in the background.

    Args:
      step: The name of the checkpoint.
      state: A dict or dataclass of groups, each a tree of arrays. Leaves that are not JAX arrays
        are saved as numpy arrays of the host. They must be the same on every process, and the ones
        that are written are those of the first process.

    Raises:
      ValueError: A key in `state` contains a dot.
      Exception: Whatever went wrong with the save before this one. `disk.explain` says whether the
        disk is the reason.
    """
    if self.has(step):
      return
    flat = {name: _own_array(leaf) for name, leaf in fmt.flatten(state).items()}
    on_disk = {name: leaf for name, leaf in flat.items() if not fmt.is_manifest_only(leaf)}
    items: dict[str, Any] = {
      group: ocp.args.StandardSave(arrays) for group, arrays in fmt.by_group(on_disk).items()
    }
    items["manifest"] = ocp.args.JsonSave(fmt.seal(fmt.describe(flat)))
    with naming(self.directory), reaching(self.directory):
      self._writer().save(step, args=ocp.args.Composite(**items), force=True)

  def restore_latest(
    self, abstract_state: Any, optional: Collection[str] = ()
  ) -> tuple[int, Any] | None:
    """The newest checkpoint that is not damaged, as (step, state), or None if there are none.

    Renames damaged checkpoints that are newer than that to STEP.damaged, and warns about them.

    Args:
      abstract_state: A state whose leaves have the shapes, dtypes and shardings to restore.
      optional: Names of groups on the host that older checkpoints lack, such as "host". Such a
        group is restored as nested dicts of numpy arrays with exactly the leaves that were saved,
        even if `abstract_state` has others there. Where the checkpoint lacks the group, the value
        that `abstract_state` has there is returned.

    Raises:
      ConfigError: All checkpoints are damaged, or the checkpoint holds another tree.
    """
    self.close()
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
    if jax.process_count() > 1:
      multihost_utils.sync_global_devices("damaged checkpoints set aside")
    return step, state

  def restore(self, step: int, abstract_state: Any) -> Any:
    """The state saved at `step`.

    Raises:
      ConfigError: The checkpoint does not exist, is damaged, or holds another tree.
    """
    return self._read_first_intact([step], abstract_state)[1]

  def restore_params(self, abstract_params: Any, step: int | None = None) -> tuple[int, Any]:
    """(step, params) of one checkpoint, without reading the rest of its state.

    Args:
      abstract_params: The shapes, dtypes and shardings of the parameters.
      step: The checkpoint's step. None means the newest one that is not damaged.

    Raises:
      ConfigError: No such checkpoint exists, it is damaged, or it holds other parameters.
    """
    steps = self.steps()[::-1] if step is None else [step]
    if not steps:
      raise ConfigError(
        f"{self.directory} holds no checkpoint: train first, or name another folder"
      )
    abstract = {"params": abstract_params}
    step, state, damaged = self._read_first_intact(steps, abstract, whole=False)
    for path, reason in damaged.items():
      self._warn(f"checkpoint {path} is damaged ({reason}): taking step {step}")
    return step, state["params"]

  def wait(self) -> None:
    """Returns when everything that was saved is on disk. Raises if that failed."""
    if self._manager is not None:
      with naming(self.directory), reaching(self.directory):
        self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits as `wait` does, then frees the threads. The object can be used again."""
    manager, self._manager = self._manager, None
    if manager is not None:
      with naming(self.directory), reaching(self.directory):
        manager.close()

  def _writer(self) -> ocp.CheckpointManager:
    if self._manager is None:
      options = ocp.CheckpointManagerOptions(
        preservation_policy=ocp.checkpoint_managers.LatestN(self._keep),
        # In a bucket, orbax would also remove what others have put there.
        cleanup_tmp_directories=not is_bucket(self.directory),
        # Otherwise garbled metadata of an old checkpoint would stop the run.
        lightweight_initialize=True,
      )
      self._manager = ocp.CheckpointManager(self.directory, options=options)
    return self._manager

  def _read_first_intact(
    self, steps: list[int], abstract: Any, optional: Collection[str] = (), whole: bool = True
  ) -> tuple[int, Any, dict[Path, checkpoint_reader.Damaged]]:
    """(step, state, the damaged checkpoints before it in `steps`, each with its error)."""
    damaged: dict[Path, checkpoint_reader.Damaged] = {}
    for step in steps:
      path = self.directory / str(step)
      if not path.exists():
        raise ConfigError(
          f"{self.directory} has no checkpoint of step {step}: there are {self.steps()}"
        )
      try:
        read = checkpoint_reader.read(path, abstract, optional, whole, self._layers_of)
        return step, read, damaged
      except checkpoint_reader.Damaged as error:
        damaged[path] = error
    reason = next(iter(damaged.values()))
    which = f": every checkpoint of steps {steps}" if len(steps) > 1 else f"/{steps[0]}"
    raise ConfigError(
      f"{self.directory}{which} is damaged ({reason}): "
      "put back a copy, or start over in another workdir"
    )


def save_tree(path: str | Path, tree: Any) -> None:
  """Writes a tree of arrays and waits. If it is killed, `path` still holds the earlier tree."""
  store = Checkpoints(path, keep=1)
  store.save(max(store.steps(), default=-1) + 1, {"tree": tree})
  store.close()


def restore_tree(
  path: str | Path,
  abstract: Any,
  layers_of: checkpoint_reader.LayersOf = checkpoint_reader.no_layers,
) -> Any:
  """The tree that `save_tree` wrote to `path`.

  Args:
    path: The folder given to `save_tree`.
    abstract: The shapes, dtypes and shardings of the tree.
    layers_of: The name of a leaf -> the names of the single layers that it holds, which trees of
      earlier versions have instead.

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
  """A JAX array as it is; anything else as a numpy array that later changes do not reach."""
  return leaf if isinstance(leaf, jax.Array) else np.array(leaf)


def _set_aside(path: Path) -> str:
  """Renames a damaged checkpoint to a name that is free, and returns that name."""
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
  """Installs the filters. Call it once, before orbax reads or writes anything."""
  report = sys.unraisablehook

  def report_unless_orbax(unraisable: UnraisableHookArgs) -> None:
    if not _is_orbax_noise(unraisable):
      report(unraisable)

  sys.unraisablehook = report_unless_orbax
  logging.getLogger("asyncio").addFilter(_keep_asyncio_record)
  absl_logging.get_absl_logger().addFilter(_keep_absl_record)


def _is_orbax_noise(unraisable: UnraisableHookArgs) -> bool:
  """True for tasks that orbax abandons when it cannot read an array."""
  code: CodeType | None = getattr(unraisable.object, "cr_code", None)
  abandoned = code is not None and "orbax" in code.co_filename
  return abandoned or str(unraisable.exc_value) == "Event loop is closed"


def _keep_asyncio_record(record: logging.LogRecord) -> bool:
  """Drops what asyncio says about tasks of orbax: it raises their errors, too."""
  frames = traceback.extract_tb(record.exc_info[2]) if record.exc_info else []
  places = [record.getMessage(), *(frame.filename for frame in frames)]
  return not any(re.search("orbax|tensorstore", place) for place in places)


def _keep_absl_record(record: logging.LogRecord) -> bool:
  """Drops orbax's progress messages, and its errors: it raises each of them, too."""
  return record.levelno == logging.WARNING or "orbax" not in record.pathname


silence_orbax()
