"""Every setting of a run: its type, default, range and meaning, once.

`Config` is a tree of frozen dataclasses. The section `algo` is in `grpo_jax/algo/settings.py`,
where the settings of the algorithm's variants come together. `configs/default.py` turns these
defaults into the `ConfigDict` that a user changes; entry points turn it back with `from_dict` and
pass the dataclasses on, so that no other code knows `ml_collections`.

This file is longer than the others because it is one table: nothing here computes.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, NamedTuple

from grpo_jax import plain_values
from grpo_jax.algo.settings import Algo
from grpo_jax.settings import (
  LARGEST_INT,
  ConfigError,
  Range,
  above,
  at_least,
  below_one,
  each_of,
  fraction,
  one_of,
  setting,
  shown,
  span,
)

DTYPES = ("float32", "bfloat16")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LEARNING_RATE_SCHEDULES = ("constant", "linear", "cosine")
TEMPERATURE_SCHEDULES = ("constant", "linear", "cosine")
TRACKERS = ("wandb", "mlflow", "trackio", "swanlab")
NOT_NEGATIVE = at_least(0)
POSITIVE = at_least(1)
# Bounds far above any batch or model in use, so that a typing error fails at once.
ROWS = at_least(1, at_most=2**20)
TOKENS = at_least(1, at_most=2**24)
WIDTH = at_least(1, at_most=2**17)
NOT_EMPTY = Range(bool, "it must not be empty")


class Removed(NamedTuple):
  """A key that only earlier versions had.

  Attributes:
    instead: The text of the error message: what to write instead, or what is now fixed.
    is_same: (the key's value in a saved config, all values of that config by dotted key) -> whether
      today's code computes the same for that config.
  """

  instead: str
  is_same: Callable[[Any, Mapping[str, Any]], bool] = lambda value, values: True


REMOVED = {
  "sampling.parts": Removed("sampling.rows says how many rows are decoded together"),
  "sampling.layout": Removed("sampling.tensor says how devices share a row"),
  "algo.keep_surplus": Removed(
    "groups flow, so that no surplus is drawn", lambda value, values: not value
  ),
  "data.max_images": Removed("a prompt may have 4,096 images"),
  "data.max_image_pixels": Removed(
    "an image may have 50,000,000 pixels", lambda value, values: value <= 50_000_000
  ),
  "learner.max_skipped_updates": Removed(
    "a run stops after 5 skipped updates in a row", lambda value, values: 0 < value <= 5
  ),
  "log.wandb": Removed("write log.trackers=('wandb',) and log.project"),
  "reward.dtype": Removed(
    "reward models and the teacher compute in model.dtype",
    lambda value, values: value in ("", values["model.dtype"]),
  ),
  "warm_start.warmup_steps": Removed(
    "the warm start warms up for 10 steps",
    lambda value, values: value == 10 or not values["warm_start.steps"],
  ),
}


@dataclasses.dataclass(frozen=True)
class Model:
  """The policy's decoder."""

  path: str = setting(
    "", "a Hugging Face folder, or OWNER/NAME[@REVISION] there; '' = random weights of this shape"
  )
  vision: str = setting(
    "frozen",
    "the vision tower of a model that has one: frozen, or trained with the rest; ignored reads and"
    " trains the text part alone",
    one_of(("frozen", "trained", "ignored")),
    before="ignored",
  )
  dtype: str = setting(
    "float32", "dtype of the computation; master weights are always float32", one_of(DTYPES)
  )
  reference_dtype: str = setting(
    "float32",
    "dtype of the matrices of a reference that is a copy of the policy. bfloat16 halves its memory,"
    " and changes no number where model.dtype is bfloat16 too. With lora.rank it has no effect: see"
    " lora.base_dtype",
    one_of(DTYPES),
  )
  attention: str = setting(
    "auto",
    "how attention is computed in the update, in prefill and in scoring: dense holds all scores;"
    " chunked holds a few; splash is a kernel for TPUs and cudnn one for GPUs. auto takes the"
    " best one that the platform has",
    one_of(("auto", "dense", "chunked", "splash", "cudnn")),
  )
  embed_dim: int = setting(64, "width D; this key and those below shape a random model", WIDTH)
  num_layers: int = setting(2, "layers L", at_least(1, at_most=512))
  num_heads: int = setting(4, "query heads H", WIDTH)
  num_kv_heads: int = setting(4, "key and value heads K; must divide num_heads", WIDTH)
  head_dim: int = setting(16, "size E of a head; must be even", WIDTH)
  mlp_dim: int = setting(256, "width F of the MLP", WIDTH)
  rope_theta: float = setting(10000.0, "base of the rotary frequencies", above(0))
  tie_embeddings: bool = setting(True, "use the embedding as the output head")


@dataclasses.dataclass(frozen=True)
class Lora:
  """Low-rank adapters on the weights of model.path, which are then frozen and the reference."""

  rank: int = setting(0, "rank of the adapters; 0 trains all weights", NOT_NEGATIVE)
  alpha: float = setting(32.0, "an adapter's product is scaled by alpha / rank", above(0))
  rslora: bool = setting(False, "scale by alpha / sqrt(rank) instead")
  targets: tuple[str, ...] = setting(
    PROJECTIONS, "the projections that get an adapter, as PEFT calls them"
  )
  path: str = setting(
    "", "a PEFT folder to continue from; the four keys above must match it. '' = new adapters"
  )
  base_dtype: str = setting(
    "bfloat16",
    "dtype of the frozen weights: int8, int4 and nf4 quantise them",
    one_of((*DTYPES, "int8", "int4", "nf4")),
  )


@dataclasses.dataclass(frozen=True)
class Data:
  """The problems."""

  task: str = setting("arithmetic", "a name of grpo_jax/data/tasks/tasks.py")
  path: str = setting(
    "",
    "a folder with train.jsonl and test.jsonl (or .parquet), or one such file; '' = the task's own"
    " source. With data.task=reasoning_gym: names of its tasks with their knobs, such as"
    " chain_sum(min_terms=2),gsm_symbolic, which become the sources of a mixture",
  )
  columns: tuple[str, ...] = setting(
    (),
    "for data.task=columns: fields of an example that are no columns of the files. NAME=COLUMN,"
    " such as answer=final_answer or answer=reward_model.ground_truth, or NAME=TEMPLATE with"
    " columns in braces. For one source of data.mixture alone: SOURCE:NAME=COLUMN",
  )
  held_out: float = setting(
    0.0, "where there is no test file: the share of training rows that become the test", below_one()
  )
  train_examples: int = setting(
    0,
    "train on the first so many training rows, in a mixture on those of each source; 0 = all",
    NOT_NEGATIVE,
  )
  mixture: tuple[str, ...] = setting(
    (),
    "several tasks instead of one: TASK, TASK:PATH or NAME=TASK:PATH. Each example says in the"
    " field task which one it is of",
  )
  weights: tuple[float, ...] = setting(
    (), "the share of each source of data.mixture in an epoch; () = that of its rows"
  )
  tokenizer: str = setting(
    "",
    "tokenizer.json, tokenizer.model or their folder; '' = that of model.path, or one id per"
    " character of the task",
  )
  prompt: str = setting(
    "{question}", "the template of a prompt, with fields of an example in braces"
  )
  prompts: tuple[str, ...] = setting(
    (), "a template for each source of data.mixture; () = data.prompt for all"
  )
  chat: bool = setting(
    False,
    "render prompts with the tokenizer's chat template: data.prompt is then the user's message, or"
    " one field that holds messages",
  )
  system: str = setting("", "the system message of conversations that have none; needs data.chat")
  chat_template_kwargs: tuple[str, ...] = setting(
    (),
    "what the chat template gets beside the messages: NAME=VALUE, such as enable_thinking=False;"
    " needs data.chat",
    before=(),
  )
  few_shot: tuple[str, ...] = setting(
    (),
    "worked examples after the system message: what the user says and what the assistant answers,"
    " in turn; needs data.chat",
  )
  max_prompt_tokens: int = setting(64, "S; longer prompts are dropped and counted", TOKENS)
  image_urls: bool = setting(False, "download images whose rows name a URL")
  count_at_start: int = setting(
    50_000,
    "up to so many rows, a file is checked and its prompts are counted at the start. Rows of a"
    " larger one are read when a batch needs them, and another one stands in for a prompt that is"
    " too long",
    NOT_NEGATIVE,
    before=LARGEST_INT,
  )


@dataclasses.dataclass(frozen=True)
class BatchSize:
  """How many completions a step samples, and how many an update computes at once."""

  prompts: int = setting(
    32, "P per GRPO step; an optimizer step uses prompts / algo.minibatches of them", ROWS
  )
  group_size: int = setting(
    8,
    "G completions of each prompt",
    at_least(
      2, "an advantage is relative to the group, so a group needs 2 completions or more", 2**20
    ),
  )
  micro_batch: int = setting(
    0,
    "prompts per forward and backward pass; 0 = as many as fit the memory of a device, and on a"
    " CPU at most 2048 tokens. It does not change the update",
    NOT_NEGATIVE,
  )


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How completions are sampled in training.

  With a filter (top_k, top_p, min_p, filters, min_tokens, regex, banned), the sampler does not draw
  from the distribution that the learner trains, which is the whole softmax. The metric
  sampler/filter_gap_mean measures the difference.
  """

  max_tokens: int = setting(64, "T, the longest completion", TOKENS)
  min_tokens: int = setting(
    0, "no stop id is drawn before a completion has so many tokens", NOT_NEGATIVE, before=0
  )
  temperature: float = setting(
    1.0, "of the first step", above(0, "training needs completions that differ")
  )
  temperature_schedule: str = setting(
    "constant",
    "how the temperature goes from temperature to temperature_end over the GRPO steps",
    one_of(TEMPERATURE_SCHEDULES),
  )
  temperature_end: float = setting(
    1.0, "of the last step, where temperature_schedule is not constant", above(0)
  )
  top_k: int = setting(0, "draw from the k likeliest tokens; 0 = off", NOT_NEGATIVE)
  top_p: float = setting(
    1.0, "draw from the likeliest tokens of this probability", fraction("1 is off")
  )
  min_p: float = setting(
    0.0, "drop tokens less likely than min_p times the likeliest", below_one("0 is off")
  )
  filters: tuple[str, ...] = setting(
    (),
    "filters of your own (grpo_jax.register_filter) with their values, such as"
    " ('top_n_sigma=1.0',)",
    before=(),
  )
  regex: str = setting(
    "",
    "whole completions match this regular expression, with llguidance (pip install -e"
    " '.[guides]'); '' = off",
    before="",
  )
  banned: tuple[str, ...] = setting(
    (), "texts that no completion holds, with llguidance", before=()
  )
  stop_ids: tuple[int, ...] = setting(
    (), "token ids that end a completion, in addition to the tokenizer's and the model's own"
  )
  stop: tuple[str, ...] = setting(
    (),
    "texts that end a completion, which keeps them and loses what it wrote after them",
    before=(),
  )
  dtype: str = setting(
    "", "dtype of weights, cache and computation; '' = model.dtype", one_of(("", *DTYPES))
  )
  weights_dtype: str = setting(
    "",
    "int8 rounds the weights of projections while sampling; '' = sampling.dtype. The completions"
    " are then those of a policy beside the one that learns: see algo.correction",
    one_of(("", "int8")),
    before="",
  )
  cache_dtype: str = setting(
    "",
    "int8 rounds the keys and values of completions; '' = sampling.dtype. See weights_dtype",
    one_of(("", "int8")),
    before="",
  )
  tensor: int = setting(
    0,
    "how many devices share the heads and hidden units of a row while sampling; the others have"
    " other rows. A multiple of mesh.tensor. 0 = mesh.tensor or, where mesh.fsdp or mesh.context"
    " splits weights, the least with which weights and cache fit and rows suffice",
    NOT_NEGATIVE,
  )
  context: int = setting(
    1,
    "how many devices share the KV cache of a row while sampling: each has the keys and values of"
    " some tokens, and computes some of those of a prompt. Weights are whole on each of them, or"
    " split by sampling.tensor",
    POSITIVE,
    before=1,
  )
  max_logprob_gap: float = setting(
    -1.0,
    "the run stops if log-probs of sampler and learner differ by more for a token: the tokens that"
    " are learned are then not those that were drawn. -1 = 0.05 in float32 and 4 in bfloat16,"
    " without int8 and rollout.max_staleness; 0 = no bound",
    at_least(-1),
    before=0.0,
  )
  prompt_piece: int = setting(
    0,
    "the most tokens of a prompt that are computed while other rows wait to draw their next ones."
    " Longer prompts are computed in pieces, between two chunks. 0 = whole prompts",
    NOT_NEGATIVE,
    before=0,
  )
  rows: int = setting(
    0,
    "the most completions that are decoded together: each one that ends gives its place to the"
    " next, and keys and values take that much less memory; 0 = as many as fit",
    NOT_NEGATIVE,
    before=0,
  )


@dataclasses.dataclass(frozen=True)
class Reward:
  """The rewards of completions. The last settings are for reward models and the teacher."""

  functions: tuple[str, ...] = setting(
    ("strict",),
    "names of grpo_jax/rewards, path/file.py:function, package.module:function, or Hugging Face"
    " folders of reward models. A function may have parameters, as in cosine(max_length=512)",
  )
  weights: tuple[float, ...] = setting((1.0,), "the weight of each function")
  on_error: str = setting(
    "stop",
    "what follows when a function raises or returns something that is no reward: stop = the run"
    " saves and stops; none = it is called again for each completion alone. If it fails again, the"
    " completion has no reward and is counted. A policy can then learn to write what a function"
    " fails on, where other rewards would be lower",
    one_of(("stop", "none")),
  )
  workers: int = setting(
    -1,
    "processes that call functions; -1 = one for each CPU core that this process of the run has;"
    " 0 = none: the process of the run calls them, without the two limits below, and a debugger"
    " can stop in them",
    at_least(-1, at_most=2**12),
  )
  max_unscored_steps: int = setting(
    5,
    "the run saves and stops after this many GRPO steps in a row without a completion to learn"
    " from; 0 = never. A run that never had one fails at its end",
    NOT_NEGATIVE,
  )
  timeout: float = setting(
    30.0,
    "seconds that a worker may take for the completions of one prompt, and for one of them alone if"
    " that was not enough",
    above(0),
  )
  memory: float = setting(4.0, "GiB that a worker may have; 0 = no limit", NOT_NEGATIVE)
  tasks: tuple[str, ...] = setting(
    (),
    "the tasks that each function scores, with commas between them, '' for all; () = all functions"
    " score all tasks. The field task of an example says its task: the source of data.mixture, or"
    " what data.columns puts there, such as task=data_source",
  )
  batch: int = setting(
    64, "texts scored at once; a multiple of mesh.data x mesh.fsdp x mesh.expert", ROWS
  )
  step_separator: str = setting("\n", "separates the steps that a *ForTokenClassification scores")
  teacher: str = setting(
    "",
    "on-policy distillation: a Hugging Face folder with the policy's tokenizer, or"
    " OWNER/NAME[@REVISION]. '' = off",
  )
  teacher_weight: float = setting(
    1.0,
    "weight of log-prob of the teacher - log-prob of the policy, which is added to each token's"
    " advantage; with reward.weights of 0 only the teacher teaches",
    NOT_NEGATIVE,
  )


@dataclasses.dataclass(frozen=True)
class Environment:
  """Tools and environments that answer the policy within a completion of several turns.

  The docstring of grpo_jax/environments explains both.
  """

  name: str = setting(
    "",
    "retry, path/file.py:Class, package.module:Class, textarena:ID or openenv:ADDRESS; it may have"
    " parameters, as in retry(tries=2). '' = none. For some tasks alone: TASK=NAME, with commas"
    " between several",
    before="",
  )
  tools: tuple[str, ...] = setting(
    (),
    "functions that the policy may call: calculator, path/file.py:function,"
    " package.module:function, or those of an MCP server: mcp:COMMAND or mcp:URL",
    before=(),
  )
  harness: str = setting(
    "",
    "verifiers:ID, path/file.py:function or package.module:function, an async function that plays"
    " with the policy through an endpoint of the run and returns a reward: see"
    " grpo_jax/environments/harness.py. '' = none",
    before="",
  )
  calls: str = setting(
    "auto",
    "how a model writes calls: hermes, llama3, mistral, qwen3_coder, gemma4, gpt_oss, deepseek,"
    " glm4, granite, olmo3, or a regular expression with the groups name and arguments; auto = by"
    " the chat template",
    before="auto",
  )
  branches: int = setting(
    1,
    "how many branches of a harness's calls are learned from a completion. Each of them has its"
    " reward",
    POSITIVE,
    before=1,
  )
  max_turns: int = setting(8, "the most turns of the policy in a completion", POSITIVE, before=8)
  max_calls: int = setting(
    16, "the most calls of tools in a completion; others get an error message", POSITIVE, before=16
  )
  turn_tokens: int = setting(
    0,
    "the longest turn of the policy; 0 = what is left of sampling.max_tokens, which counts the"
    " tokens of all turns and of the environment",
    NOT_NEGATIVE,
    before=0,
  )

  @property
  def has_turns(self) -> bool:
    """Whether completions may have several turns."""
    return bool(self.name or self.tools or self.harness)

  @property
  def has_messages(self) -> bool:
    """Whether an environment or a harness writes messages that are not known in advance."""
    return bool(self.name or self.harness)


@dataclasses.dataclass(frozen=True)
class Curriculum:
  """Chooses the training prompts by their pass rates.

  If all completions of a prompt pass, or all fail, the policy learns nothing from the group. A
  prompt that is drawn less often also weighs less in the mean over prompts. Nothing corrects that.
  """

  pass_score: float = setting(1.0, "a completion passes if its score is at least this", above(0))
  rest: int = setting(
    0,
    "GRPO steps for which a prompt is passed over after all or none of its completions passed;"
    " 0 = off",
    NOT_NEGATIVE,
  )
  floor: float = setting(
    1.0,
    "a prompt of pass rate p is taken with probability floor + (1 - floor) 4 p (1 - p) when its"
    " turn comes. 1 = off, and new prompts are always taken",
    fraction("1 is off"),
  )

  @property
  def chooses(self) -> bool:
    """Whether pass rates change which prompts are drawn."""
    return self.rest > 0 or self.floor < 1


# Values of learner.remat_policy.
AUTO, KEEPS_PRODUCTS = "auto", "dots_with_no_batch_dims_saveable"


@dataclasses.dataclass(frozen=True)
class Learner:
  """How an update is computed."""

  remat: bool = setting(
    False, "recompute each layer in the backward pass: less memory, a third more time"
  )
  remat_policy: str = setting(
    AUTO,
    "with remat, what a layer keeps for the backward pass: a policy of jax.checkpoint_policies."
    " nothing_saveable keeps its input, and offload keeps that in the memory of the host."
    " dots_with_no_batch_dims_saveable keeps the projections: less time, more memory. auto keeps"
    " them on an accelerator where they fit for one prompt on each device, and else the input",
    one_of((AUTO, "nothing_saveable", "offload", KEEPS_PRODUCTS, "dots_saveable")),
  )
  logprob_chunk: int = setting(
    0,
    "tokens whose [tokens, V] logits exist at once; 0 = as many as take 1 GiB, or 256 MiB on a CPU",
    NOT_NEGATIVE,
  )
  router_aux_coef: float = setting(
    0.0,
    "weight of the loss that makes a mixture of experts use all experts evenly, over prompts and"
    " completions. Checkpoints were trained with 0.001; the metrics router/* say whether it is"
    " needed. Where an update has several micro-batches, it costs one more forward pass",
    NOT_NEGATIVE,
  )
  router_replay: bool = setting(
    False,
    "in a mixture of experts, the sampler keeps the experts of each token, and the update uses them"
    " instead of those that its own routers would choose (R3, 2510.11370). It takes a byte or two"
    " for each expert of each token in each layer. The metric router/differs says what it changes",
  )
  router_bias_rate: float = setting(
    0.0,
    "in a mixture whose routers are sigmoids, by how much an update moves the bias of each expert"
    " towards an even load (2408.15664); 0 = the biases stay as they are",
    NOT_NEGATIVE,
  )

  @property
  def saved_activations(self) -> str:
    """The remat policy, which says what a layer keeps for the backward pass. "" keeps everything.

    An `auto` that is not resolved yet counts as nothing_saveable: a layer keeps only its input.
    """
    if not self.remat:
      return ""
    return "nothing_saveable" if self.remat_policy == AUTO else self.remat_policy


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """The optax optimizer of the GRPO steps."""

  name: str = setting("adamw", "a name of grpo_jax/learner/optimizer.py")
  learning_rate: float = setting(1e-6, "the peak, after the warmup", NOT_NEGATIVE)
  schedule: str = setting(
    "constant",
    "after the warmup: constant, or to 0 at the last step",
    one_of(LEARNING_RATE_SCHEDULES),
  )
  warmup_steps: int = setting(0, "optimizer steps of linear warmup", NOT_NEGATIVE)
  b1: float = setting(0.9, "decay of the first moment, or momentum", below_one())
  b2: float = setting(
    -1.0,
    "decay of the second moment; -1 = optax's default: 0.99 for lion, 0.999 for others",
    Range(lambda value: 0 <= value < 1 or value == -1, "it must be in [0, 1), or -1"),
    before=0.999,
  )
  eps: float = setting(1e-8, "added to the root of the second moment", NOT_NEGATIVE)
  moments_dtype: str = setting(
    "float32",
    "dtype of the first moment, or momentum. The second moment is always float32: with b2 = 0.999"
    " it changes by a thousandth in a step, which bfloat16 would round away",
    one_of(DTYPES),
  )
  weight_decay: float = setting(
    0.0,
    "decay of matrices; norms and biases have none. With muon, the embedding and the head have none"
    " either",
    NOT_NEGATIVE,
  )
  max_grad_norm: float = setting(1.0, "gradients are clipped to this norm", at_least(0, "0 is off"))


@dataclasses.dataclass(frozen=True)
class WarmStart:
  """Supervised steps on the task's worked solutions, before GRPO."""

  steps: int = setting(0, "how many", NOT_NEGATIVE)
  batch: int = setting(128, "examples in each", ROWS)
  learning_rate: float = setting(1e-3, "constant after 10 steps of linear warmup", NOT_NEGATIVE)


@dataclasses.dataclass(frozen=True)
class Eval:
  """Evaluation on the test split."""

  every: int = setting(
    0, "GRPO steps between evaluations, with one before the first; 0 = never", NOT_NEGATIVE
  )
  examples: int = setting(256, "how many test problems, from the first on", POSITIVE)
  batch: int = setting(128, "problems decoded at once", ROWS)
  function: str = setting(
    "strict",
    "the reward function that decides: 1 is right, all else is not. With reward.tasks, 'rewards' is"
    " the first of reward.functions that scores the problem's task",
  )
  tasks: tuple[str, ...] = setting(
    (),
    "exams that are evaluated beside the test split: EXAM:FILE, such as math500:test.jsonl, or EXAM"
    " alone, which is downloaded. With options: aime24(samples=16,max_tokens=4096):FILE. The exams"
    " are those of grpo_jax/data/tasks/exams.py",
    before=(),
  )
  samples: int = setting(
    0,
    "k draws of each problem for mean@k, pass@k and maj@k; 0 = greedy only",
    at_least(0, at_most=2**20),
  )
  temperature: float = setting(1.0, "of those draws", above(0))
  check_training: bool = setting(
    False,
    "eval.function also scores the completions of training, as a check that no update sees: the"
    " metric check/gap is the mean reward less the fraction that is right",
  )
  engine: bool = setting(
    False, "rollout.engine draws for evaluations during training, too", before=False
  )


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """Checkpoints."""

  every: int = setting(100, "steps; 0 = only at the end and on SIGTERM", NOT_NEGATIVE)
  keep: int = setting(3, "how many of the newest are kept", POSITIVE)


@dataclasses.dataclass(frozen=True)
class Log:
  """The rows, events and lines that a run writes while it trains."""

  every: int = setting(1, "steps between rows of metrics.jsonl", POSITIVE)
  completions_every: int = setting(
    50, "steps between saved and shown completions; 0 = never", NOT_NEGATIVE
  )
  tensorboard: bool = setting(True, "write TensorBoard's event files")
  trackers: tuple[str, ...] = setting(
    (),
    "where the rows are shown, too: any of wandb, mlflow, trackio and swanlab. Each is an extra:"
    " pip install -e '.[wandb]'",
    each_of(TRACKERS),
  )
  project: str = setting(
    "grpo_jax", "the project of the run at log.trackers; MLflow calls it an experiment", NOT_EMPTY
  )
  profile: tuple[int, ...] = setting(
    (),
    "a trace of the steps from the first number to the second, such as (3, 5), goes to profile/ in"
    " the run's folder. They are counted as in metrics.jsonl; () = off",
    span("write the first step and the last one, such as (3, 5); () is off"),
  )
  console: str = setting(
    "auto",
    "what stdout shows: auto = a progress bar or lines for a reader, json = one object a line",
    one_of(("auto", "json")),
  )


@dataclasses.dataclass(frozen=True)
class Rollout:
  """How far sampling may run ahead of learning."""

  max_staleness: int = setting(
    0,
    "how many GRPO steps a token may be old when it is learned from. 0 = each batch is drawn by the"
    " policy that learns from it. Above 0, batches are drawn ahead: rewards and tools of one batch"
    " run while the next is sampled. With mesh.sampler or listen, sampling goes on during updates",
    at_least(0, at_most=1024),
    before=0,
  )
  weights: str = setting(
    "fixed",
    "which weights draw a batch. fixed = those of exactly max_staleness steps before, so that no"
    " number depends on time; newest = the newest when the batch begins, with mesh.sampler or"
    " listen; in_flight = rows also go on under newer ones, between two chunks, and groups of the"
    " next batches fill the seats that get free, without listen. newest, and in_flight with"
    " mesh.sampler, write what drew to schedule.jsonl, which a resumed run follows",
    one_of(("fixed", "newest", "in_flight")),
    before="fixed",
  )
  replay: str = setting(
    "",
    "the schedule.jsonl of another run, whose weights draw the same batches; '' = none. For"
    " rollout.weights newest and in_flight. With rollout.engine: the drawn.jsonl of another run,"
    " whose completions are learned from without the engine",
    before="",
  )
  listen: str = setting(
    "",
    "HOST:PORT of this machine where sampler processes join, which then draw all batches of"
    " training: python -m grpo_jax.sample_for --learner=HOST:PORT. '' = the run samples itself",
    before="",
  )
  samplers: int = setting(
    1,
    "with listen: into how many equal parts a batch is split, each of which one process draws. More"
    " processes may join, and fewer draw the parts in turn",
    POSITIVE,
    before=1,
  )
  secret_file: str = setting(
    "",
    "a file with the secret that run and sampler processes prove to each other; '' = it is in the"
    " environment variable GRPO_JAX_SECRET. Without one, only this machine may join",
    before="",
  )
  certificate_file: str = setting(
    "",
    "encrypts between run and sampler processes. For the run: its certificate, in PEM; for a"
    " sampler: the same, or that of the authority that signed it. '' = not encrypted",
    before="",
  )
  key_file: str = setting(
    "",
    "for the run: the private key of its certificate, in PEM; '' = it is in certificate_file, too",
    before="",
  )
  engine: str = setting(
    "",
    "an engine of others that draws the completions of training, at rollout.engine_urls: vllm or"
    " sglang. '' = the run samples itself",
    one_of(("", "vllm", "sglang")),
    before="",
  )
  engine_urls: tuple[str, ...] = setting(
    (),
    "the servers of the engine, such as ('http://127.0.0.1:8000',), which share the groups."
    " python -m grpo_jax.engine --config=... --print writes the command that starts one",
    before=(),
  )
  engine_folder: str = setting(
    "",
    "the folder through which the engine gets weights, which run and servers reach under this name."
    " '' = the folder engine in the run's own",
    before="",
  )
  engine_restart: bool = setting(
    False,
    "each new version of the weights restarts the servers, which then must be started with"
    " python -m grpo_jax.engine --config=...; for engines that do not load weights as they say",
    before=False,
  )
  engine_timeout: float = setting(
    600.0,
    "seconds that a server may take for a completion, or to load weights",
    above(0),
    before=600.0,
  )
  engine_tensor: int = setting(
    1, "how many devices share the weights in each server", POSITIVE, before=1
  )
  engine_correction: float = setting(
    2.0,
    "with rollout.engine and algo.correction='none': importance weights of tokens are truncated"
    " here, because the engine computes a little otherwise than the learner. 0 = off",
    at_least(0),
    before=2.0,
  )


@dataclasses.dataclass(frozen=True)
class Mesh:
  """The number of devices on each axis. One axis may be -1, which takes all remaining devices."""

  data: int = setting(-1, "splits the rows of a batch")
  fsdp: int = setting(1, "splits rows, parameters and optimizer state")
  expert: int = setting(1, "splits rows and the experts of a mixture")
  tensor: int = setting(1, "splits heads and the inner width of each layer")
  context: int = setting(
    1,
    "splits the tokens of each text in the update and in passes for log-probs, and parameters and"
    " optimizer state as mesh.fsdp does. While sampling, its devices have rows of their"
    " own, or share their cache (sampling.context)",
    before=1,
  )
  sampler: int = setting(
    0,
    "how many devices, the last ones of each process, do nothing but sample, while the others"
    " learn; the axes above are those of the others. 0 = all devices sample and learn in turn",
    NOT_NEGATIVE,
    before=0,
  )


@dataclasses.dataclass(frozen=True)
class Config:
  """All settings of a run."""

  seed: int = setting(0, "numbers depend on it and on the step, on nothing else")
  steps: int = setting(100, "GRPO steps, after those of the warm start", NOT_NEGATIVE)
  compilation_cache: str = setting(
    "auto",
    "a folder that keeps compiled programs, so that the next start does not compile them again."
    " auto = grpo_jax in the user's cache folder, '' = none. The environment variable"
    " JAX_COMPILATION_CACHE_DIR has precedence. The folder grows, and can be deleted at any time",
  )
  plugins: tuple[str, ...] = setting(
    (),
    "files, or names of modules, that register parts of your own, such as"
    " grpo_jax.register_advantage does: each command that reads the config executes them first",
    before=(),
  )
  model: Model = Model()
  lora: Lora = Lora()
  data: Data = Data()
  batch: BatchSize = BatchSize()
  sampling: Sampling = Sampling()
  reward: Reward = Reward()
  environment: Environment = Environment()
  curriculum: Curriculum = Curriculum()
  algo: Algo = Algo()
  learner: Learner = Learner()
  optimizer: Optimizer = Optimizer()
  warm_start: WarmStart = WarmStart()
  eval: Eval = Eval()
  checkpoint: Checkpoint = Checkpoint()
  log: Log = Log()
  rollout: Rollout = Rollout()
  mesh: Mesh = Mesh()
  removed = REMOVED

  @property
  def old_is_policy(self) -> bool:
    """Whether the old log-probs are the current policy's own, so that the ratio is 1.

    They are not if a step has several updates. Nor are they if older policies draw the batches,
    unless a correction or a rejection compares these policies with the current one.
    """
    is_older = self.rollout.max_staleness > 0 and not self.algo.compares_with_sampler
    return self.algo.old_is_policy and not is_older

  @property
  def samples_in_turn(self) -> bool:
    """Whether the devices that learn also sample, instead of other devices or an engine."""
    return not (self.mesh.sampler or self.rollout.listen or self.rollout.engine)

  @property
  def has_other_texts(self) -> bool:
    """Whether texts are tokenized that are not in the data, so that any character may occur."""
    return self.environment.has_messages or bool(self.eval.tasks)

  @property
  def keeps_flight(self) -> bool:
    """Whether unfinished rows stay on the learning devices during an update, and go on after it."""
    return self.samples_in_turn and self.rollout.weights == "in_flight"

  @property
  def sampling_copies(self) -> int:
    """The most versions of the weights that the sampling devices hold at the same time."""
    if not self.mesh.sampler:
      return 1
    newer = self.rollout.max_staleness
    # One version draws. With `fixed`, all newer versions wait. Otherwise two do: the newest version
    # and one that arrives.
    return 1 + (newer if self.rollout.weights == "fixed" else min(newer, 2))

  @property
  def rows_per_prompt(self) -> int:
    """The most rows of a prompt that an update learns from."""
    return self.batch.group_size * self.environment.branches

  def replace(self, changes: Mapping[str, Any]) -> "Config":
    """Returns a config with new values by key: {"optimizer.learning_rate": 1e-5, "seed": 1}.

    Raises:
      ConfigError: A key is unknown, or a value has the wrong type.
    """
    return from_dict(changed(to_dict(self), changes))


def changed(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
  """Returns nested plain values with new values at some keys.

  Args:
    values: The values by name, with a dict for each section.
    changes: The new values by dotted key, such as {"optimizer.learning_rate": 1e-5}.

  Raises:
    ConfigError: A key is unknown, or `changes` is not a mapping.
  """
  if not isinstance(changes, Mapping):
    raise ConfigError(
      'changes of a config are a dict of values by key, such as {"seed": 1}, got '
      f"{shown(changes)}"
    )
  nested: dict[str, Any] = {}  # like `values`, with a dict for each section
  for key, value in changes.items():
    check_key(key)
    section, _, name = key.rpartition(".")
    in_section = nested.setdefault(section, {}) if section else nested
    in_section[name] = value
  return _merged(values, nested)


def from_dict(values: Mapping[str, Any], saved: bool = False) -> Config:
  """Builds a config from nested plain values. A missing key gets its default.

  Args:
    values: Nested dicts, such as those of a ConfigDict or of a run's config.json. An int may stand
      for a float and a list for a tuple. Nothing else is converted.
    saved: True for the config of an earlier run. A missing key then gets the value that reproduces
      the behaviour of the version that lacked it.

  Raises:
    ConfigError: A key is unknown, or a value has the wrong type.
  """
  if saved:
    values = _without_removed(values)
  return plain_values.from_dict(values, Config, saved)


def _without_removed(saved: Mapping[str, Any]) -> dict[str, Any]:
  """The nested values of an earlier run's config, without keys that no longer exist."""
  gone = [tuple(key.split(".")) for key in REMOVED]
  return {
    name: {key: section[key] for key in section if (name, key) not in gone}
    if isinstance(section, Mapping)
    else section
    for name, section in saved.items()
  }


def completed(saved: Mapping[str, Any]) -> dict[str, Any]:
  """Adds the keys that the config of an earlier run lacks because they are newer.

  They get the values that reproduce the behaviour of that time. Keys that no longer exist stay.
  """
  return _merged(plain_values.to_dict(from_dict({}, saved=True)), saved)


def to_dict(config: Config) -> dict[str, Any]:
  """Converts a config to nested plain values, the inverse of `from_dict`. Tuples become lists."""
  return plain_values.to_dict(config)


def check_key(name: str) -> None:
  """Raises ConfigError unless `name`, such as algo.clip_high, is the key of a setting."""
  plain_values.check_key(name, Config)


def wrong_type(name: str, value: Any) -> ConfigError:
  """The error for a value of the wrong type for key `name`."""
  return plain_values.wrong_type(name, value, plain_values.keys(Config)[name])


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
  """Merges nested dicts. At each level, values of `changes` replace values of `values`."""
  merged = dict(values)
  for key, change in changes.items():
    inner = merged.get(key)
    both = isinstance(inner, Mapping) and isinstance(change, Mapping)
    merged[key] = _merged(inner, change) if both else change
  return merged
