"""The prompts of a split: which examples fit, and their texts and tokens when batches need them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import itertools
import json
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from grpo_jax.data import row_tools
from grpo_jax.data.files.rows import is_in_memory, place_of
from grpo_jax.data.images.of_prompts import PromptImages, needed_sizes, without_images
from grpo_jax.data.images.pictures import Layout
from grpo_jax.data.images.processor import Processor
from grpo_jax.data.images.source import AnyImage
from grpo_jax.data.prompt_template import fill, value_of
from grpo_jax.data.tasks.mixture import Mixture
from grpo_jax.data.tasks.tasks import templates_of
from grpo_jax.data.tokenizers import chat
from grpo_jax.data.tokenizers.tokenizer import Tokenizer
from grpo_jax.progress import doing
from grpo_jax.settings import ConfigError, RunFailed

if TYPE_CHECKING:
  from grpo_jax.config import Data

T = TypeVar("T")
_AT_ONCE = 256  # prompts whose token ids are in memory while they are counted
_WITH_IMAGES = 64  # the same for prompts whose rows may hold the bytes of images
_SAMPLED = 256  # prompts that are made at the start where not all of them are
_STEP = 16  # S is a multiple of it, so that a few other rows seldom make other compiled programs
_MOST_STAND_INS = 4096  # that are tried for a prompt that is too long, and at the start if none fit
_MARGIN = 64  # tokens by which cutting a text can change how many its beginning has, and more
_CHARACTERS_PER_TOKEN = 8  # more than most texts have, so that a beginning decides in most cases
_UNOPENED = 2**31 - 1  # stands for the length of a prompt whose environment cannot begin


class Processes(Protocol):
  """How the processes of a run share work on the host. `parallel.hosts.Hosts` is one."""

  def own_rows(self, count: int) -> slice:
    """Which of `count` rows this process works on."""

  def join_rows(self, tree: Any) -> Any:
    """The rows of all processes, one after the other, as numpy arrays on every process."""

  def on_each(self, act: Callable[[], T]) -> T:
    """act() of this process. If it fails on one process, all of them raise."""


class Opens(Protocol):
  """The part of an environment that adds to prompts. `environments.Environments` is one.

  Attributes:
    schemas: The schemas of the tools that the policy may call.
  """

  schemas: list[dict[str, Any]]

  def tools_of(self, example: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The schemas of the tools that an example shows to the policy."""

  def openings(self, examples: Sequence[Mapping[str, Any]]) -> list[list[dict[str, Any]] | str]:
    """The messages with which it begins, after those of the data set, for each example.

    A line in their place says why it cannot begin.
    """


class OneProcess:
  """`Processes` of a run that has one."""

  def own_rows(self, count: int) -> slice:
    """All of them."""
    return slice(0, count)

  def join_rows(self, tree: Any) -> Any:
    """The tree as it is."""
    return tree

  def on_each(self, act: Callable[[], T]) -> T:
    """act()."""
    return act()


ONE_PROCESS = OneProcess()


@dataclasses.dataclass(frozen=True)
class Prompt:
  """A prompt.

  Attributes:
    example: The example that it was made from.
    text: Its text. With data.chat: as the chat template rendered it.
    ids: Its token ids.
    messages: With data.chat: the conversation. Else None.
    images: Its images, in their order. None of them is decoded yet.
    layouts: The layouts of these images.
    where: The name of the prompt in error messages, if it has images.
    problem: Why its environment cannot begin. Nothing but the example is then known.
  """

  example: Mapping[str, Any]
  text: str
  ids: list[int]
  messages: chat.Messages | None
  images: tuple[AnyImage, ...] = ()
  layouts: tuple[Layout, ...] = ()
  where: str = ""
  problem: str = ""


class PromptSet:
  """The prompts of a split. They are formatted and tokenized each time that a batch needs them.

  Examples whose prompt has more than data.max_prompt_tokens tokens are left out. Of a split with
  more than data.count_at_start examples, not every prompt is tokenized at the start. There, another
  example stands in for one that turns out to be too long: always the same one. So it does where an
  environment cannot begin: it may begin after a restart, which must not move the other prompts.

  Without data.chat, a prompt is the text of data.prompt with its fields filled in, after the
  tokenizer's prefix. With data.chat, it is a conversation, rendered up to where the assistant's
  answer begins. data.prompt then gives the user's message, or names the one field that holds the
  messages. In a mixture, data.prompts gives each source a template of its own.

  Attributes:
    fields: The names of an example's fields.
    dropped: How many examples are left out because their prompts are too long.
    unopened: How many have environments that cannot begin. 0 where not all examples were counted.
    replaced: About which share of the examples is left out, so that others stand in for them. 0
      where all examples were counted.
    max_tokens: S, to which prompts are padded. Where all examples were counted, the longest prompt
      decides, because padding is computed like any token. One whose environment cannot begin may
      be longer.
    pad_id: The id of the padding token.
    images: Puts images into prompts. None if the model sees none.
    most_images: The most pictures of a prompt and the most visual tokens of a picture. None where
      not all examples were counted, or an environment cannot begin.
  """

  def __init__(
    self,
    split: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    data: "Data",
    processes: Processes = ONE_PROCESS,
    count_all: bool = False,
    environment: Opens | None = None,
    *,
    processor: Processor | None = None,
  ) -> None:
    """Counts the tokens of every prompt, or of a sample of them. Each process tokenizes its part.

    Args:
      split: The examples.
      tokenizer: Makes token ids.
      data: The section of the config.
      processes: The processes that share the work.
      count_all: Whether to count all of them, however many there are, and to leave out those whose
        environments cannot begin: an evaluation takes each of them once.
      environment: The environment whose additions are a part of the prompts.
      processor: The processor of images, if the model sees them.

    Raises:
      ConfigError: data.prompt does not fit the examples, or no prompt is short enough.
    """
    self._split, self._tokenizer, self._data = split, tokenizer, data
    self._environment = environment
    self._why_no_prompt = ""  # what first kept an environment from beginning
    # A text whose beginning has more tokens than this is too long for a prompt.
    self._far_too_long = 2 * data.max_prompt_tokens + _MARGIN
    self.images = PromptImages(processor, data) if processor is not None else None
    self._templates = templates_of(data)
    self.fields = list(split[0]) if len(split) else []
    self.max_tokens = data.max_prompt_tokens
    self.pad_id = tokenizer.pad_id
    self._counts_later = len(split) > data.count_at_start and not count_all
    places = _places(len(split), _SAMPLED if self._counts_later else 0)
    counts = self._counts(places, processes)
    if self._counts_later and not (counts[:, 0] <= data.max_prompt_tokens).any():
      places = _places(len(split), _MOST_STAND_INS)
      counts = self._counts(places, processes)
    lengths = counts[:, 0]
    fits, unopened = lengths <= data.max_prompt_tokens, lengths == _UNOPENED
    if not fits.any():
      raise self._none_fits(places, lengths)
    kept = fits if count_all else fits | unopened
    self._kept = None if self._counts_later else np.flatnonzero(kept)
    self.most_images: tuple[int, int] | None = None
    if not self._counts_later and (kept == fits).all():
      longest = -(-int(lengths[fits].max()) // _STEP) * _STEP
      self.max_tokens = min(longest, data.max_prompt_tokens)
      pictures, tokens = counts[fits, 1:].max(0)
      self.most_images = int(pictures), int(tokens)
    self.unopened = 0 if self._counts_later else int(unopened.sum())
    self.dropped = 0 if self._counts_later else int((~fits).sum()) - self.unopened
    self.replaced = float((~fits).mean()) if self._counts_later else 0.0

  @property
  def has_turns(self) -> bool:
    """Whether completions have turns."""
    return self._environment is not None

  def __len__(self) -> int:
    return len(self._split) if self._kept is None else len(self._kept)

  @property
  def is_in_memory(self) -> bool:
    """Whether to look at all rows costs nothing."""
    split = self._split
    return all(map(is_in_memory, split.parts if isinstance(split, Mixture) else [split]))

  def tasks(self) -> set[str] | None:
    """The values of `task` in the examples. None if some rows are read later."""
    if isinstance(self._split, Mixture):
      return {*self._split.shares()}
    if self._counts_later:
      return None
    return {str(example.get("task")) for example in self._split}

  def example(self, index: int) -> Mapping[str, Any]:
    """The example that prompt `index` is made from."""
    if self._kept is None:
      return self.make([index])[0].example
    return self._split[int(self._kept[index])]

  def given(self, indices: Iterable[int]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The rows of the data at `indices`, as they are, each after what messages call it.

    Rows that a task makes when they are needed are left out. Of a split whose prompts are counted
    later, another row may stand in for one of these.
    """
    split = self._split
    for index in indices:
      number = index if self._kept is None else int(self._kept[index])
      part = split.part_of(number) if isinstance(split, Mixture) else split
      if isinstance(part, list) or hasattr(part, "where"):
        yield place_of(split, number), split[number]

  def make(self, indices: Iterable[int]) -> list[Prompt]:
    """The prompts at `indices`, of those that are kept.

    Raises:
      RunFailed: An example cannot be read, or no other one is short enough to stand in for it.
    """
    try:
      places = [int(i if self._kept is None else self._kept[i]) for i in indices]
      return self._make_with_stand_ins(places)
    except ConfigError as error:  # the run has begun, and saves what it has
      raise RunFailed(str(error)) from error

  def begin(self, indices: Iterable[int]) -> None:
    """Begins to decode the images of prompts that a later batch needs. Returns at once."""
    if self.images is not None:
      self.images.begin(self.make(indices))

  def _counts(self, places: np.ndarray, processes: Processes) -> np.ndarray:
    """The counts of `_count` for the prompts at places of the split, on every process."""
    own = places[processes.own_rows(len(places))]
    return processes.join_rows(processes.on_each(lambda: self._count(own)))

  def _count(self, own: np.ndarray) -> np.ndarray:
    """Counts each prompt's tokens, pictures, and most visual tokens of a picture, int32 [N, 3]."""
    at_once = _AT_ONCE if self.images is None else _WITH_IMAGES
    counts = [np.zeros((0, 3), np.int32)]
    with doing("tokenising", len(own), "prompts") as work:
      for start in range(0, len(own), at_once):
        made = self._make(own[start : start + at_once].tolist())
        lengths = np.array([_UNOPENED if one.problem else len(one.ids) for one in made], np.int32)
        sizes = needed_sizes(made) if self.images else np.zeros((len(made), 2), np.int32)
        counts.append(np.column_stack([lengths, sizes]))
        work.advance(len(made))
    return np.concatenate(counts)

  def _make_with_stand_ins(self, indices: list[int]) -> list[Prompt]:
    """Makes prompts, with others in the place of those that are too long or have a problem."""
    made = self._make(indices)
    for tried in range(_MOST_STAND_INS):
      unfit = [
        place
        for place, prompt in enumerate(made)
        if prompt.problem or len(prompt.ids) > self.max_tokens
      ]
      if not unfit:
        return made
      others = self._make([self._stand_in(indices[place], tried) for place in unfit])
      for place, prompt in zip(unfit, others):
        made[place] = prompt
    or_why = f", or cannot be made: {self._why_no_prompt}" if self._why_no_prompt else ""
    raise ConfigError(
      f"data.max_prompt_tokens={self.max_tokens}: {_MOST_STAND_INS} prompts in a row are longer"
      f"{or_why}"
    )

  def _stand_in(self, index: int, tried: int) -> int:
    """The example that stands in for one that is left out, after so many that are, too."""
    # A raw word, because numpy promises that it never changes.
    word = int(np.random.Philox(key=np.array([index, tried], np.uint64)).random_raw())
    if isinstance(self._split, Mixture):
      return self._split.stand_in(index, word)
    if self._kept is not None:
      return int(self._kept[word % len(self._kept)])
    return word % len(self._split)

  def _make(self, indices: list[int]) -> list[Prompt]:
    """The prompts of the examples at places of the split, also of those that are left out."""
    examples: list[Mapping[str, Any]] = [self._split[i] for i in indices]
    openings: list[list[dict[str, Any]] | str] = [[] for _ in examples]
    if self._environment is not None:
      openings = self._environment.openings(examples)
    opened = [
      (index, example, opening)
      for index, example, opening in zip(indices, examples, openings, strict=True)
      if not isinstance(opening, str)
    ]
    made = iter(self._make_opened(*map(list, zip(*opened))) if opened else [])
    prompts = []
    for example, opening in zip(examples, openings):
      if isinstance(opening, str):
        self._why_no_prompt = self._why_no_prompt or opening
        prompts.append(Prompt(example, "", [], None, problem=opening))
      else:
        prompts.append(next(made))
    return prompts

  def _make_opened(
    self,
    indices: list[int],
    examples: list[Mapping[str, Any]],
    openings: list[list[dict[str, Any]]],
  ) -> list[Prompt]:
    """The prompts of examples at places of the split, and what their environments begin with."""
    tokenizer = self._tokenizer
    tools = [self._tools(example, i) for example, i in zip(examples, indices)]
    examples, seen = self._see(examples)
    messages: list[chat.Messages] | list[None] = [None] * len(examples)
    if self._data.chat:
      messages = [
        self._conversation(*of_example) for of_example in zip(examples, openings, strict=True)
      ]
      if self.images is not None:
        messages = [self._place(own, one) for own, one in zip(messages, seen)]
      else:
        _check_texts(messages, f"data.prompt={self._data.prompt!r}")
      texts = self._rendered(messages, tools)
      prefix_ids: tuple[int, ...] = ()  # a chat template writes <s> or the like itself
    else:
      texts = [
        self._filled(example, opening) + "".join(message["content"] for message in opening)
        for example, opening in zip(examples, openings, strict=True)
      ]
      if self.images is not None:
        texts = [self.images.before(text, *one) for text, one in zip(texts, seen)]
      prefix_ids = tokenizer.prefix_ids
    expanded, layouts = texts, [()] * len(texts)
    if self.images is not None:
      both = [self.images.expand(text, *one) for text, one in zip(texts, seen)]
      expanded, layouts = [text for text, _ in both], [layout for _, layout in both]
    text_ids = self._encode(expanded)
    if not all(text_ids):
      raise ConfigError(
        f"data.prompt={self._data.prompt!r} makes a prompt without tokens; it must hold some text"
      )
    return [
      Prompt(example, text, [*prefix_ids, *ids], conversation, tuple(images), layout, where)
      for example, text, ids, conversation, (images, where), layout in zip(
        examples, texts, text_ids, messages, seen, layouts
      )
    ]

  def _encode(self, texts: Sequence[str]) -> list[list[int]]:
    """The token ids of texts. Of one that is far too long, only those of its beginning.

    A text is far too long if its beginning has more than twice as many tokens as a prompt may have.
    It is then too long, whatever follows: of the tokens of a beginning, only those of its last word
    can differ from the text's.
    """
    most = _CHARACTERS_PER_TOKEN * self._far_too_long
    text_ids = self._tokenizer.encode_batch([text[:most] for text in texts])
    # The beginnings of these have few tokens, so the whole text decides whether it fits.
    unsure = [
      place
      for place, text in enumerate(texts)
      if len(text) > most and len(text_ids[place]) <= self._far_too_long
    ]
    for place, ids in zip(unsure, self._tokenizer.encode_batch([texts[i] for i in unsure])):
      text_ids[place] = ids
    return text_ids

  def _none_fits(self, places: np.ndarray, lengths: np.ndarray) -> ConfigError:
    """The error of a split without a prompt that can be used. The arguments are `_shortest`'s."""
    size, most = len(self._split), self._data.max_prompt_tokens
    some = f"all {size}" if len(lengths) == size else f"each of {len(lengths)} drawn"
    if (lengths == _UNOPENED).all() and len(lengths):
      return ConfigError(f"{self._why_no_prompt}; it can begin with no other of {some} examples")
    return ConfigError(
      f"data.max_prompt_tokens={most} drops {some} prompts; the shortest one has"
      f" {self._shortest(places, lengths)} tokens"
    )

  def _shortest(self, places: np.ndarray, lengths: np.ndarray) -> str:
    """How many tokens the shortest prompt has, for an error. One that is far too long is guessed.

    Args:
      places: The places of the prompts in the split.
      lengths: The tokens of the prompts at these places.
    """
    shortest = int(lengths.min(initial=_UNOPENED)) if len(lengths) else 0
    if shortest <= self._far_too_long:
      return str(shortest)
    self._far_too_long = _UNOPENED  # so that the whole text is counted
    (one,) = self._make([int(places[lengths.argmin()])])
    return f"about {len(one.ids)}"

  def _tools(self, example: Mapping[str, Any], index: int) -> list[dict[str, Any]]:
    """The schemas of the tools that a prompt shows."""
    if self._environment is None:
      return row_tools.given(example.get(row_tools.COLUMN))
    try:
      return self._environment.tools_of(example)
    except ConfigError as error:
      raise ConfigError(f"data.path: {place_of(self._split, index)}: {error}") from None

  def _rendered(
    self, messages: Sequence[chat.Messages], tools: Sequence[list[dict[str, Any]]]
  ) -> list[str]:
    """Conversations as texts, those with the same tools together."""
    texts = [""] * len(messages)
    together: dict[str, list[int]] = {}
    for place, own in enumerate(tools):
      together.setdefault(json.dumps(own, default=str), []).append(place)
    for places in together.values():
      own = tools[places[0]] or None
      for place, text in zip(
        places, self._tokenizer.render_batch([messages[i] for i in places], tools=own)
      ):
        texts[place] = text
    return texts

  def _see(
    self, examples: list[Mapping[str, Any]]
  ) -> tuple[list[Mapping[str, Any]], list[tuple[list[AnyImage], str]]]:
    """The examples, and of each one the images of its columns and what error messages call it."""
    if self.images is None:
      return [without_images(example) for example in examples], [([], "")] * len(examples)
    read = [self.images.read(example) for example in examples]
    return [example for example, _, _ in read], [(images, where) for _, images, where in read]

  def _place(self, messages: chat.Messages, seen: tuple[list[AnyImage], str]) -> chat.Messages:
    """The conversation with places for its images, which `seen` then has all of."""
    images, where = seen
    messages, found = self.images.place(messages, images, where)
    images[:] = found
    return messages

  def _template(self, example: Mapping[str, Any]) -> str:
    if self._templates:
      return self._templates[example["task"]]
    return self._data.prompt

  def _filled(self, example: Mapping[str, Any], opening: Sequence[chat.Message]) -> str:
    """The template with the fields of the example. "" leaves the prompt to the environment."""
    template = self._template(example)
    return fill(template, example) if template or not opening else ""

  def _conversation(
    self, example: Mapping[str, Any], opening: Sequence[chat.Message]
  ) -> chat.Messages:
    """The conversation that the model is to continue, which ends with the environment's opening.

    It begins with data.system, unless it has a system message of its own. data.few_shot follows
    if a single message is left, and not if the example has earlier turns of its own.
    """
    template, data = self._template(example), self._data
    field = template[1:-1]
    if template == f"{{{field}}}" and isinstance(value_of(example, field), list):
      messages = value_of(example, field)
    else:
      text = self._filled(example, opening)
      messages = [{"role": "user", "content": text}] if text else []
    if messages and opening and opening[0].get("appended"):
      last = {**messages[-1], "content": messages[-1]["content"] + opening[0]["content"]}
      messages = [*messages[:-1], last]
    else:
      messages = [*messages, *({k: v for k, v in x.items() if k != "appended"} for x in opening)]
    chat.check_messages(messages, f"data.prompt={template!r}")
    messages = chat.with_contents(messages)
    system, turns = list(messages[:1]), list(messages[1:])
    if system[0]["role"] != "system":
      system, turns = [], list(messages)
      if data.system:
        system = [{"role": "system", "content": data.system}]
    shots = _shots(data.few_shot) if len(turns) == 1 else []
    return [*system, *shots, *turns]


def _places(size: int, sampled: int) -> np.ndarray:
  """Places of a split, in ascending order: all of them, or a random sample of about `sampled`.

  A stride instead would see nothing of a file whose rows alternate.
  """
  if not 0 < sampled < size:
    return np.arange(size)
  words = np.random.Philox(key=np.array([size, 2**64 - 1], np.uint64)).random_raw(sampled)
  return np.unique(words % np.uint64(size)).astype(np.int64)


def _check_texts(conversations: Iterable[chat.Messages], where: str) -> None:
  """Refuses images, for a model that sees none."""
  for messages in conversations:
    for message in messages:
      content = message["content"]
      if not isinstance(content, str) and any(part["type"] != "text" for part in content):
        raise ConfigError(
          f"{where}: a message has an image, which the model does not see; choose a model with a"
          " vision tower"
        )


def _shots(texts: Sequence[str]) -> list[dict[str, str]]:
  """data.few_shot as messages: the user's and the assistant's in turn."""
  return [
    {"role": role, "content": text}
    for role, text in zip(itertools.cycle(("user", "assistant")), texts)
  ]
