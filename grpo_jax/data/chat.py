"""Conversations to text, through the jinja2 template that comes with a tokenizer.

Templates are code from elsewhere: they run in jinja2's sandbox, with what `transformers` gives them and nothing else.
"""

import datetime
import json
from typing import Any, Callable, Mapping, Sequence

import jinja2
import jinja2.ext
import jinja2.sandbox

from grpo_jax.settings import ConfigError

Messages = Sequence[Mapping[str, Any]]  # each with a text `role` and a text `content`
Render = Callable[[Messages, bool, Mapping[str, str]], str]


def check(messages: Any, where: str) -> None:
  """Raises ConfigError, which begins with `where`, for what is no conversation."""
  if not isinstance(messages, (list, tuple)) or not messages:
    raise ConfigError(
      f"{where}: a conversation must be a list of messages, at least one; got {messages!r:.80}"
    )
  for message in messages:
    if not isinstance(message, Mapping) or not all(
      isinstance(message.get(key), str) for key in ("role", "content")
    ):
      raise ConfigError(
        f"{where}: a message must be an object with a text role and a text content; got {message!r:.80}"
      )


def compiled(source: str, where: str) -> Render:
  """-> render(messages, generation_prompt, names of special tokens). `where` names the template's file in errors.

  Raises ConfigError for a template that is none, and while rendering, where it refuses, fails or reaches for too much.
  """
  try:
    template = _environment().from_string(source)
  except jinja2.TemplateError as error:
    raise _error(where, "cannot be read", error) from None

  def render(messages, generation_prompt, names):
    check(messages, f"the chat template in {where}")
    plain = [
      {key: value for key, value in message.items() if value is not None} for message in messages
    ]
    try:
      return template.render(
        names, messages=plain, add_generation_prompt=generation_prompt, tools=None, documents=None
      )
    except Exception as error:  # the template's own, of whatever kind
      raise _error(where, "cannot render a conversation", error) from None

  return render


def _error(where, what, error):
  return ConfigError(
    f"the chat template in {where} {what}: {type(error).__name__}: {' '.join(str(error).split()):.200}"
  )


def _environment():
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
  )
  environment.filters["tojson"] = _tojson
  environment.globals.update(
    raise_exception=_raise, strftime_now=lambda form: datetime.datetime.now().strftime(form)
  )
  return environment


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
  """jinja2's own would escape <, > and & for HTML."""
  return json.dumps(
    value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
  )


def _raise(message):
  raise jinja2.TemplateError(message)


class _Generation(jinja2.ext.Extension):
  """{% generation %} ... {% endgeneration %}, which marks the assistant's words for other programs: its content."""

  tags = {"generation"}

  def parse(self, parser):
    line = next(parser.stream).lineno
    return jinja2.nodes.Scope(
      parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
    )
