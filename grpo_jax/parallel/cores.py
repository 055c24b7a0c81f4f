"""How many CPU cores a process of a run may use."""

import os
import socket
import zlib

import numpy as np

from grpo_jax.parallel.hosts import Hosts


def cores(hosts: Hosts) -> int:
  """The number of this process's cores, divided by the processes that share the same cores.

  All processes of the run call it together.
  """
  allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
  count = len(allowed) or os.cpu_count() or 1
  digest = zlib.crc32(f"{socket.gethostname()} {allowed}".encode())
  digests = hosts.join_rows(np.array([digest], np.uint32).view(np.int32))  # of all processes
  return max(1, count // int((digests.view(np.uint32) == digest).sum()))
