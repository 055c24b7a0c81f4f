"""Moves arrays between the processes and the mesh, and lets the processes agree on what to do."""

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

  Every process calls the methods together and in the same order, because most of them communicate.
  Where devices of each process only sample, exchanges need no devices. Those of the thread
  `SAMPLER_THREAD` have an order of their own, and none of them waits for a device that samples.

  Attributes:
    mesh: The devices that learn.
    learner_row_shards: The parts that they split rows into.
    sampler_mailbox: The mailbox through which that thread exchanges.
  """

  def __init__(
    self, mesh: jax.sharding.Mesh, sampler_shards: int = 1, is_apart: bool = True
  ) -> None:
    """Makes the exchanges of the processes.

    Args:
      mesh: The devices that learn.
      sampler_shards: The parts that the sampler's meshes split rows into.
      is_apart: Whether these meshes have devices of their own, if they have several parts.
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
    """The divisor of every number of rows: each mesh then splits their first axis evenly."""
    return math.lcm(self.learner_row_shards, self._sampler_shards)

  def check_rows(self, sizes: Mapping[str, int], sampled: bool = True) -> None:
    """Raises ConfigError unless every batch size is a multiple of `row_shards`.

    Args:
      sizes: Batch sizes by config key, such as {"batch.prompts": 64}.
      sampled: False: the sampler gets none of them, so that they are of `learner_row_shards`.
    """
    shards = self.row_shards if sampled else self.learner_row_shards
    for key, size in sizes.items():
      if size % shards:
        multiple = f"mesh.data x mesh.fsdp x mesh.expert = {shards}"
        if shards > self.learner_row_shards:
          multiple = f"{shards}, so that the devices which learn and those which sample"
          multiple += " (mesh.sampler, mesh.context, sampling.tensor) both split it evenly"
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
    """Arrays of the mesh as whole numpy arrays on every process."""
    if jax.process_count() > 1:
      tree = multihost_utils.process_allgather(tree, tiled=True)
    return jax.device_get(tree)

  def own_rows(self, count: int) -> slice:
    """Which of `count` rows this process works on: about count / processes of them, in a row."""
    processes, index = jax.process_count(), jax.process_index()
    # Rounded up, so that the first process has the first row even if there are few.
    return slice(-(-count * index // processes), -(-count * (index + 1) // processes))

  def join_rows(self, tree: Any) -> Any:
    """The rows of all processes, one after the other, as numpy arrays on every process.

    Args:
      tree: Arrays of int32, float32 or bool: the rows of this process. Their number may differ from
        process to process. Everything else is the same on every process.
    """
    if jax.process_count() == 1:
      return tree
    return jax.tree.map(self._join_rows, tree)

  def join_lines(self, lines: Sequence[str]) -> list[str]:
    """The lines of all processes, one after the other, on every process.

    Args:
      lines: The lines of this process, in ASCII and without newlines.
    """
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
    """Runs act() on every process.

    Returns:
      The result of act() on this process.

    Raises:
      Exception: act() failed on some processes. They raise the error of act(). The others raise a
        RunFailed, so that no process waits for one that has failed.
    """
    result, error = _attempt(act)
    if self.any_process(error is not None):
      raise error or RunFailed("another process has failed: see what it says")
    return cast(T, result)

  def on_first(self, act: Callable[[], T]) -> T | None:
    """Runs act() on the first process alone.

    Returns:
      The result of act() on the first process, None on the others.

    Raises:
      Exception: act() failed. The first process raises the error of act(). The others raise a
        ConfigError, so that none of them waits for the first.
    """
    result, error = _attempt(act) if self.is_first else (None, None)
    if self.any_process(error is not None):
      raise error or ConfigError("the first process has ended: see what it says")
    return result

  def _gather(self, x: np.ndarray) -> np.ndarray:
    """The arrays of all processes, which have the same shape, stacked."""
    if not self._is_apart:
      return multihost_utils.process_allgather(x)
    samples = threading.current_thread().name == SAMPLER_THREAD
    mailbox = self.sampler_mailbox if samples else self._mailbox
    parts = mailbox.gather(x.tobytes())
    return np.stack([np.frombuffer(part, x.dtype).reshape(x.shape) for part in parts])

  def _join_rows(self, rows: np.ndarray) -> np.ndarray:
    counts = self._gather(np.array(len(rows)))
    padded = np.zeros((counts.max(), *rows.shape[1:]), rows.dtype)
    padded[: len(rows)] = rows
    parts = self._gather(padded)
    return np.concatenate([part[:count] for part, count in zip(parts, counts)])


def _attempt(act: Callable[[], T]) -> tuple[T | None, Exception | None]:
  """(the result of act(), what it raised)."""
  try:
    return act(), None
  except Exception as error:
    return None, error
