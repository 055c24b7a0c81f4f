"""Restricts the current process: every program of a sandbox calls `confine` first."""

import ctypes
import os
import platform
import resource
import signal
import struct

# Refused system calls: programs do not need them, and could evade limits with them. They are for
# namespaces and mounts, memory that is in no address space, other processes, and rarely used parts
# of the kernel. Their numbers depend on the architecture; from 424 on they are the same everywhere.
# By machine: the number of the architecture, of clone, of the refused calls, and of the other calls
# that make a process.
_TABLES: dict[str, tuple[int, int, list[int], list[int]]] = {
  "x86_64": (
    0xC000003E,
    56,
    [29, 101, 165, 248, 249, 250, 272, 298, 308, 310, 311, 319, 321, 323],
    [57, 58],
  ),
  "aarch64": (
    0xC00000B7,
    220,
    [194, 117, 40, 217, 218, 219, 97, 241, 268, 270, 271, 279, 280, 282],
    [],
  ),
}
_REFUSED_EVERYWHERE = [425, 428, 429, 430, 442]
_CLONE3, _ENOSYS, _EPERM, _EAGAIN = 435, 38, 1, 11
_NEW_NAMESPACES, _THREAD = 0x7E020080, 0x10000
_LOAD, _EQUAL, _AT_LEAST, _HAS_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_KILL, _ERROR, _ALLOW = 0x80000000, 0x50000, 0x7FFF0000


def confine(limits: dict[str, int], threads: int, in_sandbox: bool) -> None:
  """Sets resource limits for this process.

  In a sandbox it also filters system calls. Without a sandbox, it makes the process end with the
  thread that started it, which a sandbox does itself.

  Args:
    limits: The limits by the name of the resource, such as {"CPU": 10} for RLIMIT_CPU.
    threads: How many threads the process may have if limits["NPROC"] is 1, that is if it may start
      no process. The kernel counts threads as processes, so RLIMIT_NPROC becomes `threads`, and
      the filter refuses new processes. Machines that `_TABLES` lacks keep the limit of 1.
    in_sandbox: Whether the process is in a sandbox.
  """
  os.environ["OPENBLAS_NUM_THREADS"] = "1"  # it would start threads when numpy is imported
  table = _TABLES.get(platform.machine())
  only_threads = limits.get("NPROC") == 1  # never without a sandbox: see `runner.values_of`
  if only_threads and table:
    limits = limits | {"NPROC": threads}
  for name, limit in limits.items():
    kind = getattr(resource, "RLIMIT_" + name)
    hard = resource.getrlimit(kind)[1]  # which this process may not raise
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (limit, limit))
  if not in_sandbox:
    set_death_signal = 1
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
  elif table:
    arch, clone, refused, forks = table
    refused = [*refused, *_REFUSED_EVERYWHERE, *(forks if only_threads else [])]
    _filter_calls(arch, clone, refused, only_threads)


def _filter_calls(arch: int, clone: int, refused: list[int], only_threads: bool) -> None:
  """Makes the kernel refuse system calls from here on, in this process and in its children.

  It installs a BPF program, whose steps are (operation, jump if true, jump if false, operand). For
  `arch`, `clone` and `refused` see `_TABLES`. With `only_threads`, clone may only make threads.
  """
  # _LOAD 4 loads the architecture, _LOAD 0 the number of the call, _LOAD 16 its first argument.
  # The numbers of `refused` would be other calls on another architecture, and x32 adds 0x40000000.
  steps = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
  steps += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _ERROR | _EPERM)]
  for number in refused:
    steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERROR | _EPERM)]
  # A filter cannot see the flags of clone3, which are in memory. Without it, libc uses clone.
  steps += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERROR | _ENOSYS)]
  in_clone = [(_LOAD, 0, 0, 16), (_HAS_BIT, 0, 1, _NEW_NAMESPACES)]
  in_clone += [(_RETURN, 0, 0, _ERROR | _EPERM)]
  if only_threads:  # _EAGAIN is what the kernel answers beyond RLIMIT_NPROC
    in_clone += [(_HAS_BIT, 1, 0, _THREAD), (_RETURN, 0, 0, _ERROR | _EAGAIN)]
  steps += [(_EQUAL, 0, len(in_clone), clone), *in_clone, (_RETURN, 0, 0, _ALLOW)]
  code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
  program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
  libc = ctypes.CDLL(None, use_errno=True)
  set_seccomp, filter_mode = 22, 2
  if libc.prctl(set_seccomp, filter_mode, ctypes.c_char_p(program), 0, 0):
    raise OSError(ctypes.get_errno(), "the system calls cannot be filtered")
