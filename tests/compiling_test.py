"""Programs that are compiled ahead: what a call finds, waits for, and does alone."""

import dataclasses
import threading

import jax
import jax.numpy as jnp
import pytest
from small_run import small_config, with_section

from grpo_jax.compiling import Compiler, Jitted, is_ahead
from grpo_jax.learner import by_slots
from grpo_jax.training import trainer
from grpo_jax.training.loop import run_steps

COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compiled(monkeypatch):
  """(is it ahead, name) of each program that is compiled or read from the cache on disk."""
  found = []

  def on_event(event, seconds, fun_name="", **details):
    if event == COMPILED:
      found.append((is_ahead(), fun_name.removeprefix("jit(").removesuffix(")")))

  jax.monitoring.register_event_duration_secs_listener(on_event)
  yield found
  jax.monitoring.unregister_event_duration_listener(on_event)


@pytest.fixture
def compiler():
  made = Compiler()
  yield made
  made.close()


def program_of(name):
  """Doubles. JAX keeps compiled programs by their functions, so each is a new one."""

  def doubled(x):
    return 2 * x

  doubled.__name__ = name
  return Jitted(doubled)


def shape(*sizes):
  return jax.ShapeDtypeStruct(sizes, jnp.float32)


def until_idle(compiler):
  """Waits until nothing is left, which jobs may have asked for."""
  for _ in range(4):
    compiler.submit(lambda: None).result()


def test_a_call_finds_what_was_compiled_ahead(compiler, compiled):
  program = program_of("doubled")
  program.compile_ahead(compiler, shape(3))
  until_idle(compiler)
  compiled.clear()
  assert program(jnp.ones(3)).tolist() == [2, 2, 2]
  assert "doubled" not in [name for _, name in compiled]


def test_a_call_for_which_nothing_was_begun_compiles_by_itself(compiler, compiled):
  started, goes_on = threading.Event(), threading.Event()
  compiler.submit(lambda: (started.set(), goes_on.wait(60)))
  programs = [program_of("doubled") for _ in range(9)]  # more than there are threads
  started.wait(60)
  for program in programs:
    program.compile_ahead(compiler, shape(3))
  last = programs[-1]
  last._ahead[None].cancel()
  assert last(jnp.ones(3)).tolist() == [2, 2, 2]
  goes_on.set()
  assert (False, "doubled") in compiled


def test_a_call_waits_for_the_thread_that_compiles_its_program(compiler, compiled):
  is_traced, goes_on = threading.Event(), threading.Event()

  def slow(x):
    if is_ahead():
      is_traced.set()
      goes_on.wait(60)
    return 3 * x

  program = Jitted(slow, lambda x: x.shape)
  program.compile_ahead(compiler, shape(3))
  is_traced.wait(60)
  threading.Timer(0.2, goes_on.set).start()
  assert program(jnp.ones(3)).tolist() == [3, 3, 3]
  assert [one for one in compiled if one[1] == "slow"] == [(True, "slow")]


def test_a_call_says_itself_why_its_program_cannot_be_compiled(compiler):
  def wrong(x):
    raise ValueError("no such shape")

  program = Jitted(wrong)
  program.compile_ahead(compiler, shape(3))
  until_idle(compiler)
  with pytest.raises(ValueError, match="no such shape"):
    program(jnp.ones(3))


def test_nothing_is_compiled_after_the_end():
  compiler, goes_on, compiled = Compiler(), threading.Event(), []
  for _ in range(9):
    compiler.submit(lambda: goes_on.wait(60))
  compiler.submit(lambda: compiled.append("one"))
  threading.Timer(0.2, goes_on.set).start()
  compiler.close()
  assert not compiled


def test_a_wish_that_cannot_be_understood_is_told(compiler, capsys):
  def ask():
    raise ValueError("no such shape")

  compiler.prepare(ask)
  until_idle(compiler)
  assert "not compiled ahead: ValueError: no such shape" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_is_over_compiles_nothing(compiled, tmp_path):
  config = dataclasses.replace(small_config(), steps=1)
  run_steps(config, tmp_path / "run")
  compiled.clear()
  run_steps(config, tmp_path / "run")
  assert not [name for is_ahead, name in compiled if is_ahead]


MESH = {"data": 2, "fsdp": 2, "tensor": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
  ("tokens", "mesh"),  # 4 tokens take one number of slots, and 32 several
  [(32, {}), (4, {}), (4, MESH), (32, MESH)],
)
def test_the_steps_of_a_run_call_what_was_compiled_ahead(
  tokens, mesh, compiled, monkeypatch, tmp_path, capsys
):
  def compile_ahead(run, compiler):
    real(run, compiler)
    until_idle(compiler)

  real = trainer.compile_ahead
  monkeypatch.setattr(trainer, "compile_ahead", compile_ahead)
  # As on accelerators.
  monkeypatch.setattr(by_slots, "_sizes_compiled_ahead", lambda sizes, platform: sizes)
  monkeypatch.setattr("os.cpu_count", lambda: 2)  # one thread, which does all in its order
  config = dataclasses.replace(small_config(), steps=1)
  config = with_section(config, "sampling", max_tokens=tokens)
  config = with_section(config, "batch", prompts=8, micro_batch=4, group_size=8)
  if mesh:
    config = with_section(config, "mesh", **mesh)
  run_steps(config, tmp_path / "run")
  assert "not compiled ahead" not in capsys.readouterr().err
  ahead = {name for is_ahead, name in compiled if is_ahead}
  here = {name for is_ahead, name in compiled if not is_ahead}
  assert not ahead & here
  wanted = {"_train_step"} if tokens == 4 else {"_prepare_and_begin", "_add_gradients", "finish"}
  assert wanted | {"_chunk"} <= ahead
