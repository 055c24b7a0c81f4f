"""The image processor of a model's folder: turns images into texts of prompts and pictures."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from grpo_jax.data.images import gemma3, gemma4, idefics3, qwen_vl
from grpo_jax.data.images.fields import Fields, read, read_json
from grpo_jax.data.images.pictures import Kind, Layout, Picture
from grpo_jax.data.images.source import AnyImage
from grpo_jax.settings import ConfigError


class TextEncoder(Protocol):
  """The part of a tokenizer that a processor needs. `tokenizers.Tokenizer` is one."""

  @property
  def special(self) -> Mapping[str, str]:
    """The texts of the special tokens by their roles."""

  def encode(self, text: str) -> list[int]:
    """Token ids of a text."""


class Placed(NamedTuple):
  """Where the visual tokens of a prompt with S tokens are.

  Attributes:
    seen_S2: int32, `types.Images.seen_PS2` of this prompt.
    positions_S3: int32, `types.Images.positions_PS3` of this prompt, or None.
    next: The position of the first token after the prompt.
  """

  seen_S2: np.ndarray
  positions_S3: np.ndarray | None
  next: int


@dataclasses.dataclass(frozen=True)
class Processor:
  """An image processor.

  Attributes:
    kind: The kind of processor, which says how images become pictures.
    token_id: The id of the token that a visual token takes the place of.
  """

  kind: Kind
  token_id: int

  def layout(self, image: AnyImage) -> Layout:
    """The layout of an image, from its header.

    Raises:
      ConfigError: The image cannot be read, or the processor cannot take one of its size.
    """
    height, width = image.size()
    try:
      return self.kind.layout(height, width)
    except ValueError as error:
      if isinstance(error, ConfigError):
        raise
      raise ConfigError(
        f"{image.name} has {width} x {height} pixels, which the model cannot see: {error}"
      ) from None

  def pictures(self, image: AnyImage) -> list[Picture]:
    """The pictures of an image, which is decoded.

    Raises:
      ConfigError: The image is damaged, or is not what its header said.
    """
    pixels, size = image.pixels(), image.size()
    if pixels.shape[:2] != size:
      raise ConfigError(
        f"{image.name} has {pixels.shape[1]} x {pixels.shape[0]} pixels, unlike its header"
      )
    return self.kind.pictures(pixels)

  def expand(self, text: str, layouts: Sequence[Layout], where: str) -> str:
    """A prompt with the texts of its images in the place of placeholders.

    Args:
      text: The prompt as a chat template rendered it.
      layouts: The layouts of its images, in their order.
      where: The name of the prompt in error messages.

    Raises:
      ConfigError: There are more or fewer placeholders than images.
    """
    first, *rest = text.split(self.kind.placeholder)
    if len(rest) != len(layouts):
      raise ConfigError(
        f"{where} has {len(rest)} places {self.kind.placeholder!r} for {len(layouts)} images"
      )
    return first + "".join(layout.text + part for layout, part in zip(layouts, rest))

  def place(self, ids: Sequence[int], layouts: Sequence[Layout], where: str) -> Placed:
    """Where the visual tokens of a prompt are.

    Args:
      ids: The token ids of the expanded prompt.
      layouts: The layouts of its images, in their order.
      where: The name of the prompt in error messages.

    Raises:
      ConfigError: The prompt has other tokens of images, which its text wrote.
    """
    grids = [grid for layout in layouts for grid in layout.tokens]
    counts = [rows * columns for rows, columns in grids]
    is_seen_S = np.asarray(ids) == self.token_id
    if int(is_seen_S.sum()) != sum(counts):
      raise ConfigError(
        f"{where} has {int(is_seen_S.sum())} tokens {self.kind.token!r} for {sum(counts)} tokens of"
        " images; leave this token out of texts"
      )
    seen_S2 = np.full((len(ids), 2), -1, np.int32)
    if counts:
      seen_S2[is_seen_S, 0] = np.repeat(np.arange(len(counts)), counts)
      seen_S2[is_seen_S, 1] = np.concatenate([np.arange(count) for count in counts])
    if not self.kind.has_axes:
      return Placed(seen_S2, None, len(ids))
    return Placed(seen_S2, *_positions(seen_S2, grids))


def _positions(seen_S2: np.ndarray, grids: Sequence[tuple[int, int]]) -> tuple[np.ndarray, int]:
  """The positions of a prompt's tokens in time, height and width, as Qwen2-VL has them.

  The tokens of a picture have the same time, and their row and column in it, all counted from where
  the picture begins. The text after it goes on after the largest of these numbers.

  Args:
    seen_S2: int32, the number of the picture that each token sees, and the number of the visual
      token in it. -1 where the token is text.
    grids: The rows and columns of visual tokens of each picture.

  Returns:
    The positions, int32 [S, 3], and the position of the first token after the prompt.
  """
  positions_S3 = np.empty((len(seen_S2), 3), np.int32)
  begin = place = 0
  for picture, (rows, columns) in enumerate(grids):
    first = int(np.argmax(seen_S2[:, 0] == picture))
    end = first + rows * columns
    positions_S3[place:first] = begin + np.arange(first - place)[:, None]
    begin += first - place
    inside = np.indices((1, rows, columns)).reshape(3, -1).T
    positions_S3[first:end] = begin + inside
    begin, place = begin + max(rows, columns), end
  positions_S3[place:] = begin + np.arange(len(seen_S2) - place)[:, None]
  return positions_S3, begin + len(seen_S2) - place


_Make = Callable[[Fields, Fields, Fields, dict[str, str]], Kind]
_KINDS: dict[str, _Make] = {
  "Qwen2VLImageProcessor": lambda own, around, vision, tokens: qwen_vl.make(own),
  "Qwen2_5_VLImageProcessor": lambda own, around, vision, tokens: qwen_vl.make(own),
  "Gemma3ImageProcessor": gemma3.make,
  "Gemma4ImageProcessor": lambda own, around, vision, tokens: gemma4.make(own, tokens),
  "Idefics3ImageProcessor": idefics3.make,
  "SmolVLMImageProcessor": idefics3.make,
}


def load(folder: str | Path, tokenizer: TextEncoder) -> Processor | None:
  """The image processor of a model's folder.

  Args:
    folder: The folder.
    tokenizer: The tokenizer of the model.

  Returns:
    The processor. None if the folder has none.

  Raises:
    ConfigError: Its files cannot be read, or ask for something that is not supported.
  """
  folder = Path(folder).expanduser()
  found = read(folder) if folder.is_dir() else None
  if found is None:
    return None
  own, around = found
  name = own.get("image_processor_type") or own.get("feature_extractor_type")
  base = str(name).removesuffix("Fast").removesuffix("Pil")
  if base not in _KINDS:
    own.refuse("image_processor_type", f"choose one of {', '.join(_KINDS)}")
  config = read_json(folder / "config.json") or {}
  vision = Fields(config.get("vision_config") or {}, "config.json: vision_config")
  kind = _KINDS[base](own, around, vision, special_tokens(folder, tokenizer))
  ids = tokenizer.encode(kind.token)
  if len(ids) != 1:
    raise ConfigError(
      f"data.tokenizer: {kind.token!r}, which images need, is not a token of the tokenizer"
    )
  return Processor(kind, ids[0])


def special_tokens(folder: Path, tokenizer: TextEncoder) -> dict[str, str]:
  """The texts of special tokens by their roles, with those that only multimodal models have.

  Different versions of transformers write the latter to different places of tokenizer_config.json.
  """
  config = read_json(folder / "tokenizer_config.json") or {}
  found = dict(tokenizer.special)
  for name in ("extra_special_tokens", "model_specific_special_tokens"):
    if isinstance(config.get(name), Mapping):
      found |= config[name]
  texts = {
    role: token["content"] if isinstance(token, Mapping) else token for role, token in found.items()
  }
  return {role: text for role, text in texts.items() if isinstance(text, str) and text}
