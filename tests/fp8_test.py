"""Checkpoints in FP8: a scale for each block of a matrix, or one for all of it."""

import json
from pathlib import Path
import shutil

import jax
from jax.sharding import PartitionSpec
import ml_dtypes
import numpy as np
import pytest

from grpo_jax import model
from grpo_jax.config import Mesh
from grpo_jax.model.huggingface import fp8
from grpo_jax.parallel.mesh import make_mesh
from grpo_jax.parallel.sharding import param_specs
from grpo_jax.settings import ConfigError

FOLDER = Path(__file__).parent / "golden" / "families" / "qwen3_fp8"


def matrix(rows, columns):
  values = np.random.default_rng(0).normal(size=(rows, columns)).astype(np.float32)
  return values.astype(ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize("part", [(0, 7, 0, 5), (3, 6, 2, 5), (6, 7, 4, 5), (2, 2, 0, 5)])
def test_each_number_has_the_scale_of_its_block(part):
  """The last blocks are cut off by the end of the matrix."""
  whole, scales = matrix(7, 5), np.arange(1.0, 7.0, dtype=np.float32).reshape(3, 2)
  expected = whole.astype(np.float32)
  for row, column in np.ndindex(7, 5):
    expected[row, column] *= scales[row // 3, column // 4]
  first, last, left, right = part
  found = fp8.dequantised(whole[first:last, left:right], scales, (3, 4), (first, left))
  np.testing.assert_array_equal(found, expected[first:last, left:right])


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_matrix_may_have_one_scale(shape):
  whole = matrix(3, 4)
  found = fp8.dequantised(whole[1:], np.full(shape, 0.5, np.float32), None, (1, 0))
  np.testing.assert_array_equal(found, 0.5 * whole[1:].astype(np.float32))


def test_each_device_reads_its_part():
  config, whole = model.load(FOLDER)
  mesh = make_mesh(Mesh(data=1, fsdp=2, tensor=2), jax.devices()[:4])
  specs = param_specs(jax.eval_shape(lambda: whole), mesh)
  names = jax.tree_util.tree_leaves_with_path(specs)
  shardings = {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in names}
  found_config, found = model.load(FOLDER, shardings)
  assert found_config == config
  assert found["layers_0"]["mlp"]["up"]["kernel"].sharding.spec == PartitionSpec(
    None, "fsdp", "tensor"
  )
  jax.tree.map(np.testing.assert_array_equal, found, whole)


@pytest.mark.parametrize(
  "changes, words",
  [
    ({"quant_method": "gptq"}, "choose a checkpoint in FP8"),
    ({"fmt": "e5m2"}, "e5m2"),
    ({"weight_block_size": [16]}, "two positive ints"),
    ({"weight_block_size": [16, 0]}, "two positive ints"),
    ({"weight_block_size": [7, 8]}, "by its quantization_config it should be"),
    ({"weight_block_size": None}, "by its quantization_config it should be"),
  ],
)
def test_other_quantisation_is_refused(changes, words, tmp_path):
  shutil.copytree(FOLDER, tmp_path / "model")
  file = tmp_path / "model" / "config.json"
  values = json.loads(file.read_text())
  values["quantization_config"] |= changes
  file.write_text(json.dumps(values))
  with pytest.raises(ConfigError, match=words) as caught:
    model.load(tmp_path / "model")
  assert "quantization_config" in str(caught.value) and "\n" not in str(caught.value)
