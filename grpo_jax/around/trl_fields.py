"""Maps the fields of TRL's GRPOConfig (TRL 1.16) to settings.

docs/from_trl.md shows `FIELDS` with remarks, and a test compares the two.
"""

from collections.abc import Callable, Mapping
import dataclasses
import math
from typing import Any, NamedTuple

from grpo_jax.config import TRACKERS
from grpo_jax.settings import shown

Changes = dict[str, Any]  # values by config key


class Refused(Exception):
  """A field has a value that grpo_jax does not support. The text says what to do."""


@dataclasses.dataclass(frozen=True)
class Port:
  """TRL's config and facts about TRL's run, on which the meaning of a field depends.

  Attributes:
    values: The values of all fields in `FIELDS` and `EARLIER`.
    processes: The number of processes of TRL's run.
    rows: The number of rows of the training data. None if it is not known.
    reward_names: The names of the reward functions.
  """

  values: Mapping[str, Any]
  processes: int
  rows: int | None
  reward_names: tuple[str, ...]

  def __getitem__(self, name: str) -> Any:
    return self.values[name]

  def count(self, name: str) -> int:
    """The value of a field, which must be a positive integer. Otherwise raises Refused."""
    value = self[name]
    if type(value) is not int or value < 1:
      raise Refused(f"{name} is {shown(value)}: it must be a whole number of at least 1")
    return value

  @property
  def update_rows(self) -> int:
    """The number of completions in a micro-batch of TRL, over all processes."""
    return self.count("per_device_train_batch_size") * self.processes

  @property
  def batches(self) -> int:
    """The number of micro-batches for which TRL samples together: its steps_per_generation."""
    if self["steps_per_generation"] is not None:
      return self.count("steps_per_generation")
    if self["generation_batch_size"] is not None:
      return max(1, self.count("generation_batch_size") // self.update_rows)
    return self.count("gradient_accumulation_steps")

  @property
  def prompts(self) -> int:
    """The number of prompts in a batch. Raises Refused if groups do not fill it."""
    rows, group = self.update_rows * self.batches, self.count("num_generations")
    if self["generation_batch_size"] is not None:
      rows = self.count("generation_batch_size")
    if rows % group:
      raise Refused(f"{rows} completions are no whole groups of {group}")
    return rows // group

  @property
  def minibatches(self) -> int:
    """The number of updates in each pass over a batch. Raises Refused for a fraction."""
    accumulated = self.count("gradient_accumulation_steps")
    if self.batches % accumulated:
      raise Refused(
        f"{self.batches} micro-batches of a batch are no whole updates of {accumulated}"
      )
    return self.batches // accumulated

  def steps(self, updates: float) -> int:
    """Converts a number of updates to steps. A step of grpo_jax has all updates of a batch."""
    return max(1, round(updates / (self.minibatches * self.count("num_iterations"))))


class Field(NamedTuple):
  """How a field of GRPOConfig is converted.

  Attributes:
    default: The default of the field in TRL.
    keys: The config keys, or the flag such as --workdir, that correspond to the field.
    become: Called with the port and the field's value, returns settings by config key, or raises
      Refused. None if the field sets nothing.
    why: Why the field sets nothing.
  """

  default: Any
  keys: tuple[str, ...] = ()
  become: Callable[[Port, Any], Changes] | None = None
  why: str = ""


def _same(default: Any, key: str, none: Any = None) -> Field:
  """A field whose value is the value of `key`. `none` replaces None."""
  return Field(default, (key,), lambda port, value: {key: none if value is None else value})


def _by(default: Any, key: str, become: Callable[[Port, Any], Any]) -> Field:
  """A field that sets `key` to the result of `become`, called with the port and the value."""
  return Field(default, (key,), lambda port, value: {key: become(port, value)})


def _with(default: Any, key: str, name: str) -> Field:
  """A field that sets nothing itself, because the entry of another field, `name`, uses it."""
  return Field(default, (key,), why=f"it counts in {name}")


def _only(default: Any, why: str) -> Field:
  """A field whose values other than the default, None and {} are refused because of `why`."""

  def refuse(port: Port, value: Any) -> Changes:
    if value in (default, None, {}):
      return {}
    raise Refused(why)

  return Field(default, (), refuse, why)


def _not_here(default: Any, why: str) -> Field:
  """A field that does not influence training because of `why`."""
  return Field(default, (), None, why)


LOSSES: dict[str, Changes] = {
  "grpo": {"algo.aggregation": "sequence_mean"},
  "dapo": {"algo.aggregation": "token_mean"},
  "bnpo": {"algo.aggregation": "token_mean"},
  "dr_grpo": {"algo.aggregation": "constant"},
  "cispo": {"algo.surrogate": "cispo", "algo.aggregation": "token_mean", "algo.clip_low": 1.0},
  "sapo": {"algo.surrogate": "sapo", "algo.aggregation": "sequence_mean"},
  "luspo": {"algo.ratio": "sequence", "algo.aggregation": "sequence_sum"},
  "vespo": {"algo.surrogate": "vespo", "algo.aggregation": "token_mean"},
}


def _choice(choices: Mapping[Any, Any], value: Any) -> Any:
  """Looks up a value, or the value of an enum of transformers. Raises Refused if it is missing."""
  value = getattr(value, "value", value)
  if value not in choices:
    raise Refused(f"choose one of {', '.join(map(str, choices))}")
  return choices[value]


def _clip_high(port: Port, value: float | None) -> float:
  if port["loss_type"] != "cispo":
    return port["epsilon"] if value is None else value
  if value is None or value <= 1:
    raise Refused(
      "with loss_type='cispo' it is the bound of the ratio: set it above 1, such as 5.0"
    )
  return value - 1


def _steps(port: Port, value: int) -> int:
  """The number of steps for max_steps, or if that is not positive for num_train_epochs."""
  if value > 0:
    return port.steps(value)
  if port.rows is None:
    raise Refused("the number of rows is not known: set max_steps, or give train_dataset a file")
  return max(1, round(port["num_train_epochs"] * port.rows / port.prompts))


def _old_logprobs(port: Port, value: int) -> Changes:
  several = value * port.minibatches > 1
  return {
    "algo.updates_per_batch": value,
    "algo.old_logprobs": "recomputed" if several else "sampler",
  }


def _advantage(port: Port, value: Any) -> str:
  choices = {
    "group": "group_normalized",
    True: "group_normalized",
    "batch": "group_mean_batch_std",
    "none": "group_centered",
    False: "group_centered",
  }
  if port["multi_objective_aggregation"] == "normalize_then_sum":
    return "gdpo"
  return _choice(choices, value)


def _correction(port: Port, value: bool) -> Changes:
  """The settings of the correction, which TRL applies only to samples from vLLM."""
  if not (value and port["use_vllm"]):
    return {}
  modes = [f"{level}_{kind}" for level in ("token", "sequence") for kind in ("mask", "truncate")]
  level, kind = _choice({mode: mode for mode in modes}, port[_MODE]).split("_")
  high = port["vllm_importance_sampling_cap"] or port["vllm_importance_sampling_clip_max"]
  return {
    "algo.correction": kind,
    "algo.correction_level": level,
    "algo.correction_high": high or 0.0,
    "algo.correction_low": port["vllm_importance_sampling_clip_min"] or 0.0,
  }


_MODE = "vllm_importance_sampling_mode"


def _updates(port: Port) -> int:
  """The number of all updates of the run."""
  updates = port["max_steps"]
  if updates <= 0:
    updates = _steps(port, updates) * port.minibatches * port["num_iterations"]
  return updates


def _warmup(port: Port, value: float) -> int:
  """The number of warm-up updates. A value between 0 and 1 is a share of all updates."""
  return round(value * _updates(port)) if 0 < value < 1 else int(value)


def _every(port: Port, value: float) -> int:
  """The steps between two events, from updates. A value between 0 and 1 is a share of all."""
  return port.steps(math.ceil(value * _updates(port)) if 0 < value < 1 else value)


def _eval_every(port: Port, value: Any) -> int:
  value = getattr(value, "value", value)
  if value == "epoch":
    if port.rows is None:
      raise Refused("the number of rows is not known: choose 'steps', or give train_dataset a file")
    return max(1, port.rows // port.prompts)
  steps = _every(port, port["eval_steps"] or port["logging_steps"])
  return _choice({"no": 0, "steps": steps}, value)


def _on_several(port: Port, value: Any) -> Changes:
  return {"mesh.fsdp": -1, "mesh.data": 1} if value else {}


def _model_kwargs(port: Port, value: Mapping[str, Any] | None) -> Changes:
  if value and "revision" in value:
    raise Refused("write the revision as model='OWNER/NAME@REVISION'")
  return {}


def _report_to(port: Port, value: Any) -> Changes:
  """The settings of trackers for a name or names. "all" means all that are installed."""
  names = {value} if isinstance(value, str) else {*(value or ())}
  if "all" in names:
    from grpo_jax.training.trackers import is_installed  # here, because few configs need it

    names |= {"tensorboard", *filter(is_installed, TRACKERS)}
  unknown = sorted(names - {"all", "none", "tensorboard", *TRACKERS}, key=str)
  if unknown:
    raise Refused(
      f"{shown(unknown[0])} is not here: choose among tensorboard, {', '.join(TRACKERS)}"
    )
  chosen = [name for name in TRACKERS if name in names]
  project = {"log.project": port["project"] or "huggingface"} if chosen else {}
  return {"log.tensorboard": "tensorboard" in names, "log.trackers": chosen, **project}


def _bad_words(port: Port, value: Mapping[str, Any] | None) -> tuple[str, ...]:
  """The texts in bad_words of generation_kwargs. All other kwargs are refused."""
  others = {*(value or {})} - {"bad_words"}
  if others:
    raise Refused(f"the learner would not know the distribution with {', '.join(sorted(others))}")
  words = (value or {}).get("bad_words") or ()
  if not isinstance(words, (list, tuple)) or not all(isinstance(word, str) for word in words):
    raise Refused(f"bad_words must be a list of texts, got {shown(words)}")
  return tuple(words)


def _log_completions(port: Port, value: bool) -> Changes:
  return {"log.completions_every": _every(port, port["logging_steps"])} if value else {}


_VLLM = "the sampler reads the learner's weights where they lie"
_OPTIMIZERS = {
  **dict.fromkeys(("adamw_torch_fused", "adamw_torch", "adamw_hf", "adamw_8bit"), "adamw"),
  **{name: name for name in ("adamw", "adafactor", "muon", "sgd")},
  **dict.fromkeys(("lion_32bit", "lion_8bit", "paged_lion_32bit"), "lion"),
}
_SCHEDULES = {"constant_with_warmup": "constant"} | {x: x for x in ("constant", "linear", "cosine")}

FIELDS: dict[str, Field] = {
  # Sampling
  "num_generations": _same(8, "batch.group_size"),
  "generation_batch_size": _by(None, "batch.prompts", lambda port, value: port.prompts),
  "max_completion_length": _same(512, "sampling.max_tokens"),
  "temperature": _same(1.0, "sampling.temperature"),
  "top_p": _same(1.0, "sampling.top_p"),
  "top_k": _by(0, "sampling.top_k", lambda port, value: max(0, value or 0)),
  "min_p": _same(None, "sampling.min_p", 0.0),
  "repetition_penalty": _only(1.0, "the learner would not know the distribution"),
  "generation_kwargs": _by(None, "sampling.banned", _bad_words),
  "chat_template_kwargs": _by(
    None,
    "data.chat_template_kwargs",
    lambda port, value: tuple(f"{name}={own!r}" for name, own in (value or {}).items()),
  ),
  "num_generations_eval": _same(None, "eval.samples", 0),
  "shuffle_dataset": _only(True, "each epoch has a new order"),
  "remove_unused_columns": _not_here(False, "reward functions get all columns"),
  "pad_to_multiple_of": _not_here("auto", "shapes come from the limits of lengths"),
  **dict.fromkeys(
    ("use_transformers_continuous_batching", "use_transformers_paged"),
    _not_here(False, "there is one compiled sampler"),
  ),
  **dict.fromkeys(
    ("cache_implementation", "transformers_continuous_batching_config"),
    _not_here(None, "there is one compiled sampler"),
  ),
  **{
    name: _not_here(default, _VLLM)
    for name, default in {
      "use_vllm": False,
      "vllm_mode": "colocate",
      "vllm_model_impl": "vllm",
      "vllm_enable_sleep_mode": False,
      "vllm_server_base_url": None,
      "vllm_server_host": "0.0.0.0",
      "vllm_server_port": 8000,
      "vllm_server_timeout": 240.0,
      "vllm_group_port": 51216,
      "vllm_gpu_memory_utilization": 0.3,
      "vllm_max_model_length": None,
      "vllm_tensor_parallel_size": 1,
    }.items()
  },
  "vllm_structured_outputs_regex": _same(None, "sampling.regex", ""),
  "ds3_gather_for_generation": Field(True, ("sampling.tensor",), why="0 gathers where it fits"),
  "max_tool_calling_iterations": _by(
    None, "environment.max_turns", lambda port, value: 8 if value is None else value + 1
  ),
  # Batches and updates
  "per_device_train_batch_size": _with(8, "batch.micro_batch", "generation_batch_size"),
  "gradient_accumulation_steps": _with(1, "batch.micro_batch", "generation_batch_size"),
  "steps_per_generation": _by(None, "algo.minibatches", lambda port, value: port.minibatches),
  "num_iterations": Field(1, ("algo.updates_per_batch",), _old_logprobs),
  "max_steps": _by(-1, "steps", _steps),
  "num_train_epochs": _with(3.0, "steps", "max_steps"),
  # Loss
  "importance_sampling_level": _by(
    "token",
    "algo.ratio",
    lambda port, value: _choice({"token": "token", "sequence": "sequence"}, value),
  ),
  "epsilon": _same(0.2, "algo.clip_low"),
  "epsilon_high": _by(None, "algo.clip_high", _clip_high),
  "loss_type": Field(  # after epsilon and the level, because some losses set them, too
    "dapo", ("algo.aggregation",), lambda port, value: _choice(LOSSES, value)
  ),
  "delta": _same(None, "algo.ratio_max", 0.0),
  "sapo_temperature_pos": _same(1.0, "algo.tau_pos"),
  "sapo_temperature_neg": _same(1.05, "algo.tau_neg"),
  "vespo_k_pos": _same(2.0, "algo.k_pos"),
  "vespo_lambda_pos": _same(3.0, "algo.lambda_pos"),
  "vespo_k_neg": _same(3.0, "algo.k_neg"),
  "vespo_lambda_neg": _same(2.0, "algo.lambda_neg"),
  "mask_truncated_completions": _same(False, "algo.mask_truncated"),
  "top_entropy_quantile": _same(1.0, "algo.top_entropy_quantile"),
  "off_policy_mask_threshold": _same(None, "algo.off_policy_threshold", 0.0),
  "entropy_coef": _same(0.0, "algo.entropy_coef"),
  "use_adaptive_entropy": _by(
    False, "algo.entropy_target", lambda port, value: port["entropy_target"] if value else 0.0
  ),
  "entropy_target": _with(0.2, "algo.entropy_target", "use_adaptive_entropy"),
  "entropy_coef_delta": _same(0.005, "algo.entropy_step"),
  "entropy_coef_min": _only(0.0, "the coefficient stays at 0 or above"),
  "entropy_coef_max": _not_here(1.0, "the coefficient stays at 0 or above"),
  # KL and reference
  "beta": _same(0.0, "algo.kl_coef"),
  "use_bias_correction_kl": _same(True, "algo.kl_importance_weighted"),
  "sync_ref_model": _by(
    False,
    "algo.ref_sync_steps",
    lambda port, value: port.steps(port["ref_model_sync_steps"]) if value else 0,
  ),
  "ref_model_sync_steps": _with(512, "algo.ref_sync_steps", "sync_ref_model"),
  "ref_model_mixup_alpha": _same(0.6, "algo.ref_mixup"),
  # Rewards and advantages
  "reward_weights": _by(
    None, "reward.weights", lambda port, value: value or [1.0] * max(1, len(port.reward_names))
  ),
  "scale_rewards": _by("group", "algo.advantage", _advantage),
  "multi_objective_aggregation": _with("sum_then_normalize", "algo.advantage", "scale_rewards"),
  # Correction for the gap between sampler and learner
  "vllm_importance_sampling_correction": Field(True, ("algo.correction",), _correction),
  _MODE: _with("sequence_mask", "algo.correction_level", "vllm_importance_sampling_correction"),
  "vllm_importance_sampling_clip_max": _with(3.0, "algo.correction_high", _MODE),
  "vllm_importance_sampling_cap": _with(None, "algo.correction_high", _MODE),
  "vllm_importance_sampling_clip_min": _with(None, "algo.correction_low", _MODE),
  # Model and optimizer
  "model_init_kwargs": Field(None, (), _model_kwargs, "see model.dtype and model.attention"),
  "bf16": _by(None, "model.dtype", lambda port, value: "float32" if value is False else "bfloat16"),
  "gradient_checkpointing": _same(True, "learner.remat"),
  "activation_checkpointing": Field(  # the name of gradient_checkpointing in later versions
    None, ("learner.remat",), lambda port, value: {} if value is None else {"learner.remat": value}
  ),
  "router_aux_loss_coef": _same(None, "learner.router_aux_coef", 0.0),
  "cast_lm_head_to_fp32": _not_here(False, "logits are float32"),
  "disable_dropout": _not_here(False, "there is no dropout"),
  "trust_remote_code": _not_here(False, "no code of a model is run"),
  "learning_rate": _same(1e-6, "optimizer.learning_rate"),
  "lr_scheduler_type": _by(
    "linear", "optimizer.schedule", lambda port, value: _choice(_SCHEDULES, value)
  ),
  "warmup_steps": _by(0, "optimizer.warmup_steps", _warmup),
  "optim": _by(
    "adamw_torch_fused", "optimizer.name", lambda port, value: _choice(_OPTIMIZERS, value)
  ),
  "adam_beta1": _same(0.9, "optimizer.b1"),
  "adam_beta2": _same(0.999, "optimizer.b2"),
  "adam_epsilon": _same(1e-8, "optimizer.eps"),
  "weight_decay": _same(0.0, "optimizer.weight_decay"),
  "max_grad_norm": _same(1.0, "optimizer.max_grad_norm"),
  "deepspeed": Field(None, ("mesh.fsdp",), _on_several),
  "fsdp": Field(None, ("mesh.fsdp",), _on_several),
  # The run
  "seed": _same(42, "seed"),
  "output_dir": Field(None, ("--workdir",), why="it is the flag --workdir"),
  "resume_from_checkpoint": _not_here(None, "the same command resumes"),
  "save_steps": _by(500, "checkpoint.every", _every),
  "save_total_limit": _same(None, "checkpoint.keep", 3),
  "eval_strategy": _by("no", "eval.every", _eval_every),
  "eval_steps": _with(None, "eval.every", "eval_strategy"),
  "per_device_eval_batch_size": Field(8, ("eval.batch",), why="eval.batch counts problems"),
  "logging_steps": _by(10, "log.every", _every),
  "report_to": Field("none", ("log.tensorboard", "log.trackers"), _report_to),
  "project": _with("huggingface", "log.project", "report_to"),
  "log_completions": Field(False, ("log.completions_every",), _log_completions, "they are saved"),
  "num_completions_to_print": _not_here(None, "the terminal shows a few completions"),
  "log_unique_prompts": _not_here(False, "the terminal shows a few completions"),
  "log_completions_hub_repo": _not_here(None, "completions are in the run's folder"),
  "log_multimodal": _not_here(True, "the report shows the images"),
}
# Fields of earlier versions of TRL.
EARLIER = {"max_prompt_length": _same(512, "data.max_prompt_tokens")}
# Fields of TrainingArguments that begin with one of these words do not influence training.
OF_PROGRAMS = tuple(
  "accelerator_config activation_checkpointing_kwargs dataloader_ ddp_ debug disable_tqdm do_"
  " gradient_checkpointing_kwargs hub_ log_ logging_ overwrite_output_dir push_to_hub"
  " run_name save_ tf32 torch_ trackio_ use_cache use_cpu use_liger_kernel".split()
)
