"""GRPO on competition problems whose answers are formulas (MATH), from a 7B checkpoint such as Qwen2.5-7B-Instruct, on a pod.

  python -m grpo_jax.train --config=configs/math.py --config.model.path=Qwen/Qwen2.5-7B-Instruct \
      --config.data.path=FOLDER --workdir=DIR

FOLDER holds train.jsonl and test.jsonl, objects with `problem` and `answer` as MATH-500 has them. Answers are compared as
expressions: pip install -e '.[math]'.

Settings as published: DAPO's objective, clip bounds, dynamic sampling and penalty of length (2503.14476) with
--config=configs/math.py:dapo; Qwen's own instruction for mathematics.
Hardware: by estimate, 7.6B parameters with float32 master weights, moments and reference are 122 GB over all devices, beside
4 GB of bfloat16 weights per device for sampling: 16 devices of 32 GB (TPU v4, v5p) or 8 of 80 GB. mesh.fsdp=-1 splits
everything over all of them.
Not measured here: time per step, memory, and the accuracy reached. Others' figures: Qwen2.5-7B-Instruct has 75.5% on MATH
before (its report, 2412.15115).
"""

from ml_collections import config_dict

from configs import gsm8k


def get_config(preset="grpo"):
  c = gsm8k.get_config(preset)  # its optimizer, dtypes, groups and intervals
  c.data.task = "math"
  c.data.path = config_dict.placeholder(str)  # to be given
  c.data.prompt = "{question}"
  c.data.system = "Please reason step by step, and put your final answer within \\boxed{}."
  c.data.max_prompt_tokens = 512
  c.batch.prompts = 128
  c.batch.micro_batch = 16
  c.sampling.max_tokens = 2048
  c.reward.functions = ("math",)
  c.eval.examples = 500
  c.eval.batch = 256
  c.eval.function = "math"
  c.mesh.data = 1
  c.mesh.fsdp = -1
  return c
