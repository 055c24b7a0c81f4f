"""Every case of tests/golden/objectives and of $GOLDEN_DIR: numbers of TRL, verl and by hand.

The README there has the schema, the tolerances and the formulas. A field that `golden_cases.py`
does not know fails.
"""

import os
from pathlib import Path

import golden_cases
import jax
import numpy as np
import pytest

FOLDERS = [golden_cases.FOLDER]
if os.environ.get("GOLDEN_DIR"):
  FOLDERS.append(Path(os.environ["GOLDEN_DIR"]))
NAMED = [
  (f"{name}-{case['name']}", case)
  for folder in FOLDERS
  for name, cases in golden_cases.load(folder).items()
  for case in cases
]


# Each case in float64, whose tolerance is smaller, and every twentieth in float32.
CASES = [
  pytest.param(case, precision, id=f"{name}-{precision}", marks=pytest.mark.slow if is_slow else ())
  for number, (name, case) in enumerate(NAMED)
  for precision, is_slow in (("float64", False), ("float32", number % 20 != 0))
]


@pytest.mark.parametrize("case, precision", CASES)
def test_golden(case, precision):
  assert case.keys() <= golden_cases.KEYS
  with jax.enable_x64(precision == "float64"):
    for name, ours, expected in golden_cases.compute(case, precision):
      assert ours.dtype == precision
      tolerance = 1e-7 if precision == "float64" else 1e-5 * (1 + np.abs(expected))
      assert (np.abs(ours - expected) <= tolerance).all(), f"{name}: {ours}, expected {expected}"
      if "exactly 0" in case.get("note", ""):
        assert (ours[expected == 0] == 0).all(), name


def test_all_cases_are_there():
  assert len(NAMED) >= 316
