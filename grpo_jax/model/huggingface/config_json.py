"""Turns Hugging Face's config.json into a ModelConfig, and back. Opens no file.

It reads the form of transformers 4 and that of transformers 5, and writes one that both read.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.huggingface import delta_json, fp8
from grpo_jax.model.huggingface.config_fields import (
  ACTIVATION_NAMES,
  OPTIONAL,
  Refuse,
  check_fields,
  fields_of,
  read_field,
  read_quotient,
)
from grpo_jax.model.huggingface.families import FAMILIES, Family, family_of
from grpo_jax.model.huggingface.rope_json import read_rope, rope_to_json
from grpo_jax.model.huggingface.text_part import has_other_parts, text_values
from grpo_jax.settings import ConfigError, shown

_MOST_LAYERS = 4096
_QWEN = ("qwen2", "qwen3", "qwen3_moe")
_WITH_DEFAULT_WINDOW = (*_QWEN, "mistral", "gemma2", "gemma3_text", "olmo3")
_WITH_A_SWITCH = (*_QWEN, "smollm3")  # use_sliding_window
_LISTS_LAYERS = (*_QWEN, "gemma2", "gemma3_text", "olmo3", "smollm3")  # in layer_types
# Their layers with a window have rotary frequencies of their own.
_WITH_LOCAL_ROPE = ("gemma3_text", "olmo3")


def family_and_config(
  values: Mapping[str, Any], file: Path, labels: Collection[int] = (0,)
) -> tuple[Family, ModelConfig]:
  """Reads the object in config.json.

  Args:
    values: The object.
    file: Where it was read from, for error messages.
    labels: The heads that the model may have, as `ModelConfig.labels` counts them. 0 is the head of
      a language model.

  Raises:
    ConfigError: A field is missing, wrong or unknown, or needs mathematics that is not supported.
  """

  def refuse(key: str, reason: str) -> NoReturn:
    raise ConfigError(f"{file}: {key} {reason}")

  if has_other_parts(values):
    values = text_values(values, refuse)
  family = FAMILIES.get(str(values.get("model_type")))
  if family is None:
    found = shown(values.get("model_type"))
    refuse("model_type", f"is {found}: choose a checkpoint of {', '.join(FAMILIES)}")
  head_labels = _read_labels(family, values, labels, refuse)
  check_fields(values, family, refuse)
  if values.get("quantization_config") is not None:
    fp8.check(values["quantization_config"], refuse)
  values = _with_defaults(family, values, refuse)
  fields = _read_fields(family, values, refuse)
  _check_activation(family, values, refuse)
  fields |= read_rope(family.model_type, values, refuse)
  scaling = fields["rope_scaling"]
  if scaling and scaling.kind == "dynamic":
    # With this kind, config.json has the length of the texts that the model was first trained on.
    fields["max_positions"] = int(fields["max_positions"] * scaling.factor)
  experts, used = fields.get("num_experts", 0), fields.get("experts_per_token", 0)
  if used > experts:
    refuse("num_experts_per_tok", f"is {used}, of {experts} experts: correct either")
  fields |= delta_json.read(family.model_type, values, refuse)
  config = ModelConfig(
    **fields,
    **family.fixed,
    windows=_read_windows(family.model_type, values, refuse),
    family=family.model_type,
    sparse_layers=_read_sparse_layers(family, values, refuse),
    unrotated_layers=_read_unrotated_layers(family.model_type, values, refuse),
    labels=head_labels,
    stop_ids=read_stop_ids(values, file) or (),
  )
  return family, config


def _read_labels(
  family: Family, values: Mapping[str, Any], labels: Collection[int], refuse: Refuse
) -> int:
  """Which of the heads that the model may have it does have, as `ModelConfig.labels`."""
  head_of = {family.architecture_with(count): count for count in labels}
  found = values.get("architectures") or [family.architecture]
  listed = found if isinstance(found, list) else []
  architecture = next((name for name in map(str, listed) if name in head_of), None)
  if architecture is None:
    named = shown(values.get("architectures"))
    refuse("architectures", f"is {named}: choose a checkpoint of {' or '.join(head_of)}")
  names = values.get("id2label")
  # transformers, too, assumes 2 labels if the file has neither field.
  count = len(names) if isinstance(names, dict) else values.get("num_labels", 2)
  wanted = head_of[architecture]
  if wanted not in (0, count):
    refuse("id2label", f"has {count} labels: choose a {architecture} with {wanted}")
  return wanted


def _with_defaults(family: Family, values: Mapping[str, Any], refuse: Refuse) -> dict[str, Any]:
  """Adds the defaults of transformers for fields that may be missing."""
  defaults = {
    "tie_word_embeddings": family.model_type.startswith(("gemma", "smollm3")),
    "norm_topk_prob": False,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
  }
  values = {**defaults, **values}
  for name in ("attention_bias", "mlp_bias"):
    values[name] = False if values.get(name) is None else values[name]
  if "num_experts" in family.fields:
    values["num_experts"] = _read_num_experts(values, refuse)
  if values.get("num_key_value_heads") is None:
    values["num_key_value_heads"] = values.get("num_attention_heads")
  if values.get("head_dim") is None:
    values["head_dim"] = read_quotient(values, "hidden_size", "num_attention_heads", refuse)
  return values


def _read_fields(family: Family, values: Mapping[str, Any], refuse: Refuse) -> dict[str, Any]:
  """The fields of ModelConfig that config.json has one for one."""
  types = get_type_hints(ModelConfig)
  fields = {}
  for name, key in fields_of(family).items():
    if name in OPTIONAL and values.get(key) is None:
      fields[name] = 0.0
    else:
      fields[name] = read_field(values, key, types[name], refuse)
  if fields["num_layers"] > _MOST_LAYERS:
    refuse("num_hidden_layers", f"is {fields['num_layers']}, more than any model has: correct it")
  read_quotient(values, "num_attention_heads", "num_key_value_heads", refuse)
  return fields


def _check_activation(family: Family, values: Mapping[str, Any], refuse: Refuse) -> None:
  """Refuses an activation that is not the family's. An absent one is the family's."""
  activation = values.get("hidden_activation", values.get("hidden_act"))
  wanted = ACTIVATION_NAMES[family.fixed.get("activation", "silu")]
  if activation not in (None, *wanted):
    refuse(
      "hidden_act",
      f"is {activation!r}, which is not supported: choose a checkpoint with {wanted[0]!r}",
    )


def _read_windows(model_type: str, values: Mapping[str, Any], refuse: Refuse) -> tuple[int, ...]:
  """The window of each layer, or () if no window hides anything.

  Absent fields stand for the defaults of transformers.
  """
  if model_type in delta_json.FAMILIES:
    return ()
  default_window = 4096 if model_type in _WITH_DEFAULT_WINDOW else None
  window = values.get("sliding_window", default_window)
  if values.get("layer_types") is None:
    unrotated = _read_unrotated_layers(model_type, values, refuse)
    has_window = _default_pattern(model_type, values, unrotated)
  else:
    has_window = _listed_pattern(model_type, values, refuse)
  if model_type == "qwen3_moe" and any(has_window) != all(has_window):
    refuse(
      "layer_types",
      "names layers with a window and without, which this family does not have: correct it",
    )
  if any(has_window) and window is not None and (type(window) is not int or window < 1):
    refuse("sliding_window", f"must be a positive int, got {window!r}")
  # A window as long as the longest text hides nothing, but a layer with one may have other rotary
  # frequencies.
  if not any(has_window) or not window:
    return ()
  if window >= values["max_position_embeddings"] and model_type not in _WITH_LOCAL_ROPE:
    return ()
  return tuple(window if has else 0 for has in has_window)


def _default_pattern(
  model_type: str, values: Mapping[str, Any], unrotated: tuple[int, ...]
) -> list[bool]:
  """Which layers have a window if config.json does not list `layer_types`."""
  layers = range(values["num_hidden_layers"])
  use_window = bool(values.get("use_sliding_window"))
  if model_type in ("qwen2", "qwen3"):
    first = values.get("max_window_layers", 28)
    return [use_window and layer >= first for layer in layers]
  if model_type == "qwen3_moe":
    return [use_window for _ in layers]
  if model_type == "gemma2":
    return [layer % 2 == 0 for layer in layers]
  if model_type == "gemma3_text":
    pattern = values.get("sliding_window_pattern", values.get("_sliding_window_pattern", 6))
    return [(layer + 1) % pattern != 0 for layer in layers]
  if model_type == "olmo3":
    return [(layer + 1) % 4 != 0 for layer in layers]
  if model_type == "smollm3":
    return [use_window and layer in unrotated for layer in layers]
  return [model_type in ("mistral", "ministral3", "phi3") for _ in layers]


def _read_unrotated_layers(
  model_type: str, values: Mapping[str, Any], refuse: Refuse
) -> tuple[int, ...]:
  """The layers whose queries and keys are not rotated."""
  if model_type != "smollm3":
    return ()
  layers, rotates = range(values["num_hidden_layers"]), values.get("no_rope_layers")
  if rotates is None:
    with_default = {"no_rope_layer_interval": 4, **values}
    every = read_field(with_default, "no_rope_layer_interval", int, refuse)
    return tuple(layer for layer in layers if (layer + 1) % every == 0)
  # transformers reads as many as there are layers.
  is_list = isinstance(rotates, list) and len(rotates) >= len(layers)
  if not is_list or any(x not in (0, 1) for x in rotates):
    found = shown(rotates)
    refuse("no_rope_layers", f"is {found}: it must have 0 or 1 for each of {len(layers)} layers")
  return tuple(layer for layer in layers if not rotates[layer])


def _listed_pattern(model_type: str, values: Mapping[str, Any], refuse: Refuse) -> list[bool]:
  """Which layers have a window according to `layer_types`."""
  types, count = values["layer_types"], values["num_hidden_layers"]
  kinds = ("full_attention", "sliding_attention")
  if not isinstance(types, list) or len(types) != count or any(kind not in kinds for kind in types):
    refuse(
      "layer_types",
      f"is {shown(types)}: it must name full_attention or sliding_attention for each of {count}"
      " layers",
    )
  if model_type in _WITH_A_SWITCH and not values.get("use_sliding_window"):
    return [False] * count
  return [kind == "sliding_attention" for kind in types]


def _read_num_experts(values: Mapping[str, Any], refuse: Refuse) -> int | None:
  """The number of experts: `num_experts` in transformers 4, `num_local_experts` in 5."""
  found = [values[key] for key in ("num_experts", "num_local_experts") if key in values]
  if any(count != found[0] for count in found):
    refuse("num_experts", f"and num_local_experts differ ({found}): correct one")
  return found[0] if found else None


def _read_sparse_layers(
  family: Family, values: Mapping[str, Any], refuse: Refuse
) -> tuple[int, ...]:
  """The layers with experts: every `decoder_sparse_step`-th, except those of `mlp_only_layers`."""
  if "num_experts" not in family.fields:
    return ()
  with_default = {"decoder_sparse_step": 1} | dict(values)
  step = read_field(with_default, "decoder_sparse_step", int, refuse)
  dense = values.get("mlp_only_layers") or []
  if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
    refuse("mlp_only_layers", f"must be a list of layers, got {dense!r}")
  layers = range(values["num_hidden_layers"])
  return tuple(layer for layer in layers if (layer + 1) % step == 0 and layer not in dense)


def read_stop_ids(values: Mapping[str, Any], file: Path) -> tuple[int, ...] | None:
  """`eos_token_id` of config.json or generation_config.json, or None if it is absent."""
  eos = values.get("eos_token_id")
  if eos is None:
    return None
  ids = eos if isinstance(eos, list) else [eos]
  if any(type(i) is not int for i in ids):
    raise ConfigError(f"{file}: eos_token_id must be a token id or a list of them, got {eos!r}")
  return tuple(ids)


def config_to_json(config: ModelConfig) -> dict[str, Any]:
  """The object to write to config.json. Raises ConfigError if no family has such models."""
  family = family_of(config)
  is_gelu = config.activation == "gelu_tanh"
  values = {
    "architectures": [family.architecture_with(config.labels)],
    "model_type": family.model_type,
    **{key: _optional(config, name) for name, key in fields_of(family).items()},
    **rope_to_json(config),
    "hidden_activation" if is_gelu else "hidden_act": ACTIVATION_NAMES[config.activation][0],
    "attention_dropout": 0.0,
    "sliding_window": _window(config),
    **stop_ids_to_json(config),
    "pad_token_id": None,
    "torch_dtype": "float32",
  }
  if config.labels:
    values["id2label"] = {str(i): f"LABEL_{i}" for i in range(config.labels)}
  if config.query_scalar and config.query_scalar.is_integer():
    # transformers 5 accepts only an int here.
    values[family.fields["query_scalar"]] = int(config.query_scalar)
  if config.rope_scaling and config.rope_scaling.kind == "dynamic":
    values["max_position_embeddings"] = config.rope_scaling.original_positions
  return values | _layers_to_json(config, family.model_type)


def _layers_to_json(config: ModelConfig, model_type: str) -> dict[str, Any]:
  """The fields that say which layers have experts or a window."""
  layers = range(config.num_layers)
  types = ["sliding_attention" if config.kind(i).window else "full_attention" for i in layers]
  values: dict[str, Any] = {}
  if config.num_experts:  # under the names of transformers 4 and 5
    values["num_local_experts"] = config.num_experts
    values["decoder_sparse_step"] = 1
    values["mlp_only_layers"] = [i for i in layers if i not in config.sparse_layers]
  elif model_type in _LISTS_LAYERS:
    values["layer_types"] = types
  if model_type == "smollm3":
    values["no_rope_layers"] = [int(i not in config.unrotated_layers) for i in layers]
    values["use_sliding_window"] = _window(config) is not None
  if config.delta:
    return values | delta_json.to_json(config)
  if model_type.startswith("qwen"):
    # transformers 4 counts the layers without a window, which come first.
    window = _window(config)
    values["use_sliding_window"] = window is not None
    values["max_window_layers"] = types.index("sliding_attention") if window else len(types)
  return values


def _optional(config: ModelConfig, name: str) -> Any:
  """A field of ModelConfig, or None if it is off and may be null."""
  value = getattr(config, name)
  return None if name in OPTIONAL and not value else value


def _window(config: ModelConfig) -> int | None:
  """The window of the layers that have one."""
  return max(config.windows, default=0) or None


def stop_ids_to_json(config: ModelConfig) -> dict[str, Any]:
  """The object to write to generation_config.json."""
  ids = list(config.stop_ids)
  if not ids:
    return {"eos_token_id": None}
  return {"eos_token_id": ids if len(ids) > 1 else ids[0]}
