"""The config.json of models that people train, with every field that was published."""

import json
import math
from pathlib import Path

import pytest

from grpo_jax import model
from grpo_jax.model.huggingface import families
from grpo_jax.settings import ConfigError

FULL, LINEAR, SLIDING = "full_attention", "linear_attention", "sliding_attention"
_QWEN3_5 = dict(
  attention_bias=False,
  attention_dropout=0.0,
  attn_output_gate=True,
  bos_token_id=248044,
  dtype="bfloat16",
  eos_token_id=248044,
  full_attention_interval=4,
  head_dim=256,
  hidden_act="silu",
  initializer_range=0.02,
  linear_conv_kernel_dim=4,
  linear_key_head_dim=128,
  linear_num_key_heads=16,
  linear_value_head_dim=128,
  mamba_ssm_dtype="float32",
  max_position_embeddings=262144,
  mtp_num_hidden_layers=1,
  mtp_use_dedicated_embeddings=False,
  pad_token_id=None,
  partial_rotary_factor=0.25,
  rms_norm_eps=1e-6,
  rope_parameters=dict(
    mrope_interleaved=True,
    mrope_section=[11, 11, 10],
    partial_rotary_factor=0.25,
    rope_theta=10_000_000,
    rope_type="default",
  ),
  tie_word_embeddings=False,
  use_cache=True,
  vocab_size=248320,
)
_FP8 = dict(
  activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=[128, 128]
)
_MXFP4 = dict(
  modules_to_not_convert=["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
  quant_method="mxfp4",
)
CONFIGS = {  # the file, and the parameters without vision towers and heads that guess, in billions
  "Qwen3.5-27B": (
    dict(
      architectures=["Qwen3_5ForConditionalGeneration"],
      image_token_id=248056,
      language_model_only=False,
      model_type="qwen3_5",
      text_config=_QWEN3_5
      | dict(
        hidden_size=5120,
        intermediate_size=17408,
        layer_types=[LINEAR, LINEAR, LINEAR, FULL] * 16,
        linear_num_value_heads=48,
        model_type="qwen3_5_text",
        num_attention_heads=24,
        num_hidden_layers=64,
        num_key_value_heads=4,
        output_gate_type="swish",
      ),
      tie_word_embeddings=False,
      vision_config=dict(depth=27, model_type="qwen3_5"),
    ),
    26.9,
  ),
  "Qwen3.5-35B-A3B": (
    dict(
      architectures=["Qwen3_5MoeForConditionalGeneration"],
      model_type="qwen3_5_moe",
      text_config=_QWEN3_5
      | dict(
        hidden_size=2048,
        layer_types=[LINEAR, LINEAR, LINEAR, FULL] * 10,
        linear_num_value_heads=32,
        model_type="qwen3_5_moe_text",
        moe_intermediate_size=512,
        num_attention_heads=16,
        num_experts=256,
        num_experts_per_tok=8,
        num_hidden_layers=40,
        num_key_value_heads=2,
        output_router_logits=False,
        router_aux_loss_coef=0.001,
        shared_expert_intermediate_size=512,
      ),
      tie_word_embeddings=False,
      vision_config=dict(depth=27),
    ),
    34.7,
  ),
  "Qwen3-Next-80B-A3B": (
    dict(
      architectures=["Qwen3NextForCausalLM"],
      attention_bias=False,
      attention_dropout=0.0,
      bos_token_id=151643,
      decoder_sparse_step=1,
      eos_token_id=151645,
      full_attention_interval=4,
      head_dim=256,
      hidden_act="silu",
      hidden_size=2048,
      initializer_range=0.02,
      intermediate_size=5120,
      linear_conv_kernel_dim=4,
      linear_key_head_dim=128,
      linear_num_key_heads=16,
      linear_num_value_heads=32,
      linear_value_head_dim=128,
      max_position_embeddings=262144,
      mlp_only_layers=[],
      model_type="qwen3_next",
      moe_intermediate_size=512,
      norm_topk_prob=True,
      num_attention_heads=16,
      num_experts=512,
      num_experts_per_tok=10,
      num_hidden_layers=48,
      num_key_value_heads=2,
      output_router_logits=False,
      partial_rotary_factor=0.25,
      rms_norm_eps=1e-6,
      rope_scaling=None,
      rope_theta=10_000_000,
      router_aux_loss_coef=0.001,
      shared_expert_intermediate_size=512,
      tie_word_embeddings=False,
      torch_dtype="bfloat16",
      use_cache=True,
      use_sliding_window=False,
      vocab_size=151936,
    ),
    79.7,
  ),
  "gpt-oss-20b": (
    dict(
      architectures=["GptOssForCausalLM"],
      attention_bias=True,
      attention_dropout=0.0,
      eos_token_id=200002,
      experts_per_token=4,
      head_dim=64,
      hidden_act="silu",
      hidden_size=2880,
      initial_context_length=4096,
      initializer_range=0.02,
      intermediate_size=2880,
      layer_types=[SLIDING, FULL] * 12,
      max_position_embeddings=131072,
      model_type="gpt_oss",
      num_attention_heads=64,
      num_experts_per_tok=4,
      num_hidden_layers=24,
      num_key_value_heads=8,
      num_local_experts=32,
      output_router_logits=False,
      pad_token_id=199999,
      quantization_config=_MXFP4,
      rms_norm_eps=1e-5,
      rope_scaling=dict(
        beta_fast=32.0,
        beta_slow=1.0,
        factor=32.0,
        original_max_position_embeddings=4096,
        rope_type="yarn",
        truncate=False,
      ),
      rope_theta=150000,
      router_aux_loss_coef=0.9,
      sliding_window=128,
      swiglu_limit=7.0,
      tie_word_embeddings=False,
      use_cache=True,
      vocab_size=201088,
    ),
    20.9,
  ),
  "DeepSeek-V3": (
    dict(
      architectures=["DeepseekV3ForCausalLM"],
      attention_bias=False,
      attention_dropout=0.0,
      auto_map=dict(AutoConfig="configuration_deepseek.DeepseekV3Config"),
      aux_loss_alpha=0.001,
      bos_token_id=0,
      eos_token_id=1,
      ep_size=1,
      first_k_dense_replace=3,
      hidden_act="silu",
      hidden_size=7168,
      initializer_range=0.02,
      intermediate_size=18432,
      kv_lora_rank=512,
      max_position_embeddings=163840,
      model_type="deepseek_v3",
      moe_intermediate_size=2048,
      moe_layer_freq=1,
      n_group=8,
      n_routed_experts=256,
      n_shared_experts=1,
      norm_topk_prob=True,
      num_attention_heads=128,
      num_experts_per_tok=8,
      num_hidden_layers=61,
      num_key_value_heads=128,
      num_nextn_predict_layers=1,
      pretraining_tp=1,
      q_lora_rank=1536,
      qk_nope_head_dim=128,
      qk_rope_head_dim=64,
      quantization_config=_FP8,
      rms_norm_eps=1e-6,
      rope_scaling=dict(
        beta_fast=32,
        beta_slow=1,
        factor=40,
        mscale=1.0,
        mscale_all_dim=1.0,
        original_max_position_embeddings=4096,
        type="yarn",
      ),
      rope_theta=10000,
      routed_scaling_factor=2.5,
      scoring_func="sigmoid",
      seq_aux=True,
      tie_word_embeddings=False,
      topk_group=4,
      topk_method="noaux_tc",
      torch_dtype="bfloat16",
      use_cache=True,
      v_head_dim=128,
      vocab_size=129280,
    ),
    671.0,
  ),
  "GLM-4.5-Air": (
    dict(
      architectures=["Glm4MoeForCausalLM"],
      attention_bias=True,
      attention_dropout=0.0,
      eos_token_id=[151329, 151336, 151338],
      first_k_dense_replace=1,
      head_dim=128,
      hidden_act="silu",
      hidden_size=4096,
      initializer_range=0.02,
      intermediate_size=10944,
      max_position_embeddings=131072,
      model_type="glm4_moe",
      moe_intermediate_size=1408,
      n_group=1,
      n_routed_experts=128,
      n_shared_experts=1,
      norm_topk_prob=True,
      num_attention_heads=96,
      num_experts_per_tok=8,
      num_hidden_layers=46,
      num_key_value_heads=8,
      num_nextn_predict_layers=1,
      pad_token_id=151329,
      partial_rotary_factor=0.5,
      rms_norm_eps=1e-5,
      rope_scaling=None,
      rope_theta=1000000,
      routed_scaling_factor=1.0,
      tie_word_embeddings=False,
      topk_group=1,
      torch_dtype="bfloat16",
      use_cache=True,
      use_qk_norm=False,
      vocab_size=151552,
    ),
    106.9,
  ),
  "Llama-2-7b-hf": (
    dict(
      _name_or_path="meta-llama/Llama-2-7b-hf",
      architectures=["LlamaForCausalLM"],
      bos_token_id=1,
      eos_token_id=2,
      hidden_act="silu",
      hidden_size=4096,
      initializer_range=0.02,
      intermediate_size=11008,
      max_position_embeddings=4096,
      model_type="llama",
      num_attention_heads=32,
      num_hidden_layers=32,
      num_key_value_heads=32,
      pretraining_tp=1,
      rms_norm_eps=1e-5,
      rope_scaling=None,
      tie_word_embeddings=False,
      torch_dtype="float16",
      use_cache=True,
      vocab_size=32000,
    ),
    6.7,
  ),
  "SmolLM2-360M-Instruct": (
    {
      "architectures": ["LlamaForCausalLM"],
      "attention_bias": False,
      "attention_dropout": 0.0,
      "bos_token_id": 1,
      "eos_token_id": 2,
      "hidden_act": "silu",
      "hidden_size": 960,
      "initializer_range": 0.02,
      "intermediate_size": 2560,
      "is_llama_config": True,
      "max_position_embeddings": 8192,
      "mlp_bias": False,
      "model_type": "llama",
      "num_attention_heads": 15,
      "num_hidden_layers": 32,
      "num_key_value_heads": 5,
      "pad_token_id": 2,
      "pretraining_tp": 1,
      "rms_norm_eps": 1e-5,
      "rope_interleaved": False,
      "rope_scaling": None,
      "rope_theta": 100000,
      "tie_word_embeddings": True,
      "torch_dtype": "bfloat16",
      "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
      "use_cache": True,
      "vocab_size": 49152,
    },
    0.4,
  ),
  "Phi-4-mini-instruct": (
    dict(
      _name_or_path="Phi-4-mini-instruct",
      architectures=["Phi3ForCausalLM"],
      attention_bias=False,
      attention_dropout=0.0,
      auto_map=dict(AutoConfig="configuration_phi3.Phi3Config"),
      bos_token_id=199999,
      embd_pdrop=0.0,
      eos_token_id=199999,
      full_attn_mod=1,
      hidden_act="silu",
      hidden_size=3072,
      initializer_range=0.02,
      intermediate_size=8192,
      interpolate_factor=1,
      lm_head_bias=False,
      max_position_embeddings=131072,
      mlp_bias=False,
      model_type="phi3",
      num_attention_heads=24,
      num_hidden_layers=32,
      num_key_value_heads=8,
      original_max_position_embeddings=4096,
      pad_token_id=199999,
      partial_rotary_factor=0.75,
      resid_pdrop=0.0,
      rms_norm_eps=1e-5,
      rope_scaling=dict(long_factor=[2.0] * 48, short_factor=[1.0] * 48, type="longrope"),
      rope_theta=10000.0,
      sliding_window=262144,
      tie_word_embeddings=True,
      torch_dtype="bfloat16",
      use_cache=True,
      vocab_size=200064,
    ),
    3.8,
  ),
  "gemma-4-31B-it": (
    dict(
      architectures=["Gemma4ForConditionalGeneration"],
      audio_config=None,
      audio_token_id=258881,
      boa_token_id=256000,
      boi_token_id=255999,
      dtype="bfloat16",
      eoa_token_id=258883,
      eoa_token_index=258883,
      eoi_token_id=258882,
      eos_token_id=[1, 106],
      image_token_id=258880,
      initializer_range=0.02,
      model_type="gemma4",
      text_config=dict(
        attention_bias=False,
        attention_dropout=0.0,
        attention_k_eq_v=True,
        bos_token_id=2,
        dtype="bfloat16",
        enable_moe_block=False,
        eos_token_id=1,
        expert_intermediate_size=None,
        final_logit_softcapping=30.0,
        global_head_dim=512,
        head_dim=256,
        hidden_activation="gelu_pytorch_tanh",
        hidden_size=5376,
        hidden_size_per_layer_input=0,
        initializer_range=0.02,
        intermediate_size=21504,
        layer_types=([SLIDING] * 5 + [FULL]) * 10,
        max_position_embeddings=262144,
        model_type="gemma4_text",
        moe_intermediate_size=None,
        num_attention_heads=32,
        num_experts=None,
        num_global_key_value_heads=4,
        num_hidden_layers=60,
        num_key_value_heads=16,
        num_kv_shared_layers=0,
        pad_token_id=0,
        rms_norm_eps=1e-6,
        rope_parameters=dict(
          full_attention=dict(partial_rotary_factor=0.25, rope_theta=1e6, rope_type="proportional"),
          sliding_attention=dict(rope_theta=1e4, rope_type="default"),
        ),
        sliding_window=1024,
        tie_word_embeddings=True,
        top_k_experts=None,
        use_bidirectional_attention="vision",
        use_cache=True,
        use_double_wide_mlp=False,
        vocab_size=262144,
        vocab_size_per_layer_input=262144,
      ),
      tie_word_embeddings=True,
      video_token_id=258884,
      vision_config=dict(
        attention_bias=False,
        attention_dropout=0.0,
        default_output_length=280,
        global_head_dim=72,
        head_dim=72,
        hidden_activation="gelu_pytorch_tanh",
        hidden_size=1152,
        intermediate_size=4304,
        max_position_embeddings=131072,
        model_type="gemma4_vision",
        num_attention_heads=16,
        num_hidden_layers=27,
        num_key_value_heads=16,
        patch_size=16,
        pooling_kernel_size=3,
        position_embedding_size=10240,
        rms_norm_eps=1e-6,
        rope_parameters=dict(rope_theta=100.0, rope_type="default"),
        standardize=True,
        use_clipped_linears=False,
      ),
      vision_soft_tokens_per_image=280,
    ),
    30.7,
  ),
  "SmolVLM2-500M": (
    {
      "architectures": ["SmolVLMForConditionalGeneration"],
      "image_token_id": 49190,
      "model_type": "smolvlm",
      "pad_token_id": 128002,
      "scale_factor": 4,
      "text_config": {
        "architectures": ["VLlama3ForCausalLM"],
        "head_dim": 64,
        "hidden_size": 960,
        "intermediate_size": 2560,
        "is_llama_config": True,
        "max_position_embeddings": 8192,
        "model_type": "llama",
        "neftune_noise_alpha": 0.0,
        "num_attention_heads": 15,
        "num_hidden_layers": 32,
        "num_key_value_heads": 5,
        "pad_token_id": 2,
        "pixel_shuffle_factor": 4,
        "qk_layer_norms": False,
        "rms_norm_eps": 1e-5,
        "rope_interleaved": False,
        "rope_theta": 100000,
        "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}},
        "use_resampler": False,
        "vocab_size": 49280,
      },
      "tie_word_embeddings": False,
      "torch_dtype": "float32",
      "use_cache": False,
      "use_reentrant_checkpointing": False,
      "vision_config": {
        "hidden_size": 768,
        "image_size": 512,
        "max_image_size": {"longest_edge": 512},
        "model_type": "smolvlm_vision",
        "num_attention_heads": 12,
        "patch_size": 16,
        "size": {"longest_edge": 2048},
        "tie_word_embeddings": False,
        "use_base_siglip": False,
      },
      "vocab_size": 49280,
    },
    0.4,
  ),
}


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_a_published_field_beside_a_vision_tower_is_known(family, tmp_path):
  """The files of Qwen3.5 say that they hold a tower. Without one, it would have to be ignored."""
  folder = Path(__file__).parent / "golden" / "vision" / family
  values = json.loads((folder / "config.json").read_text()) | {"language_model_only": False}
  (tmp_path / "config.json").write_text(json.dumps(values))
  assert model.load_model_config(tmp_path, vision=True).vision is not None
  (tmp_path / "config.json").write_text(json.dumps(values | {"language_model_only": True}))
  with pytest.raises(ConfigError, match="language_model_only is True, which is not supported"):
    model.load_model_config(tmp_path, vision=True)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_is_read(name, tmp_path):
  """And describes a model of the published size."""
  values, billions = CONFIGS[name]
  (tmp_path / "config.json").write_text(json.dumps(values))
  config = model.load_model_config(tmp_path)
  sizes = families.sizes(config)
  tensors = families.family_of(config).tensors(config)
  count = sum(math.prod(spec.hf_shape(sizes)) for spec in tensors)
  assert abs(count / 1e9 - billions) < 0.1


@pytest.mark.parametrize("name", ["gemma-4-31B-it", "SmolVLM2-500M"])
def test_a_published_config_is_read_with_its_tower(name, tmp_path):
  (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name][0]))
  assert model.load_model_config(tmp_path, vision=True).vision is not None


@pytest.mark.parametrize("vision", [False, True])
def test_the_stop_ids_of_the_whole_model_win(vision, tmp_path):
  """As in transformers. Gemma 4 ends a turn with 106, which its text_config does not have."""
  values = CONFIGS["gemma-4-31B-it"][0]
  (tmp_path / "config.json").write_text(json.dumps(values))
  assert model.load_model_config(tmp_path, vision=vision).stop_ids == (1, 106)
  (tmp_path / "config.json").write_text(json.dumps(values | {"eos_token_id": None}))
  assert model.load_model_config(tmp_path, vision=vision).stop_ids == (1,)


def test_a_base_of_positions_that_a_file_lacks_is_that_of_transformers(tmp_path):
  (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Llama-2-7b-hf"][0]))
  assert model.load_model_config(tmp_path).rope_theta == 10000.0


@pytest.mark.parametrize(
  "name, field, value",
  [
    ("SmolLM2-360M-Instruct", "rope_interleaved", True),
    ("SmolLM2-360M-Instruct", "is_llama_config", False),
    ("Phi-4-mini-instruct", "full_attn_mod", 2),
    ("Phi-4-mini-instruct", "interpolate_factor", 4),
    ("Phi-4-mini-instruct", "lm_head_bias", True),
  ],
)
def test_another_value_of_a_published_field_is_refused(name, field, value, tmp_path):
  (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name][0] | {field: value}))
  with pytest.raises(ConfigError, match=f"{field} is {value}, which is not supported"):
    model.load_model_config(tmp_path)


@pytest.mark.parametrize(
  "name, changes, words",
  [
    ("Phi-4-mini-instruct", {"original_max_position_embeddings": 1}, "original_max_position"),
    ("gemma-4-31B-it", {"text_config": None}, "text_config must be an object, got None"),
    ("gemma-4-31B-it", {"text_config": [1]}, "text_config must be an object"),
    ("gemma-4-31B-it", {"vision_config": {"rope_parameters": [1]}}, "vision_config.rope_param"),
    ("Qwen3.5-27B", {"text_config": [1]}, "text_config must be an object"),
    ("Qwen3.5-27B", {"text_config": {"rope_scaling": [1]}}, "rope_scaling must be an object"),
    ("Qwen3.5-27B", {"vision_config": {"rope_parameters": [1]}}, "vision_config.rope_param"),
  ],
)
def test_a_damaged_field_is_named(name, changes, words, tmp_path):
  """With the vision tower, which reads some fields of the text part, too."""
  (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name][0] | changes))
  with pytest.raises(ConfigError, match=rf"config\.json: {words}"):
    model.load_model_config(tmp_path, vision=True)
