"""The programs of a run's steps with the shapes of their arguments, for plans and compilation."""

from collections.abc import Iterator, Mapping
import dataclasses
import functools
from typing import Any, TypeVar, cast

import jax

from grpo_jax import model
from grpo_jax.algo.advantages import ADVANTAGES
from grpo_jax.compiling import Compiler, Jitted
from grpo_jax.parallel import sharding
from grpo_jax.run.memory import device_bytes, images_of, visual_of
from grpo_jax.run.run import Run
from grpo_jax.sampler.flight import Flight, NewRows, Prompts
from grpo_jax.sampler.logits import RowSettings
from grpo_jax.sampler.programs import FlightPrograms, Pieces
from grpo_jax.sampler.rows import Chunk
from grpo_jax.sampler.sampling import settings_of
from grpo_jax.sampler.stream import Pace, by_row
from grpo_jax.types import Batch, Completions

Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class Stage:
  """A jitted function of a `Program`, with the shapes of its arguments.

  Attributes:
    program: The function to compile.
    arguments: The shapes, dtypes and shardings of the arguments.
    runs: How many times it is called.
    rounds: {the upper bound of a loop: its most iterations per call}. If calls differ, their mean.
    cache: The bytes of the key/value cache that it reads or returns.
    visual: The bytes of visual tokens that exist besides its arguments.
  """

  program: Jitted
  arguments: tuple[Any, ...]
  runs: int = 1
  rounds: Mapping[int, float] = dataclasses.field(default_factory=dict)
  cache: float = 0.0
  visual: float = 0.0

  def lower(self) -> Any:
    """Lowers the program, as `jax.jit` does."""
    return self.program.lower(*self.arguments)


@dataclasses.dataclass(frozen=True)
class Program:
  """A phase of a step, such as sampling or an update, as one jitted function or several.

  Attributes:
    name: The name of the phase, such as "sample".
    runs: How many times it runs in a step, as a text. "3/50" is 3 times every 50 steps.
    stages: The functions to compile, in the order in which they run.
    held: The bytes that the run holds on one device while the program runs, by kind.
    taken: The kinds in `held` that are arguments of the program.
    gradients: The bytes of the sum of gradients. 0 if it computes none.
    tokens: The maximum number of decoding steps, each a token for every row. 0 if it decodes none.
  """

  name: str
  runs: str
  stages: tuple[Stage, ...]
  held: Mapping[str, float]
  taken: tuple[str, ...]
  gradients: float = 0.0
  tokens: int = 0


def programs(run: Run) -> Iterator[Program]:
  """The programs of the run's steps, in the order in which they first run."""
  config, algo, parts = run.config, run.config.algo, _ProgramArguments(run)
  G = config.batch.group_size
  # Devices that only sample draw only the prompts of their process.
  shares = run.processes if run.parameters.sampling.is_apart else 1
  P, of_eval = config.batch.prompts // shares, config.eval.batch // shares
  if config.warm_start.steps:
    yield parts.warm_start()
  if run.parameters.model.has_frozen_tower:
    yield parts.encode()
  yield parts.sampling("sample", "1", P, G)
  if ADVANTAGES[algo.advantage].needs_greedy:
    yield parts.sampling("greedy", "1", P, 1)
  if algo.uses_reference and not algo.needs_full_kl:  # a full KL is computed in the update
    yield parts.logprobs("reference", parts.reference, ("frozen base", "reference"))
  recomputes = not config.old_is_policy and algo.old_logprobs == "recomputed"
  if recomputes or algo.has_rejection:
    yield parts.logprobs(
      "old log-probs", run.parameters.abstract_policy, ("weights", "frozen base")
    )
  yield parts.update()
  if config.eval.every:
    runs = f"{-(-config.eval.examples // config.eval.batch)}/{config.eval.every}"
    yield parts.sampling("evaluate", runs, of_eval, 1)
    if config.eval.samples:
      yield parts.sampling("draws", runs, of_eval, config.eval.samples)


def compile_ahead(run: Run, compiler: Compiler) -> None:
  """Starts to compile the programs of the first steps in the background.

  Programs whose shapes depend on the data, such as prefill, are compiled at the first call, and so
  are the programs of evaluation.

  Args:
    run: The run, whose prompts have been read.
    compiler: Compiles programs in the background.
  """
  if jax.process_count() > 1 and run.parameters.model.platform == "gpu":
    # Processes of GPUs autotune each program together. A process whose run ends cancels what it has
    # not begun to compile, and the others would wait for it.
    return
  config, parts = run.config, _ProgramArguments(run)
  # Other ways to sample have other shapes or devices. They are compiled at the first call.
  if config.samples_in_turn and not config.keeps_flight and not config.environment.harness:
    run.programs.sampler(keeps_experts=config.learner.router_replay)  # cached before threads use it
    compiler.prepare(lambda: parts.compile_sampling(compiler))
  parts.compile_learning(compiler)  # which calls `prepare` for each of its programs


class _ProgramArguments:
  """Makes the `Program`s of a run, with the shapes of their arguments and the bytes held.

  Attributes:
    reference: All parameters of the reference policy, or None.
  """

  def __init__(self, run: Run):
    self._run, self._config = run, run.config
    parameters = run.parameters
    trained, base = parameters.abstract, parameters.abstract_base
    self._held = parameters.held
    sampled_base = None if base is None else parameters.sampling.abstract(base)
    self._sampled = model.join(sampled_base, parameters.sampling.abstract(trained))
    self.reference = None
    if self._config.algo.uses_reference:  # the base without adapters, unless there is a copy
      self.reference = base
    if parameters.has_reference_copy:
      self.reference = model.join(base, parameters.abstract_reference)
    self._rows = sharding.batch_sharding(run.mesh)

  def sampling(self, name: str, runs: str, prompts: int, group_size: int) -> Program:
    """The sampler of `prompts` prompts, with `group_size` completions each."""
    stages = tuple(self._sampling_stages(name, prompts, group_size))
    tokens = int(sum(stage.runs * sum(stage.rounds.values()) for stage in stages))
    held = self._held.sampling
    if name != "sample":
      held = self._beside_flight(held)
    return Program(name, runs, stages, held, self._held.sampled, tokens=tokens)

  def _beside_flight(self, held: dict[str, float]) -> dict[str, float]:
    """Adds the bytes of training rows that stay in flight, if there are any, to `held`."""
    flight = self._run.programs.flight_bytes
    return held | {"rows in flight": flight} if flight else held

  def _sampling_stages(self, name: str, prompts: int, group_size: int) -> Iterator[Stage]:
    """Yields the functions that a sampler calls if no completion ends early.

    `begin` prefills the first prompts. Then each `chunk` decodes tokens for their rows, in a cache
    that grows through the sizes `pace.slots`. If the grid has fewer rows than the call, `arrive`
    prefills the other prompts when the first rows have ended, in waves.
    """
    # Only the prompts of training batches may be encoded before sampling. Evaluations' are not.
    is_encoded = self._run.parameters.encodes_first and name in ("sample", "greedy")
    keeps_experts = name == "sample" and self._config.learner.router_replay
    sampler = self._run.programs.sampler(keeps_experts=keeps_experts)
    in_order = name == "sample" and self._config.rollout.weights == "in_flight"
    pace, programs = sampler.pace(prompts, group_size, in_order), sampler.programs
    grid, S = pace.grid, self._config.data.max_prompt_tokens
    settings = self._settings(grid.rows)
    # The prompts of the first rows. In order, all rows of a prompt get seats before the next one's.
    filled = -(-grid.rows // group_size) if in_order else grid.places
    at_first = min(-(-filled // pace.shards) * pace.shards, prompts)
    # The prompt of each place, where several places have the same one.
    prompt_N = self._host_array("int32", grid.places) if in_order else None
    flight = programs.abstract(grid, pace.slots[0], self._sampled, S, settings)
    visual_of_all = self._held.waiting if is_encoded else 0.0
    visual_of_others = visual_of_all * (1 - at_first / prompts)  # those of the first are arguments
    begun = self._prompts(at_first, is_encoded), prompt_N, settings
    begin = grid, pace.slots[0], self._sampled, *begun
    cache = device_bytes(flight.cache)
    yield Stage(programs.begin, begin, cache=cache, visual=visual_of_others)
    waves = -(-prompts * group_size // grid.rows)
    # Rows of the first wave draw in a cache of each size, as many tokens as fit there beyond those
    # of smaller caches, `written_before`. Rows of later waves draw in the largest cache alone.
    written_before = 0
    for slots in pace.slots:
      flight = programs.abstract(grid, slots, self._sampled, S, settings)
      # The last token of a completion needs no slot.
      written = min(slots, programs.decoding.max_tokens - 1)
      rounds = written - written_before
      if slots == pace.slots[-1]:
        if prompts > at_first:
          later = self._later_prompts(programs, pace, flight, prompts - at_first, is_encoded)
          for program, arguments, runs in later:
            cache = device_bytes(flight.cache)
            yield Stage(program, arguments, runs, cache=cache, visual=visual_of_all)
        rounds += (waves - 1) * (programs.decoding.max_tokens - 1)
      written_before = written
      if not rounds:
        continue
      new_rows = NewRows(
        is_new_R=self._host_array("bool", grid.rows),
        key_R2=self._host_array("uint32", grid.rows, 2),
        number_R=self._host_array("int32", grid.rows),
        settings=settings,
      )
      taken_R = self._host_array("bool", grid.rows)
      chunk = Chunk(self._host_array("int32"), self._host_array("int32"))
      arguments = self._sampled, flight, new_rows, taken_R, chunk
      runs = -(-rounds // (programs.columns - 1))
      yield Stage(
        programs.chunk,
        arguments,
        runs,
        rounds={programs.columns: rounds / runs},  # `columns` bounds the loop of a chunk
        cache=device_bytes(flight.cache),
        visual=visual_of_all,
      )

  def _later_prompts(
    self, programs: FlightPrograms, pace: Pace, flight: Flight, count: int, is_encoded: bool
  ) -> Iterator[tuple[Jitted, tuple[Any, ...], int]]:
    """Yields (program, arguments, runs) that compute `count` prompts while others draw."""
    S, most = self._config.data.max_prompt_tokens, pace.prompts_at_once
    prompts, places = self._prompts(most, is_encoded), self._host_array("int32", most)
    is_split = 0 < pace.prompt_piece < S and prompts.images is None
    if is_split:
      tokens = self._host_array("int32", most, pace.prompt_piece)
      prompts = prompts.replace(tokens_nS=tokens)
    yield programs.arrive, (flight, self._sampled, prompts, places), -(-count // most)
    if is_split:
      n = programs.pieces_at_once(pace.prompt_piece, S, most)
      tokens = self._host_array("int32", n, pace.prompt_piece)
      pieces = -(-S // pace.prompt_piece) - 1  # after the first one
      arguments = flight, self._sampled, Pieces(tokens, *[self._host_array("int32", n)] * 3)
      yield programs.continue_prompts, arguments, pieces * -(-count // n)

  def encode(self) -> Program:
    """Encodes the images of a batch with a frozen vision tower."""
    P = self._config.batch.prompts
    images = self._with_rows(images_of(self._config, self._run.parameters.model, P), P)
    stage = Stage(self._run.encode, (self._run.parameters.abstract_base, images))
    held = self._beside_flight(self._held.learning)
    return Program("encode", "1", (stage,), held, ("frozen base",))

  def logprobs(self, name: str, params: Any, taken: tuple[str, ...]) -> Program:
    """A pass over the batch without gradients."""
    logprobs: Any = self._run.programs.logprobs
    batch = self._batch.without_experts() if name == "reference" else self._batch
    stage = Stage(logprobs.whole, (params, batch))
    held = self._beside_flight(self._held.learning)
    return Program(name, "1", (stage,), held, taken)

  def update(self) -> Program:
    """A GRPO update."""
    algo = self._config.algo
    prompts = self._config.batch.prompts // algo.minibatches
    micro_batches = prompts // (self._run.programs.micro_batch or prompts)  # rounds of one loop
    update: Any = self._run.programs.update
    stage = Stage(update.whole, self._update_arguments, rounds={micro_batches: micro_batches})
    read_by_loss = ("reference",) if algo.needs_full_kl else ()
    taken = ("weights", "moments", "frozen base", *read_by_loss)
    held, gradients = self._beside_flight(self._held.learning), self._held.gradients
    return Program("update", str(algo.updates_per_step), (stage,), held, taken, gradients)

  def compile_sampling(self, compiler: Compiler) -> None:
    """Starts to compile the first decoding chunk of a step."""
    batch = self._config.batch
    stages = self._sampling_stages("sample", batch.prompts, batch.group_size)
    chunk = next(stage for stage in stages if stage.rounds)
    chunk.program.compile_ahead(compiler, *chunk.arguments)

  def compile_learning(self, compiler: Compiler) -> None:
    """Starts to compile the programs of a step after sampling."""
    programs, algo = self._run.programs, self._config.algo
    if algo.uses_reference and not algo.needs_full_kl:
      batch = self._batch.without_experts()
      logprobs, reference = programs.logprobs, self.reference
      compiler.prepare(lambda: logprobs.compile_ahead(compiler, reference, batch))
    update, arguments = programs.update, self._update_arguments
    compiler.prepare(lambda: update.compile_ahead(compiler, *arguments))

  @property
  def _update_arguments(self) -> tuple[Any, ...]:
    """The shapes of an update's arguments: state, frozen base, reference and batch."""
    algo, like_mask = self._config.algo, self._batch.mask_PGT
    batch = self._batch.replace(
      advantages_PGT=like_mask,
      old_logprobs_PGT=None if self._config.old_is_policy else like_mask,
      ref_logprobs_PGT=like_mask if algo.uses_reference and not algo.needs_full_kl else None,
    )
    part = self._with_rows(batch, self._config.batch.prompts // algo.minibatches)
    state, base = self._run.programs.abstract_state, self._run.parameters.abstract_base
    return state, base, self.reference, part

  def warm_start(self) -> Program:
    """A supervised update on one completion of each prompt, without micro-batches."""
    batch = Batch(
      prompts_PS=self._batch.prompts_PS,
      prompt_lengths_P=self._batch.prompt_lengths_P,
      completions_PGT=_resized(self._batch.completions_PGT, 1, axis=1),
      mask_PGT=_resized(self._batch.mask_PGT, 1, axis=1),
      temperature_P=self._batch.temperature_P,
    )
    count = self._config.warm_start.batch
    batch = self._with_rows(self._with_images(batch, count), count)
    update: Any = self._run.programs.warm_update
    state, base = self._run.programs.abstract_state, self._run.parameters.abstract_base
    stage = Stage(update.whole, (state, base, None, batch))
    held, gradients = self._held.warm_start, self._held.gradients
    taken = ("weights", "moments", "frozen base")
    # It runs before the first step, so 0 times in a step.
    return Program("warm start", "0", (stage,), held, taken, gradients)

  @functools.cached_property
  def _batch(self) -> Batch:
    """The shapes of a step's batch, before the reference and the advantages are computed."""
    P, G, T = (
      self._config.batch.prompts,
      self._config.rows_per_prompt,
      self._config.sampling.max_tokens,
    )
    temperature_P = live_P = self._host_array("float32", P)  # two arrays of the same shape
    completions = Completions(
      tokens_PGT=self._host_array("int32", P, G, T),
      lengths_PG=self._host_array("int32", P, G),
      sampled_PGT=self._host_array("bool", P, G, T),
      logprobs_PGT=self._host_array("float32", P, G, T),
      behavior_logprobs_PGT=self._host_array("float32", P, G, T),
      stopped_by_PG=self._host_array("int32", P, G),
      experts_PGTY=self._experts(P, G, T),
      prompt_experts_PSY=self._experts(P, self._config.data.max_prompt_tokens),
    )
    prompts = self._prompts(P)
    arrays = completions, prompts.tokens_nS, prompts.lengths_n, temperature_P, live_P
    batch = jax.eval_shape(self._run.programs.to_batch, *arrays)
    return self._with_rows(self._with_images(batch, P), P)

  def _with_images(self, batch: Batch, count: int) -> Batch:
    """Adds the largest images that `count` prompts can have, or their visual tokens, to a batch."""
    config, parameters = self._config, self._run.parameters
    if not parameters.model.has_frozen_tower:
      return batch.replace(images=images_of(config, parameters.model, count))
    visual = visual_of(config, parameters.model, parameters.abstract_policy, count)
    return batch.replace(visual=visual)

  def _experts(self, *shape: int) -> jax.ShapeDtypeStruct | None:
    """The shape of the sampler's experts for tokens of this shape. None without router_replay."""
    model_config = self._run.parameters.model
    if not self._config.learner.router_replay:
      return None
    return self._host_array(model_config.experts_dtype, *shape, model_config.experts_in_all)

  def _prompts(self, count: int, is_encoded: bool = False) -> Prompts:
    """The shapes of `count` prompts with the largest images, as visual tokens if `is_encoded`."""
    S, parameters = self._config.data.max_prompt_tokens, self._run.parameters
    images: Any = images_of(self._config, parameters.model, count)
    if is_encoded:
      visual = visual_of(self._config, parameters.model, parameters.abstract_policy, count)
      images = self._with_rows(visual, count)
    return Prompts(
      self._host_array("int32", count, S), self._host_array("int32", count), images=images
    )

  def _settings(self, rows: int) -> RowSettings:
    """The shapes of the sampling settings of `rows` rows."""
    settings = by_row(settings_of(self._config.sampling, 1.0), rows, 1)
    return jax.tree.map(lambda x: self._host_array(x.dtype, *x.shape), settings)

  def _host_array(self, dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array on the host, without sharding."""
    return jax.ShapeDtypeStruct(shape, dtype)

  def _with_rows(self, batch: Tree, count: int) -> Tree:
    """The shapes of a batch, resized to `count` prompts and sharded on the mesh."""

    def place(x: Any) -> jax.ShapeDtypeStruct:
      return jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype, sharding=self._rows)

    return cast(Tree, jax.tree.map(place, batch))


def _resized(x: Any, size: int, axis: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct((*x.shape[:axis], size, *x.shape[axis + 1 :]), x.dtype)
