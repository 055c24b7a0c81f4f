"""Writes GGUF files from Hugging Face folders, with the names that the package gguf has."""

import json
from pathlib import Path
import re

import gguf
from gguf import GGMLQuantizationType as Kind
import ml_dtypes  # noqa: F401  numpy then knows bfloat16
import numpy as np
from safetensors import safe_open
import sentencepiece

ARCHITECTURES = {  # by model_type
  "llama": gguf.MODEL_ARCH.LLAMA,
  "mistral": gguf.MODEL_ARCH.LLAMA,
  "qwen2": gguf.MODEL_ARCH.QWEN2,
  "qwen3": gguf.MODEL_ARCH.QWEN3,
  "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
  "phi3": gguf.MODEL_ARCH.PHI3,
  "gemma2": gguf.MODEL_ARCH.GEMMA2,
  "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}
LETTERS = [chr(65 + i) for i in range(96)]


def write(path, folder, kind=Kind.F32, tokenizer=None, **changes):
  """Writes the model in a folder.

  Args:
    path: The file to write.
    folder: The model.
    kind: How matrices are stored whose rows consist of whole blocks. Others are F32.
    tokenizer: A function that adds a tokenizer. None adds a vocabulary without merges.
    changes: Metadata by key behind the architecture, with __ for a dot. None leaves a key out.
  """
  config = json.loads((folder / "config.json").read_text())
  writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[config["model_type"]]])
  fields = {**metadata(config), **{key.replace("__", "."): x for key, x in changes.items()}}
  for key, value in fields.items():
    if value is not None:
      add_field(writer, f"{writer.arch}.{key}", value)
  if tokenizer:
    tokenizer(writer)
  else:
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(LETTERS[: config["vocab_size"]])
    writer.add_token_merges([])
    for key, add in (("eos", writer.add_eos_token_id), ("pad", writer.add_pad_token_id)):
      found = config.get(f"{key}_token_id")
      if found is not None:
        add(found[0] if isinstance(found, list) else found)
  for name, array in tensors(folder, config):
    add_tensor(writer, name, array, kind)
  finish(writer)
  return path


def finish(writer):
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


def add_field(writer, key, value):
  add = {str: writer.add_string, bool: writer.add_bool, float: writer.add_float32}
  add |= {int: writer.add_uint32, list: writer.add_array}
  add[type(value)](key, value)


def add_tensor(writer, name, array, kind):
  block, _ = gguf.GGML_QUANT_SIZES[kind]
  if array.ndim == 1 or array.shape[-1] % block:
    kind = Kind.F32
  writer.add_tensor(name, gguf.quants.quantize(array.astype(np.float32), kind), raw_dtype=kind)


def metadata(config):
  """The metadata of a config.json, by keys behind the architecture."""
  head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
  fields = {
    "block_count": config["num_hidden_layers"],
    "context_length": config["max_position_embeddings"],
    "embedding_length": config["hidden_size"],
    "feed_forward_length": config["intermediate_size"],
    "attention.head_count": config["num_attention_heads"],
    "attention.head_count_kv": config["num_key_value_heads"],
    "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
    "attention.key_length": head_dim,
    "attention.value_length": head_dim,
  }
  rope = config["rope_parameters"]
  rope = rope.get("full_attention", rope)
  fields["rope.freq_base"] = float(rope["rope_theta"])
  if config["model_type"] in ("llama", "mistral"):
    fields["rope.dimension_count"] = head_dim
    fields["vocab_size"] = config["vocab_size"]
  if rope["rope_type"] in ("linear", "yarn"):
    fields["rope.scaling.type"] = rope["rope_type"]
    fields["rope.scaling.factor"] = rope["factor"]
    if rope["rope_type"] == "yarn":
      fields["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
  if config["model_type"] in ("mistral", "phi3", "gemma2", "gemma3_text"):
    fields["attention.sliding_window"] = config["sliding_window"]
  if config["model_type"] == "gemma3_text":
    types = config["layer_types"]
    fields["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in types]
  if config["model_type"] == "gemma2":
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
      fields[key] = config[key]
  if config["model_type"] == "qwen3_moe":
    fields |= {
      "expert_count": config["num_local_experts"],
      "expert_used_count": config["num_experts_per_tok"],
      "expert_feed_forward_length": config["moe_intermediate_size"],
    }
  return fields


def tensors(folder, config):
  """The tensors of a file, by their names in it."""
  names = gguf.get_tensor_name_map(ARCHITECTURES[config["model_type"]], config["num_hidden_layers"])
  experts = {}
  for hf_name, array in _hf_tensors(folder):
    hf_name, expert = re.subn(r"\.experts\.\d+\.", ".experts.", hf_name)
    name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
    if expert:
      experts.setdefault(name, []).append(array)
      continue
    if config["model_type"] in ("llama", "mistral"):
      array = _rotated(name, array, config)
    if config["model_type"].startswith("gemma") and name.endswith("norm.weight"):
      array = array + np.float32(1)
    yield name, array
  yield from ((name, np.stack(arrays)) for name, arrays in experts.items())
  rope = config["rope_parameters"]
  if rope.get("rope_type") == "llama3":
    yield "rope_freqs.weight", _llama3_divisors(rope, config["head_dim"])


def _hf_tensors(folder):
  """The tensors of a folder in float32, experts in their order."""
  for file in sorted(folder.glob("*.safetensors")):
    with safe_open(file, framework="numpy") as opened:
      for name in sorted(opened.keys(), key=lambda x: [int(i) for i in re.findall(r"\d+", x)]):
        yield name, opened.get_tensor(name).astype(np.float32)


def _rotated(name, array, config):
  """Puts row i + E/2 of a head of queries or keys behind row i."""
  heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
  key = heads.get(name.split(".")[-2])
  if key is None:
    return array
  halves = array.reshape(config[key], 2, -1, array.shape[-1])
  return halves.transpose(0, 2, 1, 3).reshape(array.shape)


def _llama3_divisors(rope, head_dim):
  """What llama.cpp divides the frequencies by, from the lengths of their waves."""
  divisors = []
  original, factor = rope["original_max_position_embeddings"], rope["factor"]
  low, high = rope["low_freq_factor"], rope["high_freq_factor"]
  for i in range(0, head_dim, 2):
    wave = 2 * np.pi * rope["rope_theta"] ** (i / head_dim)
    if wave < original / high:
      divisors.append(1.0)
    elif wave > original / low:
      divisors.append(factor)
    else:
      smooth = (original / wave - low) / (high - low)
      divisors.append(1 / ((1 - smooth) / factor + smooth))
  return np.array(divisors, np.float32)


def on_bytes(folder, pre, add_bos=None):
  """A function that adds the tokenizer of a folder's tokenizer.json, a BPE on bytes."""
  parts = json.loads((folder / "tokenizer.json").read_text())
  config = json.loads((folder / "tokenizer_config.json").read_text())
  added = {token["id"]: token for token in parts["added_tokens"]}
  tokens = {i: token for token, i in parts["model"]["vocab"].items()}
  tokens |= {i: token["content"] for i, token in added.items()}
  template = folder / "chat_template.jinja"

  def add(writer):
    texts = [tokens.get(i, f"[PAD{i}]") for i in range(max(tokens) + 1)]
    kinds = [(3 if added[i]["special"] else 4) if i in added else 1 for i in range(len(texts))]
    kinds = [kind if i in tokens else 5 for i, kind in enumerate(kinds)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    writer.add_token_merges(
      [x if isinstance(x, str) else " ".join(x) for x in parts["model"]["merges"]]
    )
    _add_special(writer, config, texts)
    if add_bos is not None:
      writer.add_add_bos_token(add_bos)
    writer.add_chat_template(template.read_text() if template.exists() else config["chat_template"])

  return add


def on_characters(folder, add_space=None):
  """A function that adds the tokenizer of a folder's tokenizer.model."""
  model = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
  config = json.loads((folder / "tokenizer_config.json").read_text())
  added = {int(i): token for i, token in config.get("added_tokens_decoder", {}).items()}

  def add(writer):
    texts = [model.id_to_piece(i) for i in range(model.get_piece_size())]
    scores = [model.get_score(i) for i in range(len(texts))]
    kinds = [_kind(model, i) for i in range(len(texts))]
    for i in range(len(texts), max(added, default=-1) + 1):
      texts.append(f"[PAD{i}]")
      scores.append(-1e4)
      kinds.append(5)
    for i, token in added.items():
      texts[i], kinds[i] = token["content"], 3 if token["special"] else 4
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(texts)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    _add_special(writer, config, texts)
    if add_space is not None:
      writer.add_add_space_prefix(add_space)
    writer.add_chat_template(config["chat_template"])

  return add


def _kind(model, i):
  if model.is_unknown(i):
    return 2
  if model.is_control(i):
    return 3
  return 6 if model.is_byte(i) else 1


def _add_special(writer, config, texts):
  add = {
    "bos_token": writer.add_bos_token_id,
    "eos_token": writer.add_eos_token_id,
    "unk_token": writer.add_unk_token_id,
    "pad_token": writer.add_pad_token_id,
  }
  for role, add_id in add.items():
    token = config.get(role)
    text = token["content"] if isinstance(token, dict) else token
    if text in texts:
      add_id(texts.index(text))


GOLDEN = Path(__file__).parent / "golden"
TEXTS = [
  case["text"]
  for case in json.loads((GOLDEN / "tokenizers/qwen/expected.json").read_text())["texts"]
]
TOKENIZERS = {  # case: (folder of the model, what adds its tokenizer)
  "qwen2": ("families/qwen3", on_bytes(GOLDEN / "tokenizers/qwen", "qwen2", False)),
  "llama-bpe": ("families/llama3", on_bytes(GOLDEN / "tokenizers/llama3", "llama-bpe", True)),
  "tekken": ("families/llama", on_bytes(GOLDEN / "tokenizers/llama3", "tekken", False)),
  "gpt-4o": ("families/llama", on_bytes(GOLDEN / "tokenizers/llama3", "gpt-4o", True)),
  "smollm": ("families/llama", on_bytes(GOLDEN / "tokenizers/llama3", "smollm", False)),
  "spm": ("families/llama", on_characters(GOLDEN / "tokenizers/llama2")),
  "gemma": ("families/gemma2", on_characters(GOLDEN / "tokenizers/gemma", False)),
  "phi3": ("families/phi3", on_characters(GOLDEN / "tokenizers/llama2")),
}


def write_with_tokenizer(path, case):
  """Writes a model with a tokenizer of TOKENIZERS, which has more ids than the model."""
  folder, tokenizer = TOKENIZERS[case]
  return write(path, GOLDEN / folder, tokenizer=tokenizer, vocab_size=None)


# 93 symbols of bytes: a space, a line break, and the printable characters of ASCII but three.
SYMBOLS = ["Ġ", "Ċ", *(chr(i) for i in range(33, 127) if chr(i) not in "^|~")]
