"""What the processes of a run do together: one process here, two of them in a subprocess each."""

import os
from pathlib import Path
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.config import Mesh
from grpo_jax.parallel.hosts import Hosts
from grpo_jax.parallel.mesh import make_mesh
from grpo_jax.settings import ConfigError


def hosts_of(*axes):
  return Hosts(make_mesh(Mesh(*axes)))


def test_arrays_go_onto_the_mesh_and_come_back():
  hosts = hosts_of(2, 1, 2, 2)
  tree = {"tokens": np.arange(24, dtype=np.int32).reshape(8, 3), "half": jnp.ones(4, jnp.bfloat16)}
  on_mesh = hosts.put(tree)
  assert {shard.data.shape for shard in on_mesh["tokens"].addressable_shards} == {(2, 3)}
  assert len(on_mesh["tokens"].sharding.device_set) == 8
  back = hosts.fetch(on_mesh)
  assert type(back["tokens"]) is np.ndarray and back["half"].dtype == jnp.bfloat16
  jax.tree.map(np.testing.assert_array_equal, back, tree)


def test_one_process_is_the_first_and_the_only_one():
  hosts = hosts_of(8, 1, 1, 1)
  assert hosts.is_first and hosts.any_process(True) is True and hosts.any_process(False) is False
  tree = {"reward": np.array([1.5])}
  assert hosts.join_rows(tree) is tree
  assert hosts.own_rows(5) == slice(0, 5) and hosts.index == 0
  assert hosts.on_each(lambda: "result") == "result"
  with pytest.raises(ZeroDivisionError):
    hosts.on_each(lambda: 1 // 0)


@pytest.mark.parametrize("error", [ConfigError("no disk"), OSError("no disk")])
def test_what_fails_on_the_first_process_is_raised_there(error):
  def fail():
    raise error

  hosts = hosts_of(8, 1, 1, 1)
  with pytest.raises(type(error), match="no disk"):
    hosts.on_first(fail)
  assert hosts.on_first(lambda: "result") == "result"


def test_batches_that_the_mesh_does_not_divide_are_refused():
  hosts = hosts_of(2, 1, 2, 2)
  assert hosts.row_shards == 4
  hosts.check_rows({"batch.prompts": 8, "warm_start.batch": 0})
  with pytest.raises(ConfigError) as error:
    hosts.check_rows({"batch.prompts": 8, "batch.micro_batch": 6})
  assert str(error.value) == (
    "config key batch.micro_batch is 6: it must be a multiple of mesh.data x mesh.fsdp x "
    "mesh.expert = 4"
  )


TWO_PROCESSES = """
import sys
import threading
import time
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
import numpy as np
from grpo_jax.config import Mesh
from grpo_jax.parallel.hosts import SAMPLER_THREAD, Hosts
from grpo_jax.parallel.mesh import make_mesh
from grpo_jax.settings import ConfigError, RunFailed

hosts = Hosts(make_mesh(Mesh(data=2, fsdp=1, expert=1, tensor=1)))
process = jax.process_index()
assert hosts.is_first == (process == 0) and hosts.row_shards == 2
rows = np.arange(12, dtype=np.int32).reshape(4, 3)
on_mesh = hosts.put({"rows": rows})
assert on_mesh["rows"].addressable_data(0).shape == (2, 3)
np.testing.assert_array_equal(hosts.fetch(on_mesh)["rows"], rows)
assert hosts.any_process(process == 1) and not hosts.any_process(False)
# Five rows: three of the first process, two of the second. One row: of the first.
assert hosts.own_rows(5) == (slice(0, 3), slice(3, 5))[process]
assert hosts.own_rows(1) == (slice(0, 1), slice(1, 1))[process]
whole = np.arange(10, dtype=np.float32).reshape(5, 2)
whole[3, 0] = np.nan
for rows in (whole, whole[:1], whole[:0]):
  own = rows[hosts.own_rows(len(rows))]
  joined = hosts.join_rows({"a": own, "b": own[:, 0] > 2})
  np.testing.assert_array_equal(joined["a"], rows)
  np.testing.assert_array_equal(joined["b"], rows[:, 0] > 2)
assert hosts.on_each(lambda: process) == process
for failing in (0, 1):
  try:
    hosts.on_each(lambda: 1 // int(process != failing))
  except (ZeroDivisionError, RunFailed) as error:
    assert isinstance(error, ZeroDivisionError) == (process == failing)
  else:
    raise AssertionError
calls = []
result = hosts.on_first(lambda: calls.append("called") or "result")
assert (calls, result) == ((["called"], "result") if process == 0 else ([], None))

def fail():
  raise OSError("no disk")

apart, joined = Hosts(hosts.mesh, 2), []


def exchange():
  # Beside the main thread, in another order on each process, in one and in several messages.
  for size in (1, 3, 700_000):
    time.sleep(0.05 * process)
    own = np.full(size * (1 + process), process, np.float32)
    joined.append(apart.join_rows(own))


thread = threading.Thread(target=exchange, name=SAMPLER_THREAD)
thread.start()
for i in range(20):
  time.sleep(0.01 * (1 - process))
  assert apart.any_process(process == i % 2) and not apart.any_process(False)
thread.join()
for size, rows in zip((1, 3, 700_000), joined, strict=True):
  np.testing.assert_array_equal(rows, np.repeat([0, 1], [size, 2 * size]))
started = threading.Thread(target=lambda: waiting(apart), name=SAMPLER_THREAD)


def waiting(hosts):
  try:
    hosts.any_process(True)
  except RunFailed as error:
    joined.append(str(error))


if process == 0:  # the other process never answers
  started.start()
  apart.sampler_mailbox.close()
  started.join()
  assert "the run ends while its processes exchange" in joined[-1]

try:
  hosts.on_first(fail)
except (OSError, ConfigError) as error:
  print(type(error).__name__, error)
"""


@pytest.mark.slow
def test_two_processes_agree():
  with socket.socket() as free:
    free.bind(("localhost", 0))
    address = f"localhost:{free.getsockname()[1]}"
  processes = [
    subprocess.Popen(
      [sys.executable, "-c", TWO_PROCESSES, address, str(i)],
      cwd=Path(__file__).parents[1],
      env={**os.environ, "JAX_NUM_CPU_DEVICES": "1"},
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for i in range(2)
  ]
  try:
    outputs = [process.communicate(timeout=60) for process in processes]
  finally:
    for process in processes:
      process.kill()
  assert [process.returncode for process in processes] == [0, 0], outputs
  # gloo prints lines before.
  assert [out.splitlines()[-1] for out, _ in outputs] == [
    "OSError no disk",
    "ConfigError the first process has ended: see what it says",
  ]
