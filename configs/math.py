"""Trains a 7B checkpoint on competition problems with formulas as answers (MATH), on a pod.

Command:  pip install -e '.[math]'
          python -m grpo_jax.train --config=configs/math.py \
            --config.model.path=Qwen/Qwen2.5-7B-Instruct --config.data.path=FOLDER --workdir=DIR
Hardware: 16 chips, TPU v5p (v5p:2x2x4) or v6e (v6e:4x4). Not run on them yet.
Memory:   by plan, 65.06 GB of the 102.80 GB that programs can use on a v5p, in the update, whose
          layers keep their products. While sampling, four chips share the weights, and each needs
          18.50 GB. On a v6e an earlier version needed 30.80 of 33.55 GB.
Limit:    by plan, sampling is bound by the memory's speed and the update by computation on
          v5p:2x2x4. A step takes at least 24.5 s there.
          python -m grpo_jax.plan --config=configs/math.py --config.model.path=FOLDER
          --config.data.path=FOLDER --topology=v5p:2x2x4
Time:     not measured: no run on a pod has been made yet. Not less than the limit.
Result:   not measured. Before training, Qwen2.5-7B-Instruct solves 75.5% of MATH (its report,
          2412.15115).

FOLDER holds train.jsonl and test.jsonl. Each line is an object with `problem` and `answer`, as in
MATH-500. The reward function `math` compares answers as mathematical expressions.

For DAPO's published objective, clip bounds, dynamic sampling and length penalty (2503.14476), use
--config=configs/math.py:dapo. The system message is Qwen's own instruction for mathematics.
mesh.fsdp=-1 splits parameters and optimizer state over all devices.
"""

from ml_collections import ConfigDict, config_dict

from grpo_jax.configs import gsm8k


def get_config(preset: str = "grpo") -> ConfigDict:
  c = gsm8k.get_config(preset)  # for its optimizer, dtypes, group size and intervals
  c.data.task = "math"
  c.data.path = config_dict.placeholder(str)  # the user has to give a folder
  c.data.prompt = "{question}"
  c.data.system = "Please reason step by step, and put your final answer within \\boxed{}."
  c.data.max_prompt_tokens = 512
  c.batch.prompts = 128
  c.batch.micro_batch = 0
  c.sampling.max_tokens = 2048
  c.reward.functions = ("math",)
  c.eval.examples = 500
  c.eval.batch = 256
  c.eval.function = "math"
  c.mesh.data = 1
  c.mesh.fsdp = -1
  return c
