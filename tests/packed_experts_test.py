"""Experts in MXFP4, and all experts of a layer in one tensor."""

from pathlib import Path
import re
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from grpo_jax import model
from grpo_jax.config import Mesh
from grpo_jax.model.huggingface import packed_experts
from grpo_jax.model.huggingface.folders import TensorFiles
from grpo_jax.parallel.mesh import make_mesh
from grpo_jax.parallel.sharding import param_specs
from grpo_jax.settings import ConfigError

GOLDEN = Path(__file__).parent / "golden" / "families"
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # what the three lower bits of a number stand for


def test_each_number_has_the_exponent_of_its_block():
  rng = np.random.default_rng(0)
  packed = rng.integers(0, 256, (2, 3, 16), dtype=np.uint8)
  scales = rng.integers(100, 140, (2, 3), dtype=np.uint8)
  expected = np.zeros((2, 3, 32))
  for row, block, number in np.ndindex(2, 3, 32):
    byte = int(packed[row, block, number // 2])
    bits = byte >> 4 if number % 2 else byte & 15
    sign = -1 if bits & 8 else 1
    expected[row, block, number] = sign * E2M1[bits & 7] * 2.0 ** (int(scales[row, block]) - 127)
  found = packed_experts.dequantised(packed, scales)
  np.testing.assert_array_equal(found, expected.reshape(2, 96))


def fused(tmp_path):
  """The golden mixture of Qwen3.5 in the form in which it was published."""
  folder = Path(shutil.copytree(GOLDEN / "qwen3_5_moe", tmp_path / "fused"))
  tensors = load_file(folder / "model.safetensors")
  of_expert = {name: tensors.pop(name) for name in list(tensors) if ".experts." in name}

  def all_of(layer, part):
    names = [f"model.layers.{layer}.mlp.experts.{x}.{part}.weight" for x in range(6)]
    return np.stack([of_expert[name] for name in names])

  for layer in range(2):
    name = f"model.layers.{layer}.mlp.experts"
    both = [all_of(layer, part) for part in ("gate_proj", "up_proj")]
    tensors[f"{name}.gate_up_proj"] = np.concatenate(both, axis=1)
    tensors[f"{name}.down_proj"] = all_of(layer, "down_proj")
  save_file(tensors, folder / "model.safetensors")
  return folder


@pytest.mark.slow
def test_experts_in_one_tensor_are_those_of_single_tensors(tmp_path):
  jax.tree.map(
    np.testing.assert_array_equal,
    model.load(fused(tmp_path))[1],
    model.load(GOLDEN / "qwen3_5_moe")[1],
  )


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("width", [4, 8, 3])  # with D = 8, gate_up_proj or down_proj is square
def test_transposed_matrices_are_recognised_where_one_is_square(width, is_transposed, tmp_path):
  rng, beginning = np.random.default_rng(0), "model.layers.0.mlp.experts"
  both_XOI = rng.normal(size=(2, 2 * width, 8)).astype(np.float32)
  down_XOI = rng.normal(size=(2, 8, width)).astype(np.float32)
  tensors = {f"{beginning}.gate_up_proj": both_XOI, f"{beginning}.down_proj": down_XOI}
  if is_transposed:
    tensors = {name: np.ascontiguousarray(x.swapaxes(1, 2)) for name, x in tensors.items()}
  save_file(tensors, tmp_path / "model.safetensors")
  files = packed_experts.UnpackedExperts(TensorFiles([tmp_path / "model.safetensors"]), 8)
  parts = dict(gate_proj=both_XOI[:, :width], up_proj=both_XOI[:, width:], down_proj=down_XOI)
  for part, expected_XOI in parts.items():
    for expert in range(2):
      name = f"{beginning}.{expert}.{part}.weight"
      whole = tuple(map(slice, [0, 0], files.shapes[name]))
      np.testing.assert_array_equal(files.read(name, whole), expected_XOI[expert])


@pytest.mark.parametrize("scales", [None, np.zeros((2, 3), np.uint8)])
def test_missing_or_wrong_scales_are_named(scales, tmp_path):
  tensors = {"a_blocks": np.zeros((2, 4, 1, 16), np.uint8)}
  if scales is not None:
    tensors["a_scales"] = scales
  file = tmp_path / "model.safetensors"
  save_file(tensors, file)
  found = "missing" if scales is None else "(2, 3)"
  words = rf"{file}: tensor a_scales is {found}, by a_blocks it should be (2, 4, 1)"
  with pytest.raises(ConfigError, match=re.escape(words)):
    packed_experts.UnpackedExperts(TensorFiles([file]), 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_oss_mxfp4", "fused"])
def test_each_device_reads_its_part(name, tmp_path):
  folder = fused(tmp_path) if name == "fused" else GOLDEN / name
  config, whole = model.load(folder)
  mesh = make_mesh(Mesh(data=1, fsdp=1, expert=2, tensor=2), jax.devices()[:4])
  specs = param_specs(jax.eval_shape(lambda: whole), mesh)
  names = jax.tree_util.tree_leaves_with_path(specs)
  shardings = {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in names}
  found_config, found = model.load(folder, shardings)
  assert found_config == config
  assert found["layers_0"]["experts"]["gate"].sharding.spec[1] == "expert"
  jax.tree.map(np.testing.assert_array_equal, found, whole)
