"""GRPO on GSM8K with low-rank adapters, from a checkpoint such as Qwen2.5-1.5B-Instruct, on one accelerator.

  python -m grpo_jax.train --config=configs/gsm8k_lora.py --config.model.path=Qwen/Qwen2.5-1.5B-Instruct --workdir=DIR
  python -m grpo_jax.export --workdir=DIR --out=FOLDER            # the merged model; --adapter: a folder that peft loads

configs/gsm8k.py with adapters of rank 64 on every projection, and the learning rate that adapters want. The weights under
them are bfloat16, are not trained and are the reference: no second copy. --config.lora.base_dtype=int8 or nf4 makes 1.8 or
1.2 GB of the 3.1 GB that a 1.5B model has (experiments/LOG.md says what it costs).

Hardware: a 1.5B model has 3.1 GB of frozen weights, and 0.9 GB of adapters with their moments; beside that activations, and
11 GB while 512 completions are sampled at once (experiments/LOG.md). Not measured here: time per step, and the accuracy
reached. Others' figures: 54.3% for 0.5B, 77.9% for 1.5B, 86.1% for 3B, 93.4% for 7B (verl, GRPO with LoRA).
"""

from configs import gsm8k


def get_config(preset="grpo"):
  c = gsm8k.get_config(preset)
  c.lora.rank = 64
  c.lora.alpha = 32.0
  c.optimizer.learning_rate = 3e-6
  return c
