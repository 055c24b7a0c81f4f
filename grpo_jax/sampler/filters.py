"""Filters of sampling: which tokens may be drawn, given their logits.

To add one, write its function and its record here, a field of `RowSettings` in logits.py and a
setting in config.py. A program adds its own with `register_filter`, and changes nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import math
from typing import Any

from grpo_jax.config import Sampling
from grpo_jax.lazy import jax, jnp
from grpo_jax.registry import name_of, register
from grpo_jax.settings import LARGEST_FLOAT, LARGEST_INT, SMALLEST_FLOAT, ConfigError


@dataclasses.dataclass(frozen=True)
class Filter:
  """One way to drop tokens.

  Attributes:
    apply: (logits_BV, value_B) -> logits_BV, with -inf where the token is dropped. The logits are
      divided by the temperature, and -inf where another filter has dropped the token. It keeps the
      likeliest token, and all tokens of rows where it is off.
    off: The value with which it drops nothing, an int if its values are whole.
    limits: The least and the largest value that a request may have. One below `off` means off.
  """

  apply: Callable[[jax.Array, jax.Array], jax.Array]
  off: float
  limits: tuple[float, float]


def top_k(logits_BV: jax.Array, k_B: jax.Array) -> jax.Array:
  """Drops all but the k likeliest tokens. Equal logits at the threshold are kept or dropped alike.

  Args:
    logits_BV: The logits.
    k_B: k of each row. 0 is off.

  Returns:
    [B, V]
  """
  most_B = jnp.where(k_B > 0, k_B, jnp.inf)  # no limit where it is off
  return _likeliest(logits_BV, jnp.ones_like(logits_BV), most_B)


def top_p(logits_BV: jax.Array, p_B: jax.Array) -> jax.Array:
  """Drops all but the fewest likeliest tokens whose probability reaches p (Holtzman 1904.09751).

  Args:
    logits_BV: The logits. Their probabilities are those of the tokens that are left.
    p_B: p of each row. 1 is off.

  Returns:
    [B, V]
  """
  weights_BV = jnp.exp(logits_BV - logits_BV.max(-1, keepdims=True))
  most_B = jnp.where(p_B < 1, p_B * weights_BV.sum(-1), jnp.inf)
  return _likeliest(logits_BV, weights_BV, most_B)


def min_p(logits_BV: jax.Array, p_B: jax.Array) -> jax.Array:
  """Drops tokens less likely than p times the likeliest (Nguyen 2407.01082).

  Args:
    logits_BV: The logits.
    p_B: p of each row. 0 is off.

  Returns:
    [B, V]
  """
  least_B = logits_BV.max(-1) + jnp.log(p_B)  # -inf where it is off
  return jnp.where(logits_BV < least_B[:, None], -jnp.inf, logits_BV)


# In the order in which they are applied, which is that of Hugging Face's generate. Those of users
# follow, in the order of their names.
FILTERS: dict[str, Filter] = {
  "top_k": Filter(top_k, 0, (-1, LARGEST_INT)),
  "top_p": Filter(top_p, 1.0, (SMALLEST_FLOAT, 1)),
  "min_p": Filter(min_p, 0.0, (0, 1)),
}
BUILT_IN = tuple(FILTERS)
# The other parameters of requests to an endpoint.
OF_REQUESTS = tuple(
  "add_generation_prompt best_of chat_template_kwargs continue_final_message echo frequency_penalty"
  " function_call functions ignore_eos logit_bias logprobs max_completion_tokens max_tokens"
  " messages metadata min_tokens modalities model n parallel_tool_calls presence_penalty prompt"
  " prompt_cache_key reasoning_effort repetition_penalty response_format return_token_ids"
  " safety_identifier seed service_tier skip_special_tokens stop stop_token_ids store stream"
  " stream_options suffix temperature tool_choice tools top_logprobs user".split()
)


def register_filter(compute: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
  """Gives a filter of sampling of this program a name in configs: that of its function.

  It can be used as a decorator. `sampling.filters=("NAME=VALUE",)` then turns it on, and requests
  to an endpoint of this process may have NAME as a parameter.

  Args:
    compute: (logits_BV, value_B1) -> bool [B, V], in JAX: the tokens of B rows that may be drawn.
      The logits are divided by the temperature, and -inf where a filter before it has dropped the
      token. The value is a number above 0 of each row. The likeliest token may always be drawn.

  Returns:
    The function.

  Raises:
    ConfigError: A filter, a setting or a parameter of requests has this name, or it has none.
  """
  name = name_of(compute)
  if hasattr(Sampling, name) and name not in FILTERS:
    raise ConfigError(f"sampling.{name} is a setting: give your filter another name")
  if name in OF_REQUESTS:
    raise ConfigError(f"{name} is a parameter of requests: give your filter another name")

  def apply(logits_BV: jax.Array, value_B: jax.Array) -> jax.Array:
    value_B1, largest_B1 = value_B[:, None], logits_BV.max(-1, keepdims=True)

    def drop() -> jax.Array:
      found_BV = jnp.asarray(compute(logits_BV, value_B1))
      if found_BV.dtype != bool or found_BV.shape != logits_BV.shape:
        raise ConfigError(
          f"the filter {name} returned {found_BV.dtype} {found_BV.shape}: it must return bool"
          f" {logits_BV.shape}, True for the tokens that may be drawn"
        )
      is_kept_BV = found_BV | (logits_BV == largest_B1) | (value_B1 == 0)
      return jnp.where(is_kept_BV, logits_BV, -jnp.inf)

    return jax.lax.cond((value_B != 0).any(), drop, lambda: logits_BV)

  register("filter", FILTERS, compute, Filter(apply, 0.0, (0, LARGEST_FLOAT)))
  return compute


def values_of(sampling: Sampling) -> dict[str, float]:
  """The filters that a config turns on, with their values. Raises ConfigError as `own_values`."""
  values = {name: getattr(sampling, name) for name in BUILT_IN} | own_values(sampling.filters)
  return {name: value for name, value in values.items() if value != FILTERS[name].off}


def has_filters(sampling: Sampling) -> bool:
  """Whether tokens may be drawn from another distribution than softmax(logits / temperature)."""
  return bool(changes_draws(sampling) or sampling.min_tokens)


def changes_draws(sampling: Sampling) -> bool:
  """Whether a copy of the logits is changed before each draw. `min_tokens` needs none."""
  return bool(values_of(sampling) or sampling.regex or sampling.banned)


def own_values(filters: Sequence[str]) -> dict[str, float]:
  """The values of `sampling.filters` by name.

  Raises:
    ConfigError: An entry is not NAME=NUMBER with the name of a filter that was registered and a
      number above 0.
  """
  found = dict[str, float]()
  for entry in filters:
    name, _, text = entry.partition("=")
    key = f"config key sampling.filters has {entry!r}"
    if name in BUILT_IN:
      raise ConfigError(f"{key}: set sampling.{name} instead")
    if name not in FILTERS:
      raise ConfigError(
        f"{key}: name a filter that was registered, or call grpo_jax.register_filter first"
      )
    try:
      value = float(text)
    except ValueError:
      value = math.nan
    if not 0 < value <= LARGEST_FLOAT or name in found:
      raise ConfigError(f"{key}: write each filter once, as NAME=NUMBER with a number above 0")
    found[name] = value
  return found


def _likeliest(logits_BV: jax.Array, weights_BV: jax.Array, most_B: jax.Array) -> jax.Array:
  """Keeps the tokens before which less than `most_B` of the weight lies. Drops the others.

  A token lies before another if its logit is larger. The likeliest is always kept. Where no row has
  a limit, nothing is computed.

  It finds the least logit that is kept by bisection, over the integers that order float32 numbers.
  A sort of the vocabulary takes 10 to 40 times longer on a CPU. Where devices split the vocabulary,
  one number for a row travels at each of the 32 steps.
  """

  def halve(_: Any, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    low_B, high_B = bounds  # the least that is kept lies above the first, and not above the second
    middle_B = (low_B & high_B) + ((low_B ^ high_B) >> 1)  # their mean, which does not overflow
    before_BV = logits_BV > _from_order(middle_B)[:, None]
    is_kept_B = jnp.where(before_BV, weights_BV, 0).sum(-1) < most_B
    return jnp.where(is_kept_B, low_B, middle_B), jnp.where(is_kept_B, middle_B, high_B)

  def drop() -> jax.Array:
    high_B = _to_order(logits_BV.max(-1))
    low_B = jnp.full_like(high_B, _to_order(jnp.float32(-jnp.inf)))
    least_B = _from_order(jax.lax.fori_loop(0, 32, halve, (low_B, high_B))[1])
    return jnp.where(logits_BV < least_B[:, None], -jnp.inf, logits_BV)

  return jax.lax.cond(jnp.isfinite(most_B).any(), drop, lambda: logits_BV)


def _to_order(x: jax.Array) -> jax.Array:
  """float32 -> int32 in the same order."""
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  return jnp.where(bits < 0, bits ^ jnp.int32(2**31 - 1), bits)


def _from_order(order: jax.Array) -> jax.Array:
  """The inverse of `_to_order`."""
  bits = jnp.where(order < 0, order ^ jnp.int32(2**31 - 1), order)
  return jax.lax.bitcast_convert_type(bits, jnp.float32)
