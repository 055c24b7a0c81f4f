"""Programs that play with the policy through the endpoint of the run, in training."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from small_qwen import make_checkpoint, problems
from small_run import Collected, P, grpo_step, small_config, small_run, with_section

from grpo_jax.batches.collect import Collector
from grpo_jax.environments.harness import LIMIT, Players
from grpo_jax.rollouts.branches import Branch, as_completions, branches_of, shared_prompt
from grpo_jax.rollouts.traced import Harness
from grpo_jax.rollouts.turns import POLICY, Conversation, Turn
from grpo_jax.sampler.logits import RowSettings
from grpo_jax.scoring.scorers import Scorers
from grpo_jax.serving.traces import Recorder, Trace
from grpo_jax.settings import ConfigError, RunFailed

G, T = 3, 80

HARNESS = """
import asyncio
import sys
import numpy as np
import openai

def client_of(base_url, api_key):
  return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)

async def twice(example, base_url, api_key, model):
  client, prompt = client_of(base_url, api_key), example["prompt_text"]
  first = await client.completions.create(
    model=model, prompt=prompt, max_tokens=6, temperature=0.3, top_p=0.5
  )
  prompt += first.choices[0].text + "=1;"
  second = await client.completions.create(model=model, prompt=prompt, max_tokens=6, stream=True)
  text = "".join([part.choices[0].text async for part in second])
  return float(text.count("7"))

async def chats(example, base_url, api_key, model):
  client, messages = client_of(base_url, api_key), list(example["messages"])
  for turn in range(3):
    answer = await client.chat.completions.create(model=model, messages=messages, max_tokens=6)
    messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    messages.append({"role": "user", "content": f"No, {turn}"})
  other = [{"role": "user", "content": "What do you think?"}]
  await client.chat.completions.create(model=model, messages=other, max_tokens=3)
  return float(len(messages[-2]["content"]))

async def forks(example, base_url, api_key, model):
  client, prompt = client_of(base_url, api_key), example["prompt_text"]
  first = await client.completions.create(model=model, prompt=prompt, max_tokens=6)
  for end in ("=1;", "=2;", "=3;"):
    await client.completions.create(
      model=model, prompt=prompt + first.choices[0].text + end, max_tokens=6
    )
  return float(len(set(first.choices[0].text)))

async def grows(example, base_url, api_key, model):
  client, prompt = client_of(base_url, api_key), example["prompt_text"]
  for _ in range(6):
    made = await client.completions.create(model=model, prompt=prompt, max_tokens=4)
    prompt += made.choices[0].text + "=1;=1;=1;"
  return 0.0

async def raises(example, base_url, api_key, model):
  raise ValueError("no game")

async def exits(example, base_url, api_key, model):
  sys.exit(0)

async def exits_in_task(example, base_url, api_key, model):
  async def leave():
    await asyncio.sleep(0.01)
    sys.exit(0)
  await asyncio.gather(asyncio.sleep(0.05), *[leave() for _ in range(example["exits"])])
  return 1.0

async def pays(example, base_url, api_key, model):
  return eval(example["pays"])

async def some(example, base_url, api_key, model):
  if int(api_key[-1]) % 2:
    raise ValueError("no game")
  answer = await client_of(base_url, api_key).completions.create(
    model=model, prompt=example["prompt_text"], max_tokens=6
  )
  return float(len(answer.choices[0].text))

async def differs(example, base_url, api_key, model):
  prompt = "3" if api_key.endswith("/1") else "37;" + "1" * 9
  await client_of(base_url, api_key).completions.create(model=model, prompt=prompt, max_tokens=20)
  return 1.0

async def asks_others(example, base_url, api_key, model):
  error = ValueError(example["says"])
  error.code = "context_length_exceeded"
  raise error

async def silent(example, base_url, api_key, model):
  return 1.0

async def wants_more(example, base_url, api_key, model, board):
  return 1.0

def not_async(example, base_url, api_key, model):
  return 1.0

async def sevens(example, base_url, api_key, model):
  answer = await client_of(base_url, api_key).completions.create(
    model=model, prompt=example["question"], max_tokens=12
  )
  return answer.choices[0].text.count("7") / 12
"""


def config_of(folder, name, workers=0, **sections):
  (folder / "harness.py").write_text(HARNESS)
  config = with_section(small_config(), "sampling", max_tokens=T, **sections.get("sampling", {}))
  config = with_section(config, "environment", harness=f"{folder}/harness.py:{name}")
  reward = {"functions": ("environment",), "workers": workers} | sections.get("reward", {})
  return with_section(config, "reward", **reward)


def chat_config(folder):
  rows = list(problems(12))
  corpus = [row["question"] + row["answer"] for row in rows] + ["user assistant No, 0"]
  make_checkpoint(folder / "model", corpus, every_id_is_text=True)
  import json

  for split in ("train", "test"):
    (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
  config = config_of(folder, "chats")
  config = with_section(
    config, "data", task="gsm8k", path=str(folder), chat=True, max_prompt_tokens=96
  )
  return with_section(config, "model", path=str(folder / "model"))


def first_step(config, folder):
  """(rows, metrics) of a run's first step."""
  run = small_run(config)
  scorers = Scorers(run)
  try:
    step, store, _ = grpo_step(run, folder, Collector(run, scorers))
    state, _, _ = store.restore_or_init()
    _, metrics, rows, _ = step(state, 0)
    return rows, metrics
  finally:
    scorers.close()


@pytest.fixture(scope="module")
def twice(tmp_path_factory):
  """(rows, metrics) of the first step of a run whose harness asks twice, without workers."""
  folder = tmp_path_factory.mktemp("twice")
  return first_step(config_of(folder, "twice"), folder / "run")


@pytest.mark.slow
def test_what_a_harness_asked_is_learned_token_by_token(twice):
  rows, metrics = twice
  assert len(rows) == P * G and metrics["sampler/logprob_gap_max"] < 1e-4
  for row in rows:
    roles = [turn["role"] for turn in row["turns"]]
    assert roles in (["assistant", "user", "assistant"], ["assistant"])
    if len(roles) == 3:
      first, added, last = row["turns"]
      assert added["text"] == "=1;" and last["reward"] == row["reward"] == last["text"].count("7")
      assert first["end"] <= 6 and last["end"] - last["start"] <= 6
  assert sum(len(row["turns"]) == 3 for row in rows) > P


@pytest.mark.slow
def test_prompts_that_differ_in_a_group_say_what_they_cost(tmp_path, capfd):
  config = with_section(config_of(tmp_path, "differs"), "sampling", max_tokens=20)
  rows, metrics = first_step(config, tmp_path / "run")
  written = max(row["length"] for row in rows)
  assert written <= 20 and 0 < metrics["harness/lost_tokens"] <= 11 * P * (G - 1)
  said = re.findall("warning: the first calls of a group's completions .*", capfd.readouterr().err)
  assert len(said) == 1 and "have 1 tokens in common" in said[0] and "one has 12" in said[0]


@pytest.mark.slow
def test_calls_that_grow_compute_what_is_new(tmp_path):
  """Of a group, the first call is computed once. Of later calls, only what follows the answers."""
  rows, metrics = first_step(config_of(tmp_path, "grows"), tmp_path / "run")
  assert metrics["sampler/logprob_gap_max"] < 1e-4
  # A character is a token. Five calls of each completion have nine that are new. So is the last
  # token of the answer before, unless it ended the text: it was drawn, and no layer has seen it.
  prompts, calls = sum(len(row["prompt"]) for row in rows[::G]), 5 * len(rows)
  assert prompts + 9 * calls <= metrics["harness/computed_tokens"] <= 1.2 * (prompts + 10 * calls)
  assert metrics["harness/prompt_tokens"] > 4 * (prompts + 10 * calls)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_the_run_decides_how_tokens_are_drawn_whatever_a_request_says(workers, twice, tmp_path):
  again, metrics = first_step(config_of(tmp_path, "twice", workers), tmp_path / "again")
  assert [row["completion_ids"] for row in again] == [row["completion_ids"] for row in twice[0]]
  assert [row["turns"] for row in again] == [row["turns"] for row in twice[0]]
  assert metrics["sampler/logprob_gap_max"] < 1e-4


@pytest.mark.slow
def test_conversations_keep_their_tokens_and_other_calls_are_left_out(tmp_path, capfd):
  """A random model writes tokens that its tokenizer would not make of their text."""
  config = chat_config(tmp_path)
  rows, metrics = first_step(config, tmp_path / "run")
  assert metrics["sampler/logprob_gap_max"] < 1e-4
  own = [[turn for turn in row["turns"] if turn["role"] == "assistant"] for row in rows]
  assert all(len(turns) == 3 for turns in own)
  assert all("No, 0" in row["turns"][1]["text"] for row in rows)
  assert f"warning: {P * G} calls of the harness are not learned from" in capfd.readouterr().err


@pytest.mark.slow
def test_branches_have_the_advantage_of_their_completion(tmp_path):
  """What the branches share is learned once. Three branches need two further rows."""
  config = with_section(config_of(tmp_path, "forks"), "environment", branches=3)
  small = Collected(config)
  found, rows, programs = small.found, small.rows, small.run.programs
  batch, _ = programs.with_advantages(found.batch, found.rewards, 0.0)
  params = small.run.parameters.policy(small.run.initial_params())
  logprobs_PGT = programs.logprobs(params, batch)
  gap_PGT = np.abs(batch.mask_PGT * (logprobs_PGT - batch.sampler_logprobs_PGT))
  assert 0 < gap_PGT.max() < 1e-4
  assert batch.completions_PGT.shape[:2] == (P, 3 * G)
  mask_PGT, rollout_PG = np.array(batch.mask_PGT), np.array(found.batch.rollout_PG)
  learns_PG = mask_PGT.any(-1)
  advantages_PG = np.array(batch.advantages_PGT).sum(-1) / np.maximum(mask_PGT.sum(-1), 1)
  own_PG = np.take_along_axis(advantages_PG, rollout_PG, 1)
  rewards_PG = np.array(found.rewards.score_PG)
  above_PG = np.sign(rewards_PG - rewards_PG.mean(1, keepdims=True))
  assert (np.sign(advantages_PG[:, :G]) == above_PG).all() and len(set(above_PG.ravel())) > 1
  np.testing.assert_allclose(advantages_PG[learns_PG], own_PG[learns_PG], rtol=1e-6)
  assert advantages_PG.any() and learns_PG[:, G:].sum() == sum(len(row["branches"]) for row in rows)
  # An answer that ended by itself is no part of the prompts that its text is in.
  forked = [row for row in rows if [len(row["turns"]), *map(len, row["branches"])] == [3, 3, 3]]
  assert len(forked) > P
  for row in forked:
    added = {turns[1]["text"] for turns in (row["turns"], *row["branches"])}
    assert added == {"=1;", "=2;", "=3;"}
  # The first call of a completion is in one row alone.
  tokens_PGT, (p, g) = np.array(found.batch.completions_PGT), divmod(rows.index(forked[0]), G)
  length = forked[0]["turns"][0]["end"]
  others = np.flatnonzero((rollout_PG[p] == g) & learns_PG[p])[1:]
  assert (
    len(others) == 2 and mask_PGT[p, g, :length].all() and not mask_PGT[p, others, :length].any()
  )
  assert (tokens_PGT[p, others, :length] == tokens_PGT[p, g, :length]).all()


@pytest.mark.slow
def test_a_step_has_something_to_learn_from_while_one_branch_is_in_the_loss(tmp_path, monkeypatch):
  """With mask_truncated, the first branch may be cut off, which is the longest, and others not."""
  config = with_section(config_of(tmp_path, "forks"), "environment", branches=3)
  config = with_section(config, "algo", mask_truncated=True)
  looked_at, why = [], Collector._why_no_tokens

  def first_branches_are_cut_off(self, completions):
    stopped_by_PG = np.array(completions.stopped_by_PG)
    stopped_by_PG[:, :G], stopped_by_PG[:, G:] = -1, 0
    completions = completions.replace(stopped_by_PG=stopped_by_PG)
    looked_at.append(why(self, completions))
    return looked_at[-1]

  monkeypatch.setattr(Collector, "_why_no_tokens", first_branches_are_cut_off)
  Collected(config)
  assert looked_at == [""]


@pytest.mark.slow
def test_branches_go_through_dynamic_sampling_minibatches_and_several_updates(tmp_path):
  config = with_section(config_of(tmp_path, "forks"), "environment", branches=2)
  algo = dict(dynamic_sampling=True, max_resample_rounds=1, minibatches=2, updates_per_batch=2)
  rows, metrics = first_step(with_section(config, "algo", **algo), tmp_path / "run")
  assert len(rows) == P * G and metrics["sampler/logprob_gap_max"] < 1e-4
  assert metrics["dynamic_sampling/drawn"] >= P and any(row["branches"] for row in rows)


@pytest.mark.parametrize(
  "section, changes",
  [("algo", {"advantage": "process"}), ("algo", {"kl_in": "reward", "kl_coef": 0.1})],
)
def test_branches_need_an_advantage_of_whole_completions(section, changes, tmp_path):
  config = with_section(config_of(tmp_path, "forks"), "environment", branches=2)
  with pytest.raises(ConfigError, match="environment.branches is 2: all branches"):
    small_run(with_section(config, section, **changes))


def test_branches_without_a_harness_are_refused():
  with pytest.raises(ConfigError, match="environment.branches is 2: only the calls"):
    small_run(with_section(small_config(), "environment", branches=2))


@pytest.mark.slow
def test_rewards_rise(tmp_path):
  config = config_of(tmp_path, "sevens")
  run = small_run(with_section(config, "optimizer", learning_rate=3e-2))
  scorers = Scorers(run)
  try:
    step, store, _ = grpo_step(run, tmp_path, Collector(run, scorers))
    state, _, _ = store.restore_or_init()
    rewards = []
    for index in range(20):
      state, metrics, _, _ = step(state, index)
      rewards.append(metrics["reward"])
  finally:
    scorers.close()
  assert np.mean(rewards[-3:]) > 0.5 > 0.2 > np.mean(rewards[:3])


@pytest.mark.slow
def test_a_harness_that_raises_ends_the_run(tmp_path):
  with pytest.raises(RunFailed, match="the harness raised ValueError: no game .*harness.py line"):
    first_step(config_of(tmp_path, "raises"), tmp_path / "run")


def outcome_of(folder, name, **example):
  """What a harness gives for an example, in this process."""
  (folder / "harness.py").write_text(HARNESS)
  request = {"example": example, "base_url": "", "api_key": "", "model": ""}
  return Players(f"{folder}/harness.py:{name}", None)([request])[0]


def test_a_harness_that_exits_is_one_that_raises(tmp_path):
  assert re.match(r"raised SystemExit: 0 \(.*py line", outcome_of(tmp_path, "exits")["error"])


def test_a_harness_that_exits_in_a_task_costs_its_completion_alone(tmp_path):
  (tmp_path / "harness.py").write_text(HARNESS)
  requests = [{"example": {"exits": i == 1}} for i in range(3)]
  requests = [one | {"base_url": "", "api_key": "", "model": ""} for one in requests]
  first, second, third = Players(f"{tmp_path}/harness.py:exits_in_task", None)(requests)
  assert re.match(r"raised SystemExit: 0 \(.*py line", second["error"])
  assert first == third == {"reward": 1.0, "columns": {}, "metrics": {}}


@pytest.mark.parametrize("pays", ["1", "True", "np.float16(1)", "np.array(1.0)"])
def test_a_harness_may_pay_any_number(pays, tmp_path):
  assert outcome_of(tmp_path, "pays", pays=pays)["reward"] == 1.0
  assert outcome_of(tmp_path, "pays", pays="None")["reward"] is None


@pytest.mark.parametrize("pays", ["np.nan", "-np.inf", "'1'", "[1]", "1j", "10**400"])
def test_a_harness_that_pays_no_number_is_named(pays, tmp_path):
  error = outcome_of(tmp_path, "pays", pays=pays)["error"]
  assert error.startswith("returned the reward ") and error.endswith("(pays)")


def test_only_the_limit_of_the_run_is_no_error_of_the_harness(tmp_path):
  found = outcome_of(tmp_path, "asks_others", says="at most 4096 tokens")
  assert found["error"].startswith("raised ValueError: at most 4096 tokens")
  says = f"prompt 0 has 9 tokens ({LIMIT})"
  assert outcome_of(tmp_path, "asks_others", says=says)["reward"] is None


def test_a_harness_may_return_columns_and_metrics(tmp_path):
  pays = "{'reward': 1, 'metrics': {'tries': np.int32(2), 'late': None}, 'steps': [1, 2]}"
  found = outcome_of(tmp_path, "pays", pays=pays)
  assert found == {"reward": 1.0, "columns": {"steps": [1, 2]}, "metrics": {"tries": 2.0}}


@pytest.mark.parametrize(
  "pays, words",
  [
    ("{}", "one of them must be reward"),
    ("{'reward': 1, 2: 3}", "the keys of a dict must be texts"),
    ("{'reward': 1, 'turns': 3}", "the column turns, which reward functions have already"),
    ("{'reward': 1, 'x': object()}", "the columns .*JSON cannot represent"),
    ("{'reward': 1, 'metrics': 3}", "metrics=3: give a dict"),
    ("{'reward': 1, 'metrics': {'x': 'a'}}", "the metric x='a': give a finite number"),
    ("{'reward': 1, 'metrics': {'lost_tokens': 1}}", "the metric lost_tokens, .*: rename it"),
  ],
)
def test_a_dict_of_a_harness_that_cannot_be_read_is_named(pays, words, tmp_path):
  error = outcome_of(tmp_path, "pays", pays=pays)["error"]
  assert re.match(f"returned .*{words}.*\\(pays\\)$", error) and "\n" not in error


@pytest.mark.slow
def test_a_harness_that_fails_before_it_asks_costs_its_completion_alone(tmp_path):
  config = config_of(tmp_path, "some", reward={"on_error": "none"})
  rows, metrics = first_step(config, tmp_path / "run")
  assert metrics["environment/errors"] == P * (G // 2)
  lengths = [(row["length"] == 0, row["reward"] is None) for row in rows]
  assert lengths == [(g % 2 == 1, g % 2 == 1) for _ in range(P) for g in range(G)]


@pytest.mark.slow
@pytest.mark.parametrize(
  "name",
  ["silent", "raises"],
)
def test_a_harness_that_asks_nothing_ends_the_run(name, tmp_path):
  config = config_of(tmp_path, name, reward={"on_error": "none"})
  with pytest.raises(RunFailed, match="no call of the harness can be learned from"):
    first_step(config, tmp_path / "run")


@pytest.mark.parametrize(
  "name, words",
  [
    ("not_async", "is no async function"),
    ("wants_more", "cannot be called .*board"),
    ("absent", "defines no function"),
  ],
)
def test_a_function_that_is_no_harness_is_refused(name, words, tmp_path):
  run = small_run(config_of(tmp_path, name))
  with pytest.raises(ConfigError, match=words) as caught:
    Collector(run, Scorers(run))
  assert "\n" not in str(caught.value)


def test_filters_are_refused(tmp_path):
  run = small_run(config_of(tmp_path, "twice", sampling={"top_k": 5}))
  with pytest.raises(ConfigError, match=r"environment.harness: .* without filters"):
    Collector(run, Scorers(run))


def test_stop_texts_are_refused(tmp_path):
  run = small_run(config_of(tmp_path, "twice", sampling={"stop": ("7",)}))
  with pytest.raises(ConfigError, match=r"environment.harness: .* set sampling.stop=\(\)"):
    Collector(run, Scorers(run))


def test_a_run_goes_on_if_later_completions_ask_nothing(tmp_path):
  """Dynamic sampling may play a few examples alone, and their harness may fail."""
  harness = Harness(small_run(config_of(tmp_path, "some")), Players, stops_on_error=False)

  def warn(*turns):
    harness._warn(np.array([[Conversation(turns), None]], object)[:, :1], [])

  with pytest.raises(RunFailed, match="no call of the harness can be learned from"):
    warn()
  warn(Turn(POLICY, "7", 0, 1))
  warn()


def test_a_harness_and_an_environment_are_refused(tmp_path):
  config = with_section(config_of(tmp_path, "twice"), "environment", name="retry")
  with pytest.raises(ConfigError, match="environment.harness is .*leave it empty"):
    small_run(config)


def trace(prompt, tokens, finish="stop"):
  return Trace(prompt, tokens, [-0.5] * len(tokens), 1, finish)


CALLS = [
  trace([1, 2], [3, 4]),
  trace([1, 9], [9, 9, 9, 9, 9, 9]),  # of another agent
  trace([1, 2, 3, 4, 5], [6]),
  trace([1, 2, 3], [7, 7, 7]),  # begins in the middle of the first answer
  trace([1, 2, 3, 4, 5, 6, 8], [0], "length"),
  trace([1, 2, 3, 4, 9], [8]),
]


def test_the_branch_with_most_of_the_policy_comes_first():
  (branch,), left_out = branches_of(CALLS, 1)
  assert branch.prompt == (1, 2) and branch.is_cut and left_out == 3
  row = branch.after(2, 10)
  assert row.tokens == (3, 4, 5, 6, 8, 0) and row.sampled == (True, True, False, True, False, True)
  assert row.logprobs == (-0.5, -0.5, 0, -0.5, 0, -0.5)
  (short,), _ = branches_of(CALLS[:3], 1)
  assert short.after(2, 3).tokens == (3, 4, 5) and short.after(2, 3).is_cut and not short.is_cut
  assert [short.after(2, most).next_call for most in (1, 3, 4)] == [2, 2, -1]
  (nothing,), left_out = branches_of([], 2)
  assert nothing.tokens == () and left_out == 0


def test_a_reply_of_a_tool_keeps_its_role_if_the_answer_to_it_is_cut_off():
  call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": {}}}
  asked = [{"role": "user", "content": "1+1?"}]
  replied = [
    *asked,
    {"role": "assistant", "content": "", "tool_calls": [call]},
    {"role": "tool", "tool_call_id": "a", "content": "error: full"},
  ]
  traces = [
    trace([1], [2, 3])._replace(messages=asked, calls=(call,)),
    trace([1, 2, 3, 4, 5], [6])._replace(messages=replied),
  ]
  (branch,), _ = branches_of(traces, 1)
  harness = SimpleNamespace(_run=SimpleNamespace(tokenizer=SimpleNamespace(decode=str)))
  for most in (5, 4, 3):  # the answer is there, is cut off, is cut off with a part of the reply
    turns = Harness._turns(harness, branch.after(1, most), traces)
    assert [turn.role for turn in turns] == [POLICY, "tool", POLICY][: 3 if most == 5 else 2]
    assert turns[1].text == "error: full" and turns[1].fields["name"] == "add"


def test_further_branches_learn_what_those_before_them_lack():
  branches, left_out = branches_of(CALLS, 5)
  assert shared_prompt(branches[:1], 10) == (1, 2) and shared_prompt(branches, 10) == (1,)
  assert shared_prompt(branches[2:3], 2) == (1, 2) and shared_prompt([Branch()], 2) == ()
  assert [branch.tokens for branch in branches[1:]] == [
    (1, 9, 9, 9, 9, 9, 9, 9),  # another agent has a prompt of its own
    (1, 2, 3, 7, 7, 7),
    (1, 2, 3, 4, 9, 8),
  ]
  assert [branch.sampled[2:] for branch in branches[2:]] == [
    (False, True, True, True),  # the 3 was read there, as part of a prompt
    (False, False, False, True),
  ]
  assert left_out == 0
  rows = as_completions({(0, 1): branches[3].after(2, 10)}, (1, 2), 5)
  assert rows.tokens_PGT.tolist() == [[[0] * 5, [3, 4, 9, 8, 0]]]
  assert rows.logprobs_PGT.tolist() == [[[0] * 5, [0, 0, 0, -0.5, 0]]]
  assert rows.lengths_PG.tolist() == [[0, 4]] and rows.stopped_by_PG.tolist() == [[-1, 8]]


def test_a_recorder_knows_which_answer_a_conversation_goes_on_from():
  recorder = Recorder()
  x, first = recorder.named("x"), [{"role": "user", "content": "a"}]
  recorder.remember_prompt(x, first, None, [1])
  recorder.add(x, Trace([1], [2], [0.0], 1, "stop", said="b"))
  answered = [*first, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
  found, after = recorder.earlier(x, answered, None)
  assert found.tokens == [2] and after == answered[2:] and found.messages == first
  assert recorder.earlier(recorder.named("y"), answered, None) is None
  assert recorder.earlier(x, answered, [{"type": "function"}]) is None  # which the prompt shows
  assert recorder.earlier(x, answered[:2], None) is None  # nothing follows the answer
  changed = [*first, {"role": "assistant", "content": "B"}, {"role": "user", "content": "c"}]
  assert recorder.earlier(x, changed, None) is None
  assert recorder.take(x) == [found] and recorder.take(x) == []


def test_draws_depend_on_the_name_and_on_how_often_it_asked():
  recorder = Recorder()
  recorder.begin(RowSettings(0.7), "seed")
  asked = RowSettings(2.0, top_k=3, max_tokens=5)
  draws = [recorder.draws(recorder.named("x"), asked) for _ in range(2)]
  assert [settings for settings, *_ in draws] == [RowSettings(0.7, max_tokens=5)] * 2
  assert [number for *_, number in draws] == [0, 1]
  assert draws[0][1] != draws[1][1] != recorder.draws(recorder.named("y"), RowSettings())[1]
  recorder.begin(RowSettings(0.7), "seed")  # the numbers do not depend on earlier batches
  assert recorder.draws(recorder.named("x"), RowSettings())[1] == draws[0][1] == 1718872191


def test_calls_that_end_in_a_later_batch_are_not_recorded():
  recorder = Recorder()
  recorder.begin(RowSettings(), "seed")
  early = recorder.named("0/0")
  recorder.begin(RowSettings(), "another")
  late = recorder.named("0/0")
  assert recorder.is_current(late) and not recorder.is_current(early)
  number = recorder.draws(early, RowSettings())[1]
  assert recorder.draws(late, RowSettings())[1:] == (number, 0)  # the early call does not count
  recorder.add(early, trace([1], [2]))
  recorder.add(late, trace([1], [3]))
  assert [one.tokens for one in recorder.take(late)] == [[3]] and recorder.take(early) == []
