"""Writes the README.md of an exported model: a model card for huggingface.co."""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import json
import os.path
from pathlib import Path, PurePath
import re
from typing import Any, NamedTuple

from grpo_jax import calls
from grpo_jax.algo import presets
from grpo_jax.algo.settings import Algo
from grpo_jax.config import Config
from grpo_jax.data.tasks.tasks import name_of
from grpo_jax.model.huggingface import hub
from grpo_jax.model.huggingface.folders import read_json

FILE = "README.md"
BASE_FILE = "README_base.md"  # the card of the model that the run began with
Row = Mapping[str, Any]
# The training metrics that the card shows.
_SHOWN_METRICS = re.compile(
  r"reward|reward_std|rewards/.*/mean|kl|entropy|completions/mean_length|completions/clipped_ratio"
)


class Base(NamedTuple):
  """The model that a run began with, as its folder describes it.

  Attributes:
    card: The text of README.md. "" if there is none.
    license: license, license_name and license_link, from the card or from config.json.
  """

  card: str = ""
  license: Mapping[str, str] = {}


def read_base(folder: Path | None) -> Base:
  """Reads the card and the licence in a model's folder. None means random weights."""
  if folder is None:
    return Base()
  card = _text(folder / FILE)
  found = metadata(card)  # {} without a card
  if not found.get("license"):
    found = read_json(folder / "config.json")
  names = ("license", "license_name", "license_link")
  return Base(card, {name: found[name] for name in names if found.get(name)})


def metadata(card: str) -> Row:
  """Parses the YAML metadata of a model card. {} if it has none, or they are damaged."""
  import yaml  # here, because only an export needs it

  block = re.match(r"\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|$)", card, re.DOTALL)
  try:
    found = yaml.safe_load(block[1]) if block else None
  except (yaml.YAMLError, ValueError, RecursionError):  # an impossible date, thousands of [
    found = None
  return found if isinstance(found, dict) else {}


def model_card(
  title: str, config: Config, step: int, rows: Sequence[Row], base: Base, kind: str
) -> str:
  """Writes the text of a model card.

  Args:
    title: The name of the run, or of the model if there was no run.
    config: The config of the run.
    step: The step of the checkpoint. 0 means a model before training.
    rows: The rows of metrics.jsonl up to that step.
    base: The model that the run began with.
    kind: "model", "images" for a model with image inputs, "adapter" for only the adapters.
  """
  evaluation = next((row for row in reversed(rows) if _evaluation_cells(row)), {})
  parts = [
    f"---\n{_metadata(title, config, step, evaluation, base, kind)}\n---",
    f"# {title}",
    f"This model was made with grpo_jax: {_base_name(config)} {_trained(config, step)}.",
  ]
  if step:
    parts.append(f"## Training\n\n{_table(('setting', 'value'), _settings(config))}")
  if evaluation:
    header = ("metric", "value", "95% interval")
    parts.append(f"## Evaluation after step {evaluation['step']}")
    parts.append(_table(header, _evaluation_cells(evaluation)))
  last = rows[-1] if rows else {}
  measured = [(name, _number(last[name])) for name in last if _SHOWN_METRICS.fullmatch(name)]
  if measured:
    parts.append(f"## Metrics of step {last['step']}")
    parts.append(_table(("metric", "value"), measured))
  parts.append(f"## Use\n\n```python\n{_USE[kind]}```")
  if config.model.path:  # random weights have no licence
    parts.append(f"## Licence\n\n{_licence(base)}")
  if base.card:
    parts.append(f"[{BASE_FILE}]({BASE_FILE}) is the card of the model that it was trained from.")
  return "\n\n".join(parts) + "\n"


def _metadata(title: str, config: Config, step: int, evaluation: Row, base: Base, kind: str) -> str:
  """Returns the YAML block of a card.

  `evaluation` is the last row with an evaluation, or {}. Other arguments are as in `model_card`.
  """
  # ModelCard itself would import the client of huggingface.co, which takes half a second.
  from huggingface_hub.repocard_data import EvalResult, ModelCardData

  results = []
  for name, value in evaluation.items():
    found = re.fullmatch(r"eval/(.+/)?accuracy(/.+)?", name)
    if found and value is not None and not _is_interval_end(name, evaluation):
      # The accuracy of an exam, of a task in a mixture, or of the whole data set.
      data = (found[1] or found[2] or name_of(config.data)).strip("/")
      results.append(
        EvalResult(
          task_type="text-generation",
          dataset_type=data,
          dataset_name=data,
          metric_type="accuracy",
          metric_value=round(value, 6),
        )
      )
  is_on_hub = hub.is_name(config.model.path)
  return ModelCardData(
    base_model=hub.parts(config.model.path)[0] if is_on_hub else None,  # not a local folder
    library_name="peft" if kind == "adapter" else "transformers",
    pipeline_tag="image-text-to-text" if kind == "images" else "text-generation",
    tags=["grpo_jax", *_tags(config, step)],
    # `ModelCardData` demands a name beside results, and would write a name alone as a key.
    model_name=title if results else None,
    eval_results=results or None,
    **base.license,
  ).to_yaml()


def _tags(config: Config, step: int) -> list[str]:
  """Returns the tags of the training method. [] before reinforcement learning has begun."""
  if step <= config.warm_start.steps:
    return []
  return (["grpo"] if _method(config).startswith("GRPO") else []) + ["reinforcement-learning"]


def _method(config: Config) -> str:
  """Returns the name of the method whose preset the config follows. "" if there is none."""
  preset = presets.closest(config.algo)
  return presets.PAPERS[preset][0] if preset else ""


def _settings(config: Config) -> Iterator[tuple[str, str]]:
  """Yields the rows (name, value) of the card's table of settings."""
  algo = config.algo
  yield "base model", _base_name(config)
  path = _short(config.data.path)
  yield "data", _code(name_of(config.data)) + (f", {_code(path)}" if path else "")
  framed = ", in the chat template" if config.data.chat else ""
  yield "prompts", _code(config.data.prompt) + framed
  if config.data.system:
    yield "system message", _code(config.data.system)
  rewards = (_short(calls.split(name)[0]) for name in config.reward.functions)
  yield "rewards", ", ".join(map(_code, rewards))
  yield "algorithm", _algorithm(algo)
  default = Algo()
  changed = [
    f"{field.name}={getattr(algo, field.name)!r}"
    for field in dataclasses.fields(algo)
    if getattr(algo, field.name) != getattr(default, field.name)
  ]
  if changed:
    yield "its settings", _code(", ".join(changed))
  batch, optimizer = config.batch, config.optimizer
  yield "batch", f"{batch.prompts} prompts x {batch.group_size} completions"
  yield "longest completion", f"{config.sampling.max_tokens} tokens"
  yield "optimizer", f"{optimizer.name}, learning rate {optimizer.learning_rate:g}"
  if config.lora.rank:
    yield "adapters", f"LoRA of rank {config.lora.rank}"
  yield "seed", str(config.seed)


def _algorithm(algo: Algo) -> str:
  """Names the method with its paper, or else the variants that the config combines."""
  preset = presets.closest(algo)
  if not preset:
    axes = ("advantage", "ratio", "surrogate", "aggregation", "correction")
    return ", ".join(f"{axis} {_code(getattr(algo, axis))}" for axis in axes)
  method, number = presets.PAPERS[preset]
  return method + (f" ([arXiv:{number}](https://arxiv.org/abs/{number}))" if number else "")


def _evaluation_cells(row: Row) -> list[tuple[str, str, str]]:
  """Returns (name, value, interval) of each evaluation metric in a row of metrics.jsonl."""
  found = []
  for name, value in row.items():  # only estimates have the two ends of an interval
    ends = row.get(f"{name}_low"), row.get(f"{name}_high")
    if not name.startswith("eval/") or _is_interval_end(name, row) or value is None:
      continue
    is_share = None not in ends
    shown = f"{value:.1%}" if is_share else _number(value)
    interval = f"{ends[0]:.1%} to {ends[1]:.1%}" if is_share else ""
    found.append((name.removeprefix("eval/"), shown, interval))
  return found


def _is_interval_end(name: str, row: Row) -> bool:
  """Returns whether a metric is the low or high end of another one's 95% interval in the row."""
  return name.endswith(("_low", "_high")) and name.rpartition("_")[0] in row


def _trained(config: Config, step: int) -> str:
  """Describes the training: "after 100 steps of a warm start and 50 steps of GRPO"."""
  warm = min(step, config.warm_start.steps)
  parts = [f"{warm} steps of a warm start"] if warm else []
  method = _method(config).split(",")[0] or "reinforcement learning"
  parts += [f"{step - warm} steps of {method}"] if step > warm else []
  return f"after {' and '.join(parts)}" if parts else "before training"


def _base_name(config: Config) -> str:
  path = config.model.path
  if hub.is_name(path):
    name, _ = hub.parts(path)
    return f"[{name}](https://huggingface.co/{name})"
  return _code(_short(path)) if path else "a model of random weights"


def _licence(base: Base) -> str:
  found = base.license
  if not found:
    return "Look at the base model: the folder that it was read from names none."
  link = found.get("license_link")
  name = found.get("license_name") or found.get("license") or link
  return f"That of the base model: {f'[{name}]({link})' if link else name}."


_USE = {
  "model": """from transformers import AutoModelForCausalLM, AutoTokenizer

path = "OWNER/NAME"  # or this folder
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path)
""",
  "images": """from transformers import AutoModelForImageTextToText, AutoProcessor

path = "OWNER/NAME"  # or this folder
processor = AutoProcessor.from_pretrained(path)
model = AutoModelForImageTextToText.from_pretrained(path)
""",
  "adapter": """from peft import AutoPeftModelForCausalLM

model = AutoPeftModelForCausalLM.from_pretrained("OWNER/NAME")  # or this folder
""",
}


def _short(path: str) -> str:
  """Shortens a path, or FILE:FUNCTION, to its last part, so that a card leaks no local folders.

  Other names, such as names of reward functions, stay as they are.
  """
  is_path = path.startswith(("/", "~", ".")) or ".." in PurePath(path).parts
  if is_path or any(map(os.path.exists, (path, path.rpartition(":")[0]))):
    return PurePath(path).name
  return path


def _number(value: float | None) -> str:
  return "-" if value is None else f"{value:.4g}"


def _code(text: str) -> str:
  """Formats a text as code in one table cell: escapes line breaks and |, and fits the backticks."""
  line = json.dumps(text, ensure_ascii=False)[1:-1].replace("|", "\\|")
  inside = re.findall("`+", line)
  fence, space = "`" * (1 + max(map(len, inside), default=0)), " " if inside else ""
  return f"{fence}{space}{line}{space}{fence}"


def _table(header: Sequence[str], rows: Any) -> str:
  lines = [header, ["---"] * len(header), *rows]
  return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _text(file: Path) -> str:
  try:
    return file.read_text(encoding="utf-8", errors="replace")
  except OSError:
    return ""
