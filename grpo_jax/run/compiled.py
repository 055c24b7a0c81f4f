"""The jitted functions of a run. Each is compiled when it is first called."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from grpo_jax import learner
from grpo_jax.algo import batch as batch_lib
from grpo_jax.algo.settings import Algo
from grpo_jax.compiling import Jitted
from grpo_jax.config import Config, Optimizer
from grpo_jax.data.tokenizers.tokenizer import Tokenizer
from grpo_jax.learner.optimizer import make_optimizer
from grpo_jax.parallel import sharding
from grpo_jax.parallel.chips import memory_of
from grpo_jax.run import fitting
from grpo_jax.run.memory import Held, activation_bytes, sampler_bytes
from grpo_jax.run.parameters import Parameters, count
from grpo_jax.sampler.guides import Guided, guides_of
from grpo_jax.sampler.sampling import Sampler, decoding_of
from grpo_jax.types import Batch, TrainState


class Programs:
  """Jitted functions for a config, a mesh and a model. They hold no parameters and no state.

  Attributes:
    abstract_state: `Parameters.abstract_state`.
    most_images: `PromptSet.most_images` of the training prompts. None if they were not counted
      before `micro_batch` is chosen.
  """

  def __init__(
    self,
    config: Config,
    mesh: Mesh,
    parameters: Parameters,
    tokenizer: Tokenizer | None = None,
  ):
    """Compiles nothing yet. Only sampling.regex and sampling.banned need the tokenizer."""
    self._config, self._tokenizer = config, tokenizer
    self._mesh = mesh
    self._parameters = parameters
    self._model = parameters.model
    self.abstract_state = parameters.abstract_state
    self._algo = algo_of(config)
    self._rows = sharding.batch_sharding(mesh)
    self._everywhere = NamedSharding(mesh, PartitionSpec())
    updates = config.steps * self._algo.updates_per_step
    self._optimizer = make_optimizer(config.optimizer, updates)
    self._samplers: dict[tuple[int, bool], Sampler] = {}
    self.most_images: tuple[int, int] | None = None

  @property
  def _held(self) -> Held:
    return dataclasses.replace(self._parameters.held, most_images=self.most_images)

  @functools.cached_property
  def micro_batch(self) -> int:
    """How many prompts an update computes at once: batch.micro_batch, or what fits."""
    return fitting.micro_batch(self._updating, self._room)

  @functools.cached_property
  def _updating(self) -> Config:
    """The config of an update, with learner.remat_policy or what fits."""
    return fitting.with_policy(self._config, self._room)

  @functools.cached_property
  def _room(self) -> fitting.Room:
    """The memory of a device during an update, with the rows that stay in flight as held."""
    memory, params = memory_of(self._mesh.devices.flat[0]), self._parameters.abstract_policy
    held = self._held.in_update + self.flight_bytes
    return fitting.Room(self._model, params, held, memory, self.most_images)

  @property
  def saved_activations(self) -> str:
    """Which activations a layer keeps for the backward pass of an update. "" means all."""
    return self._updating.learner.saved_activations

  @functools.cached_property
  def estimate_of_update(self) -> tuple[float, float]:
    """Estimates of one device during an update: bytes without activations, and of activations."""
    needed = self._room.needed(self._updating)
    return self._room.held, needed(-(-self.micro_batch // self._model.row_shards))

  def _rows_in_flight(self, prompts: int, members: int) -> int:
    """How many rows of a sampler call are decoded together, see `fitting.rows_in_flight`.

    `prompts` and `members` are the prompts of the call, and the completions of each prompt.
    """
    parameters, memory = self._parameters, memory_of(self._mesh.devices.flat[0])
    shape, held = parameters.sampling.model, parameters.held.in_sampling
    if self._config.keeps_flight:  # an update with the smallest micro-batch must fit beside them
      params = parameters.abstract_policy
      needed = activation_bytes(self._config, self._model, params, self.most_images)
      held = max(held, self._held.in_update + needed(1))
    return fitting.rows_in_flight(self._config, shape, held, memory, (prompts, members))

  @functools.cached_property
  def flight_bytes(self) -> float:
    """Estimates the bytes on a device of rows that stay in flight during an update. 0 if none."""
    if not self._config.keeps_flight:
      return 0.0
    call = self._config.batch.prompts, self._config.batch.group_size
    rows = self._rows_in_flight(*call)
    return sampler_bytes(self._config, self._parameters.sampling.model, rows, call)

  @functools.cached_property
  def init_state(self) -> Callable[[Any], TrainState]:
    """(trained parameters) -> the state before the first update. The parameters are donated."""
    init = functools.partial(learner.init_state, optimizer=self._optimizer, algo=self._algo)
    return jax.jit(init, out_shardings=self._state_places, donate_argnums=0)

  def sampler(self, max_tokens: int | None = None, keeps_experts: bool = False) -> Sampler:
    """The sampler for completions of up to `max_tokens`, by default sampling.max_tokens.

    With `keeps_experts`, it also returns the experts of each token.
    """
    max_tokens = max_tokens or self._config.sampling.max_tokens
    kind = max_tokens, keeps_experts
    if kind not in self._samplers:
      shape = self._parameters.sampling.model
      shape = dataclasses.replace(shape, keeps_experts=keeps_experts)
      decoding = decoding_of(self._config.sampling, shape.stop_ids)
      decoding = dataclasses.replace(decoding, max_tokens=max_tokens)
      weights = count(self._parameters.abstract_policy)  # with few, small grids are not worth it
      piece = self._config.sampling.prompt_piece
      self._samplers[kind] = Sampler(
        shape, decoding, weights, self._rows_in_flight, self._guide, piece
      )
    return self._samplers[kind]

  @functools.cached_property
  def _guide(self) -> Callable[[], Guided] | None:
    if self._tokenizer is None:
      return None
    return guides_of(self._config.sampling, self._tokenizer, self._model.vocab_size)

  @functools.cached_property
  def to_batch(self) -> Callable[..., Batch]:
    """`algo.batch.to_batch`: (completions, prompts_PS, prompt_lengths_P, temperature_P, live_P)."""

    def to_batch(*arrays: Any) -> Batch:
      batch = batch_lib.to_batch(*arrays, algo=self._algo)
      return batch.replace(old_logprobs_PGT=None) if self._config.old_is_policy else batch

    return jax.jit(to_batch, out_shardings=self._rows)

  @functools.cached_property
  def with_advantages(self) -> Jitted:
    """`algo.batch.with_advantages` for a batch, rewards, and the weight of a KL in the reward."""
    with_advantages = functools.partial(
      batch_lib.with_advantages,
      algo=self._algo,
      teacher_weight=self._config.reward.teacher_weight,
    )
    return Jitted(with_advantages, out_shardings=(self._rows, self._everywhere))

  @functools.cached_property
  def minibatches(self) -> Callable[[Batch], list[Batch]]:
    """(batch) -> algo.minibatches batches, one for each optimizer step of a pass."""
    parts = self._algo.minibatches
    size = self._config.batch.prompts // parts

    def minibatches(batch: Batch) -> list[Batch]:
      stacked = learner.split_batch(batch, size)
      # B023 does not apply: the lambda is called at once, before i changes.
      return [jax.tree.map(lambda x: x[i], stacked) for i in range(parts)]  # noqa: B023

    return jax.jit(minibatches, out_shardings=self._rows)

  @functools.cached_property
  def logprobs(self) -> learner.MicroBatchPass:
    """(all parameters, batch) -> log-probs of the completions, [P, G, T]."""
    options = learner.StatsOptions(self._model, self._updating.learner)
    return learner.logprobs_pass(options, self.micro_batch, self._places)

  @functools.cached_property
  def update(self) -> learner.Update:
    """(state, base, reference, batch) -> (state, metrics): a GRPO update. It donates the state."""
    objective = learner.grpo(self._model, self._algo, self._updating.learner)
    return self._train_step(objective, self._optimizer, self.micro_batch)

  @functools.cached_property
  def warm_update(self) -> learner.Update:
    """(state, base, None, batch) -> (state, metrics): a supervised update. It donates the state."""
    config = self._config
    objective = learner.supervised(self._model, config.learner)
    optimizer = make_optimizer(warm_start_optimizer(config), config.warm_start.steps)
    return self._train_step(objective, optimizer, micro_batch=0)

  @functools.cached_property
  def sync_reference(self) -> Callable[[Any, Any], Any]:
    """(reference, trained parameters) -> the reference, mixed by algo.ref_mixup. It is donated."""
    sync = functools.partial(learner.sync_reference, mixup=self._algo.ref_mixup)
    shardings = jax.tree.map(lambda x: x.sharding, self._parameters.abstract_reference)
    return jax.jit(sync, donate_argnums=0, out_shardings=shardings)

  @property
  def _state_places(self) -> TrainState:
    return jax.tree.map(lambda x: x.sharding, self.abstract_state)

  @property
  def _places(self) -> learner.SlotPlaces:
    return learner.places_on(self._mesh, self._state_places)

  def _train_step(
    self, objective: learner.Objective, optimizer: Any, micro_batch: int
  ) -> learner.Update:
    move, rate = None, self._config.learner.router_bias_rate
    if rate:
      move = functools.partial(learner.moved_biases, config=self._model, rate=rate)
    rule = learner.UpdateRule(objective, optimizer, micro_batch, move, self._mesh)
    return learner.Update(rule, self._model.platform, self._places)


def algo_of(config: Config) -> Algo:
  """config.algo, where `length_norm` defaults to sampling.max_tokens."""
  length_norm = config.algo.length_norm or config.sampling.max_tokens
  return dataclasses.replace(config.algo, length_norm=length_norm)


def warm_start_optimizer(config: Config) -> Optimizer:
  """The optimizer of the warm start. Its state has the same structure as that of GRPO."""
  return dataclasses.replace(
    config.optimizer,
    learning_rate=config.warm_start.learning_rate,
    warmup_steps=10,
    schedule="constant",
  )
