"""Surrogates: what is minimised at each token. (Terms, algo) -> loss [P, G, T], never reduced here.

w is the ratio, A the advantage, lp the policy's log-prob, d = lp - old, sg a stopped gradient.
"""

from typing import Callable

import jax
import jax.numpy as jnp
from flax import struct

from grpo_jax import masked
from grpo_jax.config import Algo

sg = jax.lax.stop_gradient


@struct.dataclass
class Terms:
  """What a surrogate is made of, each [P, G, T]."""

  logprobs_PGT: jax.Array  # lp, 0 at padding
  old_logprobs_PGT: jax.Array  # 0 at padding
  ratio_PGT: jax.Array  # w, as algo.ratio says
  advantages_PGT: jax.Array  # A
  mask_PGT: jax.Array  # the tokens of the loss
  kept_PGT: jax.Array  # those of them that algo.top_entropy_quantile keeps
  chosen_PGT: jax.Array  # those that clip_cov or kl_cov treats otherwise
  weights_PGT: jax.Array  # of the correction, 1 where there is none

  @property
  def d_PGT(self) -> jax.Array:
    return self.logprobs_PGT - self.old_logprobs_PGT


def ppo_clip(x: Terms, algo: Algo) -> jax.Array:
  """-min(w A, clip(w, 1 - clip_low, 1 + clip_high) A) (PPO 1707.06347, eq. 7; clip_high apart: DAPO 2503.14476).

  ratio_max caps the w that is not clipped (INTELLECT-2 2505.07291); where A < 0, the loss is at most -dual_clip A
  (dual-clip PPO 1912.09729). Both off at 0.
  Worked at 0.2/0.2: w 1.5, A 1 -> -1.2; w 1.5, A -1 -> 1.5; w .5, A 1 -> -.5; w .5, A -1 -> .8; dual_clip 3, w 5,
  A -1 -> 3.
  """
  w_PGT, A_PGT = x.ratio_PGT, x.advantages_PGT
  clipped_PGT = jnp.clip(w_PGT, 1 - algo.clip_low, 1 + algo.clip_high)
  if algo.ratio_max:
    w_PGT = jnp.minimum(w_PGT, algo.ratio_max)
  loss_PGT = -jnp.minimum(w_PGT * A_PGT, clipped_PGT * A_PGT)
  if algo.dual_clip:
    loss_PGT = jnp.where(A_PGT < 0, jnp.minimum(loss_PGT, -algo.dual_clip * A_PGT), loss_PGT)
  return loss_PGT


def reinforce(x: Terms, algo: Algo) -> jax.Array:
  """-A lp (Williams 1992; RLOO 2402.14740; GPG 2504.02546)."""
  del algo
  return -x.advantages_PGT * x.logprobs_PGT


def cispo(x: Terms, algo: Algo) -> jax.Array:
  """-sg[clip(w, 1 - clip_low, 1 + clip_high)] A lp (MiniMax-M1 2506.13585, eq. 4-5). clip_low 1 is no lower bound."""
  return (
    -sg(jnp.clip(x.ratio_PGT, 1 - algo.clip_low, 1 + algo.clip_high))
    * x.advantages_PGT
    * x.logprobs_PGT
  )


def sapo(x: Terms, algo: Algo) -> jax.Array:
  """-(4 / tau) sigmoid(tau (w - 1)) A, tau = tau_pos where A > 0, else tau_neg (SAPO 2511.20347, eq. 6).

  Worked, tau 1: w 1 -> 2; .5 -> 1.510163; 2 -> 2.924234 (times -A).
  """
  tau_PGT = jnp.where(x.advantages_PGT > 0, algo.tau_pos, algo.tau_neg)
  return -4 / tau_PGT * jax.nn.sigmoid(tau_PGT * (x.ratio_PGT - 1)) * x.advantages_PGT


def gmpo(x: Terms, algo: Algo) -> jax.Array:
  """-A exp(mean over the row of c), c = min(d, k) where A > 0 else max(d, k), k = clip(d, -clip_low, clip_high): the
  geometric mean of ratios, clipped in log space (GMPO 2507.20673, eq. 5).

  The mean is over the kept tokens; every token carries the row's value. Worked, .4: w = [1, 1, 1, 5], A 1 -> 1.105171.
  """
  limited_PGT = jnp.clip(x.d_PGT, -algo.clip_low, algo.clip_high)
  pessimistic_PGT = jnp.where(
    x.advantages_PGT > 0, jnp.minimum(x.d_PGT, limited_PGT), jnp.maximum(x.d_PGT, limited_PGT)
  )
  return -x.advantages_PGT * jnp.exp(masked.mean(pessimistic_PGT, x.kept_PGT, -1, keepdims=True))


def vespo(x: Terms, algo: Algo) -> jax.Array:
  """-sg[phi] A lp, phi = W^k e^(lambda (1 - W)), W the product of the row's ratios (VESPO 2602.10693, eq. 12).

  (k, lambda) is (k_pos, lambda_pos) where A >= 0, else (k_neg, lambda_neg). Weights of a correction multiply W.
  Worked, (2, 3): W .5 -> 1.120422, 2 -> .199148; (3, 2): .5 -> .339785, 2 -> 1.082682.
  """
  log_w_PG1 = jnp.clip(masked.total(x.d_PGT, x.mask_PGT, -1, keepdims=True), jnp.log(1e-8), 20.0)
  log_weights_PGT = jnp.log(jnp.maximum(x.weights_PGT, 1e-8))
  row = (
    masked.total if algo.correction_level == "token" else masked.mean
  )  # else all tokens carry the row's weight
  log_w_PG1 = log_w_PG1 + row(log_weights_PGT, x.mask_PGT, -1, keepdims=True)
  positive_PGT = x.advantages_PGT >= 0
  k_PGT = jnp.where(positive_PGT, algo.k_pos, algo.k_neg)
  lambda_PGT = jnp.where(positive_PGT, algo.lambda_pos, algo.lambda_neg)
  phi_PGT = jnp.exp(k_PGT * log_w_PG1 + lambda_PGT * (1 - jnp.exp(log_w_PG1)))
  return -sg(phi_PGT) * x.advantages_PGT * x.logprobs_PGT


def clip_cov(x: Terms, algo: Algo) -> jax.Array:
  """ppo_clip, but nothing at the chosen tokens, whose covariance lies in a band (2505.22617, eq. 10-11)."""
  return jnp.where(x.chosen_PGT != 0, 0, ppo_clip(x, algo))


def kl_cov(x: Terms, algo: Algo) -> jax.Array:
  """-w A, and cov_kl_coef |d| more at the chosen tokens, those of the highest covariance (2505.22617, eq. 12-13)."""
  loss_PGT = -x.ratio_PGT * x.advantages_PGT
  return jnp.where(x.chosen_PGT != 0, loss_PGT + algo.cov_kl_coef * jnp.abs(x.d_PGT), loss_PGT)


def dppo_tv(x: Terms, algo: Algo) -> jax.Array:
  """-sg[min(e^d, ratio_max)] A lp, 0 where the token's probability has moved too far the way A pushes it: p - q above
  clip_high (A > 0) or q - p above clip_low (DPPO 2602.04879; total variation of a token against the rest)."""
  low_PGT, high_PGT = outside_tv(x, algo)
  return jnp.where(low_PGT | high_PGT, 0, _capped_reinforce(x, algo))


def dppo_kl(x: Terms, algo: Algo) -> jax.Array:
  """As dppo_tv, with the KL divergence of token against rest, q log(q / p) + (1 - q) log((1 - q) / (1 - p))."""
  low_PGT, high_PGT = outside_kl(x, algo)
  return jnp.where(low_PGT | high_PGT, 0, _capped_reinforce(x, algo))


def dro(x: Terms, algo: Algo) -> jax.Array:
  """-(lp A - dro_beta / 2 d^2) (DRO 2405.19107, eq. 4)."""
  return -(x.logprobs_PGT * x.advantages_PGT - 0.5 * algo.dro_beta * x.d_PGT**2)


def _capped_reinforce(x, algo):
  w_PGT = jnp.exp(x.d_PGT)
  w_PGT = jnp.minimum(w_PGT, algo.ratio_max) if algo.ratio_max else w_PGT
  return -sg(w_PGT) * x.advantages_PGT * x.logprobs_PGT


# Where a bound of the surrogate is at work: -> masks [P, G, T] of its lower and its upper one.


def clipped(x: Terms, algo: Algo) -> tuple[jax.Array, jax.Array]:
  """ppo_clip: tokens without a gradient, as their ratio has gone far enough the way A pushes it."""
  return (
    (x.ratio_PGT < 1 - algo.clip_low) & (x.advantages_PGT < 0),
    (x.ratio_PGT > 1 + algo.clip_high) & (x.advantages_PGT > 0),
  )


def limited(x: Terms, algo: Algo) -> tuple[jax.Array, jax.Array]:
  """cispo: tokens whose weight is the bound."""
  return x.ratio_PGT < 1 - algo.clip_low, x.ratio_PGT > 1 + algo.clip_high


def clipped_log(x: Terms, algo: Algo) -> tuple[jax.Array, jax.Array]:
  """gmpo: tokens that count as the bound in the row's mean of logarithms."""
  return (x.d_PGT < -algo.clip_low) & (x.advantages_PGT <= 0), (x.d_PGT > algo.clip_high) & (
    x.advantages_PGT > 0
  )


def outside_tv(x: Terms, algo: Algo) -> tuple[jax.Array, jax.Array]:
  """dppo_tv: q - p above clip_low where A <= 0; p - q above clip_high where A > 0."""
  moved_PGT, up_PGT = jnp.exp(x.logprobs_PGT) - jnp.exp(x.old_logprobs_PGT), x.advantages_PGT > 0
  return ~up_PGT & (-moved_PGT > algo.clip_low), up_PGT & (moved_PGT > algo.clip_high)


def outside_kl(x: Terms, algo: Algo) -> tuple[jax.Array, jax.Array]:
  """dppo_kl: the same of the divergence, where the token has moved the way A pushes it."""
  lp_PGT, old_PGT, up_PGT = x.logprobs_PGT, x.old_logprobs_PGT, x.advantages_PGT > 0
  rest = lambda logprobs: jnp.log1p(-jnp.exp(jnp.minimum(logprobs, -1e-7)))
  q_PGT = jnp.exp(old_PGT)
  divergence_PGT = q_PGT * (old_PGT - lp_PGT) + (1 - q_PGT) * (rest(old_PGT) - rest(lp_PGT))
  return (
    ~up_PGT & (lp_PGT < old_PGT) & (divergence_PGT > algo.clip_low),
    up_PGT & (lp_PGT > old_PGT) & (divergence_PGT > algo.clip_high),
  )


BOUNDS: dict[str, Callable[[Terms, Algo], tuple[jax.Array, jax.Array]]] = {
  "ppo_clip": clipped,
  "clip_cov": clipped,
  "cispo": limited,
  "gmpo": clipped_log,
  "dppo_tv": outside_tv,
  "dppo_kl": outside_kl,
}
SURROGATES: dict[str, Callable[[Terms, Algo], jax.Array]] = {
  "ppo_clip": ppo_clip,
  "reinforce": reinforce,
  "cispo": cispo,
  "sapo": sapo,
  "gmpo": gmpo,
  "vespo": vespo,
  "clip_cov": clip_cov,
  "kl_cov": kl_cov,
  "dppo_tv": dppo_tv,
  "dppo_kl": dppo_kl,
  "dro": dro,
}
