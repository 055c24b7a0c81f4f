"""Worker processes: what a reward function does costs a completion its reward, and nothing else."""

import asyncio
import dataclasses
import importlib.util
import json
import os
from pathlib import Path
import signal
import socket
import subprocess
import sys
import time
import zlib

import hostile_rewards
import jax
import numpy as np
import pytest
from small_run import small_config, with_reward, with_section

from grpo_jax import progress, rewards
from grpo_jax.config import Mesh, to_dict
from grpo_jax.parallel.cores import cores
from grpo_jax.parallel.hosts import Hosts
from grpo_jax.parallel.mesh import make_mesh
from grpo_jax.rewards import names
from grpo_jax.rewards.answer import Answer, Failure, joined
from grpo_jax.rewards.call import call_in_parts
from grpo_jax.rewards.workers import messages, processes, worker
from grpo_jax.rewards.workers.job import CallBatch
from grpo_jax.rewards.workers.messages import WorkerCall, answer_from_json, answer_to_json
from grpo_jax.settings import ConfigError, RunFailed, check_ranges
from grpo_jax.storage.reading import read_completions, read_metrics
from grpo_jax.storage.saved_config import check_same_run
from grpo_jax.train import train

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests" / "hostile_rewards.py"
TIMEOUT = 1.0
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")


@pytest.fixture(scope="module")
def pool():
  pool = rewards.Pool(2, TIMEOUT, memory=1.0)
  yield pool
  pool.close()


def answers(pool, name, groups, **options):
  """What a function of hostile_rewards.py says of groups of completions."""
  key = f"{FILE}:{name}"
  pool.add(key, None, is_named=True)
  calls = [WorkerCall(key, name, {"completions": group}, step=7, **options) for group in groups]
  return pool.start(calls).result(timeout=60)


def scores(answer):
  return [steps[0][1] if steps else None for steps in answer.steps]


def children(process):
  """The processes below a process, as pairs (number, command)."""
  found, waiting = [], [process]
  while waiting:
    number = waiting.pop()
    try:
      text = Path(f"/proc/{number}/task/{number}/children").read_text()
    except OSError:
      continue
    waiting += [int(child) for child in text.split()]
    found += [int(child) for child in text.split()]
  return found


def is_alive(process):
  try:
    return " Z " not in Path(f"/proc/{process}/stat").read_text()
  except OSError:
    return False


def test_answers_come_in_the_order_of_the_calls(pool):
  rng = np.random.default_rng(0)
  groups = [["x" * n for n in rng.integers(0, 9, rng.integers(1, 6))] for _ in range(200)]
  for group, answer in zip(groups, answers(pool, "lengths", groups), strict=True):
    assert scores(answer) == [float(len(text)) for text in group] and not answer.failures
  assert answers(pool, "lengths", [["none", "a"]])[0].steps == [[], [(1, 1.0)]]
  assert answers(pool, "lengths", []) == []


@pytest.mark.parametrize(
  "text, kind, words",
  [
    ("loop", "timeout", "has not returned within reward.timeout = 1 s"),
    pytest.param("regex", "timeout", "has not returned", marks=pytest.mark.slow),
    pytest.param("power", "timeout", "has not returned", marks=pytest.mark.slow),
    ("stop", "timeout", "has not returned"),
    ("_exit", "crash", "ended with exit code 0"),
    ("_exit3", "crash", "ended with exit code 3"),
    ("exit", "crash", "raised SystemExit: 0"),
    ("kill", "crash", "was killed"),
    ("segv", "crash", "was ended by SIGSEGV"),
    ("list", "crash", "raised MemoryError"),
    ("balloon", "crash", "raised MemoryError"),
    ("garbage", "crash", "sent something that is no answer"),
    ("close", "crash", ""),
    ("raise", "error", f"raised ValueError: no luck ({FILE} line"),
  ],
)
def test_a_completion_costs_only_its_own_reward(pool, text, kind, words):
  groups = [["a", text, "bbb"], ["cc", "dddd"], ["eeeee"]]
  first, *others = answers(pool, "lengths", groups)
  assert scores(first) == [1, None, 3]
  assert [scores(answer) for answer in others] == [[2, 4], [5]]
  (failure,) = first.failures
  assert (failure.row, failure.kind) == (1, kind)
  assert "reward function lengths" in failure.text and words in failure.text
  assert not any(answer.failures for answer in others)
  assert scores(answers(pool, "lengths", [["ffffff"]])[0]) == [6]


def test_several_failures_in_a_batch(pool):
  groups = [["a", "_exit"], ["kill", "bb"], ["ccc", "exit"], ["raise", "dddd"], ["ee"]] * 4
  found = answers(pool, "lengths", groups)
  expected = [[1, None], [None, 2], [3, None], [None, 4], [2]] * 4
  assert [scores(answer) for answer in found] == expected
  kinds = [failure.kind for answer in found for failure in answer.failures]
  assert kinds.count("crash") == 12 and kinds.count("error") == 4
  assert len(pool._processes.workers) <= 2


def test_the_calls_behind_one_that_fails_are_not_split(pool):
  """A worker gets many cheap calls at once. It answers none after the one that kills it."""
  groups = [["a", "b"]] * 60 + [["kill", "a"]] + [["a", "b"]] * 60
  found = [scores(answer) for answer in answers(pool, "sizes", groups)]
  assert found == [[2, 2]] * 60 + [[None, 1]] + [[2, 2]] * 60


def test_where_an_error_stops_a_run_the_first_one_ends_all_calls(pool):
  pool.add(f"{FILE}:lengths", None, is_named=True)
  call = WorkerCall(f"{FILE}:lengths", "lengths", {"completions": ["a", "raise", "sleep"]})
  start = time.monotonic()
  with pytest.raises(rewards.RewardError, match="lengths raised ValueError: no luck"):
    pool.start([call] * 100, stops_on_error=True).result()
  assert time.monotonic() - start < 10  # 100 times 0.2 s for those that sleep, and 300 workers
  assert scores(answers(pool, "lengths", [["a"]])[0]) == [1]


def test_a_call_that_spoils_its_worker_costs_no_other_call_its_reward():
  pool = rewards.Pool(1, 5.0)
  found = answers(pool, "lengths", [["poison"], ["a"], ["bb", "ccc"]])
  pool.close()
  assert [scores(answer) for answer in found] == [[6], [1], [2, 3]]


def test_an_alarm_that_a_call_leaves_behind_costs_no_other_call_its_reward(pool):
  groups = [["alarm"], *[["sleep"]] * 12]
  assert [scores(answer) for answer in answers(pool, "lengths", groups)] == [[5.0]] * 13


@on_linux
def test_what_a_function_leaves_behind_ends_with_its_worker():
  pool = rewards.Pool(1, 5.0)
  (answer,) = answers(pool, "lengths", [["daemon"]])
  assert scores(answer) == [6]
  (worker,) = pool._processes.workers
  forker = pool._processes.forkers[-1]._process.pid
  left = set(children(forker)) - {worker.process}
  assert left and all(map(is_alive, left))
  answers(pool, "lengths", [["kill"]])
  assert not any(map(is_alive, left))
  answers(pool, "lengths", [["daemon", "daemon"]])
  everything = [forker, *children(forker)]
  assert len(everything) > 2
  pool.close()
  assert not any(map(is_alive, everything))


STARTS = """
import subprocess, sys
echo = "import sys; [print(line, end='', flush=True) for line in sys.stdin]"
pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
server = subprocess.Popen([sys.executable, "-c", echo], **pipes)

def served(completions, **_):
  scores = []
  for text in completions:
    if text == "raise":
      raise ValueError
    server.stdin.write(text + "\\n")
    server.stdin.flush()
    scores.append(float(server.stdout.readline() == text + "\\n"))
  return scores
"""


@on_linux
def test_a_process_that_a_file_starts_lives_as_long_as_the_pool(tmp_path):
  (tmp_path / "starts.py").write_text(STARTS)
  key = f"{tmp_path}/starts.py:served"
  pool = rewards.Pool(1, 5.0)
  pool.add(key, None, True)
  calls = [WorkerCall(key, "served", {"completions": [text]}) for text in ("a", "raise", "b")]
  found = [scores(pool.start([call]).result(timeout=60)[0]) for call in calls]
  assert found == [[1.0], [None], [1.0]]
  forker = pool._processes.forkers[-1]._process.pid
  everything = [forker, *children(forker)]
  assert len(everything) > 2
  pool.close()
  assert not any(map(is_alive, everything))


SCRIPT = f"""
import os, sys, time
from grpo_jax import rewards
from grpo_jax.rewards.workers.messages import WorkerCall
pool = rewards.Pool(2, 600.0)
pool.add("{FILE}:lengths", None, True)
pool.start([WorkerCall("{FILE}:lengths", "lengths", {{"completions": ["daemon", "loop"]}})] * 2)
print(pool._processes.forkers[-1]._process.pid, flush=True)
time.sleep(600)
"""


@on_linux
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_when_the_run_is_killed(number):
  run = subprocess.Popen([sys.executable, "-c", SCRIPT], cwd=ROOT, stdout=subprocess.PIPE)
  forker = int(run.stdout.readline())
  deadline = time.monotonic() + 30
  while len(children(forker)) < 4:  # two workers and what they started
    assert time.monotonic() < deadline
    time.sleep(0.05)
  everything = [forker, *children(forker)]
  run.send_signal(number)
  run.wait()
  while any(map(is_alive, everything)):
    assert time.monotonic() < deadline, everything
    time.sleep(0.05)


@on_linux
@pytest.mark.parametrize("hangs", ["time.sleep(600)", "re.match('(a+)+$', 'a' * 64 + 'b')"])
def test_a_forker_that_imports_for_ever_ends_with_the_run(tmp_path, hangs):
  """Also where it runs no Python, and with what the file has started."""
  (tmp_path / "slow.py").write_text(
    "import os, pathlib, re, subprocess, time\n"
    "started = subprocess.Popen(['sleep', '600'])\n"
    f"pathlib.Path('{tmp_path}/pids').write_text(f'{{os.getpid()}} {{started.pid}}\\n')\n{hangs}\n"
  )
  source = (
    "from grpo_jax import rewards\n"
    f"rewards.Pool(1, 5.0).add('{tmp_path}/slow.py:f', None, is_named=True)\n"
  )
  run = subprocess.Popen([sys.executable, "-c", source], cwd=ROOT)
  deadline = time.monotonic() + 30
  while not (tmp_path / "pids").exists() or not (tmp_path / "pids").read_text().endswith("\n"):
    assert time.monotonic() < deadline
    time.sleep(0.05)
  run.kill()
  run.wait()
  left = [int(number) for number in (tmp_path / "pids").read_text().split()]
  try:
    while any(map(is_alive, left)):
      assert time.monotonic() < deadline, left
      time.sleep(0.05)
  finally:
    for process in filter(is_alive, left):
      os.kill(process, signal.SIGKILL)


def test_a_file_that_imports_for_ever_has_a_limit_here_and_in_the_forker(
  tmp_path, monkeypatch, capsys
):
  (tmp_path / "slow.py").write_text(
    "import time\nwhile True:\n  try:\n    time.sleep(600)\n  except Exception:\n    pass\n"
  )
  monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LOOKS", 0.05)
  monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.1)
  monkeypatch.setattr(names, "SECONDS_TO_LOAD", 0.3)
  handler = signal.getsignal(signal.SIGALRM)
  with pytest.raises(ConfigError, match="reward.functions: .*slow.py is not imported after 0.3 s"):
    rewards.resolve(f"{tmp_path}/slow.py:f", "reward.functions", lambda name: False)
  assert signal.getsignal(signal.SIGALRM) is handler
  assert f"importing {tmp_path}" in capsys.readouterr().err
  monkeypatch.setattr(processes, "_SECONDS_TO_END", 1.0)
  pool = rewards.Pool(1, 5.0)
  with pytest.raises(ConfigError, match="process has not loaded it after 1.3 s.*reward.workers=0"):
    pool.add(f"{tmp_path}/slow.py:f", None, is_named=True)
  pool.close()


@pytest.mark.slow
def test_a_run_survives_the_end_of_the_process_that_starts_workers():
  pool = rewards.Pool(2, 5.0)
  assert scores(answers(pool, "lengths", [["a"]])[0]) == [1]
  for _ in range(2):
    before = [worker.process for worker in pool._processes.workers]
    os.kill(pool._processes.forkers[-1]._process.pid, signal.SIGKILL)
    time.sleep(0.1)
    assert sys.platform != "linux" or not any(map(is_alive, before))
    found = answers(pool, "lengths", [["a", "bb"], ["ccc"], ["kill", "a"]])
    assert [scores(answer) for answer in found] == [[1, 2], [3], [None, 1]]
  pool.close()


def test_close_does_not_wait_for_a_call():
  pool = rewards.Pool(1, 600.0)
  pool.add(f"{FILE}:lengths", None, is_named=True)
  future = pool.start([WorkerCall(f"{FILE}:lengths", "lengths", {"completions": ["loop"]})])
  start = time.monotonic()
  pool.close()
  with pytest.raises(rewards.RewardError, match="are closed"):
    future.result(timeout=10)
  assert time.monotonic() - start < 10


def test_a_function_that_needs_whole_groups_never_gets_a_part(pool):
  found = answers(pool, "ranks", [["b", "kill", "a"], ["b", "c", "a"]], whole_groups=True)
  assert [scores(answer) for answer in found] == [[None] * 3, [1, 2, 0]]
  assert [failure.kind for failure in found[0].failures] == ["crash"] * 3


def test_a_wrong_number_of_scores_is_not_tried_again(pool):
  (answer,) = answers(pool, "short", [["a", "b"]])
  assert scores(answer) == [None, None]
  assert [failure.text for failure in answer.failures] == [
    "reward function short returned 1 scores for 2 completions"
  ] * 2


def test_a_score_that_is_not_finite_costs_its_row(pool):
  (answer,) = answers(pool, "infinite", [["1", "inf", "nan", "2"]])
  assert scores(answer) == [1, None, None, 2]
  assert [failure.row for failure in answer.failures] == [1]
  assert "not finite" in answer.failures[0].text and "'inf'" in answer.failures[0].text


@pytest.mark.slow
def test_what_a_function_logs(pool):
  (answer,) = answers(pool, "logs", [["a", "bb"]])
  assert answer.metrics == [("step_seen", 7.0), ("letters", 3.0)]
  assert answer.extras == {"upper": ["A", "BB"], "odd": ["{1, 2}", None]}
  (answer,) = answers(pool, "logs_too_few", [["a", "bb", "c"]])
  assert scores(answer) == [0, 0, 0]  # each of them alone is right
  assert answer.extras == {"one": [1, 1, 1]}


def test_async_calls_run_side_by_side(pool):
  start = time.monotonic()
  for name in ("waits", "waits_object"):
    found = answers(pool, name, [["a", "bb"]] * 20, is_async=True)
    assert [scores(answer) for answer in found] == [[1, 2]] * 20
  assert time.monotonic() - start < 5  # 12 s one after the other


def test_large_async_calls_and_answers_do_not_wait_for_each_other(tmp_path):
  """Each is larger than the buffers of the socket, and the worker answers while calls come."""
  (tmp_path / "large.py").write_text(
    "import asyncio\n"
    "async def f(completions, log_extra, **_):\n"
    "  await asyncio.sleep(0.05)\n"
    "  log_extra('text', ['x' * 600_000])\n"
    "  return [1.0]\n"
  )
  key = f"{tmp_path}/large.py:f"
  columns = {"completions": ["a"], "blob": ["z" * 600_000]}
  pool = rewards.Pool(1, 20.0)
  try:
    pool.add(key, None, True)
    call = WorkerCall(key=key, name="f", columns=columns, is_async=True)
    pending = []
    began = time.monotonic()
    for _ in range(30):
      pending.append(pool.start([call]))
      time.sleep(0.01)
    assert all(not one.result()[0].failures for one in pending)
    assert time.monotonic() - began < 15  # a second; the limit of a call would end a deadlock
  finally:
    pool.close()


def test_a_call_of_another_function_may_come_before_the_async_ones_have_ended():
  """The run sends it when it has all answers, which is before the worker's loop has ended."""
  here, there = socket.socketpair()

  async def waits(completions, **_):
    return [1.0]

  functions = {"waits": waits, "plain": lambda completions, **_: [2.0]}
  calls = [
    WorkerCall(name, name, {"completions": ["a"]}, is_async=name == "waits") for name in functions
  ]
  asyncio.run(worker._answer_side_by_side(there, functions, [*enumerate(calls)], 5.0))
  there.close()
  found = messages.LineReader(here).read()
  assert {one["number"]: one["answer"]["steps"] for one in found} == {
    0: [[[1, 1.0]]],
    1: [[[1, 2.0]]],
  }


def in_parts(pool, name, calls, parts, **options):
  """The answers of calls that are started in parts, as sampling.parts does."""
  key = f"{FILE}:{name}"
  pool.add(key, None, is_named=True)
  made = [WorkerCall(key, name, {"completions": [text]}, **options) for text in calls]
  begun = [pool.start(list(part)) for part in np.array_split(np.array(made, object), parts)]
  return [answer for future in begun for answer in future.result(timeout=60)]


@pytest.mark.parametrize("parts", [1, 4, 64])
def test_64_async_calls_run_at_the_same_time_in_any_number_of_parts(tmp_path, parts):
  pool = rewards.Pool(2, 5.0)
  found = in_parts(pool, "meets_async", [f"{tmp_path} 64"] * 64, parts, is_async=True)
  pool.close()
  assert not any(answer.failures for answer in found)
  assert len(os.listdir(tmp_path)) == 64  # no call was made again


def test_more_async_calls_than_a_worker_may_have_run_in_the_next_one(tmp_path):
  pool = rewards.Pool(2, 5.0)
  found = in_parts(pool, "meets_async", [f"{tmp_path} 100"] * 100, 3, is_async=True)
  pool.close()
  assert not any(answer.failures for answer in found)
  assert len({scores(answer)[0] for answer in found}) == 2


def test_one_worker_makes_all_calls_of_a_function_that_is_marked_so(tmp_path, pool):
  options = {"is_async": True, "one_worker": True}
  found = in_parts(pool, "meets_async", [f"{tmp_path} 64"] * 64, 4, **options)
  assert len({scores(answer)[0] for answer in found}) == 1
  assert len(os.listdir(tmp_path)) == 64


KEEPS = """
import time
calls = []

async def counts(completions, **_):
  calls.append(completions)
  return [float(len(calls))] * len(completions)

def slow(completions, **_):
  time.sleep(0.3)
  return [1.0] * len(completions)

def bad(completions, **_):
  raise ValueError
"""


def test_the_state_of_a_function_outlives_the_calls_of_others(tmp_path):
  (tmp_path / "keeps.py").write_text(KEEPS)
  pool = rewards.Pool(2, 5.0)

  def start(name, count=1, **options):
    calls = [WorkerCall(f"{tmp_path}/keeps.py:{name}", name, {"completions": ["x"]}, **options)]
    return pool.start(calls * count)

  def count():
    (answer,) = start("counts", is_async=True, one_worker=True).result(timeout=60)
    return scores(answer)[0]

  for name in ("counts", "slow", "bad"):
    pool.add(f"{tmp_path}/keeps.py:{name}", None, True)
  assert count() == 1
  scoring = start("slow", 3)  # keeps the worker of `counts` busy, so that the other one is free
  time.sleep(0.1)
  assert count() == 2
  scoring.result(timeout=60)
  start("bad", 3).result(timeout=60)  # retries need new workers
  assert count() == 3
  pool.close()
  alone = pool = rewards.Pool(1, 5.0)
  for name in ("counts", "bad"):
    pool.add(f"{tmp_path}/keeps.py:{name}", None, True)
  assert count() == 1
  start("bad").result(timeout=60)  # the only worker must make room for the retry
  assert count() == 1
  alone.close()


def test_workers_that_are_free_make_the_calls_of_the_next_part(tmp_path):
  pool = rewards.Pool(4, 5.0)
  found = in_parts(pool, "meets", [f"{tmp_path} 4"] * 4, 4)
  pool.close()
  assert not any(answer.failures for answer in found) and len(os.listdir(tmp_path)) == 4


def test_a_job_that_ends_early_costs_the_other_jobs_nothing(pool):
  key = f"{FILE}:lengths"
  pool.add(key, None, is_named=True)
  bad = [
    WorkerCall(key, "lengths", {"completions": [text]}) for text in ("sleep", "raise", "sleep")
  ]
  good = [WorkerCall(key, "lengths", {"completions": ["sleep", "a"]})] * 6
  futures = [pool.start(calls, stops_on_error=calls is bad) for calls in (good, bad, good)]
  with pytest.raises(rewards.RewardError, match="no luck"):
    futures[1].result(timeout=60)
  for future in (futures[0], futures[2]):
    found = future.result(timeout=60)
    assert [scores(answer) for answer in found] == [[5, 1]] * 6
    assert not any(answer.failures for answer in found)


def test_what_was_logged_is_in_the_order_of_the_rows_whichever_answer_comes_first():
  call = WorkerCall("f", "f", {"completions": ["a", "b", "c"]})
  answers = []
  for order in ([0, 1, 2], [2, 0, 1]):
    job = CallBatch([call], stops_on_error=False)
    tasks = job.failed(*job.tasks(), "crash", "", 1)
    for row in order:
      job.answer(tasks[row], Answer([[(1, 1.0)]], [], [("m", float(row))]))
    answers.append(job.future.result())
  assert answers[0] == answers[1]


@pytest.mark.slow
def test_an_async_call_that_hangs_or_raises_costs_only_its_own_reward(pool):
  groups = [["a", "forever"], ["blocks", "bb"], ["raise", "ccc"], ["dddd"]]
  found = answers(pool, "waits", groups, is_async=True)
  assert [scores(answer) for answer in found] == [[1, None], [None, 2], [None, 3], [4]]
  failures = [failure for answer in found for failure in answer.failures]
  assert [failure.kind for failure in failures] == ["timeout", "timeout", "error"]
  assert "raised TimeoutError: of the function itself" in failures[2].text


@pytest.mark.slow
def test_math_verify_that_never_ends_is_stopped():
  pool = rewards.Pool(1, 1.0)
  pool.add("math", None, is_named=True)
  texts, golds = [r"\boxed{5^{5^{5^{5^5}}}}", r"\boxed{\frac12}"], ["5", "0.5"]
  call = WorkerCall("math", "math", {"completions": texts, "answer": golds})
  (answer,) = pool.start([call]).result()
  pool.close()
  assert scores(answer) == [None, 1] and answer.failures[0].kind == "timeout"


def test_a_function_that_only_this_program_has_is_sent_by_value(pool):
  bonus = 3.0

  class Object:
    def __call__(self, completions, **_):
      return [len(text) + bonus for text in completions]

  caller = rewards.Caller(pool)
  function = Object()
  assert caller.add({"mine": function}) == () and caller.uses_workers(function)
  answer = caller.start([function], {"completions": ["a", "bb", "ccc"]}, 1, 2)[0].result()
  assert scores(answer) == [4, 5, 6]


def test_each_of_several_functions_gets_its_own_answers_of_all_groups(pool):
  def length(completions, **_):
    return [len(text) for text in completions]

  def minus(completions, **_):
    return [-len(text) for text in completions]

  caller = rewards.Caller(pool)
  assert caller.add({"length": length, "minus": minus}) == ()
  of_length, of_minus = caller.start(
    [length, minus], {"completions": ["a", "bb", "ccc", "", "d"]}, 1, 2
  )
  assert scores(of_minus.result()) == [-1, -2, -3, 0, -1]
  assert scores(of_length.result()) == [1, 2, 3, 0, 1]
  assert caller.start([length], {"completions": []}, 1, 2)[0].result().steps == []


def test_a_function_that_cannot_be_sent_is_called_here(pool, monkeypatch):
  lock = socket.socket()

  def locked(completions, **_):
    return [float(lock.fileno() >= 0)] * len(completions)

  caller = rewards.Caller(pool)
  (remark,) = caller.add({"locked": locked})
  assert remark.startswith("reward function locked is called in the process of the run")
  assert scores(caller.start([locked], {"completions": ["a"]}, 1, 1)[0].result()) == [1]
  lock.close()
  monkeypatch.setitem(sys.modules, "cloudpickle", None)
  with pytest.raises(messages.NotPortable, match=r"pip install -e '.\[workers\]'"):
    messages.portable("f", len, is_named=False)


def test_only_functions_that_are_not_marked_go_to_workers(pool):
  caller = rewards.Caller(pool)
  strict, math = rewards.REWARDS["strict"], rewards.REWARDS["math"]
  assert caller.add({"strict": strict, "math": math}) == ()
  assert caller.uses_workers(math) and not caller.uses_workers(strict)
  assert not rewards.Caller(None).uses_workers(math)


def test_a_module_that_starts_a_thread_is_loaded_by_each_worker(tmp_path):
  (tmp_path / "threads.py").write_text(
    "import threading, time\n"
    "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    "def reward(completions, **_):\n  return [float(threading.active_count())] * len(completions)\n"
  )
  pool, key = rewards.Pool(1, 5.0), f"{tmp_path}/threads.py:reward"
  pool.add(key, None, is_named=True)
  (answer,) = pool.start([WorkerCall(key, "reward", {"completions": ["a"]})]).result()
  pool.close()
  assert scores(answer) == [2]  # the worker has the thread, which a fork would have lost


def test_a_function_that_no_worker_can_load_is_bad_input(tmp_path):
  pool = rewards.Pool(1, 5.0)
  with pytest.raises(ConfigError, match="no file .*absent.py.*reward.workers=0"):
    pool.add(f"{tmp_path}/absent.py:f", None, is_named=True)
  pool.close()


def test_arguments_that_cannot_be_sent_name_the_function(pool):
  pool.add(f"{FILE}:lengths", None, is_named=True)
  columns = {"completions": ["a"], "open": [socket.socket()]}
  with pytest.raises(rewards.RewardError, match="lengths: its arguments cannot be sent"):
    pool.start([WorkerCall(f"{FILE}:lengths", "lengths", columns)]).result()
  assert not any(worker.pending for worker in pool._processes.workers)
  assert scores(answers(pool, "lengths", [["a"]])[0]) == [1]


@pytest.mark.slow
def test_what_a_function_prints_goes_to_stderr():
  source = SCRIPT.replace('"daemon", "loop"', '"print"').replace(
    "time.sleep(600)", "time.sleep(1); pool.close()"
  )
  done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True)
  assert done.stdout.strip().isdecimal() and "printed by a function" in done.stderr


def test_in_this_process_a_call_that_raises_is_split_too():
  texts = ["a", "raise", "bbb", "cc"]
  columns = {"completions": texts}
  answer = call_in_parts(hostile_rewards.lengths, "lengths", columns, 1, 2)
  assert scores(answer) == [1, None, 3, 2] and [one.row for one in answer.failures] == [1]
  answer = call_in_parts(hostile_rewards.ranks, "ranks", columns, 1, 2)
  assert scores(answer) == [None, None, 0, 1]
  answer = call_in_parts(hostile_rewards.short, "short", columns, 1, 2)
  assert scores(answer) == [None] * 4
  caller = rewards.Caller(None, stops_on_error=False)
  (answer,) = caller.start([hostile_rewards.waits], {"completions": ["a"]}, 1, 1)
  assert scores(answer.result()) == [1]


def test_the_state_of_an_object_lives_in_its_worker():
  pool = rewards.Pool(1, 5.0)
  found = [scores(answer) for answer in answers(pool, "counts", [["a"]] * 3)]
  pool.close()
  assert found == [[1], [2], [3]] and hostile_rewards.counts.calls == 0


def test_conversations_as_trl_passes_them():
  columns = {"prompts": ["<hi>"], "completions": ["x"], "messages": [[{"content": "hi"}]]}
  (answer,) = rewards.Caller(None).start([hostile_rewards.talks], columns, 1, 1)
  assert scores(answer.result()) == [1] and columns["completions"] == ["x"]


def test_an_answer_survives_json_and_nonsense_is_refused():
  answer = Answer([[(1, 0.5)], []], [Failure(1, "error", "no")], [("a", 1.0)], {"b": [1, "c"]})
  values = json.loads(json.dumps(answer_to_json(answer)))
  assert answer_from_json(values, 2) == answer
  for change in (
    {"steps": [[[1, 0.5]]]},
    {"steps": [[[1, 1e300]], []]},
    {"steps": [[[1, float("nan")]], []]},
    {"steps": 3},
    {"failures": [{"row": 2, "kind": "error", "text": ""}]},
    {"failures": [{}]},
    {"extras": {"b": [1]}},
    {"metrics": [1]},
  ):
    with pytest.raises(ValueError):
      answer_from_json(values | change, 2)
  for nonsense in ([], None, "x", {}):
    with pytest.raises(ValueError):
      answer_from_json(nonsense, 2)


def test_answers_for_parts_are_put_together():
  one = Answer([[(1, 1.0)]], [], [("m", 1.0)], {"e": ["x"]})
  two = Answer([[], [(1, 3.0)]], [Failure(0, "crash", "c")], [("m", 2.0)])
  whole = joined(3, [([1], one), ([2, 0], two)])
  assert scores(whole) == [3, 1, None] and whole.failures == [Failure(2, "crash", "c")]
  assert whole.metrics == [("m", 1.0), ("m", 2.0)] and whole.extras == {"e": [None, "x", None]}


@pytest.mark.parametrize("data", [b"x\n", b"[]\n", b"1\n", b"[" * 100_000 + b"\n", b"\xff\n"])
def test_lines_that_are_no_objects_are_refused(data):
  ours, theirs = socket.socketpair()
  with ours, theirs:
    lines = messages.LineReader(ours)
    theirs.sendall(b'{"a": 1}\n{"b"')
    assert lines.read() == [{"a": 1}]
    theirs.sendall(b": 2}\n")
    assert lines.read() == [{"b": 2}]
    theirs.sendall(data)
    with pytest.raises(ValueError):
      while True:
        lines.read()
    theirs.close()
    with pytest.raises(EOFError):
      lines.read()


REWARD = """
import os, time, zlib

def reward(completions, step, log_metric, log_extra, **_):
  log_metric("my/step", step)
  log_metric("my/size", len(completions))
  log_extra("upper", [text.upper() for text in completions])
  scores = []
  for text in completions:
    print("a line of the function", flush=True)
    place = zlib.crc32(text.encode()) % 6
    while place == 0:
      time.sleep(1)
    if place == 1:
      os._exit(0)
    if place == 2:
      raise ValueError(text)
    scores.append(float(place))
  return scores

def decides(completions, **_):
  return [float(zlib.crc32(text.encode()) % 2) for text in completions]
"""


def place_of(text):
  return zlib.crc32(text.encode()) % 6


@pytest.mark.slow
def test_a_run_whose_reward_hangs_crashes_and_raises_ends(tmp_path, capfd):
  config = with_reward(small_config(), tmp_path, REWARD)
  config = with_section(config, "eval", every=2, examples=8, batch=4)
  config = with_section(config, "eval", function=f"{tmp_path}/reward.py:decides")
  config = with_section(config, "reward", workers=2, timeout=0.3, on_error="none")
  config = with_section(config, "log", completions_every=1, tensorboard=False, console="json")
  train(dataclasses.replace(config, steps=2), tmp_path / "run")
  metrics = read_metrics(tmp_path / "run")[1:]
  found = set()
  for row in metrics:
    completions = read_completions(tmp_path / "run", row["step"])
    places = [place_of(one["completion"]) for one in completions]
    found |= set(places)
    expected = [None if place < 3 else place for place in places]
    assert [one["rewards/reward"] for one in completions] == expected
    counts = [row[f"rewards/reward/{name}"] for name in ("timeouts", "crashes", "errors")]
    assert counts == [places.count(place) for place in range(3)]
    assert row["rewards/reward/unscored"] == sum(place < 3 for place in places)
    assert row["my/step"] == row["step"] and "eval/accuracy" in row or row["step"] == 1
    for one, score in zip(completions, expected):
      if score is not None:
        assert one["extra/upper"] == one["completion"].upper()
  assert found >= {0, 1, 2, 3}
  out, err = capfd.readouterr()
  assert all(json.loads(line) for line in out.splitlines())
  assert "a line of the function" in err
  assert "warning: step 1: " in err and "completions have no reward of reward (" in err


@pytest.mark.slow
def test_an_exception_in_a_worker_stops_the_run_after_it_is_saved(tmp_path):
  source = "def reward(completions, step, **_):\n  return [1 / (2 - step) for _ in completions]\n"
  config = with_reward(small_config(), tmp_path, source)
  config = with_section(config, "reward", workers=1)
  with pytest.raises(RunFailed) as error:
    train(dataclasses.replace(config, steps=3), tmp_path / "run")
  assert str(error.value) == (
    "step 2: reward function reward raised ZeroDivisionError: division by zero"
    f" ({tmp_path}/reward.py line 2); step 1 is saved; run the same command again to go on"
  )


def test_the_settings_of_workers_do_not_make_another_run():
  old = to_dict(small_config())
  new = small_config().replace(
    {"reward.workers": 3, "reward.timeout": 1.5, "reward.memory": 0.0, "reward.on_error": "none"}
  )
  check_same_run(Path("config.json"), old, to_dict(new))
  with pytest.raises(ConfigError, match="reward.on_error is 'maybe': choose one of 'stop', 'none'"):
    check_ranges(small_config().replace({"reward.on_error": "maybe"}))


@pytest.mark.slow
def test_cores_are_shared_by_processes_that_have_the_same(monkeypatch):
  hosts = Hosts(make_mesh(Mesh(), jax.devices()[:1]))
  own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
  assert cores(hosts) == own
  monkeypatch.setattr(hosts, "join_rows", lambda rows: np.concatenate([rows, rows, rows + 1]))
  monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(10)), raising=False)
  assert cores(hosts) == 5


@pytest.mark.slow
def test_functions_of_the_file_of_a_config_go_to_workers_by_value(tmp_path, monkeypatch):
  """ml_collections executes it as a module that no other process finds."""
  file = tmp_path / "mine.py"
  source = "WANTED = 7\n\ndef pays(completions, **_):\n  return [WANTED for _ in completions]\n"
  file.write_text(source)
  spec = importlib.util.spec_from_file_location("config_config", file)
  module = importlib.util.module_from_spec(spec)
  monkeypatch.setitem(sys.modules, "config_config", module)
  spec.loader.exec_module(module)
  kind, data = messages.portable("pays", module.pays, False)
  monkeypatch.delitem(sys.modules, "config_config")
  assert kind == "value" and messages.load(kind, data)(["a", "b"]) == [7, 7]
