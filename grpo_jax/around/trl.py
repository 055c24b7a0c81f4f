"""Converts configs of TRL's GRPOTrainer with the table of fields in `trl_fields.py`."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import difflib
from pathlib import Path
import shlex
from typing import Any

from grpo_jax.algo import presets
from grpo_jax.around.trl_fields import EARLIER, FIELDS, OF_PROGRAMS, Changes, Port, Refused
from grpo_jax.config import PROJECTIONS, Config, changed, from_dict, to_dict
from grpo_jax.data.files.given import keep_rows
from grpo_jax.data.files.splits import rows_of
from grpo_jax.environments.names import register_tool
from grpo_jax.rewards.names import name_of, register_reward
from grpo_jax.settings import ConfigError, shown
from grpo_jax.storage.saved_config import flat


def from_trl(
  args: Any = None,
  *,
  model: str = "",
  reward_funcs: Any = (),
  train_dataset: Any = "",
  eval_dataset: Any = None,
  tools: Sequence[Any] = (),
  peft_config: Any = None,
  processes: int = 1,
  say: Callable[[str], None] | None = print,
) -> Config:
  """Converts the settings of TRL's GRPOTrainer to a config, and says what each field became.

  Args:
    args: A `trl.GRPOConfig`, or a dict of its fields. Missing fields have TRL's defaults.
    model: A Hugging Face folder, or a name on huggingface.co.
    reward_funcs: A reward function or a name as in reward.functions, or a list of these. Functions
      are registered as with `grpo_jax.register_reward`.
    train_dataset: A `datasets.Dataset`, a list of dicts, or a file or folder as in data.path. Its
      column `prompt` has texts or lists of messages.
    eval_dataset: The same for the test split. None uses the test split of train_dataset, if any.
    tools: Functions that the policy may call, or names as in environment.tools. Functions are
      registered as with `grpo_jax.register_tool`.
    peft_config: A `peft.LoraConfig`, or a dict of its fields. None trains all weights.
    processes: The number of processes of TRL's run, which multiplies its batch.
    say: Called with one line for each field that was set or is refused, and with the flags that
      make the same config from `--config=default`. None prints nothing.

  Returns:
    The config. `config.replace({...})` changes more settings.

  Raises:
    ConfigError: A field is unknown, or has a value that grpo_jax does not support.
  """
  set_fields, left_out = _fields_set_in(args)
  values = {name: field.default for name, field in (FIELDS | EARLIER).items()} | set_fields
  names = _reward_names(reward_funcs)
  data, rows = _data(train_dataset, eval_dataset)
  port = Port(values, processes, rows, names)
  changes: Changes = {"model.path": model, **data, **_lora(peft_config)}
  if tools:
    changes["environment.tools"] = [_tool_name(tool) for tool in tools]
  if names:
    changes["reward.functions"] = list(names)
    changes["eval.function"] = names[0]  # one function decides what is right
  of_fields, lines, refused = _convert_fields(port, set_fields)
  changes |= of_fields
  lines[:0] = [f"{name}: left out: it changes nothing of what is learned" for name in left_out]
  if not refused:
    config = from_dict(changed(to_dict(Config()), changes))
    lines.append(f"from --config=default, these flags give it: {' '.join(flags_of(config))}")
  for line in lines if say else ():
    say(line)
  if refused:
    raise ConfigError(f"from_trl: {'; '.join(refused)}")
  return config


def _convert_fields(
  port: Port, set_fields: Mapping[str, Any]
) -> tuple[Changes, list[str], list[str]]:
  """Converts all fields, also those that have TRL's default because the user did not set them.

  Returns:
    Settings by config key, a line for each field that was set or is refused, and errors.
  """
  changes, lines, refused = Changes(), list[str](), list[str]()
  for name, field in (FIELDS | EARLIER).items():
    value = port[name]
    try:
      found = field.become(port, value) if field.become else {}
    # `become` does not check all types: a value of a wrong type may raise one of the other errors.
    except (Refused, TypeError, ValueError, AttributeError) as error:
      refused.append(f"{name}={shown(value)}: {error}")
      lines.append(f"{name}={shown(value)}: refused: {error}")
      continue
    changes |= found
    if name in set_fields:
      became = ", ".join(f"{key}={setting}" for key, setting in found.items())
      lines.append(f"{name}={shown(value)}: {became or f'nothing is set: {field.why}'}")
  return changes, lines, refused


def flags_of(config: Config) -> list[str]:
  """The shell-quoted flags that make the config from configs/default.py."""
  default = flat(to_dict(Config(algo=presets.preset("grpo"))))
  return [
    shlex.quote(f"--config.{key}={tuple(value) if isinstance(value, list) else value}")
    for key, value in flat(to_dict(config)).items()
    if value != default[key]
  ]


def _fields_set_in(args: Any) -> tuple[dict[str, Any], list[str]]:
  """Returns the fields that the user set, and the names of those that do not influence training.

  All fields of a dict count as set, and those of a GRPOConfig that differ from TRL's defaults. Some
  differ because TRL computed them, such as generation_batch_size.

  Raises:
    ConfigError: A field is not known, or `args` is no GRPOConfig.
  """
  if dataclasses.is_dataclass(args):
    fields = dataclasses.fields(args)
    values = {field.name: getattr(args, field.name) for field in fields}
    found = {name: value for name, value in values.items() if value != _default_of(fields, name)}
    # TRL computes each of these two from the other, and `Port.batches` computes the second again.
    if found.get("generation_batch_size"):
      found.pop("steps_per_generation", None)
  elif isinstance(args, Mapping) or args is None:
    found = dict(args or {})
  else:
    raise ConfigError(f"from_trl: {shown(args)} is no GRPOConfig and no dict of its fields")
  known = {**FIELDS, **EARLIER}
  for name in found:
    if name not in known and not str(name).startswith(OF_PROGRAMS):
      close = difflib.get_close_matches(str(name), known, n=1)
      hint = f"did you mean {close[0]}?" if close else "it has no counterpart here: leave it out"
      raise ConfigError(f"from_trl: {shown(name)} is not known: {hint}")
  left_out = [name for name in found if name not in known]
  return {name: value for name, value in found.items() if name in known}, left_out


def _default_of(fields: Sequence[Any], name: str) -> Any:
  field = next(field for field in fields if field.name == name)
  has_factory = field.default_factory is not dataclasses.MISSING
  return field.default_factory() if has_factory else field.default


def _reward_names(reward_funcs: Any) -> tuple[str, ...]:
  """Registers the functions among these functions and names, and returns the names of all."""
  several = isinstance(reward_funcs, Sequence) and not isinstance(reward_funcs, str)
  functions = list(reward_funcs) if several else [reward_funcs]
  return tuple(one if isinstance(one, str) else name_of(register_reward(one)) for one in functions)


def _tool_name(tool: Any) -> str:
  return tool if isinstance(tool, str) else name_of(register_tool(tool))


def _data(train: Any, test: Any) -> tuple[Changes, int | None]:
  """Registers the data sets. Returns the settings of the data, and how many training rows exist."""
  if isinstance(train, str) and not train:
    if test is not None:
      raise ConfigError("from_trl: eval_dataset without train_dataset: give both")
    return {}, None
  if isinstance(test, Mapping):
    raise ConfigError("from_trl: eval_dataset must be one data set: name others in eval.tasks")
  is_path = isinstance(train, str) and test is None
  # Only a training set alone can stay a path. With a test set, the rows of both are kept.
  if isinstance(train, str) and test is not None:
    train = rows_of(train, "train")
  if isinstance(test, str):
    # The rows of a single file, or those that a program gave, count as training rows.
    is_folder = Path(test).expanduser().is_dir()
    found = rows_of(test, "test" if is_folder else "train") if test else None
    if found is None:
      raise ConfigError(f"from_trl: eval_dataset {test!r} has no test split: name a file of rows")
    test = found
  path = train if is_path else keep_rows(train, test, key="from_trl: train_dataset")
  rows = rows_of(path, "train")
  first_row = rows[0]
  if "prompt" not in first_row:
    where = rows.where(0).removeprefix("from_trl: ")
    raise ConfigError(
      f"from_trl: {where} has no column 'prompt', but {', '.join(first_row)}; rename the one that"
      " holds the prompts"
    )
  is_chat = isinstance(first_row["prompt"], list)
  return {
    "data.task": "columns",
    "data.path": path,
    "data.prompt": "{prompt}",
    "data.chat": is_chat,
  }, len(rows)


_RANK, _ALPHA = 8, 8  # the defaults of peft.LoraConfig
_LORA = ("r", "lora_alpha", "target_modules", "use_rslora")  # fields that become settings
_LORA_IDLE = (  # fields that do not influence training
  *("task_type", "peft_type", "base_model_name_or_path", "revision", "inference_mode"),
  *("auto_mapping", "peft_version", "runtime_config", "megatron_core", "qalora_group_size"),
)


def _lora(given: Any) -> Changes:
  """Converts a `peft.LoraConfig`, or a dict of its fields, to the settings of adapters.

  Raises:
    ConfigError: A field that grpo_jax does not support has a value other than off.
  """
  if given is None:
    return {}
  fields = dict(given if isinstance(given, Mapping) else getattr(given, "__dict__", {}))
  if not isinstance(given, Mapping) and "r" not in fields:
    raise ConfigError(
      f"from_trl: peft_config is {shown(given)}: give a peft.LoraConfig, or a dict of its fields"
    )
  for name, value in fields.items():
    is_off = value in (None, 0, "none", {}, [], ())  # False equals 0
    if name == "init_lora_weights":
      is_off = value is True  # PEFT's default: the adapters begin without effect
    if name not in (*_LORA, *_LORA_IDLE) and not is_off:
      raise ConfigError(
        f"from_trl: peft_config has {name}={shown(value)}, which adapters do not have here: leave"
        " it out"
      )
  targets = fields.get("target_modules") or ("q_proj", "v_proj")  # PEFT's default for Llama, Qwen
  targets = PROJECTIONS if targets == "all-linear" else targets
  is_list = isinstance(targets, (list, tuple, set))
  if not is_list or not all(isinstance(target, str) for target in targets):
    raise ConfigError(
      f"from_trl: peft_config has target_modules={shown(targets)}: give a list of names, such as"
      f" {', '.join(PROJECTIONS)}"
    )
  return {
    "lora.rank": fields.get("r", _RANK),
    "lora.alpha": fields.get("lora_alpha", _ALPHA),
    "lora.rslora": bool(fields.get("use_rslora", False)),
    "lora.targets": sorted(targets),
  }
