"""The shape of a vision tower as data, beside that of the decoder in config.py."""

import dataclasses
import math
from typing import Any


@dataclasses.dataclass(frozen=True)
class VisionShape:
  """The shape of a vision tower, and how the decoder reads what the tower makes of images.

  Attributes:
    tower: A name in `towers.TOWERS`.
    family: The `model_type` of Hugging Face whose names `save` writes for decoder and tower.
    patch: The axes of the numbers of a patch, such as channels, frames, height and width. C is
      their product.
    dim: The width of the tower.
    num_layers: Its layers.
    num_heads: Its heads.
    mlp_dim: The hidden units of its MLPs.
    head_size: The size of a head, or 0 if the heads share `dim`.
    clipped: The inputs and outputs of its projections are clipped, each to a range of its own.
    standardised: Numbers that are not trained move and scale its visual tokens (Gemma 4).
    activation: The activation of its MLPs, a name in `towers.layers.ACTIVATIONS`.
    norm_eps: The epsilon of its norms.
    merge: How many patches per side become one visual token.
    positions: How many learned positions there are: those of a square of places, or in the tower
      of Gemma 4 those of rows and as many of columns.
    rope_theta: The base of the frequencies by which rows and columns rotate queries and keys. 0
      means that nothing is rotated.
    window: The side of the windows in which patches see each other, in patches. 0 means that a
      patch sees all patches of its picture.
    full_layers: The layers without a window, where the others have one.
    level_layers: The layers whose outputs become further levels of visual tokens (DeepStack,
      2406.04334).
    both_ways: In which layers of the decoder tokens of a picture see those after them, too: "all",
      "windows" for those with a window, or "" for none.
    rope_sections: How many frequencies of the decoder are of each axis: time, height and width. The
      empty tuple means that tokens have one position.
    rope_interleaved: The axes take turns over the frequencies, instead of one after another.
    others: Fields of config.json that computing does not need but other programs do, such as the
      ids of tokens, and their values. Those of the tower begin with "vision_config.".
    pad_id: The token whose embeddings for each layer visual tokens have, in a decoder with such
      embeddings.
    trained: Gradients reach the tower.
  """

  tower: str
  family: str
  patch: tuple[int, ...]
  dim: int
  num_layers: int
  num_heads: int
  mlp_dim: int
  head_size: int = 0
  clipped: bool = False
  standardised: bool = False
  activation: str = "gelu_tanh"
  norm_eps: float = 1e-6
  merge: int = 1
  positions: int = 0
  rope_theta: float = 0.0
  window: int = 0
  full_layers: tuple[int, ...] = ()
  level_layers: tuple[int, ...] = ()
  both_ways: str = ""
  rope_sections: tuple[int, ...] = ()
  rope_interleaved: bool = False
  others: tuple[tuple[str, Any], ...] = ()
  pad_id: int = 0
  trained: bool = False

  @property
  def grid(self) -> int:
    """The side of the square of learned positions."""
    return math.isqrt(self.positions)

  @property
  def head_dim(self) -> int:
    """The size of a head of the tower."""
    return self.head_size or self.dim // self.num_heads

  @property
  def merged_dim(self) -> int:
    """The numbers of the patches that become one visual token."""
    return self.dim * self.merge**2
