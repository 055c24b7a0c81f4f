"""Estimates of accuracy, by enumeration and simulation, and the evaluator on a tiny policy."""

import dataclasses
import itertools
import math
import zlib

from hypothesis import given
from hypothesis import strategies as st
import jax
import numpy as np
import pytest

from configs import arithmetic
from grpo_jax.config import from_dict
from grpo_jax.run import estimators
from grpo_jax.run.build import Run
from grpo_jax.run.evaluator import Evaluator, no_progress, table

# Intervals.


@pytest.mark.parametrize(
  "right, count, low, high",
  [
    # The first four are from Newcombe 1998, table I, method 3.
    (81, 263, 0.2553, 0.3662),
    (15, 148, 0.0624, 0.1605),
    (0, 20, 0.0000, 0.1611),
    (1, 29, 0.0061, 0.1718),
    (29, 29, 0.8830, 1.0000),
  ],
)
def test_wilson_interval_of_known_cases(right, count, low, high):
  assert estimators.proportion(right, count) == pytest.approx((right / count, low, high), abs=5e-5)


@given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_ends_are_the_rates_that_would_just_be_rejected(case):
  right, count = case
  p, low, high = estimators.proportion(right, count)
  assert 0 <= low <= p <= high <= 1 and low < high
  for end in {low, high} - {0.0, 1.0}:  # |p - end| = z sqrt(end (1 - end) / n)
    assert abs(p - end) == pytest.approx(
      estimators.Z95 * math.sqrt(end * (1 - end) / count), rel=1e-6, abs=1e-9
    )
  mirrored = estimators.proportion(count - right, count)
  assert mirrored == pytest.approx((1 - p, 1 - high, 1 - low))


@given(st.lists(st.booleans(), min_size=1, max_size=300))
def test_mean_of_zeros_and_ones_is_a_proportion(right):
  assert estimators.mean(np.array(right, float)) == pytest.approx(
    estimators.proportion(sum(right), len(right))
  )


def test_mean_by_hand():
  # The variance is 1/6, so three values count as 3 * 1/4 / (1/6) = 4.5 draws. Half the width is
  # z / (1 + z^2 / 4.5) sqrt(...) = 0.3393.
  assert estimators.mean(np.array([0.0, 0.5, 1.0])) == pytest.approx(
    (0.5, 0.1607, 0.8393), abs=5e-5
  )


@pytest.mark.parametrize("values", [[0.3] * 7, [0.0], [1.0] * 50, [0.1, 0.1, 0.1]])
def test_interval_of_equal_values_is_not_empty(values):
  value, low, high = estimators.mean(np.array(values))
  assert value == pytest.approx(values[0]) and 0 <= low <= value <= high <= 1 and high - low > 0.03


DRAWS = 8
RATES = {  # how often each problem is solved: distributions over problems
  "uniform": lambda rng, n: rng.beta(1, 1, n),
  "mostly never": lambda rng, n: rng.beta(0.1, 2, n),
  "mostly always": lambda rng, n: rng.beta(20, 0.5, n),
  "all alike": lambda rng, n: np.full(n, 0.5),
  "one in a hundred, always": lambda rng, n: rng.random(n) < 0.01,
  "all hardly ever": lambda rng, n: np.full(n, 0.01),
}


@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("rates", RATES)
def test_interval_of_a_mean_over_problems_covers_the_truth(rates, k):
  rng = np.random.default_rng(1)
  truth = np.mean(1 - (1 - RATES[rates](rng, 1_000_000)) ** k)
  inside, widths, least = [], [], []
  for _ in range(400):
    right_N = rng.binomial(DRAWS, RATES[rates](rng, 256))
    values_N = estimators.pass_at_k(right_N, DRAWS, k)
    _, low, high = estimators.mean(values_N)
    inside.append(low <= truth <= high)
    widths.append(high - low)
    least.append(2 * estimators.Z95 * values_N.std() / 16)
  # 0.95 where the values are many, and less where they are few, as near 0 or 1.
  assert np.mean(inside) > 0.88
  # No wider than necessary.
  assert np.mean(widths) < 1.1 * np.mean(least) + 2 * estimators.Z95**2 / 256


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.97])
def test_interval_of_a_proportion_covers_the_rate(rate):
  """Exactly, by summing the binomial distribution.

  Coverage oscillates with the rate. For these rates the lowest is about 0.93.
  """
  n = 256
  ends = [estimators.proportion(c, n)[1:] for c in range(n + 1)]
  chance = [math.comb(n, c) * rate**c * (1 - rate) ** (n - c) for c in range(n + 1)]
  assert 0.925 < sum(p for p, (low, high) in zip(chance, ends) if low <= rate <= high) < 0.975


# pass@k and maj@k.


def test_pass_at_k_is_the_fraction_of_subsets_with_a_right_answer():
  n = 6
  for c, k in itertools.product(range(n + 1), range(1, n + 1)):
    draws = [True] * c + [False] * (n - c)
    fraction = np.mean([any(subset) for subset in itertools.combinations(draws, k)])
    assert estimators.pass_at_k(np.array([c]), n, k) == pytest.approx(fraction)


@given(
  st.floats(0, 1), st.integers(1, 24).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))
)
def test_pass_at_k_is_unbiased(rate, sizes):
  n, k = sizes
  chance_C = np.array([math.comb(n, c) * rate**c * (1 - rate) ** (n - c) for c in range(n + 1)])
  assert chance_C @ estimators.pass_at_k(np.arange(n + 1), n, k) == pytest.approx(
    1 - (1 - rate) ** k
  )


def test_pass_at_k_of_all_draws_is_whether_any_is_right_and_at_1_the_mean():
  right_N = np.array([0, 1, 5, 8])
  np.testing.assert_array_equal(estimators.pass_at_k(right_N, 8, 8), [0, 1, 1, 1])
  np.testing.assert_allclose(estimators.pass_at_k(right_N, 8, 1), right_N / 8)


@pytest.mark.parametrize(
  "answers, right, expected",
  [
    ([3, 3, 5], [1, 1, 0], 1),
    ([3, 5, 5], [1, 0, 0], 0),
    ([3, 3, 5, 5], [1, 1, 0, 0], 1 / 2),
    ([3, 5, 7], [0, 1, 0], 1 / 3),
    ([None, None, 3], [0, 0, 1], 1),
    ([None, None], [0, 0], 0),
    ([], [], 0),
    ([3, 3, 5], [0, 1, 0], 1),  # the reward did not find the first 3
  ],
)
def test_majority_by_hand(answers, right, expected):
  assert estimators.majority(answers, right) == pytest.approx(expected)


@given(st.lists(st.sampled_from([1, 2, 3, None]), max_size=8), st.permutations(range(8)))
def test_majority_does_not_depend_on_the_order(answers, order):
  shuffled = [answers[i] for i in order if i < len(answers)]
  both = [estimators.majority(a, [x == 2 for x in a]) for a in (answers, shuffled)]
  assert both[0] == both[1]


# The evaluator.


def coin(completions, prompts, **columns):
  """Right for about half of the problems, by their texts. It does not score every seventh."""
  del columns
  hashes = [zlib.crc32(f"{p}|{c}".encode()) for p, c in zip(prompts, completions)]
  return [None if h % 7 == 0 else float(h % 2) for h in hashes]


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


def evaluate(config, steps=(0,), progress=no_progress):
  run = Run(config)
  evaluator, params = Evaluator(run, progress), run.initial_params()
  return [evaluator(params, step) for step in steps]


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
  sampler = run.programs.sampler(1, greedy=True)
  for text in run.prompts("test").texts:
    ids = run.tokenizer.encode(text)
    prompts_PS = np.array([ids + [0] * (12 - len(ids))] * 8, np.int32)
    arrays = (prompts_PS, np.full(8, len(ids), np.int32), np.ones(8, np.float32))
    prompts_PS, lengths_P, temperature_P = run.hosts.put(arrays)
    sampled = sampler(params, prompts_PS, lengths_P, jax.random.key(0), temperature_P)
    completions = run.hosts.fetch(sampled)
    lengths.append(completions.lengths_PG[0, 0])
    stopped.append(completions.stopped_by_PG[0, 0] >= 0)
    completion = run.tokenizer.decode(completions.tokens_PGT[0, 0, : lengths[-1]])
    scores += coin([completion], [text])
  return scores, lengths, stopped


def test_only_draws_depend_on_the_step_and_every_estimate_has_its_interval(config):
  config = with_eval(config, samples=4)
  progress = []
  metrics, again, of_other_step = evaluate(
    config, steps=(3, 3, 4), progress=lambda *arguments: progress.append(arguments)
  )
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
  expected = [(what, done, 30) for what in ("greedy", "draws") for done in (8, 16, 24, 30)]
  assert progress == expected * 3
  lines = table(metrics, config.eval, config.sampling.max_tokens)
  assert max(map(len, lines)) <= 80 and sum("95% interval" in line for line in lines) == len(names)
  assert lines[0].endswith(f"{metrics['eval/clipped_ratio']:.1%} cut off at 6")


def test_problems_that_are_too_long_do_not_count(config):
  config = dataclasses.replace(config, data=dataclasses.replace(config.data, max_prompt_tokens=10))
  run = Run(config)
  evaluator = Evaluator(run)
  count = sum(len(example["question"]) <= 10 for example in run.task.test[:30])
  assert 0 < count < 30
  assert (len(evaluator.prompts), evaluator.prompts.dropped) == (count, 30 - count)
  accuracy = evaluator(run.initial_params(), 0)["eval/accuracy"]
  assert round(accuracy * count, 9).is_integer()
