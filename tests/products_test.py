"""Products of two operands with a float32 result, as models write them, on a CPU in each dtype.

XLA's CPU compiler has no code for some orders of axes of bfloat16 products with a float32 result.
It says so when such a product runs, and not when it compiles it.
"""

import ast
from pathlib import Path

from families_run_test import FAMILIES, family_config
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_run import with_section
from small_vision import FAMILIES as VISION
from small_vision import vision_config
from vision_run_test import take_steps

from grpo_jax.model import layers

MODEL = Path(layers.__file__).parent


def equations():
  """The equations of every `einsum` of the package's models that is not jnp.einsum."""
  found = set()
  for file in sorted(MODEL.rglob("*.py")):
    for node in ast.walk(ast.parse(file.read_text())):
      is_ours = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
      if is_ours and node.func.id == "einsum":
        # In attention/softmax.py, {a} stands for the axes of a group.
        text = ast.unparse(node.args[0]).strip("f'\"")
        found.add(text.replace("{a}", "pkg"))
  return sorted(equation for equation in found if "->" in equation and "{" not in equation)


def test_the_equations_of_models_are_found():
  assert {"nae,qae->aqn", "aqn,nae->qae", "pkgrte,pkse->pkgrts"} <= set(equations())


def operands(equation, dtype, unit):
  letters = sorted(set(equation) - set(",->"))
  sizes = {letter: unit * (place % 3 + 1) for place, letter in enumerate(letters)}
  keys = jax.random.split(jax.random.key(0))
  names = equation.split("->")[0].split(",")
  shapes = [[sizes[letter] for letter in name] for name in names]
  return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes)]


def slow(*values):
  return pytest.param(*values, marks=pytest.mark.slow)


# A product of latents, one of an attention, and one of an MLP.
FAST = "nae,qae->aqn", "pkgre,pkse->pkgrs", "btd,dx->btx"


# The unit is that of the sizes of axes: the compiler looks at sizes, too.
@pytest.mark.parametrize("unit", [slow(1), 8])
@pytest.mark.parametrize("mapped", [False, slow(True)], ids=["alone", "mapped"])
@pytest.mark.parametrize("dtype", [slow("float32"), "bfloat16", slow("float16")])
@pytest.mark.parametrize(
  "equation", [equation if equation in FAST else slow(equation) for equation in equations()]
)
def test_a_product_and_its_gradient_run_and_are_those_of_float32(equation, dtype, mapped, unit):
  x, y = operands(equation, dtype, unit)

  def alone(x, y):
    return layers.einsum(equation, x, y)

  product = jax.vmap(alone) if mapped else alone
  if mapped:
    x, y = jnp.stack([x, -x]), jnp.stack([y, 2 * y])

  def of_float32(x, y):
    inputs, output = equation.split("->")
    letters = [f"Z{name}" if mapped else name for name in (*inputs.split(","), output)]
    return jnp.einsum(f"{letters[0]},{letters[1]}->{letters[2]}", x, y, precision="highest")

  def weighted(product):
    # The gradient of a sum of products with other weights than 1, rounded as the operands are.
    def total(x, y):
      out = product(x, y)
      weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).astype(dtype).reshape(out.shape)
      return (out * weights).sum()

    return total

  wide = x.astype(jnp.float32), y.astype(jnp.float32)
  out = jax.jit(product)(x, y)
  assert out.dtype == jnp.float32
  np.testing.assert_allclose(out, of_float32(*wide), rtol=1e-5, atol=1e-4)
  expected = jax.grad(weighted(of_float32), (0, 1))(*wide)
  # Each gradient is a float32 sum that is rounded once, to the dtype of its operand.
  bound = {"float32": 1e-5, "bfloat16": 2**-8, "float16": 2**-11}[dtype]
  for gradient, right in zip(jax.jit(jax.grad(weighted(product), (0, 1)))(x, y), expected):
    assert gradient.dtype == x.dtype
    np.testing.assert_allclose(np.float32(gradient), right, rtol=bound, atol=1e-4)


# The same through runs, whose programs have products that no file of the models writes down.


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_takes_a_step_in_bfloat16(family, tmp_path):
  config = with_section(family_config(family, tmp_path), "model", dtype="bfloat16")
  take_steps(config, tmp_path, 1)


@pytest.mark.slow
@pytest.mark.parametrize("vision", ["frozen", "trained"])
@pytest.mark.parametrize("family", VISION)
def test_every_family_with_images_takes_a_step_in_bfloat16(family, vision, tmp_path):
  config = with_section(vision_config(tmp_path, vision, family), "model", dtype="bfloat16")
  take_steps(config, tmp_path, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
  "section, values",
  [
    ("lora", dict(rank=2)),
    ("lora", dict(rank=2, base_dtype="int8")),
    ("sampling", dict(cache_dtype="int8")),
    ("sampling", dict(dtype="bfloat16", weights_dtype="int8")),
    ("learner", dict(remat=True)),
  ],
)
def test_every_way_to_compute_takes_a_step_in_bfloat16(section, values, tmp_path):
  config = with_section(family_config("qwen3_5_text", tmp_path), "model", dtype="bfloat16")
  take_steps(with_section(config, section, **values), tmp_path, 1)
