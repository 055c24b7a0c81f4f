"""Rejection: removes tokens and rows from the loss if sampler and learner disagree about them.

w = exp(old - mu), where mu is the log-prob under the distribution that the token was drawn from and
old is the log-prob under the policy before the update. A rejected token has neither a loss nor a KL
term, and no mean counts it. A w that is not finite is an error and not a disagreement: the token
and the row stay, so that the update is skipped and counted. Rejections do not depend on the
weights of a correction (corrections.py): any correction, or none, goes with any rejection.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses

from grpo_jax import masked
from grpo_jax.algo.variant import Example, Record, Records, S
from grpo_jax.lazy import jax, jnp
from grpo_jax.settings import Range, Settings, at_least, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rejection(Record[S]):
  """One way to reject tokens or rows. A token stays if all rejections that are on accept it.

  Attributes:
    accepts: (log_w_PGT, mask_PGT, algo) -> bool [P, G, T], or [P, G, 1] to accept whole rows.
      log_w is 0 where the mask is 0.
    is_on: (algo) -> whether the settings turn it on.
    examples: Inputs are `w`, the weights of the tokens of one row, and the row's `mask`. The output
      is `accepted`. The settings of an example turn the rejection on.
  """

  accepts: Callable[[jax.Array, jax.Array, S], jax.Array]
  is_on: Callable[[S], bool]


REJECTIONS = Records[Rejection]()

BOUNDS = Range(
  lambda value: not value or (len(value) == 2 and 0 <= value[0] < value[1]),
  "give two numbers, the lower bound first, such as (0.5, 2.0); () is off",
)


def _inside(log_w: jax.Array, bounds: tuple[float, ...]) -> jax.Array:
  """Whether low <= w <= high. With a low of 0, whose logarithm is -inf, there is no lower bound."""
  low, high = bounds
  return (log_w >= jnp.log(low)) & (log_w <= jnp.log(high))


@dataclasses.dataclass(frozen=True)
class TokenSettings(Settings):
  """Settings of token."""

  reject_token: tuple[float, ...] = setting(
    (), "rejects tokens whose weight is outside of bounds such as (0.5, 2.0); () = off", BOUNDS
  )


def token(log_w_PGT: jax.Array, mask_PGT: jax.Array, algo: TokenSettings) -> jax.Array:
  """Accepts tokens with low <= w_t <= high.

  Args:
    log_w_PGT: log w.
    mask_PGT: The loss mask. Not read.

  Returns:
    bool [P, G, T], True to accept.
  """
  del mask_PGT
  return _inside(log_w_PGT, algo.reject_token)


REJECTIONS["token"] = Rejection(
  accepts=token,
  is_on=lambda algo: bool(algo.reject_token),
  settings=TokenSettings,
  examples=(
    Example(
      {"w": [0.4, 0.6, 1.9, 2.1], "mask": [1, 1, 1, 1]},
      {"accepted": [0, 1, 1, 0]},
      {"reject_token": (0.5, 2.0)},
    ),
    Example(
      {"w": [1e-9, 3, 9], "mask": [1, 1, 0]}, {"accepted": [1, 0, 0]}, {"reject_token": (0.0, 2.0)}
    ),
  ),
)


@dataclasses.dataclass(frozen=True)
class OutlierSettings(Settings):
  """Settings of outlier."""

  reject_outlier: tuple[float, ...] = setting(
    (),
    "rejects completions with a single weight outside of bounds such as (1e-4, 100.0); () = off",
    BOUNDS,
  )


def outlier(log_w_PGT: jax.Array, mask_PGT: jax.Array, algo: OutlierSettings) -> jax.Array:
  """Accepts rows with low <= w_t <= high at every token t: one outlier rejects the row.

  Args:
    log_w_PGT: log w.
    mask_PGT: The loss mask.

  Returns:
    bool [P, G, 1], True to accept.
  """
  inside_PGT = _inside(log_w_PGT, algo.reject_outlier)
  return (inside_PGT | (mask_PGT == 0)).all(-1, keepdims=True)


REJECTIONS["outlier"] = Rejection(
  accepts=outlier,
  is_on=lambda algo: bool(algo.reject_outlier),
  settings=OutlierSettings,
  examples=(
    Example(
      {"w": [1, 1, 101], "mask": [1, 1, 1]},
      {"accepted": [0, 0, 0]},
      {"reject_outlier": (1e-4, 100.0)},
    ),
    Example(
      {"w": [1e-5, 1, 1], "mask": [1, 1, 1]},
      {"accepted": [0, 0, 0]},
      {"reject_outlier": (1e-4, 100.0)},
    ),
    Example(
      {"w": [99, 2e-4, 101], "mask": [1, 1, 0]},
      {"accepted": [1, 1, 0]},
      {"reject_outlier": (1e-4, 100.0)},
    ),
  ),
)


@dataclasses.dataclass(frozen=True)
class ProductSettings(Settings):
  """Settings of product."""

  reject_product: tuple[float, ...] = setting(
    (),
    "rejects completions whose product of weights is outside of these bounds; () = off",
    BOUNDS,
  )


def product(log_w_PGT: jax.Array, mask_PGT: jax.Array, algo: ProductSettings) -> jax.Array:
  """Accepts rows with low <= product over t of w_t <= high.

  Args:
    log_w_PGT: log w.
    mask_PGT: The loss mask.

  Returns:
    bool [P, G, 1], True to accept.
  """
  return _inside(masked.total(log_w_PGT, mask_PGT, -1, keepdims=True), algo.reject_product)


REJECTIONS["product"] = Rejection(
  accepts=product,
  is_on=lambda algo: bool(algo.reject_product),
  settings=ProductSettings,
  examples=(
    # 2 * .6 = 1.2 and 2 * 1.5 = 3. The last token is padding.
    Example(
      {"w": [2, 0.6, 9], "mask": [1, 1, 0]},
      {"accepted": [1, 1, 0]},
      {"reject_product": (0.5, 2.0)},
    ),
    Example(
      {"w": [2, 1.5, 0.1], "mask": [1, 1, 0]},
      {"accepted": [0, 0, 0]},
      {"reject_product": (0.5, 2.0)},
    ),
  ),
)


@dataclasses.dataclass(frozen=True)
class GeometricSettings(Settings):
  """Settings of geometric."""

  reject_geometric: tuple[float, ...] = setting(
    (),
    "rejects completions whose geometric mean of weights is outside of bounds such as (0.99, 1.01);"
    " () = off",
    BOUNDS,
  )


def geometric(log_w_PGT: jax.Array, mask_PGT: jax.Array, algo: GeometricSettings) -> jax.Array:
  """Accepts rows with low <= exp(mean over t of log w_t) <= high.

  Args:
    log_w_PGT: log w.
    mask_PGT: The loss mask.

  Returns:
    bool [P, G, 1], True to accept.
  """
  return _inside(masked.mean(log_w_PGT, mask_PGT, -1, keepdims=True), algo.reject_geometric)


REJECTIONS["geometric"] = Rejection(
  accepts=geometric,
  is_on=lambda algo: bool(algo.reject_geometric),
  settings=GeometricSettings,
  examples=(
    # The roots of 4 * .25 = 1 and of 1.1 * 1.1, and the third root of 8 * 1 * 1.
    Example(
      {"w": [4, 0.25, 9], "mask": [1, 1, 0]},
      {"accepted": [1, 1, 0]},
      {"reject_geometric": (0.9, 1.05)},
    ),
    Example(
      {"w": [1.1, 1.1, 0.1], "mask": [1, 1, 0]},
      {"accepted": [0, 0, 0]},
      {"reject_geometric": (0.9, 1.05)},
    ),
    Example(
      {"w": [8, 1, 1], "mask": [1, 1, 1]},
      {"accepted": [1, 1, 1]},
      {"reject_geometric": (0.9, 2.1)},
    ),
  ),
)


def _k2(log_w: jax.Array) -> jax.Array:
  return log_w**2 / 2


def _k3(log_w: jax.Array) -> jax.Array:
  return jnp.expm1(log_w) - log_w


@dataclasses.dataclass(frozen=True)
class K2Settings(Settings):
  """Settings of k2."""

  reject_k2: float = setting(
    0.0, "rejects completions whose mean of (log w)^2 / 2 is above this; 0 = off", at_least(0)
  )


def k2(log_w_PGT: jax.Array, mask_PGT: jax.Array, algo: K2Settings) -> jax.Array:
  """Accepts rows with mean over t of (log w_t)^2 / 2 <= bound: k2 of KL(sampler || learner).

  Args:
    log_w_PGT: log w.
    mask_PGT: The loss mask.

  Returns:
    bool [P, G, 1], True to accept.
  """
  return masked.mean(_k2(log_w_PGT), mask_PGT, -1, keepdims=True) <= algo.reject_k2


REJECTIONS["k2"] = Rejection(
  accepts=k2,
  is_on=lambda algo: algo.reject_k2 > 0,
  settings=K2Settings,
  examples=(
    # Log-weights of 1 and -1, whose mean is 0: (1/2 + 1/2) / 2 = 1/2.
    Example(
      {"w": [2.7182818, 0.3678794, 9], "mask": [1, 1, 0]},
      {"accepted": [1, 1, 0]},
      {"reject_k2": 0.51},
    ),
    Example(
      {"w": [2.7182818, 0.3678794, 9], "mask": [1, 1, 0]},
      {"accepted": [0, 0, 0]},
      {"reject_k2": 0.49},
    ),
  ),
)


@dataclasses.dataclass(frozen=True)
class K3Settings(Settings):
  """Settings of k3."""

  reject_k3: float = setting(
    0.0, "rejects completions whose mean of w - 1 - log w is above this; 0 = off", at_least(0)
  )


def k3(log_w_PGT: jax.Array, mask_PGT: jax.Array, algo: K3Settings) -> jax.Array:
  """Accepts rows with mean over t of w_t - 1 - log w_t <= bound: k3 of KL(sampler || learner).

  Args:
    log_w_PGT: log w.
    mask_PGT: The loss mask.

  Returns:
    bool [P, G, 1], True to accept.
  """
  return masked.mean(_k3(log_w_PGT), mask_PGT, -1, keepdims=True) <= algo.reject_k3


REJECTIONS["k3"] = Rejection(
  accepts=k3,
  is_on=lambda algo: algo.reject_k3 > 0,
  settings=K3Settings,
  examples=(
    # (e - 1 - 1 + 1/e - 1 + 1) / 2 = .5430806
    Example(
      {"w": [2.7182818, 0.3678794, 9], "mask": [1, 1, 0]},
      {"accepted": [1, 1, 0]},
      {"reject_k3": 0.544},
    ),
    Example(
      {"w": [2.7182818, 0.3678794, 9], "mask": [1, 1, 0]},
      {"accepted": [0, 0, 0]},
      {"reject_k3": 0.542},
    ),
  ),
)


@dataclasses.dataclass(frozen=True)
class K2SumSettings(Settings):
  """Settings of k2_sum."""

  reject_k2_sum: float = setting(
    0.0, "rejects completions whose sum of (log w)^2 / 2 is above this; 0 = off", at_least(0)
  )


def k2_sum(log_w_PGT: jax.Array, mask_PGT: jax.Array, algo: K2SumSettings) -> jax.Array:
  """Accepts rows with sum over t of (log w_t)^2 / 2 <= bound. The sum grows with the length.

  Args:
    log_w_PGT: log w.
    mask_PGT: The loss mask.

  Returns:
    bool [P, G, 1], True to accept.
  """
  return masked.total(_k2(log_w_PGT), mask_PGT, -1, keepdims=True) <= algo.reject_k2_sum


REJECTIONS["k2_sum"] = Rejection(
  accepts=k2_sum,
  is_on=lambda algo: algo.reject_k2_sum > 0,
  settings=K2SumSettings,
  examples=(
    # Log-weights of 1 and -1: 1/2 + 1/2 = 1.
    Example(
      {"w": [2.7182818, 0.3678794, 9], "mask": [1, 1, 0]},
      {"accepted": [1, 1, 0]},
      {"reject_k2_sum": 1.01},
    ),
    Example(
      {"w": [2.7182818, 0.3678794, 9], "mask": [1, 1, 0]},
      {"accepted": [0, 0, 0]},
      {"reject_k2_sum": 0.99},
    ),
  ),
)


@dataclasses.dataclass(frozen=True)
class K3SumSettings(Settings):
  """Settings of k3_sum."""

  reject_k3_sum: float = setting(
    0.0, "rejects completions whose sum of w - 1 - log w is above this; 0 = off", at_least(0)
  )


def k3_sum(log_w_PGT: jax.Array, mask_PGT: jax.Array, algo: K3SumSettings) -> jax.Array:
  """Accepts rows with sum over t of w_t - 1 - log w_t <= bound. The sum grows with the length.

  Args:
    log_w_PGT: log w.
    mask_PGT: The loss mask.

  Returns:
    bool [P, G, 1], True to accept.
  """
  return masked.total(_k3(log_w_PGT), mask_PGT, -1, keepdims=True) <= algo.reject_k3_sum


REJECTIONS["k3_sum"] = Rejection(
  accepts=k3_sum,
  is_on=lambda algo: algo.reject_k3_sum > 0,
  settings=K3SumSettings,
  examples=(
    # e - 1 - 1 + 1/e - 1 + 1 = 1.0861612
    Example(
      {"w": [2.7182818, 0.3678794, 9], "mask": [1, 1, 0]},
      {"accepted": [1, 1, 0]},
      {"reject_k3_sum": 1.087},
    ),
    Example(
      {"w": [2.7182818, 0.3678794, 9], "mask": [1, 1, 0]},
      {"accepted": [0, 0, 0]},
      {"reject_k3_sum": 1.085},
    ),
  ),
)


@dataclasses.dataclass(frozen=True)
class RejectionSettings(
  K3SumSettings,
  K2SumSettings,
  K3Settings,
  K2Settings,
  GeometricSettings,
  ProductSettings,
  OutlierSettings,
  TokenSettings,
):
  """The settings of all rejections. New settings go in front."""


def rejects(algo: RejectionSettings) -> bool:
  """Whether any rejection is on."""
  return any(record.is_on(algo) for record in REJECTIONS.values())


def without_rejected(
  old_logprobs_PGT: jax.Array, mu_PGT: jax.Array, mask_PGT: jax.Array, algo: RejectionSettings
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Removes rejected tokens from the loss mask.

  Args:
    old_logprobs_PGT: Log-probs under the policy before the update.
    mu_PGT: Log-probs under the distribution that the tokens were drawn from.
    mask_PGT: The loss mask. Each rejection reads the whole mask, whatever the others reject.
    algo: Reads the settings of the rejections.

  Returns:
    (mask [P, G, T], metrics: the share of tokens that are rejected, and of rows that lose a token)
  """
  log_w_PGT = masked.masked(old_logprobs_PGT - mu_PGT, mask_PGT)
  # Tokens and rows with a weight that is not finite stay, so that the error skips the whole update.
  broken_PGT, kept_PGT = ~jnp.isfinite(log_w_PGT), mask_PGT
  for record in REJECTIONS.values():
    if record.is_on(algo):
      accepted = record.accepts(log_w_PGT, mask_PGT, algo)
      is_of_row = accepted.shape[-1] == 1  # [P, G, 1] accepts whole rows
      broken = broken_PGT.any(-1, keepdims=True) if is_of_row else broken_PGT
      kept_PGT = kept_PGT * (accepted | broken)
  is_rejected_PGT = kept_PGT != mask_PGT
  metrics = {
    "rejection/tokens": masked.mean(is_rejected_PGT, mask_PGT),
    "rejection/sequences": masked.mean(is_rejected_PGT.any(-1), (mask_PGT != 0).any(-1)),
  }
  return kept_PGT, metrics
