"""A tiny random Qwen2 with a tokenizer and a chat template, and problems like those of GSM8K."""

import json

import jax
import tokenizers

from grpo_jax import model

VOCABULARY = 4096  # of the model. The tokenizer has at most as many ids.
TEMPLATE = (
  "{% for m in messages %}"
  "{{ '<|im_start|>' + m.role + '\n' + m.content + eos_token + '\n' }}"
  "{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def problems(count):
  for i in range(count):
    a, b = 2 + i % 7, 3 + i % 5
    boxes = f"The boxes hold {a}*{b}=<<{a}*{b}={a * b}>>{a * b} pens."
    yield {
      "question": f"Ann has {a} boxes of {b} pens and one pen more. How many pens does she have?",
      "answer": f"{boxes}\nShe has {a * b + 1}.\n#### {a * b + 1}",
    }


def trained_tokenizer(corpus):
  """Byte-level BPE like that of Qwen."""
  engine = tokenizers.Tokenizer(tokenizers.models.BPE())
  engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  engine.decoder = tokenizers.decoders.ByteLevel()
  engine.train_from_iterator(
    corpus,
    tokenizers.trainers.BpeTrainer(
      vocab_size=VOCABULARY,
      special_tokens=["<|endoftext|>", "<|im_end|>", "<|im_start|>"],
      show_progress=False,
      initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    ),
  )
  return engine


def write_tokenizer(folder, engine):
  engine.save(str(folder / "tokenizer.json"))
  (folder / "tokenizer_config.json").write_text(
    json.dumps({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE})
  )


def make_checkpoint(folder, corpus, every_id_is_text=False, **fields):
  """A tiny random Qwen2 with a tokenizer for `corpus`.

  Its model has more ids than its tokenizer, as real ones have. With `every_id_is_text` it has as
  many, so that the random model writes texts that are not empty. `fields` of its shape may make it
  one of another family.
  """
  engine = trained_tokenizer(corpus)
  of_qwen = dict(
    vocab_size=engine.get_vocab_size() if every_id_is_text else VOCABULARY,
    embed_dim=16,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=32,
    rope_theta=1e6,
    max_positions=1024,
    stop_ids=(1, 0),
  )
  shape = model.ModelConfig(**of_qwen | fields)
  model.save(folder, shape, jax.jit(model.init, static_argnums=1)(jax.random.key(7), shape))
  write_tokenizer(folder, engine)
  return folder
