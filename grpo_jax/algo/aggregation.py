"""Aggregations: how the losses of tokens become one number.

Each returns a mean as (sum, weight). Sums and weights add up over micro-batches. A weight depends
on the mask alone, so the sum of a micro-batch is divided by the weight of the whole batch. A
sequence without a loss token is not counted.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
from typing import TypeAlias

from grpo_jax import masked
from grpo_jax.algo.variant import Example, Record, Records, S
from grpo_jax.lazy import jax
from grpo_jax.settings import Settings, at_least, one_of, setting

Mean: TypeAlias = "tuple[jax.Array, jax.Array]"  # (sum, weight)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Aggregation(Record[S]):
  """One way to average over tokens.

  Attributes:
    compute: (values_PGT, mask_PGT, algo) -> (sum, weight), scalars.
    examples: Inputs are `values` and `mask`, nested [P, G, T]. Outputs are `sum` and `weight`.
  """

  compute: Callable[[jax.Array, jax.Array, S], Mean]


AGGREGATIONS = Records[Aggregation]()

# The first prompt has rows of 2 and 4 tokens and a row without tokens. The second has one token.
_INPUTS = {
  "values": [
    [[1, 1, None, None], [-1, -1, -1, -1], [None, None, None, None]],
    [[None, None, None, None], [9, None, None, None], [None, None, None, None]],
  ],
  "mask": [[[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]], [[0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]],
}


def token_mean(values_PGT: jax.Array, mask_PGT: jax.Array, algo: Settings) -> Mean:
  """sum(x) / number of tokens (DAPO 2503.14476, eq. 12 over the batch).

  Args:
    values_PGT: The values of the tokens. Where the mask is 0, they may be NaN.
    mask_PGT: The loss mask.

  Returns:
    (sum of the values, number of tokens)
  """
  return masked.total(values_PGT, mask_PGT), masked.count(mask_PGT)


AGGREGATIONS["token_mean"] = Aggregation(
  compute=token_mean,
  settings=Settings,
  examples=(Example(_INPUTS, {"sum": 2 - 4 + 9, "weight": 7}),),
)


def sequence_mean(values_PGT: jax.Array, mask_PGT: jax.Array, algo: Settings) -> Mean:
  """Mean over sequences of the mean over their tokens (GRPO 2402.03300, eq. 3).

  Args:
    values_PGT: The values of the tokens. Where the mask is 0, they may be NaN.
    mask_PGT: The loss mask.

  Returns:
    (sum of the sequences' means, number of sequences)
  """
  return masked.mean(values_PGT, mask_PGT, -1).sum(), _sequences(mask_PGT)


AGGREGATIONS["sequence_mean"] = Aggregation(
  compute=sequence_mean,
  settings=Settings,
  examples=(Example(_INPUTS, {"sum": 1 - 1 + 9, "weight": 3}),),
)


def sequence_sum(values_PGT: jax.Array, mask_PGT: jax.Array, algo: Settings) -> Mean:
  """Mean over sequences of the sum over their tokens (RLOO 2402.14740).

  With the ratio `sequence` it is LUSPO 2602.05261.

  Args:
    values_PGT: The values of the tokens. Where the mask is 0, they may be NaN.
    mask_PGT: The loss mask.

  Returns:
    (sum of the values, number of sequences)
  """
  return masked.total(values_PGT, mask_PGT), _sequences(mask_PGT)


AGGREGATIONS["sequence_sum"] = Aggregation(
  compute=sequence_sum,
  settings=Settings,
  examples=(Example(_INPUTS, {"sum": 2 - 4 + 9, "weight": 3}),),
)


@dataclasses.dataclass(frozen=True)
class ConstantSettings(Settings):
  """Settings of constant."""

  length_norm: int = setting(
    0, "constant: tokens that a sequence counts as; 0 = sampling.max_tokens", at_least(0)
  )


def constant(values_PGT: jax.Array, mask_PGT: jax.Array, algo: ConstantSettings) -> Mean:
  """sum(x) / (sequences * length_norm) (Dr. GRPO 2503.20783).

  The weight of a token does not depend on the length of its sequence.

  Args:
    values_PGT: The values of the tokens. Where the mask is 0, they may be NaN.
    mask_PGT: The loss mask.

  Returns:
    (sum of the values, number of sequences times length_norm)
  """
  return masked.total(values_PGT, mask_PGT), _sequences(mask_PGT) * algo.length_norm


AGGREGATIONS["constant"] = Aggregation(
  compute=constant,
  settings=ConstantSettings,
  examples=(Example(_INPUTS, {"sum": 2 - 4 + 9, "weight": 3 * 8}, {"length_norm": 8}),),
)


def prompt_mean(values_PGT: jax.Array, mask_PGT: jax.Array, algo: Settings) -> Mean:
  """Mean over prompts of the mean over the tokens of their group (DAPO 2503.14476, eq. 8).

  Args:
    values_PGT: The values of the tokens. Where the mask is 0, they may be NaN.
    mask_PGT: The loss mask.

  Returns:
    (sum of the groups' means, number of prompts that have a loss token)
  """
  prompts = (mask_PGT != 0).any((1, 2)).sum()
  return masked.mean(values_PGT, mask_PGT, (1, 2)).sum(), prompts


AGGREGATIONS["prompt_mean"] = Aggregation(
  compute=prompt_mean,
  settings=Settings,
  examples=(
    Example(_INPUTS, {"sum": (2 - 4) / 6 + 9, "weight": 2}),
    Example({"values": [[[3]], [[None]]], "mask": [[[1]], [[0]]]}, {"sum": 3, "weight": 1}),
  ),
)


@dataclasses.dataclass(frozen=True)
class _Choice(Settings):
  aggregation: str = setting(
    "sequence_mean", "how the losses of tokens become one number", one_of(AGGREGATIONS)
  )


@dataclasses.dataclass(frozen=True)
class AggregationSettings(ConstantSettings, _Choice):
  """The choice of an aggregation, and the settings of all of them. New bases go in front."""


def _sequences(mask_PGT: jax.Array) -> jax.Array:
  """How many sequences have a loss token."""
  return (mask_PGT != 0).any(-1).sum()
