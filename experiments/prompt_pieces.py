"""How long rows in flight wait for the prompts of groups that come later, with pieces and without.

python experiments/prompt_pieces.py [--longest=2048] [--pieces=0,512,128]

Groups come one after another to a small model with random weights, as in a run with
rollout.weights=in_flight. One prompt of eight has --longest tokens, and the others have 64. For
each sampling.prompt_piece (0: whole prompts), the command prints the longest and the mean time
between two chunks, in which rows that draw wait, and the time of all. Every size is sampled once
before, so that compiling is not timed. The sum of all token ids shows that all sizes draw the same.
"""

import argparse
import time

import jax
import numpy as np

from grpo_jax import model
from grpo_jax.sampler.logits import Decoding, RowSettings
from grpo_jax.sampler.requests import GroupRequest
from grpo_jax.sampler.sampling import Sampler

GROUPS, G, T, IN_FLIGHT, SHORT = 32, 4, 96, 8, 64
CONFIG = model.ModelConfig(
  vocab_size=512,
  embed_dim=256,
  num_layers=4,
  num_heads=4,
  num_kv_heads=2,
  head_dim=64,
  mlp_dim=768,
)


def requests_of(sampler: Sampler, longest: int) -> list[GroupRequest]:
  rng = np.random.default_rng(0)
  lengths = np.where(np.arange(GROUPS) % 8 == 7, longest, SHORT).astype(np.int32)
  prompts = sampler.prompts(rng.integers(2, 512, (GROUPS, longest)).astype(np.int32), lengths)
  key = np.asarray(jax.random.key_data(jax.random.key(0)))
  limits = rng.integers(16, T + 1, (GROUPS, G))
  return [
    GroupRequest(n, prompts, n, key, n * G, RowSettings(1.0, max_tokens=limits[n]))
    for n in range(GROUPS)
  ]


def sample(sampler: Sampler, params: model.Params, longest: int) -> tuple[list[float], float, int]:
  """(seconds that rows wait before each chunk, seconds in all, sum of the tokens' ids)."""
  stream = sampler.stream(lambda: (params, 0), IN_FLIGHT, G, in_order=True)
  programs, waits, began, drawn = sampler.programs, list[float](), time.perf_counter(), 0
  chunk, ended = programs.chunk, [began]

  def timed(params: model.Params, flight: object, *rest: object) -> object:
    jax.block_until_ready(flight)  # what was computed since the last chunk
    waits.append(time.perf_counter() - ended[0])
    result = jax.block_until_ready(chunk(params, flight, *rest))
    ended[0] = time.perf_counter()
    return result

  vars(programs)["chunk"] = timed
  try:
    stream.submit(requests_of(sampler, longest))
    left = GROUPS
    while left:
      for finished in stream.advance().finished:
        left -= len(finished.prompts)
        drawn += int(finished.completions.tokens_PGT.sum())
  finally:
    vars(programs)["chunk"] = chunk
  return waits[1:], time.perf_counter() - began, drawn


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--longest", type=int, default=2048, help="tokens of the longest prompts")
  parser.add_argument("--pieces", default="0,512,128", help="sampling.prompt_piece, 0 = whole")
  args = parser.parse_args()
  params = jax.jit(model.init, static_argnums=1)(jax.random.key(0), CONFIG)
  for piece in map(int, args.pieces.split(",")):
    decoding = Decoding(max_tokens=T, stop_ids=())
    sampler = Sampler(CONFIG, decoding, rows=IN_FLIGHT * G, prompt_piece=piece)
    sample(sampler, params, args.longest)
    waits, seconds, drawn = sample(sampler, params, args.longest)
    print(
      f"pieces of {piece or 'all'} tokens: rows wait {max(waits) * 1e3:,.0f} ms at most and"
      f" {np.mean(waits) * 1e3:,.0f} on average before {len(waits)} chunks; {seconds:.1f} s in all"
      f" (sum of ids {drawn})"
    )


if __name__ == "__main__":
  main()
