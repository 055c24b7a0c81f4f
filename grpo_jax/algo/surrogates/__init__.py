"""Surrogates: the loss of a token.

To add one, write its function and its record into one of the files of this folder. A user's program
calls `register_surrogate`.
"""

from __future__ import annotations

import dataclasses

from grpo_jax.algo.surrogates import averaged, clipped, covariance, divergence, weighted
from grpo_jax.algo.surrogates.surrogate import Loss, Surrogate
from grpo_jax.algo.variant import S
from grpo_jax.registry import register
from grpo_jax.settings import Settings, one_of, setting

__all__ = ["SURROGATES", "SurrogateSettings", "register_surrogate"]

SURROGATES: dict[str, Surrogate] = (
  clipped.SURROGATES
  | weighted.SURROGATES
  | averaged.SURROGATES
  | covariance.SURROGATES
  | divergence.SURROGATES
)


@dataclasses.dataclass(frozen=True)
class _Choice(Settings):
  surrogate: str = setting(
    "ppo_clip",
    "the loss of a token",
    one_of(SURROGATES, "or call grpo_jax.register_surrogate first"),
  )


@dataclasses.dataclass(frozen=True)
class SurrogateSettings(
  covariance.KlCovSettings,
  covariance.ClipCovSettings,
  averaged.VespoSettings,
  weighted.DroSettings,
  clipped.SapoSettings,
  clipped.PpoSettings,
  _Choice,
):
  """The choice of a surrogate, and the settings of all surrogates. New bases go in front."""


def register_surrogate(loss: Loss[S]) -> Loss[S]:
  """Registers a surrogate of the user under its function's name, for `algo.surrogate`.

  Returns the function, so that it can be used as a decorator. A program that resumes a run
  registers the function first, because the run saves only the name.

  Args:
    loss: (terms, algo) -> the loss of each token, [P, G, T], in JAX. `Terms` has ratios,
      advantages, log-probs and the mask. The function does not average over tokens, because
      `algo.aggregation` does. It may read any setting of `algo`, a `grpo_jax.algo.settings.Algo`,
      such as algo.clip_high.

  Raises:
    ConfigError: grpo_jax has a surrogate of this name, or the function has no name.
  """
  register("surrogate", SURROGATES, loss, Surrogate(loss=loss, settings=Settings, examples=()))
  return loss
