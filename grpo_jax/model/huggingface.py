"""Hugging Face's names for what a decoder is made of: tensors, and the fields of config.json. Reads and writes nothing.

A family is data: rows of (their name, our path, their axes, our axes) that drive both loading and saving. Axes are the
letters of grpo_jax/types.py; "HE D" is a matrix whose rows run over H and, within it, E.
"""
import dataclasses
import math
from pathlib import Path
import re
from typing import Any, Callable, Iterator, Mapping, NoReturn, get_type_hints

import numpy as np

from grpo_jax.config import ConfigError
from grpo_jax.model.config import ModelConfig

Refuse = Callable[[str, str], NoReturn]  # (key of config.json, what is wrong with it)


@dataclasses.dataclass(frozen=True)
class Row:
  """One tensor, or with {i} one per layer."""
  theirs: str
  ours: str
  their_axes: str
  our_axes: str

  def their_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[a] for a in axis) for axis in self.their_axes.split())

  def our_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(sizes[a] for a in self.our_axes)

  def from_theirs(self, array: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
    axes = self.their_axes.replace(" ", "")
    return array.reshape([sizes[a] for a in axes]).transpose([axes.index(a) for a in self.our_axes])

  def to_theirs(self, array: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
    axes = self.their_axes.replace(" ", "")
    array = array.transpose([self.our_axes.index(a) for a in axes]).reshape(self.their_shape(sizes))
    return np.ascontiguousarray(array)


@dataclasses.dataclass(frozen=True)
class Family:
  model_type: str
  architecture: str
  qkv_bias: bool
  embedding: Row
  head: Row  # absent where embeddings are tied
  rows: tuple[Row, ...]

  def tensors(self, config: ModelConfig) -> Iterator[Row]:
    """Every tensor of a model, one row each."""
    yield self.embedding
    for row in self.rows:
      for i in range(config.num_layers if "{i}" in row.ours else 1):
        yield dataclasses.replace(row, theirs=row.theirs.format(i=i), ours=row.ours.format(i=i))
    if not config.tie_embeddings:
      yield self.head


FAMILIES = (
    Family(
        "qwen2", "Qwen2ForCausalLM", qkv_bias=True,
        embedding=Row("model.embed_tokens.weight", "embed/embedding", "V D", "VD"),
        head=Row("lm_head.weight", "head/kernel", "V D", "DV"),
        rows=(
            Row("model.layers.{i}.input_layernorm.weight", "layers_{i}/attention_norm/scale", "D", "D"),
            Row("model.layers.{i}.self_attn.q_proj.weight", "layers_{i}/attention/q/kernel", "HE D", "DHE"),
            Row("model.layers.{i}.self_attn.q_proj.bias", "layers_{i}/attention/q/bias", "HE", "HE"),
            Row("model.layers.{i}.self_attn.k_proj.weight", "layers_{i}/attention/k/kernel", "KE D", "DKE"),
            Row("model.layers.{i}.self_attn.k_proj.bias", "layers_{i}/attention/k/bias", "KE", "KE"),
            Row("model.layers.{i}.self_attn.v_proj.weight", "layers_{i}/attention/v/kernel", "KE D", "DKE"),
            Row("model.layers.{i}.self_attn.v_proj.bias", "layers_{i}/attention/v/bias", "KE", "KE"),
            Row("model.layers.{i}.self_attn.o_proj.weight", "layers_{i}/attention/o/kernel", "D HE", "HED"),
            Row("model.layers.{i}.post_attention_layernorm.weight", "layers_{i}/mlp_norm/scale", "D", "D"),
            Row("model.layers.{i}.mlp.gate_proj.weight", "layers_{i}/mlp/gate/kernel", "F D", "DF"),
            Row("model.layers.{i}.mlp.up_proj.weight", "layers_{i}/mlp/up/kernel", "F D", "DF"),
            Row("model.layers.{i}.mlp.down_proj.weight", "layers_{i}/mlp/down/kernel", "D F", "FD"),
            Row("model.norm.weight", "final_norm/scale", "D", "D"),
        )),
)
HARMLESS = re.compile(r"rotary_emb\.inv_freq$")  # tensors of old checkpoints that follow from config.json
FIELDS = {  # ours: theirs, in config.json
    "vocab_size": "vocab_size", "embed_dim": "hidden_size", "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads", "head_dim": "head_dim",
    "mlp_dim": "intermediate_size", "rope_theta": "rope_theta", "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings", "max_positions": "max_position_embeddings",
}
SUPPORTED = {  # fields that would change the mathematics, with the values that do not
    "hidden_act": ("silu", "swish"), "attention_dropout": (0,), "partial_rotary_factor": (None, 1),
    "quantization_config": (None,), "use_mrope": (None, False),
}


def sizes(config: ModelConfig) -> dict[str, int]:
  """Axis letter -> length."""
  return dict(V=config.vocab_size, D=config.embed_dim, H=config.num_heads, K=config.num_kv_heads, E=config.head_dim,
              F=config.mlp_dim)


def family_of(config: ModelConfig) -> Family:
  """The family a model of this config is saved as."""
  for family in FAMILIES:
    if family.qkv_bias == config.qkv_bias:
      return family
  raise ConfigError(f"a model with qkv_bias={config.qkv_bias} has no Hugging Face family here: it cannot be saved")


def read_config(values: Mapping[str, Any], file: Path) -> tuple[Family, ModelConfig]:
  """From the object in config.json, as transformers 4 or 5 writes it; `file` is for messages.

  Raises ConfigError for a field that is missing, wrong, or asks for mathematics that is not done here.
  """
  def refuse(key: str, why: str) -> NoReturn:
    raise ConfigError(f"{file}: {key} {why}")

  family = next((f for f in FAMILIES if f.model_type == values.get("model_type")), None)
  if family is None:
    known = ", ".join(f.model_type for f in FAMILIES)
    refuse("model_type", f"is {values.get('model_type')!r}: choose a checkpoint of {known}")
  if family.architecture not in (values.get("architectures") or [family.architecture]):
    refuse("architectures", f"is {values['architectures']}: choose a checkpoint of {family.architecture}")
  for key, allowed in SUPPORTED.items():
    if key in values and values[key] not in allowed:
      refuse(key, f"is {values[key]!r}, which is not supported: choose a checkpoint with {allowed[0]!r}")
  values = {"tie_word_embeddings": False, **values, "rope_theta": _rope_theta(values, refuse)}
  if values.get("head_dim") is None:
    values["head_dim"] = _divide(values, "hidden_size", "num_attention_heads", refuse)
  hints = get_type_hints(ModelConfig)
  fields = {ours: _value(values, theirs, hints[ours], refuse) for ours, theirs in FIELDS.items()}
  _divide(values, "num_attention_heads", "num_key_value_heads", refuse)
  _refuse_sliding_window(values, refuse)
  stop_ids = read_stop_ids(values, file) or ()
  return family, ModelConfig(**fields, qkv_bias=family.qkv_bias, stop_ids=stop_ids)


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
  # transformers 4 reads rope_theta and torch_dtype. 5 still does, and writes rope_parameters, as its readers expect.
  return {
      "architectures": [family.architecture], "model_type": family.model_type,
      **{theirs: getattr(config, ours) for ours, theirs in FIELDS.items()},
      "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"}, "hidden_act": "silu",
      "attention_dropout": 0.0, "use_sliding_window": False, **stop_ids_json(config), "torch_dtype": "float32",
  }


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


def _rope_theta(values, refuse: Refuse) -> float:
  """At the top level in transformers 4, in rope_parameters in 5."""
  thetas = [values.get("rope_theta")]
  for key in ("rope_scaling", "rope_parameters"):
    rope = values.get(key) or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
    if kind != "default":
      refuse(key, f"is of type {kind!r}, which is not supported: choose a checkpoint without scaling")
    if rope.get("partial_rotary_factor", 1) != 1:
      refuse(key, "has a partial_rotary_factor, which is not supported: choose a checkpoint that rotates whole heads")
    thetas.append(rope.get("rope_theta"))
  thetas = [t for t in thetas if t is not None]
  if not thetas or any(t != thetas[0] for t in thetas):
    refuse("rope_theta", f"is given differently in two places ({thetas}): correct one" if thetas else "is missing")
  return thetas[0]


def _refuse_sliding_window(values, refuse: Refuse) -> None:
  layers = set(values.get("layer_types") or ())
  if layers - {"full_attention", "sliding_attention"}:
    refuse("layer_types", f"has {sorted(layers)}: choose a checkpoint with full_attention only")
  window = values.get("sliding_window", 4096)  # absent fields mean the defaults of transformers
  first = values.get("max_window_layers", 28)
  slides = "sliding_attention" in layers if layers else first < values["num_hidden_layers"]
  # A window as long as the longest text hides nothing.
  if values.get("use_sliding_window") and slides and window and window < values["max_position_embeddings"]:
    refuse("use_sliding_window", f"is true (window {window}), which is not supported: choose a checkpoint without")
