"""Trains a policy with GRPO.

  python -m grpo_jax.train --config=configs/arithmetic.py --workdir=DIR [--config.section.key=value]

Run again with the same command, it goes on from the newest checkpoint, to the same numbers as if never stopped.
"""

import contextlib
import functools
import math
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import jax
from absl import flags
from ml_collections import config_flags
from rich.console import Console

from grpo_jax.algo.presets import DEFAULTS
from grpo_jax.config import Config, to_dict
from grpo_jax.data import loader
from grpo_jax.evaluate import Evaluator
from grpo_jax.learner.optimizer import learning_rate
from grpo_jax.parallel import sharding
from grpo_jax.parallel.mesh import initialize_distributed
from grpo_jax.run import cli
from grpo_jax.run.build import Run
from grpo_jax.run.checkpoint import Checkpoints, restore_tree, save_tree
from grpo_jax.run.collect import Collector
from grpo_jax.run.terminal import Loading, Terminal
from grpo_jax.run.workdir import Writer, open_run
from grpo_jax.settings import ConfigError
from grpo_jax.types import Batch, TrainState

OF_THE_RATIO = ("ratio", "clip_low", "clip_high")


def train(config: Config, workdir: str) -> TrainState:
  """The whole job: the warm start's steps, then GRPO's. Steps are counted through both."""
  trainer = Trainer(config, workdir)
  with trainer.session() as stopped:
    state, step = trainer.restore_or_init()
    trainer.evaluate_first(state, step)
    while step < trainer.last_step and not stopped():
      if step == trainer.first_grpo_step:
        state = trainer.begin_grpo(state)
      take_step = trainer.warm_step if step < trainer.first_grpo_step else trainer.grpo_step
      state, metrics = take_step(state, step)
      step += 1
      trainer.log(state, step, metrics)
      trainer.maybe_save(state, step)
    trainer.finish(state, step)
  return state


class Trainer:
  """The effects around the steps: data in, files and terminal out."""

  def __init__(self, config: Config, workdir: str):
    self.config, self.workdir = config, Path(workdir).expanduser()
    self.run = Run(config, Loading())
    self.run.check_rows(
      batch__prompts=config.batch.prompts,
      batch__micro_batch=config.batch.micro_batch,
      warm_start__batch=config.warm_start.batch if config.warm_start.steps else 0,
    )
    part, rows = config.batch.prompts // config.algo.minibatches, self.run.model.row_shards
    if part % rows:
      raise ConfigError(
        f"config key algo.minibatches is {config.algo.minibatches}: batch.prompts / algo.minibatches = {part}"
        f" must be a multiple of mesh.data x mesh.fsdp x mesh.expert = {rows}"
      )
    self.first_grpo_step, self.last_step = (
      config.warm_start.steps,
      config.warm_start.steps + config.steps,
    )
    self.collect = Collector(self.run)
    self.evaluator = Evaluator(self.run) if config.eval.every else None
    self._on_first_process(
      lambda: open_run(self.workdir, to_dict(config))
    )  # from here on the config may not change
    self.checkpoints = Checkpoints(self.workdir / "checkpoints", config.checkpoint.keep, self._warn)
    self.terminal = self.writer = None
    self.frozen = (
      None  # the reference's parameters, where the state has none; with adapters, those under them
    )

  @contextlib.contextmanager
  def session(self):
    """Yields `stopped()`: whether SIGTERM or Ctrl-C has asked a process to save and leave. Closes everything at the end."""
    signals = []

    def ask(number, _):
      if signals and number == signal.SIGINT:
        raise KeyboardInterrupt  # asked a second time
      signals.append(number)
      self._warn(
        "stopping after this step" + "; Ctrl-C again leaves at once" * (number == signal.SIGINT)
      )

    with contextlib.ExitStack() as stack:
      self.terminal = Terminal(
        self.last_step, 0, None if self.run.is_first_process else Console(quiet=True)
      )
      stack.callback(self.terminal.close)
      for number in (signal.SIGTERM, signal.SIGINT):
        stack.callback(signal.signal, number, signal.signal(number, ask))
      stack.callback(lambda: self.writer and self.writer.close())
      stack.callback(self.checkpoints.close)
      yield lambda: self.run.any_process(bool(signals))

  # Start.

  def restore_or_init(self) -> tuple[TrainState, int]:
    restored, log = self.checkpoints.restore_latest(self.run.abstract_state), self.config.log
    step, state = restored or (0, self.run.init_state(self.run.initial_params()))
    self.writer = self._on_first_process(
      lambda: Writer(self.workdir, step if restored else -1, log.tensorboard, log.wandb)
    )
    if step > self.first_grpo_step or not self.first_grpo_step:
      self.frozen = self._frozen(state, restored is None)
    self._header(step)
    return state, step

  def evaluate_first(self, state: TrainState, step: int) -> None:
    """Before the first step of a run that has no warm start, a row of step 0 that holds the evaluation alone."""
    if step == 0 and self._evaluates(0):
      self._write(0, self._evaluate(state, 0))

  def begin_grpo(self, state: TrainState) -> TrainState:
    """After the warm start: a fresh optimizer, and what was learned becomes the frozen reference."""
    if not self.first_grpo_step:
      return state
    if self._keeps_reference:
      self.frozen = jax.tree.map(lambda x: x.copy(), state.params)
      save_tree(self.workdir / "reference", self.frozen)
    return self.run.init_state(state.params).replace(step=state.step)

  @property
  def _keeps_reference(self):
    """Where the reference never moves, it is no part of the state."""
    return self.config.algo.kl_coef > 0 and not self.config.algo.ref_sync_steps

  def _frozen(self, state: TrainState, first: bool) -> Any:
    """Of a run whose GRPO has begun, or begins at once with its first step."""
    if self.run.model.lora or not self._keeps_reference:
      return self.run.parameters.base
    if first:
      return jax.tree.map(lambda x: x.copy(), state.params)
    if not self.first_grpo_step:
      return self.run.initial_params()
    return restore_tree(self.workdir / "reference", self.run.parameters.abstract)

  # Steps.

  def warm_step(self, state: TrainState, step: int) -> tuple[TrainState, dict]:
    """One supervised update on worked solutions."""
    config, clock, prompts = self.config, Clock(), self.collect.prompts
    where = loader.indices(config.seed, step, config.warm_start.batch, len(prompts))
    data = loader.supervised_batch(prompts, where, self.run.tokenizer, config.sampling.max_tokens)
    batch = self.run.put(
      Batch(
        data.prompts.prompts_PS,
        data.prompts.prompt_lengths_P,
        data.completions_PT[:, None],
        data.mask_PT[:, None],
        None,
        None,
      )
    )
    state, metrics = self.run.warm_update(state, None, batch)
    metrics = {f"warm_start/{name}": value for name, value in jax.device_get(metrics).items()}
    return state, metrics | {"warm_start/dropped": data.dropped, "time/step": clock.total()}

  def grpo_step(self, state: TrainState, step: int) -> tuple[TrainState, dict]:
    """Sample, score, compare with the group, update."""
    config, run, clock, index = self.config, self.run, Clock(), step - self.first_grpo_step
    collected = self.collect(run.parameters.for_sampling(state.params), index, clock)
    batch, advantages = self._prepared(state, collected)
    clock.lap("reference")
    state, metrics = self._update(state, batch)
    if config.algo.ref_sync_steps and (index + 1) % config.algo.ref_sync_steps == 0:
      state = run.sync_reference(state)
    clock.lap("update")
    times, last = {"step": clock.total()} | clock.laps, (index + 1) * run.updates_per_step - 1
    if config.log.completions_every and (index + 1) % config.log.completions_every == 0:
      self._completions(step + 1, collected.rows(), run.fetch(batch.advantages_PGT[..., 0]))
    return state, collected.metrics | jax.device_get(advantages) | metrics | {
      "learning_rate": float(
        learning_rate(config.optimizer, config.steps * run.updates_per_step)(last)
      ),
      "perf/tokens_per_second": collected.metrics["completions/tokens"] / times["step"],
    } | {f"time/{name}": seconds for name, seconds in times.items()}

  def _prepared(self, state, collected):
    """The batch with the reference's log-probs and its advantages, and metrics of these."""
    run, algo, batch = self.run, self.config.algo, collected.batch
    if algo.kl_coef and algo.kl != "full":
      reference = self.frozen if state.reference is None else run.parameters.policy(state.reference)
      batch = batch.replace(ref_logprobs_PGT=run.logprobs(reference, batch))
    return jax.block_until_ready(run.with_advantages(batch, collected.scores, state.coefs.kl))

  def _update(self, state, batch):
    """algo.updates_per_batch passes over the minibatches. Metrics are means over all their tokens, of loss and norm over the
    updates, or extremes."""
    algo, told = self.config.algo, []
    if self.run.updates_per_step > 1 and algo.old_logprobs == "recomputed":
      batch = batch.replace(
        old_logprobs_PGT=self.run.logprobs(self.run.parameters.policy(state.params), batch)
      )
    parts = self.run.minibatches(batch) if algo.minibatches > 1 else [batch]
    for _ in range(algo.updates_per_batch):
      for part in parts:
        state, metrics = self.run.update(state, self.frozen, part)
        told.append(metrics)
    told = jax.device_get(told)
    tokens = [m.pop("tokens") for m in told]
    mean = lambda values, weights: statistics.fmean(values, weights) if any(weights) else math.nan
    per_token, per_update = (
      functools.partial(mean, weights=w) for w in (tokens, [n > 0 for n in tokens])
    )
    of_all = {
      "ratio/max": max,
      "ratio/min": min,
      "skipped_updates": sum,
      "loss": per_update,
      "grad_norm": per_update,
    }
    metrics = {
      name: of_all.get(name, per_token)([float(m[name]) for m in told]) for name in told[0]
    }
    if algo.kl_target:
      metrics["kl_coef"] = float(state.coefs.kl)  # of the next update
    if algo.entropy_target:
      metrics["entropy_coef"] = float(state.coefs.entropy)
    # Of the policy that sampled, so of the first minibatch: the others meet one that has moved.
    return state, metrics | {name: told[0][name] for name in told[0] if name.startswith("sampler/")}

  # After a step.

  def log(self, state: TrainState, step: int, metrics: dict) -> None:
    """One row of metrics.jsonl, with the evaluation where one is due."""
    if self._evaluates(step):
      metrics = metrics | self._evaluate(state, step)
    elif step % self.config.log.every and step != self.last_step:
      return
    self._write(step, metrics)

  def maybe_save(self, state: TrainState, step: int) -> None:
    """A checkpoint where one is due; every row up to its step is written by then."""
    every = self.config.checkpoint.every
    if every and step % every == 0:
      self.checkpoints.save(step, state)

  def finish(self, state: TrainState, step: int) -> None:
    """Saves what is not saved yet, waits for it and says where everything is."""
    if step:
      self.checkpoints.save(step, state)
    self.checkpoints.wait()
    if step < self.last_step:
      self.terminal.say(f"stopped at step {step}; the same command goes on from there")
    else:
      self.terminal.say(f"finished: metrics, completions and checkpoints are in {self.workdir}")

  def _evaluates(self, step):
    every, index = self.config.eval.every, step - self.first_grpo_step
    return bool(every) and index >= 0 and (index % every == 0 or step == self.last_step)

  def _evaluate(self, state, step):
    clock = Clock()
    metrics = self.evaluator(self.run.parameters.for_sampling(state.params), step)
    return metrics | {"time/evaluate": clock.total()}

  def _write(self, step, metrics):
    values = {name: float(value) for name, value in metrics.items()}
    if self.writer:
      self.writer.write(step, values)
    self.terminal.update(step, values)

  def _completions(self, step, rows, advantages_PG):
    """Saves and shows a step's completions, each with the advantage of its first token."""
    rows = [row | {"advantage": float(a)} for row, a in zip(rows, advantages_PG.ravel())]
    if self.writer:
      self.writer.completions(step, rows)
    self.terminal.completions(
      step, rows[:: max(1, len(rows) // 4 - 1)]
    )  # of several prompts and group members

  def _on_first_process(self, act):
    """act() on the process that writes, None on the others. Where it fails, all of them end."""
    result = error = None
    if self.run.is_first_process:
      try:
        result = act()
      except ConfigError as e:
        error = e
    if self.run.any_process(error is not None):
      raise error or ConfigError("the first process has ended: see what it says")
    return result

  def _warn(self, text):
    self.terminal.say(f"warning: {text}")

  def _header(self, step):
    c, run, device = self.config, self.run, jax.devices()[0]
    axes = " x ".join(f"{name} {size}" for name, size in run.mesh.shape.items())
    lines = [
      f"{jax.device_count()} x {device.device_kind} ({device.platform}), mesh {axes}; {run.parameters.describe()}; "
      f"{c.batch.prompts} prompts x {c.batch.group_size} completions of at most {c.sampling.max_tokens} tokens"
    ]
    for prompts, split in (
      (self.collect.prompts, "training"),
      (self.evaluator and self.evaluator.prompts, "test"),
    ):
      if prompts and prompts.dropped:
        lines.append(
          f"{prompts.dropped} {split} prompts are longer than data.max_prompt_tokens = "
          f"{c.data.max_prompt_tokens} and left out; {len(prompts)} remain"
        )
    whole = sharding.undivided(run.parameters.abstract_policy, run.mesh)
    if whole:
      lines.append(f"{len(whole)} dimensions of parameters stay whole, such as {whole[0]}")
    if run.updates_per_step == 1 and any(
      getattr(c.algo, name) != DEFAULTS[name] for name in OF_THE_RATIO
    ):
      lines.append(
        f"one update per batch, so the ratio is 1: algo.{', algo.'.join(OF_THE_RATIO)} change nothing; "
        "algo.minibatches or algo.updates_per_batch would make them matter"
      )
    if step:
      lines.append(f"going on from step {step} of {self.last_step} in {self.workdir}")
    self.terminal.header(lines)


class Clock:
  """Seconds since the start, in all and in parts."""

  def __init__(self):
    self.start = self.last = time.perf_counter()
    self.laps: dict[str, float] = {}

  def lap(self, name: str) -> None:
    """Since the last lap, it was `name`."""
    now = time.perf_counter()
    self.laps[name] = self.laps.get(name, 0.0) + now - self.last
    self.last = now

  def total(self) -> float:
    return time.perf_counter() - self.start


def main(argv):
  del argv
  config = cli.read_config()
  if not flags.FLAGS.workdir:
    raise ConfigError(
      "flag --workdir is missing: the folder for this run's metrics and checkpoints"
    )
  initialize_distributed()
  train(config, flags.FLAGS.workdir)


if __name__ == "__main__":
  config_flags.DEFINE_config_file(
    "config", None, "the config, such as configs/arithmetic.py or configs/gsm8k.py"
  )
  flags.DEFINE_string(
    "workdir", None, "the run's folder; made if need be, gone on with if it has a checkpoint"
  )
  cli.run(main)
