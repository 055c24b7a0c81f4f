"""GRPO on grade-school word problems (GSM8K), from a checkpoint such as Qwen2.5-0.5B-Instruct, on one accelerator.

  python -m grpo_jax.train --config=configs/gsm8k.py --config.model.path=Qwen/Qwen2.5-0.5B-Instruct --workdir=DIR

model.path is a name of huggingface.co or a folder of that kind. The problems come through TensorFlow Datasets, or from
--config.data.path=FOLDER with train.jsonl and test.jsonl. A checkpoint without a chat template: --config.data.chat=False.

Settings as published: the objective, learning rate and KL coefficient of DeepSeekMath (2402.03300), G and temperature
of TRL, the instruction of verl's GSM8K examples as the user's message.
Hardware: by estimate, a 0.5B model wants one accelerator of 40 GB. Less: configs/gsm8k_lora.py, or lower batch.micro_batch,
then eval.batch and batch.prompts. More devices: --config.mesh.fsdp=-1 --config.mesh.data=1 splits parameters and optimizer
state; batch.micro_batch must be a multiple of their number.
Not measured here: time per step, memory, and the accuracy reached with these settings. Others' figures for
Qwen2.5-0.5B-Instruct under their own prompts: 49.6% before, 54.3% (GRPO with LoRA) and 56.7% (PPO) after (verl).
"""

from ml_collections import config_dict

from configs import default


def get_config(preset="grpo"):
  c = default.get_config(preset)
  c.steps = 500  # 4.3 passes over the 7,473 training problems
  c.model.path = config_dict.placeholder(
    str
  )  # to be given: random weights would never earn a first reward
  c.model.dtype = "bfloat16"
  c.data.task = "gsm8k"
  c.data.chat = True
  c.data.prompt = '{question} Let\'s think step by step and output the final answer after "####".'
  c.data.max_prompt_tokens = 320
  c.batch.prompts = 64
  c.batch.group_size = 8
  c.batch.micro_batch = 8
  c.sampling.max_tokens = 512
  c.sampling.dtype = "bfloat16"  # weights are cast once a step, not read as float32 for every token
  c.reward.functions = ("strict",)
  c.learner.remat = True
  c.optimizer.learning_rate = 1e-6
  c.optimizer.warmup_steps = 10
  c.eval.every = 50
  c.eval.examples = 1319  # all
  c.eval.batch = 448  # three batches; a multiple of 64 devices
  c.checkpoint.every = 50
  c.log.completions_every = 10
  return c
