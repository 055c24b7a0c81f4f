"""Trains Qwen3-30B-A3B, a mixture of 128 experts, with GSPO on competition problems, on a pod.

Command:  pip install -e '.[math]'
          python -m grpo_jax.train --config=configs/moe.py \
            --config.model.path=Qwen/Qwen3-30B-A3B --config.data.path=FOLDER --workdir=DIR
Hardware: 16 chips, TPU v5p (v5p:2x2x4). Not run on them yet.
Memory:   by plan, 58.73 GB of the 102.80 GB that programs can use, in the update, which computes 16
          prompts at once. Each chip holds a quarter of the experts in bfloat16 while it samples
          (17.58 GB with all other weights).
Limit:    by plan, sampling is bound by the memory's speed and the update by computation; a step
          with its four updates takes at least 182 s.
          python -m grpo_jax.plan --config=configs/moe.py --config.model.path=FOLDER
          --config.data.path=FOLDER --topology=v5p:2x2x4
          With Qwen/Qwen3.5-35B-A3B, text part, and an earlier version: 76.22 GB in the update and
          58.07 GB while sampling. Add --config.model.vision=ignored
          --config.data.chat_template_kwargs="('enable_thinking=False',)".
Time:     not measured: no run on a pod has been made yet.
Result:   not measured.

The data and the prompt are those of configs/math.py. Four devices share each expert's matrices
(mesh.fsdp), and four groups of such devices hold different experts (mesh.expert). GSPO (2507.18071)
weights whole completions, so that an expert which the sampler chose and the learner does not choose
moves no single token's ratio far. It has no KL term, so no reference is held. First moments are
bfloat16.
"""

from ml_collections import ConfigDict

from grpo_jax.configs import math


def get_config(preset: str = "gspo") -> ConfigDict:
  c = math.get_config(preset)  # for its data, lengths and intervals
  c.optimizer.moments_dtype = "bfloat16"
  c.learner.remat_policy = "nothing_saveable"  # no plan was made with the products kept
  c.mesh.fsdp = 4
  c.mesh.expert = -1
  return c
