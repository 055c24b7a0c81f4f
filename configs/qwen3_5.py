"""Trains Qwen3.5, whose layers mostly have the gated delta rule, on GSM8K with one accelerator.

Command:  python -m grpo_jax.train --config=configs/qwen3_5.py \
            --config.model.path=Qwen/Qwen3.5-0.8B --workdir=DIR
Hardware: one TPU v6e chip for a model of 0.8B parameters. Not run on one yet.
Memory:   by plan, 27.45 GB of the 33.55 GB that programs can use there, in evaluation; 21.09 GB in
          the update and 19.82 GB while sampling. Lower eval.batch for less.
Limit:    by plan, sampling and the update are bound by the memory's speed; a step takes at least
          26.6 s. python -m grpo_jax.plan --config=configs/qwen3_5.py
          --config.model.path=FOLDER --topology=v6e:2x2 --chips=1
Time:     not measured. Not less than the limit.
Result:   not measured.

This is configs/gsm8k.py without thoughts before an answer: the chat template of Qwen3.5 gets
enable_thinking=False. To let the model think, use
--config.data.chat_template_kwargs="('enable_thinking=True',)" and more sampling.max_tokens. First
moments are bfloat16. Of a folder with a vision tower, the text part is read. For 4B parameters, use
four chips: --config.mesh.data=1 --config.mesh.fsdp=4. An update then takes 28 GB of each, by the
estimate that plan prints first.
"""

from ml_collections import ConfigDict

from grpo_jax.configs import gsm8k


def get_config(preset: str = "grpo") -> ConfigDict:
  c = gsm8k.get_config(preset)
  c.data.chat_template_kwargs = ("enable_thinking=False",)
  c.optimizer.moments_dtype = "bfloat16"
  return c
