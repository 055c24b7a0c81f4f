"""Connects requests with the engine: tokenizes prompts, submits jobs and collects choices."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
import contextlib
import dataclasses
import functools
from typing import Any

from grpo_jax.data.tokenizers.replies import Replies
from grpo_jax.data.tokenizers.tokenizer import Tokenizer
from grpo_jax.environments.tool_calls import Format, format_for
from grpo_jax.environments.written_calls import are_read
from grpo_jax.sampler.logits import RowSettings
from grpo_jax.sampler.stop import End, end_at
from grpo_jax.serving.answers import AnswerChoice, Decode
from grpo_jax.serving.engine import AnswerPart, Closed, Engine, Full, Job, Row
from grpo_jax.serving.guides import Guides
from grpo_jax.serving.images import ImageReader, UnreadImages, with_end
from grpo_jax.serving.requests import GOES_ON, LONGEST, Request, RequestError, Texts, row_number
from grpo_jax.serving.tools import with_names, with_texts
from grpo_jax.serving.traces import Recorder
from grpo_jax.settings import ConfigError

_FEWEST_CHARACTERS = 2**16  # the smallest limit of a prompt's characters
# Marks the end of the last message if the answer continues it. No client writes this text. It ends
# with a blank, which disappears if the template trims messages.
_END = "7d1e0c52-the-last-message-goes-on-a94bf3 "
_MOST_BEHIND = 1024  # unsent parts per choice at which the connection of a slow client is cut

Writing = contextlib.AbstractAsyncContextManager[
  tuple[list[AnswerChoice], AsyncIterator[AnswerChoice]]
]


class AnswerWriter:
  """Turns requests into jobs of an engine, and the engine's parts into choices."""

  def __init__(
    self,
    engine: Engine,
    tokenizer: Tokenizer,
    seconds: float,
    recorder: Recorder | None,
    *,
    longest: str = LONGEST,
    calls: str = "auto",
    vocabulary: int | None = None,
    images: ImageReader | None = None,
  ) -> None:
    """Submits nothing yet.

    Args:
      engine: The engine.
      tokenizer: The tokenizer of the model.
      seconds: The timeout of an answer.
      recorder: Records the completions of conversations, and decides how they are drawn, or None.
      longest: The flag or config key that sets the longest prompt, for errors.
      calls: How the model writes tool calls, as in environment.calls.
      vocabulary: V, how many token ids the model has. None means as many as the tokenizer.
      images: Reads images. None: the model accepts no images.
    """
    self._engine, self._tokenizer = engine, tokenizer
    self._seconds, self._recorder = seconds, recorder
    self._calls, self._longest = _calls_of(tokenizer, calls), longest
    self._images = images
    self._names_calls = calls != "auto"  # a format that the config names is not tested
    self._guides = Guides(tokenizer, vocabulary or tokenizer.vocab_size)
    self._shown = tokenizer.skipped(self._calls.marks)  # id -> text of special tokens in calls
    # A longer text surely has too many tokens, and need not be tokenised to count them.
    self._most_characters = max(
      _FEWEST_CHARACTERS, engine.sizes.prompt_tokens * tokenizer.longest_token
    )

  def check_name(self, name: str) -> None:
    """Raises RequestError if a recorded conversation belongs to another batch of the run."""
    if self._recorder is not None and not self._recorder.is_current(name):
      raise RequestError(
        "the API key is of no completion of the current batch: let the harness await all its calls"
        " before it returns",
        status=401,
        code="invalid_api_key",
      )

  def texts(self, name: str) -> Texts:
    """The functions that tokenize prompts of the conversation `name`."""
    look = self._images.look if self._images else None
    return Texts(self._encode, functools.partial(self._render, name), look)

  @contextlib.asynccontextmanager
  async def choices(
    self, asked: Request, name: str, cut: Callable[[], None]
  ) -> AsyncIterator[tuple[list[AnswerChoice], AsyncIterator[AnswerChoice]]]:
    """Submits a request. Yields its choices, and an iterator of choices that have new tokens.

    When the block ends, rows that still run are cancelled.

    Args:
      asked: The request.
      name: The conversation's name.
      cut: Called without arguments if the client of a stream is too slow.
    """
    loop, heard = asyncio.get_running_loop(), asyncio.Queue[tuple[int, AnswerPart]]()

    def receive(index: int, part: AnswerPart) -> None:
      heard.put_nowait((index, part))
      if asked.stream and heard.qsize() > _MOST_BEHIND * asked.choices:
        cut()

    def hear(index: int, part: AnswerPart) -> None:  # in the thread of the engine
      loop.call_soon_threadsafe(receive, index, part)

    # `marks` are decoded to find calls, and then taken out of the client's text.
    shown: Mapping[int, str] = self._shown if asked.tools else {}
    marks, ends = [*shown.values()], set[int]()
    if asked.shows_special:  # all but the token that ends the answer
      shown, marks = self._tokenizer.special_texts, []
      ends = {*shown}
    decode = functools.partial(self._tokenizer.decode, shown=shown)
    arguments = asked, decode, self._calls, marks, ends
    choices = [AnswerChoice(index, *arguments) for index in range(asked.choices)]
    guides = asked.guides or [None] * len(choices)
    jobs = []
    for choice, guide in zip(choices, guides, strict=True):
      settings, number = self._draws(asked, name, choice)
      end = _end_of(asked.stop, decode) if asked.stop else None
      end = _end_at_ids(asked.stop_ids, end) if asked.stop_ids else end
      hear_choice = functools.partial(hear, choice.index)
      options = dict[str, Any](
        alternatives=asked.alternatives,
        bias=asked.bias,
        is_scored=asked.is_scored,
        images=asked.seen,
      )
      jobs.append(Job(choice.prompt, number, settings, hear_choice, end, guide, **options))
    rows = self._submit(jobs)
    try:
      yield choices, self._parts(choices, heard)
    finally:
      if not all(choice.finish for choice in choices):
        self._engine.cancel(rows)

  def record(self, name: str, choices: Sequence[AnswerChoice]) -> None:
    """Records the choices of a completed answer, if there is a recorder."""
    if self._recorder is not None:
      for choice in choices:
        self._recorder.add(name, choice.trace())

  def with_guides(self, asked: Request) -> Request:
    """Adds guides to a request with a form. A large schema takes seconds: call it in a thread.

    Raises:
      RequestError: The form is not supported, or a recorded request changes how tokens are drawn.
    """
    if self._recorder is not None:
      _check_recorded(asked)
    if asked.form is None:
      return asked
    return dataclasses.replace(asked, guides=self._guides.of(asked.form, asked.choices))

  def with_images(self, asked: Request) -> Request:
    """Decodes the images of a request, which takes long: call it in a thread.

    Raises:
      RequestError: An image is damaged.
    """
    try:
      seen = asked.unread.decode(asked.prompts[0], self._engine.sizes.prompt_tokens)
    except ConfigError as error:
      raise RequestError(str(error), "messages") from None
    return dataclasses.replace(asked, seen=seen, unread=None)

  def _draws(self, asked: Request, name: str, choice: AnswerChoice) -> tuple[RowSettings, int]:
    """The settings of a choice's row, and the int32 that determines the random numbers."""
    if self._recorder is not None:
      settings, number, choice.number = self._recorder.draws(name, asked.settings)
      return settings, number
    return asked.settings, row_number(asked.seed, choice.index)

  async def _parts(
    self, choices: list[AnswerChoice], heard: asyncio.Queue[tuple[int, AnswerPart]]
  ) -> AsyncIterator[AnswerChoice]:
    """Adds (index, part) entries of the queue to choices[index]. Yields the choice after each.

    Raises RequestError after the timeout, or if the engine ends or cannot encode the images.
    """
    going = len(choices)
    deadline = asyncio.get_running_loop().time() + self._seconds
    while going:
      try:
        async with asyncio.timeout_at(deadline):
          index, part = await heard.get()
      except TimeoutError:
        raise RequestError(
          f"the answer took more than {self._seconds:g} seconds", None, 503, "timeout"
        ) from None
      if part.finish == "closed":
        raise stopping()
      if part.finish == "failed":
        raise RequestError("the server could not encode the images; its log says why", status=500)
      choices[index].add(part)
      going -= bool(part.finish)
      yield choices[index]

  def _submit(self, jobs: list[Job]) -> list[Row]:
    try:
      return self._engine.submit(jobs)
    except Full:
      raise RequestError(
        f"{self._engine.waiting} rows wait and at most {self._engine.sizes.waiting} may; try later",
        None,
        429,
        "queue_full",
      ) from None
    except Closed:
      raise stopping() from None

  def _check_length(self, text: str, name: str) -> None:
    """Raises RequestError for a text that surely has more tokens than a prompt may have."""
    if len(text) > self._most_characters:
      raise RequestError(
        f"{name}: {len(text)} characters, and this server takes at most {self._most_characters}"
        f" for a prompt of {self._engine.sizes.prompt_tokens} tokens ({self._longest})",
        name,
        code="context_length_exceeded",
      )

  def _encode(self, text: str) -> list[int]:
    self._check_length(text, "prompt")
    return [*self._tokenizer.prefix_ids, *self._tokenizer.encode(text)]

  def _render(
    self,
    name: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    options: dict[str, Any],
    images: UnreadImages | None = None,
  ) -> list[int]:
    """Renders and tokenizes a conversation.

    If the endpoint records for training, earlier answers keep the tokens that the policy drew.
    Tokenizing their texts again might yield other tokens, which the policy never drew.

    Args:
      name: The name of the conversation.
      messages: The messages.
      tools: The tools that the client offers, or None.
      options: Variables of the chat template, with `GOES_ON` to continue the last message.
      images: The images, for which the messages have placeholders, or None.
    """
    if tools and not self._reads_calls:
      raise RequestError(
        "tools: the chat template shows tools, and makes the model call them in a way that is not"
        " read here; leave tools out",
        "tools",
      )
    shown = [tools, options]  # an earlier answer counts only if its prompt had the same
    recorded = self._recorder.earlier(name, messages, shown) if self._recorder else None
    # `Replies` writes the start of a new answer, so it cannot continue one.
    # An endpoint that records takes no images, so only the first branch has any.
    if recorded is None or GOES_ON in options:
      text = self._rendered(messages, tools, options)
      self._check_length(text, "messages")
      if images:
        text = images.expand(text, self._engine.sizes.prompt_tokens)
      ids = self._tokenizer.encode(text)
    else:
      trace, new_messages = recorded
      answer = messages[-len(new_messages) - 1]  # the recorded one, before the new messages
      named = with_names(answer.get("tool_calls") or (), new_messages)
      replies = Replies(self._with_options(options), chat=True, tools=tools or ())
      new_ids = replies.ids(named, trace.tokens[-1])
      ids = [*trace.prompt, *trace.tokens, *new_ids]
    if self._recorder is not None:
      self._recorder.remember_prompt(name, messages, shown, ids)
    return ids

  def _with_options(self, options: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer, whose chat template gets these variables, too."""
    if not options:  # a copy would compile the template again
      return self._tokenizer
    chat_options = {**self._tokenizer.chat_options, **options}
    return dataclasses.replace(self._tokenizer, chat_options=chat_options)

  def _rendered(
    self,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    options: dict[str, Any],
  ) -> str:
    """Renders a conversation. If that fails, retries with arguments of calls as JSON texts."""
    variables = {name: value for name, value in options.items() if name != GOES_ON}
    goes_on = GOES_ON in options

    def render(messages: list[dict[str, Any]]) -> str:
      if not goes_on:
        return self._tokenizer.render(messages, True, tools, variables)
      *before, last = messages
      marked = [*before, {**last, "content": with_end(last["content"], _END)}]
      return _without_end(self._tokenizer.render(marked, False, tools, variables))

    try:
      return render(messages)
    except ConfigError:
      if not any(message.get("tool_calls") for message in messages):
        raise
      try:
        return render(with_texts(messages))
      except ConfigError:
        pass
      raise  # the error of the first try

  @functools.cached_property
  def _reads_calls(self) -> bool:
    return self._names_calls or are_read(self._tokenizer)


def _check_recorded(asked: Request) -> None:
  """Raises RequestError for parameters that change what the policy would write by itself."""
  param = "logit_bias" if asked.bias else "max_tokens" if not asked.settings.max_tokens else None
  param = asked.form.param if asked.form else param
  if param is not None:
    why = "a run learns from what the policy writes by itself; leave it out"
    raise RequestError(f"{param}: {why}", param)


def stopping() -> RequestError:
  """The error for a request that arrives while the server stops."""
  return RequestError("the server is stopping", status=503, code="stopping")


def _calls_of(tokenizer: Tokenizer, calls: str) -> Format:
  """The format of the model's tool calls. `calls` is as in environment.calls."""
  try:
    template = tokenizer.template
  except ConfigError:  # it has no chat template
    template = ""
  return format_for(template, calls)


def _without_end(text: str) -> str:
  """Cuts a rendered conversation at `_END`, the end of the last message's content."""
  place = text.rfind(_END.strip())
  if place < 0:
    raise RequestError(
      "continue_final_message: the chat template writes the last message in another way",
      "continue_final_message",
    )
  is_kept = text.startswith(_END, place)  # if not, the template trims messages
  return text[:place] if is_kept else text[:place].rstrip()


def _end_at_ids(stop_ids: tuple[int, ...], end: End | None) -> End:
  """Makes an `End` that cuts rows after one of these token ids, or where `end` does, if earlier."""

  def end_of(ids: Sequence[int], checked: int) -> int | None:
    after_id = next((i + 1 for i in range(checked, len(ids)) if ids[i] in stop_ids), None)
    kept = end(ids, checked) if end else None
    return min((x for x in (after_id, kept) if x is not None), default=None)

  return end_of


def _end_of(stop: tuple[str, ...], decode: Decode) -> End:
  """Makes an `End` that cuts rows at stop texts. It only decodes tokens that may belong to one."""
  end, tokens = end_at(stop, decode), 4 * max(map(len, stop))  # up to four tokens per character

  def end_of_last(ids: Sequence[int], checked: int) -> int | None:
    start = max(0, checked - tokens)
    kept = end(ids[start:], checked - start)
    return None if kept is None else start + kept

  return end_of_last
