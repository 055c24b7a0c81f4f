"""Trains a checkpoint on grade-school word problems (GSM8K) with one accelerator.

Command:  python -m grpo_jax.train --config=configs/gsm8k.py \
            --config.model.path=Qwen/Qwen2.5-0.5B-Instruct --workdir=DIR
Hardware: one TPU v5e chip, as in Colab, for a model of 0.5B parameters. Not run on one yet.
Memory:   by plan, 15.30 GB of the 16.91 GB that programs can use there, in evaluation, and 14.86
          in the update. To use less, lower eval.batch, set learner.remat_policy to nothing_saveable
          or train adapters (configs/gsm8k_lora.py).
Limit:    by plan, sampling is bound by the memory's speed and the update by computation; a step
          takes at least 8.7 s. python -m grpo_jax.plan --config=configs/gsm8k.py
          --config.model.path=FOLDER --topology=v5e:2x2 --chips=1
Time:     not measured. Not less than the limit.
Result:   not measured. verl reports for Qwen2.5-0.5B-Instruct, with its own prompts: 49.6% before
          training, 54.3% after GRPO with LoRA, 56.7% after PPO.

model.path is a name on huggingface.co or a Hugging Face folder. If the checkpoint has no chat
template, add --config.data.chat=False. The problems come from TensorFlow Datasets, or from a folder
with train.jsonl and test.jsonl: --config.data.path=FOLDER.

On several devices, --config.mesh.fsdp=-1 --config.mesh.data=1 splits the parameters and the
optimizer state over all of them. batch.micro_batch must then be a multiple of their number, or 0,
which means as many prompts as fit.

The settings are published ones: objective, learning rate and KL coefficient from DeepSeekMath
(2402.03300), group size and temperature from TRL, and the instruction in the prompt from the GSM8K
examples of verl.
"""

from ml_collections import ConfigDict, config_dict

from grpo_jax.configs import default


def get_config(preset: str = "grpo") -> ConfigDict:
  c = default.get_config(preset)
  c.steps = 500  # 4.3 passes over the 7,473 training problems
  # The user has to give a checkpoint: random weights would never earn a first reward.
  c.model.path = config_dict.placeholder(str)
  c.model.dtype = "bfloat16"
  c.model.reference_dtype = "bfloat16"  # changes no number, because the computation is bfloat16
  c.data.task = "gsm8k"
  c.data.chat = True
  c.data.prompt = '{question} Let\'s think step by step and output the final answer after "####".'
  c.data.max_prompt_tokens = 320
  c.batch.prompts = 64
  c.batch.group_size = 8
  c.batch.micro_batch = 0
  c.sampling.max_tokens = 512
  # Casting the weights once per step is cheaper than reading float32 weights for every token.
  c.sampling.dtype = "bfloat16"
  c.reward.functions = ("strict",)
  c.learner.remat = True
  c.optimizer.learning_rate = 1e-6
  c.optimizer.warmup_steps = 10
  c.eval.every = 50
  c.eval.examples = 1319  # the whole test split
  c.eval.batch = 448  # makes three batches, and is a multiple of 64 for up to 64 devices
  c.checkpoint.every = 50
  c.log.completions_every = 10
  return c
