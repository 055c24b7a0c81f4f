"""A Slurm cluster on this machine, of its own daemons: munged, slurmctld and two slurmd.

python tests/slurm_cluster.py FOLDER    # until Ctrl-C; FOLDER is new and keeps configs and logs

It needs Debian's slurm-wlm and munge, or their like, and no root, no accounting and no cgroups.
Other clusters on the machine are left alone: ports, sockets and files are its own, and whoever
uses it has its SLURM_CONF in the environment. Jobs of the partition "urgent" preempt others.
"""

import contextlib
import os
from pathlib import Path
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time

# Slurm wants nodes of different names, and JAX must find the machine by each: that is 127.0.0.1.
NODES = (socket.gethostname(), "0x7f000001")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel")
_SYSTEM_FOLDERS = "/usr/sbin:/sbin"  # which an ordinary user's PATH may lack
_START_SECONDS = 60

CONFIG = """
ClusterName=tests
SlurmctldHost={host}
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# A job that is queued again waits for the end of its old credential: 2 minutes by default.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,batch_sched_delay=1,requeue_delay=1
MpiDefault=none
ReturnToService=2
KillWait={kill_wait}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""
NODE = "NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={port} CPUs=2 State=UNKNOWN\n"
PARTITIONS = """\
PartitionName=all Nodes=ALL Default=YES State=UP
PartitionName=urgent Nodes=ALL PriorityTier=10 State=UP
"""


def missing():
  """Why there can be no cluster here, or ""."""
  absent = [name for name in PROGRAMS if not _path(name)]
  return f"needs Slurm and munge: there is no {', '.join(absent)}" if absent else ""


@contextlib.contextmanager
def cluster(folder, kill_wait=60):
  """Starts a cluster, and ends it and all of its jobs.

  Args:
    folder: A new folder for its files.
    kill_wait: The seconds between SIGTERM and SIGKILL for a job that is cancelled.

  Yields:
    The environment in which sbatch and the others use it.
  """
  folder = Path(folder).absolute()
  for name in ("state", *(f"spool-{node}" for node in NODES)):
    (folder / name).mkdir(parents=True)
  host, user = socket.gethostname(), pwd.getpwuid(os.getuid()).pw_name
  port, *ports = _free_ports(1 + len(NODES))
  nodes = [NODE.format(name=name, port=port) for name, port in zip(NODES, ports)]
  config = CONFIG.format(host=host, port=port, user=user, folder=folder, kill_wait=kill_wait)
  (folder / "slurm.conf").write_text("".join([config, *nodes, PARTITIONS]))
  (folder / "munge.key").write_bytes(os.urandom(128))
  (folder / "munge.key").chmod(0o400)
  env = os.environ | {"SLURM_CONF": f"{folder}/slurm.conf"}
  env["PATH"] = f"{env.get('PATH', '')}:{_SYSTEM_FOLDERS}"
  processes = []
  try:
    munge = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket"]
    munge += [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    slurmds = [["slurmd", "-D", "-N", node] for node in NODES]
    for command in (munge, ["slurmctld", "-D"], *slurmds):
      processes.append(_start(command, folder, env))
      if command is munge:
        _wait_for(lambda: (folder / "munge.socket").exists(), processes, folder)
    idle = "\n".join(["idle"] * len(NODES))
    _wait_for(
      lambda: _output(env, "sinfo", "-h", "-N", "-p", "all", "-o", "%T") == idle, processes, folder
    )
    yield env
  finally:
    _end(processes, env)


def _start(command, folder, env):
  name = command[0] if command[0] != "slurmd" else f"slurmd-{command[-1]}"
  with open(folder / f"{name}.log", "ab") as log:
    return subprocess.Popen(
      [_path(command[0]), *command[1:]],
      env=env,
      stdin=subprocess.DEVNULL,
      stdout=log,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )


def _end(processes, env):
  """Cancels the jobs, waits for their end, and ends the daemons, the last one first."""
  if len(processes) > 2:
    subprocess.run(["scancel", "--me", "--signal=KILL", "--full"], env=env, capture_output=True)
    subprocess.run(["scancel", "--me"], env=env, capture_output=True)
    with contextlib.suppress(TimeoutError):
      _wait_for(lambda: not _output(env, "squeue", "-h"), processes, None, seconds=20)
  for process in reversed(processes):
    process.send_signal(signal.SIGTERM)
    try:
      process.wait(10)
    except subprocess.TimeoutExpired:
      process.kill()
      process.wait()


def _wait_for(is_true, processes, folder, seconds=_START_SECONDS):
  end = time.monotonic() + seconds
  while not is_true():
    dead = [process for process in processes if process.poll() is not None]
    if dead or time.monotonic() > end:
      logs = folder.glob("*.log") if folder else []
      tails = "\n".join(f"{log.name}:\n{log.read_text()[-1000:]}" for log in logs)
      raise TimeoutError(f"the Slurm cluster: {dead or 'does not answer'}\n{tails}")
    time.sleep(0.2)


def _output(env, *command):
  return subprocess.run(command, env=env, capture_output=True, text=True).stdout.strip()


def _path(program):
  return shutil.which(program, path=f"{os.environ.get('PATH', '')}:{_SYSTEM_FOLDERS}")


def _free_ports(count):
  listeners = [socket.socket() for _ in range(count)]
  try:
    for listener in listeners:
      listener.bind(("", 0))
    return [listener.getsockname()[1] for listener in listeners]
  finally:
    for listener in listeners:
      listener.close()


def main():
  """Runs a cluster until Ctrl-C or SIGTERM."""
  if missing():
    sys.exit(missing())
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  with cluster(sys.argv[1]) as env, contextlib.suppress(KeyboardInterrupt):
    print(f"export SLURM_CONF={env['SLURM_CONF']}", flush=True)
    while True:
      time.sleep(1)


if __name__ == "__main__":
  main()
