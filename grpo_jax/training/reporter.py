"""Reports a run to files, trackers and the terminal: metrics, evaluations and completions."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from grpo_jax.algo.checks import moves_unseen, settings_idle_at_ratio_one
from grpo_jax.config import Config
from grpo_jax.console import notebook
from grpo_jax.console.json_console import JsonConsole
from grpo_jax.console.stdout import Stdout
from grpo_jax.console.terminal import Terminal
from grpo_jax.data.prompts import PromptSet
from grpo_jax.evaluation.evaluator import Evaluators
from grpo_jax.parallel import sharding
from grpo_jax.parallel.mesh import sizes_of
from grpo_jax.rollouts.complete import Remote
from grpo_jax.run.run import Run
from grpo_jax.scoring.scorers import Scorers
from grpo_jax.storage.bucket_files import local_files
from grpo_jax.storage.row_writer import RowWriter
from grpo_jax.timing import Clock
from grpo_jax.training import trackers

COMPLETIONS_SHOWN = 4
_MOST_IDLE_STEPS = 10


class Reporter:
  """Reports a run's steps. The first process writes and prints, and all processes evaluate.

  Attributes:
    evaluator: Evaluates the policy. None if eval.every is 0.
    devices: devices() -> a context in which evaluations may use the sampler's devices.
  """

  devices: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

  def __init__(
    self,
    run: Run,
    scorers: Scorers,
    workdir: Path,
    on_lost_stdout: Callable[[str], None],
    remote: Remote | None = None,
  ):
    """Does not print or write yet.

    Args:
      run: The run.
      scorers: The reward functions of the run.
      workdir: The run's folder.
      on_lost_stdout: on_lost_stdout(reason) is called if stdout cannot be written any more.
      remote: Makes the group sampler for evaluations. None means that the run's devices sample.

    Raises:
      ConfigError: The config asks for an evaluation that is not possible.
    """
    self._run = run
    self._workdir = workdir
    self._writer: RowWriter | None = None
    self._first_grpo_step = run.config.warm_start.steps
    self._last_step = last_step(run.config)
    self._idle_steps = 0  # how many steps, the last ones, had equal rewards in every group
    is_first = run.hosts.is_first
    # A notebook gets plain text, without HTML and without the colours that its kernel asks for.
    plain = {"color_system": None, "width": 100} if notebook.is_running() else {}
    console = Console(
      file=Stdout(on_lost_stdout), highlight=False, quiet=not is_first, force_jupyter=False, **plain
    )
    self._terminal = (
      JsonConsole(console) if run.config.log.console == "json" else _terminal(run.config, console)
    )
    self.evaluator = None
    if run.config.eval.every:
      self.evaluator = Evaluators(run, scorers, remote=remote)

  def start_terminal(self) -> None:
    """Starts to show the progress of long work in the terminal, until `close`."""
    self._terminal.start()

  def open(self, start_step: int) -> None:
    """Opens metrics.jsonl and the trackers, and removes rows after `start_step`.

    -1 means that the run has no checkpoint. Then files that exist are renamed.
    """
    log = self._run.config.log

    def open_writer() -> RowWriter:
      files = local_files(self._workdir)
      senders = trackers.open_all(log, files, self.warn)
      with contextlib.ExitStack() as stack:  # closes the trackers if opening the files fails
        for sender in senders:
          stack.callback(sender.close, has_failed=True)
        writer = RowWriter(files, start_step, log.tensorboard, senders, self.warn)
        stack.pop_all()
      return writer

    self._writer = self._run.hosts.on_first(open_writer)
    if self._writer:
      self._writer.warn_of_missing_rows(start_step, log.every)

  def close(self, has_failed: bool = False) -> None:
    """Closes the files and trackers, and restores the terminal."""
    try:
      if self._writer:
        self._writer.close(has_failed)
    finally:
      self._terminal.close()

  def say(self, text: str) -> None:
    """Prints a line."""
    self._terminal.say(text)

  def warn(self, text: str) -> None:
    """Prints a warning."""
    self._terminal.say(f"warning: {text}")

  def evaluate_if_missing(self, step: int, params: Any) -> None:
    """Evaluates after `step` if an evaluation is due and missing in metrics.jsonl.

    It is missing before the first step of a run without a warm start, and if the evaluation of the
    last step failed.
    """
    if not self._evaluation_is_due(step):
      return
    if step == 0:  # no checkpoint was restored, so there is no row to add the evaluation to
      self._write(0, self._evaluate(0, params))
    elif self._run.hosts.any_process(
      self._writer is not None and self._writer.lacks_evaluation(step)
    ):
      values = self._evaluate(step, params)
      if self._writer:
        self._writer.add_to_last(values)

  def step(self, step: int, params: Any, metrics: dict, rows: list[dict] | None) -> dict:
    """Reports a finished step. Evaluates first if that is due.

    Args:
      step: The number of steps so far.
      params: The trained parameters.
      metrics: The metrics of the step.
      rows: A JSON object for each completion, or None if this step logs none.

    Returns:
      The metrics of the step and of the evaluation.
    """
    if rows is not None:
      self._completions(step, rows)
    are_equal = metrics.get("frac_reward_zero_std") == 1 and metrics.get("batch/completions") == 0
    self._idle_steps = self._idle_steps + 1 if are_equal else 0
    if self._idle_steps == _MOST_IDLE_STEPS:
      self.warn(
        f"in {_MOST_IDLE_STEPS} steps, no completion had an advantage, because the rewards in each"
        f" group are equal. Their mean is {metrics['reward']:.2f}: see in completions/ whether"
        " answers do not differ any more, or none is right. Other prompts, sampling.temperature,"
        " algo.kl_coef and algo.entropy_coef can change that"
      )
    if self._evaluation_is_due(step):
      try:
        metrics = metrics | self._evaluate(step, params)
      except BaseException:  # also too little memory, or an interrupt in a notebook
        self._write(step, metrics)  # the next start of the run repeats the evaluation
        raise
    elif step % self._run.config.log.every and step != self._last_step:
      return metrics  # no row is due
    self._write(step, metrics)
    return metrics

  def finish(self, step: int) -> None:
    """Prints where the results are, or how to resume a run that was stopped."""
    if step < self._last_step:
      self.say(f"stopped at step {step}; run the same command again to resume")
    else:
      self.say(f"finished: metrics, completions and checkpoints are in {self._workdir}")

  def header(self, lines: list[str]) -> None:
    """Prints the lines of `header_lines`."""
    self._terminal.header(lines)

  def _evaluation_is_due(self, step: int) -> bool:
    """Whether to evaluate after `step`: every eval.every GRPO steps, from 0 on, and at the end."""
    every = self._run.config.eval.every
    index = step - self._first_grpo_step
    return bool(every) and index >= 0 and (index % every == 0 or step == self._last_step)

  def _evaluate(self, step: int, params: Any) -> dict[str, float]:
    clock = Clock()
    with self.devices():
      metrics = self.evaluator(self._run.parameters.for_sampling(params), step)
    return metrics | {"time/evaluate": clock.total()}

  def _write(self, step: int, metrics: dict[str, float]) -> None:
    values = {name: float(value) for name, value in metrics.items()}
    if self._writer:
      self._writer.write(step, values)
    self._terminal.update(step, values)

  def _completions(self, step: int, rows: list[dict]) -> None:
    if self._writer:
      self._writer.completions(step, rows)
    # The stride is chosen so that the rows shown are from several prompts and group members.
    stride = max(1, len(rows) // COMPLETIONS_SHOWN - 1)
    self._terminal.completions(step, rows[::stride])


def _terminal(config: Config, console: Console) -> Terminal:
  """Makes the display of the run's progress on `console`."""
  # For the estimate of the remaining time: a GRPO step takes longer than a step of the warm start
  # in proportion to its completions.
  completions = config.batch.prompts * config.batch.group_size
  ratio = completions / config.warm_start.batch
  return Terminal(last_step(config), config.warm_start.steps, console, ratio)


def last_step(config: Config) -> int:
  """The number of steps of a run, including the warm start."""
  return config.warm_start.steps + config.steps


def header_lines(
  run: Run,
  prompts: list[tuple[str, Any]],
  remarks: Sequence[str],
  step: int,
  workdir: Path,
  saved_devices: int | None = None,
) -> list[str]:
  """The lines that describe a run to the user before the first step.

  Args:
    run: The run.
    prompts: (name, prompts) of each split of the data.
    remarks: Warnings to show.
    step: The step from which the run resumes, or 0 for a new run.
    workdir: The run's folder.
    saved_devices: The number of devices that saved the checkpoint. None: unknown or a new run.
  """
  config, device = run.config, jax.devices()[0]
  lines = [
    f"{jax.device_count()} x {device.device_kind} ({device.platform}), mesh {sizes_of(run.mesh)};"
    f" {run.parameters.describe()}; {config.batch.prompts} prompts x"
    f" {config.batch.group_size} completions of at most {config.sampling.max_tokens} tokens,"
    f" {run.programs.micro_batch} prompts at once in the update"
  ]
  lines += _about_sampling(run)
  for split, prompt_set in prompts:
    lines += _about_prompts(split, prompt_set, config.data.max_prompt_tokens)
  undivided = sharding.undivided(run.parameters.abstract_policy, run.mesh)
  if undivided:
    lines.append(f"{len(undivided)} dimensions of parameters are not split, such as {undivided[0]}")
  replicated = sharding.replicated(run.programs.abstract_state, run.mesh)
  if replicated:
    lines.append(
      f"{len(replicated)} arrays of the optimizer are replicated, such as {replicated[0]}"
    )
  lines += _about_updates(config)
  lines += [f"warning: {remark}" for remark in remarks]
  if step:
    devices, moved = run.mesh.size, ""
    if saved_devices not in (None, devices):
      moved = f", on {devices} devices instead of {saved_devices}"
    lines.append(f"resuming from step {step} of {last_step(config)} in {workdir}{moved}")
  return lines


def _about_prompts(split: str, prompts: PromptSet, most: int) -> Iterator[str]:
  """Yields lines about unused prompts of a split. `most` is the limit on a prompt's tokens."""
  if prompts.dropped:
    yield (
      f"{prompts.dropped} {split} prompts are longer than data.max_prompt_tokens = {most} and left"
      f" out; {len(prompts)} remain"
    )
  if prompts.unopened:
    # Training prompts keep their indices, because an environment may begin after a restart.
    left_out = f"left out; {len(prompts)} remain"
    effect = "others stand in for them" if split == "training" else left_out
    yield f"the environments of {prompts.unopened} {split} prompts cannot begin: {effect}"
  if prompts.replaced:
    yield (
      f"about {prompts.replaced:.1%} of {len(prompts)} {split} prompts are longer than"
      f" data.max_prompt_tokens = {most}; others stand in for them"
    )


def _about_sampling(run: Run) -> list[str]:
  """Lines about the devices that sample, and how far ahead batches are drawn."""
  lines, sampling, rollout = [], run.parameters.sampling, run.config.rollout
  if sampling.mesh != run.mesh:
    apart = "apart, " if sampling.is_apart else ""
    lines.append(f"sampling {apart}on mesh {sizes_of(sampling.mesh)}")
  if rollout.max_staleness:
    lines.append(
      f"batches are drawn up to {rollout.max_staleness} steps ahead, with {rollout.weights} weights"
    )
  return lines


def _about_updates(config: Config) -> list[str]:
  """A warning if settings do not suit the number of updates per batch, or []."""
  algo = config.algo
  idle = settings_idle_at_ratio_one(algo) if config.old_is_policy else ()
  if idle:
    return [
      f"one update per batch, so the ratio is 1 and algo.{', algo.'.join(idle)} change nothing;"
      " algo.minibatches or algo.updates_per_batch would make them matter"
    ]
  if moves_unseen(algo):
    return [
      f"warning: algo.surrogate={algo.surrogate} has no ratio, so nothing limits the"
      f" {algo.updates_per_step} updates per batch; choose fewer, set algo.kl_coef with"
      " algo.kl_in='loss', or choose another surrogate"
    ]
  return []
