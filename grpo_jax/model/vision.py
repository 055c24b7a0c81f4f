"""Images in the model: a tower turns them into visual tokens, which the decoder reads as tokens."""

from collections.abc import Callable
import itertools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.remat import policy_of
from grpo_jax.model.rope import Rotation
from grpo_jax.model.towers import TOWERS
from grpo_jax.model.towers.layers import place_rotation
from grpo_jax.types import Images, Visual

_MOST_COLUMNS = 2**15  # more columns of windows than any picture has


class TowerParts(nn.Module):
  """The modules of a vision tower, named as their parameters. Each layer has its own name."""

  config: ModelConfig

  def setup(self) -> None:
    c, tower = self.config, TOWERS[self.config.vision.tower]
    self.embed = tower.embed(c)
    self.layers = [tower.layer(c) for _ in range(c.vision.num_layers)]
    self.merge = tower.merge(c)
    self.levels = [tower.level(c) for _ in c.vision.level_layers]

  def __call__(self) -> None:
    """Creates the parameters by calling each module once on zeros.

    `encode` combines the modules to a pass.
    """
    v = self.config.vision
    side = v.merge  # that of the smallest picture, one visual token
    places_1N2 = jnp.asarray(np.stack(np.indices((side, side)), -1).reshape(1, -1, 2))
    patches_1NC = jnp.zeros((*places_1N2.shape[:2], int(np.prod(v.patch))), self.config.dtype)
    x_1NW = self.embed(patches_1NC, places_1N2)
    rope, seen_1N = _rotation(self.config, places_1N2), jnp.zeros(places_1N2.shape[:2], jnp.int32)
    for layer in self.layers:
      layer(x_1NW, rope, seen_1N)
    for merge in (self.merge, *self.levels):
      merge(x_1NW, places_1N2)


def encode(params: Any, config: ModelConfig, images: Images, remat: str = "") -> Visual:
  """Runs the vision tower: returns the visual tokens that the decoder reads in place of images.

  Gradients reach the tower if `config.vision.trained` is set.

  Args:
    params: The parameters. Only those of the tower are read.
    config: The model, with `config.vision`.
    images: The images of P prompts.
    remat: Which activations of a layer are saved for the backward pass (see `apply_layers`).
  """
  tower = params["vision"]
  if not config.vision.trained:
    tower = jax.lax.stop_gradient(tower)
  P, I, N, C = images.patches_PINC.shape
  patches_BNC = images.patches_PINC.reshape(P * I, N, C).astype(config.dtype)
  places_BN2 = images.places_PIN2.reshape(P * I, N, 2)
  levels = _levels(tower, config, patches_BNC, places_BN2, remat)
  M = levels[0].shape[1]
  features_PKND = jnp.stack([level_BMD.reshape(P, I * M, -1) for level_BMD in levels], 1)
  # A token's picture, and the number of its visual token among the M of this picture.
  picture_PS, number_PS = images.seen_PS2[..., 0], images.seen_PS2[..., 1]
  return Visual(
    features_PKND=features_PKND,
    seen_PS=jnp.where(images.is_seen_PS, picture_PS * M + number_PS, -1),
    picture_PS=jnp.where(images.is_seen_PS, picture_PS, -1),
    positions_PS3=images.positions_PS3,
    next_P=images.next_P,
  )


def _levels(
  tower: Any, config: ModelConfig, patches_BNC: jax.Array, places_BN2: jax.Array, remat: str
) -> list[jax.Array]:
  """The levels of visual tokens, [B, M, D] each: that of the last layer, then further levels.

  A further level is computed from the output of an earlier layer of the tower. The decoder adds it
  to the tokens after one of the decoder's first layers (DeepStack, 2406.04334).
  """
  v, parts = config.vision, TowerParts(config).bind({"params": tower})
  x_BNW = parts.embed(patches_BNC, places_BN2)
  apply_layer = _layer(config, places_BN2, remat)
  is_full_L = np.array([not v.window or i in v.full_layers for i in range(v.num_layers)])
  # The loop over layers stops after each layer whose output becomes a further level.
  ends = sorted({0, v.num_layers, *(layer + 1 for layer in v.level_layers)})
  levels: list[jax.Array] = []
  for first, end in itertools.pairwise(ends):
    layers = jax.tree.map(lambda x, at=slice(first, end): x[at], tower["layers_0"])
    x_BNW, _ = jax.lax.scan(apply_layer, x_BNW, (layers, is_full_L[first:end]))
    if end - 1 in v.level_layers:
      levels.append(parts.levels[len(levels)](x_BNW, places_BN2))
  return [parts.merge(x_BNW, places_BN2), *levels]


def _layer(
  config: ModelConfig, places_BN2: jax.Array, remat: str
) -> Callable[[jax.Array, tuple[Any, jax.Array]], tuple[jax.Array, None]]:
  """The loop body over layers: (x_BNW, (parameters, whether it sees whole pictures)) -> x_BNW."""
  v = config.vision
  module, rope = TOWERS[v.tower].layer(config), _rotation(config, places_BN2)
  is_patch_BN = places_BN2[..., 0] >= 0
  # A patch sees the patches with the same number: its whole picture, or its window. Padding has -1.
  picture_BN = jnp.where(is_patch_BN, 0, -1)
  window_BN = picture_BN
  if v.window:
    window_BN2 = places_BN2 // v.window
    window_BN = jnp.where(is_patch_BN, window_BN2[..., 0] * _MOST_COLUMNS + window_BN2[..., 1], -1)

  def layer(x_BNW: jax.Array, of_layer: tuple[Any, jax.Array]) -> tuple[jax.Array, None]:
    params, is_full = of_layer
    seen_BN = jnp.where(is_full, picture_BN, window_BN) if v.window else picture_BN
    out_BNW: Any = module.apply({"params": params}, x_BNW, rope, seen_BN)
    return out_BNW, None

  if not remat:
    return layer
  # The loop over layers already keeps XLA from replacing recomputed values by the original ones.
  return jax.checkpoint(layer, policy=policy_of(remat), prevent_cse=False)


def _rotation(config: ModelConfig, places_BN2: jax.Array) -> Rotation | None:
  return place_rotation(config, places_BN2) if config.vision.rope_theta else None


def put(x_BTD: jax.Array, visual: Visual) -> jax.Array:
  """Replaces the embeddings of image tokens by the visual tokens of level 0."""
  S = visual.seen_PS.shape[1]
  visual_BSD = at_tokens(visual, 0).astype(x_BTD.dtype)
  is_seen_BS1 = visual.is_seen_PS[..., None]
  return jnp.concatenate([jnp.where(is_seen_BS1, visual_BSD, x_BTD[:, :S]), x_BTD[:, S:]], 1)


def as_padding(tokens_BT: jax.Array, visual: Visual, pad_id: int) -> jax.Array:
  """The tokens, with `pad_id` in place of visual tokens."""
  S = visual.seen_PS.shape[1]
  prompt_BS = jnp.where(visual.is_seen_PS, pad_id, tokens_BT[:, :S])
  return jnp.concatenate([prompt_BS, tokens_BT[:, S:]], 1)


def at_tokens(visual: Visual, level: int) -> jax.Array:
  """[P, S, D]: the visual token of this level that replaces each token of a prompt, or 0."""
  index_PS1 = jnp.maximum(visual.seen_PS, 0)[..., None]  # text reads number 0, masked below
  visual_PSD = jnp.take_along_axis(visual.features_PKND[:, level], index_PS1, axis=1)
  return jnp.where(visual.is_seen_PS[..., None], visual_PSD, 0)


def positions(visual: Visual | None, positions_BT: jax.Array) -> jax.Array:
  """The positions of tokens: [B, T], or [B, T, 3] where those of the prompt have three axes.

  Args:
    visual: The visual tokens of the rows, which may have positions on three axes, or None.
    positions_BT: int32. After the prompt's slots, all three axes have these positions.
  """
  if visual is None or visual.positions_PS3 is None:
    return positions_BT
  prompt_BS3 = visual.positions_PS3
  rest_BT3 = jnp.repeat(positions_BT[:, prompt_BS3.shape[1] :, None], 3, axis=2)
  return jnp.concatenate([prompt_BS3, rest_BT3], 1)


def further_levels(visual: Visual, dtype: str) -> jax.Array | None:
  """[K - 1, P, S, D]: what the first K - 1 layers add to the prompts' tokens. None if K is 1."""
  K = visual.features_PKND.shape[1]
  if K == 1:
    return None
  return jnp.stack([at_tokens(visual, level).astype(dtype) for level in range(1, K)])


def pictures(config: ModelConfig, visual: Visual | None, slots: int) -> jax.Array | None:
  """int32 [P, slots]: the number of each token's picture, or -1, for attention in both directions.

  Returns None if the tokens of a picture do not see later ones.
  """
  if visual is None or not config.vision.both_ways:
    return None
  missing = slots - visual.picture_PS.shape[1]
  return jnp.pad(visual.picture_PS, ((0, 0), (0, missing)), constant_values=-1)
