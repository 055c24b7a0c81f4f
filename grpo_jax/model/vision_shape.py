"""The shape of a vision tower as data. config.py has the decoder's."""

import dataclasses
import math
from typing import Any


@dataclasses.dataclass(frozen=True)
class VisionShape:
  """The shape of a vision tower, and how the decoder reads the visual tokens.

  Attributes:
    tower: A name in `towers.TOWERS`.
    family: The `model_type` of Hugging Face whose names `save` writes for decoder and tower.
    patch: The shape of a patch, such as channels, frames, height and width. C is the product.
    dim: The width of the tower.
    num_layers: The number of layers.
    num_heads: The number of heads.
    mlp_dim: The hidden units of the MLPs.
    head_size: The size of a head, or 0 if the heads share `dim`.
    clipped: The inputs and outputs of each projection are clipped to ranges from the checkpoint.
    standardised: Constants of the checkpoint shift and scale the visual tokens (Gemma 4).
    activation: The activation of the MLPs, a name in `towers.layers.ACTIVATIONS`.
    norm_eps: The epsilon of the norms.
    merge: How many patches per side become one visual token.
    positions: The number of learned positions: a square grid or, in Gemma 4, this many for rows and
      this many for columns.
    rope_theta: The base of the frequencies by which rows and columns rotate queries and keys. 0
      means that nothing is rotated.
    window: The side, in patches, of the windows in which patches see each other. 0 means that a
      patch sees all patches of its picture.
    full_layers: The layers without a window, where the others have one.
    level_layers: The layers whose outputs become further levels of visual tokens (DeepStack,
      2406.04334).
    both_ways: The decoder layers in which a picture's tokens also see its later tokens: "all",
      "windows" for those with a window, or "" for none.
    rope_sections: How many of the decoder's frequencies belong to each axis: time, height and
      width. The empty tuple means that a token has one position.
    rope_interleaved: The axes take turns over the frequencies, instead of one after another.
    others: Fields of config.json that the computation does not need but other programs do, such as
      token ids, and their values. Names of the tower's fields begin with "vision_config.".
    pad_id: The token id whose layer embeddings visual tokens get, if `ModelConfig.per_layer_dim`.
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
    """How many numbers the patches of one visual token have in the tower."""
    return self.dim * self.merge**2
