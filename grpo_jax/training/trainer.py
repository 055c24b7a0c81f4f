"""Does the work around the training loop: sets up, checks, saves and finishes a run."""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import functools
from pathlib import Path
import sys

import jax

from grpo_jax import config as config_lib
from grpo_jax.asynchronous.access import Access, learner_access
from grpo_jax.asynchronous.ahead import Ahead, Beside, ahead_in_turn, has_drawn_ahead
from grpo_jax.asynchronous.contents import limits_of
from grpo_jax.asynchronous.learner import RemoteSampler
from grpo_jax.asynchronous.remote_groups import RemoteGroups
from grpo_jax.asynchronous.schedule import WeightSchedule
from grpo_jax.asynchronous.terms import terms_of
from grpo_jax.batches.collect import Collector, unscored_steps
from grpo_jax.compiling import Compiler
from grpo_jax.config import Config
from grpo_jax.console.exit_codes import Stopped
from grpo_jax.console.stop import StopRequest
from grpo_jax.engine.connect import ExternalEngine
from grpo_jax.progress import doing
from grpo_jax.rollouts.complete import Remote
from grpo_jax.run.device_checks import check_batches
from grpo_jax.run.parameters import has_quantised_base
from grpo_jax.run.run import Run
from grpo_jax.run.stages import compile_ahead
from grpo_jax.scoring.scorers import Scorers
from grpo_jax.settings import ConfigError, ConfigStopsRun, RunFailed, address_of
from grpo_jax.storage import starts
from grpo_jax.storage.bucket_files import local_files, run_files
from grpo_jax.storage.checkpoint import Checkpoints
from grpo_jax.storage.workdir import open_run
from grpo_jax.training import trackers
from grpo_jax.training.callback import Callback, Callbacks
from grpo_jax.training.profiler import Profiler
from grpo_jax.training.reporter import Reporter, header_lines, last_step
from grpo_jax.training.state import RunState, StateStore

Signals = Callable[[StopRequest], contextlib.AbstractContextManager[None]]
# Nats per token. In float32, the log-probs of sampler and learner differ by about a millionth.
_LARGEST_GAP = 1e-3


class Trainer:
  """Sets a run up before the loop, reports and saves after each step, and finishes it.

  Attributes:
    run: The mesh, parameters, tokenizer and compiled functions of the run.
    collector: Collects the batch of a GRPO step.
    ahead: Draws batches for later steps. None if batches are not drawn ahead.
    store: Makes, saves and restores the state of the run.
    reporter: Writes and shows the steps.
    first_grpo_step: The number of steps of the warm start.
    last_step: The number of steps of the whole run, including the warm start.
  """

  def __init__(self, config: Config, workdir: Path, stack: contextlib.ExitStack, signals: Signals):
    """Checks the config and builds the run's objects before it writes to the folder.

    Args:
      config: The config of the run.
      workdir: The run's folder, which is locked from here on.
      stack: Closes all objects when it exits, in reverse order.
      signals: signals(stop_request) -> a context in which signals ask the run to stop.

    Raises:
      ConfigError: The config or the folder cannot be used.
    """
    self._workdir = workdir
    self.first_grpo_step, self.last_step = config.warm_start.steps, last_step(config)
    access = _access(config)
    self.run = Run(config)
    self._config = self.run.config
    scorers = Scorers(self.run)
    stack.callback(scorers.close)
    hosts = self.run.hosts
    hosts.on_first(lambda: trackers.check_installed(config.log))
    check_batches(config, hosts)
    self._scorers, stop_request = scorers, StopRequest()
    self._remote = self._listen(access, stop_request, stack)
    self._engine = ExternalEngine(self.run, stop_request) if config.rollout.engine else None
    remote: Remote | None = None
    if self._remote is not None:
      remote = functools.partial(RemoteGroups, self._remote)
    elif self._engine is not None:
      remote = self._engine.groups
    self.collector = Collector(self.run, scorers, remote)
    eval_remote = remote if config.eval.engine else None
    self.reporter = Reporter(self.run, scorers, workdir, stop_request.ask, eval_remote)
    # From here on, this run holds the folder's lock, and the folder stores its config.
    self._files = run_files(workdir, self.reporter.warn, stop_request.ask)
    hosts.on_first(lambda: stack.enter_context(self._files.held()))
    hosts.on_first(lambda: open_run(workdir, config_lib.to_dict(config), config_lib.completed))
    hosts.on_first(lambda: starts.add(workdir, starts.here()))
    hosts.on_first(self._files.download)
    layers_of = self.run.parameters.layers_of
    self._checkpoints = Checkpoints(
      workdir / "checkpoints", config.checkpoint.keep, self.reporter.warn, layers_of
    )
    if self._engine is not None:
      self._engine.open(local_files(workdir))
      stack.callback(self._engine.close)
    host_state = self.collector.initial_host_state()
    self.ahead = self._draws_ahead(stack)
    if self.ahead is not None:
      self.reporter.devices = self.ahead.devices
    self.store = StateStore(self.run, workdir, self._checkpoints, host_state, self.ahead)
    self._phases_seen: set[bool] = set()  # True: the warm start; the first step of each compiles
    self._skipped = SkippedUpdates()
    # The stack closes in reverse order, so signals are handled until the last save is written.
    self._asked_to_stop = stop_request
    stack.enter_context(signals(stop_request))
    # A run that was asked to stop has not failed.
    stack.push(
      lambda kind, error, trace: self.reporter.close(
        has_failed=kind is not None and not issubclass(kind, Stopped)
      )
    )
    traced = config.log.profile if hosts.is_first else ()
    self._profiler = Profiler(traced, local_files(workdir) / "profile", self.reporter.say)
    stack.callback(self._profiler.close)
    self.reporter.start_terminal()
    self._compiler = Compiler()
    stack.callback(self._compiler.close)
    stack.callback(self._checkpoints.close)

  def _listen(
    self, access: Access | None, should_stop: Callable[[], bool], stack: contextlib.ExitStack
  ) -> RemoteSampler | None:
    """Opens the port for sampler processes, or returns None without `access`. `stack` closes it."""
    if access is None:
      return None
    rollout = self._config.rollout
    address = address_of(rollout.listen, "config key rollout.listen")
    terms, limits = terms_of(self.run), limits_of(self.run)
    remote = RemoteSampler(address, terms, limits, rollout.samplers, should_stop, access)
    stack.callback(remote.close)
    return remote

  def _draws_ahead(self, stack: contextlib.ExitStack) -> Ahead | None:
    """Makes the object that draws batches for later steps, or returns None if none are drawn."""
    config, rollout = self._config, self._config.rollout
    if not rollout.max_staleness:
      return None
    if config.samples_in_turn:
      return ahead_in_turn(self.collector, config)
    schedule = None  # with fixed weights, a batch's number says which weights draw it
    if rollout.weights != "fixed":
      in_flight, replay = rollout.weights == "in_flight", rollout.replay
      if replay and rollout.engine:  # `replay` names the file of drawn rows, beside the schedule
        replay = str(Path(replay).with_name("schedule.jsonl"))
      schedule = WeightSchedule(local_files(self._workdir), replay, in_flight)
      stack.callback(schedule.close)
    ahead = Beside(self.collector, config, schedule, self._remote or self._engine)
    stack.callback(ahead.close)
    # The thread of `ahead` may be waiting for the engine, the mailbox or sampler processes. As the
    # stack closes in reverse order, these close first, and the thread can end.
    if self._engine is not None:
      stack.callback(self._engine.close)
    stack.callback(self.run.hosts.sampler_mailbox.close)
    if self._remote is not None:
      stack.callback(self._remote.close)
    return ahead

  def callbacks(self, callback: Callback | None) -> Callbacks:
    """The object that calls the user's callback after each step."""
    return Callbacks(callback, self._workdir, self.last_step, self.run.hosts)

  def restore_or_init(self) -> tuple[RunState, int]:
    """Restores the newest checkpoint that is not damaged, or makes the state of a new run.

    Also starts compiling, opens metrics.jsonl, shows the header, and evaluates if an evaluation of
    this step is due and missing in metrics.jsonl.

    Returns:
      The state, and the number of steps so far.
    """
    with doing("preparing the state"):
      state, step, restored = self.store.restore_or_init()
    if step < self.last_step:
      compile_ahead(self.run, self._compiler)
    no_row = -1  # without a checkpoint, metrics.jsonl keeps no rows of an earlier attempt
    self.reporter.open(step if restored else no_row)
    splits = [("training", self.collector.prompts)]
    if self.reporter.evaluator:
      parts = self.reporter.evaluator.parts
      splits += [(part.name or "test", part.prompts) for part in parts]  # "" is the test split
    devices = self.store.saved_devices
    remarks = (*self.run.remarks, *self._scorers.remarks, *self._remarks_on_ahead(state, step))
    remarks += self._profiler.remarks(step)
    lines = header_lines(self.run, splits, remarks, step, self._workdir, devices)
    self.reporter.header(lines)
    with self.saving_on_failure(state, step, f"evaluation after step {step}"):
      self.reporter.evaluate_if_missing(step, state.train.params)
    return state, step

  def _remarks_on_ahead(self, state: RunState, step: int) -> tuple[str, ...]:
    """The warning that the checkpoint of `step` lacks batches drawn ahead, or ().

    A run that ends at `step` draws none for later steps, so a longer run that resumes there differs
    from one that never ended. If rollout.weights is not "fixed", runs differ in any case.
    """
    rollout = self._config.rollout
    # Before the first GRPO step, every run has drawn nothing ahead.
    resumes_midway = self.first_grpo_step < step < self.last_step
    if not resumes_midway or self.ahead is None or rollout.weights != "fixed":
      return ()
    if has_drawn_ahead(state.host):
      return ()
    # Older policies would have drawn the next `max_staleness` batches. This policy draws the batch
    # after those in any run.
    count = min(rollout.max_staleness, self.last_step - step)
    return (
      f"the checkpoint of step {step} has no batch that was drawn ahead: its policy draws the next"
      f" {count}, which older policies would have drawn in a run that did not end there",
    )

  @contextlib.contextmanager
  def doing(self, step: int) -> Iterator[None]:
    """Shows progress of the step after `step`, and profiles it, within the block."""
    in_warm_start = step < self.first_grpo_step
    is_routine = in_warm_start in self._phases_seen
    self._phases_seen.add(in_warm_start)
    with doing(f"step {step + 1}", is_routine=is_routine), self._profiler.step(step + 1):
      yield

  def should_stop(self) -> bool:
    """Whether any process was asked to stop. The result is the same on all processes."""
    return self.run.hosts.any_process(self._asked_to_stop())

  def check_and_save(
    self, state: RunState, step: int, metrics: Mapping[str, float], why_unscored: str
  ) -> None:
    """Checks that the run may continue after this step, and saves a checkpoint if one is due.

    While updates are skipped, it saves nothing: the policy is unchanged, and a save would delete an
    older checkpoint, made before the skipped updates.

    Args:
      state: The state after the step.
      step: The number of steps so far.
      metrics: The step's row, which is written already.
      why_unscored: Why the step had nothing to learn from. "" if it learned something.

    Raises:
      RunFailed: Too many updates in a row were skipped, too many steps in a row had nothing to
        learn from, or the log-probs of sampler and learner differ too much.
    """
    algo = self._config.algo
    # The steps up to `first_grpo_step` are those of the warm start, which make one update each.
    self._skipped.count(metrics, 1 if step <= self.first_grpo_step else algo.updates_per_step)
    if self._skipped.are_too_many:
      self._checkpoints.wait()
      raise self._skipped.failure(max(self._checkpoints.steps(), default=None))
    check_ratio_of_one(metrics, self._config)
    check_gap(metrics, self._config)
    unscored, _ = unscored_steps(state.host)
    if unscored == 1 and self.run.hosts.is_first:  # only for the first of several in a row
      print(f"warning: step {step} had nothing to learn from: {why_unscored}", file=sys.stderr)
    message = self._nothing_learned(unscored, why_unscored)
    # Without a limit, the run continues, and `finish` reports that no step learned anything.
    if message and 0 < self._config.reward.max_unscored_steps <= unscored:
      self._save(state, step)
      raise RunFailed(f"{message}; step {step} is saved; run the same command again to go on")
    every = self._config.checkpoint.every
    if every and step % every == 0 and not self._skipped.in_a_row:
      with doing(f"saving step {step}", is_routine=True):
        # Upload the metric rows before the checkpoint that follows them.
        self.run.hosts.on_first(self._files.upload)
        self.store.save(step, state)
    elif self.run.hosts.is_first:
      self._files.upload_if_due()

  @contextlib.contextmanager
  def saving_on_failure(self, state: RunState, step: int, work: str) -> Iterator[None]:
    """Saves the state after `step` if the block fails. `work` names what the block does."""
    try:
      yield
    except RunFailed as error:  # raised on all processes together
      saved = f"step {step} is saved" if step else "no step was finished"
      if step and _is_deleted(state):  # the update has begun, which takes the arrays of the state
        saved = f"step {step} is saved only if a checkpoint was due"
      else:
        self._save(state, step)
      is_final = isinstance(error, ConfigStopsRun)
      resuming = "" if is_final else "; run the same command again to go on"
      raise RunFailed(f"{work}: {error}; {saved}{resuming}") from error
    except (MemoryError, jax.errors.JaxRuntimeError, KeyboardInterrupt, SystemExit):
      # All processes must save together, but others may not have failed. And an update that failed
      # may have donated the arrays of the state, which then cannot be saved.
      if jax.process_count() == 1 and not _is_deleted(state):
        self._save(state, step)
      raise

  def finish(self, state: RunState, step: int, was_asked_to: bool) -> None:
    """Saves the state if it is not saved yet, waits until it is written, and reports the end.

    Args:
      state: The state of the run.
      step: The number of steps so far.
      was_asked_to: Whether the callback asked to stop.

    Raises:
      Stopped: The last step is not reached, and the callback did not ask to stop.
      RunFailed: The last step is reached, and no step had anything to learn from.
    """
    is_unfinished = step < self.last_step
    # After skipped updates, older checkpoints are kept, and a resumed run repeats the steps.
    if not (is_unfinished and self._skipped.in_a_row):
      self._save(state, step)
    self._checkpoints.wait()
    message = self._nothing_learned(*unscored_steps(state.host))
    if message and not is_unfinished:
      raise RunFailed(message)
    self.reporter.finish(step)
    # After any other stop, the run may continue, so sampler processes wait to rejoin it.
    if self._remote is not None and (was_asked_to or not is_unfinished):
      self._remote.say_ended()
    if is_unfinished and not was_asked_to:
      saved = max(self._checkpoints.steps(), default=0)  # an older one after skipped updates
      which = "which is saved" if saved == step else f"and step {saved} is saved"
      raise Stopped(
        f"at step {step} of {self.last_step}, {which}: the same call goes on from there"
        if saved
        else "before a step was saved: the same call begins again"
      )

  def _nothing_learned(self, unscored: int, why: str) -> str:
    """The error if too many steps in a row, or all, had nothing to learn from. Otherwise "".

    `unscored` counts these steps up to now, and `why` is the reason of the last one.
    """
    limit, steps = self._config.reward.max_unscored_steps, self._config.steps
    message = f"the last {unscored} GRPO steps had nothing to learn from"
    why = why or f"the rows in {self._workdir} have no reward"  # old checkpoints store no reason
    if 0 < limit <= unscored:
      return f"{message} (reward.max_unscored_steps): {why}"
    return f"{message}, which are all: {why}" if 0 < steps <= unscored else ""

  def _save(self, state: RunState, step: int) -> None:
    """Saves the state after `step` and waits until it is written. Step 0 is not saved."""
    if step:
      with doing(f"saving step {step}"):
        self.run.hosts.on_first(self._files.upload)
        self.store.save(step, state)
        self._checkpoints.wait()


def _access(config: Config) -> Access | None:
  """The secret and certificates for sampler processes, or None if the run does not listen."""
  rollout = config.rollout
  if not rollout.listen:
    return None
  if jax.process_count() > 1:
    raise ConfigError(
      f"config key rollout.listen is {rollout.listen!r}: a run of several processes samples"
      " itself; leave it empty, or start one process"
    )
  host, _ = address_of(rollout.listen, "config key rollout.listen")
  return learner_access(rollout, host)


def _is_deleted(state: RunState) -> bool:
  """Whether an update has donated the parameters of the state."""
  arrays = jax.tree.leaves(state.train.params)
  return any(isinstance(x, jax.Array) and x.is_deleted() for x in arrays)


class SkippedUpdates:
  """Counts consecutive updates that were skipped because their gradient was not finite.

  After several of them, the policy does not recover: it stays the same, so the next gradient is no
  better.

  Attributes:
    limit: The number of consecutive skipped updates that ends the run.
    in_a_row: The number of skipped updates since the last step with an update.
  """

  limit = 5

  def __init__(self) -> None:
    self.in_a_row = 0

  def count(self, metrics: Mapping[str, float], updates: int) -> None:
    """Counts the skipped updates among a step's `updates`. Unless all were skipped, resets to 0."""
    skipped = metrics.get("skipped_updates", metrics.get("warm_start/skipped_updates", 0))
    self.in_a_row = self.in_a_row + updates if skipped >= updates else 0

  @property
  def are_too_many(self) -> bool:
    """Whether the limit is reached."""
    return self.in_a_row >= self.limit

  def failure(self, newest_checkpoint: int | None) -> RunFailed:
    """Makes the error that ends the run. It names the step of the newest checkpoint, if any."""
    saved = "no checkpoint is saved"
    if newest_checkpoint is not None:
      saved = f"the newest checkpoint, of step {newest_checkpoint}, is from before"
    return RunFailed(
      f"the last {self.in_a_row} updates were skipped because their gradient was not finite, so"
      f" nothing is learned any more; {saved}. Lower optimizer.learning_rate in a new run, or look"
      " for what is not finite"
    )


def check_gap(metrics: Mapping[str, float], config: Config) -> None:
  """Checks that learner and sampler compute nearly the same log-probs.

  Rounding makes them differ a little. A large difference shows that the learner learns tokens that
  the policy did not draw, such as an environment's, or computes them after other tokens than the
  sampler did.

  Args:
    metrics: The row of a step.
    config: The config of the run.

  Raises:
    RunFailed: The log-probs of a token differ by more than `largest_gap(config)`.
  """
  gap, bound = metrics.get("sampler/logprob_gap_max", 0.0), largest_gap(config)
  if 0 < bound < gap:
    raise RunFailed(
      f"log-probs of sampler and learner differ by {gap:.3g} for a token, and rounding explains"
      f" {bound:g} (sampling.max_logprob_gap): the tokens that are learned are not those that were"
      " drawn, or follow other ones"
    )


def largest_gap(config: Config) -> float:
  """The value of sampling.max_logprob_gap, or the default that -1 stands for. 0 means no bound."""
  sampling = config.sampling
  if sampling.max_logprob_gap >= 0:
    return sampling.max_logprob_gap
  # With these settings, the sampler computes another policy than the learner on purpose. Weights
  # that lora.base_dtype quantises are the same for both.
  rounds_weights = sampling.weights_dtype and not has_quantised_base(config)
  if rounds_weights or sampling.cache_dtype or config.rollout.max_staleness:
    return 0.0
  return 0.05 if _is_exact(config) else 4.0


def check_ratio_of_one(metrics: Mapping[str, float], config: Config) -> None:
  """Checks that the probability ratio was 1 if the objective assumed that.

  With one update per batch, the objective uses the log-probs of the policy before the update as the
  old log-probs. That is right only if this policy sampled. If sampler and learner both compute in
  float32, their log-probs then agree up to rounding.

  Args:
    metrics: The row of a step.
    config: The config of the run.

  Raises:
    RunFailed: The log-probs differ too much, so another policy sampled.
  """
  gap = metrics.get("sampler/logprob_gap_mean", 0.0)
  is_assumed = config.old_is_policy and not config.algo.compares_with_sampler
  if is_assumed and _is_exact(config) and gap > _LARGEST_GAP:
    raise RunFailed(
      f"the policy that was updated is not the one that sampled: log-probs differ by {gap:.2g}"
      " per token, and one update per batch takes the ratio of the two to be 1. Set"
      " algo.correction=truncate with algo.correction_high=2, or sample from the current policy"
    )


def _is_exact(config: Config) -> bool:
  """Whether sampler and learner both compute in float32."""
  sampling = config.sampling
  dtypes = {config.model.dtype, sampling.dtype or config.model.dtype}
  return dtypes | ({sampling.weights_dtype, sampling.cache_dtype} - {""}) == {"float32"}
