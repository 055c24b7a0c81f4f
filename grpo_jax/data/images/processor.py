"""The image processor of a model's folder: makes prompt texts and pictures from images."""

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
  """The interface of a tokenizer that a processor uses. `tokenizers.Tokenizer` implements it."""

  @property
  def special(self) -> Mapping[str, str]:
    """The texts of the special tokens, keyed by role."""

  def encode(self, text: str) -> list[int]:
    """Returns the token ids of a text."""


class Placed(NamedTuple):
  """The places of the visual tokens in a prompt with S tokens.

  Attributes:
    seen_S2: int32, the row of `types.Images.seen_PS2` for this prompt.
    positions_S3: int32, the row of `types.Images.positions_PS3` for this prompt, or None.
    next: The position of the first token after the prompt.
  """

  seen_S2: np.ndarray
  positions_S3: np.ndarray | None
  next: int


@dataclasses.dataclass(frozen=True)
class Processor:
  """An image processor.

  Attributes:
    kind: The processor of the model family, which determines how images become pictures.
    token_id: The id of the token that marks each visual token in a prompt.
  """

  kind: Kind
  token_id: int

  def layout(self, image: AnyImage) -> Layout:
    """The layout of an image, computed from the size in its header.

    Raises:
      ConfigError: The image cannot be read, or the processor does not support its size.
    """
    height, width = image.size()
    try:
      return self.kind.layout(height, width)
    except ValueError as error:
      if isinstance(error, ConfigError):  # it already is a complete message
        raise
      raise ConfigError(
        f"{image.name} has {width} x {height} pixels, which the model cannot see: {error}"
      ) from None

  def pictures(self, image: AnyImage) -> list[Picture]:
    """Decodes an image. Raises ConfigError if it is damaged or its size is not the header's."""
    pixels, size = image.pixels(), image.size()
    if pixels.shape[:2] != size:
      raise ConfigError(
        f"{image.name} has {pixels.shape[1]} x {pixels.shape[0]} pixels, unlike its header"
      )
    return self.kind.pictures(pixels)

  def expand(self, text: str, layouts: Sequence[Layout], where: str) -> str:
    """Replaces the image placeholders of a prompt by the texts of its images.

    Args:
      text: The prompt as a chat template rendered it.
      layouts: The layouts of its images, in the order of the placeholders.
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
    """Assigns the visual tokens of the images to tokens of the prompt.

    Args:
      ids: The token ids of the expanded prompt.
      layouts: The layouts of its images, in the order of the prompt.
      where: The name of the prompt in error messages.

    Raises:
      ConfigError: The prompt and the layouts differ in the number of visual tokens, because a text
        contains the image token.
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
  """The positions of a prompt's tokens in time, height and width, as in Qwen2-VL.

  A text token has the same position on all axes, one more than the token before it. A picture that
  begins at position b has time b, height b + row and width b + column. Its tokens are consecutive.
  The next text begins at b + max(rows, columns).

  Args:
    seen_S2: int32, `Placed.seen_S2`: the number of the picture and of the visual token in it, or -1
      for text.
    grids: The number of rows and of columns of visual tokens of each picture.

  Returns:
    (positions, int32 [S, 3]; the position of the first token after the prompt)
  """
  positions_S3 = np.empty((len(seen_S2), 3), np.int32)
  position = done = 0  # the next position, and the number of tokens that have one
  for picture, (rows, columns) in enumerate(grids):
    first = int(np.argmax(seen_S2[:, 0] == picture))
    end = first + rows * columns
    positions_S3[done:first] = position + np.arange(first - done)[:, None]
    position += first - done
    inside = np.indices((1, rows, columns)).reshape(3, -1).T  # one time, then row and column
    positions_S3[first:end] = position + inside
    position, done = position + max(rows, columns), end
  positions_S3[done:] = position + np.arange(len(seen_S2) - done)[:, None]
  return positions_S3, position + len(seen_S2) - done


# Called with the fields of the image processor, of the processor that contains it, and of
# vision_config, and with the special tokens by role.
_Make = Callable[[Fields, Fields, Fields, dict[str, str]], Kind]
_KINDS: dict[str, _Make] = {
  "Qwen2VLImageProcessor": lambda fields, outer, vision, tokens: qwen_vl.make(fields),
  "Qwen2_5_VLImageProcessor": lambda fields, outer, vision, tokens: qwen_vl.make(fields),
  "Gemma3ImageProcessor": gemma3.make,
  "Gemma4ImageProcessor": lambda fields, outer, vision, tokens: gemma4.make(fields, tokens),
  "Idefics3ImageProcessor": idefics3.make,
  "SmolVLMImageProcessor": idefics3.make,
}


def load(folder: str | Path, tokenizer: TextEncoder) -> Processor | None:
  """The image processor of a model's folder.

  Args:
    folder: The folder, which need not exist.
    tokenizer: The tokenizer of the model.

  Returns:
    The processor. None if the folder has no image processor.

  Raises:
    ConfigError: A file cannot be read, a field has a value that is not supported, or the tokenizer
      lacks the image token.
  """
  folder = Path(folder).expanduser()
  found = read(folder) if folder.is_dir() else None
  if found is None:
    return None
  fields, outer = found  # of the image processor, and of the processor that contains it
  name = fields.get("image_processor_type") or fields.get("feature_extractor_type")  # the older key
  base = str(name).removesuffix("Fast").removesuffix("Pil")  # names of variants of one processor
  if base not in _KINDS:
    fields.refuse("image_processor_type", f"choose one of {', '.join(_KINDS)}")
  config = read_json(folder / "config.json") or {}
  vision = Fields(config.get("vision_config") or {}, "config.json: vision_config")
  kind = _KINDS[base](fields, outer, vision, special_tokens(folder, tokenizer))
  ids = tokenizer.encode(kind.token)
  if len(ids) != 1:
    raise ConfigError(
      f"data.tokenizer: {kind.token!r}, which images need, is not a token of the tokenizer"
    )
  return Processor(kind, ids[0])


def special_tokens(folder: Path, tokenizer: TextEncoder) -> dict[str, str]:
  """The texts of special tokens by role, including the tokens that only multimodal models have.

  Versions of transformers store the latter in different fields of tokenizer_config.json.
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
