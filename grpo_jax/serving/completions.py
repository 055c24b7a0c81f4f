"""Parses a body of /v1/completions into a `Request`. Pure functions."""

from collections.abc import Mapping
from typing import Any

from grpo_jax.serving.requests import (
  SHARED,
  Limits,
  Request,
  RequestError,
  Texts,
  are_ids,
  check_names,
  flag,
  make_request,
  whole,
)
from grpo_jax.settings import ConfigError, is_text

_DEFAULT_TOKENS = 16  # as OpenAI's reference says
_MOST_ALTERNATIVES = 5  # as OpenAI's reference says
_KNOWN = SHARED | {"prompt", "echo"}


def completion_request(body: Mapping[str, Any], limits: Limits, texts: Texts) -> Request:
  """Parses a body of /v1/completions. Raises RequestError if any field is wrong."""
  check_names(body, _KNOWN | {*limits.filters})
  prompts = _prompts(body, limits, texts)
  echo = None
  if flag(body, "echo"):
    given = [body["prompt"]] if isinstance(body["prompt"], str) else body["prompt"]
    texts_of = [one if isinstance(one, str) else None for one in given]
    echo = tuple(texts_of[: len(prompts)])  # a single prompt of token ids has an entry for each id
  logprobs = whole(body, "logprobs", None, (0, _MOST_ALTERNATIVES))
  return make_request(
    body, limits, prompts, logprobs, {"max_tokens": _DEFAULT_TOKENS, "echo": echo}
  )


def _prompts(body: Mapping[str, Any], limits: Limits, texts: Texts) -> tuple[tuple[int, ...], ...]:
  """Tokenizes `prompt`: a text, a list of texts, a list of token ids, or a list of such lists."""
  given = body.get("prompt")
  if isinstance(given, str) or (isinstance(given, list) and given and are_ids(given)):
    given = [given]  # a single prompt
  wrong = RequestError(
    "prompt must be a text, a list of texts, token ids or lists of them", "prompt"
  )
  if not isinstance(given, list) or not given or len({type(one) for one in given}) > 1:
    raise wrong
  if len(given) > limits.choices:
    raise RequestError(
      f"prompt has {len(given)} prompts and this server takes at most {limits.choices}", "prompt"
    )
  prompts = []
  for one in given:
    if isinstance(one, str):
      if not is_text(one):
        raise RequestError("prompt: it has half of a surrogate pair", "prompt")
      try:
        prompts.append(tuple(texts.encode(one)))
      except ConfigError as error:
        raise RequestError(f"prompt: {error}", "prompt") from None
    elif isinstance(one, list) and are_ids(one):
      prompts.append(tuple(one))
    else:
      raise wrong
  return tuple(prompts)
