"""Tokens a second of our own sampler and of an engine of others, in turn, on the same prompts.

Command:  python experiments/engine_speed.py --folder=FOLDER --url=http://127.0.0.1:8000
          [--config=smollm2] [--dtype=float32] [--prompts=16] [--members=8] [--tokens=128]
First:    --folder=NEW --make writes the model of the recipe as a folder, and --command prints how
          to start the server on CPUs.
"""

from pathlib import Path
import tempfile
import time
from typing import Any

from absl import app, flags
import jax
import numpy as np

import grpo_jax
from grpo_jax.data import loader
from grpo_jax.engine.connect import ExternalEngine
from grpo_jax.engine.engines import ENGINES, line
from grpo_jax.rollouts.complete import Completer, make_rollout
from grpo_jax.run.run import Run

FLAGS = flags.FLAGS
flags.DEFINE_string("config", "smollm2", "a recipe")
flags.DEFINE_string("folder", None, "a Hugging Face folder of its model", required=True)
flags.DEFINE_string("url", "http://127.0.0.1:8000", "the server")
flags.DEFINE_string("dtype", "float32", "of our sampler and of the server")
flags.DEFINE_integer("prompts", 16, "P")
flags.DEFINE_integer("members", 8, "G")
flags.DEFINE_integer("tokens", 128, "T")
flags.DEFINE_integer("rounds", 3, "measurements of each")
flags.DEFINE_bool("make", False, "write the folder and end")
flags.DEFINE_bool("command", False, "print the command of the server and end")


def measured(
  name: str, rollout: Completer, params: Any, prompts: loader.PromptBatch, key: jax.Array
) -> float:
  """Draws all prompts once. Prints and returns tokens a second."""
  began = time.perf_counter()
  completions = rollout(params, prompts, key).completions
  seconds, tokens = time.perf_counter() - began, int(completions.lengths_PG.sum())
  print(f"{name:8} {tokens} tokens in {seconds:.1f} s: {tokens / seconds:.1f} a second", flush=True)
  return tokens / seconds


def main(argv: list[str]) -> None:
  del argv
  if FLAGS.make:
    grpo_jax.load_policy(grpo_jax.load_config(FLAGS.config, {"lora.rank": 0})).export(FLAGS.folder)
    return
  config = grpo_jax.load_config(
    FLAGS.config,
    {
      "model.path": FLAGS.folder,
      "model.dtype": FLAGS.dtype,
      "lora.rank": 0,
      "batch.prompts": FLAGS.prompts,
      "batch.group_size": FLAGS.members,
      "sampling.max_tokens": FLAGS.tokens,
      "rollout.engine": "vllm",
      "rollout.engine_urls": (FLAGS.url,),
    },
  )
  if FLAGS.command:
    kind = ENGINES[config.rollout.engine]
    print(line(kind.environment(config, True), kind.command(config, FLAGS.url, on_cpu=True)))
    return
  run = Run(config)
  indices = np.arange(FLAGS.prompts)
  prompts = loader.prompt_batch(run.prompts("train"), indices, run.hosts)
  params = run.parameters.for_sampling(run.initial_params())
  engine, key = ExternalEngine(run, lambda: False), run.key("sample")
  with tempfile.TemporaryDirectory() as folder:
    engine.open(Path(folder))
    ours = make_rollout(run, FLAGS.members)
    theirs = make_rollout(run, FLAGS.members, remote=engine.groups)
    print("the first round of each is not counted: it compiles, and loads weights")
    found = []
    for number in range(FLAGS.rounds + 1):
      # Other random numbers, because the record would give what was drawn before.
      own_key = jax.random.fold_in(key, number)
      pair = [
        measured(name, rollout, params, prompts, own_key)
        for name, rollout in (("ours", ours), ("engine", theirs))
      ]
      found += [pair] if number else []
    engine.close()
  of_ours, of_engine = np.median(found, axis=0)
  print(
    f"median: ours {of_ours:.1f} tokens a second, engine {of_engine:.1f}, in {FLAGS.dtype} both;"
    f" engine / ours {np.median([b / a for a, b in found]):.2f}"
  )


if __name__ == "__main__":
  app.run(main)
