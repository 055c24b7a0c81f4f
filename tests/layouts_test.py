"""The order of axes in memory is fixed on each device of a mesh for its own part."""

import re

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from grpo_jax.config import Mesh
from grpo_jax.model.layouts import in_order
from grpo_jax.parallel.mesh import make_mesh
from grpo_jax.parallel.sharding import batch_sharding
from grpo_jax.sampler.logits import _with_rows_varying_fastest as rows_fastest


@pytest.fixture(scope="module")
def rows():
  """The sharding of rows on four devices, two of which split heads and the vocabulary."""
  return batch_sharding(make_mesh(Mesh(data=2, fsdp=1, tensor=2), jax.devices()[:4]))


def shapes_with_an_order(function, x):
  """The shapes of the arrays whose order is fixed, in the program for a TPU."""
  text = jax.jit(function).trace(x).lower(lowering_platforms=("tpu",)).as_text()
  return re.findall(r"@LayoutConstraint\(.*\(tensor<([\dx]+)xf32>\)", text)


def test_each_device_fixes_the_order_of_its_part(rows):
  """XLA's partitioner would give each device the whole array first."""
  x, spec = jnp.arange(8 * 6.0).reshape(8, 6), PartitionSpec(rows.spec[0], "tensor")
  assert shapes_with_an_order(lambda x: in_order(x, (1, 0), rows, spec), x) == ["4x3"]
  assert shapes_with_an_order(lambda x: in_order(x, (1, 0), None, spec), x) == ["8x6"]


def test_logits_stay_where_they_are(rows):
  """With fewer than 64 rows on a device, or none of several devices, nothing is fixed."""
  x = jnp.zeros((256, 34))
  assert shapes_with_an_order(lambda x: rows_fastest(x, rows), x) == ["128x17"]
  assert shapes_with_an_order(lambda x: rows_fastest(x, rows), x[:, :33]) == ["128x33"]
  assert shapes_with_an_order(lambda x: rows_fastest(x, rows), x[:64]) == []
  assert shapes_with_an_order(lambda x: rows_fastest(x, None), x) == ["256x34"]
  np.testing.assert_array_equal(rows_fastest(x, rows), x)
