"""How many CPU cores a process of a run may use."""

import os
import socket
import zlib

import numpy as np

from grpo_jax.parallel.hosts import Hosts


def cores(hosts: Hosts) -> int:
  """The number of this process's cores, divided by the processes that have the same ones.

  All processes of the run call it together.
  """
  own = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
  count = len(own) or os.cpu_count() or 1
  place = zlib.crc32(f"{socket.gethostname()} {own}".encode())
  places = hosts.join_rows(np.array([place], np.uint32).view(np.int32))
  return max(1, count // int((places.view(np.uint32) == place).sum()))
