"""What a run's config holds, as frozen dataclasses. The values, one comment each, are in configs/default.py.

`ml_collections.ConfigDict` stops at the door: entry points call `from_dict` once and pass these structs on.
"""

import dataclasses
import difflib
from typing import Any, Mapping, get_type_hints

from grpo_jax.settings import ConfigError


@dataclasses.dataclass(frozen=True)
class Model:
  path: str
  dtype: str
  embed_dim: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_dim: int
  rope_theta: float
  tie_embeddings: bool


@dataclasses.dataclass(frozen=True)
class Lora:
  rank: int
  alpha: float
  rslora: bool
  targets: tuple[str, ...]
  path: str
  base_dtype: str


@dataclasses.dataclass(frozen=True)
class Data:
  task: str
  path: str
  tokenizer: str
  prompt: str
  chat: bool
  system: str
  max_prompt_tokens: int


@dataclasses.dataclass(frozen=True)
class Batch:
  prompts: int
  group_size: int
  micro_batch: int


@dataclasses.dataclass(frozen=True)
class Sampling:
  max_tokens: int
  temperature: float
  top_k: int
  top_p: float
  min_p: float
  stop_ids: tuple[int, ...]
  dtype: str
  layout: str


@dataclasses.dataclass(frozen=True)
class Reward:
  functions: tuple[str, ...]
  weights: tuple[float, ...]
  batch: int
  dtype: str
  step_separator: str


@dataclasses.dataclass(frozen=True)
class Algo:
  advantage: str
  std_ddof: int
  std_eps: float
  batch_weighting: str
  batch_std_eps: float
  pass_k: int
  ratio: str
  updates_per_batch: int
  minibatches: int
  old_logprobs: str
  surrogate: str
  clip_low: float
  clip_high: float
  ratio_max: float
  dual_clip: float
  tau_pos: float
  tau_neg: float
  k_pos: float
  lambda_pos: float
  k_neg: float
  lambda_neg: float
  cov_fraction: float
  cov_low: float
  cov_high: float
  cov_kl_coef: float
  dro_beta: float
  aggregation: str
  length_norm: int
  kl: str
  kl_coef: float
  kl_in: str
  kl_importance_weighted: bool
  kl_target: float
  kl_horizon: int
  ref_sync_steps: int
  ref_mixup: float
  correction: str
  correction_level: str
  correction_low: float
  correction_high: float
  off_policy_threshold: float
  mask_truncated: bool
  top_entropy_quantile: float
  entropy_coef: float
  entropy_target: float
  entropy_step: float
  dynamic_sampling: bool
  max_resample_rounds: int
  overlong: float


@dataclasses.dataclass(frozen=True)
class Learner:
  remat: bool
  logprob_chunk: int
  router_aux_coef: float


@dataclasses.dataclass(frozen=True)
class Optimizer:
  learning_rate: float
  schedule: str
  warmup_steps: int
  b1: float
  b2: float
  eps: float
  weight_decay: float
  max_grad_norm: float


@dataclasses.dataclass(frozen=True)
class WarmStart:
  steps: int
  batch: int
  learning_rate: float
  warmup_steps: int


@dataclasses.dataclass(frozen=True)
class Eval:
  every: int
  examples: int
  batch: int
  function: str
  samples: int
  temperature: float


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  every: int
  keep: int


@dataclasses.dataclass(frozen=True)
class Log:
  every: int
  completions_every: int
  tensorboard: bool
  wandb: str


@dataclasses.dataclass(frozen=True)
class Mesh:
  data: int
  fsdp: int
  expert: int
  tensor: int


@dataclasses.dataclass(frozen=True)
class Config:
  """A whole run."""

  seed: int
  steps: int
  model: Model
  lora: Lora
  data: Data
  batch: Batch
  sampling: Sampling
  reward: Reward
  algo: Algo
  learner: Learner
  optimizer: Optimizer
  warm_start: WarmStart
  eval: Eval
  checkpoint: Checkpoint
  log: Log
  mesh: Mesh


def from_dict(values: Mapping[str, Any], cls: type = Config, prefix: str = "") -> Any:
  """Nested plain values -> `cls`. Raises ConfigError for an unknown key, a missing key or a wrong type.

  An int stands for a float, a list for a tuple; nothing else is converted.
  """
  hints = get_type_hints(cls)
  for key in values:
    if key not in hints:
      raise _unknown(prefix + key)
  out = {}
  for key, hint in hints.items():
    if key not in values:
      raise ConfigError(f"config key {prefix}{key} is missing: start from configs/default.py")
    out[key] = _convert(values[key], hint, prefix + key)
  return cls(**out)


def to_dict(config: Any) -> dict[str, Any]:
  """The inverse of `from_dict`, as JSON holds it (tuples become lists)."""
  if dataclasses.is_dataclass(config):
    return {f.name: to_dict(getattr(config, f.name)) for f in dataclasses.fields(config)}
  return list(config) if isinstance(config, tuple) else config


def keys(cls: type = Config, prefix: str = "") -> dict[str, Any]:
  """Every key, such as algo.clip_high, and its type; a section's is its dataclass."""
  out = {}
  for key, hint in get_type_hints(cls).items():
    out[prefix + key] = hint
    if dataclasses.is_dataclass(hint):
      out |= keys(hint, f"{prefix}{key}.")
  return out


def check_key(name: str) -> None:
  """Raises ConfigError unless `name` is a key and not a section."""
  known = keys()
  if name not in known:
    raise _unknown(name)
  if dataclasses.is_dataclass(known[name]):
    inside = (f"{name}.{field.name}" for field in dataclasses.fields(known[name]))
    raise ConfigError(f"config key {name} is a section: set one of {', '.join(inside)}")


def wrong_type(name: str, value: Any) -> ConfigError:
  """The error for a value that key `name` cannot have."""
  if value is None:
    return ConfigError(f"config key {name} has no value yet: give it one with --config.{name}=...")
  return ConfigError(f"config key {name} must be {_NAMES[keys()[name]]}, got {value!r}")


_NAMES = {
  int: "a whole number",
  float: "a number",
  bool: "True or False",
  str: "a string",
  tuple[int, ...]: "a list of whole numbers",
  tuple[float, ...]: "a list of numbers",
  tuple[str, ...]: "a list of strings",
}


def _unknown(name):
  section, _, last = name.rpartition(".")
  known, split = keys(), lambda key: key.rpartition(".")
  here = [split(key)[2] for key in known if split(key)[0] == section]
  meant = [f"{section}.{near}".strip(".") for near in difflib.get_close_matches(last, here, n=1)]
  meant = meant or [key for key in known if split(key)[2] == last]  # under another section
  meant = meant or difflib.get_close_matches(name, known, n=1, cutoff=0.8)
  if meant:
    return ConfigError(f"config key {name} is unknown: did you mean {' or '.join(meant)}?")
  where = (
    f"{section or 'a config'} has {', '.join(here)}"
    if here
    else "they are all in configs/default.py"
  )
  return ConfigError(f"config key {name} is unknown: {where}")


def _convert(value, hint, name):
  if dataclasses.is_dataclass(hint):
    if not isinstance(value, Mapping):
      raise ConfigError(f"config key {name} must be a section of keys, got {value!r}")
    return from_dict(value, hint, name + ".")
  if hasattr(hint, "__args__"):
    element = hint.__args__[0]
    if isinstance(value, (list, tuple)) and all(_fits(v, element) for v in value):
      return tuple(map(element, value))
  elif _fits(value, hint):
    return hint(value)
  raise wrong_type(name, value)


def _fits(value, hint):
  return type(value) is hint or (hint is float and type(value) is int)
