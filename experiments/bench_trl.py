"""Times the job of bench.py in TRL, on the same machine, for a ratio of the two.

  pip install trl==1.16.0 torch==2.13.0
  python experiments/bench_trl.py                                       # the tiny job of bench.py
  python experiments/bench_trl.py --d 512 --layers 8 --heads 8 --ff 2048 --vocab 8192 --prompts 8 \
    --plen 64 --clen 128 --steps 3                                      # the small one

It prints one line of JSON with the medians over the steps: gen_s is the time of TRL's
`_generate_and_score_completions` (sampling, rewards and the reference's log-probs) and step_s that
of a whole step, as gen_s and step_s of bench.py are. The first step is left out of both.
"""

import argparse
import json
import os
from pathlib import Path
import random
import statistics
import tempfile
import time
from typing import Any

from needs import needs

# Before the import of TRL, which reads it.
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here is on huggingface.co

from bench import LETTERS, SIZES, count_letters

with needs("pip install trl==1.16.0 torch==2.13.0"):
  import datasets
  import tokenizers
  import torch
  import transformers
  from trl import GRPOConfig, GRPOTrainer


class Timed(GRPOTrainer):
  """TRL's trainer, which notes how long each step takes.

  Attributes:
    gen_s: Seconds of `_generate_and_score_completions`, of each step.
    ends: When each step ended.
    tokens: How many tokens were sampled in each step.
  """

  def __init__(self, **arguments: Any) -> None:
    self.gen_s, self.ends, self.tokens = list[float](), list[float](), list[int]()
    super().__init__(**arguments)

  def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
    start = time.perf_counter()
    output = super()._generate_and_score_completions(inputs)
    self.gen_s.append(time.perf_counter() - start)
    self.tokens.append(int(output["completion_mask"].sum()))
    return output


class Ends(transformers.TrainerCallback):
  """Notes when a step of a `Timed` ends."""

  def __init__(self, ends: list[float]) -> None:
    self._ends = ends

  def on_step_end(self, *arguments: Any, **options: Any) -> None:
    del arguments, options
    self._ends.append(time.perf_counter())


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  for name, value in SIZES.items():
    parser.add_argument(f"--{name}", type=int, default=value)
  args = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    trainer = make_trainer(args, Path(folder))
    trainer.train()
  steps = [end - start for start, end in zip(trainer.ends, trainer.ends[1:])]
  line = {
    "peer": "trl",
    "gen_s": statistics.median(trainer.gen_s[1:]),
    "step_s": statistics.median(steps),
    "tokens": statistics.median(trainer.tokens[1:]),
  }
  print(json.dumps(line))


def make_trainer(args: argparse.Namespace, folder: Path) -> Timed:
  """The trainer of the job whose sizes are in `args`. It writes to `folder`."""
  torch.manual_seed(args.seed)
  model = transformers.LlamaForCausalLM(
    transformers.LlamaConfig(
      vocab_size=args.vocab,
      hidden_size=args.d,
      intermediate_size=args.ff,
      num_hidden_layers=args.layers,
      num_attention_heads=args.heads,
      num_key_value_heads=args.kv_heads or args.heads,
      tie_word_embeddings=True,
      max_position_embeddings=args.plen + args.clen,
      eos_token_id=1,
      pad_token_id=0,
    )
  )
  config = GRPOConfig(
    model_init_kwargs={"dtype": "float32"},
    max_steps=args.steps + 1,
    per_device_train_batch_size=args.prompts * args.G,
    num_generations=args.G,
    max_completion_length=args.clen,
    learning_rate=1e-4,
    beta=0.04,
    bf16=False,
    gradient_checkpointing=False,
    use_cpu=True,
    seed=args.seed,
    output_dir=str(folder),
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
    logging_strategy="no",
  )
  rng = random.Random(0)
  count = args.prompts * (args.steps + 1)
  prompts = [{"prompt": "".join(rng.choices(LETTERS, k=args.plen))} for _ in range(count)]
  tokenizer, path = make_tokenizer(args.vocab), str(folder / "model")
  model.save_pretrained(path)
  tokenizer.save_pretrained(path)
  trainer = Timed(
    model=path,
    reward_funcs=count_letters,
    args=config,
    train_dataset=datasets.Dataset.from_list(prompts),
    processing_class=tokenizer,
  )
  trainer.add_callback(Ends(trainer.ends))
  return trainer


def make_tokenizer(vocab: int) -> transformers.PreTrainedTokenizerFast:
  """One token for each character, as in bench.py."""
  padding = [chr(0x10000 + i) for i in range(vocab - 2 - len(LETTERS))]
  ids = {text: i for i, text in enumerate(["<pad>", "<eos>", *LETTERS, *padding])}
  model = tokenizers.models.WordLevel(ids, unk_token="<pad>")
  tokenizer = tokenizers.Tokenizer(model)
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
  )


if __name__ == "__main__":
  main()
