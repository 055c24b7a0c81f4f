"""Rotary position embedding (Su et al. 2104.09864), and how checkpoints scale it for long texts."""

from collections.abc import Callable
import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Rotation(NamedTuple):
  """The rotation of queries and keys by the positions of their tokens.

  Attributes:
    cos: The cosines of the angles, float32 [B, T, pairs].
    sin: The sines of the angles, float32 [B, T, pairs].
    query_scale_BT: float32, an additional factor of each token's queries, or None.
  """

  cos: jax.Array
  sin: jax.Array
  query_scale_BT: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """How frequencies differ from theta^(-2i/E). A kind ignores the fields that it does not need.

  Attributes:
    kind: A name in SCALINGS.
    factor: How many times as long as the original texts a text may be.
    original_positions: The length of the texts that the model was first trained on.
    low: `low_freq_factor` of llama3, `beta_slow` of yarn.
    high: `high_freq_factor` of llama3, `beta_fast` of yarn.
    attention_factor: yarn and longrope multiply cos and sin by it.
    mscale_all_dim: Latent attention multiplies scores by (0.1 mscale_all_dim log(factor) + 1)^2.
    truncate: yarn rounds the range of dimensions outwards.
    short_factors: The factors by which longrope divides the frequencies, one each, if no text is
      longer than the original ones.
    long_factors: The factors of longrope for longer texts.
    share: The share of the pairs that `proportional` rotates.
  """

  kind: str
  factor: float
  original_positions: int
  low: float = 1.0
  high: float = 4.0
  attention_factor: float = 1.0
  mscale_all_dim: float = 0.0
  truncate: bool = True
  short_factors: tuple[float, ...] = ()
  long_factors: tuple[float, ...] = ()
  share: float = 1.0


def linear(frequencies: np.ndarray, theta: float, scaling: RopeScaling, length: int) -> np.ndarray:
  """Divides frequencies, and thereby positions, by `factor` (Chen et al. 2306.15595)."""
  del theta, length
  return frequencies / scaling.factor


def dynamic(frequencies: np.ndarray, theta: float, scaling: RopeScaling, length: int) -> np.ndarray:
  """Uses a larger theta if `length`, the longest possible text, exceeds the original texts.

  This is known as "dynamic NTK".
  """
  E, original = 2 * len(frequencies), scaling.original_positions
  length = max(length, original)
  # At the original length, the factor of theta is 1.
  theta = theta * (scaling.factor * length / original - (scaling.factor - 1)) ** (E / (E - 2))
  return _frequencies(theta, E)


def llama3(frequencies: np.ndarray, theta: float, scaling: RopeScaling, length: int) -> np.ndarray:
  """Divides low frequencies by `factor`, keeps high ones, with a ramp in between (Llama 3.1)."""
  del theta, length
  turns = scaling.original_positions * frequencies / (2 * math.pi)  # over an original text
  keep = np.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
  return frequencies * (keep + (1 - keep) / scaling.factor)


def yarn(frequencies: np.ndarray, theta: float, scaling: RopeScaling, length: int) -> np.ndarray:
  """Divides low frequencies by `factor` and keeps high ones (YaRN 2309.00071, section 3.2).

  In between, the share of the division rises linearly with the index of the frequency.
  """
  del length
  E = 2 * len(frequencies)

  def index_with(turns: float) -> float:
    """The index, with a fraction, of the frequency that turns so often over an original text."""
    radians = turns * 2 * math.pi
    return E * math.log(scaling.original_positions / radians) / (2 * math.log(theta))

  first, last = index_with(scaling.high), index_with(scaling.low)
  if scaling.truncate:
    first, last = math.floor(first), math.ceil(last)
  # E - 1 is the bound in the code of the paper, although there are only E / 2 frequencies.
  first, last = max(first, 0), min(last, E - 1)
  # The share that is divided. The bound of 0.001 keeps the slope finite if the range is empty.
  divided = np.clip((np.arange(len(frequencies)) - first) / max(last - first, 0.001), 0, 1)
  return frequencies * (1 - divided + divided / scaling.factor)


def longrope(
  frequencies: np.ndarray, theta: float, scaling: RopeScaling, length: int
) -> np.ndarray:
  """Divides each frequency by a factor that was searched for it (LongRoPE 2402.13753)."""
  del theta
  is_long = length > scaling.original_positions
  return frequencies / np.array(scaling.long_factors if is_long else scaling.short_factors)


def proportional(
  frequencies: np.ndarray, theta: float, scaling: RopeScaling, length: int
) -> np.ndarray:
  """Rotates only the first pairs. Their frequencies are as if all pairs were rotated (Gemma 4)."""
  del theta, length
  rotated = np.arange(len(frequencies)) < int(scaling.share * 2 * len(frequencies) // 2)
  return np.where(rotated, frequencies / scaling.factor, 0)


SCALINGS: dict[str, Callable[[np.ndarray, float, RopeScaling, int], np.ndarray]] = {
  "linear": linear,
  "dynamic": dynamic,
  "llama3": llama3,
  "yarn": yarn,
  "longrope": longrope,
  "proportional": proportional,
}


def angles(
  positions_BT: jax.Array,
  head_dim: int,
  theta: float,
  scaling: RopeScaling | None,
  length: int,
  table: bool,
) -> Rotation:
  """Computes the rotation of tokens at the given positions.

  Args:
    positions_BT: int32, all below `length`.
    head_dim: E.
    theta: The base of the frequencies.
    scaling: How the frequencies are scaled, or None.
    length: The number of positions, on which some scalings depend.
    table: Look the cosines and sines up in a table of `length` rows. Otherwise they are computed,
      and XLA computes them again for every head of every layer.
  """
  frequencies, attention_factor = _frequencies(theta, head_dim), 1.0
  if scaling is not None:
    frequencies = SCALINGS[scaling.kind](frequencies, theta, scaling, length)
    attention_factor = scaling.attention_factor
  frequencies = frequencies.astype(np.float32)
  if not table:
    angles_BTE = positions_BT[..., None].astype(jnp.float32) * frequencies
    return Rotation(attention_factor * jnp.cos(angles_BTE), attention_factor * jnp.sin(angles_BTE))

  # numpy computes the tables once, while the program is traced.
  table_angles = np.arange(length, dtype=np.float32)[:, None] * frequencies
  cos_table = (attention_factor * np.cos(table_angles)).astype(np.float32)
  sin_table = (attention_factor * np.sin(table_angles)).astype(np.float32)
  return Rotation(jnp.asarray(cos_table)[positions_BT], jnp.asarray(sin_table)[positions_BT])


def by_axis(rope: Rotation, axes: tuple[int, ...]) -> Rotation:
  """Selects, for each pair of numbers, the rotation by one of a token's several positions.

  Args:
    rope: cos and sin [B, T, axes, pairs], for positions [B, T, axes].
    axes: For each pair, the number of the axis whose position rotates it.
  """

  def chosen(x: jax.Array) -> jax.Array:
    return sum(jnp.where(np.array(axes) == i, x[..., i, :], 0) for i in range(x.shape[-2]))

  return Rotation(chosen(rope.cos), chosen(rope.sin))


def axes_of_pairs(sections: tuple[int, ...], interleaved: bool, pairs: int) -> tuple[int, ...]:
  """The axis that rotates each pair: 0 is time, 1 height, 2 width (2502.13923).

  `sections` are the numbers of pairs of each axis. The axes follow one after another or, if
  `interleaved`, take turns: time takes the turns of axes that have no pairs left.
  """
  if not interleaved:
    return tuple(np.repeat(np.arange(len(sections)), sections)[:pairs].tolist())
  turns = ((pair, pair % 3) for pair in range(pairs))
  return tuple(axis if pair < 3 * sections[axis] else 0 for pair, axis in turns)


def query_scale(positions_BT: jax.Array, growth: float, original: int) -> jax.Array:
  """1 + growth * log(1 + floor(position / original)), float32 [B, T], as in Llama 4."""
  return 1 + growth * jnp.log1p(jnp.floor(positions_BT / original))


def rotate(x_BTHE: jax.Array, rope: Rotation) -> jax.Array:
  """Rotates the pairs (i, i + E/2) of every head, the order of Hugging Face checkpoints.

  With angles for only n < E/2 pairs, it rotates the pairs (i, i + n) of a head's first 2n numbers.
  """
  cos, sin = rope.cos[:, :, None, :], rope.sin[:, :, None, :]
  pairs = cos.shape[-1]
  first, second, rest = jnp.split(x_BTHE.astype(jnp.float32), [pairs, 2 * pairs], axis=-1)
  rotated = [first * cos - second * sin, second * cos + first * sin]
  return jnp.concatenate([*rotated, rest], axis=-1).astype(x_BTHE.dtype)


def _frequencies(theta: float, head_dim: int) -> np.ndarray:
  return theta ** -(np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
