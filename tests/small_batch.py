"""Random batches and parameters of small models, which tests of the learner share."""

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import model
from grpo_jax.types import Batch, Images


def make_batch(lengths_PG, prompt_tokens, tokens, slots=0, seed=0):
  """A batch whose completions have these lengths, without advantages."""
  rng = np.random.default_rng(seed)
  lengths_PG = np.asarray(lengths_PG)
  prompts, group = lengths_PG.shape
  mask = np.arange(tokens) < lengths_PG[..., None]
  return Batch(
    prompts_PS=jnp.asarray(rng.integers(0, 31, (prompts, prompt_tokens)), jnp.int32),
    prompt_lengths_P=jnp.asarray(rng.integers(1, prompt_tokens + 1, prompts), jnp.int32),
    completions_PGT=jnp.asarray(rng.integers(0, 31, (prompts, group, tokens)), jnp.int32),
    mask_PGT=jnp.asarray(mask, jnp.float32),
    temperature_P=jnp.linspace(0.5, 1.5, prompts),
    slots=slots,
  )


def params_of(config, mean):
  """Parameters around this mean, which no layer leaves as they are."""
  shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), config))
  rng = np.random.default_rng(1)
  return jax.tree.map(lambda x: jnp.asarray(rng.normal(mean, 0.3, x.shape), jnp.float32), shapes)


def images_of(expected):
  """The images of prompts in an expected.npz of golden/vision."""
  return Images(
    patches_PINC=jnp.asarray(expected["patches"]),
    places_PIN2=jnp.asarray(expected["places"]),
    seen_PS2=jnp.asarray(expected["seen"]),
    positions_PS3=jnp.asarray(expected["positions"]) if "positions" in expected else None,
    next_P=jnp.asarray(expected["next"]) if "next" in expected else None,
  )
