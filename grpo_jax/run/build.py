"""A run's parts, built from its config: what train, evaluate, sample and export have in common."""

import dataclasses
import functools
from typing import Any, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from grpo_jax import masked, model
from grpo_jax.algo.advantages import ADVANTAGES
from grpo_jax.algo.kl import KL
from grpo_jax.config import Algo, Config, Sampling
from grpo_jax.data import tasks, tokenizer
from grpo_jax.data.loader import Prompts
from grpo_jax.learner import optimizer as optim
from grpo_jax.learner import train_step as learner
from grpo_jax.model import hub
from grpo_jax.parallel import mesh as mesh_lib
from grpo_jax.parallel import sharding
from grpo_jax.rewards import Reward, resolve_all, silent
from grpo_jax.run import rollout
from grpo_jax.run.checks import check
from grpo_jax.run.parameters import Parameters, Progress
from grpo_jax.run.reward_model import RewardModel
from grpo_jax.settings import ConfigError
from grpo_jax.types import Batch, Rewards, Scores, TrainState


class Run:
  """Mesh, tokenizer, task, model and jitted functions of a config. Raises ConfigError for what cannot be run."""

  def __init__(
    self,
    config: Config,
    progress: Progress = lambda *_: None,
    devices: Sequence[jax.Device] | None = None,
  ):
    """`progress` is told how much of a checkpoint is read. `devices`: those of the mesh, if not all there are."""
    check(config)
    self.config, here = config, hub.local(config)
    # Else a float32 product is one of bfloat16 on a TPU and of TF32 on a GPU.
    jax.config.update(
      "jax_default_matmul_precision", "float32" if config.model.dtype == "float32" else None
    )
    self.mesh = mesh_lib.make_mesh(config.mesh, devices)
    if here.model.path:
      model.load_config(
        here.model.path
      )  # what is wrong with the folder is told before it lacks a tokenizer
    self.tokenizer = self._load_tokenizer(here)
    shape = _model_config(here, self.tokenizer)
    for key, value, off in (
      ("mesh.expert", self.mesh.shape["expert"], 1),
      ("learner.router_aux_coef", config.learner.router_aux_coef, 0),
    ):
      if value != off and not shape.num_experts:
        raise ConfigError(f"config key {key} is {value}: the model has no experts; set {off}")
    self.parameters = Parameters(here, shape, self.mesh, progress)
    self.model = self.parameters.model
    longest = config.data.max_prompt_tokens + config.sampling.max_tokens
    if longest > self.model.max_positions:
      raise ConfigError(
        f"config keys data.max_prompt_tokens + sampling.max_tokens are {longest} tokens: the model has "
        f"{self.model.max_positions} positions"
      )

  # Data.

  @functools.cached_property
  def task(self) -> tasks.Task:
    """Made when first asked for: to sample or export, no data set is needed."""
    return tasks.make_task(self.config.data)

  @functools.cached_property
  def functions(self) -> list[Reward]:
    """The reward functions. Models are computed by all processes together, the others called by the first alone."""
    functions = resolve_all(self.config.reward.functions, self._reward_model)
    return [
      f if self.is_first_process or isinstance(f, RewardModel) else silent(f) for f in functions
    ]

  def _reward_model(self, path):
    reward = self.config.reward
    self.check_rows(reward__batch=reward.batch)
    dtype = reward.dtype or self.config.model.dtype
    scorer = RewardModel(
      path, dataclasses.replace(reward, dtype=dtype), self.mesh, self.put, self.fetch
    )
    if self.config.data.chat:
      scorer.check_conversations()
    return scorer

  @property
  def reward_weights(self) -> tuple[float, ...]:
    """Of the scores of a completion: of each reward function, and of the penalty for length where that is on."""
    return self.config.reward.weights + (1.0,) * bool(self.config.algo.overlong)

  def _load_tokenizer(self, config):
    data, path = config.data, config.model.path
    if data.tokenizer or path:
      return tokenizer.load(data.tokenizer or path)
    return tokenizer.characters(self.task.alphabet + data.prompt.replace("{question}", ""))

  def check_rows(self, **sizes: int) -> None:
    """Raises ConfigError for a batch (config key with __ for its dot) that the mesh does not divide."""
    rows = self.model.row_shards
    for name, size in sizes.items():
      if size % rows:
        raise ConfigError(
          f"config key {name.replace('__', '.')} is {size}: it must be a multiple of mesh.data x "
          f"mesh.fsdp x mesh.expert = {rows}"
        )

  def prompts(self, split: str) -> Prompts:
    """The prompts of split `train` or `test`; the first eval.examples of the latter."""
    data, examples = self.config.data, getattr(self.task, split)
    if split == "test":
      examples = examples[: self.config.eval.examples]
    return Prompts(examples, self.tokenizer, data)

  def put(self, tree: Any) -> Any:
    """Host arrays, the same on every process, onto the mesh with their first axis over data x fsdp x expert."""
    where = sharding.batch_sharding(self.mesh)
    return jax.tree.map(
      lambda x: jax.make_array_from_callback(x.shape, where, lambda i: np.asarray(x)[i]), tree
    )

  def fetch(self, tree: Any) -> Any:
    """Arrays of the mesh as whole numpy arrays on every process."""
    if jax.process_count() > 1:
      tree = multihost_utils.process_allgather(tree, tiled=True)
    return jax.device_get(tree)

  def any_process(self, here: bool) -> bool:
    """Whether it is so on one of the processes: what they then do, they do together."""
    return (
      here
      if jax.process_count() == 1
      else bool(multihost_utils.process_allgather(np.array(here)).any())
    )

  @property
  def is_first_process(self) -> bool:
    """It alone scores, and writes what is not a checkpoint."""
    return jax.process_index() == 0

  def from_first_process(self, tree: Any) -> Any:
    """The first process's arrays, on all of them."""
    if jax.process_count() > 1:
      tree = jax.tree.map(np.asarray, multihost_utils.broadcast_one_to_all(tree))
    return tree

  # State.

  def initial_params(self) -> Any:
    """What is trained, before the first update, each in its place on the mesh."""
    return self.parameters.initial(self.key("init"))

  def key(self, stream: str) -> jax.Array:
    """The root of one of the run's streams of random numbers."""
    return jax.random.fold_in(
      jax.random.key(self.config.seed), ("init", "sample", "evaluate").index(stream)
    )

  @functools.cached_property
  def algo(self) -> Algo:
    """config.algo, with the length that `constant` divides by filled in."""
    algo = self.config.algo
    return dataclasses.replace(
      algo, length_norm=algo.length_norm or self.config.sampling.max_tokens
    )

  @property
  def updates_per_step(self) -> int:
    """Optimizer updates that one GRPO step makes."""
    return self.algo.updates_per_batch * self.algo.minibatches

  @functools.cached_property
  def optimizer(self):
    return optim.make_optimizer(self.config.optimizer, self.config.steps * self.updates_per_step)

  @functools.cached_property
  def warm_optimizer(self):
    """Of the warm start: the same state, so that one checkpoint layout serves both."""
    warm = self.config.warm_start
    return optim.make_optimizer(
      dataclasses.replace(
        self.config.optimizer,
        learning_rate=warm.learning_rate,
        warmup_steps=warm.warmup_steps,
        schedule="constant",
      ),
      warm.steps,
    )

  @functools.cached_property
  def abstract_state(self) -> TrainState:
    """Shapes and shardings of the train state."""
    abstract = jax.eval_shape(self._init_state, self.parameters.abstract)
    return jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      abstract,
      sharding.state_shardings(abstract, self.mesh),
    )

  def init_state(self, params: Any) -> TrainState:
    """A state before its first update. `params` are given up to it."""
    return jax.jit(
      self._init_state, out_shardings=_shardings(self.abstract_state), donate_argnums=0
    )(params)

  def _init_state(self, params):
    return learner.init_state(params, self.optimizer, self.algo)

  # Jitted functions.

  def sampler(self, sampling: Sampling, group_size: int) -> rollout.Sampler:
    """sample(params, prompts_PS, prompt_lengths_P, key, first_prompt), from `parameters.for_sampling(...)`."""
    return jax.jit(
      rollout.make_sampler(self.model, sampling, group_size),
      out_shardings=sharding.batch_sharding(self.mesh),
    )

  @functools.cached_property
  def to_batch(self):
    """(completions, prompts_PS, prompt_lengths_P, live_P) -> Batch, without advantages and reference log-probs.

    Groups where live_P is 0 are left out of the loss.
    """
    algo = self.algo

    def to_batch(out, prompts_PS, prompt_lengths_P, live_P) -> Batch:
      mask_PGT = (jnp.arange(out.tokens_PGT.shape[-1]) < out.lengths_PG[..., None]) & (live_P != 0)[
        :, None, None
      ]
      if algo.mask_truncated:
        mask_PGT = mask_PGT & (out.stopped_by_PG >= 0)[..., None]
      several = self.updates_per_step > 1  # else old is the policy itself
      return Batch(
        prompts_PS,
        prompt_lengths_P,
        out.tokens_PGT,
        mask_PGT.astype(jnp.float32),
        None,
        out.logprobs_PGT,
        out.sampling_logprobs_PGT,
        out.logprobs_PGT if several else None,
      )

    return jax.jit(to_batch, out_shardings=sharding.batch_sharding(self.mesh))

  @functools.cached_property
  def with_advantages(self):
    """(batch, Scores, weight of the KL in the reward) -> the batch with its advantages, and metrics of them."""
    algo, weights = self.algo, jnp.array(self.reward_weights, jnp.float32)

    def with_advantages(batch, scores: Scores, kl_coef) -> tuple[Batch, learner.Metrics]:
      given = lambda scores_PGK, **more: Rewards(
        jnp.moveaxis(scores_PGK, -1, 0), weights, batch.mask_PGT, **more
      )
      greedy_P = penalty_PGT = None
      if scores.greedy_P1K is not None:
        greedy_P = given(scores.greedy_P1K).score_PG[:, 0]
      if algo.kl_coef and algo.kl_in == "reward":
        penalty_PGT = kl_coef * masked.masked(
          KL[algo.kl](batch.sampler_logprobs_PGT, batch.ref_logprobs_PGT), batch.mask_PGT
        )
      rewards = given(
        scores.scores_PGK,
        greedy_P=greedy_P,
        penalty_PGT=penalty_PGT,
        step_rewards_PGT=scores.step_rewards_PGT,
        step_ends_PGT=scores.step_ends_PGT,
      )
      advantages = ADVANTAGES[algo.advantage](rewards, algo)
      advantages_PGT = batch.mask_PGT * (
        advantages if advantages.ndim == 3 else advantages[..., None]
      )
      learning_PG = (advantages_PGT != 0).any(-1)
      spread = jnp.sqrt(
        masked.mean(
          (advantages_PGT - masked.mean(advantages_PGT, batch.mask_PGT)) ** 2, batch.mask_PGT
        )
      )
      metrics = {
        "advantage/std": spread,
        "advantage/min": advantages_PGT.min(),
        "advantage/max": advantages_PGT.max(),
        "batch/completions": learning_PG.sum(),
        "batch/tokens": (learning_PG[..., None] * batch.mask_PGT).sum(),
      }
      return batch.replace(advantages_PGT=advantages_PGT), metrics

    sharded, whole = sharding.batch_sharding(self.mesh), NamedSharding(self.mesh, PartitionSpec())
    return jax.jit(with_advantages, out_shardings=(sharded, whole))

  @functools.cached_property
  def minibatches(self):
    """batch -> its algo.minibatches parts, each for an optimizer step."""

    def minibatches(batch) -> list[Batch]:
      parts = learner.micro_batches(batch, self.config.batch.prompts // self.algo.minibatches)
      return [jax.tree.map(lambda x: x[i], parts) for i in range(self.algo.minibatches)]

    return jax.jit(minibatches, out_shardings=sharding.batch_sharding(self.mesh))

  @functools.cached_property
  def logprobs(self):
    """(all parameters, batch) -> log-probs [P, G, T]: of the reference, or of the policy before an update."""
    c = self.config

    def logprobs(params, batch) -> jax.Array:
      x = learner.batch_stats(
        params, batch, self.model, c.sampling.temperature, c.learner, c.batch.micro_batch
      )
      return x.logprobs_PGT

    return jax.jit(logprobs, out_shardings=sharding.batch_sharding(self.mesh))

  @functools.cached_property
  def update(self):
    """(state, frozen, batch) -> (state, metrics): one GRPO update; the state is donated."""
    c = self.config
    loss = learner.grpo(self.model, self.algo, c.sampling.temperature, c.learner)
    return self._jit_step(loss, self.optimizer, c.batch.micro_batch)

  @functools.cached_property
  def warm_update(self):
    """(state, None, batch) -> (state, metrics): one supervised update; the state is donated."""
    return self._jit_step(
      learner.supervised(self.model, self.config.learner), self.warm_optimizer, 0
    )

  def _jit_step(self, loss, optimizer, micro_batch):
    def train_step(state: TrainState, frozen: Any, batch: Batch):
      return learner.train_step(state, frozen, batch, loss, optimizer, micro_batch)

    shardings = _shardings(self.abstract_state), NamedSharding(self.mesh, PartitionSpec())
    return jax.jit(train_step, donate_argnums=0, out_shardings=shardings)

  @functools.cached_property
  def sync_reference(self):
    """state -> the state whose reference has moved towards its policy; the state is donated."""
    sync = functools.partial(learner.sync_reference, mixup=self.algo.ref_mixup)
    return jax.jit(sync, donate_argnums=0, out_shardings=_shardings(self.abstract_state))


def _model_config(config, tokens):
  m = config.model
  if m.path:
    shape = model.load_config(m.path)
    if tokens.vocab_size > shape.vocab_size:
      raise ConfigError(
        f"config key data.tokenizer: {tokens.vocab_size} ids do not fit the {shape.vocab_size} of "
        f"{m.path}"
      )
  else:
    shape = model.ModelConfig(
      tokens.vocab_size,
      m.embed_dim,
      m.num_layers,
      m.num_heads,
      m.num_kv_heads,
      m.head_dim,
      m.mlp_dim,
      m.rope_theta,
      tie_embeddings=m.tie_embeddings,
    )
  stop_ids = tuple(dict.fromkeys((*tokens.stop_ids, *shape.stop_ids)))
  return dataclasses.replace(shape, stop_ids=stop_ids, dtype=m.dtype)


def _shardings(abstract):
  return jax.tree.map(lambda x: x.sharding, abstract)
