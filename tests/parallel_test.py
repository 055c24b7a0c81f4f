"""The mesh, the start of several processes, and where every array lies on the mesh."""

import dataclasses
import os
from pathlib import Path
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from grpo_jax import model
from grpo_jax.config import Mesh
from grpo_jax.model.config import ModelConfig
from grpo_jax.parallel import processes
from grpo_jax.parallel.mesh import arranged, make_mesh, sampling_mesh
from grpo_jax.parallel.processes import initialize_distributed
from grpo_jax.parallel.sharding import (
  batch_sharding,
  leaf_path,
  param_specs,
  replicated,
  state_shardings,
  undivided,
)
from grpo_jax.settings import ConfigError
from grpo_jax.types import Coefficients, TrainState

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
  "axes, sizes",
  [((-1, 1, 1, 1), (8, 1, 1, 1)), ((2, -1, 1, 2), (2, 2, 1, 2)), ((1, 2, -1, 2), (1, 2, 2, 2))],
)
def test_mesh_axes(axes, sizes):
  mesh = make_mesh(Mesh(*axes))
  assert mesh.axis_names == ("data", "fsdp", "expert", "tensor") and mesh.devices.shape == sizes
  assert mesh.axis_types == (AxisType.Auto,) * 4
  assert set(mesh.devices.flat) == set(jax.devices())


def test_mesh_of_chosen_devices():
  assert make_mesh(Mesh(-1, 1, 1, 1), jax.devices()[:3]).devices.tolist() == [
    [[[d]]] for d in jax.devices()[:3]
  ]


@pytest.mark.parametrize(
  "axes",
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
def test_mesh_that_does_not_fit_is_refused_with_its_numbers(axes):
  with pytest.raises(ConfigError) as error:
    make_mesh(Mesh(*axes))
  settings = "mesh.data={}, mesh.fsdp={}, mesh.expert={}, mesh.tensor={}".format(*axes)
  assert settings in str(error.value)


# --- Several processes ---


@pytest.mark.parametrize(
  "environ, several",
  [
    ({}, False),
    # sbatch or salloc without srun.
    ({"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2", "SLURM_PROCID": "0"}, False),
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
  monkeypatch.setattr(jax.distributed, "initialize", lambda **_: calls.append(1))
  monkeypatch.setattr(processes.os, "environ", environ)
  initialize_distributed()
  assert bool(calls) == several


@pytest.mark.slow
def test_two_slurm_tasks_join():
  program = """
import jax
from grpo_jax.config import Mesh
from grpo_jax.parallel import mesh, processes
processes.initialize_distributed()
processes.initialize_distributed()  # a second call changes nothing
devices = mesh.make_mesh(Mesh(data=-1, fsdp=1, expert=1, tensor=1)).devices
print(jax.process_index(), jax.process_count(), devices.size)
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
  assert [task.communicate(timeout=60)[0].splitlines()[-1].split() for task in tasks] == [
    ["0", "2", "2"],
    ["1", "2", "2"],
  ]


# --- The table ---


def test_every_parameter_has_its_rule():
  found = specs(make_mesh(Mesh(2, 2, 1, 2)))
  assert found["embed/embedding"] == P("tensor", "fsdp")
  # No axis of the mesh splits the layers of a stack.
  assert found["layers_0/attention/q/kernel"] == P(None, "fsdp", "tensor", None)
  assert found["layers_0/attention/k/bias"] == P(None, "tensor", None)
  assert found["layers_0/attention/o/kernel"] == P(None, "tensor", None, "fsdp")
  gate, up, down = (found[f"layers_0/mlp/{name}/kernel"] for name in ("gate", "up", "down"))
  assert gate == up == P(None, "fsdp", "tensor") and down == P(None, "tensor", "fsdp")
  assert found["head/kernel"] == P("fsdp", "tensor")
  norms = "layers_0/attention_norm/scale", "layers_0/mlp_norm/scale"
  assert {found[name] for name in norms} == {P(None, None)}
  assert found["final_norm/scale"] == P(None)
  assert len(found) == 12 + 3


def test_every_stack_has_the_rules_of_a_layer():
  mesh = make_mesh(Mesh(2, 2, 1, 2))
  alternating = dataclasses.replace(CONFIG, num_layers=4, windows=(4, 0, 4, 0))
  found, alone = specs(mesh, alternating), specs(mesh)
  assert any(name.startswith("layers_1/") for name in found)
  for name, spec in found.items():
    assert spec == alone[name.replace("layers_1", "layers_0")], name
  shape = shapes(alternating)["layers_0"]["mlp"]["up"]["kernel"].shape
  assert shape == (2, CONFIG.embed_dim, CONFIG.mlp_dim)


@dataclasses.dataclass(frozen=True)
class Chip:
  """What JAX reads of a device to arrange it."""

  id: int
  platform: str
  slice_index: int
  coords: tuple[int, ...] = ()
  core_on_chip: int = 0
  process_index: int = 0
  device_kind: str = "a chip without a layout of its own"


def torus(*sides: int, slices: int = 1) -> list[Chip]:
  """The chips of slices with these sides."""
  places = [(number, place) for number in range(slices) for place in np.ndindex(*sides)]
  return [Chip(i, "tpu", number, place) for i, (number, place) in enumerate(places)]


@pytest.mark.parametrize(
  "sizes, sides",
  [
    ((1, 4, 1, 4), (4, 4, 1)),
    ((1, 8, 1, 2), (4, 4, 1)),  # jax.make_mesh refuses this one, and the next two
    ((1, 2, 8, 1, 1), (4, 4, 1)),
    ((1, 8, 1, 8), (4, 4, 4)),
    ((2, 8, 1, 1), (2, 2, 4)),
  ],
)
def test_any_axes_fit_a_torus(sizes, sides):
  chips = torus(*sides)
  found = arranged(sizes, chips)
  assert found.shape == sizes
  assert sorted(chip.id for chip in found.flat) == list(range(len(chips)))


@pytest.mark.parametrize("dropped", [[15], [13, 14], [0, 15], [20, 31]])
def test_chips_with_holes_stay_in_order(dropped):
  """Slice after slice, also where one slice has fewer chips or they are given in turn."""
  chips = [chip for chip in torus(4, 4, 1, slices=2) if chip.id not in dropped]
  mixed = sorted(chips, key=lambda chip: (chip.id % 16, chip.id))
  found = arranged((len(chips), 1), mixed)
  assert [chip.id for chip in found.flat] == [chip.id for chip in chips]


def test_slices_of_two_sizes_stay_in_order():
  chips = [chip for chip in torus(4, 4, 1, slices=2) if chip.id < 24]  # 4 x 4 and 2 x 4 chips
  assert [chip.id for chip in arranged((3, 8), chips).flat] == list(range(24))


@pytest.mark.parametrize(
  "sizes, slices_of_first_axes",
  [
    ((2, 16, 1, 1), [[0] * 16, [1] * 16]),
    ((1, 8, 1, 4), [[0] * 4 + [1] * 4]),
    ((4, 2, 1, 4), [[0] * 2, [0] * 2, [1] * 2, [1] * 2]),
    ((1, 1, 1, 32), [[0]]),
  ],
)
def test_slices_lie_along_the_first_axes(sizes, slices_of_first_axes):
  found = arranged(sizes, torus(4, 4, 1, slices=2))
  assert found.shape == sizes and len({chip.id for chip in found.flat}) == 32
  numbers = np.vectorize(lambda chip: chip.slice_index)(found)
  assert numbers[:, :, 0, 0].tolist() == slices_of_first_axes
  if sizes[-1] < 32:  # only an axis of all chips crosses the slices
    assert (numbers == numbers[:, :, :1, :1]).all()


def test_four_slices_share_two_axes():
  found = arranged((2, 4, 1, 2), torus(2, 2, 1, slices=4))
  numbers = np.vectorize(lambda chip: chip.slice_index)(found)
  assert numbers[:, :, 0, 0].tolist() == [[0, 0, 1, 1], [2, 2, 3, 3]]


def test_gpus_of_two_machines_are_in_order():
  gpus = [Chip(i, "gpu", i // 8) for i in range(16)]  # JAX calls each machine a slice
  found = arranged((1, 16, 1, 1), gpus[8:] + gpus[:8])
  assert [gpu.id for gpu in found.flat] == list(range(16))


def test_the_mesh_of_the_sampler_has_the_same_devices_in_the_same_order():
  mesh = make_mesh(Mesh(data=1, fsdp=4, tensor=2))
  for tensor, data in ((2, 4), (4, 2), (8, 1)):
    other = sampling_mesh(mesh, tensor)
    assert dict(other.shape) == {"data": data, "fsdp": 1, "expert": 1, "tensor": tensor}
    assert list(other.devices.flat) == list(mesh.devices.flat)
  mixture = sampling_mesh(make_mesh(Mesh(data=1, fsdp=2, expert=2, tensor=2)), 4)
  assert dict(mixture.shape) == {"data": 1, "fsdp": 1, "expert": 2, "tensor": 4}
  whole = make_mesh(Mesh(data=4, fsdp=1, tensor=2))
  assert sampling_mesh(whole, 2) is whole
  for tensor in (1, 3, 16):
    with pytest.raises(ConfigError, match=f"sampling.tensor is {tensor}: .*mesh.tensor = 2"):
      sampling_mesh(whole, tensor)
  split = sampling_mesh(whole, 2, context=2)
  assert dict(split.shape) == {"data": 2, "fsdp": 1, "slots": 2, "expert": 1, "tensor": 2}
  assert list(split.devices.flat) == list(whole.devices.flat)
  with pytest.raises(ConfigError, match="sampling.context is 3: it must divide the 4 devices"):
    sampling_mesh(whole, 2, context=3)


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
  assert found["layers_0/attention/k/kernel"] == P(None, "fsdp", None, None)
  assert found["layers_0/attention/k/bias"] == P(None, None, None)
  assert found["layers_0/attention/q/kernel"] == P(None, "fsdp", "tensor", None)
  lines = undivided(shapes(), mesh)
  assert "layers_0/attention/v/kernel: dimension 2 of 2 is not divisible by tensor=4" in lines
  assert len(lines) == 4  # k and v, kernel and bias
  assert undivided(shapes(), make_mesh(Mesh(2, 2, 1, 2))) == []


# --- A state on the mesh ---


def is_matrix(params):
  return jax.tree.map(lambda x: x.ndim > 1, params)


ADAMW = optax.chain(
  optax.clip_by_global_norm(1.0), optax.adamw(optax.constant_schedule(1e-3), mask=is_matrix)
)


def abstract_state(optimizer=ADAMW, config=CONFIG):
  def make(params):
    coefs = Coefficients(kl=jnp.float32(0), entropy=jnp.float32(0))
    return TrainState(
      step=jnp.int32(0), params=params, opt_state=optimizer.init(params), coefs=coefs
    )

  return jax.eval_shape(make, shapes(config))


def test_moments_lie_as_their_parameters_and_scalars_everywhere():
  mesh = make_mesh(Mesh(2, 2, 1, 2))
  state, params = abstract_state(), by_path(param_specs(shapes(), mesh))
  found = state_shardings(state, mesh)
  assert jax.tree.structure(found) == jax.tree.structure(state)
  assert by_path(found.params) == params
  adam = found.opt_state[1][0]
  assert by_path(adam.mu) == by_path(adam.nu) == params
  assert found.step == adam.count == found.coefs.kl == NamedSharding(mesh, P())
  assert replicated(state, mesh) == []


@pytest.mark.parametrize(
  "optimizer, moments",
  [
    (optax.lion(1e-3), lambda opt_state: opt_state[0].mu),
    (optax.sgd(1e-3, momentum=0.9), lambda opt_state: opt_state[0].trace),
    (optax.MultiSteps(optax.sgd(1e-3), 4), lambda opt_state: opt_state.acc_grads),
  ],
  ids=["lion", "sgd", "multi_steps"],
)
def test_any_array_with_a_parameters_path_and_shape_lies_as_the_parameter(optimizer, moments):
  mesh = make_mesh(Mesh(2, 2, 1, 2))
  state = abstract_state(optimizer)
  found = moments(state_shardings(state, mesh).opt_state)
  assert by_path(found) == by_path(param_specs(shapes(), mesh))
  assert replicated(state, mesh) == []


def test_the_moments_of_adafactor_lie_as_the_dimensions_that_are_left():
  mesh = make_mesh(Mesh(2, 2, 1, 2))
  optimizer = optax.adafactor(1e-3, min_dim_size_to_factor=8)
  state = abstract_state(optimizer)
  factored = state_shardings(state, mesh).opt_state[0]
  # The embedding [V, D] = [64, 16] lies as ("tensor", "fsdp").
  assert state.opt_state[0].v_row["embed"]["embedding"].shape == (16,)
  assert factored.v_row["embed"]["embedding"].spec == P("fsdp")
  assert factored.v_col["embed"]["embedding"].spec == P("tensor")
  # The kernels of o [L, H, E, D] = [2, 4, 8, 16] lie as (None, "tensor", None, "fsdp").
  o_kernel = ("layers_0", "attention", "o", "kernel")
  assert leaf_at(state.opt_state[0].v_row, o_kernel).shape == (2, 4, 8)
  assert leaf_at(factored.v_row, o_kernel).spec == P(None, "tensor", None)
  assert leaf_at(state.opt_state[0].v_col, o_kernel).shape == (2, 4, 16)
  assert leaf_at(factored.v_col, o_kernel).spec == P(None, "tensor", "fsdp")
  # Norm scales are not factored: v is a moment as Adam's, v_row and v_col are placeholders.
  assert factored.v["final_norm"]["scale"].spec == P(None)
  assert factored.v_row["final_norm"]["scale"].spec == P()
  assert replicated(state, mesh) == []


def leaf_at(tree, keys):
  for key in keys:
    tree = tree[key]
  return tree


def test_moments_of_adafactor_whose_dimension_is_ambiguous_are_listed():
  """A square matrix does not show which of its dimensions a moment lacks."""
  mesh = make_mesh(Mesh(2, 2, 1, 2))
  square = dataclasses.replace(CONFIG, mlp_dim=CONFIG.embed_dim)
  state = abstract_state(optax.adafactor(1e-3, min_dim_size_to_factor=8), square)
  factored = state_shardings(state, mesh).opt_state[0]
  assert leaf_at(factored.v_row, ("layers_0", "mlp", "down", "kernel")).spec == P()
  lines = replicated(state, mesh)
  # Two moments of gate, up and down.
  assert len(lines) == 2 * 3
  name = "opt_state/0/v_row/layers_0/mlp/gate/kernel"
  assert f"{name} (2, 16) of the optimizer lies whole on every device" in lines
  assert replicated(state, make_mesh(Mesh(8, 1, 1, 1))) == []


def test_the_moments_of_muon_lie_as_their_parameters():
  mesh = make_mesh(Mesh(2, 2, 1, 2))
  state = abstract_state(optax.contrib.muon(1e-3))
  found = state_shardings(state, mesh).opt_state
  params = by_path(param_specs(shapes(), mesh))
  muon = by_path(found.inner_states["muon"].inner_state[0].mu)
  adam = by_path(found.inner_states["adam"].inner_state[0].mu)
  assert muon and adam and muon | adam == params
  (line,) = replicated(state, mesh)
  assert "ns_coeffs (3,) of the optimizer lies whole on every device" in line


@pytest.mark.parametrize(
  "optimizer",
  [optax.adafactor(1e-3, min_dim_size_to_factor=8), optax.contrib.muon(1e-3)],
  ids=["adafactor", "muon"],
)
def test_an_optimizer_updates_a_state_that_lies_on_the_mesh(optimizer):
  """The same numbers on one device and on eight."""
  rng = np.random.default_rng(0)
  params = {
    "embed": {"embedding": rng.standard_normal((64, 16), np.float32)},
    "layers_0": {"attention": {"o": {"kernel": rng.standard_normal((2, 4, 8, 16), np.float32)}}},
    "final_norm": {"scale": rng.standard_normal(16, np.float32)},
  }

  def update(params, opt_state):
    updates, _ = optimizer.update(jax.tree.map(jnp.sin, params), opt_state, params)
    return optax.apply_updates(params, updates)

  mesh = make_mesh(Mesh(2, 2, 1, 2))
  coefs = Coefficients(kl=jnp.float32(0), entropy=jnp.float32(0))
  opt_state = optimizer.init(params)
  state = TrainState(step=jnp.int32(0), params=params, opt_state=opt_state, coefs=coefs)
  placed = jax.device_put(state, state_shardings(state, mesh))
  found = jax.jit(update)(placed.params, placed.opt_state)
  expected = jax.jit(update)(params, opt_state)
  # Muon's Newton-Schulz iterations are in bfloat16.
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), found, expected)


@pytest.mark.parametrize(
  "path, shape", [("memory", (3,)), ("mu/final_norm/scale", (3,)), ("mu/embed/embedding", (64, 3))]
)
def test_array_of_the_optimizer_without_a_parameter_lies_everywhere_and_is_listed(path, shape):
  mesh = make_mesh(Mesh(2, 2, 1, 2))
  memory = jax.ShapeDtypeStruct(shape, jnp.float32)
  state = abstract_state().replace(opt_state={path: memory, "count": jnp.zeros((1,))})
  assert state_shardings(state, mesh).opt_state[path] == NamedSharding(mesh, P())
  assert replicated(state, mesh) == [
    f"opt_state/{path} {shape} of the optimizer lies whole on every device"
  ]


def test_batch_is_split_by_prompts_over_all_axes_but_tensor():
  prompts = jax.device_put(
    jnp.arange(16).reshape(8, 2), batch_sharding(make_mesh(Mesh(2, 1, 2, 2)))
  )
  assert {shard.data.shape for shard in prompts.addressable_shards} == {(2, 2)}
  assert len({shard.index[0].start for shard in prompts.addressable_shards}) == 4


def test_numbers_do_not_depend_on_the_mesh():
  def make():
    return model.init(jax.random.key(0), CONFIG)

  def forward(params, tokens):
    return model.forward(params, CONFIG, tokens, positions)[0]

  mesh = make_mesh(Mesh(2, 2, 1, 2))
  tokens = jax.random.randint(jax.random.key(1), (4, 6), 0, CONFIG.vocab_size)
  positions = jnp.broadcast_to(jnp.arange(6), tokens.shape)
  split = jax.jit(make, out_shardings=param_specs(shapes(), mesh))()
  gate = split["layers_0"]["mlp"]["gate"]["kernel"]
  assert gate.addressable_shards[0].data.shape == (2, 16 // 2, 32 // 2)
  logits = jax.jit(forward)(split, jax.device_put(tokens, batch_sharding(mesh)))
  np.testing.assert_allclose(logits, jax.jit(forward)(jax.jit(make)(), tokens), atol=1e-5)
