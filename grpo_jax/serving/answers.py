"""Turns the tokens of choices into the JSON of answers. Only `AnswerChoice` has state."""

from collections.abc import Callable, Collection, Iterator, Sequence
import dataclasses
import itertools
import json
from typing import Any, ClassVar, NamedTuple

from grpo_jax.data.tokenizers.replies import call_id, tool_calls
from grpo_jax.environments.tool_calls import Call, Format
from grpo_jax.serving.decoder import Likely, PromptScores
from grpo_jax.serving.engine import AnswerPart
from grpo_jax.serving.requests import Request, RequestError
from grpo_jax.serving.traces import Trace

_LEAST_LOGPROB = -9999.0  # JSON has no infinity
_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}

Decode = Callable[[list[int]], str]  # token ids -> text


class _TokenLogprob(NamedTuple):
  """The entry of a token in the log-probs of an answer.

  Attributes:
    text: The token as text.
    logprob: The log-prob of the token. None for the first token of a prompt.
    likely: The likeliest tokens at this position as (text, log-prob). None if not requested.
  """

  text: str
  logprob: float | None
  likely: list[tuple[str, float]] | None


class AnswerChoice:
  """A completion of a request. It collects tokens and hands out their text, calls and log-probs.

  Attributes:
    index: The number of the choice in the request.
    prompt: The token ids of the prompt.
    tokens: The token ids so far.
    logprobs: The log-prob of each token.
    versions: The version of the weights that wrote each token.
    version: The version that wrote the last token or, without tokens, read the prompt.
    finish: "" while the choice goes on, then "stop", "length" or "tool_calls".
    computed: How many tokens of the prompt were computed, rather than taken from the cache.
    number: If the endpoint records: how many completions the client requested earlier.
  """

  def __init__(
    self,
    index: int,
    request: Request,
    decode: Decode,
    calls: Format,
    marks: Sequence[str] = (),
    ends: Collection[int] = (),
  ):
    """Starts without tokens.

    Args:
      index: The number of the choice in the request.
      request: The request.
      decode: Token ids -> text.
      calls: How the model writes tool calls.
      marks: Special tokens that `decode` shows so that `calls` finds them. The client's text lacks
        them.
      ends: Ids of special tokens that `decode` shows, but not as the last token of a choice.
    """
    self.index, self.prompt = index, request.prompts[index // request.n]
    self.tokens: list[int] = []
    self.logprobs: list[float] = []
    self.versions: list[int] = []
    self.version: int | None = None
    self.finish, self.computed, self.number = "", 0, 0
    self._is_cut = False  # whether the token limit ended the choice
    self._decode, self._stop = decode, request.stop
    # While the choice goes on, an end of the text that may become one of these is held back.
    self._held = (*request.stop, *calls.opens) if request.tools else request.stop
    self._calls, self._tools = calls if request.tools else None, request.tools
    self._marks, self._ends = marks, ends
    self._echo = ""
    if request.echo is not None:
      prompt_text = request.echo[index // request.n]
      self._echo = decode([*self.prompt]) if prompt_text is None else prompt_text
    self._has_alternatives, self._alternatives = bool(request.alternatives), list[Likely]()
    self._scores: PromptScores | None = None
    self._said, self._called = "", list[Call]()  # text and calls that the client has received
    self._calls_before, self._most_calls = request.calls_before, request.most_calls
    self._text = ""  # of the first `_decoded` tokens
    self._decoded = 0
    self._processed = 0  # how many characters `take_text` has processed
    self._taken = 0  # how many tokens `take_tokens` has returned
    self._offset = 0  # how many characters the tokens in earlier log-probs have

  def add(self, part: AnswerPart) -> None:
    """Appends the tokens of a chunk."""
    self.tokens += part.tokens
    self.logprobs += part.logprobs
    self.versions += [part.version] * len(part.tokens)
    if part.tokens or self.version is None:
      self.version = part.version
    self.finish, self._is_cut = part.finish, part.finish == "length"
    self.computed += part.computed
    self._alternatives += part.alternatives
    self._scores = part.scores or self._scores

  def take_text(self) -> tuple[str, list[Call]]:
    """Returns the text that is new since the last call of this method, and the tool calls in it.

    While the choice goes on, an end that may become a stop text, a tool call or a character of
    several tokens is held back. Tool calls are only parsed at the end of the choice.
    """
    hides_last = self.finish == "stop" and any(token in self._ends for token in self.tokens[-1:])
    new_tokens = self.tokens[self._decoded : len(self.tokens) - hides_last]
    text = self._text + self._decode(new_tokens)
    if not text.endswith("\ufffd"):  # the replacement character stands for an incomplete one
      self._text, self._decoded = text, len(self.tokens)
    stops = [text.index(stop) for stop in self._stop if stop in text]
    text = text[: min(stops, default=len(text))]
    if not self.finish:
      text = _sure(text.rstrip("\ufffd"), self._held)
      opens = self._calls.opens if self._calls is not None else ()
      # From the beginning of a call on, the text is held back until the choice ends.
      calls_from = [text.index(one) for one in opens if one in text]
      text = text[: min(calls_from, default=len(text))]
    new = text[self._processed :]
    self._processed = max(self._processed, len(text))  # `text` is shorter if more is held back now
    calls: list[Call] = []
    if self._calls is not None and self.finish:
      new, calls, _ = self._calls.parse(new, self._tools)
      calls = calls[: self._most_calls]
      self.finish = "tool_calls" if calls else self.finish
    for mark in self._marks:
      new = new.replace(mark, "")
    self._said, self._called = self._said + new, self._called + calls
    echo, self._echo = self._echo, ""
    return echo + new, calls

  def trace(self) -> Trace:
    """The record of an ended choice, for training."""
    return Trace(
      prompt=list(self.prompt),
      tokens=list(self.tokens),
      logprobs=list(self.logprobs),
      version=self.version or 0,
      finish="length" if self._is_cut else "stop",  # whether or not there are tool calls
      said=self._said,
      calls=tuple(
        tool_calls(
          [
            (call_id(number), call.name, json.loads(call.arguments))
            for number, call in enumerate(self._called, self._calls_before)
          ]
        )
      ),
      computed=self.computed,
      number=self.number,
    )

  def take_tokens(self) -> slice:
    """Returns the slice of the tokens that are new since the last call of this method."""
    new = slice(self._taken, len(self.tokens))
    self._taken = len(self.tokens)
    return new

  def logprobs_of(self, tokens: slice, is_chat: bool) -> dict[str, Any]:
    """The log-probs of tokens in OpenAI's format. The first call begins with the prompt's, if any.

    Call it with successive slices, because it counts the characters before each token.

    Args:
      tokens: A slice of the tokens, as `take_tokens` returns it.
      is_chat: Whether to use the format of chats. Otherwise that of completions.
    """
    entries = [*self._take_prompt_logprobs(), *self._logprobs_of_drawn(tokens)]
    if is_chat:
      content = [
        {**_token(one.text, one.logprob), "top_logprobs": [_token(*x) for x in one.likely or ()]}
        for one in entries
      ]
      return {"content": content, "refusal": None}
    lengths = (len(one.text) for one in entries)
    # How many characters come before each token and, as the last number, before the next slice.
    *offsets, self._offset = itertools.accumulate(lengths, initial=self._offset)
    return {
      "tokens": [one.text for one in entries],
      "token_logprobs": [one.logprob for one in entries],
      "text_offset": offsets,
      "top_logprobs": [_by_text(one) for one in entries] if self._has_alternatives else None,
    }

  def _logprobs_of_drawn(self, tokens: slice) -> Iterator[_TokenLogprob]:
    likely = self._alternatives[tokens] if self._has_alternatives else []
    drawn = self.tokens[tokens], self.logprobs[tokens], likely
    for token, logprob, best in itertools.zip_longest(*drawn):
      yield _TokenLogprob(self._decode([token]), _finite(logprob), self._texts_of(best))

  def _take_prompt_logprobs(self) -> Iterator[_TokenLogprob]:
    """Yields the entries of the prompt's tokens, once. None if the engine did not score them."""
    if self._scores is None:
      return
    scores, self._scores = self._scores, None
    yield _TokenLogprob(self._decode([self.prompt[0]]), None, None)
    known = self.prompt[1:], scores.logprobs, scores.alternatives
    for token, logprob, best in zip(*known, strict=True):
      yield _TokenLogprob(self._decode([token]), _finite(logprob), self._texts_of(best))

  def _texts_of(self, likely: Likely | None) -> list[tuple[str, float]] | None:
    if likely is None:
      return None
    return [(self._decode([token]), _finite(logprob)) for token, logprob in likely]


def _finite(logprob: float) -> float:
  """Replaces -inf, which JSON cannot represent, by `_LEAST_LOGPROB`."""
  return max(_LEAST_LOGPROB, logprob)


def _token(text: str, logprob: float | None) -> dict[str, Any]:
  return {"token": text, "logprob": logprob, "bytes": [*text.encode()]}


def _by_text(entry: _TokenLogprob) -> dict[str, float] | None:
  """Maps the texts of the likeliest tokens and of the token itself to log-probs.

  Of tokens with the same text, the likeliest counts. None for the first token of a prompt.
  """
  if entry.logprob is None:
    return None
  least_first = sorted([(entry.text, entry.logprob), *entry.likely], key=lambda one: one[1])
  return dict(least_first)


@dataclasses.dataclass(frozen=True)
class AnswerHead:
  """Makes the JSON of an answer of /v1/completions or /v1/chat/completions.

  Attributes:
    id: The answer's id.
    created: When the answer was started, in seconds since 1970.
    model: The name of the model.
    request: The request that is answered.
    is_ended_by_done: Whether a stream ends with [DONE].
  """

  id: str
  created: int
  model: str
  request: Request
  is_ended_by_done: ClassVar[bool] = True

  def whole(self, choices: Sequence[AnswerChoice]) -> dict[str, Any]:
    """The whole answer. All choices must have ended."""
    is_chat = self.request.is_chat
    return {
      **self._fields("chat.completion" if is_chat else "text_completion"),
      "choices": [self._choice(choice, is_stream=False) for choice in choices],
      "usage": usage(self.request, choices),
      "weights_version": max(choice.version for choice in choices),
    }

  def first(self) -> list[dict[str, Any]]:
    """The events of a stream before the first token: none."""
    return []

  def piece(self, choice: AnswerChoice, is_first: bool) -> list[dict[str, Any]]:
    """The event of a stream with the new text and tokens of a choice.

    Args:
      choice: The choice.
      is_first: Whether it is the choice's first event.
    """
    kind = "chat.completion.chunk" if self.request.is_chat else "text_completion"
    made = self._choice(choice, is_stream=True, is_first=is_first)
    counts = {"usage": None} if self.request.include_usage else {}
    return [{**self._fields(kind), "choices": [made], "weights_version": choice.version, **counts}]

  def last(self, choices: Sequence[AnswerChoice]) -> list[dict[str, Any]]:
    """The last event of a stream, with token counts, if the request includes them."""
    if not self.request.include_usage:
      return []
    kind = "chat.completion.chunk" if self.request.is_chat else "text_completion"
    return [{**self._fields(kind), "choices": [], "usage": usage(self.request, choices)}]

  def error(self, wrong: RequestError) -> dict[str, Any]:
    """The event that says why a stream ends early."""
    return error(wrong)

  def _fields(self, kind: str) -> dict[str, Any]:
    return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

  def _choice(self, choice: AnswerChoice, is_stream: bool, is_first: bool = True) -> dict[str, Any]:
    """A choice in OpenAI's format: the part that is new since the last call of this method."""
    asked = self.request
    text, calls = choice.take_text()  # may change `choice.finish` to "tool_calls"
    new = choice.take_tokens()
    made: dict[str, Any] = {"index": choice.index, "finish_reason": choice.finish or None}
    if not asked.is_chat:
      made["text"] = text
    elif is_stream:
      role = {"role": "assistant"} if is_first else {}
      made["delta"] = role | _message(text, calls, asked.calls_before, is_stream)
    else:
      message = _message(text, calls, asked.calls_before, is_stream)
      made["message"] = {"role": "assistant"} | message
    made["logprobs"] = choice.logprobs_of(new, asked.is_chat) if asked.logprobs else None
    if asked.return_token_ids:
      made["token_ids"], made["token_versions"] = choice.tokens[new], choice.versions[new]
      if is_first:  # the prompt is sent once
        made["prompt_token_ids"] = [*choice.prompt]
    return made


def usage(request: Request, choices: Sequence[AnswerChoice]) -> dict[str, int]:
  """Counts tokens. A prompt counts once, however many completions it has."""
  prompt = sum(map(len, request.prompts))
  completion = sum(len(choice.tokens) for choice in choices)
  return {
    "prompt_tokens": prompt,
    "completion_tokens": completion,
    "total_tokens": prompt + completion,
  }


def error(wrong: RequestError) -> dict[str, Any]:
  """The JSON body of an error, in OpenAI's format."""
  kind = "server_error" if wrong.status >= 500 else "invalid_request_error"
  return {
    "error": {
      "message": wrong.message,
      "type": _ERROR_TYPES.get(wrong.status, kind),
      "param": wrong.param,
      "code": wrong.code or None,
    }
  }


def _message(text: str, calls: Sequence[Call], before: int, is_stream: bool) -> dict[str, Any]:
  """The content and tool calls of a message, in OpenAI's format.

  Args:
    text: The content.
    calls: The tool calls.
    before: How many calls the conversation had before. The ids of calls are numbered after them.
    is_stream: Whether the message is an event of a stream, whose calls have an index.
  """
  if not calls:
    return {"content": text}
  numbers = itertools.count(before)
  made = tool_calls([(call_id(next(numbers)), call.name, call.arguments) for call in calls])
  if is_stream:
    made = [{"index": number, **call} for number, call in enumerate(made)]
  return {"content": text or None, "tool_calls": made}


def _sure(text: str, held: Sequence[str]) -> str:
  """The text without a suffix that is the beginning of a text in `held`."""
  longest = max(map(len, held), default=0)
  for kept in range(max(0, len(text) - longest + 1), len(text)):
    if any(one.startswith(text[kept:]) for one in held):
      return text[:kept]
  return text
