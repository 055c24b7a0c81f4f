"""The loop over layers: straight code on a CPU, with the results of a loop."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import model
from grpo_jax.model import blocks
from grpo_jax.model.layers import RMSNorm
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
  monkeypatch.setattr(blocks, "_MOST_UNROLLED_LAYERS", {"cpu": 2})
  loop = gradient_program(remat).lower(params)
  assert "stablehlo.while" not in straight.as_text()
  assert "stablehlo.while" in loop.as_text()
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, 1e-4, 1e-4),
    straight.compile()(params),
    loop.compile()(params),
  )


def test_the_backward_pass_of_an_mlp_saves_no_activation_function():
  """Two arrays [B, T, F]: the factors. The activation and the hidden units are not saved."""
  params = jax.tree.map(
    lambda x: x[0],
    jax.jit(model.init, static_argnums=1)(jax.random.key(0), CONFIG)["layers_0"]["mlp"],
  )
  mlp = MLP(CONFIG)
  x_BTD = jnp.ones((2, 5, CONFIG.embed_dim))
  _, vjp = jax.vjp(lambda x: mlp.apply({"params": params}, x)[0], x_BTD)
  saved = [leaf for leaf in jax.tree.leaves(vjp) if leaf.size == 2 * 5 * CONFIG.mlp_dim]
  assert len(saved) == 2


def test_the_backward_pass_of_a_norm_saves_its_inputs_alone():
  """Flax's would save three float32 arrays [B, T, D], of which these have half as many bytes."""
  x_BTD = jnp.ones((2, 5, 64), jnp.bfloat16)
  norm = RMSNorm(dtype=jnp.bfloat16)
  params = norm.init(jax.random.key(0), x_BTD)
  _, vjp = jax.vjp(norm.apply, params, x_BTD)
  saved = [leaf.dtype for leaf in jax.tree.leaves(vjp) if leaf.size == x_BTD.size]
  assert saved == [jnp.bfloat16]


def test_projections_of_the_same_inputs_save_them_once():
  """A layer keeps 4 arrays [B, T, D] and 2 [B, T, F] beside those of attention.

  They are the inputs of both norms, the normed inputs of attention and MLP, and the MLP's factors.
  """
  config = dataclasses.replace(CONFIG, embed_dim=24, mlp_dim=40)
  params = jax.jit(model.init, static_argnums=1)(jax.random.key(0), config)

  def hidden(params):
    return model.group_features(params, config, TOKENS, GROUPS)[0]

  _, vjp = jax.vjp(hidden, params)
  sizes = [leaf.size for leaf in jax.tree.leaves(vjp)]
  tokens = config.num_layers * TOKENS.size
  assert sizes.count(tokens * config.mlp_dim) == 2
  assert sizes.count(tokens * config.embed_dim) == 4
