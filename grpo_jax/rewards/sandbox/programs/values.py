"""Plain values as JSON, for the checker and the player, which do not trust each other.

None, bools, numbers and texts are themselves; other values are lists that begin with a kind. What
is not plain stays where it is and goes as ["object", number]. Of an object of a subclass, only what
its base class holds goes over, so a method that the program wrote never runs in the checker.
"""

import builtins
from collections import Counter, OrderedDict, deque, namedtuple
import itertools
import re
import sys
from typing import Any

_MOST_ITEMS = 100_000  # of an iterator, which may be endless
# int(value) and str(value) would call methods of a subclass, such as an Enum's.
_PLAIN = {int: int.__int__, float: float.__float__, str: str.__str__}
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
  """A value as JSON holds it. number_of(value) gives a number to an object that is not plain."""
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
  """The inverse.

  Args:
    data: The JSON value that `encode` returned on the other side.
    object_of: object_of(number) returns what stands for the other side's object.
    exception_of: exception_of(description) returns what stands for its class of an exception.
  """
  if not isinstance(data, list):
    return data
  kind, *rest = data
  if kind == "object":
    return object_of(int(rest[0]))
  if kind == "exception":
    return exception_of(rest[0])
  if kind in _SCALARS:
    return _SCALARS[kind](*rest)

  def decoded(items: Any) -> Any:
    return [decode(item, object_of, exception_of) for item in items]

  if kind in _MAPPINGS:
    return _MAPPINGS[kind](dict(map(decoded, rest[0])))
  if kind == "namedtuple":
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
  """A class of exceptions: the name of a builtin one, else [number, name, what its bases are]."""
  if _is_builtin(kind):
    return kind.__name__
  bases = [base for base in kind.__bases__ if issubclass(base, Exception)]
  described = [describe_exception(base, number_of) for base in bases]
  return [number_of(kind), kind.__name__, described]


def _is_builtin(kind: type) -> bool:
  return getattr(builtins, kind.__name__, None) is kind


def _encode_rare(value: Any, number_of: Any) -> Any:
  """Encodes a value that JSON has no kind for, as a list that begins with its type."""
  # A module that the program did not import is missing here, and no value is of its types.
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
