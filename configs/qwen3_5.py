"""Trains Qwen3.5-0.8B on grade-school word problems (GSM8K) with one accelerator.

Command:  python -m grpo_jax.train --config=configs/qwen3_5.py \
            --config.model.path=Qwen/Qwen3.5-0.8B --workdir=DIR
Hardware: one TPU v6e chip. Not run on one yet.
MEMORY
Time:     not measured.
Result:   not measured.

This is configs/gsm8k.py without thinking: the chat template of Qwen3.5 begins with a thought unless
it is told not to. Three layers in four keep a memory of fixed size instead of keys and values, so
that longer completions cost less memory than with other models. First moments are bfloat16.
"""

from ml_collections import ConfigDict

from grpo_jax.configs import gsm8k


def get_config(preset: str = "grpo") -> ConfigDict:
  c = gsm8k.get_config(preset)
  c.data.chat_template_kwargs = ("enable_thinking=False",)
  c.optimizer.moments_dtype = "bfloat16"
  return c
