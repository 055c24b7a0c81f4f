"""One host of a run on a Ray cluster: the actor, and the launcher's handle of its process.

This module needs the package ray.
"""

from collections.abc import Mapping
import dataclasses
import os
from pathlib import Path
import re
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from grpo_jax.around.launchers.process_group import Process, kill_session, start_process
from grpo_jax.around.launchers.units import Unit
from grpo_jax.console.exit_codes import FAILED, STOPPED
from grpo_jax.console.text import shorten

LOST = -int(signal.SIGKILL)  # the exit code to assume for a process on a lost node
_SECONDS_TO_ANSWER = 10
_LONGEST_REASON = 200
# Ray sets this label on each host of a TPU slice. JAX needs the processes in this order.
_TPU_WORKER_LABEL = "ray.io/tpu-worker-id"

# Runs a command that the kernel kills when the actor ends. A killed actor cannot kill the command
# itself. 1 is PR_SET_PDEATHSIG of prctl(2). Starts nothing if the actor has ended before the call.
_KILLED_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
  os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclasses.dataclass(frozen=True)
class Place:
  """The place of an actor in the cluster.

  Attributes:
    host: The name of the actor's machine.
    node: Ray's id of the actor's node.
    address: host:port with a free port, where the actor's process can listen.
    tpu_worker: The number of the host in its TPU slice, 0 without TPUs.
  """

  host: str
  node: str
  address: str
  tpu_worker: int

  def __str__(self) -> str:
    return f"{self.host} (node {self.node[:8]})"


class HostActor:
  """Runs one process of a run on a node. Needs two threads, because one of them waits in `run`."""

  def __init__(self) -> None:
    self._process: subprocess.Popen | None = None
    self._early_signals: list[int] = []  # signals that arrived before the process was started
    self._lock = threading.Lock()

  def place(self) -> Place:
    """The place of the actor, with a port that is free now."""
    context = ray.get_runtime_context()
    labels = context.get_node_labels() or {}
    with socket.socket() as listener:
      listener.bind(("", 0))
      port = listener.getsockname()[1]
    return Place(
      host=socket.gethostname(),
      node=context.get_node_id(),
      address=f"{ray.util.get_node_ip_address()}:{port}",
      tpu_worker=int(labels.get(_TPU_WORKER_LABEL, 0)),
    )

  def run(self, unit: Unit, environment: Mapping[str, str], folder: str, log: str) -> int:
    """Trains a run in a process on this node, and waits until it ends.

    Args:
      unit: The run.
      environment: Environment variables of the process, in addition to the actor's.
      folder: The working folder of the process.
      log: The file to which the output of the process is appended.

    Returns:
      The exit code, or -N after signal N. 75 if a signal arrived before the process was started.

    Raises:
      OSError: A folder does not exist on this node.
    """
    os.chdir(folder)
    command = unit.command()  # with this node's Python
    if sys.platform == "linux":
      command = [sys.executable, "-c", _KILLED_WITH_PARENT, str(os.getpid()), *command]
    with self._lock:
      if self._early_signals:
        return STOPPED
      self._process = start_process(command, environment, Path(log))
    return self._process.wait()

  def send(self, number: int) -> None:
    """Sends the signal `number` to the process. Before its start, keeps it from being started."""
    with self._lock:
      if self._process:
        self._process.send_signal(number)
      else:
        self._early_signals.append(number)

  def kill(self) -> None:
    """Kills the process and its child processes."""
    self.send(signal.SIGKILL)
    if self._process:
      kill_session(self._process)


class RemoteProcess(Process):
  """The launcher's handle of an actor's process. Its code is LOST if the node does not answer."""

  def __init__(self, actor: Any, place: Place, log: Path) -> None:
    super().__init__(log, f"on {place}")
    self._actor = actor
    self._end: ray.ObjectRef | None = None
    self._code: int | None = None
    self._why = ""  # how it ended, if it has no exit code

  def start(self, unit: Unit, environment: Mapping[str, str]) -> None:
    """Starts the process in the launcher's working folder."""
    self._end = self._actor.run.remote(unit, environment, os.getcwd(), str(self.log))

  @property
  def code(self) -> int | None:
    if self._code is None and ray.wait([self._end], timeout=0)[0]:
      self._take_end()
    return self._code

  def send(self, number: int) -> None:
    if self.code is None:
      self._actor.send.remote(number)

  def kill(self) -> None:
    if self.code is None:
      self._actor.kill.remote()
      if ray.wait([self._end], timeout=_SECONDS_TO_ANSWER)[0]:
        self._take_end()
      else:
        self._code, self._why = LOST, "was lost: its node does not answer"

  def how_it_ended(self) -> str:
    return self._why or super().how_it_ended()

  def _take_end(self) -> None:
    """Stores the result of the actor's finished call of `run` in `_code` and `_why`."""
    try:
      self._code = ray.get(self._end)
    except RayTaskError as error:
      self._code = FAILED
      self._why = f"could not be started: {error.cause}; all hosts need the launcher's folders"
    except RayError as error:
      self._code, self._why = LOST, f"was lost: {reason_of(error)}"


def reason_of(error: RayError) -> str:
  """The reason in Ray's message why an actor has died, such as "its node has died"."""
  text = " ".join(str(error).split())
  found = re.search(r"The actor (?:is dead|died) because (.*?)(?:\.|$)", text)
  return shorten(found[1] if found else text, _LONGEST_REASON)
