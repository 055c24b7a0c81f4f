"""From the tokens of choices to the JSON of answers. Only a `Choice` has a state: it grows."""

from collections.abc import Callable, Sequence
import dataclasses
import itertools
import json
from typing import Any

from grpo_jax.data.tokenizers.replies import call_id, tool_calls
from grpo_jax.environments.tool_calls import Call, Format
from grpo_jax.serving.engine import Part
from grpo_jax.serving.requests import Request, RequestError
from grpo_jax.serving.traces import Trace

_LEAST_LOGPROB = -9999.0  # JSON has no infinity
_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}

Decode = Callable[[list[int]], str]


class Choice:
  """One completion of a request, as its tokens come.

  Attributes:
    index: Its number in the request.
    prompt: The token ids before it.
    tokens: Those that it has.
    logprobs: Theirs.
    versions: Of the weights that wrote each.
    finish: Empty while it goes on, then "stop" or "length".
    computed: How many tokens of the prompt were computed.
    number: How many completions the client had asked for before, where the endpoint records.
  """

  def __init__(
    self, index: int, request: Request, decode: Decode, calls: Format, marks: Sequence[str] = ()
  ):
    """It has no tokens yet.

    Args:
      index: Its number in the request.
      request: The request.
      decode: Token ids -> the text that they add.
      calls: How the model writes calls of tools.
      marks: Special tokens that `decode` shows for `calls`. They are no content.
    """
    self.index, self.prompt = index, request.prompts[index // request.n]
    self.tokens: list[int] = []
    self.logprobs: list[float] = []
    self.versions: list[int] = []
    self.finish, self.computed, self.number = "", 0, 0
    self._decode, self._stop = decode, request.stop
    self._held = (*request.stop, *calls.opens) if request.tools else request.stop
    self._calls, self._tools = calls if request.tools else None, request.tools
    self._marks = marks
    self._echo = request.echo[index // request.n] if request.echo else ""
    self._said, self._called = "", list[Call]()  # what the client has got
    self._calls_before, self._most_calls = request.calls_before, request.most_calls
    self._text = ""  # of the first tokens,
    self._decoded = 0  # which are so many
    self._texts = 0  # characters that were taken
    self._taken = 0  # tokens that were taken
    self._offset = 0  # characters of the tokens that were taken

  def add(self, part: Part) -> None:
    """Appends what the engine wrote."""
    self.tokens += part.tokens
    self.logprobs += part.logprobs
    self.versions += [part.version] * len(part.tokens)
    self.finish = part.finish
    self.computed += part.computed

  def take_text(self) -> tuple[str, list[Call]]:
    """(the text that is new since the last time, the calls of tools in it).

    While the choice goes on, it leaves out what may become a stop text, a call or a character of
    several tokens.
    """
    text = self._text + self._decode(self.tokens[self._decoded :])
    if not text.endswith("\ufffd"):  # which stands for a part of a character
      self._text, self._decoded = text, len(self.tokens)
    ends = [text.index(stop) for stop in self._stop if stop in text]
    text = text[: min(ends)] if ends else text
    if not self.finish:
      text = _sure(text.rstrip("\ufffd"), self._held)
      opens = self._calls.opens if self._calls is not None else ()
      text = text[: min((text.index(one) for one in opens if one in text), default=len(text))]
    new = text[self._texts :]
    self._texts = max(self._texts, len(text))
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
    """What was read and written, once it has ended."""
    finish = "length" if self.finish == "length" else "stop"
    version = self.versions[-1] if self.versions else 0
    return Trace(
      prompt=list(self.prompt),
      tokens=list(self.tokens),
      logprobs=list(self.logprobs),
      version=version,
      finish=finish,
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
    """The places of the tokens that are new since the last time."""
    new = slice(self._taken, len(self.tokens))
    self._taken = len(self.tokens)
    return new

  def logprobs_of(self, tokens: slice, is_chat: bool) -> dict[str, Any]:
    """The log-probs of some tokens in OpenAI's shape. Take the tokens in their order."""
    texts = [self._decode([token]) for token in self.tokens[tokens]]
    values = [max(_LEAST_LOGPROB, value) for value in self.logprobs[tokens]]
    if is_chat:
      content = [
        {"token": text, "logprob": value, "bytes": [*text.encode()], "top_logprobs": []}
        for text, value in zip(texts, values, strict=True)
      ]
      return {"content": content, "refusal": None}
    offsets = [*itertools.accumulate(map(len, texts), initial=self._offset)]
    self._offset = offsets.pop()
    names = "tokens", "token_logprobs", "text_offset"
    return {**dict(zip(names, (texts, values, offsets), strict=True)), "top_logprobs": None}


@dataclasses.dataclass(frozen=True)
class Head:
  """What all pieces of an answer begin with.

  Attributes:
    id: Of the answer.
    created: Seconds since 1970.
    model: Its name.
    request: What is answered.
  """

  id: str
  created: int
  model: str
  request: Request

  def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
    """The answer, once all choices have ended."""
    is_chat = self.request.is_chat
    versions = [choice.versions[-1] for choice in choices if choice.versions]
    return {
      **self._fields("chat.completion" if is_chat else "text_completion"),
      "choices": [self._choice(choice, is_stream=False) for choice in choices],
      "usage": usage(self.request, choices),
      "weights_version": max(versions, default=None),
    }

  def piece(self, choice: Choice, is_first: bool) -> dict[str, Any]:
    """What is new of a choice, for a stream.

    Args:
      choice: The choice.
      is_first: Whether it is the choice's first piece.
    """
    kind = "chat.completion.chunk" if self.request.is_chat else "text_completion"
    made = self._choice(choice, is_stream=True, is_first=is_first)
    version = choice.versions[-1] if choice.versions else None
    counts = {"usage": None} if self.request.include_usage else {}
    return {**self._fields(kind), "choices": [made], "weights_version": version, **counts}

  def last_piece(self, choices: Sequence[Choice]) -> dict[str, Any]:
    """The piece with the counts of tokens, which ends a stream that asks for it."""
    kind = "chat.completion.chunk" if self.request.is_chat else "text_completion"
    return {**self._fields(kind), "choices": [], "usage": usage(self.request, choices)}

  def _fields(self, kind: str) -> dict[str, Any]:
    return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

  def _choice(self, choice: Choice, is_stream: bool, is_first: bool = True) -> dict[str, Any]:
    asked = self.request
    text, calls = choice.take_text()
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
      if is_first:
        made["prompt_token_ids"] = [*choice.prompt]
    return made


def usage(request: Request, choices: Sequence[Choice]) -> dict[str, int]:
  """The counts of tokens. A prompt counts once, however many completions it has."""
  prompt = sum(map(len, request.prompts))
  completion = sum(len(choice.tokens) for choice in choices)
  return {
    "prompt_tokens": prompt,
    "completion_tokens": completion,
    "total_tokens": prompt + completion,
  }


def error(wrong: RequestError) -> dict[str, Any]:
  """The body that says why a request cannot be answered."""
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
  """The content and the calls of a message, or of a part of one.

  Args:
    text: The content.
    calls: Its calls.
    before: How many calls the conversation had before, so that no two have the same id.
    is_stream: Whether it is a part of a stream.
  """
  if not calls:
    return {"content": text}
  numbers = itertools.count(before)
  made = tool_calls([(call_id(next(numbers)), call.name, call.arguments) for call in calls])
  if is_stream:
    made = [{"index": number, **call} for number, call in enumerate(made)]
  return {"content": text or None, "tool_calls": made}


def _sure(text: str, held: Sequence[str]) -> str:
  """The text without an end with which one of `held` may begin."""
  longest = max(map(len, held), default=0)
  for kept in range(max(0, len(text) - longest + 1), len(text)):
    if any(one.startswith(text[kept:]) for one in held):
      return text[:kept]
  return text
