"""Writes folders with the weights of a policy, one for each version, for the servers to read.

If all weights are trained, a folder is a whole model. With LoRA, it holds only the adapters.

Folders are called weights-TOKEN-NUMBER, with a random token for each start of a run. The run locks
the file weights-TOKEN.owner beside them until it ends. So a later run can tell which folders a
killed run left behind, and removes no others.
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
  """The weights of a policy in a folder, which is removed when this object is garbage-collected.

  Attributes:
    name: The name of the folder, and of the adapters at the servers.
    folder: The path of the folder.
    logprobs_BN: The probe's log-probs under these weights, as this run computes them.
  """

  name: str
  folder: Path
  logprobs_BN: np.ndarray


class Folders:
  """Writes the weights of a run.

  Attributes:
    is_untied: Whether to write a separate output head although the model ties it to the embedding.
  """

  def __init__(self, run: Run, folder: Path, probe: Probe):
    """Creates and locks this run's owner file, and removes the folders of killed runs.

    A run that is alive holds a lock on its owner file. So an unlocked file is left from a kill.

    Args:
      run: The run.
      folder: The parent of the folders of weights.
      probe: The rows whose log-probs prove that a server has loaded the weights.

    Raises:
      ConfigError: The folder cannot be written.
    """
    self._run, self._folder, self._probe = run, folder.expanduser().absolute(), probe
    self.is_untied = False
    self._prefix = f"weights-{secrets.token_hex(8)}"
    self._count = 0
    self._removals = list[weakref.finalize]()  # each removes the folder of a live `Written`
    # The arrays that were written last, and the result, which is returned again for the same
    # arrays. The references are weak, so that neither stays in memory.
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
    """Writes weights, or returns the last result again if `params` are the same array objects.

    Args:
      params: All parameters, as `Parameters.for_sampling` returns them.

    Raises:
      RunFailed: The folder cannot be written.
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
    """Writes `params` with noise in every trained array, for the rehearsal of `proof.py`."""
    leaves = flatten_dict(params, sep="/")
    has_adapters = self._run.parameters.model.lora is not None
    for number, name in enumerate(sorted(leaves)):
      # With LoRA only the adapters are trained, and else all arrays, of which none is an adapter.
      if has_adapters == name.endswith(_ADAPTERS):
        leaves[name] = _shaken(leaves[name], number)
    return self._write(unflatten_dict(leaves, sep="/"))

  def close(self) -> None:
    """Removes this run's folders and its owner file."""
    for removal in self._removals:
      removal()
    with contextlib.suppress(OSError):
      Path(self._owner.name).unlink(missing_ok=True)
    self._owner.close()

  def _write(self, params: Any) -> Written:
    """Writes weights into a new folder, which is removed when nothing refers to the result.

    With LoRA, writes only the adapters. Also scores the probe, for the comparison with servers.
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
    self._removals = [other for other in self._removals if other.alive] + [removal]
    return written


def _owned(owner: Path) -> BinaryIO:
  """Creates and locks an owner file. The lock is held until the returned file is closed."""
  file = open(owner, "xb", buffering=0)
  with contextlib.suppress(OSError):  # without locks, no run ever removes another run's folders
    fcntl.flock(file, fcntl.LOCK_EX)
  file.write(_OWNED)
  return file


def _remove_left(owner: Path) -> None:
  """Removes the folders and the owner file of another run, unless that run is still alive."""
  with contextlib.suppress(FileNotFoundError), open(owner, "rb") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # the run is alive, or the file system has no locks
      return
    if file.read() != _OWNED:  # another program's file, or a starting run has yet to write it
      return
    # Also matches folders that the run had not finished writing: .NAME.partial-NUMBER.
    name = re.compile(rf"\.?{owner.stem}-[0-9]+(\.partial-[0-9]+)?")
    for left in [*owner.parent.iterdir()]:
      if name.fullmatch(left.name):
        shutil.rmtree(left)
    owner.unlink()


def _adapters_of(params: Any) -> Any:
  """Returns the parameters of the adapters only."""
  leaves = flatten_dict(params, sep="/")
  adapters = {name: leaf for name, leaf in leaves.items() if name.endswith(_ADAPTERS)}
  return unflatten_dict(adapters, sep="/")


def _untied(shape: model.ModelConfig, params: Any) -> tuple[model.ModelConfig, Any]:
  """Returns the configuration and parameters of the same model with a separate output head."""
  if not shape.tie_embeddings:
    return shape, params
  untied = dataclasses.replace(shape, tie_embeddings=False)
  shapes = flatten_dict(jax.eval_shape(lambda key: model.init(key, untied), jax.random.key(0)))
  leaves = flatten_dict(params)
  (head,) = shapes.keys() - leaves.keys()
  # The head is the transposed embedding, which has the reversed shape.
  embedding = next(leaf for name, leaf in leaves.items() if leaf.shape[::-1] == shapes[head].shape)
  return untied, unflatten_dict(leaves | {head: embedding.T})


@jax.jit
def _shaken(leaf: jax.Array, number: int) -> jax.Array:
  """Adds noise, seeded by `number`, that is about a tenth as large as the array's RMS value.

  With a third, bfloat16 rounds the log-probs of SmolLM2-135M, which has 30 layers, by 0.42.
  """
  size = jnp.sqrt(jnp.mean(jnp.square(leaf.astype(jnp.float32))))
  noise = jax.random.normal(jax.random.key(number), leaf.shape)
  # Arrays of zeros, such as those of new adapters, must change, too.
  return (leaf + jnp.where(size > 0, 0.1 * size, 0.03) * noise).astype(leaf.dtype)
