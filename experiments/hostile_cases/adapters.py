# ruff: noqa: E501  (a row is a line)
"""Adapters: PEFT folders, and runs that continue from them."""

from typing import Any

import numpy as np

from hostile_cases.case import Case, Step, cut, edit_json, move, remove, tensors, write

CONFIG, WEIGHTS = "adapter/adapter_config.json", "adapter/adapter_model.safetensors"
FROM = "train $LORA --config.lora.path=adapter"


def _lora(
  name: str, step: Step | None, *words: str, code: int | tuple[int, ...] = 2, flags: str = ""
) -> Case:
  """A run that continues from the adapter of the fixture, changed by a step."""
  setup = (step,) if step else ()
  return Case(f"lora/{name}", f"{FROM} {flags}", code, words, needs="model adapter", setup=setup)


def _field(name: str, *words: str, **changes: Any) -> Case:
  return _lora(name, edit_json(CONFIG, **changes), *words)


def _first(change: Any) -> Step:
  def step(arrays: dict[str, np.ndarray]) -> None:
    change(arrays, sorted(arrays)[0])

  return tensors(WEIGHTS, step)


PATHS = [
  _lora("continues", None, "finished", code=0),
  _lora("no config", remove(CONFIG), "lora.path", "adapter_config.json"),
  _lora("no weights", remove(WEIGHTS), "lora.path", "adapter_model.safetensors"),
  _lora("pickled weights", move(WEIGHTS, "adapter/adapter_model.bin"), "adapter_model.safetensors"),
  _lora("config is no json", cut(CONFIG), "adapter_config.json"),
  _lora("config is a list", write(CONFIG, "[]"), "adapter_config.json"),
  _lora("weights cut off", cut(WEIGHTS), "adapter_model.safetensors"),
  _lora("weights of text", write(WEIGHTS, "x" * 99), "adapter_model.safetensors"),
  _lora("other rank", None, "lora.rank is 4", flags="--config.lora.rank=4"),
  _lora("other alpha", None, "lora.alpha is 3.0", flags="--config.lora.alpha=3"),
  _lora("other targets", None, "lora.targets", flags="--config.lora.targets=\"('q_proj',)\""),
  _lora("other scale", None, "lora.rslora is True", flags="--config.lora.rslora=True"),
  _field("saved rank negative", "r is -2", r=-2),
  _field("rank a text", "r is '2'", r="2"),
  _field("rank true", "r is True", r=True),
  _field("saved rank huge", "lora.rank", r=1 << 40),
  _field("alpha zero", "lora_alpha is 0", lora_alpha=0),
  _field("alpha nan", "lora_alpha", lora_alpha=float("nan")),
  _field("kind of another method", "peft_type", peft_type="IA3"),
  _field("kind a list", "peft_type", peft_type=["LORA"]),
  _field("biases", "bias", bias="all"),
  _field("dora", "use_dora", use_dora=True),
  _field("ranks of their own", "rank_pattern", rank_pattern={"q_proj": 8}),
  _field("unknown field", "magic", magic=1),
  _field("targets a pattern", "target_modules", target_modules=".*_proj"),
  _field("targets of numbers", "target_modules", target_modules=[1, 2]),
  _field("targets twice", "targets", target_modules=["q_proj", "q_proj"]),
  _field("targets unknown", "target_modules", target_modules=["c_attn"]),
  _lora("tensor missing", _first(lambda arrays, name: arrays.pop(name)), "is missing"),
  _lora("tensor too many", _first(lambda arrays, name: arrays.update(x=arrays[name])), "tensor x"),
  _lora(
    "tensor of another shape",
    _first(lambda arrays, name: arrays.update({name: arrays[name][:1]})),
    "it should be",
  ),
  _lora(
    "tensor infinite",
    _first(lambda arrays, name: arrays.update({name: arrays[name] * np.float32(np.inf)})),
    "adapter",
  ),
  _lora(
    "tensor of integers",
    _first(lambda arrays, name: arrays.update({name: arrays[name].astype(np.int32)})),
    "adapter",
  ),
  Case(
    "lora/path is a file",
    "train $LORA --config.lora.path=tiny.py",
    2,
    ("lora.path",),
    needs="model",
  ),
  Case(
    "lora/path without a rank",
    "train $MODEL --config.lora.path=adapter",
    2,
    ("lora.path", "lora.rank"),
    needs="model adapter",
  ),
  Case(
    "lora/path is a name",
    "train $LORA --config.lora.path=someone/adapter",
    2,
    ("lora.path",),
    needs="model",
  ),
]

SETTINGS = [
  Case("lora/no model", "train $RUN --config.lora.rank=2", 2, ("lora.rank", "model.path")),
  Case("lora/rank beyond the width", "train $LORA --config.lora.rank=1000", (0, 2), needs="model"),
  Case("lora/rank huge", "ulimit -v 30000000; train $LORA --config.lora.rank=10000000000", (1, 2), ("lora.rank",), needs="model"),
  Case("lora/rank negative", "train $LORA --config.lora.rank=-1", 2, ("lora.rank is -1",), needs="model"),
  Case("lora/no targets", 'train $LORA --config.lora.targets="()"', 2, ("lora.targets",), needs="model"),
  Case("lora/unknown target", "train $LORA --config.lora.targets=\"('lm_head',)\"", 2, ("lora.targets", "lm_head"), needs="model"),
  Case("lora/target twice", "train $LORA --config.lora.targets=\"('q_proj','q_proj')\"", (0, 2), needs="model"),
  Case("lora/alpha 1e300", "train $LORA --config.lora.alpha=1e300", 2, ("lora.alpha",), needs="model"),
  Case("lora/warm start", "train $LORA --config.warm_start.steps=2", 2, ("warm_start.steps",), needs="model"),
  Case("lora/half moving reference", "train $LORA --config.algo.kl_coef=0.1 --config.algo.ref_sync_steps=1", 2, ("algo.ref_mixup",), needs="model"),
  Case("lora/unknown dtype", "train $LORA --config.lora.base_dtype=int2", 2, ("lora.base_dtype",), needs="model"),
  Case("lora/nf4 base", "train $LORA --config.lora.base_dtype=nf4", (0, 2), needs="model"),
  Case("lora/int8 base", "train $LORA --config.lora.base_dtype=int8", 0, ("finished",), needs="model"),
]  # fmt: skip

LATER = [
  Case("lora/base is gone when it resumes", "train --config=tiny.py --workdir=lora --config.model.path=model --config.lora.rank=2 --config.steps=3",
       2, ("model",), needs="lora"),
  Case("lora/base is gone when evaluated", "evaluate --workdir=lora", 2, ("model",), needs="lora"),
  Case("lora/base is cut off when sampled", "sample --workdir=lora --prompt=1", 2, ("model.safetensors",), needs="lora model", setup=(cut("model/model.safetensors"),)),
  Case("lora/resumes", "train --config=tiny.py --workdir=lora --config.model.path=model --config.lora.rank=2 --config.steps=3", 0, ("finished",), needs="lora model"),
]  # fmt: skip

CASES = [*PATHS, *SETTINGS, *LATER]
