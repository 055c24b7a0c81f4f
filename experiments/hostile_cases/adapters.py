# ruff: noqa: E501  (a row is a line)
"""Adapters: PEFT folders, and runs that continue from them."""

from typing import Any

from hostile_cases.case import Case, Step, cut, edit_json, remove

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


PATHS = [
  _lora("no config", remove(CONFIG), "lora.path", "adapter_config.json"),
  _lora("config is no json", cut(CONFIG), "adapter_config.json"),
  _lora(
    "modules by a regular expression",
    edit_json(CONFIG, target_modules=r"model\.layers\.\d+\..*_proj"),
    "finished",
    code=0,
  ),
  _lora(
    "modules in full",
    edit_json(
      CONFIG, target_modules=["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.x_proj"]
    ),
    "target_modules",
    "no adapter of 'model.layers.0.self_attn.x_proj'",
  ),
]


CASES = [*PATHS]
