"""`python -m grpo_jax.plan`: what it predicts, against formulas and runs on this machine's CPU."""

import dataclasses
import importlib.util
import json
import os
from pathlib import Path
import subprocess
import sys

import jax
import numpy as np
import pytest
from small_run import small_config, small_run, with_section

from grpo_jax.around.planning import plan, table, topologies
from grpo_jax.around.planning.phases import compiled
from grpo_jax.around.planning.plan import shape_alone
from grpo_jax.console import exit_codes
from grpo_jax.parallel import chips
from grpo_jax.parallel.mesh import sampling_mesh
from grpo_jax.run import fitting
from grpo_jax.run.parameters import count
from grpo_jax.run.stages import programs
from grpo_jax.settings import ConfigError

ROOT = Path(__file__).parents[1]
HAS_CUDA = any(importlib.util.find_spec(f"jax_cuda{number}_plugin") for number in (12, 13))
P, G, S, T = 4, 4, 32, 33
D, L, H, K, E, F = 64, 2, 4, 2, 16, 256
QWEN2 = {
  "architectures": ["Qwen2ForCausalLM"],
  "model_type": "qwen2",
  "vocab_size": 300,
  "hidden_size": 32,
  "num_hidden_layers": 1,
  "num_attention_heads": 2,
  "num_key_value_heads": 1,
  "intermediate_size": 64,
  "tie_word_embeddings": True,
  "rope_theta": 1e6,
  "max_position_embeddings": 128,
  "rms_norm_eps": 1e-6,
  "eos_token_id": 299,
  "hidden_act": "silu",
}


def config_of_all_phases():
  config = with_section(
    small_config(),
    "model",
    embed_dim=D,
    num_layers=L,
    num_heads=H,
    num_kv_heads=K,
    head_dim=E,
    mlp_dim=F,
  )
  config = with_section(config, "batch", prompts=P, group_size=G, micro_batch=2)
  config = with_section(config, "sampling", max_tokens=T, dtype="bfloat16")
  config = with_section(config, "data", max_prompt_tokens=S)
  return with_section(config, "eval", every=5, examples=8, batch=4)


@pytest.fixture(scope="module")
def run():
  return small_run(config_of_all_phases())


@pytest.fixture(scope="module")
def phases(run):
  return {program.name: compiled(program) for program in programs(run)}


def forward_flops(vocabulary, rows, new, seen, logits):
  """One pass of `rows` rows over `new` tokens that attend to `seen` tokens; then logits."""
  per_layer = D * E * (2 * H + 2 * K) + 3 * D * F
  attention = 4 * H * E * seen
  return rows * new * L * (2 * per_layer + attention) + 2 * vocabulary * D * logits


def test_operations_are_those_of_the_formula(run, phases):
  vocabulary = run.tokenizer.vocab_size
  prompts = forward_flops(vocabulary, P, S, S, 0)
  forward = prompts + forward_flops(vocabulary, P * G, T - 1, S + T - 1, P * G * T)
  assert phases["reference"].counted.whole.flops == forward
  np.testing.assert_allclose(phases["update"].counted.whole.flops, 3 * forward, rtol=0.01)
  sample = phases["sample"].counted
  prefill = sample.whole.flops - sample.open_loops.flops
  assert prefill == prompts + 2 * vocabulary * D * P
  # The loops read a cache of 32 or 33 tokens after the prompt.
  decode = [forward_flops(vocabulary, P * G, T - 1, S + size, P * G * (T - 1)) for size in (32, 33)]
  assert decode[0] <= sample.open_loops.flops <= decode[1]


def test_memory_is_what_a_run_holds(run, phases):
  parameters = count(run.parameters.abstract)
  state = 4 * parameters
  for phase in phases.values():
    assert phase.memory["weights"] == phase.memory["reference"] == state
    assert 2 * state <= phase.memory["moments"] < 2 * state + 1000
  copy = phases["sample"].memory["sampling copy"]
  assert state / 2 < copy < 0.6 * state  # norm scales stay float32
  assert "sampling copy" not in phases["update"].memory
  assert phases["update"].memory["gradients"] == state
  # At the worst moment there are slots for 32 or 33 tokens.
  for name, rows in (("sample", P * G), ("evaluate", 4)):
    prompts, (few, many) = 4 * S, (rows * 32, rows * 33)
    per_token = 2 * 2 * L * K * E
    cache = phases[name].memory["cache"]
    assert per_token * (prompts + few) <= cache < per_token * (prompts + many) + 1000


@pytest.mark.parametrize("kl_coef", [pytest.param(0.0, marks=pytest.mark.slow), 0.04])
def test_the_estimate_counts_what_the_plan_of_the_update_says_is_held(kl_coef):
  built = small_run(with_section(config_of_all_phases(), "algo", kl_coef=kl_coef))
  update = next(program for program in programs(built) if program.name == "update")
  held, _ = built.programs.estimate_of_update
  assert held == sum(update.held.values()) + update.gradients
  assert (update.held["reference"] > 0) == (kl_coef > 0)


def lora_config(folder, **mesh):
  """A frozen base in float32 that is sampled from in bfloat16, and adapters."""
  (folder / "config.json").write_text(json.dumps(QWEN2))
  config = with_section(small_config(), "model", path=str(folder))
  config = with_section(config, "lora", rank=2)
  config = with_section(config, "mesh", **{"data": 1, "fsdp": 1, "tensor": 1} | mesh)
  return with_section(config, "sampling", dtype="bfloat16")


def run_on(config, devices):
  tokens = plan.tokenizer.characters("")
  return plan.Run(shape_alone(config), devices=jax.devices()[:devices], tokens=tokens)


def test_the_base_that_the_sampler_reads_is_held_by_the_update_too(tmp_path):
  """It is made once and kept, so a micro-batch has less room."""
  built = run_on(lora_config(tmp_path), 1)
  update = next(program for program in programs(built) if program.name == "update")
  assert update.held["base for sampling"] == update.held["frozen base"] > 0
  held, _ = built.programs.estimate_of_update
  assert held == sum(update.held.values()) + update.gradients


@pytest.mark.parametrize("rows", [0, 4])
def test_rows_whose_weights_change_in_flight_have_a_place_each(rows):
  """In the plan, too. So several places have the same prompt."""
  config = small_config(old_logprobs="sampler")
  config = with_section(config, "rollout", max_staleness=1, weights="in_flight")
  built = small_run(with_section(config, "sampling", rows=rows))
  sample = next(program for program in programs(built) if program.name == "sample")
  prompts, members = config.batch.prompts, config.batch.group_size
  begin = sample.stages[0]
  assert begin.program.lower(*begin.arguments).out_info[0].grid == (rows or prompts * members, 1)
  # A sampler computes the other prompts when the first rows have ended.
  first = -(-rows // members) or prompts
  assert len(begin.arguments[3].lengths_n) == first
  arrive = [stage for stage in sample.stages[1:] if not stage.rounds]
  later = sum(stage.runs * len(stage.arguments[2].lengths_n) for stage in arrive)
  assert later == prompts - first


@pytest.mark.parametrize("sampler", [0, 1])
def test_rows_in_flight_are_chosen_beside_what_the_plan_of_the_sampler_says(
  sampler, tmp_path, monkeypatch
):
  """With a base that is sampled from as it is: a copy of the adapters alone."""
  config = with_section(lora_config(tmp_path, sampler=sampler), "lora", base_dtype="bfloat16")
  config = with_section(config, "rollout", max_staleness=2)
  monkeypatch.setattr("grpo_jax.sampler.weights._MOST_UNROLLED_LAYERS", {})
  built, seen = run_on(config, 1 + sampler), []
  monkeypatch.setattr(fitting, "rows_in_flight", lambda *given: seen.append(given[2]) or 0)
  sample = next(programs(built))
  assert seen == [sum(sample.held.values())]
  if not sampler:
    assert sample.held["base for sampling"] == 0 < sample.held["sampling copy"]


def test_the_mesh_of_the_sampler_is_chosen_beside_the_frozen_base(tmp_path, monkeypatch):
  """And the weights lie on that mesh as the plan says."""
  found = {}

  def choose(config, shape, held_on, mesh, memory, chip):
    found.update((size, held_on(sampling_mesh(mesh, size))) for size in (1, 2))
    return 2

  monkeypatch.setattr(fitting, "sampling_tensor", choose)
  sample = next(programs(run_on(lora_config(tmp_path, fsdp=2), 2)))
  assert found[2] == sum(sample.held.values())
  assert sample.held["frozen base"] > 0
  spared = found[1] - found[2]  # half of what is split along tensor
  assert 0 < spared < sample.held["base for sampling"] + sample.held["sampling copy"]


@pytest.mark.parametrize(
  "max_tokens",
  [100, *(pytest.param(x, marks=pytest.mark.slow) for x in (1, 2, 32, 33, 64, 512, 1000))],
)
@pytest.mark.parametrize("rows, waves", [(0, 1), (P, G), (4, P * G // 4)])
def test_the_rounds_of_the_decode_loops_are_the_tokens_after_the_first(max_tokens, rows, waves):
  config = with_section(config_of_all_phases(), "sampling", max_tokens=max_tokens, rows=rows)
  sample = next(p for p in programs(small_run(config)) if p.name == "sample")
  assert sample.tokens == waves * (max_tokens - 1)


def test_lora_holds_a_frozen_base_and_no_reference(tmp_path):
  built = run_on(lora_config(tmp_path), 1)
  sample = next(programs(built))
  base = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(built.parameters.abstract_base))
  assert sample.held["frozen base"] == base
  assert sample.held["reference"] == 0
  assert sample.held["base for sampling"] == base  # a CPU samples from layers that lie apart
  assert 0 < sample.held["sampling copy"] < sample.held["weights"] < base / 4


@pytest.mark.slow
def test_each_side_holds_its_own_arrays_where_devices_only_sample(monkeypatch):
  config = with_section(config_of_all_phases(), "mesh", data=1, fsdp=4, tensor=1, sampler=4)
  run = plan.Run(with_section(config, "rollout", max_staleness=2))
  held = {program.name: program.held for program in programs(run)}
  trained = jax.tree.leaves(run.parameters.abstract)
  copy = jax.tree.leaves(run.parameters.sampling.abstract(run.parameters.abstract))
  bytes_of_copy = sum(x.size * x.dtype.itemsize for x in copy)  # whole on each device
  assert held["sample"] == held["evaluate"]
  assert held["sample"] == {
    "base for sampling": 0,
    "sampling copy": bytes_of_copy,
    "other versions": 2 * bytes_of_copy,
  }
  assert held["update"].keys() == {"weights", "moments", "frozen base", "reference"}
  assert held["update"]["weights"] < sum(4 * x.size for x in trained) / 3  # on four devices
  in_turn = next(programs(plan.Run(config_of_all_phases(), devices=jax.devices()[:1]))).held
  assert in_turn.keys() == held["update"].keys() | {"base for sampling", "sampling copy"}
  sample = next(programs(run))
  assert set(sample.taken) <= held["sample"].keys()
  monkeypatch.setattr(plan.Run, "processes", 4)  # each of which draws one of four prompts
  run.config = with_section(run.config, "batch", prompts=4 * P)
  assert next(programs(run)).stages[0].cache == sample.stages[0].cache


def test_a_plan_is_printed_and_ends_with_whether_the_run_fits(run, phases, monkeypatch, capsys):
  monkeypatch.setattr(plan, "programs", lambda run: phases.values())
  monkeypatch.setattr(plan, "compiled", lambda phase: phase)
  plan.plan(run, "cpu")
  lines = capsys.readouterr().out.splitlines()
  assert max(map(len, lines)) <= 100
  names = ["sample", "reference", "update", "evaluate"]
  assert any(line.split()[-4:] == names for line in lines)
  assert lines[-1].startswith("fits: update needs 0.01 GB")
  small = chips.Chip(1e6, 1e12, 1e9, 1e9)
  monkeypatch.setitem(chips.CHIPS, "cpu", small)
  with pytest.raises(exit_codes.DoesNotFit) as caught:
    plan.plan(run, "cpu")
  assert exit_codes.exit_of(caught.value) == (3, "")
  lines = capsys.readouterr().out.splitlines()
  assert lines[-1].startswith("does not fit: update needs 0.01 GB of 0.00 GB")
  names_of_a_step = ["sample", "reference", "update"]
  seconds = sum(phases[name].counted.whole.memory_bytes for name in names_of_a_step) / 1e9
  assert f"a step without evaluation takes at least {seconds:.3g} s" in lines
  bounds = [line.split()[-2] for line in lines if line.split()[:1] in [[name] for name in names]]
  assert bounds[:4] == ["memory"] * 4


def test_devices_apart_sample_and_learn_at_the_same_time(phases):
  chip = chips.Chip(1e6, 1e12, 1e9, 1e9)
  names = ["sample", "reference", "update"]
  seconds = {name: phases[name].counted.whole.memory_bytes / 1e9 for name in names}
  longest = max(seconds["sample"], seconds["reference"] + seconds["update"])
  line = f"a step without evaluation takes at least {longest:.3g} s"
  assert table.step_lines([phases[name] for name in names], chip, is_beside=True) == [line]


def test_what_the_compiler_refuses_does_not_fit(phases):
  refused = dataclasses.replace(phases["update"], memory={}, counted=None, failure="too large")
  all_phases = [phases["sample"], refused]
  assert table.verdict(all_phases, 1e12).startswith("does not fit: update")
  assert table.verdict(all_phases, None) == "does not fit: update needs more than one device has"
  assert table.memory_table(all_phases)[-1].split()[-1] == "-"
  assert "update cannot be compiled: too large" in table.notes(all_phases)


def test_a_plan_says_what_lies_in_the_memory_of_the_host(phases):
  offloads = dataclasses.replace(phases["update"], host_bytes=2.5e9)
  line = "update: 2.50 GB of each device's activations lie in the host's memory"
  assert line in table.notes([phases["sample"], offloads])
  assert "host" not in " ".join(table.notes([phases["update"]]))


def command(*flags):
  return subprocess.run(
    [sys.executable, "-m", "grpo_jax.plan", "--config=configs/arithmetic.py", *flags],
    cwd=ROOT,
    capture_output=True,
    text=True,
    env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"},
  )


@pytest.mark.slow
def test_the_command_needs_nothing_of_a_model_but_its_config_json(tmp_path):
  (tmp_path / "config.json").write_text(json.dumps(QWEN2))
  small = ["warm_start.steps=0", "eval.every=0", "algo.kl_coef=0", "sampling.max_tokens=4"]
  small += [f"model.path={tmp_path}", "data.task=gsm8k", "batch.prompts=2", "mesh.fsdp=2"]
  done = command("--topology=cpu:2", "--chips=2", *(f"--config.{value}" for value in small))
  assert done.returncode == 0, done.stderr
  first, *_, last = done.stdout.splitlines()
  assert first.startswith("cpu, 2 of cpu:2: ")
  assert last.startswith("fits: ")


@pytest.mark.parametrize(
  "topology,chips,message",
  [
    ("cpu:8", 9, "--chips=9: cpu:8 has 8 chips"),
    ("cpu:0", None, "--topology=cpu:0: write cpu:N"),
    ("h100:0", None, "--topology=h100:0: write h100:N"),
    ("h100:", None, "--topology=h100:: write h100:N"),
    ("v99:2x2", None, "--topology=v99:2x2"),
  ],
)
def test_other_topologies_are_refused(topology, chips, message):
  with pytest.raises(ConfigError, match=message):
    topologies.devices_of(topology, chips)


def test_a_gpu_without_its_compiler_is_refused(monkeypatch):
  def unknown(*_, **__):
    raise NotImplementedError("topology not implemented for cuda")

  monkeypatch.setattr(topologies.topologies, "get_topology_desc", unknown)
  with pytest.raises(ConfigError, match=r"--topology=h100:8 needs .* pip install 'jax\[cuda\]'"):
    topologies.devices_of("h100:8", None)


@pytest.mark.skipif(not HAS_CUDA, reason="needs jax[cuda]")
def test_a_gpu_that_is_not_here_is_planned_for(monkeypatch):
  monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
  config = with_section(small_config(), "mesh", data=1, fsdp=2, tensor=1)
  devices = topologies.devices_of("h100:4", 2)
  assert chips.memory_of(devices[0]) == 0.75 * 85e9
  phases = {
    phase.name: phase for phase in map(compiled, programs(plan.Run(config, devices=devices)))
  }
  assert phases["update"].counted.whole.flops > 0 and phases["update"].total > 0
  assert phases["update"].counted.whole.link_bytes > 0


def test_a_name_on_huggingface_co_whose_config_is_not_here_is_refused():
  config = with_section(small_config(), "model", path="nobody/nothing")
  with pytest.raises(ConfigError, match="a plan downloads nothing"):
    shape_alone(config)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs jax[tpu]")
def test_a_tpu_that_is_not_here_is_planned_for():
  config = with_section(small_config(), "mesh", data=1, fsdp=4, tensor=1)
  devices = topologies.devices_of("v5e:2x2", None)
  assert chips.memory_of(devices[0]) == 15.75 * 2**30
  sample = compiled(next(programs(plan.Run(config, devices=devices))))
  assert sample.counted.open_loops.link_bytes > 0


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs jax[tpu]")
@pytest.mark.parametrize(
  "slices, topology, axes",
  [
    (2, "v5e:2x2", dict(data=2, fsdp=4)),
    (2, "v5e:2x2", dict(fsdp=8)),
    (1, "v6e:4x4", dict(fsdp=8, tensor=2)),  # axes that share an axis of the torus
  ],
)
def test_slices_and_any_axes_compile_for_tpus(slices, topology, axes):
  config = with_section(small_config(), "mesh", **dict(data=1) | axes)
  config = with_section(config, "batch", prompts=32, micro_batch=16)
  devices = topologies.devices_of(topology, None)
  if slices > 1:
    describe = topologies.topologies.get_topology_desc
    devices = describe(platform="tpu", topology_name=topology, num_slices=slices).devices
  run = plan.Run(with_section(config, "eval", every=0), devices=devices)
  assert dict(run.mesh.shape) == dict(data=1, fsdp=1, expert=1, tensor=1) | axes
  (update,) = [program for program in programs(run) if program.name == "update"]
  assert compiled(update).counted.whole.link_bytes > 0


MEASURE = """
import re
import conftest
import jax
from plan_test import config_of_large_activations, small_run
from grpo_jax.run.stages import programs
run = small_run(config_of_large_activations())
(update,) = [program for program in programs(run) if program.name == "update"]
(stage,) = update.stages
executable = stage.lower().compile()
def fill(x):
  return jax.device_put(jax.numpy.ones(x.shape, x.dtype), x.sharding)
arguments = jax.tree.map(fill, stage.arguments)
def peak():
  # The peak of this program alone. ru_maxrss would be at least that of the process that started it.
  return int(re.search("VmHWM:[^0-9]*([0-9]+)", open("/proc/self/status").read())[1]) * 1024
before = peak()
jax.block_until_ready(executable(*arguments))
sizes = executable.memory_analysis()
print(sizes.temp_size_in_bytes, peak() - before)
"""


def config_of_large_activations():
  config = with_section(config_of_all_phases(), "batch", prompts=40, group_size=8, micro_batch=40)
  return with_section(config, "learner", logprob_chunk=64)


@pytest.mark.slow
def test_an_update_takes_the_memory_that_is_predicted():
  """Of the temporary arrays, which the CPU's memory grows by."""
  done = subprocess.run(
    [sys.executable, "-c", MEASURE],
    cwd=ROOT / "tests",
    env=os.environ | {"PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  predicted, measured = map(int, done.stdout.split())
  assert predicted > 2e8
  np.testing.assert_allclose(measured, predicted, rtol=0.2)
