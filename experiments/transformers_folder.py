"""Makes a small random checkpoint with `transformers`, and compares what a folder computes there and here.

  pip install torch transformers peft
  python experiments/transformers_folder.py make --out=FOLDER --text=train.jsonl [--dtype=bfloat16]
  python experiments/transformers_folder.py compare --folder=FOLDER --text=test.jsonl [--adapter=FOLDER]

`make`: a Qwen2 decoder of 2 layers, and a byte-level BPE tokenizer trained on the text, with a chat template. `compare`: token
ids of 8 conversations, a question and its answer of the text, and the largest difference of a logit, in float32; with an
adapter, there through peft. For checks by hand; nothing of the package needs it.
"""

import argparse
import itertools
import json

import numpy as np
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

VOCABULARY = 2048


TEMPLATE = (
  "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def rows(path, count):
  """The first lines of a jsonl file."""
  with open(path, encoding="utf-8") as file:
    return [json.loads(line) for line in itertools.islice(file, count)]


def make(out, text, dtype):
  engine = Tokenizer(models.BPE())
  engine.normalizer = normalizers.NFC()
  engine.pre_tokenizer = pre_tokenizers.Sequence(
    [  # as Qwen2's, which transformers 5 puts in the place of any other
      pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated"),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  engine.decoder = decoders.ByteLevel()
  special = ["<|endoftext|>", "<|im_end|>", "<|im_start|>"]
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  texts = ["{question}\n{answer}".format(**row) for row in rows(text, 2000)]
  engine.train_from_iterator(
    texts,
    trainers.BpeTrainer(
      vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    ),
  )
  transformers.PreTrainedTokenizerFast(
    tokenizer_object=engine,
    eos_token=special[1],
    pad_token=special[0],
    additional_special_tokens=special[2:],
    chat_template=TEMPLATE,
  ).save_pretrained(out)
  torch.manual_seed(0)
  config = transformers.Qwen2Config(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
    eos_token_id=1,
    pad_token_id=0,
    bos_token_id=None,
    initializer_range=0.2,
  )  # at the usual 0.02 all logits would be near 0
  model = transformers.Qwen2ForCausalLM(config).to(getattr(torch, dtype))
  model.save_pretrained(out)


def compare(folder, text, adapter):
  import dataclasses

  import jax.numpy as jnp

  from grpo_jax import model
  from grpo_jax.data import tokenizer

  theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
  their_tokenizer, our_tokenizer = (
    transformers.AutoTokenizer.from_pretrained(folder),
    tokenizer.load(folder),
  )
  config, params = model.load(folder)
  if adapter:
    import peft

    theirs = peft.PeftModel.from_pretrained(theirs, adapter)
    config = dataclasses.replace(config, lora=model.load_lora(adapter))
    params = model.join(params, model.load_adapters(adapter, config))
  largest, scale, same = 0.0, 0.0, 0
  for row in rows(text, 8):
    messages = [
      {"role": "user", "content": row["question"]},
      {"role": "assistant", "content": row["answer"]},
    ]
    ids = their_tokenizer.apply_chat_template(messages, return_dict=False)
    same += ids == our_tokenizer.encode(our_tokenizer.render(messages, generation_prompt=False))
    with torch.no_grad():
      expected = theirs(torch.tensor([ids])).logits[0].numpy()
    logits, _ = model.forward(params, config, jnp.array([ids]), jnp.arange(len(ids))[None])
    scale = max(scale, float(np.abs(expected).max()))
    largest = max(largest, float(np.abs(np.asarray(logits[0]) - expected).max()))
  print(
    f"{adapter or folder}: token ids equal in {same} of 8 conversations, largest difference of a logit {largest:.1e} "
    f"(logits up to {scale:.1f})"
  )


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  commands = parser.add_subparsers(dest="command", required=True)
  making, comparing = commands.add_parser("make"), commands.add_parser("compare")
  making.add_argument("--out", required=True)
  making.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
  comparing.add_argument("--folder", required=True)
  comparing.add_argument("--adapter")
  for command in (making, comparing):
    command.add_argument(
      "--text", required=True, help="a jsonl file with question and answer, such as GSM8K's"
    )
  arguments = vars(parser.parse_args())
  {"make": make, "compare": compare}[arguments.pop("command")](**arguments)


if __name__ == "__main__":
  main()
