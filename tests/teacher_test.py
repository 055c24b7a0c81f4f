"""On-policy distillation: its advantages are those of the reverse KL, and a run learns from it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_run import G, P, S, T, small_config, small_run, with_reward, with_section

from grpo_jax import model
from grpo_jax.algo.distillation import teacher_advantages
from grpo_jax.batches.collect import Collector
from grpo_jax.data.tasks import tasks
from grpo_jax.data.tokenizers import tokenizer
from grpo_jax.run.run import Run
from grpo_jax.scoring.scorers import Scorers
from grpo_jax.settings import ConfigError
from grpo_jax.storage.json_files import parse_rows
from grpo_jax.timing import Clock
from grpo_jax.training.loop import run_steps

LENGTH = "def reward(completions, **_):\n  return [float(len(text)) for text in completions]\n"


def collector_of(config):
  run = small_run(config)
  return Collector(run, Scorers(run))


def save_teacher(folder, characters=tasks.ALPHABET, positions=64, rows=0):
  """A random model of another shape than the policy's, with the tokenizer of sums.

  `rows` are those of its embeddings that belong to no token.
  """
  tokens = tokenizer.characters(characters)
  shape = model.ModelConfig(
    vocab_size=tokens.vocab_size + rows,
    embed_dim=24,
    num_layers=2,
    num_heads=3,
    num_kv_heads=1,
    head_dim=8,
    mlp_dim=40,
    max_positions=positions,
    stop_ids=(1,),
  )
  params = jax.jit(model.init, static_argnums=1)(jax.random.key(3), shape)
  # Sharper than a random model, so that there is something to learn.
  params = jax.tree.map(lambda x: x * 1.5, params)
  model.save(folder, shape, params)
  tokens.save(folder)
  return shape, params


def config_with(folder, **reward):
  return with_section(small_config(kl_coef=0.0), "reward", teacher=str(folder), **reward)


# The mathematics.


def test_the_advantages_are_the_gradient_of_the_reverse_kl():
  """sum_a p(a) A(a) grad log p(a) = -grad KL(p || q), summed over all tokens a."""
  logits, teacher = jax.random.normal(jax.random.key(0), (2, 7))
  teacher_logprobs = jax.nn.log_softmax(teacher)

  def reverse_kl(logits):
    logprobs = jax.nn.log_softmax(logits)
    return (jnp.exp(logprobs) * (logprobs - teacher_logprobs)).sum()

  def expected_surrogate(logits):
    logprobs = jax.nn.log_softmax(logits)
    own = jax.lax.stop_gradient(logprobs)
    row = (x[None, None] for x in (teacher_logprobs, own, jnp.ones(7)))
    advantages = teacher_advantages(*row)[0, 0]
    return (jnp.exp(own) * advantages * logprobs).sum()

  np.testing.assert_allclose(
    jax.grad(expected_surrogate)(logits), -jax.grad(reverse_kl)(logits), atol=1e-6
  )


def test_tokens_outside_the_mask_have_none():
  found = teacher_advantages(
    jnp.array([[[-1.0, jnp.nan, 0]]]), jnp.array([[[-3.0, 1, 5]]]), jnp.array([[[1.0, 0, 0]]])
  )
  np.testing.assert_array_equal(found, [[[2, 0, 0]]])


# In a run.


@pytest.mark.slow
@pytest.mark.parametrize("context", [1, 2])
def test_the_teacher_of_another_shape_grades_each_token(tmp_path, context):
  """Its log-probs are those of a plain forward pass, and they are added with their weight."""
  shape, params = save_teacher(tmp_path / "teacher")
  config = with_reward(config_with(tmp_path / "teacher", teacher_weight=0.5), tmp_path, LENGTH)
  config = with_section(config, "mesh", context=context)
  run = Run(config, devices=jax.devices()[:context])
  collected = Collector(run, Scorers(run))(
    run.initial_params(), 0, {"num_tokens": np.int64(0)}, Clock()
  )
  batch = collected.batch
  mask_PGT, tokens_PGT = np.asarray(batch.mask_PGT), np.asarray(batch.completions_PGT)
  by_hand_PGT = np.zeros(tokens_PGT.shape)
  for p in range(P):
    prompt = np.asarray(batch.prompts_PS)[p, : int(batch.prompt_lengths_P[p])]
    for g in range(G):
      row = jnp.concatenate([prompt, tokens_PGT[p, g]])[None]
      logits = model.forward(params, shape, row, jnp.arange(row.shape[1])[None])[0][0]
      logprobs = jax.nn.log_softmax(logits[len(prompt) - 1 : -1])
      by_hand_PGT[p, g] = np.take_along_axis(logprobs, tokens_PGT[p, g][:, None], -1)[:, 0]
  found_PGT = np.asarray(batch.teacher_logprobs_PGT)
  np.testing.assert_allclose(found_PGT, by_hand_PGT * mask_PGT, atol=1e-4)

  alone, _ = run.programs.with_advantages(
    batch.replace(teacher_logprobs_PGT=None), collected.rewards, 0.0
  )
  both, metrics = run.programs.with_advantages(batch, collected.rewards, 0.0)
  difference_PGT = (by_hand_PGT - np.asarray(batch.sampler_logprobs_PGT)) * mask_PGT
  np.testing.assert_allclose(
    both.advantages_PGT, alone.advantages_PGT + 0.5 * difference_PGT, atol=1e-4
  )
  kl = -difference_PGT.sum() / mask_PGT.sum()
  assert metrics["teacher/reverse_kl"] == pytest.approx(kl, rel=1e-4)
  assert both.teacher_logprobs_PGT is None


@pytest.mark.slow
def test_a_run_learns_from_the_teacher_alone(tmp_path):
  """With reward weights of 0, and also where no group differs."""
  save_teacher(tmp_path / "teacher")
  config = config_with(tmp_path / "teacher", weights=(0.0,))
  config = with_section(config, "batch", prompts=32, group_size=4)
  config = dataclasses.replace(config, steps=25)
  run_steps(config, tmp_path / "run")
  kl = [row["teacher/reverse_kl"] for row, _ in parse_rows(tmp_path / "run" / "metrics.jsonl")]
  assert np.mean(kl[-5:]) < 0.8 * np.mean(kl[:3])


# What is refused.


@pytest.mark.slow
def test_a_teacher_with_another_tokenizer_is_refused(tmp_path):
  save_teacher(tmp_path / "other", characters="".join(reversed(tasks.ALPHABET)))
  with pytest.raises(ConfigError, match=r"reward\.teacher: token 2 is '.' for the policy and '.'"):
    collector_of(config_with(tmp_path / "other"))
  save_teacher(tmp_path / "fewer", characters=tasks.ALPHABET[:-1])
  with pytest.raises(ConfigError, match=r"reward\.teacher: the teacher has \d+ ids and the policy"):
    collector_of(config_with(tmp_path / "fewer"))


@pytest.mark.slow
def test_a_teacher_with_fewer_rows_of_embeddings_is_refused(tmp_path):
  """The policy draws the ids between the tokenizer's and its rows, and JAX would clamp them."""
  student, _ = save_teacher(tmp_path / "student", rows=3)
  for rows in (0, 2):
    save_teacher(tmp_path / f"teacher_{rows}", rows=rows)
    config = config_with(tmp_path / f"teacher_{rows}")
    config = with_section(config, "model", path=str(tmp_path / "student"))
    words = rf"reward\.teacher: the teacher has \d+ rows .* and the policy {student.vocab_size},"
    with pytest.raises(ConfigError, match=words):
      run_steps(config, tmp_path / "run")
  save_teacher(tmp_path / "teacher_4", rows=4)
  config = with_section(config, "reward", teacher=str(tmp_path / "teacher_4"))
  collector_of(config)


@pytest.mark.slow
def test_a_teacher_with_too_few_positions_is_refused(tmp_path):
  save_teacher(tmp_path / "short", positions=S + T - 1)
  with pytest.raises(ConfigError, match=r"reward\.teacher: the teacher has 16 positions, and"):
    collector_of(config_with(tmp_path / "short"))


def test_a_teacher_that_is_not_there_is_refused_before_anything_is_written(tmp_path):
  with pytest.raises(ConfigError, match="^config key reward.teacher: .*/none does not exist"):
    run_steps(config_with(tmp_path / "none"), tmp_path / "run")
  assert not (tmp_path / "run").exists()
