"""Loads a policy, to sample from it, to evaluate it or to export it."""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import math
from pathlib import Path
from typing import Any, overload

import jax
import numpy as np

from grpo_jax import model
from grpo_jax.algo.advantages import ADVANTAGES
from grpo_jax.algo.corrections import CORRECTIONS
from grpo_jax.algo.kl import KL
from grpo_jax.algo.settings import Algo
from grpo_jax.algo.surrogates import SURROGATES
from grpo_jax.config import Config, Mesh, Optimizer
from grpo_jax.data.loader import PromptBatch, prompt_batch
from grpo_jax.data.prompt_template import fields_of
from grpo_jax.data.prompts import PromptSet
from grpo_jax.data.tokenizers import chat
from grpo_jax.evaluation import model_card
from grpo_jax.evaluation.evaluator import Evaluators
from grpo_jax.evaluation.limits import check_numbers
from grpo_jax.learner.optimizer import OPTIMIZERS
from grpo_jax.model.huggingface import hub
from grpo_jax.model.huggingface.folders import new_folder
from grpo_jax.progress import doing
from grpo_jax.recipes import Change, unchanged, with_absolute_paths
from grpo_jax.rewards import plugins
from grpo_jax.rollouts.complete import Completer, make_rollout
from grpo_jax.run import compilation_cache
from grpo_jax.run.caller_state import leaving_nothing_behind
from grpo_jax.run.run import Run, set_matmul_precision
from grpo_jax.scoring.scorers import Scorers
from grpo_jax.settings import ConfigError, is_text, path_of, shown
from grpo_jax.storage.bucket import folder
from grpo_jax.storage.checkpoint import Checkpoints
from grpo_jax.storage.reading import read_config, read_metrics

Question = str | Sequence[Mapping[str, str]]  # a text or messages


@dataclasses.dataclass(frozen=True)
class Completion:
  """A completion that a policy wrote.

  Attributes:
    text: The text of the completion. With an environment, the policy's last message.
    length: The number of its tokens, including the token that ended it.
    logprob: The sum of the log-probs of these tokens.
    stopped: Whether a stop token or text ended it. Otherwise a limit cut it off.
    turns: With an environment: the messages of the policy and of the environment. Otherwise empty.
  """

  text: str
  length: int
  logprob: float
  stopped: bool
  turns: Sequence[Mapping[str, Any]] = ()


class Policy:
  """A policy in the memory of the devices.

  Attributes:
    name: The name of the policy in messages.
    run: The objects that the config describes: model, data, tokenizer.
    params: The trained parameters.
    step: The step of the checkpoint. 0 before training.
    workdir: The folder of the run. None before training.
  """

  def __init__(self, name: str, run: Run, params: Any, step: int, workdir: Path | None = None):
    self.name, self.run, self.params, self.step, self.workdir = name, run, params, step, workdir
    self._rollouts: dict[tuple[int, bool, int], Completer] = {}

  def __repr__(self) -> str:
    return f"Policy({self.name})"

  @overload
  def sample(self, question: Question, *args: Any, **kwargs: Any) -> list[Completion]: ...
  @overload
  def sample(
    self, question: Sequence[Question], *args: Any, **kwargs: Any
  ) -> list[list[Completion]]: ...
  def sample(
    self,
    question: Question | Sequence[Question],
    n: int = 4,
    temperature: float | None = None,
    max_tokens: int | None = None,
    seed: int = 0,
    images: Sequence[Any] = (),
  ) -> list[Completion] | list[list[Completion]]:
    """Samples completions of a question, or of each question of a list.

    Args:
      question: A text or, with `data.chat`, a list of messages (dicts with role and content). It is
        inserted into `data.prompt` and, with `data.chat`, the chat template. Or a list of such
        questions.
      n: How many completions to sample. At temperature 0, there is only one.
      temperature: 0 samples greedily. None means sampling.temperature.
      max_tokens: The token limit of a completion. None means sampling.max_tokens.
      seed: The seed of the random numbers.
      images: The images of the question: paths, bytes or Pillow images. For a list of questions, a
        list of images for each question.

    Returns:
      The completions. For a list of questions, a list of completions for each question, the same
      that a call with this question alone returns.

    Raises:
      ConfigError: A value is out of its range, `question` has another form, or a question is too
        long for the model.
    """
    sampling = self.run.config.sampling
    temperature = sampling.temperature if temperature is None else temperature
    max_tokens = sampling.max_tokens if max_tokens is None else max_tokens
    numbers = {"n": n, "temperature": temperature, "max_tokens": max_tokens, "seed": seed}
    check_numbers(numbers, "sample(): ")
    questions = _questions(question)  # the same object if it is a list of questions
    image_lists = images if questions is question else [images]  # one list for each question
    if len(image_lists) not in (0, len(questions)):  # 0: no question has images
      raise ConfigError(
        f"sample(): there are {len(image_lists)} lists of images for {len(questions)} questions"
      )
    image_lists = image_lists or [()] * len(questions)
    with self._settings():
      # All prompts up to this length are padded to it, and so share one compiled program.
      shortest = self.run.config.data.max_prompt_tokens
      prompts = [
        self.prompt(text, shortest=shortest, images=image_list)
        for text, image_list in zip(questions, image_lists)
      ]
      found = [self.complete(prompt, n, temperature, max_tokens, seed) for prompt in prompts]
    return found if questions is question else found[0]

  def evaluate(
    self,
    samples: int | None = None,
    examples: int | None = None,
    tasks: Sequence[str] | None = None,
  ) -> dict[str, float]:
    """Measures the accuracy on the test problems, or on exams.

    Args:
      samples: Completions per problem for mean@k, pass@k and maj@k. None means eval.samples.
      examples: How many test problems to use. None means eval.examples.
      tasks: Exams that replace the test problems, such as "math500:test.jsonl": see eval.tasks.
        None means the test problems and the exams of eval.tasks.

    Returns:
      eval/accuracy and other metrics, and eval/EXAM/accuracy for an exam. NAME_low and NAME_high
      are a 95% interval.

    Raises:
      ConfigError: The evaluation is impossible with these settings.
    """
    settings = {"eval.samples": samples, "eval.examples": examples, "eval.tasks": tasks}
    changes = {key: value for key, value in settings.items() if value is not None}
    with self._settings(), doing("evaluation"):
      run = self.run.with_eval(self.run.config.replace(changes).eval)
      evaluate = Evaluators(run, self.scorers, only_exams=bool(tasks))
      return evaluate(self._for_sampling, self.step)

  def export(self, out: str | Path, adapter: bool = False) -> Path:
    """Writes the policy as a Hugging Face folder with a model card, which transformers can load.

    Args:
      out: The folder. It must be empty or not exist yet.
      adapter: Whether to write only the adapters of a LoRA run, as a PEFT folder.

    Returns:
      The path of the folder.

    Raises:
      ConfigError: The folder is not empty, or `adapter` is set and the run has no adapters.
    """
    shape, out = self.run.parameters.model, path_of(out, "out")
    if adapter and shape.lora is None:
      raise ConfigError(
        "adapter=True: this run trained all weights and has no adapters; leave it out"
      )
    hosts = self.run.hosts
    # `new_folder` creates `out` only after all files are written. Only the first process writes.
    with (
      doing(f"writing {out}"),
      new_folder(out) if hosts.is_first else contextlib.nullcontext() as folder,
    ):
      if adapter:
        base, revision = hub.parts(self.run.config.model.path)
        model.save_adapters(folder, shape, self.params, base, revision, hosts.fetch)
      else:
        model.save(folder, shape, self.run.parameters.policy(self.params), hosts.fetch)
      if folder is not None:
        self.run.tokenizer.save(folder)
        self.run.save_processor(folder)
        self._write_card(folder, adapter)
    return out

  def _write_card(self, folder: Path, adapter: bool) -> None:
    """Writes the model card, and a copy of the card of the model that the run began with."""
    sees_images = self.run.parameters.model.vision is not None
    kind = "adapter" if adapter else "images" if sees_images else "model"
    base = model_card.read_base(self.run.base_folder)
    path, rows = self.run.config.model.path, []
    title, config = hub.short_name(path) if path else "random weights", self.run.config
    if self.workdir is not None:
      title = self.workdir.name
      # The config of the policy lacks parts of the algorithm that are not registered here.
      saved = read_config(self.workdir)
      config = dataclasses.replace(config, algo=saved.algo, optimizer=saved.optimizer)
      with contextlib.suppress(ConfigError):  # without metrics.jsonl, the card has no numbers
        rows = [row for row in read_metrics(self.workdir) if row["step"] <= self.step]
    text = model_card.model_card(title, config, self.step, rows, base, kind)
    (folder / model_card.FILE).write_text(text, encoding="utf-8")
    if base.card:
      (folder / model_card.BASE_FILE).write_text(base.card, encoding="utf-8")

  def prompt(
    self, text: Question, framed: bool = True, shortest: int = 0, images: Sequence[Any] = ()
  ) -> PromptBatch:
    """Makes a batch of one prompt for `complete`.

    The batch repeats the prompt for each row shard of the mesh, because every shard needs at least
    one row.

    Args:
      text: A question or, without `framed`, the whole prompt.
      framed: Whether `text` is a question, to be inserted into `data.prompt` and, with `data.chat`,
        the chat template, as in training.
      shortest: Pad the prompt to at least this many tokens.
      images: The images of the prompt. They come first or where the chat template puts them.

    Raises:
      ConfigError: The text is not UTF-8, a question does not fit `data.prompt`, sources have
        templates of their own (`data.prompts`), or the model sees no images.
    """
    if isinstance(text, str) and not is_text(text):
      raise ConfigError(f"the prompt {shown(text)} is not text in UTF-8")
    # No limit here: `complete` raises an error if a prompt does not fit the model.
    data = dataclasses.replace(self.run.config.data, max_prompt_tokens=2**24)
    if not framed:
      data = dataclasses.replace(data, prompt="{question}", chat=False)
    elif data.prompts:
      raise ConfigError(
        f"config key data.prompts is {data.prompts}: each source has a template of its own, so a"
        " question alone has none; give the whole prompt (--prompt)"
      )
    fields = {*fields_of(data.prompt)}
    if len(fields) > 1:
      raise ConfigError(
        f"config key data.prompt is {data.prompt!r}: a question cannot fill {len(fields)} fields;"
        " give the whole prompt (--prompt)"
      )
    data = dataclasses.replace(data, mixture=(), prompts=())  # this example is of no source
    # A template without fields ignores the question, but an example needs a field.
    example = dict.fromkeys(fields or ["question"], text)
    if images:
      if self.run.processor is None:
        raise ConfigError(f"{self.name} sees no images; leave them out")
      example["images"] = [*images]
    prompts = PromptSet(
      [example],
      self.run.tokenizer,
      data,
      # A whole prompt gets no first messages of an environment.
      environment=self.run.environments if framed else None,
      processor=self.run.processor,
    )
    (prompt,) = prompts.make([0])
    prompts.max_tokens = max(shortest, len(prompt.ids))  # `prompt_batch` pads to this length
    copies = np.zeros(self.run.hosts.row_shards, int)  # the index 0, once per row shard
    return prompt_batch(prompts, copies, self.run.hosts)

  def complete(
    self, prompt: PromptBatch, n: int, temperature: float, max_tokens: int, seed: int
  ) -> list[Completion]:
    """Completes the result of `prompt`. Other arguments and errors are those of `sample`."""
    length, positions = int(prompt.prompt_lengths_P[0]), self.run.parameters.model.max_positions
    if length + max_tokens > positions:
      raise ConfigError(
        f"a prompt of {length} tokens and a completion of {max_tokens} (max_tokens) do not fit the"
        f" model's {positions} positions"
      )
    greedy = temperature == 0
    count = 1 if greedy else n  # greedy completions would all be the same
    options = (count, greedy, max_tokens)  # each combination needs its own compiled programs
    if options not in self._rollouts:
      # A harness plays a whole example, not only a question, so the policy completes alone.
      has_harness = bool(self.run.config.environment.harness)
      talkers = None if has_harness else self.scorers.talkers
      self._rollouts[options] = make_rollout(self.run, *options, talkers=talkers)
    key = jax.random.fold_in(self.run.key("sample"), int(seed) % 2**32)  # must be >= 0
    params = self._for_sampling
    with doing(f"sampling {count} completions"):
      rollouts = self._rollouts[options](params, prompt, key, temperature)
    completions, turns_PG = rollouts.completions, rollouts.turns_PG
    return [
      Completion(
        text=rollouts.texts_PG[0, g],
        length=int(completions.lengths_PG[0, g]),
        logprob=float(completions.logprobs_PGT[0, g].sum()),
        stopped=bool(completions.stopped_by_PG[0, g] >= 0),
        turns=() if turns_PG is None else [turn.message for turn in turns_PG[0, g].turns],
      )
      for g in range(count)
    ]

  @functools.cached_property
  def scorers(self) -> Scorers:
    """The reward functions that the config names."""
    return Scorers(self.run)

  @functools.cached_property
  def _for_sampling(self) -> Any:
    return self.run.parameters.for_sampling(self.params)

  @contextlib.contextmanager
  def _settings(self) -> Iterator[None]:
    """Sets up JAX as the run needs it, and restores the settings of the caller's program."""
    with leaving_nothing_behind():
      compilation_cache.use(self.run.config.compilation_cache)
      set_matmul_precision(self.run.config)
      yield


def _questions(given: Any) -> list[Any]:
  """Returns `given` itself if it is a list of questions, or [given] if it is one question.

  Raises:
    ConfigError: `given` is neither.
  """
  if _is_question(given):
    return [given]
  if isinstance(given, list) and given and all(map(_is_question, given)):
    return given
  raise ConfigError(
    f"sample(): the question is {shown(given)}: give a text, a list of messages (dicts with a text"
    " role and a text content), or a list of questions"
  )


def _is_question(given: Any) -> bool:
  return isinstance(given, str) or chat.is_conversation(given)


def load_policy(source: Config | str | Path, step: int | None = None) -> Policy:
  """Loads a policy, to sample from it, to evaluate it or to export it.

  The policy occupies device memory until nothing refers to it any more.

  Args:
    source: The folder of a run, or a Config for the model before training.
    step: The step of the checkpoint. None means the newest.

  Raises:
    ConfigError: The folder has no such checkpoint, or the config cannot be used.
  """
  with leaving_nothing_behind():
    if isinstance(source, Config):  # `replace` checks the types of its values
      return policy_of_config(with_absolute_paths(source.replace({})))
    check_numbers({"step": step}, "load_policy(): ")
    return policy_of_run(folder(source), step)


def policy_of_config(config: Config) -> Policy:
  """Builds the policy of a config before training."""
  run = Run(config)
  with doing("making the parameters"):
    params = run.initial_params()
  return Policy(config.model.path or "random weights", run, params, 0)


def policy_of_run(workdir: Path, step: int | None, change: Change = unchanged) -> Policy:
  """Loads the policy of a run's checkpoint: the newest, or the one of `step`.

  `change` maps the run's config to the config to use.
  """
  run = Run(change(_on_this_machine(_without_unknown_parts(read_config(workdir)))))
  checkpoints = Checkpoints(workdir / "checkpoints", keep=1, layers_of=run.parameters.layers_of)
  with doing("reading the checkpoint"):
    step, params = checkpoints.restore_params(run.parameters.abstract, step)
  return Policy(f"{workdir}, step {step}", run, params, step, workdir)


def _without_unknown_parts(config: Config) -> Config:
  """Replaces parts of the algorithm that nobody has registered in this process by the default ones.

  A script may have registered them. Only training computes them, so a policy does not need them.
  """
  plugins.load(config.plugins)  # they may register the names
  tables: dict[str, Mapping[str, Any]] = {
    "advantage": ADVANTAGES,
    "surrogate": SURROGATES,
    "kl": KL,
    "correction": CORRECTIONS,
  }
  defaults = Algo()
  unknown = [name for name, table in tables.items() if getattr(config.algo, name) not in table]
  if config.optimizer.name not in OPTIMIZERS:
    config = dataclasses.replace(config, optimizer=Optimizer())
  return config.replace({f"algo.{name}": getattr(defaults, name) for name in unknown})


def _on_this_machine(config: Config) -> Config:
  """Adapts a run's config to the devices of this machine, which all sample and compute the model.

  A mesh that does not fit becomes data parallelism. If the mesh, sampling.tensor or
  sampling.context does not fit, sampling.tensor becomes 0 and sampling.context 1. No devices are
  set aside for sampling (mesh.sampler), so the settings rollout.weights and rollout.replay, which
  may need them, are reset. eval.engine is reset, because this machine evaluates. rollout.engine and
  rollout.listen stay: only training draws with them.
  """
  mesh = dataclasses.replace(config.mesh, sampler=0)
  rollout = dataclasses.replace(config.rollout, weights="fixed", replay="")
  evaluation = dataclasses.replace(config.eval, engine=False)
  config = dataclasses.replace(config, mesh=mesh, rollout=rollout, eval=evaluation)
  sizes = mesh.data, mesh.fsdp, mesh.expert, mesh.tensor, mesh.context
  product = math.prod(size for size in sizes if size != -1)  # -1 takes the remaining devices
  devices = jax.device_count()
  fits = devices % product == 0 if -1 in sizes else devices == product
  expert, tensor = (
    size if size != -1 else devices // product for size in (mesh.expert, mesh.tensor)
  )
  share_a_row = expert * (config.sampling.tensor or tensor) * config.sampling.context
  if fits and devices % share_a_row == 0:
    return config
  sampling = dataclasses.replace(config.sampling, tensor=0, context=1)
  return dataclasses.replace(config, mesh=config.mesh if fits else Mesh(data=-1), sampling=sampling)
