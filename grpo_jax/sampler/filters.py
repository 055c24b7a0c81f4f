"""Sampling filters such as top-k: they mask logits, so that some tokens cannot be drawn.

To add a built-in filter, write a function and an entry of FILTERS here, a field of `RowSettings` in
logits.py and a setting in config.py. A user's program calls `register_filter` instead.
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
  """A sampling filter.

  Attributes:
    apply: (logits_BV, value_B) -> logits_BV with -inf for dropped tokens. The logits are already
      divided by the temperature, and -inf for tokens that earlier filters dropped. It never drops
      the likeliest token of a row, and drops nothing in rows whose value is `off`.
    off: The value that turns the filter off, an int if the filter's values are integers.
    limits: The smallest and largest value that a request may set. Values below `off` mean off.
  """

  apply: Callable[[jax.Array, jax.Array], jax.Array]
  off: float
  limits: tuple[float, float]


def top_k(logits_BV: jax.Array, k_B: jax.Array) -> jax.Array:
  """Keeps the k likeliest tokens, and those that are as likely as the kth.

  Args:
    logits_BV: float32.
    k_B: int32, k of each row. 0 is off.

  Returns:
    The logits [B, V] with -inf for the other tokens.
  """
  most_B = jnp.where(k_B > 0, k_B, jnp.inf)  # no limit if the filter is off
  return _likeliest(logits_BV, jnp.ones_like(logits_BV), most_B)


def top_p(logits_BV: jax.Array, p_B: jax.Array) -> jax.Array:
  """Keeps the fewest likeliest tokens whose total probability reaches p (Holtzman 1904.09751).

  Args:
    logits_BV: float32. Probabilities are normalised over the tokens that earlier filters kept.
    p_B: float32, p of each row. 1 is off.

  Returns:
    The logits [B, V] with -inf for the other tokens.
  """
  weights_BV = jnp.exp(logits_BV - logits_BV.max(-1, keepdims=True))
  most_B = jnp.where(p_B < 1, p_B * weights_BV.sum(-1), jnp.inf)
  return _likeliest(logits_BV, weights_BV, most_B)


def min_p(logits_BV: jax.Array, p_B: jax.Array) -> jax.Array:
  """Drops tokens that are less likely than p times the likeliest token (Nguyen 2407.01082).

  Args:
    logits_BV: float32.
    p_B: float32, p of each row. 0 is off.

  Returns:
    The logits [B, V] with -inf for dropped tokens.
  """
  least_B = logits_BV.max(-1) + jnp.log(p_B)  # -inf if the filter is off
  return jnp.where(logits_BV < least_B[:, None], -jnp.inf, logits_BV)


# The order of application is the same as in Hugging Face's generate. Registered filters follow the
# built-in ones, sorted by name.
FILTERS: dict[str, Filter] = {
  "top_k": Filter(top_k, 0, (-1, LARGEST_INT)),
  "top_p": Filter(top_p, 1.0, (SMALLEST_FLOAT, 1)),
  "min_p": Filter(min_p, 0.0, (0, 1)),
}
BUILT_IN = tuple(FILTERS)
# The other parameters of requests to an endpoint. No filter may be registered under such a name.
OF_REQUESTS = tuple(
  "add_generation_prompt best_of chat_template_kwargs continue_final_message echo frequency_penalty"
  " function_call functions ignore_eos logit_bias logprobs max_completion_tokens max_tokens"
  " messages metadata min_tokens modalities model n parallel_tool_calls presence_penalty prompt"
  " prompt_cache_key reasoning_effort repetition_penalty response_format return_token_ids"
  " safety_identifier seed service_tier skip_special_tokens stop stop_token_ids store stream"
  " stream_options suffix temperature tool_choice tools top_logprobs user".split()
)


def register_filter(compute: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
  """Registers a user's sampling filter under its function's name. Works as a decorator.

  `sampling.filters=("NAME=VALUE",)` turns the filter on in a config. Requests to an endpoint of
  this process may set it as the parameter NAME.

  Args:
    compute: (logits_BV, value_B1) -> bool [B, V] in JAX, True for tokens that may be drawn. The
      logits are already divided by the temperature, and -inf for tokens that earlier filters
      dropped. Rows with value 0 ignore the result. Each row's likeliest token is always kept.

  Returns:
    `compute` itself.

  Raises:
    ConfigError: The function has no name, or the name is already that of a built-in filter, a
      setting or a parameter of requests.
  """
  name = name_of(compute)
  # Built-in filters are settings, too. `register` refuses their names.
  if hasattr(Sampling, name) and name not in FILTERS:
    raise ConfigError(f"sampling.{name} is a setting: give your filter another name")
  if name in OF_REQUESTS:
    raise ConfigError(f"{name} is a parameter of requests: give your filter another name")

  def apply(logits_BV: jax.Array, value_B: jax.Array) -> jax.Array:
    value_B1, largest_B1 = value_B[:, None], logits_BV.max(-1, keepdims=True)

    def drop() -> jax.Array:
      may_draw_BV = jnp.asarray(compute(logits_BV, value_B1))
      if may_draw_BV.dtype != bool or may_draw_BV.shape != logits_BV.shape:
        raise ConfigError(
          f"the filter {name} returned {may_draw_BV.dtype} {may_draw_BV.shape}: it must return bool"
          f" {logits_BV.shape}, True for the tokens that may be drawn"
        )
      is_kept_BV = may_draw_BV | (logits_BV == largest_B1) | (value_B1 == 0)
      return jnp.where(is_kept_BV, logits_BV, -jnp.inf)

    # A program with this filter also decodes batches in which no row uses it, and skips it then.
    return jax.lax.cond((value_B != 0).any(), drop, lambda: logits_BV)

  register("filter", FILTERS, compute, Filter(apply, 0.0, (0, LARGEST_FLOAT)))
  return compute


def values_of(sampling: Sampling) -> dict[str, float]:
  """The values of a config's active filters, by name. Raises ConfigError as `own_values` does."""
  values = {name: getattr(sampling, name) for name in BUILT_IN} | own_values(sampling.filters)
  return {name: value for name, value in values.items() if value != FILTERS[name].off}


def has_filters(sampling: Sampling) -> bool:
  """Whether a draw may differ from softmax(logits / temperature)."""
  return bool(changes_draws(sampling) or sampling.min_tokens)


def changes_draws(sampling: Sampling) -> bool:
  """Whether each draw changes a copy of the logits. `min_tokens` needs no copy."""
  return bool(values_of(sampling) or sampling.regex or sampling.banned)


def own_values(filters: Sequence[str]) -> dict[str, float]:
  """Parses `sampling.filters` into a dict of the values by name.

  Raises:
    ConfigError: An entry is not NAME=NUMBER with a number above 0, NAME is not registered, or NAME
      appears twice.
  """
  found = dict[str, float]()
  for entry in filters:
    name, _, text = entry.partition("=")
    key = f"config key sampling.filters has {entry!r}"
    if name in BUILT_IN:
      raise ConfigError(f"{key}: set sampling.{name} instead")
    if name not in FILTERS:
      raise ConfigError(f"{key}: name a registered filter, or call grpo_jax.register_filter first")
    try:
      value = float(text)
    except ValueError:
      value = math.nan  # which fails the next check
    if not 0 < value <= LARGEST_FLOAT or name in found:
      raise ConfigError(f"{key}: write each filter once, as NAME=NUMBER with a number above 0")
    found[name] = value
  return found


def _likeliest(logits_BV: jax.Array, weights_BV: jax.Array, most_B: jax.Array) -> jax.Array:
  """Keeps a token if all tokens with larger logits together weigh less than the row's limit.

  The smallest kept logit is found by bisection over the integers that order float32 numbers. A sort
  of the vocabulary takes 10 to 40 times longer on a CPU. If devices split the vocabulary, they
  exchange one number per row in each of the 32 steps.

  Args:
    logits_BV: float32.
    weights_BV: float32, the weight of each token, at least 0.
    most_B: The limit of each row, above 0. inf means no limit.
  """

  def halve(_: Any, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    low_B, high_B = bounds  # low_B < the smallest kept logit <= high_B
    middle_B = (low_B & high_B) + ((low_B ^ high_B) >> 1)  # the mean, computed without overflow
    is_larger_BV = logits_BV > _from_order(middle_B)[:, None]
    is_kept_B = jnp.where(is_larger_BV, weights_BV, 0).sum(-1) < most_B
    return jnp.where(is_kept_B, low_B, middle_B), jnp.where(is_kept_B, middle_B, high_B)

  def drop() -> jax.Array:
    # The largest logit is always kept and -inf never, so the smallest kept one lies between them.
    high_B = _to_order(logits_BV.max(-1))
    low_B = jnp.full_like(high_B, _to_order(jnp.float32(-jnp.inf)))
    # 32 halvings leave one of the 2**32 integers.
    least_B = _from_order(jax.lax.fori_loop(0, 32, halve, (low_B, high_B))[1])
    return jnp.where(logits_BV < least_B[:, None], -jnp.inf, logits_BV)

  # A program with this filter also decodes batches in which it is off for all rows.
  return jax.lax.cond(jnp.isfinite(most_B).any(), drop, lambda: logits_BV)


def _to_order(x: jax.Array) -> jax.Array:
  """Maps float32 to int32 monotonically: a larger number has a larger integer."""
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  return jnp.where(bits < 0, bits ^ jnp.int32(2**31 - 1), bits)


def _from_order(order: jax.Array) -> jax.Array:
  """Maps the int32 numbers of `_to_order` back to the float32 numbers that they order."""
  bits = jnp.where(order < 0, order ^ jnp.int32(2**31 - 1), order)
  return jax.lax.bitcast_convert_type(bits, jnp.float32)
