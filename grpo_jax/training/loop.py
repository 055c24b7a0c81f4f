"""The loop: the steps of the warm start, then those of GRPO, counted together."""

from collections.abc import Callable, Iterator, Mapping
import contextlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax import config as config_lib
from grpo_jax import learner
from grpo_jax.algo import metrics as metrics_lib
from grpo_jax.algo.metrics import Metrics
from grpo_jax.config import Config
from grpo_jax.console.exit_codes import Stopped
from grpo_jax.console.stop import StopRequest, leaving_on_second_signal
from grpo_jax.console.terminal import Loading
from grpo_jax.data import loader
from grpo_jax.data.prompts import Prompts
from grpo_jax.learner.optimizer import learning_rate
from grpo_jax.programs.checks import check_batches
from grpo_jax.programs.run import Run
from grpo_jax.rollouts.collect import Collected, Collector
from grpo_jax.rollouts.rollout_metrics import most_disputed_first
from grpo_jax.settings import RunFailed
from grpo_jax.storage import starts
from grpo_jax.storage.bucket import folder
from grpo_jax.storage.bucket_files import run_files
from grpo_jax.storage.checkpoint import Checkpoints
from grpo_jax.storage.reading import as_begun
from grpo_jax.storage.workdir import open_run
from grpo_jax.timing import Clock, told_if_slow
from grpo_jax.training.callback import Callback, Callbacks, Step
from grpo_jax.training.reporter import Reporter, header_lines, last_step
from grpo_jax.training.state import RunState, StateStore
from grpo_jax.types import Batch, TrainState

Signals = Callable[[StopRequest], contextlib.AbstractContextManager[None]]


class StepResult(NamedTuple):
  """What a step returns.

  Attributes:
    state: The state after the step.
    metrics: A row of metrics.jsonl.
    rows: One object per completion, or None if completions are not logged at this step.
  """

  state: RunState
  metrics: dict[str, float]
  rows: list[dict[str, Any]] | None = None


class Ended(NamedTuple):
  """How a run ended.

  Attributes:
    state: The state after the last step that was taken.
    step: That step. Its metrics are empty if there was nothing left to do.
  """

  state: RunState
  step: Step


def run_steps(
  config: Config,
  workdir: str | Path,
  callback: Callback | None = None,
  signals: Signals = leaving_on_second_signal,
) -> Ended:
  """The whole job, or what is left of it.

  Args:
    config: The run.
    workdir: Its folder, which is created or resumed.
    callback: Called after each step. See `grpo_jax/training/callback.py`.
    signals: Decides what the signals of `grpo_jax/console/stop.py` do while the run takes steps.

  Returns:
    The state and the last step. It is earlier than the run's last step if the callback asked to
    stop.

  Raises:
    ConfigError: The config or the folder cannot be used. Nothing was run.
    RunFailed: The run cannot go on. What could be saved is saved.
    Stopped: The run was asked to stop, but not by the callback. Its state is saved, and the same
      call goes on.
  """
  config = as_begun(config, workdir)
  with contextlib.ExitStack() as stack:
    trainer = Trainer(config, folder(workdir), stack, signals)
    callbacks = trainer.callbacks(callback)
    state, step = trainer.restore_or_init()
    while step < trainer.last_step and not trainer.should_stop() and not callbacks.ask_to_stop:
      if step == trainer.first_grpo_step:
        state = trainer.store.begin_grpo(state)
      with trainer.saving_on_failure(state, step, f"step {step + 1}"):
        result = trainer.take_step(state, step)
      state, step = result.state, step + 1
      with trainer.saving_on_failure(state, step, f"evaluation after step {step}"):
        metrics = trainer.reporter.step(step, state.train.params, result.metrics, result.rows)
      with trainer.saving_on_failure(state, step, f"callback after step {step}"):
        callbacks(step, metrics)
      trainer.save_if_due(state, step)
    trainer.finish(state, step, was_asked_to=callbacks.ask_to_stop)
  return Ended(state, callbacks.latest or callbacks.step_of(step, {}))


class Trainer:
  """The parts of the loop, and what happens before and after it.

  Attributes:
    first_grpo_step, last_step: Where the phases of the run begin and end.
    store: The state of the run and its checkpoints.
    reporter: What is written and shown.
  """

  def __init__(self, config: Config, workdir: Path, stack: contextlib.ExitStack, signals: Signals):
    """Builds everything before it writes anything. `stack` closes what is opened.

    Raises:
      ConfigError: For a config or a folder that cannot be used.
    """
    self._config, self._workdir = config, workdir
    self.first_grpo_step, self.last_step = config.warm_start.steps, last_step(config)
    self._run = Run(config, Loading())
    stack.callback(self._run.close)
    check_batches(config, self._run.hosts)
    collector = Collector(self._run)
    stop_request = StopRequest()
    self.reporter = Reporter(self._run, workdir, stop_request.ask)
    self._prompts = collector.prompts
    hosts = self._run.hosts
    # From here on, the folder belongs to this run and this config.
    self._files = run_files(workdir, self.reporter.warn, stop_request.ask)
    hosts.on_first(lambda: stack.enter_context(self._files.held()))
    hosts.on_first(lambda: open_run(workdir, config_lib.to_dict(config), config_lib.completed))
    hosts.on_first(lambda: starts.add(workdir, starts.here()))
    hosts.on_first(self._files.download)
    layers_of = self._run.parameters.layers_of
    self._checkpoints = Checkpoints(
      workdir / "checkpoints", config.checkpoint.keep, self.reporter.warn, layers_of
    )
    host_state = collector.initial_host_state()
    self.store = StateStore(self._run, workdir, self._checkpoints, host_state)
    self._warm_step = WarmStep(self._run, collector.prompts)
    self._grpo_step = GrpoStep(self._run, collector, self.store)
    self._phases_seen: set[bool] = set()  # the first step of a phase compiles
    self._skipped = SkippedUpdates(config.learner.max_skipped_updates)
    # They close in the reverse order: signals are handled until the last save is written.
    self._asked_to_stop = stop_request
    stack.enter_context(signals(stop_request))
    stack.callback(self.reporter.close)
    stack.callback(self._checkpoints.close)

  def callbacks(self, callback: Callback | None) -> Callbacks:
    """What calls the user's callback after each step."""
    return Callbacks(callback, self._workdir, self.last_step, self._run.hosts)

  def restore_or_init(self) -> tuple[RunState, int]:
    """The state and the number of steps so far: of the newest whole checkpoint, or of a new run."""
    state, step, restored = self.store.restore_or_init()
    self.reporter.open(step if restored else -1)
    splits = [("training", self._prompts)]
    if self.reporter.evaluator:
      splits.append(("test", self.reporter.evaluator.prompts))
    devices = self.store.saved_devices
    self.reporter.header(header_lines(self._run, splits, step, self._workdir, devices))
    with self.saving_on_failure(state, step, f"evaluation after step {step}"):
      with told_if_slow("compiling and evaluating"):
        self.reporter.start(step, state.train.params)
    return state, step

  def take_step(self, state: RunState, step: int) -> StepResult:
    """A step of the phase that `step` belongs to."""
    in_warm_start = step < self.first_grpo_step
    compiles = in_warm_start not in self._phases_seen
    self._phases_seen.add(in_warm_start)
    doing = f"compiling and taking step {step + 1}"
    with told_if_slow(doing) if compiles else contextlib.nullcontext():
      result = (self._warm_step if in_warm_start else self._grpo_step)(state, step)
    updates = 1 if in_warm_start else self._config.algo.updates_per_step
    self._skipped.count(result.metrics, updates)
    return result

  def should_stop(self) -> bool:
    """True on every process if any process was asked to stop."""
    return self._run.hosts.any_process(self._asked_to_stop())

  def save_if_due(self, state: RunState, step: int) -> None:
    """Saves a checkpoint every checkpoint.every steps, after the rows of metrics up to `step`.

    While updates are skipped there is nothing new to save, and a save would delete an older
    checkpoint, from before.

    Raises:
      RunFailed: Too many updates in a row were skipped.
    """
    if self._skipped.are_too_many:
      self._checkpoints.wait()
      raise self._skipped.failure(max(self._checkpoints.steps(), default=None))
    every = self._config.checkpoint.every
    if every and step % every == 0 and not self._skipped.in_a_row:
      self._run.hosts.on_first(self._files.upload)  # the rows of a checkpoint come before it
      self.store.save(step, state)
    elif self._run.hosts.is_first:
      self._files.upload_if_due()

  @contextlib.contextmanager
  def saving_on_failure(self, state: RunState, step: int, doing: str) -> Iterator[None]:
    """Saves the state of `step` if what is done next fails. `doing` says what that is."""
    try:
      yield
    except RunFailed as error:  # raised on all processes together
      self._save(state, step)
      saved = f"step {step} is saved" if step else "no step was finished"
      raise RunFailed(f"{doing}: {error}; {saved}, the same command goes on") from error
    except (MemoryError, jax.errors.JaxRuntimeError, KeyboardInterrupt):
      # A save is made by all processes together, and the others may not have failed. An update
      # takes the arrays of the state before it, which then cannot be saved.
      if jax.process_count() == 1 and not _is_deleted(state):
        self._save(state, step)
      raise

  def finish(self, state: RunState, step: int, was_asked_to: bool) -> None:
    """Saves what is not saved yet, and waits until it is written.

    Args:
      state: The state of the run.
      step: The number of steps so far.
      was_asked_to: Whether the callback asked to stop.

    Raises:
      Stopped: The last step is not reached, and the callback did not ask for it.
    """
    is_unfinished = step < self.last_step
    # A resumed run takes the skipped steps again.
    if not (is_unfinished and self._skipped.in_a_row):
      self._save(state, step)
    self._checkpoints.wait()
    self.reporter.finish(step)
    if is_unfinished and not was_asked_to:
      raise Stopped(
        f"at step {step} of {self.last_step}, which is saved: the same call goes on from there"
      )

  def _save(self, state: RunState, step: int) -> None:
    if step:
      self._run.hosts.on_first(self._files.upload)
      self.store.save(step, state)
      self._checkpoints.wait()


def _is_deleted(state: RunState) -> bool:
  arrays = jax.tree.leaves(state.train.params)
  return any(isinstance(x, jax.Array) and x.is_deleted() for x in arrays)


_merge_updates = jax.jit(metrics_lib.merge_updates)


class WarmStep:
  """A supervised update on worked solutions."""

  def __init__(self, run: Run, prompts: Prompts):
    self._run = run
    self._prompts = prompts

  def __call__(self, state: RunState, step: int) -> StepResult:
    run, config, clock = self._run, self._run.config, Clock()
    size = config.warm_start.batch
    indices = loader.step_indices(config.seed, step, size, len(self._prompts))
    examples = loader.supervised_batch(
      self._prompts, indices, run.tokenizer, config.sampling.max_tokens, run.hosts
    )
    batch = Batch(
      prompts_PS=examples.prompts.prompts_PS,
      prompt_lengths_P=examples.prompts.prompt_lengths_P,
      completions_PGT=examples.completions_PT[:, None],
      mask_PGT=examples.mask_PT[:, None],
      temperature_P=np.ones(size, np.float32),
      slots=learner.slots_of_batch(
        examples.mask_PT.sum(1, keepdims=True).astype(int),
        examples.mask_PT.shape[1],
        run.parameters.model.platform,
      ),
    )
    update = run.programs.warm_update
    train, update_metrics = update(state.train, run.parameters.base, None, run.hosts.put(batch))
    reduced = metrics_lib.reduced(update_metrics)
    metrics = {f"warm_start/{name}": value for name, value in reduced.items()}
    metrics |= {
      "warm_start/tokens": float(examples.mask_PT.sum()),
      "warm_start/dropped": examples.dropped,
      "time/step": clock.total(),
    }
    return StepResult(state.replace(train=train), metrics)


class GrpoStep:
  """Sample, score, compare within the group, update."""

  def __init__(self, run: Run, collector: Collector, store: StateStore):
    self._run = run
    self._collect = collector
    self._store = store
    self._algo = run.config.algo
    updates = run.config.steps * self._algo.updates_per_step
    self._learning_rate = learning_rate(run.config.optimizer, updates)

  def __call__(self, state: RunState, step: int) -> StepResult:
    """`step` counts the warm start's steps, too."""
    run, algo, clock = self._run, self._algo, Clock()
    index = step - run.config.warm_start.steps
    # Not kept in a variable: the converted copy must be freed before the update.
    collected = self._collect(
      run.parameters.for_sampling(state.train.params), index, state.host, clock
    )
    batch, advantage_metrics = self._prepare(state, collected)
    clock.lap("reference")
    train, update_metrics = self._update(state, batch)
    state = state.replace(train=train, host=collected.host)
    if algo.ref_sync_steps and (index + 1) % algo.ref_sync_steps == 0:
      state = self._store.sync_reference(state)
    clock.lap("update")
    metrics = collected.metrics | advantage_metrics | update_metrics
    metrics |= self._step_metrics(index, metrics, clock)
    return StepResult(state, metrics, self._rows(collected, batch))

  def _prepare(self, state: RunState, collected: Collected) -> tuple[Batch, dict[str, float]]:
    """Adds the reference's log-probs and the advantages to the batch. Also returns metrics."""
    batch = collected.batch
    if self._algo.uses_reference and not self._algo.needs_full_kl:
      reference = self._store.reference_params(state)
      logprobs_PGT = self._run.programs.logprobs(reference, batch)
      batch = batch.replace(ref_logprobs_PGT=logprobs_PGT)
    with_advantages = self._run.programs.with_advantages
    batch, metrics = with_advantages(batch, collected.rewards, state.train.coefs.kl)
    return jax.block_until_ready(batch), jax.device_get(metrics)

  def _update(self, state: RunState, batch: Batch) -> tuple[TrainState, dict[str, float]]:
    """Passes algo.updates_per_batch times over the minibatches."""
    run, algo, train = self._run, self._algo, state.train
    base, reference = run.parameters.base, self._store.reference_params(state)
    if not algo.old_is_policy and algo.old_logprobs == "recomputed":
      logprobs_PGT = run.programs.logprobs(run.parameters.policy(train.params), batch)
      batch = batch.replace(old_logprobs_PGT=logprobs_PGT)
    parts = run.programs.minibatches(batch) if algo.minibatches > 1 else [batch]
    measured: Metrics | None = None
    for _ in range(algo.updates_per_batch):
      for part in parts:
        train, metrics = run.programs.update(train, base, reference, part)
        measured = metrics if measured is None else _merge_updates(measured, metrics)
    reduced = metrics_lib.reduced(measured)
    if algo.kl_target:
      reduced["kl_coef"] = float(train.coefs.kl)  # the coefficient of the next update
    if algo.entropy_target:
      reduced["entropy_coef"] = float(train.coefs.entropy)
    return train, reduced

  def _step_metrics(self, index: int, metrics: dict[str, float], clock: Clock) -> dict[str, float]:
    last_update = (index + 1) * self._algo.updates_per_step - 1
    seconds = {"step": clock.total()} | clock.laps
    out = {f"time/{name}": value for name, value in seconds.items()}
    out["learning_rate"] = float(self._learning_rate(last_update))
    out["perf/tokens_per_second"] = metrics["completions/tokens"] / seconds["step"]
    return out

  def _rows(self, collected: Collected, batch: Batch) -> list[dict[str, Any]] | None:
    """Completions with the advantage of their first token. None if the step logs no completions."""
    if collected.rows is None:
      return None
    advantages_PG = self._run.hosts.fetch(batch.advantages_PGT[..., 0])
    if not collected.rows:
      return None
    rows = [
      row | {"advantage": float(advantage)}
      for row, advantage in zip(collected.rows, advantages_PG.ravel(), strict=True)
    ]
    return most_disputed_first(rows, advantages_PG.shape[1])


class SkippedUpdates:
  """Counts the updates in a row that were skipped because their gradient was not finite.

  After such a row the policy does not recover: its parameters stay, so the next gradient is no
  better.

  Attributes:
    in_a_row: How many there are up to now.
  """

  def __init__(self, limit: int) -> None:
    """`limit` is learner.max_skipped_updates."""
    self._limit = limit
    self.in_a_row = 0

  def count(self, metrics: Mapping[str, float], updates: int) -> None:
    """Counts those of a step.

    Args:
      metrics: The step's metrics.
      updates: How many updates the step made.
    """
    skipped = metrics.get("skipped_updates", metrics.get("warm_start/skipped_updates", 0))
    self.in_a_row = self.in_a_row + updates if skipped >= updates else 0

  @property
  def are_too_many(self) -> bool:
    """Whether the limit is reached."""
    return 0 < self._limit <= self.in_a_row

  def failure(self, newest_checkpoint: int | None) -> RunFailed:
    """The error that ends the run."""
    saved = "no checkpoint is saved"
    if newest_checkpoint is not None:
      saved = f"the newest checkpoint, of step {newest_checkpoint}, is from before"
    return RunFailed(
      f"the last {self.in_a_row} updates were skipped because their gradient was not finite, so"
      f" nothing is learned any more (learner.max_skipped_updates); {saved}. Lower"
      " optimizer.learning_rate in a new run, or look for what is not finite"
    )
