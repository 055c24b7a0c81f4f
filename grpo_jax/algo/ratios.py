"""Ratios w = pi / pi_old between the policy and the policy before the update."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses

from grpo_jax import masked
from grpo_jax.algo.variant import Example
from grpo_jax.lazy import jax, jnp
from grpo_jax.settings import Settings, at_least, one_of, setting


@dataclasses.dataclass(frozen=True)
class Ratio:
  """One way to compute the ratio.

  Attributes:
    compute: (logprobs_PGT, old_logprobs_PGT, mask_PGT) -> the ratio of each token, [P, G, T].
    examples: Inputs are `w`, the ratios of the single tokens of one row, and the row's `mask`.
      Outputs are `ratio`, and `jacobian` [T, T], the derivatives of each ratio by the log-prob of
      each token.
    shared_by_row: True if the gradient of a token's ratio reaches all tokens of its row.
  """

  compute: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
  examples: tuple[Example, ...]
  shared_by_row: bool = False


RATIOS: dict[str, Ratio] = {}


def token(logprobs_PGT: jax.Array, old_logprobs_PGT: jax.Array, mask_PGT: jax.Array) -> jax.Array:
  """w_t = exp(lp_t - old_t) (PPO 1707.06347; GRPO 2402.03300, eq. 3).

  Args:
    logprobs_PGT: lp, the log-probs under the policy.
    old_logprobs_PGT: old, the log-probs before the update.
    mask_PGT: The loss mask. Not read.

  Returns:
    The ratios, [P, G, T].
  """
  del mask_PGT
  return jnp.exp(logprobs_PGT - old_logprobs_PGT)


RATIOS["token"] = Ratio(
  compute=token,
  examples=(
    Example(
      {"w": [1.5, 0.5], "mask": [1, 1]},
      {"ratio": [1.5, 0.5], "jacobian": [[1.5, 0], [0, 0.5]]},
    ),
  ),
)


def sequence(
  logprobs_PGT: jax.Array, old_logprobs_PGT: jax.Array, mask_PGT: jax.Array
) -> jax.Array:
  """s = exp(mean over the row's tokens of lp - old), for every token (GSPO 2507.18071, eq. 7).

  Args:
    logprobs_PGT: lp, the log-probs under the policy.
    old_logprobs_PGT: old, the log-probs before the update.
    mask_PGT: The loss mask.

  Returns:
    The ratios, [P, G, T], equal along T.
  """
  log_s_PG1 = masked.mean(logprobs_PGT - old_logprobs_PGT, mask_PGT, -1, keepdims=True)
  return jnp.broadcast_to(jnp.exp(log_s_PG1), logprobs_PGT.shape)


RATIOS["sequence"] = Ratio(
  compute=sequence,
  shared_by_row=True,
  examples=(
    # (1.2 * .9 * 1.1)^(1/3); a token has a third of the gradient.
    Example(
      {"w": [1.2, 0.9, 1.1, 7], "mask": [1, 1, 1, 0]},
      {"ratio": [1.0591047] * 4, "jacobian": [[0.3530349] * 3 + [0]] * 4},
    ),
  ),
)


def sequence_token(
  logprobs_PGT: jax.Array, old_logprobs_PGT: jax.Array, mask_PGT: jax.Array
) -> jax.Array:
  """sg[s] pi / sg[pi] (GSPO-token 2507.18071, eq. 14).

  The value is the same as for `sequence`, but each ratio has the gradient of its own token alone.

  Args:
    logprobs_PGT: lp, the log-probs under the policy.
    old_logprobs_PGT: old, the log-probs before the update.
    mask_PGT: The loss mask.

  Returns:
    The ratios, [P, G, T], equal along T.
  """
  s_PGT = jax.lax.stop_gradient(sequence(logprobs_PGT, old_logprobs_PGT, mask_PGT))
  return s_PGT * jnp.exp(logprobs_PGT - jax.lax.stop_gradient(logprobs_PGT))


RATIOS["sequence_token"] = Ratio(
  compute=sequence_token,
  examples=(
    # The values of `sequence`, on the diagonal.
    Example(
      {"w": [1.2, 0.9, 1.1], "mask": [1, 1, 1]},
      {
        "ratio": [1.0591047] * 3,
        "jacobian": [[1.0591047, 0, 0], [0, 1.0591047, 0], [0, 0, 1.0591047]],
      },
    ),
  ),
)


@dataclasses.dataclass(frozen=True)
class RatioSettings(Settings):
  """The choice of a ratio, and the number of updates of a batch. With one, the ratio is 1."""

  ratio: str = setting("token", "of the policy to the policy before the update", one_of(RATIOS))
  updates_per_batch: int = setting(1, "passes over a batch", at_least(1, at_most=1000))
  minibatches: int = setting(
    1,
    "optimizer steps in a pass. With one pass and one step the ratio is 1, and no bound on it"
    " matters",
    at_least(1),
  )
  old_logprobs: str = setting(
    "sampler",
    "the ratio's denominator: the log-probs of the sampler ('sampler'), or those that the learner"
    " computes before the first update ('recomputed')",
    one_of(("sampler", "recomputed")),
  )
