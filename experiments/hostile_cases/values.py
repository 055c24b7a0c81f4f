# ruff: noqa: E501  (a row is a line)
"""Values of the config: types, ranges, combinations, and what only a tensor would notice."""

from hostile_cases.case import Case


def _bad(name: str, flags: str, *words: str, needs: str = "") -> Case:
  return Case(f"values/{name}", f"train $RUN {flags}", 2, words, needs=needs)


def _fine(name: str, flags: str, *words: str, needs: str = "") -> Case:
  """An odd value that is legal: the run must do its work."""
  return Case(f"values/{name}", f"train $RUN {flags}", 0, ("finished", *words), needs=needs)


# No machine has the memory: the limit keeps the machine of this script usable.
def _too_large(name: str, flags: str, *words: str) -> Case:
  return Case(f"values/{name}", f"ulimit -v 30000000; train $RUN {flags}", (1, 2), words)


RANGES = [
  _bad("nan clip_low", "--config.algo.clip_low=nan", "algo.clip_low is nan"),
  _bad("infinite kl_coef", "--config.algo.kl_coef=inf", "algo.kl_coef is inf"),
  _bad("infinite temperature", "--config.sampling.temperature=inf", "temperature is inf"),
  _bad("b1 one", "--config.optimizer.b1=1", "optimizer.b1 is 1.0"),
  _bad("infinite eps", "--config.optimizer.eps=inf", "optimizer.eps is inf"),
  _bad("infinite warm rate", "--config.warm_start.learning_rate=inf", "warm_start.learning_rate"),
  _bad("weight beyond float32", "--config.reward.weights='(1e200,)'", "reward.weights"),
  _bad("router coefficient", "--config.learner.router_aux_coef=0.1", "learner.router_aux_coef"),
  _bad("wandb is missing", "--config.log.trackers=\"('wandb',)\"", "log.trackers", "wandb"),
  _bad("task path of arithmetic", "--config.data.task=arithmetic", "data.path"),
]

SHAPES = [
  _too_large("width 1e9", "--config.model.embed_dim=1000000000", "model.embed_dim"),
  _too_large(
    "width beyond int64", "--config.model.embed_dim=99999999999999999999", "model.embed_dim"
  ),
  _too_large("group 1e9", "--config.batch.group_size=1000000000", "batch.group_size"),
  _bad("tokens beyond the positions", "--config.sampling.max_tokens=1000000", "positions"),
]

SAMPLING = [
  _bad(
    "stop id beyond the vocabulary", '--config.sampling.stop_ids="(99999,)"', "sampling.stop_ids"
  ),
]

ALGORITHM = [
  _bad("minibatches more than prompts", "--config.algo.minibatches=8", "algo.minibatches"),
  _bad("micro batch too large", "--config.batch.micro_batch=8", "batch.micro_batch is 8"),
  _bad(
    "process without steps and with kl",
    "--config.algo.advantage=process --config.algo.kl_coef=0.1"
    " --config.algo.kl_in=reward --config.algo.kl=k1",
    "algo.kl_in",
  ),
  _fine("full kl", "--config.algo.kl=full --config.algo.kl_coef=0.1"),
  _bad("correction of nothing", "--config.algo.correction=truncate", "algo.correction"),
  _bad("unknown ratio", "--config.algo.ratio=''", "algo.ratio is ''"),
]

PROMPTS = [
  _bad("prompt position", "--config.data.prompt='{0}'", "data.prompt"),
  _bad("prompt attribute", "--config.data.prompt='{question.__class__}'", "data.prompt"),
  _bad("prompt nested format", "--config.data.prompt='{question:{nothing}}'", "data.prompt"),
  _bad("prompt not utf-8", "--config.data.prompt=$'\\xff{question}'", "data.prompt"),
]

MESH = [
  _bad("mesh of two", "--config.mesh.data=2", "mesh.data=2", "1 devices"),
  _bad("mesh two free axes", "--config.mesh.fsdp=-1", "one of them may be -1"),
]


def _devices(name: str, count: str, flags: str, code: int | tuple[int, ...], *words: str) -> Case:
  return Case(
    f"values/{name}", f"train $RUN {flags}", code, words, env={"JAX_NUM_CPU_DEVICES": count}
  )


DEVICES = [
  _devices("two experts of none", "2", "--config.mesh.data=1 --config.mesh.expert=2", 2, "mesh.expert"),
  _devices("eval batch on four", "4", "--config.eval.every=1 --config.eval.batch=2", 2, "eval.batch"),
]  # fmt: skip

# The row counts each prompt once for each of its completions, as in TRL.
_COUNT_TOKENS = (
  "import glob, grpo_jax, json; rows = [json.loads(line) for name in glob.glob('run/completions/*')"
  " for line in open(name)]; "
  "counted = sum(len(row['prompt_ids']) + len(row['completion_ids']) for row in rows); "
  "found = grpo_jax.read_metrics('run')[-1]['num_tokens']; "
  "print('tokens agree' if found == counted else f'{found} tokens, not {counted}')"
)
METRICS = [
  Case("values/num_tokens counts prompts", f'train $RUN --config.log.completions_every=1 && python -c "{_COUNT_TOKENS}"', 0, ("tokens agree",)),
]  # fmt: skip

CASES = [*RANGES, *SHAPES, *SAMPLING, *ALGORITHM, *PROMPTS, *MESH, *DEVICES, *METRICS]
