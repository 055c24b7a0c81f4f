"""Runs a command under a pseudo-terminal and says when it first printed and how long it was silent.

  python experiments/silences.py --until 'grpo 1/' -- python -m grpo_jax.train \\
    --config=configs/arithmetic.py --workdir=/tmp/new

What moves is what a person sees: any bytes that the terminal gets. A command that draws the same
line again and again moves only where the line changes. `--bytes FILE` keeps what was printed.
"""

import argparse
from collections.abc import Sequence
import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from typing import NamedTuple

_CONTROLS = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|\r|\n")


class Output(NamedTuple):
  """Something that a command printed.

  Attributes:
    seconds: Since the command's start.
    text: The bytes.
  """

  seconds: float
  text: bytes


class Recording(NamedTuple):
  """What a command did.

  Attributes:
    outputs: What it printed, in order.
    seconds: How long it was watched.
    code: Its exit code. None if it was stopped, because it had printed enough.
  """

  outputs: list[Output]
  seconds: float
  code: int | None

  @property
  def text(self) -> bytes:
    """All that was printed."""
    return b"".join(one.text for one in self.outputs)

  @property
  def changes(self) -> list[float]:
    """The seconds at which something else was to be read than before."""
    times, last = list[float](), b""
    for seconds, text in self.outputs:
      words = _CONTROLS.sub(b" ", text).strip()
      if words and words != last:
        times.append(seconds)
        last = words
    return times

  @property
  def longest_silence(self) -> tuple[float, float]:
    """(how long, from when) nothing else was to be read, the start and the end included."""
    times = [0.0, *self.changes, self.seconds]
    return max((after - before, before) for before, after in zip(times, times[1:]))


def record(command: Sequence[str], until: str = "", limit: float = 600.0) -> Recording:
  """Runs a command on a terminal of 100 columns.

  Args:
    command: The program and its arguments.
    until: Once this is printed, the command is stopped. "" waits for its end.
    limit: The most seconds that it may take.

  Returns:
    What it printed, and when.

  Raises:
    TimeoutError: It took longer.
  """
  start, outputs, code = time.monotonic(), list[Output](), None
  process, terminal = pty.fork()
  if process == 0:
    os.execvpe(command[0], [*command], {**os.environ, "TERM": "xterm-256color"})
  fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
  has_ended = False
  try:
    while True:
      waited = time.monotonic() - start
      if waited > limit:
        raise TimeoutError(f"{command} has not ended after {waited:.0f} s: {outputs[-3:]}")
      if not select.select([terminal], [], [], 0.5)[0]:
        continue
      try:
        text = os.read(terminal, 1 << 16)
      except OSError:  # how Linux says that the command has closed its terminal
        text = b""
      if not text:
        has_ended = True
        break
      outputs.append(Output(time.monotonic() - start, text))
      if until and until.encode() in b"".join(one.text for one in outputs[-3:]):
        break
    seconds = time.monotonic() - start
  finally:
    if not has_ended:
      with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    status = os.waitpid(process, 0)[1]
    os.close(terminal)
    if has_ended:
      code = os.waitstatus_to_exitcode(status)
  return Recording(outputs, seconds, code)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--until", default="", help="stop the command once this is printed")
  parser.add_argument("--limit", type=float, default=600.0, help="the most seconds")
  parser.add_argument("--bytes", help="a file for what was printed")
  parser.add_argument("command", nargs="+")
  options = parser.parse_args()
  found = record(options.command, options.until, options.limit)
  if options.bytes:
    with open(options.bytes, "wb") as file:
      file.write(found.text)
  silence, since = found.longest_silence
  first = found.outputs[0].seconds if found.outputs else float("nan")
  print(f"first output after {first:.2f} s")
  print(f"longest silence {silence:.1f} s, from {since:.1f} s on")
  print(f"{len(found.changes)} changes in {found.seconds:.1f} s, exit code {found.code}")


if __name__ == "__main__":
  main()
