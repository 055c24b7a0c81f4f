"""A stand-in for pytest, for tests that import it in a sandbox, which has no packages.

Fixtures are not supported: a test that needs one fails.
"""

from collections.abc import Callable, Mapping
import math
import re
from typing import Any


class raises:
  """Expects an exception: `with pytest.raises(ValueError, match="bad") as caught`."""

  def __init__(self, kinds: Any, *call: Any, match: str | None = None, **keywords: Any) -> None:
    self.kinds, self.pattern = kinds, match
    self.value: BaseException | None = None
    if call:
      with self:
        call[0](*call[1:], **keywords)

  def __enter__(self) -> "raises":
    return self

  def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
    assert kind is not None, "nothing was raised"
    if not issubclass(kind, self.kinds):
      return False
    self.value, self.type = error, kind
    if self.pattern is not None:
      self.match(self.pattern)
    return True

  def match(self, pattern: str) -> bool:
    """Raises AssertionError if the pattern is not found in the text of the exception."""
    assert re.search(pattern, str(self.value)), f"{self.value} is not like {pattern}"
    return True


class approx:
  """A number, or a list or dict of numbers, that equals others within a tolerance."""

  def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None) -> None:
    self.expected, self.rel, self.abs = expected, rel, abs

  def __eq__(self, other: Any) -> bool:
    return self._near(other, self.expected)

  def _near(self, given: Any, expected: Any) -> bool:
    if isinstance(expected, Mapping):
      same_keys = isinstance(given, Mapping) and given.keys() == expected.keys()
      return same_keys and all(self._near(given[key], expected[key]) for key in expected)
    if isinstance(expected, (list, tuple)):
      same_size = isinstance(given, (list, tuple)) and len(given) == len(expected)
      return same_size and all(map(self._near, given, expected))
    if not isinstance(given, (int, float)) or not isinstance(expected, (int, float)):
      return bool(given == expected)
    only_absolute = self.abs is not None and self.rel is None
    relative = 0.0 if only_absolute else 1e-6 if self.rel is None else self.rel
    absolute = 1e-12 if self.abs is None else self.abs
    return math.isclose(given, expected, rel_tol=0, abs_tol=max(relative * abs(expected), absolute))


class param(tuple[Any, ...]):
  """The arguments of one call, for `parametrize`."""

  def __new__(cls, *values: Any, **options: Any) -> "param":
    del options
    return super().__new__(cls, values)


class _Marks:
  """Implements pytest.mark: all marks but `parametrize` are ignored."""

  def __getattr__(self, name: str) -> Any:
    if name.startswith("__"):
      raise AttributeError(name)

    def marked(*arguments: Any, **options: Any) -> Any:
      is_bare = len(arguments) == 1 and callable(arguments[0]) and not options
      return arguments[0] if is_bare else lambda test: test

    return marked

  @staticmethod
  def parametrize(names: Any, values: Any, **options: Any) -> Callable[[Any], Any]:
    """Calls a test once for each of `values`, which are for the arguments `names`."""
    del options
    is_text = isinstance(names, str)
    given_names = [*filter(None, map(str.strip, names.split(",")))] if is_text else [*names]
    # With one argument in a text, a value is the argument itself, else a sequence.
    is_argument = is_text and len(given_names) == 1
    values = list(values)  # a generator could be read only once

    def marked(test: Any) -> Any:
      def call(*arguments: Any, **keywords: Any) -> None:
        for value in values:
          is_one = is_argument and not isinstance(value, param)
          given = zip(given_names, [value] if is_one else value, strict=True)
          test(*arguments, **keywords, **dict(given))

      return call

    return marked


mark = _Marks()


def fail(reason: str = "") -> None:
  """Makes a test fail."""
  raise AssertionError(reason)
