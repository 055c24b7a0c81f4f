"""Checkpoints on orbax: asynchronous, atomic, the newest few kept, and a damaged one never restored as if it were whole.

A checkpoint is a folder named by its step. Orbax writes it under a temporary name and renames it when it is complete, so
a killed save leaves only a temporary folder. What orbax reads back it does not fully verify: its index has checksums, but
a flipped bit in an array's data comes back as another number without an error. So each checkpoint carries a manifest:
every array's name, shape, dtype and a digest of its bits, compared after each restore.
"""
import json
import logging
from pathlib import Path
import sys
from typing import Any, Callable
import zlib

from absl import logging as absl_logging
import jax
from jax import lax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import orbax.checkpoint as ocp

from grpo_jax.config import ConfigError


def _silence_orbax():
  """Its progress (absl, INFO), and the tasks it abandons when one array cannot be read, which Python prints one by one."""
  report = sys.unraisablehook

  def hook(unraisable):
    code = getattr(unraisable.object, "cr_code", None)
    abandoned = code is not None and "orbax" in code.co_filename
    if not abandoned and str(unraisable.exc_value) != "Event loop is closed":
      report(unraisable)

  sys.unraisablehook = hook
  logging.getLogger("asyncio").addFilter(lambda record: "orbax" not in record.getMessage())
  absl_logging.get_absl_logger().addFilter(
      lambda record: record.levelno >= logging.WARNING or "orbax" not in record.pathname)


_silence_orbax()


class Checkpoints:
  """The checkpoints of one run. Only `save` and `restore_latest` change the folder; one process group may call them."""

  def __init__(self, directory: str | Path, keep: int, warn: Callable[[str], None] = logging.warning):
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
      self._manager = _open_manager(self.directory, self._keep)
    items = {group: ocp.args.StandardSave(arrays) for group, arrays in _groups(_flatten(state)).items()}
    manifest = ocp.args.JsonSave(_manifest(_flatten(state)))
    self._manager.save(step, args=ocp.args.Composite(manifest=manifest, **items), force=True)

  def restore_latest(self, abstract_state: Any) -> tuple[int, Any] | None:
    """(step, state) of the newest whole checkpoint, None if there is none; `abstract_state` gives shapes and shardings.

    Damaged ones newer than that are renamed to STEP.damaged, with a warning. Raises ConfigError if all are damaged, or
    if the checkpoint holds another tree.
    """
    self.close()
    if not self.steps():
      return None
    step, state, damaged = self._newest_whole(abstract_state, whole=True)
    for path, why in damaged.items():
      self._warn(f"checkpoint {path} is damaged ({why}): moved to {_set_aside(path).name}, going on from step {step}")
    return step, state

  def restore(self, step: int, abstract_state: Any) -> Any:
    """The state saved at `step`. Raises ConfigError if it is not there, damaged, or of another tree."""
    return self._read(step, abstract_state, whole=True)

  def restore_params(self, abstract_params: Any, step: int | None = None) -> tuple[int, Any]:
    """(step, params) of one checkpoint, by default the newest whole one; reads neither optimizer nor step counter."""
    abstract = {"params": abstract_params}
    if step is not None:
      return step, self._read(step, abstract, whole=False)["params"]
    if not self.steps():
      raise ConfigError(f"{self.directory} holds no checkpoint: train first, or name another folder")
    step, state, damaged = self._newest_whole(abstract, whole=False)
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

  def _read(self, step, abstract, whole):
    if step not in self.steps():
      raise ConfigError(f"{self.directory} has no checkpoint of step {step}: there are {self.steps()}")
    try:
      return _read(self.directory / str(step), abstract, whole)
    except _Damaged as e:
      raise ConfigError(f"checkpoint {self.directory / str(step)} is damaged ({e}): choose another step") from e

  def _newest_whole(self, abstract, whole):
    """-> step, state, {path: why} of the damaged ones after it."""
    damaged = {}
    for step in reversed(self.steps()):
      path = self.directory / str(step)
      try:
        return step, _read(path, abstract, whole), damaged
      except _Damaged as e:
        damaged[path] = e
    raise ConfigError(f"every checkpoint in {self.directory} is damaged ({next(iter(damaged.values()))}): "
                      "put back a copy, or start over in another workdir")


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


def _open_manager(directory, keep):
  return ocp.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(
      preservation_policy=ocp.checkpoint_managers.LatestN(keep),
      cleanup_tmp_directories=True,
      lightweight_initialize=True,  # else the garbled metadata of an old checkpoint would stop a new run
  ))


def _flatten(tree):
  """{"params.layer.w": leaf}: flat, so that orbax's treatment of tuples and empty nodes does not matter."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  flat = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
  assert len(flat) == len(leaves), "two leaves share a name: no key may contain a dot"
  return flat


def _groups(flat):
  """By the first part of the name. Each is an item of its own in the checkpoint, so that it can be read alone."""
  groups = {}
  for name, leaf in flat.items():
    groups.setdefault(name.split(".")[0], {})[name] = leaf
  return groups


def _read(path, abstract, whole):
  """The tree `abstract` out of the checkpoint `path`, which must hold nothing else if `whole`. Raises _Damaged, ConfigError."""
  wanted = _flatten(abstract)
  groups = _groups(wanted)
  saved = _attempt(lambda: _verified(_reader().restore(path, ocp.args.Composite(manifest=ocp.args.JsonRestore())).manifest))
  if not whole:
    saved = {name: entry for name, entry in saved.items() if name.split(".")[0] in groups}
  _compare(path, saved, wanted)
  items = ocp.args.Composite(**{group: ocp.args.StandardRestore(arrays) for group, arrays in groups.items()})
  restored = _attempt(lambda: _reader().restore(path, items))
  flat = {name: leaf for group in groups for name, leaf in restored[group].items()}
  for name, digest in _digests(flat).items():
    if digest != saved[name]["digest"]:
      raise _Damaged(f"{name} is not what was saved")
  return jax.tree.unflatten(jax.tree.structure(abstract), [flat[name] for name in wanted])


def _reader():
  """Reads without barriers: a process that cannot read its part would leave the others waiting in them."""
  process = jax.process_index()
  alone = ocp.options.MultiprocessingOptions(
      primary_host=process, active_processes={process}, barrier_sync_key_prefix=f"process{process}")
  handler = ocp.CompositeCheckpointHandler(composite_options=ocp.CompositeOptions(multiprocessing_options=alone))
  return ocp.Checkpointer(handler, multiprocessing_options=alone)


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
  aside, count = path.with_name(f"{path.name}.damaged"), 2
  while aside.exists():
    aside, count = path.with_name(f"{path.name}.damaged-{count}"), count + 1
  _barrier("named")
  if jax.process_index() == 0:
    path.rename(aside)
  _barrier("renamed")
  return aside


def _barrier(name):
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(f"checkpoint {name}")


def _manifest(flat):
  digests = _digests(flat)
  leaves = {name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "digest": digests[name]}
            for name, leaf in flat.items()}
  return {"leaves": leaves, "crc32": _crc32(leaves)}


def _verified(manifest):
  if manifest["crc32"] != _crc32(manifest["leaves"]):
    raise ValueError("the manifest is not what was saved")
  return manifest["leaves"]


def _crc32(leaves):
  return zlib.crc32(json.dumps(leaves, sort_keys=True).encode())


def _compare(path, saved, wanted):
  """Raises ConfigError at the first leaf that differs."""
  for name in [*wanted, *saved]:
    here = _shape(saved[name]["dtype"], saved[name]["shape"]) if name in saved else "nothing"
    asked = _shape(wanted[name].dtype, wanted[name].shape) if name in wanted else "nothing"
    if here != asked:
      raise ConfigError(f"checkpoint {path} has {here} for {name} where this config needs {asked}: "
                        "use the config it was saved with, or another workdir")


def _shape(dtype, shape):
  return f"{dtype}[{','.join(map(str, shape))}]"


def _digests(flat):
  return {name: int(digest) for name, digest in jax.device_get({k: _digest(v) for k, v in flat.items()}).items()}


@jax.jit
def _digest(x):
  """uint32: sum over elements of mix(bits ^ mix(index)) mod 2^32.

  Integer sums do not depend on order, so it is the same on every mesh; mix is a bijection, so any one changed element
  changes it, and other damage goes unnoticed once in 2^32.
  """
  if x.dtype == bool:
    x = x.astype(jnp.uint8)
  word = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)  # eight bytes become two words
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
