"""Reads a run's config.json, and checks whether the run may continue with another config."""

from collections.abc import Mapping
import json
from pathlib import Path
from typing import Any

from grpo_jax import files
from grpo_jax.config import REMOVED
from grpo_jax.settings import ConfigError

# Prefixes of keys that may change when a run continues. They do not change what is computed, but
# how often something is saved or shown, where compiled programs are cached, and how the computation
# is distributed.
_MAY_DIFFER = (
  "compilation_cache",
  "checkpoint.",
  "eval.",
  "log.",
  "mesh.",
  "learner.remat",
  "model.attention",
  "learner.logprob_chunk",
  "batch.micro_batch",
  "sampling.context",
  "sampling.prompt_piece",
  "sampling.rows",
  "sampling.tensor",
  "reward.batch",
  "reward.max_unscored_steps",
  "reward.memory",
  "reward.on_error",
  "reward.timeout",
  "reward.workers",
  "rollout.certificate_file",
  "rollout.engine_folder",
  "rollout.engine_restart",
  "rollout.engine_tensor",
  "rollout.engine_timeout",
  "rollout.engine_urls",
  "rollout.key_file",
  "rollout.listen",
  "rollout.samplers",
  "rollout.secret_file",
)


def read_values(path: Path) -> dict[str, Any]:
  """Reads the nested values in a config.json. Raises ConfigError if it cannot be read."""
  try:
    return files.json_object(files.read_bytes(path))
  except (OSError, ValueError) as error:
    raise ConfigError(
      f"{path} cannot be read ({error}): put it back, or name another --workdir"
    ) from error


def as_json(config: Mapping[str, Any]) -> dict[str, Any]:
  """Nested values as they are read back from a config.json, with lists in place of tuples."""
  return json.loads(json.dumps(config))


def _from_here(value: Any) -> str:
  """A value as a text in which paths below the current folder are relative.

  Earlier versions kept some paths as they were given, which are absolute now.
  """
  return json.dumps(value).replace(f"{Path.cwd()}/", "")


def check_same_run(path: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
  """Raises ConfigError if a run cannot continue with other values, naming the first such key.

  Args:
    path: The config.json of the run, for the error message.
    old: The nested values of the run so far.
    new: The nested values with which it should continue.
  """
  old, new = flat(old), flat(new)
  for key in [*new, *old]:
    is_same = key in old and key in new and _from_here(old[key]) == _from_here(new[key])
    # Earlier versions accepted "auto" for a template whose calls they could not read. Now it is
    # refused, so the user must name another value.
    replaces_auto = key == "environment.calls" and old.get(key) == "auto"
    if is_same or replaces_auto or key.startswith(_MAY_DIFFER):
      continue
    advice = "name another --workdir, or keep the old value"
    if key in REMOVED and key not in new:  # today's code may compute the same without the key
      if REMOVED[key].is_same(old[key], old):
        continue
      advice = f"{REMOVED[key].instead}; name another --workdir"
    if key == "steps":
      decaying = _decaying(old) or _decaying(new)
      if not decaying:
        continue
      advice = (
        f"with {decaying} the steps so far would have been others. Keep the old value; to train"
        f" further, export the run (python -m grpo_jax.export --workdir={path.parent} --out=FOLDER)"
        " and start another --workdir with --config.model.path=FOLDER --config.warm_start.steps=0."
        " Only with constant schedules can a run go on with other steps"
      )
    raise ConfigError(
      f"{path} has {key} = {_shown(old, key)}, this run {_shown(new, key)}: {advice}"
    )


# Settings -> the values with which they do not depend on the number of steps.
_CONSTANT = {
  "optimizer.schedule": "constant",
  "sampling.temperature_schedule": "constant",
  "algo.entropy_coef_end": -1.0,
}


def _decaying(flat: Mapping[str, Any]) -> str:
  """The first setting that depends on the number of steps, as "KEY = VALUE", or "" if none does."""
  for key, constant in _CONSTANT.items():
    if flat.get(key, constant) != constant:
      return f"{key} = {flat[key]!r}"
  return ""


def _shown(flat: Mapping[str, Any], key: str) -> str:
  return repr(flat[key]) if key in flat else "no such key"


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Flattens nested values into a dict by dotted keys, such as {"model.path": ""}."""
  found = {}
  for key, value in config.items():
    if isinstance(value, Mapping):
      found.update(flat(value, f"{prefix}{key}."))
    else:
      found[prefix + key] = value
  return found
