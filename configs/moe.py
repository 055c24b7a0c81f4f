"""Trains a mixture of experts, Qwen3-30B-A3B, on competition problems (MATH), on a pod slice.

Command:  pip install -e '.[math]'
          python -m grpo_jax.train --config=configs/moe.py \
            --config.model.path=Qwen/Qwen3-30B-A3B --config.data.path=FOLDER --workdir=DIR
Hardware: HARDWARE
Memory:   MEMORY
Time:     not measured.
Result:   not measured.

FOLDER is as for configs/math.py, whose settings these are. The objective is GSPO (2507.18071),
which Qwen's team made for mixtures: the ratio is that of whole sequences, so that a token that is
sent to other experts does not decide alone. The experts are split over all chips: mesh.expert=-1.
"""

from ml_collections import ConfigDict

from configs import math


def get_config(preset: str = "gspo") -> ConfigDict:
  c = math.get_config(preset)
  c.optimizer.moments_dtype = "bfloat16"
  c.learner.router_aux_coef = 0.001
  c.mesh.data = 1
  c.mesh.fsdp = 4
  c.mesh.expert = -1
  return c
