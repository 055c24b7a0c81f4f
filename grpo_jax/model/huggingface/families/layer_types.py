"""Reads and writes the fields of config.json that say how layers differ, for several families."""

from collections.abc import Sequence
from typing import Any

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.huggingface.config_fields import Refuse, Values, read_field
from grpo_jax.settings import shown

FULL, SLIDING = "full_attention", "sliding_attention"


def read_types(values: Values, kinds: Sequence[str], refuse: Refuse) -> list[str] | None:
  """Reads the list `layer_types`, with one of `kinds` for each layer. None if it is absent."""
  types, count = values.get("layer_types"), values["num_hidden_layers"]
  if types is None:
    return None
  if not isinstance(types, list) or len(types) != count or any(kind not in kinds for kind in types):
    names = " or ".join(kinds)
    refuse("layer_types", f"is {shown(types)}: it must name {names} for each of {count} layers")
  return types


def read_full(values: Values, refuse: Refuse) -> dict[str, Any]:
  """The `Family.read` of families whose layers have no windows: checks and returns no fields."""
  read_types(values, (FULL,), refuse)
  return {}


def read_windows(
  values: Values,
  refuse: Refuse,
  by_default: Sequence[bool],
  needs_switch: bool = False,
  always: bool = False,
) -> tuple[int, ...]:
  """Reads the attention windows of the layers.

  Args:
    values: The object in config.json.
    refuse: refuse(key, reason) raises ConfigError.
    by_default: Whether each layer has a window if config.json has no `layer_types`.
    needs_switch: `layer_types` counts only if `use_sliding_window` is set.
    always: Return windows even if none is shorter than the longest text, because the layers that
      have one use other rotary frequencies.

  Returns:
    For each layer, how many tokens a token attends to, or 0 for a layer without a window. The empty
    tuple if no layer has a window that hides a token.
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
  if window >= values["max_position_embeddings"] and not always:  # it hides no token of any text
    return ()
  return tuple(window if has else 0 for has in has_window)


def every(values: Values, key: str, default: int, refuse: Refuse) -> list[bool]:
  """Whether each layer is an n-th one: number n - 1, 2n - 1, ... The field `key` holds n."""
  n = read_field({key: default, **values}, key, int, refuse)
  return [(layer + 1) % n == 0 for layer in range(values["num_hidden_layers"])]


def types_to_json(config: ModelConfig) -> dict[str, Any]:
  """The field `layer_types` for a model whose layers may have windows."""
  layers = range(config.num_layers)
  return {"layer_types": [SLIDING if config.kind(i).window else FULL for i in layers]}


def window_of(config: ModelConfig) -> int | None:
  """The field `sliding_window`: the window of the layers that have one, or None if none has."""
  return max(config.windows, default=0) or None
