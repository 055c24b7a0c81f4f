"""Starts runs of `grpo_jax.train` on this machine or on a cluster.

A launcher only builds command lines. The cluster's scheduler and JAX do the rest. No file here
imports jax, so a login node without accelerators can launch runs.
"""

from grpo_jax.around.launchers import local, ray_cluster, slurm, xmanager
from grpo_jax.around.launchers.launcher import Launcher

LAUNCHERS = {
  "local": Launcher(local.launch),
  "ray": Launcher(ray_cluster.launch),
  "slurm": Launcher(slurm.launch, slurm.queued, waits=False, settle=slurm.settle),
  "xmanager": Launcher(xmanager.launch),
}
