"""The evaluator on a tiny policy. `estimators_test.py` has the estimates and their intervals."""

import contextlib
import dataclasses
import zlib

import jax
import numpy as np
import pytest
from small_run import small_config, small_run, with_reward, with_section

from configs import arithmetic
from grpo_jax.config import from_dict
from grpo_jax.evaluation import evaluator as evaluator_lib
from grpo_jax.evaluation.evaluator import Evaluator, accuracies, table
from grpo_jax.progress import doing
from grpo_jax.run.run import Run
from grpo_jax.sampler.logits import RowSettings
from grpo_jax.sampler.sampling import Draws, whole
from grpo_jax.scoring.scorers import Scorers


def coin(completions, prompts, **columns):
  """Right for about half of the problems, by their texts. It does not score every seventh."""
  del columns
  hashes = [zlib.crc32(f"{p}|{c}".encode()) for p, c in zip(prompts, completions)]
  return [None if h % 7 == 0 else float(h % 2) for h in hashes]


coin.answer_of = lambda completions, **columns: list(completions)


@pytest.fixture(scope="module")
def config():
  config, replace = from_dict(arithmetic.get_config().to_dict()), dataclasses.replace
  tiny = dict(embed_dim=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=16)
  return replace(
    config,
    model=replace(config.model, **tiny),
    sampling=replace(config.sampling, max_tokens=6),
    eval=replace(config.eval, function=f"{__file__}:coin", examples=30, batch=8, samples=0),
  )


def with_eval(config, **changes):
  return dataclasses.replace(config, eval=dataclasses.replace(config.eval, **changes))


def evaluate(config, steps=(0,)):
  run = Run(config)
  evaluator, params = Evaluator(run, Scorers(run)), run.initial_params()
  return [evaluator(params, step) for step in steps]


@pytest.mark.slow
def test_each_problem_counts_once_whatever_the_batch(config):
  """30 problems in batches of 8, 16 and 40 leave 2, 2 and 10 places to fill up."""
  first, *others = (evaluate(with_eval(config, batch=batch, samples=2))[0] for batch in (8, 16, 40))
  assert others == [first] * 2 and 0 < first["eval/mean@2"] < 1
  scores, lengths, stopped = greedy_one_at_a_time(Run(config))
  assert None in scores and 5 < scores.count(1.0) < 25 and len(scores) == 30
  assert first["eval/accuracy"] == scores.count(1.0) / 30
  assert first["eval/mean_length"] == pytest.approx(np.mean(lengths))
  assert first["eval/clipped_ratio"] == 1 - np.mean(stopped)


def greedy_one_at_a_time(run):
  """Scores, lengths and whether it stopped, of each problem's greedy completion.

  Every problem is a batch of its own, repeated on all eight devices.
  """
  params, scores, lengths, stopped = run.initial_params(), [], [], []
  sampler = run.programs.sampler()
  prompts = run.prompts("test")
  for prompt in prompts.make(range(len(prompts))):
    ids = prompt.ids
    prompts_PS = np.array([ids + [0] * (12 - len(ids))] * 8, np.int32)
    lengths_P = np.full(8, len(ids), np.int32)
    draws = Draws(jax.random.key(0), RowSettings(0.0))
    completions = whole(sampler(params, prompts_PS, lengths_P, 1, draws))
    lengths.append(completions.lengths_PG[0, 0])
    stopped.append(completions.stopped_by_PG[0, 0] >= 0)
    completion = run.tokenizer.decode(completions.tokens_PGT[0, 0, : lengths[-1]])
    scores += coin([completion], [prompt.text])
  return scores, lengths, stopped


@pytest.mark.slow
def test_only_draws_depend_on_the_step_and_every_estimate_has_its_interval(config, monkeypatch):
  config, works = with_eval(config, samples=4), []

  @contextlib.contextmanager
  def recorded(*arguments, is_routine):
    with doing(*arguments, is_routine=is_routine) as work:
      works.append((work, []))
      monkeypatch.setattr(work, "reach", works[-1][1].append)
      yield work

  monkeypatch.setattr(evaluator_lib, "doing", recorded)
  metrics, again, of_other_step = evaluate(config, steps=(3, 3, 4))
  assert metrics == again
  greedy = {name for name in metrics if "@" not in name}
  names = {"accuracy", "mean@4", "pass@2", "pass@4", "maj@4"}
  with_intervals = {f"eval/{name}{end}" for name in names for end in ("", "_low", "_high")}
  assert set(metrics) == with_intervals | {"eval/mean_length", "eval/clipped_ratio"}
  assert all(metrics[name] == of_other_step[name] for name in greedy)
  assert metrics["eval/mean@4"] != of_other_step["eval/mean@4"]
  assert 0 < metrics["eval/mean@4"] <= metrics["eval/pass@2"] <= metrics["eval/pass@4"] <= 1
  for name in names:
    low, high = metrics[f"eval/{name}_low"], metrics[f"eval/{name}_high"]
    assert low <= metrics[f"eval/{name}"] <= high
  kinds = [(work.unit, work.total, work.is_routine) for work, _ in works]
  first = [("problems", 30, False), ("draws", 120, False)]
  assert kinds == first + 2 * [(*kind, True) for *kind, _ in first]
  for work, reached in works:
    assert sorted(reached) == reached and len(set(reached)) >= 4 and reached[-1] >= work.total
  lines = table(metrics, config.eval, config.sampling.max_tokens)
  assert max(map(len, lines)) <= 80 and sum("95% interval" in line for line in lines) == len(names)
  assert lines[0].endswith(f"{metrics['eval/clipped_ratio']:.1%} cut off at 6")


@pytest.mark.slow
def test_problems_that_are_too_long_do_not_count(config):
  config = dataclasses.replace(config, data=dataclasses.replace(config.data, max_prompt_tokens=10))
  run = small_run(config)
  evaluator = Evaluator(run, Scorers(run))
  count = sum(len(example["question"]) <= 10 for example in run.task.test[:30])
  assert 0 < count < 30
  assert (len(evaluator.prompts), evaluator.prompts.dropped) == (count, 30 - count)
  accuracy = evaluator(run.initial_params(), 0)["eval/accuracy"]
  assert round(accuracy * count, 9).is_integer()


def test_a_mixture_has_an_accuracy_for_each_task():
  right = np.array([True, False, True, True, False])
  found = accuracies(right, ["a", "b", "b", "a", "b"])
  assert (found["eval/accuracy"], found["eval/accuracy/a"], found["eval/accuracy/b"]) == (
    pytest.approx(0.6),
    1.0,
    pytest.approx(1 / 3),
  )
  assert found["eval/accuracy/a_low"] < 1.0 == found["eval/accuracy/a_high"]
  assert [name for name in accuracies(right, []) if name.count("/") > 1] == []


@pytest.mark.slow
def test_the_accuracies_of_a_mixture_are_those_of_its_problems(tmp_path):
  """The check gives a point to sums, and none to Countdown."""
  source = "def reward(completions, task, **_): return [float(t == 'arithmetic') for t in task]"
  config = with_reward(small_config(), tmp_path, source)
  config = with_section(config, "data", mixture=("arithmetic", "countdown"), max_prompt_tokens=14)
  config = with_section(config, "eval", examples=7, batch=4, function=config.reward.functions[0])
  run = small_run(config)
  found = Evaluator(run, Scorers(run))(run.parameters.for_sampling(run.initial_params()), 0)
  assert found["eval/accuracy"] == pytest.approx(4 / 7)  # they take turns
  assert (found["eval/accuracy/arithmetic"], found["eval/accuracy/countdown"]) == (1.0, 0.0)
  lines = "\n".join(table(found, config.eval, 5))
  assert "eval/accuracy/arithmetic" in lines and "0.0%" in lines
