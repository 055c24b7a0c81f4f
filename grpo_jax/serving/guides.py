"""Answers that must have a form: JSON, JSON of a schema, or a call of a tool.

The package llguidance says which tokens may follow, and the sampler draws among these alone. It is
optional, and imported where a request asks for a form.
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

# As json.dumps writes it. Where blanks were free, a model could write nothing else for ever.
_COMPACT = {
  "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
}
_BY_NAME = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
_VALUES = {"const", "enum", "default", "examples"}  # hold no schemas
_TAGS = ("<tool_call>", "</tool_call>")


class Guides:
  """Makes guides for a tokenizer."""

  def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
    """Imports nothing yet. `vocabulary` is how many ids the model has."""
    self._tokenizer, self._vocabulary = tokenizer, vocabulary
    self._lock = threading.Lock()  # requests are read in several threads

  def of(self, form: Form, count: int) -> list[Guide]:
    """Guides for so many rows.

    Raises:
      RequestError: llguidance is not installed, or it does not know something of the schema.
    """
    with self._lock:
      engine = self._engine
    from llguidance import LLMatcher

    whole = LLMatcher(engine, self._grammar(form))
    if whole.is_error():
      raise RequestError(f"{form.param}: {' '.join(whole.get_error().split()):.300}", form.param)
    return [Guide(whole.deep_copy()) for _ in range(count)]

  @functools.cached_property
  def _engine(self) -> Any:
    """The tokenizer of llguidance. Raises RequestError where there is none for this model."""
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
    """The grammar of a call of one of these, as the family writes it."""
    try:
      family = family_of(self._tokenizer.template)
    except ConfigError:  # it has no chat template
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
    special = self._tokenizer.skipped(_TAGS).values()
    opens, closes = (tag if tag in special else json.dumps(tag) for tag in _TAGS)
    return f'start: {opens} "\\n" call "\\n" {closes}\ncall: %json {calls}'


def _any_call(functions: Sequence[Mapping[str, Any]], arguments: str) -> dict[str, Any]:
  """The schema of a call of one of these. What the parameters point to is at its root."""
  calls, roots = [], {}
  for number, function in enumerate(functions):
    parameters, root = function.get("parameters") or {"type": "object"}, f"#/$defs/{number}"
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
  """A schema whose pointers from its root begin at another one.

  Args:
    schema: The schema, or a part of it.
    root: The pointer to its new place.
    by_name: Whether the keys are names of a user, as those of properties are.
  """
  if isinstance(schema, list):
    return [_moved(one, root) for one in schema]
  if not isinstance(schema, dict):
    return schema
  found = {}
  for key, value in schema.items():
    if key == "$ref" and not by_name and isinstance(value, str):
      found[key] = root + value[1:] if value == "#" or value.startswith("#/") else value
    elif key in _VALUES and not by_name:
      found[key] = value
    else:
      found[key] = _moved(value, root, by_name=key in _BY_NAME and not by_name)
  return found
