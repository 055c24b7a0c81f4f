"""Trains a policy with GRPO.

python -m grpo_jax.train --config=configs/arithmetic.py --workdir=DIR [--config.section.key=value]

Run the same command again to resume from the newest checkpoint.
"""

from collections.abc import Iterator
import contextlib
from pathlib import Path

from absl import flags
import jax
from ml_collections import config_flags

from grpo_jax import config as config_lib
from grpo_jax.config import Config
from grpo_jax.parallel.processes import initialize_distributed
from grpo_jax.patience import told_if_slow
from grpo_jax.run import cli, lock
from grpo_jax.run.build import Run
from grpo_jax.run.checkpoint import Checkpoints
from grpo_jax.run.checks import check_batches
from grpo_jax.run.collect import Collector
from grpo_jax.run.ends import Stopped
from grpo_jax.run.reporter import Reporter, header_lines, last_step
from grpo_jax.run.skipped_updates import SkippedUpdates
from grpo_jax.run.state import RunState, StateStore
from grpo_jax.run.steps import GrpoStep, StepResult, WarmStep
from grpo_jax.run.stop import StopRequest, stop_signals
from grpo_jax.run.terminal import Loading
from grpo_jax.run.workdir import open_run
from grpo_jax.settings import ConfigError, RunFailed


def train(config: Config, workdir: str | Path) -> RunState:
  """The whole job: the steps of the warm start, then those of GRPO, counted together.

  Args:
    config: The run.
    workdir: Its folder, which is created or resumed.

  Returns:
    The state after the last step.

  Raises:
    ConfigError: The config or the folder cannot be used. Nothing was run.
    RunFailed: The run cannot go on. What could be saved is saved.
    Stopped: The run was asked to stop. Its state is saved, and the same call goes on.
  """
  with contextlib.ExitStack() as stack:
    trainer = Trainer(config, Path(workdir).expanduser(), stack)
    state, step = trainer.restore_or_init()
    while step < trainer.last_step and not trainer.should_stop():
      if step == trainer.first_grpo_step:
        state = trainer.store.begin_grpo(state)
      with trainer.saving_on_failure(state, step, f"step {step + 1}"):
        result = trainer.take_step(state, step)
      state, step = result.state, step + 1
      with trainer.saving_on_failure(state, step, f"evaluation after step {step}"):
        trainer.reporter.step(step, state.train.params, result.metrics, result.rows)
      trainer.save_if_due(state, step)
    trainer.finish(state, step)
  return state


class Trainer:
  """The parts of the loop, and what happens before and after it.

  Attributes:
    first_grpo_step, last_step: Where the phases of the run begin and end.
    store: The state of the run and its checkpoints.
    reporter: What is written and shown.
  """

  def __init__(self, config: Config, workdir: Path, stack: contextlib.ExitStack):
    """Builds everything before it writes anything. `stack` closes what is opened.

    Raises:
      ConfigError: For a config or a folder that cannot be used.
    """
    self._config, self._workdir = config, workdir
    self.first_grpo_step, self.last_step = config.warm_start.steps, last_step(config)
    self._run = Run(config, Loading())
    check_batches(config, self._run.hosts)
    collector = Collector(self._run)
    stop_request = StopRequest()
    self.reporter = Reporter(self._run, workdir, stop_request.ask)
    self._prompts = collector.prompts
    hosts = self._run.hosts
    # From here on, the folder belongs to this run and this config.
    hosts.on_first(lambda: stack.enter_context(lock.held(workdir, self.reporter.warn)))
    hosts.on_first(lambda: open_run(workdir, config_lib.to_dict(config), config_lib.completed))
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
    stack.enter_context(stop_signals(stop_request))
    stack.callback(self.reporter.close)
    stack.callback(self._checkpoints.close)

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
      self.store.save(step, state)

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

  def finish(self, state: RunState, step: int) -> None:
    """Saves what is not saved yet, and waits until it is written.

    Raises:
      Stopped: The last step is not reached.
    """
    is_unfinished = step < self.last_step
    # A resumed run takes the skipped steps again.
    if not (is_unfinished and self._skipped.in_a_row):
      self._save(state, step)
    self._checkpoints.wait()
    self.reporter.finish(step)
    if is_unfinished:
      raise Stopped(f"at step {step} of {self.last_step}")

  def _save(self, state: RunState, step: int) -> None:
    if step:
      self.store.save(step, state)
      self._checkpoints.wait()


def _is_deleted(state: RunState) -> bool:
  arrays = jax.tree.leaves(state.train.params)
  return any(isinstance(x, jax.Array) and x.is_deleted() for x in arrays)


def main(argv: list[str]) -> None:
  del argv
  config = cli.read_config()
  if not flags.FLAGS.workdir:
    raise ConfigError("flag --workdir is missing: name a folder for metrics and checkpoints")
  workdir = cli.folder_of_flag("workdir", flags.FLAGS.workdir)
  initialize_distributed()
  train(config, workdir)


if __name__ == "__main__":
  config_flags.DEFINE_config_file("config", None, "a config, such as configs/arithmetic.py")
  flags.DEFINE_string(
    "workdir", None, "the run's folder: created, or resumed if it has a checkpoint"
  )
  cli.run(main)
