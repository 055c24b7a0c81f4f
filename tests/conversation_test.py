"""Reward functions that read messages, as in TRL, beside those that read texts."""

from pathlib import Path

import jax
import pytest

from grpo_jax import rewards
from grpo_jax.config import Data, Mesh
from grpo_jax.data.prompts import Prompts
from grpo_jax.data.tokenizers import tokenizer
from grpo_jax.parallel.hosts import Hosts
from grpo_jax.parallel.mesh import make_mesh
from grpo_jax.rewards.names import resolve
from grpo_jax.rollouts.scorer import Scorer, Weighted

MESSAGES = [{"role": "user", "content": "What is 1+1?"}]
COLUMNS = {"prompts": ["<user>What is 1+1?"], "messages": [MESSAGES], "answer": ["2"]}
SOURCE = """
import asyncio, re
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
  return [float(len(one)) for one in completions]

def either(completions, **columns):
  return [float(isinstance(one, str)) for one in completions]

def pattern(completions, **columns):
  return [float(re.search("####(.*)", one).group(1)) for one in completions]

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
}


@pytest.mark.parametrize("has_workers", [False, True])
def test_a_function_gets_what_it_reads(file, has_workers):
  caller = rewards.Caller(rewards.Pool(1, 5.0, 1.0) if has_workers else None)
  functions = {
    f"{file}:{name}": resolve(f"{file}:{name}", "reward.functions", lambda name: False)
    for name in EXPECTED
  }
  columns = {"completions": ["2"], "completion_ids": [[5]], **COLUMNS}
  try:
    caller.add(functions)
    for function in functions.values():
      caller.see_what_it_reads(function, columns | {"completions": ["The answer is 1."]})
    answer = caller.start([*functions.values()], columns, 1, 1)
    found = [answer(function).steps for function in functions.values()]
  finally:
    caller.close()
  assert found == [[[(1, score)]] for score in EXPECTED.values()]  # a step ends with the text


def test_who_is_called_with_a_made_up_completion(file):
  module = resolve(f"{file}:text", "reward.functions", lambda name: False).__globals__
  caller, columns = rewards.Caller(None), {"completions": ["a b c"], **COLUMNS}
  for name, calls in (("text", [["a b c"]]), ("said", []), ("said_text", [])):
    module["calls"].clear()
    for _ in range(2):
      caller.see_what_it_reads(module[name], columns)
    assert module["calls"] == calls
  for name in ("pattern", "fails"):  # fail on both: the run says so, with its own completions
    caller.see_what_it_reads(module[name], columns)
    assert caller._columns_of(module[name], columns) is columns
  ours = []
  caller.see_what_it_reads(rewards.REWARDS["strict"], {"completions": ours})  # it is not called


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
  scorer.check_arguments(Prompts(examples, qwen, Data(chat=True)), "reward.functions")
  assert caller._conversational == [(words, True)]
