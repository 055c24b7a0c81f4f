"""The parts of accelerator.py that measure a model: gap, decode, update and attention.

The models have random weights, which are made on the device. The programs are those of
`grpo_jax.run`, on the job of bench.py.
"""

import argparse
from collections.abc import Mapping, Sequence
import dataclasses
import gc
import time
from typing import Any

from accelerator_parts import Part, kernels, median_seconds, one_line, share
import attention as attention_lib
import bench
import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import model
from grpo_jax.config import Config
from grpo_jax.model.attention import ATTENTION
from grpo_jax.model.attention.choose import why_not
from grpo_jax.run.run import Run
from grpo_jax.sampler.sampling import Draws, whole
from grpo_jax.types import Batch, Completions, Rewards

QWEN = dict(d=896, layers=24, heads=14, kv_heads=2, ff=4864, vocab=151936)  # Qwen2.5-0.5B
SMALL = dict(d=512, layers=8, heads=8, kv_heads=2, ff=2048, vocab=8192)
TINY = dict(d=32, layers=2, heads=4, kv_heads=2, ff=64, vocab=512)
GROUP = 8


def sizes(part: Part, shape: Mapping[str, int], **job: Any) -> argparse.Namespace:
  """The arguments of bench.py for a shape and a job. A tiny part has TINY, and short texts."""
  if part.tiny:
    shape, job = TINY, job | {"plen": 8, "clen": 16}
  options = {
    "dtype": "bfloat16",
    "attention": "auto",
    "remat": False,
    "rows": 0,
    "lengths": "natural",
    "staleness": 0,
  }
  return argparse.Namespace(**(bench.SIZES | {"G": GROUP} | options | dict(shape) | job))


def make_run(args: argparse.Namespace, devices: Sequence[jax.Device] = ()) -> Run:
  """The run of a job on these devices, or on the first one that is there."""
  bench.register_job(args)
  config = bench.make_config(args)
  shape = dataclasses.replace(config.model, rope_theta=1e6)
  return Run(dataclasses.replace(config, model=shape), devices=devices or jax.devices()[:1])


def random_params(run: Run) -> Any:
  """Random parameters of a run. Their own initialisation takes a GPU's compiler over a minute."""
  leaves, structure = jax.tree_util.tree_flatten_with_path(run.parameters.abstract)
  places = jax.tree.unflatten(structure, [x.sharding for _, x in leaves])

  def made() -> Any:
    keys = jax.random.split(jax.random.key(0), len(leaves))
    arrays = [
      jnp.ones(x.shape, x.dtype)
      if path[-1].key == "scale"
      else 0.02 * jax.random.normal(key, x.shape, x.dtype)
      for key, (path, x) in zip(keys, leaves)
    ]
    return jax.tree.unflatten(structure, arrays)

  return jax.jit(made, out_shardings=places)()


def prompts_of(config: Config, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Random prompts, their lengths and the temperatures of their completions."""
  S = config.data.max_prompt_tokens
  tokens_PS = jax.random.randint(jax.random.key(1), (count, S), 2, 60)
  return tokens_PS, jnp.full(count, S, jnp.int32), jnp.ones(count)


def sampled(run: Run, weights: Any, prompts: tuple[jax.Array, ...]) -> Completions:
  """GROUP completions of each prompt."""
  tokens_PS, lengths_P, _ = (np.asarray(x) for x in prompts)
  draws = Draws(run.key("sample"))
  return whole(run.programs.sampler()(weights, tokens_PS, lengths_P, GROUP, draws))


def batch_of(run: Run, completions: Completions, prompts: tuple[jax.Array, ...]) -> Batch:
  """The batch of these completions, as batches/collect.py makes it."""
  tokens_PS, lengths_P, temperature_P = prompts
  live_P = jnp.ones_like(temperature_P)
  return run.programs.to_batch(completions, tokens_PS, lengths_P, temperature_P, live_P)


def gap(part: Part) -> None:
  """How far the learner's log-probs of sampled tokens are from the sampler's, in two dtypes."""
  found = {}
  for dtype in ("float32", "bfloat16"):
    args = sizes(part, SMALL, dtype=dtype, prompts=8, plen=64, clen=128)
    run = make_run(args)
    prompts = prompts_of(run.config, args.prompts)
    params = random_params(run)
    weights = run.parameters.for_sampling(params)
    batch = batch_of(run, sampled(run, weights, prompts), prompts)
    logprobs = part.compiled(f"log-probs, {dtype}", run.programs.logprobs.whole, params, batch)
    gap_PGT = jnp.abs(logprobs(params, batch) - batch.sampler_logprobs_PGT) * batch.mask_PGT
    tokens = float(batch.mask_PGT.sum())
    found[dtype] = {
      "tokens": tokens,
      "mean": float(gap_PGT.sum()) / tokens,
      "max": float(gap_PGT.max()),
      "mean_logprob": float((batch.sampler_logprobs_PGT * batch.mask_PGT).sum()) / tokens,
      "attention": attention_of(run),
    }
    part.save(sizes=vars(args), dtypes=found)


def attention_of(run: Run) -> dict[str, str]:
  """Which implementation of attention a run uses, and why not the one that was wanted."""
  name, remark = model.attention_of(run.parameters.model)
  return {"name": name, "remark": remark}


def decode(part: Part) -> None:
  """Tokens a second while sampling, and the share of memory bandwidth, by the number of rows."""
  numbers = (16, 32) if part.tiny else part.rows
  args = sizes(part, QWEN, prompts=numbers[-1] // GROUP, plen=64, clen=256)
  run = make_run(args)
  params = random_params(run)
  weights = run.parameters.for_sampling(params)
  part.save(sizes=vars(args), weights_bytes=sum(x.nbytes for x in jax.tree.leaves(weights)))
  del params
  found: dict[str, Any] = {}
  for rows in numbers:
    try:
      found[str(rows)] = decode_rows(part, run, weights, rows)
    except jax.errors.JaxRuntimeError as error:  # too little memory, say
      found[str(rows)] = {"error": one_line(error)}
    part.save(rows=found)


def decode_rows(part: Part, run: Run, weights: Any, rows: int) -> dict[str, Any]:
  """The decode of so many rows, the pass over their prompts included."""
  prompts = prompts_of(run.config, rows // GROUP)
  start = time.perf_counter()
  completions = sampled(run, weights, prompts)
  first = time.perf_counter() - start
  seconds = median_seconds(lambda: sampled(run, weights, prompts), calls=2)
  part.save(compile_s=part.results.get("compile_s", {}) | {f"sample, {rows} rows": first - seconds})
  rounds, tokens = int(completions.lengths_PG.max()), int(completions.lengths_PG.sum())
  by_shape = decode_bytes(run, weights, rows, rounds)
  return {
    "tokens": tokens,
    "rounds": rounds,
    "seconds": seconds,
    "tokens_per_s": tokens / seconds,
    "round_ms": 1000 * seconds / rounds,
    "by_shape": bandwidth(part, by_shape, tokens, seconds),
    "peak_bytes": peak_bytes(),
    "profile": kernels(lambda: sampled(run, weights, prompts), part.folder),
  }


def bandwidth(part: Part, moved: float, tokens: int, seconds: float) -> dict[str, Any]:
  """So many bytes in so much time, as a share of what the memory can do."""
  speed = moved / seconds
  return {
    "bytes_per_token": moved / tokens,
    "bytes_per_s": speed,
    "share_of_reached": share(speed, part.reached("copy")),
    "share_of_peak": share(speed, part.peak("memory_bandwidth")),
  }


def decode_bytes(run: Run, weights: Any, rows: int, rounds: int) -> float:
  """The bytes that decoding must read: all weights in each round, and the keys and values so far.

  A group's prompt is read once for the group. Logits, draws and activations do not count.
  """
  shape, S = run.parameters.sampling.model, run.config.data.max_prompt_tokens
  item = 2 if shape.dtype == "bfloat16" else 4
  token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * item
  own = rows * (rounds - 1) / 2  # tokens of completions that a round reads, on average
  in_weights = sum(x.nbytes for x in jax.tree.leaves(weights))
  return rounds * (in_weights + (rows / GROUP * S + own) * token)


def peak_bytes() -> int | None:
  """The peak memory of the first device in this process, where the device counts it."""
  return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def update(part: Part) -> None:
  """One GRPO update: FLOP/s, and peak memory against the estimate of micro_batch=0.

  If what micro_batch=0 chooses needs too much memory, half of it is tried, and so on.
  """
  micro, prompts = 0, 8 if part.tiny else 64
  attempts: list[dict[str, Any]] = []
  while not attempts or micro and "RESOURCE_EXHAUSTED" in attempts[-1].get("error", ""):
    args = sizes(part, QWEN, prompts=prompts, plen=64, clen=256, micro=micro)
    run = make_run(args)
    found: dict[str, Any] = {"micro_batch": run.programs.micro_batch, "is_choice": micro == 0}
    try:
      found |= one_update(part, run)
    except jax.errors.JaxRuntimeError as error:
      found["error"] = one_line(error)
    gc.collect()  # an error holds the arrays of the function that it left
    attempts.append(found)
    part.save(sizes=vars(args), attention=attention_of(run), attempts=attempts)
    micro = found["micro_batch"] // 2


def one_update(part: Part, run: Run, with_reference: bool = True) -> dict[str, Any]:
  """Makes a batch of random completions, and updates on it. Returns what was measured.

  The log-probs of the reference are those of the policy, or without it 0.
  """
  P, T = run.config.batch.prompts, run.config.sampling.max_tokens
  programs, prompts = run.programs, prompts_of(run.config, P)
  params = random_params(run)
  tokens_PGT = jax.random.randint(jax.random.key(2), (P, GROUP, T), 2, 60)
  lengths_PG = jnp.full((P, GROUP), T, jnp.int32)
  completions = Completions(
    tokens_PGT=tokens_PGT,
    lengths_PG=lengths_PG,
    sampled_PGT=jnp.ones((P, GROUP, T), bool),
    logprobs_PGT=jnp.zeros((P, GROUP, T)),
    behavior_logprobs_PGT=jnp.zeros((P, GROUP, T)),
    stopped_by_PG=jnp.full((P, GROUP), -1, jnp.int32),
  )
  batch = batch_of(run, completions, prompts)
  reference = run.parameters.reference(params)
  name = f"micro-batches of {programs.micro_batch}"
  batch, reference_s = batch.replace(ref_logprobs_PGT=jnp.zeros((P, GROUP, T))), None
  if with_reference:
    logprobs = part.compiled(f"log-probs, {name}", programs.logprobs.whole, reference, batch)
    reference_s = median_seconds(lambda: logprobs(reference, batch), calls=1)
    batch = batch.replace(ref_logprobs_PGT=logprobs(reference, batch))
  # Every group teaches something, because an update may leave out one that does not.
  scores_PGJ = jnp.broadcast_to(jnp.arange(GROUP)[:, None] % 2.0, (P, GROUP, 1))
  state = programs.init_state(params)
  rewards = Rewards(scores_PGJ=scores_PGJ, weights=(1.0,))
  batch, _ = programs.with_advantages(batch, rewards, state.coefs.kl)
  flops = bench.update_flops(state.params, P * run.config.data.max_prompt_tokens, P * GROUP * T)
  before, states = peak_bytes(), [state]
  del state, params
  step = part.compiled(f"update, {name}", programs.update.whole, states[0], None, reference, batch)

  def once() -> Any:
    state, metrics = step(states.pop(), None, reference, batch)
    states.append(state)
    return metrics

  part.take_turn()
  seconds = median_seconds(once, calls=2)
  return {
    "seconds": seconds,
    "reference_s": reference_s,
    "tokens": P * GROUP * T,
    "flops_per_s": flops / seconds,
    "share_of_reached": share(flops / seconds, part.reached("bfloat16")),
    "share_of_peak": share(flops / seconds, part.peak("flops")),
    "memory": memory_of_update(run, step, before),
    "profile": kernels(once, part.folder),
  }


def memory_of_update(run: Run, step: Any, before: int | None) -> dict[str, Any]:
  """The peak memory of an update by the device, by run/memory.py and by the compiler, in bytes."""
  held, activations = run.programs.estimate_of_update
  sizes = step.memory_analysis()
  peak = peak_bytes()
  estimate = held + activations
  return {
    "peak": peak,
    "peak_before_update": before,
    "estimate": estimate,
    "estimate_held": held,
    "estimate_activations": activations,
    "peak_by_estimate": None if peak is None else peak / estimate,
    "compiler": sizes.argument_size_in_bytes + sizes.temp_size_in_bytes,
    "compiler_temporary": sizes.temp_size_in_bytes,
  }


def attention(part: Part) -> None:
  """Outputs and gradients of groups by each implementation that runs here: seconds and errors."""
  first = jax.devices()[0]
  S, G, T, groups = (16, 2, 16, 1) if part.tiny else (256, GROUP, 512, 4)
  bench_of = attention_lib.Bench(S, G, T, groups, first)
  part.save(sizes={"S": S, "G": G, "T": T, "groups": groups})
  found: dict[str, Any] = {}
  for name in ATTENTION:
    reason = why_not(name, first.platform, "bfloat16", attention_lib.E, 0.0)
    if reason:
      found[name] = {"skipped": reason}
      continue
    try:
      found[name] = bench_of.measure(name, here=True)
    except Exception as error:  # one of a platform that nobody has tried must not cost the others
      found[name] = {"error": one_line(error)}
    part.save(names=found)
  part.save(
    names=found, compile_s={n: x["compile_s"] for n, x in found.items() if "compile_s" in x}
  )
