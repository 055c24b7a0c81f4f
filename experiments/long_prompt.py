"""What a long prompt costs a row that draws: how long the row waits for its next tokens.

python experiments/long_prompt.py [--prompt=4096] [--layers=8]

An engine as the endpoint has it, of random weights (D = 512), in float32. While one row draws, a
long prompt arrives, first for an engine without a prefix cache, which computes it whole, then for
one that computes it in pieces. A line of JSON for each says the longest time between two parts of
the row before the prompt and from its arrival to its first token, and how long that took.
"""

import argparse
import json
import os
import statistics
import threading
import time
from typing import Any

import jax
import numpy as np

from grpo_jax import model
from grpo_jax.sampler.logits import Decoding, RowSettings
from grpo_jax.serving.device_flight import Sizes
from grpo_jax.serving.engine import AnswerPart, Engine, Job

BEFORE, TOKENS = 10, 480  # parts of the row before the prompt arrives, and the row's tokens


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--prompt", type=int, default=4096)
  parser.add_argument("--layers", type=int, default=8)
  args = parser.parse_args()
  config = model.ModelConfig(
    vocab_size=4096,
    embed_dim=512,
    num_layers=args.layers,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    mlp_dim=2048,
  )
  params = jax.jit(model.init, static_argnums=1)(jax.random.key(0), config)
  for texts in (0, 4):
    sizes = Sizes(rows=4, prompt_tokens=args.prompt, waiting=8, texts=texts)
    engine = Engine(config, Decoding(TOKENS, (0,)), sizes, params)
    engine.start()
    found = measure(engine, args.prompt)
    engine.close()
    print(json.dumps({**vars(args), "texts": texts, "load": os.getloadavg()[0], **found}))


def measure(engine: Engine, tokens: int) -> dict[str, Any]:
  """The seconds that a row waits, before and while a prompt of `tokens` tokens is computed."""
  times: list[float] = []
  arrived = first_token = 0.0
  ended = threading.Event()
  rng = np.random.default_rng(0)
  long = tuple(rng.integers(1, 4096, tokens).tolist())

  def hear_long(part: AnswerPart) -> None:
    nonlocal first_token
    if part.tokens and not first_token:
      first_token = time.perf_counter()
      ended.set()

  def hear(part: AnswerPart) -> None:
    nonlocal arrived
    times.append(time.perf_counter())
    if len(times) == BEFORE:
      arrived = times[-1]
      engine.submit([Job(long, 2, RowSettings(max_tokens=1), hear_long)])

  engine.submit([Job((1, 2, 3), 1, RowSettings(min_tokens=TOKENS), hear)])
  if not ended.wait(300):
    raise SystemExit(f"the long prompt has no token after 300 s: {engine.failure}")
  gaps = np.diff([at for at in times if at <= first_token])
  return {
    "median_before": statistics.median(gaps[1 : BEFORE - 1]),
    "longest_before": gaps[1 : BEFORE - 1].max(),
    "longest_beside": gaps[BEFORE - 1 :].max(),
    "until_first_token": first_token - arrived,
  }


if __name__ == "__main__":
  main()
