"""The rotary fields of config.json.

transformers 4 writes `rope_theta` and `rope_scaling`. transformers 5 writes `rope_parameters`.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import math
from typing import Any

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.huggingface.config_fields import Refuse, read_field
from grpo_jax.model.huggingface.families import Family
from grpo_jax.model.rope import SCALINGS, RopeScaling
from grpo_jax.settings import shown

_GROWTH = "llama_4_scaling_beta"  # ModelConfig.query_growth
_COMMON_KEYS = {
  "rope_type",
  "type",
  "rope_theta",
  "factor",
  "partial_rotary_factor",
  "original_max_position_embeddings",
  "mrope_section",  # for the positions of images, which the vision family reads
  "mrope_interleaved",
}
_KEYS_OF_KIND: dict[str, set[str]] = {
  "linear": set(),
  "proportional": set(),
  "dynamic": set(),
  "llama3": {"low_freq_factor", "high_freq_factor"},
  "longrope": {"short_factor", "long_factor", "attention_factor"},
  "yarn": {
    "beta_slow",
    "beta_fast",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
    _GROWTH,
    "max_position_embeddings",  # repeats the field of config.json
  },
}


def read_rope(family: Family, values: Mapping[str, Any], refuse: Refuse) -> dict[str, Any]:
  """Reads the rotary fields of a ModelConfig, by their names.

  Args:
    family: The family of the model.
    values: The object in config.json, in the format of transformers 4 or 5.
    refuse: refuse(field, reason) raises ConfigError, so it never returns.
  """
  rope, local = _rope_parameters(values, refuse)  # of layers without a window, and with one
  # A file may state the base and the scaling in the fields of both versions. They must agree.
  thetas = [values.get("rope_theta")]
  scalings = []
  for key, found in (("rope_scaling", values.get("rope_scaling")), ("rope_parameters", rope)):
    if found:
      thetas.append(found.get("rope_theta") if isinstance(found, dict) else None)
      scalings.append(_read_scaling(key, found, values, refuse))
  thetas = [theta for theta in thetas if theta is not None]
  if not thetas and family.default_theta:
    thetas = [family.default_theta]
  if not thetas:
    refuse("rope_theta", "is missing")
  if any(theta != thetas[0] for theta in thetas):
    refuse("rope_theta", f"is given differently in two places ({thetas}): correct one")
  if any(scaling != scalings[0] for scaling in scalings):
    refuse("rope_scaling", "is given differently in two places: correct one")
  head_dim = values[family.all_fields["head_dim"]]
  fields = {
    "rope_theta": read_field({"rope_theta": thetas[0]}, "rope_theta", float, refuse),
    "rope_scaling": scalings[0] if scalings else None,
    "rotary_dim": _read_rotary_dim(family, (values, rope), head_dim, refuse),
  }
  fields["query_growth"] = _read_growth(family, rope, fields["rope_scaling"], refuse)
  scaling, rotated = fields["rope_scaling"], fields["rotary_dim"] or head_dim
  # `_read_longrope` has checked that there are as many long factors as short ones.
  if scaling and scaling.kind == "longrope" and len(scaling.short_factors) != rotated // 2:
    count = len(scaling.short_factors)
    refuse("short_factor", f"has {count} numbers, for {rotated // 2} frequencies: correct it")
  if family.has_local_rope:
    theta = {"rope_theta": local.get("rope_theta") or family.local_theta or thetas[0]}
    fields["local_rope_theta"] = read_field(theta, "rope_theta", float, refuse)
    fields["local_rope_scaling"] = _read_scaling("rope_parameters", local, values, refuse)
  elif local.get("rope_type", "default") != "default":
    refuse("rope_parameters", "scales layers with a window, which models of this family do not do")
  return fields


def _read_growth(
  family: Family, rope: Mapping[str, Any], scaling: RopeScaling | None, refuse: Refuse
) -> float:
  """Reads `ModelConfig.query_growth`. 0 means that queries do not grow with their position."""
  if rope.get(_GROWTH) is None:
    return 0.0
  has_growth = "query_growth" in family.varies
  if not has_growth or scaling is None:
    needed = "scaled positions" if has_growth else "a model of ministral3"
    refuse("rope_parameters", f"has {_GROWTH}, which needs {needed}: remove it")
  return read_field(rope, _GROWTH, float, refuse)


def _read_rotary_dim(
  family: Family, objects: Iterable[Mapping[str, Any]], head_dim: Any, refuse: Refuse
) -> int:
  """Returns how many numbers of a head are rotated, or 0 for all of them.

  Args:
    family: The family of the model.
    objects: The JSON objects that may state the share of rotated numbers: all fields of
      config.json, and its `rope_parameters`. They must agree.
    head_dim: The size of a head.
    refuse: refuse(field, reason) raises ConfigError.
  """
  key = "partial_rotary_factor"
  if any(values.get("rope_type") == "proportional" for values in objects):
    if family.rotated is not None:
      refuse(key, "belongs to a scaling that models of this family do not have here")
    return 0  # here the factor is `RopeScaling.share`, the share of pairs that rotate
  factors = [values[key] for values in objects if values.get(key) is not None]
  if not factors and family.rotated is not None:
    factors = [family.rotated]
  if not factors or all(factor == 1 for factor in factors):
    return 0
  if family.rotated is None:
    refuse(key, f"is {shown(factors[0])}: models of this family rotate whole heads")
  if factors[-1] != factors[0]:
    refuse(key, f"is given differently in two places ({shown(factors)}): correct one")
  rotated = int(head_dim * read_field({key: factors[0]}, key, float, refuse))
  if rotated % 2 or not 0 < rotated <= head_dim:
    refuse(key, f"rotates {rotated} of {head_dim} numbers: it must be an even part of them")
  return rotated


def _rope_parameters(
  values: Mapping[str, Any], refuse: Refuse
) -> tuple[dict[str, Any], dict[str, Any]]:
  """The `rope_parameters` of layers without a window, and of layers with one, if these differ."""
  rope = _object(values, "rope_parameters", "rope_parameters", refuse)
  if "full_attention" not in rope and "sliding_attention" not in rope:
    return rope, {"rope_theta": values.get("rope_local_base_freq")}
  local = _object(rope, "sliding_attention", "rope_parameters", refuse)
  return _object(rope, "full_attention", "rope_parameters", refuse), local


def _object(values: Mapping[str, Any], name: str, key: str, refuse: Refuse) -> dict[str, Any]:
  """The object `values[name]`, or {} if it is absent. Errors name the field `key`."""
  found = values.get(name) or {}
  if not isinstance(found, dict):
    refuse(key, f"must be an object, got {shown(found)}")
  return found


def _read_scaling(
  key: str, rope: Any, values: Mapping[str, Any], refuse: Refuse
) -> RopeScaling | None:
  """Reads the scaling from `rope`, the object under `key`. Returns None if nothing is scaled.

  `values` are all fields of config.json, which supply the lengths that `rope` leaves out.
  """
  if not isinstance(rope, dict):
    refuse(key, f"must be an object, got {shown(rope)}")
  kind = rope.get("rope_type", rope.get("type", "default"))
  if kind == "default":
    return None
  if kind not in list(SCALINGS):
    refuse(
      key,
      f"is of type {shown(kind)}, which is not supported: choose a checkpoint with"
      f" {', '.join(SCALINGS)} or none",
    )
  unknown = sorted(rope.keys() - _COMMON_KEYS - _KEYS_OF_KIND[kind])
  if unknown:
    refuse(key, f"has {unknown}, which {kind} does not read here: remove it or correct the type")
  longest = values["max_position_embeddings"]
  name = "original_max_position_embeddings"
  found = {name: rope.get(name) or values.get(name) or longest}
  original = read_field(found, name, int, refuse)
  if kind == "dynamic":
    original = longest  # for this kind, transformers ignores the field `name` in both objects
  if kind == "proportional":
    fields = {"factor": 1.0, "partial_rotary_factor": 1.0, **rope}
    share = read_field(fields, "partial_rotary_factor", float, refuse)
    return RopeScaling(kind, read_field(fields, "factor", float, refuse), original, share=share)
  if kind == "longrope":
    return _read_longrope(rope, values, original, refuse)
  scaling = RopeScaling(kind, read_field(rope, "factor", float, refuse), original)
  if kind == "llama3":
    low = read_field(rope, "low_freq_factor", float, refuse)
    high = read_field(rope, "high_freq_factor", float, refuse)
    return dataclasses.replace(scaling, low=low, high=high)
  if kind == "yarn":
    return _read_yarn(scaling, rope, refuse)
  return scaling


def _read_longrope(
  rope: Mapping[str, Any], values: Mapping[str, Any], original: int, refuse: Refuse
) -> RopeScaling:
  """Reads a scaling of type longrope. `factor` defaults to longest length / `original`.

  Args:
    rope: The object that describes the scaling.
    values: All fields of config.json.
    original: The number of positions before the scaling.
    refuse: refuse(field, reason) raises ConfigError.
  """
  if original < 2:  # log(original) is a divisor
    refuse("original_max_position_embeddings", "is 1, which longrope cannot scale: correct it")
  longest = values["max_position_embeddings"]
  fields = {"factor": rope.get("factor") or longest / original}
  factor = read_field(fields, "factor", float, refuse)  # a stated factor is checked, too
  attention_factor = longrope_attention_factor(factor, original)
  if rope.get("attention_factor") is not None:
    attention_factor = read_field(rope, "attention_factor", float, refuse)

  def factors(key: str) -> tuple[float, ...]:
    found = rope.get(key)
    if not isinstance(found, list) or not all(type(x) in (int, float) and x > 0 for x in found):
      refuse(key, f"must be a list of positive numbers, got {shown(found)}")
    return tuple(map(float, found))

  short, long = factors("short_factor"), factors("long_factor")
  if len(short) != len(long):
    refuse("short_factor", f"has {len(short)} numbers, and long_factor {len(long)}: correct one")
  return RopeScaling(
    "longrope",
    factor,
    original,
    attention_factor=attention_factor,
    short_factors=short,
    long_factors=long,
  )


def longrope_attention_factor(factor: float, original: int) -> float:
  """The default factor by which longrope multiplies cos and sin."""
  return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _read_yarn(scaling: RopeScaling, rope: Mapping[str, Any], refuse: Refuse) -> RopeScaling:
  """Returns `scaling` with the fields of yarn in `rope`, or the defaults of transformers."""

  def number(key: str, default: float) -> float:
    # transformers reads null and 0 as missing, too.
    return read_field({key: rope.get(key) or default}, key, float, refuse)

  def attention_scale(mscale: float) -> float:  # YaRN's own value for mscale = 1
    return 0.1 * mscale * math.log(scaling.factor) + 1 if scaling.factor > 1 else 1.0

  if rope.get("attention_factor") is not None:
    attention_factor = read_field(rope, "attention_factor", float, refuse)
  elif rope.get("mscale") and rope.get("mscale_all_dim"):
    mscale, all_dim = number("mscale", 1.0), number("mscale_all_dim", 1.0)
    attention_factor = attention_scale(mscale) / attention_scale(all_dim)
  else:
    attention_factor = attention_scale(1.0)
  return dataclasses.replace(
    scaling,
    low=number("beta_slow", 1.0),
    high=number("beta_fast", 32.0),
    attention_factor=attention_factor,
    mscale_all_dim=number("mscale_all_dim", 1.0) if rope.get("mscale_all_dim") else 0.0,
    truncate=read_field({"truncate": True, **rope}, "truncate", bool, refuse),
  )


def _scaling_to_json(scaling: RopeScaling | None) -> dict[str, Any]:
  """The fields of a scaling in config.json, except those that only longrope has."""
  s = scaling
  if s is None:
    return {"rope_type": "default"}
  values: dict[str, Any] = {"rope_type": s.kind, "factor": s.factor}
  if s.kind in ("llama3", "yarn"):
    values["original_max_position_embeddings"] = s.original_positions
  if s.kind == "llama3":
    values |= {"low_freq_factor": s.low, "high_freq_factor": s.high}
  if s.kind == "yarn":
    values |= {
      "beta_slow": s.low,
      "beta_fast": s.high,
      "attention_factor": s.attention_factor,
      "truncate": s.truncate,
    }
  if s.mscale_all_dim:
    values["mscale_all_dim"] = s.mscale_all_dim
  if s.kind == "proportional":
    values["partial_rotary_factor"] = s.share
  return values


def rope_to_json(config: ModelConfig, family: Family) -> dict[str, Any]:
  """The rotary fields of config.json, in the forms of transformers 4 and 5."""
  s, scaling = config.rope_scaling, _scaling_to_json(config.rope_scaling)
  if config.query_growth:  # in ministral3
    scaling[_GROWTH] = config.query_growth
  full = {"rope_theta": config.rope_theta, **scaling}
  values: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_parameters": full}
  if s is not None and s.kind != "proportional":  # which transformers 4 does not know
    values["rope_scaling"] = scaling
  if s is not None and s.kind == "longrope":
    factors = {"short_factor": list(s.short_factors), "long_factor": list(s.long_factors)}
    full |= factors | {
      "original_max_position_embeddings": s.original_positions,
      "attention_factor": s.attention_factor,
    }
    # transformers 4 accepts no other fields in this object. It reads the original length from the
    # field of config.json below.
    values["rope_scaling"] = {"type": "longrope", **factors}
    if s.attention_factor != longrope_attention_factor(s.factor, s.original_positions):
      values["rope_scaling"]["attention_factor"] = s.attention_factor
    values["original_max_position_embeddings"] = s.original_positions
  if family.rotated is not None:  # this family has models that rotate only a part of each head
    share = (config.rotary_dim or config.head_dim) / config.head_dim
    values["partial_rotary_factor"] = full["partial_rotary_factor"] = share
  if config.local_rope_theta:
    local = {"rope_theta": config.local_rope_theta, **_scaling_to_json(config.local_rope_scaling)}
    values |= {
      "rope_local_base_freq": config.local_rope_theta,
      "rope_parameters": {"full_attention": full, "sliding_attention": local},
    }
  return values
