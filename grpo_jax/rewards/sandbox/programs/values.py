"""Encodes values as JSON, for the checker, and for the player, which runs untrusted code.

None, bools, ints, floats and texts encode to themselves; other plain values encode to lists that
begin with a type name. Any other object stays in the player and is sent as ["object", number]. An
object of a subclass is sent as one of the base class, so methods of the program never run in the
checker.
"""

import builtins
from collections import Counter, OrderedDict, deque, namedtuple
import itertools
import re
import sys
from typing import Any

_MOST_ITEMS = 100_000  # items of an iterator, which may be infinite
# int(value) and str(value) would call methods of a subclass, such as an Enum's.
_PLAIN: dict[Any, Any] = {int: int.__int__, float: float.__float__, str: str.__str__}
_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS: dict[str, Any] = {"Counter": Counter, "OrderedDict": OrderedDict, "dict": dict}
_VIEWS: dict[str, Any] = {
  "keys": type({}.keys()),
  "values": type({}.values()),
  "items": type({}.items()),
}
_TYPES = (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict)
_TYPE_NAMES = {kind.__name__: kind for kind in _TYPES}
_NUMPY_TYPE = re.compile(r"[<>|=]?[biufcUS]\d+")
_NUMPY_SCALARS = {"b": bool, "i": int, "u": int, "f": float, "c": complex}


def encode(value: Any, number_of: Any) -> Any:
  """Encodes a value as JSON. number_of(value) returns the number of an object that is not plain.

  It raises an exception if such an object cannot be sent. Each type is checked before its base
  class: bool before int, namedtuple before tuple, Counter and OrderedDict before dict.
  """
  if value is None or isinstance(value, bool):
    return value
  for kind, plain in _PLAIN.items():
    if isinstance(value, kind):
      return plain(value)
  if isinstance(value, complex):
    return ["complex", value.real, value.imag]
  if isinstance(value, (bytes, bytearray)):
    return ["bytes", value.decode("latin-1")]
  if isinstance(value, tuple) and hasattr(value, "_fields"):
    items = [encode(item, number_of) for item in value]
    return ["namedtuple", type(value).__name__, list(value._fields), items]
  for name, sequence in _SEQUENCES.items():
    if isinstance(value, sequence):
      return [name, [encode(item, number_of) for item in value]]
  for name, mapping in _MAPPINGS.items():
    if isinstance(value, mapping):
      pairs = [[encode(key, number_of), encode(item, number_of)] for key, item in value.items()]
      return [name, pairs]
  return _encode_rare(value, number_of)


def decode(data: Any, object_of: Any, exception_of: Any = None) -> Any:
  """Returns the value that `encode` encoded in the other process.

  Args:
    data: The JSON value that `encode` returned.
    object_of: object_of(number) returns the object of this number, or a stand-in for it.
    exception_of: exception_of(description) returns the class that stands in for an exception class
      of the other process, from what `describe_exception` returned. None if none can come.

  Raises:
    Exception: `data` is not an encoded value.
  """
  if not isinstance(data, list):
    return data
  kind, *rest = data
  if kind == "object":
    return object_of(int(rest[0]))
  if kind == "exception":
    return exception_of(rest[0])
  if kind in _SCALARS:  # what follows the type name is not encoded
    return _SCALARS[kind](*rest)

  def decoded(items: Any) -> Any:
    return [decode(item, object_of, exception_of) for item in items]

  if kind in _MAPPINGS:
    return _MAPPINGS[kind](dict(map(decoded, rest[0])))
  if kind == "namedtuple":  # renames fields, because a program may send invalid names
    return namedtuple(rest[0], rest[1], rename=True)(*decoded(rest[2]))
  if kind == "deque":
    return deque(decoded(rest[0]), rest[1])
  if kind == "ndarray":
    return _array(rest[0], rest[1], decoded(rest[2]))
  items = decoded(rest[0])
  if kind in _VIEWS:
    return _view(kind, items)
  return iter(items) if kind == "iterator" else _SEQUENCES[kind](items)


def describe_exception(kind: type, number_of: Any) -> Any:
  """Encodes an exception class: a builtin's name, else [number, name, descriptions of bases]."""
  if _is_builtin(kind):
    return kind.__name__
  bases = [base for base in kind.__bases__ if issubclass(base, Exception)]
  described = [describe_exception(base, number_of) for base in bases]
  return [number_of(kind), kind.__name__, described]


def _is_builtin(kind: type) -> bool:
  return getattr(builtins, kind.__name__, None) is kind


def _encode_rare(value: Any, number_of: Any) -> Any:
  """Encodes a value of a less common type, or the number of an object that is not plain."""
  # If the program did not import a module, the value cannot be of a type of that module.
  decimal, fractions, numpy = map(sys.modules.get, ("decimal", "fractions", "numpy"))
  if decimal and isinstance(value, decimal.Decimal):
    return ["Decimal", str(value)]
  if fractions and isinstance(value, fractions.Fraction):
    return ["Fraction", int(value.numerator), int(value.denominator)]
  if numpy and isinstance(value, numpy.ndarray) and _NUMPY_TYPE.fullmatch(value.dtype.str):
    items = [encode(item, number_of) for item in value.ravel().tolist()]
    return ["ndarray", value.dtype.str, list(value.shape), items]
  if numpy and isinstance(value, numpy.generic) and value.dtype.kind in _NUMPY_SCALARS:
    return encode(_NUMPY_SCALARS[value.dtype.kind](value), number_of)
  if isinstance(value, deque):
    return ["deque", [encode(item, number_of) for item in value], value.maxlen]
  for name, view in _VIEWS.items():
    if isinstance(value, view):
      return [name, [encode(item, number_of) for item in list(value)]]
  if hasattr(value, "__next__"):
    items = [encode(item, number_of) for item in itertools.islice(value, _MOST_ITEMS)]
    return ["iterator", items]
  if isinstance(value, range):
    return ["range", value.start, value.stop, value.step]
  if isinstance(value, type) and _TYPE_NAMES.get(value.__name__) is value:
    return ["type", value.__name__]
  if isinstance(value, type) and issubclass(value, Exception) and not _is_builtin(value):
    return ["exception", describe_exception(value, number_of)]
  return ["object", number_of(value)]


def _decimal(text: str) -> Any:
  import decimal

  return decimal.Decimal(text)


def _fraction(numerator: int, denominator: int) -> Any:
  import fractions

  return fractions.Fraction(numerator, denominator)


def _array(dtype: str, shape: list[int], items: list[Any]) -> Any:
  import numpy

  if not _NUMPY_TYPE.fullmatch(dtype):
    raise ValueError(f"no array of {dtype} is sent")
  return numpy.array(items, dtype).reshape(shape)


def _view(kind: str, items: list[Any]) -> Any:
  if kind == "items":
    return dict(items).items()
  return dict.fromkeys(items).keys() if kind == "keys" else dict(enumerate(items)).values()


_SCALARS: dict[str, Any] = {
  "complex": complex,
  "bytes": lambda text: text.encode("latin-1"),
  "range": range,
  "type": _TYPE_NAMES.__getitem__,
  "Decimal": _decimal,
  "Fraction": _fraction,
}
