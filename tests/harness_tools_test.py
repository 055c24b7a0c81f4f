"""Agents that use OpenAI's client as anybody does: tools, messages of their own, several agents."""

import asyncio
import json

import numpy as np
import pytest
from small_qwen import TEMPLATE, make_checkpoint, problems
from small_run import Collected, P, grpo_step, small_config, small_run, with_section

from grpo_jax.batches.collect import Collector
from grpo_jax.environments import acting
from grpo_jax.environments.built_in import calculator
from grpo_jax.environments.schema import schema_of
from grpo_jax.scoring.scorers import Scorers

G, T, S = 4, 160, 192
# A digit in what the policy writes is a call of the only tool.
CALL = r"(?P<arguments>\d)"
PROGRAM = '''
import json
import openai

def press(key: str) -> str:
  """Presses a key.

  Args:
    key: A digit.
  """
  if key == "0":
    raise ValueError("0 is stuck")
  return "opens" if key == "7" else "nothing"

async def agent(example, base_url, api_key, model, tools):
  client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
  messages = [{"role": "system", "content": "Press a key."}, *example["messages"]]
  heard = []
  for _ in range(2):
    made = await client.chat.completions.create(
      model=model, messages=messages, tools=example["tools"], max_tokens=4
    )
    message = made.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    if not message.tool_calls:
      break
    for call in message.tool_calls:
      heard.append(await tools[call.function.name](**json.loads(call.function.arguments)))
      messages.append({"role": "tool", "tool_call_id": call.id, "content": heard[-1]})
  opened = float("opens" in heard)
  return {"reward": opened, "metrics": {"heard": len(heard)}, "heard": heard}

async def pair(example, base_url, api_key, model):
  client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
  said = "".join(message["content"] for message in example["messages"])
  for who in ("You plan.", "You carry out what was planned, and say what came of it."):
    messages = [{"role": "system", "content": who}, {"role": "user", "content": said}]
    made = await client.chat.completions.create(model=model, messages=messages, max_tokens=6)
    said = made.choices[0].message.content
  return {"reward": float(len(said)), "answer": 1} if "clash" in example else float(len(said))

def heard_it(completions, heard, **columns):
  calls = [
    [call for turn in one for call in turn.get("tool_calls") or []] for one in completions
  ]
  assert [len(own) for own in calls] == [len(own) for own in heard]
  return [float(any(c["function"]["arguments"]["key"] == "7" for c in own)) for own in calls]

def lengths(completions, **columns):
  return [float(len(one)) for one in completions]
'''


def config_of(folder, name, functions=("environment",), **environment):
  rows = list(problems(12))
  shows = (
    "{% if tools %}{{ '<|im_start|>tools\n' + tools[0].function.name + eos_token }}{% endif %}"
  )
  corpus = [row["question"] + row["answer"] for row in rows] + ["0123456789 system Press tool"]
  make_checkpoint(folder / "model", corpus, every_id_is_text=True)
  file = folder / "model" / "tokenizer_config.json"
  file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": shows + TEMPLATE}))
  for split in ("train", "test"):
    (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
  (folder / "program.py").write_text(PROGRAM)
  functions = tuple(one if one == "environment" else f"{folder}/{one}" for one in functions)
  config = with_section(small_config(), "sampling", max_tokens=T)
  config = with_section(config, "batch", group_size=G)
  config = with_section(
    config, "environment", harness=f"{folder}/program.py:{name}", calls=CALL, **environment
  )
  config = with_section(
    config, "reward", functions=functions, weights=(1.0,) * len(functions), workers=0
  )
  config = with_section(
    config, "data", task="gsm8k", path=str(folder), chat=True, max_prompt_tokens=S
  )
  return with_section(config, "model", path=str(folder / "model"))


def with_tools(folder, functions=("environment",)):
  return config_of(folder, "agent", functions, tools=(f"{folder}/program.py:press",))


def check_learned(small):
  """The learner computes the log-probs that the endpoint drew with."""
  batch, programs = small.found.batch, small.run.programs
  params = small.run.parameters.policy(small.run.initial_params())
  gap_PGT = np.abs(batch.mask_PGT * (programs.logprobs(params, batch) - batch.sampler_logprobs_PGT))
  assert 0 < gap_PGT.max() < 1e-4


@pytest.mark.slow
def test_an_agent_with_tools_is_learned_from_its_first_call_on(tmp_path):
  config = with_tools(tmp_path, ("environment", "program.py:heard_it"))
  small = Collected(config)
  check_learned(small)
  rows, metrics = small.rows, small.metrics
  assert all("press" in row["prompt"] and "Press a key." in row["prompt"] for row in rows)
  decode = small.run.tokenizer.decode
  assert all(decode(row["prompt_ids"]) == row["prompt"] for row in rows)
  assert metrics["rewards/environment/mean"] == metrics["rewards/heard_it/mean"]
  calls = [[turn for turn in row["turns"] if turn["role"] == "tool"] for row in rows]
  assert metrics["harness/heard"] == metrics["tools/call_frequency"] == np.mean([*map(len, calls)])
  assert [row["extra/heard"] for row in rows] == [[turn["text"] for turn in own] for own in calls]
  assert metrics["prompts/tokens"] == sum(len(row["prompt_ids"]) for row in rows)
  stuck = sum(turn["text"] == "error: 0 is stuck" for own in calls for turn in own)
  assert metrics["tools/failure_frequency"] == stuck / sum(map(len, calls))


def test_a_tool_that_a_model_invents_is_an_error_that_it_reads():
  tools = acting.callable_tools(("calculator",), [schema_of(calculator)])
  said = asyncio.run(tools["sqrt"](x=2))
  assert said == "error: there is no tool 'sqrt'; there are calculator"
  assert asyncio.run(tools["calculator"](expression="6*7")) == "42"
  assert "sqrt" not in tools and len(tools) == 1


@pytest.mark.slow
def test_rewards_of_an_agent_with_tools_rise(tmp_path):
  config = with_section(with_tools(tmp_path), "batch", group_size=16)
  run = small_run(with_section(config, "optimizer", learning_rate=3e-2))
  scorers = Scorers(run)
  rewards, gaps = [], []
  try:
    step, store, _ = grpo_step(run, tmp_path / "run", Collector(run, scorers))
    state, _, _ = store.restore_or_init()
    for index in range(30):
      state, metrics, _, _ = step(state, index)
      rewards.append(metrics["reward"])
      gaps.append(metrics["sampler/logprob_gap_max"])
  finally:
    scorers.close()
  print("rewards", np.round(rewards, 2).tolist(), "gap", max(gaps))
  assert max(gaps) < 1e-4
  assert np.mean(rewards[-5:]) > 0.8 > 0.3 > np.mean(rewards[:3])


@pytest.mark.slow
def test_several_agents_of_a_rollout_are_branches(tmp_path, capfd):
  config = config_of(tmp_path, "pair", branches=2)
  small = Collected(config)
  check_learned(small)
  assert "not learned from" not in capfd.readouterr().err
  assert small.found.batch.completions_PGT.shape[:2] == (P, 2 * G)
  for row in small.rows:
    assert row["prompt"].endswith("You ") and row["turns"][0]["role"] == "assistant"
    ((system, user, answer),) = row["branches"]
    assert "say what came of it" in system["text"] and user["text"] == row["turns"][0]["text"]
    assert answer["role"] == "assistant" and row["reward"] == len(answer["text"])
  one = Collected(with_section(config, "environment", branches=1))
  check_learned(one)
  assert f"warning: {P * G} calls of the harness" in capfd.readouterr().err
  assert all(row["prompt"].endswith("assistant\n") for row in one.rows)


@pytest.mark.slow
def test_a_prompt_may_be_longer_than_those_of_the_data(tmp_path, capfd):
  """What data.max_prompt_tokens does not hold counts as tokens of completions."""
  config = with_section(with_tools(tmp_path), "data", max_prompt_tokens=40)
  (tmp_path / "train.jsonl").write_text(json.dumps({"question": "?", "answer": "#### 1"}) + "\n")
  small = Collected(config)
  check_learned(small)
  assert "and data.max_prompt_tokens is 40" in capfd.readouterr().err
  assert {len(row["prompt_ids"]) for row in small.rows} == {40}
