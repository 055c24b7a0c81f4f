"""Checks the ranges of the numbers that decide how completions of a policy are drawn."""

from collections.abc import Mapping
from numbers import Integral, Real

from grpo_jax.settings import LARGEST_INT, SMALLEST_FLOAT, ConfigError, shown

_LIMITS = {  # (smallest, largest)
  "n": (1, 2**16),
  "temperature": (0, 1000),
  "max_tokens": (1, LARGEST_INT),
  "seed": (-LARGEST_INT, LARGEST_INT),
  "step": (0, LARGEST_INT),
}


def check_numbers(numbers: Mapping[str, float | None], prefix: str) -> None:
  """Raises ConfigError for the first number out of its range, or of the wrong type.

  Args:
    numbers: Values by name: n, temperature, max_tokens, seed, step. None values are skipped.
    prefix: The words before a name in an error message, such as "flag --".
  """
  for name, value in numbers.items():
    if value is None:
      continue
    kind, words = (Real, "number") if name == "temperature" else (Integral, "whole number")
    if not isinstance(value, kind) or isinstance(value, bool):
      raise ConfigError(f"{prefix}{name} must be a {words}, got {shown(value)}")
    least, most = _LIMITS[name]
    if not least <= value <= most:  # NaN is refused, too
      raise ConfigError(
        f"{prefix}{name} is {shown(value)}: it must be at least {least} and at most {most}"
      )
  temperature = numbers.get("temperature")
  # 0 is greedy. Other temperatures divide logits in float32, so they must be well in its range.
  if temperature and temperature < SMALLEST_FLOAT:
    raise ConfigError(f"{prefix}temperature is {temperature}: for the likeliest token set 0")
