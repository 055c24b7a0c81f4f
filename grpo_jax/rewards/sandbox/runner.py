"""Runs Python programs that nobody has read, such as those that a policy wrote.

A program runs in a process of its own with these bounds:

  files      it sees only the Python that runs it, numpy, and the system's libraries, read-only, and
             an empty /tmp in memory. No home folder, no data, no /proc, no environment variables.
  network    none: a network namespace of its own, with nothing but an empty loopback.
  processes  a process namespace of its own. It sees and signals no other process, and all that it
             started is killed with it, whatever its group or session.
  resources  CPU time, wall time, memory, file size, number of processes: see `SandboxLimits`.
  privilege  an ordinary user without capabilities, even if the run is root's. System calls that
             lead around these bounds are refused (`programs/confine.py`).

This is done by bubblewrap (`bwrap`) where it is installed, else by `unshare`, `mount`, `pivot_root`
and `setpriv` of util-linux. Both need Linux with user namespaces, or root. `find` tries them.
System calls are refused on x86-64 and ARM64 alone.

The bounds are those of the kernel: a program that exploits a defect of the kernel gets out. A
program can measure the time and the load of the machine, read all that everybody may read in /usr,
and make the kernel hold the names of many empty files while it runs.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
from pathlib import Path
import secrets
import shutil
import signal
import subprocess
import sys
from typing import Any

import numpy as np

from grpo_jax.settings import ConfigError

KINDS = ("bwrap", "unshare")
NONE = "none"  # limits of resources only
_USERS = range(60_000, 65_000)  # they own no files, and containers have them too
_READ_ONLY = ("/usr", "/lib", "/lib32", "/lib64", "/bin")

_PROGRAMS = Path(__file__).resolve().parent / "programs"
_PROGRAMS_INSIDE, _PACKAGES_INSIDE = "/programs", "/packages"

# The shell is process 1 of the namespace. It keeps its privileges, so that the program cannot
# touch it, and everything ends when it ends. $1 is the size of /tmp, $2 the options of setpriv.
# Then come pairs of a folder and its name inside up to "--", the folders that keep their names up
# to "--", and the command. The new root is made at /mnt, which is there on every machine.
_MAKE_ROOT = r"""
set -e
size=$1 drop=$2
mount -t tmpfs -o size=1m,mode=755 tmpfs /mnt
show() {
  mkdir -p "/mnt$2"
  mount --rbind "$1" "/mnt$2"
  mount -o remount,bind,ro "/mnt$2"
}
shift 2
while [ "$1" != -- ]; do
  show "$1" "$2"
  shift 2
done
shift
while [ "$1" != -- ]; do
  if [ -L "$1" ]; then
    ln -s "$(readlink "$1")" "/mnt$1"
  else
    show "$1" "$1"
  fi
  shift
done
shift
mkdir /mnt/tmp /mnt/old /mnt/proc
mount -t proc proc /mnt/proc  # umount needs it
mount -t tmpfs -o "size=$size,mode=1777" tmpfs /mnt/tmp
cd /mnt
pivot_root . old
umount -l /old
umount -l /proc
rmdir /old /proc
mount -o remount,ro /
cd /tmp
setpriv $drop --no-new-privs --inh-caps=-all --bounding-set=-all "$@" && exit 0
exit 1
"""


@dataclasses.dataclass(frozen=True)
class SandboxLimits:
  """The limits of a program's resources.

  Attributes:
    seconds: CPU time of each of its processes. Wall time is for the caller to limit.
    memory: Bytes of address space of each of its processes, and of all files in /tmp.
    file_size: Bytes of each file that it writes.
    processes: How many processes and threads it may have, itself included.
    threads: How many threads it may have if `processes` is 1, on x86-64 and ARM64. They share the
      memory and the CPU time of their process.
  """

  seconds: int = 10
  memory: int = 2**29
  file_size: int = 2**24
  processes: int = 1
  threads: int = 1


def start(
  program: str, limits: SandboxLimits, kind: str, **streams: Any
) -> subprocess.Popen[bytes]:
  """Starts a Python program that uses the standard library and numpy alone.

  The caller must end it with `stop`. It ends by itself if the thread that started it ends.

  Args:
    program: Its source.
    limits: Its limits. They are set before its first line.
    kind: One of `KINDS`, or `NONE` for a program that may do what the user may do.
    streams: stdin, stdout and stderr as of subprocess.Popen.
  """
  values = values_of(limits, kind)
  folder, packages = _PROGRAMS_INSIDE, _PACKAGES_INSIDE
  if kind == NONE:
    folder, packages = str(_PROGRAMS), str(Path(_packages()[0]).parent)
  source = (
    f"import sys; sys.path.insert(0, {folder!r}); sys.path.append({packages!r});"
    f" from confine import confine; confine({values}, {limits.threads}, {kind != NONE})\n{program}"
  )
  python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
  command = [python, "-I", "-S", "-B", "-X", "utf8", "-c", source]
  wrapped = _WRAP[kind](command, limits)
  return subprocess.Popen(wrapped, env={}, cwd="/", start_new_session=True, **streams)


def values_of(limits: SandboxLimits, kind: str) -> dict[str, int]:
  """The limits as `programs/confine.py` takes them."""
  values = {
    "CPU": limits.seconds,
    "AS": limits.memory,
    "FSIZE": limits.file_size,
    "NPROC": limits.processes,
    "CORE": 0,
    "NOFILE": 64,
  }
  if kind == NONE:  # there the limit would count all processes of the user
    del values["NPROC"]
  return values


def stop(process: "subprocess.Popen[bytes]") -> None:
  """Kills a program with all that it started, and waits until it is gone."""
  if process.poll() is None:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
  process.wait()


@functools.cache
def find() -> str:
  """The first of `KINDS` that works on this machine.

  Raises:
    ConfigError: None works.
  """
  reasons = []
  for kind in KINDS:
    reason = _problem(kind)
    if not reason:
      return kind
    reasons.append(f"{kind}: {reason}")
  raise ConfigError(
    f"programs cannot be sandboxed on this machine ({'; '.join(reasons)}): install bubblewrap, and"
    " allow user namespaces"
  )


def _problem(kind: str) -> str:
  """Why a kind of sandbox does not work here. Empty if it does."""
  if not sys.platform.startswith("linux"):
    return "it needs Linux"
  tools = ("bwrap", "setpriv") if kind == "bwrap" else ("unshare", "mount", "pivot_root", "setpriv")
  for tool in tools:
    if not _tool(tool):
      return f"there is no {tool}"
  # It is empty, shows nothing of other processes, and has this Python and not the system's.
  program = (
    "import json, os, sys;"
    " print(os.listdir('/tmp'), os.path.exists('/proc/1'), sys.version.split()[0], end='')"
  )
  streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
  process = start(program, SandboxLimits(), kind, **streams)
  try:
    out, err = process.communicate(timeout=20)
  except subprocess.TimeoutExpired:
    return "it does not answer"
  finally:
    stop(process)
  if out.decode(errors="replace") == f"[] False {sys.version.split()[0]}":
    return ""
  return " ".join(err.decode(errors="replace").split())[-200:] or f"it fails ({out!r:.80})"


def _bwrap(command: list[str], limits: SandboxLimits) -> list[str]:
  """The command line that runs a command in a sandbox of bubblewrap.

  It sees the folders of Python and the system read-only, those of this package and numpy under
  other names, and an empty /tmp that it may fill.
  """
  wrapped = [_tool("bwrap"), "--die-with-parent", "--new-session", "--clearenv"]
  wrapped += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
  if os.geteuid():
    wrapped += ["--unshare-user", "--cap-drop", "ALL"]
  else:
    # No limit of processes holds for the user root, so the program becomes the user nobody. For
    # that setpriv needs these capabilities, and gives all of them up.
    for capability in ("SETUID", "SETGID", "SETPCAP"):
      wrapped += ["--cap-add", f"CAP_{capability}"]
    command = [_tool("setpriv"), *_becomes_nobody(), *_DROPS_ALL, *command]
  for folder in _folders():
    if os.path.islink(folder):
      wrapped += ["--symlink", os.readlink(folder), folder]
    else:
      # bwrap would make the folders above it so that only root may enter them.
      for above in reversed(Path(folder).parents[:-1]):
        wrapped += ["--perms", "0755", "--dir", str(above)]
      wrapped += ["--ro-bind", folder, folder]
  wrapped += ["--perms", "0755", "--dir", _PACKAGES_INSIDE]
  for folder, inside in _renamed():
    wrapped += ["--ro-bind", folder, inside]
  wrapped += ["--perms", "1777", "--size", str(limits.memory), "--tmpfs", "/tmp"]
  return [*wrapped, "--remount-ro", "/", "--chdir", "/tmp", "--", *command]


def _unshare(command: list[str], limits: SandboxLimits) -> list[str]:
  is_root = not os.geteuid()
  user = [] if is_root else ["--user", "--map-root-user"]
  drop = " ".join(_becomes_nobody()) if is_root else ""
  return [
    *(_tool("setpriv"), "--pdeathsig", "KILL", _tool("unshare"), *user),
    *("--net", "--pid", "--ipc", "--uts", "--mount", "--fork", "--kill-child"),
    *("/bin/sh", "-c", "PATH=/usr/sbin:/usr/bin:/sbin:/bin\n" + _MAKE_ROOT, "sh"),
    *(str(limits.memory), drop, *itertools.chain(*_renamed()), "--", *_folders(), "--", *command),
  ]


_WRAP = {"bwrap": _bwrap, "unshare": _unshare, NONE: lambda command, limits: command}
_DROPS_ALL = ("--no-new-privs", "--inh-caps=-all", "--bounding-set=-all")


def _becomes_nobody() -> list[str]:
  # Another user for each program, because the kernel counts processes by user.
  user = _USERS.start + secrets.randbelow(len(_USERS))
  return [f"--reuid={user}", f"--regid={user}", "--clear-groups"]


def _folders() -> list[str]:
  """The folders of the machine that the program sees."""
  system = [folder for folder in _READ_ONLY if os.path.lexists(folder)]
  prefix = Path(sys.base_prefix).resolve()
  return system if prefix.is_relative_to("/usr") else [*system, str(prefix)]


def _renamed() -> list[tuple[str, str]]:
  """The folders that it sees under another name, as pairs (folder, its name inside)."""
  packages = [(folder, f"{_PACKAGES_INSIDE}/{Path(folder).name}") for folder in _packages()]
  return [(str(_PROGRAMS), _PROGRAMS_INSIDE), *packages]


def _packages() -> list[str]:
  """The folders of numpy: its code, and beside it the libraries that a wheel brings."""
  code = Path(np.__file__).resolve().parent
  return [str(folder) for folder in (code, code.with_name("numpy.libs")) if folder.is_dir()]


def _tool(name: str) -> str:
  return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or ""
