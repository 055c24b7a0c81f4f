"""A GRPO step as a whole: its updates, the state that it leaves, and what it reports."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_run import (
  G,
  P,
  S,
  T,
  batch_of,
  grpo_step,
  random_completions,
  small_config,
  small_run,
  with_reward,
  with_section,
)

from grpo_jax import learner
from grpo_jax.algo import metrics as metrics_lib
from grpo_jax.algo.checks import settings_idle_at_ratio_one
from grpo_jax.algo.settings import Algo
from grpo_jax.batches.collect import Collected, Collector
from grpo_jax.data import loader
from grpo_jax.learner.optimizer import make_optimizer
from grpo_jax.rollouts.complete import make_rollout
from grpo_jax.run.compiled import algo_of
from grpo_jax.scoring.scorers import Scorers
from grpo_jax.settings import RunFailed
from grpo_jax.storage.json_files import json_line
from grpo_jax.training.loop import run_steps
from grpo_jax.training.state import RunState, StateStore
from grpo_jax.types import Rewards

# A score that differs between nearly all completions.
CODES = "def reward(completions, **_):\n  return [sum(map(ord, c)) / 100 for c in completions]\n"


def random_rewards():
  scores_PGJ = np.random.default_rng(0).normal(size=(P, G, 1)).astype(np.float32)
  return Rewards(scores_PGJ=jnp.asarray(scores_PGJ), weights=(1.0,))


def collects(batch, rewards):
  """A collector that returns this batch and these rewards in every step."""

  def collector(params, index, host, clock):
    del params, index, clock
    metrics = {"completions/tokens": int(batch.mask_PGT.sum())}
    return Collected(batch=batch, rewards=rewards, rows=[{}] * P * G, metrics=metrics, host=host)

  return collector


def first_state(run, reference=None):
  train_state = run.programs.init_state(run.initial_params())
  return RunState(train=train_state, reference=reference, host={"num_tokens": np.int64(0)})


class Remembers(Collector):
  """A collector that remembers its batches."""

  def __init__(self, run):
    super().__init__(run, Scorers(run))
    self.batches = []

  def __call__(self, params, index, host, clock):
    collected = super().__call__(params, index, host, clock)
    self.batches.append(collected.batch)
    return collected


def assert_same(found, expected):
  jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("old", [pytest.param("sampler", marks=pytest.mark.slow), "recomputed"])
def test_several_updates_are_train_steps_one_after_the_other(old, tmp_path):
  """Two passes over two minibatches, by hand.

  The first ratio is 1 and the later ones are not. The old log-probs stay what they were.
  """
  algo = dict(minibatches=2, updates_per_batch=2, old_logprobs=old, kl_coef=0.0)
  # With momentum, but without the division of Adam, which enlarges errors of rounding.
  optimizer = dict(name="sgd", learning_rate=1.0)
  run = small_run(with_section(small_config(**algo), "optimizer", **optimizer))
  params = run.initial_params()
  completions = random_completions()
  batch = batch_of(run, completions)
  own_logprobs_PGT = run.programs.logprobs(params, batch)
  gap = 0.25 if old == "recomputed" else 0.0  # the sampler's error, which recomputing removes
  sampler_logprobs_PGT = own_logprobs_PGT + gap * batch.mask_PGT
  batch = batch_of(run, completions.replace(logprobs_PGT=sampler_logprobs_PGT))
  rewards = random_rewards()

  config = run.config
  optimizer = make_optimizer(config.optimizer, config.steps * 4)
  objective = learner.grpo(run.parameters.model, algo_of(config), config.learner)
  rule = learner.UpdateRule(objective, optimizer)
  update = jax.jit(lambda state, part: learner.train_step(state, None, None, part, rule))
  by_hand, _ = run.programs.with_advantages(batch, rewards, 0.0)
  parts = run.programs.minibatches(by_hand.replace(old_logprobs_PGT=own_logprobs_PGT))
  state, updates = learner.init_state(params, optimizer, config.algo), []
  for part in [*parts, *parts]:
    state, metrics = update(state, part)
    updates.append(metrics_lib.reduced(metrics))

  step, _, _ = grpo_step(run, tmp_path, collects(batch, rewards))
  found, metrics, _, _ = step(first_state(run), 0)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
    found.train.params,
    state.params,
  )
  assert int(found.train.step) == 4
  ratios = [values["ratio/max"] for values in updates]
  assert ratios[0] == pytest.approx(1, abs=1e-5) and ratios[3] > 1.001
  assert metrics["ratio/max"] == pytest.approx(max(ratios), rel=1e-4)
  mean_norm = np.mean([values["grad_norm"] for values in updates])
  assert metrics["grad_norm"] == pytest.approx(mean_norm, rel=1e-4)
  assert metrics["sampler/logprob_gap_max"] == pytest.approx(gap, abs=1e-5)
  assert metrics["skipped_updates"] == 0


@pytest.mark.slow
def test_an_update_without_a_token_changes_nothing_and_is_in_no_mean(tmp_path):
  """Of two minibatches, the first has no token in the loss: the update is that of the second."""
  algo = dict(minibatches=2, kl_coef=0.1, kl_target=1e-6, kl_horizon=100, entropy_target=9.0)
  run = small_run(small_config(**algo))
  reference = run.parameters.initial(jax.random.key(1))
  batch, rewards = batch_of(run), random_rewards()
  numbers_PGT = jnp.broadcast_to(jnp.arange(P, dtype=jnp.float32)[:, None, None], (P, G, T))
  first = run.programs.minibatches(batch.replace(mask_PGT=numbers_PGT))[0].mask_PGT[:, 0, 0]
  is_empty_P = jnp.isin(jnp.arange(P), first)
  mask_PGT = jnp.where(is_empty_P[:, None, None], 0, batch.mask_PGT)
  batch = batch.replace(mask_PGT=mask_PGT)

  prepared = batch.replace(ref_logprobs_PGT=run.programs.logprobs(reference, batch))
  prepared, _ = run.programs.with_advantages(prepared, rewards, 0.1)
  second = run.programs.minibatches(prepared)[1]
  alone, measured = run.programs.update(first_state(run).train, None, reference, second)
  expected = metrics_lib.reduced(measured)

  step, _, _ = grpo_step(run, tmp_path, collects(batch, rewards))
  found, metrics, _, _ = step(first_state(run, reference), 0)
  assert_same(found.train.replace(step=0), alone.replace(step=0))
  assert int(found.train.step) == 2 and int(alone.step) == 1
  assert metrics["skipped_updates"] == 0
  assert expected["kl"] > 1e-3 and expected["grad_norm"] > 0
  for name in ("loss", "kl", "entropy", "ratio/mean", "ratio/max", "grad_norm"):
    assert metrics[name] == pytest.approx(expected[name], rel=1e-6), name
  assert metrics["kl_coef"] == alone.coefs.kl > 0.1
  assert metrics["entropy_coef"] == np.float32(0.005)


@pytest.mark.parametrize("old_is_policy", [True, False])
def test_old_is_policy_alone_decides_whether_old_logprobs_are_computed(
  old_is_policy, tmp_path, monkeypatch
):
  """Also where it says something else than the number of updates, as an asynchronous run would."""
  several = 1 + old_is_policy
  config = small_config(kl_coef=0.0, old_logprobs="recomputed", minibatches=several)
  assert config.algo.old_is_policy != old_is_policy
  monkeypatch.setattr(Algo, "old_is_policy", property(lambda algo: old_is_policy))
  run = small_run(config)
  batch = batch_of(run)
  computed, updated = [], []

  def logprobs(params, batch):
    computed.append(batch)
    return jnp.full((P, G, T), -7.0)

  def update(state, base, reference, part):
    updated.append(part)
    return state, {}

  run.programs.logprobs, run.programs.update = logprobs, update
  step, _, _ = grpo_step(run, tmp_path, collects(batch, random_rewards()))
  step(first_state(run), 0)
  assert len(computed) == (not old_is_policy) and len(updated) == several
  for part in updated:
    if old_is_policy:
      assert part.old_logprobs_PGT is None
    else:
      assert (part.old_logprobs_PGT == -7).all()
  assert ("old_logprobs" in settings_idle_at_ratio_one(config.algo)) == old_is_policy


@pytest.mark.parametrize("minibatches", [1, 2, 4])
@pytest.mark.parametrize("updates_per_batch", [1, 3])
def test_old_is_the_policy_with_one_update_per_batch(minibatches, updates_per_batch):
  algo = Algo(minibatches=minibatches, updates_per_batch=updates_per_batch)
  assert algo.updates_per_step == minibatches * updates_per_batch
  assert algo.old_is_policy == (minibatches == updates_per_batch == 1)


@pytest.mark.slow
def test_the_temperature_follows_its_schedule_and_the_learner_follows_the_temperature(tmp_path):
  """Two steps from 1.5 to 0.5: in both, the learner's log-probs are those of the sampler."""
  config = with_section(
    dataclasses.replace(small_config(), steps=2),
    "sampling",
    temperature=1.5,
    temperature_schedule="linear",
    temperature_end=0.5,
  )
  run = small_run(with_reward(config, tmp_path, CODES))
  collector = Remembers(run)
  step, store, _ = grpo_step(run, tmp_path, collector)
  state, _, _ = store.restore_or_init()
  for index, temperature in enumerate((1.5, 0.5)):
    params = jax.tree.map(jnp.copy, state.train.params)
    state, metrics, _, _ = step(state, index)
    batch = collector.batches[index]
    assert metrics["sampling/temperature"] == temperature
    np.testing.assert_array_equal(batch.temperature_P, np.full(P, temperature, np.float32))
    is_token = np.asarray(batch.mask_PGT) > 0
    sampled = np.asarray(batch.sampler_logprobs_PGT)
    np.testing.assert_array_equal(batch.behavior_logprobs_PGT, sampled)
    learned = np.asarray(run.programs.logprobs(params, batch))
    np.testing.assert_allclose(learned[is_token], sampled[is_token], atol=1e-4)
    assert metrics["sampler/logprob_gap_max"] < 1e-4
    other = batch.replace(temperature_P=jnp.full(P, 1.0))
    gap = np.abs(np.asarray(run.programs.logprobs(params, other)) - sampled)
    assert gap[is_token].max() > 0.05


@pytest.mark.slow
def test_the_host_state_counts_sampled_tokens_and_survives_a_checkpoint(tmp_path):
  """Three steps, of which the last one is taken again from a checkpoint of the second.

  Rows of completions are returned in the steps that log them.
  """
  config = with_section(dataclasses.replace(small_config(), steps=3), "log", completions_every=2)
  run = small_run(with_reward(config, tmp_path, CODES))
  collector = Remembers(run)
  step, store, checkpoints = grpo_step(run, tmp_path, collector)
  state, done, restored = store.restore_or_init()
  assert (done, restored, state.host) == (0, False, {"num_tokens": 0})
  total, states = 0, []
  for index in range(3):
    state, metrics, rows, _ = step(state, index)
    assert metrics["completions/tokens"] == int(collector.batches[index].mask_PGT.sum()) > 0
    # A prompt counts once for each of its completions, as in TRL.
    total += metrics["completions/tokens"]
    total += G * int(collector.batches[index].prompt_lengths_P.sum())
    assert metrics["num_tokens"] == total == state.host["num_tokens"]
    assert state.host["num_tokens"].dtype == np.int64
    states.append(jax.tree.map(np.array, state))
    assert (rows is not None) == (index == 1)
    if rows is not None:
      assert len(rows) == P * G
      assert metrics["completions/tokens"] == sum(row["length"] for row in rows)
      store.save(index + 1, state)
      checkpoints.wait()
  step, store, _ = grpo_step(run, tmp_path, collector)
  state, done, restored = store.restore_or_init()
  assert (done, restored) == (2, True)
  assert state.host["num_tokens"].dtype == np.int64
  assert_same(state, states[1])
  state, metrics, _, _ = step(state, 2)
  assert metrics["num_tokens"] == total
  assert_same(state, states[2])


def replayed_batch(run, rows):
  """The batch of a step from its rows in completions/, as a reader of the files would make it."""

  def table(name, length, dtype):
    filled = np.zeros((P * G, length), dtype)
    for i, row in enumerate(rows):
      filled[i, : len(row[name])] = row[name]
    return filled.reshape(P, G, length)

  lengths_PG = np.array([len(row["completion_ids"]) for row in rows]).reshape(P, G)
  logprobs_PGT = table("logprobs", T, np.float32)
  mask_PGT = (np.arange(T) < lengths_PG[..., None]).astype(np.float32)
  advantages_PG1 = np.array([row["advantage"] for row in rows], np.float32).reshape(P, G, 1)
  batch = batch_of(run)
  return batch.replace(
    prompts_PS=jnp.asarray(table("prompt_ids", S, np.int32)[:, 0]),
    prompt_lengths_P=jnp.asarray([len(row["prompt_ids"]) for row in rows[::G]], jnp.int32),
    completions_PGT=jnp.asarray(table("completion_ids", T, np.int32)),
    mask_PGT=jnp.asarray(mask_PGT),
    sampler_logprobs_PGT=jnp.asarray(logprobs_PGT),
    behavior_logprobs_PGT=jnp.asarray(logprobs_PGT),
    advantages_PGT=jnp.asarray(mask_PGT * advantages_PG1),
  )


@pytest.mark.slow
def test_a_step_can_be_replayed_from_its_rows_of_completions(tmp_path):
  """The update from the rows is bit for bit that of the step. Their texts alone would not do.

  A random model samples <pad>, which no text holds.
  """
  run = small_run(with_reward(small_config(kl_coef=0.0), tmp_path, CODES))
  step, _, _ = grpo_step(run, tmp_path)
  state, _, rows, _ = step(first_state(run), 0)
  rows = [json.loads(json_line(row)) for row in rows]
  ids = [row["completion_ids"] for row in rows]
  assert ids != [run.tokenizer.encode(row["completion"]) for row in rows]
  assert any(0 in row for row in ids)

  replayed, _ = run.programs.update(first_state(run).train, None, None, replayed_batch(run, rows))
  assert_same(replayed, state.train)


def test_a_checkpoint_keeps_what_else_the_host_state_holds(tmp_path):
  """A key that is new since the checkpoint has its first value; one that is no longer known stays.

  A checkpoint from before there was host state restores the first host state.
  """
  run = small_run(small_config())
  _, store, checkpoints = grpo_step(run, tmp_path)
  state, _, _ = store.restore_or_init()
  curriculum = {"num_tokens": np.int64(2**40), "difficulty": np.array([0.5, 2.0])}
  store.save(1, state.replace(host=curriculum))
  checkpoints.wait()
  first = {"num_tokens": np.int64(0), "seen": np.zeros(3, np.int32)}
  found, done, _ = StateStore(run, tmp_path, checkpoints, first).restore_or_init()
  assert done == 1 and set(found.host) == {"num_tokens", "difficulty", "seen"}
  assert_same(found.host, curriculum | {"seen": first["seen"]})
  tree = {name: getattr(state.train, name) for name in ("step", "params", "opt_state", "coefs")}
  checkpoints.save(2, tree)
  checkpoints.wait()
  found, done, _ = StateStore(run, tmp_path, checkpoints, first).restore_or_init()
  assert done == 2
  assert_same(found.host, first)


@pytest.mark.slow
def test_num_tokens_counts_what_was_sampled_and_left_out(tmp_path):
  """Dynamic sampling of equal rewards uses all its rounds, and no token is in the loss."""
  source = "def reward(completions, **_):\n  return [1.0] * len(completions)\n"
  config = small_config(kl_coef=0.0, dynamic_sampling=True, max_resample_rounds=2)
  run = small_run(with_reward(config, tmp_path, source))
  step, store, _ = grpo_step(run, tmp_path)
  state, _, _ = store.restore_or_init()
  host = {"num_tokens": np.int64(1000)}
  state, metrics, rows, _ = step(state.replace(host=host), 0)
  assert metrics["dynamic_sampling/drawn"] == 3 * P and metrics["dynamic_sampling/kept"] == 0
  assert metrics["skipped_updates"] == 0 and metrics["batch/tokens"] == 0
  assert metrics["completions/tokens"] > sum(row["length"] for row in rows)
  counted = metrics["completions/tokens"] + metrics["prompts/tokens"]
  assert metrics["prompts/tokens"] > 2 * G * sum(len(row["prompt_ids"]) for row in rows[::G])
  assert metrics["num_tokens"] == 1000 + counted == state.host["num_tokens"]
  assert host == {"num_tokens": 1000}  # the state of before is as it was


@pytest.mark.slow
def test_remax_compares_with_the_greedy_completion(tmp_path):
  """The reward minus the advantage is one number for each prompt: its greedy completion's score."""
  run = small_run(with_reward(small_config("remax"), tmp_path, CODES))
  step, store, _ = grpo_step(run, tmp_path)
  state, _, _ = store.restore_or_init()
  all_prompts = run.prompts("train")
  prompts = loader.prompt_batch(all_prompts, loader.step_indices(0, 0, P, len(all_prompts)))
  greedy = make_rollout(run, 1, greedy=True)(state.train.params, prompts, jax.random.key(7))
  expected_P1 = np.asarray(Scorers(run).training(greedy, prompts).rewards.score_PG)
  _, _, rows, _ = step(state, 0)
  baselines = np.array([row["reward"] - row["advantage"] for row in rows]).reshape(P, G)
  np.testing.assert_allclose(baselines, np.tile(expected_P1, G), rtol=1e-5, atol=1e-5)
  assert len({row["reward"] for row in rows}) > 1


@pytest.mark.slow
@pytest.mark.parametrize("minibatches", [1, 2])
def test_what_is_rejected_is_as_if_it_was_not_there(minibatches, tmp_path):
  """An update with rejected tokens is the update of a batch without them.

  The sampler was wrong about the first token of some rows and about all of others.
  """
  algo = dict(minibatches=minibatches, old_logprobs="recomputed", entropy_coef=0.1)
  algo |= dict(aggregation="token_mean", correction="truncate", correction_high=2.0, kl_coef=0.0)
  rejecting = dict(reject_token=(0.1, 3.0), reject_geometric=(0.8, 1.3))
  run = small_run(small_config(**algo, **rejecting))
  batch, rewards = batch_of(run), random_rewards()
  own_PGT = np.asarray(run.programs.logprobs(run.initial_params(), batch))
  mask_PGT = np.array(batch.mask_PGT)
  wrong_PGT = np.zeros_like(mask_PGT)
  wrong_PGT[0, 0, 0], wrong_PGT[1, 1] = 2.0, 0.4  # log-weights
  lengths_PG = mask_PGT.sum(-1)
  sampled = dict(behavior_logprobs_PGT=own_PGT - wrong_PGT, sampler_logprobs_PGT=own_PGT)
  batch = batch.replace(**sampled)
  step, _, _ = grpo_step(run, tmp_path, collects(batch, rewards))
  found, metrics, _, _ = step(first_state(run), 0)

  kept_PGT = mask_PGT.copy()
  kept_PGT[0, 0, slice(None) if 2 / lengths_PG[0, 0] > np.log(1.3) else 0] = 0
  kept_PGT[1, 1] = 0
  is_lost_PGT = kept_PGT != mask_PGT
  assert metrics["rejection/tokens"] == pytest.approx(is_lost_PGT.sum() / mask_PGT.sum())
  assert metrics["rejection/sequences"] == pytest.approx(2 / (P * G))
  plain = small_run(small_config(**algo))
  prepared, _ = plain.programs.with_advantages(batch, rewards, 0.0)
  # The advantages are those of the groups as they were drawn.
  without = prepared.replace(mask_PGT=jnp.asarray(kept_PGT), old_logprobs_PGT=None)
  if minibatches > 1:
    without = without.replace(old_logprobs_PGT=own_PGT)
  parts = plain.programs.minibatches(without) if minibatches > 1 else [without]
  state = first_state(plain).train
  for part in parts:
    state, _ = plain.programs.update(state, None, None, part)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
    found.train.params,
    state.params,
  )


@pytest.mark.slow
def test_a_step_whose_tokens_are_all_rejected_says_so_and_moves_nothing(tmp_path):
  run = small_run(small_config(kl_coef=0.0, reject_product=(2.0, 3.0)))
  step, _, _ = grpo_step(run, tmp_path, collects(batch_of(run), random_rewards()))
  found, metrics, _, why = step(first_state(run), 0)
  assert metrics["rejection/tokens"] == 1 and why.startswith("all tokens were rejected")
  assert_same(found.train.params, first_state(run).train.params)


@pytest.mark.slow
def test_a_rejection_hides_neither_a_gap_nor_a_policy_of_nan(tmp_path):
  run = small_run(small_config(kl_coef=0.0, reject_product=(2.0, 3.0)))
  batch = batch_of(run)
  step, _, _ = grpo_step(run, tmp_path, collects(batch, random_rewards()))
  _, metrics, _, _ = step(first_state(run), 0)
  assert metrics["rejection/tokens"] == 1
  own_PGT = np.asarray(run.programs.logprobs(run.initial_params(), batch))
  gaps = np.abs(own_PGT - batch.sampler_logprobs_PGT)[np.asarray(batch.mask_PGT) != 0]
  assert metrics["sampler/logprob_gap_max"] == pytest.approx(gaps.max(), rel=1e-4)
  assert metrics["sampler/logprob_gap_mean"] == pytest.approx(gaps.mean(), rel=1e-4)
  assert gaps.mean() > 1
  state = first_state(run)
  params = jax.tree.map(lambda x: x * jnp.nan, state.train.params)
  _, metrics, _, why = step(state.replace(train=state.train.replace(params=params)), 0)
  assert metrics["rejection/tokens"] == 0 and metrics["skipped_updates"] == 1 and not why


@pytest.mark.slow
def test_a_run_whose_tokens_are_all_rejected_says_so_and_fails(tmp_path, capsys):
  config = with_reward(small_config(kl_coef=0.0, reject_product=(2.0, 3.0)), tmp_path, CODES)
  config = dataclasses.replace(config, steps=3)
  limited = with_section(config, "reward", max_unscored_steps=2)
  words = r"the last {} GRPO steps had nothing to learn from{}: all tokens were rejected"
  said = words.format(2, r" \(reward.max_unscored_steps\)")
  with pytest.raises(RunFailed, match=said + ".*; step 2 is saved"):
    run_steps(limited, tmp_path / "limited")
  warning = "warning: step 1 had nothing to learn from: all tokens were rejected"
  assert capsys.readouterr().err.count(warning) == 1
  endless = with_section(config, "reward", max_unscored_steps=0)
  for _ in range(2):  # the second time, no step is left to take
    with pytest.raises(RunFailed, match=words.format(3, ", which are all")):
      run_steps(endless, tmp_path / "endless")
  ended = endless.replace({"reward.max_unscored_steps": 1})
  with pytest.raises(RunFailed, match=words.format(3, r" \(reward.max_unscored_steps\)")):
    run_steps(ended, tmp_path / "endless")


@pytest.mark.slow
def test_a_planned_entropy_coefficient_is_data_and_resumes_where_it_was(tmp_path):
  """From .2 to .8 in three steps. Two runs, of which one stops in between, are the same."""
  algo = dict(entropy_coef=0.2, entropy_coef_end=0.8, kl_coef=0.0)
  config = with_reward(small_config(**algo), tmp_path, CODES)
  config = dataclasses.replace(config, steps=3)
  run = small_run(config)
  collector = Remembers(run)
  step, store, checkpoints = grpo_step(run, tmp_path, collector)
  state, _, _ = store.restore_or_init()
  assert state.train.coefs.entropy == np.float32(0.2)
  compiled = []
  for index, coef in enumerate((0.2, 0.5, 0.8)):
    state, metrics, _, _ = step(state, index)
    assert metrics["entropy_coef"] == state.train.coefs.entropy == np.float32(coef)
    compiled.append(run.programs.update.whole.jitted._cache_size())
    if index == 1:
      store.save(2, state)
      checkpoints.wait()
  assert compiled[0] == compiled[1] == compiled[2] <= 1  # nothing is compiled again
  whole = jax.tree.map(np.array, state)
  step, store, _ = grpo_step(run, tmp_path, collector)
  state, done, _ = store.restore_or_init()
  assert done == 2
  assert_same(step(state, 2).state, whole)


@pytest.mark.slow
def test_a_run_with_a_moving_reference_and_coefficients_resumes_where_it_stopped(tmp_path):
  """Two steps, then two more after a restart, are four steps, bit for bit."""
  algo = dict(kl_target=0.01, kl_horizon=100, entropy_target=2.0, ref_sync_steps=3, ref_mixup=0.5)
  config = with_reward(small_config(**algo), tmp_path, CODES)
  whole = run_steps(dataclasses.replace(config, steps=4), tmp_path / "whole").state
  run_steps(dataclasses.replace(config, steps=2), tmp_path / "parts")
  parts = run_steps(dataclasses.replace(config, steps=4), tmp_path / "parts").state
  assert_same(parts, whole)
  assert float(whole.train.coefs.kl) != np.float32(0.04) and float(whole.train.coefs.entropy) > 0
  assert whole.host["num_tokens"] > 0
  first = small_run(config).initial_params()
  moved = jax.tree.map(
    lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max()), whole.reference, first
  )
  assert max(jax.tree.leaves(moved)) > 1e-4
  assert not (tmp_path / "whole" / "reference").exists()
