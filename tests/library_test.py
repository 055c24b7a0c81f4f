"""grpo_jax as a library: what a notebook or a script calls, and what a call leaves behind."""

import dataclasses
import gc
import importlib
import inspect
import json
import logging
import os
from pathlib import Path
import signal
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest

import grpo_jax
from grpo_jax.algo.advantages import ADVANTAGES
from grpo_jax.algo.corrections import CORRECTIONS
from grpo_jax.algo.kl import KL
from grpo_jax.algo.surrogates import SURROGATES
from grpo_jax.batches.own_metrics import OWN_METRICS, own_metrics
from grpo_jax.config import Mesh
from grpo_jax.data.tasks.tasks import TASKS
from grpo_jax.evaluation.policy import _on_this_machine
from grpo_jax.learner.optimizer import OPTIMIZERS
from grpo_jax.rewards import REWARDS, plugins
from grpo_jax.rollouts import rollout
from grpo_jax.run.caller_state import leaving_nothing_behind
from grpo_jax.sampler.filters import FILTERS
from grpo_jax.settings import RunFailed
from grpo_jax.storage.reading import read_config
from grpo_jax.timing import is_of_clock
from tests.small_run import small_config

ROOT = Path(__file__).parents[1]
TOKENIZERS = ROOT / "tests/golden/tokenizers"


def config(**changes):
  keys = {key.replace("__", "."): value for key, value in changes.items()}
  small = {"reward.functions": ("digits",), "checkpoint.every": 0}
  return small_config().replace({**small, **keys})


def digits(completions, **columns):
  return [sum(map(str.isdigit, text)) for text in completions]


@pytest.fixture(autouse=True)
def registered(tables):
  grpo_jax.register_reward(digits)


def without_times(rows):
  return [{k: v for k, v in row.items() if not is_of_clock(k)} for row in rows]


def surroundings():
  """What a call must not change."""
  gc.collect()  # of arrays that earlier tests left behind
  return {
    "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
    "wakeup": signal.set_wakeup_fd(-1),
    "precision": jax.config.jax_default_matmul_precision,
    "cache": jax.config.jax_compilation_cache_dir,
    "root": (logging.root.level, list(logging.root.handlers)),
    "absl": logging.getLogger("absl").level,
    "threads": threading.active_count(),
    "arrays": len(jax.live_arrays()),
  }


def test_the_import_takes_nothing_and_every_name_is_there():
  code = (
    "import sys, grpo_jax; assert not {'jax', 'numpy', 'absl'} & set(sys.modules);"
    "grpo_jax.Config; assert 'grpo_jax.config' in sys.modules"
  )
  subprocess.run([sys.executable, "-c", code], check=True)
  assert set(grpo_jax.__all__) == {*grpo_jax._MODULE_OF, "train"} <= set(dir(grpo_jax))
  for name in grpo_jax.__all__:
    assert getattr(grpo_jax, name).__doc__
  with pytest.raises(AttributeError, match="no attribute 'trian'"):
    grpo_jax.trian  # noqa: B018  the access is what is tested


def test_train_is_a_function_and_a_module_however_it_is_imported():
  module = importlib.import_module("grpo_jax.train")
  assert grpo_jax.train is module and callable(module)
  assert inspect.signature(module) == inspect.signature(module.train)
  with pytest.raises(grpo_jax.ConfigError, match="needs a grpo_jax.Config and got a dict"):
    grpo_jax.train({}, "unused")


@pytest.mark.slow
def test_a_callback_stops_a_run_which_goes_on_and_leaves_nothing_behind(tmp_path):
  before, steps = surroundings(), []

  def stop_once(step):
    steps.append(step)
    return "this is no request" if step.step == 2 else step.step == 1

  stopped = grpo_jax.train(config(steps=2), tmp_path, stop_once)
  assert (stopped.step, stopped.last_step, stopped.is_last) == (1, 2, False)
  finished = grpo_jax.train(config(steps=2), str(tmp_path), stop_once)
  assert finished == steps[1] and finished.is_last and len(steps) == 2
  reported = [{"step": step.step, **step.metrics} for step in steps]
  assert grpo_jax.read_metrics(tmp_path) == reported
  assert surroundings() == before and not (tmp_path / "run.lock").exists()
  with pytest.raises(dataclasses.FrozenInstanceError):
    stopped.step = 2
  with pytest.raises(TypeError):
    stopped.metrics["reward"] = 1.0

  again = grpo_jax.train(config(steps=2), tmp_path, stop_once)  # nothing is left to do
  assert again == finished and len(steps) == 2
  assert grpo_jax.read_config(tmp_path) == config(steps=2)


def test_completions_are_read_by_step(tmp_path):
  folder = tmp_path / "completions"
  with pytest.raises(grpo_jax.ConfigError, match="no completions yet: log.completions_every"):
    grpo_jax.read_completions(tmp_path)
  folder.mkdir()
  for step in (2, 10, 1000000):
    (folder / f"{step:06d}.jsonl").write_text(f'{{"reward": {step}}}\n{{"reward": null}}\n')
  (folder / "000003.jsonl.new").write_text("{")
  assert grpo_jax.completion_steps(str(tmp_path)) == [2, 10, 1000000]
  assert grpo_jax.read_completions(tmp_path) == [{"reward": 1000000}, {"reward": None}]
  assert grpo_jax.read_completions(tmp_path, 2)[0] == {"reward": 2}
  with pytest.raises(grpo_jax.ConfigError, match="no completions of step 3, but of 2, 10, 1000000"):
    grpo_jax.read_completions(tmp_path, 3)
  (folder / "000010.jsonl").write_text("{")
  with pytest.raises(grpo_jax.ConfigError, match="000010.jsonl cannot be read"):
    grpo_jax.read_completions(tmp_path, 10)


def test_recipes_by_name_and_by_file(tmp_path):
  made = grpo_jax.load_config("arithmetic:dapo", {"seed": 3, "optimizer.b1": 0})
  assert made.steps == 250 and made.algo.clip_high == 0.28
  assert (made.seed, made.optimizer.b1, made.optimizer.learning_rate) == (3, 0.0, 2e-4)
  (tmp_path / "mine.py").write_text(
    "from grpo_jax.configs import arithmetic\n\n\ndef get_config(preset='gspo'):\n"
    "  c = arithmetic.get_config(preset)\n  c.steps = 7\n  return c\n"
  )
  mine = grpo_jax.load_config(tmp_path / "mine.py")
  assert (mine.steps, mine.algo.ratio) == (7, "sequence")
  assert grpo_jax.load_config(f"{tmp_path}/mine.py:rloo").algo.advantage == "leave_one_out"
  changed = mine.replace({"algo.clip_high": 0.3, "reward.functions": ["flexible"]})
  assert changed.algo.clip_high == 0.3 and changed.reward.functions == ("flexible",)
  assert mine.algo.clip_high != 0.3 and changed.steps == 7


@pytest.mark.slow
def test_recipes_are_found_where_a_user_has_configs_too(tmp_path):
  """In a folder that has a package `configs` of its own, and a folder that is named as a recipe."""
  (tmp_path / "configs").mkdir()
  (tmp_path / "configs" / "__init__.py").write_text("")
  (tmp_path / "arithmetic").mkdir()
  (tmp_path / "old.py").write_text("from configs import nosuch\n")
  program = """
import configs, grpo_jax
from grpo_jax import cli
assert "grpo_jax" not in configs.__file__
assert grpo_jax.load_config("gsm8k:dapo", {"model.path": "m"}).algo.clip_high == 0.28
assert cli.config_of(["--config=arithmetic:dapo", "--config.seed=3"]).algo.clip_high == 0.28
assert cli.config_of(["--config", "countdown"]).data.task == "countdown"
for config in ("old.py", "arithmetics", "arithmetic:ddpo"):
  for load in (grpo_jax.load_config, lambda name: cli.config_of([f"--config={name}"])):
    try:
      load(config)
    except grpo_jax.ConfigError as error:
      print(error)
"""
  environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "JAX_PLATFORMS": "cpu"}
  ended = subprocess.run(
    [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
  )
  assert ended.returncode == 0, ended.stderr
  old, old_flag, unknown, unknown_flag, preset, preset_flag = ended.stdout.splitlines()
  assert all("recipes of grpo_jax are in grpo_jax.configs" in line for line in (old, old_flag))
  assert all(
    "arithmetic, calculator, countdown, default" in line for line in (unknown, unknown_flag)
  )
  assert "there is no preset 'ddpo'" in preset and "has no preset 'ddpo'" in preset_flag


@pytest.mark.parametrize(
  ("recipe", "changes", "message"),
  [
    (
      "arithmetics",
      {},
      "there is no recipe 'arithmetics': choose one of arithmetic, calculator, countdown",
    ),
    ("nowhere.py", {}, "there is no recipe 'nowhere.py'"),
    ("arithmetic:nosuch", {}, "recipe arithmetic:nosuch: there is no preset 'nosuch'"),
    ("arithmetic", {"algo.clip_hihg": 1}, "algo.clip_hihg is unknown: did you mean algo.clip_high"),
    ("arithmetic", {"algo": 1}, "config key algo is a section"),
    ("arithmetic", {"steps": "many"}, "config key steps must be a whole number, got 'many'"),
    ("gsm8k", {}, "config key model.path has no value yet"),
  ],
)
def test_a_config_that_cannot_be_made_is_one_line(recipe, changes, message):
  with pytest.raises(grpo_jax.ConfigError, match=message) as error:
    grpo_jax.load_config(recipe, changes)
  assert error.value._render_traceback_() == [f"ConfigError: {error.value}"]


def test_an_error_that_is_its_own_cause_ends_a_run_all_the_same():
  cause = ValueError("raised from itself")
  cause.__cause__ = cause
  error = grpo_jax.ConfigError("a line")
  error.__cause__ = cause
  assert error._render_traceback_() == ["ConfigError: a line"]
  with pytest.raises(grpo_jax.ConfigError), leaving_nothing_behind():
    raise error


def test_a_recipe_that_raises_is_named(tmp_path):
  for source, message in (
    ("1 / 0", r"mine.py cannot be executed: ZeroDivisionError: division by zero .*mine.py line 1"),
    ("import sys\nsys.exit()", "mine.py cannot be executed: SystemExit"),
    ("def get_config():\n  return 1 / 0", "ZeroDivisionError"),
    ("", "mine.py has no function get_config"),
  ):
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(grpo_jax.ConfigError, match=message):
      grpo_jax.load_config(tmp_path / "mine.py")


class Raises:
  """An object of a user whose attributes and texts cannot be had."""

  def __getattr__(self, name):
    return {}[name]

  def __repr__(self):
    raise RuntimeError("no repr")

  __str__ = __fspath__ = __repr__


class RaisesWhenAsked(Raises):
  def __call__(self, *args, **columns):
    return None


NO_PATHS = [
  None,
  5,
  1.5,
  True,
  ["a"],
  {},
  b"run",
  "",
  "a\0b",
  "a\udc80",
  "x" * 5000,
  "~nobodyhere/x",
]
NO_PATHS += [Path("a\0b"), print, Raises(), RaisesWhenAsked(), np.eye(3)]
FEW_PATHS = [None, 5, b"run", "a\0b", Raises()]  # for calls that take the same way, and longer
NO_FUNCTIONS = [None, 5, "digits", b"digits", [digits], {}, Path("x"), Raises(), RaisesWhenAsked()]
NO_STEPS = ["1", b"1", [1], {}, Path("1"), True, 1.5, -1, float("nan"), Raises()]
NO_CHANGES = [5, ["steps"], "steps", b"steps", [("steps", 1)], False, Raises()]
NO_CHANGES += [{key: 1} for key in (5, None, b"steps", ("steps",), Path("steps"), "x", Raises())]
NO_CHANGES += [{"steps": value} for value in ("5", None, [5], {}, 1.5, Path("5"), Raises())]
NO_CONFIGS = [None, 5, {}, "run", Raises(), grpo_jax.Config(model=5)]
NO_CONFIGS += [grpo_jax.Config(steps=value) for value in (1.5, None, Raises())]


@pytest.mark.parametrize(
  ("call", "values"),
  [
    (grpo_jax.load_config, NO_PATHS),
    (lambda value: grpo_jax.load_config("arithmetic", value), NO_CHANGES),
    (lambda value: config().replace(value), [None, *NO_CHANGES]),
    (lambda value: grpo_jax.train(config(), value), FEW_PATHS),
    (lambda value: grpo_jax.train(value, "run"), NO_CONFIGS),
    (lambda value: grpo_jax.train(config(), "run", value), NO_FUNCTIONS[1:]),
    (grpo_jax.load_policy, [*FEW_PATHS, grpo_jax.Config(model=5), grpo_jax.Config(steps=1.5)]),
    (lambda value: grpo_jax.load_policy("saved", value), NO_STEPS),
    (grpo_jax.read_config, NO_PATHS),
    (grpo_jax.read_metrics, NO_PATHS),
    (grpo_jax.read_completions, NO_PATHS),
    (lambda value: grpo_jax.read_completions("saved", value), NO_STEPS),
    (grpo_jax.completion_steps, NO_PATHS),
    (grpo_jax.register_reward, NO_FUNCTIONS),
    (grpo_jax.register_task, NO_FUNCTIONS),
    (grpo_jax.register_surrogate, NO_FUNCTIONS),
    (grpo_jax.register_advantage, NO_FUNCTIONS),
    (grpo_jax.register_correction, NO_FUNCTIONS),
    (grpo_jax.register_kl, NO_FUNCTIONS),
    (grpo_jax.register_filter, NO_FUNCTIONS),
    (grpo_jax.register_optimizer, NO_FUNCTIONS),
    (grpo_jax.register_metric, NO_FUNCTIONS),
  ],
)
def test_what_a_call_cannot_use_is_one_line_and_nothing_is_written(
  tmp_path, monkeypatch, call, values
):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(gc, "collect", lambda: None)  # after each call it takes a second in here
  (tmp_path / "saved" / "completions").mkdir(parents=True)
  (tmp_path / "saved" / "completions" / "000001.jsonl").write_text("{}\n")
  tables = [dict(table) for table in (REWARDS, TASKS, SURROGATES)]
  for value in values:
    with pytest.raises(grpo_jax.ConfigError) as error:
      call(value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 1500
  assert [path.name for path in tmp_path.iterdir()] == ["saved"]
  assert tables == [REWARDS, TASKS, SURROGATES]


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda: grpo_jax.train(config(), None), "workdir must be a path: a text or a pathlib.Path,"),
    (lambda: grpo_jax.train(config(), "r", 5), "the callback cannot be called: 5 is no function"),
    (
      lambda: grpo_jax.load_config(["arithmetic"]),
      r"the recipe must be a path: .* \['arithmetic'\]",
    ),
    (lambda: grpo_jax.load_config("arithmetic", {5: 1}), "config key 5 is not a string"),
    (lambda: grpo_jax.load_config("arithmetic", [1]), r"a dict of values by key, such as .*\[1\]"),
    (lambda: grpo_jax.train(grpo_jax.Config(steps=1.5), "r"), "steps must be a whole number"),
    (lambda: grpo_jax.load_policy("r", "1"), r"load_policy\(\): step must be a whole number"),
    (lambda: grpo_jax.register_reward(None), "a reward function cannot be registered: None is no"),
    (
      lambda: grpo_jax.register_task(RaisesWhenAsked()),
      "__getattr__ of RaisesWhenAsked raises Key",
    ),
    (lambda: grpo_jax.load_config("arithmetic:drgrpo"), "no preset 'drgrpo': .* dr_grpo, bnpo"),
  ],
)
def test_the_line_says_what_to_give(tmp_path, monkeypatch, call, message):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(grpo_jax.ConfigError, match=message):
    call()


@pytest.mark.parametrize(
  ("register", "table"),
  [
    (grpo_jax.register_reward, REWARDS),
    (grpo_jax.register_surrogate, SURROGATES),
    (grpo_jax.register_advantage, ADVANTAGES),
    (grpo_jax.register_correction, CORRECTIONS),
    (grpo_jax.register_kl, KL),
    (grpo_jax.register_filter, FILTERS),
    (grpo_jax.register_optimizer, OPTIMIZERS),
    (grpo_jax.register_task, TASKS),
  ],
)
def test_registered_functions_are_found_by_name_and_can_be_replaced(register, table, own_tables):
  def mine(*args):
    return args

  assert register(mine) is mine
  first = table["mine"]
  function = mine

  def mine(*args):
    return args, args

  register(mine)
  assert table["mine"] is not first and mine is not function
  with pytest.raises(grpo_jax.ConfigError, match="'<lambda>': give the function a name"):
    register(lambda *args: 1)
  taken = next(iter(table))
  mine.__name__ = taken
  with pytest.raises(grpo_jax.ConfigError, match=f"named '{taken}': give yours another name"):
    register(mine)


def test_a_name_that_this_process_has_not_registered_says_what_to_do(tmp_path):
  for key, value, name in (
    ("reward.functions", ("gone",), "register_reward"),
    ("algo.surrogate", "gone", "register_surrogate"),
    ("algo.advantage", "gone", "register_advantage"),
    ("algo.correction", "gone", "register_correction"),
    ("algo.kl", "gone", "register_kl"),
    ("sampling.filters", ("gone=1",), "register_filter"),
    ("optimizer.name", "gone", "register_optimizer"),
    ("data.task", "gone", "register_task"),
  ):
    with pytest.raises(grpo_jax.ConfigError, match=f"{key}.*gone.*or call grpo_jax.{name} first"):
      grpo_jax.train(config().replace({key: value}), tmp_path / "run")


@pytest.mark.parametrize(
  ("train", "message"),
  [
    (None, "task mine returned a NoneType: it must be a grpo_jax.Task"),
    ([], r"task mine: train has no examples"),
    (
      [{"question": "1", "answer": ""}, {"answer": "2"}],
      r"train\[1\] must be a dict with a question",
    ),
    ([{"question": "1"}, {"question": "2", "answer": "2"}], "has the fields question, answer, and"),
    ([{"question": [{"role": "user"}]}], r"train\[0\]"),
  ],
)
def test_a_task_that_cannot_be_used_is_one_line(tmp_path, train, message):
  @grpo_jax.register_task
  def mine(path):
    test = [{"question": "1"}]
    return None if train is None else grpo_jax.Task(train, test, alphabet="12")

  with pytest.raises(grpo_jax.ConfigError, match=message):
    grpo_jax.train(config(data__task="mine"), tmp_path / "run")


@pytest.mark.slow
def test_what_ends_a_call_early_saves_and_frees_memory(tmp_path):
  """Each way to end is an exception, after which the next call goes on where it was."""
  before = surroundings()

  def fail(step):
    raise ValueError("no luck")

  def leave(step):
    raise SystemExit(0)

  def interrupt(step):
    os.kill(os.getpid(), signal.SIGINT)

  def interrupt_twice(step):
    interrupt(step)
    interrupt(step)

  for number, (callback, kind, message) in enumerate(
    (
      (fail, grpo_jax.RunFailed, r"step 1: fail raised ValueError: no luck \(.*step 1 is saved"),
      (leave, grpo_jax.RunFailed, "step 2: leave raised SystemExit: 0 .*step 2 is saved"),
      (interrupt, grpo_jax.Stopped, "at step 3 of 6, which is saved: the same call goes on"),
      (interrupt_twice, KeyboardInterrupt, "^$"),
    ),
    start=1,
  ):
    with pytest.raises(kind, match=message) as error:
      grpo_jax.train(config(steps=6), tmp_path / "run", callback)
    assert "\n" not in str(error.value)
    # The error is still referred to, as a notebook does, and keeps no arrays.
    assert surroundings() == before
    assert grpo_jax.read_metrics(tmp_path / "run")[-1]["step"] == number
  ended = []
  thread = threading.Thread(  # which cannot handle signals
    target=lambda: ended.append(grpo_jax.train(config(steps=6), tmp_path / "run").step)
  )
  thread.start()
  thread.join()
  assert ended == [6] and surroundings() == before
  rows = grpo_jax.read_metrics(tmp_path / "run")
  grpo_jax.train(config(steps=6), tmp_path / "whole")
  assert without_times(rows) == without_times(grpo_jax.read_metrics(tmp_path / "whole"))


@pytest.mark.slow
def test_another_definition_under_the_same_name_counts_in_the_next_run(tmp_path):
  """As when a cell of a notebook is changed and run again."""

  def run(name, letter, factor):
    @grpo_jax.register_task
    def letters(path):
      examples = [{"question": f"{letter * n}=", "solution": letter} for n in range(1, 8)]
      return grpo_jax.Task(examples, examples[:4])

    @grpo_jax.register_reward
    def mine(completions, **columns):
      return [text.count(letter) for text in completions]

    @grpo_jax.register_surrogate
    def scaled(terms, algo):
      return -factor * terms.ratio_PGT * terms.advantages_PGT

    own = {"data.task": "letters", "algo.surrogate": "scaled", "reward.functions": ("mine",)}
    grpo_jax.train(config(steps=1, algo__kl_coef=0.0).replace(own), tmp_path / name)
    completions = grpo_jax.read_completions(tmp_path / name)
    assert {row["prompt"].strip(letter) for row in completions} == {"="}
    assert all(row["reward"] == row["completion"].count(letter) for row in completions)
    return grpo_jax.read_metrics(tmp_path / name)[0]

  once, twice, other = run("a", "a", 1.0), run("b", "a", 2.0), run("c", "b", 1.0)
  assert once["reward"] > 0 < other["reward"]
  assert twice["grad_norm"] == pytest.approx(2 * once["grad_norm"])


@pytest.mark.slow
def test_parts_of_a_program_s_own_are_what_a_run_computes(tmp_path, monkeypatch, own_tables):
  page = Path("docs/developing.md").read_text()
  (code,) = [block for block in page.split("```")[1::2] if "register_advantage" in block]
  code = code.removeprefix("python").replace("/tmp/own_parts", str(tmp_path / "run"))
  calls = []
  monkeypatch.setattr(
    grpo_jax,
    "load_config",
    lambda recipe, changes: (
      calls.append(changes) or config(log__completions_every=1).replace(changes)
    ),
  )
  names = {}
  exec(code, names)
  row = grpo_jax.read_metrics(tmp_path / "run")[-1]
  rows = grpo_jax.read_completions(tmp_path / "run", row["step"])
  marks = [one["completion"].count("?") for one in rows]
  assert row["own/question_marks"] == sum(marks) / len(marks)
  by_prompt = {}
  for one in rows:
    by_prompt.setdefault(one["prompt"], []).append(one)
  for group in by_prompt.values():
    rewards = np.array([one["reward"] for one in group])
    best = rewards == rewards.max()
    np.testing.assert_allclose([one["advantage"] for one in group], best - best.mean(), atol=1e-6)
  assert set(calls[0]) == {
    "steps", "algo.advantage", "algo.correction", "algo.kl", "algo.kl_coef", "optimizer.name",
    "sampling.filters",
  }  # fmt: skip
  logprobs = np.log(np.array([0.5, 0.25, 0.3])), np.log(np.array([0.25, 0.5, 0.3]))
  # 0.5 d (1 - e^-d): ln 2 / 4 and ln 2 / 2
  np.testing.assert_allclose(names["jeffreys"](*logprobs), [0.1732868, 0.3465736, 0], rtol=1e-5)


PLUGIN = """
import grpo_jax, jax.numpy as jnp

@grpo_jax.register_advantage
def halved(rewards, mask_PGT, algo):
  centered_PG = rewards.total_PG - rewards.total_PG.mean(1, keepdims=True)
  return FACTOR * jnp.where(rewards.scored_PG, centered_PG, 0.0)

@grpo_jax.register_reward
def letters(completions, **columns):
  return [float(len(text)) for text in completions]

@grpo_jax.register_metric
def longest(rollouts, rewards_PG):
  return max(map(len, rollouts.texts_PG.ravel()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_plugin_registers_is_there_for_every_command(tmp_path, own_tables, workers):
  file = tmp_path / "mine.py"
  file.write_text(PLUGIN.replace("FACTOR", "0.5"))
  own = config(log__completions_every=1, eval__every=1, eval__examples=4, eval__batch=4)
  names = {"algo.advantage": "halved", "reward.functions": ("letters",), "eval.function": "digits"}
  own = own.replace({**names, "plugins": (str(file),), "reward.workers": workers})
  grpo_jax.train(own.replace({"eval.function": "letters"}), tmp_path / "run")
  rows = grpo_jax.read_completions(tmp_path / "run")
  assert grpo_jax.read_metrics(tmp_path / "run")[-1]["own/longest"] == max(
    len(row["completion"]) for row in rows
  )
  by_prompt = {}
  for row in rows:
    assert row["reward"] == len(row["completion"])
    by_prompt.setdefault(row["prompt"], []).append(row)
  for group in by_prompt.values():
    rewards = np.array([row["reward"] for row in group])
    expected = 0.5 * (rewards - rewards.mean())
    np.testing.assert_allclose([row["advantage"] for row in group], expected, atol=1e-5)
  for table in (ADVANTAGES, REWARDS, OWN_METRICS):  # as in a new process
    for name in {"halved", "letters", "longest"} & set(table):
      del table[name]
  plugins._loaded.clear()
  assert grpo_jax.load_policy(tmp_path / "run").sample("1+1=")
  assert "halved" in ADVANTAGES


def test_a_plugin_is_executed_again_only_if_it_has_changed(tmp_path, own_tables):
  file = tmp_path / "mine.py"
  file.write_text(PLUGIN.replace("FACTOR", "0.5"))
  plugins.load([str(file)])
  first = ADVANTAGES["halved"]
  plugins.load([str(file)])
  assert ADVANTAGES["halved"] is first
  file.write_text(PLUGIN.replace("FACTOR", "2.0"))
  os.utime(file, ns=(1, 1))
  plugins.load([str(file)])
  assert ADVANTAGES["halved"] is not first


@pytest.mark.parametrize(
  ("text", "message"),
  [
    (None, "config key plugins: '.*mine.py' cannot be read"),
    ("1 / 0", "config key plugins: .*mine.py cannot be executed: ZeroDivisionError: .* line 1"),
    ("raise SystemExit(0)", "config key plugins: .*mine.py cannot be executed"),
  ],
)
def test_a_plugin_that_cannot_be_loaded_is_one_line(tmp_path, text, message):
  file = tmp_path / "mine.py"
  if text is not None:
    file.write_text(text)
  with pytest.raises(grpo_jax.ConfigError, match=message):
    grpo_jax.train(config(plugins=(str(file),)), tmp_path / "run")
  with pytest.raises(grpo_jax.ConfigError, match="config key plugins: no_such_module cannot be"):
    grpo_jax.train(config(plugins=("no_such_module",)), tmp_path / "run")
  assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
  ("value", "message"),
  [
    ("many", "metric bad returned 'many': it must be a number"),
    (None, "metric bad returned None"),
    ({"a": [1]}, r"metric bad/a returned \[1\]"),
    (ValueError("no texts"), "metric bad raised ValueError: no texts"),
  ],
)
def test_a_metric_that_is_no_number_ends_the_run_in_one_line(tmp_path, value, message, own_tables):
  @grpo_jax.register_metric
  def bad(rollouts, rewards_PG):
    if isinstance(value, Exception):
      raise value
    return value

  with pytest.raises(RunFailed, match=message):
    grpo_jax.train(config(), tmp_path / "run")


@pytest.mark.slow
def test_a_metric_of_your_own_sees_the_rows_that_other_processes_score(
  tmp_path, own_tables, monkeypatch
):
  """Of two processes, each has the texts of its half until a metric asks for all."""
  seen = []

  @grpo_jax.register_metric
  def bad(rollouts, rewards_PG):
    seen.append(rollouts.texts_PG)
    return 0.0

  def of_first_half(completions, decode, rows=slice(None)):
    texts = rollout.texts_of(completions, decode, rows)
    if rows != slice(None):
      texts[len(texts) // 2 :] = None
    return texts

  monkeypatch.setattr("grpo_jax.rollouts.complete.texts_of", of_first_half)
  own = config(reward__functions=("always",))

  @grpo_jax.register_reward
  def always(completions, **columns):
    return [1.0 if text is None else len(text) for text in completions]

  grpo_jax.train(own, tmp_path / "run")
  assert all(isinstance(text, str) for text in seen[0].ravel())


def test_a_metric_may_have_several_numbers(own_tables):
  @grpo_jax.register_metric
  def bad(rollouts, rewards_PG):
    return {"best": rewards_PG.max(), "count": rewards_PG.size}

  assert own_metrics(None, np.array([[1.0, 2.0]])) == {"own/bad/best": 2.0, "own/bad/count": 2.0}


@pytest.mark.slow
def test_sample_takes_a_text_messages_or_a_list_of_either():
  chat = {"data.chat": True, "data.system": "Sum.", "data.prompt": "{prompt}"}
  small = {"data.tokenizer": str(TOKENIZERS / "qwen"), "data.max_prompt_tokens": 64}
  policy = grpo_jax.load_policy(config(sampling__max_tokens=2).replace({**chat, **small}))
  messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
  messages += [{"role": "user", "content": "Sure?"}]
  as_text = policy.sample("1+1=", n=2)
  assert as_text == policy.sample(messages[:1], n=2) != policy.sample(messages, n=2)
  both = policy.sample(["1+1=", messages], n=2)
  assert both == [as_text, policy.sample(messages, n=2)]
  assert policy.sample(["1+1="], n=2) == [as_text]
  (prompt,) = policy.prompt("1+1=").columns["messages"]
  assert prompt == [{"role": "system", "content": "Sum."}, messages[0]]
  for wrong in (7, None, [], [7], ["1+1=", None], {"role": "user"}, [{"role": "user"}], b"1"):
    with pytest.raises(grpo_jax.ConfigError, match=r"^sample\(\): the question is .*: give a text"):
      policy.sample(wrong)
  prompts = {"data.mixture": ("arithmetic", "countdown"), "data.prompts": ("{question}", "{text}")}
  for changes, message in (
    ({"data.prompt": "{body} {asked}"}, "data.prompt is .* a question cannot fill 2 fields; give"),
    (prompts, "data.prompts is .* a question alone has none; give the whole prompt"),
  ):
    policy.run.config = policy.run.config.replace(changes)
    with pytest.raises(grpo_jax.ConfigError, match=message):
      policy.sample("1+1=")
    assert policy.prompt("1+1=", framed=False).columns["prompts"] == ["1+1="]


@pytest.mark.slow
def test_a_policy_needs_no_part_of_training_that_only_a_script_registered(tmp_path):
  """The card of an export names these parts nevertheless."""
  grpo_jax.train(config(steps=1), tmp_path / "run")
  file = tmp_path / "run" / "config.json"
  saved = json.loads(file.read_text())
  saved["algo"] |= {name: f"own_{name}" for name in ("advantage", "surrogate", "kl", "correction")}
  saved["optimizer"]["name"] = "own_rule"
  file.write_text(json.dumps(saved))
  policy = grpo_jax.load_policy(tmp_path / "run")
  assert policy.sample("1+2=")
  card = (policy.export(tmp_path / "out") / "README.md").read_text()
  for name in ("advantage", "surrogate", "correction"):
    assert f"{name} `own_{name}`" in card
  assert "own_rule" in card
  with pytest.raises(grpo_jax.ConfigError, match=r"algo\.\w+ is 'own_"):  # training needs them
    grpo_jax.train(read_config(tmp_path / "run"), tmp_path / "again")


@pytest.mark.slow
def test_a_policy_samples_evaluates_and_exports(tmp_path, capsys):
  """The numbers are those of the run's own evaluation."""
  changes = dict(eval__every=1, eval__examples=8, eval__batch=8, eval__samples=4)
  grpo_jax.train(config(steps=1, eval__function="digits", **changes), tmp_path / "run")
  last = grpo_jax.read_metrics(tmp_path / "run")[-1]
  before = surroundings()
  policy = grpo_jax.load_policy(tmp_path / "run")
  assert repr(policy) == f"Policy({tmp_path / 'run'}, step 1)"
  metrics = policy.evaluate()
  assert metrics == {name: last[name] for name in metrics} and "eval/pass@4" in metrics
  fewer = policy.evaluate(samples=0, examples=4)
  assert "eval/pass@4" not in fewer and fewer["eval/accuracy"] in (0, 0.25, 0.5, 0.75, 1)

  drawn = policy.sample("1+2=", n=3)
  assert drawn == policy.sample("1+2=", n=3) != policy.sample("1+2=", n=3, seed=1)
  assert len(drawn) == 3 and all(1 <= one.length <= 5 and one.logprob < 0 for one in drawn)
  assert len(policy.sample("1+2=", temperature=0, max_tokens=2)) == 1
  for changed, message in (
    ({"n": 0}, "n is 0: it must be at least 1"),
    ({"temperature": -1.0}, "temperature is -1.0"),
    ({"max_tokens": 2**30}, "do not fit the model's"),
  ):
    with pytest.raises(grpo_jax.ConfigError, match=message):
      policy.sample("1+2=", **changed)

  out = policy.export(tmp_path / "out")
  with pytest.raises(grpo_jax.ConfigError, match="is not an empty folder"):
    policy.export(out)
  with pytest.raises(grpo_jax.ConfigError, match="has no adapters"):
    policy.export(tmp_path / "adapters", adapter=True)
  exported = grpo_jax.load_policy(config(model__path=str(out), steps=1))
  assert [c.text for c in exported.sample("1+2=", n=3)] == [c.text for c in drawn]
  with pytest.raises(grpo_jax.ConfigError, match="step 7"):
    grpo_jax.load_policy(tmp_path / "run", step=7)
  del policy, exported
  gc.collect()
  assert surroundings() == before


def test_a_run_of_other_devices_is_loaded_on_these():
  """The tests have eight."""
  small = small_config()
  given = dict(mesh=Mesh(data=1, fsdp=64, tensor=4), sampling=with_tensor(small, 16))
  found = _on_this_machine(dataclasses.replace(small, **given))
  assert (found.mesh, found.sampling.tensor) == (Mesh(data=-1), 0)
  for tensor, there in ((2, 2), (16, 0)):
    fitting = dataclasses.replace(
      small, mesh=Mesh(data=-1, fsdp=2), sampling=with_tensor(small, tensor)
    )
    found = _on_this_machine(fitting)
    assert (found.mesh, found.sampling.tensor) == (fitting.mesh, there)
  for context, there in ((4, 4), (16, 1)):
    sampling = dataclasses.replace(small.sampling, tensor=2, context=context)
    found = _on_this_machine(dataclasses.replace(small, mesh=Mesh(data=-1), sampling=sampling))
    assert (found.sampling.context, found.sampling.tensor) == (there, 2 if there > 1 else 0)
  for mesh, there in ((Mesh(expert=2), 4), (Mesh(tensor=4), 1), (Mesh(data=4, tensor=-1), 4)):
    sampling = dataclasses.replace(small.sampling, tensor=0, context=4)
    found = _on_this_machine(dataclasses.replace(small, mesh=mesh, sampling=sampling))
    assert found.sampling.context == there
  rollout = dataclasses.replace(small.rollout, weights="newest", replay="run", max_staleness=1)
  mesh = Mesh(data=2, fsdp=2, sampler=4)
  found = _on_this_machine(dataclasses.replace(small, mesh=mesh, rollout=rollout))
  assert found.mesh == Mesh(data=-1)
  assert (found.rollout.weights, found.rollout.replay) == ("fixed", "")  # others need a sampler


def with_tensor(config, tensor):
  return dataclasses.replace(config.sampling, tensor=tensor)
