"""Silences what orbax prints beside the errors that it raises.

A damaged file or a full disk is reported in one line. Without these filters, that line would drown
in what orbax and asyncio print about the tasks that they gave up.
"""

import logging
import re
import sys
import traceback
from types import CodeType
from typing import TYPE_CHECKING

from absl import logging as absl_logging

if TYPE_CHECKING:
  from sys import UnraisableHookArgs


def silence_orbax() -> None:
  """Installs the filters. Call it once, before orbax reads or writes anything."""
  report = sys.unraisablehook

  def report_unless_orbax(unraisable: "UnraisableHookArgs") -> None:
    if not _is_orbax_noise(unraisable):
      report(unraisable)

  sys.unraisablehook = report_unless_orbax
  logging.getLogger("asyncio").addFilter(_keep_asyncio_record)
  absl_logging.get_absl_logger().addFilter(_keep_absl_record)


def _is_orbax_noise(unraisable: "UnraisableHookArgs") -> bool:
  """True for tasks that orbax abandons when it cannot read an array."""
  code: CodeType | None = getattr(unraisable.object, "cr_code", None)
  abandoned = code is not None and "orbax" in code.co_filename
  return abandoned or str(unraisable.exc_value) == "Event loop is closed"


def _keep_asyncio_record(record: logging.LogRecord) -> bool:
  """Drops what asyncio says about tasks of orbax: it raises their errors, too."""
  frames = traceback.extract_tb(record.exc_info[2]) if record.exc_info else []
  places = [record.getMessage(), *(frame.filename for frame in frames)]
  return not any(re.search("orbax|tensorstore", place) for place in places)


def _keep_absl_record(record: logging.LogRecord) -> bool:
  """Drops orbax's progress messages, and its errors: it raises each of them, too."""
  return record.levelno == logging.WARNING or "orbax" not in record.pathname
