"""Every case of tests/golden/objectives, and of $GOLDEN_DIR: numbers of TRL, of verl and by hand, with their gradients.

Its README has the schema, the tolerances and the formulas. A field that this file does not know fails.
"""

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import masked
from grpo_jax.algo import presets, selection
from grpo_jax.algo.advantages import ADVANTAGES
from grpo_jax.algo.corrections import correction_weights
from grpo_jax.algo.kl import KL
from grpo_jax.algo.objective import objective, whole
from grpo_jax.config import Algo
from grpo_jax.types import Batch, Coefs, Rewards, TokenStats

FOLDERS = [
  Path(__file__).parent / "golden" / "objectives",
  *map(Path, filter(None, [os.environ.get("GOLDEN_DIR")])),
]
CASES = [
  pytest.param(case, id=f"{file.stem}-{case['name']}")
  for folder in FOLDERS
  for file in sorted(folder.glob("*.json"))
  for case in json.loads(file.read_text())
]
KEYS = {
  "name",
  "source",
  "kind",
  "algo",
  "reference",
  "num_prompts",
  "group_size",
  "inputs",
  "expected",
  "note",
}
PADDED = (
  4,
  8,
  12,
)  # P, G and T become multiples of these: padding changes nothing, and few shapes are compiled
NAMES = {"k": "pass_k"}  # of settings, where ours differ
NO_BOUND = {"clip_low": 1.0, "correction_low": 0.0, "correction_high": 0.0}  # for null


def algo_of(case):
  settings = {NAMES.get(k, k): NO_BOUND[k] if v is None else v for k, v in case["algo"].items()}
  settings.pop("reward_weights", None)
  if case["algo"].get("clip_low", 0) is None:
    assert settings["surrogate"] in ("ppo_clip", "cispo"), (
      "clip_low null: only a bound of the ratio can be open below"
    )
  settings.setdefault("batch_std_eps", settings.get("std_eps", presets.DEFAULTS["batch_std_eps"]))
  unknown = settings.keys() - presets.DEFAULTS.keys()
  assert not unknown, f"settings that the code cannot express: {unknown}"
  return Algo(**{**presets.DEFAULTS, **settings})


class Inputs:
  """A case's arrays as [P, G, ...]; every one of them must be asked for."""

  def __init__(self, case, dtype):
    self.P, self.G, self.dtype = case["num_prompts"], case["group_size"], dtype
    self._left = dict(case["inputs"])

  def raw(self, name):
    return self._left.pop(name, None)

  def rows(self, name):
    value = self.raw(name)
    if value is None:
      return None
    x = np.array(value, float)
    x = x.reshape(self.P, self.G, -1)  # a number per completion becomes one token's
    x = np.pad(
      x, [(0, -n % of) for n, of in zip(x.shape, PADDED if np.ndim(value[0]) else (*PADDED[:2], 1))]
    )
    return jnp.asarray(x, self.dtype)

  def done(self):
    assert not self._left, f"inputs that nothing read: {set(self._left)}"


def advantages(case, inputs, algo):
  P, G, dtype = inputs.P, inputs.G, inputs.dtype
  if algo.advantage == "process":
    mask_PGT = inputs.rows("mask")
    rewards, ends = np.zeros(mask_PGT.shape), np.zeros(mask_PGT.shape)
    for row, (values, places) in enumerate(
      zip(inputs.raw("step_rewards"), inputs.raw("step_ends"), strict=True)
    ):
      assert len(set(places)) == len(places) == len(values)
      rewards[row // G, row % G, places], ends[row // G, row % G, places] = values, 1
    r = Rewards(
      jnp.zeros((1, P, G)),
      jnp.ones(1),
      mask_PGT,
      step_rewards_PGT=jnp.asarray(rewards, dtype),
      step_ends_PGT=jnp.asarray(ends, dtype),
    )
  else:
    rewards = inputs.raw("rewards")
    rewards = np.array(
      rewards if isinstance(rewards[0], list) else [rewards], float
    )  # null becomes NaN
    scores_KPG = jnp.asarray(rewards.reshape(-1, P, G), dtype)
    weights = case["algo"].get("reward_weights", [1.0] * len(scores_KPG))
    lengths = np.array(inputs.raw("lengths") or [1] * (P * G)).reshape(P, G, 1)
    mask_PGT = jnp.asarray(np.arange(lengths.max()) < lengths, dtype)
    r = Rewards(scores_KPG, jnp.asarray(weights, dtype), mask_PGT)
  return {"advantages": ADVANTAGES[algo.advantage](r, algo)}


def loss(case, inputs, algo):
  lp, old, mask = (inputs.rows(name) for name in ("logprobs", "old_logprobs", "mask"))
  A, entropies = inputs.rows("advantages"), inputs.rows("entropies")
  A = jnp.broadcast_to(A, lp.shape)
  entropies = jnp.zeros_like(lp) if entropies is None else entropies
  batch = Batch(
    None,
    None,
    None,
    mask,
    A,
    None,
    sampling_logprobs_PGT=inputs.rows("sampler_logprobs"),
    old_logprobs_PGT=old,
    ref_logprobs_PGT=inputs.rows("ref_logprobs"),
  )
  if selection.is_needed(algo):
    batch = batch.replace(selection=selection.select(lp, old, entropies, A, mask, algo))
  of_all = whole(batch, Coefs(algo.kl_coef, algo.entropy_coef), algo)
  value = lambda lp, entropies: objective(TokenStats(lp, entropies), batch, of_all, algo)[0]
  value, (of_logprobs, of_entropies) = jax.value_and_grad(value, (0, 1))(lp, entropies)
  return {"loss": value, "grad_logprobs": of_logprobs, "grad_entropies": of_entropies}


def kl(case, inputs, algo):
  lp, ref, mask = (inputs.rows(name) for name in ("logprobs", "ref_logprobs", "mask"))
  estimate = lambda lp: masked.masked(KL[algo.kl](lp, ref), mask)
  return {"kl": estimate(lp), "grad_logprobs": jax.grad(lambda lp: estimate(lp).sum())(lp)}


def correction(case, inputs, algo):
  return {
    "weights": correction_weights(
      *(inputs.rows(n) for n in ("old_logprobs", "sampler_logprobs", "mask")), algo
    )
  }


KINDS = {"advantages": advantages, "objective": loss, "kl": kl, "correction": correction}


@pytest.mark.parametrize("precision", ["float64", "float32"])
@pytest.mark.parametrize("case", CASES)
def test_golden(case, precision):
  assert case.keys() <= KEYS
  with jax.enable_x64(precision == "float64"):
    inputs = Inputs(case, precision)
    found = KINDS[case["kind"]](case, inputs, algo_of(case))
    inputs.done()
    for name, expected in case["expected"].items():
      expected = np.array(expected, float)
      ours = np.asarray(found[name])
      assert ours.dtype == precision
      tolerance = 1e-7 if precision == "float64" else 1e-5 * (1 + np.abs(expected))
      ours = ours[: inputs.P, : inputs.G, : expected.shape[-1]] if ours.ndim == 3 else ours
      ours = ours.reshape(expected.shape)
      assert (np.abs(ours - expected) <= tolerance).all(), (
        f"{name}: {ours} where {expected} must come out"
      )
      if "exactly 0" in case.get("note", ""):
        assert (ours[expected == 0] == 0).all(), name


def test_there_are_cases():
  assert len(CASES) >= 316
