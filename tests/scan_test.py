"""The loop over layers: straight code on a CPU, with the results of a loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import model
from grpo_jax.model import blocks
from grpo_jax.model.mlps import MLP

CONFIG = model.ModelConfig(
  vocab_size=31, embed_dim=16, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=24
)
TOKENS = jnp.arange(14).reshape(2, 7)
GROUPS = model.Groups(jnp.array([3, 2]), prompt_slots=3, completions=2, slots=2)


def gradient_program(remat):
  """The gradient of a number that depends on all hidden states."""

  def loss(params):
    hidden, _ = model.group_features(params, CONFIG, TOKENS, GROUPS, remat=remat)
    return (hidden**2 * jnp.arange(hidden.size).reshape(hidden.shape)).sum()

  return jax.jit(jax.grad(loss))


@pytest.mark.slow
@pytest.mark.parametrize(
  "remat",
  [
    "",
    "nothing_saveable",
  ],
)
def test_a_cpu_runs_straight_code_that_equals_a_loop(monkeypatch, remat):
  params = jax.jit(model.init, static_argnums=1)(jax.random.key(0), CONFIG)
  straight = gradient_program(remat).lower(params)
  monkeypatch.setattr(blocks, "_MOST_UNROLLED_LAYERS", 2)
  loop = gradient_program(remat).lower(params)
  assert "stablehlo.while" not in straight.as_text()
  assert "stablehlo.while" in loop.as_text()
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, 1e-4, 1e-4),
    straight.compile()(params),
    loop.compile()(params),
  )


def test_the_backward_pass_of_an_mlp_saves_no_activation_function():
  """Three arrays [B, T, F]: the two factors and their product. The activation is not saved."""
  params = jax.tree.map(
    lambda x: x[0],
    jax.jit(model.init, static_argnums=1)(jax.random.key(0), CONFIG)["layers_0"]["mlp"],
  )
  mlp = MLP(CONFIG)
  x_BTD = jnp.ones((2, 5, CONFIG.embed_dim))
  _, vjp = jax.vjp(lambda x: mlp.apply({"params": params}, x)[0], x_BTD)
  saved = [leaf for leaf in jax.tree.leaves(vjp) if leaf.size == 2 * 5 * CONFIG.mlp_dim]
  assert len(saved) == 3
