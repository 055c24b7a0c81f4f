"""Formats the data of a run as text: the prompts of a step, and statistics of all prompts."""

import collections
from collections.abc import Iterator, Mapping
import dataclasses
from typing import Any

import numpy as np

from grpo_jax.config import Config
from grpo_jax.console.text import shorten, visible, without_common_parts
from grpo_jax.data import loader
from grpo_jax.data.images import processor as processors
from grpo_jax.data.images.of_prompts import GivenImages, has_images
from grpo_jax.data.prompts import Prompt, PromptSet
from grpo_jax.data.statistics import Statistics, duplicates, histogram, overlap, statistics
from grpo_jax.data.tasks import tasks
from grpo_jax.data.tasks.mixture import Mixture, mixture_of
from grpo_jax.data.tokenizers import chat, tokenizer
from grpo_jax.environments import make_environments
from grpo_jax.model.huggingface import hub
from grpo_jax.settings import ConfigError, shown

_LONGEST_NAME = 24  # the most characters of a task's name
_LOOKED_AT = 100  # examples of a large file that are searched for images


@dataclasses.dataclass(frozen=True)
class StepPrompts:
  """The training prompts that a step draws.

  Attributes:
    phase: "warm start" or "GRPO".
    prompts: All training prompts.
    indices: The indices in `prompts` that the step draws.
    remark: How rewards may make the run draw other prompts. "" if they cannot.
  """

  phase: str
  prompts: PromptSet
  indices: list[int]
  remark: str = ""


def open_data(
  config: Config,
) -> tuple[tasks.Task, tokenizer.Tokenizer, processors.Processor | None]:
  """Opens the data of a run without reading the model's weights.

  Returns:
    (task, tokenizer, image processor). The last is None if the model sees no images, or if no
    example that was looked at has images.
  """
  path = hub.folder(config.data.tokenizer or config.model.path, "data.tokenizer")
  if path:
    tokens = tokenizer.load(path)  # before the task, so that a wrong path shows at once
    options = chat.options_of(config.data.chat_template_kwargs)
    tokens = dataclasses.replace(tokens, chat_options=options)
    task = tasks.make_task(config.data)
    in_memory = isinstance(task.train, list)  # otherwise each example is read or made anew
    looked_at = range(len(task.train) if in_memory else min(len(task.train), _LOOKED_AT))
    needs_processor = (
      config.model.path
      and config.model.vision != "ignored"
      and any(has_images(task.train[i]) for i in looked_at)
    )
    # The key "data.tokenizer" lets `hub.folder` download no weights.
    folder = hub.folder(config.model.path, "data.tokenizer") if needs_processor else ""
    return task, tokens, processors.load(folder, tokens) if folder else None
  task = tasks.make_task(config.data)  # without a path, the tokens are the characters of the task
  alphabet = tasks.characters(config.data, task, config.has_other_texts)
  return task, tokenizer.characters(alphabet), None


def drawn(config: Config, step: int) -> StepPrompts:
  """The prompts that a step draws. `step` is the number of the step in metrics.jsonl.

  Raises:
    ConfigError: The run has no such step, or the data cannot be used.
  """
  warm, last = config.warm_start.steps, config.warm_start.steps + config.steps
  if not 1 <= step <= last:
    raise ConfigError(f"flag --step={step}: the run has the steps 1 to {last}")
  task, tokens, processor = open_data(config)
  environment = make_environments(config, tokens)
  prompts = PromptSet(task.train, tokens, config.data, environment=environment, processor=processor)
  number = step - 1  # the loader counts from 0, in each phase anew
  if number < warm:
    indices = loader.step_indices(config.seed, number, config.warm_start.batch, len(prompts))
    return StepPrompts("warm start", prompts, indices.tolist())
  indices = loader.step_indices(config.seed, number - warm, config.batch.prompts, len(prompts))
  # Dynamic sampling replaces prompts whose completions all get the same reward.
  remark = ", and later ones once rewards were all equal" if config.algo.dynamic_sampling else ""
  if config.curriculum.chooses:
    remark += ", as without the curriculum, which chooses by pass rates"
  return StepPrompts("GRPO", prompts, indices.tolist(), remark)


def step_lines(found: StepPrompts, count: int, width: int) -> Iterator[str]:
  """Yields a table of the prompts of a step, and the first prompt in full.

  Args:
    found: The prompts of the step.
    count: The most prompts in the table.
    width: The most characters of a line of the table.
  """
  made = found.prompts.make(found.indices)
  lengths = [len(prompt.ids) for prompt in made]
  mean = sum(lengths) / len(lengths)
  yield (
    f"{found.phase}: {len(made)} of {len(found.prompts):,} prompts{found.remark};"
    f" {min(lengths)} to {max(lengths)} tokens, {mean:.1f} on average"
  )
  yield from _left_out("training", found.prompts)
  names = [_task(prompt.example) for prompt in made]
  if any(names):
    counts = collections.Counter(names)
    yield "of " + ", ".join(f"{name}: {count}" for name, count in sorted(counts.items()))
    column = [f"{name}  " for name in ("task", *names)]  # the heading, then a task in each row
  else:
    column = ["", *names]  # of width 0
  space = max(map(len, column))
  yield f"{'index':>9} {'tokens':>7}  {column[0]:{space}}prompt"
  texts = without_common_parts([prompt.text for prompt in made])
  for index, prompt, name, text in list(zip(found.indices, made, column[1:], texts))[:count]:
    text = shorten(visible(text), width - 19 - space)  # 19: the columns of the index and tokens
    yield f"{index:>9} {len(prompt.ids):>7}  {name:{space}}{text}"
  if len(made) > count:
    yield f"{'':>17}  and {len(made) - count} more (--prompts={len(made)})"
  yield ""
  yield "the first one in full:"
  yield from _full(made[0], found.prompts.example(found.indices[0]))


def statistics_lines(config: Config) -> Iterator[str]:
  """Yields lines with lengths, duplicates, and the overlap of training and test.

  Reads every example. Raises ConfigError if that fails, or if there is no test split.
  """
  task, tokens, processor = open_data(config)
  if not len(task.test):
    raise tasks.no_test_split(config.data.path)
  environment, found = make_environments(config, tokens), dict[str, Statistics]()
  for split, examples in (("training", task.train), ("test", task.test)):
    shares: Mapping[str, float] = {}  # data.weights give sources shares of training only
    if isinstance(examples, Mixture) and split == "training":
      shares = {name: share for name, (_, share) in examples.shares().items()}
      examples = examples.each_row_once()  # rows that weights repeat are not duplicates
    found[split] = each = statistics(examples, tokens, config.data, environment, processor)
    limit = config.data.max_prompt_tokens
    longer = int((each.prompt_tokens > limit).sum())
    yield f"{split}: {len(examples):,} examples, all readable"
    if mixture_of(config.data) or config.reward.tasks:
      yield from _by_task(each, shares)
    counts = ", ".join(f"{visible(name)} {count:,}" for name, count in each.filled.items())
    yield f"examples that have each column: {counts}"
    yield f"tokens of prompts ({longer:,} have more than data.max_prompt_tokens = {limit}):"
    yield from histogram(each.prompt_tokens)
    solved = each.solution_tokens[each.solution_tokens > 0]  # 0: the example has no solution
    if len(solved):
      limit = config.sampling.max_tokens
      longer = int((solved > limit).sum())
      yield f"tokens of solutions ({longer:,} have more than sampling.max_tokens = {limit}):"
      yield from histogram(solved)
    different, repeated = duplicates(each)
    yield f"duplicates: {different:,} prompts occur more than once, in {repeated:,} more examples"
    yield ""
  common = overlap(found["training"], found["test"])
  such_as = ""
  if len(common):
    # The overlap counts prompts of any length, and `PromptSet` would refuse one above the limit.
    example, data = task.test[int(common[0])], _any_length(config)
    prompts = PromptSet([example], tokens, data, environment=environment, processor=processor)
    (first,) = prompts.make([0])
    such_as = f", such as number {common[0]}: {shorten(visible(first.text), 60)}"
  yield f"overlap: {len(common):,} of {len(task.test):,} test prompts are also in training{such_as}"


def _by_task(found: Statistics, shares: Mapping[str, float]) -> Iterator[str]:
  """Yields a line for each task. `shares` has each task's fraction of an epoch, or is empty."""
  tasks_N = np.array([str(name) for name in found.tasks])
  for name in np.unique(tasks_N):
    lengths = found.prompt_tokens[tasks_N == name]
    drawn_as = f", {shares[name]:.1%} of an epoch" if name in shares else ""
    tokens_line = histogram(lengths)[-1].strip()
    yield f"  {_task({'task': name})}: {len(lengths):,} examples{drawn_as}; prompts: {tokens_line}"


def _task(example: Mapping[str, Any]) -> str:
  """The task of an example, printable and shortened. "" if it has no task."""
  name = example.get("task")
  return "" if name is None else shorten(visible(str(name)), _LONGEST_NAME)


def _any_length(config: Config) -> Any:
  """The section `data` of a config with practically no limit on the tokens of a prompt."""
  return dataclasses.replace(config.data, max_prompt_tokens=2**24)


def _left_out(split: str, prompts: PromptSet) -> Iterator[str]:
  """Yields a line for each reason why prompts of a split are left out or have stand-ins."""
  if prompts.dropped:
    yield f"{prompts.dropped:,} {split} prompts are longer than data.max_prompt_tokens: left out"
  if prompts.unopened:
    yield (
      f"the environments of {prompts.unopened:,} {split} prompts cannot begin:"
      " others stand in for them"
    )
  if prompts.replaced:
    yield (
      f"about {prompts.replaced:.1%} of the {split} prompts are longer than"
      " data.max_prompt_tokens: others stand in for them"
    )


def _full(prompt: Prompt, example: Any) -> Iterator[str]:
  """Yields the lines of a prompt's text, its token ids, and the fields of its example."""
  yield from (visible(line) for line in prompt.text.split("\n"))
  yield f"ids: {shorten(' '.join(map(str, prompt.ids)), 400)}"
  for name, value in example.items():
    value = value.value if isinstance(value, GivenImages) else value
    yield f"{name}: {shorten(visible(value if isinstance(value, str) else shown(value)), 400)}"
