"""What rings of slots save in layers with a window, against slots for every token.

python experiments/rings.py bytes  # the cache of published shapes, from shapes alone
python experiments/rings.py time   # sampling with a small model, in turn
"""

import argparse
from collections.abc import Iterator
import contextlib
import functools
import time
from typing import Any
from unittest import mock

import jax
import numpy as np

from grpo_jax import model
from grpo_jax.model import cache as model_cache
from grpo_jax.sampler.logits import Decoding, RowSettings
from grpo_jax.sampler.sampling import Draws, Sampler
from grpo_jax.sampler.seats import Grid
from grpo_jax.sampler.stream import by_row

PROMPTS, MEMBERS, PROMPT_TOKENS, TOKENS = 8, 8, 1024, 8192
# What a cache depends on. Other sizes are small.
_SMALL: dict[str, Any] = dict(vocab_size=256, embed_dim=64, mlp_dim=64, dtype="bfloat16")
SHAPES = {
  "Gemma 3 4B, a window of 1,024 in 5 of 6 layers": model.ModelConfig(
    **_SMALL,
    num_layers=34,
    num_heads=8,
    num_kv_heads=4,
    head_dim=256,
    windows=tuple(0 if layer % 6 == 5 else 1024 for layer in range(34)),
  ),
  "gpt-oss-20b, a window of 128 in every other layer": model.ModelConfig(
    **_SMALL,
    num_layers=24,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    windows=(128, 0) * 12,
  ),
}
# A window in 5 of 6 layers.
TIMED = model.ModelConfig(
  vocab_size=512,
  embed_dim=128,
  num_layers=6,
  num_heads=4,
  num_kv_heads=4,
  head_dim=32,
  mlp_dim=256,
  windows=(32, 32, 32, 32, 32, 0),
)


@contextlib.contextmanager
def without_rings() -> Iterator[None]:
  """Layers with a window have a slot for every token of prompts and completions."""
  every_slot = mock.patch.object(model_cache, "ring_slots", lambda _, __, slots, ___: slots)
  whole_prompts = mock.patch.object(model, "within_windows", lambda _, prefix, __: prefix)
  with every_slot, whole_prompts:
    yield


def cache_bytes(config: model.ModelConfig) -> tuple[int, int]:
  """The bytes of the prompts' part and of the rows' own part."""
  params = jax.eval_shape(functools.partial(model.init, config=config), jax.random.key(0))
  programs = Sampler(config, Decoding(max_tokens=TOKENS)).programs
  settings = by_row(RowSettings(), PROMPTS, MEMBERS)
  flight = programs.abstract(Grid(PROMPTS, MEMBERS), TOKENS, params, PROMPT_TOKENS, settings)
  parts = flight.cache.prefix, flight.cache.replace(prefix=None)
  sizes = [sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(part)) for part in parts]
  return sizes[0], sizes[1]


def all_bytes() -> None:
  for name, config in SHAPES.items():
    with without_rings():
      before = cache_bytes(config)
    for part, whole, rings in zip(("prompts", "completions"), before, cache_bytes(config)):
      print(f"{name}, {part}: {whole / 1e9:.3f} GB, {rings / 1e9:.3f} GB: {whole / rings:.2f}x")


def seconds_per_round(sampler: Sampler, params: model.Params, rows: int, tokens: int) -> float:
  """Of a call whose rows all have as many tokens."""
  prompts_PS = np.random.default_rng(0).integers(2, 500, (rows // MEMBERS, 64)).astype(np.int32)
  lengths_P = np.full(len(prompts_PS), 64, np.int32)
  start = time.perf_counter()
  for _ in sampler(params, prompts_PS, lengths_P, MEMBERS, Draws(jax.random.key(0))):
    pass
  return (time.perf_counter() - start) / tokens


def all_times(rows: int, tokens: int, rounds: int) -> None:
  params = jax.jit(model.init, static_argnums=1)(jax.random.key(0), TIMED)
  samplers = [Sampler(TIMED, Decoding(max_tokens=tokens)) for _ in range(2)]
  with without_rings():
    seconds_per_round(samplers[0], params, rows, tokens)  # compiles
  seconds_per_round(samplers[1], params, rows, tokens)
  for _ in range(rounds):
    whole, rings = (seconds_per_round(x, params, rows, tokens) for x in samplers)
    print(f"{1e3 * whole:.2f} ms a round, {1e3 * rings:.2f} ms: {whole / rings:.2f}x", flush=True)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("what", choices=("bytes", "time"))
  parser.add_argument("--rows", type=int, default=32, help="decoded together, for time")
  parser.add_argument("--tokens", type=int, default=512, help="of each completion, for time")
  parser.add_argument("--rounds", type=int, default=3, help="how often to measure, for time")
  args = parser.parse_args()
  all_bytes() if args.what == "bytes" else all_times(args.rows, args.tokens, args.rounds)


if __name__ == "__main__":
  main()
