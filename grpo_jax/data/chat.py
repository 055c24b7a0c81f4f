"""Conversations to text, through the chat template that comes with a tokenizer.

A chat template is a jinja2 program that somebody else wrote. It runs in jinja2's sandbox. There it
can use what `transformers` provides to chat templates, and nothing else.
"""

from collections.abc import Mapping, Sequence
import datetime
import json
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from grpo_jax.data.tokenizer_files import read_json
from grpo_jax.settings import ConfigError

# A conversation. Each message has a text `role` and a text `content`, and may have more.
Messages = Sequence[Mapping[str, Any]]


def check(messages: Any, where: str) -> None:
  """Checks that `messages` is a conversation.

  Args:
    messages: Any value.
    where: Where the value comes from: the error message begins with it.

  Raises:
    ConfigError: It is not a list of messages, or it is empty.
  """
  if not isinstance(messages, (list, tuple)) or not messages:
    raise ConfigError(
      f"{where}: a conversation must be a list of messages, at least one; got {messages!r:.80}"
    )
  for message in messages:
    if not _is_message(message):
      raise ConfigError(
        f"{where}: a message must be an object with a text role and a text content;"
        f" got {message!r:.80}"
      )


def find_template(files: Mapping[str, bytes]) -> tuple[str, str]:
  """The chat template among the files of a tokenizer.

  If tokenizer_config.json has several templates, the one with the name "default" is used.

  Args:
    files: Names and contents of the files.

  Returns:
    The source of the template, and the name of the file that it is in.

  Raises:
    ConfigError: There is no template.
  """
  if "chat_template.jinja" in files:
    return files["chat_template.jinja"].decode("utf-8"), "chat_template.jinja"
  for file in ("tokenizer_config.json", "chat_template.json"):
    template = read_json(files, file).get("chat_template")
    if isinstance(template, list):
      sources = {named["name"]: named["template"] for named in template}
      template = sources.get("default")
    if template:
      return template, file
  raise ConfigError(
    "data.tokenizer: no chat template is beside the tokenizer (chat_template in"
    " tokenizer_config.json, or chat_template.jinja); choose the tokenizer of a chat model, or set"
    " data.chat=False"
  )


class Template:
  """A chat template, compiled."""

  def __init__(self, source: str, file: str) -> None:
    """Compiles a template.

    Args:
      source: The text of the template.
      file: The name of its file, for error messages.

    Raises:
      ConfigError: The source is not a jinja2 template.
    """
    self._file = file
    try:
      self._template = _environment().from_string(source)
    except jinja2.TemplateError as error:
      raise self._error("cannot be read", error) from None

  def render(
    self, messages: Messages, generation_prompt: bool, special_tokens: Mapping[str, str]
  ) -> str:
    """The conversation as text.

    Args:
      messages: The conversation.
      generation_prompt: Whether the text ends with the marks that open the assistant's answer.
      special_tokens: The special tokens that the template may use, such as {"eos_token": "</s>"}.

    Raises:
      ConfigError: `messages` is not a conversation, or the template refuses it, fails, or tries
        something that the sandbox forbids.
    """
    check(messages, f"the chat template in {self._file}")
    messages_without_none = [
      {key: value for key, value in message.items() if value is not None} for message in messages
    ]
    try:
      return self._template.render(
        special_tokens,
        messages=messages_without_none,
        add_generation_prompt=generation_prompt,
        tools=None,
        documents=None,
      )
    except Exception as error:  # the template is a program, so it can raise any exception
      raise self._error("cannot render a conversation", error) from None

  def _error(self, problem: str, error: Exception) -> ConfigError:
    message = " ".join(str(error).split())
    return ConfigError(
      f"the chat template in {self._file} {problem}: {type(error).__name__}: {message:.200}"
    )


def _is_message(message: Any) -> bool:
  if not isinstance(message, Mapping):
    return False
  return all(isinstance(message.get(key), str) for key in ("role", "content"))


def _environment() -> jinja2.Environment:
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[jinja2.ext.loopcontrols, _GenerationBlock],
  )
  environment.filters["tojson"] = _tojson
  environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
  return environment


def _tojson(
  value: Any,
  ensure_ascii: bool = False,
  indent: int | None = None,
  separators: tuple[str, str] | None = None,
  sort_keys: bool = False,
) -> str:
  """Replaces jinja2's own filter, which escapes <, > and & for HTML."""
  return json.dumps(
    value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
  )


def _raise_exception(message: str) -> NoReturn:
  raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
  return datetime.datetime.now().strftime(format)


class _GenerationBlock(jinja2.ext.Extension):
  """Renders `{% generation %} TEXT {% endgeneration %}` as TEXT.

  The block marks the words of the assistant for programs that build a loss mask from it.
  """

  tags = {"generation"}

  def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
    line = next(parser.stream).lineno
    content = parser.parse_statements(("name:endgeneration",), drop_needle=True)
    return jinja2.nodes.Scope(content, lineno=line)
