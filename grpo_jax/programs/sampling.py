"""The sampler wired to the model: one function from prompts to completions."""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from grpo_jax import model
from grpo_jax.config import Sampling
from grpo_jax.sampler.decode import Rows, capacities, decode, row_uniforms
from grpo_jax.sampler.logits import Decoding
from grpo_jax.types import Completions

# sampling.temperature_schedule: (first, last, how many steps later) -> the temperature of a step.
TEMPERATURES: dict[str, Callable[[float, float, int], optax.Schedule]] = {
  "constant": lambda first, last, steps: optax.constant_schedule(first),
  "linear": optax.linear_schedule,
  "cosine": lambda first, last, steps: optax.cosine_decay_schedule(first, steps, last / first),
}
# sample(params, prompts_PS, prompt_lengths_P, key, temperature_P, first_prompt) -> Completions
Sampler = Callable[..., Completions]


def decoding_of(sampling: Sampling, stop_ids: tuple[int, ...], greedy: bool = False) -> Decoding:
  """The sampler's options from a config, with the model's own stop ids before the config's."""
  return Decoding(
    max_tokens=sampling.max_tokens,
    stop_ids=tuple(dict.fromkeys((*stop_ids, *sampling.stop_ids))),
    top_k=sampling.top_k,
    top_p=sampling.top_p,
    min_p=sampling.min_p,
    greedy=greedy,
  )


def make_sampler(config: model.ModelConfig, decoding: Decoding, group_size: int) -> Sampler:
  """A pure function that samples `group_size` completions of each prompt.

  Its arguments are (params, prompts_PS, prompt_lengths_P, key, temperature_P, first_prompt=0). A
  prompt is computed once per group. Completion [p, g] is drawn with
  fold_in(key, (first_prompt + p) * G + g), so it does not depend on the rest of the batch.

  Args:
    config: The model, in the dtype of sampling.
    decoding: Filters, stop ids and the longest completion.
    group_size: G.
  """

  def sample(
    params: model.Params,
    prompts_PS: jax.Array,
    prompt_lengths_P: jax.Array,
    key: jax.Array,
    temperature_P: jax.Array,
    first_prompt: jax.Array | int = 0,
  ) -> Completions:
    P, S = prompts_PS.shape
    rows_config = dataclasses.replace(config, length=S + decoding.max_tokens)
    positions_PS = jnp.broadcast_to(jnp.arange(S), prompts_PS.shape)
    hidden_PSD, cache = model.features(params, rows_config, prompts_PS, positions_PS)
    last_token_P = prompt_lengths_P - 1
    last_PD = jnp.take_along_axis(hidden_PSD, last_token_P[:, None, None], axis=1)[:, 0]
    logits_PV = model.unembed(params, rows_config, last_PD)
    prefix = model.as_prefix(cache, prompt_lengths_P)
    lengths_B = jnp.repeat(prompt_lengths_P, group_size)

    def step(cache: model.Cache, token_B: jax.Array, time: jax.Array) -> tuple[jax.Array, Any]:
      positions_B1 = (lengths_B + time)[:, None]
      logits_B1V, cache = model.forward(params, rows_config, token_B[:, None], positions_B1, cache)
      return logits_B1V[:, 0], cache

    rows_B = first_prompt * group_size + jnp.arange(P * group_size)
    rows = Rows(
      logits_BV=jnp.repeat(logits_PV, group_size, axis=0),
      uniforms_BTN=row_uniforms(key, rows_B, decoding.max_tokens, logits_PV.shape[-1]),
      temperature_B=jnp.repeat(temperature_P, group_size),
    )
    slots = 0 if config.unrolled else decoding.max_tokens
    capacity = capacities(decoding.max_tokens)[0]
    empty = model.empty_cache(rows_config, prefix, group_size, capacity=capacity, slots=slots)
    return decode(step, model.grow_cache, empty, rows, decoding, group_size)

  return sample


def temperature_at(sampling: Sampling, index: int, steps: int) -> float:
  """The sampling temperature of GRPO step `index`, from 0, in a run of `steps` GRPO steps."""
  make_schedule = TEMPERATURES[sampling.temperature_schedule]
  schedule = make_schedule(sampling.temperature, sampling.temperature_end, max(1, steps - 1))
  return float(schedule(index))
