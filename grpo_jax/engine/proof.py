"""Finds out whether a server has the weights that it says it has loaded.

A probe, a few rows of fixed tokens, is scored by the server and by this run. Equal weights give
equal log-probs, but for rounding. A step may change weights by less than bfloat16 rounds, so equal
log-probs do not prove that a server loads what changes. So a run begins with a rehearsal: the
server gets weights in which every array is changed by a third, and its log-probs must follow.
Later, a server that gives the very numbers that it gave before new weights has not loaded them.
"""

from collections.abc import Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import model

_ROWS, _LONGEST = 4, 32
# Nats per token of the probe, on average. Its tokens are random, so their log-probs are low, and
# bfloat16 has 8 bits for each.
_LARGEST_GAP = {True: 2e-3, False: 0.25}


class Probe:
  """Rows of tokens whose log-probs are compared.

  Attributes:
    tokens_BN: Their ids.
    largest_gap: By how much the log-probs of equal weights may differ, on average.
  """

  def __init__(self, shape: model.ModelConfig, longest: int, is_exact: bool):
    """Draws the tokens.

    Args:
      shape: The model, as it is computed while sampling.
      longest: The most tokens of a row.
      is_exact: Whether both sides compute in float32.
    """
    size = _ROWS, max(2, min(_LONGEST, longest))
    self.tokens_BN = np.random.default_rng(0).integers(0, shape.vocab_size, size)
    self.largest_gap = _LARGEST_GAP[is_exact]
    self._score = jax.jit(functools.partial(_logprobs, shape=shape))

  def logprobs(self, params: Any) -> np.ndarray:
    """The log-probs of the tokens from the second one on, [B, N - 1], as this run computes them."""
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
  """The evidence that a server lacks the weights, in words. "" if there is none.

  Args:
    ours_BN: The probe's log-probs under the weights, as this run computes them.
    theirs_BN: The log-probs that the server returns.
    before: Both under the weights before, or None.
    largest_gap: By how much they may differ, on average.
  """
  gap = float(np.abs(ours_BN - np.asarray(theirs_BN)).mean())
  if not gap <= largest_gap:
    return (
      f"its log-probs of a probe differ from this run's by {gap:.3g} on average, and rounding"
      f" explains {largest_gap:g}"
    )
  if before is not None and theirs_BN == before[1] and not np.array_equal(ours_BN, before[0]):
    return "its log-probs of a probe are to the last bit those under the weights before"
  return ""
