# ruff: noqa: E501  (a row is a line)
"""Values of the config: types, ranges, combinations, and what only a tensor would notice."""

from hostile_cases.case import Case


def _bad(name: str, flags: str, *words: str, needs: str = "") -> Case:
  return Case(f"values/{name}", f"train $RUN {flags}", 2, words, needs=needs)


def _fine(name: str, flags: str, *words: str, needs: str = "") -> Case:
  """An odd value that is legal: the run must do its work."""
  return Case(f"values/{name}", f"train $RUN {flags}", 0, ("finished", *words), needs=needs)


def _either(name: str, flags: str, needs: str = "") -> Case:
  """Refused or done, but not something in between."""
  return Case(f"values/{name}", f"train $RUN {flags}", (0, 2), needs=needs, absent=("nan",))


# No machine has the memory: the limit keeps the machine of this script usable.
def _too_large(name: str, flags: str, *words: str) -> Case:
  return Case(f"values/{name}", f"ulimit -v 30000000; train $RUN {flags}", (1, 2), words)


RANGES = [
  _either("negative seed", "--config.seed=-1"),
  _fine("no steps", "--config.steps=0"),
  _bad("nan clip_low", "--config.algo.clip_low=nan", "algo.clip_low is nan"),
  _bad("infinite clip_low", "--config.algo.clip_low=inf", "algo.clip_low"),
  _bad("nan kl_coef", "--config.algo.kl_coef=nan", "algo.kl_coef is nan"),
  _bad("infinite kl_coef", "--config.algo.kl_coef=inf", "algo.kl_coef is inf"),
  _bad("infinite entropy_coef", "--config.algo.entropy_coef=inf", "algo.entropy_coef is inf"),
  _bad("nan top_p", "--config.sampling.top_p=nan", "sampling.top_p is nan"),
  _bad("infinite temperature", "--config.sampling.temperature=inf", "temperature is inf"),
  _bad("infinite last temperature", "--config.sampling.temperature_end=inf", "temperature_end"),
  _bad("temperature 1e-300", "--config.sampling.temperature=1e-300", "sampling.temperature"),
  _either("temperature 1e-30", "--config.sampling.temperature=1e-30"),
  _either("temperature 1e38", "--config.sampling.temperature=1e38"),
  _bad("temperature 1e300", "--config.sampling.temperature=1e300", "sampling.temperature"),
  _bad("b1 one", "--config.optimizer.b1=1", "optimizer.b1 is 1.0"),
  _bad("negative b2", "--config.optimizer.b2=-0.1", "optimizer.b2 is -0.1"),
  _bad("nan eps", "--config.optimizer.eps=nan", "optimizer.eps is nan"),
  _bad("infinite eps", "--config.optimizer.eps=inf", "optimizer.eps is inf"),
  _bad("infinite decay", "--config.optimizer.weight_decay=inf", "optimizer.weight_decay is inf"),
  _bad("nan norm", "--config.optimizer.max_grad_norm=nan", "max_grad_norm is nan"),
  _bad("learning rate 1e39", "--config.optimizer.learning_rate=1e39", "optimizer.learning_rate"),
  _fine("learning rate zero", "--config.optimizer.learning_rate=0"),
  _fine("eps zero", "--config.optimizer.eps=0"),
  _bad("infinite warm rate", "--config.warm_start.learning_rate=inf", "warm_start.learning_rate"),
  _bad("nan weight", "--config.reward.weights='(float(\"nan\"),)'", "reward.weights"),
  _bad("weight 1e309", "--config.reward.weights='(1e309,)'", "reward.weights"),
  _bad("weight beyond float32", "--config.reward.weights='(1e200,)'", "reward.weights"),
  _fine("weight zero", "--config.reward.weights='(0.0,)'"),
  _bad("rope infinite", "--config.model.rope_theta=inf", "model.rope_theta is inf"),
  _bad("rope negative", "--config.model.rope_theta=-1", "model.rope_theta is -1.0"),
  _either("rope tiny", "--config.model.rope_theta=1e-300"),
  _either("rope huge", "--config.model.rope_theta=1e300"),
  _bad("lora infinite alpha", "--config.lora.alpha=inf", "lora.alpha is inf"),
  _bad("router coefficient", "--config.learner.router_aux_coef=0.1", "learner.router_aux_coef"),
  _bad("logprob_chunk zero", "--config.learner.logprob_chunk=0", "learner.logprob_chunk is 0"),
  _fine("logprob_chunk one", "--config.learner.logprob_chunk=1"),
  _fine("logprob_chunk huge", "--config.learner.logprob_chunk=2000000000"),
  _bad("completions_every negative", "--config.log.completions_every=-1", "completions_every"),
  _fine("log seldom", "--config.log.every=1000"),
  _fine("log.every huge", "--config.log.every=99999999999999999999"),
  _fine("checkpoint.every huge", "--config.checkpoint.every=99999999999999999999"),
  _fine("checkpoint.keep huge", "--config.checkpoint.keep=99999999999999999999"),
  _fine("keep one", "--config.checkpoint.keep=1"),
  _fine("checkpoint at the end", "--config.checkpoint.every=0"),
  _bad("wandb is missing", "--config.log.wandb=project", "log.wandb", "wandb"),
  _bad("optimizer in capitals", "--config.optimizer.name=ADAMW", "optimizer.name is 'ADAMW'"),
  _bad("optimizer a path", "--config.optimizer.name=../x", "optimizer.name is '../x'"),
  _either("warmup longer than the run", "--config.optimizer.warmup_steps=1000"),
  _either("warmup beyond int64", "--config.optimizer.warmup_steps=99999999999999999999"),
  _bad("task with a space", "--config.data.task='gsm8k '", "data.task"),
  _bad("task path of arithmetic", "--config.data.task=arithmetic", "data.path"),
]

SHAPES = [
  _fine(
    "smallest model",
    "--config.model.embed_dim=1 --config.model.num_heads=1"
    " --config.model.head_dim=2 --config.model.mlp_dim=1",
  ),
  _bad("odd head", "--config.model.head_dim=1", "model.head_dim is 1"),
  _bad(
    "heads do not divide", "--config.model.num_heads=3 --config.model.num_kv_heads=2", "num_heads"
  ),
  _too_large("width 1e9", "--config.model.embed_dim=1000000000", "model.embed_dim"),
  _too_large("mlp 1e12", "--config.model.mlp_dim=1000000000000", "model.mlp_dim"),
  _too_large("heads 1e9", "--config.model.num_heads=1000000000", "model."),
  _too_large("head 1e10", "--config.model.head_dim=10000000000", "model.head_dim"),
  _too_large(
    "width beyond int64", "--config.model.embed_dim=99999999999999999999", "model.embed_dim"
  ),
  _too_large("prompts 1e9", "--config.batch.prompts=1000000000", "batch.prompts"),
  _too_large(
    "prompts beyond int64", "--config.batch.prompts=99999999999999999999", "batch.prompts"
  ),
  _too_large("group 1e9", "--config.batch.group_size=1000000000", "batch.group_size"),
  _too_large(
    "warm batch 1e10",
    "--config.warm_start.steps=1 --config.warm_start.batch=10000000000",
    "warm_start.batch",
  ),
  _too_large(
    "eval batch 1e10", "--config.eval.every=1 --config.eval.batch=10000000000", "eval.batch"
  ),
  _too_large(
    "eval samples 1e10", "--config.eval.every=1 --config.eval.samples=10000000000", "eval.samples"
  ),
  _bad("tokens beyond the positions", "--config.sampling.max_tokens=1000000", "positions"),
  _bad(
    "prompts beyond the positions",
    "--config.data.max_prompt_tokens=99999999999999999999",
    "positions",
  ),
  _fine("one token", "--config.sampling.max_tokens=1"),
  _fine("group of odd size", "--config.batch.group_size=7 --config.batch.prompts=5"),
  _fine("one prompt", "--config.batch.prompts=1"),
  _fine("more prompts than a small epoch", "--config.data.max_prompt_tokens=9"),
]

SAMPLING = [
  _fine("top_k beyond the vocabulary", "--config.sampling.top_k=1000000000"),
  _bad("top_k beyond int64", "--config.sampling.top_k=99999999999999999999", "sampling.top_k"),
  _fine("top_k one", "--config.sampling.top_k=1"),
  _fine("top_p tiny", "--config.sampling.top_p=1e-30"),
  _fine("min_p almost one", "--config.sampling.min_p=0.999999999"),
  _fine(
    "all filters",
    "--config.sampling.top_k=3 --config.sampling.top_p=0.5 --config.sampling.min_p=0.1",
  ),
  _bad("negative stop id", '--config.sampling.stop_ids="(-1,)"', "sampling.stop_ids"),
  _bad(
    "stop id beyond the vocabulary", '--config.sampling.stop_ids="(99999,)"', "sampling.stop_ids"
  ),
  _bad("stop id beyond int32", '--config.sampling.stop_ids="(99999999999,)"', "sampling.stop_ids"),
  _fine("stop id twice", '--config.sampling.stop_ids="(3,3,3)"'),
  _fine(
    "every id stops", '--config.sampling.stop_ids="(0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17)"'
  ),
  _fine(
    "temperature falls",
    "--config.sampling.temperature_schedule=cosine --config.sampling.temperature_end=0.01",
  ),
  _fine("bfloat16 sampling", "--config.sampling.dtype=bfloat16"),
  _fine("bfloat16 everywhere", "--config.model.dtype=bfloat16"),
]

ALGORITHM = [
  _bad("minibatches more than prompts", "--config.algo.minibatches=8", "algo.minibatches"),
  _bad("minibatches zero", "--config.algo.minibatches=0", "algo.minibatches is 0"),
  _bad("updates zero", "--config.algo.updates_per_batch=0", "algo.updates_per_batch is 0"),
  _fine("many updates", "--config.algo.updates_per_batch=20 --config.algo.minibatches=4"),
  _bad("micro batch does not divide", "--config.batch.micro_batch=3", "batch.micro_batch is 3"),
  _bad("micro batch too large", "--config.batch.micro_batch=8", "batch.micro_batch is 8"),
  _bad(
    "micro batch of minibatches",
    "--config.batch.micro_batch=4 --config.algo.minibatches=2",
    "batch.micro_batch is 4",
  ),
  _fine(
    "all equal rewards resampled",
    "--config.algo.dynamic_sampling=True --config.algo.max_resample_rounds=2",
  ),
  _bad(
    "pass_at_k of two", "--config.algo.advantage=pass_at_k --config.algo.pass_k=2", "algo.pass_k"
  ),
  _bad(
    "process without steps and with kl",
    "--config.algo.advantage=process --config.algo.kl_coef=0.1"
    " --config.algo.kl_in=reward --config.algo.kl=k1",
    "algo.kl_in",
  ),
  _bad("kl target without kl", "--config.algo.kl_target=0.1", "algo.kl_target"),
  _bad("reference moves without kl", "--config.algo.ref_sync_steps=1", "algo.ref_sync_steps"),
  _fine("reference moves each step", "--config.algo.ref_sync_steps=1 --config.algo.kl_coef=0.1"),
  _fine("kl target", "--config.algo.kl_target=0.1 --config.algo.kl_coef=0.1"),
  _fine("kl coefficient huge", "--config.algo.kl_coef=1e6"),
  _fine("full kl", "--config.algo.kl=full --config.algo.kl_coef=0.1"),
  _fine("entropy target", "--config.algo.entropy_target=100"),
  _fine("overlong almost all", "--config.algo.overlong=0.999"),
  _bad("overlong of no token", "--config.algo.overlong=0.01", "algo.overlong"),
  _bad("correction of nothing", "--config.algo.correction=truncate", "algo.correction"),
  _bad(
    "correction bounds crossed",
    "--config.algo.correction=mask --config.algo.correction_low=3 --config.algo.correction_high=2",
    "algo.correction_low",
  ),
  _fine("everything truncated and masked", "--config.algo.mask_truncated=True"),
  _bad("std of too many", "--config.algo.std_ddof=2", "algo.std_ddof"),
  _bad("unknown ratio", "--config.algo.ratio=''", "algo.ratio is ''"),
  _bad("surrogate with a space", "--config.algo.surrogate='ppo_clip '", "algo.surrogate"),
]

PROMPTS = [
  _bad("prompt unclosed", "--config.data.prompt='{question'", "data.prompt"),
  _bad("prompt stray brace", "--config.data.prompt='{question}}'", "data.prompt"),
  _bad("prompt position", "--config.data.prompt='{0}'", "data.prompt"),
  _bad("prompt nameless", "--config.data.prompt='{}'", "data.prompt"),
  _bad("prompt conversion", "--config.data.prompt='{question!x}'", "data.prompt"),
  _bad("prompt attribute", "--config.data.prompt='{question.__class__}'", "data.prompt"),
  _bad("prompt missing attribute", "--config.data.prompt='{question.nothing}'", "data.prompt"),
  _bad("prompt index of a text", "--config.data.prompt='{question[a]}'", "data.prompt"),
  _bad("prompt number format", "--config.data.prompt='{question:d}'", "data.prompt"),
  _bad("prompt nested format", "--config.data.prompt='{question:{nothing}}'", "data.prompt"),
  _bad("prompt only spaces", "--config.data.prompt='    '", "data.prompt"),
  _bad("prompt capital field", "--config.data.prompt='{Question}'", "data.prompt", "{question}"),
  _fine("prompt of other signs", "--config.data.prompt='→{question}'"),
  _fine("prompt with newlines", "--config.data.prompt=$'\\n{question}\\n'"),
  _bad("prompt not utf-8", "--config.data.prompt=$'\\xff{question}'", "data.prompt"),
  _bad(
    "prompt longer than the limit",
    "--config.data.prompt='{question}===================='",
    "max_prompt_tokens",
  ),
  _bad("system without chat", "--config.data.system=1", "data.system", "data.chat"),
  _bad("chat without template", "--config.data.chat=True", "chat template"),
]

MESH = [
  _bad("mesh of two", "--config.mesh.data=2", "mesh.data=2", "1 devices"),
  _bad("mesh axis zero", "--config.mesh.data=0", "mesh.data=0"),
  _bad("mesh axis -2", "--config.mesh.tensor=-2", "mesh.tensor=-2"),
  _bad("mesh two free axes", "--config.mesh.fsdp=-1", "one of them may be -1"),
  _bad("mesh axis 1e18", "--config.mesh.fsdp=1000000000000000000", "mesh.fsdp"),
  _bad("mesh experts of none", "--config.mesh.expert=2 --config.mesh.data=1", "mesh.expert"),
]


def _devices(name: str, count: str, flags: str, code: int | tuple[int, ...], *words: str) -> Case:
  return Case(
    f"values/{name}", f"train $RUN {flags}", code, words, env={"JAX_NUM_CPU_DEVICES": count}
  )


DEVICES = [
  _devices("four devices", "4", "", 0, "finished"),
  _devices("three devices", "3", "", 2, "batch.prompts is 4"),
  _devices("four in tensor", "4", "--config.mesh.data=1 --config.mesh.tensor=4", 0, "finished"),
  _devices("two experts of none", "2", "--config.mesh.data=1 --config.mesh.expert=2", 2, "mesh.expert"),
  _devices("micro batch of one on two", "2", "--config.batch.micro_batch=1", 2, "batch.micro_batch is 1"),
  _devices("minibatches on four", "4", "--config.algo.minibatches=2", 2, "algo.minibatches"),
  _devices("eval batch on four", "4", "--config.eval.every=1 --config.eval.batch=2", 2, "eval.batch"),
  _devices("no devices", "0", "", (1, 2), "JAX_NUM_CPU_DEVICES"),
  _devices("half a device", "0.5", "", (1, 2), "JAX_NUM_CPU_DEVICES"),
  _devices("devices a word", "many", "", (1, 2), "JAX_NUM_CPU_DEVICES"),
]  # fmt: skip

CASES = [*RANGES, *SHAPES, *SAMPLING, *ALGORITHM, *PROMPTS, *MESH, *DEVICES]
