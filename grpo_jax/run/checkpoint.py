"""Checkpoints on orbax: asynchronous, atomic, the newest few kept, a damaged one never restored as if it were whole.

A checkpoint is a folder named by its step. Orbax writes it under a temporary name and renames it when complete, so a
killed save leaves only a temporary folder. Reading, orbax verifies its index but not the arrays: a flipped bit there
comes back as another number, without an error. So each checkpoint carries a manifest of every array's name, shape,
dtype and a digest of its bits, compared after each restore.
"""

import json
import logging
import re
import sys
import zlib
from pathlib import Path
from typing import Any, Callable

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from absl import logging as absl_logging
from jax import lax
from jax.experimental import multihost_utils

from grpo_jax.settings import ConfigError

_report = sys.unraisablehook


def _report_unless_orbax(unraisable):
  """Orbax abandons tasks when an array cannot be read; Python would print each, and the reader says it in one line."""
  code = getattr(unraisable.object, "cr_code", None)
  abandoned = code is not None and "orbax" in code.co_filename
  if not abandoned and str(unraisable.exc_value) != "Event loop is closed":
    _report(unraisable)


sys.unraisablehook = _report_unless_orbax
logging.getLogger("asyncio").addFilter(
  lambda record: not re.search("orbax|tensorstore", record.getMessage())
)
absl_logging.get_absl_logger().addFilter(  # its progress, which users of absl.app would see
  lambda record: record.levelno >= logging.WARNING or "orbax" not in record.pathname
)


class Checkpoints:
  """The checkpoints of one run. Only `save` and `restore_latest` change the folder, and only one run may call them."""

  def __init__(
    self, directory: str | Path, keep: int, warn: Callable[[str], None] = logging.warning
  ):
    self.directory = Path(directory).absolute()
    self._keep = keep
    self._warn = warn
    self._manager = None

  def steps(self) -> list[int]:
    """The steps whose checkpoints are complete (damaged or not), ascending."""
    if not self.directory.is_dir():
      return []
    return sorted(int(p.name) for p in self.directory.iterdir() if p.name.isdecimal())

  def save(self, step: int, state: Any) -> None:
    """Returns when `state` is copied off the devices (it may be donated then); the writing goes on in the background.

    A step that is there already is left as it is. Raises what went wrong with the save before.
    """
    self.wait()
    if step in self.steps():
      return
    if self._manager is None:
      self._manager = ocp.CheckpointManager(
        self.directory,
        options=ocp.CheckpointManagerOptions(
          preservation_policy=ocp.checkpoint_managers.LatestN(self._keep),
          cleanup_tmp_directories=True,
          lightweight_initialize=True,
        ),
      )  # else garbled metadata of an old checkpoint would stop the run
    flat = _flatten(state)
    items = {group: ocp.args.StandardSave(arrays) for group, arrays in _groups(flat).items()}
    items["manifest"] = ocp.args.JsonSave(_sealed(_describe(flat)))
    self._manager.save(step, args=ocp.args.Composite(**items), force=True)

  def restore_latest(self, abstract_state: Any) -> tuple[int, Any] | None:
    """(step, state) of the newest whole checkpoint, None if there is none; `abstract_state` gives shapes and shardings.

    Damaged ones newer than that are renamed to STEP.damaged, with a warning. Raises ConfigError if all are damaged, or
    if the checkpoint holds another tree.
    """
    self.close()
    if not self.steps():
      return None
    step, state, damaged = self._first_whole(self.steps()[::-1], abstract_state, whole=True)
    if jax.process_index() == 0:
      for path, why in damaged.items():
        self._warn(
          f"checkpoint {path} is damaged ({why}): moved to {_set_aside(path)}, going on from step {step}"
        )
    if jax.process_count() > 1:
      multihost_utils.sync_global_devices("damaged checkpoints set aside")
    return step, state

  def restore(self, step: int, abstract_state: Any) -> Any:
    """The state saved at `step`. Raises ConfigError if it is not there, damaged, or of another tree."""
    return self._first_whole([step], abstract_state, whole=True)[1]

  def restore_params(self, abstract_params: Any, step: int | None = None) -> tuple[int, Any]:
    """(step, params) of one checkpoint, by default the newest whole one; reads neither optimizer nor step counter."""
    steps = self.steps()[::-1] if step is None else [step]
    if not steps:
      raise ConfigError(
        f"{self.directory} holds no checkpoint: train first, or name another folder"
      )
    step, state, damaged = self._first_whole(steps, {"params": abstract_params}, whole=False)
    for path, why in damaged.items():
      self._warn(f"checkpoint {path} is damaged ({why}): taking step {step}")
    return step, state["params"]

  def wait(self) -> None:
    """Returns when everything saved is on disk; raises if that failed."""
    if self._manager is not None:
      self._manager.wait_until_finished()

  def close(self) -> None:
    """`wait`, then frees the threads. The object can be used again."""
    manager, self._manager = self._manager, None
    if manager is not None:
      manager.close()

  def _first_whole(self, steps, abstract, whole):
    """-> step, state, {path: why} of the damaged ones before it in `steps`."""
    damaged = {}
    for step in steps:
      path = self.directory / str(step)
      if not path.exists():
        raise ConfigError(
          f"{self.directory} has no checkpoint of step {step}: there are {self.steps()}"
        )
      try:
        return step, _read(path, abstract, whole), damaged
      except _Damaged as e:
        damaged[path] = e
    why = next(iter(damaged.values()))
    raise ConfigError(
      f"{self.directory}: every checkpoint of steps {steps} is damaged ({why}): "
      "put back a copy, or start over in another workdir"
    )


def save_tree(path: str | Path, tree: Any) -> None:
  """Writes one pytree of arrays and waits for it. Killed in between, `path` still holds the tree it held before."""
  store = Checkpoints(path, keep=1)
  store.save(max(store.steps(), default=-1) + 1, {"tree": tree})
  store.close()


def restore_tree(path: str | Path, abstract: Any) -> Any:
  """What `save_tree` wrote. Raises ConfigError if it is not there, damaged, or of another tree."""
  store = Checkpoints(path, keep=1)
  if not store.steps():
    raise ConfigError(f"{path} does not exist or holds nothing: it is written when a run starts")
  return store.restore(store.steps()[-1], {"tree": abstract})["tree"]


class _Damaged(Exception):
  """A checkpoint that cannot be read, or whose numbers are not those that were saved."""


def _flatten(tree):
  """{"params.layer.w": leaf}: flat, so that orbax's treatment of tuples and empty nodes does not matter."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  flat = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
  assert len(flat) == len(leaves), "two leaves share a name: keys may not contain dots"
  return flat


def _groups(flat):
  """By the first part of the name. Each is an item of its own in the checkpoint, so that it can be read alone."""
  groups = {}
  for name, leaf in flat.items():
    groups.setdefault(name.split(".")[0], {})[name] = leaf
  return groups


def _read(path, abstract, whole):
  """The tree `abstract` out of a checkpoint; if `whole`, that holds no other. Raises _Damaged and ConfigError."""
  process = jax.process_index()
  alone = ocp.options.MultiprocessingOptions(  # no barriers: one that cannot read would leave the others in them
    primary_host=process, active_processes={process}, barrier_sync_key_prefix=f"process{process}"
  )
  handler = ocp.CompositeCheckpointHandler(
    composite_options=ocp.CompositeOptions(multiprocessing_options=alone)
  )
  reader = ocp.Checkpointer(handler, multiprocessing_options=alone)
  wanted = _flatten(abstract)
  groups = _groups(wanted)

  manifest = ocp.args.Composite(manifest=ocp.args.JsonRestore())
  saved = _attempt(lambda: _unsealed(reader.restore(path, manifest)["manifest"]))
  if not whole:
    saved = {name: entry for name, entry in saved.items() if name.split(".")[0] in groups}
  _compare(path, saved, wanted)
  items = ocp.args.Composite(
    **{group: ocp.args.StandardRestore(arrays) for group, arrays in groups.items()}
  )
  restored = _attempt(lambda: reader.restore(path, items))
  flat = {name: leaf for group in groups for name, leaf in restored[group].items()}
  for name, digest in _digests(flat).items():
    if digest != saved[name]["digest"]:
      raise _Damaged(f"{name} is not what was saved")
  return jax.tree.unflatten(jax.tree.structure(abstract), [flat[name] for name in wanted])


def _attempt(read):
  """read(), or _Damaged on every process if it failed on one."""
  value = why = None
  try:
    value = read()
  except Exception as e:  # json, orbax, tensorstore and the file system each have their own
    why = str(e.__cause__ or e).split("\n")[0][:150] or type(e).__name__
  if jax.process_count() > 1 and multihost_utils.process_allgather(why is not None).any():
    why = why or "on another host"
  if why:
    raise _Damaged(why)
  return value


def _set_aside(path):
  aside, count = f"{path.name}.damaged", 2
  while path.with_name(aside).exists():
    aside, count = f"{path.name}.damaged-{count}", count + 1
  path.rename(path.with_name(aside))
  return aside


def _describe(flat):
  digests = _digests(flat)
  return {
    k: {"shape": list(v.shape), "dtype": str(v.dtype), "digest": digests[k]}
    for k, v in flat.items()
  }


def _sealed(leaves):
  return {"leaves": leaves, "crc32": zlib.crc32(json.dumps(leaves, sort_keys=True).encode())}


def _unsealed(manifest):
  if manifest != _sealed(manifest["leaves"]):
    raise ValueError("the manifest is not what was saved")
  return manifest["leaves"]


def _compare(path, saved, wanted):
  """Raises ConfigError at the first leaf that differs."""
  here = {name: f"{entry['dtype']}{entry['shape']}" for name, entry in saved.items()}
  asked = {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in wanted.items()}
  for name in [*asked, *here]:
    if here.get(name) != asked.get(name):
      raise ConfigError(
        f"checkpoint {path} has {here.get(name, 'nothing')} for {name} where this config needs "
        f"{asked.get(name, 'nothing')}: use the config it was saved with, or another workdir"
      )


def _digests(flat):
  # One after the other: of several that are under way at once, each process may start another first, and wait for ever.
  return {name: int(_digest(leaf)) for name, leaf in flat.items()}


@jax.jit
def _digest(x):
  """uint32: sum over elements of mix(bits ^ mix(index)) mod 2^32.

  Integer sums do not depend on order, so it is the same on every mesh; mix is a bijection, so any one changed element
  changes it, and other damage goes unnoticed once in 2^32.
  """
  if x.dtype == bool:
    x = x.astype(jnp.uint8)
  word = {1: jnp.uint8, 2: jnp.uint16}.get(
    x.dtype.itemsize, jnp.uint32
  )  # eight bytes become two words
  words = lax.bitcast_convert_type(x, word).astype(jnp.uint32)
  index = jnp.zeros(words.shape, jnp.uint32)
  for axis, size in enumerate(words.shape):
    index = index * size + lax.broadcasted_iota(jnp.uint32, words.shape, axis)
  return jnp.sum(_mix(words ^ _mix(index)), dtype=jnp.uint32)


def _mix(x):
  """The last step of MurmurHash3, a bijection of uint32."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
  return x ^ (x >> 16)
