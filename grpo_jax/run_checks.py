"""What a config's values must satisfy before anything is built."""
from grpo_jax.algo.advantages import ADVANTAGES
from grpo_jax.algo.aggregation import AGGREGATIONS
from grpo_jax.algo.kl import KL
from grpo_jax.algo.ratios import RATIOS
from grpo_jax.algo.surrogates import SURROGATES
from grpo_jax.config import Config, ConfigError
from grpo_jax.optim import SCHEDULES

DTYPES = ("float32", "bfloat16")


def check(config: Config) -> None:
  """Raises ConfigError at the first value that cannot be run."""
  c = config

  def need(holds, key, value, why):
    if not holds:
      raise ConfigError(f"config key {key} is {value!r}: {why}")

  def choose(key, value, names):
    need(value in names, key, value, f"choose one of {', '.join(repr(n) for n in names)}")

  for key, value, least in (
      ("steps", c.steps, 0), ("batch.prompts", c.batch.prompts, 1), ("batch.micro_batch", c.batch.micro_batch, 0),
      ("data.max_prompt_tokens", c.data.max_prompt_tokens, 1), ("sampling.max_tokens", c.sampling.max_tokens, 1),
      ("sampling.top_k", c.sampling.top_k, 0), ("learner.logprob_chunk", c.learner.logprob_chunk, 1),
      ("optimizer.warmup_steps", c.optimizer.warmup_steps, 0), ("warm_start.steps", c.warm_start.steps, 0),
      ("warm_start.batch", c.warm_start.batch, 1), ("warm_start.warmup_steps", c.warm_start.warmup_steps, 0),
      ("eval.every", c.eval.every, 0), ("eval.examples", c.eval.examples, 1), ("eval.batch", c.eval.batch, 1),
      ("eval.samples", c.eval.samples, 0), ("checkpoint.every", c.checkpoint.every, 0),
      ("checkpoint.keep", c.checkpoint.keep, 1), ("log.every", c.log.every, 1),
      ("log.completions_every", c.log.completions_every, 0), ("algo.std_ddof", c.algo.std_ddof, 0),
      ("algo.std_eps", c.algo.std_eps, 0), ("optimizer.learning_rate", c.optimizer.learning_rate, 0),
      ("optimizer.weight_decay", c.optimizer.weight_decay, 0),
      ("warm_start.learning_rate", c.warm_start.learning_rate, 0)):
    need(value >= least, key, value, f"it must be at least {least}")
  need(c.batch.group_size >= 2, "batch.group_size", c.batch.group_size,
       "an advantage is relative to the group, so a group needs at least 2 completions")
  if c.batch.micro_batch:
    need(c.batch.prompts % c.batch.micro_batch == 0, "batch.micro_batch", c.batch.micro_batch,
         f"it must divide batch.prompts = {c.batch.prompts}")
  need(c.sampling.temperature > 0, "sampling.temperature", c.sampling.temperature,
       "training needs completions that differ, so it must be above 0")
  need(0 < c.sampling.top_p <= 1, "sampling.top_p", c.sampling.top_p, "it must be in (0, 1]; 1 is off")
  need(0 <= c.sampling.min_p < 1, "sampling.min_p", c.sampling.min_p, "it must be in [0, 1); 0 is off")
  need(c.eval.temperature > 0, "eval.temperature", c.eval.temperature, "eval.samples are drawn, so it must be above 0")
  need(c.optimizer.max_grad_norm >= 0, "optimizer.max_grad_norm", c.optimizer.max_grad_norm, "0 is off, else a norm")
  for key in ("clip_low", "clip_high"):
    need(getattr(c.algo, key) > 0, f"algo.{key}", getattr(c.algo, key),
         "it must be above 0: at 0 even a ratio of 1 is at the bound")
  need(c.algo.kl_coef >= 0, "algo.kl_coef", c.algo.kl_coef, "0 is off, else it must be positive")
  choose("model.dtype", c.model.dtype, DTYPES)
  choose("sampling.dtype", c.sampling.dtype, ("", *DTYPES))
  choose("sampling.layout", c.sampling.layout, ("train", "tensor"))
  choose("optimizer.schedule", c.optimizer.schedule, tuple(SCHEDULES))
  for key, names in (("advantage", ADVANTAGES), ("ratio", RATIOS), ("surrogate", SURROGATES),
                     ("aggregation", AGGREGATIONS), ("kl", KL)):
    choose(f"algo.{key}", getattr(c.algo, key), tuple(names))
  need(len(c.reward.weights) == len(c.reward.functions) >= 1, "reward.weights", c.reward.weights,
       f"it must hold one number for each of reward.functions = {c.reward.functions}, and there must be at least one")
  need(c.algo.std_ddof < c.batch.group_size, "algo.std_ddof", c.algo.std_ddof,
       f"it must be below batch.group_size = {c.batch.group_size}")
  if not c.model.path:
    for key in ("embed_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_dim"):
      need(getattr(c.model, key) >= 1, f"model.{key}", getattr(c.model, key), "it must be at least 1")
    need(c.model.num_heads % c.model.num_kv_heads == 0, "model.num_heads", c.model.num_heads,
         f"it must be a multiple of model.num_kv_heads = {c.model.num_kv_heads}")
    need(c.model.head_dim % 2 == 0, "model.head_dim", c.model.head_dim, "rotary embeddings turn pairs: it must be even")
