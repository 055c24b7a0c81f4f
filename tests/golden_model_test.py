"""The decoder computes what transformers computes, from the same files (tests/golden/make_qwen2.py)."""
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import model

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", ["qwen2_tied", "qwen2_untied"])
def test_logits_are_those_of_transformers(name):
  expected = np.load(GOLDEN / name / "expected.npz")
  config, params = model.load(GOLDEN / name)
  tokens_BT = jnp.asarray(expected["tokens"])
  positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
  logits_BTV, _ = model.forward(params, config, tokens_BT, positions_BT)
  valid_BT = np.arange(tokens_BT.shape[1]) < expected["lengths"][:, None]
  largest = np.abs(np.where(valid_BT[..., None], logits_BTV - expected["logits"], 0)).max()
  print(f"{name}: largest difference of a logit {largest:.1e}")  # pytest -s shows it
  assert valid_BT.any(1).all() and largest <= 1e-4
