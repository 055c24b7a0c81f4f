"""Parses the JSON of a request into a `Request`, and checks every field. Pure functions."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import hashlib
import secrets
from typing import Any, NamedTuple

from grpo_jax.data.images.source import AnyImage
from grpo_jax.files import json_object
from grpo_jax.sampler.filters import FILTERS, Filter
from grpo_jax.sampler.logits import RowSettings
from grpo_jax.serving.engine import MOST_BIASED
from grpo_jax.serving.images import SeenImages, UnreadImages
from grpo_jax.settings import SMALLEST_FLOAT, is_text, shown

DEEPEST = 64  # levels of nested lists and objects
_MOST_STOPS, _LONGEST_STOP = 16, 1000  # stop texts, and characters of a stop text
GOES_ON = "goes_on"  # key in the options of a template: the answer continues the last message
LONGEST = "flag --max_prompt_tokens"  # sets the longest prompt of `serve`

# Parameters that are accepted and ignored, because they change no answer of this server.
IGNORED = {
  "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
}  # fmt: skip
# Unsupported parameters, and the values with which they change nothing. Other values are refused.
NEUTRAL: dict[str, tuple[Any, ...]] = {
  "presence_penalty": (0,),
  "frequency_penalty": (0,),
  "repetition_penalty": (1,),
  "add_generation_prompt": (True,),
  "best_of": (1,),
  "suffix": ("",),
  "function_call": ("none",),
  "functions": ([],),
  "modalities": (["text"],),
  "ignore_eos": (False,),
}
# Parameters of both /v1/completions and /v1/chat/completions.
SHARED = {
  "model", "n", "stop", "seed", "temperature", "max_tokens", "min_tokens", "logprobs", "stream",
  "stream_options", "return_token_ids", "stop_token_ids", "logit_bias", "skip_special_tokens",
}  # fmt: skip


class RequestError(Exception):
  """A request that cannot be answered.

  Attributes:
    status: The HTTP status.
    message: The error and how to avoid it, in one line.
    param: The wrong parameter, or None.
    code: An identifier of the error for programs, or "".
  """

  def __init__(self, message: str, param: str | None = None, status: int = 400, code: str = ""):
    """See the attributes."""
    super().__init__(message)
    self.status, self.message, self.code = status, _as_text(message), code
    self.param = None if param is None else _as_text(param)


def _as_text(said: str) -> str:
  """Makes a text from a client valid UTF-8: lone surrogates become escapes such as \\ud800."""
  return said.encode("utf-8", "backslashreplace").decode()


class Limits(NamedTuple):
  """The limits of requests.

  Attributes:
    model: The only valid value of `model`.
    vocabulary: V. Token ids are smaller.
    prompt_tokens: The longest prompt.
    max_tokens: The longest completion.
    choices: The most completions of a request, over all its prompts.
    longest: The flag or key that sets prompt_tokens, for errors.
    filters: The filters that a request may set, by name.
    sees_images: Whether the model accepts images.
  """

  model: str
  vocabulary: int
  prompt_tokens: int
  max_tokens: int
  choices: int
  longest: str = LONGEST
  filters: Mapping[str, Filter] = FILTERS
  sees_images: bool = False


class Form(NamedTuple):
  """The form that an answer must have.

  Attributes:
    param: The parameter of the request that demands the form.
    schema: The JSON schema of the answer, if there are no tools.
    tools: The tools of which the answer must call one.
  """

  param: str
  schema: dict[str, Any]
  tools: tuple[dict[str, Any], ...] = ()


class Texts(NamedTuple):
  """Functions that turn texts into token ids. They may raise ConfigError.

  Attributes:
    encode: (prompt) -> token ids.
    render: (messages, tools or None, options, images or None) -> token ids of a conversation. The
      options are variables of the chat template. With `GOES_ON` among them, the answer continues
      the last message. The messages have placeholders for the images.
    look: (images) -> the images with their sizes. None if the model accepts no images.
  """

  encode: Callable[[str], Sequence[int]]
  render: Callable[
    [list[dict[str, Any]], list[dict[str, Any]] | None, dict[str, Any], UnreadImages | None],
    Sequence[int],
  ]
  look: Callable[[Sequence[AnyImage]], UnreadImages] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """A request for completions.

  Attributes:
    prompts: Token ids of each prompt.
    n: How many completions each prompt gets.
    seed: The seed of the random numbers, which also depend on the number of the choice.
    settings: How rows draw, as numbers.
    stop: Texts that end a completion.
    logprobs: Whether to return the log-probs of the tokens.
    alternatives: How many of the likeliest tokens to return for each token.
    bias: Token id -> number to add to its logit.
    shows_special: Whether texts include special tokens.
    echo: If answers begin with their prompts: the text of each prompt, or None for a prompt of
      token ids. None if they do not.
    is_chat: Whether the request is a conversation.
    tools: The tools whose calls are parsed from the answer.
    calls_before: How many tool calls the messages have. Ids of new calls are numbered after them.
    most_calls: The most tool calls of the answer. Others are dropped. None: no limit.
    stop_ids: Token ids that end a completion, besides those of the model. They stay in the answer.
    form: The form that the answer must have, or None.
    guides: With a form, the `Guided` of each choice, which restricts its tokens.
    unread: The images of the conversation before they are decoded, or None.
    seen: The decoded images of the conversation, or None.
    stream: Whether tokens are sent as soon as they are drawn.
    include_usage: Whether the last event of a stream has token counts.
    return_token_ids: Whether to return the ids of prompts and completions.
    repeated: The fields that a response of /v1/responses repeats. None for other paths.
  """

  prompts: tuple[tuple[int, ...], ...]
  n: int
  seed: int
  settings: RowSettings
  stop: tuple[str, ...]
  logprobs: bool
  alternatives: int
  bias: Mapping[int, float]
  shows_special: bool
  echo: tuple[str | None, ...] | None
  is_chat: bool
  tools: tuple[dict[str, Any], ...]
  calls_before: int
  most_calls: int | None
  stop_ids: tuple[int, ...]
  form: Form | None
  stream: bool
  include_usage: bool
  return_token_ids: bool
  guides: Sequence[Any] = ()
  unread: UnreadImages | None = None
  seen: SeenImages | None = None
  repeated: Mapping[str, Any] | None = None

  @property
  def choices(self) -> int:
    """How many completions the request has."""
    return len(self.prompts) * self.n

  @property
  def is_scored(self) -> bool:
    """Whether the answer has log-probs of the prompts' tokens."""
    return self.logprobs and self.echo is not None


def read_json(body: bytes) -> dict[str, Any]:
  """Parses a body.

  Raises:
    RequestError: The body is not a JSON object, or is nested too deeply.
  """
  try:
    value = json_object(body)
  except ValueError as error:
    raise RequestError(f"the body is not a JSON object: {error}", code="invalid_json") from None
  if is_too_deep(value):
    raise RequestError(f"the body is nested deeper than {DEEPEST} levels", code="invalid_json")
  return value


def is_too_deep(value: Any) -> bool:
  """Whether lists and objects of a parsed JSON value are nested deeper than `DEEPEST` levels."""
  layer, depth = [value] if isinstance(value, (dict, list)) else [], 0
  while layer and depth <= DEEPEST:
    depth += 1
    inside = [x.values() if isinstance(x, dict) else x for x in layer]
    layer = [x for values in inside for x in values if isinstance(x, (dict, list))]
  return depth > DEEPEST


def row_number(seed: int, choice: int) -> int:
  """The int32 that determines the random numbers of a choice. The choices of a request differ."""
  digest = hashlib.blake2b(str(seed).encode(), digest_size=4).digest()
  return (int.from_bytes(digest, "little") + choice) % 2**32 - 2**31


def make_request(
  body: Mapping[str, Any],
  limits: Limits,
  prompts: tuple[tuple[int, ...], ...],
  logprobs: int | None,
  extra: dict[str, Any],
) -> Request:
  """Parses the parameters that completions and chats share. Raises RequestError.

  Args:
    body: The body.
    limits: The limits of requests.
    prompts: The token ids of the prompts.
    logprobs: How many alternatives to return for each token. None: no log-probs.
    extra: Further fields of the `Request`, and `max_tokens`, the default length, if it differs.
  """
  defaults = dict[str, Any](echo=None, is_chat=False, tools=(), calls_before=0, most_calls=None)
  extra = defaults | {"form": None} | extra
  _check_model(body, limits)
  for number, prompt in enumerate(prompts):
    _check_prompt(prompt, limits, "messages" if extra["is_chat"] else "prompt", number)
  most, why = limits.choices // len(prompts), f"{limits.choices} choices over all prompts"
  n = whole(body, "n", 1, (1, most), why)
  settings = _settings(body, limits, extra.pop("max_tokens", limits.max_tokens), extra)
  options = body.get("stream_options")
  if options is not None and not isinstance(options, dict):
    raise RequestError("stream_options must be an object", "stream_options")
  for name, value in (options or {}).items():
    # An unknown option that is null or false asks for nothing, so it is accepted.
    if name != "include_usage" and value is not None and value is not False:
      raise RequestError(
        f"stream_options: this server does not know {shown(name)}", "stream_options"
      )
  seed = whole(body, "seed", None, (-(2**63), 2**64 - 1))
  return Request(
    prompts=prompts,
    n=n,
    seed=secrets.randbits(63) if seed is None else seed,
    settings=settings,
    stop=_stops(body),
    stop_ids=_stop_ids(body, limits),
    logprobs=logprobs is not None,
    alternatives=logprobs or 0,
    bias=_bias(body, limits),
    shows_special=body.get("skip_special_tokens") is not None
    and not flag(body, "skip_special_tokens"),
    stream=flag(body, "stream"),
    include_usage=flag(options or {}, "include_usage"),
    return_token_ids=flag(body, "return_token_ids"),
    **extra,
  )


def _settings(
  body: Mapping[str, Any], limits: Limits, default: int, extra: Mapping[str, Any]
) -> RowSettings:
  """How rows draw. `default` is max_tokens if the body has none. `extra` is as in make_request."""
  default = min(default, limits.max_tokens)
  least = 0 if extra["echo"] else 1  # with echo, a client may only want the prompt's log-probs
  # As in vLLM, a larger number is reduced to the limit.
  max_tokens = min(limits.max_tokens, whole(body, "max_tokens", default, (least, 2**31 - 1)))
  temperature = _number(body, "temperature", 1.0, (0, 1000))
  if temperature and temperature < SMALLEST_FLOAT:
    raise RequestError("temperature: it is too small; set 0 for the likeliest token", "temperature")
  settings = RowSettings(
    temperature=temperature,
    min_tokens=whole(body, "min_tokens", 0, (0, max_tokens)),
    max_tokens=max_tokens,
  )
  if extra["form"] and settings.min_tokens:
    raise RequestError(
      "min_tokens: the form of the answer says when it ends; leave it out", "min_tokens"
    )
  values = {name: _filter_value(body, name, one) for name, one in limits.filters.items()}
  if settings.temperature == 0:  # the filters keep the likeliest token, so they change nothing
    values = {name: one.off for name, one in limits.filters.items()}
  return settings.with_filters(values)


def check_names(body: Mapping[str, Any], known: set[str]) -> None:
  """Raises RequestError for parameters that are unknown, or have unsupported values."""
  for name, value in body.items():
    if name in known or name in IGNORED or value is None:
      continue
    if name == "add_generation_prompt" and value is False and body.get("continue_final_message"):
      continue  # clients of vLLM must set it so
    if name not in NEUTRAL:
      raise RequestError(f"{name!s:.100}: this server does not know the parameter", f"{name:.100}")
    # `==` also accepts 0 and 1 for False and True, and the reverse.
    if not any(value == neutral for neutral in NEUTRAL[name]):
      raise RequestError(
        f"{name} is {shown(value)}: this server does not support it; leave it out", name
      )


def _check_model(body: Mapping[str, Any], limits: Limits) -> None:
  name = body.get("model")
  if name is None:
    return
  if not isinstance(name, str):
    raise RequestError("model must be a text", "model")
  if name != limits.model:
    raise RequestError(
      f"there is no model {shown(name)}: this server has {limits.model!r}",
      "model",
      404,
      "model_not_found",
    )


def are_ids(values: list[Any]) -> bool:
  return all(type(value) is int for value in values)


def _check_prompt(prompt: tuple[int, ...], limits: Limits, name: str, number: int) -> None:
  """Raises RequestError for a prompt that is empty, too long or has unknown token ids."""
  if not prompt:
    raise RequestError(f"{name}: prompt {number} is empty; it must have a token", name)
  if len(prompt) > limits.prompt_tokens:
    raise RequestError(
      f"{name}: prompt {number} has {len(prompt)} tokens and this server takes at most"
      f" {limits.prompt_tokens} ({limits.longest})",
      name,
      code="context_length_exceeded",
    )
  wrong = next((i for i in prompt if not 0 <= i < limits.vocabulary), None)
  if wrong is not None:
    raise RequestError(
      f"{name}: token id {shown(wrong)} is not in the vocabulary, 0 to {limits.vocabulary - 1}",
      name,
    )


def _stops(body: Mapping[str, Any]) -> tuple[str, ...]:
  given = body.get("stop")
  stops = [] if given is None else [given] if isinstance(given, str) else given
  if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
    raise RequestError("stop must be a text or a list of texts, none of them empty", "stop")
  if not all(map(is_text, stops)):
    raise RequestError("stop: it contains half of a surrogate pair", "stop")
  if len(stops) > _MOST_STOPS or any(len(stop) > _LONGEST_STOP for stop in stops):
    raise RequestError(
      f"stop: at most {_MOST_STOPS} texts of at most {_LONGEST_STOP} characters", "stop"
    )
  return tuple(stops)


def _stop_ids(body: Mapping[str, Any], limits: Limits) -> tuple[int, ...]:
  given = body.get("stop_token_ids")
  ids = [] if given is None else given
  if not isinstance(ids, list) or not are_ids(ids) or len(ids) > _MOST_STOPS:
    raise RequestError(
      f"stop_token_ids must be a list of at most {_MOST_STOPS} token ids", "stop_token_ids"
    )
  if any(not 0 <= one < limits.vocabulary for one in ids):
    raise RequestError(
      f"stop_token_ids: all must be at least 0 and at most {limits.vocabulary - 1}",
      "stop_token_ids",
    )
  return tuple(ids)


def _bias(body: Mapping[str, Any], limits: Limits) -> dict[int, float]:
  """Parses logit_bias, whose keys are token ids as texts."""
  given = body.get("logit_bias")
  if given is None:
    return {}
  wrong = RequestError(
    f"logit_bias must be an object of at most {MOST_BIASED} token ids, 0 to"
    f" {limits.vocabulary - 1}, with numbers from -100 to 100",
    "logit_bias",
  )
  if not isinstance(given, dict) or len(given) > MOST_BIASED:
    raise wrong
  found: dict[int, float] = {}
  for token, value in given.items():
    is_id = token.isascii() and token.isdecimal() and len(token) < 10  # `int` refuses long texts
    if not is_id or int(token) >= limits.vocabulary or type(value) not in (int, float):
      raise wrong
    if not -100 <= value <= 100:
      raise wrong
    found[int(token)] = float(value)
  return found


def flag(body: Mapping[str, Any], name: str) -> bool:
  value = body.get(name)
  if value is not None and not isinstance(value, bool):
    raise RequestError(f"{name} must be true or false, got {shown(value)}", name)
  return bool(value)


def whole(
  body: Mapping[str, Any], name: str, default: Any, bounds: tuple[int, int], why: str = ""
) -> Any:
  """Returns the integer body[name], or the default. Outside of `bounds`, raises RequestError."""
  value = body.get(name)
  if value is None:
    return default
  if type(value) is not int:
    raise RequestError(f"{name} must be a whole number, got {shown(value)}", name)
  return _within(value, name, bounds, why)


def _number(
  body: Mapping[str, Any], name: str, default: float, bounds: tuple[float, float]
) -> float:
  """Returns the number body[name], or the default. Raises RequestError outside of `bounds`."""
  value = body.get(name)
  if value is None:
    return default
  if type(value) not in (int, float):
    raise RequestError(f"{name} must be a number, got {shown(value)}", name)
  return float(_within(value, name, bounds, ""))


def _filter_value(body: Mapping[str, Any], name: str, one: Filter) -> float:
  """Returns the value of a filter, or the value that turns it off. Raises RequestError."""
  least, most = one.limits
  if isinstance(one.off, int):  # -1 of top_k is off, too, as in vLLM
    return max(one.off, whole(body, name, one.off, (int(least), int(most))))
  return _number(body, name, one.off, one.limits)


def _within(value: Any, name: str, bounds: tuple[float, float], why: str) -> Any:
  least, most = bounds  # NaN fails the comparison
  if not least <= value <= most:
    note = f" ({why})" if why else ""
    raise RequestError(
      f"{name} is {shown(value)}: it must be at least {least} and at most {most}{note}", name
    )
  return value
