"""A Ray cluster of several nodes on this machine.

python tests/ray_cluster.py [NODES]    # until Ctrl-C; each node has two CPUs
"""

import contextlib
import os
import sys
import time

from ray.cluster_utils import Cluster

STORE_BYTES = 80 * 2**20  # about the least that Ray takes; its default is a third of the memory


@contextlib.contextmanager
def cluster(nodes):
  """Starts a cluster whose head has no room for runs, and ends it.

  Args:
    nodes: How many nodes of two CPUs it has.

  Yields:
    (the cluster, its nodes but the head, the environment in which programs use it)
  """
  head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES}
  made = Cluster(initialize_head=True, head_node_args=head)
  try:
    added = [add_node(made, index) for index in range(nodes)]
    yield made, added, os.environ | {"RAY_ADDRESS": made.address}
  finally:
    made.shutdown()


def add_node(made, tpu_worker):
  """Adds a node of two CPUs with this number in a slice of TPUs."""
  labels = {"ray.io/tpu-worker-id": str(tpu_worker)}
  return made.add_node(num_cpus=2, object_store_memory=STORE_BYTES, labels=labels)


def main():
  with cluster(int((sys.argv[1:] or ["2"])[0])) as (*_, env):
    print(f"export RAY_ADDRESS={env['RAY_ADDRESS']}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
      while True:
        time.sleep(1)


if __name__ == "__main__":
  main()
