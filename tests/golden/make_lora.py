"""Writes random LoRA adapters for checkpoints of this folder with peft, and the logits it computes.

  python tests/golden/make_lora.py [NAME ...]
  python tests/golden/make_lora.py compare

`compare` saves each adapter and the merged model with grpo_jax, lets peft and transformers read
them, and compares the logits. Before, it changes the adapters at random, so that projections of one
module no longer have an A in common.

Made with peft 0.21.2, transformers 5.23.0 and torch 2.13.0 (CPU).
"""

from pathlib import Path
import sys
import tempfile

import numpy as np
import peft
import torch
import transformers

HERE = Path(__file__).parent
FOLDER = HERE / "lora"
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OF_DELTA = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
ADAPTERS = {  # folder: (base, fields)
  "qwen2_all": ("qwen2_tied", dict(r=4, lora_alpha=8, target_modules=ALL)),
  "qwen2_some": (
    "qwen2_untied",
    dict(r=3, lora_alpha=5, use_rslora=True, target_modules=["q_proj", "o_proj", "down_proj"]),
  ),
  "gemma2": ("families/gemma2", dict(r=2, lora_alpha=4, target_modules=ALL, lora_dropout=0.1)),
  "phi3": (
    "families/phi3",
    dict(r=2, lora_alpha=6, target_modules=["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]),
  ),
  "qwen3_5": (
    "families/qwen3_5",
    dict(r=2, lora_alpha=3, use_rslora=True, target_modules=OF_DELTA + ["q_proj", "o_proj"]),
  ),
  "qwen3_next": (
    "families/qwen3_next",
    dict(r=2, lora_alpha=4, target_modules=["in_proj_qkvz", "in_proj_ba", "out_proj", "v_proj"]),
  ),
}


def main(names):
  for seed, (name, (base, fields)) in enumerate(ADAPTERS.items(), start=40):
    if names and name not in names:
      continue
    torch.manual_seed(seed)
    model = peft.get_peft_model(
      base_model(HERE / base), peft.LoraConfig(task_type="CAUSAL_LM", **fields)
    )
    for parameter_name, parameter in model.named_parameters():
      if "lora_B" in parameter_name:  # peft initialises it with 0
        torch.nn.init.normal_(parameter, std=0.3)
    model.peft_config["default"].base_model_name_or_path = base
    model.save_pretrained(FOLDER / name)
    (FOLDER / name / "README.md").unlink(missing_ok=True)
    np.savez_compressed(FOLDER / name / "expected.npz", logits=logits_of(model, HERE / base))


def base_model(folder):
  return transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32, attn_implementation="eager"
  )


def logits_of(model, folder):
  """Float32 logits of the rows of the base's own golden file."""
  expected = np.load(folder / "expected.npz")
  mask = np.arange(expected["tokens"].shape[1]) < expected["lengths"][:, None]
  with torch.no_grad():
    out = model.eval()(
      input_ids=torch.tensor(expected["tokens"]).long(), attention_mask=torch.tensor(mask).long()
    )
  return np.where(mask[..., None], out.logits.numpy(), 0)


def compare():
  """The largest difference of a logit between grpo_jax and each of peft and transformers."""
  for name in ADAPTERS:
    for how, difference in differences(name).items():
      print(f"{name}, {how}: largest difference of a logit {difference:.1e}", flush=True)


def differences(name):
  """{"adapter": that of peft with the saved adapter, "merged": that of transformers}."""
  import dataclasses

  import jax

  from grpo_jax import model  # imported here because the adapters are made without it

  base = HERE / ADAPTERS[name][0]
  config, params = model.load(base)
  config = dataclasses.replace(config, lora=model.load_adapter_shape(FOLDER / name))
  leaves, tree = jax.tree.flatten(model.load_adapters(FOLDER / name, config))
  random = np.random.default_rng(0)
  changed = [(x + random.normal(size=x.shape) / 20).astype(np.float32) for x in leaves]
  adapters = jax.tree.unflatten(tree, changed)
  joined = model.join(params, adapters)
  rows = np.load(base / "expected.npz")
  tokens, mask = rows["tokens"], np.arange(rows["tokens"].shape[1]) < rows["lengths"][:, None]
  positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
  ours = np.where(mask[..., None], model.forward(joined, config, tokens, positions)[0], 0)
  with tempfile.TemporaryDirectory() as parent:
    model.save_adapters(Path(parent) / "adapter", config, adapters, str(base))
    model.save(Path(parent) / "merged", config, joined)
    read = peft.PeftModel.from_pretrained(base_model(base), Path(parent) / "adapter")
    found = {"adapter": read, "merged": base_model(Path(parent) / "merged")}
    return {how: np.abs(logits_of(saved, base) - ours).max() for how, saved in found.items()}


if __name__ == "__main__":
  compare() if sys.argv[1:] == ["compare"] else main(sys.argv[1:])
