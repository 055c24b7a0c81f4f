"""How a case of tests/golden/objectives is computed by the code. The README there has the schema.

`golden_test.py` compares the numbers in double and single precision, on a CPU.
`experiments/accelerator_parts.py` does so on the device of a machine.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import masked
from grpo_jax.algo import token_selection
from grpo_jax.algo.advantages import ADVANTAGES
from grpo_jax.algo.corrections import correction_weights
from grpo_jax.algo.kl import KL
from grpo_jax.algo.objective import objective, totals
from grpo_jax.algo.settings import Algo
from grpo_jax.algo.token_selection.select import select
from grpo_jax.types import Batch, Coefficients, Rewards, TokenStats

FOLDER = Path(__file__).parent / "golden" / "objectives"
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
# P, G and T are padded to multiples of these. Padding changes nothing, and few shapes are compiled.
PADDED = (4, 8, 12)
OUR_NAMES = {"k": "pass_k"}  # of settings whose names differ
NO_BOUND = {"clip_low": 1.0, "correction_low": 0.0, "correction_high": 0.0}  # what null means


def load(folder):
  """The cases of each file of a folder, by the file's name without .json."""
  return {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}


def padded(x, sizes, value=0):
  return np.pad(x, [(0, -n % size) for n, size in zip(x.shape, sizes)], constant_values=value)


def algo_of(case):
  settings = {
    OUR_NAMES.get(name, name): NO_BOUND[name] if value is None else value
    for name, value in case["algo"].items()
  }
  settings.pop("reward_weights", None)
  if case["algo"].get("clip_low", 0) is None:
    assert settings["surrogate"] in ("ppo_clip", "cispo"), "only a ratio can be open below"
  settings.setdefault("batch_std_eps", settings.get("std_eps", Algo().batch_std_eps))
  unknown = settings.keys() - vars(Algo()).keys()
  assert not unknown, f"settings that the code cannot express: {unknown}"
  return Algo(**settings)


class Inputs:
  """The arrays of a case as [P, G, ...] in `dtype`, after rounding. Each of them must be read."""

  def __init__(self, case, dtype, rounded):
    self.P, self.G, self.dtype = case["num_prompts"], case["group_size"], dtype
    self._rounded = rounded
    self._unread = dict(case["inputs"])

  def raw(self, name):
    return self._unread.pop(name, None)

  def rows(self, name):
    """[P, G, T], or [P, G, 1] for one number per completion. None if the case does not have it."""
    value = self.raw(name)
    if value is None:
      return None
    x = np.array(value, float).reshape(self.P, self.G, -1)
    x = padded(x, PADDED if np.ndim(value[0]) else (*PADDED[:2], 1))
    return jnp.asarray(jnp.asarray(x, self._rounded), self.dtype)

  def finish(self):
    assert not self._unread, f"inputs that nothing read: {set(self._unread)}"


def run_advantages(case, inputs, algo):
  record = ADVANTAGES[algo.advantage]
  rewards, mask_PGT = (steps_of if record.needs_steps else scores_of)(case, inputs)
  return {"advantages": record.compute(rewards, mask_PGT, algo)}


def steps_of(case, inputs):
  G, dtype = inputs.G, inputs.dtype
  mask_PGT = inputs.rows("mask")
  rewards_PGT, ends_PGT = np.zeros(mask_PGT.shape), np.zeros(mask_PGT.shape)
  rows = zip(inputs.raw("step_rewards"), inputs.raw("step_ends"), strict=True)
  for row, (values, ends) in enumerate(rows):
    assert len(set(ends)) == len(ends) == len(values)
    rewards_PGT[row // G, row % G, ends] = values
    ends_PGT[row // G, row % G, ends] = 1
  rewards = Rewards(
    scores_PGJ=jnp.zeros((*mask_PGT.shape[:2], 1)),
    weights=(1.0,),
    step_rewards_PGT=jnp.asarray(rewards_PGT, dtype),
    step_ends_PGT=jnp.asarray(ends_PGT, dtype),
  )
  return rewards, mask_PGT


def scores_of(case, inputs):
  """Rows and groups that pad are not scored."""
  P, G, dtype = inputs.P, inputs.G, inputs.dtype
  scores = inputs.raw("rewards")
  scores = scores if isinstance(scores[0], list) else [scores]
  scores_PGJ = np.moveaxis(np.array(scores, float).reshape(-1, P, G), 0, -1)  # null becomes NaN
  weights = case["algo"].get("reward_weights", [1.0] * len(scores))
  lengths_PG1 = np.array(inputs.raw("lengths") or [1] * (P * G)).reshape(P, G, 1)
  mask_PGT = padded(np.arange(lengths_PG1.max()) < lengths_PG1, PADDED)
  scores_PGJ = jnp.asarray(padded(scores_PGJ, (*PADDED[:2], 1), np.nan), dtype)
  return Rewards(scores_PGJ=scores_PGJ, weights=tuple(weights)), jnp.asarray(mask_PGT, dtype)


def run_objective(case, inputs, algo):
  lp, old, mask = (inputs.rows(name) for name in ("logprobs", "old_logprobs", "mask"))
  A, entropies = inputs.rows("advantages"), inputs.rows("entropies")
  A = jnp.broadcast_to(A, lp.shape)
  entropies = jnp.zeros_like(lp) if entropies is None else entropies
  batch = Batch(
    mask_PGT=mask,
    advantages_PGT=A,
    behavior_logprobs_PGT=inputs.rows("sampler_logprobs"),
    old_logprobs_PGT=old,
    ref_logprobs_PGT=inputs.rows("ref_logprobs"),
  )
  if token_selection.is_needed(algo):
    batch = batch.replace(selection=select(lp, old, entropies, A, mask, algo))
  of_batch = totals(batch, Coefficients(kl=algo.kl_coef, entropy=algo.entropy_coef), algo)

  def loss(lp, entropies):
    return objective(TokenStats(lp, entropies), batch, of_batch, algo)[0]

  value, (of_logprobs, of_entropies) = jax.value_and_grad(loss, (0, 1))(lp, entropies)
  return {"loss": value, "grad_logprobs": of_logprobs, "grad_entropies": of_entropies}


def run_kl(case, inputs, algo):
  lp, ref, mask = (inputs.rows(name) for name in ("logprobs", "ref_logprobs", "mask"))

  def estimate(lp):
    return masked.masked(KL[algo.kl].compute(lp, ref), mask)

  return {"kl": estimate(lp), "grad_logprobs": jax.grad(lambda lp: estimate(lp).sum())(lp)}


def run_correction(case, inputs, algo):
  arrays = (inputs.rows(name) for name in ("old_logprobs", "sampler_logprobs", "mask"))
  return {"weights": correction_weights(*arrays, algo)}


KINDS = {
  "advantages": run_advantages,
  "objective": run_objective,
  "kl": run_kl,
  "correction": run_correction,
}


def compute(case, precision, rounded=None):
  """(name, ours, expected) for each number that the case expects, without padding.

  Args:
    case: The case.
    precision: The dtype of the computation.
    rounded: The dtype that log-probs, entropies and advantages are rounded to before. None means
      `precision`.
  """
  inputs = Inputs(case, precision, rounded or precision)
  found = KINDS[case["kind"]](case, inputs, algo_of(case))
  inputs.finish()
  for name, expected in case["expected"].items():
    expected, ours = np.array(expected, float), np.asarray(found[name])
    if ours.ndim:
      ours = ours[: inputs.P, : inputs.G]
    if ours.ndim == 3:
      ours = ours[..., : expected.shape[-1]]
    yield name, ours.reshape(expected.shape), expected
