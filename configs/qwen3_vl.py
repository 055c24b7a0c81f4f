"""Trains Qwen3-VL on questions about images, such as geometry problems, with a slice of four chips.

Command:  pip install -e '.[math]'
          python -m grpo_jax.train --config=configs/qwen3_vl.py \
            --config.model.path=Qwen/Qwen3-VL-4B-Instruct --config.data.path=FILE --workdir=DIR
Hardware: four TPU v6e chips (v6e:2x2) for a model of 4B parameters. Not run on them yet.
Memory:   by plan, 32.13 GB of the 33.55 GB that programs can use there, in evaluation; 31.03 GB
          while sampling and 28.00 GB in an update of 8 prompts at once.
Limit:    by plan, sampling and the update are bound by the memory's speed; a step takes at least
          13.1 s. python -m grpo_jax.plan --config=configs/qwen3_vl.py --config.model.path=FOLDER
          --config.data.path=FILE --topology=v6e:2x2
Time:     not measured.
Result:   not measured.

FILE is a Parquet or jsonl file with the columns problem, answer, and image or images
(docs/images.md). An image may have 1,024 tokens, beside 256 of a question: a prompt that is longer
is left out. The vision tower is frozen. First moments are bfloat16.
"""

from ml_collections import ConfigDict, config_dict

from grpo_jax.configs import gsm8k


def get_config(preset: str = "grpo") -> ConfigDict:
  c = gsm8k.get_config(preset)
  c.data.task = "columns"
  c.data.path = config_dict.placeholder(str)  # the user has to give a file
  c.data.prompt = "{problem} Please reason step by step, and put your final answer in \\boxed{}."
  c.data.held_out = 0.05
  c.data.max_prompt_tokens = 1280  # 1,024 of an image, and a question
  c.reward.functions = ("math",)
  c.eval.examples = 256
  c.eval.batch = 128
  c.eval.function = "math"
  c.optimizer.moments_dtype = "bfloat16"
  c.mesh.data = 1
  c.mesh.fsdp = -1
  return c
