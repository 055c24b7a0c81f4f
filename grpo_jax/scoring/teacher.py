"""The teacher of on-policy distillation: a frozen model that scores the policy's tokens."""

from collections.abc import Iterator
import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import jax

from grpo_jax import learner, model
from grpo_jax.data.tokenizers import tokenizer
from grpo_jax.data.tokenizers.tokenizer import Tokenizer
from grpo_jax.model.huggingface import hub
from grpo_jax.parallel import sharding
from grpo_jax.run.parameters import load_frozen
from grpo_jax.run.run import Run
from grpo_jax.settings import ConfigError
from grpo_jax.types import Batch

_KEY = "reward.teacher"


class Teacher:
  """The model of reward.teacher, on the mesh of the policy."""

  def __init__(self, run: Run):
    """Loads the model onto the mesh.

    Raises:
      ConfigError: The folder is unusable, or the teacher has another tokenizer, too few embeddings
        or too few positions.
    """
    config, hosts, micro_batch = run.config, run.hosts, run.programs.micro_batch
    reward = config.reward
    folder = Path(hub.folder(reward.teacher, _KEY)).expanduser()
    with _naming_the_key():
      shape = model.load_model_config(folder)
    _check_tokenizer(tokenizer.load(folder, _KEY), run.tokenizer, shape.vocab_size)
    if shape.vocab_size < run.parameters.model.vocab_size:
      raise ConfigError(
        f"config key {_KEY}: the teacher has {shape.vocab_size} rows of embeddings and the policy"
        f" {run.parameters.model.vocab_size}, and it cannot score the ids that it lacks; choose a"
        " teacher with as many rows, also of ids that are no tokens"
      )
    longest = config.data.max_prompt_tokens + config.sampling.max_tokens
    if longest > shape.max_positions:
      raise ConfigError(
        f"config key {_KEY}: the teacher has {shape.max_positions} positions, and"
        f" data.max_prompt_tokens + sampling.max_tokens are {longest} tokens"
      )
    # The teacher computes as the policy does: with its dtype, attention and split of tokens.
    shardings: dict[str, Any] = sharding.model_shardings(shape, hosts.mesh, splits_tokens=True)
    policy = config.model
    shardings["completion_tokens"] = config.sampling.max_tokens  # for rotary scalings by length
    shape = dataclasses.replace(shape, dtype=policy.dtype, attention=policy.attention, **shardings)
    options = learner.StatsOptions(shape, config.learner)
    with _naming_the_key():
      self._params = load_frozen(folder, shape, hosts.mesh)

    places = learner.places_on(hosts.mesh)
    self._logprobs = learner.logprobs_pass(options, micro_batch, places)

  def __call__(self, batch: Batch) -> jax.Array:
    """Returns the teacher's log-probs at the sampling temperature, float32 [P, G, T]."""
    return self._logprobs(self._params, batch.without_experts())


@contextlib.contextmanager
def _naming_the_key() -> Iterator[None]:
  """Adds the config key to errors from loading the folder, which only name files."""
  try:
    yield
  except ConfigError as error:
    raise ConfigError(f"config key {_KEY}: {error}") from None


def _check_tokenizer(teacher: Tokenizer, policy: Tokenizer, vocab_size: int) -> None:
  """Raises ConfigError unless the teacher (`vocab_size` ids) decodes ids as the policy does."""
  if vocab_size < policy.vocab_size:
    raise ConfigError(
      f"config key {_KEY}: the teacher has {vocab_size} ids and the policy {policy.vocab_size};"
      " choose a teacher with the tokenizer of the policy"
    )
  for token in range(policy.vocab_size):
    ours, theirs = policy.decode([token]), teacher.decode([token])
    if ours != theirs:
      raise ConfigError(
        f"config key {_KEY}: token {token} is {ours!r} for the policy and {theirs!r} for the"
        " teacher; choose a teacher with the tokenizer of the policy"
      )
