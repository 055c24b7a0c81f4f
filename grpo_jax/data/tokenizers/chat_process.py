"""The process that runs chat templates. `chat.py` starts it.

A chat template may loop forever, or fill memory with a few characters ("a" * 10 ** 10). The main
process could not stop both. So a template runs here: in jinja2's sandbox, with only the functions
that `transformers` provides to chat templates, and under limits of the operating system.

Each line of stdin is a question: {"source": the template, "shared": the variables of every
conversation, "conversations": lists of messages}. Each line of stdout is an answer: {"texts": ...}
or {"error": ...}. The command-line argument is the timeout of one conversation in seconds.

This file imports nothing from grpo_jax, so that it starts fast.
"""

import datetime
import functools
import json
import resource
import signal
import sys
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

_MEMORY = 1 << 30  # bytes
_LONGEST = 10_000_000  # the most characters of a rendered conversation


def main() -> None:
  # Some systems cannot limit memory. All can limit time.
  hard = resource.getrlimit(resource.RLIMIT_AS)[1]
  limit = _MEMORY if hard == resource.RLIM_INFINITY else min(_MEMORY, hard)
  try:
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
  except (ValueError, OSError):
    pass
  for line in sys.stdin.buffer:
    answer = json.dumps(_answer(int(sys.argv[1]), **json.loads(line)))
    signal.alarm(0)
    sys.stdout.write(f"{answer}\n")
    sys.stdout.flush()


def _answer(
  seconds: int, source: str, shared: dict[str, Any], conversations: list[list[dict[str, Any]]]
) -> dict[str, Any]:
  """Renders conversations: {"texts": ...}, or {"error": ...} if the template fails."""
  texts = []
  try:
    # SIGALRM has no handler, so it ends the process even inside a C function.
    signal.alarm(seconds)  # for the compilation, and below for each conversation
    template = _compiled(source)
    for messages in conversations:
      signal.alarm(seconds)
      texts.append(template.render(shared, messages=messages))
      if len(texts[-1]) > _LONGEST:
        return {"error": f"its text has more than {_LONGEST} characters"}
    return {"texts": texts}
  except Exception as error:  # the template is a program, so it can raise any exception
    return {"error": f"{type(error).__name__}: {str(error):.1000}"}


@functools.lru_cache(8)
def _compiled(source: str) -> jinja2.Template:
  return _environment().from_string(source)


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
  """Replaces jinja2's filter, which escapes <, > and & for HTML."""
  return json.dumps(
    value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
  )


def _raise_exception(message: str) -> NoReturn:
  raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
  return datetime.datetime.now().strftime(format)


class _GenerationBlock(jinja2.ext.Extension):
  """Renders `{% generation %} TEXT {% endgeneration %}` as TEXT.

  Other programs build a loss mask for the assistant's words from this block.
  """

  tags = {"generation"}

  def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
    line = next(parser.stream).lineno
    content = parser.parse_statements(("name:endgeneration",), drop_needle=True)
    return jinja2.nodes.Scope(content, lineno=line)


if __name__ == "__main__":
  main()
