"""Turns the metadata of a GGUF file into the object that config.json would hold.

A GGUF file lacks some fields of config.json. llama.cpp, which writes and runs such files, fixes
their values for each architecture, and so does this module.
"""

from collections.abc import Mapping
import dataclasses
import math
from typing import Any

import numpy as np

from grpo_jax.gguf_file import GGUFFile
from grpo_jax.settings import shown

_COMMON = {  # field of config.json -> key of the metadata, after "ARCHITECTURE."
  "num_hidden_layers": "block_count",
  "max_position_embeddings": "context_length",
  "hidden_size": "embedding_length",
  "intermediate_size": "feed_forward_length",
  "num_attention_heads": "attention.head_count",
  "num_key_value_heads": "attention.head_count_kv",
  "head_dim": "attention.key_length",
  "rms_norm_eps": "attention.layer_norm_rms_epsilon",
  "vocab_size": "vocab_size",
  "rope_theta": "rope.freq_base",
}
_SCALING = {
  "rope.scaling.type",
  "rope.scaling.factor",
  "rope.scaling.original_context_length",
  "rope.scaling.finetuned",
  "rope.scaling.yarn_beta_fast",
  "rope.scaling.yarn_beta_slow",
}
_CHECKED = {"rope.dimension_count", "attention.value_length"}
# Keys that can change what the model computes -> the values with which they change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
  "attention.causal": (True,),
  "expert_count": (0,),
  "expert_used_count": (0,),
  "expert_shared_count": (0,),
  "rope.scaling.attn_factor": (1.0,),
  "tensor_data_layout": ("Meta AI original pth",),
}
_WINDOW = {"sliding_window": "attention.sliding_window"}


@dataclasses.dataclass(frozen=True)
class Architecture:
  """Describes the GGUF files of one architecture.

  Attributes:
    model_type: `model_type` in config.json.
    name: The name in `architectures` of config.json.
    fields: Fields of config.json -> keys of the metadata, in addition to `_COMMON`.
    fixed: Fields of config.json that the files do not state -> their values.
    defaults: Fields of config.json whose keys may be missing -> their values then.
    rotated_rows: The rows of the query and key projections are in llama.cpp's order, in which
      neighbouring rows are rotated together.
    norm_offset: The number that the files add to the weights of norms.
  """

  model_type: str
  name: str
  fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  rotated_rows: bool = False
  norm_offset: float = 0.0


_GEMMA2 = {
  **_WINDOW,
  "attn_logit_softcapping": "attn_logit_softcapping",
  "final_logit_softcapping": "final_logit_softcapping",
}
_PATTERN = "attention.sliding_window_pattern"
_GEMMA3 = {
  **_WINDOW,
  "sliding_window_pattern": _PATTERN,
  "rope_local_base_freq": "rope.freq_base_swa",
}
_EXPERTS = {
  "num_experts": "expert_count",
  "num_experts_per_tok": "expert_used_count",
  "moe_intermediate_size": "expert_feed_forward_length",
}
ARCHITECTURES = {  # by general.architecture
  # Mistral's models are written as llama, too.
  "llama": Architecture("llama", "LlamaForCausalLM", _WINDOW, rotated_rows=True),
  "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
  "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
  "qwen3moe": Architecture(
    "qwen3_moe", "Qwen3MoeForCausalLM", _EXPERTS, fixed={"norm_topk_prob": True}
  ),
  "phi3": Architecture("phi3", "Phi3ForCausalLM", _WINDOW),
  "gemma2": Architecture(
    "gemma2",
    "Gemma2ForCausalLM",
    _GEMMA2,
    defaults={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    norm_offset=1.0,
  ),
  "gemma3": Architecture(
    "gemma3_text",
    "Gemma3ForCausalLM",
    _GEMMA3,
    fixed={"attn_logit_softcapping": None, "final_logit_softcapping": None},
    defaults={"sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
    norm_offset=1.0,
  ),
}
# Texts of a token that ends a turn, as in llama.cpp, for files that do not state its id.
_TURN_ENDS = (
  "<|eot_id|>",
  "<|im_end|>",
  "<|end|>",
  "<end_of_turn>",
  "<|endoftext|>",
  "<|end_of_text|>",
  "<EOT>",
  "_<EOT>",
  "[EOT]",
  "<｜end▁of▁sentence｜>",
  "<end_of_utterance>",
)
_CONTROL = 3  # a value of tokenizer.ggml.token_type
_NO_TOKEN = 2**32 - 1  # -1 in the unsigned fields of ids
_27B = {"gemma2": 46, "gemma3": 62}  # layers of the models that divide queries by sqrt(D / H)


def architecture_of(file: GGUFFile) -> Architecture:
  """The architecture of a file. Raises ConfigError if grpo_jax does not compute it."""
  name = file.metadata.get("general.architecture")
  if type(name) is not str or name not in ARCHITECTURES:
    file.refuse(
      f"general.architecture is {shown(name)}: choose a file of {', '.join(ARCHITECTURES)}"
    )
  return ARCHITECTURES[name]


def config_values(file: GGUFFile) -> dict[str, Any]:
  """Returns the object that config.json would hold for the model in a GGUF file.

  Raises:
    ConfigError: The architecture is not supported, or a field is missing, wrong or not supported.
  """
  architecture = architecture_of(file)
  prefix = file.metadata["general.architecture"] + "."
  found = {
    key.removeprefix(prefix): value
    for key, value in file.metadata.items()
    if key.startswith(prefix)
  }
  keys = {**_COMMON, **architecture.fields}
  _check_keys(file, prefix, found, {*keys.values()})
  values: dict[str, Any] = {
    "architectures": [architecture.name],
    "model_type": architecture.model_type,
    "tie_word_embeddings": "output.weight" not in file.tensors,
    "rope_theta": 1e4,
    **architecture.fixed,
    **architecture.defaults,
  }
  for field, key in keys.items():
    if key in found:
      values[field] = _one(file, prefix + key, found[key])
  _add_vocabulary(file, values)
  # The code below uses these three before `config_json` checks all fields.
  for field in ("hidden_size", "num_attention_heads", "num_hidden_layers"):
    if type(values.get(field)) is not int or values[field] < 1:
      file.refuse(f"{prefix}{keys[field]} must be a positive int, got {shown(values.get(field))}")
  values.setdefault("head_dim", values["hidden_size"] // values["num_attention_heads"])
  _check_heads(file, prefix, found, values["head_dim"])
  values["rope_parameters"] = _rope_parameters(file, prefix, found, values)
  _add_windows(values)
  if architecture.model_type.startswith("gemma"):
    # Queries are divided by the root of this scalar, which is head_dim except in the 27B models.
    # The files lack it, so these models are recognised by the number of their layers.
    is_27b = values["num_hidden_layers"] == _27B[file.metadata["general.architecture"]]
    scalar = values["hidden_size"] // values["num_attention_heads"] if is_27b else None
    values["query_pre_attn_scalar"] = scalar or values["head_dim"]
  return values


def _check_keys(file: GGUFFile, prefix: str, found: Mapping[str, Any], read: set[str]) -> None:
  """Refuses unknown keys of the metadata, because they may change what the model computes.

  `found` has the architecture's keys without their `prefix`, such as "qwen3.". `read` are the keys
  that `config_values` reads.
  """
  for key, value in found.items():
    if key in read | _SCALING | _CHECKED:
      continue
    if key not in _NEUTRAL:
      file.refuse(f"{prefix}{key} is {shown(value)}, a field that is not supported")
    if isinstance(value, (np.ndarray, list)) or value not in _NEUTRAL[key]:
      wanted = _NEUTRAL[key][0]
      file.refuse(f"{prefix}{key} is {shown(value)}: choose a file in which it is {wanted!r}")


def _one(file: GGUFFile, key: str, value: Any) -> Any:
  """Returns the value of a key. If it is a list for all layers, their values must be equal."""
  if not isinstance(value, (np.ndarray, list)):
    return value
  if key.endswith(_PATTERN):
    return list(value)
  if not len(value) or any(other != value[0] for other in value):
    file.refuse(f"{key} differs from layer to layer, which is not supported: {shown(value)}")
  return value[0].item() if isinstance(value, np.ndarray) else value[0]


def _add_vocabulary(file: GGUFFile, values: dict[str, Any]) -> None:
  """Adds the size of the vocabulary, and the ids of the tokens that end a text, to `values`."""
  metadata = file.metadata
  values.setdefault("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ())))
  # Chat models end a turn with a separate token, such as <end_of_turn>, the "eot" of the file.
  eos_id = metadata.get("tokenizer.ggml.eos_token_id")
  eot_id = metadata.get("tokenizer.ggml.eot_token_id", _turn_end(metadata))
  ids = list(dict.fromkeys(x for x in (eos_id, eot_id) if x is not None and x != _NO_TOKEN))
  values["eos_token_id"] = ids or None


def _turn_end(metadata: Mapping[str, Any]) -> int | None:
  """The id of the control token that ends a turn by its text, or None if there is no such token."""
  tokens = metadata.get("tokenizer.ggml.tokens")
  types = metadata.get("tokenizer.ggml.token_type")
  if not isinstance(tokens, list) or not isinstance(types, np.ndarray):
    return None
  kinds = zip(tokens, types)
  control = {token: number for number, (token, kind) in enumerate(kinds) if kind == _CONTROL}
  return next((control[text] for text in _TURN_ENDS if text in control), None)


def _check_heads(file: GGUFFile, prefix: str, found: Mapping[str, Any], head_dim: Any) -> None:
  """Refuses heads that are only partly rotated, and values whose size differs from `head_dim`."""
  for key in sorted(_CHECKED & found.keys()):
    if found[key] != head_dim:
      file.refuse(
        f"{prefix}{key} is {shown(found[key])}, and heads have {shown(head_dim)}: that is not"
        " supported"
      )


def _rope_parameters(
  file: GGUFFile, prefix: str, found: Mapping[str, Any], values: dict[str, Any]
) -> dict[str, Any]:
  """Returns the object `rope_parameters` of config.json: the rotary bases and their scaling.

  Moves the bases out of `values`. `prefix` and `found` are as in `_check_keys`.
  """
  for name in ("rope_factors_long.weight", "rope_factors_short.weight"):
    if name in file.tensors:
      file.refuse(f"tensor {name}: positions scaled by longrope are not supported")
  theta = values.pop("rope_theta")
  if "rope_freqs.weight" in file.tensors:
    return _from_frequencies(file, float(theta), values["head_dim"])
  kind = found.get("rope.scaling.type", "none")
  scaling: dict[str, Any] = {"rope_type": "default"}
  if kind in ("linear", "yarn"):
    scaling = {"rope_type": kind, "factor": found.get("rope.scaling.factor")}
  elif kind != "none":
    file.refuse(f"{prefix}rope.scaling.type is {shown(kind)}: choose a file with linear or yarn")
  if kind == "yarn":
    names = {
      "original_max_position_embeddings": "original_context_length",
      "beta_fast": "yarn_beta_fast",
      "beta_slow": "yarn_beta_slow",
    }
    keys = {field: f"rope.scaling.{key}" for field, key in names.items()}
    scaling |= {field: found[key] for field, key in keys.items() if key in found}
  full = {"rope_theta": theta, **scaling}
  if values["model_type"] != "gemma3_text":
    return full
  # Layers with a window are not scaled.
  local = {"rope_theta": values.pop("rope_local_base_freq")}
  return {"full_attention": full, "sliding_attention": local}


def _from_frequencies(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
  """Derives Llama 3's `rope_parameters` from the tensor of divisors, one for each frequency.

  `low_freq_factor` and `high_freq_factor` are 1 and 4 in all Llama 3 models. A frequency that makes
  t turns over the original length is scaled by 1 / divisor = s + (1 - s) / factor, where
  s = (t - 1) / (4 - 1), clipped to [0, 1]. So the largest divisor is the factor, and a frequency
  with 0 < s < 1 determines the original length.
  """
  low, high = 1.0, 4.0
  stored = file.tensors["rope_freqs.weight"]
  if stored.num_rows != 1 or 2 * stored.shape[-1] != head_dim:
    file.refuse(f"tensor rope_freqs.weight is {stored.shape}, and heads have {head_dim}")
  divisors = file.read_rows("rope_freqs.weight", 0, 1)[0].astype(np.float64)
  frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
  factor = float(divisors.max())
  if not (np.isfinite(divisors).all() and divisors.min() >= 1):
    file.refuse("tensor rope_freqs.weight has a divisor that is below 1 or not finite")
  if factor == 1:
    return {"rope_theta": theta, "rope_type": "default"}
  s = (1 / divisors - 1 / factor) / (1 - 1 / factor)  # of each frequency
  ramp = np.flatnonzero((s > 1e-3) & (s < 1 - 1e-3))  # where s was not clipped, despite rounding
  original = 8192  # the original length of the published models, if no frequency determines it
  if len(ramp):
    turns = low + s[ramp[0]] * (high - low)
    original = round(turns * 2 * math.pi / frequencies[ramp[0]])
  turns = original * frequencies / (2 * math.pi)
  s = np.clip((turns - low) / (high - low), 0, 1)  # again, now from the original length
  if not np.allclose(1 / divisors, s + (1 - s) / factor, rtol=1e-4, atol=0):
    file.refuse("tensor rope_freqs.weight scales positions in another way than Llama 3 does")
  return {
    "rope_theta": theta,
    "rope_type": "llama3",
    "factor": factor,
    "low_freq_factor": low,
    "high_freq_factor": high,
    "original_max_position_embeddings": original,
  }


def _add_windows(values: dict[str, Any]) -> None:
  """Rewrites `values` so that config.json says which layers have a window."""
  if values["model_type"] == "llama" and "sliding_window" in values:  # Llama has no windows
    values |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
  pattern = values.get("sliding_window_pattern")
  if isinstance(pattern, list):
    del values["sliding_window_pattern"]
    kinds = ("full_attention", "sliding_attention")
    values["layer_types"] = [kinds[bool(has_window)] for has_window in pattern]
