"""Hugging Face's config.json, as transformers 4 and 5 write it, to a ModelConfig and back. Opens no file."""

import re
from pathlib import Path
from typing import Any, Collection, Mapping, NoReturn, get_type_hints

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.families import FAMILIES, Family, family_of
from grpo_jax.model.fields import Refuse, quotient, value
from grpo_jax.model.rope_json import read_rope, rope_json
from grpo_jax.settings import ConfigError

FIELDS = {  # ours: theirs, in config.json
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
OPTIONAL = {"attention_cap", "logit_cap"}  # may be null
ACTIVATIONS = {
  "silu": ("silu", "swish"),
  "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new"),
}  # ours: theirs
SUPPORTED = {  # fields that would change the mathematics, with the values that do not
  "attention_dropout": (0,),
  "resid_pdrop": (0,),
  "embd_pdrop": (0,),
  "partial_rotary_factor": (None, 1),
  "quantization_config": (None,),
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
READ = {  # by the functions below
  "model_type",
  "architectures",
  "rope_theta",
  "rope_scaling",
  "rope_parameters",
  "rope_local_base_freq",
  "sliding_window",
  "sliding_window_pattern",
  "_sliding_window_pattern",
  "layer_types",
  "use_sliding_window",
  "max_window_layers",
  "hidden_act",
  "hidden_activation",
  "eos_token_id",
  "original_max_position_embeddings",
  "id2label",
  "num_labels",
  "num_local_experts",
  "decoder_sparse_step",
  "mlp_only_layers",
}
IDLE = re.compile(  # what training, generating or loading elsewhere reads
  r"_.*|.*_token_id|(torch_)?dtype|transformers(_version|_weights)|auto_map|use_cache|initializer_range|pretraining_tp|"
  r"return_dict.*|output_.*|torchscript|label2id|classifier_dropout|problem_type|finetuning_task|"
  r"task_specific_params|tokenizer_class|prefix|use_bfloat16|tf_legacy_loss|cache_implementation|bos_token|eos_token|"
  r"(min|max)_length|do_sample|early_stopping|num_(beams|beam_groups|return_sequences)|diversity_penalty|temperature|"
  r"top_[kp]|typical_p|repetition_penalty|length_penalty|no_repeat_ngram_size|encoder_no_repeat_ngram_size|bad_words_ids|"
  r"remove_invalid_values|exponential_decay_length_penalty|suppress_tokens|begin_suppress_tokens|forced_.*|"
  r"cross_attention_hidden_size|name_or_path|router_aux_loss_coef"
)


def read_config(
  values: Mapping[str, Any], file: Path, labels: Collection[int] = (0,)
) -> tuple[Family, ModelConfig]:
  """From the object in config.json, as transformers 4 or 5 writes it; `file` is for messages.

  `labels`: which heads it may have, as in ModelConfig: a language model's is 0.

  Raises ConfigError for a field that is missing, wrong, unknown, or asks for mathematics that is not done here.
  """

  def refuse(key: str, why: str) -> NoReturn:
    raise ConfigError(f"{file}: {key} {why}")

  family = FAMILIES.get(values.get("model_type"))
  if family is None:
    refuse(
      "model_type", f"is {values.get('model_type')!r}: choose a checkpoint of {', '.join(FAMILIES)}"
    )
  heads = {family.architecture_with(n): n for n in labels}
  architecture = next(
    (a for a in values.get("architectures") or [family.architecture] if a in heads), None
  )
  if architecture is None:
    refuse(
      "architectures",
      f"is {values.get('architectures')}: choose a checkpoint of {' or '.join(heads)}",
    )
  named = values.get("id2label")
  count = (
    len(named) if isinstance(named, dict) else values.get("num_labels", 2)
  )  # 2 as in transformers
  if heads[architecture] not in (0, count):
    refuse("id2label", f"has {count} labels: choose a {architecture} with {heads[architecture]}")
  for key, allowed in SUPPORTED.items():
    if key in values and values[key] not in allowed:
      refuse(
        key, f"is {values[key]!r}, which is not supported: choose a checkpoint with {allowed[0]!r}"
      )
  names = FIELDS | family.fields
  for key in values:
    if not (key in READ or key in SUPPORTED or key in names.values() or IDLE.fullmatch(key)):
      refuse(
        key,
        f"is {values[key]!r}, a field that is not known here: if it does not change what the model computes,"
        " remove it",
      )
  values = {
    "tie_word_embeddings": family.model_type.startswith("gemma"),
    "norm_topk_prob": False,
    **values,
  }
  if "num_experts" in family.fields:
    values["num_experts"] = _num_experts(values, refuse)
  if values.get("num_key_value_heads") is None:
    values["num_key_value_heads"] = values.get("num_attention_heads")
  if values.get("head_dim") is None:
    values["head_dim"] = quotient(values, "hidden_size", "num_attention_heads", refuse)
  hints = get_type_hints(ModelConfig)
  fields = {
    ours: 0.0
    if ours in OPTIONAL and values.get(theirs) is None
    else value(values, theirs, hints[ours], refuse)
    for ours, theirs in names.items()
  }
  quotient(values, "num_attention_heads", "num_key_value_heads", refuse)
  activation = values.get("hidden_activation", values.get("hidden_act"))
  wanted = ACTIVATIONS[family.fixed.get("activation", "silu")]
  if activation not in (None, *wanted):
    refuse(
      "hidden_act",
      f"is {activation!r}, which is not supported: choose a checkpoint with {wanted[0]!r}",
    )
  fields |= read_rope(family.model_type, values, refuse)
  if (
    fields["rope_scaling"] and fields["rope_scaling"].kind == "dynamic"
  ):  # there, the field is of the original texts
    fields["max_positions"] = int(fields["max_positions"] * fields["rope_scaling"].factor)
  if fields.get("experts_per_token", 0) > fields.get("num_experts", 0):
    refuse(
      "num_experts_per_tok",
      f"is {fields['experts_per_token']}, of {fields['num_experts']} experts: correct either",
    )
  return family, ModelConfig(
    **fields,
    **family.fixed,
    windows=_windows(family, values, refuse),
    family=family.model_type,
    sparse_layers=_sparse_layers(family, values, refuse),
    labels=heads[architecture],
    stop_ids=read_stop_ids(values, file) or (),
  )


def read_stop_ids(values: Mapping[str, Any], file: Path) -> tuple[int, ...] | None:
  """eos_token_id of config.json or generation_config.json; None where it says nothing."""
  eos = values.get("eos_token_id")
  if eos is None:
    return None
  ids = eos if isinstance(eos, list) else [eos]
  if any(type(i) is not int for i in ids):
    raise ConfigError(f"{file}: eos_token_id must be a token id or a list of them, got {eos!r}")
  return tuple(ids)


def config_json(config: ModelConfig) -> dict[str, Any]:
  """What config.json says."""
  family = family_of(config)
  optional = lambda ours: (
    None if ours in OPTIONAL and not getattr(config, ours) else getattr(config, ours)
  )
  names = FIELDS | family.fields
  window = max(config.windows, default=0) or None
  types = [
    "sliding_attention" if config.window(i) else "full_attention" for i in range(config.num_layers)
  ]
  activation = ACTIVATIONS[config.activation][0]
  values = {
    "architectures": [family.architecture_with(config.labels)],
    "model_type": family.model_type,
    **{theirs: optional(ours) for ours, theirs in names.items()},
    **rope_json(config),
    "hidden_activation" if config.activation == "gelu_tanh" else "hidden_act": activation,
    "attention_dropout": 0.0,
    "sliding_window": window,
    **stop_ids_json(config),
    "pad_token_id": None,
    "torch_dtype": "float32",
  }
  if config.labels:
    values["id2label"] = {str(i): f"LABEL_{i}" for i in range(config.labels)}
  if config.query_scalar and config.query_scalar.is_integer():
    values[family.fields["query_scalar"]] = int(config.query_scalar)  # transformers 5 insists on it
  if config.rope_scaling and config.rope_scaling.kind == "dynamic":
    values["max_position_embeddings"] = config.rope_scaling.original_positions
  if config.num_experts:  # the names of transformers 4 and 5
    dense = [i for i in range(config.num_layers) if i not in config.sparse_layers]
    values |= {
      "num_local_experts": config.num_experts,
      "decoder_sparse_step": 1,
      "mlp_only_layers": dense,
    }
  elif family.model_type.startswith(("qwen", "gemma")):
    values["layer_types"] = types
  if family.model_type.startswith(
    "qwen"
  ):  # transformers 4 counts the layers without a window, which come first
    values |= {
      "use_sliding_window": window is not None,
      "max_window_layers": types.index("sliding_attention") if window else config.num_layers,
    }
  return values


def stop_ids_json(config: ModelConfig) -> dict[str, Any]:
  """What generation_config.json says."""
  ids = list(config.stop_ids)
  return {"eos_token_id": ids if len(ids) > 1 else ids[0] if ids else None}


def _windows(family, values, refuse: Refuse) -> tuple[int, ...]:
  """Of each layer; () where no layer has one that hides anything. Absent fields mean the defaults of transformers."""
  count, kind = values["num_hidden_layers"], family.model_type
  window = values.get(
    "sliding_window",
    {
      "qwen2": 4096,
      "qwen3": 4096,
      "qwen3_moe": 4096,
      "mistral": 4096,
      "gemma2": 4096,
      "gemma3_text": 4096,
    }.get(kind),
  )
  types = values.get("layer_types")
  if types is None:
    if kind in ("qwen2", "qwen3"):
      slides = [
        bool(values.get("use_sliding_window")) and i >= values.get("max_window_layers", 28)
        for i in range(count)
      ]
    elif kind == "qwen3_moe":
      slides = [bool(values.get("use_sliding_window"))] * count
    elif kind == "gemma2":
      slides = [i % 2 == 0 for i in range(count)]
    elif kind == "gemma3_text":
      pattern = values.get("sliding_window_pattern", values.get("_sliding_window_pattern", 6))
      slides = [(i + 1) % pattern != 0 for i in range(count)]
    else:
      slides = [kind in ("mistral", "phi3")] * count
  else:
    if len(types) != count or set(types) - {"full_attention", "sliding_attention"}:
      refuse(
        "layer_types",
        f"is {types}: it must name full_attention or sliding_attention for each of {count} layers",
      )
    slides = [t == "sliding_attention" for t in types]
    if kind in ("qwen2", "qwen3", "qwen3_moe") and not values.get("use_sliding_window"):
      slides = [False] * count
  if kind == "qwen3_moe" and any(slides) != all(slides):
    refuse(
      "layer_types",
      "names layers with a window and without, which this family does not have: correct it",
    )
  if any(slides) and window is not None and (type(window) is not int or window < 1):
    refuse("sliding_window", f"must be a positive int, got {window!r}")
  # A window as long as the longest text hides nothing. Layers with one may rotate otherwise, so Gemma 3 keeps it.
  hides = window and (window < values["max_position_embeddings"] or kind == "gemma3_text")
  return tuple(window if s else 0 for s in slides) if any(slides) and hides else ()


def _num_experts(values, refuse: Refuse) -> int:
  """num_experts in transformers 4, num_local_experts in 5."""
  found = [values[key] for key in ("num_experts", "num_local_experts") if key in values]
  if found != found[:1] * len(found):
    refuse("num_experts", f"and num_local_experts differ ({found}): correct one")
  return found[0] if found else None


def _sparse_layers(family, values, refuse: Refuse) -> tuple[int, ...]:
  """Every decoder_sparse_step-th, but those of mlp_only_layers."""
  if "num_experts" not in family.fields:
    return ()
  step = value({"decoder_sparse_step": 1} | values, "decoder_sparse_step", int, refuse)
  dense = values.get("mlp_only_layers") or []
  if not isinstance(dense, list) or any(type(i) is not int for i in dense):
    refuse("mlp_only_layers", f"must be a list of layers, got {dense!r}")
  return tuple(
    i for i in range(values["num_hidden_layers"]) if (i + 1) % step == 0 and i not in dense
  )
