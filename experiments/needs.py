"""Ends a script in one line where a package that it imports is not installed."""

from collections.abc import Iterator
import contextlib
from pathlib import Path
import sys


@contextlib.contextmanager
def needs(install: str) -> Iterator[None]:
  """Imports optional packages in its block.

  Args:
    install: The command that installs them. The script ends with it if one is missing.
  """
  try:
    yield
  except ModuleNotFoundError as error:
    sys.exit(f"{Path(sys.argv[0]).name} needs {error.name}: {install}")
