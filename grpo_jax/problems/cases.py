"""Reads cases from the columns of data sets: inputs of a program with the expected outputs."""

import base64
import binascii
from collections.abc import Mapping
import functools
import pickle
import pickletools
from typing import Any
import zlib

from grpo_jax.problems.programs import Case, Unreadable, json_in

_MOST_BYTES = 2**28  # limit on the decompressed cases of a row


def cases_in(given: Any, name: str, function: str = "") -> tuple[Case, ...]:
  """Reads the cases in a value of a column.

  Args:
    given: An object with the lists `inputs` and `outputs`, and perhaps `fn_name` (APPS, TACO,
      PRIME), or a list of objects with `input` and `output` (LiveCodeBench, DeepCoder). Or JSON.
    name: The name of the column, for error messages.
    function: The function that cases in a list call, unless they name another one.

  Raises:
    Unreadable: The value has another form, or no cases.
  """
  given = json_in(given, name)
  if isinstance(given, Mapping):
    function = given.get("fn_name") or ""
    # Some data sets name the lists `input` and `output`.
    inputs, outputs = (given.get(key, given.get(key[:-1])) for key in ("inputs", "outputs"))
    if not isinstance(inputs, list) or not isinstance(outputs, list):
      raise Unreadable(f"{name} has no lists inputs and outputs")
    if len(inputs) != len(outputs):
      raise Unreadable(f"{name} has {len(inputs)} inputs and {len(outputs)} outputs")
    cases = [_case(entry, expected, function) for entry, expected in zip(inputs, outputs)]
  elif isinstance(given, list):
    cases = [_typed_case(one, name, function) for one in given]
  else:
    raise Unreadable(f"{name} has no cases")
  if not cases:
    raise Unreadable(f"{name} has no cases")
  return tuple(cases)


def _typed_case(case: Any, name: str, function: str) -> Case:
  """Reads a case that may state its type: stdin, functional or function_call. See `cases_in`."""
  if not isinstance(case, Mapping) or not {"input", "output"} <= case.keys():
    raise Unreadable(f"{name} has a case without input and output")
  kind = case.get("testtype") or case.get("type")
  metadata = case.get("metadata")
  in_metadata = metadata.get("func_name") if isinstance(metadata, Mapping) else None
  function = case.get("fn_name") or in_metadata or function
  if kind in ("functional", "function_call") and not function:
    raise Unreadable(f"{name} has a case that calls a function, and nothing names it")
  if kind == "functional":
    # LiveCodeBench has an argument as JSON in each line.
    arguments = [json_in(line, name) for line in str(case["input"]).split("\n") if line.strip()]
    return Case(arguments, json_in(case["output"], name), function)
  # A case without a type is a call if anything names a function.
  is_call = kind == "function_call" or (kind is None and function)
  return _case(case["input"], case["output"], function if is_call else "")


def _case(given: Any, expected: Any, function: str) -> Case:
  """A call of `function`, in the format of APPS, or if it is "" a run of the whole program."""
  if not function:
    return Case(_lines(given), _lines(expected))
  arguments = given if isinstance(given, list) else [given]
  return Case([_with_numbers(one) for one in arguments], expected, function, boxed=True)


def _lines(value: Any) -> str:
  """The text in a value, which may be a list of lines."""
  return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _with_numbers(value: Any) -> Any:
  """An argument with int keys in place of dict keys that are numbers, which JSON turned to text."""
  if isinstance(value, Mapping) and value:
    try:
      return {int(key): item for key, item in value.items()}
    except ValueError:
      return value
  return value


# The allowed opcodes, apart from those for texts. Others may run code or use much memory.
_OF_TEXTS = ("PROTO", "FRAME", "STOP", "MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT")
_MOST_OBJECTS = 2**10  # limit on opcodes, and on memo indices, for which pickle allocates a table


def _unpickled_text(data: bytes) -> str:
  """Unpickles a text without running code. Raises Unreadable if the pickle holds anything else."""
  for number, (step, argument, _) in enumerate(pickletools.genops(data)):
    if number == _MOST_OBJECTS:
      raise Unreadable(f"private_test_cases are a pickle of more than {_MOST_OBJECTS} steps")
    if "UNICODE" in step.name:
      continue
    if step.name not in _OF_TEXTS:
      raise Unreadable(f"private_test_cases hold no text alone ({step.name} {argument!s:.40})")
    if "PUT" in step.name and not 0 <= argument < _MOST_OBJECTS:
      raise Unreadable(f"private_test_cases number an object {argument}")
  return str(pickle.loads(data))


@functools.lru_cache(2)  # the completions of a prompt have the same row
def decompressed(text: str) -> str:
  """Decodes private cases of LiveCodeBench from base64, zlib and pickle. Returns their JSON."""
  try:
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(base64.b64decode(text, validate=True), _MOST_BYTES)
    if unpacker.unconsumed_tail:
      raise Unreadable(f"private_test_cases have more than {_MOST_BYTES >> 20} MiB")
    return _unpickled_text(data)
  except Unreadable:
    raise
  except (binascii.Error, zlib.error) as error:
    raise Unreadable(f"private_test_cases are neither JSON nor compressed ({error})") from None
  except Exception as error:  # a damaged pickle may raise any exception
    raise Unreadable(f"private_test_cases cannot be read ({error!s:.80})") from None
