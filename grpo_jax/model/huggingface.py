"""Hugging Face's config.json, as transformers 4 and 5 write it, to a ModelConfig and back. Opens no file."""
import dataclasses
import math
from pathlib import Path
import re
from typing import Any, Callable, Collection, Mapping, NoReturn, get_type_hints

from grpo_jax.config import ConfigError
from grpo_jax.model.config import ModelConfig
from grpo_jax.model.families import FAMILIES, Family, family_of
from grpo_jax.model.rope import SCALINGS, RopeScaling

Refuse = Callable[[str, str], NoReturn]  # (key of config.json, what is wrong with it)

FIELDS = {  # ours: theirs, in config.json
    "vocab_size": "vocab_size", "embed_dim": "hidden_size", "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads", "head_dim": "head_dim",
    "mlp_dim": "intermediate_size", "norm_eps": "rms_norm_eps", "tie_embeddings": "tie_word_embeddings",
    "max_positions": "max_position_embeddings",
}
OPTIONAL = {"attention_cap", "logit_cap"}  # may be null
ACTIVATIONS = {"silu": ("silu", "swish"), "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new")}  # ours: theirs
SUPPORTED = {  # fields that would change the mathematics, with the values that do not
    "attention_dropout": (0,), "resid_pdrop": (0,), "embd_pdrop": (0,), "partial_rotary_factor": (None, 1),
    "quantization_config": (None,), "use_mrope": (None, False), "attention_bias": (False, None), "mlp_bias": (False, None),
    "use_bidirectional_attention": (None, False), "is_decoder": (True, False), "is_encoder_decoder": (False,),
    "add_cross_attention": (False,), "chunk_size_feed_forward": (0,), "tie_encoder_decoder": (False,),
    "pruned_heads": ({}, None), "token_classification_bias": (True, None),
}
READ = {  # by the functions below
    "model_type", "architectures", "rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq",
    "sliding_window", "sliding_window_pattern", "_sliding_window_pattern", "layer_types", "use_sliding_window",
    "max_window_layers", "hidden_act", "hidden_activation", "eos_token_id", "original_max_position_embeddings",
    "id2label", "num_labels", "num_local_experts", "decoder_sparse_step", "mlp_only_layers",
}
IDLE = re.compile(  # what training, generating or loading elsewhere reads
    r"_.*|.*_token_id|(torch_)?dtype|transformers(_version|_weights)|auto_map|use_cache|initializer_range|pretraining_tp|"
    r"return_dict.*|output_.*|torchscript|label2id|classifier_dropout|problem_type|finetuning_task|"
    r"task_specific_params|tokenizer_class|prefix|use_bfloat16|tf_legacy_loss|cache_implementation|bos_token|eos_token|"
    r"(min|max)_length|do_sample|early_stopping|num_(beams|beam_groups|return_sequences)|diversity_penalty|temperature|top_[kp]|"
    r"typical_p|repetition_penalty|length_penalty|no_repeat_ngram_size|encoder_no_repeat_ngram_size|bad_words_ids|"
    r"remove_invalid_values|exponential_decay_length_penalty|suppress_tokens|begin_suppress_tokens|forced_.*|"
    r"cross_attention_hidden_size|name_or_path|router_aux_loss_coef")


def read_config(values: Mapping[str, Any], file: Path, labels: Collection[int] = (0,)) -> tuple[Family, ModelConfig]:
  """From the object in config.json, as transformers 4 or 5 writes it; `file` is for messages.

  `labels`: which heads it may have, as in ModelConfig: a language model's is 0.

  Raises ConfigError for a field that is missing, wrong, unknown, or asks for mathematics that is not done here.
  """
  def refuse(key: str, why: str) -> NoReturn:
    raise ConfigError(f"{file}: {key} {why}")

  family = FAMILIES.get(values.get("model_type"))
  if family is None:
    refuse("model_type", f"is {values.get('model_type')!r}: choose a checkpoint of {', '.join(FAMILIES)}")
  heads = {family.architecture_with(n): n for n in labels}
  architecture = next((a for a in values.get("architectures") or [family.architecture] if a in heads), None)
  if architecture is None:
    refuse("architectures", f"is {values.get('architectures')}: choose a checkpoint of {' or '.join(heads)}")
  named = values.get("id2label")
  count = len(named) if isinstance(named, dict) else values.get("num_labels", 2)  # 2 as in transformers
  if heads[architecture] not in (0, count):
    refuse("id2label", f"has {count} labels: choose a {architecture} with {heads[architecture]}")
  for key, allowed in SUPPORTED.items():
    if key in values and values[key] not in allowed:
      refuse(key, f"is {values[key]!r}, which is not supported: choose a checkpoint with {allowed[0]!r}")
  names = FIELDS | family.fields
  for key in values:
    if not (key in READ or key in SUPPORTED or key in names.values() or IDLE.fullmatch(key)):
      refuse(key, f"is {values[key]!r}, a field that is not known here: if it does not change what the model computes,"
             " remove it")
  values = {"tie_word_embeddings": family.model_type.startswith("gemma"), "norm_topk_prob": False, **values}
  if "num_experts" in family.fields:
    values["num_experts"] = _num_experts(values, refuse)
  if values.get("num_key_value_heads") is None:
    values["num_key_value_heads"] = values.get("num_attention_heads")
  if values.get("head_dim") is None:
    values["head_dim"] = _divide(values, "hidden_size", "num_attention_heads", refuse)
  hints = get_type_hints(ModelConfig)
  fields = {ours: 0.0 if ours in OPTIONAL and values.get(theirs) is None else _value(values, theirs, hints[ours], refuse)
            for ours, theirs in names.items()}
  _divide(values, "num_attention_heads", "num_key_value_heads", refuse)
  activation = values.get("hidden_activation", values.get("hidden_act"))
  wanted = ACTIVATIONS[family.fixed.get("activation", "silu")]
  if activation not in (None, *wanted):
    refuse("hidden_act", f"is {activation!r}, which is not supported: choose a checkpoint with {wanted[0]!r}")
  fields |= _rope(family, values, refuse)
  if fields["rope_scaling"] and fields["rope_scaling"].kind == "dynamic":  # there, the field is of the original texts
    fields["max_positions"] = int(fields["max_positions"] * fields["rope_scaling"].factor)
  if fields.get("experts_per_token", 0) > fields.get("num_experts", 0):
    refuse("num_experts_per_tok", f"is {fields['experts_per_token']}, of {fields['num_experts']} experts: correct either")
  return family, ModelConfig(**fields, **family.fixed, windows=_windows(family, values, refuse), family=family.model_type,
                             sparse_layers=_sparse_layers(family, values, refuse), labels=heads[architecture],
                             stop_ids=read_stop_ids(values, file) or ())


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
  optional = lambda ours: None if ours in OPTIONAL and not getattr(config, ours) else getattr(config, ours)
  names = FIELDS | family.fields
  window = max(config.windows, default=0) or None
  types = ["sliding_attention" if config.window(i) else "full_attention" for i in range(config.num_layers)]
  activation = ACTIVATIONS[config.activation][0]
  values = {
      "architectures": [family.architecture_with(config.labels)], "model_type": family.model_type,
      **{theirs: optional(ours) for ours, theirs in names.items()}, **_rope_json(config),
      "hidden_activation" if config.activation == "gelu_tanh" else "hidden_act": activation,
      "attention_dropout": 0.0, "sliding_window": window, **stop_ids_json(config), "pad_token_id": None,
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
    values |= {"num_local_experts": config.num_experts, "decoder_sparse_step": 1, "mlp_only_layers": dense}
  elif family.model_type.startswith(("qwen", "gemma")):
    values["layer_types"] = types
  if family.model_type.startswith("qwen"):  # transformers 4 counts the layers without a window, which come first
    values |= {"use_sliding_window": window is not None,
               "max_window_layers": types.index("sliding_attention") if window else config.num_layers}
  return values


def stop_ids_json(config: ModelConfig) -> dict[str, Any]:
  """What generation_config.json says."""
  ids = list(config.stop_ids)
  return {"eos_token_id": ids if len(ids) > 1 else ids[0] if ids else None}


def _value(values, key, hint, refuse: Refuse):
  value = values.get(key)
  if type(value) not in ({int, float} if hint is float else {hint}) or (hint is not bool and value <= 0):
    refuse(key, f"must be {'true or false' if hint is bool else f'a positive {hint.__name__}'}, got {value!r}")
  return hint(value)


def _divide(values, key, by, refuse: Refuse) -> int:
  whole, part = _value(values, key, int, refuse), _value(values, by, int, refuse)
  if whole % part:
    refuse(key, f"({whole}) must be a multiple of {by} ({part})")
  return whole // part


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
  step = _value({"decoder_sparse_step": 1} | values, "decoder_sparse_step", int, refuse)
  dense = values.get("mlp_only_layers") or []
  if not isinstance(dense, list) or any(type(i) is not int for i in dense):
    refuse("mlp_only_layers", f"must be a list of layers, got {dense!r}")
  return tuple(i for i in range(values["num_hidden_layers"]) if (i + 1) % step == 0 and i not in dense)


def _windows(family, values, refuse: Refuse) -> tuple[int, ...]:
  """Of each layer; () where no layer has one that hides anything. Absent fields mean the defaults of transformers."""
  count, kind = values["num_hidden_layers"], family.model_type
  window = values.get("sliding_window", {"qwen2": 4096, "qwen3": 4096, "qwen3_moe": 4096, "mistral": 4096,
                                         "gemma2": 4096, "gemma3_text": 4096}.get(kind))
  types = values.get("layer_types")
  if types is None:
    if kind in ("qwen2", "qwen3"):
      slides = [bool(values.get("use_sliding_window")) and i >= values.get("max_window_layers", 28) for i in range(count)]
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
      refuse("layer_types", f"is {types}: it must name full_attention or sliding_attention for each of {count} layers")
    slides = [t == "sliding_attention" for t in types]
    if kind in ("qwen2", "qwen3", "qwen3_moe") and not values.get("use_sliding_window"):
      slides = [False] * count
  if kind == "qwen3_moe" and any(slides) != all(slides):
    refuse("layer_types", "names layers with a window and without, which this family does not have: correct it")
  if any(slides) and window is not None and (type(window) is not int or window < 1):
    refuse("sliding_window", f"must be a positive int, got {window!r}")
  # A window as long as the longest text hides nothing. Layers with one may rotate otherwise, so Gemma 3 keeps it.
  hides = window and (window < values["max_position_embeddings"] or kind == "gemma3_text")
  return tuple(window if s else 0 for s in slides) if any(slides) and hides else ()


def _rope(family, values, refuse: Refuse) -> dict[str, Any]:
  """Fields of ModelConfig. In transformers 4 rope_theta and rope_scaling, in 5 rope_parameters, of kinds of layers or all."""
  given = values.get("rope_parameters") or {}
  if "full_attention" in given or "sliding_attention" in given:
    local, given = given.get("sliding_attention") or {}, given.get("full_attention") or {}
    if local.get("rope_type", "default") != "default":
      refuse("rope_parameters", f"scales layers with a window ({local.get('rope_type')}), which is not supported")
  else:
    local = {"rope_theta": values.get("rope_local_base_freq")}
  thetas = [values.get("rope_theta"), given.get("rope_theta")]
  scalings = []
  for key, rope in (("rope_scaling", values.get("rope_scaling")), ("rope_parameters", given)):
    if rope:
      thetas.append(rope.get("rope_theta") if isinstance(rope, dict) else None)
      scalings.append(_scaling(key, rope, values, refuse))
  thetas = [t for t in thetas if t is not None]
  if not thetas and family.model_type == "gemma3_text":
    thetas = [1e6]
  if not thetas or any(t != thetas[0] for t in thetas):
    refuse("rope_theta", f"is given differently in two places ({thetas}): correct one" if thetas else "is missing")
  if any(s != scalings[0] for s in scalings):
    refuse("rope_scaling", "is given differently in two places: correct one")
  fields = {"rope_theta": _value({"rope_theta": thetas[0]}, "rope_theta", float, refuse),
            "rope_scaling": scalings[0] if scalings else None}
  if family.model_type == "gemma3_text":
    fields["local_rope_theta"] = float(local.get("rope_theta") or 1e4)
  return fields


def _scaling(key, rope, values, refuse: Refuse) -> RopeScaling | None:
  if not isinstance(rope, dict):
    refuse(key, f"must be an object, got {rope!r}")
  kind = rope.get("rope_type", rope.get("type", "default"))
  if rope.get("partial_rotary_factor", 1) != 1:
    refuse(key, "has a partial_rotary_factor, which is not supported: choose a checkpoint that rotates whole heads")
  if kind == "default":
    return None
  if kind not in SCALINGS:
    refuse(key, f"is of type {kind!r}, which is not supported: choose a checkpoint with {', '.join(SCALINGS)} or none")
  read = {"linear": (), "dynamic": (), "llama3": ("low_freq_factor", "high_freq_factor"),
          "yarn": ("beta_slow", "beta_fast", "attention_factor", "mscale", "mscale_all_dim", "truncate")}[kind]
  known = {"rope_type", "type", "rope_theta", "factor", "partial_rotary_factor", "original_max_position_embeddings", *read}
  if rope.keys() - known:
    refuse(key, f"has {sorted(rope.keys() - known)}, which {kind} does not read here: remove it or correct the type")
  number = lambda name, default=None: _value({name: rope.get(name) or default}, name, float, refuse)
  factor, longest = number("factor"), values["max_position_embeddings"]
  original = rope.get("original_max_position_embeddings") or values.get("original_max_position_embeddings") or longest
  if kind == "dynamic":
    original = longest  # as transformers has it
  scaling = RopeScaling(kind, factor, original)
  if kind == "llama3":
    return dataclasses.replace(scaling, low=number("low_freq_factor"), high=number("high_freq_factor"))
  if kind == "yarn":
    scale = lambda m: 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0
    m, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    attention = rope.get("attention_factor")
    if attention is None:
      attention = scale(m) / scale(all_dim) if m and all_dim else scale(1.0)
    return dataclasses.replace(scaling, low=number("beta_slow", 1.0), high=number("beta_fast", 32.0),
                               attention_factor=float(attention), truncate=rope.get("truncate", True))
  return scaling


def _rope_json(config: ModelConfig) -> dict[str, Any]:
  """transformers 4 reads rope_theta and rope_scaling; 5 writes rope_parameters, as its readers expect."""
  s = config.rope_scaling
  scaling = {"rope_type": "default"}
  if s is not None:
    scaling = {"rope_type": s.kind, "factor": s.factor}
    if s.kind in ("llama3", "yarn"):
      scaling["original_max_position_embeddings"] = s.original_positions
    if s.kind == "llama3":
      scaling |= {"low_freq_factor": s.low, "high_freq_factor": s.high}
    if s.kind == "yarn":
      scaling |= {"beta_slow": s.low, "beta_fast": s.high, "attention_factor": s.attention_factor, "truncate": s.truncate}
  full = {"rope_theta": config.rope_theta, **scaling}
  values = {"rope_theta": config.rope_theta, "rope_parameters": full}
  if s is not None:
    values["rope_scaling"] = scaling
  if config.local_rope_theta:
    local = {"rope_theta": config.local_rope_theta, "rope_type": "default"}
    values |= {"rope_local_base_freq": config.local_rope_theta,
               "rope_parameters": {"full_attention": full, "sliding_attention": local}}
  return values
