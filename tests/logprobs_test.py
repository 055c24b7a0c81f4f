"""Log-probs of the endpoint: alternatives to tokens, those of prompts, and a bias on logits."""

import dataclasses
import functools
import json
import math
import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest

from grpo_jax import model
from grpo_jax.config import Mesh
from grpo_jax.parallel.mesh import make_mesh
from grpo_jax.parallel.sharding import model_shardings, param_specs
from grpo_jax.sampler.logits import RowSettings, draws_per_token, likeliest, sample_token
from grpo_jax.serving import requests
from grpo_jax.serving.completions import completion_request
from grpo_jax.serving.engine import Job
from grpo_jax.serving.traces import Recorder
from grpo_jax.serving.writer import AnswerWriter
from tests import serving_parts
from tests.serving_parts import Scripted, serving

IDS = {"return_token_ids": True}
MESSAGES = [{"role": "user", "content": "How many pens?"}]
LIMITS = requests.Limits("m", 10**6, serving_parts.PROMPT_TOKENS, serving_parts.TOKENS, 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return serving_parts.write_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def policy(folder):
  return serving_parts.open_policy(folder)


@pytest.fixture(scope="module")
def engine(policy):
  return serving_parts.make_engine(*policy[:2], rows=4, tokens=20)


@pytest.fixture(scope="module")
def address(policy, engine):
  config, _, tokens = policy
  with serving(engine, tokens, config.vocab_size) as (_, address):
    yield address


@pytest.fixture(scope="module")
def client(address):
  with openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0) as client:
    yield client


def log_softmax_of_model(policy, ids, temperature=1.0):
  """The log-probs [len(ids), V] of the token after each."""
  config, params, _ = policy
  logits, _ = model.forward(params, config, jnp.array([ids]), jnp.arange(len(ids))[None])
  return np.array(jax.nn.log_softmax(logits[0] / temperature))


def test_the_likeliest_by_hand():
  logits_BV = jnp.log(jnp.array([[1.0, 4.0, 2.0, 1.0], [1.0, 1.0, 8.0, 6.0]]))
  tokens_BA, logprobs_BA = likeliest(logits_BV, jnp.array([1.0, 0.5]), 2)
  assert tokens_BA.tolist() == [[1, 2], [2, 3]]
  # At temperature 1/2, weights are squared: 64 and 36 of 102.
  np.testing.assert_allclose(np.exp(logprobs_BA), [[4 / 8, 2 / 8], [64 / 102, 36 / 102]], rtol=1e-6)
  greedy = likeliest(logits_BV, jnp.zeros(2), 1)
  np.testing.assert_allclose(np.exp(greedy[1]), [[4 / 8], [8 / 16]], rtol=1e-6)


def test_a_bias_is_added_before_the_temperature_and_not_to_log_probs():
  """Weights 1 and 1, with log 3 added to the second, at temperature 1/2: it is drawn by 9 / 10."""
  draws = 20_000
  logits_BV = jnp.zeros((draws, 2))
  bias_BV = jnp.broadcast_to(jnp.array([0.0, jnp.log(3.0)]), (draws, 2))
  uniforms_BN = jax.random.uniform(jax.random.key(0), (draws, draws_per_token(2)))
  settings = RowSettings(temperature=jnp.full(draws, 0.5))
  drawn_B, logprob_B, behavior_B = sample_token(logits_BV, uniforms_BN, settings, bias_BV=bias_BV)
  assert abs(drawn_B.mean() - 0.9) < 0.01
  np.testing.assert_allclose(logprob_B, np.log(0.5), rtol=1e-6)
  np.testing.assert_allclose(behavior_B, np.log(np.where(drawn_B == 1, 0.9, 0.1)), rtol=1e-5)
  greedy = RowSettings(temperature=jnp.zeros(draws))
  assert sample_token(logits_BV, uniforms_BN, greedy, bias_BV=bias_BV)[0].all()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_alternatives_are_the_likeliest_of_the_model(temperature, client, policy):
  made = client.chat.completions.create(
    model="m", messages=MESSAGES, max_tokens=6, seed=2, temperature=temperature,
    logprobs=True, top_logprobs=20, extra_body=IDS,
  ).choices[0]  # fmt: skip
  ids = made.prompt_token_ids + made.token_ids
  expected = log_softmax_of_model(policy, ids, temperature or 1.0)[len(made.prompt_token_ids) - 1 :]
  decode = policy[2].decode
  assert len(made.logprobs.content) == len(made.token_ids)
  for one, token, logprobs_V in zip(made.logprobs.content, made.token_ids, expected):
    assert abs(one.logprob - logprobs_V[token]) < 1e-3
    best = np.argsort(-logprobs_V, kind="stable")[:20]
    found = [(other.token, other.logprob) for other in one.top_logprobs]
    np.testing.assert_allclose([value for _, value in found], logprobs_V[best], atol=1e-3)
    assert [text for text, _ in found] == [decode([int(i)]) for i in best]


@pytest.mark.slow
def test_alternatives_of_completions_and_of_streams(client):
  options = dict(model="m", prompt=["Ann has", "She"], max_tokens=9, seed=3, logprobs=3)
  whole = client.completions.create(**options)
  pieces = list(client.completions.create(stream=True, **options))
  for choice in whole.choices:
    seen = choice.logprobs
    assert max(map(len, seen.top_logprobs)) == 4  # with the token that was drawn
    for text, logprob, best in zip(seen.tokens, seen.token_logprobs, seen.top_logprobs):
      assert best[text] >= logprob  # several tokens may have one text: the likeliest counts
    own = [one for piece in pieces for one in piece.choices if one.index == choice.index]
    streamed = [best for one in own for best in one.logprobs.top_logprobs]
    assert [best.keys() for best in streamed] == [best.keys() for best in seen.top_logprobs]
    for ours, theirs in zip(streamed, seen.top_logprobs):
      # Other rows may have been computed beside them, which some processors round otherwise.
      assert ours == pytest.approx(theirs, abs=1e-5)
  drawn = client.completions.create(**(options | {"logprobs": 0})).choices
  assert [one.text for one in drawn] == [one.text for one in whole.choices]
  assert {one.logprobs.top_logprobs for one in drawn} == {None}


@pytest.mark.slow
def test_log_probs_of_a_prompt_are_those_of_the_model(client, policy):
  ids = [*range(30, 62)]
  logprobs_SV = log_softmax_of_model(policy, ids)
  made = client.completions.create(
    model="m", prompt=[ids, ids[:9], ids[:1]], max_tokens=0, temperature=0, echo=True, logprobs=5
  )
  assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (42, 0)
  assert made.weights_version == 3
  for choice, count in zip(made.choices, (32, 9, 1)):
    seen = choice.logprobs
    assert choice.text == policy[2].decode(ids[:count]) and choice.finish_reason == "length"
    assert seen.token_logprobs[0] is seen.top_logprobs[0] is None
    expected = logprobs_SV[np.arange(count - 1), ids[1:count]]
    np.testing.assert_allclose(seen.token_logprobs[1:], expected, rtol=1e-5, atol=1e-4)
    best = [max(one.values()) for one in seen.top_logprobs[1:]]
    np.testing.assert_allclose(best, logprobs_SV[: count - 1].max(-1), atol=1e-4)
    assert len(seen.tokens) == len(seen.text_offset) == len(seen.top_logprobs) == count


def test_what_was_drawn_has_the_same_log_probs_as_a_prompt(client):
  options = dict(model="m", echo=True, logprobs=1, seed=4, extra_body=IDS)
  (drawn,) = client.completions.create(prompt="Ann has", max_tokens=20, **options).choices
  ids = drawn.prompt_token_ids + drawn.token_ids
  assert len(drawn.logprobs.tokens) == len(ids) and drawn.text.startswith("Ann has")
  (again,) = client.completions.create(prompt=ids, max_tokens=1, **options).choices
  seen, more = drawn.logprobs.token_logprobs, again.logprobs.token_logprobs
  np.testing.assert_allclose(seen[1:], more[1 : len(ids)], atol=1e-4)
  assert len(more) == len(ids) + 1 and again.text.startswith(drawn.text)
  pieces = [*client.completions.create(prompt="Ann has", max_tokens=20, stream=True, **options)]
  offsets = sum((one.choices[0].logprobs.text_offset for one in pieces), [])
  assert offsets == drawn.logprobs.text_offset
  assert "".join(one.choices[0].text for one in pieces) == drawn.text


def test_prompts_that_are_scored_and_others_share_the_engine(client):
  """A scored prompt is neither copied nor continued, and one that is not may be copied from it."""
  options = dict(model="m", prompt=[[*range(40, 70)]] * 3, seed=1, max_tokens=5, extra_body=IDS)
  alone = client.completions.create(**options).choices
  scored = client.completions.create(echo=True, logprobs=0, **options).choices
  assert [one.token_ids for one in scored] == [one.token_ids for one in alone]
  seen = [one.logprobs.token_logprobs[:30] for one in scored]
  assert seen[0] == seen[1] == seen[2]
  after = client.completions.create(**options).choices
  assert [one.token_ids for one in after] == [one.token_ids for one in alone]


@pytest.mark.slow
def test_only_those_who_ask_have_other_programs(client, engine, monkeypatch):
  programs, chunk, seen = engine._decoder._device.programs, engine._decoder.chunk, []

  def told(params, taken_R, longest, leaves_early, extras):
    seen.append(extras)
    return chunk(params, taken_R, longest, leaves_early, extras)

  monkeypatch.setattr(engine._decoder, "chunk", told)
  plain = dict(model="m", prompt="Ann has", max_tokens=9, seed=1, extra_body=IDS)
  asks = plain | {"logprobs": 2, "logit_bias": {"5": 1.0}}
  before = client.completions.create(**(plain | {"logprobs": 0})).choices[0].token_ids
  assert seen and not any(seen)
  client.completions.create(**asks)
  assert seen[-1].alternatives == 20 and seen[-1].bias_RN.any()
  compiled = programs.chunk.jitted._cache_size()
  seen.clear()
  assert client.completions.create(**plain).choices[0].token_ids == before
  assert seen and not any(seen) and programs.chunk.jitted._cache_size() == compiled


@pytest.mark.slow
def test_a_mesh_returns_the_same():
  config = model.ModelConfig(
    vocab_size=96, embed_dim=16, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=32
  )
  params = jax.jit(model.init, static_argnums=1)(jax.random.key(0), config)
  found = []
  for shape in ((1, 1, 1, 1), (2, 1, 2, 1)):
    mesh = make_mesh(Mesh(*shape), jax.devices()[: math.prod(shape)])
    sharded = dataclasses.replace(config, **model_shardings(config, mesh))
    placed = jax.device_put(params, param_specs(params, mesh))
    engine = serving_parts.make_engine(sharded, placed, rows=4, tokens=9)
    heard = [Heard() for _ in range(5)]
    for i, one in enumerate(heard):
      asks = dict(alternatives=3, bias={7: 2.0, 90: -100.0}, is_scored=i % 2 == 0)
      settings = RowSettings(1.0, max_tokens=3 * i)
      engine.submit([Job((5, 6, 7, 30 + i), i, settings, one, None, None, **asks)])
    found.append([one.whole() for one in heard])
    engine.close()
  alone, on_mesh = found
  for one, other in zip(alone, on_mesh):
    assert one.keys() == other.keys()
    for key in one:
      np.testing.assert_allclose(one[key], other[key], atol=1e-4, err_msg=key)


class Heard:
  """Hears what an engine writes for a job."""

  def __init__(self):
    self.parts, self.is_ended = [], threading.Event()

  def __call__(self, part):
    self.parts.append(part)
    if part.finish:
      self.is_ended.set()

  def whole(self):
    assert self.is_ended.wait(60)
    scores = self.parts[0].scores
    seen = {
      "tokens": sum((one.tokens for one in self.parts), []),
      "alternatives": sum((list(one.alternatives) for one in self.parts), []),
    }
    return seen if scores is None else {**seen, **scores._asdict()}


@pytest.mark.slow
def test_a_bias_over_http(client, policy):
  ask = functools.partial(client.completions.create, model="m", prompt="Ann has", seed=1)
  free = ask(max_tokens=8, temperature=0, logprobs=0, extra_body=IDS).choices[0]
  first = free.token_ids[0]
  never = ask(max_tokens=8, temperature=0, logit_bias={str(first): -100}, extra_body=IDS)
  assert first not in never.choices[0].token_ids
  always = ask(max_tokens=8, logit_bias={"77": 100}, logprobs=0, extra_body=IDS).choices[0]
  assert always.token_ids == [77] * 8
  ids = always.prompt_token_ids + always.token_ids
  expected = log_softmax_of_model(policy, ids)[len(always.prompt_token_ids) - 1 : -1, 77]
  np.testing.assert_allclose(always.logprobs.token_logprobs, expected, atol=1e-3)


@pytest.mark.slow
def test_special_tokens_are_shown_but_for_the_one_that_ends(client, policy):
  tokens = policy[2]
  (mark,) = tokens.encode("<|im_start|>")
  for token, skips, text in (
    (mark, True, ""),
    (mark, False, "<|im_start|>" * 3),
    (tokens.stop_ids[0], False, ""),
  ):
    options = dict(model="m", prompt="a", max_tokens=3, logit_bias={str(token): 100})
    options["extra_body"] = {"skip_special_tokens": skips}
    assert client.completions.create(**options).choices[0].text == text
    stream = client.completions.create(stream=True, **options)
    assert "".join(piece.choices[0].text for piece in stream) == text


def test_a_run_that_learns_refuses_what_it_cannot_learn_from(policy):
  writer = AnswerWriter(Scripted(lambda _: []), policy[2], 1.0, Recorder())

  def read(**body):
    body = {"prompt": "a", **body}
    return writer.with_guides(completion_request(body, LIMITS, writer.texts("")))

  for param, wrong in {
    "logit_bias": {"logit_bias": {"5": 1}},
    "max_tokens": {"max_tokens": 0, "echo": True},
  }.items():
    with pytest.raises(requests.RequestError, match="a run learns") as caught:
      read(**wrong)
    assert caught.value.param == param
  assert read(logprobs=3).alternatives == 3


TASK = """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: "%s"}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
doc_to_choice: "{{choices}}"
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


@pytest.mark.slow
def test_lm_eval_reads_the_log_likelihoods(folder, policy, address, tmp_path):
  """The answers of a task over a local file are the likeliest choices by the model itself."""
  pytest.importorskip("lm_eval", reason="pip install 'lm_eval[api]' transformers")
  pytest.importorskip("transformers", reason="pip install 'lm_eval[api]' transformers")
  tokens, rows = policy[2], []
  choices = [" three pens", " 5 boxes", " has"]
  for i in range(8):
    question = f"Ann has {i} boxes. She"
    context, totals = tokens.encode(question), []
    for choice in choices:
      ids = tokens.encode(question + choice)
      logprobs_SV = log_softmax_of_model(policy, ids)
      places = np.arange(len(context) - 1, len(ids) - 1)
      totals.append(logprobs_SV[places, np.array(ids)[places + 1]].sum())
    likeliest_one = int(np.argmax(totals))
    answer = likeliest_one if i % 4 else (likeliest_one + 1) % 3
    rows.append({"question": question, "choices": choices, "answer": answer})
  (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  (tmp_path / "choices.yaml").write_text(TASK % (tmp_path / "rows.jsonl"))
  server = f"model=m,base_url={address}/v1/completions,num_concurrent=4,tokenizer={folder}"
  command = [sys.executable, "-m", "lm_eval", "--model=local-completions", "--tasks=choices"]
  command += [f"--include_path={tmp_path}", f"--output_path={tmp_path / 'out'}"]
  command += [f"--model_args={server}"]
  offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
  done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  (file,) = (tmp_path / "out").rglob("results*.json")
  assert json.loads(file.read_text())["results"]["choices"]["acc,none"] == 0.75
