"""Parses tool calls in a message, in the format of each model family.

Each public function parses one format. The docstring of tool_calls.py has an example of each.
"""

import ast
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
import json
import math
import re
from typing import Any, NamedTuple
import warnings

from grpo_jax.environments.arguments import UnquotedText, first_json

# By the name of each tool, the names of its parameters. Empty if the tools are unknown.
Names = Mapping[str, Collection[str]]
Calls = list[tuple[str, dict[str, Any]]]  # (name of the function, arguments) of each call

HERMES = ("<tool_call>", "</tool_call>")
GEMMA4 = ("<|tool_call>", "<tool_call|>")
GRANITE = ("<|tool_call|>", "<|/tool_call|>")
OLMO3 = ("<function_calls>", "</function_calls>")
DEEPSEEK = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
DEEPSEEK_NAME, DEEPSEEK_LIST = "<｜tool▁sep｜>", ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
QUOTE = '<|"|>'
_FUNCTION, _PARAMETER = ("<function=", "</function>"), ("<parameter=", "</parameter>")
_KEY, _VALUE = ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>")
_MISTRAL_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]+\s*)?(\[ARGS\]\s*|(?=\{))")
_GEMMA4_NAMED = re.compile(r"call:([\w.-]+)\s*")
_GEMMA4_WORD = re.compile(r"[^,{}\[\]]*")
_HARMONY_MESSAGE = "<|message|>"
_HARMONY_END = re.compile(r"<\|(?:end|call|return|start|message)\|>")
_HARMONY_NAMED = re.compile(r"(?:^|\s)to=(?:functions\.)?([\w.-]+)")
_DEEPEST = 64  # levels of lists and objects in a call of Gemma 4. Python limits recursion


class Read(NamedTuple):
  """The calls that were found in a text, and the rest of the text.

  Attributes:
    content: The text without the well-formed calls. Malformed calls remain in it.
    calls: The name of each function, and its arguments. An `UnquotedText` had no quotes.
    malformed: For each malformed call, an error line for the model.
  """

  content: str
  calls: Calls
  malformed: list[str]


def hermes(text: str, names: Names) -> Read:
  """Parses JSON between tags."""
  del names
  return _tagged(lambda body: _json_calls(body, ("arguments",)), text, HERMES)


def qwen3_coder(text: str, names: Names) -> Read:
  """Parses <function=...> and <parameter=...> elements between tags. Values are unquoted."""

  def parsed(body: str) -> tuple[Calls, list[str]]:
    calls: Calls = []
    for function, inner in _functions(body):
      calls.append((function, dict(_parameters(inner, names.get(function)))))
    problem = "the call is not well-formed: it needs <function=NAME> and </function>"
    return calls, [] if calls else [problem]

  return _tagged(parsed, text, HERMES)


def glm4(text: str, names: Names) -> Read:
  """Parses a name, followed by <arg_key> and <arg_value> elements, between tags."""
  del names

  def parsed(body: str) -> tuple[Calls, list[str]]:
    head, *pairs = body.split(_KEY[0])
    if not head.strip() or len(head.split()) != 1:
      return [], ["the call is not well-formed: it needs the name of one function"]
    arguments = {}
    for pair in pairs:
      key, closed, rest = pair.partition(_KEY[1])
      _, opened, value = rest.partition(_VALUE[0])
      if not closed or not opened:
        return [], [f"the call of {head.strip()!r:.80}: it needs <arg_key> and <arg_value>"]
      arguments[key.strip()] = UnquotedText(value.split(_VALUE[1])[0])
    return [(head.strip(), arguments)], []

  return _tagged(parsed, text, HERMES)


def gemma4(text: str, names: Names) -> Read:
  """Parses call:NAME{KEY:VALUE} between tags. Texts are quoted with the special token `QUOTE`."""
  del names
  return _tagged(_gemma4_call, text, GEMMA4)


def granite(text: str, names: Names) -> Read:
  """Parses a JSON list after a tag. The closing tag is optional."""
  del names
  content, mark, body = text.partition(GRANITE[0])
  if not mark:
    return Read(text, [], [])
  calls, problems = _json_calls(body.split(GRANITE[1])[0], ("arguments",))
  return Read(content.strip() if calls else text, calls, problems)


def deepseek(text: str, names: Names) -> Read:
  """Parses NAME and JSON, or "function", NAME and a block of JSON, between tags."""
  del names
  found = _tagged(_deepseek_call, text, DEEPSEEK)
  content = found.content
  for mark in DEEPSEEK_LIST if found.calls else ():
    content = content.replace(mark, "")
  return Read(content.strip() if found.calls else text, found.calls, found.malformed)


def gpt_oss(text: str, names: Names) -> Read:
  """Parses messages of the form HEADER<|message|>BODY<|end|>. Some other tokens end them, too.

  A message is a call if its header names a function, as in to=functions.NAME. Its body contains the
  arguments as JSON.
  """
  del names
  calls: Calls = []
  problems, content = list[str](), list[str]()
  start = 0  # where the current message begins
  content_from = 0  # all text before this index is in `content` already, or was a call
  while (mark := text.find(_HARMONY_MESSAGE, start)) >= 0:
    header, body_from = text[start:mark], mark + len(_HARMONY_MESSAGE)
    end = _HARMONY_END.search(text, body_from)
    body_to, message_to = (end.start(), end.end()) if end else (len(text), len(text))
    function = _HARMONY_NAMED.search(header)
    if function is not None:
      # A call without arguments may have an empty body.
      arguments, rest, problem = first_json(text[body_from:body_to].strip() or "{}")
      problem = problem or ("there is more behind its JSON" if rest else "")
      if problem:
        problems.append(f"the call of {function[1]!r:.80} is not well-formed: {problem}")
      elif found := checked({"name": function[1], "arguments": arguments}, problems):
        calls += found
        content.append(text[content_from:start])
        content_from = message_to
    # If <|message|> ended the body, that token belongs to the next message. Find it again.
    start = body_to if end and end[0] == _HARMONY_MESSAGE else message_to
  whole = "".join([*content, text[content_from:]])
  return Read(whole.strip() if calls else whole, calls, problems)


def olmo3(text: str, names: Names) -> Read:
  """Parses Python calls, one per line, between tags."""
  del names
  return _tagged(_python_calls, text, OLMO3)


def llama3(text: str, names: Names) -> Read:
  """Parses a message that consists of JSON objects only, separated by ;."""
  del names
  body = text.replace("<|python_tag|>", "").strip()
  if not body.startswith("{"):
    return Read(text, [], [])
  calls, problems = _json_calls(body, ("parameters", "arguments"), separator=";")
  return Read("" if calls else text, calls, problems)


def mistral(text: str, names: Names) -> Read:
  """Parses, after [TOOL_CALLS], either a JSON list or names that each precede JSON arguments."""
  del names
  content, mark, body = text.partition("[TOOL_CALLS]")
  if not mark:  # it is a special token, which a decoder may have dropped
    content, body = "", text
  named = _MISTRAL_NAMED.match(body)
  if named is not None and (mark or named[2]):  # without the mark, [ARGS] must follow the name
    calls: Calls = []
    problems = list[str]()
    while named is not None:
      value, rest, problem = first_json(body[named.end() :])
      if problem:
        problems.append(problem)
        break
      calls += checked({"name": named[1], "arguments": value}, problems)
      named = _MISTRAL_NAMED.match(body := rest.removeprefix("[TOOL_CALLS]"))
    return Read(content.strip() if calls else text, calls, problems)
  # Without the mark, only a text that begins like a list of calls is one.
  if not mark and not body.lstrip().startswith('[{"name"'):
    return Read(text, [], [])
  calls, problems = _json_calls(body, ("arguments",))
  return Read(content.strip() if calls else text, calls, problems)


def checked(value: Any, problems: list[str], keys: Sequence[str] = ("arguments",)) -> Calls:
  """Checks the JSON value of a call. Returns [the call], or [] after an error.

  Args:
    value: Any JSON value. A call is an object with `name` and arguments.
    problems: Receives an error line if `value` is not a call.
    keys: The keys under which the arguments may be.
  """
  if not isinstance(value, dict) or not isinstance(value.get("name"), str):
    problems.append('the call is not well-formed: it needs a "name" and "arguments"')
    return []
  arguments: Any = next((value[key] for key in keys if key in value), {})
  if isinstance(arguments, str):  # some models write the arguments as JSON in a text
    arguments, _, _ = first_json(arguments)
  if not isinstance(arguments, dict):
    problems.append(f"the call of {value['name']!r:.80}: its arguments must be a JSON object")
    return []
  return [(value["name"], arguments)]


def _tagged(
  read: Callable[[str], tuple[Calls, list[str]]], text: str, tags: tuple[str, str]
) -> Read:
  """Finds calls between tags, and removes the well-formed ones from the text.

  Args:
    read: Parses the text between two tags. Returns (calls, error lines).
    text: The text of the policy.
    tags: The opening and the closing tag.
  """
  opens, closes = tags
  calls: Calls = []
  malformed, content = list[str](), list[str]()
  place = 0
  # No regular expression: it would search the whole rest of the text for each unclosed opening tag,
  # which takes quadratic time.
  while (start := text.find(opens, place)) >= 0:
    end = text.find(closes, start)
    if end < 0:
      # Without an error line, nothing would answer the turn, unless it has other calls.
      if not calls and not malformed:
        malformed.append(f"the call has no end: {closes} is missing")
      break
    found, problems = read(text[start + len(opens) : end].strip())
    calls += found
    malformed += problems
    after = end + len(closes)
    # A call with errors stays in the content, because the policy must see it in the next turn.
    content.append(text[place : after if problems else start])
    place = after
  rest = "".join([*content, text[place:]])
  return Read(rest.strip() if calls else rest, calls, malformed)


def _json_calls(text: str, keys: Sequence[str], separator: str = "") -> tuple[Calls, list[str]]:
  """Parses calls that are JSON objects or lists of objects. Returns (calls, error lines).

  Args:
    text: One or more JSON values.
    keys: The keys under which the arguments may be.
    separator: The text between two values. "" allows only one value.
  """
  calls: Calls = []
  problems, rest = list[str](), text
  while rest:
    value, rest, problem = first_json(rest)
    # What follows a value must be a separator.
    if not problem and rest and not (separator and rest.startswith(separator)):
      problem = "there is more behind its JSON"
    if problem:
      return calls, [*problems, f"the call is not well-formed: {problem}"]
    rest = rest.removeprefix(separator).strip()
    for one in value if isinstance(value, list) else [value]:
      calls += checked(one, problems, keys)
  return calls, problems


def _functions(text: str) -> Iterator[tuple[str, str]]:
  """Yields (name, inner text) of each <function=NAME>...</function>."""
  opens, closes = _FUNCTION
  place = 0
  while (start := text.find(opens, place)) >= 0:
    name_end = text.find(">", start)
    end = text.find(closes, name_end)
    if name_end < 0 or end < 0:
      return
    yield text[start + len(opens) : name_end].strip(), text[name_end + 1 : end]
    place = end + len(closes)


def _parameters(text: str, known: Collection[str] | None) -> Iterator[tuple[str, UnquotedText]]:
  """Yields the name and the value of each <parameter=NAME>...</parameter>.

  If the closing tag is missing, the value ends at the next opening tag. Because a value may itself
  contain such a tag, the tag must then name a parameter in `known` that has not come before.
  `known` are the tool's parameters. None accepts any name.
  """
  opens, closes = _PARAMETER
  seen = set[str]()  # the names that have come before
  first, *others = text.split(opens)
  pieces = [piece.partition(">") for piece in others]
  value: list[str] = []  # the pieces of the current value
  name = ""
  for found, mark, rest in pieces:  # mark: the > after the name, or "" if it is missing
    is_new = mark and (known is None or (found.strip() in known and found.strip() not in seen))
    is_open = bool(value) and closes not in value[-1]
    if is_open and not is_new:
      value.append(f"{opens}{found}{mark}{rest}")
      continue
    if value:
      yield name, _between_lines("".join(value).split(closes)[0])
    name, value = found.strip(), [rest] if mark else []
    seen.add(name)
  if value:
    yield name, _between_lines("".join(value).split(closes)[0])


def _between_lines(text: str) -> UnquotedText:
  """Removes the line breaks that the format adds around a value."""
  return UnquotedText(text.removeprefix("\n").removesuffix("\n"))


def _gemma4_call(body: str) -> tuple[Calls, list[str]]:
  """Parses call:NAME{KEY:VALUE,...}. Returns ([the call], []) or ([], [an error line])."""
  named = _GEMMA4_NAMED.match(body)
  if named is None:
    return [], ["the call is not well-formed: it needs call:NAME{...}"]
  try:
    value, end = _gemma4_value(body, named.end(), 0)
    if not isinstance(value, dict) or body[end:].strip():
      raise ValueError("its arguments must be {KEY:VALUE,...}")
  except ValueError as error:
    return [], [f"the call of {named[1]!r:.80} is not well-formed: {error}"]
  return [(named[1], value)], []


def _gemma4_value(text: str, place: int, depth: int) -> tuple[Any, int]:
  """Parses the value at index `place`. Returns (value, index after it), or raises ValueError."""
  if depth > _DEEPEST:
    raise ValueError("it is nested too deeply")
  place = _skip(text, place)
  if text.startswith(QUOTE, place):
    return _quoted(text, place)
  if text.startswith("{", place):
    made = dict[str, Any]()
    place = _skip(text, place + 1)
    while not text.startswith("}", place):
      key, place = _gemma4_key(text, place)
      made[key], place = _gemma4_value(text, place, depth + 1)
      place = _next(text, place, "}")
    return made, place + 1
  if text.startswith("[", place):
    values = []
    place = _skip(text, place + 1)
    while not text.startswith("]", place):
      value, place = _gemma4_value(text, place, depth + 1)
      values.append(value)
      place = _next(text, place, "]")
    return values, place + 1
  if text.startswith('"', place):  # a text as in JSON, instead of `QUOTE`
    try:
      return json.JSONDecoder().raw_decode(text, place)
    except ValueError:
      raise ValueError("a text in quotes has no end") from None
  word = _GEMMA4_WORD.match(text, place)
  assert word is not None  # it may be empty
  return UnquotedText(word[0].strip()), word.end()


def _gemma4_key(text: str, place: int) -> tuple[str, int]:
  """Parses a key and its colon. Returns (key, index after the colon), or raises ValueError."""
  if text.startswith(QUOTE, place):
    key, place = _quoted(text, place)
    place = _skip(text, place)
    colon = place if text.startswith(":", place) else -1
  else:
    colon = text.find(":", place)
    key = text[place:colon].strip()
  if colon < 0 or not key:
    raise ValueError("a key needs a name and a :")
  return key, colon + 1


def _quoted(text: str, place: int) -> tuple[str, int]:
  """Parses a text between two `QUOTE`. Returns (text, index after it), or raises ValueError."""
  start = place + len(QUOTE)
  end = text.find(QUOTE, start)
  if end < 0:
    raise ValueError(f"a text has no end: {QUOTE} is missing")
  return text[start:end], end + len(QUOTE)


def _skip(text: str, place: int) -> int:
  """Returns the index of the next character that is not whitespace."""
  while text[place : place + 1].isspace():
    place += 1
  return place


def _next(text: str, place: int, closes: str) -> int:
  """Returns the index of the next item of a list or object, or of the bracket that closes it."""
  place = _skip(text, place)
  if text.startswith(",", place):
    return _skip(text, place + 1)
  if not text.startswith(closes, place):
    raise ValueError(f"a , or {closes} is missing")
  return place


def _deepseek_call(body: str) -> tuple[Calls, list[str]]:
  """Parses the text between DeepSeek's tags. Returns ([the call], []) or ([], [an error line])."""
  head, mark, tail = body.partition(DEEPSEEK_NAME)
  name, fence, fenced = tail.partition("```json")
  if not mark:
    return [], [f"the call is not well-formed: it needs {DEEPSEEK_NAME}"]
  # With a block, the name stands before it. Without, the name stands before DEEPSEEK_NAME.
  name, written = (name, fenced.rpartition("```")[0]) if fence else (head, tail)
  value, rest, problem = first_json(written.strip() or "{}")
  if problem or rest:
    return [], [f"the call is not well-formed: {problem or 'there is more behind its JSON'}"]
  problems = list[str]()
  return checked({"name": name.strip(), "arguments": value}, problems), problems


def _python_calls(body: str) -> tuple[Calls, list[str]]:
  """Parses lines of Python calls. Returns (calls, []) or ([], [an error line])."""
  try:
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")  # warnings about escapes such as \d in a text
      tree = ast.parse(body)
    return [_python_call(statement) for statement in tree.body], []
  except (SyntaxError, ValueError, MemoryError, RecursionError):
    return [], ["the call is not well-formed: it must be NAME(ARGUMENT=VALUE, ...)"]


def _python_call(statement: ast.stmt) -> tuple[str, dict[str, Any]]:
  """Converts a Python statement to (name, arguments). Raises ValueError if it is not a call."""
  call = statement.value if isinstance(statement, ast.Expr) else None
  if not isinstance(call, ast.Call) or call.args:
    raise ValueError("no call")
  if not isinstance(call.func, ast.Name | ast.Attribute):
    raise ValueError("no name")
  arguments = {}
  for keyword in call.keywords:
    if keyword.arg is None:
      raise ValueError("** has no name")
    arguments[keyword.arg] = _python_value(keyword.value)
  return ast.unparse(call.func), arguments


def _python_value(node: ast.expr) -> Any:
  """Converts a Python or JSON literal to its value. Raises ValueError for other expressions."""
  match node:
    case ast.Name(id=("true" | "false" | "null") as word):  # words of JSON, which Python lacks
      return UnquotedText(word)
    case ast.Constant(value=None | bool() | int() | str() as value):
      return value
    case ast.Constant(value=float() as value) if math.isfinite(value):
      return value
    case ast.UnaryOp(op=ast.USub(), operand=operand):
      value = _python_value(operand)
      if isinstance(value, int | float) and not isinstance(value, bool):
        return -value
    case ast.List() | ast.Tuple():
      return [_python_value(one) for one in node.elts]
    case ast.Dict():
      keys = [_python_value(key) if key else None for key in node.keys]
      if not all(isinstance(key, str) for key in keys):
        raise ValueError("a key must be a text")
      return dict(zip(keys, map(_python_value, node.values), strict=True))
  raise ValueError("no value")
