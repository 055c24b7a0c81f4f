"""Times GRPO steps of a pretrained checkpoint, in grpo_jax or in TRL, on the same job.

  python experiments/pretrained_step.py --model=FOLDER                    # grpo_jax, kl_coef 0.04
  python experiments/pretrained_step.py --model=FOLDER --kl=0             # and without a KL
  python experiments/pretrained_step.py --model=FOLDER --program=trl      # needs torch, trl 1.16.0

A step is 16 prompts x 8 completions of at most 128 tokens, at temperature 1, in float32 or --dtype,
with one update. The prompts are word problems in the model's chat template. The reward of a
completion is made up, so that an exact share of the groups teaches nothing: in those all rewards
are 0, and in the others every other completion has 1. Both programs get the same prompts and
rewards. The learning rate is 1e-6, so that the texts stay as long as they are.

It prints one line of JSON with medians over all steps but the first, which compiles. `tokens` are
those of the completions. `peak_mb` is the peak memory of the process, and `device_mb` that of an
accelerator. Both programs take the accelerator that there is.
"""

import argparse
import json
import os
from pathlib import Path
import random
import resource
import statistics
import tempfile
import time
from typing import Any

SYSTEM = "You solve word problems."
STORIES = (
  "{name} has {a} apples and buys {b} bags with {c} apples each. How many apples does {name} have?",
  "{name} reads {a} pages a day for {b} days and then {c} more. How many pages is that?",
  "There are {a} buses with {b} children each, and {c} children walk. How many children are there?",
  "{name} earns {a} dollars an hour, works {b} hours and spends {c} dollars. How much is left?",
)


def problems(count: int) -> list[str]:
  """So many questions."""
  rng = random.Random(0)
  names = ("Ana", "Ben", "Carla", "David", "Emma", "Finn")
  return [
    rng.choice(STORIES).format(
      name=rng.choice(names), a=rng.randint(5, 50), b=rng.randint(2, 9), c=rng.randint(2, 40)
    )
    for _ in range(count)
  ]


def rows(args: argparse.Namespace) -> list[dict[str, Any]]:
  """The problems of all steps, each with whether its group learns."""
  learning = round(args.prompts * (1 - args.idle))
  return [
    {"question": question, "answer": "0", "learns": i % args.prompts < learning}
    for i, question in enumerate(problems(args.prompts * args.steps))
  ]


def made_up(learns: list[bool]) -> list[float]:
  """Rewards of completions, a group's one after the other."""
  return [float(learns[i] and i % 2) for i in range(len(learns))]


def of_grpo_jax(args: argparse.Namespace, folder: Path) -> dict[str, float]:
  """Medians of a run of grpo_jax."""
  import jax  # here, because TRL's side runs where grpo_jax is not installed

  import grpo_jax

  def reward(completions: list[str], learns: list[bool], **columns: Any) -> list[float]:
    del completions, columns
    return made_up(learns)

  grpo_jax.register_reward(reward)
  data = folder / "train.jsonl"
  data.write_text("".join(json.dumps(row) + "\n" for row in rows(args)))
  settings = {
    "model.path": args.model,
    "model.dtype": args.dtype,
    "model.reference_dtype": args.dtype,
    "sampling.dtype": "",
    "sampling.max_tokens": args.max_tokens,
    "data.task": "columns",
    "data.path": str(data),
    "data.prompt": "{question}",
    "data.system": SYSTEM,
    "reward.functions": ("reward",),
    "batch.prompts": args.prompts,
    "batch.group_size": args.group,
    "steps": args.steps,
    "algo.kl_coef": args.kl,
    "optimizer.learning_rate": 1e-6,
    "optimizer.warmup_steps": 0,
    "eval.every": 0,
    "checkpoint.every": 0,
    "log.completions_every": 0,
    **{key: json.loads(value) for key, value in (one.split("=", 1) for one in args.set)},
  }
  grpo_jax.train(grpo_jax.load_config("gsm8k", settings), folder / "run")
  lines = (folder / "run/metrics.jsonl").read_text().splitlines()
  steps = [row for row in map(json.loads, lines) if "time/step" in row][1:]

  def median(name: str) -> float:
    return round(statistics.median(row[name] for row in steps), 3)

  return {
    "step_s": median("time/step"),
    "sample_s": median("time/sample"),
    "reference_s": median("time/reference"),
    "update_s": median("time/update"),
    "tokens": median("completions/tokens"),
    "padding": median("perf/padding"),
    "idle_groups": median("frac_reward_zero_std"),
    "device_mb": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) >> 20,
  }


def of_trl(args: argparse.Namespace, folder: Path) -> dict[str, float]:
  """Medians of a run of TRL, as its documentation sets it up."""
  os.environ.setdefault("HF_HUB_OFFLINE", "1")
  import datasets
  import torch
  import transformers
  import trl

  starts: list[float] = []
  sampled: list[float] = []

  def reward(completions: list[Any], learns: list[bool], **columns: Any) -> list[float]:
    del completions, columns
    sampled.append(time.perf_counter() - starts[-1])
    return made_up(learns)

  class Clock(transformers.TrainerCallback):
    def on_step_begin(self, *given: Any, **more: Any) -> None:
      starts.append(time.perf_counter())

  given = [
    {
      "prompt": [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": row["question"]},
      ],
      "learns": row["learns"],
    }
    for row in rows(args)
  ]
  config = trl.GRPOConfig(
    max_steps=args.steps,
    per_device_train_batch_size=args.prompts * args.group // args.accumulation,
    gradient_accumulation_steps=args.accumulation,
    num_generations=args.group,
    max_completion_length=args.max_tokens,
    learning_rate=1e-6,
    beta=args.kl,
    bf16=args.dtype == "bfloat16",
    gradient_checkpointing=args.checkpointing,
    use_cpu=not torch.cuda.is_available(),
    shuffle_dataset=False,
    output_dir=str(folder),
    logging_steps=1,
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
  )
  trainer = trl.GRPOTrainer(
    model=args.model,
    reward_funcs=reward,
    args=config,
    train_dataset=datasets.Dataset.from_list(given),
    callbacks=[Clock()],
  )
  trainer.train()
  starts.append(time.perf_counter())
  steps = [after - before for before, after in zip(starts, starts[1:])][1:]
  logged = [row for row in trainer.state.log_history if "completions/mean_length" in row][1:]
  lengths = [row["completions/mean_length"] for row in logged]
  idle = [row["frac_reward_zero_std"] for row in logged]
  return {
    "step_s": round(statistics.median(steps), 3),
    "sample_s": round(statistics.median(sampled[1:]), 3),
    "tokens": statistics.median(lengths) * args.prompts * args.group,
    "idle_groups": statistics.median(idle),
    "device_mb": torch.cuda.max_memory_allocated() >> 20 if torch.cuda.is_available() else 0,
  }


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--model", required=True)
  parser.add_argument("--program", choices=("grpo_jax", "trl"), default="grpo_jax")
  parser.add_argument("--kl", type=float, default=0.04)
  parser.add_argument("--idle", type=float, default=0.8, help="the share of idle groups")
  parser.add_argument("--prompts", type=int, default=16)
  parser.add_argument("--group", type=int, default=8)
  parser.add_argument("--max_tokens", type=int, default=128)
  parser.add_argument("--steps", type=int, default=3)
  parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
  parser.add_argument("--set", nargs="*", default=[], metavar="KEY=JSON", help="other settings")
  parser.add_argument("--accumulation", type=int, default=1, help="TRL's parts of a batch")
  parser.add_argument("--checkpointing", action="store_true", help="TRL's gradient checkpointing")
  args = parser.parse_args()
  run = of_trl if args.program == "trl" else of_grpo_jax
  with tempfile.TemporaryDirectory() as folder:
    found = run(args, Path(folder))
  peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
  named = {"program": args.program, "kl": args.kl, "set": args.set}
  print(json.dumps(named | found | {"peak_mb": peak_mb}))


if __name__ == "__main__":
  main()
