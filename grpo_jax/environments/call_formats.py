"""Reads the names and arguments of tool calls from a message, as each family writes them.

Each function here reads one format. `FORMATS` in tool_calls.py has an example of each.
"""

import ast
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
import json
import math
import re
from typing import Any, NamedTuple
import warnings

from grpo_jax.environments.arguments import UnquotedText, first_json

# The parameters of each tool by its name. Empty if nobody says which tools there are.
Names = Mapping[str, Collection[str]]
Calls = list[tuple[str, dict[str, Any]]]

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
_DEEPEST = 64  # levels of lists and objects in a call of Gemma 4


class Read(NamedTuple):
  """The calls that were read from a text, and the rest of the text.

  Attributes:
    content: The text without its calls. A call that is not well-formed is content.
    calls: The name of each function, and its arguments. An `UnquotedText` had no quotes.
    malformed: The error of each call that is not well-formed, in a line for the model.
  """

  content: str
  calls: Calls
  malformed: list[str]


def hermes(text: str, names: Names) -> Read:
  """JSON between tags."""
  del names
  return _tagged(lambda body: _json_calls(body, ("arguments",)), text, HERMES)


def qwen3_coder(text: str, names: Names) -> Read:
  """Elements between tags. Values have no quotes."""

  def read(body: str) -> tuple[Calls, list[str]]:
    calls: Calls = []
    for function, inner in _functions(body):
      calls.append((function, dict(_parameters(inner, names.get(function)))))
    problem = "the call is not well-formed: it needs <function=NAME> and </function>"
    return calls, [] if calls else [problem]

  return _tagged(read, text, HERMES)


def glm4(text: str, names: Names) -> Read:
  """A name and elements between tags. Values have no quotes."""
  del names

  def read(body: str) -> tuple[Calls, list[str]]:
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

  return _tagged(read, text, HERMES)


def gemma4(text: str, names: Names) -> Read:
  """call:NAME{KEY:VALUE} between tags. A mark of its own quotes texts."""
  del names
  return _tagged(_gemma4_call, text, GEMMA4)


def granite(text: str, names: Names) -> Read:
  """A list in JSON after a tag, which may have an end."""
  del names
  content, mark, body = text.partition(GRANITE[0])
  if not mark:
    return Read(text, [], [])
  calls, problems = _json_calls(body.split(GRANITE[1])[0], ("arguments",))
  return Read(content.strip() if calls else text, calls, problems)


def deepseek(text: str, names: Names) -> Read:
  """A name and JSON between tags: the name first, or what kind of call it is."""
  del names
  made = _tagged(_deepseek_call, text, DEEPSEEK)
  content = made.content
  for mark in DEEPSEEK_LIST if made.calls else ():
    content = content.replace(mark, "")
  return Read(content.strip() if made.calls else text, made.calls, made.malformed)


def gpt_oss(text: str, names: Names) -> Read:
  """Messages of the form HEADER<|message|>BODY<|end|>, where another mark may end one.

  A message whose header names a function, as in to=functions.NAME, is a call, and its body has the
  arguments as JSON.
  """
  del names
  calls: Calls = []
  problems, content = list[str](), list[str]()
  start = 0  # of the message that is read
  content_from = 0  # what lies before is in `content`, or was a call
  while (mark := text.find(_HARMONY_MESSAGE, start)) >= 0:
    header, body_from = text[start:mark], mark + len(_HARMONY_MESSAGE)
    end = _HARMONY_END.search(text, body_from)
    body_to, message_to = (end.start(), end.end()) if end else (len(text), len(text))
    function = _HARMONY_NAMED.search(header)
    if function is not None:
      arguments, rest, problem = first_json(text[body_from:body_to].strip() or "{}")
      problem = problem or ("there is more behind its JSON" if rest else "")
      if problem:
        problems.append(f"the call of {function[1]!r:.80} is not well-formed: {problem}")
      elif found := checked({"name": function[1], "arguments": arguments}, problems):
        calls += found
        content.append(text[content_from:start])
        content_from = message_to
    # The next message begins with its mark, whatever ended this one.
    start = body_to if end and end[0] == _HARMONY_MESSAGE else message_to
  whole = "".join([*content, text[content_from:]])
  return Read(whole.strip() if calls else whole, calls, problems)


def olmo3(text: str, names: Names) -> Read:
  """Calls as Python writes them, a line each, between tags."""
  del names
  return _tagged(_python_calls, text, OLMO3)


def llama3(text: str, names: Names) -> Read:
  """JSON, which is the whole message."""
  del names
  body = text.replace("<|python_tag|>", "").strip()
  if not body.startswith("{"):
    return Read(text, [], [])
  calls, problems = _json_calls(body, ("parameters", "arguments"), separator=";")
  return Read("" if calls else text, calls, problems)


def mistral(text: str, names: Names) -> Read:
  """A list in JSON, or names, each before its arguments, after a mark."""
  del names
  content, mark, body = text.partition("[TOOL_CALLS]")
  if not mark:
    content, body = "", text
  named = _MISTRAL_NAMED.match(body)
  if named is not None and (mark or named[2]):
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
  if not mark and not body.lstrip().startswith('[{"name"'):
    return Read(text, [], [])
  calls, problems = _json_calls(body, ("arguments",))
  return Read(content.strip() if calls else text, calls, problems)


def checked(value: Any, problems: list[str], keys: Sequence[str] = ("arguments",)) -> Calls:
  """The call that a JSON object describes. The error of another value is added to `problems`.

  Args:
    value: The object.
    problems: Gets the error.
    keys: The keys under which its arguments may be.
  """
  if not isinstance(value, dict) or not isinstance(value.get("name"), str):
    problems.append('the call is not well-formed: it needs a "name" and "arguments"')
    return []
  arguments: Any = next((value[key] for key in keys if key in value), {})
  if isinstance(arguments, str):  # some models write the object as a text
    arguments, _, _ = first_json(arguments)
  if not isinstance(arguments, dict):
    problems.append(f"the call of {value['name']!r:.80}: its arguments must be a JSON object")
    return []
  return [(value["name"], arguments)]


def _tagged(
  read: Callable[[str], tuple[Calls, list[str]]], text: str, tags: tuple[str, str]
) -> Read:
  """Calls between tags. Well-formed ones are cut out of the text, and the rest stays in it.

  Args:
    read: Gets the text between two tags, and returns (calls, errors).
    text: The text of the policy.
    tags: The opening and the closing one.
  """
  opens, closes = tags
  calls: Calls = []
  malformed, content = list[str](), list[str]()
  place = 0
  # A regular expression would search to the end of the text from each opening tag without an end,
  # and so take a time that grows with the square of their number.
  while (start := text.find(opens, place)) >= 0:
    end = text.find(closes, start)
    if end < 0:
      if not calls and not malformed:  # behind a call, a text that was cut off is no error
        malformed.append(f"the call has no end: {closes} is missing")
      break
    made, problems = read(text[start + len(opens) : end].strip())
    calls += made
    malformed += problems
    after = end + len(closes)
    # The policy sees a call with errors again, so it stays.
    content.append(text[place : after if problems else start])
    place = after
  whole = "".join([*content, text[place:]])
  return Read(whole.strip() if calls else whole, calls, malformed)


def _json_calls(text: str, keys: Sequence[str], separator: str = "") -> tuple[Calls, list[str]]:
  """The calls in JSON, which are objects or lists of objects, and the errors.

  Args:
    text: The JSON.
    keys: The keys under which the arguments may be.
    separator: The text that may lie between two values.
  """
  calls: Calls = []
  problems, rest = list[str](), text
  while rest:
    value, rest, problem = first_json(rest)
    if not problem and rest and not (separator and rest.startswith(separator)):
      problem = "there is more behind its JSON"
    if problem:
      return calls, [*problems, f"the call is not well-formed: {problem}"]
    rest = rest.removeprefix(separator).strip()
    for one in value if isinstance(value, list) else [value]:
      calls += checked(one, problems, keys)
  return calls, problems


def _functions(text: str) -> Iterator[tuple[str, str]]:
  """(name, inner text) of each <function=NAME>...</function>."""
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
  """The name and the value of each <parameter=NAME>...</parameter>.

  A value whose end is missing ends where the next parameter begins. A value may have such a mark
  inside it, so this must be a parameter that the tool has and that has not come yet.
  """
  opens, closes = _PARAMETER
  seen = set[str]()
  first, *others = text.split(opens)
  pieces = [piece.partition(">") for piece in others]
  value: list[str] = []
  name = ""
  for found, mark, rest in pieces:
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
  return UnquotedText(text.removeprefix("\n").removesuffix("\n"))


def _gemma4_call(body: str) -> tuple[Calls, list[str]]:
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
  """The value that begins at a place, and where it ends."""
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
  if text.startswith('"', place):
    try:
      return json.JSONDecoder().raw_decode(text, place)
    except ValueError:
      raise ValueError("a text in quotes has no end") from None
  word = _GEMMA4_WORD.match(text, place)
  assert word is not None  # it may be empty
  return UnquotedText(word[0].strip()), word.end()


def _gemma4_key(text: str, place: int) -> tuple[str, int]:
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
  """The text between two marks that quote, and where it ends."""
  start = place + len(QUOTE)
  end = text.find(QUOTE, start)
  if end < 0:
    raise ValueError(f"a text has no end: {QUOTE} is missing")
  return text[start:end], end + len(QUOTE)


def _skip(text: str, place: int) -> int:
  while text[place : place + 1].isspace():
    place += 1
  return place


def _next(text: str, place: int, closes: str) -> int:
  """Where the next part of a list or an object begins, or its end."""
  place = _skip(text, place)
  if text.startswith(",", place):
    return _skip(text, place + 1)
  if not text.startswith(closes, place):
    raise ValueError(f"a , or {closes} is missing")
  return place


def _deepseek_call(body: str) -> tuple[Calls, list[str]]:
  head, mark, tail = body.partition(DEEPSEEK_NAME)
  name, fence, fenced = tail.partition("```json")
  if not mark:
    return [], [f"the call is not well-formed: it needs {DEEPSEEK_NAME}"]
  name, given = (name, fenced.rpartition("```")[0]) if fence else (head, tail)
  value, rest, problem = first_json(given.strip() or "{}")
  if problem or rest:
    return [], [f"the call is not well-formed: {problem or 'there is more behind its JSON'}"]
  problems = list[str]()
  return checked({"name": name.strip(), "arguments": value}, problems), problems


def _python_calls(body: str) -> tuple[Calls, list[str]]:
  try:
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")  # of \d in a text
      tree = ast.parse(body)
    return [_python_call(statement) for statement in tree.body], []
  except (SyntaxError, ValueError, MemoryError, RecursionError):
    return [], ["the call is not well-formed: it must be NAME(ARGUMENT=VALUE, ...)"]


def _python_call(statement: ast.stmt) -> tuple[str, dict[str, Any]]:
  """The call in a line. Raises ValueError for another line."""
  call = statement.value if isinstance(statement, ast.Expr) else None
  if not isinstance(call, ast.Call) or call.args:
    raise ValueError("no call")
  if not isinstance(call.func, ast.Name | ast.Attribute):
    raise ValueError("no name")
  arguments = {}
  for one in call.keywords:
    if one.arg is None:
      raise ValueError("** has no name")
    arguments[one.arg] = _python_value(one.value)
  return ast.unparse(call.func), arguments


def _python_value(node: ast.expr) -> Any:
  """A JSON value, written as Python or JSON writes it."""
  match node:
    case ast.Name(id=("true" | "false" | "null") as word):
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
