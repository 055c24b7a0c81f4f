"""Writes tiny random Qwen2 checkpoints with transformers, and the logits that it computes.

  python tests/golden/make_qwen2.py

Made with transformers 5.23.0 and torch 2.13.0 (CPU). With transformers 4, the command only writes
qwen2_tied/config_transformers4.json: the config.json of the same model in the form of that version
(made with 4.57.6).
"""

from pathlib import Path
import shutil
import tempfile

import numpy as np
import torch
import transformers

FOLDER = Path(__file__).parent
LENGTHS = (24, 13, 1)
COMMON = dict(
  vocab_size=96,
  hidden_size=32,
  intermediate_size=64,
  num_hidden_layers=2,
  num_attention_heads=4,
  max_position_embeddings=128,
  architectures=["Qwen2ForCausalLM"],
)
# Grouped queries, H * E larger than D, theta and epsilon that differ from the defaults.
TIED = dict(
  COMMON,
  num_key_value_heads=2,
  head_dim=16,
  rope_theta=50000.0,
  rms_norm_eps=1e-5,
  tie_word_embeddings=True,
  eos_token_id=3,
)
# As many key heads as query heads, and no head_dim, so that it is hidden_size / heads.
# generation_config.json has more stop ids than config.json.
UNTIED = dict(
  COMMON,
  num_key_value_heads=4,
  rope_theta=1000000.0,
  rms_norm_eps=1e-6,
  tie_word_embeddings=False,
  eos_token_id=5,
)


def make_model(model: transformers.PreTrainedModel, seed: int) -> transformers.PreTrainedModel:
  """Makes every parameter random. A norm of ones or a bias of zeros could hide a mistake."""
  generator = torch.Generator().manual_seed(seed)
  with torch.no_grad():
    for name, parameter in sorted(model.named_parameters()):
      noise = torch.randn(parameter.shape, generator=generator)
      if "norm" in name:
        parameter.copy_(1 + 0.3 * noise)
      elif name.endswith("bias"):
        parameter.copy_(0.5 * noise)
      else:
        parameter.copy_(1.5 * noise / parameter.shape[-1] ** 0.5)
    for name, buffer in model.named_buffers():
      if name.endswith("e_score_correction_bias"):  # no parameter, as it has no gradient
        buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
      if name.endswith("layer_scalar"):
        buffer.copy_(1 + 0.3 * torch.randn(buffer.shape, generator=generator))
  return model


def write_expected(folder: Path, seed: int) -> None:
  """Writes right-padded tokens [3, 24], lengths [3] and float32 logits [3, 24, V].

  Logits at padding have no meaning.
  """
  model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
  tokens = np.random.default_rng(seed).integers(0, 96, (3, 24), dtype=np.int32)
  mask = np.arange(24) < np.array(LENGTHS)[:, None]
  with torch.no_grad():
    logits = model(torch.tensor(tokens).long(), attention_mask=torch.tensor(mask).long()).logits
  np.savez(
    folder / "expected.npz",
    tokens=tokens,
    lengths=np.array(LENGTHS, np.int32),
    logits=logits.numpy(),
  )


def write_checkpoints() -> None:
  tied, untied = FOLDER / "qwen2_tied", FOLDER / "qwen2_untied"

  def untrained(fields: dict) -> transformers.PreTrainedModel:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**fields))

  make_model(untrained(TIED), seed=1).save_pretrained(tied)
  model = make_model(untrained(UNTIED), seed=2).to(torch.bfloat16)
  model.generation_config.eos_token_id = [5, 7]
  model.save_pretrained(untied, max_shard_size="20KB")
  write_expected(tied, seed=3)
  write_expected(untied, seed=4)


def write_config_of_transformers_4() -> None:
  with tempfile.TemporaryDirectory() as folder:
    transformers.Qwen2Config(**TIED, dtype="float32").save_pretrained(folder)
    shutil.copy(Path(folder) / "config.json", FOLDER / "qwen2_tied/config_transformers4.json")


if __name__ == "__main__":
  if transformers.__version__.startswith("4."):
    write_config_of_transformers_4()
  else:
    write_checkpoints()
