"""Writes tiny random reward models with transformers, and the scores that it computes.

  python tests/golden/make_rewards.py [NAME ...]
  python tests/golden/make_rewards.py compare

`compare` loads and saves each model with grpo_jax, lets transformers read what was saved, and
compares the scores.

Made with transformers 5.23.0 and torch 2.13.0 (CPU), in the shapes of make_families.py.
expected.npz has the scores of right-padded rows of tokens. A folder with a tokenizer also has
texts.json: prompts, completions and their scores. transformers tokenises whole texts there, as
TRL's GRPOTrainer does, or step by step, as its PRMTrainer does.
"""

import json
from pathlib import Path
import sys
import tempfile

from make_families import FAMILIES, config_of
from make_qwen2 import make_model
import numpy as np
import tokenizers
import torch
import transformers

FOLDER, T, LENGTHS = Path(__file__).parent / "rewards", 40, (40, 23, 1)
SMALL = dict(hidden_size=16, intermediate_size=24, vocab_size=48)
SUMS = (
  ["7+15-6=", "3+4+5+6="],
  ["7+15=22;22-6=16;#### 16", "#### 18", "", "3+4=7;;7+5=12;#### 12"],
)
PROSE = (
  ["How many legs have 3 cats?", "What is 2 + 2? Think."],
  [
    "A cat has 4 legs.\n\nSo 3 cats have 12 legs.\n\n#### 12",
    "12",
    "\n\nNo idea.\n\n",
    "Two and two.\n\n4",
  ],
)
BYTES = dict(vocab_size=320)
REWARDS = {  # folder: (row of FAMILIES, head, fields, texts, separator of steps)
  "qwen2": ("qwen2_window", "Sequence", SMALL, SUMS, None),
  "qwen3": ("qwen3", "Sequence", SMALL, None, None),
  "llama": ("llama", "Sequence", SMALL | BYTES, PROSE, None),
  "mistral": ("mistral", "Sequence", SMALL, None, None),
  "phi3": ("phi3", "Sequence", SMALL, None, None),
  "gemma2": ("gemma2", "Sequence", SMALL, None, None),
  "gemma3": ("gemma3", "Sequence", SMALL, None, None),
  "qwen2_steps": ("qwen2_window", "Token", SMALL, SUMS, ";"),
  "llama_steps": ("llama3", "Token", SMALL | BYTES, PROSE, "\n\n"),
  "qwen3_5": ("qwen3_5", "Sequence", SMALL, None, None),
  "qwen3_next": ("qwen3_next", "Sequence", SMALL, None, None),
  "gpt_oss": ("gpt_oss", "Sequence", SMALL, None, None),
  "deepseek_v3": ("deepseek_v3", "Sequence", SMALL, None, None),
}


def main(names):
  for seed, (name, (row, head, fields, texts, separator)) in enumerate(REWARDS.items(), start=40):
    if names and name not in names:
      continue
    family, base, _ = FAMILIES[row]
    config = config_of(family, base | fields)
    config.num_labels, config.architectures = {"Sequence": 1, "Token": 2}[head], None
    family = f"{family}Text" if family in ("Gemma3", "Qwen3_5") else family
    model = make_model(getattr(transformers, f"{family}For{head}Classification")(config), seed).to(
      torch.bfloat16
    )
    folder = FOLDER / name
    model.save_pretrained(folder)
    tokens = np.random.default_rng(seed).integers(4, config.vocab_size, (3, T), dtype=np.int32)
    np.savez_compressed(
      folder / "expected.npz",
      tokens=tokens,
      lengths=np.array(LENGTHS, np.int32),
      scores=scores_of(folder, tokens, LENGTHS),
    )
    if texts:
      write_texts(folder, *texts, separator)


def scores_of(folder, tokens, lengths):
  """float32 scores: of texts [B], of steps [B, T], the probability of label 1 at every token."""
  head = json.loads((folder / "config.json").read_text())["architectures"][0]
  model = (
    getattr(transformers, head)
    .from_pretrained(
      folder,
      dtype=torch.float32,
      attn_implementation="eager",
      experts_implementation="eager",
    )
    .eval()
  )
  model.config.pad_token_id = 0
  mask = np.arange(tokens.shape[1]) < np.array(lengths)[:, None]
  with torch.no_grad():
    out = model(
      torch.tensor(np.where(mask, tokens, 0)).long(), attention_mask=torch.tensor(mask).long()
    ).logits
  return (out[:, 0] if head.endswith("SequenceClassification") else out.softmax(-1)[..., 1]).numpy()


def write_texts(folder, prompts, completions, separator):
  """Writes the scores of each prompt with each completion, without the help of grpo_jax."""
  (characters if prompts is SUMS[0] else byte_level)(folder)
  # AutoTokenizer would split texts as Qwen2's own tokenizer does.
  tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
  pairs = [(prompt, completion) for prompt in prompts for completion in completions]
  split = whole_text if separator is None else steps_of_text
  texts = [split(tokenizer, prompt, completion, separator) for prompt, completion in pairs]
  lengths = [len(ids) for ids, _, _ in texts]
  tokens = np.array([ids + [0] * (max(lengths) - len(ids)) for ids, _, _ in texts])
  scores = scores_of(folder, tokens, lengths)
  steps = [
    [[end, float(score if separator is None else score[place])] for end, place in zip(ends, places)]
    for score, (_, places, ends) in zip(scores, texts)
  ]
  values = {
    "prompts": [prompt for prompt, _ in pairs],
    "completions": [completion for _, completion in pairs],
    "separator": separator,
    "steps": steps,
  }
  (folder / "texts.json").write_text(json.dumps(values, indent=1))


def ids_of(tokenizer, text):
  return tokenizer(text, add_special_tokens=False)["input_ids"]


def whole_text(tokenizer, prompt, completion, separator):
  """Token ids, the place of the token whose score counts, and the end of the completion."""
  ids = ids_of(tokenizer, prompt + completion)
  return ids, [len(ids) - 1], [max(1, len(completion))]


def steps_of_text(tokenizer, prompt, completion, separator):
  """Token ids, the places of the tokens whose scores count, and where in the text steps end."""
  bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
  ids = bos + ids_of(tokenizer, prompt)
  places, ends, end = [], [], 0
  parts = completion.split(separator)
  for part in parts:
    end += len(part) + len(separator)
    if part.strip() or len(parts) == 1:
      ids = ids + ids_of(tokenizer, part) + ids_of(tokenizer, separator)
      places.append(len(ids) - 1)
      ends.append(max(1, min(end, len(completion))))
  return ids, places, ends


def characters(folder):
  """The vocabulary of the arithmetic task, so that runs can be scored."""
  from grpo_jax.data.tasks import arithmetic
  from grpo_jax.data.tokenizers import tokenizer

  tokenizer.characters(arithmetic.ALPHABET).save(folder)


def byte_level(folder):
  """Byte-level BPE, trained on the texts. <s> begins a text, and 0 pads."""
  engine = tokenizers.Tokenizer(tokenizers.models.BPE())
  engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  engine.decoder = tokenizers.decoders.ByteLevel()
  engine.train_from_iterator(
    [text for texts in PROSE for text in texts] * 3,
    tokenizers.trainers.BpeTrainer(
      vocab_size=320,
      special_tokens=["<pad>", "<s>", "</s>"],
      show_progress=False,
      initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
    ),
  )
  transformers.PreTrainedTokenizerFast(
    tokenizer_object=engine, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
  ).save_pretrained(folder)


def compare():
  from grpo_jax import model

  for folder in sorted(FOLDER.iterdir()):
    expected = np.load(folder / "expected.npz")
    with tempfile.TemporaryDirectory() as parent:
      model.save(Path(parent) / "saved", *model.load(folder, labels=model.REWARD_HEADS))
      scores = scores_of(Path(parent) / "saved", expected["tokens"], expected["lengths"])
    mask = np.arange(T) < expected["lengths"][:, None] if scores.ndim == 2 else slice(None)
    largest = np.abs(scores - expected["scores"])[mask].max()
    print(f"{folder.name}: largest difference of a score {largest:.1e}", flush=True)


if __name__ == "__main__":
  compare() if sys.argv[1:] == ["compare"] else main(sys.argv[1:])
