"""Writes TensorBoard's event files in the training thread.

The writer of tensorboardX uses another thread. When the disk is full, that thread dies, and the run
would wait for it for ever.
"""

from collections.abc import Mapping, Sequence
import html
from pathlib import Path
import re
import socket
import struct
import time
from typing import Any

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboardX.proto.tensor_pb2 import TensorProto
from tensorboardX.record_writer import masked_crc32c

from grpo_jax.storage.json_files import AppendedFile

_VERSION = "brain.Event:2"


class Events:
  """One event file. Each start of a run writes another one."""

  def __init__(self, workdir: Path, start_step: int) -> None:
    """Creates the file. TensorBoard then drops earlier data of steps after `start_step`."""
    # TensorBoard needs the time in the name. The count distinguishes two starts within a second.
    number = len(list(workdir.glob("events.out.tfevents.*")))
    name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{number}"
    self._file = AppendedFile(workdir / name)
    self._append(Event(file_version=_VERSION))
    self._append(Event(step=start_step + 1, session_log=SessionLog(status=SessionLog.START)))

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Appends the numbers of a step, which must be finite, by their names."""
    scalars = [Summary.Value(tag=_tag(name), simple_value=value) for name, value in values.items()]
    self._append(Event(step=step, summary=Summary(value=scalars)))

  def write_text(self, step: int, name: str, text: str) -> None:
    """Appends a text in Markdown."""
    content = TensorProto(dtype="DT_STRING", string_val=[text.encode()])
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    value = Summary.Value(tag=_tag(name), tensor=content, metadata=metadata)
    self._append(Event(step=step, summary=Summary(value=[value])))

  def close(self) -> None:
    self._file.close()

  def _append(self, event: Event) -> None:
    """Writes an event as a TFRecord: the length, the content and their checksums."""
    event.wall_time = time.time()
    content = event.SerializeToString()
    length = struct.pack("<Q", len(content))
    self._file.append(length + _checksum(length) + content + _checksum(content))


def _tag(name: str) -> str:
  """The name with "_" in place of characters that TensorBoard does not allow."""
  return re.sub(r"[^-/\w.]", "_", name).lstrip("/")


def _checksum(content: bytes) -> bytes:
  return struct.pack("<I", masked_crc32c(content))


MOST_SHOWN = 64  # how many completions of a step are shown; all are in completions/
_FIRST = ("prompt", "completion", "reward", "advantage", "length")
_MARKDOWN = "\\`*_{}[]()#+-.!|~"  # html.escape handles & < >


def columns(rows: Sequence[dict[str, Any]]) -> list[str]:
  """The fields of completions to show: no token ids and no log-probs."""
  scores = [name for name in rows[0] if name.startswith("rewards/")] if rows else []
  return [*_FIRST, *scores]


def completions_as_markdown(rows: Sequence[dict[str, Any]]) -> str:
  """Formats completions as a Markdown table. Markdown and HTML in their texts are escaped."""
  names = columns(rows)
  lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
  for row in rows[:MOST_SHOWN]:
    lines.append("| " + " | ".join(_cell(row.get(name)) for name in names) + " |")
  return "\n".join(lines)


def _cell(value: Any) -> str:
  if isinstance(value, float):
    return f"{value:.4g}"
  if not isinstance(value, str):
    return "-" if value is None else str(value)
  text = html.escape(value, quote=False)
  escaped = (f"&#{ord(letter)};" if letter in _MARKDOWN else letter for letter in text)
  return "".join(escaped).replace("\n", "<br>")
