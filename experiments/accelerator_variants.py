"""Measures variants of what is slow on an accelerator, side by side, in at most four minutes.

  python experiments/accelerator_variants.py --out=FILE.json [--seconds=240] [--only=NAME,NAME]
      [--tiny]

It is the second script after accelerator.py and has no network, either. Its parts, each a process
of its own, compile beside each other and then measure one after the other:

  products   products of matrices in the shapes of an update, and of a round of decoding
  token      attention of one token of each row: as XLA compiles it, by a kernel of Pallas, and by
             cuDNN with lengths, which knows neither rings nor prompts that are shared
  decode_A_B one chunk of decoding. A says how the layers lie: `apart` or in `stacks`. `kernel` is
             `apart` with that kernel of Pallas. B names flags. decode_A_B_N decodes N rows in place
             of 256
  update_A_B one update: A is `apart` or `loop`, B is an attention, or `remat`

The flags are `xla` (none), `blas` (products by cuBLAS alone, so there is little to tune) and
`graph` (loops and branches within CUDA graphs, too).
"""

import argparse
import dataclasses
import functools
import json
import os
from pathlib import Path
import signal
import sys
import time
import traceback
from typing import Any

import accelerator
from accelerator_parts import Part, kernels, median_seconds, one_line, start_device

FLAGS = {
  "xla": "",
  "blas": "--xla_gpu_enable_triton_gemm=false --xla_gpu_dot_merger_threshold_mb=0"
  " --xla_gpu_blas_max_algorithms=24",
  "graph": "--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL",
}
DECODE = ("apart_xla_64", "apart_xla", "apart_xla_1024", "kernel_xla", "apart_graph")
ON_DEMAND = ("apart_blas", "stacks_xla")  # run where --only names them
UPDATE = ("apart_cudnn", "loop_cudnn", "apart_remat")
ROWS, GROUP, PROMPT, TOKENS = 256, 8, 64, 256


def products(part: Part) -> None:
  """Products [M, K] x [K, N] in bfloat16: of an update's layers and head, and of decoding."""
  import jax
  import jax.numpy as jnp

  shapes = [(33792, 896, 4864), (33792, 4864, 896), (896, 33792, 4864), (1728, 896, 151936)]
  shapes += [(151936, 1728, 896), (256, 896, 9728), (256, 4864, 896), (256, 896, 1152)]
  shapes = [(64, 32, 128)] if part.tiny else shapes
  found = {}
  product = jax.jit(jnp.matmul)
  part.take_turn()
  for M, K, N in shapes:
    x = jax.random.normal(jax.random.key(0), (M, K), "bfloat16")
    y = jax.random.normal(jax.random.key(1), (K, N), "bfloat16")
    seconds = median_seconds(functools.partial(product, x, y), calls=9)
    moved = 2 * (M * K + K * N + M * N)
    found[f"{M} x {K} x {N}"] = {
      "tflops": 2e-12 * M * K * N / seconds,
      "gb_s": 1e-9 * moved / seconds,
    }
    part.save(products=found)


def token(part: Part) -> None:
  """Microseconds of a layer's attention of one token, in a loop over as many caches as layers."""
  import jax
  import jax.numpy as jnp
  from token_attention import Token, cudnn, pallas, plain

  sizes = (2, 2, 2, 4, 32, 16, 16, 2) if part.tiny else (32, 2, 8, 7, 256, 64, 64, 24)
  P, K, G, R, C, E, S, L = sizes
  keys = iter(jax.random.split(jax.random.key(0), 4 * L + 1))

  def some(*shape: int) -> Any:
    return jax.random.normal(next(keys), shape, jnp.bfloat16)

  q = some(P, K, G, R, E) / E**0.5
  # Apart, as the sampler has them on a GPU: a slice of a stack would be copied.
  own = [(some(P, K, G, C, E), some(P, K, G, C, E)) for _ in range(L)]
  prefix = [(some(P, K, S, E), some(P, K, S, E)) for _ in range(L)]
  lengths_P = jnp.full(P, S)
  visible_PG = jnp.full((P, G), C // 2)
  moved = own[0][0].nbytes + 2 * prefix[0][0].nbytes
  found: dict[str, Any] = {}
  programs = {}
  for name, attend in (("plain", plain), ("pallas", pallas), ("cudnn", cudnn)):
    if part.tiny and name != "plain":
      continue

    def layers(q: Any, own: Any, prefix: Any, attend: Any = attend) -> Any:
      for keys_and_values, of_prompt in zip(own, prefix):
        seen = dict(zip(("keys", "values"), keys_and_values))
        seen |= dict(zip(("prompt_keys", "prompt_values"), of_prompt))
        rows = dict(time=jnp.int32(C // 2 - 1), visible_PG=visible_PG, lengths_P=lengths_P)
        q = q + 1e-3 * attend(Token(q=q, **seen, **rows))
      return q

    try:
      programs[name] = part.compiled(name, jax.jit(layers), q, own, prefix)
    except Exception as error:
      found[name] = {"error": one_line(error)}
      part.save(token=found)
  part.take_turn()
  wanted = programs["plain"](q, own, prefix).astype(jnp.float32)
  for name, program in programs.items():
    out = program(q, own, prefix).astype(jnp.float32)
    seconds = median_seconds(functools.partial(program, q, own, prefix), calls=9) / L
    gap = float(jnp.abs(out - wanted).max() / jnp.abs(wanted).max())
    found[name] = {"us": 1e6 * seconds, "gb_s": 1e-9 * moved / seconds, "gap": gap}
    part.save(token=found)


def decode(part: Part, layers: str, flags: str, rows: str = str(ROWS)) -> None:
  """Milliseconds of a round, in a chunk of rows half way through their completions.

  The flags are those of the process.
  """
  import accelerator_model
  import jax
  import jax.numpy as jnp
  import numpy as np

  from grpo_jax import model
  from grpo_jax.model import cached_pass
  from grpo_jax.sampler.flight import NewRows
  from grpo_jax.sampler.programs import FlightPrograms
  from grpo_jax.sampler.rows import Chunk
  from grpo_jax.sampler.sampling import (
    decoding_of,
    longest_chunk,
    settings_of,
    sizes_up_to,
  )
  from grpo_jax.sampler.seats import Grid
  from grpo_jax.sampler.stream import by_row
  from grpo_jax.sampler.weights import cast_for_sampling

  if layers == "kernel" and not part.tiny:
    setattr(cached_pass, "softmax_attention", by_kernel)  # noqa: B010 (mypy)
  del flags
  count = 16 if part.tiny else int(rows)
  job = dict(prompts=count // GROUP, plen=PROMPT, clen=TOKENS)
  args = accelerator_model.sizes(part, accelerator_model.QWEN, **job)
  T = args.clen
  run = accelerator_model.make_run(args)
  config = dataclasses.replace(run.parameters.sampling.model, unrolled=layers != "stacks")
  weights = cast_for_sampling(accelerator_model.random_params(run), run.config.sampling)
  if config.unrolled:
    weights = jax.jit(model.unrolled, static_argnums=1)(weights, run.parameters.model)
  decoding = decoding_of(run.config.sampling, config.stop_ids)
  programs = FlightPrograms(config, decoding, longest_chunk(decoding.max_tokens))
  grid, slots = Grid(count // GROUP, GROUP), sizes_up_to(T, model.slots_step(config))[-1]
  settings = by_row(settings_of(run.config.sampling, 1.0), count, 1)
  shapes = programs.abstract(grid, slots, weights, run.config.data.max_prompt_tokens, settings)
  make = jax.jit(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))

  def flight() -> Any:
    made = make()
    cache, state = made.cache, made.rows
    prefix = cache.prefix.replace(lengths_P=cache.prefix.lengths_P + args.plen)
    uniforms = jax.random.uniform(jax.random.key(1), state.uniforms_RTU.shape)
    state = state.replace(
      token_R=state.token_R + 5,
      drawn_R=state.drawn_R + T // 2,
      goes_on_R=~state.goes_on_R,
      given_RT=state.given_RT - 1,
      uniforms_RTU=uniforms,
      settings=jax.tree.map(jnp.asarray, settings),
    )
    return made.replace(cache=cache.replace(prefix=prefix, time=cache.time + T // 2), rows=state)

  nobody, numbers = np.zeros(count, bool), np.arange(count, dtype=np.int32)
  keys = np.zeros((count, 2), np.uint32)
  new = NewRows(nobody, keys, numbers, settings)
  rounds = min(programs.columns - 1, T // 2 - 1)
  chunk = Chunk(np.int32(rounds), np.int32(count))
  program = part.compiled("chunk", programs.chunk, weights, flight(), new, ~nobody, chunk)
  part.take_turn()
  times = []
  for _ in range(4):
    arguments = jax.block_until_ready((weights, flight(), new, ~nobody, chunk))
    start = time.perf_counter()
    out = jax.block_until_ready(program(*arguments))
    times.append(time.perf_counter() - start)
  drawn = int(out[1].is_drawn_RN.sum())
  seconds = sorted(times[1:])[1]
  moved = accelerator_model.decode_bytes(run, weights, count, T) / T
  part.save(
    drawn=drawn,
    round_ms=1000 * seconds / rounds,
    tokens_per_s=drawn / seconds,
    share_of_reached=moved * rounds / seconds / (part.reached("copy") or float("nan")),
    share_of_peak=moved * rounds / seconds / (part.peak("memory_bandwidth") or float("nan")),
  )
  arguments = [flight() for _ in range(2)]
  profile = kernels(lambda: program(weights, arguments.pop(), new, ~nobody, chunk), part.folder)
  part.save(rounds=rounds, profile=profile)


def by_kernel(q: Any, own: Any, own_mask: Any, prefix: Any, prefix_mask: Any, scoring: Any) -> Any:
  """`softmax_attention` of one token by the kernel, on one device."""
  import jax.numpy as jnp
  from token_attention import masked

  P, K, G, R, _, E = q.shape
  keys, values = (x.reshape(P, K, G, -1, E) for x in (own.keys, own.values))
  C, S = keys.shape[3], prefix[0].shape[2]
  mask_PGC = jnp.broadcast_to(own_mask[:, 0, :, 0, 0], (P, G, C))
  mask_PGS = jnp.broadcast_to(prefix_mask[:, 0, :, 0, 0], (P, G, S))
  del scoring
  out = masked(q[..., 0, :], keys, values, mask_PGC, prefix[0], prefix[1], mask_PGS)
  return out[..., None, :]


def update(part: Part, layers: str, what: str) -> None:
  """An update of accelerator.py with other layers or another attention."""
  import accelerator_model

  from grpo_jax.model import blocks

  if layers == "loop":
    blocks._MOST_UNROLLED_LAYERS = {}
  remat, attention = what == "remat", "auto" if what == "remat" else what
  args = accelerator_model.sizes(
    part,
    accelerator_model.QWEN,
    prompts=8 if part.tiny else 64,
    plen=PROMPT,
    clen=TOKENS,
    attention=attention,
    remat=remat,
  )
  run = accelerator_model.make_run(args)
  found = accelerator_model.one_update(part, run, with_reference=False)
  attention_used = accelerator_model.attention_of(run)
  part.save(micro_batch=run.programs.micro_batch, attention=attention_used, update=found)


def run_one(name: str, part: Part) -> None:
  kind, *how = name.split("_")
  functions: Any = {"products": products, "token": token, "decode": decode, "update": update}
  functions[kind](part, *how)


def parts() -> list[accelerator.Part]:
  """All of them. Each is told its flags by its environment."""

  def made(name: str, seconds: float, flags: str = "") -> accelerator.Part:
    flags = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    command = ("env", f"XLA_FLAGS={flags}", sys.executable, __file__, f"--name={name}")
    return accelerator.Part(name, seconds, 15, command)

  found = [made("products", 40, FLAGS["blas"]), made("token", 50, FLAGS["blas"])]
  decoding = (*DECODE, *ON_DEMAND)
  found += [made(f"decode_{how}", 100, FLAGS[how.split("_")[1]]) for how in decoding]
  return found + [made(f"update_{how}", 80, FLAGS["blas"]) for how in UPDATE]


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--out", type=Path, help="the file to write")
  parser.add_argument("--seconds", type=float, default=240.0, help="of all parts together")
  parser.add_argument("--only", default="", help="names of parts, separated by commas")
  parser.add_argument("--tiny", action="store_true", help="the sizes of a test on a CPU")
  parser.add_argument("--name", default="", help=argparse.SUPPRESS)
  parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
  parser.add_argument("--device", type=json.loads, default={}, help="what the part `device` found")
  args = parser.parse_args()
  if args.name:
    part = Part(args.results, args.tiny, args.device)
    try:
      part.save(start=start_device())
      run_one(args.name, part)
    except Exception as error:  # whatever fails, the other parts go on
      traceback.print_exc()
      part.save(error=one_line(error))
      sys.exit(1)
    return
  by_name = {part.name: part for part in parts()}
  usual = [name for name in by_name if name.removeprefix("decode_") not in ON_DEMAND]
  wanted = list(filter(None, args.only.split(","))) or usual
  args.out.parent.mkdir(parents=True, exist_ok=True)
  signal.signal(signal.SIGTERM, accelerator.stop)
  report = accelerator.facts(vars(args))
  report["parts"]["device"] = args.device
  accelerator.measure_together(
    [by_name[name] for name in wanted], args.out, args.seconds, report, ["--tiny"] * args.tiny
  )


if __name__ == "__main__":
  main()
