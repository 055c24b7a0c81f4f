"""A run so small that its programs compile within seconds, and what tests of its parts share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from configs import default
from grpo_jax.batches.collect import Collector
from grpo_jax.config import from_dict
from grpo_jax.run.run import Run
from grpo_jax.scoring.scorers import Scorers
from grpo_jax.storage.checkpoint import Checkpoints
from grpo_jax.timing import Clock
from grpo_jax.training.loop import GrpoStep
from grpo_jax.training.state import StateStore
from grpo_jax.types import Completions

P, G, T = 4, 3, 5
S = 12


def small_config(preset="grpo", **algo):
  """The config of a random model of one layer. `algo` are settings of that section."""
  config = default.get_config(preset)
  config.steps = 1
  config.model.update(
    embed_dim=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=32
  )
  config.batch.update(prompts=P, group_size=G)
  config.data.max_prompt_tokens, config.sampling.max_tokens = S, T
  config.optimizer.learning_rate = 1e-2
  config.mesh.update(data=1, fsdp=1, tensor=-1)
  config.log.update(completions_every=1, tensorboard=False)
  config.reward.workers = 0  # they take half a second to start
  config.data.count_at_start = 500  # to count all 20,000 prompts takes another half
  config.algo.update(algo)
  return from_dict(config.to_dict())


def with_section(config, name, /, **values):
  """The config with other values in one of its sections."""
  section = dataclasses.replace(getattr(config, name), **values)
  return dataclasses.replace(config, **{name: section})


def with_reward(config, folder, source, names=("reward",), weights=None):
  """The config with reward functions of this source, which is written to a file of the folder."""
  (folder / "reward.py").write_text(source)
  functions = tuple(f"{folder}/reward.py:{name}" for name in names)
  return with_section(
    config, "reward", functions=functions, weights=weights or (1.0,) * len(functions)
  )


def small_run(config):
  """The run on one device, which compiles faster than on all of them."""
  return Run(config, devices=jax.devices()[:1])


def grpo_step(run, workdir, collector=None):
  """(step, store, collector) of a run, as `grpo_jax.train` puts them together."""
  collector = collector or Collector(run, Scorers(run))
  checkpoints = Checkpoints(workdir / "checkpoints", keep=1)
  store = StateStore(run, workdir, checkpoints, {"num_tokens": np.int64(0)})
  return GrpoStep(run, collector, store), store, checkpoints


class Collected:
  """What a run collects in its first step.

  Attributes:
    run, collector: What collected it.
    found: What was collected, whose completions are `rows` and whose metrics are `metrics`.
  """

  def __init__(self, config):
    self.run = small_run(config)
    scorers = Scorers(self.run)
    try:
      self.collector = Collector(self.run, scorers)
      params = self.run.parameters.for_sampling(self.run.initial_params())
      self.found = self.collector(params, 0, self.collector.initial_host_state(), Clock())
    finally:
      scorers.close()
    self.rows, self.metrics = self.found.rows, self.found.metrics


def random_completions(seed=0):
  """Rows of 1 to T tokens. Those of T tokens were cut off, the others were stopped."""
  rng = np.random.default_rng(seed)
  lengths_PG = rng.integers(1, T + 1, (P, G))
  is_token = np.arange(T) < lengths_PG[..., None]
  logprobs_PGT = np.where(is_token, -rng.random((P, G, T)), 0).astype(np.float32)
  tokens_PGT = np.where(is_token, rng.integers(1, 9, (P, G, T)), 0)
  return Completions(
    tokens_PGT=jnp.asarray(tokens_PGT, jnp.int32),
    lengths_PG=jnp.asarray(lengths_PG, jnp.int32),
    sampled_PGT=jnp.asarray(is_token),
    logprobs_PGT=jnp.asarray(logprobs_PGT),
    behavior_logprobs_PGT=jnp.asarray(logprobs_PGT + 0.1),
    stopped_by_PG=jnp.asarray(np.where(lengths_PG == T, -1, 0), jnp.int32),
  )


def batch_of(run, completions=None, live_P=None):
  """The run's batch of these completions, or of random ones, after random prompts."""
  rng = np.random.default_rng(0)
  return run.programs.to_batch(
    random_completions() if completions is None else completions,
    jnp.asarray(rng.integers(1, 9, (P, S)), jnp.int32),
    jnp.asarray(rng.integers(1, S + 1, P), jnp.int32),
    jnp.ones(P),
    jnp.ones(P) if live_P is None else jnp.asarray(live_P),
  )
