"""How long rows in flight wait for the prompts of groups that come later, with pieces and without.

python experiments/prompt_pieces.py [--longest=2048] [--pieces=0,512,128]
python experiments/prompt_pieces.py --chips [--longest=32768] [--pieces=0,2048] [--context=1]

Groups come one after another to a small model with random weights, as in a run with
rollout.weights=in_flight. One prompt of eight has --longest tokens, and the others have 64. For
each sampling.prompt_piece (0: whole prompts), the command prints the longest and the mean time
between two chunks, in which rows that draw wait, and the time of all. Every size is sampled once
before, so that compiling is not timed. The sum of all token ids shows that all sizes draw the same.

With --chips, the compiler of jax[tpu] compiles what computes later prompts of the shape of
Qwen2.5-7B on eight chips of a TPU v5p, which need not exist, with 64 rows in flight: what a call
needs beside its arguments, and how long it takes at least. Where attention has a kernel, its time
adds to that of the other computation. The last line is about the program that copies prompts to
further places: it counts one prompt of each shard.
"""

import argparse
import json
from pathlib import Path
import tempfile
import time

from context_memory import LONG_QWEN, config_of
import jax
import numpy as np

from grpo_jax import model
from grpo_jax.around.planning import cost
from grpo_jax.around.planning.phases import seconds_by_limit
from grpo_jax.around.planning.plan import run_of
from grpo_jax.around.planning.topologies import devices_of
from grpo_jax.config import from_dict
from grpo_jax.model.huggingface import config_json
from grpo_jax.parallel.chips import chip_of
from grpo_jax.run.stages import programs
from grpo_jax.sampler.flight import NewRows
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
  """(seconds that rows wait before each chunk, seconds in all, sum of the tokens' ids).

  Chunks that only new rows draw are left out: nobody waits for them.
  """
  stream = sampler.stream(lambda: (params, 0), IN_FLIGHT, G, in_order=True)
  programs, waits, began, drawn = sampler.programs, list[float](), time.perf_counter(), 0
  chunk, ended = programs.chunk, [began]

  def timed(
    params: model.Params, flight: object, new: NewRows, going_R: np.ndarray, *rest: object
  ) -> object:
    jax.block_until_ready(flight)  # what was computed since the last chunk
    if (going_R & ~new.is_new_R).any():
      waits.append(time.perf_counter() - ended[0])
    result = jax.block_until_ready(chunk(params, flight, new, going_R, *rest))
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
  return waits, time.perf_counter() - began, drawn


def by_compiler(longest: int, pieces: list[int], context: int) -> None:
  """Prints memory and least times of the programs that compute later prompts."""
  jax.config.update("jax_platforms", "cpu")
  devices = devices_of("v5p:2x2x2", None)
  with tempfile.TemporaryDirectory() as folder:
    Path(folder, "config.json").write_text(json.dumps(config_json.config_to_json(LONG_QWEN)))
    for piece in pieces:
      c = config_of(longest, 4096, prompts=128, group_size=8, micro_batch=8)
      c.model.update(path=folder, dtype="bfloat16", reference_dtype="bfloat16")
      c.sampling.update(dtype="bfloat16", tensor=4 // context, rows=64, prompt_piece=piece)
      c.sampling.context = context
      c.mesh.update(data=1, fsdp=8)
      run = run_of(from_dict(c.to_dict()), devices)
      (sample,) = [program for program in programs(run) if program.name == "sample"]
      compiled = run.programs.sampler().programs
      for stage in sample.stages:
        if stage.program not in (compiled.arrive, compiled.continue_prompts):
          continue
        flight = stage.arguments[0]
        name = "arrive" if stage.program is compiled.arrive else "continue_prompts"
        print(f"pieces of {piece or 'all'} tokens, {name}, called {stage.runs} times:", end=" ")
        try:
          executable = stage.lower().compile()
        except jax.errors.JaxRuntimeError as error:
          print(str(error).splitlines()[0])
          continue
        limits = seconds_by_limit(cost.count(executable.as_text()).whole, chip_of(devices[0]))
        # The kernel of attention does not declare its operations.
        prompts = jax.tree.leaves(stage.arguments[2])[0]  # token ids
        count, queries = prompts.shape
        keys = queries / 2 if stage.program is compiled.arrive else longest + queries / 2
        scores = count * LONG_QWEN.num_heads * LONG_QWEN.num_layers * queries * keys
        attention = 4 * LONG_QWEN.head_dim * scores / len(devices) / chip_of(devices[0]).flops
        has_kernel = context == 1 or stage.program is compiled.arrive
        print(
          f"{executable.memory_analysis().temp_size_in_bytes / 1e9:.1f} GB of temporary arrays; at"
          " least "
          + ", ".join(f"{limit} {least:.3f} s" for limit, least in limits.items())
          + (f", attention {attention:.3f} s with a kernel" if has_kernel else "")
        )
  from_N = jax.ShapeDtypeStruct((flight.grid.places,), "int32")
  executable = compiled.copy.lower(flight, from_N).compile()
  moved = cost.count(executable.as_text()).whole.memory_bytes
  print(
    f"a copy: {executable.memory_analysis().temp_size_in_bytes / 1e9:.2f} GB of temporary arrays,"
    f" {moved / 1e9:.1f} GB read and written"
  )


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--longest", type=int, default=2048, help="tokens of the longest prompts")
  parser.add_argument("--pieces", default="0,512,128", help="sampling.prompt_piece, 0 = whole")
  parser.add_argument("--context", type=int, default=1, choices=(1, 2, 4))
  parser.add_argument("--chips", action="store_true", help="ask the compiler of jax[tpu]")
  args = parser.parse_args()
  if args.chips:
    by_compiler(args.longest, [*map(int, args.pieces.split(","))], args.context)
    return
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
