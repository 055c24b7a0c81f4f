"""Weights for the gap between the sampler and the policy that the update starts from.

w = exp(old - mu), where mu is the log-prob under the distribution that the token was drawn from and
old is the log-prob under the policy before the update. A level says whether w belongs to a token or
to a row, and a correction limits it. The loss of a token is multiplied by the result, which has no
gradient.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses

from grpo_jax import masked
from grpo_jax.algo.variant import Example, Record, Records, S
from grpo_jax.lazy import jax, jnp
from grpo_jax.registry import register
from grpo_jax.settings import Settings, at_least, one_of, setting


@dataclasses.dataclass(frozen=True)
class CorrectionLevel:
  """The tokens that share one weight: a single token, or all of a row.

  Attributes:
    compute: (log_w_PGT, mask_PGT) -> log w of the level, [P, G, T] or [P, G, 1].
    examples: Inputs are `w`, the weights of the single tokens of one row, and the row's `mask`. The
      output is `weights`.
    shared_by_row: True if all tokens of a row have the same weight.
  """

  compute: Callable[[jax.Array, jax.Array], jax.Array]
  examples: tuple[Example, ...]
  shared_by_row: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Correction(Record[S]):
  """A way to limit the weights, such as an upper bound.

  Attributes:
    compute: (weights_PGT, algo) -> the limited weights, [P, G, T].
    examples: The input is `weights`, a list. The output is `corrected`.
  """

  compute: Callable[[jax.Array, S], jax.Array]


LEVELS: dict[str, CorrectionLevel] = {}
CORRECTIONS = Records[Correction]()

_ROW = {"w": [2, 4, 0.5, 3], "mask": [1, 1, 1, 0]}


def token(log_w_PGT: jax.Array, mask_PGT: jax.Array) -> jax.Array:
  """log w of the token, unchanged."""
  del mask_PGT
  return log_w_PGT


LEVELS["token"] = CorrectionLevel(
  token, (Example(_ROW, {"weights": [2, 4, 0.5, 1]}),), shared_by_row=False
)


def sequence(log_w_PGT: jax.Array, mask_PGT: jax.Array) -> jax.Array:
  """The logarithm of the product of the weights of the row's tokens."""
  return masked.total(log_w_PGT, mask_PGT, -1, keepdims=True)


LEVELS["sequence"] = CorrectionLevel(sequence, (Example(_ROW, {"weights": [4, 4, 4, 4]}),))


def geometric(log_w_PGT: jax.Array, mask_PGT: jax.Array) -> jax.Array:
  """The logarithm of the geometric mean of the weights of the row's tokens."""
  return masked.mean(log_w_PGT, mask_PGT, -1, keepdims=True)


LEVELS["geometric"] = CorrectionLevel(
  geometric,
  (Example(_ROW, {"weights": [1.5874011] * 4}),),  # the cube root of 4
)


@dataclasses.dataclass(frozen=True)
class BoundSettings(Settings):
  """The bounds of a weight."""

  correction_low: float = setting(0.0, "lower bound of the weights", at_least(0))
  correction_high: float = setting(0.0, "upper bound of the weights; 0 = no bound", at_least(0))


def none(weights_PGT: jax.Array, algo: Settings) -> jax.Array:
  """1 for every token."""
  return jnp.ones_like(weights_PGT)


CORRECTIONS["none"] = Correction(
  compute=none,
  settings=Settings,
  examples=(Example({"weights": [0.25, 1.25, 7]}, {"corrected": [1, 1, 1]}),),
)


def truncate(weights_PGT: jax.Array, algo: BoundSettings) -> jax.Array:
  """w limited to [correction_low, correction_high] (TIS, Yao et al. 2025). A high of 0 is no bound.

  mu, old and pi are the probabilities of a token in the draw, before the update and now. This is
  truncated importance sampling, and with ppo_clip it is decoupled PPO (AReaL 2505.24298): for mu
  .2, old .25, pi .3, A 1 and clip .2, w times the surrogate is 1.25 min(1.2, 1.2) = 1.5.

  With the surrogate reinforce and one update per batch, where old is the policy itself, the
  gradient is min(pi / mu, correction_high) A grad lp, which is AIPO (LlamaRL 2505.24034). For mu
  .1, pi .6, A 2 and bound 4, it is 4 * 2 = 8 times grad lp.

  Args:
    weights_PGT: w, which is old / mu for a token.

  Returns:
    The limited weights, [P, G, T].
  """
  return jnp.clip(weights_PGT, algo.correction_low, algo.correction_high or jnp.inf)


CORRECTIONS["truncate"] = Correction(
  compute=truncate,
  settings=BoundSettings,
  examples=(
    Example(
      {"weights": [0.25, 1.25, 7]},
      {"corrected": [0.5, 1.25, 5]},
      {"correction_low": 0.5, "correction_high": 5.0},
    ),
    Example({"weights": [0.25, 7]}, {"corrected": [0.5, 7]}, {"correction_low": 0.5}),
    Example({"weights": [0.25, 7]}, {"corrected": [0.25, 5]}, {"correction_high": 5.0}),
  ),
)


def mask(weights_PGT: jax.Array, algo: BoundSettings) -> jax.Array:
  """w inside [correction_low, correction_high], 0 outside (MIS; IcePop with .5 and 5).

  Args:
    weights_PGT: w.

  Returns:
    The limited weights, [P, G, T].
  """
  high = algo.correction_high or jnp.inf
  inside_PGT = (weights_PGT >= algo.correction_low) & (weights_PGT <= high)
  return jnp.where(inside_PGT, weights_PGT, 0)


CORRECTIONS["mask"] = Correction(
  compute=mask,
  settings=BoundSettings,
  examples=(
    Example(
      {"weights": [0.25, 0.5, 1.25, 5, 7]},
      {"corrected": [0, 0.5, 1.25, 5, 0]},
      {"correction_low": 0.5, "correction_high": 5.0},
    ),
    Example({"weights": [0.25, 7]}, {"corrected": [0, 7]}, {"correction_low": 0.5}),
    Example({"weights": [0.25, 7]}, {"corrected": [0.25, 0]}, {"correction_high": 5.0}),
  ),
)


@dataclasses.dataclass(frozen=True)
class _Choice(Settings):
  correction: str = setting(
    "none",
    "what becomes of the importance weights for the gap between sampler and learner",
    one_of(CORRECTIONS, "or call grpo_jax.register_correction first"),
  )
  correction_level: str = setting(
    "token",
    "what a weight belongs to: the 'token', or the completion with the product ('sequence') or the"
    " geometric mean ('geometric') of its tokens' weights",
    one_of(LEVELS),
  )


@dataclasses.dataclass(frozen=True)
class CorrectionSettings(BoundSettings, _Choice):
  """The choice of a correction, and the settings of all corrections. New bases go in front."""


def importance(
  old_logprobs_PGT: jax.Array, mu_PGT: jax.Array, mask_PGT: jax.Array, algo: CorrectionSettings
) -> jax.Array:
  """Computes w at the level of `algo.correction_level`, before any bound.

  Args:
    old_logprobs_PGT: Log-probs under the policy before the update.
    mu_PGT: Log-probs under the distribution that the tokens were drawn from.
    mask_PGT: The loss mask.

  Returns:
    The weights, [P, G, T].
  """
  log_w_PGT = masked.masked(old_logprobs_PGT - mu_PGT, mask_PGT)
  log_weight = LEVELS[algo.correction_level].compute(log_w_PGT, mask_PGT)
  return jnp.exp(jnp.broadcast_to(log_weight, mask_PGT.shape))


def correction_weights(
  old_logprobs_PGT: jax.Array, mu_PGT: jax.Array, mask_PGT: jax.Array, algo: CorrectionSettings
) -> jax.Array:
  """Computes the weights that multiply the loss of the surrogate.

  Args:
    old_logprobs_PGT: Log-probs under the policy before the update.
    mu_PGT: Log-probs under the distribution that the tokens were drawn from.
    mask_PGT: The loss mask.
    algo: Reads `correction`, `correction_level` and the settings of the correction.

  Returns:
    The weights, [P, G, T], 0 where the mask is 0.
  """
  weights_PGT = importance(old_logprobs_PGT, mu_PGT, mask_PGT, algo)
  weights_PGT = CORRECTIONS[algo.correction].compute(weights_PGT, algo)
  return jax.lax.stop_gradient(masked.masked(weights_PGT, mask_PGT))


def register_correction(compute: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
  """Registers a correction of the user under its function's name, for `algo.correction`.

  Returns the function, so that it can be used as a decorator. A program that resumes a run
  registers the function first, because the run saves only the name.

  Args:
    compute: (weights_PGT, algo) -> factors of the loss of each token, [P, G, T], in JAX. The
      weights belong to a token or to a row, as `algo.correction_level` says.

  Raises:
    ConfigError: grpo_jax has a correction of this name, or the function has no name.
  """
  record = Correction(compute=compute, settings=Settings, examples=())
  register("correction", CORRECTIONS, compute, record)
  return compute
