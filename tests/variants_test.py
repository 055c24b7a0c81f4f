"""Every record of every axis: its worked examples, and what its properties promise.

The tests iterate over the registries. A new record is tested as soon as it is registered.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.algo import corrections
from grpo_jax.algo.advantages import ADVANTAGES
from grpo_jax.algo.aggregation import AGGREGATIONS
from grpo_jax.algo.corrections import CORRECTIONS, LEVELS
from grpo_jax.algo.kl import KL
from grpo_jax.algo.ratios import RATIOS
from grpo_jax.algo.rejections import REJECTIONS, without_rejected
from grpo_jax.algo.settings import Algo
from grpo_jax.algo.surrogates import SURROGATES
from grpo_jax.algo.surrogates.terms import BatchTokens, Terms
from grpo_jax.algo.token_selection import TOKEN_WEIGHTS
from grpo_jax.algo.token_selection.select import select
from grpo_jax.settings import names_of
from grpo_jax.types import Rewards

AXES = {
  "advantage": ADVANTAGES,
  "ratio": RATIOS,
  "surrogate": SURROGATES,
  "aggregation": AGGREGATIONS,
  "kl": KL,
  "correction": CORRECTIONS,
  "correction_level": LEVELS,
  "rejection": REJECTIONS,
  "token_weight": TOKEN_WEIGHTS,
}
RECORDS = [pytest.param(axis, name, id=f"{axis}-{name}") for axis in AXES for name in AXES[axis]]


def array(values):
  """None becomes NaN."""
  return jnp.asarray(np.array(values, float), jnp.float32)


@functools.partial(jax.jit, static_argnums=(0, 3))
def advantages(name, rewards, mask, algo):
  """What ADVANTAGES[name] computes, as one program: op by op takes several times as long."""
  return ADVANTAGES[name].compute(rewards, mask, algo)


# How the inputs of an example become arguments, and what comes out. One function per axis.


def rewards_of(inputs):
  """Rewards and the loss mask."""
  scores = np.array(inputs["scores"], float)
  scores = scores[..., None] if scores.ndim == 2 else scores
  P, G, J = scores.shape
  lengths = np.array(inputs.get("lengths", np.ones((P, G))))[..., None]
  more = {}
  if "greedy_scores" in inputs:
    more["greedy_scores_PJ"] = array(inputs["greedy_scores"])[:, None]
  if "kl_penalty" in inputs:
    more["kl_penalty_PGT"] = array(inputs["kl_penalty"])
  if "step_rewards" in inputs:
    steps = np.array(inputs["step_rewards"], float)
    more["step_rewards_PGT"] = array(np.nan_to_num(steps, nan=99.0))
    more["step_ends_PGT"] = array(~np.isnan(steps))
  T = next((x.shape[-1] for name, x in more.items() if name.endswith("PGT")), int(lengths.max()))
  weights = inputs.get("weights", (1.0,) * J)
  rewards = Rewards(scores_PGJ=array(scores), weights=weights, **more)
  return rewards, array(np.arange(T) < lengths)


def run_advantage(record, inputs, algo):
  return {"advantages": record.compute(*rewards_of(inputs), algo)}


def run_ratio(record, inputs, algo):
  del algo
  d, mask = jnp.log(array(inputs["w"])), array(inputs["mask"])

  def ratio(d):
    old = jnp.full(d.shape, -0.7)
    return record.compute((old + d)[None, None], old[None, None], mask[None, None])[0, 0]

  return {"ratio": ratio(d), "jacobian": jax.jacobian(ratio)(d)}


def run_surrogate(record, inputs, algo):
  if "lp" in inputs:
    row = {name: array(inputs[name])[None, None] for name in ("lp", "w", "A", "mask")}
    tokens = BatchTokens(
      logprobs_PGT=row["lp"],
      ratio_PGT=row["w"],
      entropies_PGT=jnp.full(row["lp"].shape, jnp.nan),
      advantages_PGT=row["A"],
      mask_PGT=row["mask"],
    )
    return {"chosen": record.select(tokens, algo)[0, 0]}
  ones = np.ones(len(inputs["w"]))
  inputs = {"old": ones / 2, "mask": ones, "weights": ones, "chosen": 0 * ones} | inputs
  of_row = inputs.pop("corrections_of_row", False)
  row = {name: array(values)[None, None] for name, values in inputs.items()}

  def terms(lp):
    old = jnp.log(row["old"])
    return Terms(
      logprobs_PGT=lp,
      old_logprobs_PGT=old,
      ratio_PGT=RATIOS["token"].compute(lp, old, row["mask"]),
      advantages_PGT=row["A"],
      mask_PGT=row["mask"],
      weights_PGT=row["weights"],
      chosen_PGT=row["chosen"],
      corrections_PGT=row.get("corrections", jnp.ones_like(lp)),
      corrections_of_row=of_row,
    )

  lp = jnp.log(row["old"] * row["w"])
  gradient = jax.grad(lambda lp: (record.loss(terms(lp), algo) * row["mask"]).sum())(lp)
  found = {"loss": record.loss(terms(lp), algo), "gradient": gradient}
  if record.bounds is not None:
    found["low"], found["high"] = record.bounds(terms(lp), algo)
  return {name: values[0, 0] for name, values in found.items()}


def run_aggregation(record, inputs, algo):
  total, weight = record.compute(array(inputs["values"]), array(inputs["mask"]), algo)
  return {"sum": total, "weight": weight}


def run_kl(record, inputs, algo):
  del algo
  policy, reference = (jnp.log(array(inputs[name]))[None, None] for name in ("policy", "reference"))
  gradient = jax.grad(lambda policy: record.compute(policy, reference).sum())(policy)
  return {"kl": record.compute(policy, reference)[0, 0], "gradient": gradient[0, 0]}


def run_correction(record, inputs, algo):
  return {"corrected": record.compute(array(inputs["weights"])[None, None], algo)[0, 0]}


def run_correction_level(record, inputs, algo):
  name = next(name for name in LEVELS if LEVELS[name] is record)
  algo = dataclasses.replace(algo, correction_level=name)
  log_w, mask = jnp.log(array(inputs["w"])), array(inputs["mask"])
  old = jnp.full(log_w.shape, -0.7)
  args = (x[None, None] for x in (old, old - log_w, mask))
  return {"weights": corrections.importance(*args, algo)[0, 0]}


def run_rejection(record, inputs, algo):
  assert record.is_on(algo)
  log_w, mask = jnp.log(array(inputs["w"]))[None, None], array(inputs["mask"])[None, None]
  old = jnp.full(log_w.shape, -0.7)
  return {"accepted": without_rejected(old, old - log_w, mask, algo)[0][0, 0]}


def run_token_weight(record, inputs, algo):
  assert record.is_on(algo)
  zeros, ones = np.zeros(len(inputs["mask"])), np.ones(len(inputs["mask"]))
  inputs = {"lp": zeros, "w": ones, "A": ones, "entropies": zeros} | inputs
  row = {name: array(values)[None, None] for name, values in inputs.items()}
  old = row["lp"] - jnp.log(row["w"])
  selection = select(row["lp"], old, row["entropies"], row["A"], row["mask"], algo)
  return {"weights": selection.weights_PGT[0, 0]}


RUN = {
  "advantage": run_advantage,
  "ratio": run_ratio,
  "surrogate": run_surrogate,
  "aggregation": run_aggregation,
  "kl": run_kl,
  "correction": run_correction,
  "correction_level": run_correction_level,
  "rejection": run_rejection,
  "token_weight": run_token_weight,
}


@pytest.mark.parametrize("axis, name", RECORDS)
def test_worked_examples(axis, name):
  record = AXES[axis][name]
  assert record.examples, f"{name} has no worked example"

  @jax.jit
  def of_examples():
    return [RUN[axis](record, x.inputs, Algo(**x.settings)) for x in record.examples]

  for example, found in zip(record.examples, of_examples(), strict=True):
    for output, expected in example.expected.items():
      np.testing.assert_allclose(
        np.asarray(found[output], float),
        np.broadcast_to(expected, np.shape(found[output])),
        rtol=2e-6,
        atol=2e-6,
        err_msg=f"{output} of {example}",
      )
      assert np.shape(expected) == np.shape(found[output])
      if axis == "advantage":
        zeros = np.asarray(expected) == 0
        assert (np.asarray(found[output])[zeros] == 0).all(), "0 must be exact"


@pytest.mark.parametrize("axis, name", RECORDS)
def test_a_record_cannot_be_changed(axis, name):
  record = AXES[axis][name]
  for value in (record, record.examples[0]):
    with pytest.raises(dataclasses.FrozenInstanceError):
      value.settings = {}


# What the examples of a record must cover.


@pytest.mark.parametrize("name", ADVANTAGES)
def test_examples_of_an_advantage_have_unequal_rewards_and_an_unscored_completion(name):
  scores = [np.array(x.inputs["scores"], float).ravel() for x in ADVANTAGES[name].examples]
  assert any(np.nanmin(x) < np.nanmax(x) for x in scores)
  assert any(np.isnan(x).any() for x in scores)


@pytest.mark.parametrize("name", SURROGATES)
def test_examples_of_a_surrogate_move_each_sign_of_the_advantage_both_ways(name):
  record = SURROGATES[name]
  found = set()
  for example in record.examples:
    if "loss" in example.expected and "gradient" in example.expected:
      w, A = np.array(example.inputs["w"]), np.array(example.inputs["A"])
      moved = w != 1
      found |= set(zip(np.sign(A[moved]), w[moved] > 1))
  assert found >= {(1, True), (1, False), (-1, True), (-1, False)}
  outputs = set().union(*(example.expected for example in record.examples))
  assert ("chosen" in outputs) == (record.select is not None)
  assert ({"low", "high"} <= outputs) == (record.bounds is not None)


@pytest.mark.parametrize("side", ["low", "high"])
@pytest.mark.parametrize("name", [name for name in SURROGATES if SURROGATES[name].bounds])
def test_examples_of_a_bound_lie_on_both_sides_of_it(name, side):
  examples = SURROGATES[name].examples
  assert {value for x in examples for value in x.expected.get(side, ())} == {0, 1}


@pytest.mark.parametrize("axis", ["kl", "ratio"])
def test_examples_have_gradients(axis):
  for record in AXES[axis].values():
    assert all(x.expected.keys() & {"gradient", "jacobian"} for x in record.examples)


# A record declares the settings that it reads, and no others.


class Reads:
  """Settings that remember which of them were read."""

  def __init__(self, algo):
    self.algo, self.names = algo, set()

  def __getattr__(self, name):
    self.names.add(name)
    return getattr(self.algo, name)


@pytest.mark.parametrize("axis, name", RECORDS)
def test_a_record_declares_the_settings_that_it_reads(axis, name):
  record = AXES[axis][name]
  read = set()
  if axis in ("ratio", "kl", "correction_level"):  # these get no settings
    return
  for example in record.examples:
    reads = Reads(Algo(**example.settings))
    if axis == "rejection":
      log_w = jnp.log(array(example.inputs["w"]))[None, None]
      record.is_on(reads)
      jax.eval_shape(lambda x=log_w, reads=reads: record.accepts(x, x, reads))
    elif axis == "token_weight":
      record.is_on(reads)
      read |= reads.names
      reads.names.clear()
      tokens = {name: array(values)[None, None] for name, values in example.inputs.items()}
      nothing = jnp.zeros_like(tokens["mask"])
      entropies = tokens.get("entropies", nothing)
      batch = BatchTokens(nothing, nothing + 1, entropies, nothing, tokens["mask"])
      jax.eval_shape(lambda batch=batch, reads=reads: record.compute(batch, reads))
    else:
      jax.eval_shape(lambda x=example, reads=reads: RUN[axis](record, x.inputs, reads))
    read |= reads.names
  assert read == set(names_of(record.settings))


# Properties of all advantages.

PLAIN = Algo(std_eps=0.0, batch_std_eps=0.0, pass_k=2)


def random_rewards(seed, P=3, G=5, T=4, J=2, unequal=True):
  """Rewards with everything that an advantage may read, and a loss mask."""
  rng = np.random.default_rng(seed)
  ends = rng.random((P, G, T)) < 0.6
  ends[..., 0] = True
  mask = np.arange(T) < rng.integers(1, T + 1, (P, G, 1))
  rewards = Rewards(
    scores_PGJ=array(rng.integers(-1, 3, (P, G, J)) if unequal else np.full((P, G, J), 0.7)),
    weights=(1.0, 2.0)[:J],
    greedy_scores_PJ=array(rng.integers(0, 2, (P, J))),
    step_rewards_PGT=array(rng.random((P, G, T)) if unequal else np.full((P, G, T), 0.7)),
    step_ends_PGT=array(ends),
  )
  return rewards, array(mask)


def of_members(rewards, members):
  """The rewards of some members of each group."""

  def pick(name, x):
    return x[:, members] if x is not None and "G" in name.split("_")[-1] else x

  arrays = {name: value for name, value in vars(rewards).items() if name != "weights"}
  return rewards.replace(**{name: pick(name, value) for name, value in arrays.items()})


def kl_penalties(record):
  return (False, True) if record.takes_kl_penalty else (False,)


@pytest.mark.parametrize(
  "name, weighting",
  [
    (name, weighting)
    for name, record in ADVANTAGES.items()
    for weighting in ("sequence", "token")
    if weighting == Algo().batch_weighting or "batch_weighting" in names_of(record.settings)
  ],
)
def test_a_completion_that_nobody_scored_gets_zero_and_changes_nothing(name, weighting):
  """The others get what they would get in a group without it."""
  record = ADVANTAGES[name]
  algo = dataclasses.replace(PLAIN, batch_weighting=weighting)
  others = [0, 1, 3, 4]
  for seed in range(3):
    for with_kl in kl_penalties(record):
      rewards, mask = random_rewards(seed)
      if with_kl:
        rewards = rewards.replace(kl_penalty_PGT=mask * 0.1 * rewards.step_rewards_PGT)
      rewards = rewards.replace(scores_PGJ=rewards.scores_PGJ.at[:, 2].set(jnp.nan))
      found = advantages(name, rewards, mask, algo)
      expected = advantages(name, of_members(rewards, np.array(others)), mask[:, others], algo)
      assert (found[:, 2] == 0).all()
      np.testing.assert_allclose(found[:, others], expected, rtol=1e-5, atol=1e-6)
      assert np.isfinite(found).all() and (np.abs(found).max((1,)) > 0).any()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_group_that_nobody_scored_changes_nothing(name):
  rewards, mask = random_rewards(0)
  rewards = rewards.replace(scores_PGJ=rewards.scores_PGJ.at[1].set(jnp.nan))
  found = advantages(name, rewards, mask, PLAIN)
  kept = np.array([0, 2])
  alone = jax.tree.map(lambda x: x[kept], rewards)
  assert (found[1] == 0).all()
  expected = advantages(name, alone, mask[kept], PLAIN)
  np.testing.assert_allclose(found[kept], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", sorted({*ADVANTAGES} - {"reward"}))  # it compares with nothing
def test_equal_rewards_have_advantage_exactly_zero(name):
  """0.7 twelve times: the mean in float32 is not 0.7, and the standard deviation is not 0."""
  rewards, mask = random_rewards(0, G=12, J=1, unequal=False)
  rewards = rewards.replace(greedy_scores_PJ=jnp.full((3, 1), 0.7))
  assert (advantages(name, rewards, mask, PLAIN) == 0).all()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_whether_a_group_of_equal_rewards_teaches(name):
  """The totals of the first group are equal. Its steps and its single scores differ."""
  record = ADVANTAGES[name]
  rewards, mask = random_rewards(0, G=4)
  scores = rewards.scores_PGJ.at[0].set(array([[0, 2], [2, 1], [4, 0], [2, 1]]))
  rewards = rewards.replace(scores_PGJ=scores)
  assert jnp.unique(rewards.total_PG[0]).size == 1
  found = advantages(name, rewards, mask, PLAIN)
  assert bool((found[0] != 0).any()) == record.equal_rewards_teach


@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_advantage_says_what_it_needs(name):
  record = ADVANTAGES[name]
  rewards, mask = random_rewards(0)
  full = advantages(name, rewards, mask, PLAIN)
  assert (full.ndim == 3) == record.per_token
  if record.needs_greedy:
    better = rewards.replace(greedy_scores_PJ=rewards.greedy_scores_PJ + 1)
    assert (advantages(name, better, mask, PLAIN) != full).any()
  else:
    rewards = rewards.replace(greedy_scores_PJ=None)
  if record.needs_steps:
    turned = rewards.replace(step_rewards_PGT=rewards.step_rewards_PGT[::-1])
    assert (advantages(name, turned, mask, PLAIN) != full).any()
  else:
    rewards = rewards.replace(step_rewards_PGT=None, step_ends_PGT=None)
  np.testing.assert_array_equal(advantages(name, rewards, mask, PLAIN), full)
  penalised = rewards.replace(kl_penalty_PGT=0.3 * mask * jnp.arange(4.0))
  if record.takes_kl_penalty:
    found = advantages(name, penalised, mask, PLAIN)
    full = jnp.broadcast_to(full[..., None], (*full.shape, 4)) if found.ndim == 3 else full
    assert np.abs(found - full).max() > 1e-3
  if record.counts_right_answers:
    signs = rewards.replace(scores_PGJ=jnp.sign(rewards.score_PG)[..., None], weights=(1.0,))
    np.testing.assert_array_equal(advantages(name, signs, mask, PLAIN), full)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_members_and_prompts_may_be_permuted(name):
  rng = np.random.default_rng(0)
  rewards, mask = random_rewards(1, G=8)
  p, g = rng.permutation(3), rng.permutation(8)
  moved = jax.tree.map(lambda x: x[p], of_members(rewards, g))
  expected = advantages(name, rewards, mask, PLAIN)[p][:, g]
  np.testing.assert_allclose(advantages(name, moved, mask[p][:, g], PLAIN), expected, atol=1e-6)


# Properties of the other axes.


@pytest.mark.parametrize("name", RATIOS)
def test_a_ratio_is_one_where_nothing_has_moved_and_says_whose_gradient_it_has(name):
  lp, mask = jnp.log(array([[[0.3, 0.6, 0.9]]])), jnp.ones((1, 1, 3))
  np.testing.assert_array_equal(RATIOS[name].compute(lp, lp, mask), np.ones((1, 1, 3)))
  old = lp - 0.1
  jacobian = jax.jacobian(lambda lp: RATIOS[name].compute(lp, old, mask))(lp)[0, 0, :, 0, 0]
  assert bool(jacobian[0, 1] != 0) == RATIOS[name].shared_by_row


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_an_aggregation_of_equal_values_of_full_rows_is_that_value_times_a_constant(name):
  """Its weight does not depend on the values. Its mean is linear in them."""
  compute = functools.partial(AGGREGATIONS[name].compute, algo=Algo(length_norm=4))
  mask = jnp.ones((2, 3, 4)).at[0, 0, 2:].set(0)
  values = array(np.random.default_rng(0).normal(size=(2, 3, 4)))
  (total, weight), (double, same) = compute(values, mask), compute(2 * values, mask)
  np.testing.assert_allclose(double, 2 * total, rtol=1e-6)
  assert weight == same > 0


def test_records_are_found_under_their_settings():
  """The names of the axes are settings whose default is registered."""
  for axis, records in AXES.items():
    if axis not in ("rejection", "token_weight"):
      assert getattr(Algo(), axis) in records


@pytest.mark.parametrize("name", SURROGATES)
def test_a_surrogate_with_bounds_reports_where_they_are_at_work(name):
  """A record that reads clip_low or clip_high has the function of the metrics clip_ratio/*."""
  reads_bounds = {"clip_low", "clip_high"} & set(names_of(SURROGATES[name].settings))
  assert bool(reads_bounds) == (SURROGATES[name].bounds is not None)
