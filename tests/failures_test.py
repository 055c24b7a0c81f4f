"""Runs that fail or are stopped: what is saved, what is said, and how the same command goes on."""

import asyncio
import dataclasses
import functools
import io
import json
import os
from pathlib import Path
import re
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from small_run import small_config, with_reward, with_section
from teacher_test import save_teacher

from grpo_jax import cli, rewards
from grpo_jax.algo.metrics import disjoint
from grpo_jax.algo.surrogates import SURROGATES
from grpo_jax.config import check_key
from grpo_jax.console.exit_codes import Stopped
from grpo_jax.console.stdout import Stdout
from grpo_jax.console.stop import leaving_on_second_signal, raising_on_second_signal
from grpo_jax.data.tasks.tasks import register_task
from grpo_jax.rewards import call
from grpo_jax.rewards.answer import Answer, Failure
from grpo_jax.run.parameters import Parameters
from grpo_jax.scoring.scorer import _Place, _why_unscored
from grpo_jax.settings import ConfigError, RunFailed
from grpo_jax.storage.checkpoint import Checkpoints
from grpo_jax.storage.reading import read_metrics
from grpo_jax.timing import is_of_clock
from grpo_jax.train import train
from grpo_jax.training import reporter
from grpo_jax.training.loop import run_steps
from grpo_jax.training.trainer import SkippedUpdates

ROOT = Path(__file__).parents[1]

# "reward 3 exit" in plan.txt: at its third call, the function reward exits.
REWARDS = """
import os, pathlib, signal, sys
calls = {"reward": 0, "decides": 0}
plan = pathlib.Path(__file__).with_name("plan.txt")

def act(name):
  calls[name] += 1
  wanted, number, action = plan.read_text().split() if plan.exists() else ("", 0, "")
  if name == wanted and calls[name] == int(number):
    if action == "raise":
      raise ValueError("no\\nluck")
    if action == "exit":
      sys.exit(0)
    os.kill(os.getpid(), signal.SIGTERM)

def reward(completions, **_):
  act("reward")
  return [sum(map(ord, c)) / 100 for c in completions]

def decides(completions, **_):
  act("decides")
  return [float(len(c) % 2) for c in completions]
"""


def without_times(rows):
  return [{k: v for k, v in row.items() if not is_of_clock(k)} for row in rows]


def saved_steps(workdir):
  return Checkpoints(workdir / "checkpoints", keep=1).steps()


@pytest.mark.slow
def test_what_a_function_raises_and_a_signal_lose_nothing(tmp_path):
  """A run that fails in a step and in an evaluation and is stopped is in the end the same run."""
  config = with_reward(dataclasses.replace(small_config(), steps=6), tmp_path, REWARDS)
  function = f"{tmp_path}/reward.py:decides"
  config = with_section(config, "eval", every=2, examples=4, batch=4, function=function)
  config = with_section(config, "checkpoint", every=0)
  config = with_section(config, "mesh", data=1, fsdp=1, tensor=-1)
  train(config, tmp_path / "undisturbed")
  run, plan = tmp_path / "run", tmp_path / "plan.txt"

  plan.write_text("reward 3 exit")
  with pytest.raises(RunFailed) as error:
    train(config, run)
  words = f"step 3: reward function reward raised SystemExit: 0 ({tmp_path}/reward.py line 13)"
  assert str(error.value) == f"{words}; step 2 is saved; run the same command again to go on"
  assert saved_steps(run) == [2] and len(read_metrics(run)) == 3

  plan.write_text("decides 1 raise")  # at step 4; those of steps 0 and 2 are made
  with pytest.raises(RunFailed) as error:
    train(config, run)
  words = "evaluation after step 4: reward function decides raised ValueError: no luck ("
  assert str(error.value).startswith(words) and "\n" not in str(error.value)
  assert saved_steps(run) == [2, 4]
  last_row = read_metrics(run)[-1]
  assert last_row["step"] == 4 and "reward" in last_row and "eval/accuracy" not in last_row

  plan.write_text("reward 1 stop")
  with pytest.raises(Stopped):
    train(config, run)
  assert saved_steps(run) == [2, 4, 5]
  assert "eval/accuracy" in read_metrics(run)[-2]  # made when the run began again

  plan.unlink()
  train(config, run)
  assert without_times(read_metrics(run)) == without_times(read_metrics(tmp_path / "undisturbed"))


@pytest.mark.slow
def test_a_run_that_learns_nothing_any_more_stops_and_keeps_its_good_checkpoint(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(SkippedUpdates, "limit", 3)
  config = dataclasses.replace(small_config(kl_coef=0.1), steps=9)
  config = with_section(config, "optimizer", learning_rate=1e30, max_grad_norm=0.0)
  config = with_section(config, "checkpoint", every=1, keep=1)
  source = "def reward(completions, **_):\n  return [sum(map(ord, c)) / 100 for c in completions]\n"
  with pytest.raises(RunFailed, match="the last 3 updates were skipped.*learning_rate") as error:
    train(with_reward(config, tmp_path, source), tmp_path / "run")
  rows = read_metrics(tmp_path / "run")
  first_skipped = next(row["step"] for row in rows if row["skipped_updates"])
  assert [row["skipped_updates"] for row in rows[-3:]] == [1, 1, 1]
  assert saved_steps(tmp_path / "run") == [first_skipped - 1]
  assert f"of step {first_skipped - 1}, is from before" in str(error.value)
  assert len(rows) == first_skipped + 2 < 9

  monkeypatch.setattr(SkippedUpdates, "limit", 9)  # a run that is stopped says what is saved, too
  words = f"at step {first_skipped} of 9, and step {first_skipped - 1} is saved: the same call"
  with pytest.raises(Stopped, match=words):
    interrupt = functools.partial(os.kill, os.getpid(), signal.SIGINT)
    train(with_reward(config, tmp_path, source), tmp_path / "run", lambda step: interrupt())


SOMETIMES = """
def reward(completions, step, **_):
  if step in (2, 4, 5):
    return [None] * len(completions)
  return [sum(map(ord, c)) / 100 for c in completions]

def never(completions, **_):
  return [float("nan")] * len(completions)
"""


@pytest.mark.slow
def test_a_run_without_rewards_stops_saves_and_goes_on(tmp_path):
  """Steps 4 and 5 in a row have no reward. Going on, step 6 has rewards again."""
  config = with_reward(dataclasses.replace(small_config(), steps=6), tmp_path, SOMETIMES)
  config = with_section(config, "checkpoint", every=0)
  config = with_section(config, "reward", max_unscored_steps=2)
  with pytest.raises(RunFailed) as error:
    train(config, tmp_path / "run")
  said = str(error.value)
  assert said.startswith(
    "the last 2 GRPO steps had nothing to learn from"
    " (reward.max_unscored_steps): reward function reward returned no score for any completion"
    " (the first answer in the data is '"
  )
  assert (
    said.endswith("; step 5 is saved; run the same command again to go on") and "\n" not in said
  )
  assert saved_steps(tmp_path / "run") == [5]
  train(config, tmp_path / "run")
  train(config.replace({"reward.max_unscored_steps": 0}), tmp_path / "undisturbed")
  rows = [without_times(read_metrics(tmp_path / name)) for name in ("run", "undisturbed")]
  assert rows[0] == rows[1] and len(rows[0]) == 6


@pytest.mark.slow
def test_a_run_that_never_had_a_reward_stops_and_fails_at_its_end_too(tmp_path):
  config = with_reward(dataclasses.replace(small_config(), steps=3), tmp_path, SOMETIMES, ["never"])
  config = with_section(config, "reward", max_unscored_steps=2)
  words = "the last {} GRPO steps had nothing to learn from"
  with pytest.raises(
    RunFailed, match=words.format(2) + ".*; step 2 is saved; run the same command"
  ):
    train(config, tmp_path / "run")
  endless = config.replace({"reward.max_unscored_steps": 0})
  for _ in range(2):  # the second time, no step is left to take
    with pytest.raises(RunFailed, match=words.format(3) + ", which are all: "):
      train(endless, tmp_path / "run")
  assert saved_steps(tmp_path / "run") == [2, 3]


FORKS = """
import multiprocessing, time

def reward(completions, **_):
  started = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
  started.start()
  time.sleep(0.2)  # until it sleeps
  started.terminate()
  started.join(20)
  assert started.exitcode == -15
  return [float(len(text)) for text in completions]
"""


@pytest.mark.slow
@pytest.mark.parametrize(
  "signals",
  [leaving_on_second_signal, pytest.param(raising_on_second_signal, marks=pytest.mark.slow)],
)
def test_processes_that_a_reward_forks_and_ends_do_not_stop_the_run(signals, tmp_path):
  """As a multiprocessing.Pool ends its processes. They are forks of the run, and not the run."""
  config = with_reward(dataclasses.replace(small_config(), steps=2), tmp_path, FORKS)
  signal.alarm(60)  # of what waits for ever
  run_steps(config, tmp_path / "run", signals=signals)
  signal.alarm(0)
  assert len(read_metrics(tmp_path / "run")) == 2


@pytest.mark.slow
@pytest.mark.parametrize("teacher", [False, True])
def test_a_run_whose_completions_are_all_cut_off_and_masked_stops(teacher, tmp_path, capsys):
  """Before its third token no completion may end. A teacher has no token to grade."""
  config = dataclasses.replace(small_config(mask_truncated=True, kl_coef=0.1), steps=12)
  config = with_reward(
    config, tmp_path, "def reward(completions, **_):\n  return [1.0, 0.0, 0.5] * 4\n"
  )
  config = with_section(config, "sampling", max_tokens=3, min_tokens=3)
  if teacher:
    save_teacher(tmp_path / "teacher")
    config = with_section(config, "reward", teacher=str(tmp_path / "teacher"), max_unscored_steps=2)
  else:
    config = with_section(config, "reward", max_unscored_steps=2)
  with pytest.raises(RunFailed, match=r"^the last 2 GRPO steps had nothing to learn from") as error:
    train(config, tmp_path / "run")
  assert "all 12 completions were cut off (sampling.max_tokens is 3)" in str(error.value)
  output = capsys.readouterr()
  assert output.err.count("warning: step 1 had nothing to learn from: all 12 completions") == 1
  assert "kl nan" not in output.out


def why_unscored(entry, failures=(), **columns):
  place = _Place(1, 0, 2, columns)
  return _why_unscored("f", Answer([[], []], list(failures)), entry, place)


def test_why_no_completion_has_a_reward():
  crash = Failure(0, "crash", "reward function f raised SystemExit: 0")
  assert why_unscored("", [crash]) == "reward function f raised SystemExit: 0"
  assert why_unscored("gsm8k, svamp", task=["code", "code"]) == (
    "reward function f is for gsm8k, svamp alone (reward.tasks), and the prompts are of code"
  )
  returned = "reward function f returned no score for any completion"
  assert why_unscored("code", task=["code", "code"]) == returned
  assert why_unscored("", answer=["n/a", "n/a"]) == (
    f"{returned} (the first answer in the data is 'n/a')"
  )


def one_step_behind(monkeypatch):
  """Lets every step sample from the policy before the last update."""
  for_sampling, kept = Parameters.for_sampling, []

  def stale(self, trained):
    kept.append(jax.tree.map(np.asarray, trained))
    return for_sampling(self, jax.device_put(kept[-2:][0]))

  monkeypatch.setattr(Parameters, "for_sampling", stale)


@pytest.mark.slow
def test_a_run_one_step_behind_its_sampler_stops_where_the_ratio_counts_as_one(
  tmp_path, monkeypatch
):
  one_step_behind(monkeypatch)
  source = "def reward(completions, **_):\n  return [sum(map(ord, c)) / 100 for c in completions]\n"
  config = with_reward(dataclasses.replace(small_config(), steps=3), tmp_path, source)
  with pytest.raises(RunFailed, match="not the one that sampled: .* algo.correction=truncate"):
    train(config, tmp_path / "run")
  assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2]
  # What is computed for a policy that is behind may be behind.
  corrected = with_section(config, "algo", correction="truncate", correction_high=2.0)
  corrected = with_section(corrected, "sampling", max_logprob_gap=0.0)  # the gap is meant
  assert train(corrected, tmp_path / "corrected").step == 3


def test_skipped_updates_are_counted_in_a_row():
  skipped = SkippedUpdates()
  for metrics, updates, expected in (
    ({"warm_start/skipped_updates": 1}, 1, 1),
    ({"skipped_updates": 2}, 2, 3),
    ({"skipped_updates": 1}, 2, 0),  # one of the two was good
    ({"skipped_updates": 4}, 4, 4),
  ):
    skipped.count(metrics, updates)
    assert skipped.in_a_row == expected and not skipped.are_too_many
  skipped.count({"skipped_updates": 1}, 1)
  assert skipped.are_too_many and "no checkpoint is saved" in str(skipped.failure(None))


# Reward functions.


def test_each_function_gets_its_own_arguments():
  def spoils(completions, completion_ids, messages, **columns):
    completions.clear()
    completion_ids[0].append(99)
    messages[0][0]["content"] = "spoiled"
    columns["answer"][:] = ["spoiled"] * 2
    columns["array"][0][:] = -1
    return [0.0, 0.0]

  def looks(completions, **columns):
    seen.update(columns, completions=completions)
    return [0.0, 0.0]

  seen = {}
  message = {"role": "user", "content": "1+1="}
  columns = {
    "completions": ["a", "b"],
    "completion_ids": [[1], [2]],
    "messages": [[message], [message]],
    "answer": ["2", "2"],
    "array": [np.ones(1), np.ones(1)],
  }
  answers = rewards.Caller(None).start([spoils, looks], columns, 1, 2)
  assert [answer.result().steps for answer in answers] == [[[(1, 0.0)]] * 2] * 2
  assert seen["completions"] == ["a", "b"] and seen["answer"] == ["2", "2"]
  assert seen["completion_ids"] == [[1], [2]] and seen["array"][0][0] == 1
  assert seen["messages"][0][0]["content"] == message["content"] == "1+1="
  assert seen["messages"][0][0] is not seen["messages"][1][0]


def generator_that_exits(completions, **_):
  yield 1.0
  sys.exit(0)


def without_reply(completions, **_):
  time.sleep(0.5)
  return [0.0]


def test_a_generator_that_exits_is_named():
  with pytest.raises(rewards.RewardError, match="generator_that_exits raised SystemExit: 0"):
    call.call_here(generator_that_exits, "generator_that_exits", {"completions": ["a", "b"]})


@pytest.mark.parametrize(
  "name", ["step", "time", "event", "eval/accuracy", "", " ", "a\nb", "\x1b[2J", 5]
)
def test_log_metric_takes_no_column_of_a_row_and_no_unreadable_name(name):
  def logs(completions, log_metric, **_):
    log_metric(name, 99)
    return [0.0]

  with pytest.raises(rewards.RewardError, match=r"logs raised ValueError: log_metric\(.*") as error:
    call.call_here(logs, "logs", {"completions": ["a"]})
  assert f"log_metric({name!r}, ...): " in str(error.value) and str(error.value).isprintable()


def test_log_extra_takes_no_unreadable_name():
  def logs(completions, log_extra, **_):
    log_extra("a\0b", [1])
    return [0.0]

  with pytest.raises(rewards.RewardError, match="log_extra.*a name is text of printable charac"):
    call.call_here(logs, "logs", {"completions": ["a"]})


def test_metrics_of_two_parts_with_one_name_are_refused():
  assert disjoint({"my/size": 1.0}, {"reward": 2.0}, {}) == {"my/size": 1.0, "reward": 2.0}
  with pytest.raises(RunFailed, match=r"log_metric\('reward', ...\), and the run has a metric of"):
    disjoint({"my/size": 1.0}, {"reward": 2.0}, {"reward": 1.0})


@pytest.mark.slow
@pytest.mark.parametrize(
  "name", ["reward", "completions/tokens", "kl", "learning_rate", "time/step"]
)
def test_log_metric_takes_no_metric_of_the_run(tmp_path, name):
  source = f"def reward(log_metric, completions, **_):\n  log_metric({name!r}, 7)\n"
  source += "  return [float(len(c)) for c in completions]\n"
  with pytest.raises(RunFailed, match=f"log_metric.'{name}', .* the run has a metric of this name"):
    train(with_reward(small_config(), tmp_path, source), tmp_path / "run")


@pytest.mark.slow
def test_log_metric_takes_no_metric_of_the_run_after_a_warm_start_either(tmp_path):
  """The update of the step has taken the arrays of the state, which can no longer be saved."""
  source = "def reward(log_metric, completions, **_):\n  log_metric('kl', 7)\n"
  source += "  return [float(len(c)) for c in completions]\n"
  config = with_section(small_config(), "warm_start", steps=2)
  config = with_section(config, "sampling", max_tokens=40)
  with pytest.raises(RunFailed, match="the run has a metric of this name.*only if a checkpoint"):
    train(with_reward(config, tmp_path, source), tmp_path / "run")


def test_a_function_that_does_not_return_is_named_again_and_again(monkeypatch, capsys):
  monkeypatch.setattr(call, "SECONDS_BETWEEN_WARNINGS", 0.1)
  call.call_here(without_reply, "without_reply", {"completions": ["a"]})
  lines = capsys.readouterr().err.splitlines()
  assert lines[0] == "warning: reward function without_reply has not returned for 0.1 s"
  assert len(lines) > 1


INTERRUPTED = """
import asyncio, os, signal, threading
from grpo_jax.rewards import call

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it

async def waits(completions, **_):
  threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
  await asyncio.sleep(600)

try:
  call.call_here(waits, "waits", {"completions": ["a"]})
except KeyboardInterrupt:
  print("interrupted")
"""


def test_ctrl_c_ends_a_program_that_waits_for_an_async_function():
  command = [sys.executable, "-c", INTERRUPTED]
  done = subprocess.run(command, capture_output=True, text=True, timeout=60)
  assert (done.returncode, done.stdout) == (0, "interrupted\n")


async def fails_late(completions, **_):
  await asyncio.sleep(0)
  raise SystemExit(3)


def test_an_async_function_is_called_where_an_event_loop_runs_and_its_exit_is_named():
  async def cell():
    call.call_here(fails_late, "fails_late", {"completions": ["a"]})

  with pytest.raises(rewards.RewardError, match=r"fails_late raised SystemExit: 3 .*failures_test"):
    asyncio.run(cell())


async def asynchronous_generator(completions, **_):
  yield 0.0


class Keyed:
  def __call__(self, completions, *, difficulty, **_):
    return [0.0] * len(completions)


@pytest.mark.parametrize(
  "function, words",
  [
    (lambda completions: [0.0], "unexpected keyword argument 'prompts'.*as \\*\\*columns"),
    (lambda prompts, /, completions: [0.0], "keyword arguments completions, prompts"),
    (lambda completions, level, **_: [0.0], "missing a required argument: 'level'"),
    (Keyed(), "missing a required argument: 'difficulty'"),
    (asynchronous_generator, "yields in an async function"),
  ],
)
def test_a_function_that_cannot_be_called_is_refused_at_the_start(function, words):
  with pytest.raises(ConfigError, match=f"^reward.functions: f.*{words}") as error:
    rewards.check_arguments(function, "f", "reward.functions", ["completions", "prompts"])
  assert "\n" not in str(error.value)


def test_a_function_gets_the_fields_of_examples_that_it_names():
  def named(completions, prompts, answer, step, log_metric, log_extra):
    return [float(len(answer[0]))]

  columns = {"completions": ["a"], "prompts": ["q"], "answer": ["12"], "id": [None]}
  fields = ["answer", "id"]
  rewards.check_arguments(named, "f", "reward.functions", [*columns], fields)
  assert call.call(named, "f", columns).steps == [[(1, 2.0)]]
  for function, words in (
    (lambda completions, answer: [0.0], "unexpected keyword argument 'prompts'"),
    (lambda gold, **columns: [0.0], "missing a required argument: 'gold'"),
  ):
    with pytest.raises(ConfigError, match=words):
      rewards.check_arguments(function, "f", "reward.functions", [*columns], fields)


@pytest.mark.slow
def test_a_column_that_a_test_file_alone_has_stops_no_run(tmp_path):
  rows = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(6)]
  later = [*rows, rows[0] | {"note": "x", "prompts": "y"}]
  (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in later))
  (tmp_path / "test.jsonl").write_text("".join(f"{json.dumps(row | {'id': 3})}\n" for row in rows))
  source = """
def reward(completions, prompts, completion_ids, question, answer, step, log_metric, log_extra):
  return [float(len(one) + len(prompt)) for one, prompt in zip(completions, prompts)]
"""
  config = with_reward(small_config(), tmp_path, source)
  data = {"task": "columns", "path": str(tmp_path), "prompt": "{question}"}
  config = with_section(config, "data", **data)
  config = with_section(config, "eval", every=1, examples=4, batch=4)
  config = with_section(config, "eval", function=config.reward.functions[0])
  train(config, tmp_path / "run")
  rows = read_metrics(tmp_path / "run")
  assert max(row["rewards/reward/mean"] for row in rows if "reward" in row) >= 4


def test_the_signature_is_checked_before_anything_is_written(tmp_path):
  config = with_reward(small_config(), tmp_path, "def reward(completions):\n  return [0.0]\n")
  with pytest.raises(ConfigError, match="reward.functions: reward.completions. cannot be called"):
    train(config, tmp_path / "run")
  evaluated = with_section(small_config(), "eval", every=1, examples=8, batch=8)
  evaluated = with_section(evaluated, "eval", function=config.reward.functions[0])
  with pytest.raises(ConfigError, match="eval.function: reward.completions. cannot be called"):
    train(evaluated, tmp_path / "run")
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
  "source, words",
  [
    ("import sys\nsys.exit(0)\n", "SystemExit: 0 ({file} line 2)"),
    ("def reward(:\n", "SyntaxError: invalid syntax ({name}, line 1)"),
    ("\nimport nosuchpackage\n", "ModuleNotFoundError: No module named 'nosuchpackage' ({file}"),
    ("def f():\n  return f()\nf()\n", "RecursionError"),
    ("x = '\\0'\n1/0", "ZeroDivisionError: division by zero ({file} line 2)"),
  ],
)
def test_a_file_that_cannot_be_executed_is_one_line(tmp_path, source, words):
  file = tmp_path / "mine.py"
  file.write_text(source)
  with pytest.raises(ConfigError) as error:
    rewards.resolve(f"{file}:reward", "reward.functions", lambda name: False)
  words = words.replace("{file}", str(file)).replace("{name}", file.name)
  assert f"reward.functions: {file} cannot be executed: {words}" in str(error.value)
  assert "\n" not in str(error.value)


# The ends of a program.


def end_of(monkeypatch, capsys, error):
  """The exit code and the lines of stderr of a program that raises `error`."""

  def main(argv):
    raise error

  monkeypatch.setattr(cli, "_parse", lambda argv, values: argv)
  with pytest.raises(SystemExit) as raised:
    cli.run(main)
  return raised.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
  "error, code, line",
  [
    (ConfigError("bad\nkey"), 2, "error: bad key\n"),
    (RunFailed("disk"), 1, "error: disk\n"),
    (Stopped(), 75, ""),
    (KeyboardInterrupt(), 130, "interrupted\n"),
    (MemoryError(), 1, "error: out of memory: lower batch.micro_batch, "),
    (MemoryError("Unable to allocate 9 TiB"), 1, "error: out of memory (Unable to allocate 9 TiB)"),
  ],
)
def test_every_end_has_its_code_and_its_line(monkeypatch, capsys, error, code, line):
  found, lines = end_of(monkeypatch, capsys, error)
  assert found == code and lines.startswith(line) and lines.count("\n") <= 1
  assert line or not lines


def test_the_line_of_too_little_memory_names_keys_that_there_are(monkeypatch, capsys):
  _, line = end_of(monkeypatch, capsys, MemoryError())
  keys = re.findall(r"[a-z_]+\.[a-z_]+", line)
  assert len(keys) > 5
  for key in keys:
    check_key(key)


@pytest.mark.parametrize("code", [0, None, 3, "no"])
def test_code_of_others_that_exits_does_not_end_a_program_with_its_code(monkeypatch, capsys, code):
  found, lines = end_of(monkeypatch, capsys, SystemExit(code))
  text = "error: code that the program called ended it: SystemExit"
  assert found == 1 and lines.startswith(text) and lines.count("\n") == 1
  assert f"({__file__} line" in lines


def exits(path):
  sys.exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["task", "surrogate"])
def test_code_of_others_that_exits_does_not_end_the_program_that_calls_train(whose, tmp_path):
  config = small_config()
  if whose == "task":
    register_task(exits)
    config = with_section(config, "data", task="exits")
  else:
    ours = dataclasses.replace(SURROGATES["ppo_clip"], loss=lambda *given: exits(""))
    SURROGATES["ours"] = ours
    config = with_section(config, "algo", surrogate="ours")
  with pytest.raises(RunFailed, match=r"ended it: SystemExit: 0 \(.*failures_test.py line"):
    train(config, tmp_path / "run")


def test_a_defect_keeps_its_traceback(monkeypatch):
  monkeypatch.setattr(cli, "_parse", lambda argv, values: argv)
  with pytest.raises(ZeroDivisionError):
    cli.run(lambda argv: 1 / 0)


class Closed(io.StringIO):
  """A stream whose reader has gone, or whose disk is full."""

  def __init__(self, error):
    super().__init__()
    self._error = error

  def write(self, text):
    raise self._error


@pytest.mark.parametrize(
  "error, reason",
  [
    (BrokenPipeError(32, "Broken pipe"), "stdout was closed"),
    (OSError(28, "No space left on device"), "stdout fails (No space left on device)"),
  ],
)
def test_a_lost_stdout_is_reported_once(monkeypatch, error, reason):
  monkeypatch.setattr(sys, "stdout", Closed(error))
  reasons = []
  stdout = Stdout(reasons.append)
  assert stdout.write("one\n") == 4 and stdout.write("two\n") == 4
  stdout.flush()
  assert reasons == [reason]


# The same in real processes.

FLAGS = """
  model.embed_dim=16 model.num_layers=1 model.num_heads=2 model.num_kv_heads=2 model.head_dim=8
  model.mlp_dim=32 batch.prompts=8 batch.group_size=4 sampling.max_tokens=8 steps=4
  optimizer.schedule=constant warm_start.steps=0 eval.every=0 log.tensorboard=False
""".split()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has the device that is full")
def test_a_stream_that_cannot_be_flushed_does_not_change_the_exit_code(monkeypatch):
  """The interpreter flushes both at its exit, and makes the code 120 if it cannot."""
  with open("/dev/full", "w") as out, open("/dev/full", "w", buffering=1) as err:
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)

    def bad_input(arguments):
      out.write("a row")
      raise ConfigError("seed")

    monkeypatch.setattr(cli, "_parse", lambda argv, values: argv)
    with pytest.raises(SystemExit) as ended:
      cli.run(bad_input)
    assert ended.value.code == 2
    out.flush()
    err.flush()


def start(workdir, function, stdout=subprocess.PIPE):
  """A process that trains with a reward function of this source, named reward."""
  file = workdir.with_suffix(".py")
  file.write_text(function)
  command = [sys.executable, "-m", "grpo_jax.train", "--config=configs/arithmetic.py"]
  flags = [f"--config.{flag}" for flag in FLAGS]
  functions = f"--config.reward.functions=('{file}:reward',)"
  return subprocess.Popen(
    [*command, *flags, functions, f"--workdir={workdir}"],
    cwd=ROOT,
    env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"},
    stdout=stdout,
    stderr=subprocess.PIPE,
    text=True,
  )


def wait_for(file):
  deadline = time.monotonic() + 300
  while not file.exists():
    assert time.monotonic() < deadline
    time.sleep(0.05)


HANGS = """
import pathlib, time
calls = 0
def reward(completions, **_):
  global calls
  calls += 1
  while calls == 2:
    pathlib.Path(__file__).with_suffix(".hangs").touch()
  return [float(len(c)) for c in completions]
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_second_signal_ends_a_run_whose_function_does_not_return(tmp_path, number):
  process = start(tmp_path / "run", HANGS)
  wait_for(tmp_path / "run.hangs")
  process.send_signal(number)
  if number == signal.SIGTERM:
    process.send_signal(number)  # soon after the first one it counts as the same
    time.sleep(3)
  time.sleep(1)
  assert process.poll() is None
  process.send_signal(number)
  _, lines = process.communicate(timeout=10)
  assert process.returncode == 128 + number
  said = [line.split(":")[0] for line in lines.splitlines() if line.startswith("SIG")]
  assert said == [number.name, f"{number.name} again"]


SLEEPS = """
import time

def reward(completions, **_):
  time.sleep(1)
  return [*map(len, completions)]
"""


@pytest.mark.slow
def test_a_run_whose_stdout_is_closed_saves_and_says_so(tmp_path):
  process = start(tmp_path / "run", SLEEPS)
  process.stdout.readline()
  process.stdout.close()
  said = process.stderr.read()
  assert process.wait(timeout=300) == 75
  assert said.count("stdout was closed: stopping after this step") == 1
  assert not re.search("Traceback|Error", said), said  # lines of what takes long may be there
  assert saved_steps(tmp_path / "run")


@pytest.mark.slow
def test_ctrl_c_while_the_program_imports_prints_no_traceback(tmp_path):
  process = start(tmp_path / "run", HANGS)
  time.sleep(0.3)
  process.send_signal(signal.SIGINT)
  _, lines = process.communicate(timeout=60)
  assert process.returncode in (-signal.SIGINT, 130) and "Traceback" not in lines


@pytest.mark.parametrize("differs, warned", [(False, 1), (True, 0)])
def test_a_run_whose_rewards_have_stopped_to_differ_says_so_once(
  tmp_path, capfd, monkeypatch, differs, warned
):
  """The rewards differ in the first of nine steps, or in every third. A step has 12 completions."""
  monkeypatch.setattr(reporter, "_MOST_IDLE_STEPS", 3)
  source = f"""
seen = [0]
def reward(completions, **_):
  step = seen[0] // 12
  seen[0] += len(completions)
  differs = step == 0 or {differs} and step % 3 == 0
  return [0.5 + differs * number for number in range(len(completions))]
"""
  config = with_reward(dataclasses.replace(small_config(), steps=9), tmp_path, source)
  config = with_section(config, "eval", every=0)
  run_steps(config, tmp_path / "run")
  output = capfd.readouterr()
  line = "warning: in 3 steps, no completion had an advantage"
  assert (output.out + output.err).count(line) == warned
  if warned:
    assert "Their mean is 0.50" in " ".join(output.out.split())
