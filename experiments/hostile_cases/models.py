# ruff: noqa: E501  (a row is a line)
"""Folders of models: config.json, weights, and names on huggingface.co without a network."""

import json
import struct
from typing import Any

import numpy as np

from hostile_cases.case import (
  Case,
  Step,
  cut,
  edit_json,
  fifo,
  flip,
  header,
  link,
  make_folder,
  move,
  remove,
  replace_text,
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
  _field("unchanged", "finished", code=0),
  _model("no config", remove("model/config.json"), "model/config.json"),
  _model("empty config", write("model/config.json", ""), "model/config.json is not JSON"),
  _model("config is a list", write("model/config.json", "[]"), "model/config.json"),
  _model("config is null", write("model/config.json", "null"), "model/config.json"),
  _model("config cut off", cut("model/config.json"), "model/config.json is not JSON"),
  _model(
    "config is binary", write("model/config.json", bytes(range(128, 256))), "model/config.json"
  ),
  _model(
    "config is utf-16", write("model/config.json", "{}".encode("utf-16")), "model/config.json"
  ),
  _model("config is a fifo", fifo("model/config.json"), "model/config.json", limit=40),
  _model("config is a folder", make_folder("model/config.json"), "model/config.json"),
  _model("config links to itself", link("model/config.json", "config.json"), "model/config.json"),
  _model(
    "config of deep lists",
    write("model/config.json", '{"a":' + "[" * 99_999 + "]" * 99_999 + "}"),
    "model/config.json",
  ),
  _model(
    "config with a long integer",
    write("model/config.json", '{"a":' + "9" * 9_999 + "}"),
    "model/config.json",
  ),
  _field("type unknown", "model_type", model_type="gpt2"),
  _field("type missing", "model_type", model_type=...),
  _field("type is a list", "model_type", model_type=["qwen2"]),
  _field("type is of another family", "architectures", model_type="gemma2"),
  _field("architecture unknown", "architectures", architectures=["GPT2LMHeadModel"]),
  _field("architectures a text", code=(0, 2), architectures="Qwen2ForCausalLM"),
  _field("architectures numbers", "architectures", architectures=[3]),
  _field("architectures an object", "architectures", architectures={"a": 1}),
  _field("width zero", "hidden_size", hidden_size=0),
  _field("width negative", "hidden_size", hidden_size=-16),
  _field("width a text", "hidden_size", hidden_size="16"),
  _field("width a float", "hidden_size", hidden_size=16.0),
  _field("width true", "hidden_size", hidden_size=True),
  _field("width missing", "hidden_size", hidden_size=...),
  _field("width of another model", "tensor model.", hidden_size=32),
  _field("width huge", "model", hidden_size=1 << 40),
  _field("layers missing", "no tensor", num_hidden_layers=2, layer_types=...),
  _field("vocabulary smaller", "do not fit", code=(2,), vocab_size=4),
  _field("vocabulary larger", "embed_tokens", vocab_size=4000),
  _field("vocabulary huge", "vocab_size", vocab_size=1 << 33),
  _field("heads do not divide", "q_proj", num_attention_heads=3),
  _field("heads a list", "num_attention_heads", num_attention_heads=[2]),
  _field("head odd", "head_dim", head_dim=7),
  _field("epsilon a text", "rms_norm_eps", rms_norm_eps="1e-6"),
  _field("epsilon zero", "rms_norm_eps", rms_norm_eps=0),
  _field("epsilon nan", "rms_norm_eps", rms_norm_eps=float("nan")),
  _field("epsilon infinite", "rms_norm_eps", rms_norm_eps=float("inf")),
  _field("rope nan", "rope_theta", rope_theta=float("nan"), rope_parameters=...),
  _field("rope zero", "rope_theta", rope_theta=0, rope_parameters=...),
  _field("rope missing", "rope_theta", rope_theta=..., rope_parameters=...),
  _field("rope given twice", "rope_theta", rope_theta=123.0),
  _field("rope parameters a list", "rope_parameters", rope_parameters=[1]),
  _field("rope parameters a text", "rope_parameters", rope_parameters="default"),
  _field(
    "rope parameters of texts", "rope", rope_theta=..., rope_parameters={"full_attention": "x"}
  ),
  _field("rope scaling a text", "rope_scaling", rope_scaling="linear"),
  _field(
    "rope scaling unknown",
    "longrope",
    rope_scaling={"rope_type": "longrope"},
    rope_parameters=...,
    rope_theta=1e4,
  ),
  _field(
    "rope scaling a list as type",
    "rope",
    rope_scaling={"rope_type": ["linear"]},
    rope_parameters=...,
    rope_theta=1e4,
  ),
  _field(
    "rope factor zero",
    "factor",
    rope_scaling={"rope_type": "linear", "factor": 0},
    rope_parameters=...,
    rope_theta=1e4,
  ),
  _field(
    "rope factor a text",
    "factor",
    rope_scaling={"rope_type": "linear", "factor": "2"},
    rope_parameters=...,
    rope_theta=1e4,
  ),
  _field(
    "rope factor nan",
    "factor",
    rope_scaling={"rope_type": "linear", "factor": float("nan")},
    rope_parameters=...,
    rope_theta=1e4,
  ),
  _field(
    "rope factor huge",
    code=(0, 2),
    rope_scaling={"rope_type": "dynamic", "factor": 1e300},
    rope_parameters=...,
    rope_theta=1e4,
  ),
  _field(
    "yarn with a text",
    "rope",
    rope_scaling={"rope_type": "yarn", "factor": 2.0, "mscale": "x", "mscale_all_dim": "y"},
    rope_parameters=...,
    rope_theta=1e4,
  ),
  _field("unknown field", "attention_sinks", attention_sinks=True),
  _field("quantised", "quantization_config", quantization_config={"bits": 4}),
  _field("tied a text", "tie_word_embeddings", tie_word_embeddings="yes"),
  _field("untied without a head", "lm_head", tie_word_embeddings=False),
  _field("other activation", "hidden_act", hidden_act="relu"),
  _field("activation a number", "hidden_act", hidden_act=3),
  _field("layer types too many", "layer_types", layer_types=["full_attention"] * 9),
  _field("layer types a number", "layer_types", layer_types=3),
  _field("layer types of lists", "layer_types", layer_types=[["full_attention"]]),
  _field(
    "window a text",
    "sliding_window",
    sliding_window="x",
    use_sliding_window=True,
    layer_types=["sliding_attention"],
  ),
  _field(
    "window negative",
    "sliding_window",
    sliding_window=-3,
    use_sliding_window=True,
    layer_types=["sliding_attention"],
  ),
  _field("stop id a text", "eos_token_id", eos_token_id="2"),
  _field("stop ids with null", "eos_token_id", eos_token_id=[1, None]),
  _field("stop id beyond the vocabulary", "eos_token_id", eos_token_id=99999),
  _field("stop id negative", "eos_token_id", eos_token_id=-1),
  _field("few positions", "positions", max_position_embeddings=8),
  _field("positions a text", "max_position_embeddings", max_position_embeddings="many"),
  _field("labels of a language model", code=(0, 2), id2label={"0": "a", "1": "b"}),
  _field("experts of none", code=2, num_experts=8),
  _model(
    "generation config is a list",
    write("model/generation_config.json", "[]"),
    "generation_config.json",
  ),
  _model(
    "generation config cut off",
    write("model/generation_config.json", "{"),
    "generation_config.json",
  ),
  _model(
    "generation stop id an object",
    write("model/generation_config.json", '{"eos_token_id": {}}'),
    "eos_token_id",
  ),
  _model(
    "key twice", replace_text("model/config.json", "{", '{"model_type": "llama",'), code=(0, 2)
  ),
]


def _shard(weight_map: Any) -> Step:
  return write(INDEX, json.dumps({"metadata": {}, "weight_map": weight_map}))


def _set(name: str, value: float) -> Step:
  def change(arrays: dict[str, np.ndarray]) -> None:
    arrays[name].flat[0] = value

  return tensors(WEIGHTS, change)


def _retyped(dtype: str) -> Step:
  def change(values: dict[str, Any]) -> None:
    values["model.norm.weight"]["dtype"] = dtype

  return header(WEIGHTS, change)


def _moved_offsets(values: dict[str, Any]) -> None:
  values["model.norm.weight"]["data_offsets"] = [0, 64]


def _far_offsets(values: dict[str, Any]) -> None:
  values["model.norm.weight"]["data_offsets"] = [1 << 40, (1 << 40) + 64]


WEIGHT_FILES = [
  _model("no weights", remove(WEIGHTS), "no model.safetensors"),
  _model("only pickled weights", move(WEIGHTS, "model/pytorch_model.bin"), "unpickling"),
  _model("weights cut in half", cut(WEIGHTS), "model.safetensors"),
  _model("weights without the last byte", cut(WEIGHTS, 0.9999), "model.safetensors"),
  _model("weights of four bytes", write(WEIGHTS, b"1234"), "model.safetensors"),
  _model("empty weights", write(WEIGHTS, b""), "model.safetensors"),
  _model(
    "weights of text",
    write(WEIGHTS, "version https://git-lfs.github.com/spec/v1\n" * 9),
    "model.safetensors",
  ),
  _model("weights are a folder", make_folder(WEIGHTS), "model.safetensors"),
  _model("weights are a fifo", fifo(WEIGHTS), "model.safetensors", limit=40),
  _model("weights link to themselves", link(WEIGHTS, "model.safetensors"), "model.safetensors"),
  _model("weights link to dev zero", link(WEIGHTS, "/dev/zero"), "model.safetensors", limit=60),
  _header("header length huge", b"{}", "model.safetensors", length=2**63),
  _header("header length beyond the file", b"{}", "model.safetensors", length=10**6),
  _header("header is no json", b"{nothing", "model.safetensors"),
  _header("header is a list", b"[1, 2]", "model.safetensors"),
  _header("header of no tensors", b"{}", "model.safetensors"),
  _header("header of deep lists", b'{"a":' + b"[" * 9999 + b"]" * 9999 + b"}", "model.safetensors"),
  _model("offsets overlap", header(WEIGHTS, _moved_offsets), "model.safetensors"),
  _model("offsets beyond the file", header(WEIGHTS, _far_offsets), "model.safetensors"),
  _model(
    "dtype unknown",
    header(WEIGHTS, lambda h: h["model.norm.weight"].update(dtype="F7")),
    "model.safetensors",
  ),
  _model("dtype int32", _retyped("I32"), "I32"),
  _model("dtype of another size", _retyped("F64"), "model.safetensors"),
  _model(
    "tensor missing", tensors(WEIGHTS, lambda a: a.pop("model.norm.weight")), "model.norm.weight"
  ),
  _model(
    "tensor too many", tensors(WEIGHTS, lambda a: a.update(extra=np.ones(3, np.float32))), "extra"
  ),
  _model(
    "tensor with a long name",
    tensors(WEIGHTS, lambda a: a.update({"y" * 9999: np.ones(3, np.float32)})),
    "does not belong",
  ),
  _model(
    "tensor with an escape",
    tensors(WEIGHTS, lambda a: a.update({"\x1b[2J": np.ones(3, np.float32)})),
    "does not belong",
    absent=("\x1b",),
  ),
  _model(
    "tensor of another shape",
    tensors(WEIGHTS, lambda a: a.update({"model.norm.weight": np.ones(5, np.float32)})),
    "model.norm.weight",
  ),
  _model(
    "tensor without axes",
    tensors(WEIGHTS, lambda a: a.update({"model.norm.weight": np.array(1, np.float32)})),
    "model.norm.weight",
  ),
  _model(
    "tensor without numbers",
    tensors(WEIGHTS, lambda a: a.update({"model.norm.weight": np.ones(0, np.float32)})),
    "model.norm.weight",
  ),
  _model(
    "one weight is infinite", _set("model.embed_tokens.weight", np.inf), "model.embed_tokens.weight"
  ),
  _model(
    "one weight beyond bfloat16 products",
    _set("model.embed_tokens.weight", 3e38),
    code=(0, 1, 2),
    absent=("nan",),
  ),
  _model(
    "all weights zero",
    tensors(WEIGHTS, lambda a: a.update({k: v * 0 for k, v in a.items()})),
    "finished",
    code=0,
  ),
  _model(
    "float16",
    tensors(WEIGHTS, lambda a: a.update({k: v.astype(np.float16) for k, v in a.items()})),
    "finished",
    code=0,
  ),
  _model("a flipped byte in the header", flip(WEIGHTS, 0.005), "model"),
]

SHARDED = (move(WEIGHTS, "model/model-00001-of-00001.safetensors"),)


def _index(name: str, content: Any, *words: str, code: int | tuple[int, ...] = 2) -> Case:
  text = content if isinstance(content, str) else json.dumps(content)
  return Case(
    f"model/index {name}",
    "train $MODEL",
    code,
    words,
    needs="model",
    setup=(*SHARDED, write(INDEX, text)),
  )


SHARDS = [
  _index("is no json", "{", "index.json"),
  _index("is a list", [], "index.json"),
  _index("without a map", {}, "weight_map"),
  _index("with an empty map", {"weight_map": {}}, "weight_map"),
  _index("with a list as map", {"weight_map": ["a"]}, "weight_map"),
  _index("with a number as file", {"weight_map": {"a": 3}}, "weight_map"),
  _index(
    "with a number among files",
    {"weight_map": {"a": 3, "b": "model-00001-of-00001.safetensors"}},
    "weight_map",
  ),
  _index(
    "with a missing shard", {"weight_map": {"a": "model-2.safetensors"}}, "model-2.safetensors"
  ),
  _index(
    "of another tensor", {"weight_map": {"a": "model-00001-of-00001.safetensors"}}, code=(0, 2)
  ),
  _index("with an empty name", {"weight_map": {"a": ""}}, "index.json"),
  _index("with a folder as shard", {"weight_map": {"a": "."}}, "index.json"),
  _index("with a null byte", {"weight_map": {"a": "x\x00y"}}, "index.json"),
  Case(
    "model/index is a fifo",
    "train $MODEL",
    2,
    ("model",),
    needs="model",
    setup=(*SHARDED, fifo(INDEX)),
    limit=40,
  ),
]


def _path(name: str, path: str, *words: str, **more: Any) -> Case:
  return Case(f"model/{name}", f"train $RUN --config.model.path={path}", 2, words, **more)


PATHS = [
  _path("name without a network", "Qwen/Qwen2.5-0.5B", "model.path"),
  _path("name with a revision", "Qwen/Qwen2.5-0.5B@main", "model.path"),
  _path("name of three parts", "a/b/c", "a/b/c"),
  _path("name of one part", "gpt2", "model"),
  _path("web address", "https://huggingface.co/Qwen/Qwen2.5-0.5B", "huggingface.co/Qwen"),
  _path("a file", "tiny.py", "tiny.py"),
  _path("this folder", ".", "config.json"),
  _path("the root", "/", "config.json"),
  _path("dev null", "/dev/null", "/dev/null"),
  _path("spaces", "' '", "model"),
  _path("newline", "$'a\\nb'", "model"),
  _path("long name", "x" * 5000, "model"),
  _path("no utf-8", "$'\\xff'", "model"),
  _path("cache not writable", "Qwen/Qwen2.5-0.5B", "model.path", env={"HF_HOME": "/proc/x"}),
  _path("cache is a file", "Qwen/Qwen2.5-0.5B", "model.path", env={"HF_HOME": "tiny.py"}),
  Case("model/unreadable weights", "train $MODEL", 2, ("model.safetensors",), needs="model",
       setup=(lambda folder: (folder / WEIGHTS).chmod(0),), as_user=True),
  Case("model/deep folder", "train $RUN --config.model.path=model/../model/./", 0, ("finished",), needs="model"),
]  # fmt: skip

CASES = [*FIELDS, *WEIGHT_FILES, *SHARDS, *PATHS]
