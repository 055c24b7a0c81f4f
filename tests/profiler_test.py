"""Traces of some steps: which steps they have, and that they end no run."""

import gzip
import json
import types

import jax
import pytest

import grpo_jax
from grpo_jax.run.checks import check_config
from grpo_jax.settings import ConfigError
from grpo_jax.training.profiler import Profiler
from grpo_jax.training.trainer import Trainer
from tests.small_run import small_config


def config(**changes):
  keys = {key.replace("__", "."): value for key, value in changes.items()}
  return small_config().replace({"log.completions_every": 0, "checkpoint.every": 0, **keys})


@pytest.fixture
def calls(monkeypatch):
  """What is called of JAX's profiler, in order."""
  calls = []

  class Named:
    def __init__(self, name, step_num):
      self.name = f"{name} {step_num}"

    def __enter__(self):
      calls.append(self.name)

    def __exit__(self, *_):
      calls.append("end")

  monkeypatch.setattr(jax.profiler, "start_trace", lambda *_, **__: calls.append("start"))
  monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
  monkeypatch.setattr(jax.profiler, "save_device_memory_profile", lambda _: calls.append("memory"))
  monkeypatch.setattr(jax.profiler, "StepTraceAnnotation", Named)
  return calls


def take(profiler, *steps):
  for step in steps:
    with profiler.step(step):
      pass


@pytest.mark.parametrize(
  "steps, first, traced",
  [((), 1, []), ((3, 5), 1, [3, 4, 5]), ((3, 5), 5, [5]), ((4, 4), 1, [4]), ((3, 5), 6, [])],
)
def test_the_steps_of_the_range_that_are_taken_are_traced(tmp_path, calls, steps, first, traced):
  said = []
  profiler = Profiler(steps, tmp_path, said.append)
  take(profiler, *range(first, 8))
  profiler.close()
  inner = [call for step in traced for call in (f"step {step}", "end")]
  assert calls == (["start", *inner, "stop", "memory"] if traced else [])
  assert said == ([f"the trace is in {tmp_path}"] if traced else [])


def test_the_loop_names_a_step_by_its_number_in_the_file(tmp_path, calls):
  profiler = Profiler((3, 3), tmp_path, lambda _: None)
  trainer = types.SimpleNamespace(first_grpo_step=0, _phases_seen=set(), _profiler=profiler)
  for step in range(4):  # the steps that were taken before
    with Trainer.doing(trainer, step):
      calls.append(step)
  assert calls == [0, 1, "start", "step 3", 2, "end", "stop", "memory", 3]


def test_a_run_that_ends_in_the_range_writes_the_trace_so_far(tmp_path, calls):
  profiler = Profiler((3, 5), tmp_path, lambda _: None)
  with pytest.raises(ZeroDivisionError), profiler.step(3):
    raise ZeroDivisionError
  assert calls == ["start", "step 3", "end"]
  profiler.close()
  profiler.close()
  assert calls == ["start", "step 3", "end", "stop", "memory"]


@pytest.mark.parametrize("fails", ["start_trace", "stop_trace", "save_device_memory_profile"])
def test_a_trace_that_cannot_be_made_says_so_once_and_ends_no_run(
  tmp_path, calls, monkeypatch, fails
):
  def fail(*_, **__):
    raise RuntimeError("Profile has already\nbeen started.")

  monkeypatch.setattr(jax.profiler, fails, fail)
  said = []
  profiler = Profiler((1, 2), tmp_path, said.append)
  take(profiler, 1, 2, 3)
  profiler.close()
  assert said == ["warning: log.profile: there is no trace: Profile has already been started."]


def test_a_resume_after_the_range_says_that_nothing_is_traced(tmp_path):
  profiler = Profiler((3, 5), tmp_path, print)
  assert profiler.remarks(0) == profiler.remarks(4) == ()
  assert profiler.remarks(5) == ("log.profile: step 5 is over, so nothing is traced",)
  assert Profiler((), tmp_path, print).remarks(5) == ()


@pytest.mark.parametrize(
  "pair, message",
  [
    ((3,), "write the first step and the last one, such as"),
    ((3, 5, 7), "write the first step and the last one"),
    ((5, 3), "write the first step and the last one"),
    ((0, 3), "write the first step and the last one"),
    ((3, 9), "the run has 8 steps, those of the warm start included"),
  ],
)
def test_a_range_that_is_none_is_one_line(pair, message):
  with pytest.raises(ConfigError) as error:
    check_config(config(steps=6, warm_start__steps=2, log__profile=pair))
  assert str(error.value).startswith(f"config key log.profile is {pair}: {message}")
  check_config(config(steps=6, warm_start__steps=2, log__profile=(3, 8)))


def traced(folder):
  """The numbers of the steps that the trace of a run has, and its events' names."""
  (file,) = (folder / "profile").glob("plugins/profile/*/perfetto_trace.json.gz")
  events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
  steps = [int(e["args"]["step_num"]) for e in events if e.get("name") == "step"]
  return sorted(steps), {e.get("name") for e in events}


IN_TURN = {"rollout.max_staleness": 1, "algo.old_logprobs": "sampler"}
BESIDE = IN_TURN | {"mesh.sampler": 4, "mesh.data": 1, "mesh.fsdp": 1, "mesh.tensor": -1}


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, IN_TURN, BESIDE], ids=["in turn", "ahead", "beside"])
def test_a_run_has_a_trace_of_what_samples_and_learns_and_a_profile_of_memory(tmp_path, how):
  grpo_jax.train(config(steps=4, log__profile=(2, 3)).replace(how), tmp_path)
  steps, names = traced(tmp_path)
  assert steps == [2, 3]
  assert {"PjitFunction(_chunk)", "PjitFunction(_train_step)"} <= names
  assert gzip.decompress((tmp_path / "profile/memory.prof").read_bytes())
  (xplane,) = (tmp_path / "profile").glob("plugins/profile/*/*.xplane.pb")  # for XProf
  assert xplane.stat().st_size > 1000
