"""Writes random LoRA adapters for checkpoints of this folder with peft, and the logits it computes.

  python tests/golden/make_lora.py
  python tests/golden/make_lora.py compare

`compare` saves each adapter and the merged model with grpo_jax, lets peft and transformers read
them, and compares the logits.

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
ADAPTERS = {  # folder: (base, fields)
  "qwen2_all": ("qwen2_tied", dict(r=4, lora_alpha=8, target_modules=ALL)),
  "qwen2_some": (
    "qwen2_untied",
    dict(r=3, lora_alpha=5, use_rslora=True, target_modules=["q_proj", "o_proj", "down_proj"]),
  ),
  "gemma2": ("families/gemma2", dict(r=2, lora_alpha=4, target_modules=ALL, lora_dropout=0.1)),
}


def main():
  for seed, (name, (base, fields)) in enumerate(ADAPTERS.items(), start=40):
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
  import dataclasses

  from grpo_jax import model  # imported here because the adapters are made without it

  for name, (base, _) in ADAPTERS.items():
    expected = np.load(FOLDER / name / "expected.npz")["logits"]
    config, params = model.load(HERE / base)
    config = dataclasses.replace(config, lora=model.load_adapter_shape(FOLDER / name))
    adapters = model.load_adapters(FOLDER / name, config)
    with tempfile.TemporaryDirectory() as parent:
      model.save_adapters(Path(parent) / "adapter", config, adapters, base)
      model.save(Path(parent) / "merged", config, model.join(params, adapters))
      read = peft.PeftModel.from_pretrained(base_model(HERE / base), Path(parent) / "adapter")
      for how, saved in (("adapter", read), ("merged", base_model(Path(parent) / "merged"))):
        largest = np.abs(logits_of(saved, HERE / base) - expected).max()
        print(f"{name}, {how}: largest difference of a logit {largest:.1e}", flush=True)


if __name__ == "__main__":
  compare() if sys.argv[1:] == ["compare"] else main()
