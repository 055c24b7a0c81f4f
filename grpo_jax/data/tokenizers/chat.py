"""Conversations to text, through the chat template that comes with a tokenizer.

A chat template is a jinja2 program that somebody else wrote. It runs in a process of its own, which
limits what it may do, and how much time and memory it may take: `chat_process.py`.
"""

from collections.abc import Mapping, Sequence
import json
from pathlib import Path
import signal
import subprocess
import sys
import threading
from typing import Any, NoReturn

from grpo_jax import calls
from grpo_jax.data.images.messages import is_part
from grpo_jax.data.tokenizers.tokenizer_files import read_json
from grpo_jax.settings import ConfigError, is_text, shown

SECONDS = 5  # for one conversation, which takes well under a millisecond
_OPTIONS = "data.chat_template_kwargs"
_TOGETHER = 64  # conversations that are sent to the process at once, which saves time

# A message has a text `role` and a `content`, and may have more. A content is a text, or a list of
# parts: {"type": "text", "text": ...} and, where an image comes, {"type": "image"}. A message with
# `tool_calls` may have none.
Message = Mapping[str, Any]
Messages = Sequence[Message]  # a conversation


def check_messages(messages: Any, where: str) -> None:
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
        f"{where}: a message must be an object with a text role and a content, which is a text or a"
        f" list of parts, texts and images, and may be missing beside tool_calls; got"
        f" {message!r:.80}"
      )


def with_contents(messages: Messages) -> Messages:
  """A conversation in which each message has a content: that of a call without one is no text."""
  return [message if message.get("content") else {**message, "content": ""} for message in messages]


def is_conversation(value: Any) -> bool:
  """Whether a value is a list of messages, at least one."""
  return isinstance(value, (list, tuple)) and bool(value) and all(map(_is_message, value))


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


def options_of(entries: Sequence[str]) -> dict[str, Any]:
  """The values of data.chat_template_kwargs, by their names.

  Args:
    entries: The entries, such as "enable_thinking=False".

  Raises:
    ConfigError: One is not NAME=VALUE with a plain value, or has a name that is not free.
  """
  _, options = calls.parse(f"chat_template({', '.join(entries)})", _OPTIONS)
  for name in options.keys() & {"messages", "tools", "documents", "add_generation_prompt"}:
    raise ConfigError(f"{_OPTIONS}: the chat template gets {name} from the run; leave it out")
  try:
    json.dumps(options)
  except (TypeError, ValueError):
    raise ConfigError(
      f"{_OPTIONS}: {shown(list(entries))} has a value that JSON does not have; write numbers,"
      " strings in quotes, True, False, None, lists or dicts"
    ) from None
  return options


class Template:
  """A chat template."""

  def __init__(self, source: str, file: str) -> None:
    """Compiles a template.

    Args:
      source: The text of the template.
      file: The name of its file, for error messages.

    Raises:
      ConfigError: The source is not a jinja2 template.
    """
    self._source, self._file = source, file
    answer = _PROCESS.ask({"source": source, "shared": {}, "conversations": []})
    if "error" in answer:
      self._refuse("cannot be read", answer["error"])

  def render(
    self,
    conversations: Sequence[Messages],
    generation_prompt: bool,
    given: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None = None,
  ) -> list[str]:
    """Conversations as texts.

    Args:
      conversations: The conversations.
      generation_prompt: Whether a text ends with the marks that open the assistant's answer.
      given: Further variables of the template, such as {"eos_token": "</s>"}.
      tools: The functions that the assistant may call, as JSON schemas, or None.

    Raises:
      ConfigError: One of them is not a conversation, or the template refuses it, fails, tries
        something that the sandbox forbids, or takes too much time or memory.
    """
    for messages in conversations:
      check_messages(messages, f"the chat template in {self._file}")
    shared = {
      **given,
      "add_generation_prompt": generation_prompt,
      "tools": tools,
      "documents": None,
    }
    texts: list[str] = []
    for start in range(0, len(conversations), _TOGETHER):
      some = [
        _without_none(with_contents(messages))
        for messages in conversations[start : start + _TOGETHER]
      ]
      answer = _PROCESS.ask({"source": self._source, "shared": shared, "conversations": some})
      if "error" in answer:
        self._refuse("cannot render a conversation", answer["error"])
      texts += answer["texts"]
    if not all(map(is_text, texts)):
      self._refuse("cannot render a conversation", "it makes half of a surrogate pair")
    return texts

  def _refuse(self, problem: str, error: str) -> NoReturn:
    raise ConfigError(
      f"the chat template in {self._file} {problem}: {' '.join(error.split()):.240}"
    )


class _Process:
  """The process of `chat_process.py`. It is started when it is first needed, and after its death.

  It ends when this process does, because its input then ends.
  """

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._process: subprocess.Popen[bytes] | None = None

  def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a question, as `chat_process.py` describes both."""
    # A Parquet file may have dates in messages and tools, whose texts a template writes.
    line = json.dumps(question, default=str).encode() + b"\n"
    with self._lock:
      if self._process is None:
        self._process = subprocess.Popen(
          [sys.executable, "-P", Path(__file__).with_name("chat_process.py"), str(SECONDS)],
          stdin=subprocess.PIPE,
          stdout=subprocess.PIPE,
          start_new_session=True,  # so that Ctrl-C reaches this process alone
        )
      try:
        self._process.stdin.write(line)
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
      except BaseException as error:  # Ctrl-C too: what is half sent or half read is lost
        self._process.kill()
        if not isinstance(error, OSError):
          self._process = None
          raise
        answer = b""
      if answer.endswith(b"\n"):
        return json.loads(answer)
      code = self._process.wait()
      self._process = None
    if code == -signal.SIGALRM:
      return {"error": f"it was stopped because it did not end within {SECONDS} seconds"}
    return {"error": f"its process died with exit code {code}"}


_PROCESS = _Process()


def _without_none(value: Any) -> Any:
  """Messages without nulls, which mean that something is missing. In arguments, null is a value."""
  if isinstance(value, Mapping):
    return {
      key: x if key == "arguments" else _without_none(x)
      for key, x in value.items()
      if x is not None or key == "arguments"
    }
  return [*map(_without_none, value)] if isinstance(value, (list, tuple)) else value


def _is_message(message: Any) -> bool:
  if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
    return False
  content = message.get("content")
  if content is None:
    return bool(message.get("tool_calls"))
  if isinstance(content, (list, tuple)):
    return all(map(is_part, content))
  return isinstance(content, str)
