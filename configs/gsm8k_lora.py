"""Trains low-rank adapters on grade-school word problems (GSM8K) with one accelerator.

Command:  python -m grpo_jax.train --config=configs/gsm8k_lora.py \
            --config.model.path=Qwen/Qwen2.5-1.5B-Instruct --workdir=DIR
Export:   python -m grpo_jax.export --workdir=DIR --out=FOLDER
          This writes the merged model. With --adapter it writes a folder that PEFT loads.
Hardware: one TPU v5e chip for a model of 1.5B parameters. Not run on one yet.
Memory:   by plan, 15.67 GB of the 16.91 GB that programs can use there, in evaluation; 13.50 GB
          while sampling and 8.57 GB in the update. Lower eval.batch or batch.prompts for less.
Limit:    by plan, sampling is bound by the memory's speed and the update by computation; a step
          takes at least 23.8 s. python -m grpo_jax.plan --config=configs/gsm8k_lora.py
          --config.model.path=FOLDER --topology=v5e:2x2 --chips=1
Time:     not measured. Not less than the limit.
Result:   not measured. verl reports after GRPO with LoRA: 54.3% for 0.5B, 77.9% for 1.5B, 86.1% for
          3B, 93.4% for 7B.

This is configs/gsm8k.py with adapters of rank 64 on every projection and a learning rate that suits
adapters. The weights under the adapters are bfloat16 and are not trained. They also serve as the
reference, so the reference needs no second copy. --config.lora.base_dtype=int8 stores the 3.1 GB of
a 1.5B model in 1.8 GB, and nf4 in 1.2 GB. experiments/LOG.md shows what that costs in accuracy.
"""

from ml_collections import ConfigDict

from grpo_jax.configs import gsm8k


def get_config(preset: str = "grpo") -> ConfigDict:
  c = gsm8k.get_config(preset)
  c.lora.rank = 64
  c.lora.alpha = 32.0
  c.optimizer.learning_rate = 3e-6
  return c
