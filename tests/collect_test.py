"""A step's parts as the run puts them together: what the batch holds, and several updates of it."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import default
from grpo_jax.config import from_dict
from grpo_jax.data import loader
from grpo_jax.learner import train_step as learner
from grpo_jax.run import rollout
from grpo_jax.run.build import Run
from grpo_jax.run.collect import Collector
from grpo_jax.train import Trainer, train
from grpo_jax.types import Completions, Scores

P, G, T = 4, 3, 5


def config(preset="grpo", **algo):
  c = default.get_config(preset)
  c.steps = 1
  c.model.update(embed_dim=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=32)
  c.batch.update(prompts=P, group_size=G)
  c.data.max_prompt_tokens, c.sampling.max_tokens = 12, T
  c.optimizer.learning_rate = 1e-2
  c.mesh.data, c.mesh.fsdp, c.mesh.tensor = 1, 1, -1
  c.log.update(completions_every=1, tensorboard=False)
  c.algo.update(algo)
  return from_dict(c.to_dict())


def completions(seed=0):
  """Rows of 1 to T tokens, some cut off."""
  rng = np.random.default_rng(seed)
  lengths = rng.integers(1, T + 1, (P, G))
  lp = np.where(np.arange(T) < lengths[..., None], -rng.random((P, G, T)), 0).astype(np.float32)
  tokens = np.where(np.arange(T) < lengths[..., None], rng.integers(1, 9, (P, G, T)), 0)
  return Completions(
    jnp.asarray(tokens, jnp.int32),
    jnp.asarray(lengths, jnp.int32),
    jnp.asarray(lp),
    jnp.asarray(lp + 0.1),
    jnp.asarray(np.where(lengths == T, -1, 0), jnp.int32),
  )


def batch_of(run, out=None, seed=0):
  rng = np.random.default_rng(seed)
  prompts = (
    jnp.asarray(rng.integers(1, 9, (P, 12)), jnp.int32),
    jnp.asarray(rng.integers(1, 13, P), jnp.int32),
  )
  return run.to_batch(completions(seed) if out is None else out, *prompts, jnp.ones(P))


@pytest.mark.parametrize("truncated", [False, True])
def test_completions_that_were_cut_off_may_be_left_out(truncated):
  out = completions()
  batch = batch_of(Run(config(mask_truncated=truncated)), out)
  counts = (out.stopped_by_PG >= 0) | (not truncated)
  assert not counts.all() or not truncated
  np.testing.assert_array_equal(batch.mask_PGT.sum(-1), out.lengths_PG * counts)


def test_old_logprobs_are_kept_only_where_the_policy_moves_before_they_are_read():
  out = completions()
  assert batch_of(Run(config()), out).old_logprobs_PGT is None
  for several in (dict(minibatches=2), dict(updates_per_batch=2)):
    np.testing.assert_array_equal(
      batch_of(Run(config(**several)), out).old_logprobs_PGT, out.logprobs_PGT
    )


def test_the_kl_in_the_reward_is_taken_from_it():
  """RLOO by numpy: r - .5 sum_t (lp - ref), less the mean of the two others."""
  run = Run(config("rloo"))
  batch = batch_of(run)
  ref = np.asarray(batch.sampler_logprobs_PGT) - np.random.default_rng(1).random((P, G, T)).astype(
    np.float32
  )
  scores = np.random.default_rng(2).random((P, G, 1)).astype(np.float32)
  total = scores[..., 0] - 0.5 * np.where(
    batch.mask_PGT > 0, batch.sampler_logprobs_PGT - ref, 0
  ).sum(-1)
  expected = total - (total.sum(1, keepdims=True) - total) / (G - 1)
  found, _ = run.with_advantages(
    batch.replace(ref_logprobs_PGT=jnp.asarray(ref)), Scores(jnp.asarray(scores)), 0.5
  )
  np.testing.assert_allclose(
    found.advantages_PGT, np.where(batch.mask_PGT > 0, expected[..., None], 0), atol=1e-5
  )


def test_minibatches_part_the_prompts():
  run = Run(config(minibatches=2))
  batch = batch_of(run)
  parts = run.minibatches(batch)
  assert len(parts) == 2 and all(len(part.prompts_PS) == P // 2 for part in parts)
  rows = lambda b: sorted(map(bytes, np.asarray(b.prompts_PS)))
  assert sorted(rows(parts[0]) + rows(parts[1])) == rows(batch)


@pytest.mark.parametrize("old", ["sampler", "recomputed"])
def test_several_updates_are_train_steps_one_after_the_other(old, tmp_path):
  """Two passes over two minibatches, by hand. The first ratio is 1, the later ones are not; old stays what it was."""
  trainer = Trainer(
    config(minibatches=2, updates_per_batch=2, old_logprobs=old, kl_coef=0.0), str(tmp_path)
  )
  run = trainer.run
  rng = np.random.default_rng(0)
  out = completions()
  params = run.initial_params()
  draft = batch_of(run, out)
  sampled = run.logprobs(params, draft)
  gap = 0.25 * (old == "recomputed")  # what the sampler says, and recomputing mends
  batch = batch_of(run, out.replace(logprobs_PGT=sampled + gap * draft.mask_PGT))
  batch = batch.replace(
    advantages_PGT=batch.mask_PGT * jnp.asarray(rng.normal(size=(P, G, 1)), jnp.float32)
  )

  state, told = run.init_state(params), []
  loss = learner.grpo(run.model, run.algo, 1.0, run.config.learner)
  step = jax.jit(lambda s, b: learner.train_step(s, None, b, loss, run.optimizer))
  for part in [*run.minibatches(batch.replace(old_logprobs_PGT=sampled))] * 2:
    state, metrics = step(state, part)
    told.append(jax.device_get(metrics))

  ours, metrics = trainer._update(run.init_state(run.initial_params()), batch)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours.params, state.params
  )
  assert int(ours.step) == 4
  assert told[0]["ratio/max"] == pytest.approx(1, abs=1e-5) and told[3]["ratio/max"] > 1.001
  assert metrics["ratio/max"] == pytest.approx(max(t["ratio/max"] for t in told), rel=1e-4)
  assert metrics["grad_norm"] == pytest.approx(np.mean([t["grad_norm"] for t in told]), rel=1e-4)
  assert metrics["sampler/logprob_gap_max"] == pytest.approx(gap, abs=1e-5)


def test_metrics_of_the_advantages_tell_how_much_of_the_batch_teaches():
  """One group of four has no spread. The others' advantages by numpy."""
  run = Run(config(minibatches=2))
  batch = batch_of(run)
  scores = np.array([[1, 0, 0], [1, 1, 1], [0, 0, 1], [1, 0, 1]], np.float32)
  batch, metrics = run.with_advantages(batch, Scores(jnp.asarray(scores[..., None])), 0.0)
  assert metrics["batch/completions"] == 9
  assert metrics["batch/tokens"] == batch.mask_PGT[np.array([0, 2, 3])].sum()
  A = (scores - scores.mean(1, keepdims=True)) / (scores.std(1, ddof=1, keepdims=True) + 1e-4)
  tokens = np.broadcast_to(A[..., None], (P, G, T))[np.asarray(batch.mask_PGT) > 0]
  for name, value in (("std", tokens.std()), ("min", tokens.min()), ("max", tokens.max())):
    assert metrics[f"advantage/{name}"] == pytest.approx(value, rel=1e-5)


class Lap:
  def lap(self, name):
    pass


def collector(tmp_path, reward, preset="grpo", weights=(1.0,), **algo):
  """Of a random model, with this source of a function `reward` of completions, prompts and what tokens there are; with
  two weights, also of a function `another`."""
  (tmp_path / "reward.py").write_text(reward)
  functions = tuple(
    f"{tmp_path}/reward.py:{name}" for name in ("reward", "another")[: len(weights)]
  )
  c = config(preset, **algo)
  c = dataclasses.replace(
    c, reward=dataclasses.replace(c.reward, functions=functions, weights=weights)
  )
  run = Run(c)
  return run, Collector(run), run.initial_params()


SOMETIMES = """
def reward(completions, prompts, completion_ids, **_):
  # Groups of prompts that end in 3= or 7= differ, the others have all rewards equal.
  ids = [sum(tokens) for tokens in completion_ids]
  return [float(i) if p.endswith(("3=", "7=")) else 0.5 for i, p in zip(ids, prompts)]
"""


def test_groups_that_teach_nothing_give_way_to_fresh_ones(tmp_path):
  """The batch holds the first live groups of the rounds in order, each round the prompts and draws of its own number."""
  run, collect, params = collector(
    tmp_path, SOMETIMES, dynamic_sampling=True, max_resample_rounds=9
  )
  found = collect(params, 1, Lap())
  expected, texts, rounds = [], [], 0
  while len(expected) < P:
    number = 1 * 10 + rounds
    prompts = loader.prompt_batch(
      collect.prompts, loader.step_indices(0, number, P, len(collect.prompts))
    )
    out = run.sampler(run.config.sampling, G)(
      params,
      prompts.prompts_PS,
      prompts.prompt_lengths_P,
      jax.random.fold_in(run.key("sample"), number),
    )
    live = [p for p, text in enumerate(prompts.texts) if text.endswith(("3=", "7="))]
    expected += [np.asarray(out.tokens_PGT[p]) for p in live]
    texts += [prompts.texts[p] for p in live]
    rounds += 1
  assert rounds > 1
  np.testing.assert_array_equal(found.batch.completions_PGT, expected[:P])
  assert (
    list(found.prompts.texts) == texts[:P]
    and [row["prompt"] for row in found.rows()][::G] == texts[:P]
  )
  assert (found.batch.mask_PGT.sum((1, 2)) > 0).all()
  told = {
    name: found.metrics[f"dynamic_sampling/{name}"]
    for name in ("rounds", "kept", "dropped", "discarded")
  }
  assert told == {
    "rounds": rounds,
    "kept": P,
    "dropped": rounds * P - len(expected),
    "discarded": len(expected) - P,
  }
  assert found.metrics["frac_reward_zero_std"] == pytest.approx(
    1 - len(expected) / (rounds * P)
  )  # of all that was sampled


def test_where_rounds_do_not_suffice_the_rest_is_left_out_of_the_loss(tmp_path):
  run, collect, params = collector(
    tmp_path, SOMETIMES, dynamic_sampling=True, max_resample_rounds=1
  )
  found = next(
    f
    for f in (collect(params, i, Lap()) for i in range(20))
    if 0 < f.metrics["dynamic_sampling/kept"] < P
  )
  kept = int(found.metrics["dynamic_sampling/kept"])
  counted = np.asarray(found.batch.mask_PGT.sum((1, 2)) > 0)
  np.testing.assert_array_equal(counted, np.arange(P) < kept)
  assert [text.endswith(("3=", "7=")) for text in found.prompts.texts] == list(counted)
  assert found.metrics["dynamic_sampling/rounds"] == 2


def test_what_fills_up_a_batch_is_in_no_mean(tmp_path):
  """group_mean_batch_std divides by the deviation of the live groups' rewards alone."""
  run, collect, params = collector(
    tmp_path, SOMETIMES, "lite_ppo", dynamic_sampling=True, max_resample_rounds=1
  )
  found = next(
    f
    for f in (collect(params, i, Lap()) for i in range(20))
    if 0 < f.metrics["dynamic_sampling/kept"] < P
  )
  batch, _ = run.with_advantages(found.batch, found.scores, 0.0)
  live = found.drawn.scored.rewards_PG[: int(found.metrics["dynamic_sampling/kept"])]
  expected = (live - live.mean(1, keepdims=True)) / (live.std(ddof=1) + 1e-4)
  np.testing.assert_allclose(batch.advantages_PGT[: len(live), :, 0], expected, rtol=1e-4)


def test_scores_keep_the_order_of_their_weights(tmp_path):
  """Names out of the alphabet's order, unequal weights, groups chosen among several rounds, and the penalty for length:
  advantages by numpy."""
  reward = (
    SOMETIMES + "\ndef another(completions, **_):\n  return [len(c) * 10.0 for c in completions]\n"
  )
  run, collect, params = collector(
    tmp_path, reward, "dr_grpo", weights=(2.0, -1.0), dynamic_sampling=True, overlong=0.4
  )
  found = collect(params, 0, Lap())
  assert found.metrics["dynamic_sampling/rounds"] > 1 or found.metrics["dynamic_sampling/kept"] == P
  rows = found.rows()
  total = [
    2 * r["rewards/reward"] - r["rewards/another"] + min(0, (3 - r["length"]) / 2) for r in rows
  ]
  total = np.reshape(total, (P, G))
  batch, _ = run.with_advantages(found.batch, found.scores, 0.0)
  expected = (total - total.mean(1, keepdims=True)) * (
    np.asarray(found.batch.mask_PGT).max((1, 2)) > 0
  )[:, None]
  np.testing.assert_allclose(batch.advantages_PGT[..., 0], expected, rtol=1e-5, atol=1e-4)


def test_an_update_without_a_token_changes_nothing_and_is_in_no_mean(tmp_path):
  """Two minibatches, of which the first has no token of the loss: the update is that of the second alone."""
  algo = dict(minibatches=2, kl_coef=0.1, kl_target=1e-6, kl_horizon=100, entropy_target=9.0)
  trainer = Trainer(config(**algo), str(tmp_path))
  run, rng = trainer.run, np.random.default_rng(0)
  batch = batch_of(run)
  advantages = jnp.asarray(rng.normal(size=(P, G, 1)), jnp.float32)
  batch = batch.replace(
    advantages_PGT=batch.mask_PGT * advantages, ref_logprobs_PGT=batch.sampler_logprobs_PGT - 0.3
  )
  first = run.minibatches(
    batch.replace(mask_PGT=jnp.broadcast_to(jnp.arange(P)[:, None, None], (P, G, T)))
  )[0].mask_PGT
  empty = jnp.isin(jnp.arange(P), first[:, 0, 0])[:, None, None]
  batch = batch.replace(mask_PGT=jnp.where(empty, 0, batch.mask_PGT))
  ours, metrics = trainer._update(run.init_state(run.initial_params()), batch)
  alone, told = run.update(run.init_state(run.initial_params()), None, run.minibatches(batch)[1])
  jax.tree.map(np.testing.assert_array_equal, ours.replace(step=0), alone.replace(step=0))
  assert metrics["skipped_updates"] == 1
  for name in ("loss", "kl", "entropy", "ratio/mean", "ratio/max", "grad_norm"):
    assert metrics[name] == pytest.approx(float(told[name]), rel=1e-6), name
  assert metrics["kl_coef"] == alone.coefs.kl > 0.1 and metrics["entropy_coef"] == np.float32(0.005)


def test_without_dynamic_sampling_a_step_is_one_draw_of_its_own_number(tmp_path):
  run, collect, params = collector(tmp_path, SOMETIMES)
  where = loader.step_indices(0, 3, P, len(collect.prompts))
  found = collect(params, 3, Lap())
  assert list(found.prompts.texts) == [collect.prompts.texts[i] for i in where]
  assert not any(name.startswith("dynamic_sampling") for name in found.metrics)


def test_overlong_is_a_score_of_its_own(tmp_path):
  """T = 5, the last 2 tokens: 3 tokens 0, 4 tokens -1/2, 5 tokens -1. Rewards and spread are of the functions alone."""
  reward = "def reward(completions, prompts, **_):\n  return [None if p.endswith('0=') else 1 for p in prompts]"
  run, collect, params = collector(tmp_path, reward, overlong=0.4)
  found = collect(params, 0, Lap())
  lengths = np.array([row["length"] for row in found.rows()]).reshape(P, G)
  unscored = np.array([text.endswith("0=") for text in found.prompts.texts])[:, None]
  penalty = np.where(unscored, np.nan, np.clip((3 - lengths) / 2, -1, 0))
  np.testing.assert_allclose(found.scores.scores_PGK[..., 1], penalty)
  assert found.metrics["frac_reward_zero_std"] == 1 and found.metrics["reward"] == 1
  batch, _ = run.with_advantages(found.batch, found.scores, 0.0)
  for p in range(P):
    spread = len(set(lengths[p].clip(3))) > 1 and not unscored[p]
    assert bool((batch.advantages_PGT[p] != 0).any()) == spread


def test_rewards_of_steps_reach_the_tokens(tmp_path):
  """A step for every character but the first, worth its place: by hand from the formula, with the token that ends the
  completion in the last step."""
  reward = """
def reward(completions, **_):
  return [[(i, float(i % 2)) for i in range(2, len(c) + 1)] or 1.0 for c in completions]
"""
  run, collect, params = collector(tmp_path, reward, "process")
  found = collect(params, 0, Lap())
  rows = found.rows()
  rewards, ends = np.zeros((P * G, T)), np.zeros((P * G, T), bool)
  for b, row in enumerate(rows):
    n, tokens = (
      len(row["completion"]),
      found.drawn.out.tokens_PGT.reshape(P * G, T)[b, : row["length"]],
    )
    written = np.cumsum(
      [len(run.tokenizer.decode([int(token)])) for token in tokens]
    )  # a special token writes nothing
    for i in range(2, n + 1):
      at = row["length"] - 1 if i == n else int((written < i).sum())
      rewards[b, at], ends[b, at] = i % 2, True
    if n < 2:
      rewards[b, row["length"] - 1], ends[b, row["length"] - 1] = 1, True
  np.testing.assert_array_equal(found.scores.step_rewards_PGT, rewards.reshape(P, G, T))
  np.testing.assert_array_equal(found.scores.step_ends_PGT, ends.reshape(P, G, T))
  batch, _ = run.with_advantages(found.batch, found.scores, 0.0)
  for p in range(P):
    of = slice(p * G, p * G + G)
    values = rewards[of][ends[of]]
    z = np.where(ends[of], (rewards[of] - values.mean()) / (values.std(ddof=1) + 1e-4), 0)
    expected = np.cumsum(z[:, ::-1], 1)[:, ::-1] * np.asarray(found.batch.mask_PGT[p])
    np.testing.assert_allclose(batch.advantages_PGT[p], expected, atol=1e-4)


def test_process_with_rewards_of_whole_completions_is_grpo(tmp_path):
  run, collect, params = collector(tmp_path, SOMETIMES, "process")
  found = collect(params, 0, Lap())
  ours, _ = run.with_advantages(found.batch, found.scores, 0.0)
  theirs, _ = Run(config()).with_advantages(found.batch, found.scores, 0.0)
  np.testing.assert_allclose(ours.advantages_PGT, theirs.advantages_PGT, atol=1e-5)


@pytest.mark.slow
def test_a_run_with_a_moving_reference_and_coefficients_goes_on_where_it_stopped(tmp_path):
  """Two steps, then two more by another process's trainer, are four: parameters, reference, coefficients and metrics."""
  reward = "def reward(completions, **_):\n  return [sum(map(ord, c)) / 100 for c in completions]"
  (tmp_path / "reward.py").write_text(reward)
  c = config(kl_target=0.01, kl_horizon=100, entropy_target=2.0, ref_sync_steps=3, ref_mixup=0.5)
  c = dataclasses.replace(
    c, reward=dataclasses.replace(c.reward, functions=(f"{tmp_path}/reward.py:reward",))
  )
  whole = train(dataclasses.replace(c, steps=4), str(tmp_path / "whole"))
  train(dataclasses.replace(c, steps=2), str(tmp_path / "parts"))
  parts = train(dataclasses.replace(c, steps=4), str(tmp_path / "parts"))
  jax.tree.map(np.testing.assert_array_equal, parts, whole)
  assert float(whole.coefs.kl) != np.float32(0.04) and float(whole.coefs.entropy) > 0
  moved = jax.tree.map(
    lambda a, b: float(jnp.abs(a - b).max()), whole.reference, Run(c).initial_params()
  )
  assert max(jax.tree.leaves(moved)) > 1e-4
  assert not (tmp_path / "whole" / "reference").exists()


def test_remax_compares_with_the_greedy_completion(tmp_path):
  """Reward less advantage is one number for each prompt: the score of what temperature 0 writes."""
  (tmp_path / "reward.py").write_text(
    "def codes(completions, **_):\n  return [sum(map(ord, c)) / 100 for c in completions]"
  )
  c = config("remax")
  c = dataclasses.replace(
    c, reward=dataclasses.replace(c.reward, functions=(f"{tmp_path}/reward.py:codes",))
  )
  trainer = Trainer(c, str(tmp_path / "run"))
  with trainer.session():
    state, step = trainer.restore_or_init()
    greedy = trainer.run.sampler(dataclasses.replace(c.sampling, temperature=0.0), 1)
    prompts = loader.prompt_batch(
      trainer.collect.prompts, loader.step_indices(0, 0, P, len(trainer.collect.prompts))
    )
    out = trainer.run.fetch(
      greedy(state.params, prompts.prompts_PS, prompts.prompt_lengths_P, jax.random.key(7))
    )
    expected = rollout.score(
      out, prompts, trainer.run.tokenizer.decode, trainer.run.functions, (1.0,)
    ).rewards_PG[:, 0]
    trainer.grpo_step(state, step)
  rows = [
    json.loads(line)
    for line in (tmp_path / "run" / "completions" / "000001.jsonl").read_text().splitlines()
  ]
  baselines = np.array([row["reward"] - row["advantage"] for row in rows]).reshape(P, G)
  np.testing.assert_allclose(baselines, np.tile(expected[:, None], G), rtol=1e-5, atol=1e-5)
  assert len({row["reward"] for row in rows}) > 1


def test_what_was_sampled_is_what_is_trained(tmp_path):
  """Through a chat template, with a tokenizer of bytes: a random model's tokens are none that its text is encoded to."""
  (tmp_path / "reward.py").write_text(
    "def reward(completions, completion_ids, messages, prompts, **_):\n"
    "  seen.append((completions, completion_ids, messages, prompts))\n"
    "  return [0.0] * len(completions)\n\n\nseen = []\n"
  )
  asked = [[{"role": "user", "content": "2 pens?"}], "3 pens?"]
  for split in ("train", "test"):
    (tmp_path / f"{split}.jsonl").write_text(
      "".join(json.dumps({"question": q, "answer": "#### 2"}) + "\n" for q in asked)
    )
  c, folder = config(), Path(__file__).parent / "golden/tokenizers/qwen"
  run = Run(
    dataclasses.replace(
      c,
      reward=dataclasses.replace(c.reward, functions=(f"{tmp_path}/reward.py:reward",)),
      data=dataclasses.replace(
        c.data,
        task="gsm8k",
        path=str(tmp_path),
        tokenizer=str(folder),
        chat=True,
        system="Add.",
        max_prompt_tokens=64,
      ),
    )
  )
  collect = Collector(run)
  found = collect(run.initial_params(), 0, Lap())
  completions, ids, messages, prompts = run.functions[0].__globals__["seen"][0]

  batch, where = found.batch, loader.step_indices(0, 0, P, 2)
  assert messages[::G] == [
    [{"role": "system", "content": "Add."}, {"role": "user", "content": f"{2 + i} pens?"}]
    for i in where
  ]
  for p, row in enumerate(np.asarray(batch.prompts_PS)):
    text = run.tokenizer.render(messages[p * G])
    assert prompts[p * G] == text and row[
      : batch.prompt_lengths_P[p]
    ].tolist() == run.tokenizer.encode(text)

  out = found.drawn.out
  np.testing.assert_array_equal(batch.completions_PGT, out.tokens_PGT)
  lengths = np.asarray(out.lengths_PG).ravel()
  assert ids == [
    row[:n].tolist() for row, n in zip(np.asarray(out.tokens_PGT).reshape(P * G, T), lengths)
  ]
  np.testing.assert_array_equal(batch.mask_PGT.sum(-1), out.lengths_PG)
  again = run.tokenizer.encode_batch_after(completions)
  assert (
    sum(a != b for a, b in zip(again, ids)) > P * G / 2
  )  # so a text encoded anew would be another one
