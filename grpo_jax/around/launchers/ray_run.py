"""One run on a Ray cluster: room for it, its hosts, and its next start when one of them is lost.

This file needs the package ray.
"""

from collections.abc import Mapping, Sequence
import os
from pathlib import Path
import time

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from grpo_jax.around.launchers.launcher import say
from grpo_jax.around.launchers.process_group import ProcessGroup, found_by, make_logs
from grpo_jax.around.launchers.ray_host import LOST, HostActor, Place, RemoteProcess, reason_of
from grpo_jax.around.launchers.units import Unit
from grpo_jax.config import TRACKERS
from grpo_jax.console.exit_codes import FAILED, STOPPED
from grpo_jax.storage import lock

# What a run inherits from the launcher's environment. The rest is that of the node.
_OF_TRACKERS = tuple(f"{name.upper()}_" for name in TRACKERS)
_PASSED_ON = ("HF_", "JAX_", "LIBTPU_", "NCCL_", "XLA_", *_OF_TRACKERS)
_SECONDS_TO_RELEASE = 120.0  # the folder, by a process on a node that was lost


class RayRun:
  """A run that waits for room in the cluster, or that has a process on each of its hosts.

  Attributes:
    unit: The run.
  """

  def __init__(self, unit: Unit, hosts: int, resources: Mapping[str, float], restarts: int) -> None:
    """Asks the cluster for room.

    Args:
      unit: The run.
      hosts: How many hosts it has.
      resources: The amounts that are reserved for it on each of them, by Ray's names.
      restarts: How often it is started again after the loss of a host.
    """
    self.unit = unit
    self._hosts, self._resources = hosts, resources
    self._restarts, self._restarted = restarts, 0
    self._is_stopping = False
    self._why = ""  # it failed before it had processes
    self._forget()
    self._reserve()

  @property
  def waits(self) -> bool:
    """Whether it has no processes."""
    return self._group is None

  def poll(self) -> int | None:
    """The exit code of the run, or None while it goes on. Takes the next step towards its end."""
    code = self._group.poll() if self._group else self._poll_start()
    if code is None:
      return None
    self._free()
    # A code below 0 means that a host is gone, or that a process there was killed. Other failures
    # would come again.
    if code >= 0 or self._is_stopping or self._restarted == self._restarts:
      return code
    self._restarted += 1
    say(
      f"restart {self._restarted} of {self._restarts} of {self.unit.title}: {self.why_it_failed()}"
    )
    self._forget()
    return None

  def send(self, number: int) -> None:
    """Sends a signal to each process."""
    self._is_stopping = True
    if self._group:
      self._group.send(number)

  def why_it_failed(self) -> str:
    """How the run failed."""
    return self._group.why_it_failed() if self._group else self._why

  def _forget(self) -> None:
    """Is before its start."""
    self._room: PlacementGroup | None = None
    self._actors: list[ray.actor.ActorHandle] = []
    self._places: list[ray.ObjectRef] = []
    self._group: ProcessGroup | None = None
    self._since = time.monotonic()

  def _reserve(self) -> None:
    strategy = "STRICT_SPREAD" if self._hosts > 1 else "PACK"
    self._room = placement_group([dict(self._resources)] * self._hosts, strategy)
    self._ready = self._room.ready()

  def _poll_start(self) -> int | None:
    """Goes on towards processes. Returns a code if there will be none."""
    if self._is_stopping:
      return STOPPED
    try:
      if not self._room:
        self._reserve_again()
      elif not self._actors and _are_there([self._ready]):
        ray.get(self._ready)
        self._start_actors()
      elif self._actors and _are_there(self._places):
        self._start_processes(ray.get(self._places))
    except RayTaskError as error:
      self._why = f"its hosts could not be prepared: {error.cause}"
      return FAILED
    except RayError as error:
      self._why = f"a host was lost before it began: {reason_of(error)}"
      return FAILED if getattr(error, "actor_init_failed", False) else LOST
    return None

  def _reserve_again(self) -> None:
    """Asks for room again as soon as no process of the last start holds the folder."""
    is_late = time.monotonic() - self._since > _SECONDS_TO_RELEASE
    if is_late or not lock.holder(Path(self.unit.workdir)):
      self._reserve()

  def _start_actors(self) -> None:
    named = ("CPU", "GPU", "memory")  # which Ray takes as options of their own
    resources = dict(
      num_cpus=self._resources.get("CPU"),
      num_gpus=self._resources.get("GPU"),
      memory=self._resources.get("memory"),
      resources={name: x for name, x in self._resources.items() if name not in named},
    )
    actor = ray.remote(HostActor)
    for index in range(self._hosts):
      strategy = PlacementGroupSchedulingStrategy(self._room, index)
      options = actor.options(scheduling_strategy=strategy, max_concurrency=2, **resources)
      self._actors.append(options.remote())
    self._places = [actor.place.remote() for actor in self._actors]

  def _start_processes(self, places: Sequence[Place]) -> None:
    order = sorted(range(self._hosts), key=lambda index: places[index].tpu_worker)
    places, actors = [places[index] for index in order], [self._actors[index] for index in order]
    processes = []
    logs = make_logs(self.unit, self._hosts)
    for actor, place, log, environment in zip(actors, places, logs, environments(places)):
      processes.append(RemoteProcess(actor, place, log))
      processes[-1].start(self.unit, environment)
    self._group = ProcessGroup(self.unit, processes)
    say(f"started {self.unit.title} on {', '.join(map(str, places))}")

  def _free(self) -> None:
    """Gives the room back. The processes have ended, or cannot be reached."""
    for actor in self._actors:
      ray.kill(actor)
    if self._room:
      remove_placement_group(self._room)


def environments(places: Sequence[Place]) -> list[dict[str, str]]:
  """The environment variables of each process of a run, among them those to find the others.

  Args:
    places: Where the processes are, the first one first.
  """
  passed_on = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
  return [passed_on | one for one in found_by(places[0].address, len(places))]


def _are_there(results: Sequence[ray.ObjectRef]) -> bool:
  """Whether all of these remote calls have ended."""
  return len(ray.wait(list(results), num_returns=len(results), timeout=0)[0]) == len(results)
