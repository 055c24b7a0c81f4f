"""Checks a config together with its model, its mesh and its devices."""

from typing import Any

import jax

from grpo_jax import model
from grpo_jax.algo.advantages import ADVANTAGES
from grpo_jax.config import Config
from grpo_jax.data.tokenizers.tokenizer import Tokenizer
from grpo_jax.parallel.chips import machine_memory, reported_memory
from grpo_jax.parallel.hosts import Hosts
from grpo_jax.run.memory import device_bytes
from grpo_jax.settings import ConfigError


def check_apart(config: Config, shape: model.ModelConfig, processes: int) -> None:
  """Checks a run with several processes whose `mesh.sampler` devices only sample.

  When these devices sample ahead, concurrently with the learner, some settings would make the
  processes start collectives in an order that depends on timing, which deadlocks. These settings
  are refused even if the run does not sample ahead.

  Args:
    config: The config of a run whose mesh.sampler is above 0.
    shape: The shape of the model.
    processes: How many processes the run has.

  Raises:
    ConfigError: One of these settings is used.
  """
  if processes == 1:
    return
  algo, key = config.algo, f"config key mesh.sampler is {config.mesh.sampler}"
  for is_met, condition in (
    (config.rollout.weights == "fixed", "rollout.weights must be 'fixed'"),
    (not algo.dynamic_sampling, "algo.dynamic_sampling must be False"),
    (not config.curriculum.chooses, "the curriculum must choose no prompts"),
    (not ADVANTAGES[algo.advantage].needs_greedy, "algo.advantage must need no greedy completions"),
    (not config.environment.has_turns, "there must be no tools and no environment"),
    (shape.vision is None, "the model must see no images"),
  ):
    if not is_met:
      raise ConfigError(f"{key}: in a run of several processes, {condition}; or set mesh.sampler=0")


def check_memory(params: Any, mesh: jax.sharding.Mesh) -> None:
  """Raises ConfigError if the parameters alone do not fit in the memory of a device.

  Args:
    params: The shapes and shardings of the parameters.
    mesh: The devices. Nothing is checked if they do not report how much memory they have.
  """
  needed = device_bytes(params)
  if mesh.devices.flat[0].platform == "cpu":  # all CPU devices share the memory of this machine
    needed *= len(mesh.local_devices)
    memory: float | None = machine_memory()
  else:
    memory = reported_memory(mesh.local_devices[0]) if mesh.local_devices else None
  if memory is not None and needed > memory:
    raise ConfigError(
      f"the parameters alone take {needed / 1e9:,.1f} GB, and there are {memory / 1e9:,.1f} GB of"
      " memory: choose a smaller model.path, lower model.embed_dim, model.mlp_dim or"
      " model.num_layers, or split it over more devices with mesh.fsdp or mesh.tensor"
    )


def check_batches(config: Config, hosts: Hosts) -> None:
  """Raises ConfigError for batch sizes that the mesh does not divide."""
  hosts.check_rows(
    {
      "batch.prompts": config.batch.prompts,
      "eval.batch": config.eval.batch if config.eval.every else 0,
    }
  )
  learned = {
    "batch.micro_batch": config.batch.micro_batch,
    "warm_start.batch": config.warm_start.batch if config.warm_start.steps else 0,
  }
  hosts.check_rows(learned, sampled=False)
  count = config.algo.minibatches
  part = config.batch.prompts // count
  if part % hosts.learner_row_shards:
    raise ConfigError(
      f"config key algo.minibatches is {count}: batch.prompts / algo.minibatches = {part} must be a"
      f" multiple of mesh.data x mesh.fsdp x mesh.expert = {hosts.learner_row_shards}"
    )
  rows = config.sampling.rows
  if rows and rows < hosts.row_shards:
    raise ConfigError(
      f"config key sampling.rows is {rows}: it must be 0, or at least {hosts.row_shards}, the parts"
      " into which devices split rows (mesh.data x mesh.fsdp x mesh.expert, mesh.context,"
      " mesh.sampler)"
    )


def check_stop_ids(config: Config, shape: model.ModelConfig) -> None:
  """Raises ConfigError for a stop id outside the model's vocabulary."""
  for stop_id in config.sampling.stop_ids:
    if not 0 <= stop_id < shape.vocab_size:
      raise ConfigError(
        f"config key sampling.stop_ids holds {stop_id}: the model's ids are 0 to"
        f" {shape.vocab_size - 1}"
      )


def check_stop_texts(config: Config, tokens: Tokenizer, shape: model.ModelConfig) -> None:
  """Raises ConfigError for a stop text that no completion shows, because it is a special token.

  Such a text is no error if the token ends completions anyway.
  """
  ending = {*shape.stop_ids, *config.sampling.stop_ids}
  for token, text in tokens.skipped(config.sampling.stop).items():
    if token not in ending:
      raise ConfigError(
        f"config key sampling.stop holds {text!r}: it is a special token, whose text is not in a"
        f" completion; put its id {token} into sampling.stop_ids"
      )


def check_length(config: Config, shape: model.ModelConfig) -> None:
  """Raises ConfigError if the longest prompt and completion have more tokens than positions."""
  longest = config.data.max_prompt_tokens + config.sampling.max_tokens
  if longest > shape.max_positions:
    raise ConfigError(
      f"config keys data.max_prompt_tokens + sampling.max_tokens are {longest} tokens: the model"
      f" has {shape.max_positions} positions"
    )
