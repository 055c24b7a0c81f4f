"""Plain values as JSON, for the checker and the player, which do not trust each other.

None, bools, numbers and texts are themselves; other values are lists that begin with a kind. What
is not plain stays where it is and goes as ["object", number].
"""

import itertools
from typing import Any

_MOST_ITEMS = 100_000  # of an iterator, which may be endless
_SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def encode(value: Any, number_of: Any) -> Any:
  """A value as JSON holds it. number_of(value) gives a number to an object that is not plain."""
  if value is None or isinstance(value, bool):
    return value
  for kind in (int, float, str):
    if isinstance(value, kind):
      return kind(value)  # of a subclass, the value alone
  if isinstance(value, complex):
    return ["complex", value.real, value.imag]
  if isinstance(value, (bytes, bytearray)):
    return ["bytes", value.decode("latin-1")]
  for name, sequence in _SEQUENCES.items():
    if isinstance(value, sequence):
      return [name, [encode(item, number_of) for item in value]]
  if isinstance(value, dict):
    return [
      "dict",
      [[encode(key, number_of), encode(item, number_of)] for key, item in value.items()],
    ]
  if hasattr(value, "__next__"):
    items = [encode(item, number_of) for item in itertools.islice(value, _MOST_ITEMS)]
    return ["iterator", items]
  if isinstance(value, range):
    return ["range", [value.start, value.stop, value.step]]
  return ["object", number_of(value)]


def decode(data: Any, object_of: Any) -> Any:
  """The inverse. object_of(number) returns what stands for the other side's object."""
  if not isinstance(data, list):
    return data
  kind, *rest = data
  if kind == "complex":
    return complex(*rest)
  if kind == "bytes":
    return rest[0].encode("latin-1")
  if kind == "dict":
    return {decode(key, object_of): decode(item, object_of) for key, item in rest[0]}
  if kind == "object":
    return object_of(int(rest[0]))
  if kind == "range":
    return range(*rest[0])
  items = [decode(item, object_of) for item in rest[0]]
  return iter(items) if kind == "iterator" else _SEQUENCES[kind](items)
