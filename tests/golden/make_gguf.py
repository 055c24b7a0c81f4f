"""Writes down how transformers reads the tokenizers of small GGUF files, and compares logits.

  python tests/golden/make_gguf.py            # writes tests/golden/gguf/tokens.json
  python tests/golden/make_gguf.py compare    # logits of every family, at several quantisations

The files are written by tests/gguf_writing.py. A GGUF file leaves out some fields, for which
transformers takes those of its own classes. So the models of `compare` have these values.

Made with transformers 5.23.0, torch 2.13.0 (CPU) and gguf 0.19.0.
"""

import json
from pathlib import Path
import sys
import tempfile

from gguf import GGMLQuantizationType as Kind
import numpy as np
import torch
import transformers

FOLDER = Path(__file__).parent / "gguf"
sys.path.insert(0, str(FOLDER.parents[1]))
import gguf_writing  # noqa: E402  it is in tests/

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Oh."}]
COMMON = dict(
  vocab_size=96,
  hidden_size=64,
  intermediate_size=96,
  num_hidden_layers=3,
  num_attention_heads=4,
  num_key_value_heads=2,
  max_position_embeddings=64,
  rms_norm_eps=1e-5,
  eos_token_id=3,
  bos_token_id=1,
  pad_token_id=0,
)
ROPE, ROPE_1M = dict(rope_theta=10000.0), dict(rope_theta=1e6)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=768, norm_topk_prob=True)
GEMMA = dict(head_dim=256, query_pre_attn_scalar=256)
FAMILIES = {  # class: fields
  "Llama": dict(COMMON, rope_parameters=ROPE),
  "Qwen2": dict(COMMON, rope_parameters=ROPE_1M, tie_word_embeddings=True),
  "Qwen3": dict(COMMON, rope_parameters=ROPE_1M, head_dim=128),
  "Qwen3Moe": dict(COMMON, rope_parameters=ROPE_1M, head_dim=128, **EXPERTS),
  "Phi3": dict(COMMON, rope_parameters=ROPE),
  "Gemma2": dict(COMMON, rope_parameters=ROPE, sliding_window=4096, **GEMMA),
  "Gemma3": dict(
    {**COMMON, "num_hidden_layers": 7},
    sliding_window=8,
    rope_parameters={"full_attention": ROPE_1M, "sliding_attention": ROPE},
    **GEMMA,
  ),
}


def read_tokenizer(case):
  """What transformers makes of the texts and a conversation, with one case of TOKENIZERS."""
  with tempfile.TemporaryDirectory() as folder:
    gguf_writing.write_with_tokenizer(Path(folder, "x.gguf"), case)
    tokens = transformers.AutoTokenizer.from_pretrained(folder, gguf_file="x.gguf")
  texts = gguf_writing.TEXTS
  return {
    "ids": tokens(texts, add_special_tokens=False)["input_ids"],
    "first": tokens("0")["input_ids"],
    "eos": tokens.eos_token_id,
    "chat": tokens.apply_chat_template(CHAT, tokenize=False),
  }


def make():
  FOLDER.mkdir(exist_ok=True)
  cases = {case: read_tokenizer(case) for case in gguf_writing.TOKENIZERS}
  (FOLDER / "tokens.json").write_text(json.dumps(cases, separators=(",", ":")) + "\n")


def random_model(name, folder):
  """Saves a model of random weights."""
  torch.manual_seed(0)
  config_class = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
  config = getattr(transformers, config_class)(**FAMILIES[name])
  model = getattr(transformers, f"{name}ForCausalLM")(config)
  with torch.no_grad():
    for path, parameter in model.named_parameters():
      # Gemma multiplies by 1 + the weight of a norm, the others by the weight.
      centre = 1.0 if "norm" in path and not name.startswith("Gemma") else 0.0
      parameter.copy_(centre + 0.15 * torch.randn_like(parameter))
  model.save_pretrained(folder)


def compare(name, kind):
  """The largest difference between the logits of transformers and of grpo_jax, from one file."""
  import jax.numpy as jnp

  from grpo_jax import model

  with tempfile.TemporaryDirectory() as folder:
    random_model(name, folder)
    absent = {"attention__sliding_window_pattern": None}
    if name == "Phi3":
      absent["attention__sliding_window"] = None
    file = gguf_writing.write(Path(folder, "x.gguf"), Path(folder), kind, **absent)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
      folder, gguf_file="x.gguf", dtype=torch.float32
    )
    config, params = model.load(file)
  tokens_BT = np.random.default_rng(0).integers(0, 96, (2, 40))
  with torch.no_grad():
    expected = theirs.eval()(torch.tensor(tokens_BT)).logits.numpy()
  positions_BT = jnp.broadcast_to(jnp.arange(40), (2, 40))
  logits_BTV, _ = model.forward(params, config, jnp.asarray(tokens_BT), positions_BT)
  return float(np.abs(np.asarray(logits_BTV) - expected).max()), float(np.abs(expected).max())


if __name__ == "__main__":
  if sys.argv[1:] == ["compare"]:
    for name in FAMILIES:
      for kind in (Kind.F32, Kind.BF16, Kind.Q8_0):
        difference, largest = compare(name, kind)
        print(f"{name}, {kind.name}: {difference:.1e}, of logits up to {largest:.1f}")
  else:
    make()
