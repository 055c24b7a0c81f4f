"""The rotary fields of config.json: rope_theta and rope_scaling in transformers 4, rope_parameters in 5."""

import dataclasses
import math
from typing import Any, Mapping

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.fields import Refuse, value
from grpo_jax.model.rope import SCALINGS, RopeScaling


def read_rope(model_type: str, values: Mapping[str, Any], refuse: Refuse) -> dict[str, Any]:
  """Fields of ModelConfig. In transformers 4 rope_theta and rope_scaling, in 5 rope_parameters, of kinds of layers or all."""
  given = values.get("rope_parameters") or {}
  if "full_attention" in given or "sliding_attention" in given:
    local, given = given.get("sliding_attention") or {}, given.get("full_attention") or {}
    if local.get("rope_type", "default") != "default":
      refuse(
        "rope_parameters",
        f"scales layers with a window ({local.get('rope_type')}), which is not supported",
      )
  else:
    local = {"rope_theta": values.get("rope_local_base_freq")}
  thetas = [values.get("rope_theta"), given.get("rope_theta")]
  scalings = []
  for key, rope in (("rope_scaling", values.get("rope_scaling")), ("rope_parameters", given)):
    if rope:
      thetas.append(rope.get("rope_theta") if isinstance(rope, dict) else None)
      scalings.append(_scaling(key, rope, values, refuse))
  thetas = [t for t in thetas if t is not None]
  if not thetas and model_type == "gemma3_text":
    thetas = [1e6]
  if not thetas or any(t != thetas[0] for t in thetas):
    refuse(
      "rope_theta",
      f"is given differently in two places ({thetas}): correct one" if thetas else "is missing",
    )
  if any(s != scalings[0] for s in scalings):
    refuse("rope_scaling", "is given differently in two places: correct one")
  fields = {
    "rope_theta": value({"rope_theta": thetas[0]}, "rope_theta", float, refuse),
    "rope_scaling": scalings[0] if scalings else None,
  }
  if model_type == "gemma3_text":
    fields["local_rope_theta"] = float(local.get("rope_theta") or 1e4)
  return fields


def _scaling(key, rope, values, refuse: Refuse) -> RopeScaling | None:
  if not isinstance(rope, dict):
    refuse(key, f"must be an object, got {rope!r}")
  kind = rope.get("rope_type", rope.get("type", "default"))
  if rope.get("partial_rotary_factor", 1) != 1:
    refuse(
      key,
      "has a partial_rotary_factor, which is not supported: choose a checkpoint that rotates whole heads",
    )
  if kind == "default":
    return None
  if kind not in SCALINGS:
    refuse(
      key,
      f"is of type {kind!r}, which is not supported: choose a checkpoint with {', '.join(SCALINGS)} or none",
    )
  read = {
    "linear": (),
    "dynamic": (),
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_slow", "beta_fast", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
  }[kind]
  known = {
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    *read,
  }
  if rope.keys() - known:
    refuse(
      key,
      f"has {sorted(rope.keys() - known)}, which {kind} does not read here: remove it or correct the type",
    )
  number = lambda name, default=None: value({name: rope.get(name) or default}, name, float, refuse)
  factor, longest = number("factor"), values["max_position_embeddings"]
  original = (
    rope.get("original_max_position_embeddings")
    or values.get("original_max_position_embeddings")
    or longest
  )
  if kind == "dynamic":
    original = longest  # as transformers has it
  scaling = RopeScaling(kind, factor, original)
  if kind == "llama3":
    return dataclasses.replace(
      scaling, low=number("low_freq_factor"), high=number("high_freq_factor")
    )
  if kind == "yarn":
    scale = lambda m: 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0
    m, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    attention = rope.get("attention_factor")
    if attention is None:
      attention = scale(m) / scale(all_dim) if m and all_dim else scale(1.0)
    return dataclasses.replace(
      scaling,
      low=number("beta_slow", 1.0),
      high=number("beta_fast", 32.0),
      attention_factor=float(attention),
      truncate=rope.get("truncate", True),
    )
  return scaling


def rope_json(config: ModelConfig) -> dict[str, Any]:
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
      scaling |= {
        "beta_slow": s.low,
        "beta_fast": s.high,
        "attention_factor": s.attention_factor,
        "truncate": s.truncate,
      }
  full = {"rope_theta": config.rope_theta, **scaling}
  values = {"rope_theta": config.rope_theta, "rope_parameters": full}
  if s is not None:
    values["rope_scaling"] = scaling
  if config.local_rope_theta:
    local = {"rope_theta": config.local_rope_theta, "rope_type": "default"}
    values |= {
      "rope_local_base_freq": config.local_rope_theta,
      "rope_parameters": {"full_attention": full, "sliding_attention": local},
    }
  return values
