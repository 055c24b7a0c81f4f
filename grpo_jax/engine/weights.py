"""Folders with the weights of a policy, which run and servers reach: one for each version.

Where all weights are trained, a folder is a whole model. With adapters, it holds these alone.

The folders of a start are called weights-TOKEN-NUMBER, where no other start has its token. The file
weights-TOKEN.owner beside them is locked while the run goes on. So a later run knows which folders
a killed one left, and touches nothing else.
"""

import contextlib
import dataclasses
import fcntl
from pathlib import Path
import re
import secrets
import shutil
from typing import Any, BinaryIO
import weakref

from flax.traverse_util import flatten_dict, unflatten_dict
import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import model
from grpo_jax.engine.proof import Probe
from grpo_jax.model.huggingface import hub
from grpo_jax.run.run import Run
from grpo_jax.settings import ConfigError, RunFailed

_ADAPTERS = ("lora_a", "lora_b")
_OWNER, _OWNED = re.compile(r"weights-[0-9a-f]{16}\.owner"), b"grpo_jax writes weights here\n"


@dataclasses.dataclass(frozen=True, eq=False)
class Written:
  """The weights of a policy in a folder, which is removed when nobody has this object any more.

  Attributes:
    name: Of the folder, and of the adapters in it.
    folder: The folder.
    logprobs_BN: What the probe's log-probs are under these weights, as this run computes them.
  """

  name: str
  folder: Path
  logprobs_BN: np.ndarray


class Folders:
  """Writes the weights of a run.

  Attributes:
    is_untied: Whether a model whose output head is its embedding gets one of its own.
  """

  def __init__(self, run: Run, folder: Path, probe: Probe):
    """Removes the folders that a killed run left.

    Args:
      run: The run.
      folder: Where they are written.
      probe: What proves that a server has them.

    Raises:
      ConfigError: Nothing can be written there.
    """
    self._run, self._folder, self._probe = run, folder.expanduser().absolute(), probe
    self.is_untied = False
    self._prefix = f"weights-{secrets.token_hex(8)}"
    self._count, self._removals = 0, list[weakref.finalize]()
    self._last: tuple[list[weakref.ref], weakref.ref[Written]] | None = None
    try:
      self._folder.mkdir(parents=True, exist_ok=True)
      for owner in [*self._folder.iterdir()]:
        if _OWNER.fullmatch(owner.name):
          _remove_left(owner)
      self._owner = _owned(self._folder / f"{self._prefix}.owner")
    except OSError as error:
      raise ConfigError(
        f"config key rollout.engine_folder: {self._folder} cannot be written ({error.strerror})"
      ) from error

  def __call__(self, params: Any) -> Written:
    """Writes weights, unless they are those that were written last.

    Args:
      params: All parameters, as `Parameters.for_sampling` returns them.

    Raises:
      RunFailed: The disk cannot be written.
    """
    leaves = jax.tree.leaves(params)
    if self._last is not None:
      refs, written = self._last[0], self._last[1]()
      if written is not None and len(refs) == len(leaves):
        if all(ref() is leaf for ref, leaf in zip(refs, leaves)):
          return written
    written = self._write(params)
    self._last = [weakref.ref(leaf) for leaf in leaves], weakref.ref(written)
    return written

  def changed(self, params: Any) -> Written:
    """Writes other weights, in which every array that is trained differs from these."""
    leaves = flatten_dict(params, sep="/")
    has_adapters = self._run.parameters.model.lora is not None
    for number, name in enumerate(sorted(leaves)):
      if has_adapters == name.endswith(_ADAPTERS):
        leaves[name] = _shaken(leaves[name], number)
    return self._write(unflatten_dict(leaves, sep="/"))

  def close(self) -> None:
    """Removes all folders."""
    for removal in self._removals:
      removal()
    with contextlib.suppress(OSError):
      Path(self._owner.name).unlink(missing_ok=True)
    self._owner.close()

  def _write(self, params: Any) -> Written:
    run, name = self._run, f"{self._prefix}-{self._count}"
    self._count += 1
    folder, shape = self._folder / name, run.parameters.sampling.model
    logprobs_BN = self._probe.logprobs(params)
    try:
      if shape.lora is not None:
        base, revision = hub.parts(run.config.model.path)
        model.save_adapters(folder, shape, _adapters_of(params), base, revision)
      else:
        model.save(folder, *(_untied(shape, params) if self.is_untied else (shape, params)))
        run.tokenizer.save(folder)
    except OSError as error:
      raise RunFailed(
        f"weights for the engine cannot be written to {folder} ({error.strerror or error}): make"
        " room there, or name another folder as rollout.engine_folder"
      ) from error
    written = Written(name, folder, logprobs_BN)
    removal = weakref.finalize(written, shutil.rmtree, folder, ignore_errors=True)
    self._removals = [one for one in self._removals if one.alive] + [removal]
    return written


def _owned(owner: Path) -> BinaryIO:
  """A file that says that a run goes on, until it is closed."""
  file = open(owner, "xb", buffering=0)
  with contextlib.suppress(OSError):  # a file system without locks: nobody removes what is left
    fcntl.flock(file, fcntl.LOCK_EX)
  file.write(_OWNED)
  return file


def _remove_left(owner: Path) -> None:
  """Removes the folders of a run, unless it goes on."""
  with contextlib.suppress(FileNotFoundError), open(owner, "rb") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # it goes on, or nobody can know
      return
    if file.read() != _OWNED:
      return
    name = re.compile(rf"\.?{owner.stem}-[0-9]+(\.partial-[0-9]+)?")
    for left in [*owner.parent.iterdir()]:
      if name.fullmatch(left.name):
        shutil.rmtree(left)
    owner.unlink()


def _adapters_of(params: Any) -> Any:
  """The adapters alone."""
  leaves = flatten_dict(params, sep="/")
  own = {name: leaf for name, leaf in leaves.items() if name.endswith(_ADAPTERS)}
  return unflatten_dict(own, sep="/")


def _untied(shape: model.ModelConfig, params: Any) -> tuple[model.ModelConfig, Any]:
  """The same model with an output head of its own."""
  if not shape.tie_embeddings:
    return shape, params
  untied = dataclasses.replace(shape, tie_embeddings=False)
  made = flatten_dict(jax.eval_shape(lambda key: model.init(key, untied), jax.random.key(0)))
  leaves = flatten_dict(params)
  (head,) = made.keys() - leaves.keys()
  embedding = next(leaf for name, leaf in leaves.items() if leaf.shape[::-1] == made[head].shape)
  return untied, unflatten_dict(leaves | {head: embedding.T})


@jax.jit
def _shaken(leaf: jax.Array, number: int) -> jax.Array:
  """An array whose every number is changed at random, by about a third of their size."""
  size = jnp.sqrt(jnp.mean(jnp.square(leaf.astype(jnp.float32))))
  noise = jax.random.normal(jax.random.key(number), leaf.shape)
  return (leaf + 0.3 * jnp.where(size > 0, size, 0.1) * noise).astype(leaf.dtype)
