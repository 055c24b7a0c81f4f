"""Differences between layers, in the fields of config.json that several families share."""

from collections.abc import Sequence
from typing import Any

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.huggingface.config_fields import Refuse, Values, read_field
from grpo_jax.settings import shown

FULL, SLIDING = "full_attention", "sliding_attention"


def read_types(values: Values, kinds: Sequence[str], refuse: Refuse) -> list[str] | None:
  """The list `layer_types`, whose entries must be among `kinds`, or None if it is absent."""
  types, count = values.get("layer_types"), values["num_hidden_layers"]
  if types is None:
    return None
  if not isinstance(types, list) or len(types) != count or any(kind not in kinds for kind in types):
    names = " or ".join(kinds)
    refuse("layer_types", f"is {shown(types)}: it must name {names} for each of {count} layers")
  return types


def read_full(values: Values, refuse: Refuse) -> dict[str, Any]:
  """The `read` of a family whose layers all attend to the whole text: no fields."""
  read_types(values, (FULL,), refuse)
  return {}


def read_windows(
  values: Values,
  refuse: Refuse,
  by_default: Sequence[bool],
  needs_switch: bool = False,
  always: bool = False,
) -> tuple[int, ...]:
  """The window of each layer, or () if no window hides anything.

  Args:
    values: The object in config.json.
    refuse: Raises ConfigError.
    by_default: Which layers have a window if config.json does not list them.
    needs_switch: The list counts only where `use_sliding_window` is set.
    always: Return windows that hide nothing too: their layers have other rotary frequencies.
  """
  types, window = read_types(values, (FULL, SLIDING), refuse), values.get("sliding_window")
  has_window = list(by_default)
  if types is not None:
    is_on = bool(values.get("use_sliding_window")) or not needs_switch
    has_window = [is_on and kind == SLIDING for kind in types]
  if any(has_window) and window is not None and (type(window) is not int or window < 1):
    refuse("sliding_window", f"must be a positive int, got {window!r}")
  if not any(has_window) or not window:
    return ()
  if window >= values["max_position_embeddings"] and not always:  # the longest text
    return ()
  return tuple(window if has else 0 for has in has_window)


def every(values: Values, key: str, default: int, refuse: Refuse) -> list[bool]:
  """Whether each layer is one of every so many: numbers n - 1, 2n - 1, ..."""
  n = read_field({key: default, **values}, key, int, refuse)
  return [(layer + 1) % n == 0 for layer in range(values["num_hidden_layers"])]


def types_to_json(config: ModelConfig) -> dict[str, Any]:
  """The list `layer_types` of a model whose layers may have a window."""
  layers = range(config.num_layers)
  return {"layer_types": [SLIDING if config.kind(i).window else FULL for i in layers]}


def window_of(config: ModelConfig) -> int | None:
  """The window of the layers that have one."""
  return max(config.windows, default=0) or None
