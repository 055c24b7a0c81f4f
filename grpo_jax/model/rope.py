"""Rotary position embedding (Su et al. 2104.09864): the frequencies, as checkpoints scale them for longer texts."""

import dataclasses
import math
from typing import Callable

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """How frequencies differ from theta^(-2i/E). Fields that a kind does not read are left as they are."""

  kind: str  # a name of SCALINGS
  factor: float
  original_positions: int  # of the texts that the model was first trained on
  low: float = 1.0  # llama3: low_freq_factor; yarn: beta_slow
  high: float = 4.0  # llama3: high_freq_factor; yarn: beta_fast
  attention_factor: float = 1.0  # yarn: what cos and sin are multiplied by
  truncate: bool = True  # yarn: whether the range of dimensions is rounded outwards


def linear(frequencies, theta, scaling: RopeScaling, length: int):
  """Positions divided by `factor` (Chen et al. 2306.15595)."""
  del theta, length
  return frequencies / scaling.factor


def dynamic(frequencies, theta, scaling: RopeScaling, length: int):
  """A larger theta for texts longer than the original ones ("dynamic NTK"): `length` tokens is the longest there can be."""
  E, original = 2 * len(frequencies), scaling.original_positions
  length = max(length, original)
  theta = theta * (scaling.factor * length / original - (scaling.factor - 1)) ** (E / (E - 2))
  return _frequencies(theta, E)


def llama3(frequencies, theta, scaling: RopeScaling, length: int):
  """Low frequencies divided by `factor`, high ones kept, and a ramp between them (Llama 3.1)."""
  del theta, length
  turns = scaling.original_positions * frequencies / (2 * math.pi)  # over an original text
  keep = np.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
  return frequencies * (keep + (1 - keep) / scaling.factor)


def yarn(frequencies, theta, scaling: RopeScaling, length: int):
  """The same idea, with a ramp over dimensions (YaRN 2309.00071, section 3.2)."""
  del length
  E, half = 2 * len(frequencies), np.arange(len(frequencies))
  dimension = lambda turns: (
    E * math.log(scaling.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))
  )
  first, last = dimension(scaling.high), dimension(scaling.low)
  if scaling.truncate:
    first, last = math.floor(first), math.ceil(last)
  first, last = max(first, 0), min(last, E - 1)
  divide = np.clip((half - first) / max(last - first, 0.001), 0, 1)
  return frequencies * (1 - divide + divide / scaling.factor)


SCALINGS: dict[str, Callable] = {
  "linear": linear,
  "dynamic": dynamic,
  "llama3": llama3,
  "yarn": yarn,
}


def angles(
  positions_BT: jax.Array,
  head_dim: int,
  theta: float,
  scaling: RopeScaling | None,
  length: int,
  table: bool,
) -> tuple[jax.Array, jax.Array]:
  """cos and sin [B, T, E/2], float32. `length`: positions are below it.

  With `table` they are looked up among `length` rows: computed, XLA would do it again in every head of every layer.
  """
  frequencies, attention = _frequencies(theta, head_dim), 1.0
  if scaling is not None:
    frequencies = SCALINGS[scaling.kind](frequencies, theta, scaling, length)
    attention = scaling.attention_factor
  frequencies = frequencies.astype(np.float32)
  if not table:
    angles_BTE = positions_BT[..., None].astype(jnp.float32) * frequencies
    return attention * jnp.cos(angles_BTE), attention * jnp.sin(angles_BTE)
  rows = np.arange(length, dtype=np.float32)[:, None] * frequencies
  scaled = lambda x: jnp.asarray((attention * x).astype(np.float32))[positions_BT]
  return scaled(np.cos(rows)), scaled(np.sin(rows))


def rotate(x_BTHE: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
  """Rotates the pairs (i, i + E/2) of every head, the order of Hugging Face checkpoints."""
  cos, sin = (r[:, :, None, :] for r in rope)
  first, second = jnp.split(x_BTHE.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(
    x_BTHE.dtype
  )


def _frequencies(theta, head_dim):
  return theta ** -(np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
