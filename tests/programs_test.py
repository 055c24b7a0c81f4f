"""The compiled programs of a run: what a batch holds, and the advantages that it gets."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from small_run import (
  G,
  P,
  T,
  batch_of,
  random_completions,
  small_config,
  small_run,
  with_section,
)

from grpo_jax.algo.settings import Algo
from grpo_jax.run.stages import programs
from grpo_jax.types import Rewards


@pytest.mark.parametrize("mask_truncated", [False, True])
def test_completions_that_were_cut_off_may_be_left_out(mask_truncated):
  completions = random_completions()
  batch = batch_of(small_run(small_config(mask_truncated=mask_truncated)), completions)
  counts_PG = (completions.stopped_by_PG >= 0) | (not mask_truncated)
  assert not counts_PG.all() or not mask_truncated
  np.testing.assert_array_equal(batch.mask_PGT.sum(-1), completions.lengths_PG * counts_PG)


def test_a_batch_holds_the_completions_and_leaves_groups_that_are_not_live_out_of_the_loss():
  completions = random_completions()
  batch = batch_of(small_run(small_config()), completions, live_P=[1, 0, 1, 0])
  is_live = np.array([1, 0, 1, 0])[:, None, None]
  np.testing.assert_array_equal(batch.mask_PGT, completions.sampled_PGT * is_live)
  assert batch.mask_PGT.dtype == jnp.float32
  np.testing.assert_array_equal(batch.completions_PGT, completions.tokens_PGT)
  np.testing.assert_array_equal(batch.sampler_logprobs_PGT, completions.logprobs_PGT)
  np.testing.assert_array_equal(batch.behavior_logprobs_PGT, completions.behavior_logprobs_PGT)
  np.testing.assert_array_equal(batch.temperature_P, np.ones(P))
  assert batch.advantages_PGT is None and batch.ref_logprobs_PGT is None


@pytest.mark.parametrize(
  "algo", [dict(), dict(minibatches=2), dict(updates_per_batch=2)], ids=["one", "two", "passes"]
)
def test_old_logprobs_are_kept_only_where_the_policy_moves_before_they_are_read(algo):
  completions = random_completions()
  batch = batch_of(small_run(small_config(**algo)), completions)
  if algo:
    np.testing.assert_array_equal(batch.old_logprobs_PGT, completions.logprobs_PGT)
  else:
    assert batch.old_logprobs_PGT is None


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("old_is_policy", [True, False])
def test_old_is_policy_alone_decides_whether_old_logprobs_are_kept(
  old_is_policy, minibatches, monkeypatch
):
  """Also where it says something else than the number of updates, as an asynchronous run would."""
  monkeypatch.setattr(Algo, "old_is_policy", property(lambda algo: old_is_policy))
  batch = batch_of(small_run(small_config(minibatches=minibatches)))
  assert (batch.old_logprobs_PGT is None) == old_is_policy


def test_the_kl_in_the_reward_is_taken_from_it():
  """RLOO by numpy: r - 0.5 sum_t (logprob - reference), minus the mean of the two others."""
  run = small_run(small_config("rloo"))
  batch = batch_of(run)
  is_token = np.asarray(batch.mask_PGT) > 0
  kl_PGT = np.random.default_rng(1).random((P, G, T)).astype(np.float32)
  scores_PGJ = np.random.default_rng(2).random((P, G, 1)).astype(np.float32)
  total_PG = scores_PGJ[..., 0] - 0.5 * np.where(is_token, kl_PGT, 0).sum(-1)
  others_PG = (total_PG.sum(1, keepdims=True) - total_PG) / (G - 1)
  found, _ = run.programs.with_advantages(
    batch.replace(ref_logprobs_PGT=batch.sampler_logprobs_PGT - kl_PGT),
    Rewards(scores_PGJ=jnp.asarray(scores_PGJ), weights=(1.0,)),
    0.5,
  )
  expected_PGT = np.where(is_token, (total_PG - others_PG)[..., None], 0)
  np.testing.assert_allclose(found.advantages_PGT, expected_PGT, atol=1e-5)


def test_minibatches_divide_the_prompts():
  run = small_run(small_config(minibatches=2))
  batch = batch_of(run)
  parts = run.programs.minibatches(batch)
  assert len(parts) == 2 and all(len(part.prompts_PS) == P // 2 for part in parts)

  def rows(part):
    arrays = zip(np.asarray(part.prompts_PS), np.asarray(part.completions_PGT))
    return sorted(prompt.tobytes() + completion.tobytes() for prompt, completion in arrays)

  assert sorted(rows(parts[0]) + rows(parts[1])) == rows(batch)


def test_metrics_of_the_advantages_say_how_much_of_the_batch_teaches():
  """One group of four has equal rewards. The advantages of the others by numpy."""
  run = small_run(small_config(minibatches=2))
  scores_PG = np.array([[1, 0, 0], [1, 1, 1], [0, 0, 1], [1, 0, 1]], np.float32)
  rewards = Rewards(scores_PGJ=jnp.asarray(scores_PG[..., None]), weights=(1.0,))
  batch, metrics = run.programs.with_advantages(batch_of(run), rewards, 0.0)
  assert metrics["batch/completions"] == 9
  assert metrics["batch/tokens"] == batch.mask_PGT[np.array([0, 2, 3])].sum()
  mean_P1, std_P1 = scores_PG.mean(1, keepdims=True), scores_PG.std(1, ddof=1, keepdims=True)
  advantages_PG1 = ((scores_PG - mean_P1) / (std_P1 + 1e-4))[..., None]
  tokens = np.broadcast_to(advantages_PG1, (P, G, T))[np.asarray(batch.mask_PGT) > 0]
  for name, value in (("std", tokens.std()), ("min", tokens.min()), ("max", tokens.max())):
    assert metrics[f"advantage/{name}"] == pytest.approx(value, rel=1e-5)


@pytest.mark.slow
def test_a_decoded_token_is_written_into_the_cache_without_a_copy():
  """Once for the keys and once for the values of each layer."""
  config = with_section(small_config(), "model", num_layers=2, num_kv_heads=2)
  run = small_run(with_section(config, "sampling", max_tokens=40))
  (sampler,) = (program for program in programs(run) if program.name == "sample")
  # The last stage decodes with the cache of the largest size.
  text = sampler.stages[-1].lower().compile().as_text()
  cache = rf"= f32\[(?:1,)?{P},2,{G},40,8\]\S* "
  assert len(re.findall(cache + r"dynamic-update-slice\(", text)) == 4
  assert not re.findall(cache + r"copy\(", text)
