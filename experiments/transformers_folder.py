"""Makes a small random checkpoint with transformers, and compares grpo_jax with transformers on it.

  pip install torch transformers peft
  python experiments/transformers_folder.py make --out=FOLDER --text=train.jsonl [--dtype=bfloat16]
  python experiments/transformers_folder.py compare --folder=FOLDER --text=test.jsonl \
    [--adapter=FOLDER]

`make` writes a Qwen2 decoder of 2 layers and a byte-level BPE tokenizer with a chat template. The
tokenizer is trained on the text.

`compare` takes 8 questions with their answers from the text, as conversations. It compares their
token ids and prints the largest difference of a logit in float32. With --adapter, transformers
loads the adapter through peft.

These are checks to run by hand. The package does not need this file.
"""

import argparse
from collections.abc import Callable
import dataclasses
import itertools
import json
from typing import Any

from needs import needs
import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

with needs("pip install torch transformers peft"):
  import torch
  import transformers
  from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

VOCABULARY = 2048
TEMPLATE = (
  "{% for m in messages %}"
  "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
  "{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PAD, END, START = "<|endoftext|>", "<|im_end|>", "<|im_start|>"
CONVERSATIONS = 8  # that `compare` reads


def read_lines(path: str, count: int) -> list[dict[str, Any]]:
  """The first `count` objects of a jsonl file."""
  with open(path, encoding="utf-8") as file:
    return [json.loads(line) for line in itertools.islice(file, count)]


def train_tokenizer(text: str) -> Tokenizer:
  """A byte-level BPE tokenizer, trained on questions and answers of a jsonl file."""
  engine = Tokenizer(models.BPE())
  engine.normalizer = normalizers.NFC()
  # As in Qwen2's tokenizer: transformers 5 replaces any other pre-tokenizer by this one.
  engine.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated"),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  engine.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=VOCABULARY,
    special_tokens=[PAD, END, START],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  engine.train_from_iterator(
    ["{question}\n{answer}".format(**row) for row in read_lines(text, 2000)], trainer
  )
  return engine


def make(out: str, text: str, dtype: str, **shape: float) -> None:
  """Writes tokenizer and random model into the folder `out`. `shape` are fields of Qwen2Config."""
  transformers.PreTrainedTokenizerFast(
    tokenizer_object=train_tokenizer(text),
    eos_token=END,
    pad_token=PAD,
    additional_special_tokens=[START],
    chat_template=TEMPLATE,
  ).save_pretrained(out)
  torch.manual_seed(0)
  small = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.2,  # at the usual 0.02 all logits would be near 0
  )
  config = transformers.Qwen2Config(
    max_position_embeddings=2048,
    tie_word_embeddings=True,
    eos_token_id=1,
    pad_token_id=0,
    bos_token_id=None,
    **small | shape,
  )
  qwen2 = transformers.Qwen2ForCausalLM(config).to(getattr(torch, dtype))
  qwen2.save_pretrained(out)


def compare(folder: str, text: str, adapter: str | None) -> None:
  """Prints how far grpo_jax and transformers are apart on the folder, with or without adapter."""
  # Imported here, so that `make` also runs where grpo_jax is not installed.
  import jax.numpy as jnp

  from grpo_jax import model
  from grpo_jax.data.tokenizers import tokenizer

  torch_model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
  torch_tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  our_tokenizer = tokenizer.load(folder)
  config, params = model.load(folder)
  if adapter:
    import peft  # only adapters need it

    torch_model = peft.PeftModel.from_pretrained(torch_model, adapter)
    config = dataclasses.replace(config, lora=model.load_adapter_shape(adapter))
    params = model.join(params, model.load_adapters(adapter, config))
  largest_difference, largest_logit, equal = 0.0, 0.0, 0
  for row in read_lines(text, CONVERSATIONS):
    messages = [
      {"role": "user", "content": row["question"]},
      {"role": "assistant", "content": row["answer"]},
    ]
    ids = torch_tokenizer.apply_chat_template(messages, return_dict=False)
    rendered = our_tokenizer.render(messages, generation_prompt=False)
    equal += ids == our_tokenizer.encode(rendered)
    with torch.no_grad():
      expected = torch_model(torch.tensor([ids])).logits[0].numpy()
    positions = jnp.arange(len(ids))[None]
    logits, _ = model.forward(params, config, jnp.array([ids]), positions)
    difference = float(np.abs(np.asarray(logits[0]) - expected).max())
    largest_difference = max(largest_difference, difference)
    largest_logit = max(largest_logit, float(np.abs(expected).max()))
  print(
    f"{adapter or folder}: token ids equal in {equal} of {CONVERSATIONS} conversations, "
    f"largest difference of a logit {largest_difference:.1e} (logits up to {largest_logit:.1f})"
  )


def parse_arguments() -> dict[str, Any]:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  commands = parser.add_subparsers(dest="command", required=True)
  make_parser, compare_parser = commands.add_parser("make"), commands.add_parser("compare")
  make_parser.add_argument("--out", required=True)
  make_parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
  compare_parser.add_argument("--folder", required=True)
  compare_parser.add_argument("--adapter")
  for command in (make_parser, compare_parser):
    command.add_argument(
      "--text", required=True, help="a jsonl file with question and answer, such as GSM8K's"
    )
  return vars(parser.parse_args())


def main() -> None:
  commands: dict[str, Callable[..., None]] = {"make": make, "compare": compare}
  arguments = parse_arguments()
  commands[arguments.pop("command")](**arguments)


if __name__ == "__main__":
  main()
