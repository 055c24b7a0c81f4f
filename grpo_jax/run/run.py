"""Builds the objects of a run from a config: mesh, model, tokenizer, data and programs."""

from collections.abc import Sequence
import copy
import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import jax

from grpo_jax import learner, model
from grpo_jax.compiling import Jitted
from grpo_jax.config import Config, Environment, Eval
from grpo_jax.data.files.rows import InMemory
from grpo_jax.data.images import processor
from grpo_jax.data.images.processor import Processor
from grpo_jax.data.prompts import PromptSet
from grpo_jax.data.tasks import exams, tasks
from grpo_jax.data.tokenizers import chat, tokenizer
from grpo_jax.environments import Environments, make_environments
from grpo_jax.model.huggingface import hub
from grpo_jax.parallel.hosts import Hosts
from grpo_jax.parallel.mesh import make_mesh, split
from grpo_jax.parallel.sharding import batch_sharding
from grpo_jax.progress import doing
from grpo_jax.run import compilation_cache, compilations
from grpo_jax.run.checks import check_config, corrected
from grpo_jax.run.compiled import Programs
from grpo_jax.run.device_checks import (
  check_apart,
  check_length,
  check_memory,
  check_stop_ids,
  check_stop_texts,
)
from grpo_jax.run.parameters import Parameters, has_quantised_base
from grpo_jax.settings import ConfigError
from grpo_jax.types import Images, Visual

STREAMS = ("init", "sample", "evaluate")  # streams of random numbers. Their order sets the seeds

# Files of a model's folder that configure image processors. Only other programs read videos.
_PROCESSOR_FILES = (
  "processor_config.json",
  "preprocessor_config.json",
  "video_preprocessor_config.json",
)


class Run:
  """The objects that train, evaluate, sample and export have in common.

  Attributes:
    config: The config that the run was built from.
    mesh: The devices, without those that only sample.
    hosts: Moves arrays between the processes and the mesh.
    tokenizer: Converts texts to token ids and back.
    parameters: The shapes, shardings and sources of the parameters.
    remarks: Warnings about the config, as lines.
    programs: The compiled functions.
    base_folder: The local folder of the initial model. None if it is a file or has random weights.
  """

  def __init__(
    self,
    config: Config,
    devices: Sequence[jax.Device] | None = None,
    tokens: tokenizer.Tokenizer | None = None,
  ):
    """Checks the config and builds the objects. Loads no weights yet.

    Args:
      config: The config to build from.
      devices: The devices of the run. None means all.
      tokens: The tokenizer. None means the tokenizer that the config names.

    Raises:
      ConfigError: The config is invalid.
    """
    check_config(config)
    config = self.config = corrected(config)
    compilations.tell()
    if devices is None:  # for given devices of a topology, programs are only compiled, never run
      compilation_cache.use(config.compilation_cache)
    # `local` is the config with folders of this machine instead of names of models.
    with doing("looking for models on huggingface.co"):
      local = self._local = hub.local(config)
    self.base_folder = _folder(local.model.path)
    set_matmul_precision(config)
    # `apart` are the devices of this process that only sample.
    learn, apart = split(config.mesh, jax.devices() if devices is None else devices)
    self.mesh = make_mesh(config.mesh, learn)
    # Read before the tokenizer, so that errors of the model come first.
    loaded = _loaded_shape(local) if local.model.path else None
    self.tokenizer = tokens or self._load_tokenizer(local, loaded)
    shape = _model_shape(local, self.tokenizer, loaded)
    check_experts(config, shape, self.mesh.shape["expert"])
    with doing(f"laying out {shape.num_layers} layers"):
      self.parameters = Parameters(local, shape, self.mesh, apart)
    check_memory(self.parameters.abstract_policy, self.mesh)
    remark = model.attention_of(self.parameters.model)[1]
    self.remarks = (*_remarks(config, local), *([remark] if remark else []))
    sampler_shards = self.parameters.sampling.model.row_shards
    if apart:
      check_apart(config, self.parameters.model, self.processes)
      sampler_shards *= self.processes  # the sampler's mesh has the devices of one process
    self.hosts = Hosts(self.mesh, sampler_shards, is_apart=bool(apart))
    check_length(config, shape)
    check_stop_ids(config, shape)
    check_stop_texts(config, self.tokenizer, shape)
    self.programs = Programs(config, self.mesh, self.parameters, self.tokenizer)

  @property
  def processes(self) -> int:
    """How many processes the devices belong to. With a topology, they need not exist."""
    return len({device.process_index for device in self.mesh.devices.flat})

  @functools.cached_property
  def task(self) -> tasks.Task:
    """The data set. It is read on first use, because sampling and export need none."""
    with doing(f"reading the data of task {tasks.name_of(self.config.data)}"):
      return tasks.make_task(self.config.data)

  def prompts(self, split: str) -> PromptSet:
    """The prompts of the split "train", or of the first eval.examples of the split "test".

    Raises:
      ConfigError: The split is empty.
    """
    examples, name = getattr(self.task, split), "training" if split == "train" else split
    if not len(examples):  # the test split: reading the data checks that there are training rows
      raise tasks.no_test_split(self.config.data.path)
    if split == "test":
      examples = InMemory(examples, self.config.eval.examples)
    with doing(f"making the {name} prompts"):
      prompts = PromptSet(
        examples,
        self.tokenizer,
        self.config.data,
        self.hosts,
        count_all=split == "test",  # an evaluation uses each prompt once
        environment=self.environments,
        processor=self.processor,
      )
    if split == "train":
      self.programs.most_images = prompts.most_images  # for estimates of memory
    return prompts

  @functools.cached_property
  def processor(self) -> Processor | None:
    """The image processor of the model's folder, or None if the model sees no images."""
    tower, path = self.parameters.model.vision, self._local.model.path
    if tower is None:
      return None
    found = processor.load(path, self.tokenizer)
    if found is not None and found.kind.patch_numbers != math.prod(tower.patch):
      raise ConfigError(
        f"{path}: the image processor makes patches of {found.kind.patch_numbers} numbers, and the"
        f" vision tower takes {math.prod(tower.patch)}; the patch sizes in preprocessor_config.json"
        " and config.json must be equal"
      )
    return found

  def save_processor(self, folder: Path) -> None:
    """Copies the files of the image processor to a folder, if there are any."""
    if self.parameters.model.vision is None or self.base_folder is None:
      return
    for name in _PROCESSOR_FILES:
      file = self.base_folder / name
      if file.exists():
        (folder / name).write_bytes(file.read_bytes())

  @functools.cached_property
  def environments(self) -> Environments | None:
    """The tools and environments, or None if completions have one turn."""
    return make_environments(self.config, self.tokenizer)

  @functools.cached_property
  def encode(self) -> Jitted:
    """(parameters with the vision tower, images) -> the visual tokens of the images."""
    shape, micro_batch = self.parameters.model, self.programs.micro_batch

    def encode(params: Any, images: Images) -> Visual:
      is_whole = len(images.seen_PS2) % micro_batch != 0  # a batch of the warm start
      return learner.encoded(params, shape, images, 0 if is_whole else micro_batch)

    return Jitted(encode, out_shardings=batch_sharding(self.mesh))

  def with_eval(self, settings: Eval) -> "Run":
    """A copy of the run with other settings of the evaluation. It shares all objects."""
    run = copy.copy(self)
    run.config = dataclasses.replace(self.config, eval=settings)
    return run

  def with_exam(self, entry: exams.Entry) -> "tuple[Run, PromptSet]":
    """A copy of the run for an exam, which has one turn and no tools.

    Returns:
      The run, with the exam's settings of data, sampling and evaluation, and the exam's prompts.

    Raises:
      ConfigError: The exam cannot be read, or none of its prompts fits the model.
    """
    where, positions = f"eval.tasks: {entry.name}", self.parameters.model.max_positions
    run = copy.copy(self)
    run.__dict__.pop("environments", None)  # the cached one. The exam's config has none
    run.processor = None  # exams have no images
    try:
      with doing(f"reading the exam {entry.name}"):
        run.task = tasks.Task((), exams.problems(entry))
        run.config = _config_of_exam(self.config, entry, len(run.task.test), positions)
        prompts = run.prompts("test")
    except ConfigError as error:  # the key data.path is not that of the exam
      raise ConfigError(f"{where}: {str(error).removeprefix('data.path: ')}") from None
    # The limit so far is all positions. Prompts are padded only to the longest one.
    data = dataclasses.replace(run.config.data, max_prompt_tokens=prompts.max_tokens)
    run.config = dataclasses.replace(run.config, data=data)
    run.programs = Programs(run.config, run.mesh, run.parameters, run.tokenizer)
    return run, prompts

  def initial_params(self) -> Any:
    """The trained parameters before the first update, on the mesh."""
    return self.parameters.initial(self.key("init"))

  def initial_reference(self) -> Any:
    """A copy of the initial parameters for the reference, in model.reference_dtype."""
    return self.parameters.initial_reference(self.key("init"))

  def key(self, stream: str) -> jax.Array:
    """The root key of one of the run's `STREAMS` of random numbers."""
    return jax.random.fold_in(jax.random.key(self.config.seed), STREAMS.index(stream))

  def _load_tokenizer(
    self, config: Config, loaded: model.ModelConfig | None
  ) -> tokenizer.Tokenizer:
    """Loads the config's tokenizer. Without one, makes one whose tokens are characters.

    `loaded` is the shape of the checkpoint at model.path, if there is one.
    """
    path = config.data.tokenizer or config.model.path
    if path:
      tokens = tokenizer.load(path)
      options = chat.options_of(config.data.chat_template_kwargs)
      tokens = dataclasses.replace(tokens, chat_options=options)
      if loaded is not None:
        tokens = tokens.for_model(loaded.vocab_size, config.model.path, "config key data.tokenizer")
      return tokens
    alphabet = tasks.characters(config.data, self.task, config.has_other_texts)
    return tokenizer.characters(alphabet)


def _config_of_exam(config: Config, entry: exams.Entry, problems: int, positions: int) -> Config:
  """Puts the settings of an exam into the config of a run.

  Prompts may have all `positions` of the model that a completion leaves. `problems` is the number
  of problems of the exam. Raises ConfigError if a completion may take all positions.
  """
  max_tokens = entry.max_tokens or config.sampling.max_tokens
  if max_tokens >= positions:
    raise ConfigError(
      f"the model has {positions} positions, and a completion may have {max_tokens} tokens; set"
      " max_tokens"
    )
  if config.sampling.min_tokens > max_tokens:
    raise ConfigError(
      f"a completion may have {max_tokens} tokens, and sampling.min_tokens is"
      f" {config.sampling.min_tokens}, so none could end by itself; set max_tokens"
    )
  # Settings for the run's own data must not change the exam's prompts. How the model is talked to,
  # such as data.system, holds for exams, too.
  data = dataclasses.replace(
    config.data,
    task="columns",
    path="",
    columns=(),
    mixture=(),
    weights=(),
    prompts=(),
    few_shot=(),
    prompt=entry.prompt or entry.exam.prompt,
    max_prompt_tokens=positions - max_tokens,
  )
  settings = dataclasses.replace(
    config.eval,
    examples=problems,
    function=entry.function or entry.exam.function,
    samples=config.eval.samples if entry.samples < 0 else entry.samples,  # -1: as in the run
  )
  # The regex of the run may not match the exam's answers.
  sampling = dataclasses.replace(config.sampling, max_tokens=max_tokens, regex="")
  return dataclasses.replace(
    config, data=data, eval=settings, sampling=sampling, environment=Environment()
  )


def _folder(path: str) -> Path | None:
  folder = Path(path).expanduser()
  return folder if path and folder.is_dir() else None


def set_matmul_precision(config: Config) -> None:
  """Makes float32 products exact. By default, JAX rounds to bfloat16 on a TPU, to TF32 on a GPU."""
  precision = "float32" if config.model.dtype == "float32" else None
  jax.config.update("jax_default_matmul_precision", precision)


def _loaded_shape(local: Config) -> model.ModelConfig:
  """The shape of the checkpoint at model.path. model.vision decides about the vision tower."""
  vision_setting, path = local.model.vision, local.model.path
  shape = model.load_model_config(path, vision=vision_setting != "ignored")
  if shape.vision is None:
    return shape
  if local.reward.teacher:
    raise ConfigError(
      f"config key reward.teacher is {local.reward.teacher!r}: a teacher sees no images; set"
      " model.vision=ignored to train on texts alone"
    )
  tower = dataclasses.replace(shape.vision, trained=vision_setting == "trained")
  return dataclasses.replace(shape, vision=tower)


def _model_shape(
  config: Config, tokens: tokenizer.Tokenizer, loaded: model.ModelConfig | None
) -> model.ModelConfig:
  """The shape of the checkpoint, `loaded`, or without a checkpoint the shape in the config."""
  shaped = config.model
  if loaded is not None:
    shape = loaded
  else:
    shape = model.ModelConfig(
      vocab_size=tokens.vocab_size,
      embed_dim=shaped.embed_dim,
      num_layers=shaped.num_layers,
      num_heads=shaped.num_heads,
      num_kv_heads=shaped.num_kv_heads,
      head_dim=shaped.head_dim,
      mlp_dim=shaped.mlp_dim,
      rope_theta=shaped.rope_theta,
      tie_embeddings=shaped.tie_embeddings,
    )
  # The files of a checkpoint and of its tokenizer may name different ids.
  stop_ids = tuple(dict.fromkeys((*tokens.stop_ids, *shape.stop_ids)))
  return dataclasses.replace(
    shape, stop_ids=stop_ids, dtype=shaped.dtype, attention=shaped.attention
  )


def check_experts(config: Config, shape: model.ModelConfig, expert_axis: int) -> None:
  """Raises ConfigError for settings of experts or routers that the model does not have.

  Args:
    config: The config.
    shape: The model.
    expert_axis: The size of the mesh axis `expert`.
  """
  for key, value, off in (  # `off` is the value that a model without experts needs
    ("mesh.expert", expert_axis, 1),
    ("learner.router_aux_coef", config.learner.router_aux_coef, 0),
    ("learner.router_replay", config.learner.router_replay, False),
    ("learner.router_bias_rate", config.learner.router_bias_rate, 0),
  ):
    if value != off and not shape.num_experts:
      raise ConfigError(f"config key {key} is {value}: the model has no experts; set {off}")
  rate = config.learner.router_bias_rate
  if rate and shape.router != "sigmoid":
    raise ConfigError(
      f"config key learner.router_bias_rate is {rate}: the routers of this model have no biases"
      " that even out loads; set 0, or learner.router_aux_coef"
    )


def _remarks(config: Config, local: Config) -> tuple[str, ...]:
  """Warnings about parts of model.path that are not read, idle settings, and foreign adapters."""
  sees, found = local.model.vision != "ignored", list[str]()
  if local.model.path and model.ignores_parts(local.model.path, vision=sees):
    found.append(f"only the text part of {config.model.path} is read, trained and saved")
  if config.sampling.weights_dtype and has_quantised_base(config):
    found.append(
      f"sampling.weights_dtype={config.sampling.weights_dtype} has no effect: the sampler uses the"
      f" weights as lora.base_dtype={config.lora.base_dtype} holds them"
    )
  return *found, *_remarks_on_adapters(config, local)


def _remarks_on_adapters(config: Config, local: Config) -> tuple[str, ...]:
  """A warning if, by name, the adapters at lora.path were trained on another model."""
  if not config.lora.path:
    return ()
  base = model.base_of_adapters(local.lora.path)
  # Folders may be moved or copied, so only the last part of a path is compared.
  if not base or hub.short_name(base) == hub.short_name(config.model.path):
    return ()
  return (
    f"the adapters of lora.path = {config.lora.path} were trained on {base!r}, not on model.path ="
    f" {config.model.path}; only their shapes are sure to fit",
  )
