"""Writes a tiny random checkpoint of every family with transformers, and the logits it computes.

  python tests/golden/make_families.py [NAME ...]
  python tests/golden/make_families.py compare [NAME ...]

Without a NAME, a command covers all folders. `compare` loads and saves each checkpoint with
grpo_jax, lets transformers read what was saved, and compares the logits.

Made with transformers 5.23.0 and torch 2.13.0 (CPU). Texts are longer than every sliding window,
and longer than the original texts of every scaled rotary embedding.
"""

import functools
import json
from pathlib import Path
import sys
import tempfile

from make_qwen2 import make_model
import numpy as np
from safetensors.torch import load_file, save_file
import torch
import transformers

FOLDER, T, LENGTHS = Path(__file__).parent / "families", 40, (40, 23, 1)
COMMON = dict(
  vocab_size=96,
  hidden_size=32,
  intermediate_size=48,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  head_dim=12,
  max_position_embeddings=64,
  rms_norm_eps=1e-5,
  eos_token_id=3,
  pad_token_id=0,
  bos_token_id=1,
)
ROPE = dict(rope_theta=10000.0)
SLIDES, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
GEMMA = dict(
  COMMON,
  num_hidden_layers=3,
  query_pre_attn_scalar=20,
  sliding_window=7,
  tie_word_embeddings=True,
  layer_types=[SLIDES, FULL, SLIDES],
)
GEMMA4 = dict(
  COMMON,
  head_dim=8,
  global_head_dim=12,
  sliding_window=7,
  final_logit_softcapping=3.0,
  hidden_size_per_layer_input=0,
  tie_word_embeddings=True,
  rope_parameters={
    FULL: dict(rope_type="proportional", partial_rotary_factor=0.5, rope_theta=1e6),
    SLIDES: dict(rope_type="default", rope_theta=1e4),
  },
)
DELTA = COMMON | dict(
  head_dim=16,
  num_hidden_layers=4,
  linear_num_key_heads=2,
  linear_num_value_heads=4,
  linear_key_head_dim=10,
  linear_value_head_dim=6,
  linear_conv_kernel_dim=4,
  rms_norm_eps=1e-3,  # less would make much of the rounding of queries that find no key
  rope_parameters=dict(partial_rotary_factor=0.5, **ROPE),
)
SIGMOID = COMMON | dict(
  head_dim=8,
  n_routed_experts=8,
  num_experts_per_tok=3,
  moe_intermediate_size=12,
  n_shared_experts=2,
  n_group=4,
  topk_group=2,
  routed_scaling_factor=1.5,
)
LATENT = SIGMOID | dict(
  head_dim=None,
  num_hidden_layers=3,
  first_k_dense_replace=1,
  num_key_value_heads=4,
  kv_lora_rank=10,
  qk_nope_head_dim=8,
  qk_rope_head_dim=6,
  v_head_dim=9,
)
FAMILIES = {  # folder: (family, fields, dtype of the weights)
  "qwen2_window": (
    "Qwen2",
    dict(
      COMMON,
      use_sliding_window=True,
      sliding_window=9,
      layer_types=[FULL, SLIDES],
      rope_parameters=ROPE,
    ),
    torch.float32,
  ),
  "qwen3": (
    "Qwen3",
    dict(COMMON, rope_parameters=dict(rope_theta=1e6), tie_word_embeddings=True),
    torch.bfloat16,
  ),
  "llama": ("Llama", dict(COMMON, rope_parameters=ROPE, num_key_value_heads=4), torch.float32),
  "llama3": (
    "Llama",
    dict(
      COMMON,
      tie_word_embeddings=True,
      rope_parameters=dict(
        rope_type="llama3",
        rope_theta=5000.0,
        factor=4.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=16,
      ),
    ),
    torch.float32,
  ),
  "llama_linear": (
    "Llama",
    dict(COMMON, rope_parameters=dict(rope_type="linear", factor=4.0, **ROPE)),
    torch.float32,
  ),
  "llama_dynamic": (
    "Llama",
    dict(
      COMMON,
      max_position_embeddings=16,
      rope_parameters=dict(rope_type="dynamic", factor=4.0, **ROPE),
    ),
    torch.float32,
  ),
  "qwen3_yarn": (
    "Qwen3",
    dict(
      COMMON,
      rope_parameters=dict(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=16, **ROPE
      ),
    ),
    torch.float32,
  ),
  "mistral": ("Mistral", dict(COMMON, sliding_window=8, rope_parameters=ROPE), torch.float32),
  "phi3": (
    "Phi3",
    dict(COMMON, head_dim=None, sliding_window=10, rope_parameters=ROPE),
    torch.float32,
  ),
  "gemma2": (
    "Gemma2",
    dict(GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=3.0, rope_parameters=ROPE),
    torch.bfloat16,
  ),
  "gemma3": (
    "Gemma3",
    dict(
      GEMMA,
      rope_parameters={
        FULL: dict(rope_type="linear", factor=8.0, rope_theta=1e6),
        SLIDES: dict(rope_type="default", rope_theta=1e4),
      },
    ),
    torch.float32,
  ),
  "qwen3_moe": (
    "Qwen3Moe",
    dict(
      COMMON,
      num_experts=6,
      num_experts_per_tok=2,
      moe_intermediate_size=20,
      norm_topk_prob=True,
      rope_parameters=dict(rope_theta=1e6),
    ),
    torch.float32,
  ),
  "qwen3_moe_mixed": (
    "Qwen3Moe",
    dict(  # only layer 1 has experts
      COMMON,
      num_hidden_layers=4,
      num_experts=8,
      num_experts_per_tok=3,
      moe_intermediate_size=12,
      norm_topk_prob=False,
      decoder_sparse_step=2,
      mlp_only_layers=[0, 3],
      use_sliding_window=True,
      sliding_window=9,
      tie_word_embeddings=True,
      rope_parameters=ROPE,
    ),
    torch.bfloat16,
  ),
  "olmo2": (
    "Olmo2",
    dict(COMMON, head_dim=None, num_key_value_heads=4, rope_parameters=ROPE),
    torch.float32,
  ),
  "olmo3": (
    "Olmo3",
    dict(
      COMMON,
      head_dim=None,
      num_hidden_layers=5,
      sliding_window=7,
      rope_parameters={
        FULL: dict(
          rope_type="yarn", factor=4.0, original_max_position_embeddings=16, rope_theta=5e5
        ),
        SLIDES: dict(rope_type="default", rope_theta=5e5),
      },
    ),
    torch.float32,
  ),
  "smollm3": (
    "SmolLM3",
    dict(COMMON, head_dim=None, num_hidden_layers=5, rope_parameters=ROPE),
    torch.bfloat16,
  ),
  "smollm3_window": (
    "SmolLM3",
    dict(
      COMMON,
      head_dim=None,
      num_hidden_layers=4,
      no_rope_layers=[1, 0, 1, 0],
      use_sliding_window=True,
      sliding_window=9,
      tie_word_embeddings=False,
      rope_parameters=ROPE,
    ),
    torch.float32,
  ),
  "llama_biases": (
    "Llama",
    dict(COMMON, attention_bias=True, mlp_bias=True, rope_parameters=ROPE),
    torch.float32,
  ),
  "qwen3_biases": ("Qwen3", dict(COMMON, attention_bias=True, rope_parameters=ROPE), torch.float32),
  "phi3_partial": (
    "Phi3",
    dict(
      COMMON,
      head_dim=None,
      num_attention_heads=2,
      sliding_window=None,
      rope_parameters=dict(partial_rotary_factor=0.75, **ROPE),
    ),
    torch.float32,
  ),
  "phi3_longrope": (
    "Phi3",
    dict(
      COMMON,
      head_dim=None,
      num_attention_heads=2,
      sliding_window=None,
      original_max_position_embeddings=16,
      rope_parameters=dict(
        rope_type="longrope",
        partial_rotary_factor=0.75,
        short_factor=[1.0 + 0.1 * i for i in range(6)],
        long_factor=[1.5 + 0.7 * i for i in range(6)],
        **ROPE,
      ),
    ),
    torch.float32,
  ),
  "ministral3": (
    "Ministral3",
    dict(
      COMMON,
      rope_parameters=dict(
        rope_type="yarn",
        factor=4.0,
        original_max_position_embeddings=16,
        mscale=1.0,
        mscale_all_dim=1.0,
        beta_fast=32.0,
        beta_slow=1.0,
        llama_4_scaling_beta=0.4,
        **ROPE,
      ),
    ),
    torch.float32,
  ),
  "granite": (
    "Granite",
    dict(
      COMMON,
      head_dim=None,
      embedding_multiplier=3.0,
      residual_multiplier=0.22,
      attention_multiplier=0.4,
      logits_scaling=0.5,
      tie_word_embeddings=True,
      rope_parameters=ROPE,
    ),
    torch.float32,
  ),
  "qwen3_5": (
    "Qwen3_5",
    dict(
      DELTA,
      layer_types=[LINEAR, FULL, LINEAR, FULL],
      tie_word_embeddings=True,
    ),
    torch.float32,
  ),
  "qwen3_5_moe": (
    "Qwen3_5Moe",
    dict(
      DELTA,
      intermediate_size=None,
      linear_value_head_dim=16,
      num_hidden_layers=2,
      layer_types=[LINEAR, FULL],
      num_experts=6,
      num_experts_per_tok=2,
      moe_intermediate_size=20,
      shared_expert_intermediate_size=12,
    ),
    torch.float32,
  ),
  "qwen3_next": (
    "Qwen3Next",
    dict(
      DELTA,
      num_hidden_layers=2,
      linear_value_head_dim=16,
      rms_norm_eps=1e-2,
      layer_types=[LINEAR, FULL],
      num_experts=6,
      num_experts_per_tok=2,
      moe_intermediate_size=20,
      shared_expert_intermediate_size=12,
      norm_topk_prob=False,
      mlp_only_layers=[1],
    ),
    torch.float32,
  ),
  "gpt_oss": (
    "GptOss",
    dict(
      COMMON,
      intermediate_size=20,
      num_local_experts=6,
      num_experts_per_tok=2,
      sliding_window=7,
      layer_types=[SLIDES, FULL],
      rope_parameters=dict(
        rope_type="yarn",
        factor=4.0,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=False,
        original_max_position_embeddings=16,
        rope_theta=150000.0,
      ),
    ),
    torch.float32,
  ),
  "deepseek_v3": (
    "DeepseekV3",
    dict(LATENT, q_lora_rank=14, rope_parameters=ROPE),
    torch.float32,
  ),
  "deepseek_v3_dense": (
    "DeepseekV3",
    dict(
      LATENT,
      q_lora_rank=14,
      num_hidden_layers=2,
      first_k_dense_replace=2,
      rope_parameters=ROPE,
    ),
    torch.float32,
  ),
  "deepseek_v3_yarn": (
    "DeepseekV3",
    dict(
      LATENT,
      q_lora_rank=None,
      rope_interleave=False,
      v_head_dim=18,
      n_group=1,
      topk_group=1,
      attention_bias=True,
      rope_parameters=dict(
        rope_type="yarn",
        factor=4.0,
        original_max_position_embeddings=16,
        mscale=1.0,
        mscale_all_dim=0.7,
        **ROPE,
      ),
    ),
    torch.float32,
  ),
  "glm4_moe": (
    "Glm4Moe",
    dict(
      SIGMOID,
      num_hidden_layers=3,
      first_k_dense_replace=1,
      use_qk_norm=True,
      attention_bias=True,
      rope_parameters=dict(partial_rotary_factor=0.5, **ROPE),
    ),
    torch.float32,
  ),
  "gemma4": (
    "Gemma4",
    dict(
      GEMMA4,
      num_hidden_layers=4,
      layer_types=[SLIDES, FULL] * 2,
      num_global_key_value_heads=1,
      attention_k_eq_v=True,
      use_bidirectional_attention="vision",
    ),
    torch.float32,
  ),
  "gemma4_e": (
    "Gemma4",
    dict(  # layers 1 and 2 lend their keys, which layers 3 to 5 borrow
      GEMMA4,
      num_hidden_layers=6,
      layer_types=[SLIDES, SLIDES, FULL, SLIDES, FULL, FULL],
      num_kv_shared_layers=3,
      use_double_wide_mlp=True,
      intermediate_size=12,
      hidden_size_per_layer_input=6,
      rms_norm_eps=1e-3,  # less would make much of the rounding where a gate is nearly shut
      vocab_size_per_layer_input=96,
    ),
    torch.float32,
  ),
  "gemma4_moe": (
    "Gemma4",
    dict(
      GEMMA4,
      num_hidden_layers=3,
      layer_types=[SLIDES, SLIDES, FULL],
      num_global_key_value_heads=1,
      attention_k_eq_v=True,
      enable_moe_block=True,
      num_experts=6,
      top_k_experts=2,
      moe_intermediate_size=10,
      intermediate_size=24,
    ),
    torch.float32,
  ),
  "gemma3_scaled": (
    "Gemma3",
    dict(
      GEMMA,
      rope_parameters={
        FULL: dict(
          rope_type="yarn", factor=4.0, original_max_position_embeddings=16, rope_theta=1e6
        ),
        SLIDES: dict(rope_type="linear", factor=2.0, rope_theta=1e4),
      },
    ),
    torch.float32,
  ),
  "glm4_moe_lite": (
    "Glm4MoeLite",
    dict(
      LATENT,
      first_k_dense_replace=None,
      q_lora_rank=14,
      mlp_layer_types=["dense", "sparse", "dense"],
      rope_parameters=ROPE,
    ),
    torch.float32,
  ),
}

GRADIENTS = (
  "qwen3_5",
  "gemma4_e",
  "gpt_oss",
  "deepseek_v3_dense",
)  # folders with the gradients of all tensors

VISION = dict(
  hidden_size=16,
  intermediate_size=16,
  num_hidden_layers=1,
  num_attention_heads=2,
  image_size=16,
  patch_size=8,
)
WITH_IMAGES = {  # folder: (family, fields of the text part, other fields)
  "gemma3_images": (
    "Gemma3",
    FAMILIES["gemma3"][1],
    dict(mm_tokens_per_image=4, vision_config=dict(VISION, model_type="siglip_vision_model")),
  ),
  "mistral3_images": (
    "Mistral3",
    dict(COMMON, model_type="mistral", sliding_window=None, rope_parameters=ROPE),
    dict(tie_word_embeddings=False, vision_config=dict(VISION, head_dim=8, model_type="pixtral")),
  ),
  "qwen3_5_images": (
    "Qwen3_5",
    dict(DELTA, num_hidden_layers=2, layer_types=[LINEAR, FULL], tie_word_embeddings=True),
    dict(
      tie_word_embeddings=True,
      vision_config=dict(
        depth=1,
        hidden_size=16,
        intermediate_size=16,
        num_heads=2,
        patch_size=8,
        out_hidden_size=32,
        num_position_embeddings=4,
      ),
    ),
  ),
  "gemma4_images": (
    "Gemma4",
    dict(GEMMA4, num_hidden_layers=2, layer_types=[SLIDES, FULL]),
    dict(
      vision_config=dict(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        patch_size=4,
        position_embedding_size=16,
      ),
      audio_config=dict(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        subsampling_conv_channels=[4, 4],
        output_proj_dims=16,
      ),
    ),
  ),
}


WITH_TEXT_CONFIG = ("Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe")


def config_of(family, fields):
  # None leaves a field out, apart from the one whose default is a number.
  fields = {k: v for k, v in fields.items() if v is not None or k == "q_lora_rank"}
  name = f"{family}TextConfig" if family in WITH_TEXT_CONFIG else f"{family}Config"
  return getattr(transformers, name)(**fields, architectures=[f"{family}ForCausalLM"])


FP8 = {  # folder: (family, fields, rows and columns of a block)
  "qwen3_fp8": ("Qwen3", dict(COMMON, head_dim=16, rope_parameters=ROPE), (16, 8)),
}


def quantise(folder, block):
  """Makes the projections of a folder float8 with a scale for each block, as DeepSeek's are."""
  file, quantised = folder / "model.safetensors", {}
  for name, weight in load_file(file).items():
    quantised[name] = weight
    if "proj" in name:
      R, C = (size // of_block for size, of_block in zip(weight.shape, block))
      blocks = weight.reshape(R, block[0], C, block[1])
      scales = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
      small = (blocks / scales[:, None, :, None]).reshape(weight.shape)
      quantised[name] = small.to(torch.float8_e4m3fn)
      quantised[f"{name}_scale_inv"] = scales
  save_file(quantised, file, metadata={"format": "pt"})
  how = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic")
  values = json.loads((folder / "config.json").read_text())
  values["quantization_config"] = dict(how, weight_block_size=list(block))
  (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")


MXFP4 = {  # folder: (family, fields)
  "gpt_oss_mxfp4": (
    "GptOss",
    dict(FAMILIES["gpt_oss"][1], intermediate_size=32, layer_types=[FULL, SLIDES]),
  ),
}


def quantise_experts(folder):
  """Makes the experts of a folder random numbers in MXFP4, as the published gpt-oss are."""
  file, quantised, rng = folder / "model.safetensors", {}, np.random.default_rng(0)
  for name, weight in load_file(file).items():
    if not name.endswith(("gate_up_proj", "down_proj")):
      quantised[name] = weight
      continue
    X, inputs, outputs = weight.shape
    blocks = rng.integers(0, 256, (X, outputs, inputs // 32, 16), dtype=np.uint8)
    scales = rng.integers(122, 126, blocks.shape[:-1], dtype=np.uint8)
    quantised[name + "_blocks"] = torch.from_numpy(blocks)
    quantised[name + "_scales"] = torch.from_numpy(scales)
  save_file(quantised, file, metadata={"format": "pt"})
  values = json.loads((folder / "config.json").read_text())
  values["quantization_config"] = dict(quant_method="mxfp4", modules_to_not_convert=["lm_head"])
  (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")


def model_with_images(family, text_fields, fields):
  config = getattr(transformers, f"{family}Config")(text_config=text_fields, **fields)
  return getattr(transformers, f"{family}ForConditionalGeneration")(config)


def main(names):
  for seed, (name, parts) in enumerate(WITH_IMAGES.items(), start=100):
    if not names or name in names:
      write(FOLDER / name, make_model(model_with_images(*parts), seed), seed)
  for seed, (name, (family, fields, block)) in enumerate(FP8.items(), start=200):
    if not names or name in names:
      make = getattr(transformers, f"{family}ForCausalLM")
      quantised = functools.partial(quantise, block=block)
      write(FOLDER / name, make_model(make(config_of(family, fields)), seed), seed, quantised)
  for seed, (name, (family, fields)) in enumerate(MXFP4.items(), start=300):
    if not names or name in names:
      make = getattr(transformers, f"{family}ForCausalLM")
      made = make_model(make(config_of(family, fields)), seed)
      write(FOLDER / name, made, seed, quantise_experts)
  for seed, (name, (family, fields, dtype)) in enumerate(FAMILIES.items(), start=10):
    if names and name not in names:
      continue
    folder = FOLDER / name
    model = make_model(
      getattr(transformers, f"{family}ForCausalLM")(config_of(family, fields)), seed
    )
    if family == "Gemma4":
      calm(model)
    write(folder, model.to(dtype), seed)


def calm(model):
  """Makes queries small. Gemma 4 does not divide scores, and large ones make much of rounding."""
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      if "q_norm" in name:
        parameter.mul_(parameter.shape[0] ** -0.5)


def write(folder, model, seed, quantised=lambda folder: None):
  is_bfloat16 = model.dtype == torch.bfloat16
  model.save_pretrained(folder, max_shard_size="30KB" if is_bfloat16 else "5GB")
  quantised(folder)
  tokens = np.random.default_rng(seed).integers(4, 96, (3, T), dtype=np.int32)
  outputs, _ = outputs_of(folder, tokens, LENGTHS)
  np.savez_compressed(
    folder / "expected.npz", tokens=tokens, lengths=np.array(LENGTHS, np.int32), **outputs
  )
  if folder.name in GRADIENTS:
    write_gradients(folder, tokens, LENGTHS)


def write_gradients(folder, tokens, lengths):
  """The gradient of a loss that reads every logit of a token, in float64, for each tensor."""
  model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
  )
  mask = torch.tensor(np.arange(tokens.shape[1]) < np.array(lengths)[:, None])
  # Padding is on the right, so no token sees it. With a mask, padding beyond a window is NaN.
  logits = model(torch.tensor(tokens).long()).logits
  (logits.softmax(-1).square().sum(-1) * mask).sum().backward()
  gradients = {name: p.grad.float().numpy() for name, p in model.named_parameters()}
  np.savez_compressed(folder / "gradients.npz", **gradients)


def outputs_of(folder, tokens, lengths):
  """What transformers computes from the right-padded rows.

  Returns:
    A dict with float32 logits and, for a mixture of experts, its auxiliary loss. And a mask that is
    False at padding.
  """
  values = json.loads((folder / "config.json").read_text())
  has_images = "text_config" in values
  # In float32, its delta rule and its latents are further from float64 than the bound of the tests.
  text = values.get("text_config", values)
  is_exact = LINEAR in (text.get("layer_types") or []) or "kv_lora_rank" in text
  auto = "AutoModelForImageTextToText" if has_images else "AutoModelForCausalLM"
  model = getattr(transformers, auto).from_pretrained(
    folder,
    dtype=torch.float64 if is_exact else torch.float32,
    attn_implementation="eager",
    experts_implementation="eager",
  )
  model.eval()
  mask = np.arange(tokens.shape[1]) < np.array(lengths)[:, None]
  with torch.no_grad():
    options = dict(output_router_logits=True) if "Moe" in type(model).__name__ else {}
    outputs = model(
      torch.tensor(tokens).long(), attention_mask=torch.tensor(mask).long(), **options
    )
  names = [name for name in ("logits", "aux_loss") if name in outputs]
  return {name: outputs[name].float().numpy() for name in names}, mask


def compare(names):
  from grpo_jax import model  # imported here because the checkpoints are made without it

  for folder in [
    FOLDER.parent / "qwen2_tied",
    FOLDER.parent / "qwen2_untied",
    *sorted(FOLDER.iterdir()),
  ]:
    if names and folder.name not in names:
      continue
    expected = np.load(folder / "expected.npz")
    with tempfile.TemporaryDirectory() as parent:
      model.save(Path(parent) / "saved", *model.load(folder))
      outputs, mask = outputs_of(Path(parent) / "saved", expected["tokens"], expected["lengths"])
    largest = np.abs(outputs["logits"] - expected["logits"])[mask].max()
    print(f"{folder.name}: largest difference of a logit {largest:.1e}", flush=True)


if __name__ == "__main__":
  compare(sys.argv[2:]) if sys.argv[1:2] == ["compare"] else main(sys.argv[1:])
