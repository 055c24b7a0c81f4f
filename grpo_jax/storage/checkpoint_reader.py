"""Reads one checkpoint from disk and verifies that its arrays equal those that were saved."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax

from grpo_jax.lazy import ocp
from grpo_jax.parallel.hosts import any_process
from grpo_jax.storage import manifest as fmt

T = TypeVar("T")
LayersOf = Callable[[str], Sequence[str]]


class Damaged(Exception):
  """A checkpoint that cannot be read, or that does not hold the numbers that were saved."""


def no_layers(name: str) -> Sequence[str]:
  """The `layers_of` of trees without stacked layers."""
  del name
  return ()


def read(
  path: Path,
  abstract: Any,
  optional: Collection[str] = (),
  whole: bool = True,
  layers_of: LayersOf = no_layers,
) -> Any:
  """Restores the tree of the checkpoint at `path`. All processes call it together.

  Args:
    path: The folder of one step.
    abstract: The tree to restore. Its top level is a dict or a dataclass of groups. Each leaf has a
      shape and a dtype, and a sharding if the array belongs on the devices.
    optional: Names of groups on the host that a checkpoint may lack. Such a group is restored as
      nested dicts of numpy arrays with the leaves that were saved, even if `abstract` has other
      leaves. If the checkpoint lacks the group, the value in `abstract` is returned.
    whole: Whether the checkpoint must hold no groups that `abstract` lacks.
    layers_of: layers_of(name of a stacked leaf) -> the names of its single layers. If a checkpoint
      of an earlier version holds these instead, they are stacked.

  Raises:
    Damaged: The checkpoint cannot be read, or differs from what was saved.
    ConfigError: The checkpoint holds another tree.
  """
  subtrees, structure = _groups_of(abstract)
  named_leaves = fmt.flatten(abstract).items()
  wanted = {name: leaf for name, leaf in named_leaves if fmt.group_of(name) not in optional}
  reader, manifest = _make_reader(), read_manifest(path)
  groups_to_check = subtrees.keys() | (fmt.by_group(manifest).keys() if whole else set())
  entries_to_check = _entries_of(manifest, groups_to_check - set(optional))
  # Where a checkpoint of an earlier version has single layers, these are read, and stacked below.
  layers_of_stack = fmt.in_layers(entries_to_check, wanted, layers_of)
  stacks = {name: wanted.pop(name) for name in layers_of_stack}
  for stack, layers in layers_of_stack.items():
    wanted |= dict.fromkeys(layers, fmt.one_layer(stacks[stack]))
  fmt.check_same_leaves(path, entries_to_check, wanted)
  # Optional groups are read as they were saved, so their leaves are not compared.
  saved = entries_to_check | _entries_of(manifest, subtrees.keys() & set(optional))

  arrays = _attempt(lambda: _read_arrays(reader, path, saved, wanted))
  # `_read_arrays` has verified the arrays of the host. Those on devices may be split over
  # processes, so all processes verify them together.
  damaged = fmt.first_damaged(_select(arrays, saved, on_host=False), saved)
  if damaged:
    raise Damaged(f"{damaged} is not what was saved")
  for name, layers in layers_of_stack.items():
    arrays[name] = fmt.stack([arrays.pop(layer) for layer in layers], stacks[name])
  restored = [_restore_group(group, tree, arrays, optional) for group, tree in subtrees.items()]
  return jax.tree.unflatten(structure, restored)


def read_manifest(path: Path) -> fmt.Manifest:
  """Reads the entries of the arrays in the checkpoint at `path`. Raises Damaged if that fails."""
  args = ocp.args.Composite(manifest=ocp.args.JsonRestore())
  return _attempt(lambda: fmt.unseal(_make_reader().restore(path, args)["manifest"]))


def _restore_group(
  group: str, abstract: Any, arrays: Mapping[str, Any], optional: Collection[str]
) -> Any:
  """Builds one group of the restored tree from `arrays`, which holds all arrays by name."""
  if group not in optional:
    leaves = [arrays[name] for name in fmt.flatten({group: abstract})]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)
  in_group = {name: array for name, array in arrays.items() if fmt.group_of(name) == group}
  return fmt.nested(in_group)[group] if in_group else abstract


def _groups_of(tree: Any) -> tuple[dict[str, Any], Any]:
  """Splits the top level of a tree into {group: subtree} and the structure that joins them."""
  children, structure = jax.tree_util.tree_flatten_with_path(tree, lambda x: x is not tree)
  return {jax.tree_util.keystr(path, simple=True): child for path, child in children}, structure


def _entries_of(manifest: fmt.Manifest, groups: Collection[str]) -> fmt.Manifest:
  """The entries of the manifest that belong to these groups."""
  return {name: entry for name, entry in manifest.items() if fmt.group_of(name) in groups}


def _make_reader() -> ocp.Checkpointer:
  """A reader without barriers, in which a process that cannot read would leave others waiting."""
  process = jax.process_index()
  alone = ocp.options.MultiprocessingOptions(
    primary_host=process, active_processes={process}, barrier_sync_key_prefix=f"process{process}"
  )
  options = ocp.CompositeOptions(multiprocessing_options=alone)
  handler = ocp.CompositeCheckpointHandler(composite_options=options)
  return ocp.Checkpointer(handler, multiprocessing_options=alone)


def _read_arrays(
  reader: ocp.Checkpointer, path: Path, saved: fmt.Manifest, wanted: Mapping[str, Any]
) -> dict[str, Any]:
  """Reads the arrays in the manifest `saved`, by name. Verifies the arrays of the host.

  Arrays that were saved from devices get the shardings of the leaves in `wanted`. Those of optional
  groups, which `wanted` lacks, are read to the host.
  """
  targets = {}
  for name, entry in saved.items():
    on_host = fmt.is_host_entry(entry) or name not in wanted
    targets[name] = fmt.empty_host_array(entry) if on_host else wanted[name]
  on_disk = {name: leaf for name, leaf in targets.items() if not fmt.is_manifest_only(leaf)}
  items = {
    group: ocp.args.StandardRestore(leaves) for group, leaves in fmt.by_group(on_disk).items()
  }
  restored = reader.restore(path, ocp.args.Composite(**items))
  arrays = targets | {name: restored[fmt.group_of(name)][name] for name in on_disk}
  # Each process verifies its copy. This function runs inside `_attempt`, so that all processes give
  # up if one of them has read a damaged file.
  damaged = fmt.first_damaged(_select(arrays, saved, on_host=True), saved)
  if damaged:
    raise ValueError(f"{damaged} is not what was saved")
  return arrays


def _select(arrays: Mapping[str, Any], saved: fmt.Manifest, on_host: bool) -> dict[str, Any]:
  """The arrays that were saved from the host, or those that were saved from devices."""
  return {
    name: array for name, array in arrays.items() if fmt.is_host_entry(saved[name]) == on_host
  }


def _attempt(read: Callable[[], T]) -> T:
  """Returns the result of read(). Raises Damaged on every process if read() raised on any."""
  result: T
  reason = ""
  try:
    result = read()
  except Exception as error:  # json, orbax, tensorstore and the file system raise different ones
    reason = str(error.__cause__ or error).split("\n")[0][:150] or type(error).__name__
  if any_process(bool(reason)):
    raise Damaged(reason or "on another host")
  return result
