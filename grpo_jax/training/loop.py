"""The training loop and its two kinds of steps.

If a run has a warm start, it first imitates worked solutions. Then it takes GRPO steps. Both kinds
are counted together. `trainer.py` does the work before the loop and after each step.
"""

import contextlib
import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from grpo_jax.algo import metrics as metrics_lib
from grpo_jax.algo.controllers import planned
from grpo_jax.algo.metrics import Metrics, disjoint
from grpo_jax.algo.rejections import without_rejected
from grpo_jax.asynchronous.ahead import Ahead
from grpo_jax.asynchronous.learner import SamplingClosed
from grpo_jax.batches.collect import Collected, Collector, with_unscored
from grpo_jax.batches.rollout_metrics import most_disputed_first
from grpo_jax.config import Config
from grpo_jax.console.stop import leaving_on_second_signal
from grpo_jax.data import loader
from grpo_jax.data.prompts import PromptSet
from grpo_jax.learner.objectives import sampler_gap
from grpo_jax.learner.optimizer import learning_rate
from grpo_jax.parallel import sharding
from grpo_jax.progress import doing
from grpo_jax.run.run import Run
from grpo_jax.run.seen import with_images
from grpo_jax.storage.bucket import folder
from grpo_jax.storage.reading import as_begun
from grpo_jax.timing import Clock
from grpo_jax.training.callback import Callback, Step
from grpo_jax.training.state import RunState, StateStore
from grpo_jax.training.trainer import Signals, Trainer
from grpo_jax.types import Batch, TrainState

_merge_updates = jax.jit(metrics_lib.merge_updates)
_ALL_REJECTED = (
  "all tokens were rejected: close the gap between sampler and learner, or widen the bounds"
  " algo.reject_... in another --workdir"
)


class RunEnd(NamedTuple):
  """The end of a run.

  Attributes:
    state: The state after the last step that was taken.
    step: The last step. Its metrics are empty if this call took no step.
  """

  state: RunState
  step: Step


def run_steps(
  config: Config,
  workdir: str | Path,
  callback: Callback | None = None,
  signals: Signals = leaving_on_second_signal,
) -> RunEnd:
  """Takes all steps of a run, or those that remain if its folder has a checkpoint.

  Args:
    config: The config of the run.
    workdir: The run's folder, which is created if it does not exist.
    callback: callback(Step) is called after each step. If it returns True, the run stops.
    signals: signals(stop_request) -> a context in which SIGTERM, Ctrl-C and SIGHUP are handled.

  Returns:
    The state, and the last step that was taken. If the callback asked to stop, it may be earlier
    than the run's last step.

  Raises:
    ConfigError: The config or the folder cannot be used. No step was taken.
    RunFailed: The run cannot continue. The state is saved if that was possible.
    Stopped: The run was asked to stop, but not by the callback. The state is saved if a step was
      taken that can be learned from, as the message says. The same call continues the run.
  """
  config = as_begun(config, workdir)
  with contextlib.ExitStack() as stack:
    trainer = Trainer(config, folder(workdir), stack, signals)
    callbacks = trainer.callbacks(callback)
    warm_step = WarmStep(trainer.run, trainer.collector.prompts)
    grpo_step = GrpoStep(trainer.run, trainer.ahead or trainer.collector, trainer.store)
    state, step = trainer.restore_or_init()
    while step < trainer.last_step and not trainer.should_stop() and not callbacks.ask_to_stop:
      if step == trainer.first_grpo_step:
        with doing("beginning with GRPO"):
          state = trainer.store.begin_grpo(state)
      take_step = warm_step if step < trainer.first_grpo_step else grpo_step
      try:
        with trainer.saving_on_failure(state, step, f"step {step + 1}"), trainer.doing(step):
          result = take_step(state, step)
      except SamplingClosed:  # the run was asked to stop, and no sampler process or server is there
        break
      state, step = result.state, step + 1
      # The row of a step is written before its checkpoint, or a kill between them would lose it. A
      # run that resumes drops only rows after its checkpoint.
      with trainer.saving_on_failure(state, step, f"evaluation after step {step}"):
        metrics = trainer.reporter.step(step, state.train.params, result.metrics, result.rows)
      with trainer.saving_on_failure(state, step, f"callback after step {step}"):
        with doing("calling the callback", is_routine=True):
          callbacks(step, metrics)
      trainer.check_and_save(state, step, result.metrics, result.why_unscored)
    trainer.finish(state, step, was_asked_to=callbacks.ask_to_stop)
  return RunEnd(state, callbacks.latest or callbacks.step_of(step, {}))


class StepResult(NamedTuple):
  """The result of a step.

  Attributes:
    state: The state after the step.
    metrics: The step's row of metrics.jsonl, without `step`.
    rows: A JSON object for each completion, or None if completions are not logged at this step.
    why_unscored: Why the step had nothing to learn from: no completion has a reward and a token in
      the loss, or all tokens were rejected. "" if it learned something.
  """

  state: RunState
  metrics: dict[str, float]
  rows: list[dict[str, Any]] | None = None
  why_unscored: str = ""


class WarmStep:
  """Takes a step of the warm start: a supervised update on worked solutions."""

  def __init__(self, run: Run, prompts: PromptSet):
    self._run = run
    self._prompts = prompts

  def __call__(self, state: RunState, step: int) -> StepResult:
    """Updates the policy on the examples of `step`, which counts from 0."""
    run, config, clock = self._run, self._run.config, Clock()
    size = config.warm_start.batch
    indices = loader.step_indices(config.seed, step, size, len(self._prompts))
    examples = loader.supervised_batch(
      self._prompts, indices, run.tokenizer, config.sampling.max_tokens, run.hosts
    )
    batch = Batch(
      prompts_PS=examples.prompts.prompts_PS,
      prompt_lengths_P=examples.prompts.prompt_lengths_P,
      completions_PGT=examples.completions_PT[:, None],  # groups of one
      mask_PGT=examples.mask_PT[:, None],
      temperature_P=np.ones(size, np.float32),  # no temperature drew the solutions
    )
    update = run.programs.warm_update
    batch = with_images(run, run.hosts.put(batch), examples.prompts)
    # None: no reference, because a supervised update has no KL term.
    train, update_metrics = update(state.train, run.parameters.base, None, batch)
    reduced = metrics_lib.reduced(update_metrics)
    metrics = {f"warm_start/{name}": value for name, value in reduced.items()}
    metrics |= {
      "warm_start/tokens": float(examples.mask_PT.sum()),
      "warm_start/dropped": examples.dropped,
      "time/step": clock.total(),
    }
    return StepResult(state.replace(train=train), metrics)


class GrpoStep:
  """Takes a GRPO step: samples and scores completions, compares them within groups, and updates.

  `run.programs` has the compiled functions: `with_advantages` of algo/batch.py, and `update`, which
  is `train_step` of learner/train_step.py.
  """

  def __init__(self, run: Run, collector: Collector | Ahead, store: StateStore):
    """`collector` returns the batch of a step, and `store` has the reference policy."""
    self._run = run
    self._collect = collector
    self._store = store
    self._algo = run.config.algo
    updates = run.config.steps * self._algo.updates_per_step
    self._learning_rate = learning_rate(run.config.optimizer, updates)
    everywhere = NamedSharding(run.mesh, PartitionSpec())
    shardings = sharding.batch_sharding(run.mesh), everywhere  # of the mask, and of the metrics
    reject = functools.partial(without_rejected, algo=self._algo)
    self._without_rejected = jax.jit(reject, out_shardings=shardings)
    self._sampler_gap = jax.jit(sampler_gap, out_shardings=everywhere)

  def __call__(self, state: RunState, step: int) -> StepResult:
    """Takes the step. `step` counts from 0 and includes the steps of the warm start."""
    run, algo, clock = self._run, self._algo, Clock()
    index = step - run.config.warm_start.steps  # the number of the GRPO step, from 0
    # The parameters for sampling have no variable, because this converted copy must be freed
    # before the update.
    collected = self._collect(
      run.parameters.for_sampling(state.train.params), index, state.host, clock
    )
    batch, advantage_metrics = self._prepare(state, collected)
    clock.lap("reference")
    state = state.replace(train=self._with_planned(state.train, index))
    batch, rejected = self._with_old_logprobs(state.train, batch)
    train, update_metrics = self._update(state, batch)
    nothing_left = rejected.get("rejection/tokens") == 1  # the share of tokens that were rejected
    why = collected.why_unscored or (_ALL_REJECTED if nothing_left else "")
    host = with_unscored(collected.host, state.host, why)
    state = state.replace(train=train, host=host)
    if algo.ref_sync_steps and (index + 1) % algo.ref_sync_steps == 0:
      state = self._store.sync_reference(state)
    clock.lap("update")
    metrics = disjoint(collected.metrics, advantage_metrics, rejected, update_metrics)
    metrics = disjoint(metrics, self._step_metrics(index, metrics, clock))
    return StepResult(state, metrics, self._rows(collected, batch), why)

  def _prepare(self, state: RunState, collected: Collected) -> tuple[Batch, dict[str, float]]:
    """Returns the batch with the reference's log-probs and the advantages, and metrics of both."""
    batch = collected.batch
    # A KL of whole distributions needs more than these log-probs. The update computes it.
    if self._algo.uses_reference and not self._algo.needs_full_kl:
      reference = self._store.reference_params(state)
      with doing("log-probs of the reference"):
        logprobs_PGT = self._run.programs.logprobs(reference, batch.without_experts())
      batch = batch.replace(ref_logprobs_PGT=logprobs_PGT)
    with_advantages = self._run.programs.with_advantages
    # The images are large, so they bypass the compiled function, which would copy them.
    image_fields = dict(images=batch.images, visual=batch.visual)
    batch = batch.replace(images=None, visual=None)
    batch, metrics = with_advantages(batch, collected.rewards, state.train.coefs.kl)
    batch = batch.replace(**image_fields)
    # Without the wait, the time of this work would count as that of the update.
    return jax.block_until_ready(batch), jax.device_get(metrics)

  def _with_old_logprobs(self, train: TrainState, batch: Batch) -> tuple[Batch, dict[str, float]]:
    """Recomputes the old log-probs and masks out rejected tokens, as far as the config asks for it.

    Returns the batch, and the metrics of the rejection with the gap between sampler and learner, or
    {} without rejection.
    """
    run, algo = self._run, self._algo
    is_recomputed = not run.config.old_is_policy and algo.old_logprobs == "recomputed"
    if not is_recomputed and not algo.has_rejection:
      return batch, {}
    old_PGT = run.programs.logprobs(run.parameters.policy(train.params), batch)
    if is_recomputed:
      batch = batch.replace(old_logprobs_PGT=old_PGT)
    if not algo.has_rejection:
      return batch, {}
    # The gap covers all tokens, before those with the largest differences are rejected.
    gap = self._sampler_gap(old_PGT, batch.sampler_logprobs_PGT, batch.mask_PGT)
    inputs = old_PGT, batch.behavior_logprobs_PGT, batch.mask_PGT
    mask_PGT, metrics = self._without_rejected(*inputs)
    return batch.replace(mask_PGT=mask_PGT), jax.device_get(metrics) | metrics_lib.reduced(gap)

  def _update(self, state: RunState, batch: Batch) -> tuple[TrainState, dict[str, float]]:
    """Updates on each minibatch, algo.updates_per_batch times. Returns the state and metrics."""
    run, algo, train = self._run, self._algo, state.train
    base, reference = run.parameters.base, self._store.reference_params(state)
    minibatches = run.programs.minibatches(batch) if algo.minibatches > 1 else [batch]
    merged: Metrics | None = None
    with doing("updating", algo.updates_per_batch * len(minibatches), "minibatches") as work:
      for _ in range(algo.updates_per_batch):
        for minibatch in minibatches:
          train, metrics = run.programs.update(train, base, reference, minibatch)
          merged = metrics if merged is None else _merge_updates(merged, metrics)
          work.advance()
      reduced = metrics_lib.reduced(merged)
    if algo.kl_target:
      reduced["kl_coef"] = float(train.coefs.kl)  # the coefficient for the next update
    if algo.moves_entropy_coef:
      reduced["entropy_coef"] = float(train.coefs.entropy)
    return train, reduced

  def _with_planned(self, train: TrainState, index: int) -> TrainState:
    """Sets the coefficients that the config schedules for GRPO step `index`."""
    coefs, new = train.coefs, dict[str, jax.Array]()
    # The coefficients keep their sharding, so that nothing is compiled again. The lambda ignores
    # which part it makes, because a scalar has only one.
    for name, value in planned(self._algo, index, self._run.config.steps).items():
      kept = getattr(coefs, name).sharding
      new[name] = jax.make_array_from_callback((), kept, lambda _, x=value: np.float32(x))
    return train.replace(coefs=coefs.replace(**new))

  def _step_metrics(self, index: int, metrics: dict[str, float], clock: Clock) -> dict[str, float]:
    """The metrics of time, speed and learning rate. `metrics` are the others of the step."""
    last_update = (index + 1) * self._algo.updates_per_step - 1
    seconds = {"step": clock.total()} | clock.laps
    out = {f"time/{name}": value for name, value in seconds.items()}
    if "wait" in clock.laps:  # batches are drawn ahead, and the learner waited for this one
      out["rollout/learner_idle"] = clock.laps["wait"] / seconds["step"]
    out["learning_rate"] = float(self._learning_rate(last_update))
    out["perf/tokens_per_second"] = metrics["completions/tokens"] / seconds["step"]
    return out

  def _rows(self, collected: Collected, batch: Batch) -> list[dict[str, Any]] | None:
    """The logged completions with the advantages of their first tokens, or None if none are logged.

    `collected.rows` is None on all processes if the step logs none, and empty on other processes
    than the first.
    """
    if collected.rows is None:
      return None
    # Members of a group after the first `size` are further branches of rollouts.
    size = self._run.config.batch.group_size
    # All processes must fetch together, so the others return only after it.
    advantages_PG = self._run.hosts.fetch(batch.advantages_PGT[:, :size, 0])
    if not collected.rows:
      return None
    rows = [
      row | {"advantage": float(advantage)}
      for row, advantage in zip(collected.rows, advantages_PG.ravel(), strict=True)
    ]
    return most_disputed_first(rows, advantages_PG.shape[1])
