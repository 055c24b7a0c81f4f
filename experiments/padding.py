"""Times an update whose completions have geometric lengths against one whose are all T tokens.

  python experiments/padding.py [--tokens 128 ...]

The lengths have a mean of T / 8 and are at most T. The model is a Qwen2 decoder with random float32
weights. Prints one line of JSON: medians of five updates in seconds, their ratio, and the metric
perf/padding of both, which is computed tokens / real tokens.
"""

import argparse
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax import learner, model
from grpo_jax.algo import presets
from grpo_jax.algo.metrics import reduced
from grpo_jax.config import Learner
from grpo_jax.types import Batch, TrainState

SIZES = dict(
  d=256, layers=4, ff=1024, vocab=2048, prompts=16, group=8, plen=64, tokens=128, micro_batch=4
)


def make_batch(args: argparse.Namespace, lengths_PG: np.ndarray) -> Batch:
  """Random tokens, with as many in the loss as the lengths say."""
  rng = np.random.default_rng(0)
  P, G, S, T = args.prompts, args.group, args.plen, args.tokens
  mask_PGT = (np.arange(T) < lengths_PG[..., None]).astype(np.float32)
  return Batch(
    prompts_PS=jnp.asarray(rng.integers(0, args.vocab, (P, S)), jnp.int32),
    prompt_lengths_P=jnp.full(P, S),
    completions_PGT=jnp.asarray(rng.integers(0, args.vocab, (P, G, T)), jnp.int32),
    mask_PGT=jnp.asarray(mask_PGT),
    temperature_P=jnp.ones(P),
    advantages_PGT=jnp.asarray(rng.normal(size=(P, G, 1)) * mask_PGT, jnp.float32),
    sampler_logprobs_PGT=jnp.asarray(-4 * mask_PGT),
    ref_logprobs_PGT=jnp.asarray(-4 * mask_PGT),
  )


def measured(update: learner.Update, state: TrainState, batch: Batch) -> tuple[float, float]:
  """The median seconds of five updates after the first, which compiles, and perf/padding."""
  found = []
  for _ in range(6):
    start = time.perf_counter()
    state, metrics = jax.block_until_ready(update(state, None, None, batch))
    found.append(time.perf_counter() - start)
  return statistics.median(found[1:]), reduced(metrics)["perf/padding"]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  for name, value in SIZES.items():
    parser.add_argument(f"--{name}", type=int, default=value)
  args = parser.parse_args()
  config = model.ModelConfig(
    vocab_size=args.vocab,
    embed_dim=args.d,
    num_layers=args.layers,
    num_heads=8,
    num_kv_heads=8,
    head_dim=args.d // 8,
    mlp_dim=args.ff,
  )
  algo = presets.preset("grpo")
  objective = learner.grpo(config, algo, Learner())
  rule = learner.UpdateRule(objective, optax.adamw(1e-4), args.micro_batch)
  params = model.init(jax.random.key(0), config)
  update = learner.Update(rule, jax.default_backend())

  P, G, T = args.prompts, args.group, args.tokens
  geometric = np.minimum(np.random.default_rng(0).geometric(8 / T, (P, G)), T)
  result: dict[str, float] = {}
  for name, lengths_PG in (("full", np.full((P, G), T)), ("geometric", geometric)):
    state = learner.init_state(jax.tree.map(jnp.copy, params), rule.optimizer, algo)
    seconds, padding = measured(update, state, make_batch(args, lengths_PG))
    result |= {f"{name}_s": seconds, f"{name}_padding": padding}
  result["ratio"] = result["geometric_s"] / result["full_s"]
  print(json.dumps(result))


if __name__ == "__main__":
  main()
