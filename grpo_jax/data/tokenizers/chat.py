"""Renders conversations as text with the chat template of a tokenizer.

A chat template is an untrusted jinja2 program. It runs in a separate process, which restricts its
actions, time and memory: `chat_process.py`.
"""

from collections.abc import Mapping, Sequence
import json
from pathlib import Path
import re
import signal
import subprocess
import sys
import threading
from typing import Any, NoReturn

from grpo_jax import calls
from grpo_jax.data.images.messages import is_part
from grpo_jax.data.tokenizers.tokenizer_files import read_json
from grpo_jax.settings import ConfigError, is_text, shown

SECONDS = 5  # timeout of one conversation, which normally takes well under a millisecond
_OPTIONS = "data.chat_template_kwargs"
_TOGETHER = 64  # conversations in one request to the process, which saves round trips
# A template that compares a content with None, such as `message['content'] is not none`.
_KNOWS_NONE = re.compile(r"""\bcontent['"]?\]?\s*(is\s+(not\s+)?|[=!]=\s*)none\b""", re.IGNORECASE)

# A message has a text `role`, a `content` and perhaps other fields. The content is a text, or a
# list of text parts, {"type": "text", "text": ...}, and image parts, {"type": "image"}. A
# message with `tool_calls` needs no content.
Message = Mapping[str, Any]
Messages = Sequence[Message]  # a conversation


def check_messages(messages: Any, where: str) -> None:
  """Checks that `messages` is a conversation.

  Args:
    messages: Any value.
    where: The origin of the value, with which the error message begins.

  Raises:
    ConfigError: `messages` is empty or not a list of messages.
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
  """A conversation in which a missing content, as beside a tool call, is ""."""
  return [message if message.get("content") else {**message, "content": ""} for message in messages]


def is_conversation(value: Any) -> bool:
  """Whether a value is a nonempty list of messages."""
  return isinstance(value, (list, tuple)) and bool(value) and all(map(_is_message, value))


def find_template(files: Mapping[str, bytes]) -> tuple[str, str]:
  """Finds the chat template in the files of a tokenizer.

  If tokenizer_config.json has several templates, the template named "default" is used.

  Args:
    files: The contents of the files, keyed by name.

  Returns:
    (the source of the template, the name of its file)

  Raises:
    ConfigError: There is no template, or it is damaged.
  """
  name = "chat_template.jinja"
  if name in files:
    try:
      return files[name].decode("utf-8"), name
    except UnicodeDecodeError as error:
      raise ConfigError(
        f"data.tokenizer: {name} beside the tokenizer is not UTF-8 ({error}): save it as UTF-8"
      ) from None
  for file in ("tokenizer_config.json", "chat_template.json"):
    template = _default_template(read_json(files, file).get("chat_template"), file)
    if template:
      return template, file
  raise ConfigError(
    "data.tokenizer: no chat template is beside the tokenizer (chat_template in"
    " tokenizer_config.json, or chat_template.jinja); choose the tokenizer of a chat model, or set"
    " data.chat=False"
  )


def _default_template(found: Any, file: str) -> str | None:
  """The template in `found`, the value of chat_template in a JSON file. None if it has none.

  Raises ConfigError if `found` is neither a template nor a list of named templates.
  """
  if isinstance(found, list):
    named = [x for x in found if isinstance(x, dict) and isinstance(x.get("name"), str)]
    if len(named) == len(found) and all(isinstance(x.get("template"), str) for x in named):
      return {x["name"]: x["template"] for x in named}.get("default")
  elif found is None or isinstance(found, str):
    return found
  raise ConfigError(
    f"data.tokenizer: chat_template in {file} must be a template, or a list of objects with a name"
    f" and a template; got {shown(found)}"
  )


def options_of(entries: Sequence[str]) -> dict[str, Any]:
  """Parses data.chat_template_kwargs into a dict of values by name.

  Args:
    entries: The entries, such as "enable_thinking=False".

  Raises:
    ConfigError: An entry is not NAME=VALUE with a JSON-like value, or its name is one of the
      variables that the run sets.
  """
  # The entries are written like the arguments of a call, whose name only appears in errors.
  _, options = calls.parse(f"chat_template({', '.join(entries)})", _OPTIONS)
  for name in options.keys() & {"messages", "tools", "documents", "add_generation_prompt"}:
    raise ConfigError(f"{_OPTIONS}: the chat template gets {name} from the run; leave it out")
  try:
    json.dumps(options)  # `_Process` sends them as JSON
  except (TypeError, ValueError):
    raise ConfigError(
      f"{_OPTIONS}: {shown(list(entries))} has a value that JSON does not have; write numbers,"
      " strings in quotes, True, False, None, lists or dicts"
    ) from None
  return options


class Template:
  """A chat template, which `chat_process.py` compiles and renders."""

  def __init__(self, source: str, file: str) -> None:
    """Compiles a template in the process, to check it.

    Args:
      source: The text of the template.
      file: The name of its file, for error messages.

    Raises:
      ConfigError: The source is not a jinja2 template.
    """
    self._source, self._file = source, file
    self._knows_none = bool(_KNOWS_NONE.search(source))
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
    """Renders conversations as texts.

    Args:
      conversations: The conversations.
      generation_prompt: Whether a text ends with the header of the assistant's next message.
      given: Other variables of the template, such as {"eos_token": "</s>"}.
      tools: The functions that the assistant may call, as JSON schemas, or None.

    Raises:
      ConfigError: A value is not a conversation, or the template refuses it, fails, violates the
        sandbox, or exceeds the time or memory limit.
    """
    for messages in conversations:
      check_messages(messages, f"the chat template in {self._file}")
    shared = {
      **given,
      "add_generation_prompt": generation_prompt,
      "tools": tools,
      "documents": None,  # transformers sets it, too
    }
    texts: list[str] = []
    for start in range(0, len(conversations), _TOGETHER):
      batch = [
        [*map(self._for_template, messages)]
        for messages in conversations[start : start + _TOGETHER]
      ]
      answer = _PROCESS.ask({"source": self._source, "shared": shared, "conversations": batch})
      if "error" in answer:
        self._refuse("cannot render a conversation", answer["error"])
      texts += answer["texts"]
    if not all(map(is_text, texts)):
      self._refuse("cannot render a conversation", "it makes half of a surrogate pair")
    return texts

  def _for_template(self, message: Message) -> Message:
    """The message as the template gets it.

    A missing content is "", which every template can print. Beside tool calls, it is None if the
    template compares a content with None: DeepSeek-R1's writes calls only then.
    """
    given = _without_none(message)
    is_none = self._knows_none and given.get("tool_calls")
    return given if given.get("content") else {**given, "content": None if is_none else ""}

  def _refuse(self, problem: str, error: str) -> NoReturn:
    raise ConfigError(
      f"the chat template in {self._file} {problem}: {' '.join(error.split()):.240}"
    )


class _Process:
  """The process of `chat_process.py`, which the first question starts and restarts after a death.

  When this process ends, the input of the other ends, and so it ends too.
  """

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._process: subprocess.Popen[bytes] | None = None

  def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
    """Sends a question. Returns the answer (see `chat_process.py`), or an error of the process."""
    # Dates, which Parquet files may have in messages and tools, become texts.
    line = json.dumps(question, default=str).encode() + b"\n"
    with self._lock:
      if self._process is None:
        self._process = subprocess.Popen(
          # -P: the modules beside the script must not hide packages of the same names.
          [sys.executable, "-P", Path(__file__).with_name("chat_process.py"), str(SECONDS)],
          stdin=subprocess.PIPE,
          stdout=subprocess.PIPE,
          start_new_session=True,  # so that Ctrl-C does not reach the new process
        )
      try:
        self._process.stdin.write(line)
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
      except BaseException as error:  # Ctrl-C too, which may leave half a line in a pipe
        self._process.kill()
        if not isinstance(error, OSError):
          self._process = None
          raise
        answer = b""  # the process had already died, which the lines below report
      if answer.endswith(b"\n"):  # else the process died before it had written the whole line
        return json.loads(answer)
      code = self._process.wait()
      self._process = None
    if code == -signal.SIGALRM:
      return {"error": f"it was stopped because it did not end within {SECONDS} seconds"}
    return {"error": f"its process died with exit code {code}"}


_PROCESS = _Process()


def _without_none(value: Any) -> Any:
  """Removes None values, which mean absent fields. In the arguments of calls, None is a value."""
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
