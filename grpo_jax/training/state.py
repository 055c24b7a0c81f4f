"""The state of a run: its start, the contents of a checkpoint, and the reference policy."""

import functools
from pathlib import Path
from typing import Any

from flax import struct
import numpy as np

from grpo_jax.asynchronous.ahead import Ahead
from grpo_jax.batches.collect import HostState
from grpo_jax.run.run import Run
from grpo_jax.storage.checkpoint import Checkpoints, restore_tree, save_tree
from grpo_jax.types import TrainState

_DEVICES = "num_devices"  # an entry of the group `host` in checkpoints, but not of the host state


class RunState(struct.PyTreeNode):
  """Everything that changes during a run.

  Attributes:
    train: The parameters and the optimizer's state, which updates change.
    reference: The parameters of the reference policy in model.reference_dtype, or with LoRA its
      adapters. None if no KL term needs it, during the warm start if the reference does not move
      later, and with LoRA if the reference is the base model without adapters.
    host: numpy arrays on the host, such as counters.
  """

  train: TrainState
  reference: Any
  host: HostState


class StateStore:
  """Makes, saves and restores a run's state.

  A reference that moves is part of every checkpoint. A fixed reference is written once, after the
  warm start, to the folder `reference`. Without a warm start, it is made again from the config.

  Attributes:
    saved_devices: The number of devices on which the restored checkpoint was saved, or None if it
      is not known.
  """

  def __init__(
    self,
    run: Run,
    workdir: Path,
    checkpoints: Checkpoints,
    host: HostState,
    ahead: Ahead | None = None,
  ):
    """`host` is the host state of a new run. `ahead` draws batches ahead, which are saved, too."""
    self._run, self._ahead = run, ahead
    self.saved_devices: int | None = None
    self._reference_path = workdir / "reference"
    self._checkpoints = checkpoints
    self._initial_host = host
    algo = run.config.algo
    self._reference_moves = algo.uses_reference and bool(algo.ref_sync_steps)
    self._base_is_reference = run.parameters.model.lora is not None and not algo.ref_sync_steps
    self._has_warm_start = run.config.warm_start.steps > 0

  def restore_or_init(self) -> tuple[RunState, int, bool]:
    """Returns (state, number of steps so far, whether the state comes from a checkpoint)."""
    _ = self._run.parameters.base  # loaded now, so that it does not count as a step's time
    for store in (self._checkpoints, Checkpoints(self._reference_path, keep=1)):
      store.remove_unfinished()
    restored = self._checkpoints.restore_latest(self._abstract(), optional=("host",))
    if restored is None:
      return self._init(), 0, False
    step, tree = restored
    names = ("step", "params", "opt_state", "coefs")
    train = TrainState(**{name: tree[name] for name in names})
    reference = tree.get("reference")
    # `begin_grpo`, which the loop calls after the last step of the warm start, makes the reference.
    in_warm_start = self._has_warm_start and step <= self._run.config.warm_start.steps
    if reference is None and not in_warm_start:
      reference = self._frozen_reference()
    saved_host = dict(tree["host"] or {})
    if _DEVICES in saved_host:
      self.saved_devices = int(saved_host.pop(_DEVICES))
    host = self._initial_host | saved_host  # older checkpoints lack some entries
    return RunState(train, reference, host), step, True

  def begin_grpo(self, state: RunState) -> RunState:
    """Ends the warm start, if any: resets the optimizer and makes the policy the reference."""
    if not self._has_warm_start:
      return state
    reference = self._first_reference(state.train.params)
    if reference is not None and not self._reference_moves:
      # Two saves at once could deadlock, because processes may start them in different orders.
      self._checkpoints.wait()
      save_tree(self._reference_path, reference)
    train = self._run.programs.init_state(state.train.params).replace(step=state.train.step)
    return state.replace(train=train, reference=reference)

  def save(self, step: int, state: RunState) -> None:
    """Starts to write a checkpoint, unless the step is saved already."""
    if self._checkpoints.has(step):  # checked here, too, so that `ahead` need not prepare a save
      return
    index = step - self._run.config.warm_start.steps
    if self._ahead is not None and index >= 0:
      for_sampling = functools.partial(self._run.parameters.for_sampling, state.train.params)
      state = state.replace(host=self._ahead.saved(index, state.host, for_sampling))
    self._checkpoints.save(step, self._tree(state))

  def reference_params(self, state: RunState) -> Any:
    """All parameters of the reference policy, or None if no KL term needs them."""
    if not self._run.config.algo.uses_reference:
      return None
    if state.reference is None:
      return self._run.parameters.base
    return self._run.parameters.policy(state.reference)

  def sync_reference(self, state: RunState) -> RunState:
    """Moves the reference towards the policy."""
    moved = self._run.programs.sync_reference(state.reference, state.train.params)
    return state.replace(reference=moved)

  def _init(self) -> RunState:
    """The state of a new run."""
    params = self._run.initial_params()
    # A fixed reference is the policy after the warm start. One that moves is in every checkpoint.
    is_made_later = self._has_warm_start and not self._reference_moves
    reference = None if is_made_later else self._first_reference(params)
    return RunState(self._run.programs.init_state(params), reference, self._initial_host)

  def _first_reference(self, params: Any) -> Any:
    """A copy of the policy, or None if the reference is unused or is the base model."""
    if not self._run.config.algo.uses_reference or self._base_is_reference:
      return None
    return self._run.parameters.reference(params)

  def _frozen_reference(self) -> Any:
    """The reference after the warm start if checkpoints do not hold it, or None (`RunState`)."""
    algo = self._run.config.algo
    if not algo.uses_reference or self._base_is_reference:
      return None
    if not self._has_warm_start:
      return self._run.initial_reference()
    parameters = self._run.parameters
    return restore_tree(self._reference_path, parameters.abstract_reference, parameters.layers_of)

  def _abstract(self) -> dict[str, Any]:
    """The shapes, dtypes and shardings of the arrays of a checkpoint."""
    abstract = self._run.programs.abstract_state
    reference = self._run.parameters.abstract_reference if self._reference_moves else None
    return self._tree(RunState(abstract, reference, self._initial_host))

  def _tree(self, state: RunState) -> dict[str, Any]:
    """The arrays of a checkpoint. The names must stay the same in all versions."""
    train = state.train
    tree = {
      "step": train.step,
      "params": train.params,
      "opt_state": train.opt_state,
      "coefs": train.coefs,
      "host": state.host | {_DEVICES: np.int64(self._run.mesh.size)},
    }
    return tree | {"reference": state.reference} if self._reference_moves else tree
