"""The prompts of a split: selects the examples that fit, and makes texts and tokens for batches."""

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
_WITH_IMAGES = 64  # the same for prompts whose rows may contain the bytes of images
_SAMPLED = 256  # prompts that are made at the start if not all are
_STEP = 16  # S is a multiple of it, so that a few changed rows seldom cause a recompilation
_MOST_STAND_INS = 4096  # the most that are tried for a prompt. Also the size of a second sample
_MARGIN = 64  # more tokens than truncating a text can add to its beginning
_CHARACTERS_PER_TOKEN = 8  # more than most texts have, so that the beginning usually decides
_UNOPENED = 2**31 - 1  # the length that marks a prompt whose environment cannot begin


class Processes(Protocol):
  """The interface through which a run's processes share host work, as in `parallel.hosts.Hosts`."""

  def own_rows(self, count: int) -> slice:
    """The rows, of `count`, that this process works on."""

  def join_rows(self, tree: Any) -> Any:
    """Concatenates the rows of all processes as numpy arrays, on every process."""

  def on_each(self, act: Callable[[], T]) -> T:
    """Returns act() of this process. If act fails on one process, all processes raise."""


class Opens(Protocol):
  """The interface of environments that prompts use. `environments.Environments` implements it.

  Attributes:
    schemas: The schemas of the tools that the policy may call.
  """

  schemas: list[dict[str, Any]]

  def tools_of(self, example: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The schemas of the tools that an example shows to the policy."""

  def openings(self, examples: Sequence[Mapping[str, Any]]) -> list[list[dict[str, Any]] | str]:
    """For each example, the environment's first messages, which follow the data set's messages.

    If an environment cannot begin, its entry is a line that says why.
    """


class OneProcess:
  """`Processes` of a run with one process."""

  def own_rows(self, count: int) -> slice:
    """All rows."""
    return slice(0, count)

  def join_rows(self, tree: Any) -> Any:
    """Returns the tree unchanged."""
    return tree

  def on_each(self, act: Callable[[], T]) -> T:
    """Returns act()."""
    return act()


ONE_PROCESS = OneProcess()


@dataclasses.dataclass(frozen=True)
class Prompt:
  """A prompt.

  Attributes:
    example: The example that the prompt was made from.
    text: The text. With data.chat, the chat template rendered it.
    ids: The token ids.
    messages: The conversation with data.chat, or None.
    images: The images in order, not yet decoded.
    layouts: The layout of each image.
    where: The name of the prompt in error messages, if it has images.
    problem: Why the environment cannot begin, or "". If set, only `example` is valid.
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
  """The prompts of a split. A prompt is formatted and tokenized each time a batch needs it.

  Examples whose prompt has more than data.max_prompt_tokens tokens are left out. If the split has
  more than data.count_at_start examples, not every prompt is tokenized at the start. A prompt that
  turns out to be too long is then replaced by a stand-in, another prompt that is always the same.
  A prompt whose environment cannot begin is also replaced, and not left out: it may begin after a
  restart, which must not change the indices of other prompts.

  Without data.chat, a prompt is the text of data.prompt with its fields filled in, after the
  tokenizer's prefix. With data.chat, a prompt is a conversation, rendered up to the header of the
  assistant's answer. data.prompt is then the user's message, or names the one field that contains
  the messages. In a mixture, data.prompts has a template for each source.

  Attributes:
    fields: The names of an example's fields.
    dropped: How many examples are left out because their prompts are too long.
    unopened: How many examples have environments that cannot begin. 0 if not all prompts were made
      at the start.
    replaced: The estimated fraction of examples with stand-ins. 0 if all prompts were made.
    max_tokens: S, the length to which prompts are padded. If all prompts were made and their
      environments begin, it is the longest prompt's, because padding costs as much as other tokens.
    pad_id: The id of the padding token.
    images: Puts images into prompts. None if the model sees no images.
    most_images: (most pictures of a prompt, most visual tokens of a picture). None if not all
      prompts were made at the start, or an environment cannot begin.
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
    """Counts the tokens of every prompt or of a sample. The processes share the tokenization.

    Args:
      split: The examples.
      tokenizer: Encodes the prompts.
      data: The section `data` of the config.
      processes: The processes that share the work.
      count_all: Whether to count all prompts, however many, and to leave out prompts whose
        environments cannot begin. An evaluation needs this, because it uses each prompt once.
      environment: The environment, whose openings are a part of the prompts, or None.
      processor: The image processor, or None if the model sees no images.

    Raises:
      ConfigError: data.prompt does not fit the examples, or no prompt is short enough.
    """
    self._split, self._tokenizer, self._data = split, tokenizer, data
    self._environment = environment
    self._why_no_prompt = ""  # the first reason why an environment cannot begin
    # A text whose beginning has more tokens than this is certainly too long for a prompt.
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
      # No prompt of the sample fits. One of a larger sample may, so the split is not refused yet.
      places = _places(len(split), _MOST_STAND_INS)
      counts = self._counts(places, processes)
    lengths = counts[:, 0]
    fits, unopened = lengths <= data.max_prompt_tokens, lengths == _UNOPENED
    if not fits.any():
      raise self._none_fits(places, lengths)
    kept = fits if count_all else fits | unopened
    # The place in the split of each prompt. None: the split is left whole, with stand-ins.
    self._kept = None if self._counts_later else np.flatnonzero(kept)
    self.most_images: tuple[int, int] | None = None
    if not self._counts_later and (kept == fits).all():  # else prompts of unknown length remain
      longest = -(-int(lengths[fits].max()) // _STEP) * _STEP
      self.max_tokens = min(longest, data.max_prompt_tokens)
      pictures, tokens = counts[fits, 1:].max(0)
      self.most_images = int(pictures), int(tokens)
    self.unopened = 0 if self._counts_later else int(unopened.sum())
    self.dropped = 0 if self._counts_later else int((~fits).sum()) - self.unopened
    self.replaced = float((~fits).mean()) if self._counts_later else 0.0

  @property
  def has_turns(self) -> bool:
    """Whether completions have several turns, because there is an environment."""
    return self._environment is not None

  def __len__(self) -> int:
    return len(self._split) if self._kept is None else len(self._kept)

  @property
  def is_in_memory(self) -> bool:
    """Whether all rows are in memory, so that reading them is free."""
    split = self._split
    return all(map(is_in_memory, split.parts if isinstance(split, Mixture) else [split]))

  def tasks(self) -> set[str] | None:
    """The distinct values of `task` in the examples. None if that would read the whole file."""
    if isinstance(self._split, Mixture):
      return {*self._split.shares()}
    if self._counts_later:
      return None
    return {str(example.get("task")) for example in self._split}

  @property
  def sources(self) -> list[str]:
    """The names of the sources of data.mixture. Empty without a mixture."""
    return self._split.names if isinstance(self._split, Mixture) else []

  def sources_of(self, indices: Iterable[int]) -> list[str]:
    """The source of each prompt. Empty without a mixture. This reads no example."""
    split = self._split
    if not isinstance(split, Mixture):
      return []
    return [
      split.name_of(int(index) if self._kept is None else int(self._kept[index]))
      for index in indices
    ]

  def example(self, index: int) -> Mapping[str, Any]:
    """The example that prompt `index` is made from."""
    if self._kept is None:
      return self.make([index])[0].example
    return self._split[int(self._kept[index])]

  def given(self, indices: Iterable[int]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields (name in error messages, example) for the examples at `indices`.

    Generated examples are skipped. If the prompts are not all counted at the start, a batch may use
    stand-ins for some of these examples.
    """
    split = self._split
    for index in indices:
      number = index if self._kept is None else int(self._kept[index])
      part = split.part_of(number) if isinstance(split, Mixture) else split
      if isinstance(part, list) or hasattr(part, "where"):
        yield place_of(split, number), split[number]

  def make(self, indices: Iterable[int]) -> list[Prompt]:
    """Makes the prompts at `indices`, which count only the examples that are not left out.

    Raises:
      RunFailed: An example cannot be read, or a prompt that is too long has no stand-in.
    """
    try:
      places = [int(i if self._kept is None else self._kept[i]) for i in indices]
      return self._make_with_stand_ins(places)
    except ConfigError as error:  # after the start, RunFailed lets the run save its state
      raise RunFailed(str(error)) from error

  def begin(self, indices: Iterable[int]) -> None:
    """Starts to decode the images of prompts for a later batch, in threads. Makes the prompts."""
    if self.images is not None:
      self.images.begin(self.make(indices))

  def _counts(self, places: np.ndarray, processes: Processes) -> np.ndarray:
    """`_count` of the prompts at `places` of the split. The processes share the work."""
    own = places[processes.own_rows(len(places))]
    return processes.join_rows(processes.on_each(lambda: self._count(own)))

  def _count(self, places: np.ndarray) -> np.ndarray:
    """Counts (tokens, pictures, most visual tokens of a picture) of each prompt, int32 [N, 3].

    The tokens of a prompt whose environment cannot begin are `_UNOPENED`.
    """
    at_once = _AT_ONCE if self.images is None else _WITH_IMAGES
    counts = [np.zeros((0, 3), np.int32)]  # the result if this process has no prompts
    with doing("tokenising", len(places), "prompts") as work:
      for start in range(0, len(places), at_once):
        made = self._make(places[start : start + at_once].tolist())
        lengths = np.array([_UNOPENED if x.problem else len(x.ids) for x in made], np.int32)
        sizes = needed_sizes(made) if self.images else np.zeros((len(made), 2), np.int32)
        counts.append(np.column_stack([lengths, sizes]))
        work.advance(len(made))
    return np.concatenate(counts)

  def _make_with_stand_ins(self, indices: list[int]) -> list[Prompt]:
    """Makes the prompts at `indices` of the split, with stand-ins for those that cannot be used."""
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
    """The stand-in for example `index`, after `tried` others that cannot be used either."""
    # This uses a raw word, because numpy promises that it never changes.
    word = int(np.random.Philox(key=np.array([index, tried], np.uint64)).random_raw())
    if isinstance(self._split, Mixture):
      return self._split.stand_in(index, word)
    if self._kept is not None:
      return int(self._kept[word % len(self._kept)])
    return word % len(self._split)

  def _make(self, indices: list[int]) -> list[Prompt]:
    """Makes the prompts at `indices` of the split, even those that cannot be used."""
    examples: list[Mapping[str, Any]] = [self._split[i] for i in indices]
    openings: list[list[dict[str, Any]] | str] = [[] for _ in examples]
    if self._environment is not None:
      openings = self._environment.openings(examples)
    opened = [
      (index, example, opening)
      for index, example, opening in zip(indices, examples, openings, strict=True)
      if not isinstance(opening, str)
    ]
    # All prompts that can be made are made together, and then put between the others.
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
    """Makes prompts whose environments can begin.

    Without data.chat, the texts of an opening are appended to the prompt's text. `Prompt.text` has
    a placeholder for each image, which the token ids replace by image tokens.

    Args:
      indices: The places of the examples in the split, for error messages.
      examples: The examples.
      openings: The first messages of each example's environment.
    """
    tokenizer = self._tokenizer
    tools = [self._tools(example, i) for example, i in zip(examples, indices)]
    examples, images_of_rows = self._read_image_columns(examples)
    messages: list[chat.Messages] | list[None] = [None] * len(examples)
    if self._data.chat:
      messages = [
        self._conversation(*of_example) for of_example in zip(examples, openings, strict=True)
      ]
      if self.images is not None:
        messages = [
          self._place_images(turns, of_row) for turns, of_row in zip(messages, images_of_rows)
        ]
      else:
        _check_texts(messages, f"data.prompt={self._data.prompt!r}")
      texts = self._rendered(messages, tools)
      prefix_ids: tuple[int, ...] = ()  # chat templates write tokens such as <s> themselves
    else:
      texts = [
        self._filled(example, opening) + "".join(message["content"] for message in opening)
        for example, opening in zip(examples, openings, strict=True)
      ]
      if self.images is not None:
        texts = [self.images.before(text, *of_row) for text, of_row in zip(texts, images_of_rows)]
      prefix_ids = tokenizer.prefix_ids
    expanded, layouts = texts, [()] * len(texts)
    if self.images is not None:
      pairs = [self.images.expand(text, *of_row) for text, of_row in zip(texts, images_of_rows)]
      expanded, layouts = [text for text, _ in pairs], [layout for _, layout in pairs]
    text_ids = self._encode(expanded)
    if not all(text_ids):
      raise ConfigError(
        f"data.prompt={self._data.prompt!r} makes a prompt without tokens; it must hold some text"
      )
    return [
      Prompt(example, text, [*prefix_ids, *ids], conversation, tuple(images), layout, where)
      for example, text, ids, conversation, (images, where), layout in zip(
        examples, texts, text_ids, messages, images_of_rows, layouts
      )
    ]

  def _encode(self, texts: Sequence[str]) -> list[list[int]]:
    """Encodes texts. For a text that is far too long, it encodes only the beginning.

    A text is far too long if its beginning has more than twice the allowed tokens. The whole text
    is then too long, because truncation only changes the tokens of the beginning's last word.
    """
    most = _CHARACTERS_PER_TOKEN * self._far_too_long
    text_ids = self._tokenizer.encode_batch([text[:most] for text in texts])
    # The beginnings of these texts have few tokens, so the whole texts are encoded.
    unsure = [
      place
      for place, text in enumerate(texts)
      if len(text) > most and len(text_ids[place]) <= self._far_too_long
    ]
    for place, ids in zip(unsure, self._tokenizer.encode_batch([texts[i] for i in unsure])):
      text_ids[place] = ids
    return text_ids

  def _none_fits(self, places: np.ndarray, lengths: np.ndarray) -> ConfigError:
    """The error for a split without a usable prompt. The arguments are as in `_shortest`."""
    size, most = len(self._split), self._data.max_prompt_tokens
    which = f"all {size}" if len(lengths) == size else f"each of {len(lengths)} drawn"
    if (lengths == _UNOPENED).all() and len(lengths):
      return ConfigError(f"{self._why_no_prompt}; it can begin with no other of {which} examples")
    return ConfigError(
      f"data.max_prompt_tokens={most} drops {which} prompts; the shortest one has"
      f" {self._shortest(places, lengths)} tokens"
    )

  def _shortest(self, places: np.ndarray, lengths: np.ndarray) -> str:
    """The number of tokens of the shortest prompt, for an error message.

    If all prompts are far too long, only their beginnings were encoded. This then counts the prompt
    with the shortest beginning and says "about".

    Args:
      places: The places of the prompts in the split.
      lengths: The number of tokens of the prompts at these places.
    """
    shortest = int(lengths.min()) if len(lengths) else 0  # an empty split has no lengths
    if shortest <= self._far_too_long:
      return str(shortest)
    self._far_too_long = _UNOPENED  # so that `_encode` encodes the whole text
    (prompt,) = self._make([int(places[lengths.argmin()])])
    return f"about {len(prompt.ids)}"  # another prompt may have a longer beginning and be shorter

  def _tools(self, example: Mapping[str, Any], index: int) -> list[dict[str, Any]]:
    """The schemas of the tools in the prompt of an example, which has the place `index`."""
    if self._environment is None:
      return row_tools.given(example.get(row_tools.COLUMN))
    try:
      return self._environment.tools_of(example)
    except ConfigError as error:
      raise ConfigError(f"data.path: {place_of(self._split, index)}: {error}") from None

  def _rendered(
    self, messages: Sequence[chat.Messages], tools: Sequence[list[dict[str, Any]]]
  ) -> list[str]:
    """Renders conversations as texts. Conversations with the same tools form one batch."""
    texts = [""] * len(messages)
    together: dict[str, list[int]] = {}  # places in `messages`, keyed by the JSON of their tools
    for place, schemas in enumerate(tools):
      together.setdefault(json.dumps(schemas, default=str), []).append(place)
    for places in together.values():
      schemas = tools[places[0]] or None  # some templates write a header for an empty list
      for place, text in zip(
        places, self._tokenizer.render_batch([messages[i] for i in places], tools=schemas)
      ):
        texts[place] = text
    return texts

  def _read_image_columns(
    self, examples: list[Mapping[str, Any]]
  ) -> tuple[list[Mapping[str, Any]], list[tuple[list[AnyImage], str]]]:
    """Reads the image columns. Returns (examples, (images, name in error messages) of each)."""
    if self.images is None:
      return [without_images(example) for example in examples], [([], "")] * len(examples)
    rows = [self.images.read(example) for example in examples]
    return [example for example, _, _ in rows], [(images, where) for _, images, where in rows]

  def _place_images(
    self, messages: chat.Messages, of_row: tuple[list[AnyImage], str]
  ) -> chat.Messages:
    """A conversation with its images assigned.

    `of_row` has the images of the row's columns, and the row's name in error messages. The list of
    images is changed: it becomes all images of the conversation.
    """
    images, where = of_row
    messages, found = self.images.place(messages, images, where)
    images[:] = found
    return messages

  def _template(self, example: Mapping[str, Any]) -> str:
    """The template of an example's source, from data.prompts or data.prompt."""
    if self._templates:
      return self._templates[example["task"]]
    return self._data.prompt

  def _filled(self, example: Mapping[str, Any], opening: Sequence[chat.Message]) -> str:
    """Fills the template. "" if the template is empty and an environment writes the prompt."""
    template = self._template(example)
    return fill(template, example) if template or not opening else ""

  def _conversation(
    self, example: Mapping[str, Any], opening: Sequence[chat.Message]
  ) -> chat.Messages:
    """The conversation that the model will continue, with the environment's opening at the end.

    It begins with the example's system message or else with data.system. data.few_shot follows if
    one other message remains, but not if the example has earlier turns.
    """
    template, data = self._template(example), self._data
    field = template[1:-1]  # if the template is {FIELD} alone, which may contain a conversation
    if template == f"{{{field}}}" and isinstance(value_of(example, field), list):
      messages = value_of(example, field)
    else:
      text = self._filled(example, opening)
      messages = [{"role": "user", "content": text}] if text else []
    # "appended" marks an opening that continues the last message. A chat template must not see it.
    if messages and opening and opening[0].get("appended"):
      chat.check_messages(messages, f"data.prompt={template!r}")  # before reading the last one
      content, more = messages[-1].get("content") or "", opening[0]["content"]
      # The content may be a list of parts, such as texts and images.
      joined = (
        content + more if isinstance(content, str) else [*content, {"type": "text", "text": more}]
      )
      messages = [*messages[:-1], {**messages[-1], "content": joined}]
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
  """Places of a split in ascending order: all, or a random sample of about `sampled` if not 0.

  A stride would not be representative for a file whose rows alternate.
  """
  if not 0 < sampled < size:
    return np.arange(size)
  # The key is fixed, so that every start and every process draws the same sample.
  words = np.random.Philox(key=np.array([size, 2**64 - 1], np.uint64)).random_raw(sampled)
  return np.unique(words % np.uint64(size)).astype(np.int64)


def _check_texts(conversations: Iterable[chat.Messages], where: str) -> None:
  """Raises ConfigError if a conversation has images, for a model that sees no images."""
  for messages in conversations:
    for message in messages:
      content = message["content"]
      if not isinstance(content, str) and any(part["type"] != "text" for part in content):
        raise ConfigError(
          f"{where}: a message has an image, which the model does not see; choose a model with a"
          " vision tower"
        )


def _shots(texts: Sequence[str]) -> list[dict[str, str]]:
  """data.few_shot as messages. The roles of user and assistant alternate."""
  return [
    {"role": role, "content": text}
    for role, text in zip(itertools.cycle(("user", "assistant")), texts)
  ]
