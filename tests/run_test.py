"""A step's parts as the run puts them together: what the batch holds, and several updates of it."""
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import default
from grpo_jax import learner, rollout
from grpo_jax.config import from_dict
from grpo_jax.data import loader
from grpo_jax.run import Run
from grpo_jax.train import Trainer
from grpo_jax.types import Completions

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
  return Completions(jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32), jnp.asarray(lp), jnp.asarray(lp + .1),
                     jnp.asarray(np.where(lengths == T, -1, 0), jnp.int32))


def batch_of(run, out=None, seed=0):
  rng = np.random.default_rng(seed)
  prompts = jnp.asarray(rng.integers(1, 9, (P, 12)), jnp.int32), jnp.asarray(rng.integers(1, 13, P), jnp.int32)
  return run.to_batch(completions(seed) if out is None else out, *prompts)


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
    np.testing.assert_array_equal(batch_of(Run(config(**several)), out).old_logprobs_PGT, out.logprobs_PGT)


def test_the_kl_in_the_reward_is_taken_from_it():
  """RLOO by numpy: r - .5 sum_t (lp - ref), less the mean of the two others."""
  run = Run(config("rloo", kl_coef=.5))
  batch = batch_of(run)
  ref = np.asarray(batch.sampler_logprobs_PGT) - np.random.default_rng(1).random((P, G, T)).astype(np.float32)
  scores = np.random.default_rng(2).random((P, G, 1)).astype(np.float32)
  total = scores[..., 0] - .5 * np.where(batch.mask_PGT > 0, batch.sampler_logprobs_PGT - ref, 0).sum(-1)
  expected = total - (total.sum(1, keepdims=True) - total) / (G - 1)
  found = run.with_advantages(batch.replace(ref_logprobs_PGT=jnp.asarray(ref)), jnp.asarray(scores), None)
  np.testing.assert_allclose(found.advantages_PGT, np.where(batch.mask_PGT > 0, expected[..., None], 0), atol=1e-5)


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
  trainer = Trainer(config(minibatches=2, updates_per_batch=2, old_logprobs=old, kl_coef=0.0), str(tmp_path))
  run = trainer.run
  rng = np.random.default_rng(0)
  out = completions()
  params = run.initial_params()
  draft = batch_of(run, out)
  sampled = run.logprobs(params, draft)
  gap = 0.25 * (old == "recomputed")  # what the sampler says, and recomputing mends
  batch = batch_of(run, out.replace(logprobs_PGT=sampled + gap * draft.mask_PGT))
  batch = batch.replace(advantages_PGT=batch.mask_PGT * jnp.asarray(rng.normal(size=(P, G, 1)), jnp.float32))

  state, told = run.init_state(params), []
  loss = learner.grpo(run.model, run.algo, 1.0, run.config.learner)
  step = jax.jit(lambda s, b: learner.train_step(s, b, loss, run.optimizer))
  for part in [*run.minibatches(batch.replace(old_logprobs_PGT=sampled))] * 2:
    state, metrics = step(state, part)
    told.append(jax.device_get(metrics))

  ours, metrics = trainer._update(run.init_state(run.initial_params()), batch)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours.params, state.params)
  assert int(ours.step) == 4
  assert told[0]["ratio/max"] == pytest.approx(1, abs=1e-5) and told[3]["ratio/max"] > 1.001
  assert metrics["ratio/max"] == pytest.approx(max(t["ratio/max"] for t in told), rel=1e-4)
  assert metrics["grad_norm"] == pytest.approx(np.mean([t["grad_norm"] for t in told]), rel=1e-4)
  assert metrics["sampler/logprob_gap_max"] == pytest.approx(gap, abs=1e-5)


def test_remax_compares_with_the_greedy_completion(tmp_path):
  """Reward less advantage is one number for each prompt: the score of what temperature 0 writes."""
  (tmp_path / "reward.py").write_text("def codes(completions, **_):\n  return [sum(map(ord, c)) / 100 for c in completions]")
  c = config("remax")
  c = dataclasses.replace(c, reward=dataclasses.replace(c.reward, functions=(f"{tmp_path}/reward.py:codes",)))
  trainer = Trainer(c, str(tmp_path / "run"))
  with trainer.session():
    state, step = trainer.restore_or_init()
    greedy = trainer.run.sampler(dataclasses.replace(c.sampling, temperature=0.0), 1)
    prompts = loader.prompt_batch(trainer.prompts, loader.indices(0, 0, P, len(trainer.prompts)))
    out = trainer.run.fetch(greedy(state.params, prompts.prompts_PS, prompts.prompt_lengths_P, jax.random.key(7)))
    expected = rollout.score(out, prompts, trainer.run.tokenizer.decode, trainer.run.functions, c.reward).rewards_PG[:, 0]
    trainer.grpo_step(state, step)
  rows = [json.loads(line) for line in (tmp_path / "run" / "completions" / "000001.jsonl").read_text().splitlines()]
  baselines = np.array([row["reward"] - row["advantage"] for row in rows]).reshape(P, G)
  np.testing.assert_allclose(baselines, np.tile(expected[:, None], G), rtol=1e-5, atol=1e-5)
  assert len({row["reward"] for row in rows}) > 1
