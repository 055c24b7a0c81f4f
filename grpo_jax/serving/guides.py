"""Guides for answers with a required form: JSON, JSON of a schema, or a tool call.

The optional package llguidance computes which tokens may follow, and the sampler draws only these.
It is imported when a request demands a form.
"""

from collections.abc import Mapping, Sequence
import functools
import json
import threading
from typing import Any

from grpo_jax.data.tokenizers.tokenizer import Tokenizer
from grpo_jax.environments.tool_calls import family_of
from grpo_jax.sampler.guides import Guide, lexicon
from grpo_jax.serving.requests import Form, RequestError
from grpo_jax.settings import ConfigError

# The whitespace of json.dumps. If it were free, a model could write whitespace forever.
_COMPACT = {
  "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
}
# Keywords of JSON Schema: those that map names to schemas, and those whose values are no schemas.
_BY_NAME = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
_VALUES = {"const", "enum", "default", "examples"}
_TAGS = ("<tool_call>", "</tool_call>")
# The parameters of a function that states none, as in OpenAI's API.
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class Guides:
  """Makes guides for a tokenizer."""

  def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
    """Imports nothing yet. `vocabulary` is V, the model's token ids."""
    self._tokenizer, self._vocabulary = tokenizer, vocabulary
    self._lock = threading.Lock()  # several threads parse requests

  def of(self, form: Form, count: int) -> list[Guide]:
    """Makes `count` guides that force rows to have a form, one for each row.

    Raises:
      RequestError: llguidance is not installed, or it does not support the schema.
    """
    with self._lock:
      llg_tokenizer = self._engine
    from llguidance import LLMatcher

    matcher = LLMatcher(llg_tokenizer, self._grammar(form))
    if matcher.is_error():
      raise RequestError(f"{form.param}: {' '.join(matcher.get_error().split()):.300}", form.param)
    return [Guide(matcher.deep_copy()) for _ in range(count)]

  @functools.cached_property
  def _engine(self) -> Any:
    """llguidance's tokenizer for this model. Raises RequestError if it cannot be made."""
    try:
      return lexicon(self._tokenizer, self._vocabulary)
    except ConfigError as error:
      raise RequestError(f"response_format and tool_choice: {error}", status=501) from None

  def _grammar(self, form: Form) -> str:
    from llguidance import LLMatcher

    if form.tools:
      return LLMatcher.grammar_from_lark(self._of_calls(form.tools))
    return LLMatcher.grammar_from_json_schema(json.dumps({**form.schema, **_COMPACT}))

  def _of_calls(self, tools: Sequence[Mapping[str, Any]]) -> str:
    """The Lark grammar of a call of one of these tools, in the format of the model's family."""
    try:
      family = family_of(self._tokenizer.template)
    except ConfigError:  # there is no chat template
      family = ""
    if family not in ("hermes", "llama3"):
      raise RequestError(
        "tool_choice: 'auto' and 'none' are supported for the way in which this model writes calls",
        "tool_choice",
      )
    arguments = "arguments" if family == "hermes" else "parameters"
    calls = json.dumps(_any_call([tool["function"] for tool in tools], arguments) | _COMPACT)
    if family == "llama3":
      return f"start: call\ncall: %json {calls}"
    # In Lark, a special token is written as itself, and another text is quoted.
    special = self._tokenizer.skipped(_TAGS).values()
    opens, closes = (tag if tag in special else json.dumps(tag) for tag in _TAGS)
    return f'start: {opens} "\\n" call "\\n" {closes}\ncall: %json {calls}'


def _any_call(functions: Sequence[Mapping[str, Any]], arguments: str) -> dict[str, Any]:
  """The JSON schema of a call of one of these functions.

  `$ref`s of a function's parameters point to the root of their schema. So schemas that have any
  move to `$defs`, and their `$ref`s are changed accordingly. `arguments` is the key under which the
  model's family writes the arguments of a call.
  """
  calls, roots = [], {}
  for number, function in enumerate(functions):
    parameters, root = function.get("parameters") or _NO_PARAMETERS, f"#/$defs/{number}"
    moved = _moved(parameters, root)
    if moved != parameters:
      roots[str(number)], moved = moved, {"$ref": root}
    calls.append(
      {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, arguments: moved},
        "required": ["name", arguments],
        "additionalProperties": False,
      }
    )
  return {"anyOf": calls} | ({"$defs": roots} if roots else {})


def _moved(schema: Any, root: str, *, by_name: bool = False) -> Any:
  """Copies a JSON schema, and changes its `$ref`s for a new position in a larger schema.

  Args:
    schema: The schema, or a part of it.
    root: The JSON pointer to the new position, "#/...".
    by_name: Whether the keys are names that the user chose, rather than keywords.
  """
  if isinstance(schema, list):
    return [_moved(one, root) for one in schema]
  if not isinstance(schema, dict):
    return schema
  found = {}
  for key, value in schema.items():
    if key == "$ref" and not by_name and isinstance(value, str):  # URLs and anchors stay
      found[key] = root + value[1:] if value == "#" or value.startswith("#/") else value
    elif key in _VALUES and not by_name:
      found[key] = value
    else:
      found[key] = _moved(value, root, by_name=key in _BY_NAME and not by_name)
  return found
