"""The beginning of every program of a sandbox: limits what its process can do from here on."""

import ctypes
import platform
import resource
import signal
import struct

# System calls that the programs do without and that would take them around a limit: new namespaces
# and mounts, memory that is in no address space, other processes, and rarely used parts of the
# kernel. The numbers are those of the architectures; from 424 on they are the same everywhere.
# By machine: the number of the architecture, of clone, and of the refused calls.
_TABLES: dict[str, tuple[int, int, list[int]]] = {
  "x86_64": (
    0xC000003E,
    56,
    [29, 101, 165, 248, 249, 250, 272, 298, 308, 310, 311, 319, 321, 323],
  ),
  "aarch64": (
    0xC00000B7,
    220,
    [194, 117, 40, 217, 218, 219, 97, 241, 268, 270, 271, 279, 280, 282],
  ),
}
_REFUSED_EVERYWHERE = [425, 428, 429, 430, 442]
_CLONE3, _ENOSYS, _EPERM = 435, 38, 1
_NEW_NAMESPACES = 0x7E020080
_LOAD, _EQUAL, _AT_LEAST, _HAS_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_KILL, _ERROR, _ALLOW = 0x80000000, 0x50000, 0x7FFF0000


def confine(limits: dict[str, int], in_sandbox: bool) -> None:
  """Sets limits of resources by name, such as {"CPU": 10}.

  In a sandbox it also filters system calls. Elsewhere the process ends with the thread that started
  it, for which a sandbox cares itself.
  """
  for name, limit in limits.items():
    kind = getattr(resource, "RLIMIT_" + name)
    hard = resource.getrlimit(kind)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (limit, limit))
  table = _TABLES.get(platform.machine())
  if not in_sandbox:
    set_death_signal = 1
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
  elif table:
    arch, clone, refused = table
    _filter_calls(arch, clone, [*refused, *_REFUSED_EVERYWHERE])


def _filter_calls(arch: int, clone: int, refused: list[int]) -> None:
  """Makes the kernel refuse system calls from here on, in this process and in its children."""
  steps = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
  steps += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _ERROR | _EPERM)]  # x86's second table
  for number in refused:
    steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERROR | _EPERM)]
  steps += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERROR | _ENOSYS)]  # libc then uses clone
  steps += [(_EQUAL, 0, 3, clone), (_LOAD, 0, 0, 16), (_HAS_BIT, 0, 1, _NEW_NAMESPACES)]
  steps += [(_RETURN, 0, 0, _ERROR | _EPERM), (_RETURN, 0, 0, _ALLOW)]
  code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
  program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
  libc = ctypes.CDLL(None, use_errno=True)
  set_seccomp, filter_mode = 22, 2
  if libc.prctl(set_seccomp, filter_mode, ctypes.c_char_p(program), 0, 0):
    raise OSError(ctypes.get_errno(), "the system calls cannot be filtered")
