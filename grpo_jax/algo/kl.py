"""KL(policy || reference) at each token.

Estimates read the log-probs of the sampled token, lp under the policy and ref under the reference,
with d = lp - ref. `full` reads both distributions. A `+` after a name keeps the value of the
estimate and takes the gradient of k2.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
from typing import TypeAlias

from grpo_jax.algo.variant import Example
from grpo_jax.lazy import jax, jnp
from grpo_jax.registry import register
from grpo_jax.settings import Settings, above, at_least, fraction, one_of, setting

Estimate: TypeAlias = "Callable[[jax.Array, jax.Array], jax.Array]"


@dataclasses.dataclass(frozen=True)
class KLEstimator:
  """One way to compute the KL divergence at a token.

  Attributes:
    compute: (logprobs_PGT, ref_logprobs_PGT) -> [P, G, T], or (logits [..., V], ref_logits
      [..., V]) -> [...] if `reads_logits`.
    examples: Inputs are `policy` and `reference`: lists of probabilities of sampled tokens, or of
      distributions if `reads_logits`. Outputs are `kl` and `gradient`, the derivative of the KL by
      the log-prob, or by the logits if `reads_logits`.
    reads_logits: True if `compute` needs whole distributions.
    replaces_gradient: True if the gradient is not that of the value.
  """

  compute: Estimate
  examples: tuple[Example, ...]
  reads_logits: bool = False
  replaces_gradient: bool = False


KL: dict[str, KLEstimator] = {}

# d = ln 2, -ln 2 and 0
_INPUTS = {"policy": [0.5, 0.25, 0.3], "reference": [0.25, 0.5, 0.3]}
_LN2 = 0.6931472


def k1(logprobs_PGT: jax.Array, ref_logprobs_PGT: jax.Array) -> jax.Array:
  """d, an unbiased estimate of either sign.

  Args:
    logprobs_PGT: lp.
    ref_logprobs_PGT: ref.

  Returns:
    The KL of each token, [P, G, T].
  """
  return logprobs_PGT - ref_logprobs_PGT


KL["k1"] = KLEstimator(k1, (Example(_INPUTS, {"kl": [_LN2, -_LN2, 0], "gradient": [1, 1, 1]}),))


def absolute(logprobs_PGT: jax.Array, ref_logprobs_PGT: jax.Array) -> jax.Array:
  """|d|. Its gradient is 0 where d is 0.

  Args:
    logprobs_PGT: lp.
    ref_logprobs_PGT: ref.

  Returns:
    The KL of each token, [P, G, T].
  """
  d_PGT = logprobs_PGT - ref_logprobs_PGT
  # The gradient of jnp.abs at 0 is 1. It would push every token before anything has moved.
  return d_PGT * jax.lax.stop_gradient(jnp.sign(d_PGT))


KL["abs"] = KLEstimator(
  absolute, (Example(_INPUTS, {"kl": [_LN2, _LN2, 0], "gradient": [1, -1, 0]}),)
)


def k2(logprobs_PGT: jax.Array, ref_logprobs_PGT: jax.Array) -> jax.Array:
  """d^2 / 2: its gradient, d, is on average that of the KL (Schulman 2020; 2506.09477).

  Args:
    logprobs_PGT: lp.
    ref_logprobs_PGT: ref.

  Returns:
    The KL of each token, [P, G, T].
  """
  return 0.5 * (logprobs_PGT - ref_logprobs_PGT) ** 2


KL["k2"] = KLEstimator(
  k2, (Example(_INPUTS, {"kl": [0.2402265, 0.2402265, 0], "gradient": [_LN2, -_LN2, 0]}),)
)


def k3(logprobs_PGT: jax.Array, ref_logprobs_PGT: jax.Array) -> jax.Array:
  """e^-d + d - 1: unbiased, never negative (Schulman 2020; GRPO 2402.03300, eq. 4).

  Args:
    logprobs_PGT: lp.
    ref_logprobs_PGT: ref.

  Returns:
    The KL of each token, [P, G, T].
  """
  d_PGT = logprobs_PGT - ref_logprobs_PGT
  # expm1 keeps the value exact for small d. Below d = -20, the tangent replaces e^-d. Its gradient
  # of 5e8 still points the right way, and the gradient norm can square it without overflow.
  bounded_PGT = jnp.minimum(-d_PGT, 20.0)
  tangent_PGT = jnp.exp(bounded_PGT) * (-d_PGT - bounded_PGT)
  return jnp.expm1(bounded_PGT) + tangent_PGT + d_PGT


KL["k3"] = KLEstimator(
  k3,
  (
    # 1/2 + ln 2 - 1 and 2 - ln 2 - 1; the gradient is 1 - e^-d.
    Example(_INPUTS, {"kl": [0.1931472, 0.3068528, 0], "gradient": [0.5, -1, 0]}),
    # d = -30, beyond the tangent: e^20 (1 + 10) - 1 - 30 with the gradient 1 - e^20.
    Example(
      {"policy": [9.357623e-14], "reference": [1.0]},
      {"kl": [5.336817e9], "gradient": [-4.851652e8]},
    ),
  ),
)


def straight_through(estimate: Estimate) -> Estimate:
  """Returns an estimate with the value of `estimate` and the gradient of `k2`."""

  def compute(logprobs_PGT: jax.Array, ref_logprobs_PGT: jax.Array) -> jax.Array:
    gradient_PGT = k2(logprobs_PGT, ref_logprobs_PGT)
    value_PGT = estimate(logprobs_PGT, ref_logprobs_PGT)
    return gradient_PGT + jax.lax.stop_gradient(value_PGT - gradient_PGT)

  return compute


def _with_gradient_of_k2(record: KLEstimator) -> KLEstimator:
  """The record of the `+` form of an estimate."""
  value = record.examples[0].expected["kl"]
  example = Example(_INPUTS, {"kl": value, "gradient": [_LN2, -_LN2, 0]})
  return KLEstimator(straight_through(record.compute), (example,), replaces_gradient=True)


KL |= {f"{name}+": _with_gradient_of_k2(record) for name, record in KL.items()}


def full(logits: jax.Array, ref_logits: jax.Array) -> jax.Array:
  """sum over the vocabulary of pi (log pi - log ref).

  The KL of the token's distribution is exact, and so is its gradient: it needs no + form.

  Args:
    logits: The policy's logits [..., V], divided by the temperature.
    ref_logits: The reference's logits [..., V], divided by the temperature.

  Returns:
    The KL of each token, [...].
  """
  logprobs, ref_logprobs = jax.nn.log_softmax(logits), jax.nn.log_softmax(ref_logits)
  return (jnp.exp(logprobs) * (logprobs - ref_logprobs)).sum(-1)


KL["full"] = KLEstimator(
  full,
  (
    # 3/4 ln(3/2) + 1/4 ln(1/2). The gradient by the logits is pi (log pi - log ref - KL).
    Example(
      {"policy": [[0.75, 0.25]], "reference": [[0.5, 0.5]]},
      {"kl": [0.1308120], "gradient": [[0.2059898, -0.2059898]]},
    ),
  ),
  reads_logits=True,
)


@dataclasses.dataclass(frozen=True)
class KLSettings(Settings):
  """The choice of a KL estimator, the use of the KL, and the updates of the reference."""

  kl: str = setting(
    "k3",
    "the estimate. A + keeps the value and takes the gradient of k2; full sums over the vocabulary",
    one_of(KL, "or call grpo_jax.register_kl first"),
  )
  kl_coef: float = setting(
    0.0,
    "weight of the KL to the reference; 0 = no reference is kept and no forward pass spent on it",
    at_least(0),
  )
  kl_in: str = setting(
    "loss",
    "where the KL counts: in the 'loss', or in the 'reward' of a completion",
    one_of(("loss", "reward")),
  )
  kl_importance_weighted: bool = setting(False, "multiply the KL by the ratio of the token")
  kl_target: float = setting(
    0.0,
    "above 0, kl_coef is only the initial coefficient: it follows the mean KL of a token to reach"
    " this value",
    at_least(0),
  )
  kl_horizon: int = setting(
    10_000, "completions in which the coefficient can change by a fifth", above(0)
  )
  ref_sync_steps: int = setting(
    0, "the reference moves after every so many GRPO steps; 0 = it is frozen", at_least(0)
  )
  ref_mixup: float = setting(
    0.6,
    "how far the reference moves towards the policy; 1 = it becomes the policy",
    fraction("1 makes the reference the policy"),
  )


def register_kl(estimate: Estimate) -> Estimate:
  """Registers a KL estimate of the user under its function's name, for `algo.kl`.

  Returns the function, so that it can be used as a decorator. A program that resumes a run
  registers the function first, because the run saves only the name.

  Args:
    estimate: (logprobs_PGT, ref_logprobs_PGT) -> the KL of each token, [P, G, T], in JAX. Its
      gradient is used as it is. `straight_through` returns an estimate with the gradient of k2.

  Raises:
    ConfigError: grpo_jax has an estimate of this name, or the function has no name.
  """
  register("KL estimate", KL, estimate, KLEstimator(estimate, ()))
  return estimate
