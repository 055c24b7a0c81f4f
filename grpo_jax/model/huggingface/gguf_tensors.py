"""Reads the tensors of a GGUF file with the names, shapes and row order of Hugging Face folders."""

import dataclasses
import re

import numpy as np

from grpo_jax.gguf_file import GGUFFile
from grpo_jax.model.huggingface.gguf_config import architecture_of
from grpo_jax.settings import shown

_MOST_EXPERTS = 4096  # more than any model has. A damaged file may state billions
_OUTSIDE = {
  "token_embd.weight": "model.embed_tokens.weight",
  "output_norm.weight": "model.norm.weight",
  "output.weight": "lm_head.weight",
}
_IN_LAYERS = {  # name within a layer of a GGUF file, without .weight -> name in Hugging Face
  "attn_norm": "input_layernorm",
  "attn_q": "self_attn.q_proj",
  "attn_k": "self_attn.k_proj",
  "attn_v": "self_attn.v_proj",
  "attn_qkv": "self_attn.qkv_proj",
  "attn_output": "self_attn.o_proj",
  "attn_q_norm": "self_attn.q_norm",
  "attn_k_norm": "self_attn.k_norm",
  "ffn_norm": "post_attention_layernorm",
  "ffn_gate": "mlp.gate_proj",
  "ffn_up": "mlp.up_proj",
  "ffn_down": "mlp.down_proj",
  "ffn_gate_inp": "mlp.gate",
}
_IN_GEMMA_LAYERS = {
  "post_attention_norm": "post_attention_layernorm",
  "ffn_norm": "pre_feedforward_layernorm",
  "post_ffw_norm": "post_feedforward_layernorm",
}
_IN_PHI3_LAYERS = {"ffn_up": "mlp.gate_up_proj"}
_EXPERTS = {
  "ffn_gate_exps": "mlp.experts.{x}.gate_proj",
  "ffn_up_exps": "mlp.experts.{x}.up_proj",
  "ffn_down_exps": "mlp.experts.{x}.down_proj",
}
# Tensors of rotary frequencies, which belong to the config.
_READ_WITH_CONFIG = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight")
_ROTATED = (".q_proj.weight", ".k_proj.weight")


@dataclasses.dataclass(frozen=True)
class _Source:
  """Where a GGUF file holds a Hugging Face tensor.

  Attributes:
    name: The name of the tensor in the file.
    first_row: The row there at which an expert's matrix begins. 0 for other tensors.
    rotated: The rows of each head are in llama.cpp's order (see `_read_rotated`).
    norm_offset: The number that the file added to the tensor, and that reading subtracts.
  """

  name: str
  first_row: int = 0
  rotated: bool = False
  norm_offset: float = 0.0


class GGUFTensors:
  """Reads Hugging Face tensors, by name, from a GGUF file. Used in place of `TensorFiles`.

  Attributes:
    shapes: The shape of each tensor, by its name in Hugging Face.
    dtypes: The dtype of each tensor as safetensors names it: always F32, because they are
      dequantised.
    config: The name of the model's config in error messages.
  """

  config = "metadata"

  def __init__(self, file: GGUFFile, head_dim: int) -> None:
    """Maps the tensors of the file to their names in Hugging Face.

    Args:
      file: The file.
      head_dim: The size of an attention head (E).

    Raises:
      ConfigError: The file has a tensor that models of its architecture do not have here.
    """
    self._file, self._head_dim = file, head_dim
    self._architecture = architecture_of(file)
    self._sources: dict[str, _Source] = {}
    self.shapes: dict[str, tuple[int, ...]] = {}
    for name, stored in file.tensors.items():
      if not _READ_WITH_CONFIG.fullmatch(name):
        self._add(name, stored.shape)
    self.dtypes = dict.fromkeys(self.shapes, "F32")

  def _add(self, name: str, shape: tuple[int, ...]) -> None:
    """Adds the Hugging Face tensor for the file's tensor `name`, or one for each expert in it."""
    architecture = self._architecture
    in_layer = re.fullmatch(r"blk\.(\d{1,6})\.([a-z_]+)\.(weight|bias)", name)
    hf_names = dict(_IN_LAYERS)
    if architecture.model_type.startswith("gemma"):
      hf_names |= _IN_GEMMA_LAYERS
    if architecture.model_type == "phi3":
      hf_names |= _IN_PHI3_LAYERS
    if name in _OUTSIDE:
      hf_name = _OUTSIDE[name]
    elif in_layer and in_layer[2] in hf_names:
      hf_name = f"model.layers.{int(in_layer[1])}.{hf_names[in_layer[2]]}.{in_layer[3]}"
    elif in_layer and in_layer[2] in _EXPERTS and len(shape) == 3 and shape[0] <= _MOST_EXPERTS:
      of_expert = f"model.layers.{int(in_layer[1])}.{_EXPERTS[in_layer[2]]}.{in_layer[3]}"
      for expert in range(shape[0]):
        self.shapes[of_expert.format(x=expert)] = shape[1:]
        self._sources[of_expert.format(x=expert)] = _Source(name, expert * shape[1])
      return
    else:
      self._file.refuse(
        f"tensor {shown(name)} {shape} does not belong to a model of {architecture.model_type}"
        " that can be computed here"
      )
    is_norm = name.endswith("norm.weight")
    self.shapes[hf_name] = shape
    self._sources[hf_name] = _Source(
      name,
      rotated=architecture.rotated_rows and hf_name.endswith(_ROTATED),
      norm_offset=architecture.norm_offset if is_norm else 0.0,
    )

  def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
    """Reads a part of a tensor as float32. See `TensorFiles.read`."""
    first, *others = index
    source = self._sources[name]
    begin, end = first.start, first.stop
    if len(self.shapes[name]) == 1:
      values = self._file.read_rows(source.name, 0, 1)[0, begin:end]
      return values - np.float32(source.norm_offset) if source.norm_offset else values
    if source.rotated:
      return self._read_rotated(source.name, begin, end)[:, *others]
    offset = source.first_row
    return self._file.read_rows(source.name, offset + begin, offset + end)[:, *others]

  def _read_rotated(self, name: str, begin: int, end: int) -> np.ndarray:
    """Reads rows `begin` to `end` in Hugging Face's order, as float32.

    Hugging Face rotates row i of a head with row i + E/2. llama.cpp rotates neighbouring rows, so
    in its files row i + E/2 follows row i.
    """
    E = self._head_dim
    first_head, end_head = begin // E, -(-end // E)
    rows = self._file.read_rows(name, first_head * E, end_head * E)
    heads = rows.reshape(end_head - first_head, E // 2, 2, -1).swapaxes(1, 2)
    return heads.reshape(rows.shape)[begin - first_head * E : end - first_head * E]
