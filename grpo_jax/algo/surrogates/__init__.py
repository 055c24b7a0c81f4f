"""Surrogates: the loss of a token.

To add one, write its function and its record into one of the files of this folder. A program adds
its own with `register_surrogate`.
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
  """The choice of a surrogate and the settings of all. New settings go in front."""


def register_surrogate(loss: Loss[S]) -> Loss[S]:
  """Gives a surrogate of this program a name in configs: that of its function.

  It can be used as a decorator. `algo.surrogate` then finds the name. The config that a run saves
  holds the name alone, so a program that goes on with the run registers the function first.

  Args:
    loss: (terms, algo) -> the loss of each token, [P, G, T], in JAX. `Terms` has what it reads:
      ratios, advantages, log-probs and the mask. It does not average over tokens, because
      `algo.aggregation` does. It may read any setting of `algo`, which is an
      `grpo_jax.algo.settings.Algo`, such as algo.clip_high.

  Returns:
    The function.

  Raises:
    ConfigError: A surrogate of grpo_jax has this name, or it has none.
  """
  register("surrogate", SURROGATES, loss, Surrogate(loss=loss, settings=Settings, examples=()))
  return loss
