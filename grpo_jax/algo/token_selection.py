"""Token selection. It needs statistics of the whole batch, so it runs before micro-batching.

It gives each token a weight for the surrogate, and it chooses the tokens that the surrogate treats
in its own special way. Neither has a gradient. To add a weight, write its function and its record.
"""

from collections.abc import Callable
import dataclasses

import jax
import jax.numpy as jnp

from grpo_jax.algo.ratios import RATIOS, RatioSettings
from grpo_jax.algo.record import Example, Record, Records, S
from grpo_jax.algo.surrogates import SURROGATES, BatchTokens, SurrogateSettings
from grpo_jax.settings import Settings, fraction, setting
from grpo_jax.types import TokenSelection


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenWeight(Record[S]):
  """One way to weigh tokens. The weights of all that are on are multiplied.

  Attributes:
    compute: (tokens of the whole batch, algo) -> weights [P, G, T], read where the mask is 1.
    is_on: (algo) -> whether the settings turn it on.
    examples: Inputs are lists over the tokens of one row: `entropies` and `mask`, and where they
      are read `lp`, `w` and `A`. The output is `weights`. Their settings turn it on.
  """

  compute: Callable[[BatchTokens, S], jax.Array]
  is_on: Callable[[S], bool]


TOKEN_WEIGHTS = Records[TokenWeight]()


@dataclasses.dataclass(frozen=True)
class TopEntropySettings(Settings):
  """Settings of top_entropy."""

  top_entropy_quantile: float = setting(
    1.0, "the fraction of tokens, those of highest entropy, that learn", fraction("1 is off")
  )


def top_entropy(tokens: BatchTokens, algo: TopEntropySettings) -> jax.Array:
  """1 at the tokens of highest entropy, from its (1 - q) quantile on (2506.01939, eq. 5).

  Args:
    tokens: The tokens of the whole batch, [P, G, T].
    algo: Reads q, which is `top_entropy_quantile`.

  Returns:
    [P, G, T], 1 or 0
  """
  entropies = jnp.where(tokens.mask_PGT != 0, tokens.entropies_PGT, jnp.nan)
  threshold = jnp.nanquantile(entropies, 1 - algo.top_entropy_quantile)
  return (tokens.entropies_PGT >= threshold).astype(tokens.mask_PGT.dtype)


def _top_entropy_is_on(algo: TopEntropySettings) -> bool:
  return algo.top_entropy_quantile < 1


TOKEN_WEIGHTS["top_entropy"] = TokenWeight(
  compute=top_entropy,
  is_on=_top_entropy_is_on,
  settings=TopEntropySettings,
  examples=(
    # The threshold is the third of the five entropies. The last token is padding.
    Example(
      {"entropies": [0.5, 0.1, 0.4, 0.2, 0.3, 9], "mask": [1, 1, 1, 1, 1, 0]},
      {"weights": [1, 0, 1, 0, 1, 0]},
      {"top_entropy_quantile": 0.5},
    ),
    # The threshold is between .4 and .5; it is .4 + .2 (.5 - .4).
    Example(
      {"entropies": [0.5, 0.1, 0.4, 0.2, 0.3], "mask": [1] * 5},
      {"weights": [1, 0, 0, 0, 0]},
      {"top_entropy_quantile": 0.2},
    ),
  ),
)


@dataclasses.dataclass(frozen=True)
class SelectionSettings(TopEntropySettings, SurrogateSettings, RatioSettings):
  """What the selection reads: the settings of all token weights, and the choices of other axes."""


def is_needed(algo: SelectionSettings) -> bool:
  """Whether any choice of the config weighs or chooses tokens."""
  return SURROGATES[algo.surrogate].select is not None or has_weights(algo)


def has_weights(algo: SelectionSettings) -> bool:
  """Whether any token weight is on."""
  return any(record.is_on(algo) for record in TOKEN_WEIGHTS.values())


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
  """The selection of a whole batch. All arrays are [P, G, T].

  Args:
    logprobs_PGT: The policy's log-probs before the update.
    old_logprobs_PGT: The old log-probs, the same where old is the policy itself.
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
