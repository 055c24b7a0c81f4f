"""Finds out whether a server has really loaded the weights.

Both the server and this run score a probe, a few rows of fixed tokens. With equal weights, the
log-probs are equal up to rounding. A training step may change weights by less than bfloat16 can
represent, so equal log-probs do not prove that a server loads every change. Therefore a run begins
with a rehearsal: every trained array is changed by about a tenth, and the server's log-probs
must follow. Later, if a server returns exactly the same numbers as before new weights, it has not
loaded them.
"""

from collections.abc import Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import model

_ROWS, _LONGEST = 4, 32
# By is_exact, the largest mean gap in nats per token. The probe's tokens are random, so their
# log-probs are large negative numbers, which bfloat16 rounds to 8 bits.
_LARGEST_GAP = {True: 2e-3, False: 0.25}


class Probe:
  """Rows of tokens whose log-probs are compared.

  Attributes:
    tokens_BN: The token ids, int64.
    largest_gap: The largest mean difference of log-probs that rounding explains, in nats.
  """

  def __init__(self, shape: model.ModelConfig, longest: int, is_exact: bool):
    """Draws the same random tokens in every run of a model.

    Args:
      shape: The model configuration of the sampler.
      longest: The token limit of a row.
      is_exact: Whether both sides compute in float32.
    """
    size = _ROWS, max(2, min(_LONGEST, longest))
    self.tokens_BN = np.random.default_rng(0).integers(0, shape.vocab_size, size)
    self.largest_gap = _LARGEST_GAP[is_exact]
    self._score = jax.jit(functools.partial(_logprobs, shape=shape))

  def logprobs(self, params: Any) -> np.ndarray:
    """Computes in this run the log-probs of the tokens from the second on, float32 [B, N - 1]."""
    return np.asarray(self._score(params, self.tokens_BN))


def _logprobs(params: Any, tokens_BN: jax.Array, shape: model.ModelConfig) -> jax.Array:
  positions_BN = jnp.broadcast_to(jnp.arange(tokens_BN.shape[1]), tokens_BN.shape)
  logits_BNV, _ = model.forward(params, shape, tokens_BN, positions_BN)
  logprobs_BNV = jax.nn.log_softmax(logits_BNV[:, :-1].astype(jnp.float32))
  return jnp.take_along_axis(logprobs_BNV, tokens_BN[:, 1:, None], axis=-1)[..., 0]


def mismatch(
  ours_BN: np.ndarray,
  theirs_BN: Sequence[Sequence[float]],
  before: tuple[np.ndarray, Sequence[Sequence[float]]] | None,
  largest_gap: float,
) -> str:
  """Describes why a server cannot have loaded the weights. "" if nothing speaks against it.

  Args:
    ours_BN: The probe's log-probs under the new weights, as this run computes them.
    theirs_BN: The log-probs that the server returns.
    before: The same two under the previous weights. None if there were none.
    largest_gap: The largest mean absolute difference that rounding explains, in nats.
  """
  gap = float(np.abs(ours_BN - np.asarray(theirs_BN)).mean())
  if not gap <= largest_gap:  # also if it is NaN
    return (
      f"its log-probs of a probe differ from this run's by {gap:.3g} on average, and rounding"
      f" explains {largest_gap:g}"
    )
  # If the new weights leave even this run's numbers as they were, the server's may stay, too.
  if before is not None and theirs_BN == before[1] and not np.array_equal(ours_BN, before[0]):
    return "its log-probs of a probe are exactly those under the previous weights"
  return ""
