"""The manifest of a checkpoint: the name, shape, dtype and digest of every array.

Orbax verifies its index but not the arrays: a flipped bit in an array silently becomes another
number. So each checkpoint contains a manifest, and the reader compares the digest of every array
that it restores.

There are two kinds of digests. An array on the devices may be split over several processes, so its
entry has a `digest` that the devices compute. A numpy array on the host has a `crc32` instead.
"""

from collections.abc import Callable, Mapping, Sequence
import json
from pathlib import Path
from typing import Any
import zlib

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from grpo_jax.settings import ConfigError

Manifest = dict[str, dict[str, Any]]  # name of an array -> its entry


def flatten(tree: Any) -> dict[str, Any]:
  """The leaves of a tree by name, such as {"params.layer.w": leaf}.

  Checkpoints are flat, so that orbax need not restore tuples and empty nodes.

  Raises:
    ValueError: A key contains a dot, which separates the keys in a name.
  """
  flat = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    keys = [jax.tree_util.keystr((key,), simple=True) for key in path]
    if any("." in key for key in keys):
      raise ValueError(f"keys of a saved tree may not contain dots: {keys}")
    flat[".".join(keys)] = leaf
  return flat


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
  """The inverse of `flatten` for nested dicts."""
  tree: dict[str, Any] = {}
  for name, leaf in flat.items():
    *parents, last = name.split(".")
    node = tree
    for key in parents:
      node = node.setdefault(key, {})
    node[last] = leaf
  return tree


def group_of(name: str) -> str:
  """The first part of a leaf's name, such as "params"."""
  return name.split(".")[0]


def by_group(flat: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  """The leaves by group. Each group is a separate item on disk, so that it can be read alone."""
  groups: dict[str, dict[str, Any]] = {}
  for name, leaf in flat.items():
    groups.setdefault(group_of(name), {})[name] = leaf
  return groups


def describe(flat: Mapping[str, jax.Array | np.ndarray]) -> Manifest:
  """The manifest entries of named arrays."""
  # Digests are computed one after another. If several ran at once, processes could start them in
  # different orders, and would wait for each other for ever.
  return {name: _entry(leaf) for name, leaf in flat.items()}


def seal(entries: Manifest) -> dict[str, Any]:
  """The manifest in the format on disk: the entries and their checksum."""
  return {"leaves": entries, "crc32": zlib.crc32(json.dumps(entries, sort_keys=True).encode())}


def unseal(manifest: Mapping[str, Any]) -> Manifest:
  """The entries of a sealed manifest. Raises ValueError if they do not match the checksum."""
  if manifest != seal(manifest["leaves"]):
    raise ValueError("the manifest is not what was saved")
  return manifest["leaves"]


def is_host_entry(entry: Mapping[str, Any]) -> bool:
  """Whether the leaf was saved as a numpy array on the host."""
  return "crc32" in entry


def empty_host_array(entry: Mapping[str, Any]) -> np.ndarray:
  """An uninitialised numpy array of the entry's shape and dtype."""
  return np.empty(entry["shape"], jnp.dtype(entry["dtype"]))


def is_manifest_only(leaf: Any) -> bool:
  """Whether a leaf is an empty numpy array, which orbax cannot write. The entry suffices."""
  return isinstance(leaf, np.ndarray) and leaf.size == 0


def first_damaged(arrays: Mapping[str, jax.Array | np.ndarray], saved: Manifest) -> str | None:
  """The name of the first array whose digest differs from that in `saved`, or None."""
  for name, array in arrays.items():
    if _digest_of(array, is_host_entry(saved[name])) != _saved_digest(saved[name]):
      return name
  return None


def check_same_leaves(path: Path, saved: Manifest, wanted: Mapping[str, Any]) -> None:
  """Raises ConfigError at the first leaf whose name, shape or dtype differs.

  Args:
    path: The checkpoint, for the error message.
    saved: The entries of the checkpoint.
    wanted: The leaves that the config needs, by name. Each has a shape and a dtype.
  """
  there = {name: f"{entry['dtype']}{entry['shape']}" for name, entry in saved.items()}
  here = {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in wanted.items()}
  for name in [*here, *there]:  # also finds leaves that only one side has
    if there.get(name) != here.get(name):
      raise ConfigError(
        f"checkpoint {path} has {there.get(name, 'nothing')} for {name} where this config needs "
        f"{here.get(name, 'nothing')}: use the config it was saved with, or another workdir"
      )


def in_layers(
  saved: Manifest, wanted: Mapping[str, Any], layers_of: Callable[[str], Sequence[str]]
) -> dict[str, Sequence[str]]:
  """Finds stacked leaves whose layers a checkpoint of an earlier version holds as separate arrays.

  Args:
    saved: The entries of the checkpoint.
    wanted: The leaves that the config needs, by name.
    layers_of: layers_of(name of a leaf) -> the names of its single layers in order, or ().

  Returns:
    The name of each such leaf -> the names of its layers.
  """
  found = {}
  for name, leaf in wanted.items():
    names = layers_of(name)
    # If the checkpoint lacks a layer, this list is shorter, and the leaf is not found.
    shapes = [saved[layer]["shape"] for layer in names if layer in saved]
    if names and shapes == [list(leaf.shape[1:])] * len(names):
      found[name] = names
  return found


def one_layer(leaf: Any) -> jax.ShapeDtypeStruct:
  """The shape, dtype and sharding of a single layer of a stacked leaf."""
  sharding = getattr(leaf, "sharding", None)
  if isinstance(sharding, NamedSharding):
    sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
  return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=sharding)


def stack(layers: Sequence[jax.Array], leaf: Any) -> jax.Array:
  """Stacks layers into one array with the sharding of `leaf`."""
  return jax.jit(lambda *x: jnp.stack(x), out_shardings=leaf.sharding)(*layers)


def _entry(leaf: jax.Array | np.ndarray) -> dict[str, Any]:
  """The entry of an array: its shape, dtype and digest."""
  on_host = isinstance(leaf, np.ndarray)
  kind = "crc32" if on_host else "digest"
  return {"shape": list(leaf.shape), "dtype": str(leaf.dtype), kind: _digest_of(leaf, on_host)}


def _digest_of(array: jax.Array | np.ndarray, on_host: bool) -> int:
  return zlib.crc32(array.tobytes()) if on_host else int(device_digest(array))


def _saved_digest(entry: Mapping[str, Any]) -> int:
  return entry["crc32"] if is_host_entry(entry) else entry["digest"]


@jax.jit
def device_digest(x: jax.Array) -> jax.Array:
  """Computes the uint32 sum over all elements of mix(bits ^ mix(index)), modulo 2^32.

  Integer sums do not depend on the order, so the digest is the same on every mesh. `mix` is a
  bijection, so changing one element always changes the digest. Other damage goes unnoticed with a
  probability of 2^-32.
  """
  if x.dtype == bool:  # as 0 and 1
    x = x.astype(jnp.uint8)
  # An element of eight bytes becomes two words.
  word_dtype = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
  words = lax.bitcast_convert_type(x, word_dtype).astype(jnp.uint32)
  index = jnp.zeros(words.shape, jnp.uint32)  # becomes the position in the flattened array
  for axis, size in enumerate(words.shape):
    index = index * size + lax.broadcasted_iota(jnp.uint32, words.shape, axis)
  return jnp.sum(_mix(words ^ _mix(index)), dtype=jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
  """The last step of MurmurHash3, a bijection of uint32."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
  return x ^ (x >> 16)
