"""Every key once, with what it means. Other configs start from here and change a few."""

from ml_collections import ConfigDict

from grpo_jax.algo import presets


def get_config(preset="grpo"):
  """`preset`: a row of grpo_jax/algo/presets.py, chosen with --config=configs/X.py:PRESET."""
  c = ConfigDict()
  c.seed = 0  # numbers depend on it and on the step, on nothing else
  c.steps = 100  # GRPO steps, after the warm start's

  c.model = ConfigDict()
  c.model.path = ""  # a Hugging Face folder, or its OWNER/NAME[@REVISION] there; "" = random weights of the shape below
  c.model.dtype = (
    "float32"  # of the computation (float32 or bfloat16); master weights are always float32
  )
  c.model.embed_dim = 64
  c.model.num_layers = 2
  c.model.num_heads = 4
  c.model.num_kv_heads = 4
  c.model.head_dim = 16
  c.model.mlp_dim = 256
  c.model.rope_theta = 10000.0
  c.model.tie_embeddings = True

  c.lora = (
    ConfigDict()
  )  # low-rank adapters on model.path's weights, which are then frozen and the reference
  c.lora.rank = 0  # 0 = off: all weights are trained
  c.lora.alpha = 32.0  # an adapter's product is scaled by alpha / rank
  c.lora.rslora = False  # by alpha / sqrt(rank) instead
  c.lora.targets = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
  )  # any of these
  # A folder that PEFT saved, to go on from; the four keys above must be its own. The reference is without it.
  c.lora.path = ""
  c.lora.base_dtype = "bfloat16"  # of the frozen weights: float32, bfloat16, int8, int4 or nf4

  c.data = ConfigDict()
  c.data.task = "arithmetic"  # a name of grpo_jax/data/tasks.py
  c.data.path = ""  # a folder with train.jsonl and test.jsonl; "" = the task's own source
  c.data.tokenizer = ""  # tokenizer.json, tokenizer.model or their folder; "" = model.path's, or the task's characters
  c.data.prompt = "{question}"  # what the model is given
  c.data.chat = False  # through its chat template: data.prompt is the user's message, or a field that holds messages
  c.data.system = (
    ""  # the system message of conversations that have none; "" = none. Needs data.chat
  )
  c.data.max_prompt_tokens = 64  # S: longer prompts are dropped and counted

  c.batch = ConfigDict()
  c.batch.prompts = 32  # P, per GRPO step; an optimizer step takes P / algo.minibatches of them
  c.batch.group_size = 8  # G completions of each prompt
  c.batch.micro_batch = (
    0  # prompts per forward and backward pass; 0 = all. The update does not depend on it
  )

  c.sampling = ConfigDict()
  c.sampling.max_tokens = 64  # T
  c.sampling.temperature = 1.0
  # The filters make what is sampled another distribution than what is learned, the whole softmax: see the metric
  # sampler/filter_gap_mean. All off, the two are one.
  c.sampling.top_k = 0  # 0 = off
  c.sampling.top_p = 1.0  # 1 = off
  c.sampling.min_p = 0.0  # 0 = off
  c.sampling.stop_ids = ()  # token ids that end a completion, beside the tokenizer's and the model's own
  c.sampling.dtype = ""  # of weights, cache and computation while sampling; "" = model.dtype
  c.sampling.layout = (
    "train"  # of the weights while sampling: train = as learned, tensor = whole but for that axis
  )

  c.reward = ConfigDict()
  c.reward.functions = (
    "strict",
  )  # names of grpo_jax/rewards, file.py:function, or Hugging Face folders of reward models
  c.reward.weights = (1.0,)
  # Of reward models:
  c.reward.batch = 64  # texts scored at once, a multiple of mesh.data x mesh.fsdp x mesh.expert
  c.reward.dtype = ""  # of their weights and computation; "" = model.dtype
  c.reward.step_separator = "\n"  # between the steps that a *ForTokenClassification scores

  c.algo = ConfigDict(presets.row(preset))  # see grpo_jax/algo/presets.py

  c.learner = ConfigDict()
  c.learner.remat = (
    False  # recompute each layer in the backward pass: less memory, a third more time
  )
  c.learner.logprob_chunk = 2048  # tokens whose [tokens, V] logits a device holds at once

  # Weight of the loss that has a mixture of experts use all of them evenly, over prompts and completions. Checkpoints were
  # trained with 0.001; metrics router/* say whether it is needed. With batch.micro_batch it costs one more forward pass.
  c.learner.router_aux_coef = 0.0

  c.optimizer = ConfigDict()  # AdamW
  c.optimizer.learning_rate = 1e-6
  c.optimizer.schedule = (
    "constant"  # after the warmup: constant, linear or cosine to 0 at the last step
  )
  c.optimizer.warmup_steps = 0  # optimizer steps
  c.optimizer.b1 = 0.9
  c.optimizer.b2 = 0.999
  c.optimizer.eps = 1e-8
  c.optimizer.weight_decay = 0.0  # of matrices, not of norms and biases
  c.optimizer.max_grad_norm = 1.0  # 0 = no clipping

  c.warm_start = ConfigDict()  # supervised steps on the task's worked solutions, before GRPO
  c.warm_start.steps = 0
  c.warm_start.batch = 128
  c.warm_start.learning_rate = 1e-3
  c.warm_start.warmup_steps = 10

  c.eval = ConfigDict()  # on the test split
  c.eval.every = 0  # GRPO steps; 0 = never. Also before the first and after the last
  c.eval.examples = 256  # the first so many test problems
  c.eval.batch = 128  # problems decoded at once
  c.eval.function = (
    "strict"  # the reward function that says what is right: 1 is, anything else is not
  )
  c.eval.samples = 0  # k: draws per problem for mean@k, pass@k, maj@k; 0 = greedy only
  c.eval.temperature = 1.0  # of those draws

  c.checkpoint = ConfigDict()
  c.checkpoint.every = 100  # steps; 0 = only at the end and on SIGTERM
  c.checkpoint.keep = 3

  c.log = ConfigDict()
  c.log.every = 1  # steps between rows of metrics.jsonl
  c.log.completions_every = 50  # steps between saved and shown completions; 0 = never
  c.log.tensorboard = True
  c.log.wandb = ""  # a project of Weights & Biases (pip install -e '.[wandb]'); "" = off

  c.mesh = ConfigDict()  # devices along each axis; one of them may be -1 = what is left
  c.mesh.data = -1
  c.mesh.fsdp = 1
  c.mesh.expert = 1  # the experts of a mixture, and rows as data does
  c.mesh.tensor = 1
  return c
