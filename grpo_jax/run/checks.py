"""What a config's values must satisfy before anything is built."""

from grpo_jax import model
from grpo_jax.algo.advantages import ADVANTAGES
from grpo_jax.algo.aggregation import AGGREGATIONS
from grpo_jax.algo.corrections import CORRECTIONS, LEVELS
from grpo_jax.algo.kl import KL
from grpo_jax.algo.presets import DEFAULTS
from grpo_jax.algo.ratios import RATIOS
from grpo_jax.algo.surrogates import SURROGATES
from grpo_jax.config import Config
from grpo_jax.learner.optimizer import SCHEDULES
from grpo_jax.settings import ConfigError

DTYPES = ("float32", "bfloat16")
BASE_DTYPES = (*DTYPES, *model.QUANTISED)
TARGETS = tuple(f"{name}_proj" for name in model.PROJECTIONS)
TOKEN_ONLY = (
  "reinforce",
  "gmpo",
  "vespo",
  "dppo_tv",
  "dppo_kl",
  "dro",
)  # surrogates that read no other ratio
CHOICES = {  # key of algo -> its values
  "advantage": ADVANTAGES,
  "ratio": RATIOS,
  "surrogate": SURROGATES,
  "aggregation": AGGREGATIONS,
  "kl": (*KL, "full"),
  "kl_in": ("loss", "reward"),
  "correction": CORRECTIONS,
  "correction_level": LEVELS,
  "batch_weighting": ("sequence", "token"),
  "old_logprobs": ("sampler", "recomputed"),
}


def check(config: Config) -> None:
  """Raises ConfigError at the first value that cannot be run."""
  c = config

  def need(holds, key, value, why):
    if not holds:
      raise ConfigError(f"config key {key} is {value!r}: {why}")

  def choose(key, value, names):
    need(value in names, key, value, f"choose one of {', '.join(repr(n) for n in names)}")

  for key, value, least in (
    ("steps", c.steps, 0),
    ("batch.prompts", c.batch.prompts, 1),
    ("batch.micro_batch", c.batch.micro_batch, 0),
    ("data.max_prompt_tokens", c.data.max_prompt_tokens, 1),
    ("sampling.max_tokens", c.sampling.max_tokens, 1),
    ("sampling.top_k", c.sampling.top_k, 0),
    ("learner.logprob_chunk", c.learner.logprob_chunk, 1),
    ("learner.router_aux_coef", c.learner.router_aux_coef, 0),
    ("optimizer.warmup_steps", c.optimizer.warmup_steps, 0),
    ("warm_start.steps", c.warm_start.steps, 0),
    ("warm_start.batch", c.warm_start.batch, 1),
    ("warm_start.warmup_steps", c.warm_start.warmup_steps, 0),
    ("reward.batch", c.reward.batch, 1),
    ("eval.every", c.eval.every, 0),
    ("eval.examples", c.eval.examples, 1),
    ("eval.batch", c.eval.batch, 1),
    ("eval.samples", c.eval.samples, 0),
    ("checkpoint.every", c.checkpoint.every, 0),
    ("checkpoint.keep", c.checkpoint.keep, 1),
    ("log.every", c.log.every, 1),
    ("log.completions_every", c.log.completions_every, 0),
    ("optimizer.learning_rate", c.optimizer.learning_rate, 0),
    ("optimizer.weight_decay", c.optimizer.weight_decay, 0),
    ("warm_start.learning_rate", c.warm_start.learning_rate, 0),
  ):
    need(value >= least, key, value, f"it must be at least {least}")
  need(
    c.batch.group_size >= 2,
    "batch.group_size",
    c.batch.group_size,
    "an advantage is relative to the group, so a group needs at least 2 completions",
  )
  if c.batch.micro_batch:
    of = "" if c.algo.minibatches == 1 else " / algo.minibatches"
    need(
      c.batch.prompts // max(1, c.algo.minibatches) % c.batch.micro_batch == 0,
      "batch.micro_batch",
      c.batch.micro_batch,
      f"it must divide batch.prompts{of} = {c.batch.prompts // max(1, c.algo.minibatches)}",
    )
  need(
    c.sampling.temperature > 0,
    "sampling.temperature",
    c.sampling.temperature,
    "training needs completions that differ, so it must be above 0",
  )
  need(
    c.data.chat or not c.data.system,
    "data.system",
    c.data.system,
    "a prompt that is no conversation has no system message; set data.chat=True, or write it into data.prompt",
  )
  need(
    0 < c.sampling.top_p <= 1, "sampling.top_p", c.sampling.top_p, "it must be in (0, 1]; 1 is off"
  )
  need(
    0 <= c.sampling.min_p < 1, "sampling.min_p", c.sampling.min_p, "it must be in [0, 1); 0 is off"
  )
  need(
    c.eval.temperature > 0,
    "eval.temperature",
    c.eval.temperature,
    "eval.samples are drawn, so it must be above 0",
  )
  need(
    c.optimizer.max_grad_norm >= 0,
    "optimizer.max_grad_norm",
    c.optimizer.max_grad_norm,
    "0 is off, else a norm",
  )
  choose("model.dtype", c.model.dtype, DTYPES)
  choose("sampling.dtype", c.sampling.dtype, ("", *DTYPES))
  choose("sampling.layout", c.sampling.layout, ("train", "tensor"))
  choose("optimizer.schedule", c.optimizer.schedule, tuple(SCHEDULES))
  choose("reward.dtype", c.reward.dtype, ("", *DTYPES))
  need(c.reward.step_separator, "reward.step_separator", "", "it must hold at least a character")
  need(
    len(c.reward.weights) == len(c.reward.functions) >= 1,
    "reward.weights",
    c.reward.weights,
    f"it must hold one number for each of reward.functions = {c.reward.functions}, and there must be at least one",
  )
  _check_algo(c, need, choose)
  _check_lora(c, need, choose)
  if not c.model.path:
    for key in ("embed_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_dim"):
      need(
        getattr(c.model, key) >= 1, f"model.{key}", getattr(c.model, key), "it must be at least 1"
      )
    need(
      c.model.num_heads % c.model.num_kv_heads == 0,
      "model.num_heads",
      c.model.num_heads,
      f"it must be a multiple of model.num_kv_heads = {c.model.num_kv_heads}",
    )
    need(
      c.model.head_dim % 2 == 0,
      "model.head_dim",
      c.model.head_dim,
      "rotary embeddings turn pairs: it must be even",
    )


def _check_lora(c, need, choose):
  lora = c.lora
  need(lora.rank >= 0, "lora.rank", lora.rank, "it must be at least 0; 0 trains all weights")
  if not lora.rank:
    need(not lora.path, "lora.path", lora.path, "set lora.rank to the rank of its adapters")
    return
  need(lora.alpha > 0, "lora.alpha", lora.alpha, "it must be above 0")
  choose("lora.base_dtype", lora.base_dtype, BASE_DTYPES)
  need(lora.targets, "lora.targets", lora.targets, "name at least one projection")
  for name in lora.targets:
    choose("lora.targets", name, TARGETS)
  need(
    c.model.path,
    "lora.rank",
    lora.rank,
    "adapters need the weights of a checkpoint under them; set model.path",
  )
  need(
    not c.warm_start.steps,
    "warm_start.steps",
    c.warm_start.steps,
    "with lora.rank the frozen weights alone are the"
    " reference: warm-start without adapters, export, and give that as model.path",
  )
  need(
    not c.algo.ref_sync_steps or c.algo.ref_mixup == 1,
    "algo.ref_mixup",
    c.algo.ref_mixup,
    "a mixture of two adapters' factors is no mixture of their weights; with lora.rank choose 1",
  )


def _check_algo(c, need, choose):
  """The choices of an objective one by one, then those that make no sense together."""
  a = c.algo
  settings = {name: getattr(a, name) for name in DEFAULTS}
  for name, names in CHOICES.items():
    choose(f"algo.{name}", settings[name], tuple(names))
  for name in (
    "std_ddof",
    "std_eps",
    "batch_std_eps",
    "ratio_max",
    "dual_clip",
    "cov_kl_coef",
    "dro_beta",
    "length_norm",
    "kl_coef",
    "kl_target",
    "ref_sync_steps",
    "correction_low",
    "correction_high",
    "off_policy_threshold",
    "entropy_coef",
    "entropy_target",
  ):
    need(settings[name] >= 0, f"algo.{name}", settings[name], "it must be at least 0")
  for name in (
    "clip_low",
    "clip_high",
    "tau_pos",
    "tau_neg",
    "k_pos",
    "lambda_pos",
    "k_neg",
    "lambda_neg",
    "cov_fraction",
    "kl_horizon",
    "entropy_step",
  ):
    need(settings[name] > 0, f"algo.{name}", settings[name], "it must be above 0")
  for name in ("updates_per_batch", "minibatches", "pass_k", "max_resample_rounds"):
    need(settings[name] >= 1, f"algo.{name}", settings[name], "it must be at least 1")
  for name in ("ratio_max", "dual_clip"):
    need(
      not settings[name] or settings[name] > 1,
      f"algo.{name}",
      settings[name],
      "it must be above 1, or it stops the gradient of tokens that have not moved; 0 is off",
    )
  sequences = c.batch.prompts * c.batch.group_size // a.minibatches
  need(
    not a.kl_target or a.kl_horizon >= sequences,
    "algo.kl_horizon",
    a.kl_horizon,
    f"it must be at least the {sequences} completions of an update",
  )
  need(
    not a.dynamic_sampling
    or a.advantage not in ("batch_normalized", "greedy_baseline", "gdpo", "process"),
    "algo.dynamic_sampling",
    True,
    f"with the advantage {a.advantage} a group of equal rewards teaches, too; set False",
  )
  need(
    0 < a.top_entropy_quantile <= 1,
    "algo.top_entropy_quantile",
    a.top_entropy_quantile,
    "it must be in (0, 1]; 1 is off",
  )
  need(
    0 < a.ref_mixup <= 1,
    "algo.ref_mixup",
    a.ref_mixup,
    "it must be in (0, 1]; 1 makes the reference the policy",
  )
  need(0 <= a.overlong < 1, "algo.overlong", a.overlong, "it must be in [0, 1); 0 is off")
  need(
    not a.overlong or round(a.overlong * c.sampling.max_tokens) >= 1,
    "algo.overlong",
    a.overlong,
    f"of sampling.max_tokens = {c.sampling.max_tokens} that is not one token",
  )
  need(
    a.std_ddof < c.batch.group_size,
    "algo.std_ddof",
    a.std_ddof,
    f"it must be below batch.group_size = {c.batch.group_size}",
  )
  need(
    c.batch.prompts % a.minibatches == 0,
    "algo.minibatches",
    a.minibatches,
    f"it must divide batch.prompts = {c.batch.prompts}",
  )
  if a.advantage == "pass_at_k":
    need(
      a.pass_k < c.batch.group_size,
      "algo.pass_k",
      a.pass_k,
      f"it must be below batch.group_size = {c.batch.group_size}: else all answers of a group weigh the same",
    )
  if a.surrogate in TOKEN_ONLY:
    need(
      a.ratio == "token",
      "algo.ratio",
      a.ratio,
      f"the surrogate {a.surrogate} has its own ratio; leave this at 'token'",
    )
  if a.ratio == "sequence" and a.correction != "none":
    need(
      a.correction_level != "token",
      "algo.correction_level",
      a.correction_level,
      "a weight per token undoes the sequence ratio; choose 'sequence' or 'geometric'",
    )
  if a.correction != "none":
    need(
      a.correction_low or a.correction_high,
      "algo.correction",
      a.correction,
      "set algo.correction_low or algo.correction_high, or it changes nothing",
    )
    several, filters = (
      a.updates_per_batch * a.minibatches > 1,
      (c.sampling.top_k, c.sampling.top_p, c.sampling.min_p),
    )
    need(
      not several or a.old_logprobs == "recomputed" or filters != (0, 1, 0),
      "algo.correction",
      a.correction,
      "the old log-probs are the sampler's own, so every weight is 1; set algo.old_logprobs='recomputed'",
    )
    need(
      not a.correction_high or a.correction_low < a.correction_high,
      "algo.correction_low",
      a.correction_low,
      f"it must be below algo.correction_high = {a.correction_high}",
    )
  if a.kl_coef and a.kl_in == "reward":
    need(
      not a.kl.endswith("+"),
      "algo.kl",
      a.kl,
      "in a reward it has no gradient to replace; leave out the +",
    )
    need(
      not a.kl_importance_weighted,
      "algo.kl_importance_weighted",
      True,
      "in a reward it has no ratio; choose False",
    )
    need(
      a.kl != "full",
      "algo.kl",
      a.kl,
      "a reward is of the token that was sampled; choose k1, abs, k2 or k3",
    )
    need(
      a.advantage not in ("gdpo", "pass_at_k", "greedy_baseline", "process"),
      "algo.kl_in",
      a.kl_in,
      f"the advantage {a.advantage} is of the rewards alone; choose 'loss'",
    )
  need(
    a.kl != "full" or not a.kl_importance_weighted,
    "algo.kl_importance_weighted",
    True,
    "the full KL is of a whole distribution, not of the token that was sampled; choose False",
  )
  for name in ("kl_target", "ref_sync_steps"):
    need(
      a.kl_coef or not settings[name],
      f"algo.{name}",
      settings[name],
      "with algo.kl_coef = 0 there is no reference; set algo.kl_coef",
    )
  need(
    not a.overlong or a.advantage != "pass_at_k",
    "algo.overlong",
    a.overlong,
    "pass_at_k counts right answers, which a penalty would make wrong; set 0",
  )
  if a.surrogate == "clip_cov":
    need(
      a.cov_low < a.cov_high,
      "algo.cov_low",
      a.cov_low,
      f"it must be below algo.cov_high = {a.cov_high}",
    )
