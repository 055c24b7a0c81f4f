import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from grpo_jax import model
from grpo_jax.config import Mesh
from grpo_jax.model.config import ModelConfig
from grpo_jax.parallel import mesh as mesh_lib
from grpo_jax.parallel.mesh import initialize_distributed, make_mesh
from grpo_jax.parallel.sharding import (
  batch_sharding,
  leaf_path,
  param_specs,
  state_shardings,
  undivided,
)
from grpo_jax.settings import ConfigError
from grpo_jax.types import Coefs, TrainState

CONFIG = ModelConfig(
  vocab_size=64,
  embed_dim=16,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  mlp_dim=32,
  tie_embeddings=False,
)


def shapes(config=CONFIG):
  return jax.eval_shape(lambda: model.init(jax.random.key(0), config))


def by_path(tree):
  return {leaf_path(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def specs(mesh, config=CONFIG, **kwargs):
  return {name: s.spec for name, s in by_path(param_specs(shapes(config), mesh, **kwargs)).items()}


# --- The mesh ---


@pytest.mark.parametrize(
  "asked, sizes",
  [((-1, 1, 1, 1), (8, 1, 1, 1)), ((2, -1, 1, 2), (2, 2, 1, 2)), ((1, 2, -1, 2), (1, 2, 2, 2))],
)
def test_mesh_axes(asked, sizes):
  mesh = make_mesh(Mesh(*asked))
  assert mesh.axis_names == ("data", "fsdp", "expert", "tensor") and mesh.devices.shape == sizes
  assert mesh.axis_types == (AxisType.Auto,) * 4
  assert set(mesh.devices.flat) == set(jax.devices())


def test_mesh_of_chosen_devices():
  assert make_mesh(Mesh(-1, 1, 1, 1), jax.devices()[:3]).devices.tolist() == [
    [[[d]]] for d in jax.devices()[:3]
  ]


@pytest.mark.parametrize(
  "asked",
  [
    (3, 1, 1, 1),
    (-1, 3, 1, 1),
    (-1, 1, 16, 1),
    (1, 1, 1, 1),
    (-1, -1, 1, 1),
    (0, 8, 1, 1),
    (-2, 4, 1, -1),
  ],
)
def test_mesh_that_does_not_fit_is_refused_with_its_numbers(asked):
  with pytest.raises(ConfigError) as error:
    make_mesh(Mesh(*asked))
  assert "mesh.data={}, mesh.fsdp={}, mesh.expert={}, mesh.tensor={}".format(*asked) in str(
    error.value
  )


# --- Several processes ---


@pytest.mark.parametrize(
  "environ, several",
  [
    ({}, False),
    (
      {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2", "SLURM_PROCID": "0"},
      False,
    ),  # sbatch or salloc, without srun
    ({"SLURM_STEP_NUM_TASKS": "1"}, False),
    ({"SLURM_STEP_NUM_TASKS": "8"}, True),
    ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
    ({"TPU_WORKER_HOSTNAMES": "host-0,host-1"}, True),
    ({"TPU_ML_PLATFORM": "JAX"}, True),
    ({"TPU_ML_PLATFORM": "JAX", "TPU_SKIP_MDS_QUERY": "1"}, False),
    ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, False),
  ],
)
def test_only_a_cluster_starts_several_processes(environ, several, monkeypatch):
  calls = []
  monkeypatch.setattr(jax.distributed, "initialize", lambda: calls.append(1))
  monkeypatch.setattr(mesh_lib.os, "environ", environ)
  initialize_distributed()
  assert bool(calls) == several


def test_two_slurm_tasks_join():
  program = """
import jax
from grpo_jax.config import Mesh
from grpo_jax.parallel import mesh
mesh.initialize_distributed()
mesh.initialize_distributed()  # a second call changes nothing
print(jax.process_index(), jax.process_count(), mesh.make_mesh(Mesh(data=-1, fsdp=1, expert=1, tensor=1)).devices.size)
"""
  with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
  environ = dict(
    os.environ,
    JAX_NUM_CPU_DEVICES="1",
    SLURM_JOB_ID="1",
    SLURM_STEP_NODELIST="localhost",
    SLURM_NTASKS="2",
    SLURM_STEP_NUM_TASKS="2",
    SLURM_LOCALID="0",
    JAX_COORDINATOR_PORT=str(port),
  )
  tasks = [
    subprocess.Popen(
      [sys.executable, "-c", program],
      env=dict(environ, SLURM_PROCID=str(i)),
      text=True,
      cwd=Path(__file__).parents[1],
      stdout=subprocess.PIPE,
    )
    for i in range(2)
  ]
  assert [task.communicate(timeout=60)[0].split() for task in tasks] == [
    ["0", "2", "2"],
    ["1", "2", "2"],
  ]


# --- The table ---


def test_every_parameter_has_its_rule():
  found = specs(make_mesh(Mesh(2, 2, 1, 2)))
  assert found["embed/embedding"] == P("tensor", "fsdp")
  assert found["layers_1/attention/q/kernel"] == P("fsdp", "tensor", None)
  assert found["layers_1/attention/k/bias"] == P("tensor", None)
  assert found["layers_1/attention/o/kernel"] == P("tensor", None, "fsdp")
  assert found["layers_0/mlp/gate/kernel"] == found["layers_0/mlp/up/kernel"] == P("fsdp", "tensor")
  assert found["layers_0/mlp/down/kernel"] == P("tensor", "fsdp")
  assert found["head/kernel"] == P("fsdp", "tensor")
  norms = "layers_0/attention_norm/scale", "layers_1/mlp_norm/scale", "final_norm/scale"
  assert {found[name] for name in norms} == {P(None)}
  assert len(found) == 2 * 12 + 3


def test_layout_of_the_sampler_is_whole_along_fsdp():
  found = specs(make_mesh(Mesh(2, 2, 1, 2)), layout="tensor")
  assert found["embed/embedding"] == P("tensor", None)
  assert found["layers_1/attention/o/kernel"] == P("tensor", None, None)
  with pytest.raises(ConfigError, match="'replicated'.*train, tensor"):
    specs(make_mesh(Mesh(2, 2, 1, 2)), layout="replicated")


@pytest.mark.parametrize(
  "path", ["adapter/kernel", "layers_0/mlp/gate/kernel/q", "xembed/embedding"]
)
def test_unknown_path_is_refused_by_name(path):
  tree = jnp.zeros((8, 8))
  for key in reversed(path.split("/")):
    tree = {key: tree}
  with pytest.raises(ConfigError, match=f"parameter {path} "):
    param_specs(tree, make_mesh(Mesh(8, 1, 1, 1)))


def test_dimension_that_its_axis_does_not_divide_stays_whole():
  mesh = make_mesh(Mesh(1, 2, 1, 4))  # two kv heads on tensor=4
  found = specs(mesh)
  assert found["layers_0/attention/k/kernel"] == P("fsdp", None, None)
  assert found["layers_0/attention/k/bias"] == P(None, None)
  assert found["layers_0/attention/q/kernel"] == P("fsdp", "tensor", None)
  lines = undivided(shapes(), mesh)
  assert "layers_1/attention/v/kernel: dimension 1 of 2 is not divisible by tensor=4" in lines
  assert len(lines) == 2 * 4  # k and v, kernel and bias, of both layers
  assert undivided(shapes(), make_mesh(Mesh(2, 2, 1, 2))) == []


# --- A state on the mesh ---


def abstract_state():
  matrices = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
  optimizer = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(lambda count: 1e-3, mask=matrices)
  )
  make = lambda params: TrainState(
    jnp.int32(0), params, optimizer.init(params), Coefs(jnp.float32(0), jnp.float32(0))
  )
  return jax.eval_shape(make, shapes())


def test_moments_lie_as_their_parameters_and_scalars_everywhere():
  mesh = make_mesh(Mesh(2, 2, 1, 2))
  state, params = abstract_state(), by_path(param_specs(shapes(), mesh))
  found = state_shardings(state, mesh)
  assert jax.tree.structure(found) == jax.tree.structure(state)
  assert by_path(found.params) == params
  adam = found.opt_state[1][0]
  assert by_path(adam.mu) == by_path(adam.nu) == params
  assert found.step == adam.count == NamedSharding(mesh, P())


@pytest.mark.parametrize(
  "path", ["memory", "mu/final_norm/scale"]
)  # the second of another shape than the parameter
def test_array_of_the_optimizer_without_a_parameter_is_refused(path):
  strange = abstract_state().replace(opt_state={path: jax.ShapeDtypeStruct((3,), jnp.float32)})
  with pytest.raises(ConfigError, match=rf"opt_state/{path} \(3,\)"):
    state_shardings(strange, make_mesh(Mesh(8, 1, 1, 1)))


def test_batch_is_split_by_prompts_over_all_axes_but_tensor():
  prompts = jax.device_put(
    jnp.arange(16).reshape(8, 2), batch_sharding(make_mesh(Mesh(2, 1, 2, 2)))
  )
  assert {shard.data.shape for shard in prompts.addressable_shards} == {(2, 2)}
  assert len({shard.index[0].start for shard in prompts.addressable_shards}) == 4


def test_numbers_do_not_depend_on_the_mesh():
  mesh = make_mesh(Mesh(2, 2, 1, 2))
  make = lambda: model.init(jax.random.key(0), CONFIG)
  tokens = jax.random.randint(jax.random.key(1), (4, 6), 0, CONFIG.vocab_size)
  positions = jnp.broadcast_to(jnp.arange(6), tokens.shape)
  forward = jax.jit(lambda params, tokens: model.forward(params, CONFIG, tokens, positions)[0])
  split = jax.jit(make, out_shardings=param_specs(shapes(), mesh))()
  gate = split["layers_0"]["mlp"]["gate"]["kernel"]
  assert gate.addressable_shards[0].data.shape == (16 // 2, 32 // 2)
  logits = forward(split, jax.device_put(tokens, batch_sharding(mesh)))
  np.testing.assert_allclose(logits, forward(jax.jit(make)(), tokens), atol=1e-5)
