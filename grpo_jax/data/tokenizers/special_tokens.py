"""The special tokens that the JSON files of a tokenizer name.

In all functions, `files` has the contents of these files, keyed by file name.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from grpo_jax.data.tokenizers.tokenizer_files import read_json


class SpecialToken(NamedTuple):
  """A special token and its id."""

  text: str
  id: int


def texts(files: Mapping[str, bytes]) -> dict[str, str]:
  """The texts of the special tokens, keyed by role, such as {"eos_token": "</s>"}."""
  values = read_json(files, "special_tokens_map.json") | read_json(files, "tokenizer_config.json")
  found = {role: _text(value) for role, value in values.items() if role.endswith("_token")}
  return {role: text for role, text in found.items() if text}


def all_texts(files: Mapping[str, bytes]) -> set[str]:
  """The texts of all special tokens: those with a role, and the lists of those without one."""
  found = set(texts(files).values())
  for name in ("special_tokens_map.json", "tokenizer_config.json"):
    values = read_json(files, name)
    for key in ("additional_special_tokens", "extra_special_tokens"):
      tokens = values.get(key) or ()  # transformers 4 has {role: token}, 5 a list
      if isinstance(tokens, dict | list):
        found |= set(map(_text, tokens.values() if isinstance(tokens, dict) else tokens))
  return found - {""}


def stop_and_pad_ids(
  files: Mapping[str, bytes], token_to_id: Callable[[str], int | None]
) -> tuple[tuple[int, ...], int | None]:
  """The ids of the tokens that end a text, and the id of the padding token.

  The stop ids are the eos_token of tokenizer_config.json, the eos_token of special_tokens_map.json
  and the eos_token_id of generation_config.json, in this order. Any of them may be missing.

  Args:
    files: The JSON files of the tokenizer.
    token_to_id: Maps the text of a token to its id, or None.

  Returns:
    (stop ids without repetitions, id of the padding token or None)
  """
  stop_ids, pad_ids = [], []
  for name in ("tokenizer_config.json", "special_tokens_map.json"):
    values = read_json(files, name)
    stop_ids.append(token_to_id(_text(values.get("eos_token"))))  # the id of "" is None
    pad_ids.append(token_to_id(_text(values.get("pad_token"))))
  generation_ids = read_json(files, "generation_config.json").get("eos_token_id")
  stop_ids += generation_ids if isinstance(generation_ids, list) else [generation_ids]
  unique_stop_ids = tuple(dict.fromkeys(i for i in stop_ids if i is not None))
  return unique_stop_ids, next((i for i in pad_ids if i is not None), None)


def prefix_ids(
  files: Mapping[str, bytes],
  token_to_id: Callable[[str], int | None],
  bos_token: str,
  post_processor_ids: tuple[int, ...],
) -> tuple[int, ...]:
  """The ids that a text begins with.

  If tokenizer_config.json has add_bos_token or add_eos_token, transformers 4 replaces the
  post-processor of a tokenizer.json, and so does this function: a text begins with the bos_token
  only if add_bos_token is true. transformers 5 reads the post-processor alone. If the file has
  neither field, a text begins with `post_processor_ids`.

  Args:
    files: The JSON files of the tokenizer.
    token_to_id: Maps the text of a token to its id, or None.
    bos_token: The text of the bos_token, or "".
    post_processor_ids: The ids that the post-processor puts before a text.
  """
  config = read_json(files, "tokenizer_config.json")
  if not config.keys() & {"add_bos_token", "add_eos_token"}:
    return post_processor_ids
  bos_id = token_to_id(bos_token)
  return (bos_id,) if config.get("add_bos_token") and bos_id is not None else ()


def _text(token: Any) -> str:
  """The text of a token in a JSON file, where it is a string or an object. "" for None."""
  if isinstance(token, dict):
    return token["content"]
  return token if isinstance(token, str) else ""
