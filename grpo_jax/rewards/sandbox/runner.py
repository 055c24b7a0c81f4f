"""Runs untrusted Python programs, such as programs that a policy wrote.

A program runs in a separate process with these limits:

  files      it sees only Python, numpy and the system's libraries, read-only, and an empty /tmp in
             memory. No home folder, no data, no /proc, no environment variables.
  network    none: a separate network namespace with only a loopback device.
  processes  a separate process namespace: the program cannot see or signal other processes, and all
             processes that it started are killed with it, whatever their group or session.
  resources  CPU time, memory, file size, number of processes: see `SandboxLimits`.
  privilege  an ordinary user without capabilities, even if root started the run. System calls that
             could evade these limits are refused (`programs/confine.py`).

This uses bubblewrap (`bwrap`) if it is installed, else `unshare`, `mount`, `pivot_root` and
`setpriv` of util-linux. Both need Linux with user namespaces, or root. `find` tries them. System
calls are refused on x86-64 and ARM64 only.

The kernel enforces the limits, so a program that exploits a bug of the kernel can escape. A program
can measure the time and the load of the machine, read all public files in /usr, and make the kernel
hold the names of many empty files while it runs.
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
NONE = "none"  # no sandbox, only resource limits
_USERS = range(60_000, 65_000)  # user ids that own no files, and that containers have, too
_READ_ONLY = ("/usr", "/lib", "/lib32", "/lib64", "/bin")

_PROGRAMS = Path(__file__).resolve().parent / "programs"
_PROGRAMS_INSIDE, _PACKAGES_INSIDE = "/programs", "/packages"

# The shell is process 1 of the namespace: all processes end when it ends. It keeps its privileges,
# so that the program cannot signal it. $1 is the size of /tmp, $2 the options of setpriv. Then come
# pairs of a folder and its name inside, "--", the folders that keep their names, "--", and the
# command. The new root is made at /mnt, which every machine has.
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
  """The resource limits of a program.

  Attributes:
    seconds: CPU time of each process. The caller must limit the wall time.
    memory: Bytes of address space of each process. Also the limit for all files in /tmp together.
    file_size: Bytes of each file that the program writes.
    processes: How many processes and threads the program may have, the first process included.
    threads: How many threads the program may have if `processes` is 1, on x86-64 and ARM64. They
      share the memory and the CPU time of the process.
  """

  seconds: int = 10
  memory: int = 2**29
  file_size: int = 2**24
  processes: int = 1
  threads: int = 1


def start(
  program: str, limits: SandboxLimits, kind: str, **streams: Any
) -> subprocess.Popen[bytes]:
  """Starts a Python program that can import only the standard library, numpy and `programs/`.

  The caller must end it with `stop`. It also ends when the thread that started it ends.

  Args:
    program: The source.
    limits: The resource limits. They are set before the first line runs.
    kind: One of `KINDS`, or `NONE` for a program that may do what the user may do.
    streams: stdin, stdout and stderr, as for subprocess.Popen.
  """
  values = values_of(limits, kind)
  folder, packages = _PROGRAMS_INSIDE, _PACKAGES_INSIDE
  if kind == NONE:  # the program can then import all packages in the folder of numpy
    folder, packages = str(_PROGRAMS), str(Path(_packages()[0]).parent)
  source = (
    f"import sys; sys.path.insert(0, {folder!r}); sys.path.append({packages!r});"
    f" from confine import confine; confine({values}, {limits.threads}, {kind != NONE})\n{program}"
  )
  # The Python that a virtual environment was made with, because a sandbox lacks the environment.
  python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
  command = [python, "-I", "-S", "-B", "-X", "utf8", "-c", source]
  wrapped = _WRAP[kind](command, limits)
  return subprocess.Popen(wrapped, env={}, cwd="/", start_new_session=True, **streams)


def values_of(limits: SandboxLimits, kind: str) -> dict[str, int]:
  """Converts the limits to the argument `limits` of `programs/confine.py`."""
  values = {
    "CPU": limits.seconds,
    "AS": limits.memory,
    "FSIZE": limits.file_size,
    "NPROC": limits.processes,
    "CORE": 0,
    "NOFILE": 64,
  }
  if kind == NONE:  # without a sandbox, the limit would count all processes of the user
    del values["NPROC"]
  return values


def stop(process: "subprocess.Popen[bytes]") -> None:
  """Kills a program and the processes that it started, and waits until it has ended."""
  if process.poll() is None:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
  process.wait()


@functools.cache
def find() -> str:
  """Finds the first of `KINDS` that works on this machine.

  Raises:
    ConfigError: None of them works.
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
  """Tries a kind of sandbox. Returns why it does not work on this machine, or "" if it does."""
  if not sys.platform.startswith("linux"):
    return "it needs Linux"
  tools = ["bwrap"] if kind == "bwrap" else ["unshare", "mount", "pivot_root"]
  if kind == "unshare" or not os.geteuid():  # bwrap drops the rights of others by itself
    tools.append("setpriv")
  for tool in tools:
    if not _tool(tool):
      return f"there is no {tool}"
  # In a sandbox, /tmp is empty, /proc is missing, and Python is the one that runs this process.
  program = (
    "import os, sys;"
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

  The sandbox has the folders of Python and the system, read-only, those of `_renamed` under other
  names, and an empty /tmp of `limits.memory` bytes. Other limits are not set here.
  """
  wrapped = [_tool("bwrap"), "--die-with-parent", "--new-session", "--clearenv"]
  wrapped += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
  if os.geteuid():  # only root may make the namespaces above without a user namespace
    wrapped += ["--unshare-user", "--cap-drop", "ALL"]
  else:
    # The limit of processes does not apply to root, so setpriv changes the user. It needs these
    # capabilities for that, and then drops them all.
    for capability in ("SETUID", "SETGID", "SETPCAP"):
      wrapped += ["--cap-add", f"CAP_{capability}"]
    command = [_tool("setpriv"), *_becomes_nobody(), *_DROPS_ALL, *command]
  for folder in _folders():
    if os.path.islink(folder):
      wrapped += ["--symlink", os.readlink(folder), folder]
    else:
      # Without this, bwrap would create the parent folders so that only root may enter them.
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
  # Each program gets a random user id, because the kernel counts processes by user.
  user = _USERS.start + secrets.randbelow(len(_USERS))
  return [f"--reuid={user}", f"--regid={user}", "--clear-groups"]


def _folders() -> list[str]:
  """The folders of the machine that a sandbox has under their own names."""
  system = [folder for folder in _READ_ONLY if os.path.lexists(folder)]
  prefix = Path(sys.base_prefix).resolve()
  return system if prefix.is_relative_to("/usr") else [*system, str(prefix)]


def _renamed() -> list[tuple[str, str]]:
  """The folders that a sandbox has under other names, as pairs (folder, name in the sandbox)."""
  packages = [(folder, f"{_PACKAGES_INSIDE}/{Path(folder).name}") for folder in _packages()]
  return [(str(_PROGRAMS), _PROGRAMS_INSIDE), *packages]


def _packages() -> list[str]:
  """The folders of numpy: the code, and the shared libraries of a wheel, if there are any."""
  code = Path(np.__file__).resolve().parent
  return [str(folder) for folder in (code, code.with_name("numpy.libs")) if folder.is_dir()]


def _tool(name: str) -> str:
  return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or ""
