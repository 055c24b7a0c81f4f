"""Which fields of config.json are read, which are ignored, and which values are not supported."""

from collections.abc import Callable, Collection, Mapping
import math
import re
from typing import Any, NoReturn

from grpo_jax.settings import LARGEST_INT, shown

FIELDS = {  # field of ModelConfig -> field of config.json; families add more
  "vocab_size": "vocab_size",
  "embed_dim": "hidden_size",
  "num_layers": "num_hidden_layers",
  "num_heads": "num_attention_heads",
  "num_kv_heads": "num_key_value_heads",
  "head_dim": "head_dim",
  "mlp_dim": "intermediate_size",
  "norm_eps": "rms_norm_eps",
  "tie_embeddings": "tie_word_embeddings",
  "max_positions": "max_position_embeddings",
}
Values = Mapping[str, Any]  # the object in config.json
Refuse = Callable[[str, str], NoReturn]  # refuse(key, reason) raises ConfigError
OPTIONAL = {"attention_cap", "logit_cap"}  # fields of ModelConfig that may be null in config.json
# `ModelConfig.activation` -> its names in config.json. Saving writes the first name.
ACTIVATION_NAMES = {
  "silu": ("silu", "swish"),
  "gelu": ("gelu",),
  "clamped_silu": ("silu",),
  "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new"),
}
# Fields that can change what the model computes -> the values with which they change nothing.
SUPPORTED: dict[str, tuple[Any, ...]] = {
  "attention_dropout": (0,),
  "resid_pdrop": (0,),
  "embd_pdrop": (0,),
  "use_mrope": (None, False),
  "attention_bias": (False, None),
  "mlp_bias": (False, None),
  "use_bidirectional_attention": (None, False),
  "is_decoder": (True, False),
  "is_encoder_decoder": (False,),
  "add_cross_attention": (False,),
  "chunk_size_feed_forward": (0,),
  "tie_encoder_decoder": (False,),
  "pruned_heads": ({}, None),
  "token_classification_bias": (True, None),
}
# Fields that are read, but that do not correspond one to one to a field of ModelConfig.
READ = {
  "model_type",
  "architectures",
  "rope_theta",
  "rope_scaling",
  "rope_parameters",
  "rope_local_base_freq",
  "partial_rotary_factor",
  "sliding_window",
  "layer_types",
  "use_sliding_window",
  "max_window_layers",
  "quantization_config",
  "hidden_act",
  "hidden_activation",
  "eos_token_id",
  "original_max_position_embeddings",
  "id2label",
  "num_labels",
}
# Fields that matter only to training, generating or loading with other programs.
IGNORED = re.compile(
  r"_.*|.*_token_id|(torch_)?dtype|transformers(_version|_weights|\.js_config)|auto_map|use_cache"
  r"|initializer_range|pretraining_tp|return_dict.*|output_.*|torchscript|label2id"
  r"|classifier_dropout|problem_type|finetuning_task|task_specific_params|tokenizer_class|prefix"
  r"|use_bfloat16|tf_legacy_loss|cache_implementation|bos_token|eos_token|(min|max)_length"
  r"|do_sample|early_stopping|num_(beams|beam_groups|return_sequences)|diversity_penalty"
  r"|temperature|top_[kp]|typical_p|repetition_penalty|length_penalty|no_repeat_ngram_size"
  r"|encoder_no_repeat_ngram_size|bad_words_ids|remove_invalid_values"
  r"|exponential_decay_length_penalty|suppress_tokens|begin_suppress_tokens|forced_.*"
  r"|cross_attention_hidden_size|name_or_path|router_aux_loss_coef"
)


def check_fields(
  values: Mapping[str, Any],
  of_family: Collection[str],
  supported: Mapping[str, tuple[Any, ...]],
  refuse: Refuse,
) -> None:
  """Refuses unknown fields, and values that are not supported.

  Args:
    values: The object in config.json.
    of_family: The fields that the model's family reads. Their values are not checked here.
    supported: The family's additions to SUPPORTED. They override equal keys.
    refuse: refuse(key, reason) raises ConfigError.
  """
  for key, allowed in {**SUPPORTED, **supported}.items():
    if key in values and key not in of_family and values[key] not in allowed:
      refuse(
        key, f"is {values[key]!r}, which is not supported: choose a checkpoint with {allowed[0]!r}"
      )
  known = {*READ, *SUPPORTED, *supported, *of_family}
  for key in values:
    if key not in known and not IGNORED.fullmatch(key):
      refuse(
        key,
        f"is {values[key]!r}, a field that is not known here: if it does not change what the model"
        " computes, remove it",
      )


def read_field(values: Mapping[str, Any], key: str, kind: type, refuse: Refuse) -> Any:
  """Reads a field as `kind`: bool, or int or float, which must be positive.

  If `kind` is float, the field may hold an int. `refuse(key, reason)` raises ConfigError if the
  field is missing or its value is wrong.
  """
  found = values.get(key)
  types = (int, float) if kind is float else (kind,)
  # `type` and not isinstance, because a bool is an instance of int.
  if type(found) not in types or not (kind is bool or _is_positive(found)):
    wanted = "true or false" if kind is bool else f"a positive {kind.__name__}"
    refuse(key, f"must be {wanted}, got {shown(found)}")
  return kind(found)


def read_object(values: Mapping[str, Any], key: str, refuse: Refuse) -> dict[str, Any]:
  """Reads a JSON object, or returns {} if it is missing or empty. Refuses any other value."""
  found = values.get(key) or {}
  if not isinstance(found, dict):
    refuse(key, f"must be an object, got {shown(found)}")
  return found


def _is_positive(number: float) -> bool:
  """Whether a number is positive and finite and, if it is an int, at most LARGEST_INT."""
  largest = LARGEST_INT if type(number) is int else math.inf
  return 0 < number <= largest and number < math.inf


def read_quotient(
  values: Mapping[str, Any], dividend_key: str, divisor_key: str, refuse: Refuse
) -> int:
  """Reads two positive ints and divides one by the other. Refuses a division with a remainder."""
  dividend = read_field(values, dividend_key, int, refuse)
  divisor = read_field(values, divisor_key, int, refuse)
  if dividend % divisor:
    refuse(dividend_key, f"({dividend}) must be a multiple of {divisor_key} ({divisor})")
  return dividend // divisor
