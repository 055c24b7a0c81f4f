"""Models that see images compute what transformers computes (tests/golden/make_vision.py).

Run `pytest -s -n 0` to print the largest differences.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import model
from grpo_jax.types import Images

GOLDEN = Path(__file__).parent / "golden" / "vision"
BOUND = 1e-4


@pytest.fixture(scope="module", params=sorted(x.name for x in GOLDEN.iterdir()))
def golden(request):
  config, params = model.load(GOLDEN / request.param, vision=True)
  return request.param, config, params, np.load(GOLDEN / request.param / "expected.npz")


def images_of(expected):
  return Images(
    patches_PINC=jnp.asarray(expected["patches"]),
    places_PIN2=jnp.asarray(expected["places"]),
    seen_PS2=jnp.asarray(expected["seen"]),
    positions_PS3=jnp.asarray(expected["positions"]) if "positions" in expected else None,
    next_P=jnp.asarray(expected["next"]) if "next" in expected else None,
  )


def check(name, how, found, expected, valid_BT):
  difference = np.abs(np.where(valid_BT[..., None], found - expected, 0)).max()
  print(f"{name}, {how}: largest difference of a logit {difference:.1e}")
  assert valid_BT.any() and np.abs(expected[valid_BT]).max() > 1 and difference <= BOUND


def test_logits_are_those_of_transformers(golden):
  """Rows of different lengths that see 0, 1 and 3 images, in one pass."""
  name, config, params, expected = golden
  tokens_BT = jnp.asarray(expected["tokens"])
  positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
  valid_BT = np.asarray(positions_BT) < expected["lengths"][:, None]

  @jax.jit
  def run(params):
    visual = model.encode(params, config, images_of(expected))
    return model.forward(params, config, tokens_BT, positions_BT, visual=visual)[0]

  check(name, "one pass", run(params), expected["logits"], valid_BT)
