"""Moves arrays between the processes and the mesh, and lets the processes agree on decisions."""

from collections.abc import Callable, Mapping, Sequence
import math
import threading
from typing import Any, TypeVar, cast

import jax
from jax.experimental import multihost_utils
import numpy as np

from grpo_jax.parallel.mailbox import Mailbox
from grpo_jax.parallel.sharding import ROW_AXES, batch_sharding
from grpo_jax.settings import ConfigError, RunFailed

T = TypeVar("T")
SAMPLER_THREAD = "sampler"  # the name of the thread that samples beside the main one


def any_process(here: bool) -> bool:
  """True on every process if `here` is true on any. All processes must call it together."""
  if jax.process_count() == 1:
    return here
  return bool(multihost_utils.process_allgather(np.array(here)).any())


class Hosts:
  """The processes of a run and their mesh.

  All processes call the methods together and in the same order, because most methods communicate.
  If some devices only sample, the processes exchange data through mailboxes instead of devices, so
  that no exchange waits for a device that is sampling. The thread `SAMPLER_THREAD` has a separate
  mailbox, so that its calls need no common order with those of the main thread.

  Attributes:
    mesh: The devices that learn.
    learner_row_shards: The number of shards into which these devices split the rows of a batch.
    sampler_mailbox: The mailbox of the thread `SAMPLER_THREAD`.
  """

  def __init__(
    self, mesh: jax.sharding.Mesh, sampler_shards: int = 1, is_apart: bool = True
  ) -> None:
    """Makes the mailboxes.

    Args:
      mesh: The devices that learn.
      sampler_shards: The number of shards into which the sampler's meshes split rows.
      is_apart: Whether these meshes consist of devices that only sample. Ignored if
        `sampler_shards` is 1, because then no other process has such devices.
    """
    self.mesh, self._sampler_shards = mesh, sampler_shards
    self.learner_row_shards = math.prod(mesh.shape[axis] for axis in ROW_AXES)
    self._is_apart = is_apart and sampler_shards > 1
    self._mailbox, self.sampler_mailbox = Mailbox(), Mailbox()

  @property
  def is_first(self) -> bool:
    """True on the process that writes everything except checkpoints, and that prints."""
    return jax.process_index() == 0

  @property
  def index(self) -> int:
    """The number of this process, from 0."""
    return jax.process_index()

  @property
  def row_shards(self) -> int:
    """The divisor that a number of rows needs so that each mesh splits the rows evenly."""
    return math.lcm(self.learner_row_shards, self._sampler_shards)

  def check_rows(self, sizes: Mapping[str, int], sampled: bool = True) -> None:
    """Raises ConfigError unless every batch size is a multiple of `row_shards`.

    Args:
      sizes: Batch sizes by config key, such as {"batch.prompts": 64}.
      sampled: False checks for multiples of `learner_row_shards`, for rows that are not sampled.
    """
    shards = self.row_shards if sampled else self.learner_row_shards
    for key, size in sizes.items():
      if size % shards:
        multiple = f"mesh.data x mesh.fsdp x mesh.expert = {shards}"
        if shards > self.learner_row_shards:
          multiple = f"{shards}, so that the devices which learn and those which sample"
          multiple += (
            " (mesh.sampler, mesh.context, sampling.tensor, sampling.context) both split it"
          )
        raise ConfigError(f"config key {key} is {size}: it must be a multiple of {multiple}")

  def put(self, tree: Any) -> Any:
    """Puts host arrays onto the mesh, with their first axis over data x fsdp x expert.

    Args:
      tree: Arrays that are the same on every process.
    """
    sharding = batch_sharding(self.mesh)

    def put_array(array: Any) -> jax.Array:
      array = np.asarray(array)
      return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map(put_array, tree)

  def fetch(self, tree: Any) -> Any:
    """Copies arrays of the mesh to every process, as whole numpy arrays."""
    if jax.process_count() > 1:
      tree = multihost_utils.process_allgather(tree, tiled=True)
    return jax.device_get(tree)

  def own_rows(self, count: int) -> slice:
    """The consecutive rows of `count` that this process works on: about count / processes."""
    processes, index = jax.process_count(), jax.process_index()
    # Rounded up, so that the first process has the first row even if there are few rows.
    return slice(-(-count * index // processes), -(-count * (index + 1) // processes))

  def join_rows(self, tree: Any) -> Any:
    """Concatenates the rows of all processes, as numpy arrays on every process.

    Args:
      tree: The rows of this process: arrays of int32, float32 or bool. Their number may differ
        between processes, but dtypes and other axes may not.
    """
    if jax.process_count() == 1:
      return tree
    return jax.tree.map(self._join_rows, tree)

  def join_lines(self, lines: Sequence[str]) -> list[str]:
    """Concatenates the lines of all processes. They must be ASCII and contain no newlines."""
    if jax.process_count() == 1:
      return list(lines)
    text = "".join(f"{line}\n" for line in lines)
    codes = self.join_rows(np.frombuffer(text.encode("ascii"), np.uint8).astype(np.int32))
    return codes.astype(np.uint8).tobytes().decode("ascii").splitlines()

  def any_process(self, here: bool) -> bool:
    """True on every process if `here` is true on any."""
    if jax.process_count() == 1:
      return here
    return bool(self._gather(np.array(here)).any())

  def on_each(self, act: Callable[[], T]) -> T:
    """Runs act() on every process, and returns its result on this process.

    Raises:
      Exception: act() failed on some processes, which raise its error. The others raise RunFailed,
        so that no process waits for one that has failed.
    """
    result, error = _attempt(act)
    if self.any_process(error is not None):
      raise error or RunFailed("another process has failed: see what it says")
    return cast(T, result)

  def on_first(self, act: Callable[[], T]) -> T | None:
    """Runs act() on the first process only. Returns its result there, and None elsewhere.

    Raises:
      Exception: act() failed. The first process raises its error. The others raise ConfigError, so
        that they do not wait for the first process.
    """
    result, error = _attempt(act) if self.is_first else (None, None)
    if self.any_process(error is not None):
      raise error or ConfigError("the first process has ended: see what it says")
    return result

  def _gather(self, x: np.ndarray) -> np.ndarray:
    """Stacks the arrays of all processes, which have the same shape and dtype."""
    if not self._is_apart:
      return multihost_utils.process_allgather(x)
    samples = threading.current_thread().name == SAMPLER_THREAD
    mailbox = self.sampler_mailbox if samples else self._mailbox
    parts = mailbox.gather(x.tobytes())
    return np.stack([np.frombuffer(part, x.dtype).reshape(x.shape) for part in parts])

  def _join_rows(self, rows: np.ndarray) -> np.ndarray:
    # `_gather` needs equal shapes, so the rows are padded to the largest number of a process.
    counts = self._gather(np.array(len(rows)))
    padded = np.zeros((counts.max(), *rows.shape[1:]), rows.dtype)
    padded[: len(rows)] = rows
    parts = self._gather(padded)
    return np.concatenate([part[:count] for part, count in zip(parts, counts)])


def _attempt(act: Callable[[], T]) -> tuple[T | None, Exception | None]:
  """Returns (the result of act(), None), or (None, the exception that it raised)."""
  try:
    return act(), None
  except Exception as error:
    return None, error
