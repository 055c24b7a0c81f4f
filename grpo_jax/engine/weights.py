"""Writes folders with the weights of a policy, one for each version, for the servers to read.

If all weights are trained, a folder is a whole model. With adapters, it holds only the adapters.

The folders of a start are called weights-TOKEN-NUMBER. Each start has a token of its own. The file
weights-TOKEN.owner beside them is locked while the run goes on. So a later run knows which folders
a killed run left, and touches nothing else.
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
  """The weights of a policy in a folder, which is removed when this object is collected as garbage.

  Attributes:
    name: The name of the folder, and of the adapters in it.
    folder: The folder.
    logprobs_BN: The probe's log-probs under these weights, as this run computes them.
  """

  name: str
  folder: Path
  logprobs_BN: np.ndarray


class Folders:
  """Writes the weights of a run.

  Attributes:
    is_untied: Whether to write an output head for a model whose head is its embedding.
  """

  def __init__(self, run: Run, folder: Path, probe: Probe):
    """Writes a file that says that this run owns its folders, and removes those of killed runs.

    A run holds a lock on its file as long as it lives. So a run whose file has no lock was killed.

    Args:
      run: The run.
      folder: The folder that gets a folder for each version.
      probe: The rows whose log-probs prove that a server has the weights.

    Raises:
      ConfigError: The folder cannot be written.
    """
    self._run, self._folder, self._probe = run, folder.expanduser().absolute(), probe
    self.is_untied = False
    self._prefix = f"weights-{secrets.token_hex(8)}"
    self._count = 0
    self._removals = list[weakref.finalize]()  # each removes the folder of a `Written` that lives
    # The arrays that were written last, and their folder, which serves again if no array is another
    # one. Neither is kept alive.
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
    """Writes weights, unless the same arrays were written last.

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
    """Writes changed weights: every trained array differs from `params`."""
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
    """Writes weights into a new folder, which is removed when nothing refers to the result.

    Of a LoRA run, the adapters alone are written. The log-probs of the probe go with the weights,
    so that a server can be asked whether it has them.
    """
    run, name = self._run, f"{self._prefix}-{self._count}"
    self._count += 1
    folder, shape = self._folder / name, run.parameters.sampling.model
    logprobs_BN = self._probe.logprobs(params)
    try:
      if shape.lora is not None:
        base, revision = hub.parts(run.config.model.path)
        model.save_adapters(folder, shape, _adapters_of(params), base, revision)
      else:
        if self.is_untied:
          shape, params = _untied(shape, params)
        model.save(folder, shape, params)
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
  """Opens a file whose lock says that the run goes on, until it is closed."""
  file = open(owner, "xb", buffering=0)
  with contextlib.suppress(OSError):  # a file system without locks: nobody removes what is left
    fcntl.flock(file, fcntl.LOCK_EX)
  file.write(_OWNED)
  return file


def _remove_left(owner: Path) -> None:
  """Removes the folders of a run, unless the run goes on."""
  with contextlib.suppress(FileNotFoundError), open(owner, "rb") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # it goes on, or the file system has no locks
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
  """An array with noise of about a third of its size added to every number."""
  size = jnp.sqrt(jnp.mean(jnp.square(leaf.astype(jnp.float32))))
  noise = jax.random.normal(jax.random.key(number), leaf.shape)
  return (leaf + 0.3 * jnp.where(size > 0, size, 0.1) * noise).astype(leaf.dtype)
