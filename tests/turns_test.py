"""Completions of several turns: tools and environments answer the policy while it is sampled."""

import asyncio
import dataclasses
import itertools
import json
from pathlib import Path
import re
from types import SimpleNamespace

import agent_functions
from call_templates import BEFORE_LAST_USER, GEMMA4, GPT_OSS, QWEN35, SHOWS, tokens_for
import numpy as np
import pytest
import small_qwen
from small_qwen import trained_tokenizer
from small_run import Collected, P, grpo_step, small_config, small_run, with_reward, with_section

from grpo_jax.data.loader import prompt_batch
from grpo_jax.data.prompts import PromptSet
from grpo_jax.data.tasks.tasks import make_task
from grpo_jax.data.tokenizers import tokenizer
from grpo_jax.data.tokenizers.replies import Replies
from grpo_jax.environments import acting, make_environments, written_calls
from grpo_jax.environments.built_in import calculator
from grpo_jax.environments.returned import content_of
from grpo_jax.rewards import REWARDS, Caller
from grpo_jax.rewards.dispatch import start_for_tasks
from grpo_jax.rollouts.talk import Talk
from grpo_jax.rollouts.turns import POLICY, Turn, from_line, turn_of
from grpo_jax.run import run as run_module
from grpo_jax.sampler.requests import StoppedRow
from grpo_jax.scoring.scorer import Scorer, Weighted, _Place
from grpo_jax.scoring.scorers import Scorers
from grpo_jax.settings import ConfigError, RunFailed
from grpo_jax.training.trainer import check_gap, largest_gap

G, T = 3, 24

# Each turn's reward is its number. It ends at the third turn, or where the policy writes a 7.
COUNTING = """
class Counting:
  def __init__(self, *, last=3):
    self.turns, self.last = 0, last

  def reset(self, example):
    self.question = example["question"]
    return []

  def step(self, message):
    self.turns += 1
    text = message["content"]
    done = self.turns == self.last or "7" in text
    return [{"role": "user", "content": f"{len(text)}=" + self.question[:1]}], self.turns, done
"""


def config_of(folder, source="", name="", workers=0, **environment):
  """A small run with an environment of this source, or with tools."""
  config = with_section(small_config(), "sampling", max_tokens=T)
  (folder / "env.py").write_text(source)
  name = name and f"{folder}/env.py:{name}"
  config = with_section(config, "environment", name=name, turn_tokens=6, **environment)
  functions = ("environment",) if name else ("strict",)
  return with_section(config, "reward", functions=functions, weights=(1.0,), workers=workers)


def own(row):
  return [turn for turn in row["turns"] if turn["role"] == "assistant"]


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
  folder = tmp_path_factory.mktemp("counting")
  return Collected(config_of(folder, COUNTING, "Counting"))


def test_turns_are_the_tokens_of_the_row_in_their_order(counted):
  decode, sampled = counted.run.tokenizer.decode, np.asarray(counted.found.batch.mask_PGT) > 0
  several = 0
  for row, (p, g) in zip(counted.rows, np.ndindex(P, G), strict=True):
    ids, end, latest = row["completion_ids"], 0, ""
    for turn in row["turns"]:
      assert turn["start"] == end and decode(ids[turn["start"] : turn["end"]]) == turn["text"]
      end = turn["end"]
      is_own = turn["role"] == "assistant"
      assert (sampled[p, g, turn["start"] : end] == is_own).all()
      assert is_own or turn["text"] == f"{len(latest)}={row['prompt'][0]}"
      latest = turn["text"]
    assert end == len(ids) == row["length"] <= T and row["turns"][-1]["role"] == "assistant"
    assert row["completion"] == row["turns"][-1]["text"]
    several += len(own(row)) > 1
  assert several > P


def test_each_row_has_an_environment_of_its_own_and_its_rewards(counted):
  for row in counted.rows:
    rewards = [turn["reward"] for turn in own(row)]
    assert rewards == [1 + i for i in range(len(rewards))] and len(rewards) <= 3
    assert row["reward"] == sum(rewards)
    assert all("7" not in turn["text"] for turn in own(row)[:-1])
  turns = [len(own(row)) for row in counted.rows]
  assert counted.metrics["environment/turns"] == np.mean(turns)
  assert counted.metrics["tools/call_frequency"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
  "workers, rows",
  [(2, 0), (0, 3)],
)
def test_workers_and_rows_in_flight_change_no_token(counted, workers, rows, tmp_path):
  config = config_of(tmp_path, COUNTING, "Counting", workers)
  config = with_section(config, "sampling", rows=rows)
  found = Collected(config)
  names = ("completion_ids", "turns", "reward", "stopped_by")
  for ours, theirs in zip(found.rows, counted.rows, strict=True):
    assert {name: ours[name] for name in names} == {name: theirs[name] for name in names}
    np.testing.assert_allclose(ours["logprobs"], theirs["logprobs"], atol=1e-4)


@pytest.mark.slow
def test_a_whole_step_agrees_with_the_learner(counted, tmp_path):
  step, store, _ = grpo_step(counted.run, tmp_path, counted.collector)
  state, _, _ = store.restore_or_init()
  _, metrics, rows, _ = step(state, 0)
  assert metrics["sampler/logprob_gap_max"] < 1e-4
  assert [row["turns"] for row in rows] == [row["turns"] for row in counted.rows]
  json.dumps(rows)


@pytest.mark.slow
def test_a_message_that_is_learned_by_mistake_stops_the_run(counted, tmp_path):
  """Nobody drew its tokens, so their log-probs say nothing of the policy."""

  class Mistaken:
    def __getattr__(self, name):
      return getattr(counted.collector, name)

    def __call__(self, *given):
      found = counted.collector(*given)
      is_token = found.batch.completions_PGT != 0
      return dataclasses.replace(found, batch=found.batch.replace(mask_PGT=1.0 * is_token))

  step, store, _ = grpo_step(counted.run, tmp_path, Mistaken())
  state, _, _ = store.restore_or_init()
  _, metrics, _, _ = step(state, 0)
  with pytest.raises(RunFailed, match=r"differ by [1-9].* \(sampling.max_logprob_gap\)"):
    check_gap(metrics, counted.run.config)


def test_weights_that_the_base_quantises_are_not_rounded_again_for_the_sampler():
  config = with_section(small_config(), "sampling", weights_dtype="int8")
  lora = dict(rank=2, targets=("q_proj",), base_dtype="nf4")
  quantised = with_section(config, "lora", **lora)
  assert (largest_gap(config), largest_gap(quantised)) == (0.0, 4.0)
  (remark,) = run_module._remarks(quantised, quantised)
  assert remark.startswith("sampling.weights_dtype=int8 has no effect: ")
  assert not run_module._remarks(config, config)


@pytest.mark.parametrize(
  "settings, bound",
  [
    ({}, 0.05),
    ({"dtype": "bfloat16"}, 4.0),
    ({"cache_dtype": "int8"}, 0.0),
    ({"max_logprob_gap": 0.0}, 0.0),
    ({"max_logprob_gap": 0.3, "weights_dtype": "int8"}, 0.3),
  ],
)
def test_how_far_rounding_may_go_depends_on_dtypes(settings, bound):
  config = with_section(small_config(), "sampling", **settings)
  assert largest_gap(config) == bound
  check_gap({"sampler/logprob_gap_max": bound}, config)
  if bound:
    with pytest.raises(RunFailed):
      check_gap({"sampler/logprob_gap_max": 1.01 * bound}, config)


def test_rewards_of_turns_are_steps_of_process_supervision(tmp_path):
  config = config_of(tmp_path, COUNTING, "Counting")
  config = dataclasses.replace(config, algo=small_config("process").algo)
  found = Collected(config)
  rewards_PGT = np.zeros((P, G, T))
  for row, index in zip(found.rows, np.ndindex(P, G), strict=True):
    for turn in own(row):
      rewards_PGT[(*index, turn["end"] - 1)] = turn["reward"]
  np.testing.assert_array_equal(found.found.rewards.step_rewards_PGT, rewards_PGT)
  np.testing.assert_array_equal(found.found.rewards.step_ends_PGT, rewards_PGT > 0)


def test_a_row_of_another_task_has_no_steps_of_the_reward_of_turns():
  rewards = [1.0, 0.25]  # of the only turns of two rows, whose tasks are a and b
  turns_PG = np.array([[SimpleNamespace(own=[Turn(POLICY, "", 0, 2, one)])] for one in rewards])
  rollouts = SimpleNamespace(
    texts_PG=np.array([["ab"], ["#### 5"]], object),
    turns_PG=turns_PG,
    completions=SimpleNamespace(
      tokens_PGT=np.zeros((2, 1, 3), np.int32), sampled_PGT=np.ones((2, 1, 3), bool)
    ),
  )
  columns = {
    **{"completions": ["ab", "#### 5"], "completion_ids": [[1], [1]], "task": ["a", "b"]},
    **{"answer": [None, "5"], "turn_rewards": [[one] for one in rewards]},
  }
  functions = [("environment", "a"), ("strict", "b")]
  weighted = [Weighted(REWARDS[name], 1.0, tasks) for name, tasks in functions]
  caller = Caller(None)
  scorer = Scorer(weighted, small_run(small_config()).hosts, str, caller, needs_steps=True)
  pairs = [(REWARDS[name], tasks) for name, tasks in functions]
  asked = start_for_tasks(caller, pairs, columns, 0, 1)
  answers = {name: answer.result() for (name, _), answer in zip(functions, asked, strict=True)}
  found = scorer._scored(rollouts, answers, _Place(0, 0, 1, columns)).rewards
  np.testing.assert_array_equal(found.scores_PGJ, [[[1.0, np.nan]], [[np.nan, 1.0]]])
  np.testing.assert_array_equal(found.step_rewards_PGT, [[[0, 1, 0]], [[0, 0, 1]]])
  np.testing.assert_array_equal(found.step_ends_PGT, [[[0, 1, 0]], [[0, 0, 1]]])


READS = """
def last(completions, turns, turn_rewards, **_):
  assert all(type(text) is str for text in completions)
  assert [one[-1]["content"] for one in turns] == completions
  return [float(len(one)) + 0.01 * sum(r) for one, r in zip(turns, turn_rewards)]

def steps(completions, **_):
  return [[(i + 1, 1.0 + i) for i in range(len(text))] or None for text in completions]
"""


@pytest.mark.slow
def test_reward_functions_read_the_turns(tmp_path):
  config = config_of(tmp_path, COUNTING, "Counting")
  found = Collected(with_reward(config, tmp_path, READS, ["last"]))
  for row in found.rows:
    rewards = sum(turn["reward"] for turn in own(row))
    assert row["reward"] == pytest.approx(len(row["turns"]) + 0.01 * rewards, abs=1e-5)


@pytest.mark.slow
def test_steps_of_a_text_lie_in_the_last_turn(tmp_path):
  config = config_of(tmp_path, COUNTING, "Counting")
  config = dataclasses.replace(config, algo=small_config("process").algo)
  found = Collected(with_reward(config, tmp_path, READS, ["steps"]))
  ends_PGT = np.asarray(found.found.rewards.step_ends_PGT)
  for row, index in zip(found.rows, np.ndindex(P, G), strict=True):
    last, places = row["turns"][-1], np.flatnonzero(ends_PGT[index])
    assert len(places) == len(last["text"])
    assert all(last["start"] <= place < last["end"] for place in places)


# Tools.

DIGITS = r"(?P<arguments>[0-9][0-9+-])"  # what a random model writes often

TOOLS = """
import os, time

def double(x: str) -> str:
  '''Doubles.

  Args:
    x: A number.
  '''
  return f"={2 * int(x)};"

async def double_later(x: str) -> int:
  '''Doubles.

  Args:
    x: A number.
  '''
  import asyncio
  await asyncio.sleep(0.01)
  return 2 * int(x)

def hangs(x: str) -> str:
  '''Hangs at an even number.

  Args:
    x: A number.
  '''
  if "0" in x:
    os._exit(3)
  while int(x[:1]) % 2 == 0:
    time.sleep(0.1)
  return "1"
"""


@pytest.mark.parametrize(
  "tool, workers",
  [
    pytest.param("double", 0, marks=pytest.mark.slow),
    ("double", 1),
    pytest.param("double_later", 0, marks=pytest.mark.slow),
    pytest.param("double_later", 1, marks=pytest.mark.slow),
  ],
)
def test_tools_answer_what_calls_them(tool, workers, tmp_path):
  config = config_of(
    tmp_path, TOOLS, workers=workers, tools=(f"{tmp_path}/env.py:{tool}",), calls=DIGITS
  )
  found = Collected(config)
  calls = failures = 0
  for row in found.rows:
    for turn, after in zip(row["turns"], [*row["turns"][1:], None]):
      if turn["role"] == "assistant" and after is not None:
        first = next(one for one in "0123456789" if one in turn["text"])
        assert first and after["role"] == "tool"
      if turn["role"] == "tool":
        calls += 1
        failures += turn["text"].startswith("error")
        number = turn["text"].strip("=;")
        assert turn["text"].startswith("error") or int(number) % 2 == 0
  assert calls > P and 0 < failures < calls
  frequency = found.metrics["tools/call_frequency"]
  # Calls of a last turn are counted, and nobody answers them.
  assert frequency * P * G >= calls
  assert found.metrics["tools/failure_frequency"] * frequency * P * G == pytest.approx(failures)


@pytest.mark.slow
def test_tools_and_an_environment_take_turns(tmp_path):
  """The environment sees the turns without calls, in their order."""
  tools = (f"{tmp_path}/env.py:double",)
  config = config_of(tmp_path, TOOLS + COUNTING, "Counting", tools=tools, calls=DIGITS)
  found, late = Collected(with_section(config, "sampling", max_tokens=60)), 0
  for row in found.rows:
    steps = 0
    for turn, after in zip(row["turns"], [*row["turns"][1:], None]):
      if turn["role"] != "assistant" or (after is not None and after["role"] == "tool"):
        assert turn["reward"] is None
        late += turn["role"] == "assistant" and steps == 0
      elif turn["reward"] is not None:
        steps += 1
        assert turn["reward"] == steps
  assert late and found.metrics["environment/errors"] == 0


@pytest.mark.slow
def test_a_tool_that_hangs_or_ends_is_an_error_that_the_model_reads(tmp_path):
  config = config_of(
    tmp_path, TOOLS, workers=2, tools=(f"{tmp_path}/env.py:hangs",), calls=DIGITS, max_turns=2
  )
  config = with_section(config, "reward", timeout=0.5)
  found = Collected(config)
  texts = {turn["text"] for row in found.rows for turn in row["turns"] if turn["role"] == "tool"}
  assert {"error: hangs did not answer in time", "error: hangs ended without an answer"} <= texts
  assert 0 < found.metrics["tools/failure_frequency"] <= 1


SETS = """
def set(zip: str, on: bool, n: int, note: str | None = "") -> str:
  '''Sets.

  Args:
    zip: A code.
    on: Whether.
    n: A number.
    note: A note.
  '''
  return repr((zip, on, n, note))

class Says:
  def reset(self, example):
    return []

  def step(self, message):
    return "Again.", 0.0, False
"""
SET = {"type": "function", "function": {"name": "set", "parameters": {}}}


def talk_of(folder, template, **environment):
  """(what answers the turns of a run with the tool of SETS, the tokenizer)."""
  corpus = json.dumps([row["question"] + row["answer"] for row in small_qwen.problems(12)])
  if not (folder / "model").exists():
    small_qwen.make_checkpoint(folder / "model", [corpus])
  tokens = tokens_for(folder / "model", template, corpus)
  for split in ("train", "test"):
    rows = "".join(f"{json.dumps(row)}\n" for row in small_qwen.problems(12))
    (folder / f"{split}.jsonl").write_text(rows)
  config = config_of(folder, SETS, **{"tools": (f"{folder}/env.py:set",)} | environment)
  data = dict(task="gsm8k", path=str(folder), chat=True, max_prompt_tokens=400)
  config = with_section(with_section(config, "data", **data), "model", path=str(folder / "model"))
  return begun_talk(small_run(config)), tokens


def begun_talk(run):
  """The conversations of P groups of a run."""
  talk = Talk(Scorers(run).talkers, G)
  prompts = prompt_batch(run.prompts("train"), np.arange(P), run.hosts)
  for p in range(P):
    talk.begin(p, prompts, p)
  return talk


def answered(talk, rows):
  """The tokens with which rows go on, which have got their answers."""
  talk.ask(rows)
  found = {(number, member): ids for number, member, ids in talk.answers(60)}
  return [found[row.prompt, row.member] for row in rows]


@pytest.mark.parametrize(
  "template, text",
  [
    (
      QWEN35,
      "<tool_call>\n<function=set>\n<parameter=zip>\n12345\n</parameter>\n<parameter=on>\nTrue\n"
      "<parameter=n>\n5.0\n</parameter>\n<parameter=note>\nnull\n</parameter>\n</function>\n"
      "</tool_call>",
    ),
    (GEMMA4, '<|tool_call>call:set{zip:<|"|>12345<|"|>,on:true,n:5.0,note:None}<tool_call|>'),
    (
      GPT_OSS,
      '<|channel|>commentary to=functions.set<|message|>{"zip": "12345", "on": true, "n": 5.0,'
      ' "note": null}',
    ),
  ],
)
def test_tools_get_what_the_family_writes_as_their_hints_say(template, text, tmp_path):
  talk, tokens = talk_of(tmp_path, template)
  (stop, *_) = tokens.stop_ids
  row = StoppedRow(0, 0, [*tokens.encode_batch_after([text])[0], stop], stop, 500)
  (ids,) = answered(talk, [row])
  assert "('12345', True, 5, None)" in tokens.decode(ids)
  assert talk._conversations[0, 0].calls == 1 and talk._conversations[0, 0].failures == 0


@pytest.mark.parametrize(
  "calls", ["hermes", r"<tool_call>(?P<arguments>\{.*?\})</tool_call>"], ids=["hermes", "pattern"]
)
def test_a_call_between_special_tokens_is_seen_and_no_other_special_token(calls, tmp_path):
  """The decoder leaves them out of the text of the turn."""
  talk, tokens = talk_of(tmp_path, BEFORE_LAST_USER, calls=calls)
  given = {"zip": "12345", "on": True, "n": 5, "note": None}
  written = json.dumps({"name": "set", "arguments": given} if calls == "hermes" else given)
  ids = tokens.encode_batch_after([f"Hm. <tool_call>{written}</tool_call>"])[0]
  assert "<tool_call>" not in tokens.decode(ids)
  (stop, *_) = tokens.stop_ids
  (answer,) = answered(talk, [StoppedRow(0, 0, [*ids, stop], stop, 500)])
  assert "('12345', True, 5, None)" in tokens.decode(answer)
  conversation = talk._conversations[0, 0]
  assert (conversation.calls, conversation.failures) == (1, 0)
  assert "im_end" not in str(conversation.turns[0])


def written_by_hermes(**given):
  return f"<tool_call>{json.dumps({'name': 'set', 'arguments': given})}</tool_call>"


@pytest.fixture
def two_turns(tmp_path):
  """(a row with two turns of calls, the tokens that followed each turn, the tokenizer)."""
  talk, tokens = talk_of(tmp_path, BEFORE_LAST_USER, calls="hermes")
  (stop, *_) = tokens.stop_ids
  first = f"Hm. {written_by_hermes(zip='1', on=True, n=2)}{written_by_hermes(zip=3)}"
  second = written_by_hermes(zip="4", on=False, n=5) + "<tool_call>{</tool_call>"
  row, replies = [], []
  for text in (first, second, "Done."):
    row += [*tokens.encode_batch_after([text])[0], stop]
    (ids,) = answered(talk, [StoppedRow(0, 0, list(row), stop, 500)])
    replies.append(ids)
    row += ids or []
  return talk._conversations[0, 0], replies, tokens


def test_messages_have_their_calls_as_openai_and_trl_write_them(two_turns):
  conversation, _, _ = two_turns
  first, one, wrong, second, three, malformed, last = (x.message for x in conversation.turns)

  def call(id, **given):
    return {"id": id, "type": "function", "function": {"name": "set", "arguments": given}}

  calls = [call("call00000", zip="1", on=True, n=2), call("call00001", zip=3)]
  assert first == {"role": "assistant", "content": "Hm.", "tool_calls": calls}
  said = {"role": "tool", "name": "set", "tool_call_id": "call00000"}
  assert one == {**said, "content": "('1', True, 2, '')"}
  assert wrong["tool_call_id"] == "call00001" and wrong["content"].startswith("error: ")
  # A call that is not well-formed is no call of a message. Its answer names none.
  assert second["tool_calls"] == [call("call00002", zip="4", on=False, n=5)]
  assert three["tool_call_id"] == "call00002" and three["name"] == "set"
  assert malformed["name"] == "unknown" and "tool_call_id" not in malformed
  assert last == {"role": "assistant", "content": "Done."}
  assert "fields" not in json.dumps(conversation.as_json())
  assert from_line(json.loads(json.dumps(conversation))) == conversation


def test_the_ids_of_calls_change_no_token_of_a_prompt(two_turns):
  """What the template writes after a turn is what it wrote when messages had a name alone."""
  conversation, replies, tokens = two_turns
  messages = [turn.message for turn in conversation.turns]
  for some, ids in ((messages[1:3], replies[0]), (messages[4:6], replies[1])):
    plain = [{name: one[name] for name in ("role", "name", "content")} for one in some]
    assert all(one["content"] in tokens.decode(ids) for one in some)
    assert Replies(tokens, True, [SET]).ids(plain, tokens.stop_ids[0], [SET]) == ids


def test_a_template_that_writes_ids_writes_those_of_before(tmp_path):
  """Gemma 4's finds the call of an answer by its id, in the turn that stands for the real one."""
  replies = Replies(tokens_for(tmp_path, GEMMA4), True, [SET])
  said = [
    {"role": "tool", "name": "set", "content": "1"},
    {"role": "tool", "name": "b", "content": "2"},
  ]
  with_ids = [one | {"tool_call_id": f"call0000{7 + i}"} for i, one in enumerate(said)]
  assert replies.ids(with_ids, -1) == replies.ids(said, -1)


# As TRL's example of an agent reads messages: examples/scripts/grpo_agent.py.
AGENT = """
def structure(completions, turns, **_):
  found = []
  for completion in turns:
    calls = any(turn.get("role") == "assistant" and turn.get("tool_calls") for turn in completion)
    answers = any(turn.get("role") == "tool" for turn in completion)
    found.append(0.1 if calls and answers else -0.15 if calls else 0.0)
  return found

def arguments(completions, turns, **_):
  calls = [[call for turn in one for call in turn.get("tool_calls") or []] for one in turns]
  return [float(sum(len(one["function"]["arguments"]["x"]) for one in own)) for own in calls]
"""


def test_rewards_of_agents_read_the_calls_as_with_trl(tmp_path):
  config = config_of(tmp_path, TOOLS, tools=(f"{tmp_path}/env.py:double",), calls=DIGITS)
  found = Collected(with_reward(config, tmp_path, AGENT, ["structure", "arguments"]))
  answered = [any(turn["role"] == "tool" for turn in row["turns"]) for row in found.rows]
  structure = [row["rewards/structure"] for row in found.rows]
  assert [value == pytest.approx(0.1) for value in structure] == answered and True in answered
  written = [sum(len(re.findall(DIGITS, turn["text"])) for turn in own(row)) for row in found.rows]
  assert [row["rewards/arguments"] for row in found.rows] == [2.0 * count for count in written]


def test_agents_have_the_messages_and_rewards_of_trls_trainer(tmp_path):
  """tests/golden/make_agent.py had TRL's trainer make both of the same answers."""
  expected = json.loads((Path(__file__).parent / "golden/agent.json").read_text())
  source = Path(agent_functions.__file__)
  tools = tuple(f"{source}:{name}" for name in ("find", "later"))
  talk, tokens = talk_of(tmp_path, BEFORE_LAST_USER, calls="hermes", tools=tools)
  (stop, *_) = tokens.stop_ids
  places = list(np.ndindex(P, G))[: len(agent_functions.ANSWERS)]
  for place, answers in zip(places, agent_functions.ANSWERS, strict=True):
    row = []
    for answer in answers:
      row += [*tokens.encode_batch_after([agent_functions.written(answer)])[0], stop]
      (ids,) = answered(talk, [StoppedRow(*place, list(row), stop, 2000)])
      row += ids or []
  turns = [[turn.message for turn in talk._conversations[place].turns] for place in places]
  for ours, theirs in zip(turns, expected["messages"], strict=True):
    assert [as_in_trl(one) for one in ours] == [as_in_ours(one) for one in theirs]
  columns = {"prompts": turns, "messages": turns, "turns": turns, "completions": turns}
  columns["answer"] = ["yes"] * len(turns)
  for function in agent_functions.REWARDS:
    (answer,) = Caller(None).start([function], columns, 1, 1)
    found = [score for ((_, score),) in answer.result().steps]
    assert found == expected["rewards"][function.__name__]


def as_in_trl(message):
  """A message without ids, and without what an error says."""
  calls = [{k: v for k, v in call.items() if k != "id"} for call in message.get("tool_calls", ())]
  rest = {k: v for k, v in message.items() if k not in ("tool_calls", "tool_call_id")}
  if str(rest["content"]).startswith("error: "):
    rest["content"] = "error"
  return rest | ({"tool_calls": calls} if calls else {})


def as_in_ours(message):
  """A message of TRL with its reasoning in the content, and without what an error says."""
  rest = {k: v for k, v in message.items() if k != "reasoning_content"}
  if "reasoning_content" in message:
    thought = f"<think>\n{message['reasoning_content']}\n</think>"
    rest["content"] = f"{thought}\n\n{message['content']}".strip()
  if str(rest["content"]).startswith("{'error'"):
    rest["content"] = "error"
  return rest


def test_the_answer_to_a_turn_shows_the_tools_of_its_row(tmp_path):
  talk, tokens = talk_of(tmp_path, BEFORE_LAST_USER, name="Says", calls="hermes")
  prompts, _ = talk._prompts[0]
  prompts.columns["tools"] = [["set"], [], None, json.dumps(["set"])]
  rows = [StoppedRow(p, 0, [5, tokens.stop_ids[0]], tokens.stop_ids[0], 500) for p in range(P)]
  texts = [tokens.decode(ids) for ids in answered(talk, rows)]
  assert texts == ["tools setAgain.", "Again.", "tools setAgain.", "tools setAgain."]


def test_a_template_whose_calls_are_not_read_ends_the_run_at_its_start(tmp_path):
  with pytest.raises(ConfigError, match="environment.calls: the chat template shows tools") as one:
    talk_of(tmp_path, SHOWS)
  assert "\n" not in str(one.value)
  talk_of(tmp_path, SHOWS, calls="hermes")  # who says so knows


ASKS = "{% if tools %}{{ tools | tojson }}Write <tool_call>\n{...}\n</tool_call>{% endif %}"
ASKS += "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or () %}CALL{% endfor %}"
ASKS += "{{ '<|im_end|>' }}{% endfor %}"


@pytest.mark.parametrize(
  "call, are_read",
  [
    ("{{ c.function | tojson }}", True),
    ("<tool_call>{{ {'name': c.function.name, 'arguments': c.function.arguments} }}", True),
    ("{{ c.function.name }}({{ c.function.arguments.zq7text }})", True),
  ],
)
def test_a_template_may_write_earlier_calls_in_another_way_than_it_tells(call, are_read, tmp_path):
  template = ASKS.replace("CALL", call)
  assert written_calls.are_read(tokens_for(tmp_path, template)) == are_read
  other = template.replace("{...}", "name(...)")
  assert not written_calls.are_read(tokens_for(tmp_path, other))


@pytest.mark.slow
def test_calls_beyond_the_limit_get_an_error(tmp_path):
  tools = (f"{tmp_path}/env.py:double",)
  found = Collected(config_of(tmp_path, TOOLS, tools=tools, calls=DIGITS, max_calls=1))
  refused = 0
  for row in found.rows:
    said = [turn["text"] for turn in row["turns"] if turn["role"] == "tool"]
    assert all("no more than 1 calls" in text for text in said[1:])
    refused += len(said[1:])
  assert refused


@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.slow
def test_turns_end_at_their_limit(most, tmp_path):
  found = Collected(config_of(tmp_path, COUNTING, "Counting", max_turns=most))
  assert max(len(own(row)) for row in found.rows) == most
  assert all(turn["reward"] is not None for row in found.rows for turn in own(row))


OPENS = """
class Opens:
  begun = []

  def reset(self, example):
    self.begun.append(example["question"])
    return [{"role": "user", "content": str(len(self.begun))}]

  def step(self, message):
    return [], 1.0, True
"""


def test_an_opening_is_made_once(tmp_path):
  """A step makes its prompts several times, and an environment may ask a server for each."""
  run = small_run(config_of(tmp_path, OPENS, "Opens"))
  example = {"question": "1+1="}
  first = run.environments.openings([example, {"question": "2="}, example])
  assert [messages[0]["content"] for messages in first] == ["1", "2", "1"]
  assert run.environments.openings([{"question": "2="}]) == [first[1]]


# What goes wrong.

FAILS = """
import time

class Raises:
  def reset(self, example):
    return []

  def step(self, message):
    raise KeyError("no such move")

class Hangs(Raises):
  def step(self, message):
    time.sleep(60)

class RefusesToStart(Raises):
  def reset(self, example):
    raise ValueError("no seed")

class SaysNothing(Raises):
  def step(self, message):
    return [{"role": "user", "content": "2"}], None, False

class Mumbles(Raises):
  def step(self, message):
    return [{"role": "user"}], None, False
"""


def test_an_environment_that_raises_ends_the_run(tmp_path):
  with pytest.raises(RunFailed, match="the environment raised KeyError: .*env.py line"):
    Collected(config_of(tmp_path, FAILS, "Raises"))


@pytest.mark.parametrize(
  "name, kind", [("Raises", "errors"), pytest.param("Mumbles", "errors", marks=pytest.mark.slow)]
)
def test_an_environment_that_raises_ends_the_completion_if_asked(name, kind, tmp_path, capfd):
  config = with_section(config_of(tmp_path, FAILS, name), "reward", on_error="none")
  found = Collected(config)
  assert found.metrics[f"environment/{kind}"] == P * G
  assert all(row["reward"] is None for row in found.rows)
  assert capfd.readouterr().err.count("the completion ends there") >= 1


@pytest.mark.slow
def test_a_conversation_that_a_limit_ends_counts_nothing(tmp_path):
  """It has a reward, or the policy would learn not to finish what it would lose."""
  found = Collected(config_of(tmp_path, FAILS, "SaysNothing"))
  assert all(row["reward"] == 0 for row in found.rows)


@pytest.mark.slow
def test_an_environment_that_hangs_ends_the_completion(tmp_path):
  config = config_of(tmp_path, FAILS, "Hangs", workers=4)
  found = Collected(with_section(config, "reward", timeout=0.5))
  assert found.metrics["environment/timeouts"] == P * G


def test_an_environment_that_refuses_an_example_is_named(tmp_path):
  with pytest.raises(
    ConfigError, match=r"reset\(\) of .*RefusesToStart raised ValueError: no seed"
  ):
    Collected(config_of(tmp_path, FAILS, "RefusesToStart"))


EXITS = """
import asyncio, decimal, sys
import numpy as np

class Fine:
  def reset(self, example):
    return []

  def step(self, message):
    return [], 1.0, True

class InInit(Fine):
  def __init__(self):
    sys.exit(0)

class InReset(Fine):
  def reset(self, example):
    sys.exit(0)

class InAsyncReset(Fine):
  async def reset(self, example):
    raise GeneratorExit

class InTask(Fine):
  async def reset(self, example):
    async def leave():
      sys.exit(0)
    await asyncio.create_task(leave())

class InGroup(Fine):
  async def step(self, message):
    async def leave():
      sys.exit(0)
    await asyncio.gather(asyncio.sleep(0), leave())

class Beside(Fine):
  async def reset(self, example):
    await self.begin()

  async def begin(self):
    async def leave():
      sys.exit(0)
    asyncio.ensure_future(leave())
    await asyncio.sleep(0.01)

  async def step(self, message):
    await self.begin()
    return [], 1.0, True

class Sessions(Fine):
  opened, closed, broken = [], [], []

  def __init__(self):
    self.opened.append(self)

  def reset(self, example):
    if example.get("fails"):
      raise ValueError("no board")
    return example.get("opening", [])

  def step(self, message):
    sys.exit(0)

  def close(self):
    self.closed.append(self)
    if self.broken:
      sys.exit(1)

class InClose(Fine):
  def close(self):
    sys.exit(0)

class InStep(Fine):
  def step(self, message):
    sys.exit(0)

class InAsyncStep(Fine):
  async def step(self, message):
    sys.exit(0)

class Cancelled(Fine):
  async def step(self, message):
    raise asyncio.CancelledError

class InKeptClose(Fine):
  pickles, turns = False, 0

  def step(self, message):
    self.turns += 1
    return "1", 1.0, False

  def close(self):
    if self.turns:
      sys.exit(0)

class Returns(Fine):
  def __init__(self, value):
    self.value = value

  def step(self, message):
    values = {"decimal": decimal.Decimal(1), "float32": np.float32(1), "array": np.array(True)}
    values |= {"nan": np.nan, "inf": np.inf, "complex": 1j, "huge": 10**400, "yes": np.True_}
    return eval(self.value, values)

class RefusesSome(Fine):
  def reset(self, example):
    if "7" in example["question"]:
      sys.exit(0)
    return "a\\ud800b" if "8" in example["question"] else []
"""


@pytest.mark.parametrize(
  "name, method",
  [("InInit", "__init__"), ("InReset", "reset"), ("InAsyncReset", "reset"), ("InClose", "close")],
)
def test_an_environment_that_exits_where_it_begins_is_named_with_its_example(
  name, method, tmp_path
):
  run = small_run(config_of(tmp_path, EXITS, name))
  with pytest.raises(ConfigError) as caught:
    run.environments.openings([{"question": "1+1="}])
  line = str(caught.value)
  assert re.search(
    rf"{method}\(\) of .*{name} raised (SystemExit: 0|GeneratorExit) \(.*env.py line", line
  )
  assert "for the example {'question': '1+1='}" in line and "\n" not in line


def test_a_task_that_an_environment_starts_does_not_end_the_program(tmp_path):
  run = small_run(config_of(tmp_path, EXITS, "InTask"))
  with pytest.raises(ConfigError, match="env.py:InTask raised SystemExit: 0 .*env.py line"):
    run.environments.openings([{"question": "1+1="}])


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", ["InStep", "InAsyncStep", "Cancelled"])
def test_an_environment_that_exits_in_a_step_ends_the_run_like_one_that_raises(
  name, workers, tmp_path
):
  config = config_of(tmp_path, EXITS, name, workers)
  with pytest.raises(RunFailed, match=r"the environment raised (SystemExit: 0|Cancelled).*env.py"):
    Collected(config)


@pytest.mark.parametrize("name, error", [("InGroup", "raised SystemExit: 0"), ("Beside", None)])
def test_an_exit_in_a_task_of_an_environment_is_an_error_of_that_task(name, error, tmp_path):
  """Whoever waits for the task gets it. asyncio itself would end the event loop, and so the run."""
  (tmp_path / "env.py").write_text(EXITS)
  parts = acting.load((), f"{tmp_path}/env.py:{name}")
  found = acting.outcome(parts, FIRST_STEP)
  assert error in found["error"] if error else found["reward"] == 1.0
  run = small_run(config_of(tmp_path, EXITS, "Beside"))
  assert run.environments.openings([{"question": "1+1="}]) == [[]]


@pytest.mark.parametrize("broken", [[], [1]])
def test_an_environment_that_fails_is_closed(broken, tmp_path):
  """It may hold a session of a server. What its close raises then says less than the failure."""
  config = config_of(tmp_path, EXITS, "Sessions")
  run = small_run(with_section(config, "reward", on_error="none"))
  made = run.environments.parts.of_task("")
  sessions = getattr(made, "func", made)
  sessions.broken[:] = broken
  examples = [{"fails": True}, {"opening": 5}, {"opening": [None]}]
  for opening in run.environments.openings(examples):
    assert re.search(r"reset\(\) of .* (raised ValueError: no board|returned the message)", opening)
  assert sessions.closed == sessions.opened and len(sessions.opened) == 3
  for request in (FIRST_STEP, FIRST_STEP | {"example": {"fails": True}}):
    error = acting.outcome(run.environments.parts, request)["error"]
    assert re.search("raised (SystemExit: 0|ValueError: no board)", error)
  assert sessions.closed == sessions.opened and len(sessions.opened) == 5


def test_an_environment_whose_answer_does_not_fit_is_closed(tmp_path):
  """It is pickled between turns, and pickle finds its class by name: `closed` is there once."""
  source = """
class Talks:
  closed, turns = [], 0

  def reset(self, example):
    return []

  def step(self, message):
    self.turns += 1
    return "A long answer.", 0.5, False

  def close(self):
    self.closed.append(self.turns)
"""
  run = small_run(config_of(tmp_path, source, "Talks"))
  talk, made = begun_talk(run), run.environments.parts.of_task("")
  closed = getattr(made, "func", made).closed
  closed.clear()  # the openings of prompts have closed some
  assert answered(talk, [StoppedRow(0, 0, [5, 6], -1, 5)]) == [None] and closed == [1]
  (reply,) = answered(talk, [StoppedRow(0, 1, [5, 6], -1, 500)])
  assert reply and closed == [1]
  row = StoppedRow(0, 1, [5, 6, *reply, 7], -1, 5)
  assert answered(talk, [row]) == [None] and closed == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("on_error", ["stop", "none"])
def test_an_environment_that_exits_where_a_worker_closes_it(on_error, tmp_path):
  config = config_of(tmp_path, EXITS, "InKeptClose", workers=1, max_turns=2)
  config = with_section(config, "reward", on_error=on_error)
  if on_error == "none":
    assert Collected(config).metrics["environment/errors"] > 0
    return
  with pytest.raises(RunFailed, match=r"the environment raised SystemExit: 0 \(.*env.py"):
    Collected(config)


FIRST_STEP = {"task": "", "example": {}, "is_first": True, "state": "", "key": "a"}
FIRST_STEP |= {"message": {"content": "x"}, "is_last": False}


def outcome_of(folder, value):
  """The outcome of a step of `Returns` that returns this expression."""
  (folder / "env.py").write_text(EXITS)
  parts = acting.load((), f"{folder}/env.py:Returns(value={value!r})")
  return acting.outcome(parts, FIRST_STEP)


def test_what_an_environment_may_return(tmp_path):
  for value in ("1", "True", "float32", "decimal", "yes", "array"):
    assert outcome_of(tmp_path, f"([], {value}, True)")["reward"] == 1
  for value in ("True", "1", "1.0", "yes", "array"):
    assert outcome_of(tmp_path, f"([], None, {value})")["done"] is True
  for value in ("False", "0", "~yes", "None", "~array"):  # such as self.winner, while there is none
    assert outcome_of(tmp_path, f"([], None, {value})")["done"] is False
  halves = "{'role': 'user', 'content': 'a\\ud800b', 'n': ('c\\udc00',)}"
  said = outcome_of(tmp_path, f"({halves}, 1, False)")
  assert said["messages"] == [{"role": "user", "content": "a?b", "n": ["c?"]}]
  assert outcome_of(tmp_path, "(None, 1, False)")["messages"] == []


@pytest.mark.parametrize(
  "value, words",
  [(f"([], {one}, False)", "the reward ") for one in ("nan", "inf", "-inf", "complex", "huge")]
  + [(f"([], {one}, False)", "the reward ") for one in ("'1'", "b'1'", "[1]", "{}", "1e16")]
  + [(f"([], 1, {one})", "done=") for one in ("'False'", "'true'", "b''", "2", "nan", "[]", "{}")]
  + [(f"({one}, 1, False)", "the message ") for one in ("[None]", "['a']", "{'role': 'user'}")]
  + [(f"({one}, 1, False)", "the messages ") for one in ("5", "True")]
  + [
    ("({'role': 'user', 'content': None}, 1, False)", "a text content"),
    ("({'role': 'user', 'content': b'a'}, 1, False)", "a text content"),
    ("({'role': 'user', 'content': 5}, 1, False)", "a text content"),
    ("({'role': 'assistant', 'content': 'a'}, 1, False)", "its role must be"),
    ("({'role': 'user', 'content': 'a', 'b': nan}, 1, False)", "JSON cannot represent"),
    ("({'role': 'user', 'content': 'a', 'b': {1, 2}}, 1, False)", "JSON cannot represent"),
    ("([], 1)", "return (messages, reward, done)"),
    ("None", "return (messages, reward, done)"),
  ],
)
def test_what_an_environment_may_not_return(value, words, tmp_path):
  error = outcome_of(tmp_path, value)["error"]
  assert words in error and error.startswith("returned ") and error.endswith("(step() of Returns)")


def refusing(folder):
  """A run whose environment refuses some examples, and what makes prompts with it."""
  config = with_section(config_of(folder, EXITS, "RefusesSome"), "reward", on_error="none")
  run = small_run(config)

  def prompts_of(questions, count_all=False, **data):
    section = dict(max_prompt_tokens=99, prompt="{question}") | data
    section = dataclasses.replace(config.data, **section)
    split = [{"question": one} for one in questions]
    return PromptSet(
      split, run.tokenizer, section, count_all=count_all, environment=run.environments
    )

  return run, prompts_of


def test_an_example_that_an_environment_refuses_is_not_used_if_asked(tmp_path, capfd):
  """In training others stand in for it. An evaluation leaves it out, and takes each other once."""
  run, prompts_of = refusing(tmp_path)
  questions = [run.task.train[i]["question"] for i in range(300)]
  prompts = prompts_of(questions)
  refused = sum("7" in one for one in questions)
  assert 0 < refused == prompts.unopened and prompts.dropped == 0
  assert len(prompts) == len(questions)
  assert len(prompts_of(questions, count_all=True)) == len(questions) - refused
  made = prompts.make(range(len(prompts)))
  assert all("7" not in one.text and one.ids for one in made)
  assert all(one.text.endswith("a?b") for one in made if "8" in one.example["question"])
  assert capfd.readouterr().err.count("it is left out") == 1
  with pytest.raises(ConfigError, match="raised SystemExit.* no other of all 2 examples"):
    prompts_of(["7", "77"])
  drawn = prompts_of(questions, count_at_start=9)  # another example stands in for one
  assert drawn.unopened == 0 and drawn.replaced > 0
  assert all("7" not in one.text and one.ids for one in drawn.make(range(len(questions))))


def test_an_example_that_an_environment_refuses_later_gets_a_stand_in(tmp_path):
  run, prompts_of = refusing(tmp_path)
  prompts = prompts_of([str(i) for i in range(7)])
  assert len(prompts) == 7
  for key in list(run.environments._known)[:3]:  # as if it was asked again
    run.environments._known[key] = "reset() raised something"
  assert all(int(one.text) > 2 for one in prompts.make(range(7)))


def test_the_number_of_a_prompt_does_not_depend_on_what_an_environment_refuses(tmp_path):
  """It may be a server that is busy for a moment. After a restart, a number is the same prompt."""
  run, prompts_of = refusing(tmp_path)
  questions = ["1", "77", "2", "22222", "3", "7" * 40, "4" * 20, "5" * 200]
  before = prompts_of(questions)
  texts = [prompt.text for prompt in before.make(range(len(before)))]
  for key in list(run.environments._known):  # as if no other was refused in a new process
    run.environments._known[key] = []
  after = prompts_of(questions)
  assert len(before) == len(after) == 7 and (before.dropped, after.dropped) == (1, 1)
  made = [prompt.text for prompt in after.make(range(len(after)))]
  assert made == questions[:7] and [i for i in range(7) if made[i] != texts[i]] == [1, 5]
  assert before.max_tokens >= after.max_tokens == 48  # the longest one may begin later


ODD_TOOLS = """
import sys

class Mute(Exception):
  def __str__(self):
    raise KeyError("no text")

def mute(x: str) -> str:
  '''Raises.

  Args:
    x: A number.
  '''
  raise Mute

def exits(x: str) -> str:
  '''Exits.

  Args:
    x: A number.
  '''
  sys.exit(0)

def halves(x: str) -> str:
  '''Returns half of a character.

  Args:
    x: A number.
  '''
  return "a\\ud800"

def objects(x: str):
  '''Returns objects.

  Args:
    x: A number.
  '''
  return {"a": float("nan"), "b": Mute, "c": b"d"}

def silent(x: str):
  '''Returns an object without a text.

  Args:
    x: A number.
  '''
  return Mute()

def first(x: str):
  '''Returns the first of none.

  Args:
    x: A number.
  '''
  return next(iter(()))
"""


@pytest.mark.parametrize(
  "tool, said",
  [
    ("mute", "error: Mute that cannot be printed"),
    ("exits", "error: it ended with SystemExit(0)"),
    ("halves", "a?"),
    ("objects", '{"a": NaN, "b": "<class'),
    ("silent", "error: 'no text'"),
    ("first", "error: it ended with StopIteration()"),
  ],
)
def test_a_tool_may_raise_and_return_anything(tool, said, tmp_path):
  (tmp_path / "env.py").write_text(ODD_TOOLS)
  parts = acting.load((f"{tmp_path}/env.py:{tool}",), "")
  request = {"tool": tool, "arguments": {"x": "1"}}
  found = acting.outcome(parts, request)
  assert found["content"].startswith(said)
  in_thread = acting._outcome(parts, request, as_thread=True)  # as beside an async tool
  assert asyncio.run(asyncio.wait_for(in_thread, 9)) == found
  assert found["failed"] == said.startswith("error")
  json.dumps(found, allow_nan=False)


def test_two_tools_of_one_name_are_refused(tmp_path):
  for file in ("env.py", "other.py"):
    (tmp_path / file).write_text(ODD_TOOLS)
  with pytest.raises(ConfigError, match="two tools are called mute"):
    acting.load((f"{tmp_path}/env.py:mute", f"{tmp_path}/other.py:mute"), "")


@pytest.mark.parametrize(
  "returned, content, read",
  [
    (["a", {"b": [1.5, None]}], ["a", {"b": [1.5, None]}], '["a", {"b": [1.5, null]}]'),
    ([], [], "[]"),
    ([float("nan"), b"d", "\ud800"], ["NaN", "b'd'", "?"], '["NaN", "b\'d\'", "?"]'),
    ({"b": [1]}, '{"b": [1]}', '{"b": [1]}'),
    ("[1]", "[1]", "[1]"),
    (["é" * 20_000], '["' + "é" * 19_998 + "... (cut off)", None),
  ],
)
def test_reward_functions_get_a_list_of_a_tool_and_the_model_its_text(returned, content, read):
  found = content_of(returned)
  assert found == content
  turn = turn_of({"role": "tool", "name": "x", "content": found}, 3, 5)
  assert turn.text == (content if read is None else read)
  assert turn.message == {"role": "tool", "name": "x", "content": content}
  json.dumps(found, allow_nan=False)


LISTS = """
def digits(x: str) -> list:
  '''Returns the digits of a number.

  Args:
    x: A number.
  '''
  return [*x]
"""

COUNTS = """
def counts(completions, turns, **_):
  lists = [[turn["content"] for turn in one if turn["role"] == "tool"] for one in turns]
  return [float(sum(len(digits) for digits in one if isinstance(digits, list))) for one in lists]
"""


def test_a_run_pays_for_the_lists_of_a_tool_and_shows_their_text(tmp_path):
  config = config_of(tmp_path, LISTS, tools=(f"{tmp_path}/env.py:digits",), calls=DIGITS)
  found = Collected(with_reward(config, tmp_path, COUNTS, ["counts"]))
  texts = [[turn["text"] for turn in row["turns"] if turn["role"] == "tool"] for row in found.rows]
  expected = [float(sum(len(json.loads(text)) for text in own)) for own in texts]
  assert [row["rewards/counts"] for row in found.rows] == expected and max(expected) > 0


ASYNC_RETRY = "retry(function=\"judge(url='http://localhost:1/v1', model='m')\")"


@pytest.mark.parametrize(
  "settings, words",
  [
    (dict(name="chess"), "environment.name: 'chess' is unknown: choose one of retry"),
    (dict(name="retry(lives=3)"), "environment.name: .*unexpected keyword argument 'lives'"),
    (dict(name="retry(function='strikt')"), "environment.name: retry: 'strikt' is unknown: choose"),
    (dict(name=ASYNC_RETRY), "environment.name: retry.*: judge is async, and retry calls only"),
    (dict(name="a=retry,a=retry"), "two environments for a"),
    (dict(name="a=retry,retry"), "write TASK=NAME"),
    (dict(tools=("abacus",)), "environment.tools: 'abacus' is unknown: choose one of calculator"),
    (dict(tools=("calculator",), calls="qwen"), "environment.calls"),
  ],
)
def test_a_wrong_name_is_refused_in_a_line(settings, words):
  with pytest.raises(ConfigError, match=words) as caught:
    small_run(with_section(small_config(), "environment", **settings)).prompts("train")
  assert "\n" not in str(caught.value)


def test_the_reward_of_an_environment_needs_one():
  config = with_section(small_config(), "reward", functions=("environment",))
  with pytest.raises(ConfigError, match="environment.name is ''"):
    small_run(config)


@pytest.mark.parametrize(
  "expression, value",
  [
    ("3 * (4 + 5)", "27"),
    ("7 / 2", "3.5"),
    ("6 / 2", "3"),
    ("1,000 + 1", "1001"),
    ("-2 ** 2", "-4"),
    ("7 // 2 + 7 % 4", "6"),
  ],
)
def test_the_calculator_computes(expression, value):
  assert calculator(expression) == value


@pytest.mark.parametrize(
  "expression",
  ["", "x", "1 +", "9 ** 9 ** 9", "(1).real", "__import__('os')", "[1]*9", "1/0", "2**-0.5**0.5j"]
  + ["(" * 500, "1" * 300, "-1 ** 0.5 + (-1) ** 0.5", "1e999", "1e999 - 1e999"],
)
def test_the_calculator_refuses_the_rest(expression):
  with pytest.raises((ValueError, ZeroDivisionError)):
    calculator(expression)


ROW_TOOLS = '''
def a(digit: str) -> str:
  """Says one.

  Args:
    digit: A digit.
  """
  return "1"


def b(digit: str) -> str:
  """Says two.

  Args:
    digit: A digit.
  """
  return "2"
'''
SCHEMA_OF_B = {"type": "function", "function": {"name": "b", "parameters": {}}}


def with_rows(folder, config, values, **changes):
  """The config with rows whose column `tools` holds these values in turn."""
  rows = [{"question": f"{i}ab=", "answer": "0"} for i in range(10)]
  for row, value in zip(rows, itertools.cycle(values)):
    row["tools"] = value
  for split in ("train", "test"):
    (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
  return with_section(config, "data", task="columns", path=str(folder), **changes)


@pytest.mark.slow
def test_a_row_may_have_some_of_the_tools(tmp_path):
  """Those of other rows do not exist for it, and a row without any has none to call."""
  tools = tuple(f"{tmp_path}/env.py:{name}" for name in "ab")
  calls = "(?P<name>[ab]) *(?P<arguments>[0-9])"
  config = config_of(tmp_path, ROW_TOOLS, tools=tools, calls=calls)
  values = [["a"], json.dumps([SCHEMA_OF_B]), [], None]
  config = with_section(config, "batch", prompts=8)
  found = Collected(with_rows(tmp_path, config, values))
  expected = [
    {"1", "error: there is no tool 'b'; there are a"},
    {"2", "error: there is no tool 'a'; there are b"},
    set(),
  ]
  said = [set[str]() for _ in values]
  for row in found.rows:
    texts = [turn["text"] for turn in row["turns"] if turn["role"] == "tool"]
    said[int(row["prompt"][0]) % 4].update(texts)
  assert said[:3] == expected and set() < said[3] <= {"1", "2"}


def test_an_environment_answers_calls_of_tools_that_rows_only_show(tmp_path):
  corpus = json.dumps([row["question"] + row["answer"] for row in small_qwen.problems(12)])
  small_qwen.make_checkpoint(tmp_path / "model", [corpus])
  tokens = tokens_for(tmp_path / "model", BEFORE_LAST_USER, corpus)
  config = config_of(tmp_path, SETS, name="Says", calls="hermes")
  options = dict(chat=True, prompt="{question}", max_prompt_tokens=400)
  config = with_rows(tmp_path, config, [[SET]], **options)
  talk = begun_talk(small_run(with_section(config, "model", path=str(tmp_path / "model"))))
  stop, call = tokens.stop_ids[0], written_by_hermes(zip="1")
  ids = [*tokens.encode(call), stop]
  (reply,) = answered(talk, [StoppedRow(0, 0, ids, stop, 500)])
  assert "Again." in tokens.decode(reply)
  conversation = talk._conversations[0, 0]
  assert conversation.calls == 0 and conversation.own[0].reward == 0.0


@pytest.mark.parametrize(
  "value, words",
  [
    (["a", "c"], "train.jsonl line 1: the column tools names 'c', and environment.tools has a, b"),
    (5, "train.jsonl line 1: the column tools must be a list of names or schemas of tools"),
    ("a, b", "train.jsonl line 1: the column tools must be a list of names or schemas of tools"),
    ([["a"]], r"train.jsonl line 1: the column tools holds \['a'\]: an entry must be the name"),
    (
      [{"function": {}}],
      "train.jsonl line 1: the column tools holds .*: an entry must be the name",
    ),
  ],
)
@pytest.mark.parametrize("at_start", [500, 1])
def test_tools_of_a_row_that_a_run_lacks_are_named(tmp_path, value, words, at_start):
  tools = tuple(f"{tmp_path}/env.py:{name}" for name in "ab")
  config = config_of(tmp_path, ROW_TOOLS, tools=tools, calls="(?P<name>a)(?P<arguments>1)")
  run = small_run(with_rows(tmp_path, config, [value], count_at_start=at_start))
  for split in ("train", "test"):
    with pytest.raises(ConfigError, match=words.replace("train", split)):
      run.prompts(split)


NAMES_TOOLS = (
  "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}{{ messages[0].content }}"
)


def test_a_prompt_shows_the_tools_of_its_row(tmp_path):
  """Without environment.tools, nobody answers calls, and the row says what the model reads."""
  trained_tokenizer(["a b ; = 0 1 2"]).save(str(tmp_path / "tokenizer.json"))
  about = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": NAMES_TOOLS}
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
  tokens = tokenizer.load(tmp_path)
  tools = tuple(f"{tmp_path}/env.py:{name}" for name in "ab")
  config = config_of(tmp_path, ROW_TOOLS, tools=tools)
  values = [["b", "a", "b"], [], None, [SCHEMA_OF_B], [{"name": "a"}]]
  config = with_rows(tmp_path, config, values, chat=True, prompt="{question}")
  made = PromptSet(
    make_task(config.data).train, tokens, config.data, environment=make_environments(config, tokens)
  ).make(range(5))
  assert [one.text for one in made] == ["b;a;0ab=", "1ab=", "a;b;2ab=", "b;3ab=", "a;4ab="]
  for environment in (
    None,
    make_environments(with_section(config, "environment", tools=(), name="retry"), tokens),
  ):
    made = PromptSet(make_task(config.data).train, tokens, config.data, environment=environment)
    texts = [one.text for one in made.make(range(5))]
    assert texts == ["0ab=", "1ab=", "2ab=", "b;3ab=", "4ab="]
