"""One fixed GRPO job through this project's sampler, reward, reference and update, timed. Prints one JSON line.

  python experiments/bench.py                                                                   # tiny
  python experiments/bench.py --d 512 --layers 8 --heads 8 --ff 2048 --vocab 8192 \
                              --prompts 8 --plen 64 --clen 128 --steps 4                        # small

A Qwen2 decoder of random float32 weights; each step samples G completions of at most `clen` tokens for each of `prompts`
prompts of `plen` tokens (temperature 1, stop at eos), rewards the count of three letters, and makes one update
(kl_coef 0.04 with a frozen reference, AdamW, learning rate 1e-4).

gen_s: sampling, rewards and reference log-probs; step_s: the whole step; sample_s, reference_s, update_s: parts of it.
Medians over the steps after the first, which compiles; compile_s: what the first step took longer. tokens: really emitted
per step, median. peak_mb: of this process.
"""

import argparse
import json
import random
import resource
import statistics
import tempfile

import jax

from configs import default
from grpo_jax.config import from_dict
from grpo_jax.data import tasks
from grpo_jax.rewards import REWARDS
from grpo_jax.train import Trainer

SIZES = dict(
  d=128, layers=4, heads=4, ff=512, vocab=64, prompts=32, G=8, plen=16, clen=32, steps=8, seed=0
)
LETTERS = [chr(c) for c in range(33, 33 + 62)]


def letters(completions, **_):
  """The number of A, B and C in each completion."""
  return [float(sum(character in "ABC" for character in text)) for text in completions]


def config_of(a):
  """The job as a config of this project."""
  c = default.get_config()
  c.seed, c.steps = a.seed, a.steps + 1
  c.model.update(
    embed_dim=a.d,
    num_layers=a.layers,
    num_heads=a.heads,
    num_kv_heads=a.heads,
    head_dim=a.d // a.heads,
    mlp_dim=a.ff,
    tie_embeddings=True,
  )
  c.data.update(task="letters", max_prompt_tokens=a.plen)
  c.batch.update(prompts=a.prompts, group_size=a.G)
  c.sampling.max_tokens = a.clen
  c.reward.functions = ("letters",)
  c.algo.kl_coef = 0.04
  c.optimizer.learning_rate = 1e-4
  c.eval.batch, c.log.completions_every, c.log.tensorboard = 8, 0, False
  c.warm_start.batch = 8
  return from_dict(c.to_dict())


def main():
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  for name, value in SIZES.items():
    parser.add_argument(f"--{name}", type=int, default=value)
  a = parser.parse_args()

  rng = random.Random(0)
  prompts = [
    {"question": "".join(rng.choices(LETTERS, k=a.plen))} for _ in range(a.prompts * (a.steps + 2))
  ]
  alphabet = LETTERS + [chr(0x4E00 + i) for i in range(a.vocab - 2 - len(LETTERS))]
  tasks.TASKS["letters"] = lambda path: tasks.Task(prompts, prompts, "".join(alphabet))
  REWARDS["letters"] = letters

  trainer = Trainer(config_of(a), tempfile.mkdtemp())
  state, rows = trainer.run.init_state(trainer.run.initial_params()), []
  trainer.frozen = trainer.run.initial_params()
  for step in range(a.steps + 1):
    state, metrics = trainer.grpo_step(state, step)
    rows.append(metrics)
  seconds = lambda row, names: sum(row[f"time/{name}"] for name in names)
  median = lambda names: statistics.median(seconds(row, names) for row in rows[1:])
  print(
    json.dumps(
      dict(
        peer="grpo_jax",
        gen_s=median(["sample", "reward", "reference"]),
        step_s=median(["step"]),
        tokens=statistics.median(row["completions/tokens"] for row in rows[1:]),
        sample_s=median(["sample"]),
        reference_s=median(["reference"]),
        update_s=median(["update"]),
        compile_s=rows[0]["time/step"] - median(["step"]),
        peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        params=sum(x.size for x in jax.tree.leaves(state.params)),
        device=jax.devices()[0].device_kind,
      )
    )
  )


if __name__ == "__main__":
  main()
