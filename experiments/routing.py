"""How often sampler and learner route a token to different experts, with and without replay.

A mixture of random weights samples completions, and the learner computes their log-probs in one
pass. For float32 and bfloat16 it prints

  differs        the share of (completion token, sparse layer) whose experts differ
  gap mean, max  of the log-probs of sampler and learner

once with the learner's own routing and once with the sampler's, which is learner.router_replay.
With it, `differs` counts the experts that the learner's routers would have chosen.

    python experiments/routing.py
"""

import argparse
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import learner, model
from grpo_jax.config import Learner
from grpo_jax.learner.features import completion_features
from grpo_jax.sampler.logits import Decoding
from grpo_jax.sampler.sampling import Draws, Sampler, whole
from grpo_jax.types import Batch, Completions

PROMPTS, MEMBERS, PROMPT_TOKENS = 8, 8, 16


def mixture(layers: int, experts: int, used: int) -> model.ModelConfig:
  """The shape of Qwen3-MoE, small."""
  return model.ModelConfig(
    vocab_size=512,
    embed_dim=128,
    num_layers=layers,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    mlp_dim=128,
    family="qwen3_moe",
    qkv_bias=False,
    qk_norm="head",
    num_experts=experts,
    experts_per_token=used,
    expert_dim=64,
    normalise_shares=True,
    sparse_layers=tuple(range(layers)),
  )


def to_batch(found: Completions, prompts_PS: np.ndarray, lengths_P: np.ndarray) -> Batch:
  """The batch of completions, with their experts."""
  return Batch(
    prompts_PS=jnp.asarray(prompts_PS),
    prompt_lengths_P=jnp.asarray(lengths_P),
    completions_PGT=jnp.asarray(found.tokens_PGT),
    mask_PGT=jnp.asarray(found.sampled_PGT, jnp.float32),
    temperature_P=jnp.ones(len(lengths_P)),
    experts_PGTY=jnp.asarray(found.experts_PGTY),
    prompt_experts_PSY=jnp.asarray(found.prompt_experts_PSY),
  )


def main() -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--layers", type=int, default=8)
  parser.add_argument("--experts", type=int, default=64)
  parser.add_argument("--used", type=int, default=8)
  parser.add_argument("--tokens", type=int, default=128)
  args = parser.parse_args()
  shape = mixture(args.layers, args.experts, args.used)
  params = jax.jit(model.init, static_argnums=1)(jax.random.key(0), shape)
  rng = np.random.default_rng(0)
  prompts_PS = rng.integers(0, 512, (PROMPTS, PROMPT_TOKENS)).astype(np.int32)
  lengths_P = rng.integers(4, PROMPT_TOKENS + 1, PROMPTS).astype(np.int32)
  print(f"{shape.num_layers} layers, {args.used} of {args.experts} experts, {args.tokens} tokens")
  for dtype in ("float32", "bfloat16"):
    jax.config.update("jax_default_matmul_precision", "float32" if dtype == "float32" else None)
    config = dataclasses.replace(shape, dtype=dtype)
    sampler = Sampler(dataclasses.replace(config, keeps_experts=True), Decoding(args.tokens))
    draws = Draws(jax.random.key(1))
    found = whole(sampler(params, prompts_PS, lengths_P, MEMBERS, draws))
    batch = to_batch(found, prompts_PS, lengths_P)
    options = learner.StatsOptions(config, Learner())
    stats = jax.jit(functools.partial(learner.batch_stats, options=options))
    for replays in (False, True):
      features = functools.partial(completion_features, config=config, replays=replays)
      routing = jax.jit(lambda p, b, f=features: f(p, batch=b)[1])(params, batch)
      differs = routing.differs_BL.sum() / routing.compared_BL.sum()
      used = batch if replays else batch.without_experts()
      gap = np.abs(stats(params, None, used).logprobs_PGT - found.logprobs_PGT)
      how = "replayed" if replays else "by itself"
      print(
        f"{dtype:9} {how:9} differs {float(differs):.5f}"
        f"  gap mean {gap[found.sampled_PGT].mean():.2e} max {gap.max():.2e}"
      )


if __name__ == "__main__":
  main()
