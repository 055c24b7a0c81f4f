"""Computes the token selection of a batch: a weight and a choice for each token."""

import dataclasses

import jax
import jax.numpy as jnp

from grpo_jax.algo.ratios import RATIOS
from grpo_jax.algo.surrogates import SURROGATES
from grpo_jax.algo.surrogates.terms import BatchTokens
from grpo_jax.algo.token_selection.weights import TOKEN_WEIGHTS, SelectionSettings
from grpo_jax.types import TokenSelection


def trivial(mask_PGT: jax.Array) -> TokenSelection:
  """Weight 1 for every token of the loss, and no token chosen."""
  return TokenSelection(weights_PGT=mask_PGT, chosen_PGT=jnp.zeros_like(mask_PGT))


def select(
  logprobs_PGT: jax.Array,
  old_logprobs_PGT: jax.Array,
  entropies_PGT: jax.Array,
  advantages_PGT: jax.Array,
  mask_PGT: jax.Array,
  algo: SelectionSettings,
) -> TokenSelection:
  """Computes the token selection of a whole batch. All arrays are [P, G, T].

  Args:
    logprobs_PGT: The policy's log-probs before the update.
    old_logprobs_PGT: The old log-probs. If the old policy is the current one, they are the same.
    entropies_PGT: The entropies of softmax(logits / temperature) at the tokens.
    advantages_PGT: The advantages.
    mask_PGT: The loss mask.
    algo: Names the surrogate and the ratio, and has the settings of the weights.

  Returns:
    Weights and choices, 0 where the mask is 0, without a gradient.
  """
  tokens = BatchTokens(
    logprobs_PGT=logprobs_PGT,
    ratio_PGT=RATIOS[algo.ratio].compute(logprobs_PGT, old_logprobs_PGT, mask_PGT),
    entropies_PGT=entropies_PGT,
    advantages_PGT=advantages_PGT,
    mask_PGT=mask_PGT,
  )
  selection = trivial(mask_PGT)
  for record in TOKEN_WEIGHTS.values():
    if record.is_on(algo):
      weights_PGT = jnp.where(mask_PGT != 0, record.compute(tokens, algo), 0)
      weights_PGT = selection.weights_PGT * weights_PGT
      selection = dataclasses.replace(selection, weights_PGT=weights_PGT)
  choose = SURROGATES[algo.surrogate].select
  if choose is not None:
    chosen_PGT = choose(tokens, algo).astype(mask_PGT.dtype)
    selection = dataclasses.replace(selection, chosen_PGT=chosen_PGT)
  return jax.lax.stop_gradient(selection)
