"""Launches runs on a Ray cluster. Each run has a placement group, with an actor on each host."""

from collections.abc import Mapping, Sequence
import json
import os
import re
import shlex
import socket

from grpo_jax.around.launchers.launcher import say
from grpo_jax.around.launchers.options import Options
from grpo_jax.around.launchers.units import Unit
from grpo_jax.around.launchers.work import work
from grpo_jax.console.exit_codes import DONE
from grpo_jax.progress import doing
from grpo_jax.settings import ConfigError

_ACCELERATORS = ("GPU", "TPU")


def launch(units: Sequence[Unit], options: Options) -> int:
  """Trains the units on the cluster, and waits until they have ended, with `work`.

  Each host of a run is an actor that runs one process. The hosts of a run are on different nodes.
  Runs wait until the cluster has room for them. If a run loses a host, its other processes are
  ended, and the run resumes from its checkpoint on hosts that have room.

  Args:
    units: The runs to train.
    options: Uses hosts, at_once, ray_resources, restarts and dry_run.

  Returns:
    0 if all runs are finished, 1 if one failed, else 75.

  Raises:
    ConfigError: The package ray is missing, there is no cluster, or an option is invalid.
  """
  resources = parse_resources(options.ray_resources)
  if options.dry_run:
    for unit in units:
      print(f"# {options.hosts} x {json.dumps(resources)}: {unit.title}")
      print(shlex.join(unit.command("python")))
    return DONE
  try:
    import ray  # here, because it is an optional dependency

    from grpo_jax.around.launchers.ray_run import RayRun
  except ImportError:
    raise ConfigError("flag --on=ray needs the package ray: pip install -e '.[ray]'") from None
  _connect()
  try:
    _warn_of_little_room(ray.nodes(), resources, options.hosts)
    return work(
      units,
      lambda unit: RayRun(unit, options.hosts, resources, options.restarts),
      options.at_once or len(units),
    )
  finally:
    ray.shutdown()


def parse_resources(text: str) -> dict[str, float]:
  """Parses --ray_resources: the amounts to reserve on each host, by Ray's names.

  CPU is 1 if it is not set, because Ray refuses to reserve nothing.

  Raises:
    ConfigError: The text is not a JSON object with positive numbers.
  """
  try:
    amounts = json.loads(text or "{}")
  except ValueError:
    amounts = None
  are_amounts = isinstance(amounts, dict) and all(
    isinstance(amount, int | float) and not isinstance(amount, bool) and amount > 0
    for amount in amounts.values()
  )
  if not are_amounts:
    raise ConfigError(
      f"flag --ray_resources={text}: write an object of JSON such as"
      ' {"GPU": 8}, with amounts above 0'
    )
  return {"CPU": 1} | amounts


def _connect() -> None:
  """Connects to the Ray cluster at RAY_ADDRESS, or without it to the cluster of this machine.

  Raises:
    ConfigError: There is no cluster, or the connection fails.
  """
  import ray

  try:
    with doing("connecting to the Ray cluster"):
      _check_somebody_listens(os.environ.get("RAY_ADDRESS", ""))
      # The output of runs is in their logs, so Ray does not show what actors print.
      ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
  except Exception as error:  # Ray raises many types
    if isinstance(error, ConnectionError) and "RAY_ADDRESS" not in os.environ:
      raise ConfigError(  # Ray's message names a flag that grpo_jax does not have
        "flag --on=ray: no Ray cluster runs on this machine: start one (ray start --head), run this"
        " on a machine of a cluster, or set RAY_ADDRESS=HOST:PORT"
      ) from error
    reason = " ".join(str(error).split())
    raise ConfigError(
      f"flag --on=ray: {reason:.300}; run this on a machine of the cluster, or set RAY_ADDRESS"
    ) from error


def _check_somebody_listens(address: str) -> None:
  """Raises OSError if nobody listens at a host:port. Ray itself would retry for ten minutes."""
  if match := re.fullmatch(r"([^:/]+):(\d+)", address):
    try:
      socket.create_connection((match[1], int(match[2])), timeout=10).close()
    except OSError as error:
      raise OSError(
        f"RAY_ADDRESS={address} cannot be reached ({error.strerror or error})"
      ) from None


def _warn_of_little_room(
  nodes: Sequence[Mapping], resources: Mapping[str, float], hosts: int
) -> None:
  """Warns if fewer than `hosts` nodes have the resources, or if runs reserve no accelerators."""
  alive = [node["Resources"] for node in nodes if node["Alive"]]
  fitting = [
    node for node in alive if all(node.get(key, 0) >= amount for key, amount in resources.items())
  ]
  if len(fitting) < hosts:
    say(
      f"warning: a run needs {hosts} nodes with {json.dumps(resources)}, and the cluster has"
      f" {len(fitting)}: waiting for more"
    )
  for name in _ACCELERATORS:
    if any(name in node for node in alive) and not any(key in resources for key in _ACCELERATORS):
      say(
        f"warning: the cluster has {name}s and no run reserves any, so runs can share a host: add"
        f" --ray_resources='{{\"{name}\": 8}}' with the number of one host"
      )
