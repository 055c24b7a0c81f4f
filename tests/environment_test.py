"""Rows in which an environment wrote tokens between those of the policy.

The learner reads the tokens of the environment and does not learn to write them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_run import G, P, S, grpo_step, small_config, small_run, with_reward, with_section

from grpo_jax.algo import metrics as metrics_lib
from grpo_jax.batches.collect import Collector
from grpo_jax.data.loader import PromptBatch
from grpo_jax.rollouts.complete import make_rollout, whole_batches
from grpo_jax.rollouts.rollout import Rollouts, texts_of
from grpo_jax.scoring.scorers import Scorers
from grpo_jax.timing import Clock
from grpo_jax.types import Completions

TURN = 3  # the most tokens of a turn of the policy
ANSWER = (5, 7)  # the tokens of the environment
T = TURN + len(ANSWER) + TURN

# Each character is a step, worth its place.
STEPS = """
def reward(completions, completion_ids, **_):
  seen.append((completions, completion_ids))
  return [[(i + 1, float(i)) for i in range(len(c))] or 0.0 for c in completions]

seen = []
"""


class TwoTurns:
  """The policy writes, the environment answers, and the policy writes again.

  A row that a stop id ends in its first turn gets no answer.
  """

  def __init__(self, run):
    self._first = make_rollout(run, G, max_tokens=TURN)
    self._second = make_rollout(run, 1, max_tokens=TURN)
    self._decode = run.tokenizer.decode

  def __call__(self, params, prompts, key, temperature):
    first = self._first(params, prompts, key, temperature).completions
    goes_on_PG = first.stopped_by_PG < 0
    asked_BS = np.zeros((P * G, S + TURN + len(ANSWER)), np.int32)
    lengths_B = np.ones(P * G, np.int32)  # a row that has ended is asked for nothing
    for row, (p, g) in enumerate(np.ndindex(P, G)):
      if goes_on_PG[p, g]:
        prompt = prompts.prompts_PS[p, : prompts.prompt_lengths_P[p]]
        asked = [*prompt, *first.tokens_PGT[p, g], *ANSWER]
        asked_BS[row, : len(asked)], lengths_B[row] = asked, len(asked)
    second_prompts = PromptBatch(prompts_PS=asked_BS, prompt_lengths_P=lengths_B)
    second_key = jax.random.fold_in(key, 1)
    second = self._second(params, second_prompts, second_key, temperature).completions
    completions = _joined(first, jax.tree.map(lambda x: x[:, 0], second), goes_on_PG)
    return Rollouts(completions=completions, texts_PG=texts_of(completions, self._decode))


def _joined(first, second_B, goes_on_PG):
  """The rows of both turns with the environment's answers between them."""
  start = TURN + len(ANSWER)
  tokens_PGT, sampled_PGT = np.zeros((P, G, T), np.int32), np.zeros((P, G, T), bool)
  logprobs_PGT, behavior_PGT = np.zeros((P, G, T), np.float32), np.zeros((P, G, T), np.float32)
  lengths_PG, stopped_by_PG = first.lengths_PG.copy(), first.stopped_by_PG.copy()
  tokens_PGT[..., :TURN] = first.tokens_PGT
  sampled_PGT[..., :TURN] = first.sampled_PGT
  logprobs_PGT[..., :TURN] = first.logprobs_PGT
  behavior_PGT[..., :TURN] = first.behavior_logprobs_PGT
  for row, (p, g) in enumerate(np.ndindex(P, G)):
    if goes_on_PG[p, g]:
      tokens_PGT[p, g, TURN:start] = ANSWER
      tokens_PGT[p, g, start:] = second_B.tokens_PGT[row]
      sampled_PGT[p, g, start:] = second_B.sampled_PGT[row]
      logprobs_PGT[p, g, start:] = second_B.logprobs_PGT[row]
      behavior_PGT[p, g, start:] = second_B.behavior_logprobs_PGT[row]
      lengths_PG[p, g] = start + second_B.lengths_PG[row]
      stopped_by_PG[p, g] = second_B.stopped_by_PG[row]
  return Completions(
    tokens_PGT=tokens_PGT,
    lengths_PG=lengths_PG,
    sampled_PGT=sampled_PGT,
    logprobs_PGT=logprobs_PGT,
    behavior_logprobs_PGT=behavior_PGT,
    stopped_by_PG=stopped_by_PG,
  )


class Small:
  """A run whose rows have two turns, with what it collects in its first step.

  Attributes:
    found: What was collected.
    is_sampled, is_answer: bool [P, G, T], where the policy wrote and where the environment did.
  """

  def __init__(self, folder, preset="process", **algo):
    config = with_section(small_config(preset, **algo), "sampling", max_tokens=T)
    self.run = small_run(with_reward(config, folder, STEPS))
    two_turns = TwoTurns(self.run)
    self.collector = Collector(self.run, Scorers(self.run))
    flow = self.collector.flow
    rollout = whole_batches(two_turns, self.run.tokenizer.decode)
    flow._player = rollout.player(flow._policy_that_draws, P)
    self.params = self.run.initial_params()
    host = self.collector.initial_host_state()
    self.found = self.collector(self.params, 0, host, Clock())
    tokens_PGT = np.asarray(self.found.batch.completions_PGT)
    self.is_sampled = np.asarray(self.found.batch.mask_PGT) > 0
    goes_on_PG = (tokens_PGT[..., TURN : TURN + len(ANSWER)] == ANSWER).all(-1)
    self.is_answer = np.zeros((P, G, T), bool)
    self.is_answer[goes_on_PG, TURN : TURN + len(ANSWER)] = True
    assert goes_on_PG.sum() > P  # so that there is something to test

  def logprobs(self, batch):
    return np.asarray(self.run.programs.logprobs(self.params, batch))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
  return Small(tmp_path_factory.mktemp("environment"))


def test_the_answers_are_in_the_completions_and_neither_in_the_loss_nor_in_the_texts(small):
  found, decode = small.found, small.run.tokenizer.decode
  tokens_PGT = np.asarray(found.batch.completions_PGT)
  assert tokens_PGT.shape == (P, G, T)
  assert (tokens_PGT[small.is_answer].reshape(-1, 2) == ANSWER).all()
  assert not (small.is_sampled & small.is_answer).any()
  assert (small.is_sampled & (np.arange(T) >= TURN + len(ANSWER))).any()
  (function,) = small.collector._score._functions
  texts, ids = function.__globals__["seen"][0]
  for row, (p, g) in enumerate(np.ndindex(P, G)):
    sampled = tokens_PGT[p, g][small.is_sampled[p, g]].tolist()
    assert ids[row] == sampled
    assert texts[row] == found.rows[row]["completion"] == decode(sampled)
    length = (small.is_sampled | small.is_answer)[p, g].sum()
    assert found.rows[row]["length"] == length
  count = small.is_sampled.sum()
  assert found.metrics["completions/tokens"] == count
  assert found.host["num_tokens"] == count + found.metrics["prompts/tokens"]
  # Lengths count what the policy sampled, as in TRL.
  assert found.metrics["completions/mean_length"] == count / (P * G)


def test_later_tokens_see_the_answers(small):
  """The sampler read the answers in the second turn's prompt: the learner finds its log-probs."""
  batch = small.found.batch
  logprobs_PGT, sampled_PGT = small.logprobs(batch), np.asarray(batch.sampler_logprobs_PGT)
  np.testing.assert_allclose(
    logprobs_PGT[small.is_sampled], sampled_PGT[small.is_sampled], atol=1e-4
  )
  assert (logprobs_PGT[~small.is_sampled] == 0).all()
  # Other answers change the log-probs of the tokens after them, and of no other.
  tokens_PGT = jnp.where(small.is_answer, 9, batch.completions_PGT)
  changed_PGT = np.abs(small.logprobs(batch.replace(completions_PGT=tokens_PGT)) - logprobs_PGT)
  is_later = small.is_sampled & (np.arange(T) >= TURN + len(ANSWER))
  assert (changed_PGT[~is_later] < 1e-5).all()
  assert (changed_PGT[is_later] > 1e-3).all()


def test_rewards_of_steps_and_advantages_land_on_sampled_tokens(small):
  """By hand: the i-th character is the i-th sampled token, and the last step ends the row."""
  rewards_PGT, ends_PGT = np.zeros((P, G, T)), np.zeros((P, G, T))
  lengths = np.array([row["length"] for row in small.found.rows]).reshape(P, G)
  for row, (p, g) in enumerate(np.ndindex(P, G)):
    text = small.found.rows[row]["completion"]
    tokens = np.asarray(small.found.batch.completions_PGT)[p, g]
    decode = small.run.tokenizer.decode
    writes = [t for t in np.flatnonzero(small.is_sampled[p, g]) if decode([int(tokens[t])])]
    assert len(writes) == len(text)
    for i in range(max(1, len(text))):
      t = lengths[p, g] - 1 if i >= len(text) - 1 else writes[i]
      rewards_PGT[p, g, t], ends_PGT[p, g, t] = i, 1
  found = small.found.rewards
  np.testing.assert_array_equal(found.step_rewards_PGT, rewards_PGT)
  np.testing.assert_array_equal(found.step_ends_PGT, ends_PGT)
  assert (ends_PGT * (np.arange(T) >= TURN + len(ANSWER))).sum() > P
  with_advantages = small.run.programs.with_advantages
  batch, metrics = with_advantages(small.found.batch, found, 0.0)
  advantages_PGT = np.asarray(batch.advantages_PGT)
  assert (advantages_PGT[~small.is_sampled] == 0).all()
  assert metrics["batch/tokens"] <= small.is_sampled.sum()
  for p in range(P):
    steps = rewards_PGT[p][ends_PGT[p] > 0]
    z_GT = (rewards_PGT[p] - steps.mean()) / (steps.std(ddof=1) + 1e-4) * ends_PGT[p]
    expected_GT = np.cumsum(z_GT[:, ::-1], 1)[:, ::-1] * small.is_sampled[p]
    np.testing.assert_allclose(advantages_PGT[p], expected_GT, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
  "algo",
  [
    pytest.param(dict(kl_coef=0.1), id="grpo"),
    pytest.param(
      dict(
        ratio="sequence",
        minibatches=2,
        old_logprobs="recomputed",
        correction="truncate",
        correction_level="sequence",
        correction_high=2.0,
        off_policy_threshold=0.5,
        kl="k1",
        kl_coef=0.1,
        kl_in="reward",
        entropy_coef=0.01,
      ),
      id="all at once",
    ),
  ],
)
def test_log_probs_at_the_answers_change_no_update(algo, tmp_path):
  """Nobody drew the tokens of the environment, so their log-probs may hold anything."""
  small = Small(tmp_path, "grpo", **algo)
  clean = small.found
  batch = clean.batch.replace(
    sampler_logprobs_PGT=jnp.where(small.is_answer, jnp.nan, clean.batch.sampler_logprobs_PGT),
    behavior_logprobs_PGT=jnp.where(small.is_answer, jnp.nan, clean.batch.behavior_logprobs_PGT),
  )
  if batch.old_logprobs_PGT is not None:
    batch = batch.replace(old_logprobs_PGT=batch.sampler_logprobs_PGT)
  ends = []
  for collected in (clean.batch, batch):
    programs = small.run.programs
    reference = jax.tree.map(lambda x: 1.1 * x, small.params)
    prepared = collected.replace(ref_logprobs_PGT=programs.logprobs(reference, collected))
    prepared, metrics = programs.with_advantages(prepared, clean.rewards, 0.1)
    state = programs.init_state(jax.tree.map(jnp.copy, small.params))
    state, measured = programs.update(state, None, reference, prepared)
    ends.append((state, metrics_lib.reduced(measured), jax.device_get(metrics)))
  jax.tree.map(np.testing.assert_array_equal, ends[1], ends[0])
  assert ends[0][1]["skipped_updates"] == 0 and ends[0][1]["grad_norm"] > 0
  assert ends[0][1]["kl"] != 0


def test_a_whole_step_reports_that_sampler_and_learner_agree(tmp_path):
  small = Small(tmp_path, "grpo")
  step, store, _ = grpo_step(small.run, tmp_path, small.collector)
  state, _, _ = store.restore_or_init()
  state, metrics, rows, _ = step(state, 0)
  assert metrics["sampler/logprob_gap_max"] < 1e-4 and metrics["skipped_updates"] == 0
  assert metrics["num_tokens"] == state.host["num_tokens"]
  assert metrics["completions/tokens"] < sum(row["length"] for row in rows)
  assert all(np.isfinite(value) for value in metrics.values())
