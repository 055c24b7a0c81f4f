"""The loop over layers: straight code on a CPU, with the results of a loop."""

import dataclasses
import json
from pathlib import Path

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


FAMILIES = Path(__file__).parent / "golden" / "families"
# Those of Gemma 4 say of each layer by its number what it is, and are not repeated here.
REPEATED = sorted(folder.name for folder in FAMILIES.iterdir() if "gemma4" not in folder.name)
FAST = ("gpt_oss",)


def with_layers(name, times, folder):
  """The model of a family with its layers repeated: at least 12 of them, so many times."""
  values = json.loads((FAMILIES / name / "config.json").read_text())
  part = values.get("text_config", values)
  number = part["num_hidden_layers"]
  times *= -(-12 // number)
  for key, value in part.items():
    if isinstance(value, list) and len(value) == number:
      part[key] = value * times
  if part.get("mlp_only_layers"):
    own = part["mlp_only_layers"]
    part["mlp_only_layers"] = [layer + number * i for i in range(times) for layer in own]
  part["num_hidden_layers"] = number * times
  (folder / "config.json").write_text(json.dumps(values))
  return model.load_model_config(folder, vision=False)


def instructions(config):
  """How many there are in the gradient's program for a TPU, which is not compiled."""
  tokens = TOKENS % config.vocab_size
  params = jax.eval_shape(lambda key: model.init(key, config), jax.random.key(0))

  def loss(params):
    return (model.group_features(params, config, tokens, GROUPS)[0] ** 2).sum()

  lowered = jax.jit(jax.grad(loss)).trace(params).lower(lowering_platforms=("tpu",))
  return lowered.as_text().count(" = ")


@pytest.mark.slow
@pytest.mark.parametrize(
  "name", [pytest.param(x, marks=() if x in FAST else pytest.mark.slow) for x in REPEATED]
)
def test_twice_the_layers_are_the_same_program(name, tmp_path):
  """Layers that are alike have one body, whatever mixes their tokens, however they alternate."""
  few, many = (with_layers(name, count, tmp_path) for count in (1, 2))
  assert many.num_layers == 2 * few.num_layers
  assert instructions(many) == instructions(few)


@pytest.mark.slow
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


@pytest.mark.slow
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
