"""Times the choices that were made for deep models on a CPU.

  python experiments/cpu_choices.py products                 # bfloat16 with a float32 result
  python experiments/cpu_choices.py filters                  # top-k and top-p, and by a sort
  python experiments/cpu_choices.py layers --model=FOLDER    # sampling from stacks or single layers
  python experiments/cpu_choices.py gradient --model=FOLDER  # and how many logits exist at once

Each line is the smallest time of three calls, after one that is not counted.
"""

import argparse
from collections.abc import Callable
import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import learner, model
from grpo_jax.algo import presets
from grpo_jax.config import Learner
from grpo_jax.sampler.logits import Decoding, RowSettings, filtered
from grpo_jax.sampler.sampling import Draws, Sampler, whole
from grpo_jax.types import Batch, Coefficients

PROMPT_TOKENS, GROUP = 128, 8
# Rows, inputs, outputs: the products of SmolLM2-135M's MLP for a group of 1,152 tokens.
PRODUCTS = ((1152, 576, 1536), (1152, 1536, 576), (128, 576, 1536), (2048, 2048, 2048))

FILTERED = ((128, 49_152), (8, 151_936), (256, 512))  # rows and vocabulary


def compiled(function: Callable[..., Any], *args: Any) -> tuple[Callable[..., Any], float]:
  """The compiled function, and the seconds that tracing and compiling took."""
  start = time.perf_counter()
  program = jax.jit(function).lower(*args).compile()
  return program, time.perf_counter() - start


def seconds(program: Callable[..., Any], *args: Any) -> float:
  """The smallest time of three calls, after one that is not counted."""
  jax.block_until_ready(program(*args))
  times = []
  for _ in range(3):
    start = time.perf_counter()
    jax.block_until_ready(program(*args))
    times.append(time.perf_counter() - start)
  return min(times)


def products() -> None:
  for rows, inputs, outputs in PRODUCTS:
    for dtype, result in (("float32",) * 2, ("bfloat16",) * 2, ("bfloat16", "float32")):
      x, y = jnp.ones((rows, inputs), dtype), jnp.ones((inputs, outputs), dtype)

      def product(x: jax.Array, y: jax.Array, result: str = result) -> jax.Array:
        return jnp.matmul(x, y, preferred_element_type=result).astype(x.dtype)

      program, _ = compiled(product, x, y)
      rate = 2 * rows * inputs * outputs / seconds(program, x, y) / 1e9
      print(f"{rows} x {inputs} x {outputs}, {dtype} into {result}: {rate:.0f} GFLOP/s", flush=True)


def filters() -> None:
  def sorted_top_k(logits_BV: jax.Array, settings: RowSettings) -> jax.Array:
    least_B1 = jax.lax.top_k(logits_BV, int(settings.top_k[0]))[0][:, -1:]
    return jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)

  def sorted_top_p(logits_BV: jax.Array, settings: RowSettings) -> jax.Array:
    sorted_BV = -jnp.sort(-logits_BV, axis=-1)
    probs_BV = jax.nn.softmax(sorted_BV, axis=-1)
    before_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV
    kept_BV = jnp.where(before_BV < settings.top_p[:, None], sorted_BV, jnp.inf)
    return jnp.where(logits_BV < kept_BV.min(-1, keepdims=True), -jnp.inf, logits_BV)

  for rows, vocabulary in FILTERED:
    logits_BV = 3 * jax.random.normal(jax.random.key(0), (rows, vocabulary))
    for name, settings, by_sort in (
      ("top-k 50", RowSettings(top_k=np.full(rows, 50)), sorted_top_k),
      ("top-p 0.9", RowSettings(top_p=np.full(rows, 0.9, np.float32)), sorted_top_p),
    ):
      ours, _ = compiled(lambda x, settings=settings: filtered(x, settings), logits_BV)
      theirs, _ = compiled(lambda x, f=by_sort, settings=settings: f(x, settings), logits_BV)
      same = (ours(logits_BV) == theirs(logits_BV)).mean()
      print(
        f"{name}, {rows} rows of {vocabulary} logits: {seconds(ours, logits_BV) * 1e3:.1f} ms,"
        f" {seconds(theirs, logits_BV) * 1e3:.1f} ms by a sort; {same:.7f} of the results are"
        " equal",
        flush=True,
      )


def layers(folder: str, tokens: int, prompts: int) -> None:
  stacked = model.load_config(folder)
  params = model.load(folder)[1]
  prompts_PS = np.ones((prompts, PROMPT_TOKENS), np.int32)
  rest = prompts_PS, np.full(prompts, PROMPT_TOKENS), GROUP, Draws(jax.random.key(0))
  for unrolled in (True, False):
    config = dataclasses.replace(stacked, unrolled=unrolled)
    weights = model.unrolled(params, stacked) if unrolled else params
    sampler = Sampler(config, Decoding(max_tokens=tokens))

    def sample(sampler: Sampler = sampler, weights: Any = weights) -> Any:
      return whole(sampler(weights, *rest))

    start = time.perf_counter()
    sample()
    compiling = time.perf_counter() - start
    took = seconds(sample)
    compiling -= took
    name = "single layers" if unrolled else "stacks"
    print(
      f"{name}, {prompts * GROUP} rows of {tokens} tokens: compiling {compiling:.1f} s,"
      f" sampling {took:.2f} s",
      flush=True,
    )


def gradient(folder: str, tokens: int, dtype: str, remat: bool, chunks: list[int]) -> None:
  config, params = model.load(folder)
  config = dataclasses.replace(config, dtype=dtype)
  rng = np.random.default_rng(0)
  shape = 1, GROUP, tokens
  batch = Batch(
    prompts_PS=jnp.ones((1, PROMPT_TOKENS), jnp.int32),
    prompt_lengths_P=jnp.full(1, PROMPT_TOKENS),
    completions_PGT=jnp.asarray(rng.integers(0, config.vocab_size, shape), jnp.int32),
    mask_PGT=jnp.ones(shape),
    temperature_P=jnp.ones(1),
    advantages_PGT=jnp.broadcast_to(jnp.asarray(rng.normal(size=(1, GROUP, 1))), shape),
    sampler_logprobs_PGT=jnp.zeros(shape),
    slots=0,
  )
  algo = dataclasses.replace(presets.preset("grpo"), kl_coef=0.0)
  for chunk in chunks:
    settings = Learner(logprob_chunk=chunk, remat=remat)
    objective = learner.grpo(config, algo, settings)
    options = learner.StatsOptions(config, settings)

    def logprobs(params: Any, options: learner.StatsOptions = options) -> jax.Array:
      return learner.batch_stats(params, None, batch, options).logprobs_PGT

    def loss(params: Any, objective: learner.Objective = objective) -> jax.Array:
      of_batch = objective.totals(batch, Coefficients(kl=jnp.zeros(()), entropy=jnp.zeros(())))
      return objective.part_loss(params, None, batch, of_batch)[0]

    forward, _ = compiled(logprobs, params)
    backward, _ = compiled(jax.grad(loss), params)
    print(
      f"{dtype}, remat={remat}, logits of {chunk} tokens at once: log-probs of"
      f" {PROMPT_TOKENS + GROUP * tokens} tokens {seconds(forward, params):.2f} s, gradient"
      f" {seconds(backward, params):.2f} s",
      flush=True,
    )


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("what", choices=("products", "filters", "layers", "gradient"))
  parser.add_argument("--model", help="a Hugging Face folder or a GGUF file")
  parser.add_argument("--tokens", type=int, default=128, help="of each completion")
  parser.add_argument("--prompts", type=int, default=16, help="of 8 completions each, for layers")
  parser.add_argument("--dtype", default="float32", help="for gradient")
  parser.add_argument("--remat", action="store_true", help="for gradient")
  parser.add_argument("--chunks", type=int, nargs="*", default=[341], help="for gradient")
  args = parser.parse_args()
  if args.what == "products":
    products()
  elif args.what == "filters":
    filters()
  elif args.what == "layers":
    layers(args.model, args.tokens, args.prompts)
  else:
    gradient(args.model, args.tokens, args.dtype, args.remat, args.chunks)


if __name__ == "__main__":
  main()
