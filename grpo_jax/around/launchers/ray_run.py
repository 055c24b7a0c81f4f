"""One run on a Ray cluster: its reserved room, its processes, and restarts after lost hosts.

This module needs the package ray.
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

# Prefixes of the environment variables that a run inherits from the launcher, not from its node.
_OF_TRACKERS = tuple(f"{name.upper()}_" for name in TRACKERS)
_PASSED_ON = ("HF_", "JAX_", "LIBTPU_", "NCCL_", "XLA_", *_OF_TRACKERS)
_SECONDS_TO_RELEASE = 120.0  # how long a process on a lost node may still hold the run's folder


class RayRun:
  """A run of a `unit`, which waits for room in the cluster or has a process on each of its hosts.

  `poll` moves it through these states: it waits for a placement group (`_room`), then for actors to
  report their places, and then it has processes (`_group`).
  """

  def __init__(self, unit: Unit, hosts: int, resources: Mapping[str, float], restarts: int) -> None:
    """Requests room from the cluster.

    Args:
      unit: The unit of the run.
      hosts: The number of hosts.
      resources: The amounts to reserve on each host, by Ray's resource names.
      restarts: How often the run may be restarted after it has lost a host.
    """
    self.unit = unit
    self._hosts, self._resources = hosts, resources
    self._restarts, self._restarted = restarts, 0
    self._is_stopping = False
    self._why = ""  # the reason, if it failed before it had processes
    self._forget()
    self._reserve()

  @property
  def waits(self) -> bool:
    """Whether the run waits for room and has no processes yet."""
    return self._group is None

  def poll(self) -> int | None:
    """Advances the run. Returns its exit code, or None as long as it runs, waits or restarts."""
    code = self._group.poll() if self._group else self._poll_start()
    if code is None:
      return None
    self._free()
    # A negative code means that a host was lost or a process was killed. Other failures would occur
    # again after a restart.
    if code >= 0 or self._is_stopping or self._restarted == self._restarts:
      return code
    self._restarted += 1
    say(
      f"restart {self._restarted} of {self._restarts} of {self.unit.title}: {self.why_it_failed()}"
    )
    self._forget()
    return None

  def send(self, number: int) -> None:
    """Sends the signal `number` to each process. The run then does not start or restart."""
    self._is_stopping = True
    if self._group:
      self._group.send(number)

  def why_it_failed(self) -> str:
    """Describes how the run failed."""
    return self._group.why_it_failed() if self._group else self._why

  def _forget(self) -> None:
    """Resets the state to the time before the run has room."""
    self._room: PlacementGroup | None = None
    self._actors: list[ray.actor.ActorHandle] = []
    self._places: list[ray.ObjectRef] = []
    self._group: ProcessGroup | None = None
    self._without_room_since = time.monotonic()

  def _reserve(self) -> None:
    """Requests a placement group. STRICT_SPREAD puts each host on another node."""
    strategy = "STRICT_SPREAD" if self._hosts > 1 else "PACK"
    self._room = placement_group([dict(self._resources)] * self._hosts, strategy)
    self._ready = self._room.ready()

  def _poll_start(self) -> int | None:
    """Takes the next step towards the start of the processes. Returns a code if it failed."""
    if self._is_stopping:
      return STOPPED
    try:
      if not self._room:  # a restart
        self._reserve_again()
      elif not self._actors and _are_there([self._ready]):
        ray.get(self._ready)  # raises the error if the reservation has failed
        self._start_actors()
      elif self._actors and _are_there(self._places):
        self._start_processes(ray.get(self._places))
    except RayTaskError as error:  # the actor's own code failed, and would fail again
      self._why = f"its hosts could not be prepared: {error.cause}"
      return FAILED
    except RayError as error:
      self._why = f"a host was lost before it began: {reason_of(error)}"
      # An actor that cannot be made would fail again. After LOST, the run may restart.
      return FAILED if getattr(error, "actor_init_failed", False) else LOST
    return None

  def _reserve_again(self) -> None:
    """Requests room again once no process of the last start holds the folder or after a timeout."""
    is_late = time.monotonic() - self._without_room_since > _SECONDS_TO_RELEASE
    if is_late or not lock.holder(Path(self.unit.workdir)):
      self._reserve()

  def _start_actors(self) -> None:
    """Starts an actor in each bundle of the placement group, and asks each for its place."""
    named = ("CPU", "GPU", "memory")  # for which Ray has separate options
    resources = dict(
      num_cpus=self._resources.get("CPU"),
      num_gpus=self._resources.get("GPU"),
      memory=self._resources.get("memory"),
      resources={name: x for name, x in self._resources.items() if name not in named},
    )
    actor = ray.remote(HostActor)
    for index in range(self._hosts):
      strategy = PlacementGroupSchedulingStrategy(self._room, index)
      # Two threads: one waits in `HostActor.run`, the other answers `send` and `kill` meanwhile.
      options = actor.options(scheduling_strategy=strategy, max_concurrency=2, **resources)
      self._actors.append(options.remote())
    self._places = [actor.place.remote() for actor in self._actors]

  def _start_processes(self, places: Sequence[Place]) -> None:
    """Starts the run's process on each actor, ordered by TPU worker. `places` are the actors'."""
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
    """Frees the room of the run, whose processes have ended or cannot be reached."""
    for actor in self._actors:
      ray.kill(actor)
    if self._room:
      remove_placement_group(self._room)


def environments(places: Sequence[Place]) -> list[dict[str, str]]:
  """The environment variables of each process, among them those by which it finds the others.

  Args:
    places: The places of the processes, in the order of their process ids.
  """
  passed_on = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
  return [passed_on | one for one in found_by(places[0].address, len(places))]


def _are_there(results: Sequence[ray.ObjectRef]) -> bool:
  """Whether the results of all these remote calls are available."""
  return len(ray.wait(list(results), num_returns=len(results), timeout=0)[0]) == len(results)
