"""What a layer with the gated delta rule costs beside one with full attention of the same width.

  python experiments/delta.py [--tokens=1024,4096] [--repeats=5]

For each number of tokens it prints the seconds of a forward and a backward pass of the update over
one text, in turn, and the bytes that the compiled program needs beside its arguments. The layers
have the width of Qwen3.5-0.8B, and an MLP of 8 units, which costs next to nothing.
"""

import argparse
import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import model
from grpo_jax.model.config import DeltaShape

# Both have 16 heads of 128 for queries, keys and values, an output gate and projections of D.
DELTA = model.ModelConfig(
  vocab_size=256,
  embed_dim=1024,
  num_layers=1,
  num_heads=16,
  num_kv_heads=16,
  head_dim=128,
  mlp_dim=8,
  qkv_bias=False,
  output_gate=True,
  mixers=("delta",),
  delta=DeltaShape(key_heads=16, value_heads=16, key_dim=128, value_dim=128, width=4),
)
KINDS = {"delta": DELTA, "attention": dataclasses.replace(DELTA, mixers=())}


def update(config: model.ModelConfig, tokens: int) -> tuple[Any, Any]:
  """The compiled gradient of a text, and its arguments."""
  params = jax.jit(model.init, static_argnums=1)(jax.random.key(0), config)
  text_1T = jax.random.randint(jax.random.key(1), (1, tokens), 0, config.vocab_size)
  groups = model.Groups(jnp.full(1, tokens), tokens)

  def loss(params: Any) -> jax.Array:
    hidden, _ = model.group_features(params, config, text_1T, groups, remat="nothing_saveable")
    return jnp.square(hidden).sum()

  return jax.jit(jax.grad(loss)).lower(params).compile(), params


def main() -> None:
  """Times both layers at each length, and prints the ratio."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--tokens", default="1024,4096", help="tokens of the texts")
  parser.add_argument("--repeats", type=int, default=5, help="timed passes of each kind")
  flags = parser.parse_args()
  for tokens in map(int, flags.tokens.split(",")):
    passes = {kind: update(config, tokens) for kind, config in KINDS.items()}
    seconds: dict[str, list[float]] = {kind: [] for kind in passes}
    for _repeat in range(flags.repeats + 1):
      for kind, (run, params) in passes.items():
        start = time.perf_counter()
        jax.block_until_ready(run(params))
        seconds[kind].append(time.perf_counter() - start)
    for kind, (run, _) in passes.items():
      mebibytes = run.memory_analysis().temp_size_in_bytes / 2**20
      print(f"T={tokens} {kind}: {np.median(seconds[kind][1:]):.2f} s, {mebibytes:.0f} MiB")
    ratios = np.array(seconds["delta"][1:]) / np.array(seconds["attention"][1:])
    print(f"T={tokens}: the delta rule takes {np.median(ratios):.2f} times attention", flush=True)


if __name__ == "__main__":
  main()
