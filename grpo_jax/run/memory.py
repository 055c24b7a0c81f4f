"""Counts the bytes on a device in each phase of a run.

`Held` counts arrays that stay there between programs. The rest of this module estimates what a
program adds while it runs. `python -m grpo_jax.plan` prints the numbers of `Held`, and the
compiler's numbers instead of the estimates.
"""

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax import model
from grpo_jax.config import Config
from grpo_jax.learner.features import completion_features
from grpo_jax.learner.token_stats import default_chunk
from grpo_jax.parallel.mesh import CONTEXT
from grpo_jax.sampler.filters import changes_draws
from grpo_jax.sampler.programs import most_rewound
from grpo_jax.sampler.sampling import longest_chunk, sizes_up_to
from grpo_jax.sampler.seats import Grid, first_grid
from grpo_jax.sampler.weights import SamplingWeights
from grpo_jax.types import Batch, Images, TrainState, Visual

# Without the decoding kernel, a TPU holds the cache of prompts a second time, in another layout.
_PROMPT_COPIES_ON_TPU = 2.0
# While the cache of rows grows to twice the slots, the old keys and values exist beside the new.
_OLD_SLOTS_SHARE = 0.5
# A sampler may hold logits twice, with temperature and without; with filters, filtered logits and
# their probabilities, too.
_LOGITS_COPIES, _LOGITS_COPIES_OF_FILTERS = 2, 4
# A chunk in an update has logits and gradients. A CPU also stores probabilities and gradients.
_CHUNK_COPIES, _CHUNK_COPIES_ON_CPU = 2, 4


@dataclasses.dataclass(frozen=True, eq=False)
class Held:
  """The arrays that a run holds on one device between programs.

  Attributes:
    config: The config of the run.
    shape: The model on the mesh.
    state: Shapes and shardings of the train state.
    base: Shapes and shardings of the frozen base, or None.
    reference: Shapes and shardings of a reference copy of the trained parameters, or None.
    weights: How the sampler reads the parameters.
    encodes_first: Whether images are encoded before their prompts are sampled.
    most_images: `PromptSet.most_images` of the training prompts, or None if they are not counted.
  """

  config: Config
  shape: model.ModelConfig
  state: TrainState
  base: Any
  reference: Any
  weights: SamplingWeights
  encodes_first: bool
  most_images: tuple[int, int] | None = None

  @functools.cached_property
  def learning(self) -> dict[str, float]:
    """The bytes of a learner's device, by kind, during updates and passes without gradients."""
    weights = device_bytes(self.state.params)
    held = {
      "weights": weights,
      "moments": device_bytes(self.state) - weights,
      "frozen base": device_bytes(self.base),
      "reference": device_bytes(self.reference),
    }
    if self.encodes_first:  # for batches that were sampled ahead
      held["visual tokens"] = self.config.rollout.max_staleness * self._visual_tokens
    if not self.weights.is_apart:  # devices that also sample keep this copy while they learn
      held["base for sampling"] = self._copy_bytes(self.base)
    return held

  @property
  def warm_start(self) -> dict[str, float]:
    """The bytes of a device, by kind, in the warm start, before most references are made."""
    has_reference = self.config.algo.ref_sync_steps > 0
    return self.learning if has_reference else self.learning | {"reference": 0.0}

  @functools.cached_property
  def sampling(self) -> dict[str, float]:
    """The bytes of a sampling device, by kind, in training and in evaluation."""
    copy = self._copy_bytes(self.state.params)
    if not self.weights.is_apart:
      return self.learning | {"sampling copy": copy}
    return {
      "base for sampling": self._copy_bytes(self.base),
      "sampling copy": copy,
      "other versions": (self.config.sampling_copies - 1) * copy,
    }

  @property
  def sampled(self) -> tuple[str, str]:
    """The kinds in `sampling` that the sampler reads: for the trained parameters, for the base."""
    held = self.sampling
    has_own_base = held["base for sampling"] or "frozen base" not in held
    return (
      "sampling copy" if held["sampling copy"] else "weights",
      "base for sampling" if has_own_base else "frozen base",
    )

  @property
  def gradients(self) -> float:
    """The bytes of the sum of gradients, which exists during an update."""
    return device_bytes(self.state.params)

  @property
  def waiting(self) -> float:
    """The bytes of a batch's visual tokens, which wait for the update while it is sampled."""
    return self._visual_tokens if self.encodes_first else 0.0

  @property
  def in_update(self) -> float:
    """The bytes of a device in an update, without activations."""
    return sum(self.learning.values()) + self.gradients + self._visual_tokens

  @property
  def in_sampling(self) -> float:
    """The bytes of a device while a batch is sampled, without the cache and logits."""
    return sum(self.sampling.values()) + self.waiting

  @property
  def _visual_tokens(self) -> float:
    policy = model.join(self.base, self.state.params)
    return visual_bytes(self.config, self.shape, policy, self.most_images)

  def _copy_bytes(self, params: Any) -> float:
    """The bytes of the sampler's copy of parameters. 0 if the sampler reads them without a copy."""
    copy = None if params is None else self.weights.abstract(params)
    return 0.0 if copy is params else device_bytes(copy)


def device_bytes(tree: Any) -> float:
  """The bytes of a tree of shapes and shardings on one device."""
  leaves = jax.tree.leaves(tree)
  return sum(1.0 * math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def sampler_bytes(
  config: Config,
  shape: model.ModelConfig,
  rows: int | None = None,
  call: tuple[int, int] | None = None,
) -> float:
  """Estimates the bytes of keys, values and logits on one device while a batch is sampled.

  Args:
    config: The config of the run.
    shape: The model on the sampler's mesh.
    rows: The maximum number of rows in flight, 0 for all. None means sampling.rows.
    call: (prompts, completions of each). None means the largest call of `sampler_calls`.
  """
  S, T = config.data.max_prompt_tokens, config.sampling.max_tokens
  dtype, cache_dtype = config.sampling.dtype or shape.dtype, config.sampling.cache_dtype
  shape = dataclasses.replace(shape, dtype=dtype, cache_dtype=cache_dtype)
  slots = sizes_up_to(T, model.slots_step(shape))[-1]
  # A row may be rewound by this number of slots, which layers with a window keep in addition.
  rewind = most_rewound(longest_chunk(T))
  # cache.place: the bytes for a prompt. cache.row: the bytes for a completion.
  cache = model.cache_bytes(shape, S, slots, rewind)
  # Without the decoding kernel, a TPU copies the cache to another layout.
  is_copied = shape.platform == "tpu" and model.slots_step(shape) == shape.slot_shards
  of_prompts, grown = (_PROMPT_COPIES_ON_TPU, _OLD_SLOTS_SHARE) if is_copied else (1.0, 0.0)
  if is_copied and shape.slot_shards > 1:  # it never grows, but the whole of it was copied (LOG.md)
    grown = 1.0
  copies = _LOGITS_COPIES_OF_FILTERS if changes_draws(config.sampling) else _LOGITS_COPIES
  logits = copies * shape.vocab_size / shape.rows.mesh.shape["tensor"] * 4  # float32
  rows = config.sampling.rows if rows is None else rows
  calls = sampler_calls(config) if call is None else [call]
  # The first grid of a call is the largest: rows only ever move to smaller grids. If groups follow
  # without end, each row has a place and a copy of its prompt (see `Sampler.pace`).
  grids = [first_grid(*call, rows, shape.row_shards) for call in calls]
  of_training = config.batch.prompts, config.batch.group_size
  if config.rollout.weights == "in_flight":
    grids = [
      Grid(grid.rows, 1) if call == of_training else grid
      for grid, call in zip(grids, calls, strict=True)
    ]
  of_images = _image_bytes(config, shape, 2.0 if dtype == "bfloat16" else 4.0)
  sizes = [
    grid.places * of_prompts * cache.place
    + min(grid.places, prompts) * of_images
    + grid.rows * (cache.row + max(grown * cache.row, logits))  # no logits exist while it grows
    for grid, (prompts, _) in zip(grids, calls, strict=True)
  ]
  return max(sizes) / shape.row_shards


def images_of(
  config: Config, shape: model.ModelConfig, prompts: int, most: tuple[int, int] | None = None
) -> Images | None:
  """The shapes of the largest images that prompts can have. None without a vision tower or images.

  Args:
    config: The config of the run.
    shape: The model.
    prompts: The number of prompts.
    most: `PromptSet.most_images`. None if unknown: then one image fills the whole prompt.
  """
  S, v = config.data.max_prompt_tokens, shape.vision
  pictures, tokens = most or (1, S)
  if v is None or not pictures:
    return None
  array = jax.ShapeDtypeStruct
  patches = tokens * v.merge**2  # the tower merges squares of patches to visual tokens
  axes, next_P = array((prompts, S, 3), jnp.int32), array((prompts,), jnp.int32)
  return Images(
    patches_PINC=array((prompts, pictures, patches, math.prod(v.patch)), jnp.float32),
    places_PIN2=array((prompts, pictures, patches, 2), jnp.int32),
    seen_PS2=array((prompts, S, 2), jnp.int32),
    positions_PS3=axes if shape.has_axes else None,
    next_P=next_P if shape.has_axes else None,
  )


def visual_of(
  config: Config,
  shape: model.ModelConfig,
  params: Any,
  prompts: int,
  most: tuple[int, int] | None = None,
) -> Visual | None:
  """The shapes of the visual tokens of `images_of`, or None.

  Args:
    config: The config of the run.
    shape: The model.
    params: The shapes of all parameters of the model.
    prompts: The number of prompts.
    most: As for `images_of`.
  """
  images = images_of(config, shape, prompts, most)
  if images is None:
    return None
  # The shapes do not depend on the mesh, whose row shards need not divide `prompts`.
  shape = dataclasses.replace(shape, rows=None)
  return jax.eval_shape(lambda params, images: model.encode(params, shape, images), params, images)


def visual_bytes(
  config: Config, shape: model.ModelConfig, params: Any, most: tuple[int, int] | None = None
) -> float:
  """The bytes of a batch's visual tokens on one device. 0 without a frozen vision tower.

  `params` are the shapes of all parameters, and `most` is `PromptSet.most_images` or None.
  """
  if not shape.has_frozen_tower:
    return 0.0
  visual = visual_of(config, shape, params, config.batch.prompts, most)
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(visual)) / shape.row_shards


def _image_bytes(config: Config, shape: model.ModelConfig, item: float) -> float:
  """The bytes of a prompt's images while it is sampled: pixels, and features for the decoder."""
  if shape.vision is None:
    return 0.0
  images = images_of(config, shape, 1)
  levels = 1 + len(shape.vision.level_layers)
  tokens = config.data.max_prompt_tokens
  return 4.0 * math.prod(images.patches_PINC.shape) + item * levels * tokens * shape.embed_dim


def sampler_calls(config: Config) -> list[tuple[int, int]]:
  """(prompts, completions of each) of the sampler's calls, in training and in evaluation."""
  calls = [(config.batch.prompts, config.batch.group_size)]
  if config.eval.every:
    calls.append((config.eval.batch, max(1, config.eval.samples)))
  return calls


def activation_bytes(
  config: Config,
  shape: model.ModelConfig,
  params: Any,
  most: tuple[int, int] | None = None,
) -> Callable[[int], float]:
  """Estimates activations. Returns a function: (prompts of a device) -> bytes, besides `Held`.

  With a mesh axis `context`, a device computes only a part of the tokens of these prompts.
  `params` are the shapes of all parameters, and `most` is `PromptSet.most_images` or None.
  """
  split = shape.rows.mesh.shape["tensor"]
  everything = _kept_bytes(config, shape, params, split, "", most)
  kept = everything
  if config.learner.remat:
    saved = config.learner.saved_activations
    kept = _kept_bytes(config, shape, params, split, saved, most)
  # The backward pass recomputes one layer at a time, which counts three times: its arrays, arrays
  # that are never kept, such as scores, and gradients, each assumed to be as large.
  per_prompt = kept + 3 * everything / shape.num_layers
  chunk = config.learner.logprob_chunk or default_chunk(shape.vocab_size, shape.platform)
  copies = _CHUNK_COPIES_ON_CPU if shape.platform == "cpu" else _CHUNK_COPIES
  per_token = copies * shape.vocab_size * 4 / split
  tokens = config.rows_per_prompt * config.sampling.max_tokens // shape.context
  gathered = _gathered_head_bytes(config, shape, params)

  def needed(prompts: int) -> float:
    # A chunk has at least one token of each prompt, and at most all tokens.
    in_chunk = min(max(chunk, prompts), prompts * tokens)
    return prompts * per_prompt + in_chunk * per_token + gathered

  return needed


def _gathered_head_bytes(config: Config, shape: model.ModelConfig, params: Any) -> float:
  """The bytes of the heads that a device has gathered, and of the gradient of a trained one.

  What the device holds of them all the time is not counted (see `learner.token_stats`).
  """
  mesh = shape.rows.mesh
  parts = mesh.shape["fsdp"] * mesh.shape.get(CONTEXT, 1)
  head = params["head"]["kernel"] if "head" in params else params["embed"]["embedding"]
  item = head.dtype.itemsize
  if not config.lora.rank:
    item += 4  # its gradient is float32
    if config.algo.needs_full_kl:
      item += head.dtype.itemsize  # the reference's head
  split = mesh.shape["tensor"] if shape.vocab_size % mesh.shape["tensor"] == 0 else 1
  return (1 - 1 / parts) * item * head.size / split


def _kept_bytes(
  config: Config,
  shape: model.ModelConfig,
  params: Any,
  split: int,
  remat: str,
  most: tuple[int, int] | None,
) -> float:
  """The bytes of activations that are kept for one prompt and its completions, by JAX's count.

  Args:
    config: The config of the run.
    shape: The model on the mesh.
    params: The shapes and dtypes of all parameters of the policy.
    split: Over how many devices a layer's heads and hidden units are split.
    remat: The activations that a layer keeps (see `completion_features`).
    most: As for `images_of`.
  """
  S, G, T = config.data.max_prompt_tokens, config.rows_per_prompt, config.sampling.max_tokens
  lanes = 128 if shape.platform == "tpu" else 1  # a TPU pads the last axis of every array

  def on_one_device(x: jax.ShapeDtypeStruct) -> float:
    last = x.shape[-1] if x.shape else 1
    padded = math.prod(x.shape[:-1]) * -(-last // lanes) * lanes * x.dtype.itemsize
    # Each device has whole features of a token. Heads and hidden units are split.
    return padded if last == shape.embed_dim else padded / split

  def kept(compute: Callable[[model.Params, Any], jax.Array], inputs: Any) -> float:
    def backward(params: model.Params, inputs: Any) -> Any:
      return jax.vjp(lambda params: compute(params, inputs), params)[1]

    arrays = jax.tree.leaves(jax.eval_shape(backward, params, inputs))
    return sum(on_one_device(x) for x in arrays)

  def of_all(prompts: int) -> float:
    is_frozen = shape.has_frozen_tower
    batch = Batch(
      images=None if is_frozen else images_of(config, shape, prompts, most),
      visual=visual_of(config, shape, params, prompts, most) if is_frozen else None,
      prompts_PS=jax.ShapeDtypeStruct((prompts, S), jnp.int32),
      prompt_lengths_P=jax.ShapeDtypeStruct((prompts,), jnp.int32),
      completions_PGT=jax.ShapeDtypeStruct((prompts, G, T), jnp.int32),
      mask_PGT=jax.ShapeDtypeStruct((prompts, G, T), jnp.float32),
    )
    return kept(lambda params, batch: completion_features(params, shape, batch, remat)[0], batch)

  def of_tower(prompts: int) -> float:
    images = images_of(config, shape, prompts, most)
    if images is None or shape.has_frozen_tower:  # a frozen tower keeps nothing for backward
      return 0.0
    encode = functools.partial(model.encode, config=shape, remat=remat)
    return kept(lambda params, images: encode(params, images=images).features_PKND, images)

  # The difference between two and one prompts per device leaves out the parameters.
  one, two = shape.row_shards, 2 * shape.row_shards
  tower = of_tower(two) - of_tower(one)
  decoder = of_all(two) - of_all(one) - tower
  if remat == model.OFFLOAD:  # what JAX counts are the inputs of layers, which the host keeps
    tokens = shape.row_shards * shape.num_layers * (S + G * T)
    decoder -= tokens * shape.embed_dim * jnp.dtype(shape.dtype).itemsize
  # With an axis `context`, only the decoder's tokens are split, not the images of the tower.
  return (decoder / shape.context + tower) / shape.row_shards
