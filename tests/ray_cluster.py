"""A Ray cluster of several nodes on this machine.

python tests/ray_cluster.py [NODES]    # until Ctrl-C; each node has one CPU
"""

import contextlib
import os
import sys
import time

from ray.cluster_utils import Cluster


@contextlib.contextmanager
def cluster(nodes):
  """Starts a cluster whose head has no room for runs, and ends it.

  Args:
    nodes: How many nodes of one CPU it has.

  Yields:
    (the cluster, the environment in which programs use it)
  """
  store = 80 * 2**20  # bytes, the least that Ray takes; the default is a third of the memory
  head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": store}
  made = Cluster(initialize_head=True, head_node_args=head)
  try:
    for index in range(nodes):
      # The label that hosts of a TPU slice have, the other way round.
      labels = {"ray.io/tpu-worker-id": str(nodes - 1 - index)}
      made.add_node(num_cpus=1, object_store_memory=store, labels=labels)
    yield made, os.environ | {"RAY_ADDRESS": made.address}
  finally:
    made.shutdown()


def main():
  with cluster(int((sys.argv[1:] or ["2"])[0])) as (_, env):
    print(f"export RAY_ADDRESS={env['RAY_ADDRESS']}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
      while True:
        time.sleep(1)


if __name__ == "__main__":
  main()
