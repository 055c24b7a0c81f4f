"""Reward functions that read messages, as in TRL, beside those that read texts."""

import json
import os
from pathlib import Path
import sys
import time

import jax
import pytest
from small_qwen import make_checkpoint, problems
from small_run import small_config, with_reward, with_section

from grpo_jax import read_metrics, rewards, train
from grpo_jax.config import Data, Mesh
from grpo_jax.data.prompts import PromptSet
from grpo_jax.data.tokenizers import tokenizer
from grpo_jax.parallel.hosts import Hosts
from grpo_jax.parallel.mesh import make_mesh
from grpo_jax.rewards.asking import asking
from grpo_jax.rewards.names import resolve
from grpo_jax.scoring.scorer import Scorer, Weighted

MESSAGES = [{"role": "user", "content": "What is 1+1?"}]
COLUMNS = {"prompts": ["<user>What is 1+1?"], "messages": [MESSAGES], "answer": ["2"]}
SOURCE = """
import asyncio, collections, concurrent.futures, copy, json, multiprocessing, pickle, re
from pathlib import Path
import numpy as np
calls = []

def trl(completions, prompts, answer, **kwargs):
  contents = [completion[0]["content"] for completion in completions]
  asked = [prompt[-1]["content"] for prompt in prompts]
  return [float(text == gold) + len(ask) for text, gold, ask in zip(contents, answer, asked)]

async def waits(completions, prompts, answer, **kwargs):
  await asyncio.sleep(0)
  return trl(completions, prompts, answer)

def scaled(completions, by=2.0, **kwargs):
  return [by * len(completion[-1].get("content")) for completion in completions]

def text(completions, **columns):
  calls.append(completions)
  Path(__file__).with_name("calls").open("a").write(f"{completions}\\n")
  return [float(len(one)) for one in completions]

def either(completions, **columns):
  return [float(isinstance(one, str)) for one in completions]

def pattern(completions, **columns):
  return [float(re.search("####(.*)", one).group(1)) for one in completions]

def caught(completions, **columns):
  try:
    return [float(m[0]["content"] == "2") for m in completions]
  except Exception:
    return [0.0] * len(completions)

async def caught_each(completions, answer, **columns):
  scores = []
  for messages, gold in zip(completions, answer):
    try:
      await asyncio.sleep(0)
      scores.append(float(messages[-1].get("content") == gold))
    except Exception:
      scores.append(0.0)
  return scores

def lists_only(completions, **columns):
  return [float(one[0]["content"] == "2") if isinstance(one, list) else 0.0 for one in completions]

def texts_first(completions, **columns):
  try:
    return [float(one.strip() == "2") for one in completions]
  except AttributeError:
    return [float(one[0]["content"] == "2") for one in completions]

def each_message(completions, **columns):
  return [float("".join(m["content"] for m in one if m["role"] == "assistant") == "2")
          for one in completions]

def unpacked(completions, **columns):
  try:
    return [float({**one[0]}["content"] == dict(**one[0])["content"] == "2") for one in completions]
  except Exception:
    return [0.0] * len(completions)

def arrays(completions, **columns):
  try:
    texts = np.array([one[0]["content"] for one in completions])
  except (TypeError, KeyError, IndexError):
    return [0.0] * len(completions)
  return np.char.equal(texts, "2").astype(float)

class Class:
  __name__ = "scorer"
  def __call__(self, completions, **columns):
    try:
      yield from (float(one[0]["content"] == "2") for one in completions)
    except Exception:
      yield from [0.0] * len(completions)

scorer = Class()

def asked(completions, prompts, **columns):
  try:
    return [float(prompt[-1]["content"] == "What is 1+1?") for prompt in prompts]
  except Exception:
    return [0.0] * len(completions)

def members(completions, **columns):
  if len(completions) < 2:
    return [None] * len(completions)
  return [float(one[0]["content"] == "2") for one in completions]

def unlucky(completions, **columns):  # it reads messages, and nothing of one without a digit 2
  return [float(re.search("2", one[0]["content"]).group()) / 2 for one in completions]

def copies(completions, **columns):
  return [float(json.loads(json.dumps(copy.deepcopy(one))) == "2") for one in completions]

def counts(completions, **columns):
  try:
    return [float(collections.Counter(one) == {"2": 1} and str(one) == one) for one in completions]
  except Exception:
    return [-1.0] * len(completions)

def of_column(completions, messages, **columns):
  return [float(one == "2" and m[-1]["content"] == "What is 1+1?")
          for one, m in zip(completions, messages)]

def half(message):
  return len(message[-1]["content"]) / 2

def pool(completions, **columns):
  with multiprocessing.get_context("fork").Pool(1) as pool:
    return [2 * score for score in pool.map(half, completions)]

def executor(completions, **columns):
  context = multiprocessing.get_context("fork")
  with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
    return [2 * score for score in executor.map(half, completions)]

async def executor_of_loop(completions, **columns):
  context = multiprocessing.get_context("fork")
  with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
    loop = asyncio.get_running_loop()
    return [2 * await loop.run_in_executor(executor, half, one) for one in completions]

def items(completions, **columns):
  return [float(len(dict(one[0].items())["content"])) for one in completions]

def pickled(completions, **columns):
  return [float(len(pickle.loads(pickle.dumps(one))[0]["content"])) for one in completions]

def from_json(completions, **columns):
  return [float(json.loads(json.dumps(one))[0].get("content") == "2") for one in completions]

def copied(completions, **columns):
  try:
    return [float(copy.deepcopy(one)[0]["content"] == "2") for one in completions]
  except Exception:
    return [0.0] * len(completions)

seen = []

def new(completions, **columns):
  scores = [float(len({*one.split()} - {*seen})) for one in completions]
  seen.extend(completions)
  return scores

def in_a_set(completions, **columns):  # which takes no lists and no messages after the first call
  known = {*seen}
  seen.extend(completions)
  return [float(one not in known) for one in completions]

def fails(completions, **columns):
  raise ConnectionError("no server")

def said(completions, **columns):
  calls.append(completions)
  return [float(len(one)) for one in completions]

def said_text(completions, **columns):
  calls.append(completions)
  return [float(len(one)) for one in completions]

said.conversational, said_text.conversational = True, False
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
  path = tmp_path_factory.mktemp("rewards") / "mine.py"
  path.write_text(SOURCE)
  return path


EXPECTED = {
  "trl": 1.0 + len("What is 1+1?"),
  "waits": 1.0 + len("What is 1+1?"),
  "scaled(by=3.0)": 3.0,
  "text": 1.0,
  "either": 1.0,
  "said": 1.0,
  "said_text": 1.0,
} | dict.fromkeys(
  """caught caught_each lists_only texts_first each_message unpacked arrays scorer asked unlucky
  copies counts of_column items pickled from_json copied
  new""".split(),
  1.0,
)


@pytest.mark.parametrize("has_workers", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_function_gets_what_it_reads(file, has_workers):
  caller = rewards.Caller(rewards.Pool(1, 30.0, 1.0) if has_workers else None)
  functions = {
    f"{file}:{name}": resolve(f"{file}:{name}", "reward.functions", lambda name: False)
    for name in EXPECTED
  }
  columns = {"completions": ["2"], "completion_ids": [[5]], **COLUMNS}
  try:
    caller.add(functions)
    for function in functions.values():
      problem = caller.see_what_it_reads(
        function, [columns | {"completions": ["The answer is 1."]}]
      )
      assert problem == ""
    answers = caller.start([*functions.values()], columns, 1, 1)
    found = [answer.result().steps for answer in answers]
  finally:
    caller.close()
  assert found == [[[(1, score)]] for score in EXPECTED.values()]  # a step ends with the text


def test_who_is_called_with_a_made_up_completion(file):
  module = resolve(f"{file}:text", "reward.functions", lambda name: False).__globals__
  caller, columns = rewards.Caller(None), {"completions": ["a b c"], **COLUMNS}
  made_up = [[{"role": "assistant", "content": "a b c"}]]
  told = file.with_name("calls")
  told.write_text("")
  for name in ("text", "said", "said_text"):
    for _ in range(2):
      caller.see_what_it_reads(module[name], [columns])
    assert module["calls"] == []  # the calls are made elsewhere
  assert told.read_text() == f"{made_up}\n{['a b c']}\n"
  for name in ("pattern", "fails"):  # they fail, and the run says so, with its own completions
    caller.see_what_it_reads(module[name], [columns])
    assert caller._columns_of(module[name], columns) is columns
  caller.see_what_it_reads(rewards.REWARDS["strict"], [{"completions": []}])  # it is not called


@pytest.mark.parametrize("has_workers", [False, True])
@pytest.mark.parametrize("name", ["pool", "executor", "executor_of_loop"])
def test_messages_may_be_read_in_another_process(file, name, has_workers):
  function = resolve(f"{file}:{name}", "reward.functions", lambda name: False)
  caller = rewards.Caller(rewards.Pool(1, 30.0, 1.0) if has_workers else None)
  columns = {"completions": ["2"], "completion_ids": [[5]], **COLUMNS}
  try:
    caller.add({f"{file}:{name}": function})
    assert caller.see_what_it_reads(function, [columns]) == ""
    assert caller.start([function], columns, 1, 1)[0].result().steps == [[(1, 1.0)]]
  finally:
    caller.close()


@pytest.mark.parametrize("has_workers", [False, True])
def test_a_function_remembers_no_made_up_messages(file, has_workers):
  function = resolve(f"{file}:in_a_set", "reward.functions", lambda name: False)
  caller = rewards.Caller(rewards.Pool(1, 30.0, 1.0) if has_workers else None)
  columns = {"completions": ["2"], "completion_ids": [[5]], **COLUMNS}
  try:
    caller.add({f"{file}:in_a_set": function})
    assert caller.see_what_it_reads(function, [columns] * 2) == ""
    found = [caller.start([function], columns, 1, 1)[0].result().steps for _ in range(2)]
  finally:
    caller.close()
  assert found == [[[(1, 1.0)]], [[(1, 0.0)]]]  # that of before the run is not seen either


def test_a_fork_without_an_answer_leaves_the_call_to_this_process():
  home, calls = os.getpid(), []

  def reads(completions, **columns):
    if os.getpid() != home:
      os._exit(3)
    calls.append(1)
    return [float(len(one[0]["content"])) for one in completions]

  def hangs(completions, **columns):
    while os.getpid() != home:
      time.sleep(1)
    calls.append(1)
    return [float(len(one[0]["content"])) for one in completions]

  columns = {"completions": ["a"], **COLUMNS}
  assert asking(reads)(**columns) == asking(hangs, seconds=0.2)(**columns) == [1.0]
  assert calls == [1, 1]


@pytest.mark.parametrize("ending", ["time.sleep(60)", "os._exit(1)"])
def test_a_function_that_does_not_end_is_called_once_before_the_start(tmp_path, ending):
  source = f"""
import os, pathlib, time
def ends(completions, **columns):
  pathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch()
  {ending}
"""
  (tmp_path / "mine.py").write_text(source)
  name = f"{tmp_path}/mine.py:ends"
  function = resolve(name, "reward.functions", lambda name: False)
  caller = rewards.Caller(rewards.Pool(1, 1.0))
  columns = {"completions": ["a"], "completion_ids": [[5]], **COLUMNS}
  start = time.monotonic()
  try:
    caller.add({name: function})
    assert "ends" in caller.see_what_it_reads(function, [columns] * 4)
  finally:
    caller.close()
  calls = [path for path in tmp_path.iterdir() if path.name.isdigit()]
  assert len(calls) == (1 if "sleep" in ending else 2)  # one in a fork, and one in its worker
  assert time.monotonic() - start < 10


def test_a_first_call_that_does_not_end_is_said():
  def exits(completions, **columns):
    sys.exit(0)

  caller, columns = rewards.Caller(None), {"completions": ["a b c"], **COLUMNS}
  assert "exits raised SystemExit: 0" in caller.see_what_it_reads(exits, [columns])
  assert not caller.reads_messages(exits)


def test_a_function_of_one_task_sees_an_example_of_it():
  """In a mixture, the columns of other tasks are None."""

  def words(completions, gold, **columns):
    return [float(gold[0].lower() in one[0]["content"]) for one in completions]

  examples = [{"question": "1+1", "gold": None, "task": "sums"}] * 3
  examples += [{"question": "Say yes", "gold": "yes", "task": "words"}]
  qwen = tokenizer.load(str(Path(__file__).parent / "golden/tokenizers/qwen"))
  caller = rewards.Caller(None)
  hosts = Hosts(make_mesh(Mesh(), jax.devices()[:1]))
  scorer = Scorer([Weighted(words, tasks="words")], hosts, qwen.decode, caller)
  scorer.check_arguments(PromptSet(examples, qwen, Data(chat=True)), "reward.functions")
  assert caller._conversational == [(words, True)]


def test_a_function_that_compares_members_or_wants_a_column_is_seen_to_read():
  def members(completions, gold, **columns):
    if len(completions) < 2 or None in gold:
      return [None] * len(completions)
    return [float(len(one[0]["content"])) for one in completions]

  examples = [{"question": "1+1", "gold": None, "task": "sums"}] * 40
  examples[30] = {"question": "1+1", "gold": None, "task": "words"}
  examples[31] = {"question": "1+1", "gold": "yes", "task": "words"}
  qwen = tokenizer.load(str(Path(__file__).parent / "golden/tokenizers/qwen"))
  hosts = Hosts(make_mesh(Mesh(), jax.devices()[:1]))
  for split in (examples, examples[:1] + examples[31:], examples[30:32]):
    caller = rewards.Caller(None)
    scorer = Scorer([Weighted(members, tasks="words")], hosts, qwen.decode, caller)
    scorer.check_arguments(PromptSet(split, qwen, Data(chat=True)), "reward.functions")
    assert caller.reads_messages(members)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_gives_messages_to_a_function_that_catches_its_exceptions(tmp_path, capsys, workers):
  rows = list(problems(6))
  make_checkpoint(tmp_path / "model", [row["question"] + row["answer"] for row in rows])
  for split in ("train", "test"):
    (tmp_path / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
  source = """
def caught(completions, **columns):
  try:
    return [1.0 + len(one[0]["content"]) for one in completions]
  except Exception:
    return [0.0] * len(completions)

def brevity(completions, **columns):
  return [-float(len(one)) for one in completions]
"""
  config = with_reward(small_config(), tmp_path, source, ("caught", "brevity"))
  config = with_section(config, "reward", workers=workers)
  config = with_section(config, "model", path=str(tmp_path / "model"))
  data = {"task": "gsm8k", "path": str(tmp_path), "chat": True, "max_prompt_tokens": 200}
  train(with_section(config, "data", **data), tmp_path / "run")
  said = capsys.readouterr().err
  line = "reward.functions: your functions that get messages: caught; that get texts: brevity\n"
  assert said.count(line) == 1
  (row,) = (row for row in read_metrics(tmp_path / "run") if "reward" in row)
  assert row["rewards/caught/mean"] == pytest.approx(1 - row["rewards/brevity/mean"])
