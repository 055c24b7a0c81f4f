"""Times one fixed GRPO job through the real sampler, reward, reference and update.

  python experiments/bench.py                                                             # tiny
  python experiments/bench.py --d 512 --layers 8 --heads 8 --ff 2048 --vocab 8192 \
                              --prompts 8 --plen 64 --clen 128 --steps 4                  # small

  python experiments/bench.py --clen 512 --lengths geometric --rows 64          # long tails
  python experiments/bench.py --clen 64 --lengths equal                         # what they cost is
                                                                                # compared with
  python experiments/bench.py --clen 256 --lengths geometric --rows 64 \
                              --staleness 1 --weights in_flight                 # no empty seats

  python experiments/bench.py --d 896 --layers 24 --heads 14 --kv_heads 2 --ff 4864 \
                              --vocab 151936 --prompts 16 --plen 256 --clen 512 --steps 3 \
                              --dtype bfloat16                                          # 0.5B

The model is a Qwen2 decoder with random float32 weights, which computes in --dtype. Each
step takes `prompts` prompts of `plen` tokens and samples G completions of at most `clen` tokens for
each (temperature 1, stop at eos). The reward counts three letters. Then the step makes one update
with a frozen reference (kl_coef 0.04, AdamW, learning rate 1e-4), `micro` prompts at a time (0: the
program's choice). With --lengths=geometric, so many tokens end a completion that lengths are about
geometric with mean clen / 8. With --lengths=equal, each has clen tokens. --rows is how many
completions are decoded together (0: all). With --staleness above 0, batches are drawn so many steps
ahead, with --weights as rollout.weights has it. With --sampler=1, a device of its own draws them
beside the one that learns. On a CPU the two devices share its cores.

The script prints one line of JSON. Times are in seconds. They are medians over all steps but the
first, which compiles.

  gen_s        sampling, rewards and log-probs of the reference
  step_s       the whole step
  sample_s, reference_s, update_s   parts of the step
  compile_s    how much longer the first step took than the median step
  tokens       tokens actually emitted per step, median
  token_us     microseconds of a step for each of them
  seats_used   the share of the seats that drew a token, in a round of decoding, from step 2 on
  matmul_share the update's FLOP/s, divided by those of a plain product [N, D] x [D, F] in the
               model's dtype that runs in this process just after the steps. N are the tokens of
               a step. The update counts 6 FLOPs for each weight of a layer and each token of
               prompts and completions, and 6 for each weight of the head and each token of
               completions. It counts neither attention scores nor padding
  plain_tflops what that product reaches
  peak_mb      peak memory of this process
  device_mb    peak memory of the device, where it counts it
"""

import argparse
from collections.abc import Mapping, Sequence
import json
from pathlib import Path
import random
import resource
import statistics
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.asynchronous.ahead import Ahead, Beside, ahead_in_turn
from grpo_jax.asynchronous.schedule import WeightSchedule
from grpo_jax.batches.collect import Collector
from grpo_jax.config import Config, from_dict
from grpo_jax.configs import default
from grpo_jax.data.tasks import tasks
from grpo_jax.rewards import REWARDS
from grpo_jax.run.run import Run
from grpo_jax.scoring.scorers import Scorers
from grpo_jax.storage.checkpoint import Checkpoints
from grpo_jax.training.loop import GrpoStep
from grpo_jax.training.state import StateStore

SIZES = dict(
  d=128,
  layers=4,
  heads=4,
  kv_heads=0,  # 0: as many as heads
  ff=512,
  vocab=64,
  prompts=32,
  G=8,
  plen=16,
  clen=32,
  steps=8,
  seed=0,
  micro=0,
)
LETTERS = [chr(c) for c in range(33, 33 + 62)]


def count_letters(completions: Sequence[str], **_: Any) -> list[float]:
  """The number of A, B and C in each completion."""
  return [float(sum(character in "ABC" for character in text)) for text in completions]


def make_config(args: argparse.Namespace) -> Config:
  """The config of the job whose sizes are in `args`."""
  c = default.get_config()
  # Steps beyond those that are taken, so that the seats do not get empty towards the end.
  c.seed, c.steps = args.seed, args.steps + 1 + args.staleness
  c.model.update(
    embed_dim=args.d,
    num_layers=args.layers,
    num_heads=args.heads,
    num_kv_heads=args.kv_heads or args.heads,
    head_dim=args.d // args.heads,
    mlp_dim=args.ff,
    tie_embeddings=True,
    dtype=args.dtype,
    reference_dtype=args.dtype,
    attention=args.attention,
  )
  c.data.update(task="letters", max_prompt_tokens=args.plen)
  c.batch.update(prompts=args.prompts, group_size=args.G, micro_batch=args.micro)
  c.sampling.max_tokens, c.sampling.rows = args.clen, args.rows
  c.sampling.min_tokens = args.clen if args.lengths == "equal" else 0
  c.sampling.stop_ids = stop_ids(args)
  c.sampling.dtype = args.dtype
  if args.staleness:
    c.rollout.update(max_staleness=args.staleness, weights=args.weights)
    c.mesh.update(sampler=args.sampler, data=1)
    c.algo.old_logprobs = "sampler"
  c.learner.remat = args.remat
  c.learner.remat_policy = "nothing_saveable"  # as in all measurements of the log
  c.reward.functions = ("letters",)
  c.algo.kl_coef = 0.04
  # Long tails keep their lengths only if nothing is learned.
  c.optimizer.learning_rate = 1e-12 if args.lengths == "geometric" else 1e-4
  c.eval.batch, c.log.completions_every, c.log.tensorboard = 8, 0, False
  c.warm_start.batch = 8
  return from_dict(c.to_dict())


def stop_ids(args: argparse.Namespace) -> tuple[int, ...]:
  """Ids that end a completion beside eos: together 8 / clen of the vocabulary. Or none."""
  if args.lengths != "geometric":
    return ()
  return tuple(range(2, 1 + max(1, round(8 * args.vocab / args.clen))))


def register_job(args: argparse.Namespace) -> None:
  """Adds the task `letters`, with random prompts, and its reward function."""
  rng = random.Random(0)
  prompts = [
    {"question": "".join(rng.choices(LETTERS, k=args.plen))}
    for _ in range(args.prompts * (args.steps + 2))
  ]
  padding = [chr(0x10000 + i) for i in range(args.vocab - 2 - len(LETTERS))]
  alphabet = "".join(LETTERS + padding)

  def letters(path: str) -> tasks.Task:
    del path
    return tasks.Task(prompts, prompts, alphabet)

  tasks.TASKS["letters"] = letters
  REWARDS["letters"] = count_letters


def median_seconds(rows: Sequence[Mapping[str, float]], *parts: str) -> float:
  """The median over the rows of the time that these parts of a step took together."""
  return statistics.median(sum(row[f"time/{part}"] for part in parts) for row in rows)


def plain_flops(N: int, D: int, F: int, dtype: str) -> float:
  """The FLOP/s of a product [N, D] x [D, F], the median of seven."""
  x_ND, y_DF = jnp.ones((N, D), dtype), jnp.ones((D, F), dtype)
  product = jax.jit(jnp.matmul)
  product(x_ND, y_DF).block_until_ready()  # compiles
  times = []
  for _ in range(7):
    start = time.perf_counter()
    product(x_ND, y_DF).block_until_ready()
    times.append(time.perf_counter() - start)
  return 2 * N * D * F / statistics.median(times)


def update_flops(params: Mapping[str, Any], prompt_tokens: int, tokens: float) -> float:
  """The FLOPs of an update, as `matmul_share` counts them. The head is the embedding."""
  head = params["embed"]["embedding"].size
  stacks = [entry for name, entry in params.items() if name.startswith("layers_")]
  in_layers = sum(x.size for x in jax.tree.leaves(stacks))
  return 6 * (in_layers * (prompt_tokens + tokens) + head * tokens)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  for name, value in SIZES.items():
    parser.add_argument(f"--{name}", type=int, default=value)
  parser.add_argument("--rows", type=int, default=0)
  parser.add_argument("--lengths", choices=("natural", "geometric", "equal"), default="natural")
  parser.add_argument("--dtype", default="float32")
  parser.add_argument("--attention", default="auto")
  parser.add_argument("--remat", action="store_true")
  parser.add_argument("--staleness", type=int, default=0)
  parser.add_argument("--sampler", type=int, choices=(0, 1), default=0)
  parser.add_argument("--weights", choices=("fixed", "newest", "in_flight"), default="fixed")
  args = parser.parse_args()
  register_job(args)
  if args.sampler and not args.staleness:
    parser.error("--sampler=1 needs --staleness above 0")
  if args.sampler:
    jax.config.update("jax_num_cpu_devices", 2)

  run, workdir = Run(make_config(args)), Path(tempfile.mkdtemp())
  collector = Collector(run, Scorers(run))
  ahead: Ahead | None = None
  if args.sampler:
    schedule = None
    if args.weights != "fixed":
      schedule = WeightSchedule(workdir, in_flight=args.weights == "in_flight")
    ahead = Beside(collector, run.config, schedule)
  elif args.staleness:
    ahead = ahead_in_turn(collector, run.config)
  checkpoints = Checkpoints(workdir / "checkpoints", keep=1)
  store = StateStore(run, workdir, checkpoints, collector.initial_host_state())
  take_step = GrpoStep(run, ahead or collector, store)
  state, _, _ = store.restore_or_init()
  rows = []
  for step in range(args.steps + 1):
    taken = take_step(state, step)
    state = taken.state
    rows.append(taken.metrics)
  if ahead is not None:
    ahead.close()

  compiled = rows[1:]
  step_s = median_seconds(compiled, "step")
  update_s = median_seconds(compiled, "update")
  tokens = statistics.median(row["completions/tokens"] for row in compiled)
  prompt_tokens = args.prompts * args.plen
  plain = plain_flops(int(prompt_tokens + tokens), args.d, args.ff, args.dtype)
  name = "rollout/seats_idle"  # a batch that was there before its step has none
  idle = [row[name] for row in rows[2:] or compiled if name in row]
  result = dict(
    peer="grpo_jax",
    gen_s=median_seconds(compiled, "sample", "reward", "reference"),
    step_s=step_s,
    tokens=tokens,
    token_us=1e6 * step_s / tokens,
    seats_used=1 - statistics.mean(idle),
    sample_s=median_seconds(compiled, "sample"),
    reference_s=median_seconds(compiled, "reference"),
    update_s=update_s,
    matmul_share=update_flops(state.train.params, prompt_tokens, tokens) / update_s / plain,
    compile_s=rows[0]["time/step"] - step_s,
    plain_tflops=plain / 1e12,
    peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    device_mb=(jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**20,
    params=sum(x.size for x in jax.tree.leaves(state.train.params)),
    device=jax.devices()[0].device_kind,
  )
  print(json.dumps(result))


if __name__ == "__main__":
  main()
