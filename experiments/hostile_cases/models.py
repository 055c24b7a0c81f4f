# ruff: noqa: E501  (a row is a line)
"""Folders of models: config.json, weights, and names on huggingface.co without a network."""

import json
from pathlib import Path
import shutil
import struct
from typing import Any

import numpy as np

from hostile_cases.case import (
  Case,
  Step,
  edit_json,
  header,
  move,
  remove,
  tensors,
  write,
)  # fmt: skip

WEIGHTS = "model/model.safetensors"
INDEX = "model/model.safetensors.index.json"


def _model(
  name: str, step: Step | None, *words: str, code: int | tuple[int, ...] = 2, **more: Any
) -> Case:
  """A run from the model of the fixture, changed by a step."""
  command = "ulimit -v 30000000; train $MODEL"
  return Case(
    f"model/{name}", command, code, words, needs="model", setup=(step,) if step else (), **more
  )


def _field(name: str, *words: str, code: int | tuple[int, ...] = 2, **changes: Any) -> Case:
  """The model with other fields in config.json."""
  return _model(name, edit_json("model/config.json", **changes), *words, code=code)


def _header(name: str, text: bytes, *words: str, length: int | None = None) -> Case:
  """A weight file with another header."""
  content = struct.pack("<Q", len(text) if length is None else length) + text + bytes(64)
  return _model(name, write(WEIGHTS, content), *words)


FIELDS = [
  _model("no config", remove("model/config.json"), "model/config.json"),
  _model(
    "config is binary", write("model/config.json", bytes(range(128, 256))), "model/config.json"
  ),
  _model(
    "config with a long integer",
    write("model/config.json", '{"a":' + "9" * 9_999 + "}"),
    "model/config.json",
  ),
  _field("architectures numbers", "architectures", architectures=[3]),
  _field("width true", "hidden_size", hidden_size=True),
  _field("vocabulary huge", "vocab_size", vocab_size=1 << 33),
  _field("epsilon nan", "rms_norm_eps", rms_norm_eps=float("nan")),
  _field("rope parameters a list", "rope_parameters", rope_parameters=[1]),
  _field(
    "rope factor zero",
    "factor",
    rope_scaling={"rope_type": "linear", "factor": 0},
    rope_parameters=...,
    rope_theta=1e4,
  ),
  _field("tied a text", "tie_word_embeddings", tie_word_embeddings="yes"),
  _field("layer types of lists", "layer_types", layer_types=[["full_attention"]]),
  _model(
    "generation stop id an object",
    write("model/generation_config.json", '{"eos_token_id": {}}'),
    "eos_token_id",
  ),
]


def _set(name: str, value: float) -> Step:
  def change(arrays: dict[str, np.ndarray]) -> None:
    arrays[name].flat[0] = value

  return tensors(WEIGHTS, change)


def _moved_offsets(values: dict[str, Any]) -> None:
  values["model.norm.weight"]["data_offsets"] = [0, 64]


WEIGHT_FILES = [
  _model("empty weights", write(WEIGHTS, b""), "model.safetensors"),
  _header("header length huge", b"{}", "model.safetensors", length=2**63),
  _model("offsets overlap", header(WEIGHTS, _moved_offsets), "model.safetensors"),
  _model(
    "tensor too many", tensors(WEIGHTS, lambda a: a.update(extra=np.ones(3, np.float32))), "extra"
  ),
  _model(
    "tensor with a long name",
    tensors(WEIGHTS, lambda a: a.update({"y" * 9999: np.ones(3, np.float32)})),
    "does not belong",
  ),
  _model(
    "one weight is infinite", _set("model.embed_tokens.weight", np.inf), "model.embed_tokens.weight"
  ),
]

SHARDED = (move(WEIGHTS, "model/model-00001-of-00001.safetensors"),)


def _path(name: str, path: str, *words: str, **more: Any) -> Case:
  return Case(f"model/{name}", f"train $RUN --config.model.path={path}", 2, words, **more)


PATHS = [
  _path("long name", "x" * 5000, "model"),
]  # fmt: skip


def _more_rows(folder: Path) -> None:
  """Gives the model three rows of embeddings that are no tokens, which its copy `teacher` lacks."""
  shutil.copytree(folder / "model", folder / "teacher")

  def grow(arrays: dict[str, Any]) -> None:
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
      if name in arrays:
        arrays[name] = np.concatenate([arrays[name], arrays[name][:3]])

  tensors(WEIGHTS, grow)(folder)
  rows = json.loads((folder / "model/config.json").read_text())["vocab_size"] + 3
  edit_json("model/config.json", vocab_size=rows)(folder)


TEACHERS = [
  Case("model/a teacher that lacks rows", "train $MODEL --config.reward.teacher=teacher", 2, ("reward.teacher", "rows of embeddings"), needs="model", setup=(_more_rows,)),
]  # fmt: skip


CASES = [*TEACHERS, *FIELDS, *WEIGHT_FILES, *PATHS]
